"""Embeddings that are put before the ids where inputs are prepared, as PEFT's prompt tuning does: the ids do not tell them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny import CACHE, VOCAB, build, default, make_pool, paged, prompts
from transformers import LlamaForCausalLM

from hf_paged import packing

GREEDY: dict[str, Any] = dict(max_new_tokens=9)
VIRTUAL = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(3))


def with_virtual_tokens(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What a model is fed: in the first step, eight embeddings before its ids."""
    places = ("attention_mask", "position_ids", "cache_position")
    inputs = {name: value for name, value in inputs.items() if name not in places}
    cache = inputs.get(CACHE)  # up to 5.9 the model makes its own in the first step
    if cache is None or cache.get_seq_length() == 0:
        embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
        inputs["inputs_embeds"] = torch.cat([VIRTUAL.expand(len(embeddings), -1, -1), embeddings], 1)
    return inputs


class Tuned(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return with_virtual_tokens(self, super().prepare_inputs_for_generation(*args, **kwargs))


def tune(model: Any, how: str) -> None:
    """Let `model` prepend them, by a method of its own or by its class."""
    if how == "class":
        model.__class__ = Tuned
        return
    own = model.prepare_inputs_for_generation

    @functools.wraps(own)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        return with_virtual_tokens(model, own(*args, **kwargs))

    model.prepare_inputs_for_generation = prepare


def whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("how", ["instance", "class"])
def test_nothing_is_shared_between_prompts_with_and_without(how: str) -> None:
    model = build("llama")
    pool, ids = make_pool(model), torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(5))
    plain = default(model, whole(ids), **GREEDY)
    if how == "instance":
        assert torch.equal(plain, paged(model, whole(ids), pool, **GREEDY))  # its blocks are there to be found
    tune(model, how)
    tuned = default(model, whole(ids), **GREEDY)
    assert not torch.equal(plain, tuned)
    for _ in range(2):
        assert torch.equal(tuned, paged(model, whole(ids), pool, **GREEDY))
    vars(model).pop("prepare_inputs_for_generation", None)
    model.__class__ = LlamaForCausalLM
    assert pool.stats().prefix_hit_tokens == 0
    assert torch.equal(plain, paged(model, whole(ids), pool, **GREEDY))
    # Back with the class's own method, bound to the instance as PEFT leaves it, what is known is found again.
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    before = pool.stats().prefix_hit_tokens
    assert torch.equal(plain, paged(model, whole(ids), pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == before + 28


def test_rows_that_begin_alike_and_ragged_ones() -> None:
    """No pass of its own for what rows share, and none without pads, that says of the class what is this instance's."""
    model, inputs = build("llama"), prompts([120, 120])
    inputs["input_ids"][1, :100] = inputs["input_ids"][0, :100]
    tune(model, "instance")
    for case in (inputs, prompts([9, 5])):
        want = default(model, case, **GREEDY)
        assert torch.equal(want, paged(model, case, make_pool(model), **GREEDY))
        assert type(model) not in packing._padded_only
