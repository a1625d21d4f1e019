"""The "paged" attention function: to a kernel with block tables where it can, to exact dense attention where not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from .compat import autocast_dtype
from .cross import cross_attention
from .kernels import KERNELS
from .lazy import LazyKV, LazyMask, LazyTensor


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function registered for `attn_implementation="paged"`.

    `query` is [B, H_q, q_length, D_k]; `key` and `value` are what a PagedCache's `update` returned, and the output is
    [B, q_length, H_q, D_v]. With ordinary keys and values this is sdpa, gradients included.
    """
    # Sparse attention leaves it to us to look at the chosen keys, or blocks of keys, only.
    indices, block_indices = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    if indices is not None:
        attention_mask = _only_chosen(indices, attention_mask, query.shape[2], key.shape[2])
    if block_indices is not None:
        attention_mask = _only_chosen_blocks(module, block_indices, attention_mask, query, key.shape[2])
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not isinstance(key, LazyKV) or not isinstance(value, LazyKV):
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks")):
            return _dense(module, query, key, value, attention_mask, dropout, scaling, causal, kwargs)
        mask = attention_mask.dense() if isinstance(attention_mask, LazyTensor) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    autocast = autocast_dtype(query.device)
    if autocast:
        query = query.to(key.dtype)
    if key.state.cross:
        seen = None if dropout else cross_attention(query, key, value, attention_mask, scaling, causal, kwargs)
        if seen is not None:
            return seen, None
        return _dense(module, query, key.gathered(), value.gathered(), attention_mask, dropout, scaling, causal, kwargs)
    window = _native_window(query, key, attention_mask, causal, kwargs.get("sliding_window"))
    dense_only = dropout or any(kwargs.get(name) is not None for name in ("position_bias", "sinks"))
    if window is None or dense_only or kwargs.get("output_attentions"):
        attention_mask = _without_left_tokens(query, key, attention_mask, causal)
        return _dense(module, query, key.gathered(), value.gathered(), attention_mask, dropout, scaling, causal, kwargs)

    key.plan.attended.add(key.layer)
    softcap, sinks = kwargs.get("softcap") or 0.0, kwargs.get("s_aux")
    pool = key.state.pool
    group, chunk = pool.group_of[key.layer], attention_mask.chunk_size if isinstance(attention_mask, LazyMask) else 0
    plan = key.plan.on_chunks(query.device, group, chunk) if chunk else key.plan.on(query.device, group)
    batch, num_heads, q_length, dim = query.shape
    queries = query.transpose(1, 2).reshape(batch * q_length, num_heads, dim)  # [B * q_length, H_q, D_k]
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    out = KERNELS[pool.kernel_for(key.layer, window, softcap, sinks)](
        queries if plan.source is None else queries[plan.source],
        key.blocks,
        value.blocks,
        plan.block_table,
        plan.seq_lens,
        plan.cu_seqlens_q,
        dim**-0.5 if scaling is None else scaling,
        window,
        softcap,
        None if sinks is None else sinks.float().contiguous(),
        plan.max_seqlen_q,
        plan.max_seqlen_k,
        plan.cu_seqlens_k,
    )  # [T, H_q, D_v]
    if autocast:
        out = out.to(autocast)  # as sdpa's would be
    if plan.source is not None:
        padded = out.new_zeros((batch * q_length, *out.shape[1:]))
        padded[plan.source] = out
        out = padded
    return out.view(batch, q_length, num_heads, -1), None


