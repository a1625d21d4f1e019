"""Kernels: one file per backend, one contract, reached through `torch.library` operators.

    attention(q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, scale, window, softcap, sinks,
              max_seqlen_q, max_seqlen_k, cu_seqlens_k=None) -> out

| argument       | shape, dtype                                | meaning                                                   |
|----------------|---------------------------------------------|-----------------------------------------------------------|
| `q`            | `[T, H_q, D_k]`                             | queries of all rows, row after row                        |
| `k_pool`       | `[num_blocks, block_size, H_kv, D_k]`       | keys; `H_q` is a multiple of `H_kv`                       |
| `v_pool`       | `[num_blocks, block_size, H_kv, D_v]`       | values                                                    |
| `block_table`  | `[B, M]` int32                              | frames of each row; any frame outside the blocks it sees  |
| `seq_lens`     | `[B]` int32                                 | tokens stored per row, the new ones included              |
| `cu_seqlens_q` | `[B + 1]` int32                             | row `b` has the queries `cu[b] : cu[b + 1]`               |
| `scale`        | float                                       | factor on the scores                                      |
| `window`       | int                                         | keys that a query sees, itself included; 0: all           |
| `softcap`      | float                                       | scores become `softcap * tanh(score / softcap)`; 0: off   |
| `sinks`        | `[H_q]` float32 or None                     | a logit per head that only adds to the softmax denominator |
| `max_seqlen_q` | int                                         | at least the queries of any row; 1: none has more         |
| `max_seqlen_k` | int                                         | at least the tokens of any row, at most the table's room  |
| `cu_seqlens_k` | `[B + 1]` int32 or None                     | the sums of `seq_lens`, for who needs them; None: unknown |
| `out`          | `[T, H_q, D_v]`                             | a query that sees no key gives 0                          |

The causal mask is aligned bottom-right: the last query of a row sees all of the row's tokens. With 3 queries over 5:

    1 1 1 0 0
    1 1 1 1 0
    1 1 1 1 1

A kernel reads no slot at or beyond `seq_lens[b]`: unused slots may hold anything, NaN included, unless the backend says
`needs_zeroed_frames`. The two bounds are numbers of the host: to read them from the device would stop the GPU once per
layer, and shapes do not tell them (two queries of two rows may both be one row's). A pool may be a view of wider storage:
slots are `H_kv * k_pool.stride(2)` numbers apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import cpu, reference, triton
from .backend import FEATURES, Backend, ModuleBackend
from .build import KernelUnavailable
from .flash import Flash2, Flash3, Flash4

__all__ = ["BACKENDS", "FEATURES", "KERNELS", "WRITERS", "Backend", "KernelUnavailable", "cpu", "register"]

AttentionKernel: TypeAlias = Callable[..., Tensor]
WriteKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], None]

ATTENTION_SCHEMA = (
    "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "float scale, int window, float softcap, Tensor? sinks, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? cu_seqlens_k=None) -> Tensor"
)
WRITE_SCHEMA = "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor key, Tensor value, Tensor slots, Tensor? source) -> ()"

_library = torch.library.Library("hf_paged", "DEF")


def _fake_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v_pool.shape[-1]))


def _fake_write(*arguments: Any) -> None:
    return None


def _operator(name: str, function: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` the operator `hf_paged::name` on every device."""
    _library.define(name + schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_paged::{name}", fake, lib=_library)
    return getattr(torch.ops.hf_paged, name).default


BACKENDS: dict[str, Backend] = {}
KERNELS: dict[str, AttentionKernel] = {}
WRITERS: dict[str, WriteKernel] = {}


def register(name: str, backend: Backend) -> None:
    """Make `backend` known as `kernel=name`, through operators of its own. `name` must be new."""
    BACKENDS[name] = backend
    KERNELS[name] = _operator(f"attention_{name}", backend.attention, ATTENTION_SCHEMA, _fake_attention)
    WRITERS[name] = _operator(f"write_{name}", backend.write, WRITE_SCHEMA, _fake_write)


register("reference", ModuleBackend(reference))
register("cpu", ModuleBackend(cpu))
register("triton", ModuleBackend(triton))
for _flash in (Flash2(), Flash3(), Flash4()):
    register(_flash.name, _flash)
