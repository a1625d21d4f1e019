"""The control plane: block tables, reference counts, the free list. numpy only, no torch, no model.

Token `i` of a row lives in logical block `i // block_size` at offset `i % block_size`. A block table maps the logical
blocks of a row to frames, the physical places that every layer's storage is divided into. Rows may share frames
(a fork copies no key and no value, it only counts references); a row that is about to write into a frame which
somebody else reads gets a copy of that one frame first (copy-on-write).

The scheme is that of PagedAttention (Kwon et al., SOSP 2023, section 4).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]

UNUSED = -1  # what a block table holds beyond the last block of a row


class PoolExhausted(MemoryError):
    """More blocks were asked for than are free. Nothing has changed: not the tables, not the counts, not the contents.

    Attributes: `needed`, `free`, `used` and `num_blocks`, all in blocks.
    """

    def __init__(self, needed: int, free: int, used: int, num_blocks: int):
        self.needed, self.free, self.used, self.num_blocks = needed, free, used, num_blocks
        super().__init__(
            f"the pool is out of blocks: {needed} needed, {free} free of {num_blocks} ({used} in use by live caches). "
            "Nothing was changed. Release the caches that are no longer needed (cache.release()), use fewer rows "
            "(batch, num_beams, num_return_sequences) or fewer tokens, or make a larger pool (memory=..., num_blocks=...)"
        )

    def __reduce__(self) -> tuple[type[PoolExhausted], tuple[int, int, int, int]]:
        return type(self), (self.needed, self.free, self.used, self.num_blocks)


class IntegrityError(RuntimeError):
    """The bookkeeping of a pool contradicts itself: a bug in hf_paged, never in the caller."""


class Append(NamedTuple):
    """What `BlockTables.append` decided. The copies must be carried out before anything is written to the slots."""

    slots: Int64  # [T] where each new token goes: frame * block_size + offset; row after row, in order
    copy_from: Int32  # [C] frames to copy ...
    copy_to: Int32  # [C] ... and where to, the whole frame each


class BlockManager:
    """Owns `num_blocks` frames: who is free, and how many rows hold each of the others.

    All methods take the lock, so several `BlockTables` may draw on one manager from several threads.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must both be at least 1")
        if num_blocks > np.iinfo(np.int32).max:
            raise ValueError(f"num_blocks={num_blocks} does not fit the int32 of a block table: use larger blocks")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts: Int32 = np.zeros(num_blocks, np.int32)
        # A stack: frames that were given back last, and so are warm, are handed out first. Lowest ids on top at start.
        self._free: Int32 = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks
        self.peak_used = 0
        self.cow_copies = 0
        self.lock = threading.RLock()
        self._tables: weakref.WeakSet[BlockTables] = weakref.WeakSet()
        # Garbage collection may run at any line, also while the lock is held and the counts are half changed. So a
        # dying cache only leaves its tables here, and the next operation frees them.
        self._abandoned: deque[BlockTables] = deque()

    @property
    def num_used(self) -> int:
        """Frames held by at least one live row."""
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Frames held by more than one live row."""
        return int(np.count_nonzero(self.ref_counts > 1))

    def blocks_for(self, lengths: Int64) -> Int64:
        """Number of blocks that rows of these lengths (tokens) take."""
        blocks: Int64 = -(-lengths // self.block_size)
        return blocks

    def allocate(self, count: int) -> Int32:
        """Take `count` free frames, each with a reference count of 1. Raises `PoolExhausted` and changes nothing else."""
        with self.lock:
            self.require(count)
            taken = self._free[self.num_free - count : self.num_free][::-1].copy()
            self.num_free -= count
            self.ref_counts[taken] = 1
            self.peak_used = max(self.peak_used, self.num_used)
            return taken

    def require(self, count: int) -> None:
        """Raise `PoolExhausted` unless `count` frames are free."""
        with self.lock:
            self.collect()
            if count > self.num_free:
                raise PoolExhausted(count, self.num_free, self.num_used, self.num_blocks)

    def add_references(self, frames: Int32, change: ArrayLike) -> None:
        """Add `change` (one number, or one per frame) to the counts of `frames`, which may repeat. A frame whose count
        falls to zero is free at once. The same frame may gain and lose in one call."""
        with self.lock:
            np.add.at(self.ref_counts, frames, np.asarray(change, np.int32))
            freed = np.unique(frames[self.ref_counts[frames] == 0])
            self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
            self.num_free += len(freed)

    def abandon(self, tables: BlockTables) -> None:
        """Free `tables` at the next operation. Takes no lock and is safe inside garbage collection."""
        tables.abandoned = True
        self._abandoned.append(tables)

    def collect(self) -> None:
        """Free what was abandoned."""
        while self._abandoned:
            try:
                tables = self._abandoned.popleft()
            except IndexError:  # another thread was faster
                return
            tables.free()

    def check_integrity(self) -> None:
        """Recompute every count from the live block tables. Raises `IntegrityError` at the first contradiction."""
        with self.lock:
            self.collect()
            expected = np.zeros(self.num_blocks, np.int64)
            for tables in list(self._tables):
                np.add.at(expected, tables.held_frames(), 1)
            wrong = np.flatnonzero(expected != self.ref_counts)
            if len(wrong):
                frame = int(wrong[0])
                raise IntegrityError(
                    f"frame {frame} counts {self.ref_counts[frame]} rows, but {expected[frame]} hold it"
                )
            free = np.sort(self._free[: self.num_free])
            if not np.array_equal(free, np.flatnonzero(expected == 0)):
                raise IntegrityError(
                    f"the free list ({self.num_free} frames) is not the set of frames that no row holds"
                )


class BlockTables:
    """The block tables of the rows of one cache.

    `table` is int32 [rows, capacity]; the entries of row `b` are valid from block `starts[b]` to its last one, and `UNUSED`
    before and beyond. `lengths` is int64 [rows], in tokens, and `starts` int64 [rows], in blocks: what lies before was given
    back by `slide`. All three are replaced or changed in place by the methods below and by nobody else.
    `abandoned` tells that the owner is gone: whoever still looks must not read.
    """

    def __init__(self, manager: BlockManager):
        self.manager = manager
        self.table: Int32 = np.empty((0, 0), np.int32)
        self.lengths: Int64 = np.empty(0, np.int64)
        self.starts: Int64 = np.empty(0, np.int64)
        self.abandoned = False
        with manager.lock:
            manager._tables.add(self)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def block_ids(self) -> list[list[int]]:
        """The frames that every row holds, in logical order."""
        counts = self.manager.blocks_for(self.lengths)
        return [row[start:count].tolist() for row, start, count in zip(self.table, self.starts, counts)]

    def held_frames(self, rows: Int64 | None = None) -> Int32:
        """The frames of the given rows (all by default) in one array, row after row, with repeats."""
        rows = np.arange(self.num_rows) if rows is None else rows
        column, ends = np.arange(self.table.shape[1]), self.manager.blocks_for(self.lengths[rows])
        frames: Int32 = self.table[rows][(column >= self.starts[rows, None]) & (column < ends[:, None])]
        return frames

    def add_rows(self, count: int) -> None:
        """Add `count` empty rows at the end. They hold no block."""
        with self.manager.lock:
            table = np.full((self.num_rows + count, self.table.shape[1]), UNUSED, np.int32)
            table[: self.num_rows] = self.table
            self.table = table
            self.lengths = np.concatenate([self.lengths, np.zeros(count, np.int64)])
            self.starts = np.concatenate([self.starts, np.zeros(count, np.int64)])

    def append(self, counts: ArrayLike) -> Append:
        """Make room for `counts[b]` further tokens in each row `b`, and say where they go.

        A partial last block that somebody else holds too is replaced by a copy. When only rows of this very call
        hold it, the first of them keeps the original. All or nothing: raises `PoolExhausted` with nothing changed.
        Hold the manager's lock until the copies are made: the frames to copy from may be free by then.
        """
        manager = self.manager
        counts = np.asarray(counts, np.int64)
        if counts.shape != self.lengths.shape or (counts < 0).any():
            raise ValueError(f"append needs one count >= 0 for each of {self.num_rows} rows, got {counts.tolist()}")
        with manager.lock:
            manager.collect()
            old, new = self.lengths, self.lengths + counts
            have, need = manager.blocks_for(old), manager.blocks_for(new)
            grow = need - have
            copy_rows = self._rows_to_copy(counts, have)
            frames = manager.allocate(int(grow.sum()) + len(copy_rows))  # the only step that can fail

            copy_to = frames[: len(copy_rows)]
            copy_from = self.table[copy_rows, have[copy_rows] - 1]
            self.table[copy_rows, have[copy_rows] - 1] = copy_to
            if len(copy_rows):
                manager.add_references(copy_from, -1)
                manager.cow_copies += len(copy_rows)

            self._reserve(int(need.max(initial=0)))
            rows, index = ragged(grow)
            self.table[rows, have[rows] + index] = frames[len(copy_rows) :]
            self.lengths = new

            rows, index = ragged(counts)
            position = old[rows] + index
            frame = self.table[rows, position // manager.block_size].astype(np.int64)
            return Append(frame * manager.block_size + position % manager.block_size, copy_from, copy_to)

    def blocks_needed(self, counts: ArrayLike) -> int:
        """Free frames that `append(counts)` takes."""
        counts = np.asarray(counts, np.int64)
        have = self.manager.blocks_for(self.lengths)
        grow = self.manager.blocks_for(self.lengths + counts) - have
        return int(grow.sum()) + len(self._rows_to_copy(counts, have))

    def slide(self, first: ArrayLike) -> None:
        """Give back the blocks of each row `b` that lie wholly before its token `first[b]`, which nobody will read again.
        The block of the last token stays."""
        with self.manager.lock:
            last = np.maximum(self.lengths - 1, 0)
            starts = np.clip(np.asarray(first, np.int64), 0, last) // self.manager.block_size
            starts = np.maximum(starts, self.starts)
            column = np.arange(self.table.shape[1])
            dropped = (column >= self.starts[:, None]) & (column < starts[:, None])
            if dropped.any():
                self.manager.add_references(self.table[dropped], -1)
                self.table[dropped] = UNUSED
                self.starts = starts

    def _rows_to_copy(self, counts: Int64, have: Int64) -> Int64:
        """Rows whose partial last block must be copied before this append writes into it."""
        rows = np.flatnonzero((counts > 0) & (self.lengths % self.manager.block_size != 0))
        tails = self.table[rows, have[rows] - 1]
        shared = self.manager.ref_counts[tails] > 1
        rows, tails = rows[shared], tails[shared]
        if not len(rows):
            return rows
        frames, first, writers = np.unique(tails, return_index=True, return_counts=True)
        keepers = first[self.manager.ref_counts[frames] == writers]  # nobody but writers holds the frame: one may stay
        return np.delete(rows, keepers)

    def _reserve(self, columns: int) -> None:
        """Grow the capacity to at least `columns`, geometrically."""
        if columns > self.table.shape[1]:
            table = np.full((self.num_rows, max(columns, self.table.shape[1] * 3 // 2, 4)), UNUSED, np.int32)
            table[:, : self.table.shape[1]] = self.table
            self.table = table

    def select(self, rows: ArrayLike) -> bool:
        """Row `i` becomes what row `rows[i]` was; rows may repeat (forks) and be left out (freed).

        Needs no frame and cannot run short. The identity changes nothing and returns False.
        """
        chosen = np.asarray(rows, np.int64)
        if chosen.ndim != 1 or (len(chosen) and (chosen.min() < 0 or chosen.max() >= self.num_rows)):
            raise IndexError(
                f"rows {chosen.tolist()} must lie in 0..{self.num_rows - 1}: the cache has {self.num_rows}"
            )
        if np.array_equal(chosen, np.arange(self.num_rows)):
            return False
        with self.manager.lock:
            change = np.bincount(chosen, minlength=self.num_rows) - 1
            touched = np.flatnonzero(change)
            per_row = self.manager.blocks_for(self.lengths[touched]) - self.starts[touched]
            self.manager.add_references(self.held_frames(touched), np.repeat(change[touched], per_row))
            self.table = self.table[chosen]
            self.lengths = self.lengths[chosen]
            self.starts = self.starts[chosen]
            return True

    def fork(self, repeats: int = 1) -> BlockTables:
        """A new set of rows, each row of this one `repeats` times in a row, that shares all frames."""
        twin = BlockTables(self.manager)
        with self.manager.lock:
            twin.table = np.repeat(self.table, repeats, axis=0)
            twin.lengths = np.repeat(self.lengths, repeats)
            twin.starts = np.repeat(self.starts, repeats)
            self.manager.add_references(self.held_frames(), repeats)
        return twin

    def crop(self, lengths: ArrayLike) -> None:
        """Shorten each row `b` to `lengths[b]` tokens, at most what it has now. Frames that fall off are released; a
        frame cut in the middle stays as it is, and a later append copies it if it is shared. A row that has lost its first
        blocks to `slide` may lose its last ones too: the caller sees to it that what is left is enough."""
        new = np.asarray(lengths, np.int64)
        if new.shape != self.lengths.shape or (new < 0).any() or (new > self.lengths).any():
            raise ValueError(f"cannot crop rows of {self.lengths.tolist()} tokens to {new.tolist()}")
        with self.manager.lock:
            keep, have = self.manager.blocks_for(new), self.manager.blocks_for(self.lengths)
            column = np.arange(self.table.shape[1])
            dropped = (column >= np.maximum(keep, self.starts)[:, None]) & (column < have[:, None])
            self.manager.add_references(self.table[dropped], -1)
            self.table[dropped] = UNUSED
            self.lengths = new.copy()
            self.starts = np.minimum(self.starts, keep)

    def free(self) -> None:
        """Give every frame back and drop all rows. Always safe, also twice."""
        with self.manager.lock:
            frames = self.held_frames()
            self.table = np.empty((0, 0), np.int32)
            self.lengths = np.empty(0, np.int64)
            self.starts = np.empty(0, np.int64)
            self.manager.add_references(frames, -1)


def ragged(counts: Int64) -> tuple[Int64, Int64]:
    """For [2, 0, 3]: the row of each item, [0 0 2 2 2], and its index in the row, [0 1 0 1 2]."""
    rows = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, index
