"""The steps of `test_machine` in programs without Hypothesis, which takes longer to choose a step than the step takes."""

from __future__ import annotations

import gc
import os
import random
import time

import pytest
from test_machine import LAYERS, MAX_CACHES, Machine, executed

from hf_paged import reuse


def walk(start: int, steps: int) -> None:
    """One random program."""
    numbers, machine = random.Random(start), Machine()
    machine.make_pool(
        windows=numbers.choice(LAYERS),
        block_size=numbers.randint(1, 4),
        num_blocks=numbers.randint(6, 64),
        growth=numbers.choice([0, 0, 9]),
        prefix_caching=numbers.random() < 0.75,
        random=numbers,
    )
    machine.new(random=numbers)
    likely = ("turn", "decode", "by_hand", "select", "crop", "fork", "end")
    rare = ("new", "turn", "announced_in_vain", "half_a_pass", "join", "record", "evict", "clear_prefix_cache")
    for _ in range(steps):
        name = numbers.choice(likely) if numbers.random() < 0.8 else numbers.choice(rare)
        world = machine.world
        if name in ("fork", "join", "new") and len(world.mirrors) == MAX_CACHES:
            name = "decode"
        if name == "end" and len(world.mirrors) < 2:
            name = "new"
        if name == "decode":
            machine.decode(random=numbers, steps=numbers.randint(1, 4), beams=numbers.random() < 0.4)
        elif name == "end":
            machine.end(random=numbers, how=numbers.choice(["release", "release", "reset", "drop", "drop a cycle"]))
        elif name == "evict":
            machine.evict(count=numbers.randint(1, 12))
        elif name == "clear_prefix_cache":
            machine.clear_prefix_cache()
        else:
            getattr(machine, name)(random=numbers)
        machine.everything_is_as_the_oracle_has_it()
    machine.teardown()


@pytest.mark.slow
def test_many_operations_match_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand, or as many as HF_PAGED_OPERATIONS says, from the seed HF_PAGED_SEED on."""
    wanted, start = int(os.environ.get("HF_PAGED_OPERATIONS", 100_000)), int(os.environ.get("HF_PAGED_SEED", 0))
    monkeypatch.setattr(reuse, "MIN_SAVED", 4)
    executed.clear()
    gc.collect()
    gc.freeze()
    began, operations, program = time.monotonic(), 0, start
    while operations < wanted:
        try:
            walk(program, steps=150)
        except BaseException:
            print(f"walk({program}, steps=150) fails")
            raise
        program += 1
        operations = sum(count for name, count in executed.items() if not name.endswith("!"))
        if program % 50 == 0:
            took = time.monotonic() - began
            print(
                f"seeds {start}..{program - 1}, {operations} operations, {took:.0f} s: {dict(sorted(executed.items()))}",
                flush=True,
            )
    gc.unfreeze()
