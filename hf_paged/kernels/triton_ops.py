# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The Triton programs behind :mod:`hf_paged.kernels.triton`, which launches them. Importing this needs triton.

A *tile* is `TILE_M` pairs of a query and one of the query heads that share a key/value head, counted through a row:
pair `i` is query `i // GROUP` of the row and head `i % GROUP` of the group. So keys are read once for all heads of a
group, however few the queries are. Dims are padded to a power of two, `DIM_K` and `DIM_V`.

Frame ids are multiplied in int64: a pool may have more than 2**31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_of(tile, cu_seqlens_q, num_rows, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """The row that a tile belongs to: the last one with `_first_tile` at or before it."""
    row = tl.full((), -1, tl.int32)
    for begin in range(0, num_rows, 128):
        candidate = begin + tl.arange(0, 128)
        start = tl.load(cu_seqlens_q + candidate, mask=candidate < num_rows, other=0)
        before = (_first_tile(candidate, start, GROUP, TILE_M) <= tile) & (candidate < num_rows)
        row += tl.sum(before.to(tl.int32), 0)
    return row


@triton.jit
def _first_tile(row, start, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """Rows get at least the tiles they need without anyone adding up: `row` is for what rounding down loses."""
    return start * GROUP // TILE_M + row


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "table_stride", "window"])
def attend(
    q,
    k_pool,
    v_pool,
    block_table,
    seq_lens,
    cu_seqlens_q,
    sinks,  # float32 [H_q] or None
    out,  # [T, H_q, D_v], or float32 [splits, T, H_q, D_v] with SPLIT
    stats,  # float32 [2, splits, T, H_q]: maximum and sum of the softmax, with SPLIT
    num_tokens,
    num_rows,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale,
    softcap,
    window,
    K_FRAME: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_FRAME: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile over the keys it sees, or over one of the parts they are split into. Grid: (tiles, H_kv, splits).

    The softmax is in base 2, and its factor log2(e) is in `scale`; or in `softcap`, and then twice it and one over the
    soft cap are in `scale`, as tanh(x) = 1 - 2 / (exp(2 x) + 1) asks for. `sinks` is None with SPLIT.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of(tile, cu_seqlens_q, num_rows, GROUP, TILE_M)
    start = tl.load(cu_seqlens_q + row)
    num_queries = tl.load(cu_seqlens_q + row + 1) - start
    first_pair = (tile - _first_tile(row, start, GROUP, TILE_M)) * TILE_M
    if first_pair >= num_queries * GROUP:
        return

    pair = first_pair + tl.arange(0, TILE_M)
    query = pair // GROUP
    asks = query < num_queries
    head = (kv_head * GROUP + pair % GROUP).to(tl.int64)
    token = (start + query).to(tl.int64)
    past = tl.load(seq_lens + row) - num_queries
    position = past + query  # of the query in its row; negative: it sees nothing

    # The keys begin .. end - 1 are those that any query of the tile sees.
    end = past + tl.minimum((first_pair + TILE_M - 1) // GROUP, num_queries - 1) + 1
    begin = tl.zeros((), tl.int32)
    if HAS_WINDOW:
        begin = tl.maximum(past + first_pair // GROUP - window + 1, 0)
    place = token * tl.num_programs(1) * GROUP + head  # in [T, H_q]
    if SPLIT:
        split = tl.program_id(2)
        place += split.to(tl.int64) * num_tokens * tl.num_programs(1) * GROUP  # in [splits, T, H_q]
        part = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), tl.num_programs(2)), TILE_N) * TILE_N
        begin += split * part
        end = tl.minimum(begin + part, end)
        if begin >= end:
            tl.store(stats + place, tl.full((TILE_M,), float("-inf"), tl.float32), mask=asks)
            return

    dim_k = tl.arange(0, DIM_K)
    dim_v = tl.arange(0, DIM_V)
    q_offset = token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim_k[None, :]
    queries = tl.load(q + q_offset, mask=asks[:, None] & (dim_k < KEY_DIM)[None, :], other=0.0)  # [TILE_M, DIM_K]
    highest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    if sinks is not None:
        highest = tl.load(sinks + head, mask=asks, other=0.0) * 1.4426950408889634
        total += 1.0
    accumulated = tl.zeros((TILE_M, DIM_V), tl.float32)

    for first in range(begin, end, TILE_N):
        key = first + tl.arange(0, TILE_N)
        stored = key < end
        frame = tl.load(block_table + row.to(tl.int64) * table_stride + key // BLOCK_SIZE, mask=stored, other=0)
        frame = frame.to(tl.int64)
        k_offset = frame * K_FRAME + (key % BLOCK_SIZE) * K_SLOT + kv_head * K_HEAD
        v_offset = frame * V_FRAME + (key % BLOCK_SIZE) * V_SLOT + kv_head * V_HEAD
        keys = tl.load(
            k_pool + k_offset[None, :] + dim_k[:, None], mask=(dim_k < KEY_DIM)[:, None] & stored[None, :], other=0.0
        )  # [DIM_K, TILE_N]
        # Unused slots may hold NaN, which a weight of 0 would not silence.
        values = tl.load(
            v_pool + v_offset[:, None] + dim_v[None, :], mask=stored[:, None] & (dim_v < VALUE_DIM)[None, :], other=0.0
        )  # [TILE_N, DIM_V]

        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale  # [TILE_M, TILE_N]
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: nothing seen so far
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        accumulated = accumulated * shrink[:, None]
        accumulated = tl.dot(weights.to(values.dtype), values, accumulated, input_precision=PRECISION)
        highest = higher

    if SPLIT:
        tl.store(stats + place, highest, mask=asks)
        size = tl.num_programs(2).to(tl.int64) * num_tokens * tl.num_programs(1) * GROUP
        tl.store(stats + size + place, total, mask=asks)
    else:
        accumulated = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + place[:, None] * VALUE_DIM + dim_v[None, :],
        accumulated.to(out.dtype.element_ty),
        mask=asks[:, None] & (dim_v < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_splits"])
def reduce_splits(
    parts,  # float32 [splits, T, H_q, D_v]; undefined where the part saw nothing
    stats,  # float32 [2, splits, T, H_q]: maximum (-inf: the part saw nothing), sum of the softmax (undefined there)
    sinks,
    out,
    num_splits,
    VALUE_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    STEP: tl.constexpr,
):
    """Join what `attend` found in the parts of a row. Grid: (T, H_q)."""
    head = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head  # in [T, H_q]
    stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    dim = tl.arange(0, DIM_V)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if sinks is not None:
        highest = tl.load(sinks + head) * 1.4426950408889634
        total += 1.0
    accumulated = tl.zeros((DIM_V,), tl.float32)
    for first in range(0, num_splits, STEP):
        split = first + tl.arange(0, STEP)
        index = split * stride + place
        part_highest = tl.load(stats + index, mask=split < num_splits, other=float("-inf"))
        saw = part_highest > float("-inf")
        part_total = tl.load(stats + num_splits * stride + index, mask=saw, other=0.0)
        part = tl.load(
            parts + index[:, None] * VALUE_DIM + dim[None, :], mask=saw[:, None] & (dim < VALUE_DIM)[None, :], other=0.0
        )  # [STEP, DIM_V]
        higher = tl.maximum(highest, tl.max(part_highest, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(part_highest - base)
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights * part_total, 0)
        accumulated = accumulated * shrink + tl.sum(weights[:, None] * part, 0)
        highest = higher
    accumulated = accumulated / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * VALUE_DIM + dim, accumulated.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


@triton.jit(do_not_specialize=["per_row"])
def write_tokens(
    k_pool,
    v_pool,
    key,
    value,
    slots,
    source,
    per_row,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    K_FRAME: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_FRAME: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
):
    """Copy `HEADS` heads of one token, its key and its value, to its slot. Grid: (tokens, cdiv(H_kv, HEADS))."""
    index = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    slot = tl.load(slots + index)
    token = index
    if source is not None:
        token = tl.load(source + index)
    row = token // per_row
    position = token % per_row
    frame = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    dim = tl.arange(0, DIM_K)
    real = (head < KV_HEADS)[:, None] & (dim < KEY_DIM)[None, :]
    here = row * key_row_stride + position * key_token_stride + head[:, None] * key_head_stride + dim[None, :]
    there = frame * K_FRAME + offset * K_SLOT + head[:, None] * K_HEAD + dim[None, :]
    tl.store(k_pool + there, tl.load(key + here, mask=real), mask=real)

    dim = tl.arange(0, DIM_V)
    real = (head < KV_HEADS)[:, None] & (dim < VALUE_DIM)[None, :]
    here = row * value_row_stride + position * value_token_stride + head[:, None] * value_head_stride + dim[None, :]
    there = frame * V_FRAME + offset * V_SLOT + head[:, None] * V_HEAD + dim[None, :]
    tl.store(v_pool + there, tl.load(value + here, mask=real), mask=real)
