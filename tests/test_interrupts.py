"""KeyboardInterrupt at every line of the bookkeeping: no block is lost, no count is wrong, and a cache either holds what it
must or is refused. Contents are compared with the dense arrays of `oracle`."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Mirror, World

import hf_paged
from hf_paged import LayerGeometry, PagedCache, reuse

FOLDER = Path(hf_paged.__file__).parent
FILES = {str(FOLDER / name) for name in ("blocks.py", "tables.py", "prefix.py", "state.py", "cache.py")}
PROMPT = [1, 2, 3, 1, 2, 2, 3, 3, 1, 2, 1]  # over two blocks of 4
OTHER = [3, 3, 1, 2, 2, 1, 3, 2, 2]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that is executed in `FILES`.

    Not where a `with` statement is left, or a `try` begins: a tracer can break in between a block and the release of its lock
    there, a signal can't. And not in finalizers, whose errors are swallowed."""

    def __init__(self) -> None:
        self.left = 0
        self.places: list[tuple[str, int]] = []  # where a line was executed
        self._sources: dict[str, list[str]] = {name: Path(name).read_text().splitlines() for name in FILES}

    @contextlib.contextmanager
    def at(self, line: int) -> Iterator[None]:
        self.left, self.places = line, []
        before = sys.gettrace()
        gc.disable()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            gc.enable()

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in ("__del__", "abandon"):
            return None
        source, inside = self._sources[frame.f_code.co_filename], set()

        def line(frame: Any, event: str, arg: Any) -> Any:
            if event != "line":
                return line
            number = frame.f_lineno
            if source[number - 1].strip() == "try:":
                return line
            if source[number - 1].lstrip().startswith(("with ", "return ")):
                inside.symmetric_difference_update([number])
                if number not in inside:
                    return line
            self.left -= 1
            self.places.append((Path(frame.f_code.co_filename).name, number))
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
            return line

        return line


def fill(world: World, *rows: list[int], how: str = "padded") -> Mirror:
    mirror = Mirror(PagedCache(world.pool))
    width = max(map(len, rows))
    tokens = np.array([[0] * (width - len(row)) + row for row in rows])
    world.turn(mirror, tokens, np.arange(width) >= width - np.array([[len(row)] for row in rows]), 0, how, True, True)
    return mirror


def step(world: World, mirror: Mirror, count: int = 1) -> None:
    tokens = np.full((len(mirror.tokens), count), 2)
    world.step(mirror, tokens, np.ones(tokens.shape, bool), 0)


# What stood there before, "a" the cache that is being changed, and the change; it returns what "a" is afterwards.
def _append(world: World, a: Mirror) -> None:
    step(world, a)


def _prefill(world: World, a: Mirror) -> None:
    a.cache.reset()
    a.clear()
    tokens = np.array([PROMPT, PROMPT[:8] + OTHER[:3]])
    world.turn(a, tokens, np.ones(tokens.shape, bool), 0, "padded", True, True)


def _packed(world: World, a: Mirror) -> None:
    a.cache.reset()
    a.clear()
    tokens = np.array([PROMPT, [0, 0, 0, *OTHER[:8]]])
    world.turn(a, tokens, np.array([[True] * 11, [False] * 3 + [True] * 8]), 0, "packed", True, True)


def _fork(world: World, a: Mirror) -> None:
    world.mirrors[9] = a.like(a.cache.fork(2), [0, 0, 1, 1])


def _join(world: World, a: Mirror) -> None:
    twin = Mirror(PagedCache.join([a.cache, world.mirrors[1].cache]))
    other = world.mirrors[1]
    for name in ("tokens", "values", "real"):
        arrays = [getattr(part, name) for part in (a, other)]
        width = max(array.shape[1] for array in arrays)
        setattr(twin, name, np.concatenate([np.pad(x, ((0, 0), (width - x.shape[1], 0))) for x in arrays]))
    world.mirrors[9] = twin


def _select(world: World, a: Mirror) -> None:
    a.cache.select([1, 1, 0])
    a.select([1, 1, 0])


def _crop(world: World, a: Mirror) -> None:
    a.cache.crop(-1)
    a.crop(a.width - 1)


def _crop_recorded(world: World, a: Mirror) -> None:
    a.cache.layers[0].activate_past_recording()
    a.cache.crop(-3)
    a.crop(a.width - 3)


def _reset(world: World, a: Mirror) -> None:
    a.cache.reset()
    a.clear()


def _release(world: World, a: Mirror) -> None:
    a.cache.release()
    a.clear()


def _evict(world: World, a: Mirror) -> None:
    """More blocks than are free: prefixes go, then the pool grows."""
    a.cache.reset()
    a.clear()
    tokens = np.array([OTHER[::-1] * 2])
    world.turn(a, tokens, np.ones(tokens.shape, bool), 1, "padded", True, True)


