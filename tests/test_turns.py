"""A turn on a cache that is filled already: whatever it is given, it computes what the default cache computes, and leaves
nothing in the prefix index that a later prompt should not find."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CACHE, KNOWS_POSITIONS, VOCAB, build, default, make_pool, paged, prompts, upstream
from transformers import DynamicCache

from hf_paged import PagedCache, PagePool, PoolExhausted
from hf_paged.compat import CUTS_BY_POSITION
from hf_paged.history import History

GREEDY: dict[str, Any] = dict(max_new_tokens=9)


def random_ids(length: int, seed: int = 5, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("new", [1, 7, 28, 40], ids=lambda new: f"{new} new")
def test_a_second_turn_of_new_ids_alone(new: int, kind: str, model_of: Any) -> None:
    """After `generate`, with a mask of ones for everything, which `generate` drops. 28 are as many as
    are cached."""
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
    # A release that takes them for the whole sequence feeds a part of them, as the default cache says, too.
    assert pool.stats().prefix_hit_tokens == (20 if CUTS_BY_POSITION else 28 + want.shape[1] - 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_masks_of_any_dtype(dtype: torch.dtype, llama: Any) -> None:
    inputs = prompts([9, 25])
    pool, want = make_pool(llama), default(llama, inputs, **GREEDY)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    for _ in range(2):
        assert torch.equal(want, paged(llama, inputs, pool, **GREEDY))


@pytest.mark.parametrize("lengths", [[20, 20], [20, 13]])
@pytest.mark.parametrize("keep", [0, 5, torch.tensor([3, 4, -1])], ids=["all", "some", "chosen"])
def test_all_the_logits_that_are_asked_for(keep: Any, lengths: list[int], llama: Any) -> None:
    """Also of a prompt that the pool holds."""
    pool, inputs = make_pool(llama), prompts(lengths)
    seen: list[torch.Tensor] = []
    forward = llama.lm_head.forward
    llama.lm_head.forward = lambda hidden: seen.append(forward(hidden)) or seen[-1]
    try:
        default(llama, inputs, max_new_tokens=1, logits_to_keep=keep)
        paged(llama, inputs, pool, max_new_tokens=1)
        paged(llama, inputs, pool, max_new_tokens=1, logits_to_keep=keep)
    finally:
        del llama.lm_head.forward
    want, _, got = seen
    real = inputs["attention_mask"].bool()[:, -want.shape[1] :] if isinstance(keep, int) else torch.ones(2, 3).bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)


def test_what_rows_share_is_computed_where_the_ids_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded layer by layer stand on "meta" between, and so does the model."""
    model = build("llama")
    inputs = whole(torch.cat([random_ids(100).repeat(3, 1), random_ids(7, 2, rows=3)], 1))
    pool, want = make_pool(model), default(model, inputs, **GREEDY)
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    assert torch.equal(want, paged(model, inputs, pool, **GREEDY))
    assert pool.stats().prefix_hit_tokens == 300


LOOKUP = dict(prompt_lookup_num_tokens=3, eos_token_id=VOCAB)  # of 5.0 it cannot do without one


def later_prompts_are_right(model: Any, pool: PagePool, *turns: torch.Tensor) -> None:
    """No prompt that starts as one of `turns` finds keys and values of another, and no block is lost."""
    pool.check_integrity()
    for turn in turns:
        later = whole(torch.cat([turn, random_ids(3, 77)], 1))
        assert torch.equal(default(model, later, **GREEDY), paged(model, later, pool, **GREEDY))
    pool.clear_prefix_cache()
    assert pool.stats().free == pool.num_blocks


def first_turn(model: Any, cache: PagedCache, length: int = 24) -> torch.Tensor:
    return model.generate(**whole(random_ids(length)), **GREEDY, **{CACHE: cache})


