"""What the layers of one cache share: its rows, its padded width, and the plan of the forward pass under way."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .access import Access
from .blocks import Int64, PoolExhausted
from .device_plan import DeviceTables
from .history import History
from .layout import Group
from .plan import Bool, StepPlan
from .pool import PagePool
from .prefix import Match
from .tables import Append, BlockTables


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


class Packing(NamedTuple):
    """A forward pass in which the rows stand one after the other, without pads: bool [B, q_length] each."""

    new: Bool  # the positions that go through the model
    real: Bool  # those and the ones that the rows hold already


class CacheState(Access):
    """Rows, width and pads of one cache. Layers hold this object, not the cache, so a cache that nobody holds any more
    dies at once and its finalizer gives the blocks back.

    `width` counts padded positions, the same for all rows; a row's length counts its real tokens. `real` is bool
    [B, width], or None as long as there was no pad. `version` changes whenever stored tokens move or go away. `cross` marks
    the keys of an encoder: written once, whole, and seen whole by every query, whatever window the decoder's layers have.
    """

    def __init__(self, pool: PagePool):
        super().__init__(pool)
        self.groups = [BlockTables(pool.manager) for _ in pool.groups]
        self.ahead: BlockTables | None = None  # see `reserve`; where layers keep more than blocks
        self.cross = False
        self.recording = False  # whether tokens that leave a window are kept until the next `crop`
        self.width = 0
        self.real: Bool | None = None
        self.on_devices: dict[torch.device, DeviceTables] = {}  # the block tables that GPUs hold
        self.version = 0
        self.abandoned = False  # whether nobody holds the cache any more; set by the block manager
        self.packing: Packing | None = None  # set while a forward pass runs packed
        self.history: History | None = None  # which tokens these are; None: not known
        self.prefilling = False  # set while `generate` runs the prompt that `history` begins with
        self.given_all = False  # set while `generate` prepares steps from ids that begin with the cached ones
        self._told: weakref.ref[Tensor] | None = None  # the ids of the pass that `follow` heard of
        self.shares = pool.prefix_caching  # whether its blocks are kept for later prompts
        self._announced: _Announcement | None = None

    @property
    def tables(self) -> BlockTables:
        """The block tables of the first layer group. Rows and lengths are the same in all of them."""
        return self.groups[0]

    def group_of(self, layer: int) -> Group:
        """The group of a layer. Nothing leaves the window of cross-attention, which has none."""
        group = self.pool.groups[self.pool.group_of[layer]]
        return group._replace(window=0) if self.cross else group

    # ------------------------------------------------------------------------------------------------ a forward pass

    def announce_mask(self, attention_mask: Tensor | None, q_length: int) -> None:
        """Take notice of the 2-D mask [B, width + q_length] of the forward pass that is about to begin; None: no pads."""
        self.check()
        total = self.width + q_length
        if attention_mask is not None and attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, but {self.width} positions are cached and {q_length} "
                f"are new: pass the mask of the whole sequence, [batch, {total}]"
            )
        self._announced = _Announcement(None if attention_mask is None else attention_mask[:, :total], q_length)

    def reserve(self, q_length: int) -> None:
        """Hold blocks for the pass of this length that is about to begin, pads counted, where layers keep more than blocks: a
        shortage must come before the first of them has changed. Raises `PoolExhausted`; the state is as before then."""
        if self.ahead is None or not self.width:  # what an empty cache's layers keep of a failed pass is dropped
            return
        counts = np.full(self.tables.num_rows, q_length)
        with self.pool.manager.lock, self.pool.manager:
            self.ahead.free()
            marks = [tables.mark() for tables in self.groups]
            try:
                if not self.recording:
                    self._slide()
                needed = sum(tables.blocks_needed(counts) for tables in self.groups)
                self.ahead.add_rows(1)
                self.ahead.append([needed * self.pool.block_size])
            except PoolExhausted:
                for tables, mark in zip(self.groups, marks):
                    tables.restore(mark)
                raise

    def begin(self, batch: int, q_length: int) -> StepPlan:
        """Take blocks for the new tokens of a pass of this shape, and plan it. Raises `PoolExhausted`, and
        `ValueError` where batch or mask contradict what is cached; the state is as before then."""
        self.check()
        self.check_passes()
        with self:
            return self._begin(batch, q_length)

    def _begin(self, batch: int, q_length: int) -> StepPlan:
        told, self._told = self._told, None
        rows = batch if self.packing is None else len(self.packing.new)
        if self.width == 0 and self.tables.num_rows not in (0, rows):
            self._drop_rows()
        elif self.width and self.tables.num_rows != rows:
            raise ValueError(
                f"the cache holds {self.tables.num_rows} rows, but the model was called with {rows}: use "
                "cache.batch_repeat_interleave(n), cache.batch_select_indices(rows) or cache.reset() first"
            )
        announced, self._announced = self._announced, None
        new: Bool | None = None
        real, native = None, True
        if self.packing is not None:
            new, real = self.packing
            q_length = new.shape[1]
        elif announced is not None and announced.q_length == q_length:
            new, native = self._read_mask(announced.mask, rows, q_length)
            real = new
        self._settle()
        appends = self._take_blocks(rows, np.full(rows, q_length) if new is None else new.sum(1), q_length > 1)
        self._foresee(self.width + q_length, told is not None and told() is not None)
        if real is not None or self.real is not None:
            past = np.ones((rows, self.width), bool) if self.real is None else self.real
            now = np.ones((rows, q_length), bool) if real is None else real
            self.real = np.concatenate([past, now], 1)
        packed = self.packing is not None
        slots = [append.slots for append in appends]
        self.plan = StepPlan(self.groups, slots, self.width, q_length, new, self.real, native, packed, self.on_devices)
        self.width += q_length
        self.version += 1
        return self.plan

    def _foresee(self, width: int, told: bool) -> None:
        """What is known after a pass up to `width`, whose tokens somebody `told` or not. A width that is not that of the
        tokens says that something else is fed, such as embeddings before the prompt."""
        history = self.history
        if history is None:
            return
        if not self.prefilling and not told:
            history.known = min(history.known, self.width)
        elif width > history.known or (width < history.known and not self.prefilling):
            self.history = None

    def _take_blocks(self, rows: int, counts: Int64, many: bool) -> list[Append]:
        """Blocks for `counts` further tokens per row in every group, the rows themselves included where there are none yet,
        and the copies that these need made. Whatever it raises, the tables are as before then."""
        manager = self.pool.manager
        with manager.lock, manager:
            self._let_go()
            if many and not self.recording and any(group.window for group in self.pool.groups):
                self.remember()  # a chunk of a prompt, before what leaves a window is given back
            marks = [tables.mark() for tables in self.groups]
            try:
                if not self.recording:
                    self._slide()
                if self.tables.num_rows == 0:
                    for tables in self.groups:
                        tables.add_rows(rows)
                if len(self.groups) > 1:
                    manager.require(sum(tables.blocks_needed(counts) for tables in self.groups))
                appends = [tables.append(counts) for tables in self.groups]
                for append in appends:
                    self.pool.copy_blocks(append.copy_from, append.copy_to)
                return appends
            except BaseException:
                for tables, mark in zip(self.groups, marks):
                    tables.restore(mark)
                raise

    def _let_go(self) -> None:
        """Give back what `reserve` holds."""
        if self.ahead is not None:
            self.ahead.free()

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

    def ragged(self, mask: Tensor | None, batch: int, q_length: int) -> Bool | None:
        """Which of the next `q_length` positions are real, bool [B, q_length], where every row ends in a real token, and
        causality over the stored tokens is what the mask asks for. None otherwise."""
        new, native = self._read_mask(mask, batch, q_length)
        if new is None and native:
            return np.ones((batch, q_length), bool)
        return new if native and new is not None and new[:, -1].all() else None

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

    # ----------------------------------------------------------------------------------------------------- prefixes

    def adopt(self, matches: list[Match], lengths: Int64, width: int, real: Bool | None) -> None:
        """Begin with tokens that the pool still holds: row `b` with the first `lengths[b]` of its match, at the real ones
        of `width` padded positions (`real` bool [B, width], None: all). With width 0 they stand among the new positions of
        the packed pass that follows."""
        with self.pool.manager.lock, self.pool.manager:
            for tables in self.groups:
                tables.add_rows(len(matches))
            for row, match in enumerate(matches):
                self.pool.prefixes.adopt(match, row, int(lengths[row]), self.groups)
        self.width, self.real = width, real

    def follow(self, ids: Tensor, fed: Tensor | None) -> None:
        """Take notice of the sequences so far, `ids` [B, n], for the pass that is about to be `fed` the last of them. It is
        that pass only if `fed` lives until then: ids are made for one pass, which may fail before it comes here."""
        if self.history is None or self.prefilling:
            return
        self._told = None if fed is None else weakref.ref(fed)
        if not self.history.follow(ids, self.width):
            self.history = None

    def remember(self) -> None:
        """Let later prompts that start alike find the full blocks of these rows."""
        self._settle()
        if self.history is None or not self.shares:
            return
        tokens = self.history.tokens()[:, : self.width]
        with self.pool.manager.lock:
            for row in range(self.tables.num_rows):
                real = slice(None) if self.real is None else self.real[row, : tokens.shape[1]]
                self.pool.prefixes.insert(self.history.root, tokens[row, real], row, self.groups)

    def _settle(self) -> None:
        """Look back at the last forward pass. Its tokens may serve others only if every layer has stored them, and a kernel
        has read them: that proves the pass causal, each key and value a function of the tokens up to its own."""
        plan = self.plan
        if plan is not None and plan.q_length and not plan.served(len(self.pool.geometry)):
            self.history = None

    def view(self) -> StepPlan:
        """A plan to read what is stored, with no new token in it."""
        self.check()
        if self.plan is None or self.plan.packed:
            self._settle()
            nothing = [np.empty(0, np.int64)] * len(self.groups)
            self.plan = StepPlan(self.groups, nothing, self.width, 0, real=self.real, kept=self.on_devices)
        return self.plan

    # ---------------------------------------------------------------------------------------------------------- rows

    def select(self, rows: ArrayLike) -> bool:
        """Row `i` becomes what row `rows[i]` was. Costs table entries only; the identity, and an exchange of rows that hold
        the same frames, changes nothing and returns False."""
        rows = np.asarray(rows, np.int64)
        if self._unchanged_by(rows):
            return False
        if not all([tables.select(rows) for tables in self.groups]):
            return False  # the identity, in all groups alike
        self.real = None if self.real is None else self.real[rows]
        self._moved()
        if self.history is not None:
            self.history.select(rows)
        return True

    def _unchanged_by(self, rows: Int64) -> bool:
        if len(rows) != self.tables.num_rows or not all(tables.unchanged_by(rows) for tables in self.groups):
            return False
        return self.real is None or bool((self.real[rows] == self.real).all())

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

    def fork(self, rows: Int64) -> CacheState:
        """A state of its own with these rows, which may repeat. Shares all frames with this one."""
        twin = CacheState(self.pool)
        with self.pool.manager.lock:
            twin.groups = [tables.fork(rows=rows) for tables in self.groups]
        twin.cross, twin.recording = self.cross, self.recording
        twin.width = self.width
        twin.real = None if self.real is None else self.real[rows]
        self._settle()
        twin.history = None if self.history is None else self.history.fork(rows)
        return twin

    @staticmethod
    def join(states: Sequence[CacheState]) -> CacheState:
        """A state of its own with the rows of all `states`, padded on the left to one width. Shares all frames with them."""
        pool, width = states[0].pool, max(state.width for state in states)
        twin = CacheState(pool)
        with pool.manager.lock:
            twin.groups = [BlockTables.join(parts) for parts in zip(*(state.groups for state in states))]
        twin.recording = any(state.recording for state in states)
        twin.width = width
        real = np.concatenate([state._at_width(width) for state in states])
        twin.real = None if real.all() else real
        for state in states:
            state._settle()
        histories = [state.history for state in states]
        known = [history for history, state in zip(histories, states) if history and history.known >= state.width]
        if len(known) == len(states) and len({history.root for history in known}) == 1:
            padding = [((0, 0), (width - state.width, 0)) for state in states]
            tokens = [
                np.pad(history.tokens()[:, : state.width], pad) for history, state, pad in zip(known, states, padding)
            ]
            twin.history = History(known[0].root, np.concatenate(tokens), width)
        return twin

    def _at_width(self, width: int) -> Bool:
        """Which positions hold tokens, bool [B, width], pads on the left."""
        real = np.ones((self.tables.num_rows, self.width), bool) if self.real is None else self.real
        return np.pad(real, ((0, 0), (width - self.width, 0)))

    def reset(self) -> None:
        """Give all blocks back and start over, as new."""
        self._announced = None
        self.free()
        self.on_devices.clear()

    def release(self) -> None:
        """Give all blocks back for good."""
        if not self.released:
            self.reset()
        self.released = True

    def row_keys(self) -> list[bytes]:
        """Per row, a value equal for two rows exactly when they hold the same frames and pads."""
        ids = list(zip(*(tables.block_ids() for tables in self.groups)))
        pads = [b""] * len(ids) if self.real is None else [row.tobytes() for row in self.real]
        return [repr((row, int(length))).encode() + pad for row, length, pad in zip(ids, self.tables.lengths, pads)]

    def free(self) -> None:
        """Give all blocks back, those that may serve a later prompt to the prefix index."""
        if self.interrupted:
            self.history = None  # it may not be that of the rows any more
        with self.pool.manager.lock, self.pool.manager, self:
            self.remember()
            self._drop_rows()

    def _drop_rows(self) -> None:
        self._let_go()
        for tables in self.groups:
            tables.free()
        self.width = 0
        self.real = None
        self.history = None
        self._moved()

    def _moved(self) -> None:
        self._settle()
        self.plan = None
        self.version += 1
