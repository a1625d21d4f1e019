"""Decoding modes that roll back, branch or run a second model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tiny import CACHE, default, make_pool, paged, prompts

from hf_paged import PagedCache


def repetitive(length: int = 30) -> dict[str, torch.Tensor]:
    """A prompt in which n-grams come back, so that prompt lookup has something to propose."""
    ids = torch.tensor([[5, 9, 17, 33, 8, 21] * (length // 6 + 1)])[:, :length]
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("block_size", [4, 16, 256])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt2"])
def test_prompt_lookup_equals_greedy(kind: str, block_size: int, model_of: Callable[[str], Any]) -> None:
    model, inputs = model_of(kind), repetitive()
    want = default(model, inputs, max_new_tokens=64)
    got = paged(model, inputs, make_pool(model, 400, block_size), max_new_tokens=64, prompt_lookup_num_tokens=3)
    assert torch.equal(want, got)


@pytest.mark.parametrize("assistant_cache", ["default", "own model"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_assisted_equals_greedy(kind: str, assistant_cache: str, model_of: Callable[[str], Any]) -> None:
    """With a weak assistant, whose proposals are mostly rolled back, and with the model itself."""
    model, inputs = model_of(kind), prompts([13])
    assistant = tiny.build(kind, "sdpa", seed=5 if assistant_cache == "default" else 2)
    want = default(model, inputs, max_new_tokens=64)
    got = paged(model, inputs, make_pool(model), max_new_tokens=64, assistant_model=assistant)
    assert torch.equal(want, got)


def test_rollback_inside_a_shared_block(llama: Any) -> None:
    """Prompt lookup on a fork: crops cut into the block that the original still holds."""
    inputs = repetitive(30)
    with PagedCache(make_pool(llama, 100, 16)) as cache:
        with torch.no_grad():
            llama(inputs["input_ids"][:, :26], **{CACHE: cache})
        before = [keys.dense().clone() for keys, _ in cache]
        for lookup in ({}, dict(prompt_lookup_num_tokens=3)):
            with cache.fork() as twin:
                got = llama.generate(**inputs, max_new_tokens=40, **lookup, **{CACHE: twin})
            assert torch.equal(default(llama, inputs, max_new_tokens=40), got)
        for (keys, _), old in zip(cache, before):
            assert torch.equal(keys.dense(), old), "the original was written to"


def test_guidance(llama: Any) -> None:
    flags = dict(max_new_tokens=12, guidance_scale=1.5)
    assert torch.equal(default(llama, prompts([9]), **flags), paged(llama, prompts([9]), make_pool(llama), **flags))


def test_constrained_prefix(llama: Any) -> None:
    flags: dict[str, Any] = dict(
        max_new_tokens=10, num_beams=3, prefix_allowed_tokens_fn=lambda batch, ids: list(range(3 + len(ids) % 5, 90))
    )
    inputs = prompts([9, 5])
    assert torch.equal(default(llama, inputs, **flags), paged(llama, inputs, make_pool(llama), **flags))


def test_generate_goes_on_from_a_returned_cache(llama: Any) -> None:
    inputs = prompts([9, 5])
    with PagedCache(make_pool(llama)) as cache:
        flags = dict(max_new_tokens=5, return_dict_in_generate=True)
        first = llama.generate(**inputs, **flags, **{CACHE: cache})
        assert getattr(first, CACHE) is cache
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
        second = llama.generate(first.sequences, attention_mask=mask, **flags, **{CACHE: getattr(first, CACHE)})
    assert torch.equal(default(llama, inputs, max_new_tokens=10), second.sequences)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_forward(llama: Any) -> None:
    """torch.compile may break the graph, but gives the same tokens."""
    inputs, pool = prompts([9, 5]), make_pool(llama)
    want = default(llama, inputs, max_new_tokens=6)
    forward = llama.forward
    llama.forward = torch.compile(forward, backend="eager")
    try:
        assert torch.equal(want, paged(llama, inputs, pool, max_new_tokens=6))
        assert torch.equal(
            default(llama, inputs, max_new_tokens=6, num_beams=3),
            paged(llama, inputs, pool, max_new_tokens=6, num_beams=3),
        )
    finally:
        llama.forward = forward
        torch._dynamo.reset()
