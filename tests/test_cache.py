"""PagedCache as an object: what transformers and its users may do with it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from test_reuse import contents, feed
from tiny import CACHE, make_pool, poison, prompts
from transformers import Cache, DynamicCache

from hf_paged import LayerGeometry, PagedCache, PagePool
from hf_paged.lazy import LazyKV


@pytest.fixture
def pool() -> PagePool:
    return poison(PagePool([LayerGeometry(2, 4, 3)] * 2, num_blocks=40, block_size=4))


def test_is_a_cache(pool: PagePool) -> None:
    cache = PagedCache(pool)
    assert isinstance(cache, Cache) and len(cache) == 2
    assert cache.get_seq_length() == 0 and cache.layers[0].batch_size == -1 and not cache.is_initialized
    assert not cache.is_compileable and cache.is_sliding == [False, False]
    assert getattr(cache, "is_croppable", True) and not any(getattr(cache, "is_linear", []))  # younger than 5.0
    feed(cache, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert cache.get_seq_length() == cache.get_seq_length(1) == 3 and cache.layers[0].batch_size == 2
    assert cache.get_mask_sizes(2, 0) == (5, 0)
    assert cache.layers[0].get_max_length() == -1
    assert "2 rows, width 3" in repr(cache) and "PagedLayer(1)" in repr(cache.layers)


def test_lengths_and_block_tables(pool: PagePool) -> None:
    cache = PagedCache(pool)
    assert cache.lengths == [] and cache.block_tables == []
    feed(cache, torch.arange(10).view(2, 5))
    assert cache.lengths == [5, 5] and cache.block_tables == [[0, 1], [2, 3]]


def test_layers_can_be_read(pool: PagePool) -> None:
    """`cache.layers[i].keys`, iteration and shapes, as with a DynamicCache."""
    cache, twin = PagedCache(pool), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    assert cache.layers[0].keys is None
    for _ in range(3):
        for index in range(2):
            key, value = torch.randn(2, 2, 3, 4, generator=generator), torch.randn(2, 2, 3, 3, generator=generator)
            cache.update(key, value, index)
            twin.update(key, value, index)
    for mine, theirs in zip(cache.layers, twin.layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape and mine.values.shape == theirs.values.shape
        assert torch.equal(mine.keys + 0, theirs.keys) and torch.equal(mine.values[:, :, 4:], theirs.values[:, :, 4:])
    assert [keys.shape for keys, _ in cache] == [(2, 2, 9, 4)] * 2


def test_handle_advertises_what_it_delivers(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.arange(10).view(2, 5))
    handle = cache.layers[1].values
    assert isinstance(handle, LazyKV) and handle._dense is None
    dense = handle.dense()
    assert handle.stride() == dense.stride() and handle.dtype == dense.dtype and handle.shape == dense.shape
    assert handle.is_contiguous() and handle.view(4, 5, 3).shape == (4, 5, 3)  # as with the default cache
    assert handle.tolist() == dense.tolist() and (handle.numpy() == dense.numpy()).all()
    assert "LazyKV(shape=(2, 2, 5, 3)" in repr(handle)
    assert torch.equal(copy.deepcopy(handle), dense) and torch.equal(pickle.loads(pickle.dumps(handle)), dense)


def test_handle_refuses_what_would_be_lost(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.arange(4).view(1, 4))
    handle = cache.layers[0].keys
    with pytest.raises(RuntimeError, match="the change would be lost"):
        handle.add_(1)
    cache.crop(-1)
    with pytest.raises(
        RuntimeError, match=r"read after their PagedCache had changed or was dropped.*layers\[0\]\.keys again"
    ):
        handle + 1


def test_layer_methods_are_refused(pool: PagePool) -> None:
    cache = PagedCache(pool)
    for name in ("reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(RuntimeError, match="call this on the cache"):
            getattr(cache.layers[0], name)(1)
    with pytest.raises(RuntimeError, match="not offloaded"):
        cache.layers[0].offload()


def test_release_twice_and_use_after(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.arange(10).view(2, 5))
    cache.release()
    assert pool.stats().free == 40
    cache.release()
    assert pool.stats().free == 40 and repr(cache) == "PagedCache(released)"
    with pytest.raises(RuntimeError, match="was released"):
        feed(cache, torch.tensor([[1]]))
    for use in (
        cache.fork,
        cache.reset,
        lambda: cache.lengths,
        lambda: cache.block_tables,
        lambda: cache.attention_mask,
        lambda: cache.select([0, 1]),
        lambda: cache.crop(-1),
        lambda: cache.rewind(0),
        lambda: PagedCache.join([cache]),
    ):
        with pytest.raises(RuntimeError, match=r"was released, its keys and values are gone: make a new one"):
            use()
    cache.release()


def test_rows_are_whole_numbers_or_one_flag_each(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.arange(15).view(3, 5))
    before = cache.block_tables
    flags = r"flags, and the cache has 3 rows: give one flag per row"
    for rows, error, message in [
        ([True], ValueError, flags),
        (torch.tensor([[True, False, True]]), ValueError, flags),
        ([0.0, 2.0], TypeError, r"rows=\[0.0, 2.0\] must be whole numbers"),
        (["0"], TypeError, "must be whole numbers"),
        ([3], IndexError, "must lie in 0..2"),
    ]:
        for use in (cache.select, lambda rows: cache.fork(rows=rows)):
            with pytest.raises(error, match=message):
                use(rows)
    assert cache.block_tables == before
    cache.select(torch.tensor([True, False, True]))
    assert cache.block_tables == [before[0], before[2]]
    cache.select([])
    assert cache.num_rows == 0


def test_context_manager_releases_after_an_exception(pool: PagePool) -> None:
    with pytest.raises(KeyError), PagedCache(pool) as cache:
        feed(cache, torch.arange(10).view(2, 5))
        raise KeyError
    assert pool.stats().free == 40


def test_a_dropped_cache_gives_its_blocks_back_at_once(pool: PagePool) -> None:
    gc.disable()  # reference counting alone must do it
    try:
        cache = PagedCache(pool)
        feed(cache, torch.arange(10).view(2, 5))
        layers, handle = cache.layers, cache.layers[0].keys
        assert pool.stats().used == 4
        del cache
        assert pool.stats().used == 0, "what is left of a cache must not hold its blocks"
        del layers, handle
    finally:
        gc.enable()


def test_a_handle_does_not_read_for_a_dropped_cache() -> None:
    """Its blocks may hold somebody else's tokens by then."""
    pool = poison(PagePool([LayerGeometry(1, 2, 2)], num_blocks=1, block_size=4))
    cache = PagedCache(pool)
    handle, _ = cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    del cache
    other = PagedCache(pool)
    other.update(torch.full((1, 1, 2, 2), 9.0), torch.full((1, 1, 2, 2), 9.0), 0)
    with pytest.raises(RuntimeError, match="changed or was dropped"):
        handle.dense()


