"""Every benchmark, one after another, each in a process of its own."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import ROOT
from benchmarks.registry import BENCHMARKS

RESULTS = pathlib.Path(__file__).with_name("results")
QUICK_RESULTS = ROOT / "build" / "benchmarks"
LIMIT_SECONDS = 1800
"""Of one benchmark."""


def command(name: str, folder: pathlib.Path, quick: bool, paths: Sequence[str]) -> list[str]:
    """Runs one benchmark into `folder`."""
    return [
        *(sys.executable, "-m", "benchmarks", name),
        *("--json", str(folder / f"{name}.json"), "--plot", str(folder / f"{name}.svg")),
        *(["--quick"] if quick else []),
        *(["--paths", ",".join(paths)] if paths else []),
    ]


def run(folder: pathlib.Path, *, quick: bool, paths: Sequence[str] = ()) -> bool:
    """Run all of them; whether each could be measured. One that fails leaves no old result behind.

    Args:
        folder: where `NAME.json` and `NAME.svg` are written.
        quick, paths: see `python -m benchmarks --help`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    began = time.monotonic()
    for number, name in enumerate(BENCHMARKS, 1):
        for old in (folder / f"{name}.json", folder / f"{name}.svg"):
            old.unlink(missing_ok=True)
        print(f"== {name} ({number} of {len(BENCHMARKS)}, {time.monotonic() - began:.0f} s so far)")
        sys.stdout.flush()
        try:
            done = subprocess.run(
                command(name, folder, quick, paths), cwd=ROOT, timeout=LIMIT_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"{name} took longer than {LIMIT_SECONDS} s", file=sys.stderr)
            done = 1
        if done != 0:
            failed.append(name)
    print(f"== {len(BENCHMARKS) - len(failed)} of {len(BENCHMARKS)} benchmarks measured")
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return not failed
