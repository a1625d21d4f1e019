"""The tasks that need no model: the attention of one layer in one decode step, and the bookkeeping of a step."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .. import LayerGeometry, PagedCache, PagePool
from ..attention import paged_attention
from ..blocks import BlockManager
from ..device_plan import DeviceTables
from ..kernels import cpu
from ..kernels.choose import choose
from ..plan import StepPlan
from ..tables import BlockTables
from .measure import Row, interleave, median
from .tasks import Progress

ROWS, CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 16, 2048, 32, 8, 64
CPU = torch.device("cpu")
LAYERS = 8  # taken in turn, so that no layer's keys are still in a processor cache


@torch.no_grad()
def run_decode(
    dtype: torch.dtype, pool_options: dict[str, Any], repeats: int, progress: Progress, device: torch.device = CPU
) -> list[Row]:
    """One layer's part of a decode step, 16 rows x 2048 tokens, 32 query and 8 key/value heads of 64: against `torch.cat`
    and sdpa as the default cache does it, against sdpa alone, and against a plain read of the same bytes."""
    generator = torch.Generator().manual_seed(0)
    kernel, asked = pool_options["kernel"], pool_options["block_size"]
    block_size = choose(kernel, asked, device, dtype, [(HEAD_DIM, HEAD_DIM)]).block_size
    steps = 4 * repeats + 1
    pool = PagePool(
        [LayerGeometry(KV_HEADS, HEAD_DIM, HEAD_DIM)] * LAYERS,
        num_blocks=ROWS * (-(-(CONTEXT + steps) // block_size) + 1),
        dtype=dtype,
        device=device,
        kernel=kernel,
        block_size=block_size,
    )
    module: Any = types.SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, training=False)
    cache, layers, fixed = PagedCache(pool), [DynamicLayer() for _ in range(LAYERS)], []
    for index in range(LAYERS):
        key, value = (_random(generator, dtype, KV_HEADS, CONTEXT, device) for _ in range(2))
        cache.update(key, value, index)
        layers[index].update(key, value)
        fixed.append((key, value))
    query, key, value = (_random(generator, dtype, heads, 1, device) for heads in (HEADS, KV_HEADS, KV_HEADS))

    read_memory = cpu.read if device.type == "cpu" and cpu.available() else torch.sum

    def cat_and_sdpa() -> None:
        for layer in layers:
            keys, values = layer.update(key, value)
            sdpa_attention_forward(module, query, keys, values, None)

    def sdpa() -> None:
        for keys, values in fixed:
            sdpa_attention_forward(module, query, keys, values, None)

    def paged() -> None:
        for index in range(LAYERS):
            paged_attention(module, query, *cache.update(key, value, index), None)

    def read() -> None:
        for keys, values in fixed:
            for tensor in (keys, values):
                read_memory(tensor)

    seconds = interleave(
        {"cat + sdpa": cat_and_sdpa, "sdpa": sdpa, "paged": paged, "read": read}, 4 * repeats, progress
    )
    cache.release()
    each = {name: median(values) / LAYERS * 1e3 for name, values in seconds.items()}
    read_bytes = sum(tensor.nbytes for pair in fixed for tensor in pair) / LAYERS
    bandwidth = {name: read_bytes / each[name] / 1e6 for name in ("read", "paged")}  # GB/s
    notes = dict(bandwidth_gb_s=bandwidth, of_read=each["read"] / each["paged"], kernel=pool.kernel)
    return [
        Row(f"decode vs {name}", each[name], each["paged"], "ms", notes=notes)
        for name in ("cat + sdpa", "sdpa", "read")
    ]


def _random(generator: torch.Generator, dtype: torch.dtype, heads: int, length: int, device: torch.device) -> Tensor:
    return torch.randn(ROWS, heads, length, HEAD_DIM, generator=generator).to(device, dtype)


def run_reorder(repeats: int, progress: Progress, device: torch.device = CPU) -> Row:
    """Reorder, append and plan of one step of 8 x 8 beams with 512 blocks each, against the same step in place."""
    rows, blocks, block_size = 64, 512, 16
    manager = BlockManager(rows * (blocks + 2), block_size)
    tables = BlockTables(manager)
    tables.add_rows(rows // 8)
    tables.append(np.full(rows // 8, blocks * block_size - 8))
    tables.select(np.repeat(np.arange(rows // 8), 8))
    generator = np.random.default_rng(0)
    kept: dict[torch.device, DeviceTables] = {}

    def step(order: Any) -> None:
        tables.select(order)
        append = tables.append(np.ones(rows, np.int64))
        StepPlan([tables], [append.slots], 0, 1, kept=kept).on(device)
        tables.crop(tables.lengths - 1)

    beams = np.arange(rows) // 8 * 8
    orders = iter([beams + generator.integers(0, 8, rows) for _ in range(20 * repeats + 1)])
    ways = dict(paged=lambda: step(next(orders)), default=lambda: step(np.arange(rows)))
    seconds = interleave(ways, 20 * repeats, progress)
    times = {name: median(values) * 1e3 for name, values in seconds.items()}
    return Row(
        "reorder", times["default"], times["paged"], "ms", notes=dict(what="64 rows x 512 blocks; left: identity")
    )
