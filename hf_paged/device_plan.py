"""What the kernels read of a plan, on a device. On a GPU the block tables stay from pass to pass, only what changed is sent,
and on CUDA nobody waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .blocks import UNUSED, Int32, Int64

HOST_MEMORY = {"cpu"}  # types of devices that read arrays of the host where they are
ALIGNMENT = 16  # bytes; Triton compiles a kernel once more for pointers that are no multiples of it


class DevicePlan(NamedTuple):
    """What the kernels read, on one device, for one group of layers."""

    slots: Tensor  # [T] int64, where each new token is stored
    source: Tensor | None  # [T] int64, which of the padded new tokens [B * q_length] are real; None: all of them
    block_table: Tensor  # [B, M] int32
    seq_lens: Tensor  # [B] int32, the new tokens included
    cu_seqlens_q: Tensor  # [B + 1] int32
    cu_seqlens_k: Tensor  # [B + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int


class HostPlan(NamedTuple):
    """The same for all groups, as arrays of the host."""

    slots: Sequence[Int64]  # one array per group
    source: Int64 | None
    tables: Int32  # [groups, B, M]
    seq_lens: Int32
    cu_seqlens_q: Int32
    cu_seqlens_k: Int32
    max_seqlen_q: int
    max_seqlen_k: int

    def on(self, device: torch.device, kept: dict[torch.device, DeviceTables]) -> list[DevicePlan]:
        """The plan of every group on `device`. `kept` are the tables that the devices hold already."""
        if device.type not in HOST_MEMORY:
            return kept.setdefault(device, DeviceTables(device)).bring(self)
        source = None if self.source is None else torch.from_numpy(self.source)
        lengths = [torch.from_numpy(array) for array in (self.seq_lens, self.cu_seqlens_q, self.cu_seqlens_k)]
        return [
            self._plan(torch.from_numpy(slots), source, torch.from_numpy(table), lengths)
            for slots, table in zip(self.slots, self.tables)
        ]

    def _plan(self, slots: Tensor, source: Tensor | None, table: Tensor, lengths: Sequence[Tensor]) -> DevicePlan:
        seq_lens, cu_seqlens_q, cu_seqlens_k = lengths
        bounds = self.max_seqlen_q, self.max_seqlen_k
        return DevicePlan(slots, source, table, seq_lens, cu_seqlens_q, cu_seqlens_k, *bounds)


class DeviceTables:
    """The block tables of all groups of one cache on one device, int32 [groups, row capacity, column capacity].

    They are changed in place while kernels of an earlier pass that read them may still be queued: on one stream everything
    runs in order. Another stream gets new ones, made on it, and the memory of the old ones stays with theirs.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = None
        self._held: Int32 = np.empty((0, 0, 0), np.int32)  # what the device holds
        self._tables = torch.empty(0)

    def bring(self, plan: HostPlan) -> list[DevicePlan]:
        """The plan on the device. One transfer: the small arrays whole, of the tables the entries that changed. The block
        tables of an earlier plan are no longer its own."""
        stream, tables = current_stream(self.device), plan.tables
        groups, rows, columns = tables.shape
        if stream != self._stream or any(need > room for need, room in zip(tables.shape, self._held.shape)):
            self._make(groups, rows, columns)
            self._stream = stream
        held = self._held[:, :rows, :columns]
        group, row, column = np.nonzero(held != tables)
        _, row_capacity, column_capacity = self._held.shape
        index = (group * row_capacity + row) * column_capacity + column
        whole = index.nbytes > tables.nbytes / 2
        changes = [tables] if whole else [index, tables[group, row, column]]
        common = [plan.seq_lens, plan.cu_seqlens_q, plan.cu_seqlens_k, *([] if plan.source is None else [plan.source])]
        sent = send([*plan.slots, *changes, *common], self.device)
        slots, changed, common_sent = sent[:groups], sent[groups : -len(common)], sent[-len(common) :]
        if whole:
            self._tables[:, :rows, :columns].copy_(changed[0])
        elif len(index):
            self._tables.view(-1).index_copy_(0, *changed)
        held[...] = tables  # not before: a transfer may find no memory
        source = None if plan.source is None else common_sent[-1]
        return [
            plan._plan(slots[group], source, self._tables[group, :rows, :columns], common_sent[:3])
            for group in range(groups)
        ]

    def _make(self, groups: int, rows: int, columns: int) -> None:
        """New tables, with room to grow by half."""
        needed = zip((rows, columns), self._held.shape[1:])
        rows, columns = (room if need <= room else need * 3 // 2 for need, room in needed)
        columns = -(-columns // ALIGNMENT) * ALIGNMENT
        self._held = np.full((groups, rows, columns), UNUSED, np.int32)
        with torch.inference_mode(False):  # it will be changed outside inference mode too
            self._tables = torch.full(self._held.shape, UNUSED, dtype=torch.int32, device=self.device)


def send(arrays: Sequence[Any], device: torch.device) -> list[Tensor]:
    """numpy arrays as tensors on `device`, all in one transfer that nobody waits for on CUDA. On the host nothing is copied."""
    if device.type in HOST_MEMORY:
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    # torch hands pinned memory out again only when the transfers from it have run.
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = buffer.numpy()
    for start, array in zip(starts, arrays):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = transfer(buffer, device)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays)
    ]


def current_stream(device: torch.device) -> Any:
    """The stream that work on `device` is queued on now; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def transfer(buffer: Tensor, device: torch.device) -> Tensor:
    """A buffer of the host on `device`. Only CUDA's is pinned: elsewhere it may be gone before it was read."""
    return buffer.to(device, non_blocking=device.type == "cuda")
