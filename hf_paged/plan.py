"""The plan of one forward pass: computed once, by the first layer, and read by all the others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .blocks import Int32, Int64
from .device_plan import DevicePlan, DeviceTables, HostPlan, send
from .layout import Group
from .tables import BlockTables, ragged

Bool = np.ndarray  # dtype bool


class PackedRead(RuntimeError):
    """Something other than the kernels wanted keys, values or mask of rows that went through the model packed."""


class StepPlan:
    """Where the new tokens of one forward pass go, and what each of its queries may see.

    Attributes:
        rows: rows of the cache.
        start, width: the padded width before and after the pass.
        batch, q_length: the shape of the pass: `rows` and `width - start`; 1 and all new tokens of all rows when packed.
        packed: the rows stand one after the other in a batch of 1, without pads.
        native: whether plain causality over the stored tokens is what the caller expects; else the exact dense mask.
        thread: the one that runs the pass. None: the `generate` that ran it is over.
        written, attended: the layers that have written, and those that a kernel has read.
    """

    def __init__(
        self,
        groups: Sequence[BlockTables],
        slots: Sequence[Int64],
        start: int,
        q_length: int,
        new: Bool | None = None,
        real: Bool | None = None,
        native: bool = True,
        packed: bool = False,
        kept: dict[torch.device, DeviceTables] | None = None,
    ):
        """`groups` are the block tables of the layer groups, and `slots` where the new tokens go in each of them.
        `q_length` is the number of new padded positions per row; `new` bool [rows, q_length] and `real` bool [rows, width]
        say which positions hold tokens, None where all do. `kept` are the tables of the same cache that devices hold."""
        self.rows = rows = groups[0].num_rows
        counts = np.full(rows, q_length) if new is None else new.sum(1)
        self.start, self.width, self.native, self.packed = start, start + q_length, native, packed
        self.batch, self.q_length = (1, int(counts.sum())) if packed else (rows, q_length)
        self.thread: int | None = threading.get_ident()
        self.written: set[int] = set()
        self.attended: set[int] = set()
        lengths = groups[0].lengths
        columns = int(groups[0].manager.blocks_for(lengths).max(initial=0))
        tables = np.stack([tables.table[:, :columns] for tables in groups])  # a copy: they change with the next step
        self._host = HostPlan(
            slots,
            None if new is None or packed else np.flatnonzero(new),
            np.maximum(tables, 0, out=tables),  # some kernels read, and then mask, what lies before a window
            lengths.astype(np.int32),
            sums(counts),
            sums(lengths),
            int(counts.max(initial=0)),
            int(lengths.max(initial=0)),
        )
        self._starts = [tables.starts for tables in groups]
        self._past = lengths - counts
        self._real = real
        self._block_size = groups[0].manager.block_size
        self._kept = {} if kept is None else kept
        self._on_device: dict[torch.device, list[DevicePlan]] = {}
        self._in_chunks: dict[tuple[torch.device, int, int], DevicePlan] = {}
        self._dense_index: dict[tuple[torch.device, int], tuple[Tensor, Tensor | None]] = {}
        self._left_window: dict[tuple[torch.device, int, bool], Tensor] = {}
        self._single_queries: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._once: dict[str, tuple[Any, Any]] = {}

    def served(self, layers: int) -> bool:
        """Whether all of so many layers have written, and a kernel has read every one of them."""
        return len(self.written) == layers and self.written <= self.attended

    @property
    def longest_past(self) -> int:
        """Tokens that the longest row held before this pass."""
        return int(self._past.max(initial=0))

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, width) of the keys as the model sees them in this pass."""
        return self.batch, self.start + self.q_length

    def on(self, device: torch.device, group: int = 0) -> DevicePlan:
        """The plan of a layer group as tensors on `device`, sent there once."""
        if device not in self._on_device:
            self._on_device[device] = self._host.on(device, self._kept)
        return self._on_device[device][group]

    def single_queries(self, device: torch.device, group: int, q_length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Block table [B * q_length, M], lengths and `cu_seqlens_q` for `q_length` queries per row, each of which sees all
        that its row holds."""
        if (device, group, q_length) not in self._single_queries:
            plan, count = self.on(device, group), self.rows * q_length
            self._single_queries[device, group, q_length] = (
                plan.block_table.repeat_interleave(q_length, 0),
                plan.seq_lens.repeat_interleave(q_length),
                torch.arange(count + 1, dtype=torch.int32, device=device),
            )
        return self._single_queries[device, group, q_length]

    def once(self, name: str, subject: Any, decide: Callable[[], Any]) -> Any:
        """What `decide()` says of `subject`. All layers of a forward pass share their masks, so only the first one asks."""
        if name not in self._once or self._once[name][0] is not subject:
            self._once[name] = subject, decide()
        return self._once[name][1]

    def on_chunks(self, device: torch.device, group: int, chunk: int) -> DevicePlan:
        """The same where attention stays within chunks of `chunk` tokens, a multiple of the block size: the new tokens of a
        row that lie in one chunk become a row of their own, whose table begins with that chunk."""
        if (device, group, chunk) not in self._in_chunks:
            lengths, tables = self._host.seq_lens.astype(np.int64), self._host.tables[group]
            first, last = self._past // chunk, (lengths - 1) // chunk
            rows, index = ragged(np.where(lengths > self._past, last - first + 1, 0))
            start = (first[rows] + index) * chunk
            begin, end = np.maximum(self._past[rows], start), np.minimum(lengths[rows], start + chunk)
            columns = (start // self._block_size)[:, None] + np.arange(chunk // self._block_size)
            table = tables[rows[:, None], np.minimum(columns, tables.shape[1] - 1)]
            new, seen = end - begin, end - start
            sent = send([table, seen.astype(np.int32), sums(new), sums(seen)], device)
            self._in_chunks[device, group, chunk] = self.on(device, group)._replace(
                block_table=sent[0],
                seq_lens=sent[1],
                cu_seqlens_q=sent[2],
                cu_seqlens_k=sent[3],
                max_seqlen_q=int(new.max(initial=0)),
                max_seqlen_k=int(seen.max(initial=0)),
            )
        return self._in_chunks[device, group, chunk]

    def dense_index(self, device: torch.device, group: int = 0) -> tuple[Tensor, Tensor | None]:
        """For the dense view: the slot of every padded position, int64 [B * width], and which of the positions hold
        nothing, bool [B, width] (None: there are none): pads, and tokens that left the window. Their slot is 0 and means
        nothing."""
        if self.packed:
            raise PackedRead("keys and values were read outside the kernels in a packed forward pass")
        if (device, group) not in self._dense_index:
            rows, starts = self.rows, self._starts[group]
            token = np.maximum(self._token, 0)
            gone = token < starts[:, None] * self._block_size
            empty = gone if self._real is None else gone | ~self._real
            block, offset = token // self._block_size, token % self._block_size
            table = self._host.tables[group]
            table = table if table.size else np.zeros((rows, 1), np.int32)
            slot = np.take_along_axis(table, block, 1).astype(np.int64) * self._block_size + offset
            slot[empty] = 0
            index, *pads = send([slot.reshape(-1), *([empty] if empty.any() else [])], device)
            self._dense_index[device, group] = index, pads[0] if pads else None
        return self._dense_index[device, group]

    def left_window(self, device: torch.device, group: Group) -> Tensor | None:
        """For the dense view: which positions hold tokens that had left the window of a layer group before this pass, bool
        [B, width]. None where there are none."""
        if not group.window or self.longest_past < group.window:
            return None
        key = device, group.window, group.chunked
        if key not in self._left_window:
            left = self._token < group.first_seen(self._past)[:, None]
            self._left_window[key] = send([left], device)[0]
        return self._left_window[key]

    @functools.cached_property
    def _token(self) -> Int64:
        """Which of its row's tokens stands at each padded position, int64 [B, width]; at a pad, the one before, or -1."""
        if self._real is None:
            return np.broadcast_to(np.arange(self.width), (self.rows, self.width))
        token: Int64 = np.cumsum(self._real, 1) - 1
        return token


def sums(counts: Int64) -> Int32:
    """For [2, 0, 3]: [0 2 2 5]."""
    total: Int32 = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return total
