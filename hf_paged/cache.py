"""PagedCache: what transformers talks to."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .blocks import BlockTables
from .compat import CROP_TO_LENGTH, LinearAttentionLayer, query_length
from .kernels import WRITERS
from .layout import LayerGeometry, OwnLayer
from .lazy import LazyKV
from .plan import StepPlan
from .pool import PagePool
from .state import CacheState, Width


class PagedLayer(CacheLayerMixin):
    """One attention layer of a `PagedCache`. Rows and blocks are the cache's; a layer knows how far it has written."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, state: CacheState, index: int):
        # Not super().__init__(): `keys`, `values` and `is_initialized` are properties here.
        self.state = state
        self.index = index
        self.width = 0

    @property
    def keys(self) -> LazyKV | None:
        """The keys, `[B, H_kv, width, D_k]`, gathered when read. None when empty."""
        return self._handles(self.state.view())[0] if self.width else None

    @property
    def values(self) -> LazyKV | None:
        """The values, `[B, H_kv, width, D_v]`, gathered when read. None when empty."""
        return self._handles(self.state.view())[1] if self.width else None

    @property
    def is_initialized(self) -> bool:
        return self.width > 0

    @property
    def batch_size(self) -> int:
        """Number of rows, -1 before the first forward pass."""
        return self.state.tables.num_rows or -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check the geometry and allocate this layer's storage ahead of time."""
        self.state.pool.storage_for(self.index, key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] of real tokens, and return handles for all of
        them, [B, H_kv, width, D]."""
        if key_states.requires_grad or value_states.requires_grad:
            raise RuntimeError(
                "a PagedCache is for inference: these keys require gradients. Call the model under torch.no_grad(), or "
                "without the cache for a training step"
            )
        state = self.state
        if torch.is_autocast_enabled(key_states.device.type):  # RoPE leaves float32 keys; attention would cast them
            key_states, value_states = key_states.to(state.pool.dtype), value_states.to(state.pool.dtype)
        storage = state.pool.storage_for(self.index, key_states, value_states)
        batch, q_length = key_states.shape[0], key_states.shape[2]
        plan = state.plan
        if self.width == state.width:  # the first layer of a forward pass
            plan = state.begin(batch, q_length)
        if plan is None or (self.width, batch, q_length) != (plan.start, plan.batch, plan.q_length):
            raise RuntimeError(
                f"layer {self.index} holds {self.width} positions and got {q_length} for {batch} rows, out of step with "
                f"the other layers ({state.width} positions, {state.tables.num_rows} rows). After a forward pass that "
                "failed half way, start over with cache.reset()"
            )
        self.width = plan.width
        plan.updates += 1
        on_device = plan.on(key_states.device, state.pool.group_of[self.index])
        if key_states.stride(-1) != 1 or value_states.stride(-1) != 1:
            key_states, value_states = key_states.contiguous(), value_states.contiguous()
        write = WRITERS[storage.kernel]
        write(storage.keys, storage.values, key_states, value_states, on_device.slots, on_device.source)
        return self._handles(plan)

    def _handles(self, plan: StepPlan) -> tuple[LazyKV, LazyKV]:
        storage = self.state.pool.storage(self.index)
        return LazyKV(self.state, plan, self.index, storage.keys), LazyKV(self.state, plan, self.index, storage.values)

    def get_seq_length(self) -> int:
        """The padded width that this layer has seen."""
        return self.width

    def get_max_length(self) -> int:
        """-1: no maximum but the pool's."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def get_mask_sizes(self, length: Any) -> tuple[int, int]:
        """Length and offset of the keys in the next forward pass."""
        return Width(self.width + query_length(length), self.state), 0

    @property
    def record_past(self) -> bool:
        """Whether tokens that leave a window are kept until the next `crop`."""
        return self.state.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.state.recording = value

    def activate_past_recording(self) -> None:
        """Keep tokens that leave a window until the next `crop`."""
        self.record_past = True

    def offload(self) -> None:
        raise RuntimeError("the blocks of a PagedCache are not offloaded: make a pool of fewer blocks instead")

    prefetch = offload

    def _refuse(self, *args: Any) -> None:
        raise RuntimeError("the layers of a PagedCache share their rows: call this on the cache, not on one layer")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse

    def __repr__(self) -> str:
        return f"PagedLayer({self.index})"


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):
    """A layer with keys and values, which are paged, and convolution or recurrent states, which are transformers' own."""

    is_compileable = False

    def __init__(self, state: CacheState, index: int, number_of_states: int):
        PagedLayer.__init__(self, state, index)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def forget(self) -> None:
        """Drop the states."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def copy_states(self, other: PagedHybridLayer) -> None:
        """Take over a copy of the states of `other`."""
        for name in vars(LinearAttentionLayer()):
            setattr(self, name, copy.deepcopy(getattr(other, name)))

    def __repr__(self) -> str:
        return f"PagedHybridLayer({self.index})"


class PagedCache(Cache):
    """A key/value cache in blocks of a `PagePool`, for `model.generate(..., past_key_values=PagedCache(pool))` (named
    `cache=` in newer releases of transformers) and for plain forward passes.

    Forks, beams and samples share blocks and copy one on write. Blocks come back on `release()`, at the end of a
    `with` block, or when nobody holds the cache any more.
    """

    def __init__(self, pool: PagePool):
        if not isinstance(pool, PagePool):
            raise TypeError(
                f"PagedCache needs a PagePool, got {type(pool).__name__}: make one with PagePool.for_model(model)"
            )
        self._attach(CacheState(pool))

    def _attach(self, state: CacheState) -> None:
        self._state = state
        layers = [_make_layer(state, index, spec) for index, spec in enumerate(state.pool.layers)]
        super().__init__(layers=layers)
        # Bound to the tables only: a finalizer that held the cache would keep it alive.
        self._finalizer = weakref.finalize(self, _abandon, state.groups)

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
        """Real tokens of every row, pads not counted."""
        lengths: list[int] = self._state.tables.lengths.tolist()
        return lengths

    @property
    def block_tables(self) -> list[list[int]]:
        """The block ids of every row, in the order of its tokens. Of a model whose layers look back differently far, those
        of its first group of layers."""
        return self._state.tables.block_ids()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `PagedLayer.update`."""
        if layer_idx >= len(self.layers):
            raise IndexError(
                f"the model uses layer {layer_idx}, but the pool was made for {len(self.layers)} layers: make the pool with "
                "PagePool.for_model(this_model)"
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    # ---------------------------------------------------------------------------------------------------------- rows

    def fork(self, repeats: int = 1) -> PagedCache:
        """A cache of its own whose rows, each `repeats` times in a row, share all blocks of this one. Copies nothing."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats} must be at least 1")
        twin = type(self).__new__(type(self))
        twin._attach(self._state.fork(repeats))
        for mine, theirs in zip(self._paged, twin._paged):
            theirs.width = mine.width
        rows = torch.arange(self._state.tables.num_rows).repeat_interleave(repeats)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PagedHybridLayer):
                twin.layers[index].copy_states(layer)
            elif not isinstance(layer, PagedLayer):
                twin.layers[index] = copy.deepcopy(layer)
        for layer in twin._stateful:
            layer.reorder_cache(rows)
        return twin

    def select(self, rows: Any) -> None:
        """Row `i` becomes what row `rows[i]` was. Rows may repeat, which forks them, or be left out, which frees them.
        Moves table entries, never keys or values; the identity does nothing."""
        if isinstance(rows, Tensor):
            rows = rows.detach().cpu().numpy()
        rows = np.asarray(rows)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        rows = rows.reshape(-1)
        if self._state.select(rows):
            for layer in self._stateful:
                layer.reorder_cache(torch.from_numpy(rows.astype(np.int64)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in a row."""
        self.select(np.repeat(np.arange(self._state.tables.num_rows), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order."""
        self.select(indices)

    # --------------------------------------------------------------------------------------------------------- tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` positions of every row; 0 removes nothing, more than there are all.

        Under transformers up to 5.17 a number >= 0 is the number of positions to keep, as it is for every cache there.
        """
        if tokens_to_remove >= 0 and CROP_TO_LENGTH:
            tokens_to_remove = min(tokens_to_remove - self._state.width, 0)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not supported: pass a negative number, -n removes the last n positions"
            )
        for layer in self._stateful:
            layer.crop(int(tokens_to_remove))
        self.rewind(self._state.width + int(tokens_to_remove))

    def rewind(self, width: int) -> None:
        """Keep the first `width` padded positions, at most what there are, also after a forward pass that failed half way.
        Only the paged layers."""
        self._state.crop(width)
        for layer in self._paged:
            layer.width = min(layer.width, self._state.width)

    def reset(self) -> None:
        """Give all blocks back and start over with any batch size, also after a failed forward pass."""
        self._state.reset()
        self._empty_layers()

    def _empty_layers(self) -> None:
        for index, spec in enumerate(self.pool.layers):
            if isinstance(spec, LayerGeometry):
                self.layers[index].width = 0
                if spec.states:
                    self.layers[index].forget()
            else:
                self.layers[index] = spec.make()

    def release(self) -> None:
        """Give all blocks back for good. Safe to call twice."""
        self._state.release()
        self._empty_layers()

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *exc: object) -> None:
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
        size = f"{state.tables.num_rows} rows, width {state.width}, {len(self._paged)} paged layers"
        return f"PagedCache({size}{f', not paged: {own}' if own else ''}, {state.pool!r})"


def _make_layer(state: CacheState, index: int, spec: LayerGeometry | OwnLayer) -> Any:
    if isinstance(spec, OwnLayer):
        return spec.make()
    return PagedHybridLayer(state, index, spec.states) if spec.states else PagedLayer(state, index)


def _abandon(groups: list[BlockTables]) -> None:
    for tables in groups:
        tables.manager.abandon(tables)
