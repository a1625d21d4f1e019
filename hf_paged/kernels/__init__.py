"""Kernels: one file per backend, one contract, reached through `torch.library` operators.

    attention(q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, scale, window, softcap, sinks) -> out

| argument       | shape, dtype                                | meaning                                                   |
|----------------|---------------------------------------------|-----------------------------------------------------------|
| `q`            | `[T, H_q, D_k]`                             | queries of all rows, row after row                        |
| `k_pool`       | `[num_blocks, block_size, H_kv, D_k]`       | keys; `H_q` is a multiple of `H_kv`                       |
| `v_pool`       | `[num_blocks, block_size, H_kv, D_v]`       | values                                                    |
| `block_table`  | `[B, M]` int32                              | frames of each row; undefined beyond its last block       |
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

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from . import reference

AttentionKernel: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, float, Tensor | None], Tensor
]

SCHEMA = (
    "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "float scale, int window, float softcap, Tensor? sinks) -> Tensor"
)

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


def _register(name: str, function: AttentionKernel) -> AttentionKernel:
    """Make `function` the operator `hf_paged::name` on every device."""
    _library.define(name + SCHEMA)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_paged::{name}", _fake_attention, lib=_library)
    operator: AttentionKernel = getattr(torch.ops.hf_paged, name).default
    return operator


KERNELS: dict[str, AttentionKernel] = {"reference": _register("attention_reference", reference.attention)}

_library.define(
    "write(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor key, Tensor value, Tensor slots, Tensor? source) -> ()"
)
_library.impl("write", reference.write, "CompositeExplicitAutograd")
torch.library.register_fake("hf_paged::write", _fake_write, lib=_library)
write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], None] = torch.ops.hf_paged.write.default


def choose(kernel: str | None) -> str:
    """The name of the backend to use. None and "auto" pick the best one that is there."""
    if kernel in (None, "auto"):
        return "reference"
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not known: use 'auto' or one of {sorted(KERNELS)}")
    assert kernel is not None
    return kernel
