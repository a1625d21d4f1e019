"""Tell a cache which tokens `generate` feeds, so that what it generated can be found by a later prompt too; and feed a step
of assisted decoding no token that is cached.

Wraps       `transformers.generation.GenerationMixin.prepare_inputs_for_generation`
Checked     transformers 5.0.0, 5.10.4, 5.17.0, 5.24.0
Acts        only where the cache is a `PagedCache` whose prompt is known, or in the first step of assisted decoding
Why         a cache sees keys and values, never the ids of the tokens that they belong to; for the second, see `assisted`
Delete      when ids, or a hash of them, reach the cache
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

from .prefill import paged_in

TITLE = "finding generated tokens by later prompts"


def apply() -> str | None:
    """Install the patch. Returns why not, where that is so."""
    upstream = getattr(GenerationMixin, "prepare_inputs_for_generation", None)
    if upstream is None:
        return "GenerationMixin.prepare_inputs_for_generation does not exist in this release of transformers"
    if getattr(upstream, "_hf_paged", False):
        return None

    @functools.wraps(upstream)
    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = paged_in(kwargs)
        if cache is None:
            return upstream(self, input_ids, *args, **kwargs)
        if cache._state.given_all and not args and kwargs.get("next_sequence_length") is None:
            kwargs["next_sequence_length"] = input_ids.shape[1] - cache.get_seq_length()
        inputs = upstream(self, input_ids, *args, **kwargs)
        if input_ids is not None:
            cache._state.follow(input_ids, inputs.get("input_ids"))
        return inputs

    prepare_inputs_for_generation._hf_paged = True  # type: ignore[attr-defined]
    GenerationMixin.prepare_inputs_for_generation = prepare_inputs_for_generation
    return None
