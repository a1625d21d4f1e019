"""The attention of a decode step by every backend that serves on a device, against a copy of the same bytes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import BACKENDS, KERNELS
from ..kernels.choose import problem_of
from . import ops
from .measure import Row, interleave, median
from .tasks import Progress

GPU_SCALE = 4  # times the rows and the context: a kernel then takes longer than the host does to launch it


class Shape(NamedTuple):
    """Of what the kernels read."""

    rows: int
    context: int
    layers: int  # taken in turn, see `ops.LAYERS`; two are enough where one is larger than any cache

    @property
    def numbers(self) -> int:
        """Of the keys and values of one layer."""
        return 2 * self.rows * self.context * ops.KV_HEADS * ops.HEAD_DIM


def shape_on(device: torch.device) -> Shape:
    """As in `ops.run_decode` on a CPU."""
    if device.type == "cpu":
        return Shape(ops.ROWS, ops.CONTEXT, ops.LAYERS)
    return Shape(GPU_SCALE * ops.ROWS, GPU_SCALE * ops.CONTEXT, 2)


def run_kernels(dtype: torch.dtype, repeats: int, progress: Progress, device: torch.device) -> list[Row]:
    """One layer's attention in a decode step on permuted tables, in milliseconds; left, a copy of the keys and values that it
    reads, which moves every byte twice."""
    shape = shape_on(device)
    dims = [(ops.HEAD_DIM, ops.HEAD_DIM)]
    serving = [
        name for name, backend in BACKENDS.items() if problem_of(name, device, dtype, dims, backend.block_size) is None
    ]
    source = [torch.randn(shape.numbers, dtype=dtype, device=device) for _ in range(shape.layers)]
    target = torch.empty_like(source[0])

    def copy() -> None:
        for layer in source:
            target.copy_(layer)

    ways = {"copy": copy, **{name: _attention(name, source, device, shape) for name in serving}}
    seconds = interleave(ways, 4 * repeats, progress)
    each = {name: median(values) / shape.layers * 1e3 for name, values in seconds.items()}
    rate = {name: target.nbytes / time / 1e6 for name, time in each.items()}  # GB/s
    return [
        Row(
            f"kernel {name} vs copy",
            each["copy"],
            each[name],
            "ms",
            notes=dict(
                reads_gb_s=rate[name],
                copy_moves_gb_s=2 * rate["copy"],
                of_copy=rate[name] / (2 * rate["copy"]),
                block_size=BACKENDS[name].block_size,
                what=f"{shape.rows} x {shape.context} tokens",
            ),
        )
        for name in serving
    ]


def _attention(name: str, layers: list[Tensor], device: torch.device, shape: Shape) -> Callable[[], None]:
    """A function that runs the backend once over each layer, whose numbers it takes for a pool's keys and values."""
    size = BACKENDS[name].block_size
    blocks = shape.context // size
    length = blocks * size
    generator = torch.Generator().manual_seed(0)
    pools = [
        half[: shape.rows * length * ops.KV_HEADS * ops.HEAD_DIM].view(-1, size, ops.KV_HEADS, ops.HEAD_DIM)
        for layer in layers
        for half in layer.chunk(2)
    ]
    table = torch.randperm(shape.rows * blocks, generator=generator).int().view(shape.rows, blocks).to(device)
    lengths = torch.full((shape.rows,), length, dtype=torch.int32, device=device)
    starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=device)
    query = torch.randn(shape.rows, ops.HEADS, ops.HEAD_DIM, generator=generator).to(device, layers[0].dtype)
    scale = ops.HEAD_DIM**-0.5

    def run() -> None:
        for keys, values in zip(pools[::2], pools[1::2]):
            KERNELS[name](query, keys, values, table, lengths, starts, scale, 0, 0.0, None, 1, length)

    return run
