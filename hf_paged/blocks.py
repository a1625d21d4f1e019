"""The frames of a pool: who is free, how many hold each of the others. numpy only, no torch, no model.

A frame is the physical place of a block in every layer's storage. Rows share frames (a fork copies no key and no value, it
only counts references), and a frame that nobody holds is free.

The scheme is that of PagedAttention (Kwon et al., SOSP 2023, section 4).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]

UNUSED = -1  # what a block table holds beyond the last block of a row


class PoolExhausted(MemoryError):
    """More blocks were asked for than are free, or could be. Nothing has changed: not the tables, not the counts, not the
    contents.

    Attributes: `needed`, `free`, `used`, `num_blocks` and `max_blocks`, up to which the pool could grow, all in blocks.
    """

    def __init__(self, needed: int, free: int, used: int, num_blocks: int, max_blocks: int):
        self.needed, self.free, self.used, self.num_blocks, self.max_blocks = needed, free, used, num_blocks, max_blocks
        growth = f", which may grow to {max_blocks}" if max_blocks > num_blocks else ""
        super().__init__(
            f"the pool is out of blocks: {needed} needed, {free} free of {num_blocks}{growth} ({used} in use by live caches). "
            "Nothing was changed. Release the caches that are no longer needed (cache.release()), use fewer rows "
            "(batch, num_beams, num_return_sequences) or fewer tokens, or make a larger pool (memory=..., num_blocks=...)"
        )

    def __reduce__(self) -> tuple[type[PoolExhausted], tuple[int, int, int, int, int]]:
        return type(self), (self.needed, self.free, self.used, self.num_blocks, self.max_blocks)


class IntegrityError(RuntimeError):
    """The bookkeeping of a pool contradicts itself: a bug in hf_paged, never in the caller."""


@runtime_checkable
class Holder(Protocol):
    """What may hold frames: the rows of a cache, the prefix index."""

    def held_frames(self) -> Int32:
        """Every frame it holds, as often as it counts in that frame's reference count."""


class Owner(Protocol):
    """What gives frames back when it goes."""

    abandoned: bool

    def free(self) -> None:
        """Give every frame back. Safe to call twice."""


class Reserve(Protocol):
    """What holds frames that it can do without."""

    held: NDArray[np.bool_]  # [max_blocks]

    def give_back(self, count: int) -> None:
        """Free `count` of the frames that nobody else holds; there are as many."""

    def recover(self) -> None:
        """Be whole again after a change that was interrupted anywhere. Leaves the counts to the manager."""