@pytest.mark.parametrize("flags", [{}, LOOKUP, "assistant"], ids=["greedy", "lookup", "assistant"])
@pytest.mark.parametrize("change", ["nothing", "ids", "weights", "weights and back"])
def test_a_turn_whose_past_is_another(change: str, flags: Any) -> None:
    """The caller edits what is cached, or trains between the turns. Only where nothing changed does a later prompt find the
    second turn."""
    model = build("llama")
    pool = make_pool(model)
    cache = PagedCache(pool)
    flags = dict(assistant_model=build("llama", "sdpa", seed=3)) if flags == "assistant" else flags
    weight = model.model.layers[0].self_attn.k_proj.weight
    out = first_turn(model, cache)
    turn = torch.cat([out, random_ids(30, 8)], 1)
    if change == "ids":
        turn[0, 5] = (turn[0, 5] + 3) % VOCAB
    elif change != "nothing":
        weight.data.mul_(2)
    turn = model.generate(**whole(turn), **GREEDY, **flags, **{CACHE: cache})
    cache.release()
    if change == "weights and back":
        weight.data.div_(2)
    before = pool.stats().prefix_hit_tokens
    with PagedCache(pool) as again:
        model.generate(**whole(turn), max_new_tokens=1, **{CACHE: again})
    hits = pool.stats().prefix_hit_tokens - before
    assert hits == {"nothing": 68, "ids": 4, "weights": 0, "weights and back": 24}[change]
    later_prompts_are_right(model, pool, turn, out)


def filled(model: Any, pool: PagePool, ids: torch.Tensor) -> PagedCache:
    """A cache that holds `ids` [1, n]."""
    cache = PagedCache(pool)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return cache


@pytest.mark.parametrize("own", [False, True], ids=["the class's", "an attribute"])
@pytest.mark.parametrize("mode", ["lookup", "itself", "its first layers"])
def test_drafts_from_the_model_itself_on_a_filled_cache(mode: str, own: bool) -> None:
    """Its `prepare_inputs_for_generation` stays as it is, be it the class's or one that the user has set."""
    model, ids = build("llama"), random_ids(10).repeat(1, 3)
    flags: dict[str, Any] = dict(max_new_tokens=12, eos_token_id=VOCAB)
    drafts = {"lookup": LOOKUP, "itself": dict(assistant_model=model), "its first layers": dict(assistant_early_exit=2)}
    with upstream():
        want = model.generate(**whole(ids), **{**flags, **drafts[mode]})
    prepare = functools.partial(type(model).prepare_inputs_for_generation, model)
    if own:
        model.prepare_inputs_for_generation = prepare
    pool = make_pool(model)
    with filled(model, pool, ids[:, :20]) as cache:
        assert torch.equal(want, model.generate(**whole(ids), **{**flags, **drafts[mode]}, **{CACHE: cache}))
        pool.check_integrity()
    assert vars(model).get("prepare_inputs_for_generation") is (prepare if own else None)
    if own:
        del model.prepare_inputs_for_generation
    later_prompts_are_right(model, pool, want)


def test_lookup_in_four_threads(llama: Any) -> None:
    """All at once on filled caches of their own, each with plain calls of the same model between its steps."""
    pool, ids = make_pool(llama, 1000), [random_ids(10, seed).repeat(1, 3) for seed in range(4)]
    want = [default(llama, whole(row), max_new_tokens=12) for row in ids]
    plain = llama.generate(**whole(ids[0]), max_new_tokens=3)
    barrier, got = threading.Barrier(4), {}

    def run(seed: int) -> None:
        alone: list[torch.Tensor] = []

        def between(ids_so_far: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not alone:
                barrier.wait(60)
                alone.append(llama.generate(**whole(ids[0]), max_new_tokens=3))
                barrier.wait(60)
            return scores

        flags = dict(**LOOKUP, max_new_tokens=12, logits_processor=[between])
        with filled(llama, pool, ids[seed][:, :20]) as cache:
            got[seed] = llama.generate(**whole(ids[seed]), **flags, **{CACHE: cache}), *alone

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    for seed, (mine, alone) in got.items():
        assert torch.equal(want[seed], mine) and torch.equal(plain, alone)
    later_prompts_are_right(llama, pool, *want)


def by_hand(model: Any, cache: PagedCache, ids: torch.Tensor, new: int, told: bool) -> None:
    """Run the last `new` of `ids` [1, n] on the cache, prepared as `generate` does it if `told`."""
    inputs: dict[str, Any] = dict(input_ids=ids[:, -new:])
    if told:
        mask = torch.ones_like(ids)
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=new, attention_mask=mask, **{CACHE: cache}
        )
    with torch.no_grad():
        model(**{**inputs, CACHE: cache})


