"""The drives of a benchmark: simulated SSDs, or real ones, read with O_DIRECT and io_uring.

    with checked_drives([PM9A3.slower(200)] * 8, 64 << 20, report) as drives:
        config = SwarmConfig(paths=drives.paths, ...)
        drives.control(3, "fail r 65536 4096 5 1")

Each simulated SSD is a process of its own behind a FUSE mount (simulated_ssd.cpp), which needs
root. Where that cannot be had, files on a real disk take their place: then `throttled` is False,
`note` says why, and figures that depend on the drives' speed mean nothing. With
`python -m benchmarks NAME --paths /mnt/a,/mnt/b` the drives are files in those directories.

fio reads all drives before and after a benchmark, and the result is refused where they did not
deliver their models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.drives import fio
from benchmarks.drives.daemon import SimulatedDrive, simulated_drive
from benchmarks.drives.model import OPTANE_900P, PM9A3, UNLIMITED, DriveModel, drive_sets
from benchmarks.harness import Report, Unavailable

__all__ = [
    "OPTANE_900P",
    "PM9A3",
    "UNLIMITED",
    "DriveModel",
    "Drives",
    "checked_drives",
    "drive_sets",
    "fio",
    "stand_in_drives",
]

DEPTH = 32
TOLERANCE = 0.05
REAL_TOLERANCE = 0.15
"""Between two measurements of a real drive."""
CHECKED_SIZES = (16 << 10, 64 << 10)
CHECK_SECONDS = 0.6
CHECK_READS = 50
"""Of each simulated drive, per read in flight: fio leaves out what is in flight at the end."""
WRITTEN_AT_ONCE = 4 << 20


@dataclasses.dataclass(frozen=True)
class Drives:
    """Drives that are there for as long as their context.

    Attributes:
        models: what each delivers, unless `files` stand in.
        files: the drives, as fio takes them. `paths`: the same as `SwarmConfig` takes them.
        kind: `simulated`, `real`, or `files` that stand in for drives.
        note: what they are, for a reader of the figures.
    """

    models: tuple[DriveModel, ...]
    files: tuple[pathlib.Path, ...]
    kind: str
    note: str
    _running: tuple[SimulatedDrive, ...] = ()

    @property
    def throttled(self) -> bool:
        """Whether they are simulated SSDs."""
        return self.kind == "simulated"

    @property
    def paths(self) -> list[str]:
        return [f"raw:{file}" for file in self.files]

    @property
    def settings(self) -> dict[str, Any]:
        """Of `SwarmConfig`: the paths, and the model of drives that are equal and simulated, which
        takes time to measure, and which a busy machine would measure wrongly."""
        equal = self.kind != "real" and len(set(self.models)) == 1
        known = {"device_model": self.models[0].costs} if equal else {}
        return {"paths": self.paths, **known}

    def first(self, count: int) -> Drives:
        """The first `count` of them."""
        return dataclasses.replace(
            self,
            models=self.models[:count],
            files=self.files[:count],
            _running=self._running[:count],
        )

    def control(self, drive: int, command: str) -> None:
        """Give one drive a command of simulated_ssd.cpp, such as a fault."""
        if not self.throttled:
            raise Unavailable(f"`{command}` needs simulated SSDs. {self.note}")
        self._running[drive].control(command)

    def slow_down(self, drive: int, factor: float) -> None:
        """Let one drive deliver 1/`factor` of its model; 1 ends it."""
        model = self.models[drive]
        self.control(drive, model.slower(factor).command())

    @contextlib.contextmanager
    def following(self, models: Sequence[DriveModel]) -> Iterator[Drives]:
        """The same drives with other models inside."""
        changed = dataclasses.replace(self, models=tuple(models))
        changed._apply()
        try:
            yield changed
        finally:
            self._apply()

    def unthrottled(self) -> contextlib.AbstractContextManager[Drives]:
        """Without limits inside, such as while data is written."""
        return self.following([UNLIMITED] * len(self.models))

    def _apply(self) -> None:
        # Only simulated ones run.
        for drive, model in zip(self._running, self.models, strict=False):
            drive.control(model.command())

    def check(self, sizes: Sequence[int] = CHECKED_SIZES) -> None:
        """Let fio read all drives at once, and compare what each delivers with its model.

        Args:
            sizes: of the reads, in bytes.

        Raises:
            Unavailable: a drive is off by more than the tolerance, so that nothing measured on it
                would mean anything: the machine is too slow for these models, or too busy.
        """
        if self.kind == "files":
            return
        tolerance = TOLERANCE if self.throttled else REAL_TOLERANCE
        for size in sizes:
            # No deeper than keeps all of them busy.
            rates = [model.rate(size) for model in self.models]
            latency = max(model.latency for model in self.models)
            depth = min(DEPTH, 4 + math.ceil(2 * max(rates) * latency)) if self.throttled else DEPTH
            seconds = max(CHECK_SECONDS, CHECK_READS * depth / min(rates))
            measured = fio.rates(self.files, block=size, depth=depth, seconds=seconds)
            for number, (rate, wanted) in enumerate(zip(measured, rates, strict=True)):
                if abs(rate / wanted - 1) > tolerance:
                    drive = f"drive {number} of {len(self.files)} ({self.models[number].name})"
                    raise Unavailable(
                        f"{drive} delivers {rate:.0f} reads of {size} bytes per second instead "
                        f"of {wanted:.0f}: this machine is too busy, or too slow for these models"
                    )

    def describe(self) -> list[dict[str, object]]:
        """One object per model: how many, and what each delivers; for result files."""
        return [
            {
                "kind": self.kind,
                "model": model.name,
                "count": self.models.count(model),
                "iops": model.iops,
                "bytes_per_second": model.bytes_per_second,
                "latency": model.latency,
            }
            for model in dict.fromkeys(self.models)
        ]


@contextlib.contextmanager
def checked_drives(
    models: Sequence[DriveModel],
    size: int,
    report: Report,
    *,
    checked: Sequence[int] = CHECKED_SIZES,
) -> Iterator[Drives]:
    """`stand_in_drives`, or the real ones of `report`, checked before and after.

    Args:
        models, size: see `stand_in_drives`.
        report: names the real ones, and is told what they are.
        checked: request sizes that fio reads them with.

    Raises:
        Unavailable: they do not deliver their models, or `--paths` names too few.
    """
    with stand_in_drives(models, size, report.paths) as drives:
        report.use(drives.describe(), drives.note)
        drives.check(checked)
        yield drives
        drives.check(checked[-1:])


@contextlib.contextmanager
def stand_in_drives(
    models: Sequence[DriveModel], size: int, paths: Sequence[str] = ()
) -> Iterator[Drives]:
    """Drives of `size` bytes each: simulated ones, or plain files where those cannot be had.

    They are gone when the context ends, however it ends, and when this process is killed.

    Args:
        models: of simulated drives. Real ones are as many, and have the models that fio measures.
        size: bytes of each.
        paths: directories on real drives, which are taken instead if given.

    Raises:
        Unavailable: `paths` are too few.
    """
    with contextlib.ExitStack() as stack:
        yield _opened(models, size, paths, stack)


def _opened(
    models: Sequence[DriveModel], size: int, paths: Sequence[str], stack: contextlib.ExitStack
) -> Drives:
    if paths:
        if len(paths) < len(models):
            raise Unavailable(f"{len(models)} drives are needed, --paths names {len(paths)}")
        return _real(paths[: len(models)], size, stack)
    try:
        running = tuple(stack.enter_context(simulated_drive(size)) for _ in models)
    except Unavailable as error:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm_kv_drives_"))
        files = tuple(pathlib.Path(folder) / f"drive{number}" for number in range(len(models)))
        for file in files:
            with open(file, "wb") as written:
                written.truncate(size)
        note = f"drives: files on one disk in place of simulated SSDs ({error})"
        return Drives(tuple(models), files, "files", note)
    names = ", ".join(f"{models.count(model)} x {model.name}" for model in dict.fromkeys(models))
    note = (
        f"drives: simulated SSDs, one process each behind FUSE, {names}: rates are scaled, "
        "CPU time is not"
    )
    files = tuple(drive.device for drive in running)
    drives = Drives(tuple(models), files, "simulated", note, running)
    drives._apply()
    return drives


def _real(paths: Sequence[str], size: int, stack: contextlib.ExitStack) -> Drives:
    """A file in each directory, and what fio gets from them when all are read at once."""
    files = []
    for path in paths:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="swarm_kv_drive_", dir=path)
        )
        files.append(pathlib.Path(folder) / "drive")
        with open(files[-1], "wb") as written:
            for begin in range(0, size, WRITTEN_AT_ONCE):
                written.write(os.urandom(min(WRITTEN_AT_ONCE, size - begin)))
            os.fsync(written.fileno())

    def rates(block: int) -> list[float]:
        return fio.rates(files, block=block, depth=DEPTH, seconds=CHECK_SECONDS)

    measured = tuple(
        DriveModel(f"drive {number}", iops, big * (256 << 10), 0.0)
        for number, (iops, big) in enumerate(zip(rates(4 << 10), rates(256 << 10), strict=True))
    )
    note = "drives: files in the directories that --paths names, with the rates that fio measured"
    return Drives(measured, tuple(files), "real", note)