def _collect(world: World, a: Mirror) -> None:
    """What was dropped is freed by the next one who asks for blocks."""
    del world.mirrors[2]
    step(world, a)


def _clear(world: World, a: Mirror) -> None:
    world.mirrors[1].cache.release()
    del world.mirrors[1]
    world.pool.clear_prefix_cache()


CHANGES: list[Callable[[World, Mirror], None]] = [
    _fork, _join, _select, _crop, _crop_recorded, _reset, _release, _clear, _collect, _append, _evict, _prefill, _packed,
]  # fmt: skip


def prepared(blocks: int) -> World:
    """Two prefixes in the index, three caches that share blocks with each other and with the index."""
    world = World([LayerGeometry(1, 1, 1, window=window) for window in (0, 5, 0)], blocks, 4, blocks + 6, True)
    world.mirrors[0] = fill(world, PROMPT, OTHER)
    step(world, world.mirrors[0], 3)
    world.mirrors[1] = world.mirrors[0].like(world.mirrors[0].cache.fork())
    world.mirrors[2] = fill(world, [*PROMPT[:9], 3, 3])
    done = fill(world, [*OTHER, 1, 1, 1])
    done.cache.release()
    return world


def same(world: World, mirror: Mirror) -> bool:
    try:
        world.check_cache(mirror)
    except (AssertionError, RuntimeError):
        return False
    return True


def assert_refused(world: World, mirror: Mirror) -> None:
    """The next use says so, and `reset` makes the cache as new."""
    with pytest.raises((RuntimeError, ValueError), match=r"interrupted|out of step|15 positions are cached"):
        step(world, mirror)


def settle(world: World, mirror: Mirror, before: Mirror) -> None:
    """After an interrupt a cache holds what it did, or all that the change brings, or nothing; or else it is refused."""
    cache = mirror.cache
    if same(world, before):
        vars(mirror).update(vars(before))
    elif cache._state.released or same(world, Mirror(cache)):
        mirror.clear()
    elif not same(world, mirror):
        assert_refused(world, mirror.like(cache))
        cache.reset()
        mirror.clear()


def sound_after(change: Callable[[World, Mirror], None], interrupt: Interrupt, line: int) -> bool:
    """Interrupt a change at a line. False if it has fewer."""
    world = prepared(40 if change is not _evict else 32)
    mirrors = {key: world.mirrors[key] for key in (0, 1)}
    befores = {key: mirror.like(mirror.cache) for key, mirror in mirrors.items()}
    try:
        with interrupt.at(line):
            change(world, mirrors[0])
        finished = True
    except KeyboardInterrupt as error:
        error.__traceback__ = None
        finished = False
    gc.collect()
    world.pool.check_integrity()
    if not finished:
        assert not world.pool.manager.lock._is_owned()  # type: ignore[attr-defined]
        for key, mirror in mirrors.items():
            settle(world, mirror, befores[key])
    for key in [key for key, mirror in world.mirrors.items() if mirror.cache._state.released]:
        del world.mirrors[key]
    world.check()
    for mirror in list(world.mirrors.values()):
        if mirror.width:
            step(world, mirror)
    world.check()
    world.mirrors.clear()
    del mirrors, befores
    mirror = None
    gc.collect()
    pool = world.pool
    assert pool.stats().used == 0
    pool.clear_prefix_cache()
    assert pool.stats().free == pool.num_blocks and not pool.prefixes._nodes and not pool.prefixes._roots
    return not finished


def sweep(
    change: Callable[[World, Mirror], None], seen: set[tuple[str, int]] | None = None
) -> tuple[int, dict[str, str]]:
    """Interrupt a change at every line that it executes, or at the first visit of those that are not in `seen`, where they
    are added. The number of interrupts, and what went wrong where."""
    gc.collect()
    gc.freeze()  # what exists now need not be walked each time
    interrupt, damage, done = Interrupt(), dict[str, str](), 0
    assert not sound_after(change, interrupt, 0)
    for line, place in enumerate(interrupt.places, 1):
        if seen is not None and place in seen:
            continue
        done += 1
        if seen is not None:
            seen.add(place)
        try:
            assert sound_after(change, interrupt, line), "the interrupt was swallowed"
        except Exception as error:
            damage[f"{change.__name__[1:]}, {place}"] = f"{type(error).__name__}: {str(error)[:90]}"
    gc.unfreeze()
    return done, damage


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MIN_SAVED", 4)


def test_an_interrupt_at_any_line() -> None:
    """At each once."""
    total, damage, seen = 0, dict[str, str](), set[tuple[str, int]]()
    for change in CHANGES:
        done, new = sweep(change, seen)
        total += done
        damage.update(new)
    assert not damage, f"{len(damage)} of {total}"
    assert total > 250


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_an_interrupt_at_any_time(change: Callable[[World, Mirror], None]) -> None:
    done, damage = sweep(change)
    assert not damage, f"{len(damage)} of {done}"
