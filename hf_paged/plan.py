"""The plan of one forward pass: computed once, by the first layer, and read by all the others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .blocks import BlockTables, Int64

Bool = np.ndarray  # dtype bool


class DevicePlan(NamedTuple):
    """What the kernels read, on one device."""

    slots: Tensor  # [T] int64, where each new token is stored
    source: Tensor | None  # [T] int64, which of the padded new tokens [B * q_length] are real; None: all of them
    block_table: Tensor  # [B, M] int32
    seq_lens: Tensor  # [B] int32, the new tokens included
    cu_seqlens_q: Tensor  # [B + 1] int32


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
        updates, attended: how many layers have written, and how many of them a kernel has read.
    """

    def __init__(
        self,
        tables: BlockTables,
        slots: Int64,
        start: int,
        q_length: int,
        new: Bool | None = None,
        real: Bool | None = None,
        native: bool = True,
        packed: bool = False,
    ):
        """`q_length` is the number of new padded positions per row, `new` bool [rows, q_length] and `real` bool
        [rows, width] say which positions hold tokens; None where all do."""
        self.rows = rows = tables.num_rows
        counts = np.full(rows, q_length) if new is None else new.sum(1)
        self.start, self.width, self.native, self.packed = start, start + q_length, native, packed
        self.batch, self.q_length = (1, int(counts.sum())) if packed else (rows, q_length)
        self.updates = self.attended = 0
        self._slots = slots
        self._source = None if new is None or packed else np.flatnonzero(new)
        # The tables live on and change with the next step, the plan does not.
        self._table = tables.table[:, : int(tables.manager.blocks_for(tables.lengths).max(initial=0))].copy()
        self._lengths = tables.lengths.astype(np.int32)
        self._cu_seqlens_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self._real = real
        self._block_size = tables.manager.block_size
        self._on_device: dict[torch.device, DevicePlan] = {}
        self._dense_index: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, width) of the keys as the model sees them in this pass."""
        return self.batch, self.start + self.q_length

    def on(self, device: torch.device) -> DevicePlan:
        """The plan as tensors on `device`, sent there once."""
        if device not in self._on_device:
            self._on_device[device] = DevicePlan(
                torch.from_numpy(self._slots).to(device, non_blocking=True),
                None if self._source is None else torch.from_numpy(self._source).to(device, non_blocking=True),
                torch.from_numpy(self._table).to(device, non_blocking=True),
                torch.from_numpy(self._lengths).to(device, non_blocking=True),
                torch.from_numpy(self._cu_seqlens_q).to(device, non_blocking=True),
            )
        return self._on_device[device]

    def dense_index(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """For the dense view: the slot of every padded position, int64 [B * width], and which of the positions are
        pads, bool [B, width] (None: there are none). The slot of a pad is 0 and means nothing."""
        if self.packed:
            raise PackedRead("keys and values were read outside the kernels in a packed forward pass")
        if device not in self._dense_index:
            rows, width = self.rows, self.width
            if self._real is None:
                token = np.broadcast_to(np.arange(width), (rows, width))
                pads = None
            else:
                token = np.maximum(np.cumsum(self._real, 1) - 1, 0)
                pads = ~self._real
            block, offset = token // self._block_size, token % self._block_size
            table = self._table if self._table.size else np.zeros((rows, 1), np.int32)
            slot = np.take_along_axis(table, block, 1).astype(np.int64) * self._block_size + offset
            if pads is not None:
                slot[pads] = 0
            self._dense_index[device] = (
                torch.from_numpy(slot.reshape(-1)).to(device),
                None if pads is None else torch.from_numpy(pads).to(device),
            )
        return self._dense_index[device]
