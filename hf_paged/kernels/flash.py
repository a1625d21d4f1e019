"""FlashAttention 2, 3 and 4 (Dao 2023; Shah et al. 2024) behind the contract of `hf_paged.kernels`.

Read in the sources of 2.8.3 and, for 3 and 4, of August 2026:

|                            | 2                       | 3                           | 4                              |
|----------------------------|-------------------------|-----------------------------|--------------------------------|
| GPUs, compute capability   | from 8.0                | 8.x, 9.0                    | 9.0, 10.x, 11.x                |
| block size                 | multiples of 256        | any; 128: loaded by TMA     | any; 128: loaded by TMA        |
| head dims                  | 8n to 256, D_v = D_k    | 8n to 256, D_v = D_k        | 16n to 256; 128 on 10.x, 11.x  |
| sinks                      | no                      | builds with `s_aux`         | `learnable_sink`               |
| unused slots               | never reach the output  | a NaN in a value does       | a NaN in a value does          |
| table left of the window   | never read              | read, and must be valid     | read, and must be valid        |

Version 2 walks tiles of at most 256 keys, which never straddle blocks of 256. The tiles of 3 and 4 do straddle smaller
blocks, and the first one begins left of the window: what is read there is masked, but has to be finite memory of the pool,
as all is that a pool for versions 3 and 4 holds: zeros, or what a model once wrote.

Which function of version 2 splits long rows over the GPU (`csrc/flash_attn/flash_api.cpp` from 2.6.0 to August 2026):

- `flash_attn_varlen_func`, for one query per row, fewer key/value heads than query heads, and no window. It takes the split
  from `max_seqlen_k`, as the other one does from the table's room, so both cut alike. It copies queries and output once.
- `flash_attn_with_kvcache` always. Since July 2026 it waits for the device to compare the lengths with the table's room, in
  every layer. No version number tells, so the first one is preferred where it splits.

On ROCm it is Composable Kernel behind the same functions: it ignores soft caps, and does not know that special case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import flash_find, reference
from .backend import SINKS, SOFTCAP, WINDOW, Backend
from .build import KernelUnavailable
from .flash_find import Functions

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256

Capability = Callable[[torch.device], "tuple[int, int] | None"]


@functools.cache
def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


class Flash(Backend):
    """What the three versions have in common.

    Args:
        find: delivers the functions, or raises `KernelUnavailable`. By default they are looked for in this installation.
        capability: the compute capability of a device, or None where it is no CUDA device.
    """

    version: int
    capabilities: tuple[int, ...]  # major ones
    block_multiple = 1
    dim_multiple = 8
    same_dims = True  # whether keys and values must have one head dim

    def __init__(self, find: Callable[[], Functions] | None = None, capability: Capability = cuda_capability):
        self._find = find or functools.partial(flash_find.find, self.version)
        self._capability = capability
        self._functions: Functions | None = None

    @property
    def name(self) -> str:
        return f"flash{self.version}"

    def functions(self) -> Functions:
        """The functions of this version. Raises `KernelUnavailable`; a later call looks again."""
        if self._functions is None:
            self._functions = self._find()
        return self._functions

    def describe(self) -> str:
        return self.functions().source

    def write(
        self, k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source: Tensor | None
    ) -> None:
        reference.write(k_pool, v_pool, key, value, slots, source)

    def storage_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        up = self.dim_multiple
        key_dim, value_dim = -(-key_dim // up) * up, -(-value_dim // up) * up
        return (max(key_dim, value_dim),) * 2 if self.same_dims else (key_dim, value_dim)

    def problem(
        self, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, block_size: int
    ) -> str | None:
        capability = self._capability(device)
        if capability is None:
            return f"{self.name} does not run on {device}, only on CUDA devices"
        if torch.version.hip and self.version > 2:
            return f"{self.name} does not run on ROCm"
        try:
            functions = self.functions()
        except KernelUnavailable as error:
            return str(error)
        lacking = [argument for argument in self._needed() if not functions.accepts(argument)]
        if lacking:
            return f"{functions.source} is too old for {self.name}: it does not know {', '.join(lacking)}"
        if capability[0] not in self.capabilities:
            known = ", ".join(f"{major}.x" for major in self.capabilities)
            return f"{self.name} serves compute capabilities {known}, not {capability[0]}.{capability[1]}"
        if dtype not in DTYPES:
            return f"{self.name} takes bfloat16 and float16, not {dtype}"
        if block_size % self.block_multiple:
            multiple = self.block_multiple
            return f"{self.name} takes block sizes that are multiples of {multiple}, not {block_size}: use {multiple}"
        return self._problem_of_dims(capability, *self.storage_dims(key_dim, value_dim))

    def _needed(self) -> list[str]:
        """Arguments that the functions must know."""
        raise NotImplementedError

    def _problem_of_dims(self, capability: tuple[int, int], key_dim: int, value_dim: int) -> str | None:
        if max(key_dim, value_dim) > MAX_HEAD_DIM:
            return f"{self.name} takes head dims up to {MAX_HEAD_DIM}, not {(key_dim, value_dim)}"
        return None

    def attention(
        self,
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
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        num_tokens, heads, _ = q.shape
        value_dim = v_pool.shape[-1]
        if num_tokens == 0 or block_table.shape[1] == 0:  # no batch, or nothing stored: refused by some versions
            return q.new_zeros((num_tokens, heads, value_dim))
        key_width, value_width = self.storage_dims(k_pool.shape[-1], value_dim)
        with torch.cuda.device_of(q):  # version 4 launches on the current device
            out = self._call(
                q if q.shape[-1] == key_width else pad(q, (0, key_width - q.shape[-1])),  # which copies also by 0
                _widened(k_pool, key_width),
                _widened(v_pool, value_width),
                block_table,
                seq_lens,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                max_seqlen_k,
                window,
                sinks,
                softmax_scale=scale,
                causal=True,
                softcap=softcap,
            )
        out = out.view(num_tokens, heads, value_width)
        return out if value_width == value_dim else out[..., :value_dim].contiguous()

    def _call(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        window: int,
        sinks: Tensor | None,
        **common: Any,
    ) -> Tensor:
        raise NotImplementedError


class Flash2(Flash):
    """FlashAttention 2, from 2.6 on. What can be split over the GPU goes to a function that does, the rest to
    `flash_attn_varlen_func`."""

    version = 2
    capabilities = (8, 9, 10, 11, 12)
    block_multiple = block_size = 128 if torch.version.hip else 256

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({WINDOW} if torch.version.hip else {WINDOW, SOFTCAP})

    def _needed(self) -> list[str]:
        return ["block_table", "cache_seqlens", "window_size", "softcap"]

    def _call(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        window: int,
        sinks: Tensor | None,
        **common: Any,
    ) -> Tensor:
        functions = self.functions()
        assert functions.with_kvcache is not None
        common.update(block_table=block_table, window_size=(window - 1, 0) if window else (-1, -1))
        even = _even(q, cu_seqlens_q, max_seqlen_q)
        grouped = even is not None and max_seqlen_q == 1 and q.shape[1] > k_pool.shape[2] and not window
        if even is not None and (torch.version.hip or not grouped):
            return functions.with_kvcache(even, k_pool, v_pool, cache_seqlens=seq_lens, **common)
        if cu_seqlens_k is None:
            cu_seqlens_k = pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return functions.varlen(
            q,
            k_pool,
            v_pool,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            # With 1 it takes the queries for one per row, though some rows may have none.
            max_seqlen_q=1 if grouped else max(max_seqlen_q, 2),
            max_seqlen_k=max_seqlen_k,
            **common,
        )


class Flash3(Flash):
    """FlashAttention 3, all through `flash_attn_with_kvcache`."""

    version = 3
    capabilities = (8, 9)
    block_size = 128
    needs_zeroed_frames = True

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        try:
            with_sinks = self.functions().accepts("s_aux")  # vLLM's build of it, which is also the Hub's
        except KernelUnavailable:
            with_sinks = False
        return frozenset({WINDOW, SOFTCAP, SINKS} if with_sinks else {WINDOW, SOFTCAP})

    def _needed(self) -> list[str]:
        return ["page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "window_size", "softcap"]

    def _call(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        window: int,
        sinks: Tensor | None,
        **common: Any,
    ) -> Tensor:
        with_kvcache = self.functions().with_kvcache
        assert with_kvcache is not None
        common.update(page_table=block_table, window_size=(window - 1, 0) if window else (-1, -1))
        if sinks is not None:
            common["s_aux"] = sinks.to(torch.bfloat16)  # the only type it takes
        even = _even(q, cu_seqlens_q, max_seqlen_q)
        if even is None:
            common.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
        out = with_kvcache(q if even is None else even, k_pool, v_pool, cache_seqlens=seq_lens, **common)
        return out[0] if isinstance(out, tuple) else out


class Flash4(Flash):
    """FlashAttention 4, through `flash_attn_varlen_func`; it has no other function that reads tables."""

    version = 4
    capabilities = (9, 10, 11)
    block_size = 128
    needs_zeroed_frames = True
    dim_multiple = 16
    same_dims = False

    def _needed(self) -> list[str]:
        return ["page_table", "seqused_k", "window_size", "softcap", "learnable_sink"]

    def _problem_of_dims(self, capability: tuple[int, int], key_dim: int, value_dim: int) -> str | None:
        if capability[0] >= 10 and max(key_dim, value_dim) > 128 and (key_dim, value_dim) != (192, 128):
            return f"flash4 takes head dims up to 128, or 192 and 128, on this GPU, not {(key_dim, value_dim)}"
        return super()._problem_of_dims(capability, key_dim, value_dim)

    def _call(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        window: int,
        sinks: Tensor | None,
        **common: Any,
    ) -> Tensor:
        capability = self._capability(q.device)
        out = self.functions().varlen(
            q,
            k_pool,
            v_pool,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            seqused_k=seq_lens,
            page_table=block_table,
            window_size=(window - 1, 0) if window else (None, None),
            learnable_sink=None if sinks is None else sinks.to(torch.bfloat16),  # the only type that all releases take
            # 0 lets it split long rows over the GPU, which it cannot on compute capability 9.0.
            num_splits=0 if capability is not None and capability[0] >= 10 and max_seqlen_q == 1 else 1,
            **common,
        )
        return out[0] if isinstance(out, tuple) else out


def _widened(pool: Tensor, dim: int) -> Tensor:
    """A pool whose slots show the room behind their last number, zeros, up to `dim`. Costs nothing."""
    if pool.shape[-1] == dim:
        return pool
    if pool.stride(2) < dim:
        raise ValueError(
            f"a pool of head dim {pool.shape[-1]} needs room for {dim} numbers per head, has {pool.stride(2)}: let a PagePool "
            "allocate it"
        )
    return pool.as_strided((*pool.shape[:3], dim), pool.stride())


def _even(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> Tensor | None:
    """The queries as [B, max_seqlen_q, H_q, D] where every row has that many, which the sum tells: no row has more."""
    rows = cu_seqlens_q.shape[0] - 1
    return q.view(rows, max_seqlen_q, *q.shape[1:]) if len(q) == rows * max_seqlen_q else None