class BlockManager:
    """Owns `num_blocks` frames: who is free, and how many rows hold each of the others.

    All methods take the lock, so several `BlockTables` may draw on one manager from several threads. With `max_blocks` it
    grows up to that number when nothing else is left. `reserve` is asked for frames first.

    What changes counts together with those who hold frames stands inside `with manager.lock, manager:`. An interrupt there
    (KeyboardInterrupt, SystemExit) may leave both half changed, and everything is counted anew then. The lock stands outside:
    no signal is delivered between the end of a block and the release of a lock.
    """

    def __init__(self, num_blocks: int, block_size: int, max_blocks: int | None = None):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must both be at least 1")
        max_blocks = num_blocks if max_blocks is None else max_blocks
        if max_blocks < num_blocks:
            raise ValueError(f"max_blocks={max_blocks} is less than num_blocks={num_blocks}, what the pool starts with")
        if max_blocks > np.iinfo(np.int32).max:
            raise ValueError(f"num_blocks={max_blocks} does not fit the int32 of a block table: use larger blocks")
        self.num_blocks = num_blocks
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.ref_counts: Int32 = np.zeros(max_blocks, np.int32)
        # A stack: frames that were given back last, and so are warm, are handed out first. Lowest ids on top at start.
        self._free: Int32 = np.empty(max_blocks, np.int32)
        self._free[:num_blocks] = np.arange(num_blocks - 1, -1, -1)
        self.num_free = num_blocks
        self.peak_used = 0
        self.cow_copies = 0
        self.lock = threading.RLock()
        self.reserve: Reserve | None = None
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        # Garbage collection may run at any line, also while the lock is held and the counts are half changed. So a
        # dying cache only leaves its rows here, and the next operation frees them.
        self._abandoned: deque[Owner] = deque()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.recount()

    @property
    def num_reserved(self) -> int:
        """Frames that no live row holds, but the reserve."""
        return 0 if self.reserve is None else int(np.count_nonzero(self.reserve.held & (self.ref_counts == 1)))

    @property
    def num_used(self) -> int:
        """Frames held by at least one live row."""
        return self.num_blocks - self.num_free - self.num_reserved

    @property
    def num_shared(self) -> int:
        """Frames held by more than one live row."""
        rows = self.ref_counts if self.reserve is None else self.ref_counts - self.reserve.held
        return int(np.count_nonzero(rows > 1))

    def add_holder(self, holder: Holder) -> None:
        """Let `check_integrity` know of one more that holds frames."""
        with self.lock:
            self._holders.add(holder)

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
        """See to it that `count` frames are free: by taking them from the reserve, then by growing. Raises `PoolExhausted`
        where both together do not suffice, with nothing changed."""
        with self.lock:
            self.collect()
            if count <= self.num_free:
                return
            reserved = self.num_reserved
            lacking = count - self.num_free - reserved
            if lacking > self.max_blocks - self.num_blocks:
                raise PoolExhausted(count, self.num_free + reserved, self.num_used, self.num_blocks, self.max_blocks)
            if self.reserve is not None:
                self.reserve.give_back(min(count - self.num_free, reserved))
            if lacking > 0:
                self._grow(lacking)

    def _grow(self, count: int) -> None:
        """Add `count` free frames, and some in advance, as far as `max_blocks` goes."""
        size = min(self.num_blocks + max(count, self.num_blocks // 4), self.max_blocks)
        new = np.arange(size - 1, self.num_blocks - 1, -1)
        self._free[len(new) : len(new) + self.num_free] = self._free[: self.num_free].copy()
        self._free[: len(new)] = new
        self.num_free += len(new)
        self.num_blocks = size

    def add_references(self, frames: Int32, change: ArrayLike) -> None:
        """Add `change` (one number, or one per frame) to the counts of `frames`, which may repeat. A frame whose count
        falls to zero is free at once. The same frame may gain and lose in one call."""
        with self.lock:
            np.add.at(self.ref_counts, frames, np.asarray(change, np.int32))
            freed = np.unique(frames[self.ref_counts[frames] == 0])
            self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
            self.num_free += len(freed)

    def exchange(self, given: Int32, taken: Int32) -> None:
        """Give back one reference to each of `given` and take one to each of `taken`, which may be free. To undo what was done
        under the lock that is still held: nobody has got the free ones since."""
        with self.lock:
            np.add.at(self.ref_counts, given, -1)
            np.add.at(self.ref_counts, taken, 1)
            free = np.flatnonzero(self.ref_counts[: self.num_blocks] == 0)
            self._free[: len(free)] = free[::-1]
            self.num_free = len(free)

    def abandon(self, owner: Owner) -> None:
        """Call `owner.free()` at the next operation. Takes no lock and is safe inside garbage collection."""
        self._abandoned.append(owner)
        owner.abandoned = True

    def collect(self) -> None:
        """Free what was abandoned. Under the lock."""
        while self._abandoned:
            self._abandoned[0].free()
            self._abandoned.popleft()  # only now: an interrupt before leaves it to the next call

    def _held(self) -> Int64:
        """How many hold each frame, int64 [max_blocks], asked of those who do."""
        held = np.zeros(self.max_blocks, np.int64)
        # Garbage collection takes what dies in a cycle out of the weak set before it is abandoned.
        for holder in {id(holder): holder for holder in (*self._holders, *self._abandoned)}.values():
            if isinstance(holder, Holder):
                np.add.at(held, holder.held_frames(), 1)
        return held

    def recount(self) -> None:
        """Take all counts and the free list from those who hold frames, whatever they say now."""
        if self.reserve is not None:
            self.reserve.recover()
        held = self._held()
        free = np.flatnonzero(held[: self.num_blocks] == 0)
        self.ref_counts[:] = held
        self._free[: len(free)] = free[::-1]
        self.num_free = len(free)

    def check_integrity(self) -> None:
        """Recompute every count from those who hold frames. Raises `IntegrityError` at the first contradiction."""
        with self.lock:
            self.collect()
            expected = self._held()
            wrong = np.flatnonzero(expected != self.ref_counts)
            if len(wrong):
                frame = int(wrong[0])
                raise IntegrityError(
                    f"frame {frame} counts {self.ref_counts[frame]} holders, but {expected[frame]} hold it"
                )
            free = np.sort(self._free[: self.num_free])
            if not np.array_equal(free, np.flatnonzero(expected[: self.num_blocks] == 0)):
                raise IntegrityError(
                    f"the free list ({self.num_free} frames) is not the set of frames that nobody holds"
                )
