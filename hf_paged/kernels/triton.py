"""PagedAttention on GPUs in Triton, for any block size that flash-attn's paged kernels do not take.

Nothing here needs triton until a kernel is launched. Nothing waits for the device: grids and tiles follow from shapes.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)

# Splitting over the sequence: as many parts as fill the device, each worth a program of its own.
PROGRAMS_PER_PROCESSOR = 4
KEYS_PER_PART = 128
MAX_PARTS = 64
PARTS_PER_STEP = 16  # read at once when they are joined


def available() -> str | None:
    """Why triton cannot be imported here, or None when it can. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed (pip install triton)"
    return None


def problem(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, block_size: int) -> str | None:
    """Why this backend cannot serve a pool of these dims on `device`, or None when it can.

    CPUs are served by Triton's interpreter, for tests: TRITON_INTERPRET=1 in the environment, before triton is imported.
    """
    missing = available()
    if missing is not None:
        return missing
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "the triton kernel was never tested on ROCm"
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
            return f"the triton kernel needs compute capability {need} or newer, and {device} has {have}"
    elif device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"the triton kernel runs on CUDA devices, not on {device}"
    if dtype not in DTYPES:
        return f"the triton kernel takes float32, bfloat16 and float16, not {dtype}"
    if not (0 < key_dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM):
        return f"the triton kernel takes head dims up to {MAX_HEAD_DIM}, not {(key_dim, value_dim)}"
    if block_size not in BLOCK_SIZES:
        return f"the triton kernel takes blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, not of {block_size}"
    return None


class Tile(NamedTuple):
    """What one program works on at a time, and with what."""

    pairs: int  # of a query and a head
    keys: int
    num_warps: int
    num_stages: int


