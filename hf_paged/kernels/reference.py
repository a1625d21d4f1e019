"""The slow, obvious kernel that every other one is tested against. Plain torch operations, any device, any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_CHUNK = 512  # bounds the score matrix of a long prefill to [H_q, 512, L]


def problem(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, block_size: int) -> str | None:
    """None: it serves everything."""
    return None


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

    Computes in float32 and rounds once at the end. Reads the lengths on the host.
    """
    out = q.new_zeros((q.shape[0], q.shape[1], v_pool.shape[-1]))  # [T, H_q, D_v]
    block_size = k_pool.shape[1]
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last or length == 0:
            continue
        # The table holds nothing before the first block that the first query sees.
        unseen = max(0, length - (last - first) - window + 1) // block_size if window > 0 else 0
        frames = block_table[row, unseen : -(-length // block_size)].long()
        length -= unseen * block_size
        keys = k_pool[frames].flatten(0, 1)[:length]  # [L, H_kv, D_k]
        values = v_pool[frames].flatten(0, 1)[:length]  # [L, H_kv, D_v]
        for begin in range(first, last, QUERY_CHUNK):
            end = min(begin + QUERY_CHUNK, last)
            position = length - (last - begin)  # of the chunk's first query in its row
            out[begin:end] = _attend(q[begin:end], keys, values, position, scale, window, softcap, sinks)
    return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Queries `q` [n, H_q, D_k] at `position`, `position + 1`, ... of one row over all of its tokens -> [n, H_q, D_v]."""
    n, num_heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    grouped = q.float().view(n, kv_heads, num_heads // kv_heads, -1)
    scores = torch.einsum("nhgd,lhd->hgnl", grouped, keys.float()).flatten(0, 1) * scale  # [H_q, n, L]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query_position = torch.arange(position, position + n, device=q.device)[:, None]
    key_position = torch.arange(length, device=q.device)
    visible = key_position <= query_position
    if window:
        visible &= key_position > query_position - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :length].nan_to_num(0.0)  # NaN: a query that sees nothing
    weights = weights.view(kv_heads, num_heads // kv_heads, n, length)
    return torch.einsum("hgnl,lhd->nhgd", weights, values.float()).flatten(1, 2).to(q.dtype)


def write(k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source: Tensor | None) -> None:
    """Store new keys and values.

    `key` [B, H_kv, n, D_k] and `value` [B, H_kv, n, D_v] hold padded rows; token `source[t]` of the flat `[B * n]`
    (token `t` where `source` is None) goes to slot `slots[t]`, which is `frame * block_size + offset`. Both int64 [T].
    """
    for pool, new in ((k_pool, key), (v_pool, value)):
        flat = new.transpose(1, 2).reshape(-1, *pool.shape[2:])  # [B * n, H_kv, D]
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, flat if source is None else flat[source])
