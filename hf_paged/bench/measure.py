"""Timing two or more ways of doing the same thing, side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)

COMPILED_WARM_UPS = 3  # on a GPU, until compiled graphs are recorded


@dataclass
class Row:
    """One line of the result: seconds (or what `unit` says) of both sides, medians, and what else was seen."""

    task: str
    default: float
    paged: float
    unit: str = "s"
    default_runs: list[float] = field(default_factory=list)
    paged_runs: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times faster hf_paged is. None where a difference of times came out as nothing: it is below the noise."""
        return self.default / self.paged if self.paged > 0 else None


def on_gpu() -> bool:
    """Whether anything has run on a GPU in this process."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def finish() -> None:
    """Wait until the GPU, where there is one in use, has done what it was given."""
    if on_gpu():
        torch.cuda.synchronize()


def interleave(
    ways: dict[Name, Callable[[], Any]],
    repeats: int,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    collect: bool = False,
) -> dict[Name, list[float]]:
    """Call every way once to warm up, then `repeats` times in turn. Returns the seconds of each call, the device's part
    included.

    No garbage is collected during a call; with `collect` it is before each, so that no way pays for another's.
    """
    for way in ways.values():
        way()
    seconds: dict[Name, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    try:
        for _ in progress(range(repeats)):
            for name, way in ways.items():
                if collect:
                    gc.collect()
                finish()
                start = time.perf_counter()
                way()
                finish()
                seconds[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return seconds


def median(values: Iterable[float]) -> float:
    return statistics.median(values)
