"""How many instructions five hot paths take, against what is stored: noise cannot move them.

python -m benchmarks.instructions [--update]

Builds csrc/bench/hot_paths.cpp and counts with callgrind. Exit status 1 where a path needs more
than `LIMIT` above the stored count; --update stores what was counted instead. Counts of another
compiler, C library or x86-64 level mean nothing here: then, and without valgrind, it says why it
cannot compare and exits with 0. Valgrind shows programs the same processor on every machine that
has AVX2, so that counts do not depend on which one it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.harness import build

STORED = pathlib.Path(__file__).with_suffix(".json")
LIMIT = 0.03
"""A path may need so much more, as a share of what is stored, before it fails."""
GAIN = 0.01
"""A path that needs so much less should be stored anew: the difference would hide a loss."""
UPDATE = "python -m benchmarks.instructions --update"


class Incomparable(RuntimeError):
    """Counts cannot be had here or not be compared; the message says why."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Instructions by path, and what else they depend on: compiler, libc, level."""

    built: dict[str, str]
    instructions: dict[str, int]


def count(program: pathlib.Path, arguments: Sequence[str] = ()) -> Counts:
    """Runs the program under callgrind.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={out}", str(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        # A dump per path, in order, and one without a name at the end.
        dumps = [dump.read_text() for dump in pathlib.Path(folder).iterdir()]
    instructions = {}
    for dump in dumps:
        name = re.search(r"^desc: Trigger: Client Request: (.+)$", dump, re.MULTILINE)
        total = re.search(r"^totals: (\d+)$", dump, re.MULTILINE)
        if name and total:
            instructions[name[1]] = int(total[1])
    return Counts(json.loads(done.stdout), dict(sorted(instructions.items())))


def compare(counted: Counts, stored: Counts) -> tuple[list[str], list[str]]:
    """What fails and what else is worth saying, a sentence for each.

    Raises:
        Incomparable: they were not built alike.
    """
    different = [
        f"{what} is {counted.built.get(what)}, the stored counts are of {value}"
        for what, value in stored.built.items()
        if counted.built.get(what) != value
    ]
    if different:
        raise Incomparable("; ".join(different))
    failures = [
        f"{name}: only in {where}; {UPDATE} stores the paths that there are"
        for name in sorted(counted.instructions.keys() ^ stored.instructions.keys())
        for where in ["the program" if name in counted.instructions else STORED.name]
    ]
    remarks = []
    for name in counted.instructions.keys() & stored.instructions.keys():
        now, before = counted.instructions[name], stored.instructions[name]
        most = int(before * (1 + LIMIT))
        change = now / before - 1
        if now > most:
            failures.append(
                f"{name}: {now:,} instructions, {change:.1%} more than the {before:,} stored; the "
                f"limit is {LIMIT:.0%}, {most:,}. If that is meant, store it "
                f"by {UPDATE} and say why in the commit"
            )
        elif change < -GAIN:
            remarks.append(
                f"{name}: {now:,} instructions, {-change:.1%} fewer than the {before:,} stored: "
                f"keep that by {UPDATE}"
            )
    return failures, remarks


def load() -> Counts:
    return Counts(**json.loads(STORED.read_text()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {STORED.name}")
    options = parser.parse_args(arguments)
    try:
        if shutil.which("valgrind") is None:
            raise Incomparable("valgrind is missing: apt-get install valgrind")
        counted = count(build("hot_paths"))
        if options.update:
            STORED.write_text(json.dumps(dataclasses.asdict(counted), indent=2) + "\n")
            return 0
        failures, remarks = compare(counted, load())
    except Incomparable as reason:
        print(f"instruction counts are not compared: {reason}")
        return 0
    for name, instructions in counted.instructions.items():
        print(f"{name:8} {instructions:12,} instructions")
    print("\n".join(remarks + failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
