"""Assisted decoding and prompt lookup that go on from a filled cache, and leave it as it was found.

Wraps       `transformers.generation.GenerationMixin._assisted_decoding`
Checked     transformers 5.0.0, 5.10.4, 5.17.0, 5.24.0
Acts        only where the cache is a `PagedCache`, or the halves of an encoder-decoder model's
Why         upstream feeds the whole sequence in its first step, also when part of it is cached, so those tokens would stand
            in the cache twice (not in 5.0); no hook lies before that step, which `history` cuts. Nor does one where it could
            be seen that ids or weights aren't those of the cached tokens. And it makes the cache keep what leaves
            a window, for its rollbacks, but never lets go of it: a later turn would grow without end
Delete      when upstream slices its first step as it does in `_prefill`, and ends the recording as `DeferredStopCheck` does
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

from hf_paged import reuse
from hf_paged.compat import CUTS_BY_POSITION
from hf_paged.rows import draws_at_random, is_instrumented

from .prefill import cached_positions, covers_everything, leave_one_token, paged_in

TITLE = "assisted decoding from a filled cache"


def apply() -> str | None:
    """Install the patch. Returns why not, where that is so."""
    upstream = getattr(GenerationMixin, "_assisted_decoding", None)
    if upstream is None:
        return "GenerationMixin._assisted_decoding does not exist in this release of transformers"
    if getattr(upstream, "_hf_paged", False):
        return None
    named = set(inspect.signature(upstream).parameters)

    @functools.wraps(upstream)
    def _assisted_decoding(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = paged_in(kwargs)
        if cache is None:
            return upstream(self, input_ids, *args, **kwargs)
        state = cache._state
        recording = state.recording
        if cached_positions(cache):
            model_kwargs = {name: value for name, value in kwargs.items() if name not in named}
            whole = covers_everything(input_ids, kwargs["generation_config"], model_kwargs)
            leave_one_token(input_ids, whole, model_kwargs, cache)
            rows_as_given = is_instrumented(self) or draws_at_random(self)
            prompt = None if rows_as_given else reuse.read(self, input_ids, whole, model_kwargs, cache)
            state.history = None if prompt is None else prompt.history
            state.given_all = whole and not CUTS_BY_POSITION
        try:
            return upstream(self, input_ids, *args, **kwargs)
        finally:
            state.recording, state.given_all = recording, False

    _assisted_decoding._hf_paged = True  # type: ignore[attr-defined]
    GenerationMixin._assisted_decoding = _assisted_decoding
    return None
