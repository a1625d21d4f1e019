"""Samples and beams: what they cost in blocks, copies and computed rows, and that every beam is the right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_padding import kernel_calls
from tiny import CACHE, default, make_pool, paged, poison, prompts
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged import LayerGeometry, PagedCache, PagePool


@pytest.mark.parametrize("block_size", [4, 16])
def test_many_samples_fit_a_small_pool(block_size: int, llama: Any) -> None:
    """128 samples of one 512-token prompt, in a pool far too small for 128 copies of it."""
    bound = math.ceil(512 / block_size) + 128 * (math.ceil(32 / block_size) + 1)
    assert bound * block_size < 128 * 512 / 4
    pool = make_pool(llama, bound, block_size)
    inputs = prompts([512])
    flags = dict(num_return_sequences=128, do_sample=True, max_new_tokens=32)
    assert torch.equal(default(llama, inputs, **flags), paged(llama, inputs, pool, **flags))
    assert pool.stats().peak_used <= bound


def test_samples_peak_blocks(llama: Any) -> None:
    """1024 tokens, 8 samples, 64 new: 64 shared blocks and 4 of each sample's own; 8 dense copies would be 544."""
    pool = make_pool(llama, 544, 16)
    with kernel_calls(pool) as calls:
        paged(llama, prompts([1024]), pool, num_return_sequences=8, do_sample=True, max_new_tokens=64)
    assert pool.stats().peak_used == 96
    assert [rows for rows, _ in calls[:3]] == [1, 1, 1], "the prefill computed more than one row"


def test_beam_peak_blocks_and_copies(llama: Any) -> None:
    pool = make_pool(llama, 200, 16)
    copies: list[int] = []
    copy_blocks = pool.copy_blocks
    pool.copy_blocks = lambda source, target: (copies.append(len(source)), copy_blocks(source, target))[1]  # type: ignore
    paged(llama, prompts([512]), pool, num_beams=4, max_new_tokens=64)
    assert pool.stats().peak_used <= 32 + 4 * 5
    assert max(copies) <= 4 and sum(copies) == pool.stats().cow_copies > 0


@pytest.mark.parametrize("beams", [dict(num_beams=8), dict(do_sample=True, num_return_sequences=8)])
def test_prompt_is_computed_once(beams: dict[str, Any], llama: Any) -> None:
    pool = make_pool(llama, 400, 16)
    with kernel_calls(pool) as calls:
        paged(llama, prompts([2048]), pool, max_new_tokens=2, **beams)
    assert calls == [(1, 2048)] * 3 + [(8, 8)] * 3  # (rows, query tokens) of each layer in each forward pass


def test_batch_of_ragged_beams(llama: Any) -> None:
    """16 prompts x 8 beams."""
    inputs = prompts([int(n) for n in np.random.default_rng(0).integers(1, 40, 16)])
    flags = dict(num_beams=8, max_new_tokens=8)
    pool = make_pool(llama, 900)
    with kernel_calls(pool) as calls:
        assert torch.equal(default(llama, inputs, **flags), paged(llama, inputs, pool, **flags))
    assert calls[0] == (16, int(inputs["attention_mask"].sum()))


def test_decode_makes_no_temporary_of_the_size_of_the_cache(llama: Any) -> None:
    """8192 cached tokens in 2 rows: no tensor made in a decode step is as large as one layer's keys."""

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in storages:
                self.bytes = max(self.bytes, out.untyped_storage().nbytes())
            return out

    pool = make_pool(llama, 1100, 16)
    with PagedCache(pool) as cache, torch.no_grad():
        for layer in cache.layers:
            layer.update(torch.zeros(2, 2, 8192, 16), torch.zeros(2, 2, 8192, 16))
        with Largest() as largest:
            llama(torch.tensor([[5], [6]]), **{CACHE: cache})
        one_layer = 2 * 2 * 8192 * 16 * 4
        assert 0 < largest.bytes < one_layer


def spy_on_reorder(cache: PagedCache) -> list[list[int]]:
    reorders: list[list[int]] = []
    reorder = cache.reorder_cache

    def spy(beam_idx: torch.Tensor) -> None:
        reorders.append(beam_idx.tolist())
        reorder(beam_idx)

    cache.reorder_cache = spy  # type: ignore[method-assign]
    return reorders


