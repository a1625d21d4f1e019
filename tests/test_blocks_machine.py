"""Random programs over several caches on one small pool, compared token by token with rows kept as plain lists.

The data plane is an array of token ids. Every id is written once in the life of a machine, and frames that nobody
holds are overwritten with a marker after every step. So a frame that is lost, reused too early, shared by mistake or
not copied before a write shows up as a wrong token, whatever the counts say.

At the end: what such a program cannot show. That `check_integrity` finds each kind of error, and how the manager
stands garbage collection and several threads.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hf_paged.blocks import UNUSED, BlockManager, IntegrityError, PoolExhausted
from hf_paged.tables import BlockTables

POISON = -7
MAX_CACHES = 6
MAX_ROWS = 8

executed: Counter[str] = Counter()  # operations over all machines of this process, by name

picks = st.lists(st.integers(0, 40), min_size=MAX_ROWS, max_size=MAX_ROWS)  # one number per row, reduced where used


class Owner:
    """Stands for the cache that a user holds: when it dies, its tables are abandoned, as those of a PagedCache are."""

    itself: Owner  # for a reference cycle

    def __init__(self, tables: BlockTables) -> None:
        weakref.finalize(self, tables.manager.abandon, tables)


def fill(manager: BlockManager, *lengths: int) -> BlockTables:
    """Tables with one row of each length."""
    tables = BlockTables(manager)
    tables.add_rows(len(lengths))
    tables.append(lengths)
    return tables


@dataclass
class Cache:
    tables: BlockTables
    rows: list[list[int]]  # the oracle: the token ids of every row
    owner: Owner


def shortage(tables: BlockTables, counts: list[int]) -> tuple[int, int, int] | None:
    """What the exception says. Not `pytest.raises`: that would keep the traceback, and with it the cache, alive."""
    try:
        tables.append(counts)
    except PoolExhausted as error:
        return error.needed, error.free, error.used
    return None


class PagedMachine(RuleBasedStateMachine):
    """Block tables against lists."""

    caches = Bundle("caches")

    @initialize(block_size=st.sampled_from([1, 3, 4, 16]), num_blocks=st.integers(1, 24))
    def make_pool(self, block_size: int, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.memory = np.full(num_blocks * block_size, POISON, np.int64)
        self.live: dict[int, Cache] = {}  # bundles hold keys only, so that a cache dies when it leaves this dict
        self.made = 0
        self.next_token = 0
        self.copies = 0
        self.peak = 0

    def keep(self, tables: BlockTables, rows: list[list[int]]) -> int:
        self.made += 1
        self.live[self.made] = Cache(tables, rows, Owner(tables))
        return self.made

    def has_room_for_a_cache(self) -> bool:
        return len(self.live) < MAX_CACHES

    # --------------------------------------------------------------------------------------------------------- rules

    @precondition(has_room_for_a_cache)
    @rule(target=caches, rows=st.integers(0, 4), picks=picks)
    def new_cache(self, rows: int, picks: list[int]) -> int:
        """Rows with a prompt each, or empty where the prompts do not fit."""
        executed["new"] += 1
        tables = BlockTables(self.manager)
        tables.add_rows(rows)
        key = self.keep(tables, [[] for _ in range(rows)])
        self.append(key, [pick % (self.manager.block_size * 2) for pick in picks])
        return key

    @rule(key=caches, count=st.integers(1, 2))
    def add_rows(self, key: int, count: int) -> None:
        executed["add_rows"] += 1
        cache = self.live[key]
        if len(cache.rows) + count <= MAX_ROWS:
            cache.tables.add_rows(count)
            cache.rows += [[] for _ in range(count)]

    @rule(key=caches, picks=picks)
    def append_ragged(self, key: int, picks: list[int]) -> None:
        """Another turn of a chat: up to two and a half blocks per row, none for some rows."""
        limit = self.manager.block_size * 5 // 2 + 1
        self.append(key, [pick % limit for pick in picks])

    @rule(key=caches)
    def decode(self, key: int) -> None:
        self.append(key, [1] * MAX_ROWS)

    @rule(victim=consumes(caches), key=caches, picks=picks)
    def collect_and_append(self, victim: int, key: int, picks: list[int]) -> None:
        """A cache dies, and its frames are still held when the next operation begins."""
        executed["collect"] += 1
        self.drop(victim)
        if key in self.live:
            self.append(key, [pick % (self.manager.block_size + 2) for pick in picks])

    def append(self, key: int, numbers: list[int]) -> None:
        executed["append"] += 1
        cache = self.live[key]
        counts = numbers[: len(cache.rows)]
        growth, copies = self.predict(cache, counts)
        free = self.manager.num_blocks - len(self.poison())
        if growth + copies > free:
            executed["exhausted"] += 1
            assert shortage(cache.tables, counts) == (growth + copies, free, self.manager.num_blocks - free)
            return
        slots, copy_from, copy_to = cache.tables.append(counts)
        executed["copies"] += len(copy_from)
        self.copies += copies
        self.peak = max(self.peak, self.manager.num_blocks - free + growth + copies)
        frames = self.memory.reshape(self.manager.num_blocks, -1)
        assert (frames[copy_to] == POISON).all(), "copied into a frame that somebody holds"
        frames[copy_to] = frames[copy_from]
        tokens = np.arange(self.next_token, self.next_token + sum(counts))
        self.next_token += len(tokens)
        self.memory[slots] = tokens
        start = 0
        for row, count in zip(cache.rows, counts):
            row += tokens[start : start + count].tolist()
            start += count

    def predict(self, cache: Cache, counts: list[int]) -> tuple[int, int]:
        """Blocks that an append needs for growth and for copies, by walking over all rows of all caches."""
        size = self.manager.block_size
        growth = sum(-(-(len(row) + n) // size) + -len(row) // size for row, n in zip(cache.rows, counts))
        holders = Counter(frame for other in self.live.values() for row in other.tables.block_ids() for frame in row)
        writers: Counter[int] = Counter()
        for row, ids, count in zip(cache.rows, cache.tables.block_ids(), counts):
            if count and len(row) % size:
                writers[ids[-1]] += 1
        return growth, sum(n - 1 if n == holders[frame] else n for frame, n in writers.items())

    @precondition(has_room_for_a_cache)
    @rule(target=caches, key=caches, repeats=st.integers(1, 3))
    def fork(self, key: int, repeats: int) -> int:
        executed["fork"] += 1
        cache = self.live[key]
        repeats = min(repeats, MAX_ROWS // max(len(cache.rows), 1))
        return self.keep(cache.tables.fork(repeats), [list(row) for row in cache.rows for _ in range(repeats)])

    @rule(key=caches, picks=picks, length=st.integers(1, MAX_ROWS))
    def select(self, key: int, picks: list[int], length: int) -> None:
        """Rows repeat, drop out, change places."""
        executed["select"] += 1
        cache = self.live[key]
        rows = [pick % len(cache.rows) for pick in picks[:length]] if cache.rows else []
        changed = cache.tables.select(rows)
        assert changed == (rows != list(range(len(cache.rows))))
        cache.rows = [list(cache.rows[row]) for row in rows]

    @rule(key=caches, picks=picks, length=st.integers(1, MAX_ROWS))
    def beam_step(self, key: int, picks: list[int], length: int) -> None:
        self.select(key, picks, length)
        self.append(key, [1] * MAX_ROWS)

    @rule(key=caches)
    def select_identity(self, key: int) -> None:
        executed["identity"] += 1
        tables = self.live[key].tables
        assert not tables.select(np.arange(tables.num_rows))

    @rule(key=caches, picks=picks, everything=st.booleans())
    def crop(self, key: int, picks: list[int], everything: bool) -> None:
        """Cut up to two blocks from some rows (speculative decoding), or any number of tokens from all of them."""
        executed["crop"] += 1
        cache = self.live[key]
        cut = [pick % (2 * self.manager.block_size) for pick in picks]
        keep = [pick % (len(r) + 1) if everything else max(len(r) - n, 0) for r, pick, n in zip(cache.rows, picks, cut)]
        cache.tables.crop(keep)
        cache.rows = [row[:length] for row, length in zip(cache.rows, keep)]

    @precondition(lambda self: len(self.live) > 2)
    @rule(key=caches)
    def free(self, key: int) -> None:
        executed["free"] += 1
        cache = self.live[key]
        cache.tables.free()
        cache.rows = []

    @rule(key=consumes(caches))
    def garbage_collect(self, key: int) -> None:
        executed["collect"] += 1
        self.drop(key)

    def drop(self, key: int) -> None:
        """Let a cache die. `free` is not called: its finalizer has to see to that."""
        alive = weakref.ref(self.live.pop(key).owner)
        assert alive() is None

    # ---------------------------------------------------------------------------------------------------- invariants

    def poison(self) -> set[int]:
        """Overwrite all frames but those of live rows, which are returned."""
        used = {frame for cache in self.live.values() for row in cache.tables.block_ids() for frame in row}
        free = np.ones(self.manager.num_blocks, bool)
        free[list(used)] = False
        self.memory.reshape(self.manager.num_blocks, -1)[free] = POISON
        return used

    @invariant()
    def contents_are_those_of_the_oracle(self) -> None:
        manager = self.manager
        manager.check_integrity()
        used = self.poison()
        assert manager.num_used == len(used) and manager.num_free + len(used) == manager.num_blocks
        assert manager.cow_copies == self.copies and manager.peak_used == self.peak
        for cache in self.live.values():
            tables = cache.tables
            assert tables.lengths.tolist() == [len(row) for row in cache.rows]
            for row, entries, ids in zip(cache.rows, tables.table, tables.block_ids(), strict=True):
                assert entries[: len(ids)].tolist() == ids and (entries[len(ids) :] == UNUSED).all()
                assert len(ids) == -(-len(row) // manager.block_size)
                block, offset = np.divmod(np.arange(len(row)), manager.block_size)
                assert self.memory[entries[block].astype(np.int64) * manager.block_size + offset].tolist() == row


def run_machine(max_examples: int, steps: int) -> int:
    """Run random programs, the same ones every time, and return the number of operations."""
    executed.clear()
    run_state_machine_as_test(
        PagedMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return sum(n for name, n in executed.items() if name not in ("exhausted", "copies"))


def test_ten_thousand_operations_match_the_oracle() -> None:
    """Contents, counts and shortage, with enough of every event for the comparison to mean something."""
    assert run_machine(max_examples=250, steps=50) >= 10_000
    assert min(executed[event] for event in ("exhausted", "copies", "collect", "crop", "fork")) > 150, executed


@pytest.mark.slow
def test_hundred_thousand_operations_match_the_oracle() -> None:
    assert run_machine(max_examples=1_100, steps=100) >= 100_000


def held_and_free(manager: BlockManager, tables: BlockTables) -> None:
    manager._free[manager.num_free] = 0
    manager.num_free += 1


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (lambda manager, tables: manager.ref_counts.__setitem__(0, 2), "frame 0 counts 2 holders, but 1 hold it"),
        (lambda manager, tables: manager.ref_counts.__setitem__(1, 0), "frame 1 counts 0 holders, but 1 hold it"),
        (lambda manager, tables: manager.ref_counts.__setitem__(4, 1), "frame 4 counts 1 holders, but 0 hold it"),
        (lambda manager, tables: tables.table.__setitem__((0, 1), 2), "frame 1 counts 1 holders, but 0 hold it"),
        (lambda manager, tables: tables.lengths.__setitem__(1, 0), "frame 2 counts 1 holders, but 0 hold it"),
        (lambda manager, tables: setattr(manager, "num_free", 2), "free list"),  # a frame leaks
        (lambda manager, tables: manager._free.__setitem__(0, 4), "free list"),  # one is free twice, one leaks
        (held_and_free, "free list"),
    ],
)
def test_check_integrity_finds(corrupt: Callable[[BlockManager, BlockTables], None], message: str) -> None:
    manager = BlockManager(6, 4)
    tables = fill(manager, 5, 2)
    manager.check_integrity()
    corrupt(manager, tables)
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity()


def test_dead_cache_is_freed_by_the_next_operation_and_not_before() -> None:
    """Also one that dies in a reference cycle while another thread holds the lock: its finalizer must not wait."""
    manager = BlockManager(2, 4)
    tables = fill(manager, 8)
    owner = Owner(tables)
    owner.itself = owner
    del owner
    with manager.lock:
        thread = threading.Thread(target=gc.collect, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive() and manager.num_free == 0
    manager.abandon(tables)  # a second time: safe
    successor = fill(manager, 1, 4)
    assert successor.block_ids() == [[0], [1]] and tables.num_rows == 0
    manager.check_integrity()


@pytest.mark.parametrize("method", ["append", "select", "fork", "crop", "free"])
def test_nobody_sees_an_operation_half_done(method: str) -> None:
    """A check by another thread that begins in the middle has to wait for the end."""
    manager = BlockManager(9, 4)
    tables = fill(manager, 6, 6)
    reader = tables.fork()
    checks: list[Future[None]] = []
    count = manager.add_references
    with ThreadPoolExecutor() as executor:

        def count_and_check(*args: Any) -> None:
            for step in (lambda: None, lambda: count(*args)):
                step()
                checks.append(executor.submit(manager.check_integrity))
                wait(checks, timeout=0.05)

        manager.add_references = count_and_check  # type: ignore[method-assign]
        outcome = getattr(tables, method)(*{"fork": [2], "free": []}.get(method, [[1, 1]]))
    assert [check.result() for check in checks] == [None, None], (outcome, reader)


def test_threads_with_caches_of_their_own_share_one_manager() -> None:
    """Nobody ever gets a slot in a frame that somebody else holds, and nothing is lost in the end."""
    manager = BlockManager(40, 3)

    def hammer(seed: int) -> None:
        rng = np.random.default_rng(seed)
        tables = twin = BlockTables(manager)
        for _ in range(300):
            try:
                if not tables.num_rows:
                    tables.add_rows(2)
                slots = tables.append(rng.integers(0, 4, tables.num_rows)).slots
                assert (manager.ref_counts[slots // manager.block_size] == 1).all()
                twin = tables.fork()
                twin.append(np.ones(twin.num_rows, np.int64))
                tables.select(rng.integers(0, tables.num_rows, rng.integers(1, 5)))
                manager.abandon(tables)
                tables = twin
                tables.crop(tables.lengths * 2 // 3)
                manager.check_integrity()
            except PoolExhausted:
                tables.free()
                twin.free()
        manager.abandon(tables)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(hammer, range(4)))
    finally:
        sys.setswitchinterval(interval)
    manager.check_integrity()
    assert sorted(manager._free[: manager.num_free].tolist()) == list(range(40))


def test_rows_are_added_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`table` and `lengths` change one after the other: nobody may look in between."""
    manager = BlockManager(8, 4)
    tables = BlockTables(manager)
    tables.add_rows(1)
    tables.append([3])
    held: list[bool] = []
    concatenate = np.concatenate

    def spy(*args: object, **kwargs: object) -> object:
        thread = threading.Thread(target=lambda: held.append(not manager.lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return concatenate(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(np, "concatenate", spy)
    tables.add_rows(2)
    assert held and all(held)
