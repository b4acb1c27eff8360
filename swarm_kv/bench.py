"""What a store gets from given drives, against what their own model says.

Two questions: which rates reads of each size reach, on each drive and on all at once; and how long
the reads of a decoding step take, against what `swarm_kv.plan` reckons for these drives.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .config import SwarmConfig
from .index import sequence_blocks
from .measure import (
    DEFAULT_BYTES,
    DEPTHS,
    DIM,
    ENTRY_BYTES,
    PIECE_BYTES,
    READ_SECONDS,
    DriveTest,
    Rate,
    quiet_store,
)
from .plan import run_length, scattered
from .replay import Drive
from .simulate import simulate_selections
from .store import NOTHING, Segment, Store, Wanted

CONTEXTS = (8192, 32768, 131072)
"""Tokens; a step reads a tenth of them, as if nothing were cached."""
SPARSITY = 0.10
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class SizeRate:
    """Reads of one size.

    Attributes:
        drive: path, or "all" for all at once.
        rate: what they gave.
        of_model: bytes per second, over what the drives' models say.
    """

    drive: str
    rate: Rate
    of_model: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The reads of a decoding step in one layer.

    Attributes:
        context: tokens, of which a tenth is read.
        entries, requests, bytes: read.
        seconds: of each repetition, until the last entry was there.
        planned: seconds that the busiest drive needs by its model.
    """

    context: int
    entries: int
    requests: float
    bytes: float
    seconds: tuple[float, ...]
    planned: float

    @property
    def median(self) -> float:
        """Of the repetitions."""
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class Result:
    """What `run` measured.

    Attributes:
        paths: of the drives. models: what their requests cost, by the sizes 4 KiB and 256 KiB.
        engine: that read, as in "io_uring, O_DIRECT".
        rates: by size, each drive and then all of them.
        steps: by context.
    """

    paths: tuple[str, ...]
    models: tuple[Drive, ...]
    engine: str
    rates: tuple[SizeRate, ...]
    steps: tuple[StepTime, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dataclasses.asdict(self)
        for step, own in zip(values["steps"], self.steps, strict=True):
            step["median"] = own.median
        return values


def run(
    paths: Sequence[str],
    *,
    size: int = DEFAULT_BYTES,
    seconds: float = READ_SECONDS,
    on_step: Callable[[str], object] = lambda what: None,
) -> Result:
    """Measure drives.

    Args:
        paths: one directory per drive.
        size: bytes that are written to each.
        seconds: that each size is read.
        on_step: called with words after each part, see `steps_of`.

    Raises:
        ArgumentError: no path, or `size` too small. StorageError: a drive cannot be used.
    """
    with DriveTest(paths, size, seconds, on_step) as test:
        asked = [*range(len(paths)), *([None] if len(paths) > 1 else [])]
        found = {
            (request, drive): test.read(request, drive)
            for request, drive in itertools.product(DEPTHS, asked)
        }
    small, large = min(DEPTHS), max(DEPTHS)
    models = tuple(
        Drive.of_rates(
            found[small, drive].requests_per_second, found[large, drive].bytes_per_second, large
        )
        for drive in range(len(paths))
    )
    rates = []
    for (request, drive), rate in found.items():
        own = models if drive is None else [models[drive]]
        expected = sum(request / model.seconds(1, request) for model in own)
        name = "all" if drive is None else paths[drive]
        rates.append(SizeRate(name, rate, rate.bytes_per_second / expected))
    engine, steps = _steps(paths, size, on_step)
    return Result(tuple(paths), models, engine, tuple(rates), steps)


def steps_of(drives: int, size: int = DEFAULT_BYTES) -> int:
    """How often `run` calls `on_step` at most, for progress bars."""
    reads = len(DEPTHS) * (drives + (drives > 1))
    return size // PIECE_BYTES + reads + len(CONTEXTS)


def _steps(
    paths: Sequence[str], size: int, on_step: Callable[[str], object]
) -> tuple[str, tuple[StepTime, ...]]:
    """Engine and step times of a store as a user opens it."""
    entries = len(paths) * min(size, 4 * PIECE_BYTES) // ENTRY_BYTES
    config = SwarmConfig(paths=list(paths), dram_bytes="256MiB")
    with quiet_store(config) as store:
        numbers = np.frombuffer(os.urandom(entries * ENTRY_BYTES // 2), dtype=np.float16)
        half = torch.from_numpy(numbers.copy()).view(1, entries, DIM)
        segment = store.write(half, half, *sequence_blocks(entries, config.cluster_size), "bench")
        steps = []
        for context in CONTEXTS:
            if round(SPARSITY * context) <= entries // 2:
                steps.append(_step(store, segment, context))
            on_step("steps")
        engine = store.stats().engine
        del segment
    return engine, tuple(steps)


def _step(store: Store, segment: Segment, context: int) -> StepTime:
    """Repetitions of one size of step, each with entries of its own."""
    config, wanted = store.config, round(SPARSITY * context)
    random = torch.Generator().manual_seed(context)
    run_of = run_length(context, config.selection_request_cost(ENTRY_BYTES))
    chosen = [scattered(segment.entries, wanted, run_of, random) for _ in range(REPEATS + 1)]
    seconds = []
    for entries in chosen:
        began = time.perf_counter()
        row = Wanted((segment,), NOTHING, entries, segment.entries)
        with store.fetch([row], purpose="stream") as fetch:
            fetch.complete()
            seconds.append(time.perf_counter() - began)
    drives = store.counters()["drives"]
    requests, size, planned = simulate_selections(
        *store.clusters(segment),
        [(NOTHING, entries) for entries in chosen[1:]],
        entries=segment.entries,
        entry_bytes=ENTRY_BYTES,
        drives=[(drive["t_base"], drive["t_transfer"]) for drive in drives],
        block=max(drive["block"] for drive in drives),
        placement=config.placement,
        router=config.router,
    )
    return StepTime(
        context,
        wanted,
        requests.sum(1).double().mean().item(),
        size.sum(1).double().mean().item(),
        tuple(seconds[1:]),  # the first one warms memory up
        planned.mean().item(),
    )
