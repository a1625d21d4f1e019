"""PagedAttention on CPUs: the compiled kernel, one function per C entry point.

The functions take plain tensors and follow the contract of every backend (see :mod:`hf_paged.kernels.reference`).
:func:`attention` and :func:`write` are called once per layer and decode step, so they check what they are given by
metadata only, and do nothing else in Python.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch

from hf_paged.kernels import build
from hf_paged.kernels.build import KernelUnavailable

__all__ = [
    "KernelUnavailable",
    "advise_huge_pages",
    "attention",
    "available",
    "describe",
    "instruction_set",
    "problem",
    "read",
    "supports",
    "write",
]

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MAX_HEAD_DIM = 256

_NO_SHARING = 1
_NO_SPLIT = 2
_SPLIT_ALWAYS = 4

_HUGE_PAGE = 2**21  # bytes; whole ones only, so that a pool of which little is used stays small
_MADV_HUGEPAGE = 14  # <sys/mman.h>; the mmap module has it from Python 3.13 on

_ERRORS = {1: "data type", 2: "shape", 3: "not enough memory"}

# pointer, then three strides (q and out: two)
_TENSOR_2: list[Any] = [c_void_p, c_int64, c_int64]
_TENSOR_3: list[Any] = [c_void_p, c_int64, c_int64, c_int64]

_attention: Any = None
_write: Any = None


def _bind() -> None:
    """Loads the library and declares its signatures; the module's two globals are set last."""
    global _attention, _write
    library = build.load()
    write_entry = library.hf_paged_write
    write_entry.restype = c_int
    write_entry.argtypes = _TENSOR_3 * 4 + [c_void_p, c_void_p, c_int64, c_int64] + [c_int] * 6
    entry = library.hf_paged_attention
    entry.restype = c_int
    tensors = [c_int, *_TENSOR_2, *_TENSOR_3, *_TENSOR_3, *_TENSOR_2]
    tables: list[Any] = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]
    scalars: list[Any] = [c_float, c_int64, c_float, c_int, c_int]
    entry.argtypes = tensors + tables + [c_int] * 6 + scalars
    _attention, _write = entry, write_entry


def available() -> bool:
    """Whether the kernel can be used here; compiles it if that was never done."""
    try:
        build.load()
    except KernelUnavailable:
        return False
    return True


def instruction_set() -> str:
    """Vector instructions the library uses: ``avx512-bf16``, ``avx512``, ``avx2`` or ``portable``."""
    library = build.load()
    library.hf_paged_instruction_set.restype = ctypes.c_char_p
    name: bytes = library.hf_paged_instruction_set()
    return name.decode()


def read(tensor: torch.Tensor) -> int:
    """Read all of ``tensor``'s memory (whole 4 KiB of it) with torch's threads and return a digest: the time it takes is
    what no attention over the same bytes can beat. For benchmarks."""
    library = build.load()
    library.hf_paged_read.restype = ctypes.c_uint64
    digest: int = library.hf_paged_read(c_void_p(tensor.data_ptr()), c_int64(tensor.nbytes), torch.get_num_threads())
    return digest


