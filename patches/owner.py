"""One `generate` at a time on one cache: whoever comes in between is refused, before anything has changed.

Wraps       `transformers.generation.GenerationMixin.generate`, outside of what else wraps it here
Checked     transformers 5.0.0, 5.10.4, 5.17.0, 5.24.0
Acts        only where the cache is a `PagedCache`, or an `EncoderDecoderCache` that has one
Why         a cache alone sees forward passes, and between two of them it can't tell that another thread's call isn't over
Delete      when a cache is told where a call to `generate` begins and ends
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from transformers import EncoderDecoderCache
from transformers.generation import GenerationMixin

from hf_paged.cache import PagedCache
from hf_paged.rows import CACHE_NAMES

TITLE = "refusal of a second thread"


def apply() -> str | None:
    """Install the patch. Returns why not, where that is so."""
    upstream = GenerationMixin.generate
    if getattr(upstream, "_hf_paged_owner", False):
        return None

    @functools.wraps(upstream)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if not isinstance(cache, PagedCache):
            return upstream(self, *args, **kwargs)
        state, thread = cache._state, threading.get_ident()
        inside = state.thread == thread  # of another `generate` of this thread
        try:
            state.claim()
            return upstream(self, *args, **kwargs)
        finally:  # without a call, so no interrupt comes in between
            if not inside and state.thread == thread:
                state.thread = None
                if state.plan is not None:
                    state.plan.thread = None

    generate._hf_paged_owner = True  # type: ignore[attr-defined]
    GenerationMixin.generate = generate
    return None
