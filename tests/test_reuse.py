"""Caches that live longer than one call: fork, second turns, crop, reset."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from tiny import CACHE, default, make_pool, paged, poison, prompts, upstream
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_paged import LayerGeometry, PagedCache, PagePool
from hf_paged.compat import CROP_TO_LENGTH, CROP_ZERO_KEEPS_ALL


def feed(cache: PagedCache, tokens: torch.Tensor) -> None:
    """Write keys and values whose contents are the token numbers, in all layers: tokens is [B, n]."""
    for index, (heads, key_dim, value_dim, *_) in enumerate(cache.pool.geometry):
        key = tokens[:, None, :, None].float().expand(-1, heads, -1, key_dim) + index
        value = tokens[:, None, :, None].float().expand(-1, heads, -1, value_dim) - index
        cache.update(key.contiguous(), value.contiguous(), index)


def contents(cache: PagedCache) -> list[list[int]]:
    """The tokens that `feed` wrote, read back from keys and values of every layer."""
    found = None
    for index, (keys, values) in enumerate(cache):
        assert keys is not None and values is not None
        tokens = keys.dense()[:, 0, :, 0] - index
        assert torch.equal(tokens, values.dense()[:, 0, :, 0] + index)
        assert found is None or torch.equal(found, tokens)
        found = tokens
    assert found is not None
    return found.long().tolist()


@pytest.fixture
def pool() -> PagePool:
    return poison(PagePool([LayerGeometry(2, 4, 3)] * 2, num_blocks=40, block_size=4))


@pytest.mark.parametrize("how", ["fork", "deepcopy"])
@pytest.mark.parametrize("length", [16, 18])
def test_prefix_is_prefilled_once(how: str, length: int, llama: Any) -> None:
    """Two continuations of one prompt cache; the pool holds the prefix once. Works where gradients are on."""
    pool, prefix = make_pool(llama), prompts([length])["input_ids"]
    cache = PagedCache(pool)
    with torch.no_grad():
        llama(prefix, **{CACHE: cache})
    blocks = pool.stats().used
    for tail in (prompts([5], 7)["input_ids"], prompts([3], 8)["input_ids"]):
        twin = cache.fork() if how == "fork" else copy.deepcopy(cache)
        assert pool.stats().used == blocks and pool.stats().shared == blocks
        ids = torch.cat([prefix, tail], 1)
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        want = default(llama, inputs, max_new_tokens=10)
        assert torch.equal(want, llama.generate(**inputs, max_new_tokens=10, **{CACHE: twin}))
        assert twin.block_tables[0][: length // 4] == cache.block_tables[0][: length // 4]
        assert cache.lengths == [length]
        twin.release()
    cache.release()
    assert pool.stats().free == pool.num_blocks


def test_fork_repeats_rows(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    twin = cache.fork(2)
    feed(twin, torch.tensor([[7], [8], [9], [10]]))
    assert contents(twin) == [[1, 2, 3, 7], [1, 2, 3, 8], [4, 5, 6, 9], [4, 5, 6, 10]]
    assert contents(cache) == [[1, 2, 3], [4, 5, 6]]
    pool.check_integrity()


def test_four_turns_of_whole_ids(llama: Any) -> None:
    pool, ids = make_pool(llama), prompts([9])["input_ids"]
    with PagedCache(pool) as cache:
        for turn in range(4):
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
            want = default(llama, inputs, max_new_tokens=7)
            assert torch.equal(want, llama.generate(**inputs, max_new_tokens=7, **{CACHE: cache}))
            ids = torch.cat([want, prompts([4], turn)["input_ids"]], 1)


def test_only_new_ids_with_the_full_mask(llama: Any) -> None:
    ids = prompts([20])["input_ids"]

    def go_on(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            llama(ids[:, :13], **{CACHE: cache})
        return llama.generate(ids[:, 13:], attention_mask=torch.ones(1, 20), max_new_tokens=9, **{CACHE: cache})

    with upstream():
        go_on(DynamicCache())
    with PagedCache(make_pool(llama)) as cache:
        got = go_on(cache)
    want = default(llama, dict(input_ids=ids, attention_mask=torch.ones_like(ids)), max_new_tokens=9)
    assert torch.equal(want[:, 13:], got)


def test_cache_as_long_as_the_input(llama: Any) -> None:
    """Everything is cached: one token is computed again, and the result is that of one call."""
    inputs = prompts([12, 8])
    with PagedCache(make_pool(llama)) as cache:
        with torch.no_grad():
            positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
            llama(**inputs, position_ids=positions, **{CACHE: cache})
        got = llama.generate(**inputs, max_new_tokens=6, **{CACHE: cache})
        assert cache.lengths == [17, 13]
    assert torch.equal(default(llama, inputs, max_new_tokens=6), got)


def test_cache_longer_than_the_input(llama: Any) -> None:
    ids = prompts([12])["input_ids"]
    with PagedCache(make_pool(llama)) as cache:
        with torch.no_grad():
            llama(ids, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"input_ids has 5 positions.*holds 12.*cache\.reset"):
            llama.generate(ids[:, :5], attention_mask=torch.ones(1, 5), max_new_tokens=6, **{CACHE: cache})
        assert cache.lengths == [12]


def test_positions_after_an_external_prefill(llama: Any) -> None:
    """100 tokens by a forward pass, then `generate` from the last token with the mask of all 101."""
    ids = prompts([101])["input_ids"]

    def go_on(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            llama(ids[:, :100], **{CACHE: cache})
        return llama.generate(ids[:, 100:], attention_mask=torch.ones(1, 101), max_new_tokens=10, **{CACHE: cache})

    with upstream():
        go_on(DynamicCache())
    with PagedCache(make_pool(llama)) as cache:
        got = go_on(cache)
    want = default(llama, dict(input_ids=ids, attention_mask=torch.ones_like(ids)), max_new_tokens=10)
    assert torch.equal(want[:, 100:], got)


def test_crop(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.arange(1, 11)[None])
    if CROP_ZERO_KEEPS_ALL:
        cache.crop(0)
    assert contents(cache) == [list(range(1, 11))]
    cache.crop(-1)
    assert contents(cache) == [list(range(1, 10))] and pool.stats().used == 3
    cache.crop(-1)
    assert pool.stats().used == 2 and cache.get_seq_length() == 8
    if CROP_TO_LENGTH:
        cache.crop(8)
        cache.crop(100)
        assert cache.get_seq_length() == 8
    else:
        with pytest.raises(ValueError, match=r"crop\(3\)"):
            cache.crop(3)
    feed(cache, torch.tensor([[99]]))
    assert contents(cache) == [[1, 2, 3, 4, 5, 6, 7, 8, 99]]
    cache.crop(-9)
    assert cache.get_seq_length() == 0 and pool.stats().used == 0
    feed(cache, torch.tensor([[1], [2]]))  # empty again: any number of rows
    cache.crop(-50)
    assert cache.get_seq_length() == 0 and pool.stats().used == 0


def test_crop_inside_a_shared_block(pool: PagePool) -> None:
    """The next write after a crop must not reach the rows that share the block."""
    cache = PagedCache(pool)
    feed(cache, torch.arange(1, 9)[None])
    twin = cache.fork()
    twin.crop(-2)
    feed(twin, torch.tensor([[77]]))
    assert contents(twin) == [[1, 2, 3, 4, 5, 6, 77]]
    assert contents(cache) == [list(range(1, 9))]
    assert pool.stats().cow_copies == 1
    pool.check_integrity()


def test_crop_with_pads(llama: Any) -> None:
    """Crop counts padded positions: a row loses the real tokens among them."""
    inputs = prompts([9, 4])
    with PagedCache(make_pool(llama)) as cache, torch.no_grad():
        llama(**inputs, **{CACHE: cache})
        cache.crop(-3)
        assert cache.lengths == [6, 1] and cache.get_seq_length() == 6
        rest = {name: value[:, :6] for name, value in inputs.items()}
        tail = torch.tensor([[5, 6], [7, 8]])
        ids, mask = (
            torch.cat([rest["input_ids"], tail], 1),
            torch.cat([rest["attention_mask"], torch.ones(2, 2).long()], 1),
        )
        got = llama.generate(ids, attention_mask=mask, max_new_tokens=5, **{CACHE: cache})
    assert torch.equal(default(llama, dict(input_ids=ids, attention_mask=mask), max_new_tokens=5), got)


def test_reset(llama: Any) -> None:
    pool, first, second = make_pool(llama), prompts([12, 8]), prompts([6], 5)
    with PagedCache(pool) as cache:
        llama.generate(**first, max_new_tokens=6, **{CACHE: cache})
        cache.reset()
        assert pool.stats().used == 0 and cache.get_seq_length() == 0
        got = llama.generate(**second, max_new_tokens=6, **{CACHE: cache})
        assert torch.equal(got, paged(llama, second, make_pool(llama), max_new_tokens=6))


def test_batch_operations(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]))
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    feed(cache, torch.tensor([[20], [21], [22], [23]]))
    want = [[11, 12, 13, 14, 15], [1, 2, 3, 4, 5]]
    assert contents(cache) == [[*want[0], 20], [*want[0], 21], [*want[1], 22], [*want[1], 23]]
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert contents(cache) == [[*want[0], 20], [*want[1], 23]]
    with pytest.raises(IndexError, match=r"must lie in 0\.\.1"):
        cache.batch_select_indices(torch.tensor([2]))


@pytest.mark.parametrize("block_size", [4, 16, 256])
@pytest.mark.parametrize("window", [0, 8])
def test_operations_follow_a_dynamic_cache(window: int, block_size: int) -> None:
    """The same random operations on both caches, contents compared after each. With a window, both keep what `crop` may want
    back, and the last 7 positions are what the next token sees."""
    if window and not hasattr(DynamicSlidingWindowLayer, "activate_past_recording"):
        pytest.skip("the sliding layers of this release cannot be cropped")
    pool = poison(PagePool([LayerGeometry(2, 4, 3, window=window)] * 2, num_blocks=400, block_size=block_size))
    rng, generator = random.Random(window + block_size), torch.Generator().manual_seed(0)
    layers = [DynamicSlidingWindowLayer(window) if window else DynamicLayer() for _ in range(2)]
    mine, theirs = PagedCache(pool), Cache(layers=layers)
    if window:
        mine.activate_past_recording()
        theirs.activate_past_recording()
    rows, kept = 3, []  # what copies were made of stays alive, and must not change
    for step in range(90):
        width = mine.get_seq_length()
        length = rng.choice([1, 1, 5, 13])
        name = (
            rng.choice(["append", "append", "crop", "reorder", "repeat", "select", "deepcopy"]) if width else "append"
        )
        if name == "append":
            for index in range(2):
                keys = torch.randn(rows, 2, length, 4, generator=generator)
                values = torch.randn(rows, 2, length, 3, generator=generator)
                mine.update(keys, values, index)
                theirs.update(keys, values, index)
        if name == ("append" if window else "crop"):  # a recording is cropped after each forward pass
            count = rng.randrange(length if window else min(width, 4))
            for cache in (mine, theirs):
                keep = cache.get_seq_length() - count
                cache.crop(-count if CROP_ZERO_KEEPS_ALL else keep)
        elif name == "reorder":
            order = torch.tensor([rng.randrange(rows) for _ in range(rows)])
            mine.reorder_cache(order)
            theirs.reorder_cache(order)
        elif name == "repeat" and rows <= 4:
            mine.batch_repeat_interleave(2)
            theirs.batch_repeat_interleave(2)
            rows *= 2
        elif name == "select":
            chosen = torch.tensor(sorted(rng.sample(range(rows), max(1, rows // 2))))
            mine.batch_select_indices(chosen)
            theirs.batch_select_indices(chosen)
            rows = len(chosen)
        elif name == "deepcopy":
            kept.append((mine, theirs))
            mine, theirs = copy.deepcopy(mine), copy.deepcopy(theirs)
        for ours, other in (*kept[-2:], (mine, theirs)):
            assert ours.get_seq_length() == other.get_seq_length()
            for a, b in zip(ours.layers, other.layers, strict=True):
                last = min(window - 1, ours.get_seq_length()) if window else ours.get_seq_length()
                if last:
                    assert torch.equal(a.keys[:, :, -last:], b.keys[:, :, -last:]), (step, name)
                    assert torch.equal(a.values[:, :, -last:], b.values[:, :, -last:]), (step, name)
        pool.check_integrity()
    assert kept
