"""enable: paged generation for code that calls `generate` itself and has no place to pass a cache."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.generation import GenerationMixin

from .cache import PagedCache
from .compat import ASSISTANT_CACHES, CACHE_NAME
from .encoder_decoder import PagedEncoderDecoderCache
from .layout import LayerGeometry, layers_of, measure
from .patches import generate as generate_patch
from .patches.prefill import CACHE_NAMES
from .pool import PagePool


def enable(model: Any, pool: PagePool | None = None, **pool_kwargs: Any) -> Enabled:
    """Let every `model.generate` that gets no cache run with a fresh `PagedCache`, until `disable()` or the end of a
    `with` block:

        with hf_paged.enable(model, memory="4GiB"):
            pipe("...", num_return_sequences=8)

    The blocks of a call come back when it returns, or raises; with `return_dict_in_generate` they belong to the cache in
    the output and come back when nobody holds that any more. Calls with a cache of their own, with `cache_implementation`
    or with `use_cache=False` are left alone. The "paged" attention is in force while such a call runs, and only for the
    decoder: a forward pass outside of `generate`, as in training, is the model's own. Several threads may generate at once.

    Args:
        model: a transformers model that can `generate`, or a wrapper around one (DDP, PEFT, `torch.compile`).
        pool: where the blocks come from. By default a new one, `PagePool.for_model(model, **pool_kwargs)`, and another new
            one whenever the model has changed its device or dtype.

    The latest of several `enable` for one model serves its calls; they may be disabled in any order. A `model.generate` that
    somebody took hold of before the first `enable` is not reached. Where a model lets one inside generate, that runs paged.

    Raises `TypeError` where `model` cannot generate, or where both `pool` and `pool_kwargs` are given, `ValueError` for a pool
    of another model, and what `PagePool.for_model` raises, for a model that hf_paged does not support too.
    """
    return Enabled(_generating(model), pool, pool_kwargs)


class Enabled:
    """What `enable` returns: a context manager, and a handle to end it by hand."""

    def __init__(self, model: Any, pool: PagePool | None, pool_kwargs: dict[str, Any], outer: Enabled | None = None):
        if pool is not None and pool_kwargs:
            raise TypeError(
                f"pool and {', '.join(pool_kwargs)} were both given: give the pool, or what to make one from"
            )
        if pool is not None and not isinstance(pool, PagePool):
            raise TypeError(
                f"pool must be a PagePool, got {type(pool).__name__}: make one with PagePool.for_model(model)"
            )
        if not model._supports_default_dynamic_cache():
            raise ValueError(
                f"{type(model).__name__} makes its cache itself, so there is nothing to exchange for a paged one"
            )
        problem = _misfit(model, pool) if pool is not None and outer is None else None
        if problem:
            raise ValueError(
                f"this pool was made for another model, {type(model).__name__} has {problem}: make one with "
                "PagePool.for_model(model)"
            )
        self._pool_kwargs = pool_kwargs
        self._made_for: tuple[Any, ...] | None = None  # of a pool of our own: device and dtype that the model had
        self._pool = self._make_pool(model) if pool is None else pool
        problem = generate_patch.apply(type(model), _around, _preparing)
        if problem:
            raise RuntimeError(f"enable() does not work here: {problem}. Pass a PagedCache to generate instead")
        self._configs = _decoder_configs(model)
        self._model = weakref.ref(model)  # the registry must not keep a model alive
        self._outer = outer
        self._disabled = False
        self._told = False  # whether somebody was told that nothing runs paged
        self._inside = [Enabled(part, self._pool, {}, self) for part in _parts(model, self._pool)]
        with _lock:
            _enabled.setdefault(model, []).append(self)

    @property
    def pool(self) -> PagePool:
        """The pool that the calls draw on."""
        return self._pool

    def disable(self) -> None:
        """End it. Calls under way finish as they began. Safe to call twice."""
        self._disabled = True
        model = self._model()
        with _lock:
            handles = _enabled.get(model, []) if model is not None else []
            if self in handles:
                handles.remove(self)
            if model is not None and not handles:
                _enabled.pop(model, None)
        for part in self._inside:
            part.disable()

    def _make_pool(self, model: Any) -> PagePool:
        self._made_for = (model.device, model.dtype)
        return PagePool.for_model(model, **self._pool_kwargs)

    def _pool_for(self, model: Any) -> PagePool:
        if self._outer is not None:
            return self._outer._pool_for(self._outer._model())
        with _lock:
            if self._made_for not in (None, (model.device, model.dtype)):
                self._pool = self._make_pool(model)
            return self._pool

    def __enter__(self) -> Enabled:
        if self._disabled:
            raise RuntimeError("this handle was disabled: call hf_paged.enable(model) again")
        return self

    def __exit__(self, *exc: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        model = self._model()
        with _lock:
            on = model is not None and self in _enabled.get(model, [])
        return f"Enabled({type(model).__name__ if on else 'disabled'}, {self._pool!r})"


class _Call:
    """One run of `generate` on an enabled model."""

    def __init__(self, model: Any, handle: Enabled):
        self.model = model
        self.handle = handle
        self.caches: list[weakref.ref[PagedCache]] = []
        self.switched = False
        self.preparing = False
        self.reached = False  # whether it, or a call inside, came to where caches are made

    def exchange(self, config: Any, model_kwargs: dict[str, Any]) -> None:
        """Put paged caches in the place of those that `generate` has made in `model_kwargs`, under a generation config."""
        name = next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), CACHE_NAME)
        made = model_kwargs.get(name)
        if made is None:  # no cache is wanted, or it is left to the model to make it, as up to 5.9
            wanted = getattr(self.model.config, "use_cache", True) if config.use_cache is None else config.use_cache
            pair = wanted and self.model.config.is_encoder_decoder
            plain = wanted and not pair
        else:
            halves = (
                (made.self_attention_cache, made.cross_attention_cache) if isinstance(made, EncoderDecoderCache) else ()
            )
            pair = bool(halves) and all(type(half) is DynamicCache for half in halves)
            plain = type(made) is DynamicCache
        if pair:
            model_kwargs[name] = PagedEncoderDecoderCache(self._new_cache(config))
        elif plain:
            model_kwargs[name] = cache = self._new_cache(config)
            if config.is_assistant:  # whose forward passes are undone by more than one
                for layer in cache.layers:
                    getattr(layer, "activate_past_recording", lambda: None)()

    def _new_cache(self, config: Any) -> PagedCache:
        cache = PagedCache(self.handle._pool_for(self.model))
        # The cache of an assistant lives on in the arguments of its next call, and goes with the call that it assists.
        caller = _calls()[-2] if config.is_assistant and len(_calls()) > 1 else self
        caller.caches.append(weakref.ref(cache))
        return cache

    def switch_attention(self, config: Any, model_kwargs: dict[str, Any]) -> None:
        """Set the "paged" attention if the cache is paged, ours or the caller's."""
        cache = _cache_in(model_kwargs)
        cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if isinstance(cache, PagedCache) and not config.output_attentions and not self.switched:
            _switch(self.handle._configs)
            self.switched = True

    def end(self, failed: bool) -> None:
        """Put the attention back; give back the blocks of a run that failed, whose traceback may hold the cache for long."""
        if self.switched:
            _switch_back(self.handle._configs)
        if not (self.reached or failed or self.handle._told):
            self.handle._told = True
            warnings.warn(
                f"hf_paged: {type(self.model).__name__}.generate makes no cache where enable() could exchange it, so nothing "
                "runs paged; if a model inside does the work, enable that one",
                stacklevel=5,
            )
        for cache in (reference() for reference in self.caches if failed):
            if cache is not None:
                cache.release()