def test_copies_are_made_before_their_source_can_be_reused(pool: PagePool) -> None:
    """Another thread must not get hold of a frame between the decision to copy it and the copy."""
    cache = PagedCache(pool)
    feed(cache, torch.tensor([[1, 2]]))
    twin, states = cache.fork(), []
    copy_blocks = pool.copy_blocks

    def spy(*args: Any) -> None:
        thread = threading.Thread(target=lambda: states.append(pool.manager.lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        copy_blocks(*args)

    pool.copy_blocks = spy  # type: ignore[method-assign]
    feed(twin, torch.tensor([[3]]))
    assert states == [False] and contents(twin) == [[1, 2, 3]]


def test_exception_inside_generate(llama: Any) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 12:
            raise ZeroDivisionError
        return scores

    pool = make_pool(llama)
    cache = PagedCache(pool)
    with pytest.raises(ZeroDivisionError):
        llama.generate(**prompts([9, 4]), max_new_tokens=9, num_beams=3, logits_processor=[fail], **{CACHE: cache})
    assert pool.stats().used > 0
    pool.check_integrity()
    cache.release()
    assert pool.stats().used == 0


def test_pickling_is_refused(pool: PagePool) -> None:
    for thing, words in ((PagedCache(pool), "PagedCache cannot be pickled"), (pool, "PagePool cannot be pickled")):
        with pytest.raises(TypeError, match=words):
            pickle.dumps(thing)
    with pytest.raises(TypeError, match="PagePool cannot be pickled or copied"):
        copy.deepcopy(pool)


def test_shallow_copy_is_a_fork(pool: PagePool) -> None:
    cache = PagedCache(pool)
    feed(cache, torch.tensor([[1, 2]]))
    twin = copy.copy(cache)
    feed(twin, torch.tensor([[3]]))
    assert contents(cache) == [[1, 2]] and contents(twin) == [[1, 2, 3]]


def test_wrong_arguments(pool: PagePool) -> None:
    with pytest.raises(TypeError, match="needs a PagePool, got str"):
        PagedCache("4GiB")  # type: ignore[arg-type]
    cache = PagedCache(pool)
    with pytest.raises(ValueError, match="repeats=0"):
        cache.fork(0)
    with pytest.raises(IndexError, match="uses layer 2, but the pool was made for 2 layers"):
        cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 3), 2)
    with pytest.raises(ValueError, match=r"delivers LayerGeometry\(kv_heads=1.*made for LayerGeometry\(kv_heads=2"):
        cache.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 3), 0)
    with pytest.raises(ValueError, match=r"delivers torch.bfloat16 keys.*dtype=torch.bfloat16"):
        cache.update(torch.zeros(1, 2, 1, 4).bfloat16(), torch.zeros(1, 2, 1, 3).bfloat16(), 0)
    feed(cache, torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match=r"holds 2 rows, but the model was called with 3"):
        feed(cache, torch.tensor([[1], [2], [3]]))
    cache.update(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 3), 0)
    with pytest.raises(RuntimeError, match="out of step with the other layers"):
        cache.update(torch.zeros(2, 2, 2, 4), torch.zeros(2, 2, 2, 3), 1)
    cache.reset()
    feed(cache, torch.tensor([[1], [2], [3]]))
    pool.check_integrity()


def test_caches_in_threads_share_a_pool(llama: Any) -> None:
    pool, inputs = make_pool(llama), prompts([9, 4])
    want = llama.generate(**inputs, max_new_tokens=6)
    failures: list[Any] = []

    def work() -> None:
        for _ in range(5):
            with PagedCache(pool) as cache:
                if not torch.equal(want, llama.generate(**inputs, max_new_tokens=6, **{CACHE: cache})):
                    failures.append("tokens differ")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.check_integrity()
    assert pool.stats().used == 0
