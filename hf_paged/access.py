"""Who may use a cache: not after its release or an interrupted change, not in a forked process, one thread at a time."""

from __future__ import annotations

import threading

from .plan import StepPlan
from .pool import PagePool

TWO_THREADS = "this PagedCache is used by two threads at once: give each its own, cache.fork() shares the blocks"


class Access:
    """What a cache knows of its users.

    What changes rows, width and pads together stands inside `with state:`. An interrupt there (KeyboardInterrupt, SystemExit)
    leaves the cache `interrupted`: all but `reset` and `release` refuse it then.
    """

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.plan: StepPlan | None = None
        self.released = False
        self.interrupted = False
        self.thread: int | None = None  # the one whose `generate` runs on this cache

    def __enter__(self) -> None:
        self.interrupted = True

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.interrupted = kind is not None and not issubclass(kind, Exception)

    def check(self, whole: bool = True) -> None:
        """Raise `RuntimeError` where nobody may use this cache, or not this process or thread; also after an interrupt, unless
        it is only to be emptied (not `whole`)."""
        self.pool.check_process()
        self.check_released()
        self.check_thread()
        if whole and self.interrupted:
            raise RuntimeError(
                "a change of this PagedCache was interrupted half way: start over with cache.reset(), or make a new one"
            )

    def check_released(self) -> None:
        """Raise `RuntimeError` after `release`."""
        if self.released:
            raise RuntimeError("this PagedCache was released, its keys and values are gone: make a new one")

    @property
    def elsewhere(self) -> bool:
        """Whether a `generate` in another thread runs on this cache."""
        return self.thread is not None and self.thread != threading.get_ident()

    def check_thread(self) -> None:
        """Raise `RuntimeError` while a `generate` in another thread runs on this cache."""
        if self.elsewhere:
            raise RuntimeError(f"{TWO_THREADS}. A generate runs on it in another thread")

    def check_passes(self) -> None:
        """Raise `RuntimeError` where another thread is in the middle of a forward pass with this cache."""
        plan = self.plan
        if plan is None or not plan.q_length or plan.thread in (None, threading.get_ident()):
            return
        layers = len(self.pool.geometry)
        if len(plan.written) < layers:
            raise RuntimeError(
                f"{TWO_THREADS}. Or a forward pass in another thread ended short, {len(plan.written)} of {layers} layers have "
                "written: start over with cache.reset(), and if the model has no more layers than that, make the pool with "
                "PagePool.for_model(model)"
            )

    def claim(self) -> None:
        """Let nobody but this thread change the cache, until `thread` is None again."""
        self.check()
        with self.pool.manager.lock:
            self.check_thread()
            self.check_passes()
            self.thread = threading.get_ident()
