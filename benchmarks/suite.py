"""Every benchmark of this machine, one after another, each in a process of its own.

They are forked from one that has imported everything and computed nothing, for to import torch and
transformers anew takes longer than some of the benchmarks.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import ROOT
from benchmarks.registry import BENCHMARKS

RESULTS = pathlib.Path(__file__).with_name("results")
QUICK_RESULTS = ROOT / "build" / "benchmarks"
NAMES = tuple(name for name, benchmark in BENCHMARKS.items() if not benchmark.elsewhere)
LIMIT_SECONDS = 1800
"""Of one benchmark."""


def arguments(name: str, folder: pathlib.Path, quick: bool, paths: Sequence[str]) -> list[str]:
    """Of `python -m benchmarks`, for one benchmark into `folder`."""
    return [
        *(name, "--json", str(folder / f"{name}.json"), "--plot", str(folder / f"{name}.svg")),
        *(["--quick"] if quick else []),
        *(["--paths", ",".join(paths)] if paths else []),
    ]


def measure(given: Sequence[str]) -> None:
    """`python -m benchmarks` in this process, which ends with it."""
    from benchmarks import __main__ as command

    sys.exit(command.main(list(given)))


def apart(given: Sequence[str], limit: float = LIMIT_SECONDS) -> int | None:
    """Exit status of `measure` in a process of its own; None where that took `limit` seconds."""
    process = multiprocessing.get_context("fork").Process(target=measure, args=(given,))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def run(folder: pathlib.Path, *, quick: bool, paths: Sequence[str] = ()) -> bool:
    """Run all of them; whether each could be measured. One that fails leaves no old result behind.

    Prints at the end how long each took.

    Args:
        folder: where `NAME.json` and `NAME.svg` are written.
        quick, paths: see `python -m benchmarks --help`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    seconds: dict[str, float] = {}
    began = time.monotonic()
    for module in ("matplotlib.figure", *(each.module for each in BENCHMARKS.values())):
        importlib.import_module(module)
    for number, name in enumerate(NAMES, 1):
        for old in (folder / f"{name}.json", folder / f"{name}.svg"):
            old.unlink(missing_ok=True)
        print(f"== {name} ({number} of {len(NAMES)}, {time.monotonic() - began:.0f} s so far)")
        sys.stdout.flush()
        started = time.monotonic()
        done = apart(arguments(name, folder, quick, paths))
        if done is None:
            print(f"{name} took longer than {LIMIT_SECONDS} s", file=sys.stderr)
        seconds[name] = time.monotonic() - started
        if done != 0:
            failed.append(name)
    for name in sorted(seconds, key=lambda name: seconds[name], reverse=True):
        print(f"{name:10} {seconds[name]:6.0f} s")
    print(
        f"== {len(NAMES) - len(failed)} of {len(NAMES)} benchmarks measured in "
        f"{time.monotonic() - began:.0f} s"
    )
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return not failed
