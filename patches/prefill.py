"""Compute a prompt once, however many rows ask for it, take over what the pool still holds of it, and never feed a cached
prompt again.

Wraps       `transformers.generation.GenerationMixin._prefill`
Checked     transformers 5.0.0, 5.10.4, 5.17.0, 5.24.0
Acts        only where the cache is a `PagedCache`, or the halves of an encoder-decoder model's
Why         `generate` repeats the rows for beams and samples before the prefill, and callers repeat rows themselves; no
            hook lies between the repetition and the forward pass. And where the cache already holds the whole prompt,
            upstream takes the last 0 tokens of it, `ids[:, -0:]`, which is all of them
Delete      when `generate` expands its inputs after the prefill, and slices a cached prompt right
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.generation import GenerationMixin

from hf_paged import packing, reuse
from hf_paged.cache import PagedCache
from hf_paged.compat import CHUNKS_GO_ON, CUTS_BY_POSITION, after_chunks, only_states, positions_in_modules
from hf_paged.encoder_decoder import PagedEncoderDecoderCache
from hf_paged.layout import STATE_IN_MODULES
from hf_paged.rows import (
    CACHE_NAMES,
    ENCODED,
    ROW_WISE,
    chosen_rows,
    draws_at_random,
    equal_rows,
    is_instrumented,
    repeat_rows,
)
from hf_paged.state import Packing

TITLE = "sharing of equal prompts"
PARAMETERS = ["self", "input_ids", "generation_config", "model_kwargs"]
MIN_CHUNK = 256  # tokens; a smaller chunk would cost the rest of the model more than it saves


def apply() -> str | None:
    """Install the patch. Returns why not, where that is so."""
    upstream = getattr(GenerationMixin, "_prefill", None)
    if upstream is None:
        return "GenerationMixin._prefill does not exist in this release of transformers"
    if getattr(upstream, "_hf_paged", False):
        return None
    parameters = list(inspect.signature(upstream).parameters)
    if parameters[: len(PARAMETERS)] != PARAMETERS:
        return f"GenerationMixin._prefill has unknown parameters {parameters}"
    wrapper = _wrap(upstream)
    wrapper._hf_paged = True  # type: ignore[attr-defined]
    GenerationMixin._prefill = wrapper
    return None


def paged_in(arguments: dict[str, Any]) -> PagedCache | None:
    """The `PagedCache` among the arguments of a call; of an encoder-decoder model, the self-attention half. None if there
    is none."""
    cache = _cache_in(arguments)
    if isinstance(cache, PagedEncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache if isinstance(cache, PagedCache) else None


def _cache_in(named: Any) -> Any:
    """The cache among arguments or outputs, None if there is none."""
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)


def cached_positions(cache: PagedCache) -> int:
    """Padded positions that the cache holds; 0 where its layers keep states only, which tell no number."""
    return 0 if only_states(cache) else cache.get_seq_length()


def _wrap(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def _prefill(
        self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = paged_in(model_kwargs)
        if cache is None:
            return upstream(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        if model_kwargs.get("use_cache") is False:
            raise ValueError("generate got a PagedCache and use_cache=False: leave one of the two away")
        whole = covers_everything(input_ids, generation_config, model_kwargs)
        leave_one_token(input_ids, whole, model_kwargs, cache)
        state, instrumented = cache._state, is_instrumented(self)
        rows_as_given = instrumented or draws_at_random(self)

        def run(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
            fresh, empty = not cached_positions(cache), not cache.num_rows
            prompt = None if rows_as_given else reuse.read(self, input_ids, whole, model_kwargs, cache)
            new_ids = input_ids[:, cached_positions(cache) :] if whole else input_ids
            if prompt is not None and fresh:
                reuse.compute_shared(self, prompt, generation_config, model_kwargs, cache)
            state.history, state.prefilling = None if prompt is None else prompt.history, True
            try:
                outputs, failure = None, None
                if not rows_as_given and generation_config.prefill_chunk_size is None and cache.cross_attention is None:
                    try:
                        outputs = _run_packed(self, new_ids, model_kwargs, cache, prompt)
                    except packing.Unpackable as error:
                        failure = str(error)
                if outputs is None:
                    if prompt is not None and fresh:
                        reuse.adopt_at_common_width(prompt, cache)
                    with _chunks(self, new_ids.shape[1], generation_config, model_kwargs, cache, instrumented):
                        outputs = upstream(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
                        if generation_config.prefill_chunk_size is not None:
                            after_chunks(model_kwargs, cached_positions(cache))
                if failure is not None:
                    packing.run_padded(self, failure)
            except BaseException:
                plan = state.plan
                if plan is None or not plan.q_length or plan.thread == threading.get_ident():
                    # Nothing stands in it that another thread has written.
                    if empty:
                        cache.reset()  # states and the encoder's keys, too
                    elif fresh:
                        cache.rewind(0)
                raise
            finally:
                state.prefilling = False
            if _cache_in(outputs) is not _cache_in(model_kwargs):  # the model keeps more than this cache holds
                state.history = None
            state.remember()
            return outputs

        apart = rows_as_given or self.config.model_type in STATE_IN_MODULES or positions_in_modules(self)
        groups = None if apart else equal_rows(input_ids, model_kwargs, cache)
        if groups is None:
            return run(input_ids, model_kwargs)

        first, inverse = groups
        batch, shared = len(inverse), len(first)
        rows = torch.from_numpy(first)
        few = {
            name: chosen_rows(name, value, rows, batch) if name in ROW_WISE or name == ENCODED else value
            for name, value in model_kwargs.items()
        }
        if cache.num_rows:
            cache.select(first)
        try:
            outputs = run(input_ids[rows.to(input_ids.device)], few)
        finally:
            # Older releases note in the arguments how far they have come.
            model_kwargs.update({name: value for name, value in few.items() if name not in model_kwargs})
            # Also on failure: rows that were equal before hold the same blocks, so this puts the cache back as it was.
            if cache.num_rows == shared and not state.interrupted:
                cache.select(inverse)
        returned = _cache_in(outputs)
        if (
            isinstance(returned, EncoderDecoderCache) and cache.cross_attention is None
        ):  # a model has added one of its own
            returned.cross_attention_cache.reorder_cache(torch.from_numpy(inverse))
        return repeat_rows(outputs, torch.from_numpy(inverse), shared)

    return _prefill


def _run_packed(
    model: Any, new_ids: Tensor, model_kwargs: dict[str, Any], cache: PagedCache, prompt: reuse.Prompt | None
) -> Any | None:
    """Prefill without pads. None where that is not possible or would save nothing."""
    if new_ids.dim() != 2:
        return None
    real = packing.packable(model, new_ids, model_kwargs, cache._state)
    if real is None:
        return None
    pack = Packing(real, real) if prompt is None else reuse.adopt_packed(prompt, real, cache)
    if pack is None or pack.new.all():
        return None
    return packing.prefill(model, new_ids, pack, model_kwargs, cache)


@contextlib.contextmanager
def _chunks(
    model: Any, length: int, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache, instrumented: bool
) -> Iterator[None]:
    """Choose the size of the chunks that the prefill of `length` new positions is cut into: none where upstream would start
    over, though something is cached, and none of ours in an instrumented model."""
    given, cached = generation_config.prefill_chunk_size, cached_positions(cache)
    size = given
    if given is None and not instrumented:
        size = _chunk_for_windows(model, length, model_kwargs, cache)
    generation_config.prefill_chunk_size = size if CHUNKS_GO_ON or not cached else None
    try:
        yield
    finally:
        generation_config.prefill_chunk_size = given


def _chunk_for_windows(model: Any, length: int, model_kwargs: dict[str, Any], cache: PagedCache) -> int | None:
    """The size of the chunks for a long prompt where layers with a window would else keep all of it until the next step. Only
    where nothing but the last logits is asked for."""
    window = max(group.window for group in cache.pool.groups)
    chunk = max(window, MIN_CHUNK)
    if (
        not window
        or cache.cross_attention is not None  # upstream would cut the encoder's mask
        or model.config.model_type in STATE_IN_MODULES
        or length < 2 * chunk
        or not packing.asked_for(model_kwargs) <= ROW_WISE | {"use_cache", "logits_to_keep", *CACHE_NAMES}
    ):
        return None
    return chunk


def covers_everything(input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether `input_ids` are the whole sequence, cached tokens included, as `generate` decides it: by the mask's length."""
    mask = model_kwargs.get("attention_mask" if model_kwargs.get(ENCODED) is None else "decoder_attention_mask")
    covered = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", -1)
    return CUTS_BY_POSITION or bool(covered == input_ids.shape[1])


def leave_one_token(input_ids: Tensor, whole: bool, model_kwargs: dict[str, Any], cache: PagedCache) -> None:
    """Where `input_ids` are the `whole` sequence and all of it is cached, drop the last position: the next token needs one
    position computed. Raises `ValueError` where the cache holds more than the sequence."""
    cached, given = cached_positions(cache), input_ids.shape[1]
    if not whole or model_kwargs.get("inputs_embeds") is not None or given == 0:
        return
    if cached == given:
        cache.crop(-1)
    elif cached > given:
        raise ValueError(
            f"input_ids has {given} positions, but the cache holds {cached} already: pass the ids of the whole sequence, or "
            f"new ids with attention_mask for everything ([batch, {cached} + new]), or start over with cache.reset()"
        )
