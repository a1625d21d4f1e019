"""Forking and joining rows at will, as a search over many branches does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_reuse import feed
from tiny import CACHE, KNOWS_POSITIONS, default, make_pool, paged, prompts

from hf_paged import LayerGeometry, PagedCache, PagePool
from hf_paged.blocks import UNUSED


@pytest.fixture
def pool() -> PagePool:
    return PagePool([LayerGeometry(2, 4, 3)] * 2, num_blocks=40, block_size=4)


def contents(cache: PagedCache) -> list[list[int]]:
    """The tokens that `feed` wrote, read back from keys and values of every layer; 0 at pads."""
    mask, found = cache.attention_mask, []
    for index, (keys, values) in enumerate(cache):
        assert keys is not None and values is not None
        found += [(keys.dense()[:, 0, :, 0] - index) * mask, (values.dense()[:, 0, :, 0] + index) * mask]
    assert all(torch.equal(found[0], other) for other in found)
    return found[0].long().tolist()


def test_fork_picks_rows(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    twin = cache.fork(2, rows=[2, 0])
    assert contents(twin) == [[5, 6], [5, 6], [1, 2], [1, 2]]
    assert contents(cache.fork(rows=torch.tensor([False, True, False]))) == [[3, 4]]
    with pytest.raises(IndexError, match=r"rows \[0, 3\] must lie in 0..2"):
        cache.fork(rows=[0, 3])
    with pytest.raises(IndexError, match=r"\[-1\]"):
        cache.fork(rows=[-1])
    pool.check_integrity()


def test_join_keeps_tokens_and_shares_blocks(pool: PagePool) -> None:
    """Rows of different widths, one cache twice, one with pads in the middle."""
    first, second = PagedCache(pool), PagedCache(pool)
    feed(first, torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]))
    feed(second, torch.tensor([[11, 12]]))
    used = pool.stats().used
    joined = PagedCache.join([second, first, second])
    assert contents(joined) == [[0, 0, 0, 11, 12], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [0, 0, 0, 11, 12]]
    assert joined.attention_mask.tolist() == [[0, 0, 0, 1, 1], [1] * 5, [1] * 5, [0, 0, 0, 1, 1]]
    assert joined.lengths == [2, 5, 5, 2] and pool.stats().used == used
    feed(joined, torch.tensor([[21], [22], [23], [24]]))
    again = PagedCache.join([joined, first])
    assert contents(again)[0] == [0, 0, 0, 11, 12, 21] and contents(again)[4] == [0, 1, 2, 3, 4, 5]
    assert contents(first) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]] and contents(second) == [[11, 12]]
    pool.check_integrity()
    for cache in (first, second, joined, again):
        cache.release()
    assert pool.stats().free == 40


def test_join_refuses_what_does_not_fit_together(pool: PagePool) -> None:
    cache = PagedCache(pool)
    for others in ([], [cache, PagedCache(pool, salt="x")]):
        with pytest.raises(ValueError, match="one pool and one salt"):
            PagedCache.join(others)
    half = PagedCache(pool)
    half.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 3), 0)
    with pytest.raises(RuntimeError, match="failed half way"):
        PagedCache.join([half])
    cache.release()
    with pytest.raises(RuntimeError, match="released"):
        PagedCache.join([cache])


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_branches_of_different_lengths_in_one_forward_pass(kind: str, model_of: Any) -> None:
    """Three branches of one prompt, grown apart, extended together: each has the logits that it has alone."""
    model = model_of(kind)
    pool, prompt = make_pool(model), prompts([13])["input_ids"]
    with torch.no_grad():
        root = PagedCache(pool)
        model(prompt, **{CACHE: root})
        tails, branches = [prompts([n], n)["input_ids"] for n in (5, 9, 1)], []
        for tail in tails:
            branch = root.fork()
            model(tail, attention_mask=torch.ones(1, 13 + tail.shape[1]), **{CACHE: branch})
            branches.append(branch)
        batch = PagedCache.join(branches)
        new = prompts([2, 2, 2], 3)["input_ids"]
        mask = torch.cat([batch.attention_mask, torch.ones(3, 2, dtype=torch.long)], 1)
        got = model(new, attention_mask=mask, position_ids=(mask.cumsum(1) - 1)[:, -2:], **{CACHE: batch}).logits
        for row, tail in enumerate(tails):
            ids = torch.cat([prompt, tail, new[row : row + 1]], 1)
            model.set_attn_implementation("sdpa")
            want = model(ids).logits[0, -2:]
            model.set_attn_implementation("paged")
            torch.testing.assert_close(got[row], want, atol=1e-4, rtol=1e-4)
    # The first block of the prompt is there once, whatever became of it.
    assert len({table[0] for branch in branches for table in branch.block_tables}) == 1 or kind == "mistral"
    pool.check_integrity()


def test_generate_goes_on_from_joined_caches_and_leaves_prefixes(llama: Any) -> None:
    pool = make_pool(llama)
    first, second = prompts([17], 1), prompts([10], 2)
    caches, outs = [], []
    for inputs in (first, second):
        caches.append(PagedCache(pool))
        outs.append(llama.generate(**inputs, max_new_tokens=4, **{CACHE: caches[-1]}))
    joined = PagedCache.join(caches)
    ids = torch.full((2, 21), 0)
    ids[0], ids[1, 7:] = outs[0][0], outs[1][0]
    inputs = dict(input_ids=ids, attention_mask=(ids != 0).long())
    want = default(llama, inputs, max_new_tokens=9)
    assert torch.equal(want, llama.generate(**inputs, max_new_tokens=9, **{CACHE: joined}))
    for cache in (joined, *caches):
        cache.release()
    hits = pool.stats().prefix_hit_tokens
    assert torch.equal(want[:, :-1], paged(llama, inputs, pool, max_new_tokens=8))
    turn = dict(input_ids=want[:1], attention_mask=torch.ones(1, 30, dtype=torch.long))
    paged(llama, turn, pool, max_new_tokens=1)
    ragged, last = 20 + 12, 28  # 29 tokens of the first row are cached: seven blocks
    assert pool.stats().prefix_hit_tokens - hits == (ragged + last if KNOWS_POSITIONS else 20)


def test_joined_tables_are_unused_beyond_each_row(pool: PagePool) -> None:
    long, short = PagedCache(pool), PagedCache(pool)
    feed(long, torch.arange(1, 30)[None])
    feed(short, torch.tensor([[1]]))
    (tables,) = PagedCache.join([long, short])._state.groups
    assert (tables.table[1, 1:] == UNUSED).all() and (tables.table[0, 8:] == UNUSED).all()


@pytest.mark.parametrize("how", ["fork", "join"])
def test_what_leaves_a_window_is_kept_by_a_copy_too(how: str, model_of: Any) -> None:
    """Fifteen tokens, over three windows of eight, are undone in a copy of a cache that keeps them."""
    model, ids = model_of("mistral"), prompts([12, 12])["input_ids"]
    pool = make_pool(model)
    caches = [PagedCache(pool), PagedCache(pool)]
    with torch.no_grad():
        for row, cache in enumerate(caches):
            model(ids[row : row + 1], **{CACHE: cache})
        caches[1].layers[0].activate_past_recording()
        twin = caches[1].fork() if how == "fork" else PagedCache.join(caches)
        for token in range(15):
            model(torch.full((twin.num_rows, 1), 3 + token), **{CACHE: twin})
        twin.crop(-15)
        new = torch.full((twin.num_rows, 1), 9)
        got = model(new, **{CACHE: twin}).logits[-1]
        want = model(new[:1], **{CACHE: caches[1]}).logits[0]
    assert twin.lengths == [13] * twin.num_rows and twin.layers[0].record_past
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
