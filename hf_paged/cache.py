"""PagedCache: what transformers talks to."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .blocks import Int64, PoolExhausted
from .compat import CROP_TO_LENGTH, CROP_ZERO_KEEPS_ALL
from .layers import PagedBesideLayer, PagedHybridLayer, PagedLayer, make_layer, rows_of
from .layout import LayerGeometry
from .lazy import LazyKV
from .plan import Bool
from .pool import PagePool
from .prefix import Match
from .state import CacheState
from .tables import BlockTables


class PagedCache(Cache):
    """A key/value cache in blocks of a `PagePool`, for `model.generate(..., past_key_values=PagedCache(pool))` (named
    `cache=` in newer releases of transformers) and for plain forward passes.

    Forks, beams and samples share blocks and copy one on write. Blocks come back on `release()`, at the end of a
    `with` block, or when nobody holds the cache any more.

    Args:
        pool: where the blocks come from.
        salt: caches of different salts find no prefixes of one another, which keeps tenants apart.

    Raises `TypeError` for anything but a `PagePool`, and `RuntimeError` in a process that was forked from the pool's.
    """

    def __init__(self, pool: PagePool, *, salt: str = ""):
        if not isinstance(pool, PagePool):
            raise TypeError(
                f"PagedCache needs a PagePool, got {type(pool).__name__}: make one with PagePool.for_model(model)"
            )
        pool.check_process()
        self._attach(CacheState(pool), salt)

    def _attach(self, state: CacheState, salt: str) -> None:
        self._state = state
        self.salt = salt
        self._cross: PagedCache | None = None
        self._owner: weakref.ref[PagedCache] | None = None  # of a cross-attention half: the self-attention half
        layers = [make_layer(state, index, spec) for index, spec in enumerate(state.pool.layers)]
        super().__init__(layers=layers)
        state.ahead = BlockTables(state.pool.manager) if self._stateful else None
        # Bound to the state only: a finalizer that held the cache would keep it alive.
        self._finalizer = weakref.finalize(self, state.pool.manager.abandon, state)

    @property
    def _paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def _stateful(self) -> list[Any]:
        """The layers that keep, alone or beside their keys and values, what is not paged."""
        return [layer for layer in self.layers if type(layer) is not PagedLayer]

    @property
    def pool(self) -> PagePool:
        """The pool whose blocks this cache uses."""
        return self._state.pool

    @property
    def lengths(self) -> list[int]:
        """Real tokens of every row, pads not counted. Empty where no layer is paged."""
        self._state.check_released()
        lengths: list[int] = self._state.tables.lengths.tolist()
        return lengths

    @property
    def block_tables(self) -> list[list[int]]:
        """The block ids of every row, in the order of its tokens. Of a model whose layers look back differently far, those
        of its first group of layers."""
        self._state.check_released()
        return self._state.tables.block_ids()

    @property
    def num_rows(self) -> int:
        """Number of rows, 0 before the first forward pass."""
        rows = self._state.tables.num_rows or next((rows for rows in map(rows_of, self.layers) if rows), 0)
        return rows or (self._cross.num_rows if self._cross is not None else 0)

    @property
    def batch_size(self) -> int:
        """Number of rows, -1 before the first forward pass."""
        return self.num_rows or -1

    @property
    def is_compileable(self) -> bool:
        """False: `generate` must not compile the forward pass, also where no layer is paged."""
        return False

    @property
    def cross_attention(self) -> PagedCache | None:
        """The keys and values of the encoder, beside those of an encoder-decoder model's decoder in this cache. None where
        no such model has been run. See `PagedEncoderDecoderCache`."""
        return self._cross

    def own(self, cross: PagedCache) -> None:
        """Make `cross` the cross-attention half of this cache. Raises `ValueError` for a cache that is its own half."""
        if cross is self:
            raise ValueError("self-attention and cross-attention need a PagedCache each, got one for both")
        self._cross, cross._owner = cross, weakref.ref(self)
        cross._state.cross = True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `PagedLayer.update`."""
        if layer_idx >= len(self.layers):
            raise IndexError(
                f"the model uses layer {layer_idx}, but the pool was made for {len(self.layers)} layers: make the pool with "
                "PagePool.for_model(this_model)"
            )
        try:
            return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        except PoolExhausted:
            if not self._state.width:
                self._empty_layers()  # of states that layers before this one have noted already
            owner = self._owner and self._owner()
            if owner and owner._state.plan:  # its layer has just written: undo that too
                owner.rewind(owner._state.plan.start)
            raise

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """See `PagedLayer.get_mask_sizes`."""
        try:
            return super().get_mask_sizes(*args, **kwargs)
        except PoolExhausted:
            for layer in self.layers:
                if isinstance(layer, PagedBesideLayer):
                    layer.forget_positions()
            raise

    # ---------------------------------------------------------------------------------------------------------- rows

    @property
    def attention_mask(self) -> Tensor:
        """Which positions hold tokens, 1, and which are pads, 0: int64 [B, width], on the CPU whatever device
        the model is on. With ones for the new tokens behind it, the mask of the next forward pass."""
        self._state.check_released()
        return torch.from_numpy(self._state._at_width(self._state.width).astype(np.int64))

    def fork(self, repeats: int = 1, rows: Any = None) -> PagedCache:
        """A cache of its own with each of `rows` (all by default) `repeats` times in a row. Shares all blocks with this one
        and copies nothing."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats} must be at least 1")
        self._state.check()
        chosen = np.arange(self.num_rows) if rows is None else _row_numbers(rows, self.num_rows)
        chosen = np.repeat(chosen, repeats)
        twin = type(self).__new__(type(self))
        twin._attach(self._state.fork(chosen if self._paged else chosen[:0]), self.salt)
        for mine, theirs in zip(self._paged, twin._paged):
            theirs.width = mine.width
        for index, layer in enumerate(self.layers):
            if isinstance(layer, (PagedHybridLayer, PagedBesideLayer)):
                twin.layers[index].copy_states(layer)
            elif not isinstance(layer, PagedLayer):
                twin.layers[index] = copy.deepcopy(layer)
        for layer in twin._stateful:
            layer.reorder_cache(torch.from_numpy(chosen))
        if self._cross is not None:
            twin.own(self._cross.fork(rows=chosen))
        return twin

    @classmethod
    def join(cls, caches: Sequence[PagedCache]) -> PagedCache:
        """One cache with the rows of all `caches`, in that order, padded on the left to the longest. It shares all blocks
        with them and copies nothing; they stay as they are.

        Raises `ValueError` where they have not one pool and salt, or none is given, and `RuntimeError` where a cache holds
        other states than the keys and values of a decoder, or a forward pass failed half way.
        """
        if not caches or len({(id(cache.pool), cache.salt) for cache in caches}) > 1:
            raise ValueError(f"join needs caches of one pool and one salt, got {list(caches)}")
        for cache in caches:
            cache._state.check()
        if caches[0]._stateful or any(cache.cross_attention is not None for cache in caches):
            own = caches[0]._stateful or "cross-attention"
            raise RuntimeError(f"caches that hold more than the keys and values of a decoder cannot be joined: {own}")
        for cache in caches:
            if any(layer.width != cache._state.width for layer in cache._paged):
                raise RuntimeError("a forward pass of one of the caches to join failed half way: reset that cache")
        twin = cls.__new__(cls)
        twin._attach(CacheState.join([cache._state for cache in caches]), caches[0].salt)
        for layer in twin._paged:
            layer.width = twin._state.width
        return twin

    def select(self, rows: Any) -> None:
        """Row `i` becomes what row `rows[i]` was. Rows may repeat, which forks them, or be left out, which frees them.
        Moves table entries, never keys or values; the identity does nothing."""
        self._state.check()
        chosen = _row_numbers(rows, self.num_rows)
        with self._state:
            cross = self._cross
            if cross is not None and cross.num_rows:
                cross.select(chosen)
                if not self._state.tables.num_rows:
                    return  # cropped to nothing, while the encoder's keys stay
            identity = np.array_equal(chosen, np.arange(self.num_rows))
            if self._paged:
                self._state.select(chosen)
            for layer in [] if identity else self._stateful:
                layer.reorder_cache(torch.from_numpy(chosen))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in a row."""
        self.select(np.repeat(np.arange(self.num_rows), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order."""
        self.select(indices)

    # --------------------------------------------------------------------------------------------------------- tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` positions of every row; 0 removes nothing, more than there are all.

        Under transformers up to 5.17 a number > 0 is the number of positions to keep, and in its older releases 0 as well, as
        for every cache there.
        """
        self._state.check()
        if (tokens_to_remove > 0 and CROP_TO_LENGTH) or (tokens_to_remove == 0 and not CROP_ZERO_KEEPS_ALL):
            tokens_to_remove = min(tokens_to_remove - self._state.width, 0)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not supported: pass a negative number, -n removes the last n positions"
            )
        with self._state:
            for layer in self._stateful:
                layer.crop(int(tokens_to_remove))
            self._rewind(self._state.width + int(tokens_to_remove))

    def adopt(self, matches: list[Match], lengths: Int64, width: int, real: Bool | None) -> None:
        """See `CacheState.adopt`."""
        self._state.check()
        with self._state:
            self._state.adopt(matches, lengths, width, real)
            for layer in self._paged:
                layer.width = width

    def rewind(self, width: int) -> None:
        """Keep the first `width` padded positions, at most what there are, also after a forward pass that failed half way.
        Only the paged layers."""
        self._state.check(whole=width > 0)
        with self._state:
            self._rewind(width)

    def _rewind(self, width: int) -> None:
        self._state.crop(width)
        for layer in self._paged:
            layer.width = min(layer.width, self._state.width)

    def reset(self) -> None:
        """Give all blocks back and start over with any batch size, also after a failed forward pass or an interrupt."""
        self._state.check(whole=False)
        self._state.reset()
        self._empty_layers()
        if self._cross is not None:
            self._cross.reset()

    def _empty_layers(self) -> None:
        for index, spec in enumerate(self.pool.layers):
            if isinstance(spec, LayerGeometry):
                self.layers[index].width = 0
                if isinstance(self.layers[index], (PagedHybridLayer, PagedBesideLayer)):
                    self.layers[index].forget()
            else:
                self.layers[index] = spec.make()

    def release(self) -> None:
        """Give all blocks back for good. Safe to call twice, and in a forked process, where it does nothing. Raises
        `RuntimeError` while a `generate` in another thread runs on this cache."""
        if self.pool.forked:
            return
        self._state.check_thread()
        self._state.release()
        self._empty_layers()
        if self._cross is not None:
            self._cross.release()

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None or not self._state.elsewhere:  # an error on its way goes first: the blocks come back later
            self.release()

    # -------------------------------------------------------------------------------------------------------- objects

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.fork()

    def __copy__(self) -> PagedCache:
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PagedCache cannot be pickled: its keys and values live in a pool of this process. Save "
            "[(layer.keys.dense(), layer.values.dense()) for layer in cache.layers] instead"
        )

    def __iter__(self) -> Iterator[tuple[LazyKV | None, LazyKV | None]]:
        """Keys and values layer by layer, like a DynamicCache."""
        for layer in self.layers:
            yield getattr(layer, "keys", None), getattr(layer, "values", None)

    def __repr__(self) -> str:
        state = self._state
        if state.released:
            return "PagedCache(released)"
        own = ", ".join(f"{i}: {layer!r}" for i, layer in enumerate(self.layers) if not isinstance(layer, PagedLayer))
        size = f"{max(self.batch_size, 0)} rows, width {state.width}, {len(self._paged)} paged layers"
        return f"PagedCache({size}{f', not paged: {own}' if own else ''}, {state.pool!r})"


def _row_numbers(rows: Any, num_rows: int) -> Int64:
    """Row numbers, int64 [n], from whole numbers in any form, or from one flag for each of `num_rows` rows."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu().numpy()
    given = np.asarray(rows)
    if given.dtype == bool:
        if given.shape != (num_rows,):
            raise ValueError(
                f"rows={given.tolist()} are flags, and the cache has {num_rows} rows: give one flag per row, or row numbers"
            )
        given = np.flatnonzero(given)
    elif given.size and given.dtype.kind not in "iu":
        raise TypeError(f"rows={given.tolist()} must be whole numbers, rows of the cache, got {given.dtype}")
    return given.reshape(-1).astype(np.int64)