# By bytes per number and padded head dim. Few pairs (decoding) wait for memory: their tiles are small, so that several
# programs share a multiprocessor, and have the stages it takes to load keys ahead (a block's id comes first, then its keys).
# Many pairs (prefill) compute: their tiles are as large as registers allow. Next to nothing spills on devices of
# capability 8.0 and 9.0, and all fit into the 99 KiB of shared memory that 8.6, 8.9 and 12.0 have.
TILES = {
    (2, 64): (Tile(16, 64, 4, 5), Tile(32, 64, 4, 5), Tile(64, 64, 4, 5), Tile(128, 64, 8, 3)),
    (2, 128): (Tile(16, 32, 4, 5), Tile(32, 32, 4, 5), Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    (2, 256): (Tile(16, 32, 4, 5), Tile(32, 32, 4, 2), Tile(64, 32, 8, 3)),
    (4, 64): (Tile(16, 32, 8, 5), Tile(32, 32, 8, 5), Tile(64, 32, 8, 3)),
    (4, 128): (Tile(16, 32, 8, 2), Tile(32, 16, 8, 2)),
    (4, 256): (Tile(16, 16, 8, 2),),
}


def choose_tile(dtype: torch.dtype, dim: int, pairs: int) -> Tile:
    """The tile for head dims padded to `dim`, and `pairs` of a query and a head per row and key/value head on average: the
    smallest one that holds them, or the largest there is."""
    tiles = TILES[dtype.itemsize, max(dim, 64)]
    return next((tile for tile in tiles if tile.pairs >= pairs), tiles[-1])


def choose_parts(programs: int, keys: int, processors: int) -> int:
    """Into how many parts rows of at most `keys` keys are cut, when each part makes `programs` programs."""
    return max(1, min(PROGRAMS_PER_PROCESSOR * processors // programs, -(-keys // KEYS_PER_PART), MAX_PARTS))


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a ragged batch over paged keys and values; the contract stands in `hf_paged.kernels`.

    Sums are accumulated in float32, and float32 inputs are multiplied in float32. `q` may have any strides with a contiguous
    last dimension. Raises `ValueError` for tensors that do not fit together.

    Follows FlashAttention-2 (Dao, 2023) over a block table as in PagedAttention (Kwon et al., 2023), split over the
    sequence as in Flash-Decoding (Dao et al., 2023) where there are too few queries to fill the device.
    """
    _check_attention(q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, sinks)
    num_tokens, num_heads, key_dim = q.shape
    _, block_size, kv_heads, value_dim = v_pool.shape
    num_rows, columns = block_table.shape
    out = q.new_empty((num_tokens, num_heads, value_dim))
    if out.numel() == 0:
        return out
    group = num_heads // kv_heads
    dim_k, dim_v = max(16, power_of_2(key_dim)), max(16, power_of_2(value_dim))
    tile = choose_tile(q.dtype, max(dim_k, dim_v), -(-num_tokens * group // num_rows))
    tiles = num_tokens * group // tile.pairs + num_rows  # at least as many as the rows need, see `_first_tile`
    keys = columns * block_size
    if window > 0:
        keys = min(keys, window + tile.pairs // group)
    parts = choose_parts(tiles * kv_heads, keys, _processors(q.device))
    split = parts > 1
    result, stats = out, None
    if split:
        result = q.new_empty((parts, *out.shape), dtype=torch.float32)
        stats = q.new_empty((2, *result.shape[:3]), dtype=torch.float32)
    log2_e = math.log2(math.e)
    ops = _ops()
    with torch.cuda.device_of(q):
        ops.attend[(tiles, kv_heads, parts)](
            *(q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, None if split else sinks, result, stats),
            *(num_tokens, num_rows, block_table.stride(0), q.stride(0), q.stride(1)),
            *(2 * log2_e * scale / softcap if softcap else log2_e * scale, log2_e * softcap, window),
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            *(group, key_dim, value_dim, block_size, tile.pairs, tile.keys, dim_k, dim_v),
            *(softcap != 0.0, window > 0, split, "ieee"),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,  # what releases before 3.10 do unasked
        )
        if split:
            ops.reduce_splits[(num_tokens, num_heads)](
                *(result, stats, sinks, out, parts, value_dim, dim_v, PARTS_PER_STEP), enable_fp_fusion=True
            )
    return out


def write(k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source: Tensor | None) -> None:
    """Store new keys and values, as `hf_paged.kernels.reference.write` does. `key` and `value` may have any strides with a
    contiguous last dimension. Raises `ValueError` for tensors that do not fit together."""
    _check_write(k_pool, v_pool, key, value, slots, source)
    _, kv_heads, per_row, key_dim = key.shape
    block_size, value_dim = k_pool.shape[1], value.shape[-1]
    if slots.numel() == 0:
        return
    dim_k, dim_v = power_of_2(key_dim), power_of_2(value_dim)
    heads = min(power_of_2(kv_heads), max(1, 2048 // max(dim_k, dim_v)))
    with torch.cuda.device_of(key):
        _ops().write_tokens[(slots.numel(), -(-kv_heads // heads))](
            *(k_pool, v_pool, key, value, slots, source, per_row),
            *key.stride()[:3],
            *value.stride()[:3],
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            *(kv_heads, key_dim, value_dim, block_size, heads, dim_k, dim_v),
        )


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _ops() -> ModuleType:
    from . import triton_ops

    return triton_ops


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; for Triton's interpreter, enough for a few parts."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def _check_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    sinks: Tensor | None,
) -> None:
    _, num_heads, key_dim = q.shape
    _, block_size, kv_heads, value_dim = v_pool.shape
    num_rows = block_table.shape[0]
    if (
        q.dtype not in DTYPES
        or not q.dtype == k_pool.dtype == v_pool.dtype
        or k_pool.shape != (v_pool.shape[0], block_size, kv_heads, key_dim)
        or not (0 < key_dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM)
        or num_heads % kv_heads
        or not q.stride(-1) == k_pool.stride(-1) == v_pool.stride(-1) == 1
        or not block_table.dtype == seq_lens.dtype == cu_seqlens_q.dtype == torch.int32
        or block_table.stride(-1) != 1
        or seq_lens.shape != (num_rows,)
        or cu_seqlens_q.shape != (num_rows + 1,)
        or not (seq_lens.is_contiguous() and cu_seqlens_q.is_contiguous())
        or not (
            sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,) and sinks.is_contiguous())
        )
        or any(
            x.device != q.device for x in (k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, sinks) if x is not None
        )
    ):
        raise ValueError(
            "attention: these do not fit together, or are not on one device, of one of the types float32, bfloat16 and "
            f"float16, with a contiguous last dimension, head dims up to {MAX_HEAD_DIM}, int32 tables and float32 sinks: "
            f"q {_describe(q)}, k_pool {_describe(k_pool)}, v_pool {_describe(v_pool)}, block_table "
            f"{_describe(block_table)}, seq_lens {_describe(seq_lens)}, cu_seqlens_q {_describe(cu_seqlens_q)}, sinks "
            f"{_describe(sinks)}"
        )


def _check_write(
    k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source: Tensor | None
) -> None:
    rows, kv_heads, per_row, key_dim = key.shape
    if (
        not key.dtype == value.dtype == k_pool.dtype == v_pool.dtype
        or k_pool.shape != (*v_pool.shape[:2], kv_heads, key_dim)
        or v_pool.shape[2:] != (kv_heads, value.shape[-1])
        or value.shape[:3] != key.shape[:3]
        or not key.stride(-1) == value.stride(-1) == k_pool.stride(-1) == v_pool.stride(-1) == 1
        or slots.dtype != torch.int64
        or not slots.is_contiguous()
        or (source is None and slots.shape != (rows * per_row,))
        or (source is not None and (source.dtype != torch.int64 or source.shape != slots.shape))
        or (source is not None and not source.is_contiguous())
        or any(x.device != key.device for x in (k_pool, v_pool, value, slots, source) if x is not None)
    ):
        raise ValueError(
            f"write: keys {_describe(key)}, values {_describe(value)} do not fit into pools {_describe(k_pool)}, "
            f"{_describe(v_pool)} at slots {_describe(slots)} from {_describe(source)}"
        )


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} strides {list(tensor.stride())} {tensor.device}"
