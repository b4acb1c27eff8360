"""Work beside decoding: one thread per store, one piece of work at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

from .errors import CapacityError

logger = logging.getLogger(__name__)

ATTEMPTS, PAUSE = 50, 0.02
"""How often, and after how many seconds, background work tries again to get memory."""

T = TypeVar("T")
Check = Callable[[], None]
"""Work calls it between its steps; raises CancelledError when nobody wants the result any more."""


class Job(Generic[T]):
    """A piece of work. It is cancelled when the last reference to it goes."""

    def __init__(self, future: Future[T], dropped: threading.Event) -> None:
        self._future = future
        self._finalizer = weakref.finalize(self, dropped.set)

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._future.done()

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; whether `result` would not wait any more."""
        return bool(wait([self._future], seconds).done)

    def result(self) -> T:
        """Wait for the result, or raise what the work raised."""
        return self._future.result()


class Background:
    """The thread of one store. It starts with the first piece of work.

    Attributes:
        failures: pieces of work that failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._stopping = threading.Event()
        self._working = threading.Lock()
        self._thread: int | None = None
        self.failures = 0

    def failed(self, what: str) -> None:
        """Count work that failed, and say so the first time."""
        self.failures += 1
        log = logger.warning if self.failures == 1 else logger.debug
        log("swarm_kv: %s", what)

    def submit(self, work: Callable[[Check], T]) -> Job[T]:
        """Run `work` after what was submitted before, without gradients."""
        dropped = threading.Event()

        def run(stopping: threading.Event) -> T:
            def check() -> None:
                if dropped.is_set() or stopping.is_set():
                    raise CancelledError("the work is not wanted any more")

            check()
            self._thread = threading.get_ident()
            with self._working, torch.no_grad():
                return work(check)

        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="swarm_kv")
            return Job(self._executor.submit(run, self._stopping), dropped)

    def make_room(self, call: Callable[[], T]) -> T:
        """`call()`; again where the other side left no room for it.

        What a fetch takes from the cluster cache is pinned, so that the cache cannot shrink:
        decoding waits for the work that is under way, and the work for a decoding step to end.
        """
        try:
            return call()
        except CapacityError:
            if threading.get_ident() != self._thread:
                with self._working:
                    return call()
        for _ in range(ATTEMPTS):
            time.sleep(PAUSE)
            with contextlib.suppress(CapacityError):
                return call()
        return call()

    def stop(self) -> None:
        """Cancel everything and wait until the thread has ended. `submit` starts another one."""
        with self._lock:
            executor, self._executor = self._executor, None
            stopping, self._stopping = self._stopping, threading.Event()
        stopping.set()
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
