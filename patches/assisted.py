"""Assisted decoding and prompt lookup that go on from a filled cache, and leave it as it was found.

Wraps       `transformers.generation.GenerationMixin._assisted_decoding`
Checked     transformers 5.10.4, 5.17.0, 5.24.0; not needed in 5.0.0, and not installed there
Acts        only where the cache is a `PagedCache`, or the halves of an encoder-decoder model's
Why         upstream feeds the whole sequence in its first step, also when part of it is cached, so those tokens would stand
            in the cache twice; no hook lies before that step. And it makes the cache keep what leaves a window, for its
            rollbacks, but never lets go of it: a later turn would grow without end
Delete      when upstream slices its first step as it does in `_prefill`, and ends the recording as `DeferredStopCheck` does
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

from hf_paged.cache import PagedCache

from .prefill import cached_positions, covers_everything, leave_one_token, paged_in

TITLE = "assisted decoding from a filled cache"


def apply() -> str | None:
    """Install the patch. Returns why not, where that is so."""
    upstream = getattr(GenerationMixin, "_assisted_decoding", None)
    if upstream is None:
        return "GenerationMixin._assisted_decoding does not exist in this release of transformers"
    if getattr(upstream, "_hf_paged", False):
        return None
    if "next_sequence_length" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
        return None  # older releases slice every step by position

    @functools.wraps(upstream)
    def _assisted_decoding(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = paged_in(kwargs)
        if cache is None:
            return upstream(self, input_ids, *args, **kwargs)
        recording = cache._state.recording
        try:
            with _only_new_tokens(self, input_ids, kwargs, cache):
                return upstream(self, input_ids, *args, **kwargs)
        finally:
            cache._state.recording = recording

    _assisted_decoding._hf_paged = True  # type: ignore[attr-defined]
    GenerationMixin._assisted_decoding = _assisted_decoding
    return None


@contextlib.contextmanager
def _only_new_tokens(model: Any, input_ids: Tensor, kwargs: dict[str, Any], cache: PagedCache) -> Iterator[None]:
    """Feed the first step what is not cached, where `input_ids` are the whole sequence."""
    if not cached_positions(cache):
        yield
        return
    generation_config = kwargs["generation_config"]
    leave_one_token(input_ids, generation_config, kwargs, cache)
    whole, prepare = covers_everything(input_ids, generation_config, kwargs), model.prepare_inputs_for_generation

    @functools.wraps(prepare)  # `generate` reads its signature
    def sliced(input_ids: Tensor, next_sequence_length: int | None = None, **inputs: Any) -> Any:
        if whole and next_sequence_length is None and paged_in(inputs) is cache:
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return prepare(input_ids, next_sequence_length=next_sequence_length, **inputs)

    model.prepare_inputs_for_generation = sliced
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation
