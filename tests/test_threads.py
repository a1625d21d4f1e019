"""One cache in several threads: while `generate` runs on it, all others are refused before anything has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import CACHE, build, default, make_pool, prompts
from transformers import LogitsProcessor, LogitsProcessorList

from hf_paged import PagedCache

NEW = dict(max_new_tokens=6)


class Between(LogitsProcessor):  # type: ignore[misc]
    """Calls a function once, before the n-th token is chosen."""

    def __init__(self, call: int, action: Callable[[], Any]) -> None:
        self.left, self.action = call, action

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            self.action()
        return scores


def test_one_of_two_wins_and_the_other_changes_nothing(llama: Any) -> None:
    """Whoever comes first waits, before its first token or a later one, until the other has been refused."""
    pool = make_pool(llama, block_size=1)
    inputs = [prompts([9], 1), prompts([14], 5)]
    want = [default(llama, each, **NEW) for each in inputs]

    def run(cache: PagedCache, number: int, call: int, start: threading.Barrier, refused: threading.Event) -> Any:
        wait = LogitsProcessorList([Between(call, lambda: refused.wait(5))])
        start.wait(60)
        try:
            return llama.generate(**inputs[number], **NEW, logits_processor=wait, **{CACHE: cache})
        except RuntimeError as error:
            refused.set()
            return str(error)

    with ThreadPoolExecutor(2) as executor:
        for number in range(30):
            pool.clear_prefix_cache()
            cache, start, refused = PagedCache(pool), threading.Barrier(2), threading.Event()
            jobs = [executor.submit(run, cache, which, 1 + number % 3, start, refused) for which in range(2)]
            got = [job.result(60) for job in jobs]
            winner = int(isinstance(got[0], str))
            assert "two threads at once" in got[1 - winner], f"round {number}: {got}"
            assert torch.equal(got[winner], want[winner])
            assert cache.lengths == [want[winner].shape[1] - 1]
            cache.release()
            for each, tokens in zip(inputs, want):  # nothing false has got into the prefix index
                with PagedCache(pool) as fresh:
                    assert torch.equal(tokens, llama.generate(**each, **NEW, **{CACHE: fresh}))
    assert pool.stats().used == 0
    pool.check_integrity()


@torch.no_grad()
def forward(model: Any, cache: PagedCache) -> Any:
    ids = torch.tensor([[5], [6]])
    return model(ids, attention_mask=torch.zeros(2, cache.layers[0].width + 1, dtype=torch.long), **{CACHE: cache})


ACTIONS: dict[str, Callable[[Any, PagedCache], Any]] = {
    "crop": lambda model, cache: cache.crop(-2),
    "select": lambda model, cache: cache.select([1, 0]),
    "reset": lambda model, cache: cache.reset(),
    "rewind": lambda model, cache: cache.rewind(0),
    "release": lambda model, cache: cache.release(),
    "with": lambda model, cache: cache.__exit__(None),
    "fork": lambda model, cache: cache.fork(),
    "join": lambda model, cache: PagedCache.join([cache]),
    "forward": forward,
    "generate": lambda model, cache: model.generate(**prompts([30, 20]), **NEW, **{CACHE: cache}),
    "keys": lambda model, cache: cache.layers[0].keys,
}


@pytest.mark.parametrize("flags", [{}, dict(num_beams=2)], ids=["greedy", "beams"])
def test_nobody_else_changes_a_cache_that_generate_runs_on(flags: dict[str, Any], llama: Any) -> None:
    pool, inputs = make_pool(llama), prompts([9, 6])
    want = default(llama, inputs, **NEW, **flags)
    cache, errors = PagedCache(pool), {}

    def meddle() -> None:
        for name, action in ACTIONS.items():
            try:
                action(llama, cache)
            except RuntimeError as error:
                errors[name] = str(error)
        cache.__exit__(KeyboardInterrupt)  # that error is not hidden by one of ours

    def in_another_thread() -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(meddle).result(60)
        cache.fork().release()  # this thread may

    between = LogitsProcessorList([Between(3, in_another_thread)])
    got = llama.generate(**inputs, **NEW, **flags, logits_processor=between, **{CACHE: cache})
    assert torch.equal(want, got)
    assert errors.keys() == ACTIONS.keys() and all("two threads at once" in error for error in errors.values()), errors
    with ThreadPoolExecutor(1) as executor:  # it is over
        executor.submit(cache.crop, -1).result(60)
        executor.submit(cache.release).result(60)
    assert pool.stats().used == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_generate_that_failed_is_over(error: type[BaseException], llama: Any) -> None:
    pool, inputs = make_pool(llama), prompts([9, 6])

    def fail() -> None:
        raise error

    cache = PagedCache(pool)
    with pytest.raises(error):
        llama.generate(**inputs, **NEW, logits_processor=LogitsProcessorList([Between(2, fail)]), **{CACHE: cache})

    def again() -> Any:
        cache.reset()
        return llama.generate(**inputs, **NEW, **{CACHE: cache})

    with ThreadPoolExecutor(1) as executor:
        assert torch.equal(default(llama, inputs, **NEW), executor.submit(again).result(60))


def test_a_prefill_that_failed_between_two_layers_leaves_an_empty_cache(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded, as a packed one clears up by itself."""
    pool, inputs = make_pool(llama), prompts([9, 9])
    cache, update = PagedCache(pool), PagedCache.update

    def failing(self: Any, key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        if layer == 1:
            raise ValueError("between two layers")
        return update(self, key, value, layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "update", failing)
        with pytest.raises(ValueError, match="between two layers"):
            llama.generate(**inputs, **NEW, **{CACHE: cache})
    assert cache.lengths == [] and pool.stats().used == 0
    assert torch.equal(default(llama, inputs, **NEW), llama.generate(**inputs, **NEW, **{CACHE: cache}))


def test_a_prefill_that_is_refused_leaves_what_another_thread_wrote(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass by hand that is complete when a `generate`, which found an empty cache, fails."""
    pool, ids = make_pool(llama), prompts([9])["input_ids"]
    cache, run = PagedCache(pool), type(llama).forward

    @torch.no_grad()
    def by_hand() -> Any:
        cache._state.thread = None  # as if HF_PAGED_PATCHES had no say in who comes in
        return run(llama, ids, **{CACHE: cache}).logits

    def failing(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(by_hand).result(60)
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(type(llama), "forward", failing)
        with pytest.raises(ValueError, match="no"):
            llama.generate(**prompts([5, 5]), **NEW, **{CACHE: cache})
    assert cache.lengths == [9]
    keys = cache.layers[2].keys
    with PagedCache(pool) as other, torch.no_grad():
        llama(ids, **{CACHE: other})
        expected = other.layers[2].keys
        assert keys is not None and expected is not None and torch.equal(keys.dense(), expected.dense())


def test_a_model_of_fewer_layers_than_the_pool() -> None:
    """`generate` goes on in another thread; a pass by hand can't be told from one under way, and says what it saw."""
    model = build("llama")
    pool = make_pool(model)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    inputs = prompts([9])
    want, cache = default(model, inputs, **NEW), PagedCache(pool)
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(lambda: model.generate(**inputs, max_new_tokens=3, **{CACHE: cache})).result(60)
        assert torch.equal(first, want[:, :12])
        again = dict(input_ids=first, attention_mask=torch.ones_like(first))
        assert torch.equal(model.generate(**again, max_new_tokens=3, **{CACHE: cache}), want)
        with torch.no_grad():
            model(want[:, -1:], **{CACHE: cache})
            with pytest.raises(RuntimeError, match=r"ended short, 2 of 3 layers.*make the pool with"):
                executor.submit(torch.no_grad()(model), want[:, -1:], **{CACHE: cache}).result(60)
