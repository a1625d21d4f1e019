"""Encoder-decoder models take a `PagedCache` in `generate`, as others do.

Wraps       `transformers.generation.GenerationMixin.generate`
Checked     transformers 5.0.0, 5.10.4, 5.17.0, 5.24.0
Acts        only where the model is an encoder-decoder one and the cache a `PagedCache`, or an `EncoderDecoderCache` of two
Why         such models ask for an `EncoderDecoderCache`, and `generate` leaves a cache that it is given as it is
Delete      when `generate` pairs a given cache by itself
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import EncoderDecoderCache
from transformers.generation import GenerationMixin

from hf_paged.cache import PagedCache
from hf_paged.encoder_decoder import PagedEncoderDecoderCache
from hf_paged.pool import PagePool
from hf_paged.rows import CACHE_NAMES

TITLE = "PagedCache for encoder-decoder models"


def apply() -> str | None:
    """Install the patch. Returns why not, where that is so."""
    upstream = GenerationMixin.generate
    if getattr(upstream, "_hf_paged", False):
        return None
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(upstream).parameters.values()):
        return "GenerationMixin.generate takes no keyword arguments for the model any more"

    @functools.wraps(upstream)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [name for name in CACHE_NAMES if kwargs.get(name) is not None]
        refuse_misused([kwargs[name] for name in given])
        name = given[0] if given else None
        pair = paired(kwargs[name]) if name and self.config.is_encoder_decoder else None
        if pair is None or name is None:
            return upstream(self, *args, **kwargs)
        kwargs[name] = pair
        if type(self)._prepare_cache_for_generation is GenerationMixin._prepare_cache_for_generation:
            return upstream(self, *args, **kwargs)
        # T5Gemma puts a new cache in place of an empty cross-attention half, lest it slides. Ours does not.
        self._prepare_cache_for_generation = functools.partial(GenerationMixin._prepare_cache_for_generation, self)
        try:
            return upstream(self, *args, **kwargs)
        finally:
            vars(self).pop("_prepare_cache_for_generation", None)  # another thread may have been first

    generate._hf_paged = True  # type: ignore[attr-defined]
    GenerationMixin.generate = generate
    return None


def refuse_misused(caches: list[Any]) -> None:
    """Raise for what stands under the names of a cache in a call of `generate` and cannot be meant: what a `PagedCache` is made
    of or from (`TypeError`), or two of which one would be ignored (`ValueError`)."""
    for cache in caches:
        if isinstance(cache, PagePool) or (isinstance(cache, type) and issubclass(cache, PagedCache)):
            what = "the pool" if isinstance(cache, PagePool) else "the class"
            raise TypeError(f"generate needs a PagedCache, got {what}: pass PagedCache(pool)")
    if any(cache is not caches[0] for cache in caches) and any(paired(cache) for cache in caches):
        raise ValueError(f"{' and '.join(CACHE_NAMES)} name two caches of one call: pass one of them")


def paired(cache: Any) -> PagedEncoderDecoderCache | None:
    """The two halves that a `PagedCache`, or a pair of them, stands for. None for any other cache."""
    if isinstance(cache, PagedEncoderDecoderCache):
        return cache
    if isinstance(cache, PagedCache):
        return PagedEncoderDecoderCache(cache)
    if isinstance(cache, EncoderDecoderCache):
        halves = cache.self_attention_cache, cache.cross_attention_cache
        if all(isinstance(half, PagedCache) for half in halves):
            return PagedEncoderDecoderCache(*halves)
    return None
