"""What fails at any one place leaves the caches as they were, leaks nothing, and can be tried again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CACHE, default, make_pool, prompts

from hf_paged import PagedCache, PagePool, PoolExhausted, packing, reuse
from hf_paged.blocks import BlockManager
from hf_paged.state import CacheState

NEW = dict(max_new_tokens=2)


def rows_of(state: CacheState) -> list[Any]:
    """Tables, lengths and the contents of all blocks that the rows hold."""
    pool, kept = state.pool, [state.width, None if state.real is None else state.real.copy()]
    for group, tables in zip(pool.groups, state.groups):
        kept += [tables.block_ids(), tables.lengths.copy(), tables.starts.copy()]
        for layer in group.layers:
            if pool._storage[layer] is not None:
                kept += [tensor[tables.held_frames()].clone() for tensor in pool.storage(layer)[:2]]
    return kept


def assert_same(before: list[Any], after: list[Any]) -> None:
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        else:
            np.testing.assert_equal(new, old)


class Fault:
    """Raises an error at the n-th call, and tells whether there was one."""

    def __init__(self) -> None:
        self.left = 0

    def hits(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """The n-th call for blocks finds none; tables, counts and contents are compared around the pass that fails."""
    fault, require, begin = Fault(), BlockManager.require, CacheState.begin

    def failing(self: BlockManager, count: int) -> None:
        if fault.hits():
            raise PoolExhausted(count, 0, self.num_blocks, self.num_blocks, self.num_blocks)
        require(self, count)

    def watched(self: CacheState, *args: Any) -> Any:
        manager, index = self.pool.manager, self.pool.prefixes
        if self.width == 0 and self.tables.num_rows not in (0, args[0]) and self.packing is None:
            self._drop_rows()  # part of the call, and nothing to keep
        before, counts = rows_of(self), (manager.ref_counts - index.held).copy()
        try:
            return begin(self, *args)
        except PoolExhausted:
            assert_same(before, rows_of(self))
            assert np.array_equal(counts, manager.ref_counts - index.held)
            raise

    monkeypatch.setattr(BlockManager, "require", failing)
    monkeypatch.setattr(CacheState, "begin", watched)
    return fault


def shared_beginning(count: int = 3) -> dict[str, torch.Tensor]:
    """Rows that begin alike, of different lengths."""
    inputs = prompts([24, 21, 22][:count])
    for row, length in enumerate([24, 21, 22][:count]):
        start = 24 - length
        inputs["input_ids"][row, start : start + 14] = torch.arange(20, 34)
    return inputs


# What runs, the flags of `generate`, and what happened before: nothing, the same prompt, a turn of this very cache, a fork of
# it, two caches that were joined.
CASES: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], dict[str, Any], str]] = {
    "prefill": (lambda: prompts([9, 9]), {}, ""),
    "packed": (lambda: prompts([9, 4, 6]), {}, ""),
    "chunked": (lambda: prompts([9, 4]), dict(prefill_chunk_size=4), ""),
    "beams": (lambda: prompts([9, 6]), dict(num_beams=3), ""),
    "samples": (lambda: prompts([9]), dict(num_return_sequences=3, do_sample=True), ""),
    "adoption": (lambda: prompts([17, 9]), {}, "known"),
    "adoption at one width": (lambda: prompts([17, 17]), dict(prefill_chunk_size=4), "known"),
    "shared beginnings": (shared_beginning, {}, ""),
    "second turn": (lambda: prompts([13]), {}, "turn"),
    "fork": (lambda: prompts([13]), {}, "fork"),
    "join": (lambda: prompts([13, 13]), {}, "join"),
}


def prepared(model: Any, pool: PagePool, inputs: dict[str, torch.Tensor], before: str) -> tuple[PagedCache, Any]:
    """The cache that the case runs on, and another one that lives beside it."""
    cache = PagedCache(pool)
    if before == "known":
        with PagedCache(pool) as other:
            model.generate(**inputs, max_new_tokens=1, **{CACHE: other})
    elif before == "join":
        parts = [PagedCache(pool) for _ in inputs["input_ids"]]
        for row, part in enumerate(parts):
            with torch.no_grad():
                model(inputs["input_ids"][row : row + 1, :6], **{CACHE: part})
        return PagedCache.join(parts), parts
    elif before:
        with torch.no_grad():
            model(inputs["input_ids"][:, :6], **{CACHE: cache})
        return (cache.fork(), [cache]) if before == "fork" else (cache, [])
    return cache, []


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_no_blocks_at_any_one_place(
    case: str, kind: str, model_of: Any, shortage: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "MIN_SAVED", 4)
    make, flags, before = CASES[case]
    model, inputs = model_of(kind), make()
    want = default(model, inputs, **NEW, **flags)
    place = 0
    while True:
        place += 1
        shortage.left = 0
        pool = make_pool(model, 200)
        cache, others = prepared(model, pool, inputs, before)
        width, kept = cache.get_seq_length(), [rows_of(other._state) for other in others]
        used = pool.stats().used
        shortage.left = place
        try:
            torch.manual_seed(0)
            got = model.generate(**inputs, **NEW, **flags, **{CACHE: cache})
        except PoolExhausted as error:
            error.__traceback__ = None
            shortage.left = 0
            pool.check_integrity()
            for old, new in zip(kept, [rows_of(other._state) for other in others]):
                assert_same(old, new)
            if cache.get_seq_length() == width:
                assert pool.stats().used == used, "a failed prefill kept blocks"
            elif width and kind == "llama":  # failed at a later token
                cache.crop(width - cache.get_seq_length())
            elif width:  # windows do not go back that far
                cache, others = prepared(model, pool, inputs, before)
            else:
                cache.reset()
            torch.manual_seed(0)
            got = model.generate(**inputs, **NEW, **flags, **{CACHE: cache})
            assert torch.equal(want, got), f"after a shortage at place {place}"
            del cache
            del others
            gc.collect()
            assert pool.stats().used == 0
            continue
        assert torch.equal(want, got)
        break
    assert place > 2, "prefill and decode were not both hit"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Fault:
    fault, copy_blocks = Fault(), PagePool.copy_blocks

    def failing(self: PagePool, copy_from: Any, copy_to: Any) -> None:
        if len(copy_from) and fault.hits():
            raise MemoryError("no room for the copy")
        copy_blocks(self, copy_from, copy_to)

    monkeypatch.setattr(PagePool, "copy_blocks", failing)
    return fault


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a_copy_that_fails_is_undone(kind: str, model_of: Any, copies: Fault) -> None:
    """Three rows of one prompt, none of which may write into its last block before it has its own."""
    model, inputs = model_of(kind), prompts([14])
    pool = make_pool(model)
    cache = PagedCache(pool)
    with torch.no_grad():
        model(inputs["input_ids"], **{CACHE: cache})
        twin, new = cache.fork(3), torch.tensor([[5], [6], [7]])
        kept, used = rows_of(twin._state), pool.stats().used
        copies.left = 1
        with pytest.raises(MemoryError, match="no room for the copy"):
            model(new, **{CACHE: twin})
        assert_same(kept, rows_of(twin._state))
        pool.check_integrity()
        assert pool.stats().used == used
        got = model(new, **{CACHE: twin}).logits
        model.set_attn_implementation("sdpa")
        want = model(torch.cat([inputs["input_ids"].repeat(3, 1), new], 1)).logits[:, -1:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert cache.lengths == [14] and pool.stats().cow_copies >= 3


@pytest.mark.parametrize("lengths", [[9, 9], [9, 4]], ids=["padded", "packed"])
@pytest.mark.parametrize("where", ["storage", "write", "kernel"])
def test_memory_that_runs_out_inside_a_pass(
    where: str, lengths: list[int], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer of every pass of a generate: the error comes out, nothing stays behind, and the next try is right."""
    from hf_paged import attention as attention_module
    from hf_paged import layers as layers_module

    fault = Fault()

    def fail_in(function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any) -> Any:
            if fault.hits():
                raise MemoryError("no room")
            return function(*args)

        return failing

    if where == "storage":
        monkeypatch.setattr(PagePool, "_allocate", fail_in(PagePool._allocate))
    else:
        module, name = (layers_module, "WRITERS") if where == "write" else (attention_module, "KERNELS")
        table = getattr(module, name)
        monkeypatch.setattr(module, name, {key: fail_in(function) for key, function in table.items()})
    inputs = prompts(lengths)
    want, place = default(llama, inputs, **NEW), 0
    while True:
        place += 1
        pool = PagePool.for_model(llama, num_blocks=60, block_size=4)
        cache = PagedCache(pool)
        fault.left = place
        try:
            got = llama.generate(**inputs, **NEW, **{CACHE: cache})
        except MemoryError as error:
            error.__traceback__ = None
            fault.left = 0
            pool.check_integrity()
            assert type(llama) not in packing._padded_only, "a shortage says nothing about the model"
            if cache.get_seq_length():
                cache.reset()
            assert pool.stats().used == 0
            assert torch.equal(want, llama.generate(**inputs, **NEW, **{CACHE: cache})), f"place {place}"
            continue
        assert torch.equal(want, got)
        break
    assert place > 3


