"""Ragged prompts go through the model without their pads, where that is provably the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import CACHE, KNOWS_POSITIONS, build, default, make_pool, paged, prompts, shapes_of

from hf_paged import PagedCache, PagePool, PoolExhausted, packing

pytestmark = pytest.mark.skipif(not KNOWS_POSITIONS, reason="positions are not known before the prefill: runs padded")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    packing._padded_only.clear()
    yield
    packing._padded_only.clear()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gpt_neox", "mistral", "gemma2", "gemma3"])
def test_pads_are_not_computed(kind: str, model_of: Callable[[str], Any]) -> None:
    model, inputs = model_of(kind), prompts([16, 21, 3])
    pool = make_pool(model)
    with shapes_of(model) as shapes:
        got = paged(model, inputs, pool, max_new_tokens=4)
    assert shapes[:2] == [(1, 40), (3, 1)], "40 real tokens, not 3 x 21"
    assert torch.equal(default(model, inputs, "eager" if kind == "gemma2" else "sdpa", max_new_tokens=4), got)
    assert not packing._padded_only


def test_equal_rows_are_packed_once(llama: Any) -> None:
    inputs = {name: value.repeat(2, 1) for name, value in prompts([16, 21, 3]).items()}
    pool = make_pool(llama)
    with shapes_of(llama) as shapes:
        got = paged(llama, inputs, pool, max_new_tokens=4, num_beams=2)
    assert shapes[:2] == [(1, 40), (12, 1)]
    assert torch.equal(default(llama, inputs, max_new_tokens=4, num_beams=2), got)


def test_second_turn_is_packed(llama: Any) -> None:
    """Pads in the middle: the new tokens of a ragged second turn, on what is cached."""
    first, second = prompts([5, 9, 1], 1), prompts([7, 2, 4], 2)
    ids = torch.cat([first["input_ids"], second["input_ids"]], 1)
    mask = torch.cat([first["attention_mask"], second["attention_mask"]], 1)
    with PagedCache(make_pool(llama)) as cache, shapes_of(llama) as shapes:
        positions = (first["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            llama(**first, position_ids=positions, **{CACHE: cache})
        got = llama.generate(ids, attention_mask=mask, max_new_tokens=5, **{CACHE: cache})
        assert shapes[:2] == [(3, 9), (1, 13)]
        assert cache.lengths == [5 + 7 + 4, 9 + 2 + 4, 1 + 4 + 4]
    assert torch.equal(default(llama, dict(input_ids=ids, attention_mask=mask), max_new_tokens=5), got)


@pytest.mark.parametrize(
    ("lengths", "flags"),
    [
        ([9, 9], {}),
        ([9, 0], {}),
        ([9, 4], dict(prefill_chunk_size=5)),
        ([9, 4], dict(output_hidden_states=True, return_dict_in_generate=True)),
    ],
    ids=["no pads", "a row of pads", "chunks", "hidden states"],
)
def test_where_packing_saves_nothing_or_loses_something(lengths: list[int], flags: dict[str, Any], llama: Any) -> None:
    pool = make_pool(llama)
    with shapes_of(llama) as shapes:
        paged(llama, prompts(lengths), pool, max_new_tokens=2, **flags)
    assert shapes[0][0] == 2


def test_right_padding_is_not_packed(llama: Any) -> None:
    inputs = prompts([9, 9])
    inputs["attention_mask"][1, 6:] = 0
    want, pool = default(llama, inputs, max_new_tokens=4), make_pool(llama)
    with shapes_of(llama) as shapes:
        assert torch.equal(want, paged(llama, inputs, pool, max_new_tokens=4))
    assert shapes[0] == (2, 9)


@pytest.mark.parametrize("touch", ["keys", "mask", "own attention", "error"])
def test_a_model_that_cannot_be_packed(touch: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads keys or mask itself, or attends to its new keys without the cache: padded, right, and remembered."""
    from transformers import AttentionInterface

    from hf_paged.attention import paged_attention

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if touch == "keys":
            key, value = key + 0, value + 0
        elif touch == "mask":
            mask = mask & True
        elif touch == "own attention" and query.shape[0] == 1 and module.layer_idx == 1:
            return query.transpose(1, 2), None  # reads no key at all
        elif touch == "error" and query.shape[0] == 1 and module.layer_idx == 2:
            raise IndexError("expected 3 rows")
        return paged_attention(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "paged", attention)
    inputs, pool = prompts([16, 21, 3]), make_pool(llama)
    want = default(llama, inputs, max_new_tokens=4)
    with shapes_of(llama) as shapes:
        assert torch.equal(want, paged(llama, inputs, pool, max_new_tokens=4))
        assert shapes[:2] == [(1, 40), (3, 21)]
        del shapes[:]
        assert torch.equal(want, paged(llama, inputs, pool, max_new_tokens=4))
        assert shapes[0] == (3, 21)
    assert type(llama) in packing._padded_only