_lock = threading.RLock()
_enabled: weakref.WeakKeyDictionary[Any, list[Enabled]] = weakref.WeakKeyDictionary()  # the latest handle last
_switched: dict[int, tuple[Any, str, int]] = {}  # by id: a config, the implementation it came with, the calls under way
_of_thread = threading.local()


def _calls() -> list[_Call]:
    """The runs of `generate` under way in this thread, the innermost last."""
    if not hasattr(_of_thread, "calls"):
        _of_thread.calls = []
    calls: list[_Call] = _of_thread.calls
    return calls


@contextlib.contextmanager
def _around(model: Any) -> Iterator[None]:
    with _lock:
        handles = _enabled.get(model)
        handle = handles[-1] if handles else None
    if handle is None:
        yield
        return
    call, failed = _Call(model, handle), True
    _calls().append(call)
    try:
        yield
        failed = False
    finally:
        _calls().remove(call)
        call.end(failed)


@contextlib.contextmanager
def _preparing(model: Any, config: Any, model_kwargs: dict[str, Any]) -> Iterator[None]:
    call = _calls()[-1] if _calls() else None
    if call is None or call.model is not model or call.preparing:  # a class and its base class may both be patched
        yield
        return
    for outer in _calls():
        outer.reached = True
    unasked = ASSISTANT_CACHES if config.is_assistant else (None,)
    free = _cache_in(model_kwargs) is None and config.cache_implementation in unasked
    call.preparing = True
    try:
        yield
    finally:
        call.preparing = False
    if free:
        call.exchange(config, model_kwargs)
    call.switch_attention(config, model_kwargs)


