"""Prefixes that live on: tokens as with the default cache, and how many of them were computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import CACHE, KNOWS_POSITIONS, PAD, VOCAB, build, default, make_pool, paged, prompts

from hf_paged import PagedCache, PagePool, prefix

KINDS = ["llama", "gpt2", "mistral", "gemma3"]
GREEDY: dict[str, Any] = dict(max_new_tokens=9)


def random_ids(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens that every forward pass writes, one entry each."""
    counts: list[int] = []
    begin = PagedCache.__init__.__globals__["CacheState"].begin

    def spy(self: Any, *args: Any) -> Any:
        plan = begin(self, *args)
        counts.append(int(plan._host.cu_seqlens_q[-1]))
        return plan

    monkeypatch.setattr(PagedCache.__init__.__globals__["CacheState"], "begin", spy)
    return counts


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_chat_with_a_fresh_cache_each_turn(kind: str, block_size: int, model_of: Any, computed: list[int]) -> None:
    """Each turn computes what is new and the partial block before it: generated tokens are found again too."""
    model = model_of(kind)
    pool, ids = make_pool(model, block_size=block_size), random_ids(1, 37)
    for turn in range(4):
        want = default(model, whole(ids), max_new_tokens=11)
        known = 0 if turn == 0 else (ids.shape[1] - 6 - 1) // block_size * block_size
        del computed[:]
        assert torch.equal(want, paged(model, whole(ids), pool, max_new_tokens=11))
        assert computed[0] == ids.shape[1] - known, f"turn {turn}"
        ids = torch.cat([want, random_ids(1, 6, turn)], 1)


@pytest.mark.parametrize("flags", [{}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch_after_each_of_its_rows(kind: str, flags: dict[str, Any], model_of: Any) -> None:
    """Every row of a left-padded batch takes over what it can."""
    model, inputs = model_of(kind), prompts([30, 9, 21])
    pool = make_pool(model)
    for row, length in enumerate((17, 9, 14)):
        ids = inputs["input_ids"][row : row + 1, -[30, 9, 21][row] :][:, :length]
        paged(model, whole(ids), pool, max_new_tokens=1)
    before = pool.stats().prefix_hit_tokens
    want = default(model, inputs, **GREEDY, **flags)
    assert torch.equal(want, paged(model, inputs, pool, **GREEDY, **flags))
    assert pool.stats().prefix_hit_tokens - before == (16 + 8 + 12 if KNOWS_POSITIONS else 0)
    assert torch.equal(want, paged(model, inputs, pool, **GREEDY, **flags))  # all of it is known now


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_batch_share_what_they_begin_with(
    kind: str, prefix_caching: bool, model_of: Any, computed: list[int]
) -> None:
    """A preamble of 100 tokens for six questions, two of which share 80 more: computed once each."""
    model, pool = model_of(kind), make_pool(model_of(kind), 1000, prefix_caching=prefix_caching)
    preamble, more = random_ids(1, 100, 1), random_ids(1, 80, 2)
    rows = [
        torch.cat([preamble, *([more] if row < 2 else []), random_ids(1, 9 + row, 10 + row)], 1) for row in range(6)
    ]
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.cat([torch.full((1, width - row.shape[1]), PAD), row], 1) for row in rows])
    inputs = dict(input_ids=ids, attention_mask=(ids != PAD).long())
    want = default(model, inputs, **GREEDY)
    del computed[:]
    assert torch.equal(want, paged(model, inputs, pool, **GREEDY))
    prefill = sum(computed[: -(GREEDY["max_new_tokens"] - 1)])
    new = sum(9 + row for row in range(6))
    assert prefill == (100 + 80 + new if KNOWS_POSITIONS else 6 * 100 + 2 * 80 + new)
    assert prefix_caching or pool.stats().free == pool.num_blocks


def test_prompt_of_whole_blocks_twice(llama: Any, computed: list[int]) -> None:
    """Everything is known: one token is computed all the same."""
    pool, ids = make_pool(llama), random_ids(1, 20)
    want = default(llama, whole(ids), **GREEDY)
    for computes in (20, 1):
        del computed[:]
        assert torch.equal(want, paged(llama, whole(ids), pool, **GREEDY))
        assert computed[0] == computes