TOLD = pytest.mark.skipif(not KNOWS_POSITIONS, reason="inputs are prepared otherwise")


@TOLD
@pytest.mark.parametrize("failed", ["call", "preparation"])
def test_ids_of_a_pass_that_never_ran(failed: str) -> None:
    """They were told to the cache; then something else is run by hand."""
    model = build("llama")
    pool, ids = make_pool(model, block_size=1), random_ids(12)
    want, cache = default(model, whole(ids), **GREEDY), PagedCache(pool)
    if failed == "call":
        passes: list[int] = []

        def stop(*args: Any) -> None:
            passes.append(1)
            if len(passes) == 3:
                raise KeyboardInterrupt

        hook = model.model.register_forward_pre_hook(stop)
        with contextlib.suppress(KeyboardInterrupt):
            model.generate(**whole(ids), **GREEDY, **{CACHE: cache})
        hook.remove()
    else:
        model.generate(**whole(ids), max_new_tokens=2, **{CACHE: cache})
        told = want[:, :14]
        model.prepare_inputs_for_generation(
            told, next_sequence_length=1, attention_mask=torch.ones_like(told), **{CACHE: cache}
        )
    assert cache.lengths == [13]
    by_hand(model, cache, (want[:, 13:14] + 17) % VOCAB, 1, told=False)
    cache.release()
    later_prompts_are_right(model, pool, want[:, :14])


@TOLD
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("before", ["crop", "shortage"])
def test_other_tokens_in_the_place_of_a_prompt(before: str, told: bool) -> None:
    """After a crop into the prompt, or a prompt for which there was no room: what is fed there instead isn't taken for it."""
    model = build("llama")
    pool, ids = make_pool(model, 40, block_size=1), random_ids(12)
    cache, guest = PagedCache(pool), PagedCache(pool)
    out = model.generate(**whole(ids), max_new_tokens=3, **{CACHE: cache})
    if before == "crop":
        cache.crop(4 - cache.get_seq_length())
        pool.clear_prefix_cache()
        turn = ids
    else:
        turn = torch.cat([out, random_ids(8, 4)], 1)
        with torch.no_grad():
            model(random_ids(22), **{CACHE: guest})
        with contextlib.suppress(PoolExhausted):
            model.generate(**whole(turn), max_new_tokens=1, **{CACHE: cache})
        guest.release()
    width = cache.get_seq_length()
    assert width == (4 if before == "crop" else 14)
    by_hand(model, cache, torch.cat([turn[:, :width], (turn[:, width : width + 4] + 9) % VOCAB], 1), 4, told)
    cache.release()
    later_prompts_are_right(model, pool, turn)


def test_ids_that_begin_beyond_what_is_cached() -> None:
    """After a crop, what stands between the two is not known: it isn't what stood there before."""
    history = History(b"root", np.arange(20)[None], given=4)
    history.known = 16
    assert not history.follow(torch.empty(1, 0, dtype=torch.long), 15)
    assert history.follow(torch.tensor([[7]]), 16) and history.known == 17
    assert history.tokens().tolist() == [[*range(16), 7]]
