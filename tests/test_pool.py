"""PagePool: size, geometry, statistics, and a shortage at every point where a block is asked for."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_reuse import contents, feed
from tiny import CACHE, build, make_pool, poison, prompts
from transformers import GPTNeoXConfig, MambaConfig, MistralConfig

from hf_paged import LayerGeometry, PagedCache, PagePool, PoolExhausted
from hf_paged import pool as pool_module
from hf_paged.layout import geometry_of
from hf_paged.pool import default_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 2**29),
        ("64k", 64_000),
        ("10", 10),
        (7, 7),
        ("2ti", 2**41),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "4 XiB", "1.2.3GB", "-5GB", "3 i"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: give bytes, or text like '4GiB'"):
        parse_bytes(text)


def test_for_model(llama: Any) -> None:
    per_block = 3 * 2 * 2 * 16 * 4 * 16  # layers, keys and values, heads, head_dim, bytes, block size
    pool = PagePool.for_model(llama, memory=10 * per_block + 1)
    assert (pool.num_blocks, pool.block_size, pool.bytes_per_block) == (10, 16, per_block)
    assert pool.geometry == [LayerGeometry(2, 16, 16)] * 3
    assert PagePool.for_model(llama, num_blocks=5, block_size=8).block_size == 8
    assert PagePool.for_model(llama, num_blocks=5, dtype=torch.bfloat16).bytes_per_block == per_block / 2
    default = PagePool.for_model(llama)
    assert 0 < default.num_blocks * default.bytes_per_block <= default_budget(torch.device("cpu"))
    assert "5 blocks of 8 tokens, 3 layers, float32" in repr(PagePool.for_model(llama, num_blocks=5, block_size=8))


def test_a_container_has_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files, cpu = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"], torch.device("cpu")
    monkeypatch.setattr(pool_module, "CGROUP_LIMITS", files)
    machine = default_budget(cpu)
    for texts, budget in (
        (["max\n", None], machine),
        ([f"{2**24}\n", None], 2**22),
        ([None, f"{2**25}\n"], 2**23),
        (["max\n", f"{2**63 - 4096}\n"], machine),
    ):
        for file, text in zip(files, texts):
            file.unlink(missing_ok=True) if text is None else file.write_text(text)
        assert default_budget(cpu) == budget


def test_for_model_refuses(llama: Any) -> None:
    with pytest.raises(ValueError, match="memory='1KiB' holds no block: one block of 16 tokens takes 12288 bytes"):
        PagePool.for_model(llama, memory="1KiB")
    with pytest.raises(ValueError, match="give one of them"):
        PagePool.for_model(llama, memory="1GiB", num_blocks=4)
    with pytest.raises(ValueError, match="kernel='warp' is not known"):
        PagePool.for_model(llama, num_blocks=4, kernel="warp")
    with pytest.raises(ValueError, match="num_blocks=-1 must be an int of at least 1"):
        PagePool.for_model(llama, num_blocks=-1)
    with pytest.raises(ValueError, match="layers is empty: give one LayerGeometry"):
        PagePool([], num_blocks=4)


def test_geometry_from_configs() -> None:
    assert geometry_of(GPTNeoXConfig(num_hidden_layers=2)) == [LayerGeometry(64, 96, 96)] * 2
    assert geometry_of(MistralConfig(num_hidden_layers=2)) == [LayerGeometry(8, 128, 128)] * 2
    with pytest.raises(ValueError, match="LayerTypes has layers of type linear_attention, which keep other state"):
        geometry_of(LayerTypes(num_hidden_layers=2))


class LayerTypes(MistralConfig):
    model_type = "hf_paged_test"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layer_types = ["linear_attention", "full_attention"]


def test_a_model_without_keys_is_named() -> None:
    with pytest.raises(ValueError, match="MambaConfig has layers of type linear_attention"):
        geometry_of(MambaConfig(num_hidden_layers=2))
    headless = types.SimpleNamespace(get_text_config=lambda decoder: types.SimpleNamespace(num_hidden_layers=2))
    with pytest.raises(ValueError, match="SimpleNamespace names no attention heads"):
        geometry_of(headless)


def test_stats_add_up() -> None:
    pool = poison(PagePool([LayerGeometry(2, 4, 3)] * 2, num_blocks=40, block_size=4))
    cache = PagedCache(pool)
    feed(cache, torch.arange(12).view(2, 6))  # 2 rows x 2 blocks
    twin = cache.fork()
    stats = pool.stats()
    assert stats.free + stats.used + stats.cached == stats.num_blocks == 40
    assert (stats.used, stats.shared, stats.peak_used, stats.cow_copies) == (4, 4, 4, 0)
    feed(twin, torch.tensor([[1], [2]]))
    stats = pool.stats()
    assert (stats.used, stats.shared, stats.peak_used, stats.cow_copies) == (6, 2, 6, 2)
    cache.release()
    twin.release()
    stats = pool.stats()
    assert (stats.used, stats.shared, stats.peak_used, stats.free) == (0, 0, 6, 40)
    assert stats.bytes_per_block == 4 * 2 * 2 * 7 * 4 and stats.cached == stats.prefix_hit_tokens == 0
    assert pool.clear_prefix_cache() == 0


def snapshot(cache: PagedCache) -> Any:
    state, manager = cache._state, cache.pool.manager
    return (
        state.tables.table.tolist(),
        cache.lengths,
        cache.block_tables,
        state.width,
        [layer.width for layer in cache.layers],
        manager.ref_counts.tolist(),
        manager._free[: manager.num_free].tolist(),
        contents(cache) if state.width else None,
    )


@pytest.mark.parametrize("point", ["prefill", "decode", "copy on write", "after reorder"])
def test_shortage_changes_nothing(point: str) -> None:
    """A pool one block short: a typed error that says how short, the state as before, and a retry that works."""
    pool = poison(PagePool([LayerGeometry(2, 4, 3)] * 2, num_blocks=6, block_size=4))
    cache, other = PagedCache(pool), PagedCache(pool)
    new = torch.tensor([[50], [51]])
    if point == "prefill":
        feed(other, torch.arange(12)[None])  # 3 blocks; 4 more are needed
        new = torch.arange(10).view(2, 5)
    elif point == "decode":
        feed(cache, torch.arange(8).view(2, 4))  # 2 full blocks, 3 elsewhere: 1 free, 2 needed
        feed(other, torch.arange(12)[None])
    elif point == "copy on write":
        feed(cache, torch.arange(3)[None])
        cache.batch_repeat_interleave(2)
        twin = cache.fork()  # an outside holder, so both rows must copy
        feed(other, torch.arange(16)[None])
        assert twin.lengths == [3, 3]
    else:
        feed(cache, torch.arange(10).view(2, 5))
        cache.reorder_cache(torch.tensor([1, 1]))  # row 0's blocks are free again: 2 held
        feed(other, torch.arange(16)[None])
        assert pool.stats().free == 0
    before = snapshot(cache)
    needed = {"prefill": 4, "decode": 2, "copy on write": 2, "after reorder": 1}[point]
    with pytest.raises(PoolExhausted, match=f"{needed} needed, .* free of 6 .*cache.release") as error:
        feed(cache, new)
    free = pool.stats().free
    assert (error.value.needed, error.value.free, error.value.used) == (needed, free, 6 - free)
    assert isinstance(error.value, MemoryError)
    assert snapshot(cache) == before
    pool.check_integrity()
    other.release()
    feed(cache, new)
    assert [row[-new.shape[1] :] for row in contents(cache)] == new.tolist()
    pool.check_integrity()


@pytest.mark.parametrize("flags", [{}, dict(num_beams=4), dict(do_sample=True, num_return_sequences=4)])
def test_shortage_inside_generate(flags: dict[str, Any], llama: Any) -> None:
    """With every pool size that is too small: PoolExhausted, nothing lost after release, and the pool still works."""
    inputs, failed = prompts([11, 6]), 0
    want = llama.generate(**prompts([3]), max_new_tokens=2)
    for num_blocks in range(3, 60):
        pool = make_pool(llama, num_blocks)
        cache = PagedCache(pool)
        torch.manual_seed(0)
        try:
            llama.generate(**inputs, max_new_tokens=14, **{CACHE: cache}, **flags)
            break
        except PoolExhausted:
            failed += 1
        pool.check_integrity()
        cache.release()
        assert pool.stats().used == 0
        with PagedCache(pool) as again:
            assert torch.equal(want, llama.generate(**prompts([3]), max_new_tokens=2, **{CACHE: again}))
    assert failed > 2 and num_blocks < 59


def test_prefill_shortage_keeps_the_rows_of_the_caller(llama: Any) -> None:
    """The prefill runs fewer rows than the cache has; a shortage in it must not leave the cache with those few."""
    pool = make_pool(llama, 6)
    cache = PagedCache(pool)
    prefix = prompts([6])["input_ids"]
    with torch.no_grad():
        llama(prefix, **{CACHE: cache})
    cache.batch_repeat_interleave(3)
    before = cache.block_tables, pool.manager.ref_counts.tolist()
    ids = torch.cat([prefix, prompts([40], 5)["input_ids"]], 1).repeat(3, 1)
    with pytest.raises(PoolExhausted):
        llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **{CACHE: cache})
    assert (cache.block_tables, pool.manager.ref_counts.tolist()) == before
    pool.check_integrity()


def test_storage_follows_the_model_and_is_checked(llama: Any) -> None:
    pool = make_pool(llama, 8)
    other = build("gpt2")
    with (
        PagedCache(pool) as cache,
        torch.no_grad(),
        pytest.raises(ValueError, match=r"make the pool with PagePool\.for_model"),
    ):
        other(**prompts([4]), **{CACHE: cache})
    assert pool.stats().free == 8
    with pytest.raises(RuntimeError, match="layer 0 holds nothing yet"):
        PagePool([LayerGeometry(1, 8, 8)], num_blocks=2).storage(0)
    with pytest.raises(ValueError, match="delivers keys on meta, but its blocks are on cpu"):
        pool.storage_for(0, torch.empty(1, 2, 1, 16, device="meta"), torch.empty(1, 2, 1, 16, device="meta"))


def test_no_storage_before_the_first_keys(llama: Any) -> None:
    pool = PagePool.for_model(llama, memory="100TB", block_size=1024)
    assert pool._storage == [None] * 3 and pool.num_blocks > 10**6
    assert np.dtype(pool.manager.ref_counts.dtype) == np.int32


def test_layers_on_two_devices() -> None:
    """Each layer's storage is where its keys arrive; indices may come from either device. ("meta" keeps no contents.)"""
    pool = PagePool([LayerGeometry(2, 4, 4)] * 2, num_blocks=8, block_size=4, kernel="reference")
    cache = PagedCache(pool)
    devices = [torch.device("cpu"), torch.device("meta")]

    def feed(length: int) -> None:
        for layer, device in enumerate(devices):
            keys = torch.full((2, 2, length, 4), float(length), device=device)
            cache.update(keys, keys, layer)

    feed(3)
    assert [pool.storage(layer).keys.device for layer in range(2)] == devices
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.select([0, 0])
    feed(2)  # copies the shared block on both devices
    assert pool.stats().cow_copies == 1 and cache.lengths == [5, 5]
    keys = cache.layers[0].keys
    assert keys is not None and keys.dense()[:, 0, :, 0].tolist() == [[3, 3, 3, 2, 2]] * 2
    moved = torch.zeros(2, 2, 1, 4, device="meta")
    with pytest.raises(ValueError, match="delivers keys on meta, but its blocks are on cpu"):
        cache.update(moved, moved, 0)
