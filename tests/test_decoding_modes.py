"""Decoding modes that roll back, branch, constrain, or run a second model: the default cache's tokens in each."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import CACHE, VOCAB, default, make_pool, paged, prompts
from transformers import DynamicCache

from hf_paged import PagedCache

SIZES = [4, 16, 256]
KINDS = ["llama", "mistral", "gemma3", "gpt2"]
NEVER = dict(eos_token_id=VOCAB)  # a token that no model has: prompt lookup of 5.0 cannot do without one


def repetitive(length: int = 30) -> dict[str, torch.Tensor]:
    """A prompt in which n-grams come back, so that prompt lookup has something to propose."""
    ids = torch.tensor([[5, 9, 17, 33, 8, 21] * (length // 6 + 1)])[:, :length]
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


def draft_of(model: Any, noise: float = 0.1) -> Any:
    """A model that agrees with `model` on some tokens."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() >= 2:
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    config = draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 5, "constant"
    config.assistant_confidence_threshold = 0  # else drafts end early, and rollbacks are short
    draft.set_attn_implementation("sdpa")
    return draft


@contextlib.contextmanager
def generating_into(draft: Any, cache: PagedCache) -> Iterator[None]:
    """Let an assistant, whose cache `generate` makes, work in this one, as `enable()` would."""
    upstream = draft.generate
    for layer in cache.layers:
        layer.activate_past_recording()

    def generate(generation_config: Any, **kwargs: Any) -> Any:
        generation_config.cache_implementation = None  # older releases ask for one by name
        return upstream(generation_config=generation_config, **{CACHE: cache, **kwargs})

    draft.generate = generate
    try:
        yield
    finally:
        del draft.generate


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each `crop` of a PagedCache took away."""
    numbers: list[int] = []
    crop = PagedCache.crop

    def spy(self: PagedCache, count: int) -> None:
        before = self.get_seq_length()
        crop(self, count)
        numbers.append(before - self.get_seq_length())

    monkeypatch.setattr(PagedCache, "crop", spy)
    return numbers


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_lookup_equals_greedy(
    kind: str, block_size: int, model_of: Callable[[str], Any], removed: list[int]
) -> None:
    model, inputs, flags = model_of(kind), repetitive(), dict(max_new_tokens=64, **NEVER)
    want = default(model, inputs, **flags)
    got = paged(model, inputs, make_pool(model, 400, block_size), prompt_lookup_num_tokens=3, **flags)
    assert torch.equal(want, got)
    assert sum(removed) > 0, "nothing was rolled back"


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_assisted_equals_greedy(kind: str, block_size: int, model_of: Callable[[str], Any], removed: list[int]) -> None:
    """With an assistant that is right now and then."""
    model, inputs, flags = model_of(kind), prompts([13]), dict(max_new_tokens=64, **NEVER)
    draft, pool = draft_of(model), make_pool(model, 400, block_size)
    want = default(model, inputs, **flags)
    assert torch.equal(want, default(model, inputs, assistant_model=draft, **flags))
    assert torch.equal(want, paged(model, inputs, pool, assistant_model=draft, **flags))
    assert len(set(removed)) > 2, "rollbacks of one depth prove little"


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_both_models_paged(kind: str, block_size: int, model_of: Callable[[str], Any], removed: list[int]) -> None:
    model, inputs, flags = model_of(kind), prompts([13]), dict(max_new_tokens=64, **NEVER)
    draft, pool = draft_of(model), make_pool(model, 400, block_size)
    draft.set_attn_implementation("paged")
    with PagedCache(make_pool(draft, 400, block_size)) as cache, generating_into(draft, cache):
        got = paged(model, inputs, pool, assistant_model=draft, **flags)
        assert cache.get_seq_length() > 60, "the assistant worked elsewhere"
        cache.pool.check_integrity()
    assert torch.equal(default(model, inputs, **flags), got)
    assert len(set(removed)) > 2


def test_assisted_sampling(llama: Any) -> None:
    """Speculative sampling draws the same numbers over both caches."""
    flags = dict(max_new_tokens=32, do_sample=True, assistant_model=draft_of(llama), **NEVER)
    inputs = prompts([13])
    want, got = default(llama, inputs, **flags), paged(llama, inputs, make_pool(llama), **flags)
    assert torch.equal(want, got)


@pytest.mark.parametrize("block_size", SIZES)
def test_rollback_inside_a_shared_block(block_size: int, llama: Any, removed: list[int]) -> None:
    """On forks: crops cut into the block that the original still holds."""
    inputs, flags = repetitive(30), dict(max_new_tokens=40, **NEVER)
    want = default(llama, inputs, **flags)
    with PagedCache(make_pool(llama, 100, block_size)) as cache:
        with torch.no_grad():
            llama(inputs["input_ids"][:, :26], **{CACHE: cache})
        before = [keys.dense().clone() for keys, _ in cache]
        for mode in ({}, dict(prompt_lookup_num_tokens=3), dict(assistant_model=draft_of(llama))):
            with cache.fork() as twin:
                assert twin.block_tables == cache.block_tables
                assert torch.equal(want, llama.generate(**inputs, **flags, **mode, **{CACHE: twin}))
            cache.pool.check_integrity()
        for (keys, _), old in zip(cache, before):
            assert torch.equal(keys.dense(), old), "the original was written to"
    assert sum(removed) > 0


def test_a_turn_after_assisted_decoding_gives_blocks_back(model_of: Callable[[str], Any]) -> None:
    """What left the window is kept while it may be wanted again, and no longer."""
    model, inputs = model_of("mistral"), repetitive()
    pool = make_pool(model)
    with PagedCache(pool) as cache:
        out = model.generate(**inputs, max_new_tokens=20, prompt_lookup_num_tokens=3, **NEVER, **{CACHE: cache})
        assert not cache.layers[0].record_past
        mask = torch.ones_like(out)
        got = model.generate(out, attention_mask=mask, max_new_tokens=40, **{CACHE: cache})
        assert pool.stats().used <= 3, "a window of 8 touches 3 blocks of 4"
    assert torch.equal(default(model, dict(input_ids=out, attention_mask=mask), max_new_tokens=40), got)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_guidance(kind: str, model_of: Callable[[str], Any]) -> None:
    """Classifier-free guidance keeps a second, default cache for its unconditional rows."""
    model, negative = model_of(kind), prompts([4, 4], 3)
    flags = dict(max_new_tokens=12, guidance_scale=1.5)
    more = dict(negative_prompt_ids=negative["input_ids"], negative_prompt_attention_mask=negative["attention_mask"])
    for inputs, extra in ((prompts([9]), {}), (prompts([9, 5]), more)):
        want = default(model, inputs, **flags, **extra)
        assert torch.equal(want, paged(model, inputs, make_pool(model), **flags, **extra))
        assert not torch.equal(want, default(model, inputs, max_new_tokens=12)), "guidance changed nothing"


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("beams", [1, 3])
def test_constrained_prefix(kind: str, beams: int, model_of: Callable[[str], Any]) -> None:
    flags: dict[str, Any] = dict(
        max_new_tokens=10,
        num_beams=beams,
        prefix_allowed_tokens_fn=lambda batch, ids: list(range(3 + len(ids) % 5 + batch, 90)),
    )
    model, inputs = model_of(kind), prompts([9, 5])
    assert torch.equal(default(model, inputs, **flags), paged(model, inputs, make_pool(model), **flags))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("flags", [{}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)])
def test_inputs_embeds(kind: str, flags: dict[str, Any], model_of: Callable[[str], Any]) -> None:
    """Embeddings instead of tokens, alone and beside them, with pads."""
    model, inputs = model_of(kind), prompts([9, 5])
    embeds = dict(
        inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]).detach(),
        attention_mask=inputs["attention_mask"],
    )
    want = default(model, embeds, max_new_tokens=10, **flags)
    assert torch.equal(want, paged(model, embeds, make_pool(model), max_new_tokens=10, **flags))
    both = {**embeds, "input_ids": inputs["input_ids"]}
    assert torch.equal(
        default(model, both, max_new_tokens=10, **flags),
        paged(model, both, make_pool(model), max_new_tokens=10, **flags),
    )


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("first", [{}, dict(prompt_lookup_num_tokens=3)])
def test_generate_goes_on_from_a_returned_cache(
    kind: str, first: dict[str, Any], model_of: Callable[[str], Any]
) -> None:
    model, inputs = model_of(kind), prompts([9] if first else [9, 5])
    with PagedCache(make_pool(model)) as cache:
        flags = dict(max_new_tokens=5, return_dict_in_generate=True, **NEVER)
        out = model.generate(**inputs, **flags, **first, **{CACHE: cache})
        assert getattr(out, CACHE) is cache
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(out.sequences), 5, dtype=torch.long)], 1)
        second = model.generate(out.sequences, attention_mask=mask, **flags, **{CACHE: getattr(out, CACHE)})
    assert torch.equal(default(model, inputs, max_new_tokens=10), second.sequences)


def test_no_time_left(llama: Any) -> None:
    """`max_time` ends after the first token; the cache holds the prompt, and serves the next call."""
    inputs = prompts([9, 5])
    with PagedCache(make_pool(llama)) as cache:
        short = llama.generate(**inputs, max_new_tokens=8, max_time=1e-9, **{CACHE: cache})
        assert torch.equal(default(llama, inputs, max_new_tokens=8, max_time=1e-9), short)
        assert short.shape[1] == 10 and cache.lengths == [9, 5]
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        rest = llama.generate(short, attention_mask=mask, max_new_tokens=7, **{CACHE: cache})
    assert torch.equal(default(llama, inputs, max_new_tokens=8), rest)


def best_of_three(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """A decoding method from outside, with all that contrastive search does to a cache: run the three likeliest tokens as
    rows of their own, keep the one whose successor is surest, and look at the rest in a copy that is thrown away."""
    cache, mask = kwargs.get(CACHE), kwargs["attention_mask"]
    cache = DynamicCache(config=model.config) if cache is None else cache  # older releases leave it to the method

    def forward(ids: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits[:, -1]

    rows = len(input_ids)
    logits = forward(input_ids)
    while not stopping_criteria(input_ids, None).all():
        candidates = logits.topk(3).indices  # [B, 3]
        before = copy.deepcopy(cache)
        cache.batch_repeat_interleave(3)
        mask = torch.cat([mask, mask.new_ones(rows, 1)], 1).repeat_interleave(3, 0)
        after = forward(candidates.view(-1, 1))
        chosen = after.log_softmax(-1).max(-1).values.view(rows, 3).argmax(1)
        kept = torch.arange(rows) * 3 + chosen
        cache.batch_select_indices(kept)
        mask, logits = mask[kept], after[kept]
        if input_ids.shape[1] % 4 == 0:  # now and then, do the chosen token again on the copy
            cache = before
            again = forward(candidates.gather(1, chosen[:, None]))
            torch.testing.assert_close(again, logits, rtol=1e-3, atol=1e-3)
        input_ids = torch.cat([input_ids, candidates.gather(1, chosen[:, None])], 1)
    return input_ids


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a_decoding_method_from_outside(kind: str, block_size: int, model_of: Callable[[str], Any]) -> None:
    model, inputs = model_of(kind), prompts([9, 5])
    flags = dict(max_new_tokens=20, custom_generate=best_of_three)
    want = default(model, inputs, **flags)
    assert torch.equal(want, paged(model, inputs, make_pool(model, 300, block_size), **flags))
    assert not torch.equal(want, default(model, inputs, max_new_tokens=20))