def test_every_beam_is_reordered(model_of: Callable[[str], Any]) -> None:
    """All returned sequences and their beam indices, and a reorder at every step."""
    for kind in ["llama", "gemma3"]:
        model, inputs = model_of(kind), prompts([16, 21])
        flags = dict(
            num_beams=5, num_return_sequences=5, max_new_tokens=24, return_dict_in_generate=True, output_scores=True
        )
        want = default(model, inputs, **flags)
        with PagedCache(make_pool(model)) as cache:
            reorders = spy_on_reorder(cache)
            got = model.generate(**inputs, **{CACHE: cache}, **flags)
        assert torch.equal(want.sequences, got.sequences)
        assert torch.equal(want.beam_indices, got.beam_indices)
        torch.testing.assert_close(want.sequences_scores, got.sequences_scores)
        assert len(reorders) == 24
        assert any(idx != list(range(10)) for idx in reorders)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_contents_follow_their_beams(block_size: int) -> None:
    """Keys and values, each by itself, against dense tensors that are copied at every step."""
    generator = torch.Generator().manual_seed(0)
    pool = poison(PagePool([LayerGeometry(2, 8, 6)] * 2, num_blocks=300, block_size=block_size))
    with PagedCache(pool) as cache:
        dense = [(torch.empty(4, 2, 0, 8), torch.empty(4, 2, 0, 6)) for _ in range(2)]
        for step in range(40):
            length = int(torch.randint(1, 4, (1,), generator=generator))
            for index, (keys, values) in enumerate(dense):
                key, value = (
                    torch.randn(4, 2, length, 8, generator=generator),
                    torch.randn(4, 2, length, 6, generator=generator),
                )
                dense[index] = torch.cat([keys, key], 2), torch.cat([values, value], 2)
                got = cache.update(key, value, index)
                assert torch.equal(got[0].dense(), dense[index][0]) and torch.equal(got[1].dense(), dense[index][1])
            beam_idx = torch.randint(0, 4, (4,), generator=generator) if step % 3 else torch.arange(4)
            cache.reorder_cache(beam_idx)
            dense = [(keys[beam_idx], values[beam_idx]) for keys, values in dense]
            for layer, (keys, values) in zip(cache.layers, dense):
                assert torch.equal(layer.keys.dense(), keys) and torch.equal(layer.values.dense(), values)
            pool.check_integrity()
    assert pool.stats().free == 300


def test_reorder_touches_no_keys_or_values() -> None:
    """64 rows of 512 blocks each: a reorder runs not one torch operation on the storage."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += any(isinstance(arg, torch.Tensor) and arg.dim() == 4 for arg in args)
            return func(*args, **(kwargs or {}))

    pool = poison(PagePool([LayerGeometry(1, 8, 8)], num_blocks=600, block_size=4))
    with PagedCache(pool) as cache:
        cache.update(torch.zeros(1, 1, 2048, 8), torch.zeros(1, 1, 2048, 8), 0)
        cache.batch_repeat_interleave(64)
        with Count() as count:
            cache.reorder_cache(torch.randint(0, 64, (64,)))
        assert count.calls == 0
        assert pool.stats().used == 512


def test_more_samples_than_before_on_one_pool(model_of: Callable[[str], Any]) -> None:
    """num_return_sequences 3, then 5, with sliding and full layers, on one pool."""
    model = model_of("gemma3")
    pool, inputs = make_pool(model), prompts([16, 21])
    for samples in (3, 5):
        flags = dict(num_return_sequences=samples, do_sample=True, max_new_tokens=12)
        assert torch.equal(default(model, inputs, **flags), paged(model, inputs, pool, **flags))


def test_identity_reorder_is_free() -> None:
    pool = poison(PagePool([LayerGeometry(1, 8, 8)], num_blocks=50, block_size=4))
    with PagedCache(pool) as cache:
        cache.update(torch.zeros(3, 1, 6, 8), torch.zeros(3, 1, 6, 8), 0)
        handle, table = cache.layers[0].keys, cache._state.tables.table
        before = table.copy(), pool.manager.ref_counts.copy()
        cache.reorder_cache(torch.arange(3))
        assert cache._state.tables.table is table and np.array_equal(table, before[0])
        assert np.array_equal(pool.manager.ref_counts, before[1])
        assert pool.stats().cow_copies == 0
        assert handle.current, "the identity must not even invalidate what was read before"
