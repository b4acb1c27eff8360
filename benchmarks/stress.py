"""Ten thousand decoding steps over drives that fail and slow down: runs the program `stress_bench`.

Four threads decode at random on four drives, with joins, leaves, forks, cancellations and
prefetches. One drive has reads that fail or bring other bytes, one turns 50 times slower for a
while, all have short reads (csrc/tests/stress.h). Every entry carries a pattern of its own.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from typing import Any

from benchmarks.harness import Program, Report

DRIVES = 4
NONE_OF = {
    "wrong": "entries with a wrong byte",
    "missing": "entries that were not delivered, or not asked for",
    "avoidable": "failures of entries that another drive holds",
    "unnamed": "failures without drive, segment and entry",
    "leaks": "kinds of memory, tickets or files that are held at the end",
    "errors": "errors of another kind",
}
COUNTS = ("steps", "joins", "cancelled", "entries", "faults", "short_reads", "failures", "repaired")


@dataclasses.dataclass(frozen=True)
class Parameters:
    program: str = ""
    """Path of stress_bench; built if empty."""
    paths: tuple[str, ...] = ()
    """Four directories, as four drives; temporary ones if empty."""
    steps: int = 10_000
    """Of all threads together."""
    timeout_s: float = 240.0
    """Limit of the run, in seconds."""


QUICK: dict[str, Any] = {"steps": 1_000}


def run(parameters: Parameters, report: Report) -> dict[str, Any]:
    """Run the steps and check that nothing was wrong, lost or left.

    Returns:
        The program's figures; `slow_share` is the share of the slow drive in what was read from all
        of them, `before`, `during` and `after` it was slow.
    """
    figures = measure(parameters)
    for name in COUNTS:
        report.measure(f"stress: {name.replace('_', ' ')}", "count", figures[name])
    for name, meaning in NONE_OF.items():
        report.at_most(f"stress: {meaning}", figures[name], 0)
    share = figures["slow_share"]
    for when, value in share.items():
        report.measure(f"stress: share of the slow drive {when}", "share", value)
    report.at_most(
        "stress: share of the slow drive, while it is slow / before",
        share["during"] / share["before"],
        0.8,
    )
    report.at_least(
        "stress: share of the slow drive, after / before", share["after"] / share["before"], 0.9
    )
    return figures


def measure(parameters: Parameters) -> dict[str, Any]:
    """What the program prints.

    Raises:
        Unavailable: it cannot be built, or it did not finish.
    """
    program = Program("stress_bench", parameters.program)
    with tempfile.TemporaryDirectory(prefix="swarm_kv_bench_") as scratch:
        paths = list(parameters.paths)
        if not paths:
            paths = [f"{scratch}/drive{number}" for number in range(DRIVES)]
            for path in paths:
                pathlib.Path(path).mkdir()
        arguments = ["--steps", str(parameters.steps), *paths]
        figures: dict[str, Any] = program.output(arguments, parameters.timeout_s)
    return figures
