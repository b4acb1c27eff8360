"""Store-level peers: random extents of files on the same drives, in bytes per second."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.table import Table
from tqdm import tqdm

from benchmarks.drives import DriveModel, fio
from benchmarks.harness import Report, Unavailable
from benchmarks.peers.decoding import evict
from benchmarks.peers.process import QUIET, Runner, last_line, program

EXTENTS_BYTES = 64 << 20
"""Of the file that is read on each drive."""
IN_FLIGHT = 2 << 20
"""Bytes asked for on each drive at a time."""
TIMEOUT_SECONDS = 120.0
LMCACHE_ROUNDS = 4

Read = Callable[[int], float]
"""Read random extents, chosen by a seed: bytes per second."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where is read.

    Attributes:
        folders: one on each drive, and on each the file `extents`.
        size: of an extent, in bytes. requests: how many are read, about.
    """

    folders: Sequence[pathlib.Path]
    size: int
    requests: int

    @property
    def depth(self) -> int:
        """Extents in flight on each drive."""
        return IN_FLIGHT // self.size

    @property
    def files(self) -> list[str]:
        return [str(folder / "extents") for folder in self.folders]


@contextlib.contextmanager
def by_fio(place: Place) -> Iterator[Read]:
    def read(seed: int) -> float:
        return fio.random_reads(
            place.files,
            block=place.size,
            depth=place.depth * len(place.files),
            requests=place.requests,
            seed=seed,
        ).bytes_per_second

    yield read


@contextlib.contextmanager
def by_swarm(place: Place) -> Iterator[Read]:
    with _runner("swarm_store") as runner:
        runner.ask(
            TIMEOUT_SECONDS,
            folders=[str(folder) for folder in place.folders],
            size=place.size,
            depth=place.depth,
            drive_bytes=EXTENTS_BYTES,
        )
        yield lambda seed: _rate(runner, requests=place.requests, seed=seed)


@contextlib.contextmanager
def by_deepnvme(place: Place) -> Iterator[Read]:
    with _runner("deepnvme", "deepspeed") as runner:
        yield lambda seed: _rate(
            runner,
            size=place.size,
            depth=place.depth,
            files=place.files,
            requests=place.requests,
            seed=seed,
        )


@contextlib.contextmanager
def by_lmcache(place: Place) -> Iterator[Read]:
    """Its own benchmark, `lmcache bench l2`, on its C++ backend for files; it knows one folder."""
    command = program("lmcache", "lmcache")
    adapter = {"type": "fs_native", "use_odirect": True, "num_workers": place.depth}
    keys = max(place.depth, place.requests // len(place.folders) // LMCACHE_ROUNDS)

    def read(seed: int) -> float:
        with (
            tempfile.TemporaryDirectory() as scratch,
            tempfile.TemporaryDirectory(
                dir=place.folders[0]
            ) as base,  # keys are the same each time
        ):
            output = pathlib.Path(scratch) / "result.json"
            arguments = [
                *("bench", "l2", "--quiet", "--format", "json", "--output", output),
                *(
                    "--l2-adapter",
                    json.dumps(adapter | {"base_path": base}),
                    "--l1-align-bytes",
                    "4096",
                ),
                *("--data-size-kb", str(place.size >> 10), "--num-keys", str(keys)),
                *("--rounds", str(LMCACHE_ROUNDS), "--no-skip-verify"),
            ]
            try:
                done = subprocess.run(
                    [command, *arguments],
                    capture_output=True,
                    text=True,
                    env=os.environ | QUIET,
                    timeout=TIMEOUT_SECONDS,
                )
            except subprocess.TimeoutExpired:
                raise Unavailable(f"no answer within {TIMEOUT_SECONDS:g} s") from None
            if done.returncode or not output.exists():
                raise Unavailable(last_line(done.stderr))
            metrics = json.loads(output.read_text())["metrics"]
        (load,) = (m for m in metrics.values() if m.get("operation") == "Load")
        if load["rounds_timed_out"] or load["total_success"] != load["total_keys"]:
            raise Unavailable(f"loaded {load['total_success']} of {load['total_keys']} keys")
        return float(load["throughput_avg_mbps"]) * 2**20

    yield read


@contextlib.contextmanager
def _runner(module: str, environment: str = "") -> Iterator[Runner]:
    runner = Runner(module, environment)
    try:
        yield runner
    finally:
        runner.close()


def _rate(runner: Runner, **request: object) -> float:
    done = runner.ask(TIMEOUT_SECONDS, **request)
    return float(done["bytes"] / done["seconds"])


FIO = "fio io_uring"
ONE_DRIVE = "LMCache fs_native (one drive)"
STORES: dict[str, Callable[[Place], contextlib.AbstractContextManager[Read]]] = {
    FIO: by_fio,
    "swarm_kv store": by_swarm,
    "DeepNVMe aio handle": by_deepnvme,
    ONE_DRIVE: by_lmcache,
}


@dataclasses.dataclass
class Row:
    """One store and size. `drives`: bytes per second of the drives that it can use."""

    store: str
    size: int
    drives: float
    rates: list[float] = dataclasses.field(default_factory=list)
    reason: str = ""


def prepare(folders: Sequence[pathlib.Path]) -> None:
    """Write the files: each 4 KiB begin with their number, int64."""
    pages = np.zeros((EXTENTS_BYTES // 4096, 512), dtype=np.int64)
    pages[:, 0] = np.arange(len(pages))
    for folder in folders:
        pages.tofile(folder / "extents")
    evict(folders)


def run(
    folders: Sequence[pathlib.Path],
    model: DriveModel,
    sizes: Sequence[int],
    seconds: float,
    repeats: int,
) -> list[Row]:
    """Read extents of each size for about `seconds`, the stores in turn, `repeats` times."""
    rows = []
    for size in tqdm(sizes, desc="peers at store level", disable=None):
        place = Place(folders, size, int(model.rate(size) * len(folders) * seconds))
        with contextlib.ExitStack() as stack:
            at_work = []
            for name, store in STORES.items():
                count = 1 if name == ONE_DRIVE else len(folders)
                row = Row(name, size, model.rate(size) * size * count)
                rows.append(row)
                with _reporting(row):
                    at_work.append((row, stack.enter_context(store(place))))
            for seed in range(1, repeats + 1):
                for row, read in at_work:
                    if not row.reason:
                        with _reporting(row):
                            row.rates.append(read(seed))
    return rows


@contextlib.contextmanager
def _reporting(row: Row) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        row.reason, row.rates = str(error), []


def report_rows(rows: Sequence[Row], report: Report) -> None:
    for row in rows:
        case = f"{row.store}, {row.size >> 10} KiB"
        if row.reason:
            report.note(f"{case}: cannot run here: {row.reason}")
            continue
        report.measure(f"{case}: read", "B/s", row.rates)
        report.measure(f"{case}: of its drives' sum", "share", [r / row.drives for r in row.rates])


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="peers: random extents of files")
    for heading in ("store", "extent", "MB/s", "of its drives' sum"):
        shown.add_column(heading, justify="left" if heading == "store" else "right")
    for row in rows:
        extent = f"{row.size >> 10} KiB"
        if row.reason:
            shown.add_row(row.store, extent, "cannot run here")
            continue
        rate = statistics.median(row.rates)
        shown.add_row(row.store, extent, f"{rate / 1e6:.0f}", f"{rate / row.drives:.1%}")
    return shown
