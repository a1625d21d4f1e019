"""A turn on a cache that is filled already: whatever it is given, it computes what the default cache computes, and leaves
nothing in the prefix index that a later prompt should not find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CACHE, VOCAB, build, default, make_pool, paged, prompts, upstream
from transformers import DynamicCache

from hf_paged import PagedCache

GREEDY: dict[str, Any] = dict(max_new_tokens=9)


def random_ids(length: int, seed: int = 5, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("new", [1, 7, 28, 40], ids=lambda new: f"{new} new")
def test_a_second_turn_of_new_ids_alone(new: int, kind: str, model_of: Any) -> None:
    """After `generate`, with a mask of ones for everything, which `generate` drops. 28 are as many as
    are cached."""
    model = model_of(kind)
    pool, ids = make_pool(model, block_size=1), random_ids(20)

    def turns(cache: Any) -> torch.Tensor:
        out = model.generate(**whole(ids), **GREEDY, **{CACHE: cache})
        more = torch.cat([out[:, 28:], random_ids(new - 1, 7)], 1)
        return model.generate(more, attention_mask=torch.ones(1, 28 + new), **GREEDY, **{CACHE: cache})

    with upstream():
        want = turns(DynamicCache(config=model.config))
    with PagedCache(pool) as cache:
        assert torch.equal(want, turns(cache))
    # What was generated in it is found by the tokens of both turns.
    first = default(model, whole(ids), **GREEDY)
    later = whole(torch.cat([first[:, :28], want, random_ids(3, 8)], 1))
    assert torch.equal(default(model, later, **GREEDY), paged(model, later, pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == 28 + want.shape[1] - 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_masks_of_any_dtype(dtype: torch.dtype, llama: Any) -> None:
    inputs = prompts([9, 25])
    pool, want = make_pool(llama), default(llama, inputs, **GREEDY)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    for _ in range(2):
        assert torch.equal(want, paged(llama, inputs, pool, **GREEDY))


@pytest.mark.parametrize("lengths", [[20, 20], [20, 13]])
@pytest.mark.parametrize("keep", [0, 5, torch.tensor([3, 4, -1])], ids=["all", "some", "chosen"])
def test_all_the_logits_that_are_asked_for(keep: Any, lengths: list[int], llama: Any) -> None:
    """Also of a prompt that the pool holds."""
    pool, inputs = make_pool(llama), prompts(lengths)
    seen: list[torch.Tensor] = []
    hook = llama.lm_head.register_forward_hook(lambda _, args, out: seen.append(out))
    try:
        default(llama, inputs, max_new_tokens=1, logits_to_keep=keep)
        paged(llama, inputs, pool, max_new_tokens=1)
        paged(llama, inputs, pool, max_new_tokens=1, logits_to_keep=keep)
    finally:
        hook.remove()
    want, _, got = seen
    real = inputs["attention_mask"].bool()[:, -want.shape[1] :] if isinstance(keep, int) else torch.ones(2, 3).bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)


def test_what_rows_share_is_computed_where_the_ids_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded layer by layer stand on "meta" between, and so does the model."""
    model = build("llama")
    inputs = whole(torch.cat([random_ids(100).repeat(3, 1), random_ids(7, 2, rows=3)], 1))
    pool, want = make_pool(model), default(model, inputs, **GREEDY)
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    assert torch.equal(want, paged(model, inputs, pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == 300
