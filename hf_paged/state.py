"""What the layers of one cache share: its rows, its padded width, and the plan of the forward pass under way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from .blocks import Append, BlockTables, Int64, PoolExhausted
from .plan import Bool, StepPlan
from .pool import PagePool


class Width(int):
    """The key length that `get_mask_sizes` reports. It remembers whose it is, so that the mask function, which
    transformers hands this number but no cache, can tell that cache which of the positions are pads."""

    state: CacheState

    def __new__(cls, value: int, state: CacheState) -> Width:
        self = super().__new__(cls, value)
        self.state = state
        return self


class _Announcement(NamedTuple):
    """What is known of the next forward pass before its first layer writes."""

    mask: Tensor | None  # [B, width + q_length], None: no pads
    q_length: int


class CacheState:
    """Rows, width and pads of one cache. Layers hold this object, not the cache, so a cache that nobody holds any more
    dies at once and its finalizer gives the blocks back.

    `width` counts padded positions, the same for all rows; a row's length counts its real tokens. `real` is bool
    [B, width], or None as long as there was no pad. `version` changes whenever stored tokens move or go away.
    """

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.groups = [BlockTables(pool.manager) for _ in pool.groups]
        self.recording = False  # whether tokens that leave a window are kept until the next `crop`
        self.width = 0
        self.real: Bool | None = None
        self.plan: StepPlan | None = None
        self.version = 0
        self.released = False
        self.packing: Bool | None = None  # set while a forward pass runs packed: its new positions, [B, q_length]
        self._announced: _Announcement | None = None

    @property
    def tables(self) -> BlockTables:
        """The block tables of the first layer group. Rows and lengths are the same in all of them."""
        return self.groups[0]

    # ------------------------------------------------------------------------------------------------ a forward pass

    def announce_mask(self, attention_mask: Tensor | None, q_length: int) -> None:
        """Take notice of the 2-D mask [B, width + q_length] of the forward pass that is about to begin; None: no pads."""
        total = self.width + q_length
        if attention_mask is not None and attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, but {self.width} positions are cached and {q_length} "
                f"are new: pass the mask of the whole sequence, [batch, {total}]"
            )
        self._announced = _Announcement(None if attention_mask is None else attention_mask[:, :total], q_length)

    def begin(self, batch: int, q_length: int) -> StepPlan:
        """Take blocks for the new tokens of a pass of this shape, and plan it. Raises `PoolExhausted`, and
        `ValueError` where batch or mask contradict what is cached; the state is as before then."""
        if self.released:
            raise RuntimeError("this PagedCache was released, its keys and values are gone: make a new one")
        rows = batch if self.packing is None else len(self.packing)
        if self.width == 0 and self.tables.num_rows != rows:
            self._drop_rows()
        elif self.tables.num_rows != rows:
            raise ValueError(
                f"the cache holds {self.tables.num_rows} rows, but the model was called with {rows}: use "
                "cache.batch_repeat_interleave(n), cache.batch_select_indices(rows) or cache.reset() first"
            )
        announced, self._announced = self._announced, None
        new, native = self.packing, True
        if new is not None:
            q_length = new.shape[1]
        elif announced is not None and announced.q_length == q_length:
            new, native = self._read_mask(announced.mask, rows, q_length)
        with self.pool.manager.lock:
            if not self.recording:
                self._slide()
            appends = self._append(rows, np.full(rows, q_length) if new is None else new.sum(1))
            for append in appends:
                self.pool.copy_blocks(append.copy_from, append.copy_to)
        if new is not None or self.real is not None:
            past = np.ones((rows, self.width), bool) if self.real is None else self.real
            now = np.ones((rows, q_length), bool) if new is None else new
            self.real = np.concatenate([past, now], 1)
        packed = self.packing is not None
        slots = [append.slots for append in appends]
        self.plan = StepPlan(self.groups, slots, self.width, q_length, new, self.real, native, packed)
        self.width += q_length
        self.version += 1
        return self.plan

    def _append(self, rows: int, counts: Int64) -> list[Append]:
        """Blocks for `counts` further tokens per row in every group, the rows themselves included where there are none yet.
        Raises `PoolExhausted` with nothing changed."""
        fresh = self.tables.num_rows == 0
        for tables in self.groups:
            if fresh:
                tables.add_rows(rows)
        manager = self.pool.manager
        try:
            if len(self.groups) > 1:
                manager.require(sum(tables.blocks_needed(counts) for tables in self.groups))
            return [tables.append(counts) for tables in self.groups]
        except PoolExhausted:
            if fresh:
                self._drop_rows()
            raise

    def _slide(self) -> None:
        """Give back what no query that follows will see: the next one of a row stands at its length."""
        for group, tables in zip(self.pool.groups, self.groups):
            if group.window:
                tables.slide(group.first_seen(tables.lengths))

    def _read_mask(self, mask: Tensor | None, batch: int, q_length: int) -> tuple[Bool | None, bool]:
        """Which of the new positions are real, bool [B, q_length] (None: all), and whether plain causality over the
        stored tokens is what the mask asks for."""
        if self.pool.stores_pads:
            return None, mask is None or bool(mask.all())
        if mask is None:
            if self.real is not None:
                self._refuse_pads(np.ones_like(self.real))
            return None, True
        wanted: Bool = mask.detach().bool().expand(batch, -1).cpu().numpy()
        past, new = wanted[:, : self.width], wanted[:, self.width :]
        stored = np.ones_like(past) if self.real is None else self.real
        self._refuse_pads(past)
        # A token that is stored but masked out now, and a row that ends in a pad yet is read there (right padding):
        # only the dense mask gives what the caller means.
        ends_in_pad = ~new[:, -1] & wanted.any(1)
        native = bool((past == stored).all()) and not ends_in_pad.any()
        return (None if new.all() else new), native

    def ragged(self, mask: Tensor, q_length: int) -> Bool | None:
        """Which of the next `q_length` positions are real, where some are pads, every row ends in a real token, and
        causality over the stored tokens is what the mask asks for. None otherwise."""
        new, native = self._read_mask(mask, len(mask), q_length)
        return new if new is not None and native and new[:, -1].all() else None

    def _refuse_pads(self, past: Bool) -> None:
        """Raise where `past` calls a position real whose key and value were never stored."""
        if self.real is None:
            return
        lost = past & ~self.real
        if lost.any():
            row, position = (int(i) for i in np.argwhere(lost)[0])
            raise ValueError(
                f"attention_mask says that position {position} of row {row} holds a token, but it was a pad when it was "
                "cached, and pads are not stored: pass the attention_mask of the whole sequence, pads as zeros, at every call"
            )

    def view(self) -> StepPlan:
        """A plan to read what is stored, with no new token in it."""
        if self.plan is None or self.plan.packed:
            nothing = [np.empty(0, np.int64)] * len(self.groups)
            self.plan = StepPlan(self.groups, nothing, self.width, 0, real=self.real)
        return self.plan

    # ---------------------------------------------------------------------------------------------------------- rows

    def select(self, rows: ArrayLike) -> bool:
        """Row `i` becomes what row `rows[i]` was. Costs table entries only; the identity costs nothing and returns False."""
        rows = np.asarray(rows, np.int64)
        if not all([tables.select(rows) for tables in self.groups]):
            return False  # the identity, in all groups alike
        self.real = None if self.real is None else self.real[rows]
        self._moved()
        return True

    def crop(self, width: int) -> None:
        """Keep the first `width` padded positions of every row. Raises `ValueError` where that reaches back further than a
        window's tokens are kept: those of the last forward pass can always be removed, and all since the last `crop` after
        `activate_past_recording`."""
        if width <= 0:
            self._drop_rows()
            return
        if width < self.width:
            real = None if self.real is None else self.real[:, :width]
            lengths = np.full(self.tables.num_rows, width) if real is None else real.sum(1)
            for group, tables in zip(self.pool.groups, self.groups):
                first = np.maximum(group.first_seen(lengths), 0) if group.window else 0
                if (tables.starts * tables.manager.block_size > first).any():
                    raise ValueError(
                        f"cannot go back to {width} positions: the tokens that a window of {group.window} would show there "
                        "have been given back. Call activate_past_recording() before forward passes that you may want to undo"
                    )
            for tables in self.groups:
                tables.crop(lengths)
            self.real = real
            self.width = width
            self._moved()
        if self.recording:
            self._slide()
            self._moved()

    def fork(self, repeats: int) -> CacheState:
        """A state of its own whose rows, each `repeats` times, share all frames of this one."""
        if self.released:
            raise RuntimeError("this PagedCache was released: there is nothing left to fork")
        twin = CacheState(self.pool)
        twin.groups = [tables.fork(repeats) for tables in self.groups]
        twin.recording = self.recording
        twin.width = self.width
        twin.real = None if self.real is None else np.repeat(self.real, repeats, axis=0)
        return twin

    def reset(self) -> None:
        """Give all blocks back and start over, as new."""
        self._announced = None
        self._drop_rows()

    def release(self) -> None:
        """Give all blocks back for good."""
        self.reset()
        self.released = True

    def row_keys(self) -> list[bytes]:
        """Per row, a value equal for two rows exactly when they hold the same frames and pads."""
        ids = list(zip(*(tables.block_ids() for tables in self.groups)))
        pads = [b""] * len(ids) if self.real is None else [row.tobytes() for row in self.real]
        return [repr((row, int(length))).encode() + pad for row, length, pad in zip(ids, self.tables.lengths, pads)]

    def _drop_rows(self) -> None:
        for tables in self.groups:
            tables.free()
        self.width = 0
        self.real = None
        self._moved()

    def _moved(self) -> None:
        self.plan = None
        self.version += 1
