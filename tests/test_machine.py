"""Random programs over all that a user can do with the caches of one small pool, against dense arrays; see `oracle`.

Rows grow by prompts, decode steps and passes run by hand, ragged and with pads, fork, join, reorder, crop, slide, take over
prefixes and leave some, break off half way, run short, and die. After every step all counts are recomputed, and every
content that a live cache or the prefix index holds is compared.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import ROOTS, Mirror, World

from hf_paged import LayerGeometry, PagedCache, reuse

MAX_CACHES, MAX_ROWS, MAX_WIDTH = 5, 6, 40
LAYERS = [[0], [0, 0], [5], [0, 3], [4, 0, 0], [3, 7], [0, 2, 6], [1, 9, 1]]  # windows, layer by layer; 0: all

executed: Counter[str] = Counter()  # over all machines of this process

# Details of a step come from one number: drawing each of them takes longer than the step itself.
numbers = st.integers(0, 2**32 - 1).map(random.Random)


def has_caches(machine: Machine) -> bool:
    return bool(machine.world.mirrors)


def has_room(machine: Machine) -> bool:
    return len(machine.world.mirrors) < MAX_CACHES


class Machine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from(LAYERS),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(6, 64),
        growth=st.sampled_from([0, 0, 9]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        random=numbers,
    )
    def make_pool(
        self,
        windows: list[int],
        block_size: int,
        num_blocks: int,
        growth: int,
        prefix_caching: bool,
        random: random.Random,
    ) -> None:
        layers = [LayerGeometry(1, 1, 1, window=window) for window in windows]
        self.world = World(layers, num_blocks, block_size, num_blocks + growth, prefix_caching)
        self.made = 0
        self.stems = [[random.randint(1, 2) for _ in range(24)] for _ in range(2)]

    def add(self, mirror: Mirror) -> Mirror:
        self.made += 1
        self.world.mirrors[self.made] = mirror
        return mirror

    def pick(self, random: random.Random, filled: bool = False) -> Mirror | None:
        keys = [key for key, mirror in self.world.mirrors.items() if mirror.width or not filled]
        return self.world.mirrors[random.choice(keys)] if keys else None

    def did(self, name: str, yes: bool = True) -> None:
        executed[name] += yes

    # --------------------------------------------------------------------------------------------------------- rules

    @precondition(has_room)
    @rule(random=numbers)
    def new(self, random: random.Random) -> None:
        """A cache, most often with a prompt."""
        self.did("new")
        self.prefill(self.add(Mirror(PagedCache(self.world.pool))), random)

    @precondition(has_caches)
    @rule(random=numbers)
    def turn(self, random: random.Random) -> None:
        mirror = self.pick(random)
        assert mirror is not None
        self.did("turn")
        self.prefill(mirror, random)

    def prefill(self, mirror: Mirror, random: random.Random) -> None:
        """A prompt, or what follows in a conversation. Rows begin like others do."""
        if mirror.width > MAX_WIDTH:
            return
        if mirror.width:
            rows = [self.tail(random, 1 + random.randrange(5)) for _ in mirror.tokens]
        else:
            count = random.randint(1, 3)
            rows = [
                random.choice(self.stems)[: random.randrange(14)] + self.tail(random, random.randint(1, 3))
                for _ in range(count)
            ]
        tokens, real = left_padded(rows)
        root = mirror.root if random.random() < 0.8 else random.randrange(len(ROOTS))
        how = random.choice(["packed", "padded", "chunks"])
        whole, known = random.random() < 0.7, random.random() < 0.9
        self.did(how + "!", self.world.attempt(lambda: self.world.turn(mirror, tokens, real, root, how, whole, known)))

    def tail(self, random: random.Random, count: int) -> list[int]:
        return [random.randint(1, 3) for _ in range(count)]

    @precondition(has_caches)
    @rule(random=numbers, steps=st.integers(1, 4), beams=st.booleans())
    def decode(self, random: random.Random, steps: int, beams: bool) -> None:
        """As `generate` does, with a reorder between two steps of beam search."""
        mirror = self.pick(random, filled=True)
        if mirror is None or mirror.width > MAX_WIDTH:
            return
        for _ in range(steps):
            if beams:
                self.reorder(mirror, [random.randrange(len(mirror.tokens)) for _ in mirror.tokens])
            tokens = np.array([[random.randint(1, 2)] for _ in mirror.tokens])
            real = np.ones(tokens.shape, bool)
            if not self.world.attempt(lambda: self.world.step(mirror, tokens, real, mirror.root)):  # noqa: B023
                return
            self.did("decode")

    @precondition(has_caches)
    @rule(random=numbers)
    def by_hand(self, random: random.Random) -> None:
        """A pass that nobody told the tokens of: with pads anywhere, read by a kernel or not, with cached tokens hidden."""
        mirror = self.pick(random)
        assert mirror is not None
        if mirror.width > MAX_WIDTH:
            return
        count, width = len(mirror.tokens) or random.randint(1, 3), random.randint(1, 4)
        tokens = np.array([self.tail(random, width) for _ in range(count)])
        real = np.array([[random.random() < 0.8 for _ in range(width)] for _ in range(count)])
        mask = None
        if random.random() < 0.2 and mirror.width:
            mask = np.concatenate([mirror.real, real], 1)
            mask[:, random.randrange(mirror.width)] = False
        read, root = random.random() < 0.8, random.randrange(len(ROOTS))
        world = self.world
        self.did(
            "by hand",
            world.attempt(lambda: world.step(mirror, tokens, real, root, told=False, mask=mask, read=read)),
        )

    @precondition(has_caches)
    @rule(random=numbers)
    def announced_in_vain(self, random: random.Random) -> None:
        """`generate` tells tokens, and the pass fails for want of blocks or a wrong mask; other tokens follow by hand."""
        mirror = self.pick(random, filled=True)
        if mirror is None:
            return
        pads = np.argwhere(~mirror.real)
        if not len(pads):
            return
        self.did("lie")
        mask = np.concatenate([mirror.real, np.ones((len(mirror.real), 1), bool)], 1)
        mask[tuple(random.choice(pads))] = True
        tokens = np.full((len(mirror.tokens), 1), random.randint(1, 2))
        with pytest.raises(ValueError, match="it was a pad when it was cached"):
            self.world.step(mirror, tokens, np.ones(tokens.shape, bool), 0, mask=mask)

    @precondition(has_caches)
    @rule(random=numbers)
    def half_a_pass(self, random: random.Random) -> None:
        """It breaks off between two layers, after `generate` told its tokens or not; the caller looks, and goes back."""
        mirror = self.pick(random, filled=True)
        layers = len(self.world.pool.layers)
        if mirror is None or layers == 1 or mirror.width > MAX_WIDTH:
            return
        cache, before = mirror.cache, mirror.like(mirror.cache)
        tokens = np.array([self.tail(random, 4) for _ in mirror.tokens])
        written, told = random.randrange(1, layers), random.random() < 0.7
        real = np.ones(tokens.shape, bool)
        if not self.world.attempt(
            lambda: self.world.step(mirror, tokens, real, mirror.root, told=told, layers=written, read=True)
        ):
            return
        self.did("half a pass")
        if random.random() < 0.5:
            assert cache.layers[0].keys is not None and cache.layers[-1].keys is not None
        if random.random() < 0.5:
            cache.rewind(before.width)
            vars(mirror).update(vars(before))
            mirror.undo = before.width
        else:
            cache.reset()
            mirror.clear()

    @precondition(lambda self: has_caches(self) and has_room(self))
    @rule(random=numbers)
    def fork(self, random: random.Random) -> None:
        self.did("fork")
        mirror = self.pick(random)
        assert mirror is not None
        count = len(mirror.tokens)
        if random.random() < 0.3:
            self.add(mirror.like(copy.deepcopy(mirror.cache)))
            return
        repeats = random.randint(1, max(MAX_ROWS // max(count, 1), 1))
        rows = [random.randrange(count) for _ in range(random.randint(1, 2))] if count else []
        if random.random() < 0.5 and count:
            self.add(mirror.like(mirror.cache.fork(repeats, rows), np.repeat(rows, repeats)))
        else:
            self.add(mirror.like(mirror.cache.fork(repeats), np.repeat(np.arange(count), repeats)))

    @precondition(lambda self: has_caches(self) and has_room(self))
    @rule(random=numbers)
    def join(self, random: random.Random) -> None:
        parts = [mirror for mirror in (self.pick(random) for _ in range(random.randint(1, 3))) if mirror is not None]
        if sum(len(part.tokens) for part in parts) > MAX_ROWS:
            return
        self.did("join")
        width = max(part.width for part in parts)
        twin = Mirror(PagedCache.join([part.cache for part in parts]))
        for name in ("tokens", "values", "real"):
            arrays = [getattr(part, name) for part in parts]
            padded = [np.pad(array, ((0, 0), (width - array.shape[1], 0))) for array in arrays]
            setattr(twin, name, np.concatenate(padded))
        twin.root, twin.undo = parts[0].root, twin.width
        self.add(twin)

    @precondition(has_caches)
    @rule(random=numbers)
    def select(self, random: random.Random) -> None:
        mirror = self.pick(random, filled=True)
        if mirror is not None:
            self.reorder(
                mirror, [random.randrange(len(mirror.tokens)) for _ in range(random.randint(1, min(MAX_ROWS, 4)))]
            )

    def reorder(self, mirror: Mirror, rows: list[int]) -> None:
        self.did("select")
        mirror.cache.select(rows)
        mirror.select(rows)

    @precondition(has_caches)
    @rule(random=numbers)
    def crop(self, random: random.Random) -> None:
        """Any number of positions; what a window no longer keeps is refused, and nothing changes."""
        mirror = self.pick(random, filled=True)
        if mirror is None:
            return
        remove = random.randint(0, mirror.width + 1) if random.random() < 0.3 else random.randint(0, 4)
        width = max(mirror.width - remove, 0)
        try:
            mirror.cache.crop(-remove)
        except ValueError as error:
            assert "have been given back" in str(error) and 0 < width < mirror.undo
            self.did("crop refused")
            return
        self.did("crop")
        mirror.crop(width)
        if not width:
            mirror.clear()
        elif mirror.cache._state.recording:
            mirror.undo = width

    @precondition(has_caches)
    @rule(random=numbers)
    def record(self, random: random.Random) -> None:
        mirror = self.pick(random)
        assert mirror is not None
        self.did("record")
        for layer in mirror.cache.layers:
            layer.activate_past_recording()

    @precondition(lambda self: self.world.pool.manager.num_reserved)
    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        """Somebody else takes blocks, and gives them back."""
        manager = self.world.pool.manager
        if reserved := manager.num_reserved:
            manager.add_references(manager.allocate(manager.num_free + 1 + count % reserved), -1)
            self.did("evict")

    @precondition(lambda self: self.world.pool.prefixes.held.any())
    @rule()
    def clear_prefix_cache(self) -> None:
        self.did("clear")
        before = self.world.pool.stats()
        assert self.world.pool.clear_prefix_cache() == before.cached
        assert self.world.pool.stats().cached == 0

    @precondition(lambda self: len(self.world.mirrors) > 1)
    @rule(random=numbers, how=st.sampled_from(["release", "reset", "drop", "drop a cycle"]))
    def end(self, random: random.Random, how: str) -> None:
        """A cache gives its blocks back. One that is merely dropped has not done so when the next operation begins."""
        self.did(how)
        key = random.choice(list(self.world.mirrors))
        cache = self.world.mirrors[key].cache
        if how == "reset":
            cache.reset()
            self.world.mirrors[key].clear()
            return
        del self.world.mirrors[key]
        if how == "release":
            cache.release()
            cache.release()
            return
        alive = weakref.ref(cache)
        if how == "drop a cycle":
            cache.itself = cache
        del cache
        if how == "drop a cycle":
            gc.collect()
        assert alive() is None
        if random.random() < 0.7 and self.world.mirrors:
            self.decode_once(random)

    def decode_once(self, random: random.Random) -> None:
        mirror = self.pick(random, filled=True)
        if mirror is not None:
            tokens = np.ones((len(mirror.tokens), 1), np.int64)
            real = np.ones(tokens.shape, bool)
            self.world.attempt(lambda: self.world.step(mirror, tokens, real, mirror.root))

    @invariant()
    def everything_is_as_the_oracle_has_it(self) -> None:
        if hasattr(self, "world"):
            self.sound = False  # an error on its way keeps caches alive: `teardown` is not to hide it
            self.world.check()
            self.sound = True

    def teardown(self) -> None:
        """With the last cache gone, nobody holds a block but the index, and clearing that frees them all."""
        if not getattr(self, "sound", False):
            return
        world = self.world
        for event in ("exhausted", "adopted padded", "packed", "shared beginnings"):
            executed[event + "!"] += world.counts[event]
        executed["copied!"] += world.pool.manager.cow_copies
        executed["hit tokens!"] += world.pool.prefixes.hit_tokens
        world.mirrors.clear()
        gc.collect()
        pool = world.pool
        assert pool.stats().used == 0
        pool.clear_prefix_cache()
        assert pool.stats().free == pool.num_blocks and not pool.prefixes._nodes and not pool.prefixes._roots


def left_padded(rows: list[list[int]]) -> tuple[Any, Any]:
    width = max(len(row) for row in rows)
    tokens = np.array([[0] * (width - len(row)) + row for row in rows])
    real = np.array([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return tokens, real


def run_machine(max_examples: int, steps: int, start: int | None = None) -> int:
    """Run random programs, and return the number of operations: always the same ones, or those of a seed."""
    executed.clear()
    gc.collect()
    gc.freeze()  # what exists now need not be walked by each collection of a machine
    run_state_machine_as_test(
        Machine if start is None else seed(start)(type("Machine", (Machine,), {})),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            derandomize=start is None,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    gc.unfreeze()
    return sum(count for name, count in executed.items() if not name.endswith("!"))


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MIN_SAVED", 4)


def test_thousands_of_operations_match_the_oracle() -> None:
    """With enough of every event for the comparison to mean something."""
    assert run_machine(max_examples=130, steps=50) >= 4_000
    assert min(executed[name + "!"] for name in ("exhausted", "adopted padded", "shared beginnings")) > 20, executed
    assert min(executed[name] for name in ("half a pass", "join", "crop refused", "evict", "drop a cycle")) > 20, (
        executed
    )