def _cache_in(model_kwargs: dict[str, Any]) -> Any:
    return next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)


def _switch(configs: list[Any]) -> None:
    with _lock:
        for config in configs:
            _, own, calls = _switched.get(id(config), (config, config._attn_implementation_internal, 0))
            _switched[id(config)] = config, own, calls + 1
            config._attn_implementation_internal = "paged"


def _switch_back(configs: list[Any]) -> None:
    with _lock:
        for config in configs:
            _, own, calls = _switched.pop(id(config))
            if calls > 1:  # another thread, or another model with this config
                _switched[id(config)] = config, own, calls - 1
            else:
                config._attn_implementation_internal = own


def _generating(model: Any) -> Any:
    """The model itself, or the one inside a wrapper. Raises `TypeError` where there is none, or more than one."""
    if isinstance(model, GenerationMixin):
        return model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"enable() needs a transformers model, got {type(model).__name__}: pass its model")
    found: list[Any] = []
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, GenerationMixin) and id(module) not in inner:
            found.append(module)
            inner.update(map(id, module.modules()))
    if len(found) != 1:
        names = ", ".join(type(module).__name__ for module in found) or "none"
        raise TypeError(
            f"{type(model).__name__} holds {names} that can generate: call enable() with one model that can"
        )
    return found[0]


def _parts(model: Any, pool: PagePool) -> list[Any]:
    """The models inside one with a `generate` of its own that may do the work, as far as its pool fits them."""
    if type(model).generate is GenerationMixin.generate:
        return []
    inside = [module for module in model.modules() if module is not model and isinstance(module, GenerationMixin)]
    return [part for part in inside if part._supports_default_dynamic_cache() and not _misfit(part, pool)]


def _misfit(model: Any, pool: PagePool) -> str | None:
    """What a model has that a pool has not; None where they fit, or where the model does not tell. A pool may store less than
    a float32 model computes in, for autocast."""
    if model.device.type not in (pool.device.type, "meta"):
        return f"its weights on {model.device}, not on {pool.device}"
    if model.dtype not in (pool.dtype, torch.float32):
        return f"{model.dtype} weights, and the pool stores {pool.dtype}"
    try:
        measure(model)  # a config alone may tell other shapes
        layers = layers_of(model)
    except Exception:
        return None
    if len(layers) != len(pool.layers):
        return f"{len(layers)} layers, not {len(pool.layers)}"
    for index, (own, given) in enumerate(zip(layers, pool.layers)):
        if type(own) is not type(given) or (isinstance(own, LayerGeometry) and own[:3] != given[:3]):
            return f"{own} in layer {index}, not {given}"
    return None


def _decoder_configs(model: Any) -> list[Any]:
    """The configs that name the attention implementation of the decoder: its own, and those of the modules around it. Not
    those of encoders for images or audio, and none of a model whose code does not ask for the name."""
    configs: dict[int, Any] = {}
    fixed = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
                fixed.add(id(config))

    def decoder_part(config: Any) -> Any:
        text = config.get_text_config(decoder=True)
        return text if id(text) in configs else config  # of a flat encoder-decoder config, it is a copy

    own = decoder_part(model.config)
    return [config for key, config in configs.items() if key not in fixed and decoder_part(config) is own]
