"""Builds and runs the simulated SSD, one process per drive."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

from benchmarks.drives.child import kept
from benchmarks.harness import ROOT, Unavailable

SOURCE = pathlib.Path(__file__).with_name("simulated_ssd.cpp")
INSTALL = "run scripts/setup.sh bench"
START_SECONDS = 10.0
STOP_SECONDS = 5.0


def program() -> pathlib.Path:
    """The simulated SSD, compiled when its source has changed.

    Raises:
        Unavailable: it does not compile here.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    built = ROOT / "build" / "drives" / f"simulated_ssd-{digest}"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    unfinished = built.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            ["g++", "-O2", "-std=c++20", SOURCE, "-o", unfinished, "-lfuse3"],
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise Unavailable(f"no g++ to build the simulated SSD with: {INSTALL}") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[0]
        raise Unavailable(f"the simulated SSD does not compile ({reason}): {INSTALL}") from error
    unfinished.replace(built)  # at once, for another process may build it too
    return built


class SimulatedDrive:
    """A running daemon: the file `device` is the drive."""

    def __init__(self, mount: pathlib.Path) -> None:
        self.device = mount / "dev"
        self._control = mount / "ctl"

    def control(self, command: str) -> None:
        """Give a command of simulated_ssd.cpp; it holds when this returns.

        Raises:
            OSError: it is none.
        """
        self._control.write_text(command + "\n")


@contextlib.contextmanager
def simulated_drive(size: int) -> Iterator[SimulatedDrive]:
    """Start a drive of `size` bytes without limits; it ends with the context, or this process.

    Raises:
        Unavailable: it cannot be mounted here.
    """
    executable = program()
    mount = pathlib.Path(tempfile.mkdtemp(prefix="swarm_kv_drive_"))
    ended = None
    try:
        command = [executable, mount, str(size)]
        refused = "no FUSE file system can be mounted here"
        with kept(command, refused, START_SECONDS, STOP_SECONDS) as ended:
            yield SimulatedDrive(mount)
    finally:
        # It has done both, unless it was killed.
        if os.path.ismount(mount) or ended is None or ended.returncode < 0:
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
        with contextlib.suppress(FileNotFoundError):
            mount.rmdir()
