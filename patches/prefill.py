"""Compute a prompt once, however many rows ask for it, and never feed a cached prompt again.

Wraps       `transformers.generation.GenerationMixin._prefill`
Checked     transformers 5.0.0, 5.10.4, 5.17.0, 5.24.0
Acts        only where the cache is a `PagedCache`
Why         `generate` repeats the rows for beams and samples before the prefill, and callers repeat rows themselves; no
            hook lies between the repetition and the forward pass. And where the cache already holds the whole prompt,
            upstream takes the last 0 tokens of it, `ids[:, -0:]`, which is all of them
Delete      when `generate` expands its inputs after the prefill, and slices a cached prompt right
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation import GenerationMixin

from hf_paged import packing
from hf_paged.cache import PagedCache

TITLE = "sharing of equal prompts"
PARAMETERS = ["self", "input_ids", "generation_config", "model_kwargs"]
CACHE_NAMES = ("cache", "past_key_values")
MIN_CHUNK = 256  # tokens; a smaller chunk would cost the rest of the model more than it saves
# Arguments that are known to act on each row alone, and to be [B, ...] or the same for all rows. With any other one
# present, rows of equal tokens may still differ, and nothing is shared.
ROW_WISE = {"attention_mask", "position_ids", "token_type_ids"}
# Modules that draw random numbers in training, and words in the names of the numbers, > 0, that make others do so.
DROPOUT = torch.nn.modules.dropout._DropoutNd
RANDOM = ("drop", "jitter", "noise")
SAME_FOR_ALL = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict"}


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


def cache_in(arguments: dict[str, Any]) -> Any:
    """The cache among the arguments of a call, None if there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def _wrap(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def _prefill(
        self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = cache_in(model_kwargs)
        if not isinstance(cache, PagedCache):
            return upstream(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        leave_one_token(input_ids, generation_config, model_kwargs, cache)

        def run(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
            outputs = None
            if generation_config.prefill_chunk_size is None:
                outputs = _run_packed(self, input_ids, generation_config, model_kwargs, cache)
            if outputs is None:
                with _chunks_for_windows(input_ids, generation_config, model_kwargs, cache):
                    outputs = upstream(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
            return outputs

        groups = None if draws_at_random(self) else equal_rows(input_ids, model_kwargs, cache)
        if groups is None:
            return run(input_ids, model_kwargs)

        first, inverse = groups
        batch, shared = len(inverse), len(first)
        rows = torch.from_numpy(first)
        few = {
            name: value[rows.to(value.device)] if name in ROW_WISE and _is_per_row(value, batch) else value
            for name, value in model_kwargs.items()
        }
        if cache.get_seq_length():
            cache.select(first)
        try:
            outputs = run(input_ids[rows.to(input_ids.device)], few)
        finally:
            # Older releases note in the arguments how far they have come.
            model_kwargs.update({name: value for name, value in few.items() if name not in model_kwargs})
            # Also on failure: rows that were equal before hold the same blocks, so this puts the cache back as it was.
            if len(cache.lengths) == shared:
                cache.select(inverse)
        return _repeat(outputs, torch.from_numpy(inverse), shared)

    return _prefill


def _run_packed(
    model: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache
) -> Any | None:
    """Prefill without pads. None where that is not possible or would save nothing."""
    whole = covers_everything(input_ids, generation_config, model_kwargs)
    new_ids = input_ids[:, cache.get_seq_length() :] if whole else input_ids
    if new_ids.dim() != 2:
        return None
    new = packing.packable(model, new_ids, model_kwargs, cache._state)
    return None if new is None else packing.prefill(model, new_ids, new, model_kwargs, cache)


@contextlib.contextmanager
def _chunks_for_windows(
    input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache
) -> Iterator[None]:
    """Prefill a long prompt in chunks where layers with a window would else keep all of it until the next step. Only where
    nothing but the last logits is asked for."""
    window = max(group.window for group in cache.pool.groups)
    chunk = max(window, MIN_CHUNK)
    if (
        not window
        or generation_config.prefill_chunk_size is not None
        or input_ids.shape[1] - cache.get_seq_length() < 2 * chunk
        or not packing.asked_for(model_kwargs) <= ROW_WISE | {"use_cache", "logits_to_keep", *CACHE_NAMES}
    ):
        yield
        return
    generation_config.prefill_chunk_size = chunk
    try:
        yield
    finally:
        generation_config.prefill_chunk_size = None


def covers_everything(input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether `input_ids` are the whole sequence, cached tokens included, as `generate` decides it: by the mask's length."""
    mask = model_kwargs.get("attention_mask")
    covered = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", -1)
    return bool(covered == input_ids.shape[1])


def leave_one_token(input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache) -> None:
    """Where `input_ids` are the whole sequence and all of it is cached, drop the last position: the next token needs one
    position computed. Raises `ValueError` where the cache holds more than the sequence."""
    cached, given = cache.get_seq_length(), input_ids.shape[1]
    if not covers_everything(input_ids, generation_config, model_kwargs):
        return
    if model_kwargs.get("inputs_embeds") is not None or given == 0:
        return
    if cached == given:
        cache.crop(-1)
    elif cached > given:
        raise ValueError(
            f"input_ids has {given} positions, but the cache holds {cached} already: pass the ids of the whole sequence, or "
            f"new ids with attention_mask for everything ([batch, {cached} + new]), or start over with cache.reset()"
        )


def draws_at_random(model: Any) -> bool:
    """Whether rows of equal content may come out different, since dropout or the like is in force. Reinforcement learning
    generates in training mode, mostly without any."""
    training = [module for module in model.modules() if module.training]
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in training):
        return True
    named = [vars(module) for module in training]
    named += [
        vars(module.config) for module in training if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    return any(isinstance(module, DROPOUT) and module.p > 0 for module in training) or any(
        isinstance(value, (int, float)) and value > 0
        for values in named
        for name, value in values.items()
        if any(word in name for word in RANDOM)
    )


def equal_rows(input_ids: Tensor, model_kwargs: dict[str, Any], cache: PagedCache) -> tuple[Any, Any] | None:
    """Which rows are equal in all that the model sees of them: `first` [U], a representative of each group, and
    `inverse` [B], the group of each row. None where no two rows are provably equal."""
    batch = input_ids.shape[0]
    if input_ids.dim() != 2 or batch < 2:
        return None
    per_row = [input_ids]
    for name, value in model_kwargs.items():
        if name in CACHE_NAMES or name in SAME_FOR_ALL or value is None:
            continue
        if name not in ROW_WISE or not isinstance(value, Tensor):
            return None
        if _is_per_row(value, batch):
            per_row.append(value)
        elif value.shape[0] != 1:
            return None
    keys = [b"".join(parts) for parts in zip(*([row.tobytes() for row in t.cpu().numpy()] for t in per_row))]
    if cache.get_seq_length():
        stored = cache._state.row_keys()
        if len(stored) != batch:
            return None  # the forward pass says so in a sentence
        keys = [new + old for new, old in zip(keys, stored)]
    groups: dict[bytes, int] = {}
    inverse = np.array([groups.setdefault(key, len(groups)) for key in keys])
    if len(groups) == batch:
        return None
    return np.unique(inverse, return_index=True)[1], inverse


def _is_per_row(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch


def _repeat(outputs: Any, inverse: Tensor, shared: int) -> Any:
    """Give every tensor of a model output that has one entry per computed row one per row of the caller."""

    def repeat(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == shared:
            return value[inverse.to(value.device)]
        if isinstance(value, (tuple, list)):
            return type(value)(repeat(item) for item in value)
        return value

    for name, value in list(outputs.items()):
        outputs[name] = repeat(value)
    return outputs
