"""Kernels: one file per backend, one contract, reached through `torch.library` operators.

    attention(q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, scale, window, softcap, sinks) -> out

| argument       | shape, dtype                                | meaning                                                   |
|----------------|---------------------------------------------|-----------------------------------------------------------|
| `q`            | `[T, H_q, D_k]`                             | queries of all rows, row after row                        |
| `k_pool`       | `[num_blocks, block_size, H_kv, D_k]`       | keys; `H_q` is a multiple of `H_kv`                       |
| `v_pool`       | `[num_blocks, block_size, H_kv, D_v]`       | values                                                    |
| `block_table`  | `[B, M]` int32                              | frames of each row; undefined outside the blocks it sees  |
| `seq_lens`     | `[B]` int32                                 | tokens stored per row, the new ones included              |
| `cu_seqlens_q` | `[B + 1]` int32                             | row `b` has the queries `cu[b] : cu[b + 1]`               |
| `scale`        | float                                       | factor on the scores                                      |
| `window`       | int                                         | keys that a query sees, itself included; 0: all           |
| `softcap`      | float                                       | scores become `softcap * tanh(score / softcap)`; 0: off   |
| `sinks`        | `[H_q]` float32 or None                     | a logit per head that only adds to the softmax denominator |
| `out`          | `[T, H_q, D_v]`                             | a query that sees no key gives 0                          |

The causal mask is aligned bottom-right: the last query of a row sees all of the row's tokens. With 3 queries over 5:

    1 1 1 0 0
    1 1 1 1 0
    1 1 1 1 1

A kernel reads no slot at or beyond `seq_lens[b]`: unused slots may hold anything, NaN included.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from . import cpu, reference, triton
from .build import KernelUnavailable

AttentionKernel: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, float, Tensor | None], Tensor
]
WriteKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], None]

ATTENTION_SCHEMA = (
    "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "float scale, int window, float softcap, Tensor? sinks) -> Tensor"
)
WRITE_SCHEMA = "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor key, Tensor value, Tensor slots, Tensor? source) -> ()"

_library = torch.library.Library("hf_paged", "DEF")


def _fake_attention(
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
    return q.new_empty((q.shape[0], q.shape[1], v_pool.shape[-1]))


def _fake_write(
    k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source: Tensor | None
) -> None:
    return None


def _register(
    name: str, function: Callable[..., object], schema: str, fake: Callable[..., object]
) -> Callable[..., object]:
    """Make `function` the operator `hf_paged::name` on every device."""
    _library.define(name + schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_paged::{name}", fake, lib=_library)
    return getattr(torch.ops.hf_paged, name).default


KERNELS: dict[str, AttentionKernel] = {}
WRITERS: dict[str, WriteKernel] = {}

for _name, _backend in (("reference", reference), ("cpu", cpu), ("triton", triton)):
    KERNELS[_name] = _register(f"attention_{_name}", _backend.attention, ATTENTION_SCHEMA, _fake_attention)  # type: ignore
    WRITERS[_name] = _register(f"write_{_name}", _backend.write, WRITE_SCHEMA, _fake_write)  # type: ignore


def choose(
    kernel: str | None, device: torch.device, dtype: torch.dtype, head_dims: Iterable[tuple[int, int]]
) -> tuple[str, str]:
    """The backend for keys and values of these dims on `device`, and why. None and "auto" pick the best one that works
    here; the compiled CPU kernel is built now if it never was.

    Raises `ValueError` where the kernel asked for is unknown or cannot serve, `KernelUnavailable` where it cannot be built.
    """
    if kernel not in (None, "auto", *KERNELS):
        raise ValueError(f"kernel={kernel!r} is not known: use 'auto' or one of {sorted(KERNELS)}")
    if kernel == "reference":
        return "reference", "asked for"
    dims = sorted(set(head_dims))
    problem = None
    if device.type != "cpu":
        problem = f"the cpu kernel does not run on {device}"
    elif not all(cpu.supports(dtype, key_dim, value_dim) for key_dim, value_dim in dims):
        problem = (
            "the cpu kernel takes float32, bfloat16 and float16, and head dims that are multiples of 8 up to 256, "
            f"not {dtype} {dims}"
        )
    if problem is None:
        try:
            return "cpu", f"compiled for {cpu.instruction_set()}"
        except KernelUnavailable as error:
            if kernel == "cpu":
                raise
            _warn_once(str(error))
            problem = "the cpu kernel is not available"
    if kernel == "cpu":
        raise ValueError(f"kernel='cpu' cannot serve this pool: {problem}")
    return "reference", problem


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"hf_paged uses its slow reference kernel: {reason}", stacklevel=4)
