"""Which backend serves a pool, and with blocks of what size."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from . import BACKENDS, cpu
from .flash import cuda_capability
from .trial import failure_of

logger = logging.getLogger(__name__)

# Best first, by major compute capability. Version 3 is made for Hopper. There, version 4 cannot split a long row over the
# GPU in decoding, and version 2 can; on Blackwell version 4 can, and version 3 does not run.
FLASH = {9: ("flash3", "flash2", "flash4"), 10: ("flash4", "flash2"), 11: ("flash4", "flash2")}


class Choice(NamedTuple):
    """A backend, a block size in tokens, and why."""

    kernel: str
    block_size: int
    reason: str


def candidates(device: torch.device) -> tuple[str, ...]:
    """The backends worth trying on `device`, best first. The last one always serves."""
    if device.type == "cpu":
        return ("cpu", "reference")
    capability = cuda_capability(device)
    if capability is None:
        return ("triton", "reference")
    if torch.version.hip:  # versions 3 and 4 are not made for it, whatever capability it reports
        return ("flash2", "triton", "reference")
    return (*FLASH.get(capability[0], ("flash2", "flash3")), "triton", "reference")


def problem_of(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Iterable[tuple[int, int]],
    block_size: int,
    needs: Collection[str] = (),
) -> str | None:
    """Why backend `name` cannot serve all of these; None where it can. On a GPU it is tried, once per process."""
    backend, dims = BACKENDS[name], sorted(set(head_dims))
    for key_dim, value_dim in dims:
        problem = backend.problem(device, dtype, key_dim, value_dim, block_size)
        if problem:
            return problem
    lacking = sorted(set(needs) - backend.features)
    if lacking:
        return f"{name} has no {' and no '.join(lacking)}"
    if device.type != "cuda" or name == "reference":
        return None
    failures = (failure_of(name, device, dtype, *pair, block_size, frozenset(needs)) for pair in dims)
    return next(filter(None, failures), None)


def choose(
    kernel: str | None,
    block_size: int | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Iterable[tuple[int, int]],
    needs: Collection[str] = (),
    order: Collection[str] | None = None,
) -> Choice:
    """Pick backend and block size together. None leaves the block size to the backend; None and "auto" pick the first of
    `order` (default: `candidates(device)`) that serves these dims and features here. The compiled CPU kernel is built now
    if it never was.

    A backend asked for by name may lack features that the model needs: layers which ask for them are routed elsewhere.

    Raises `ValueError` where the kernel asked for is unknown or cannot serve; the message names what it could.
    """
    dims = list(head_dims)
    if kernel not in (None, "auto"):
        if kernel not in BACKENDS:
            raise ValueError(f"kernel={kernel!r} is not known: use 'auto' or one of {sorted(BACKENDS)}")
        size = BACKENDS[kernel].block_size if block_size is None else block_size
        problem = problem_of(kernel, device, dtype, dims, size, BACKENDS[kernel].features.intersection(needs))
        if problem:
            raise ValueError(f"kernel={kernel!r} cannot serve this pool: {problem}")
        return Choice(kernel, size, "asked for")
    passed_over: list[str] = []
    for name in candidates(device) if order is None else order:
        backend = BACKENDS[name]
        size = backend.block_size if block_size is None else block_size
        problem = problem_of(name, device, dtype, dims, size, needs)
        if problem is None:
            if name == "reference" and passed_over:
                _warn_if_slow(device, dtype, dims, passed_over)
            reason = "; ".join([backend.describe(), *passed_over])
            return Choice(name, size, reason.removeprefix("; "))
        passed_over.append(problem)
    raise ValueError(f"no kernel of {order} serves this pool: {'; '.join(passed_over)}")


def _warn_if_slow(device: torch.device, dtype: torch.dtype, dims: list[tuple[int, int]], problems: list[str]) -> None:
    """Where a fast kernel could be had: on GPUs, and on CPUs where only the compiler is missing."""
    if device.type == "cuda" or (device.type == "cpu" and all(cpu.supports(dtype, *pair) for pair in dims)):
        _warn_once("; ".join(problems))


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"hf_paged uses its slow reference kernel: {reason}. `python -m hf_paged doctor` says what would help",
        stacklevel=5,
    )


@functools.cache
def substitute(
    kernel: str,
    needs: frozenset[str],
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    block_size: int,
) -> str:
    """The backend that serves layers asking for `needs` over the storage of `kernel`: itself where it can."""
    if needs <= BACKENDS[kernel].features:
        return kernel
    others = [name for name in candidates(device) if name != kernel and not BACKENDS[name].needs_zeroed_frames]
    choice = choose(None, block_size, device, dtype, [head_dims], needs, order=others)
    lacking = ", ".join(sorted(needs - BACKENDS[kernel].features))
    logger.info("layers with %s, which %s lacks, use the %s kernel", lacking, kernel, choice.kernel)
    return choice.kernel
