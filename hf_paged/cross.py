"""Cross-attention on blocks: every query of a row sees all keys of its row, or all but the pads at its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import KERNELS
from .lazy import LazyKV


def cross_attention(
    query: Tensor,
    key: LazyKV,
    value: LazyKV,
    mask: Tensor | None,
    scaling: float | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """`query` [B, H_q, q_length, D_k] over the keys of an encoder, by a kernel -> [B, q_length, H_q, D_v]. None where a
    kernel would not give exactly what `mask`, [B, 1, q_length, width], bool or additive, and `kwargs` ask for.

    The kernels' causality ends at a row's last key, so a row of one query sees everything: each query is made such a row.
    """
    plan = key.plan
    batch, num_heads, q_length, dim = query.shape
    if not key.current or query.dtype != key.dtype or batch != plan.rows:
        return None
    if (causal and q_length > 1) or kwargs.get("sliding_window") or kwargs.get("output_attentions"):
        return None
    bias = kwargs.get("position_bias")
    if bias is not None and not plan.once("bias", bias, lambda: not bias.any()):
        return None
    seen = None
    if mask is not None:
        seen = plan.once("mask", mask, lambda: keys_seen(mask, batch, key.shape[2]))
        if seen is None:
            return None
    pool, softcap, sinks = key.state.pool, kwargs.get("softcap") or 0.0, kwargs.get("s_aux")
    block_table, seq_lens, cu_seqlens_q = plan.single_queries(query.device, pool.group_of[key.layer], q_length)
    out = KERNELS[pool.kernel_for(key.layer, 0, softcap, sinks)](
        query.transpose(1, 2).reshape(batch * q_length, num_heads, dim),
        key.blocks,
        value.blocks,
        block_table,
        seq_lens if seen is None else seen.repeat_interleave(q_length),
        cu_seqlens_q,
        dim**-0.5 if scaling is None else scaling,
        0,
        softcap,
        None if sinks is None else sinks.float().contiguous(),
        1,
        key.shape[2],
        None,
    )  # [B * q_length, H_q, D_v]
    return out.view(batch, q_length, num_heads, -1)


def keys_seen(mask: Tensor, batch: int, width: int) -> Tensor | None:
    """How many keys each row sees, int32 [B], where `mask` [B, 1, q_length, width] shows all queries of a row the same
    leading ones, at least one. None for every other mask."""
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[3] != width:
        return None
    visible = mask if mask.dtype == torch.bool else mask == 0
    seen = visible[:, 0, 0].sum(-1)  # [B]
    leading = torch.arange(width, device=mask.device) < seen[:, None]  # [B, width]
    exact = (visible == leading[:, None, None]).all() & (seen > 0).all()
    if mask.dtype != torch.bool:
        exact &= (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()
    return seen.int().expand(batch) if exact else None