def supports(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel takes this element type and these head sizes. Block sizes, groups and windows: any."""
    return dtype in _TYPES and all(0 < dim <= _MAX_HEAD_DIM and dim % 8 == 0 for dim in (key_dim, value_dim))


def problem(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, block_size: int) -> str | None:
    """Why the kernel cannot serve this, None where it can; it is compiled now if it never was."""
    if device.type != "cpu":
        return f"the cpu kernel does not run on {device}"
    if not supports(dtype, key_dim, value_dim):
        return (
            "the cpu kernel takes float32, bfloat16 and float16, and head dims that are multiples of 8 up to 256, not "
            f"{dtype} {(key_dim, value_dim)}"
        )
    try:
        build.load()
    except KernelUnavailable as error:
        return str(error)
    return None


def describe() -> str:
    """The instruction set."""
    return f"compiled for {instruction_set()}"


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask the system to back ``tensor``'s memory with huge pages: a decode step walks all of it, in an order that misses
    the table of 4 KiB pages. Returns whether it took the advice (Linux with transparent huge pages); contents stay."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if madvise is None:
        return False
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    last = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    return last > first and madvise(c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE) == 0


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    share_prefix: bool = True,
    split: bool | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    """Attention of ragged queries over paged keys and values, bottom-right causal.

    Query ``j`` of a row with ``n`` queries and length ``L`` stands at position ``p = L - n + j`` and sees the keys at
    ``max(0, p - window + 1) .. p``. A query that sees none gets zeros. Sums are accumulated in float32. Slots at or
    past a row's length, tokens before the window of its first query, and the table's columns for them are never read.

    Args:
        q: ``[T, Hq, D_k]``; float32, bfloat16 or float16, as the pools. Any strides with a contiguous last dimension.
        k_pool: ``[num_blocks, block_size, H_kv, D_k]``; ``Hq`` is a multiple of ``H_kv``.
        v_pool: ``[num_blocks, block_size, H_kv, D_v]``. ``D_k`` and ``D_v``: multiples of 8 up to 256.
        block_table: ``[B, M]`` int32, block ids of each row.
        seq_lens: ``[B]`` int32, tokens stored per row, new ones included and already written.
        cu_seqlens_q: ``[B + 1]`` int32, where each row's queries start in ``q``.
        scale: factor of the raw scores.
        window: tokens a query sees, itself included; 0 or less: all.
        softcap: scores become ``softcap * tanh(score / softcap)`` after scaling; 0: off.
        sinks: ``[Hq]`` float32, a logit per head that takes part in the softmax without a value.
        out: ``[T, Hq, D_v]``, written and returned; made when None.
        share_prefix: read leading blocks that several rows have in common once (decode only).
        split: cut long rows over their tokens. None: when that balances the threads; True: always (for tests).
        num_threads: as ``torch.get_num_threads()`` when None.

    Returns:
        ``out``, ``[T, Hq, D_v]``.

    Raises:
        KernelUnavailable: the kernel cannot be loaded or compiled here.
        ValueError: shapes, strides or types that the kernel does not take.
        MemoryError: no room for the intermediate results.

    Follows FlashAttention (Dao et al., 2022) over a block table as in PagedAttention (Kwon et al., 2023), split over
    the sequence as in Flash-Decoding (2023), with shared prefixes as in Hydragen (Juravsky et al., 2024).
    """
    if _attention is None:
        _bind()
    num_tokens, q_heads, key_dim = q.shape
    _, block_size, kv_heads, value_dim = v_pool.shape
    rows = seq_lens.shape[0]
    dtype = q.dtype
    if out is None:
        out = q.new_empty(num_tokens, q_heads, value_dim)
    q_stride, k_stride, v_stride, out_stride = q.stride(), k_pool.stride(), v_pool.stride(), out.stride()
    table_stride = block_table.stride()
    if (
        dtype not in _TYPES
        or k_pool.dtype is not dtype
        or v_pool.dtype is not dtype
        or out.dtype is not dtype
        or k_pool.shape[1:] != (block_size, kv_heads, key_dim)
        or k_stride[3] != 1
        or v_stride[3] != 1
        or q_stride[2] != 1
        or out_stride[2] != 1
        or key_dim % 8
        or value_dim % 8
        or key_dim > _MAX_HEAD_DIM
        or value_dim > _MAX_HEAD_DIM
        or q_heads % kv_heads
        or out.shape != (num_tokens, q_heads, value_dim)
        or block_table.dtype is not torch.int32
        or seq_lens.dtype is not torch.int32
        or cu_seqlens_q.dtype is not torch.int32
        or table_stride[1] != 1
        or not seq_lens.is_contiguous()
        or not cu_seqlens_q.is_contiguous()
        or block_table.shape[0] < rows
        or cu_seqlens_q.shape[0] != rows + 1
        or not (sinks is None or (sinks.dtype is torch.float32 and sinks.shape == (q_heads,) and sinks.is_contiguous()))
        or not q.is_cpu
    ):
        raise ValueError(_explain(q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, sinks, out))
    flags = (0 if share_prefix else _NO_SHARING) | (0 if split is None else _SPLIT_ALWAYS if split else _NO_SPLIT)
    status = _attention(
        *(_TYPES[dtype], q.data_ptr(), q_stride[0], q_stride[1]),
        *(k_pool.data_ptr(), k_stride[0], k_stride[1], k_stride[2]),
        *(v_pool.data_ptr(), v_stride[0], v_stride[1], v_stride[2]),
        *(out.data_ptr(), out_stride[0], out_stride[1]),
        *(block_table.data_ptr(), table_stride[0], seq_lens.data_ptr(), cu_seqlens_q.data_ptr()),
        None if sinks is None else sinks.data_ptr(),
        *(rows, q_heads, kv_heads, key_dim, value_dim, block_size),
        *(scale, window, softcap, flags, torch.get_num_threads() if num_threads is None else num_threads),
    )
    if status:
        _raise(status)
    return out


def write(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slots: torch.Tensor,
    source: torch.Tensor | None = None,
    *,
    num_threads: int | None = None,
) -> None:
    """Writes new keys and values into slots of the pools.

    Args:
        k_pool: ``[num_blocks, block_size, H_kv, D_k]``.
        v_pool: ``[num_blocks, block_size, H_kv, D_v]``, same element type.
        k_new: ``[B, H_kv, n, D_k]`` or ``[T, H_kv, D_k]``, any strides with a contiguous last dimension.
        v_new: the same with ``D_v``.
        slots: ``[N]`` int64, ``block * block_size + offset``; negative: the token is not written.
        source: ``[N]`` int64, the token that goes into each slot: ``row * n + position`` (or the index in ``T``). None:
            tokens ``0 .. N - 1`` in order.
        num_threads: as ``torch.get_num_threads()`` when None.

    Raises:
        KernelUnavailable: the kernel cannot be loaded or compiled here.
        ValueError: shapes, strides or types that the kernel does not take.
    """
    if _write is None:
        _bind()
    k_stride, v_stride = k_new.stride(), v_new.stride()
    if len(k_stride) == 4:
        _, kv_heads, per_row, key_dim = k_new.shape
        k_row, k_head, k_token, k_last = k_stride
        v_row, v_head, v_token, v_last = v_stride
    else:
        per_row, kv_heads, key_dim = k_new.shape
        k_token, k_head, k_last = k_stride
        v_token, v_head, v_last = v_stride
        k_row = v_row = 0
    kp_stride, vp_stride = k_pool.stride(), v_pool.stride()
    _, block_size, pool_heads, value_dim = v_pool.shape
    dtype = k_new.dtype
    count = slots.shape[0]
    if (
        v_new.dtype is not dtype
        or k_pool.dtype is not dtype
        or v_pool.dtype is not dtype
        or k_last != 1
        or v_last != 1
        or kp_stride[3] != 1
        or vp_stride[3] != 1
        or pool_heads != kv_heads
        or k_pool.shape[1:] != (block_size, kv_heads, key_dim)
        or v_new.shape[:-1] != k_new.shape[:-1]
        or v_new.shape[-1] != value_dim
        or slots.dtype is not torch.int64
        or not slots.is_contiguous()
        or (source is None and count * kv_heads * key_dim > k_new.numel())
        or (source is not None and (source.dtype is not torch.int64 or source.shape != slots.shape))
        or (source is not None and not source.is_contiguous())
        or not k_new.is_cpu
    ):
        raise ValueError(
            f"write: keys {_describe(k_new)}, values {_describe(v_new)} do not fit into pools {_describe(k_pool)}, "
            f"{_describe(v_pool)} at slots {_describe(slots)} from {_describe(source)}"
        )
    if count == 0:
        return
    status = _write(
        *(k_new.data_ptr(), k_row, k_head, k_token, v_new.data_ptr(), v_row, v_head, v_token),
        *(k_pool.data_ptr(), *kp_stride[:3], v_pool.data_ptr(), *vp_stride[:3]),
        *(slots.data_ptr(), None if source is None else source.data_ptr(), count, per_row),
        *(kv_heads, key_dim, value_dim, block_size, dtype.itemsize),
        torch.get_num_threads() if num_threads is None else num_threads,
    )
    if status:
        _raise(status)


def _raise(status: int) -> None:
    reason = _ERRORS.get(status, f"status {status}")
    if status == 3:
        raise MemoryError(f"hf_paged CPU kernel: {reason}")
    raise ValueError(f"hf_paged CPU kernel refused its arguments: {reason}")


def _describe(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} strides {list(tensor.stride())} {tensor.device}"


def _explain(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> str:
    given = {
        "q": q,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "sinks": sinks,
        "out": out,
    }
    return (
        "attention: these do not fit together, or are not CPU tensors with a contiguous last dimension, head sizes "
        f"that are multiples of 8 up to {_MAX_HEAD_DIM}, int32 tables and float32 sinks: "
        + ", ".join(f"{name} {_describe(tensor)}" for name, tensor in given.items())
    )