def test_shortage_in_a_packed_prefill(llama: Any) -> None:
    pool = make_pool(llama, 8)
    cache = PagedCache(pool)
    with pytest.raises(PoolExhausted, match="11 needed, 8 free"):
        llama.generate(**prompts([16, 21, 3]), max_new_tokens=4, **{CACHE: cache})
    assert cache.lengths == [] and pool.stats().free == 8 and cache._state.packing is None
    assert not packing._padded_only, "a shortage says nothing about the model"


def test_shortage_while_a_model_is_measured(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no room for one token")

    monkeypatch.setattr(llama, "forward", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        PagePool.for_model(llama, num_blocks=4)


def _wrong_dtype(model: Any) -> None:
    model.generate(
        **prompts([9, 5]), **{CACHE: PagedCache(PagePool.for_model(model, num_blocks=40, dtype=torch.bfloat16))}
    )


def _released(model: Any) -> None:
    cache = PagedCache(make_pool(model))
    cache.release()
    model.generate(**prompts([9, 5]), **{CACHE: cache})


def _hook(model: Any) -> None:
    """That fails once only."""
    pool = make_pool(model)
    calls: list[int] = []

    def check(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("a check of mine")

    hook = model.model.layers[1].register_forward_pre_hook(check)
    try:
        model.generate(**prompts([9, 5]), **{CACHE: PagedCache(pool)})
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("mistake", "error"), [(_wrong_dtype, "the pool stores"), (_released, "was released"), (_hook, "a check of mine")]
)
def test_a_mistake_of_the_caller_says_nothing_about_the_model(mistake: Any, error: str, llama: Any) -> None:
    """It arrives as itself, and the next prompt is packed."""
    with pytest.raises((ValueError, RuntimeError, OSError), match=error):
        mistake(llama)
    pool = make_pool(llama)
    with shapes_of(llama) as shapes:
        paged(llama, prompts([16, 21, 3]), pool, max_new_tokens=2)
    assert shapes[0] == (1, 40) and not packing._padded_only


def test_hooks_see_the_rows(llama: Any) -> None:
    """What is looked at inside a model is not packed: a hook that changes the hidden states of one row finds it."""
    inputs = prompts([16, 21, 3])

    def steer(module: Any, args: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        hidden[-1] *= -1

    hook = llama.model.layers[1].register_forward_hook(steer)
    try:
        want = default(llama, inputs, max_new_tokens=4)
        assert torch.equal(want, paged(llama, inputs, make_pool(llama), max_new_tokens=4))
    finally:
        hook.remove()
    assert not torch.equal(want, default(llama, inputs, max_new_tokens=4))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_dropout_draws_the_numbers_of_a_padded_pass(kind: str) -> None:
    model, inputs = build(kind), prompts([16, 21, 3])
    model.set_input_embeddings(torch.nn.Sequential(model.get_input_embeddings(), torch.nn.Dropout(0.1)))
    model.train()
    want = default(model, inputs, max_new_tokens=4)
    assert torch.equal(want, paged(model, inputs, make_pool(model), max_new_tokens=4))
    assert not torch.equal(want, default(model, inputs, max_new_tokens=4, seed=1))
