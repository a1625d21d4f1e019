"""Sliding windows: the right tokens are seen, and the others give their blocks back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_reuse import feed
from tiny import CACHE, condition, default, make_pool, paged, poison, prompts
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig

from hf_paged import LayerGeometry, PagedCache, PagePool, PoolExhausted
from hf_paged.kernels import KERNELS
from hf_paged.layout import Group, OwnLayer, groups_of


def test_groups() -> None:
    full, sliding = LayerGeometry(2, 16, 16), LayerGeometry(2, 16, 16, window=8)
    assert groups_of([full] * 3) == [Group(0, [0, 1, 2])]
    assert groups_of([sliding] * 3) == [Group(8, [0, 1, 2])]
    assert groups_of([sliding, full, sliding]) == [Group(0, [1]), Group(8, [0]), Group(8, [2])]
    assert groups_of([full, OwnLayer("Other", object), sliding, full, sliding]) == [Group(0, [0, 3]), Group(8, [2, 4])]
    assert groups_of([full, sliding._replace(key_dim=8)]) == [Group(0, [0, 1])], "different shapes share no frame"


@pytest.mark.parametrize("block_size", [4, 16, 256])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_past_the_window(kind: str, block_size: int, model_of: Callable[[str], Any]) -> None:
    """Window 8, prompts around it, 40 new tokens; gemma2 starts with a sliding layer, gemma3 with a full one."""
    model = model_of(kind)
    for lengths in ([5], [8], [9], [30], [5, 30, 9]):
        want = default(model, prompts(lengths), "eager" if kind == "gemma2" else "sdpa", max_new_tokens=40)
        assert torch.equal(want, paged(model, prompts(lengths), make_pool(model, 300, block_size), max_new_tokens=40))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_what_was_given_back_is_never_read(kind: str, kernel: str, model_of: Callable[[str], Any]) -> None:
    """NaN in every free frame before each step: the logits are those of the default cache."""
    model, ids = model_of(kind), prompts([40])["input_ids"]
    model.set_attn_implementation("sdpa")
    want = model(ids).logits.detach()
    model.set_attn_implementation("paged")
    pool = make_pool(model, 100, kernel=kernel)
    with torch.no_grad(), PagedCache(pool) as cache:
        parts = []
        for start, end in [(0, 11), (11, 12), (12, 30), *((i, i + 1) for i in range(30, 40))]:
            free = torch.from_numpy(pool.manager.ref_counts == 0)
            for storage in pool._storage:
                storage.keys[free] = storage.values[free] = float("nan")
            parts.append(model(ids[:, start:end], **{CACHE: cache}).logits)
            pool.check_integrity()
        torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_the_window_is_exact(block_size: int) -> None:
    """One layer, window 8: token i sees i - 7 and not i - 8, in a prefill and in a decode step."""
    size = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = MistralConfig(**size, num_hidden_layers=1, sliding_window=8, vocab_size=160, eos_token_id=None)
    model = condition(AutoModelForCausalLM.from_config(config), 2)
    model.set_attn_implementation("paged")
    pool, ids = make_pool(model, 40, block_size), prompts([30])["input_ids"]

    @torch.no_grad()
    def logits(changed: int, prefilled: int) -> torch.Tensor:
        other = ids.clone()
        other[0, changed] = 5
        with PagedCache(pool) as cache:
            parts = [model(other[:, :prefilled], **{CACHE: cache}).logits]
            parts += [model(other[:, i : i + 1], **{CACHE: cache}).logits for i in range(prefilled, 30)]
        return torch.cat(parts, 1)[0]

    for prefilled in (30, 3, 17):
        seen = (logits(12, prefilled) - logits(29, prefilled)).abs().amax(-1) > 1e-4  # 29 is seen by itself alone
        assert seen[12:20].all() and not seen[:12].any() and not seen[20:29].any()


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_each_layer_gets_its_own_window(kind: str, model_of: Callable[[str], Any]) -> None:
    model = model_of(kind)
    pool = make_pool(model)
    windows: list[int] = []
    kernel = KERNELS[pool.kernel]

    def spy(*args: Any) -> Any:
        windows.append(args[7])
        return kernel(*args)

    KERNELS[pool.kernel] = spy
    try:
        paged(model, prompts([30, 13]), pool, max_new_tokens=3)
    finally:
        KERNELS[pool.kernel] = kernel
    types = {"mistral": [8, 8, 8], "gemma2": [8, 0, 8], "gemma3": [0, 8, 0]}
    assert windows == types[kind] * 3


def test_blocks_come_back(model_of: Callable[[str], Any]) -> None:
    """Each sliding layer keeps the blocks of its window, the full one all of them."""
    pool = make_pool(model_of("gemma3"), 300)  # a full layer first and last, a sliding one between, in groups of one
    with PagedCache(pool) as cache:
        model_of("gemma3").generate(**prompts([50]), max_new_tokens=30, **{CACHE: cache})
        kept = [len(tables.block_ids()[0]) for tables in cache._state.groups]
    assert [group.window for group in pool.groups] == [0, 0, 8]
    assert kept == [20, 20, 3], "79 tokens in blocks of 4; a window of 8 touches 3 blocks"


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_peak_of_a_long_prompt(kind: str) -> None:
    """Window 512, 4000 tokens, 64 new: what is kept is the window and one chunk, not the prompt."""
    size = dict(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=99
    )
    if kind == "mistral":
        config = MistralConfig(**size, num_hidden_layers=2, sliding_window=512, eos_token_id=None)
    else:
        types = ["sliding_attention"] * 5 + ["full_attention"]
        config = Gemma3TextConfig(**size, num_hidden_layers=6, layer_types=types, sliding_window=512, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paged").eval()
    ids = torch.randint(3, 99, (1, 4000), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    pool = make_pool(model, 1600, 16)
    assert torch.equal(default(model, inputs, max_new_tokens=64), paged(model, inputs, pool, max_new_tokens=64))
    whole, window = -(-4063 // 16), (512 + 512) // 16 + 1
    full = sum(group.window == 0 for group in pool.groups)
    assert pool.stats().peak_used <= full * whole + (len(pool.groups) - full) * window


def tail(cache: PagedCache, count: int) -> list[int]:
    """The last tokens of the first row that `feed` wrote, from keys and values of every layer."""
    found = set()
    for index, (keys, values) in enumerate(cache):
        assert keys is not None and values is not None
        found.add(tuple((keys.dense()[0, 0, -count:, 0] - index).int().tolist()))
        found.add(tuple((values.dense()[0, 0, -count:, 0] + index).int().tolist()))
    (tokens,) = found
    return list(tokens)


def window_pool(num_blocks: int = 40) -> PagePool:
    return poison(PagePool([LayerGeometry(2, 4, 3, window=8)] * 2, num_blocks=num_blocks, block_size=4))


def test_rollback_of_the_last_pass_is_always_possible() -> None:
    cache = PagedCache(window_pool())
    feed(cache, torch.arange(1, 31)[None])
    feed(cache, torch.arange(31, 36)[None])
    cache.crop(-5)
    feed(cache, torch.arange(131, 134)[None])
    assert tail(cache, 10) == [*range(24, 31), 131, 132, 133]
    with pytest.raises(ValueError, match=r"cannot go back to 20 positions.*window of 8.*activate_past_recording"):
        cache.crop(-13)
    assert cache.get_seq_length() == 33
    cache.pool.check_integrity()


def test_recording_keeps_everything_until_the_crop() -> None:
    pool = window_pool()
    cache = PagedCache(pool)
    cache.layers[0].activate_past_recording()  # the cache's own method of that name is younger than 5.10
    assert cache.layers[0].record_past
    for start in range(1, 31, 5):
        feed(cache, torch.arange(start, start + 5)[None])
    assert pool.stats().used == 8
    cache.crop(-12)
    assert tail(cache, 7) == list(range(12, 19)) and pool.stats().used == 3
    pool.check_integrity()


def test_forks_and_shortage_with_windows() -> None:
    pool = window_pool(9)
    cache = PagedCache(pool)
    feed(cache, torch.arange(1, 31)[None])  # 8 blocks
    twin = cache.fork()
    feed(twin, torch.tensor([[77]]))  # gives back its hold on 5, copies none of them: 30 % 4 = 2, so the tail is copied
    assert tail(twin, 8) == [*range(24, 31), 77]
    assert pool.stats().used == 9
    with pytest.raises(PoolExhausted):
        feed(cache, torch.arange(31, 60)[None])
    feed(cache, torch.tensor([[88]]))  # the sole holder of its tail by now, and of the five that it gives back
    assert tail(cache, 8) == [*range(24, 31), 88]
    assert pool.stats().used == 4
    pool.check_integrity()


def test_shortage_over_all_groups_changes_nothing() -> None:
    layers = [LayerGeometry(2, 4, 3), LayerGeometry(2, 4, 3, window=8)]
    pool = poison(PagePool(layers, num_blocks=7, block_size=4))
    assert len(pool.groups) == 2
    cache = PagedCache(pool)
    feed(cache, torch.arange(1, 9)[None])  # 2 blocks in each group
    before = [tables.table.tolist() for tables in cache._state.groups], pool.manager.ref_counts.tolist()
    with pytest.raises(PoolExhausted, match="4 needed, 3 free"):
        feed(cache, torch.arange(9, 15)[None])
    assert before == ([tables.table.tolist() for tables in cache._state.groups], pool.manager.ref_counts.tolist())
    pool.check_integrity()


@pytest.mark.parametrize("flags", [{}, dict(num_beams=3), dict(prefill_chunk_size=7)])
def test_masks_that_look_back_further_than_the_cache(
    flags: dict[str, Any], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config with a window, and a model that never asks for a sliding mask: what the default cache has dropped is not
    seen, and what was given back is never read. Other attention would read it, and is told so."""
    monkeypatch.setattr(llama.config, "sliding_window", 8, raising=False)
    inputs = prompts([30, 13])
    want = default(llama, inputs, max_new_tokens=20, **flags)
    pool = make_pool(llama, 200)
    assert [group.window for group in pool.groups] == [8] and not pool.masks_slide
    assert torch.equal(want, paged(llama, inputs, pool, max_new_tokens=20, **flags))
    llama.set_attn_implementation("sdpa")
    with (
        PagedCache(pool) as cache,
        pytest.raises(RuntimeError, match=r"keeps a window of 8 tokens.*implementation=.paged"),
    ):
        llama.generate(**inputs, max_new_tokens=20, **flags, **{CACHE: cache})


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_not_one_block_more_than_the_window_shows(block_size: int) -> None:
    """Token by token: the blocks of the last 5 tokens, exactly."""
    pool = PagePool([LayerGeometry(1, 8, 8, window=5)], num_blocks=40, block_size=block_size, kernel="reference")
    cache = PagedCache(pool)
    for length in range(1, 30):
        keys = torch.zeros(1, 1, 1, 8)
        cache.update(keys, keys, 0)
        first = max(0, length - 5)
        assert pool.stats().used == (length - 1) // block_size - first // block_size + 1
