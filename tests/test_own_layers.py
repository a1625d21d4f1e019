"""Layers that are not paged, or not all of what they keep: they follow every operation on the cache."""

from __future__ import annotations

import copy
import functools
from typing import Any

import architectures
import pytest
import torch
from tiny import CACHE, VOCAB, make_pool, paged, prompts, shapes_of
from transformers import CONFIG_MAPPING, DynamicCache

from hf_paged import LayerGeometry, PagedCache, PagePool
from hf_paged.layout import Group, OwnLayer, groups_of

STATES = ["mamba", "falcon_mamba", "deepseek_v4"]  # nothing is paged
BESIDE = ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text"]  # the keys of an indexer beside the others
KINDS = [*STATES, *BESIDE, "jamba", "zaya"]


@functools.cache
def built(kind: str) -> Any:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    model = architectures.build(kind, False)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return architectures.condition(model, initial, seed=0, gain=1.5)


class Both:
    """A PagedCache and a default cache that are taken through the same steps; every step compares the logits."""

    def __init__(self, model: Any, cache: PagedCache, default: DynamicCache):
        self.model, self.cache, self.default = model, cache, default
        self.implementation = model.config._attn_implementation

    def step(self, ids: torch.Tensor) -> None:
        with torch.no_grad():
            want = self.model(ids, **{CACHE: self.default}, use_cache=True).logits
            self.model.set_attn_implementation("paged")
            got = self.model(ids, **{CACHE: self.cache}, use_cache=True).logits
        self.model.set_attn_implementation(self.implementation)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_follow(kind: str) -> None:
    """Fork, reorder, repeat and reset, and the original is not touched by what happens to its fork."""
    model = built(kind)
    ids = functools.partial(torch.randint, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    both = Both(model, PagedCache(make_pool(model)), DynamicCache(config=model.config))
    both.step(ids((2, 9)))
    twin = Both(model, both.cache.fork(2), copy.deepcopy(both.default))
    twin.default.reorder_cache(torch.tensor([0, 0, 1, 1]))
    assert twin.cache.batch_size == 4
    twin.step(ids((4, 1)))
    for rows in ([3, 0, 0], [1, 2]):
        twin.cache.select(rows)
        twin.default.reorder_cache(torch.tensor(rows))
        twin.step(ids((len(rows), 1)))
    twin.cache.batch_repeat_interleave(2)
    twin.default.reorder_cache(torch.tensor([0, 0, 1, 1]))
    twin.step(ids((4, 1)))
    both.step(ids((2, 1)))
    again = copy.deepcopy(both.cache)
    Both(model, again, copy.deepcopy(both.default)).step(ids((2, 1)))
    both.cache.reset()
    assert both.cache.batch_size == -1
    both.default = DynamicCache(config=model.config)
    both.step(ids((3, 5)))
    both.cache.pool.check_integrity()


@pytest.mark.parametrize("kind", BESIDE[:2])
def test_crop(kind: str) -> None:
    model = built(kind)
    ids = functools.partial(torch.randint, 3, VOCAB, generator=torch.Generator().manual_seed(2))
    both = Both(model, PagedCache(make_pool(model)), DynamicCache(config=model.config))
    both.step(ids((2, 9)))
    both.step(ids((2, 1)))
    both.cache.crop(-3)
    both.default.crop(-3)
    both.step(ids((2, 1)))
    both.cache.crop(-20)
    both.default = DynamicCache(config=model.config)
    both.step(ids((2, 4)))


def test_one_mask_for_all_that_slide() -> None:
    """Where one sliding layer stays transformers' own, all do: several new tokens past the window of 16 see the right keys."""
    model = built("deepseek_v4")
    ids = functools.partial(torch.randint, 3, VOCAB, generator=torch.Generator().manual_seed(4))
    both = Both(model, PagedCache(make_pool(model)), DynamicCache(config=model.config))
    both.step(ids((2, 20)))
    both.step(ids((2, 5)))


@pytest.mark.parametrize("kind", STATES)
def test_nothing_to_page(kind: str) -> None:
    """A pool is made all the same: its caches take no block, and equal prompts are still computed once."""
    model = built(kind)
    model.set_attn_implementation("paged")
    pool = PagePool.for_model(model, memory="1MiB")
    with PagedCache(pool) as cache:
        assert (cache.batch_size, cache.lengths, cache.block_tables) == (-1, [], [])
        with shapes_of(model) as rows:
            out = model.generate(**prompts([7, 7]), **{CACHE: cache}, max_new_tokens=3, num_beams=3)
        assert rows[:2] == [(2, 7), (6, 1)] and len(out) == 2
        assert cache.batch_size == 6 and pool.stats().used == 0
        assert f"6 rows, width 0, 0 paged layers, not paged: 0: {pool.layers[0]!r}" in repr(cache)
        again = model.generate(**prompts([7, 7]), **{CACHE: PagedCache(pool)}, max_new_tokens=3, num_beams=3)
        assert torch.equal(out, again)
    assert cache.batch_size == -1


def test_equal_ids_after_unequal_states() -> None:
    """A cache of states alone tells no rows apart by blocks: nothing is shared when it is filled already."""
    model = built("mamba")
    first = torch.tensor([[5, 6, 7], [8, 9, 10]])
    rows = torch.tensor([[20], [20]])

    def second(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            model(first, **{CACHE: cache}, use_cache=True)
        kwargs: dict[str, Any] = {CACHE: cache, "attention_mask": torch.ones(2, 4, dtype=torch.long)}
        out: torch.Tensor = model.generate(rows, max_new_tokens=6, **kwargs)
        return out

    want = second(DynamicCache(config=model.config))
    assert not torch.equal(want[0], want[1]), "the test proves nothing"
    assert torch.equal(second(PagedCache(make_pool(model))), want)


def test_rows_of_an_added_cache_follow() -> None:
    """BLT puts the cache it is given beside one of its own: equal prompts that are computed once are repeated in both."""
    model = built("blt")
    inputs = prompts([9, 9, 12])
    inputs["input_ids"][1] = inputs["input_ids"][0]
    flags = dict(max_new_tokens=5, do_sample=True, num_return_sequences=2)
    torch.manual_seed(0)
    want = model.generate(**inputs, **flags)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("paged")
    got = paged(model, inputs, make_pool(model), **flags)
    model.set_attn_implementation(implementation)
    assert torch.equal(got, want)


def test_layers_beside() -> None:
    """What a paged layer does not know is asked of the layer beside it, and set there."""
    model = built("deepseek_v32")
    pool = make_pool(model)
    assert all(isinstance(layer, LayerGeometry) and layer.beside is not None for layer in pool.layers)
    cache = PagedCache(pool)
    layer = cache.layers[1]
    assert layer.indexer_keys is None and not layer.is_indexer_initialized and hasattr(layer, "update_indexer")
    cache.update_indexer(torch.ones(2, 3, 4), 1)
    layer.indexer_position_ids = torch.arange(3).expand(1, 2, 3)
    assert layer.indexer_keys.shape == (2, 3, 4) and layer.width == 0 and cache.layers[0].indexer_keys is None
    with pytest.raises(AttributeError, match="indexer_values"):
        _ = layer.indexer_values
    assert "PagedBesideLayer(1, beside DynamicIndexedLayer)" in repr(cache.layers)
    cache.reset()
    assert layer.indexer_keys is None and layer.indexer_position_ids is None


def test_groups_of_nothing() -> None:
    assert groups_of([OwnLayer("Other", object)] * 2) == [Group(0, [])]
