"""A backend is tried before a pool on a GPU relies on it: that it can be imported says little."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import BACKENDS, reference
from .backend import SINKS, SOFTCAP, WINDOW

LENGTHS = 1000, 77  # tokens; every backend splits the first row over a GPU
QUERIES = (1, 1), (3, 1)
HEADS, KV_HEADS = 8, 2


@functools.cache
def failure_of(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    block_size: int,
    features: frozenset[str],
) -> str | None:
    """What goes wrong when backend `name` writes two rows and attends to them, without features and with these; None where
    it agrees with the reference kernel on the CPU."""
    try:
        error = _error(name, device, dtype, key_dim, value_dim, block_size, features)
    except torch.OutOfMemoryError:  # which says nothing about the backend
        raise
    except Exception as raised:
        reason = next(iter(str(raised).splitlines()), "")
        return f"{name} failed when it was tried on {device}: {type(raised).__name__}: {reason}"
    if error <= (1e-3 if dtype == torch.float32 else 0.02):
        return None
    return f"{name} was wrong by {error:.2g} when it was tried on {device}"


def _error(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    block_size: int,
    features: frozenset[str],
) -> float:
    backend, generator = BACKENDS[name], torch.Generator().manual_seed(0)
    host: dict[str, Any] = dict(device="cpu", generator=generator)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, **host).to(dtype)

    def there(*tensors: Tensor) -> list[Tensor]:
        return [tensor.to(device, copy=True) for tensor in tensors]

    longest, columns = LENGTHS[0], -(-LENGTHS[0] // block_size)
    table = torch.randperm(2 * columns, dtype=torch.int32, **host).view(2, columns)
    dims, widths = (key_dim, value_dim), backend.storage_dims(key_dim, value_dim)
    pools = [torch.zeros(2 * columns, block_size, KV_HEADS, width, dtype=dtype, device="cpu") for width in widths]
    unused = 0.0 if backend.needs_zeroed_frames else float("nan")
    used = [pool[..., :dim].fill_(unused) for pool, dim in zip(pools, dims)]
    tried = [pool[..., :dim] for pool, dim in zip(there(*pools), dims)]

    new = [draw(2, KV_HEADS, longest, dim) for dim in dims]
    position = torch.cat([torch.arange(length, device="cpu") for length in LENGTHS])
    row = torch.repeat_interleave(torch.arange(2, device="cpu"), torch.tensor(LENGTHS, device="cpu"))
    slots = table[row, position // block_size].long() * block_size + position % block_size
    source = row * longest + position
    reference.write(used[0], used[1], new[0], new[1], slots, source)
    key, value, *places = there(*new, slots, source)
    backend.write(tried[0], tried[1], key, value, places[0], places[1])

    worst, lengths = 0.0, torch.tensor(LENGTHS, dtype=torch.int32, device="cpu")
    for asked in {frozenset[str](), features}:
        window, softcap = 100 if WINDOW in asked else 0, 5.0 if SOFTCAP in asked else 0.0
        sinks = draw(HEADS).float() if SINKS in asked else None
        for queries in QUERIES:
            starts = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32, device="cpu")
            q, scale = draw(sum(queries), HEADS, key_dim), 2 * key_dim**-0.5
            want = reference.attention(q, used[0], used[1], table, lengths, starts, scale, window, softcap, sinks)
            q, *where = there(q, table, lengths, starts)
            numbers: Any = scale, window, softcap, None if sinks is None else sinks.to(device), max(queries), longest
            out = backend.attention(q, tried[0], tried[1], where[0], where[1], where[2], *numbers)
            error = (out.cpu().float() - want.float()).abs().nan_to_num(float("inf"))
            worst = max(worst, float(error.max()))
    return worst
