"""The layers of a `PagedCache`: what transformers' models talk to, layer by layer."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .compat import LinearAttentionLayer, autocast_dtype, query_length
from .kernels import WRITERS
from .layout import LayerGeometry, OwnLayer
from .lazy import LazyKV
from .plan import StepPlan
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
        if autocast_dtype(key_states.device):  # RoPE leaves float32 keys; attention would cast them
            key_states, value_states = key_states.to(state.pool.dtype), value_states.to(state.pool.dtype)
        storage = state.pool.storage_for(self.index, key_states, value_states)
        batch, q_length = key_states.shape[0], key_states.shape[2]
        plan = state.plan
        if self.width == state.width:  # the first layer of a forward pass
            plan = state.begin(batch, q_length)
        else:
            state.check_thread()
        if plan is None or (self.width, batch, q_length) != (plan.start, plan.batch, plan.q_length):
            raise RuntimeError(
                f"layer {self.index} holds {self.width} positions and got {q_length} for {batch} rows, out of step with "
                f"the other layers ({state.width} positions, {state.tables.num_rows} rows). After a forward pass that "
                "failed half way, start over with cache.reset()"
            )
        self.width = plan.width
        plan.written.add(self.index)
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
        """Length and offset of the keys in the next forward pass. Models ask before their first layer, so that is where the
        blocks are reserved: see `CacheState.reserve`."""
        q_length = query_length(length)
        self.state.reserve(q_length)
        return Width(self.width + q_length, self.state), 0

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


class PagedBesideLayer(PagedLayer):
    """A layer whose keys and values are paged, and what else it keeps of every token, such as the keys of an indexer, is
    transformers' own: in a layer of that kind without keys and values, which answers to all that this one does not know."""

    def __init__(self, state: CacheState, index: int, own: OwnLayer):
        super().__init__(state, index)
        self._make, self._own = own.make, own.make()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a copy is being made, before there is an `_own`
            raise AttributeError(name)
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get("_own")
        if own is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(own, name, value)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder what is not paged."""
        self._own.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Shorten what is not paged."""
        if self.width + tokens_to_remove <= 0:
            self.forget()
        else:
            self._own.crop(tokens_to_remove)

    def forget(self) -> None:
        """Drop what is not paged."""
        self._own = self._make()

    def forget_positions(self) -> None:
        """Drop the positions of a pass that has not begun. Models note them before they ask for the sizes of masks."""
        positions = getattr(self._own, "indexer_position_ids", None)  # [3, B, S]
        if positions is not None:
            self._own.indexer_position_ids = positions[..., : self.width]

    def copy_states(self, other: PagedBesideLayer) -> None:
        """Take over a copy of what `other` keeps beside its keys and values."""
        self._own = copy.deepcopy(other._own)

    def __repr__(self) -> str:
        return f"PagedBesideLayer({self.index}, beside {self._own!r})"


def make_layer(state: CacheState, index: int, spec: LayerGeometry | OwnLayer) -> Any:
    if isinstance(spec, OwnLayer):
        return spec.make()
    if spec.beside is not None:
        return PagedBesideLayer(state, index, spec.beside)
    return PagedHybridLayer(state, index, spec.states) if spec.states else PagedLayer(state, index)


def rows_of(layer: Any) -> int:
    """Rows that one of transformers' own layers holds, 0 if it is empty."""
    states = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        kept = getattr(layer, name, None)
        states += kept.values() if isinstance(kept, dict) else [kept]
    return next((len(state) for state in states if isinstance(state, Tensor) and state.numel()), 0)
