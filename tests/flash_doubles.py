"""Stand-ins for FlashAttention 2.8.3, 3 and 4: the real names, signatures and refusals, and what they are documented to
compute, in plain torch. Every call is recorded.

Like the real kernels they walk the keys in tiles, beginning at the tile of the first key that a row's first query sees, and
touch the frames of every tile. A frame id outside the pool is an illegal access then. In versions 3 and 4 a tile that comes
as a whole (TMA: the block size is a multiple of it) brings the slots beyond the row's length too, and their values are
multiplied with a weight of 0, which keeps NaN alive.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_paged.kernels import register
from hf_paged.kernels.backend import Backend
from hf_paged.kernels.flash import Flash2, Flash3, Flash4
from hf_paged.kernels.flash_find import Functions

HALF = (torch.float16, torch.bfloat16)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: list[int],
    starts: list[int],
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sink: Tensor | None = None,
    tile: int = 256,
    whole_tiles: bool = False,
    max_q: int = 10**9,
    max_k: int = 10**9,
) -> Tensor:
    """`q` [T, H_q, D], pools [num_pages, page, H_kv, D] -> [T, H_q, D_v], one query and one head at a time. `window` is
    (left, right), -1: unlimited. Queries and keys beyond the bounds are left out, as a grid that is too small does."""
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    left, right = window
    right = 0 if causal else right
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
    for row, length in enumerate(lengths):
        n = starts[row + 1] - starts[row]
        first = max(0, length - n - left) // tile * tile if left >= 0 else 0
        last = -(-length // tile) * tile if whole_tiles and page % tile == 0 else length
        frames = []
        for position in range(first, last):
            column = position // page
            check(column < table.shape[1], "CUDA error: the block table has too few columns")
            frame = int(table[row, column])
            check(0 <= frame < k.shape[0], f"CUDA error: an illegal memory access, frame {frame}")
            frames.append(frame * page + position % page)
        index = torch.tensor(frames, dtype=torch.long)
        keys = k.reshape(-1, *k.shape[2:])[index].float()
        values = v.reshape(-1, *v.shape[2:])[index].float()
        for i in range(n):
            if i >= max_q or length > max_k:
                out[starts[row] + i] = float("nan")
                continue
            here = i + length - n  # the position of query i
            position = torch.arange(first, last)
            seen = position < length
            if right >= 0:
                seen &= position <= here + right
            if left >= 0:
                seen &= position >= here - left
            for head in range(q.shape[1]):
                score = keys[:, head // group] @ q[starts[row] + i, head].float() * scale
                if softcap > 0:
                    score = softcap * torch.tanh(score / softcap)
                weight = torch.where(seen, score, -math.inf)
                extra = -math.inf if sink is None else float(sink[head])
                peak = max([extra, *weight[seen].tolist()])
                weight = (
                    torch.where(seen, (score - peak).exp(), 0.0) if math.isfinite(peak) else torch.zeros(len(score))
                )
                total = weight.sum() + (math.exp(extra - peak) if math.isfinite(extra) else 0.0)
                value = weight @ values[:, head // group]
                out[starts[row] + i, head] = value / total if total > 0 else value
    return out


class Double:
    """The functions of one version as methods, and the `calls` made: (function, arguments)."""

    capability = (9, 0)

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def record(self, name: str, arguments: dict[str, Any]) -> None:
        self.calls.append((name, {key: value for key, value in arguments.items() if key != "self"}))


def starts_of(cu_seqlens: Tensor | None, q: Tensor) -> list[int]:
    if cu_seqlens is not None:
        return cu_seqlens.tolist()
    return [row * q.shape[1] for row in range(q.shape[0] + 1)]


class FlashAttn2(Double):
    """flash_attn 2.8.3 (flash_attn_interface.py, csrc/flash_attn/flash_api.cpp)."""

    capability = (8, 0)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        self.record("varlen", locals())
        batch = cu_seqlens_q.numel() - 1
        self._check(q, k, v, block_table, batch)
        for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check(cu_seqlens.dtype == torch.int32, f"{name} must have dtype int32")
            check(
                cu_seqlens.is_contiguous() and cu_seqlens.shape == (batch + 1,), f"{name} must have shape (batch + 1)"
            )
        check(q.shape[0] > 0 and type(max_seqlen_q) is type(max_seqlen_k) is int, "max_seqlen must be int")
        check(q.shape[-1] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
        if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and window_size[0] < 0 and window_size[1] < 0:
            q.reshape(batch, k.shape[2], -1, q.shape[-1])  # one query per row, whatever cu_seqlens_q says
            check(len(q) == batch, f"shape '[{batch}, ...]' is invalid for input of size {q.numel()}")
        lengths = cu_seqlens_k.diff().tolist()
        bounds = dict(max_q=max_seqlen_q, max_k=max_seqlen_k)
        starts = cu_seqlens_q.tolist()
        return paged(q, k, v, block_table, lengths, starts, softmax_scale, causal, window_size, softcap, **bounds)

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        self.record("with_kvcache", locals())
        check(q.ndim == 4, "q must be (batch_size, seqlen, nheads, headdim)")
        self._check(q, k_cache, v_cache, block_table, q.shape[0])
        check(cache_batch_idx is None, "Paged KVcache does not support cache_batch_idx")
        check(cache_leftpad is None, "We don't support Paged KV and leftpad_k running at the same time yet")
        check(cache_seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
        check(
            cache_seqlens.is_contiguous() and cache_seqlens.shape == (q.shape[0],), "seqlens_k must have shape (batch)"
        )
        lengths, flat = cache_seqlens.tolist(), q.flatten(0, 1)
        starts = starts_of(None, q)
        out = paged(flat, k_cache, v_cache, block_table, lengths, starts, softmax_scale, causal, window_size, softcap)
        return out.view(q.shape)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: int) -> None:
        check(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
        check(k.dtype == v.dtype == q.dtype, "query and key must have the same dtype")
        check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
        check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
        check(all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension")
        check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        check(batch > 0, "batch size must be positive")
        check(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
        check(k.shape[-1] == q.shape[-1] and v.shape == k.shape, "k and v must have shape (.., head_size)")
        check(table.shape[0] == batch, "block_table must have shape (batch_size, max_num_blocks_per_seq)")


class FlashAttn3(Double):
    """flash_attn_interface (hopper/flash_attn_interface.py, hopper/flash_api.cpp), on an H100."""

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        raise AssertionError("knows no page table")

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        arguments = locals()
        self.record("with_kvcache", arguments)
        return self._run(**{name: value for name, value in arguments.items() if name != "self"})

    def _run(
        self, q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, sink=None, **kwargs: Any
    ):
        check(q.dtype in HALF, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
        check(k_cache.dtype == v_cache.dtype == q.dtype, "query and key must have the same dtype")
        check(all(x.stride(-1) == 1 for x in (q, k_cache, v_cache)), "Input tensor must have contiguous last dimension")
        check(page_table.dtype == torch.int32, "page_table must have dtype torch.int32")
        check(page_table.stride(-1) == 1, "page_table must have contiguous last dimension")
        if cu_seqlens_q is None:
            check(q.ndim == 4, "q must be (batch_size, seqlen, nheads, headdim)")
        else:
            check(q.ndim == 3 and cu_seqlens_q.dtype == torch.int32, "cu_seqlens_q must have dtype torch.int32")
            check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        starts = starts_of(cu_seqlens_q, q)
        check(len(starts) - 1 == page_table.shape[0], "batch_size must be equal to batch_size_k")
        check(
            cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (len(starts) - 1,),
            "seqused_k: int32, (batch)",
        )
        check(kwargs.get("cache_leftpad") is None, "left padding is not expected here")
        check(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head_size should be a multiple of 8")
        check(k_cache.shape[-1] == q.shape[-1], "k must have shape (num_pages, page_size, num_heads_k, head_size)")
        check(v_cache.shape[-1] == q.shape[-1] or q.shape[-1] <= 64, "If V headdim is different from Q/K dim, ...")
        flat = q if q.ndim == 3 else q.flatten(0, 1)
        out = paged(
            *(flat, k_cache, v_cache, page_table, cache_seqlens.tolist(), starts, kwargs["softmax_scale"]),
            *(kwargs["causal"], kwargs["window_size"], kwargs["softcap"], sink),
            tile=128,
            whole_tiles=True,
            max_q=q.shape[1] if cu_seqlens_q is None else max_seqlen_q,
            max_k=page_table.shape[1] * k_cache.shape[1],
        )
        return out.view(*q.shape[:-1], v_cache.shape[-1])


class FlashAttn3WithSinks(FlashAttn3):
    """vLLM's build of version 3, cut down to the arguments that count."""

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        cache_seqlens=None,
        page_table=None,
        cu_seqlens_q=None,
        max_seqlen_q=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        s_aux=None,
    ):
        arguments = locals()
        self.record("with_kvcache", arguments)
        check(s_aux is None or s_aux.dtype == torch.bfloat16, "We only support bf16 dtype for S extra.")
        run = {name: value for name, value in arguments.items() if name not in ("self", "s_aux")}
        return self._run(**run, sink=s_aux)


