"""Stand-in drives: simulated SSDs that the production path reads with O_DIRECT and io_uring.

    with stand_in_drives([PM9A3.slower(200)] * 8, size=64 << 20) as drives:
        drives.check()
        config = SwarmConfig(paths=drives.paths, ...)
        drives.control(3, "fail r 65536 4096 5 1")

Each is a process of its own behind a FUSE mount (simulated_ssd.cpp), which needs root. Where that
cannot be had, files on a real disk take their place: then `throttled` is False, `note` says why,
and figures that depend on the drives' speed mean nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.drives import fio
from benchmarks.drives.daemon import SimulatedDrive, simulated_drive
from benchmarks.drives.model import OPTANE_900P, PM9A3, UNLIMITED, DriveModel
from benchmarks.harness import Unavailable

__all__ = ["OPTANE_900P", "PM9A3", "UNLIMITED", "DriveModel", "Drives", "fio", "stand_in_drives"]

DEPTH = 32
TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Drives:
    """Drives that are there for as long as their context.

    Attributes:
        models: what each delivers, where `throttled`.
        files: the drives, as fio takes them. paths: the same as `SwarmConfig` takes them.
        throttled: whether they are simulated SSDs.
        note: what they are, for a reader of the figures.
    """

    models: tuple[DriveModel, ...]
    files: tuple[pathlib.Path, ...]
    throttled: bool
    note: str
    _running: tuple[SimulatedDrive, ...] = ()

    @property
    def paths(self) -> list[str]:
        return [f"raw:{file}" for file in self.files]

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
        # None of them runs where files stand in.
        for drive, model in zip(self._running, self.models, strict=False):
            drive.control(model.command())

    def check(self, sizes: Sequence[int] = (4 << 10, 64 << 10), seconds: float = 0.6) -> None:
        """Let fio read all drives at once, and compare what each delivers with its model.

        Args:
            sizes: of the reads, in bytes.
            seconds: that each is read for.

        Raises:
            Unavailable: a drive is off by more than `TOLERANCE`, so that nothing measured on it
                would mean anything: the machine is too slow for these models, or too busy.
        """
        if not self.throttled:
            return
        for size in sizes:
            measured = fio.rates(self.files, block=size, depth=DEPTH, seconds=seconds)
            for number, (rate, model) in enumerate(zip(measured, self.models, strict=True)):
                wanted = model.rate(size)
                if abs(rate / wanted - 1) > TOLERANCE:
                    raise Unavailable(
                        f"stand-in drive {number} of {len(self.files)} ({model.name}) delivers "
                        f"{rate:.0f} reads of {size} bytes per second instead of {wanted:.0f}: "
                        "this machine is too busy, or too slow for these models"
                    )


@contextlib.contextmanager
def stand_in_drives(models: Sequence[DriveModel], size: int) -> Iterator[Drives]:
    """Drives of `size` bytes each, of these models, or plain files where those cannot be had.

    They are gone when the context ends, however it ends, and when this process is killed.
    """
    with contextlib.ExitStack() as stack:
        try:
            running = tuple(stack.enter_context(simulated_drive(size)) for _ in models)
        except Unavailable as error:
            reason = str(error)
        else:
            names = ", ".join(
                f"{sum(model == each for each in models)} x {model.name}"
                for model in dict.fromkeys(models)
            )
            note = (
                f"drives: simulated SSDs, one process each behind FUSE, {names}: rates are scaled, "
                "CPU time is not"
            )
            drives = Drives(tuple(models), tuple(d.device for d in running), True, note, running)
            drives._apply()
            yield drives
            return
    with tempfile.TemporaryDirectory(prefix="swarm_kv_drives_") as folder:
        files = tuple(pathlib.Path(folder) / f"drive{number}" for number in range(len(models)))
        for file in files:
            with open(file, "wb") as written:
                written.truncate(size)
        note = f"drives: files on one disk in place of simulated SSDs ({reason})"
        yield Drives(tuple(models), files, False, note)
