"""Blocks come back whatever happens, and nobody writes into what another uses."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import CACHE, default, make_pool, prompts
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_paged import PagedCache


class FailAt(LogitsProcessor, StoppingCriteria):  # type: ignore[misc]
    def __init__(self, call: int, error: BaseException) -> None:
        self.left, self.error = call, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise self.error
        return args[1] if isinstance(args[1], torch.Tensor) else torch.zeros(len(args[0]), dtype=torch.bool)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_exceptions_inside_generate_lose_nothing(where: str, error: BaseException, llama: Any) -> None:
    pool, inputs = make_pool(llama), prompts([9, 5])
    kind: Any = LogitsProcessorList if where == "logits_processor" else StoppingCriteriaList
    for flags in ({}, dict(num_beams=3)):
        extra: dict[str, Any] = {where: kind([FailAt(3, error)])}
        with pytest.raises(type(error)):
            llama.generate(**inputs, max_new_tokens=9, **flags, **extra, **{CACHE: PagedCache(pool)})
        error.__traceback__ = None  # it holds the frames of `generate`, and so the cache
        gc.collect()
        assert pool.stats().used == 0
        pool.check_integrity()
    want = default(llama, inputs, max_new_tokens=9)
    assert torch.equal(want, llama.generate(**inputs, max_new_tokens=9, **{CACHE: PagedCache(pool)}))


def test_one_cache_in_two_threads_raises_and_the_first_goes_on(llama: Any) -> None:
    """The second thread comes while the first is between two layers."""
    pool, ids = make_pool(llama), prompts([9])["input_ids"]
    cache = PagedCache(pool)
    inside, go_on = threading.Event(), threading.Event()
    update = cache.update

    def waiting(key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == 1 and not inside.is_set():
            inside.set()
            assert go_on.wait(60)
        return update(key, value, layer_idx, *args, **kwargs)

    cache.update = waiting  # type: ignore[method-assign]

    @torch.no_grad()
    def run(ids: torch.Tensor) -> Any:
        return llama(ids, **{CACHE: cache}).logits

    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(run, ids)
        assert inside.wait(60)
        second = executor.submit(run, ids)
        with pytest.raises(RuntimeError, match="two threads at once"):
            second.result(60)
        go_on.set()
        logits = first.result(60)
        assert torch.equal(logits, executor.submit(lambda: llama_alone(llama, ids)).result(60))
        executor.submit(run, prompts([1], 2)["input_ids"]).result(60)  # one after the other: any thread may
    assert cache.lengths == [10]


@torch.no_grad()
def llama_alone(model: Any, ids: torch.Tensor) -> Any:
    return model(ids, **{CACHE: PagedCache(make_pool(model))}).logits


def test_four_threads_one_pool(llama: Any) -> None:
    """4 x 20 generates with prompts that overlap: tokens as one by one, nothing held, nothing lost."""
    pool = make_pool(llama, num_blocks=150)
    stems = prompts([24] * 3, 1)["input_ids"]

    def task(number: int) -> Any:
        tail = prompts([3 + number % 5] * 2, number)["input_ids"]
        ids = torch.cat([stems[[number % 3, (number + 1) % 3]], tail], 1)
        flags: dict[str, Any] = [{}, dict(num_beams=2), dict(num_beams=3, num_return_sequences=2)][number % 3]
        return dict(input_ids=ids, attention_mask=torch.ones_like(ids)), flags

    tasks = [task(number) for number in range(80)]
    want = [default(llama, inputs, max_new_tokens=6, **flags) for inputs, flags in tasks]

    def run(job: Any) -> Any:
        inputs, flags = job
        return llama.generate(**inputs, max_new_tokens=6, **flags, **{CACHE: PagedCache(pool)})

    with ThreadPoolExecutor(4) as executor:
        got = list(executor.map(run, tasks))
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    gc.collect()
    stats = pool.stats()
    assert stats.used == 0 and stats.prefix_hit_tokens > 1000 and stats.free + stats.cached == 150
    pool.check_integrity()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_is_told_so() -> None:
    """In a process of its own: a fork of one that runs threads is not for a test runner. Another thread holds the pool's lock
    meanwhile, so whatever waits for it in the child waits for ever."""
    program = """
import gc, os, signal, threading, torch, hf_paged
pool = hf_paged.PagePool([hf_paged.LayerGeometry(1, 8, 8)], num_blocks=4, kernel="reference")
cache, other, dropped = (hf_paged.PagedCache(pool) for _ in range(3))
keys = torch.zeros(1, 1, 1, 8)
for each in (cache, other, dropped):
    each.update(keys, keys, 0)
actions = dict(
    update=lambda: cache.update(keys, keys, 0),
    new=lambda: hf_paged.PagedCache(pool),
    fork=lambda: cache.fork(),
    select=lambda: cache.select([0, 0]),
    reorder=lambda: cache.reorder_cache(torch.tensor([0])),
    repeat=lambda: cache.batch_repeat_interleave(2),
    crop=lambda: cache.crop(-1),
    rewind=lambda: cache.rewind(0),
    join=lambda: hf_paged.PagedCache.join([cache, other]),
    reset=lambda: cache.reset(),
    stats=pool.stats,
    check=pool.check_integrity,
    clear=pool.clear_prefix_cache,
)
held, go_on = threading.Event(), threading.Event()
def hold():
    with pool.manager.lock:
        held.set()
        go_on.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(30)
    silent = []
    for name, action in actions.items():
        try:
            action()
            silent.append(name)
        except RuntimeError as error:
            assert "Make a pool in this process" in str(error), (name, error)
    other.release()
    other.release()
    del dropped, each
    gc.collect()
    print("not told:", silent, flush=True)
    os._exit(len(silent))
go_on.set()
assert os.waitpid(child, 0)[1] == 0
cache.update(keys, keys, 0)
assert cache.lengths == [2] and other.lengths == dropped.lengths == [1]
pool.check_integrity()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_a_thousand_generates_leave_memory_flat(llama: Any) -> None:
    pool = make_pool(llama)

    def run(count: int) -> float:
        for number in range(count):
            inputs = prompts([9 + number % 7, 6], number)
            llama.generate(**inputs, max_new_tokens=4, num_beams=1 + number % 3, **{CACHE: PagedCache(pool)})
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB

    before = run(200)
    after = run(1000)
    assert pool.stats().used == 0
    assert after - before < 5, f"{before:.1f} -> {after:.1f} MiB"
