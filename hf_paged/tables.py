"""Block tables: which frames hold the tokens of each row. numpy only, no torch, no model.

Token `i` of a row lives in logical block `i // block_size` at offset `i % block_size`. A block table maps the logical
blocks of a row to frames. Rows may share frames; a row that is about to write into a frame which somebody else reads gets a
copy of that one frame first (copy-on-write).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .blocks import UNUSED, BlockManager, Int32, Int64


class Append(NamedTuple):
    """What `BlockTables.append` decided. The copies must be carried out before anything is written to the slots."""

    slots: Int64  # [T] where each new token goes: frame * block_size + offset; row after row, in order
    copy_from: Int32  # [C] frames to copy ...
    copy_to: Int32  # [C] ... and where to, the whole frame each


class BlockTables:
    """The block tables of the rows of one cache.

    `table` is int32 [rows, capacity]; the entries of row `b` are valid from block `starts[b]` to its last one, and `UNUSED`
    before and beyond. `lengths` is int64 [rows], in tokens, and `starts` int64 [rows], in blocks: what lies before was given
    back by `slide`. All three are replaced or changed in place by the methods below and by nobody else, those that must agree
    in one statement without a call, which no signal interrupts: so `held_frames` is right at any moment.
    `abandoned` tells that the owner is gone: whoever still looks must not read.
    """

    lengths: Int64 = np.empty(0, np.int64)

    def __init__(self, manager: BlockManager):
        self.manager = manager
        self.table: Int32 = np.empty((0, 0), np.int32)
        self.starts: Int64 = np.empty(0, np.int64)
        self.abandoned = False
        manager.add_holder(self)

    def __del__(self) -> None:
        if len(self.lengths):  # an interrupt has lost it before there was a cache to give its frames back
            self.manager.abandon(self)

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
            lengths, starts = (np.concatenate([old, np.zeros(count, np.int64)]) for old in (self.lengths, self.starts))
            self.table, self.lengths, self.starts = table, lengths, starts

    def adopt(self, row: int, frames: Int32, start: int, length: int) -> None:
        """Let an empty row hold `length` tokens in `frames`, its blocks from block `start` on, which others hold too."""
        with self.manager.lock, self.manager:
            self._reserve(start + len(frames))
            self.table[row, start : start + len(frames)] = frames
            self.lengths[row], self.starts[row] = length, start
            self.manager.add_references(frames, 1)

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
        with manager.lock, manager:
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

    def mark(self) -> tuple[Int32, Int64, Int64]:
        """What `restore` needs to undo all that follows."""
        return self.table.copy(), self.lengths.copy(), self.starts.copy()

    def restore(self, mark: tuple[Int32, Int64, Int64]) -> None:
        """Be as at a `mark` that was taken under the lock that is still held."""
        with self.manager.lock, self.manager:
            frames = self.held_frames()
            self.table, self.lengths, self.starts = mark
            self.manager.exchange(frames, self.held_frames())

    def blocks_needed(self, counts: ArrayLike) -> int:
        """Free frames that `append(counts)` takes."""
        counts = np.asarray(counts, np.int64)
        have = self.manager.blocks_for(self.lengths)
        grow = self.manager.blocks_for(self.lengths + counts) - have
        return int(grow.sum()) + len(self._rows_to_copy(counts, have))

    def slide(self, first: ArrayLike) -> None:
        """Give back the blocks of each row `b` that lie wholly before its token `first[b]`, which nobody will read again.
        The block of the last token stays."""
        with self.manager.lock, self.manager:
            last = np.maximum(self.lengths - 1, 0)
            starts = np.clip(np.asarray(first, np.int64), 0, last) // self.manager.block_size
            starts = np.maximum(starts, self.starts)
            column = np.arange(self.table.shape[1])
            dropped = (column >= self.starts[:, None]) & (column < starts[:, None])
            if dropped.any():
                frames = self.table[dropped]
                self.starts = starts
                self.table[dropped] = UNUSED
                self.manager.add_references(frames, -1)

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
        chosen = self._chosen(rows)
        if np.array_equal(chosen, np.arange(self.num_rows)):
            return False
        with self.manager.lock, self.manager:
            change = np.bincount(chosen, minlength=self.num_rows) - 1
            touched = np.flatnonzero(change)
            per_row = self.manager.blocks_for(self.lengths[touched]) - self.starts[touched]
            self.manager.add_references(self.held_frames(touched), np.repeat(change[touched], per_row))
            table, lengths, starts = self.table[chosen], self.lengths[chosen], self.starts[chosen]
            self.table, self.lengths, self.starts = table, lengths, starts
            return True

    def unchanged_by(self, rows: Int64) -> bool:
        """Whether `select(rows)` would put rows in place of rows that hold the same frames."""
        if len(rows) != self.num_rows or (len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows)):
            return False
        return all(np.array_equal(kept[rows], kept) for kept in (self.lengths, self.starts, self.table))

    def _chosen(self, rows: ArrayLike) -> Int64:
        chosen = np.asarray(rows, np.int64)
        if chosen.ndim != 1 or (len(chosen) and (chosen.min() < 0 or chosen.max() >= self.num_rows)):
            raise IndexError(
                f"rows {chosen.tolist()} must lie in 0..{self.num_rows - 1}: the cache has {self.num_rows}"
            )
        return chosen

    def fork(self, repeats: int = 1, rows: ArrayLike | None = None) -> BlockTables:
        """A new set of rows, each of `rows` (all by default) `repeats` times in a row, that shares all frames."""
        chosen = np.arange(self.num_rows) if rows is None else self._chosen(rows)
        return BlockTables.join([self], np.repeat(chosen, repeats))

    @staticmethod
    def join(parts: Sequence[BlockTables], rows: ArrayLike | None = None) -> BlockTables:
        """A new set of rows that shares all frames with the rows of `parts`, in that order; `rows` picks some of them."""
        twin = BlockTables(parts[0].manager)
        with twin.manager.lock, twin.manager:
            columns = max(part.table.shape[1] for part in parts)
            padding = [((0, 0), (0, columns - part.table.shape[1])) for part in parts]
            table = np.concatenate(
                [np.pad(part.table, pad, constant_values=UNUSED) for part, pad in zip(parts, padding)]
            )
            chosen = np.arange(len(table)) if rows is None else np.asarray(rows, np.int64)
            lengths = np.concatenate([part.lengths for part in parts])[chosen]
            starts = np.concatenate([part.starts for part in parts])[chosen]
            twin.table, twin.lengths, twin.starts = table[chosen], lengths, starts
            twin.manager.add_references(twin.held_frames(), 1)
        return twin

    def crop(self, lengths: ArrayLike) -> None:
        """Shorten each row `b` to `lengths[b]` tokens, at most what it has now. Frames that fall off are released; a
        frame cut in the middle stays as it is, and a later append copies it if it is shared. A row that has lost its first
        blocks to `slide` may lose its last ones too: the caller sees to it that what is left is enough."""
        new = np.asarray(lengths, np.int64)
        if new.shape != self.lengths.shape or (new < 0).any() or (new > self.lengths).any():
            raise ValueError(f"cannot crop rows of {self.lengths.tolist()} tokens to {new.tolist()}")
        with self.manager.lock, self.manager:
            keep, have = self.manager.blocks_for(new), self.manager.blocks_for(self.lengths)
            column = np.arange(self.table.shape[1])
            dropped = (column >= np.maximum(keep, self.starts)[:, None]) & (column < have[:, None])
            frames, lengths, starts = self.table[dropped], new.copy(), np.minimum(self.starts, keep)
            self.lengths, self.starts = lengths, starts
            self.table[dropped] = UNUSED
            self.manager.add_references(frames, -1)

    def free(self) -> None:
        """Give every frame back and drop all rows. Always safe, also twice."""
        with self.manager.lock, self.manager:
            frames = self.held_frames()
            table, lengths, starts = np.empty((0, 0), np.int32), np.empty(0, np.int64), np.empty(0, np.int64)
            self.table, self.lengths, self.starts = table, lengths, starts
            self.manager.add_references(frames, -1)


def ragged(counts: Int64) -> tuple[Int64, Int64]:
    """For [2, 0, 3]: the row of each item, [0 0 2 2 2], and its index in the row, [0 1 0 1 2]."""
    rows = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, index