def _only_chosen(indices: Tensor, mask: Tensor | None, q_length: int, width: int) -> Tensor:
    """The mask, bool or additive [B, 1, q_length, width], with all keys hidden but those that `indices` [B, q_length, k]
    names for each query."""
    chosen = torch.zeros((*indices.shape[:2], width), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter_(-1, indices.long(), True)[:, None]  # [B, 1, q_length, width]
    if mask is None:
        return chosen & _causal_mask(q_length, width, chosen.device)
    return _hide(mask, ~chosen)


def _only_chosen_blocks(
    module: torch.nn.Module, indices: Tensor, mask: Tensor | None, query: Tensor, width: int
) -> Tensor:
    """The mask, additive [B, H_q, q_length, width], with all keys hidden but those in the blocks of keys that `indices`
    [B, H_index, q_length, k] names for each query. The size of a block is the model's, and so is the code."""
    mask = _causal_mask(query.shape[2], width, query.device) if mask is None else mask
    mask = mask.dense() if isinstance(mask, LazyTensor) else mask
    indexer: Any = module.indexer
    chosen: Tensor = indexer.build_block_mask(indices, mask, width, query.dtype, query.device, None)
    return chosen


def _causal_mask(q_length: int, width: int, device: torch.device) -> Tensor:
    """Bool [q_length, width], aligned bottom-right."""
    position = torch.arange(width, device=device)
    return position <= position[width - q_length :, None]


def _native_window(
    query: Tensor, key: LazyKV, mask: Tensor | None, causal: bool, sliding_window: int | None
) -> int | None:
    """The window to hand to a kernel (0: none), or None where only the dense path gives the exact result."""
    plan = key.plan
    if not (plan.native and key.current and query.dtype == key.dtype):
        return None
    if query.shape[0] != plan.batch or query.shape[2] != plan.q_length:
        return None
    if mask is None:  # no padding; the model has left causality to the attention function
        window = sliding_window or 0 if causal else None
    elif isinstance(mask, LazyMask) and mask.state is key.state and mask.shape[2:] == (plan.q_length, plan.shape[1]):
        window = mask.window
    else:
        window = None
    group, block_size = key.state.group_of(key.layer), key.state.pool.block_size
    if isinstance(mask, LazyMask) and mask.chunk_size:
        kept = not group.window or (
            mask.chunk_size == group.window if group.chunked else mask.chunk_size <= group.window
        )
        return window if kept and mask.chunk_size % block_size == 0 else None
    if window is not None and group.window and (group.chunked or not 0 < window <= group.window):
        # The model looks back further than its cache keeps: as in the default cache, what is gone is not seen.
        if plan.q_length == 1 and not group.chunked:
            return group.window
        return window if plan.longest_past < group.window else None
    return window


def _without_left_tokens(query: Tensor, key: LazyKV, mask: Tensor | None, causal: bool) -> Tensor | None:
    """The mask, with the tokens hidden that had left the window of the layer's cache before this pass."""
    left = key.plan.left_window(query.device, key.state.group_of(key.layer))
    if left is None:
        return mask
    q_length, width = query.shape[2], key.shape[2]
    if mask is None:
        mask = _causal_mask(q_length, width, query.device) if causal else torch.ones_like(left)[:, None, None]
    return _hide(mask, left[:, None, None])


def _hide(mask: Tensor, hidden: Tensor) -> Tensor:
    """A mask, bool or additive, with more positions hidden."""
    mask = mask.dense() if isinstance(mask, LazyTensor) else mask
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _dense(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention over gathered keys [B, H_kv, width, D_k] and values, by sdpa, or by hand where sdpa lacks a feature.

    Sinks are a logit per head, `s_aux` [H_q], or one per query, `sinks` [B, H_q, q_length, 1]."""
    mask = mask.dense() if isinstance(mask, LazyTensor) else mask
    q_length, width = query.shape[2], key.shape[2]
    if mask is None and causal and q_length > 1:  # sdpa's own flag aligns top-left
        mask = _causal_mask(q_length, width, query.device)
    softcap, sinks, bias = kwargs.get("softcap"), kwargs.get("sinks"), kwargs.get("position_bias")
    if kwargs.get("s_aux") is not None:
        sinks = kwargs["s_aux"].view(1, -1, 1, 1).expand(query.shape[0], -1, q_length, 1)
    if not softcap and sinks is None and bias is None and not kwargs.get("output_attentions"):
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False
        )
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).transpose(2, 3)  # [B, H_q, q_length, width]
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., :width].to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return (weights @ repeat_kv(value, groups)).transpose(1, 2).contiguous(), weights
