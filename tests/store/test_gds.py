"""Engine `gds`: through a stand-in of NVIDIA's library, and what is said where there is no GPU."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from typing import Any

import pytest

from . import another_process
from .helpers import MODEL, left_behind

ROOT = pathlib.Path(__file__).parents[2]
STAND_IN = ROOT / "csrc/tests/stand_ins/cufile.cpp"


def run_script(drives: list[str], folder: pathlib.Path, **environment: str) -> dict[str, Any]:
    """What a store on `gds` says in a process that writes cuFile's log into `folder`."""
    settings = {"engine": "gds", "staging_bytes": "1MiB", "device_model": MODEL}
    log = {"CUFILE_LOGFILE_PATH": str(folder / "cufile.log")}
    return another_process.run(drives, settings, **log, **environment)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that is loaded in place of libcufile.so.0."""
    if not STAND_IN.exists():
        pytest.skip("the C++ sources are not here")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    library = tmp_path_factory.mktemp("stand_in") / "libcufile.so.0"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    command += [f"-Wl,-soname,{library.name}", str(STAND_IN), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    return str(library)


@pytest.mark.timeout(300)
def test_reads_through_the_library(
    drives: list[str], stand_in: str, tmp_path: pathlib.Path
) -> None:
    through = run_script(drives, tmp_path, LD_PRELOAD=stand_in)
    assert through["engine"].startswith("gds")
    assert not any("GPUDirect" in line for line in through["warnings"])
    assert through["reads"] >= 2 * len(drives)  # each was probed and read
    assert left_behind(drives) == []
    # The control: with a driver that refuses, other calls read the same bytes.
    refused = run_script(drives, tmp_path, LD_PRELOAD=stand_in, SWARM_KV_STAND_IN_FAULT="driver")
    assert refused["reads"] == 0
    assert refused["engine"].startswith(("io_uring", "threads"))
    assert refused["digest"] == through["digest"]


@pytest.mark.timeout(300)
def test_without_a_gpu_it_falls_back_and_says_why(
    drives: list[str], tmp_path: pathlib.Path
) -> None:
    here = run_script(drives, tmp_path)
    if here["engine"].startswith("gds"):
        pytest.skip("GPUDirect Storage works here")
    warnings = [line for line in here["warnings"] if "GPUDirect Storage" in line]
    assert len(warnings) == 1  # of four drives
    assert "cannot be used here: cuFile" in warnings[0]
    assert "reads and writes instead" in warnings[0]
    assert here["engine"].startswith(("io_uring", "threads"))