def test_hash_collisions_change_nothing(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "digest_of", lambda parent, block: b"the same for all")
    pool = make_pool(llama)
    for seed in range(4):
        inputs = whole(random_ids(2, 23, seed // 2))
        assert torch.equal(default(llama, inputs, **GREEDY), paged(llama, inputs, pool, **GREEDY))


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(0.3)


def _through_data(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


def _optimizer(fused: bool) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        model(input_ids=random_ids(1, 8), labels=random_ids(1, 8)).loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return step


def _state_dict(model: Any) -> None:
    model.load_state_dict(build("llama", seed=3).state_dict())


def _new_parameter(model: Any) -> None:
    projection = model.model.layers[1].self_attn.v_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 1.5)


CHANGES = [_in_place, _through_data, _optimizer(False), _optimizer(True), _state_dict, _new_parameter]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__qualname__)
def test_changed_weights_find_nothing_stale(change: Callable[[Any], None]) -> None:
    model = build("llama")
    pool, inputs = make_pool(model), whole(random_ids(2, 30))
    paged(model, inputs, pool, **GREEDY)
    kept = PagedCache(pool)
    model.generate(**inputs, **GREEDY, **{CACHE: kept})
    hits = pool.stats().prefix_hit_tokens
    assert hits == 2 * 28
    change(model)
    want = default(model, inputs, **GREEDY)
    assert torch.equal(want, paged(model, inputs, pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == hits
    # A cache from before goes on, as the default cache would, but leaves nothing under the new weights.
    turn = whole(torch.cat([want, random_ids(2, 5, 6)], 1))
    cached = kept.lengths[0]
    model.generate(**turn, **GREEDY, **{CACHE: kept})
    kept.release()
    fresh = default(model, turn, **GREEDY)
    assert torch.equal(fresh, paged(model, turn, pool, **GREEDY)) and cached == 38


@pytest.mark.parametrize("forget", [False, True])
def test_a_cache_from_before_leaves_nothing_under_changed_weights(forget: bool) -> None:
    """Nor where the index knows its blocks no longer, and would take them under any weights."""
    model = build("llama")
    pool, ids = make_pool(model), random_ids(1, 30)
    with PagedCache(pool) as kept:
        out = model.generate(**whole(ids), **GREEDY, **{CACHE: kept})
        _in_place(model)
        if forget:
            pool.clear_prefix_cache()
        turn = whole(torch.cat([out, random_ids(1, 5, 6)], 1))
        model.generate(**turn, **GREEDY, **{CACHE: kept})
    assert torch.equal(default(model, turn, **GREEDY), paged(model, turn, pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == 0


class Adapted(torch.nn.Module):
    """A linear layer with two adapters, as PEFT's are: the same parameters whichever is active."""

    def __init__(self, base: torch.nn.Module):
        super().__init__()
        self.base, self._active_adapter, self._disable_adapters = base, ["first"], False
        self.scaling = {"first": 1.5, "second": 0.5}

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) if self._disable_adapters else self.base(x) * self.scaling[self._active_adapter[0]]


def test_switched_adapters_find_nothing_stale() -> None:
    model = build("llama")
    attention = model.model.layers[0].self_attn
    attention.k_proj = adapted = Adapted(attention.k_proj)
    pool, inputs = make_pool(model), whole(random_ids(1, 30))
    for state in (dict(_active_adapter=["second"]), dict(_disable_adapters=True), dict(_active_adapter=["first"])):
        for name, value in state.items():
            setattr(adapted, name, value)
        assert torch.equal(default(model, inputs, **GREEDY), paged(model, inputs, pool, **GREEDY))
        assert pool.stats().prefix_hit_tokens == 0
    adapted._disable_adapters = False
    adapted._active_adapter = ["second"]
    assert torch.equal(default(model, inputs, **GREEDY), paged(model, inputs, pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == 28  # what was switched back to is still there


def test_another_salt_or_model_finds_nothing(llama: Any) -> None:
    pool, inputs = make_pool(llama), whole(random_ids(1, 30))
    for salt in ("tenant 1", "tenant 2", ""):
        with PagedCache(pool, salt=salt) as cache:
            llama.generate(**inputs, **GREEDY, **{CACHE: cache})
    assert pool.stats().prefix_hit_tokens == 0
    other = build("llama", seed=3)
    assert torch.equal(default(other, inputs, **GREEDY), paged(other, inputs, pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == 0


@pytest.mark.parametrize("how", ["dropout", "embeds", "positions", "sdpa", "dense"])
def test_where_ids_do_not_tell_nothing_is_kept(how: str, model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    pool, inputs = make_pool(model), whole(random_ids(1, 30))
    extra: dict[str, Any] = {}
    if how == "dropout":
        monkeypatch.setattr(model.config, "attention_dropout", 0.1)
        model.train()
    elif how == "embeds":
        extra["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    elif how == "positions":
        extra["position_ids"] = torch.arange(5, 35)[None]
    elif how == "sdpa":
        model.set_attn_implementation("sdpa")
    else:
        extra["output_attentions"] = True
    attention = "eager" if how == "dense" else "sdpa"
    for _ in range(2):  # the second finds nothing, and computes the same
        want = default(model, inputs, attention, **extra, **GREEDY)
        got = paged(model, inputs, pool, **extra, **GREEDY)
        assert how == "dropout" or torch.equal(want, got)
        assert pool.stats().cached == 0
    model.eval()


def test_image_placeholders_never_match(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ids, other images: what stands at and after the first placeholder is computed each time."""
    monkeypatch.setattr(llama.config, "image_token_id", 7, raising=False)
    pool, ids = make_pool(llama), random_ids(1, 30).clamp_min(8)
    ids[0, 14] = 7
    for _ in range(2):
        paged(llama, whole(ids), pool, **GREEDY)
    assert pool.stats().prefix_hit_tokens == 14


def test_tokens_fed_by_hand_are_never_taken_for_others(llama: Any) -> None:
    """After `generate`, the model is run by hand on a token of the caller's choice, cropped, and run on another."""
    pool, ids = make_pool(llama), random_ids(1, 12)
    cache = PagedCache(pool)
    out = llama.generate(**whole(ids), **GREEDY, **{CACHE: cache})
    cache.crop(-4)
    with torch.no_grad():
        llama(random_ids(1, 12, 9), **{CACHE: cache})
    cache.release()
    assert pool.stats().cached == 16 // 4
    for tail in (random_ids(1, 12, 9), random_ids(1, 12, 8)):
        turn = whole(torch.cat([out[:, :16], tail], 1))
        assert torch.equal(default(llama, turn, **GREEDY), paged(llama, turn, pool, **GREEDY))


def test_assisted_and_prompt_lookup_after_hits(llama: Any) -> None:
    pool, ids = make_pool(llama), random_ids(1, 10).repeat(1, 3)
    flags = dict(max_new_tokens=20, eos_token_id=VOCAB)  # prompt lookup of 5.0 cannot do without one
    want = default(llama, whole(ids), **flags)
    for _ in range(2):
        assert torch.equal(want, paged(llama, whole(ids), pool, prompt_lookup_num_tokens=3, **flags))
        assert torch.equal(want, paged(llama, whole(ids), pool, **flags))


@pytest.mark.parametrize("attn", ["paged", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_chunks_on_what_is_cached(kind: str, attn: str, model_of: Any) -> None:
    """A prefill in chunks, in a fresh cache after a hit and in a second turn, goes on where the cache ends."""
    model, inputs = model_of(kind), whole(random_ids(1, 21))
    want, pool = default(model, inputs, **GREEDY), make_pool(model)
    model.set_attn_implementation(attn)
    turn = whole(torch.cat([want, random_ids(1, 11, 6)], 1))
    for _ in range(2):
        with PagedCache(pool) as cache:
            assert torch.equal(want, model.generate(**inputs, prefill_chunk_size=4, **GREEDY, **{CACHE: cache}))
            got = model.generate(**turn, prefill_chunk_size=4, **GREEDY, **{CACHE: cache})
        assert torch.equal(default(model, turn, **GREEDY), got)
    assert pool.stats().prefix_hit_tokens == (20 if attn == "paged" else 0)


@pytest.fixture
def half_a_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A llama whose second layer fails at the forward pass with the number in the list."""
    left = [3]
    update = PagedCache.update

    def failing(self: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == 1:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return update(self, key, value, layer_idx, *args, **kwargs)

    monkeypatch.setattr(PagedCache, "update", failing)
    yield left


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_pass_that_broke_off_leaves_nothing_behind(at: int, llama: Any, half_a_pass: list[int]) -> None:
    """Interrupted between two layers, where the last tokens are stored in the first one only."""
    pool, inputs = make_pool(llama, block_size=1), whole(random_ids(2, 13))
    want = default(llama, inputs, **GREEDY)
    half_a_pass[0] = at
    with pytest.raises(KeyboardInterrupt):
        llama.generate(**inputs, **GREEDY, **{CACHE: PagedCache(pool)})
    assert pool.stats().used == 0
    pool.check_integrity()
    # First what the broken pass was about to store: positions that only its first layer holds.
    for again in (whole(want[:, : 13 + at]), inputs):
        assert torch.equal(default(llama, again, **GREEDY), paged(llama, again, pool, **GREEDY))


@pytest.mark.parametrize("flags", [{}, dict(num_beams=3)])
def test_a_full_pool_evicts_and_goes_on(flags: dict[str, Any], llama: Any) -> None:
    """Twenty different prompts through a pool with room for two: right each time, never exhausted, nothing lost."""
    pool = make_pool(llama, num_blocks=30)
    for seed in range(20):
        inputs = whole(random_ids(2, 20 + seed % 3, seed % 7))
        assert torch.equal(default(llama, inputs, **GREEDY, **flags), paged(llama, inputs, pool, **GREEDY, **flags))
        stats = pool.stats()
        assert stats.used == 0 and stats.free + stats.cached == 30
    cached = pool.stats().cached
    assert pool.clear_prefix_cache() == cached > 0 and pool.stats().free == 30


def test_a_pool_grows_to_its_second_budget(llama: Any) -> None:
    pool = PagePool.for_model(llama, num_blocks=8, block_size=4, max_memory=24 * 4 * 3 * 2 * 2 * 16 * 4)
    inputs = whole(random_ids(2, 30))
    assert torch.equal(default(llama, inputs, **GREEDY), paged(llama, inputs, pool, **GREEDY))
    assert 8 < pool.num_blocks <= 24
