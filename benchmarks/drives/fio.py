"""Random reads by fio's io_uring engine: what the drives can do without this project."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.drives.daemon import INSTALL
from benchmarks.harness import Unavailable


@dataclasses.dataclass(frozen=True)
class Reads:
    """What one run of fio reports.

    Attributes:
        requests, seconds: how many, and how long they took.
        bytes_per_second: of all files together.
        cpu_seconds: user and system time of the reading thread.
    """

    requests: int
    seconds: float
    bytes_per_second: float
    cpu_seconds: float


def _run(arguments: Sequence[str]) -> list[dict[str, Any]]:
    program = shutil.which("fio")
    if program is None:
        raise Unavailable(f"fio is not installed: {INSTALL}")
    command = [program, "--output-format=json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise Unavailable(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    jobs: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    return jobs


def _common(block: int) -> list[str]:
    return [
        "--ioengine=io_uring",
        "--direct=1",
        "--rw=randread",
        "--norandommap",
        f"--bs={block}",
        "--fixedbufs",
        "--registerfiles",
        "--readonly",
        "--thread",
    ]


def random_reads(
    files: Sequence[str | os.PathLike[str]],
    *,
    block: int,
    depth: int,
    requests: int,
    batch: int = 1,
    seed: int = 1,
) -> Reads:
    """Read `requests` random blocks of `files` in turn, from one thread with one ring.

    Args:
        depth: requests in flight, all files together.
        batch: submitted, and waited for, at a time; fio's own default is 1.
    """
    (job,) = _run(
        [
            "--name=reads",
            f"--filename={':'.join(os.fspath(file) for file in files)}",
            "--file_service_type=roundrobin:1",
            f"--iodepth={depth}",
            f"--iodepth_batch_submit={batch}",
            f"--iodepth_batch_complete_min={batch}",
            f"--iodepth_batch_complete_max={depth}",
            f"--number_ios={requests}",
            "--time_based=0",
            "--io_size=100T",
            f"--randseed={seed}",
            *_common(block),
        ]
    )
    seconds = job["job_runtime"] / 1000
    return Reads(
        requests=job["read"]["total_ios"],
        seconds=job["read"]["runtime"] / 1000,
        bytes_per_second=job["read"]["bw_bytes"],
        cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds,
    )


def rates(
    files: Sequence[str | os.PathLike[str]], *, block: int, depth: int, seconds: float
) -> list[float]:
    """Requests per second of each file, when all are read at once, each by a thread of its own."""
    jobs = _run(
        [
            *_common(block),
            f"--iodepth={depth}",
            "--time_based",
            # In whole numbers: fio takes a fraction of a second for none, and reads whole files.
            f"--runtime={round(1000 * seconds)}ms",
            "--ramp_time=200ms",
            *(
                argument
                for number, file in enumerate(files)
                for argument in (f"--name=drive{number}", f"--filename={os.fspath(file)}")
            ),
        ]
    )
    return [job["read"]["iops"] for job in jobs]