def test_tokens_of_a_pass_that_failed_are_not_taken_for_those_fed_by_hand(llama: Any) -> None:
    """A second turn, or a decode step, finds no blocks; the user goes on by hand with other tokens."""
    pool, ids = make_pool(llama, 9), prompts([12], 3)["input_ids"]
    cache, guest = PagedCache(pool), PagedCache(pool)
    out = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **{CACHE: cache})
    turn = torch.cat([out, prompts([8], 4)["input_ids"]], 1)
    with torch.no_grad():
        llama(prompts([16], 5)["input_ids"], **{CACHE: guest})
    with pytest.raises(PoolExhausted):
        llama.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=1, **{CACHE: cache})
    guest.release()
    with torch.no_grad():
        llama(prompts([9], 6)["input_ids"], **{CACHE: cache})
    cache.release()
    want = default(llama, dict(input_ids=turn, attention_mask=torch.ones_like(turn)), max_new_tokens=4)
    with PagedCache(pool) as cache:
        assert torch.equal(
            want, llama.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=4, **{CACHE: cache})
        )


def test_reading_keys_after_an_interrupt_does_not_hide_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed second turn is interrupted between two layers; the user looks at the keys, then lets go of the cache."""
    pool, first = make_pool(llama), prompts([9, 9])
    cache = PagedCache(pool)
    out = llama.generate(**first, max_new_tokens=2, **{CACHE: cache})
    more = prompts([14, 11], 4)
    turn = dict(
        input_ids=torch.cat([out, more["input_ids"]], 1),
        attention_mask=torch.cat([torch.ones_like(out), more["attention_mask"]], 1),
    )
    update = PagedCache.update

    def interrupted(self: Any, key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return update(self, key, value, layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llama.generate(**turn, max_new_tokens=1, **{CACHE: cache})
    assert cache.layers[0].keys is not None and cache._state.packing is None
    cache.release()
    want = default(llama, turn, max_new_tokens=4)
    with PagedCache(pool) as cache:
        assert torch.equal(want, llama.generate(**turn, max_new_tokens=4, **{CACHE: cache}))


def test_handles_outlive_a_shortage_in_a_window(model_of: Any) -> None:
    """A pass finds no blocks: what the window no longer shows has not been given back, and the last pass can be undone."""
    model = model_of("mistral")
    pool, ids = make_pool(model, 8), prompts([14])["input_ids"]
    cache, guest = PagedCache(pool), PagedCache(pool)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        keys = cache.layers[0].keys
        assert keys is not None
        kept = rows_of(cache._state)
        model(ids[:, :12], **{CACHE: guest})
        with pytest.raises(PoolExhausted):
            model(prompts([16], 2)["input_ids"], **{CACHE: cache})
    assert_same(kept, rows_of(cache._state))
    assert torch.isfinite(keys.dense()).all()
    cache.crop(-8)
    assert cache.lengths == [6]
