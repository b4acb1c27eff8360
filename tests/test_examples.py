"""The examples run as they stand."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
RUNS = [(path.name,) for path in sorted(FOLDER.glob("*.py"))]
RUNS += [("long_document_qa.py", "--batch")]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_example_runs(smollm2: object, run: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / run[0], *run[1:]],
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
