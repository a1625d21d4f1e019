"""A turn on a cache that is filled already: whatever it is given, it computes what the default cache computes, and leaves
nothing in the prefix index that a later prompt should not find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CACHE, VOCAB, build, default, make_pool, paged, upstream
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
    """After `generate`, with a mask of ones for everything, which `generate` drops. 28 are as many as are cached."""
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