class FlashAttn4(Double):
    """flash_attn.cute (flash_attn/cute/interface.py), on an H100."""

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        seqused_q=None,
        seqused_k=None,
        gather_kv_indices=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(None, None),
        learnable_sink=None,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        score_mod=None,
        score_mod_bwd=None,
        mask_mod=None,
        block_sparse_tensors=None,
        aux_tensors=None,
        aux_scalars=None,
        return_lse=False,
        scheduler_metadata=None,
        seqlen_k_per_split=None,
        disable_scheduler_metadata=False,
    ):
        self.record("varlen", locals())
        batch = cu_seqlens_q.shape[0] - 1
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32, "page_table must be int32"
        assert page_table.stride(-1) == 1 and page_table.shape[0] == batch
        assert q.dtype in HALF and k.dtype == v.dtype == q.dtype, "inputs must be float16, bfloat16, ..."
        for tensor in (cu_seqlens_q, seqused_k):
            assert tensor.dtype == torch.int32 and tensor.stride(0) == 1, "cu_seqlens_q, seqused_k must be int32"
        assert seqused_k.shape == (batch,), "seqused_k must have shape (batch_size,)"
        assert k.shape[-1] == q.shape[-1] and k.shape[:3] == v.shape[:3]
        assert all(8 <= dim <= 256 and dim % 8 == 0 for dim in (q.shape[-1], v.shape[-1])), "not supported on SM90"
        page = k.shape[1]
        assert page == 128 or all(dim % 16 == 0 for dim in (q.shape[-1], v.shape[-1])), (
            "Paged KV does not support irregular head dim"
        )
        assert learnable_sink is None or learnable_sink.shape == (q.shape[1],)
        assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16, (
            "learnable_sink must be bfloat16"
        )  # betas
        assert self.capability[0] > 9 or num_splits == 1, "SplitKV not supported on SM 9.0"
        left, right = (-1 if bound is None else bound for bound in window_size)
        out = paged(
            *(q, k, v, page_table, seqused_k.tolist(), cu_seqlens_q.tolist(), softmax_scale, causal),
            *((left, right), softcap, learnable_sink),
            tile=128,
            whole_tiles=True,
            max_q=max_seqlen_q,
            max_k=page_table.shape[1] * page,
        )
        return out, None


def install(name: str, adapter: Any, double: Double) -> Double:
    """Make a double known as the backend `name`, on this machine's CPU."""
    with_kvcache = getattr(double, "flash_attn_with_kvcache", None)
    functions = Functions(double.flash_attn_varlen_func, with_kvcache, f"a double of {name}")
    register(name, adapter(lambda: functions, lambda device: double.capability))
    return double


DOUBLES = {
    "double2": install("double2", Flash2, FlashAttn2()),
    "double3": install("double3", Flash3, FlashAttn3()),
    "double3s": install("double3s", Flash3, FlashAttn3WithSinks()),
    "double4": install("double4", Flash4, FlashAttn4()),
}


class Missing(Backend):
    """A backend that an installation does not have."""

    def __init__(self, reason: str):
        self.reason = reason

    def problem(self, *arguments: object) -> str:
        return self.reason
