"""Time on a GPU by its own events, and on the CPU by the same calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

COLD_BYTES = 1 << 30
"""Written before each call: more than caches hold, and long enough for the host to get ahead."""


class HostEvent:
    """`torch.cuda.Event` where everything has happened when a call returns."""

    def record(self, stream: Any = None) -> None:
        self.moment = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing is left to wait for."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds."""
        return 1e3 * (end.moment - self.moment)


def event(device: str) -> Any:
    return torch.cuda.Event(enable_timing=True) if device == "cuda" else HostEvent()


def settle(device: str) -> None:
    """Wait for everything."""
    if device == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Times calls on a device whose caches hold nothing of theirs."""

    def __init__(self, device: str) -> None:
        self._device = device
        size = COLD_BYTES if device == "cuda" else 1
        self._cold = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, from its first kernel to its last."""
        begin, end = event(self._device), event(self._device)
        self._cold.zero_()
        begin.record()
        call()
        end.record()
        settle(self._device)
        return begin.elapsed_time(end) / 1e3

    def in_turn(self, calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
        """Seconds of each call, after one to warm up; a change of clocks meets all of them."""
        for call in calls.values():
            call()
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                taken[name].append(self.seconds(call))
        return taken
