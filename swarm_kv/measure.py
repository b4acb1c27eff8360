"""What drives deliver to a store: reads and bytes per second, through the path of a decoding step.

    with DriveTest(["/mnt/nvme0", "/mnt/nvme1"]) as test:
        print(test.speed(0), test.read(256 << 10).bytes_per_second)

The test writes a file to each directory that no name leads to, so that nothing is left of it,
however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import logging
import mmap
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .config import SwarmConfig
from .errors import ArgumentError, CapacityError, StorageError
from .replay import SMALL_READ, Drive
from .store import NOTHING, Fetch, Segment, Store, Wanted

ENTRY_BYTES = SMALL_READ
DIM = ENTRY_BYTES // 4
"""Numbers of K and of V in an entry, of 16 bits each."""
CLUSTER = 64
"""Entries that lie together on a drive."""
SMALL, LARGE = ENTRY_BYTES, CLUSTER * ENTRY_BYTES
PIECE_BYTES = 16 << 20
"""Written to each drive at a time."""
DEPTHS = {4 << 10: 128, 16 << 10: 64, 64 << 10: 32, LARGE: 16}
"""Bytes of a request, and how many of them one fetch asks of each drive."""
OUTSTANDING = 2
"""Fetches under way at a time, as with prefetch."""
STAGING_BYTES = 24 << 20
"""Per drive."""
DEFAULT_BYTES = 256 << 20
WRITE_SECONDS = 2.0
READ_SECONDS = 0.5
DESCRIPTOR = re.compile(r"(?:raw:)?/proc/self/fd/(\d+)")
WITHOUT_GAPS = (1e-12, 1e-9)
"""Device model of requests that cost nothing, so that no two of them are joined."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """What reads of one size gave.

    Attributes:
        request_bytes: of each.
        requests_per_second, bytes_per_second: delivered.
        cpu_share: user and system time of this process, of the time that passed.
    """

    request_bytes: int
    requests_per_second: float
    bytes_per_second: float
    cpu_share: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """What one drive delivers.

    Attributes:
        path: its directory.
        iops: random reads of 4 KiB per second.
        bytes_per_second: in random reads of 256 KiB.
    """

    path: str
    iops: float
    bytes_per_second: float

    @property
    def model(self) -> Drive:
        """What its requests cost."""
        return Drive.of_rates(self.iops, self.bytes_per_second, LARGE)


class DriveTest:
    """Files of random data on drives, and reads of them; a context manager.

    Args:
        paths: one directory per drive.
        size: bytes to write to each, at most: where writing is slow it ends after
            `WRITE_SECONDS`.
        seconds: that each rate is measured.
        on_step: called after each piece that was written and each rate that was measured.

    Attributes:
        written: bytes on each drive.
        write_bytes_per_second: of all drives together, while they were written.

    Raises:
        ArgumentError: `size` is too small, or there is no path.
        StorageError: a directory cannot be written to, or is full.
    """

    def __init__(
        self,
        paths: Sequence[str],
        size: int = DEFAULT_BYTES,
        seconds: float = READ_SECONDS,
        on_step: Callable[[str], object] = lambda what: None,
    ) -> None:
        if not paths or size < PIECE_BYTES:
            raise ArgumentError(
                f"a test of {len(paths)} drives with `size` ({size}) needs at least one drive and "
                f"{PIECE_BYTES} bytes on each"
            )
        self.paths = tuple(paths)
        self.written = 0
        self.write_bytes_per_second = 0.0
        self._size, self._seconds, self._on_step = size, seconds, on_step
        self._open = contextlib.ExitStack()
        self._files: list[Any] = []
        self._segments: list[Segment] = []
        self._places: list[torch.Tensor] = []

    def __enter__(self) -> DriveTest:
        with contextlib.ExitStack() as opening:
            for path in self.paths:
                self._files.append(opening.enter_context(unnamed_file(path)))
                os.ftruncate(self._files[-1].fileno(), self._size)
            names = [f"raw:/proc/self/fd/{file.fileno()}" for file in self._files]
            config = SwarmConfig(
                paths=names,
                dram_bytes=(STAGING_BYTES + self._size // 32) * len(names),  # with their index
                staging_bytes=STAGING_BYTES * len(names),
                placement="sequential",
                device_model=WITHOUT_GAPS,
            )
            with self._named_errors():
                self._store = opening.enter_context(quiet_store(config))
                opening.callback(self._segments.clear)
                self._write()
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Errors name the directories, not the files in them."""
        try:
            yield
        except (StorageError, CapacityError) as error:
            folders = {
                str(file.fileno()): path
                for path, file in zip(self.paths, self._files, strict=False)
            }
            text = DESCRIPTOR.sub(lambda found: folders.get(found[1], found[0]), str(error))
            raise type(error)(text) from None

    def _write(self) -> None:
        entries = PIECE_BYTES // ENTRY_BYTES * len(self.paths)
        numbers = np.frombuffer(os.urandom(entries * ENTRY_BYTES // 2), dtype=np.int16)
        k = torch.from_numpy(numbers.copy()).view(1, entries, DIM)
        offsets = torch.arange(0, entries + 1, CLUSTER, dtype=torch.int32)
        members = torch.arange(entries, dtype=torch.int32)
        began = time.perf_counter()
        while self.written + PIECE_BYTES <= self._size:
            half = (k + len(self._segments)).view(torch.float16)  # no two pieces are alike
            self._segments.append(self._store.write(half, half, offsets, members, "drive test"))
            self.written += PIECE_BYTES
            self._on_step("writing")
            if time.perf_counter() - began > WRITE_SECONDS:
                break
        for file in self._files:
            os.fdatasync(file.fileno())
        seconds = time.perf_counter() - began
        self.write_bytes_per_second = self.written * len(self.paths) / seconds
        drives = torch.cat([self._store.drives_of(segment) for segment in self._segments])
        self._places = [(drives == drive).nonzero()[:, 0] for drive in range(len(self.paths))]

    def read(self, request_bytes: int, drive: int | None = None) -> Rate:
        """Random reads of one size.

        Args:
            request_bytes: one of `DEPTHS`.
            drive: only this one; None for all at once.

        Raises:
            StorageError: a read failed, or brought other bytes than were written.
        """
        drives = range(len(self.paths)) if drive is None else [drive]
        steps = itertools.cycle(self._steps(request_bytes, drives))
        with self._named_errors():
            self._finish(self._fetch(next(steps)))  # the first one opens what later ones use
            before, cpu, began = self._counts(), time.process_time(), time.perf_counter()
            with contextlib.ExitStack() as interrupted:
                under_way: deque[Fetch] = deque()
                interrupted.callback(release, under_way)
                while time.perf_counter() - began < self._seconds:
                    under_way.append(self._fetch(next(steps)))
                    if len(under_way) == OUTSTANDING:
                        self._finish(under_way.popleft())
                while under_way:
                    self._finish(under_way.popleft())
        passed, used = time.perf_counter() - began, time.process_time() - cpu
        requests, size = (now - then for now, then in zip(self._counts(), before, strict=True))
        self._on_step("reading")
        return Rate(request_bytes, requests / passed, size / passed, used / passed)

    def speed(self, drive: int) -> Speed:
        """Small and large reads of one drive alone."""
        small, large = (self.read(size, drive) for size in (SMALL, LARGE))
        return Speed(self.paths[drive], small.requests_per_second, large.bytes_per_second)

    def cached_share(self, drive: int) -> float | None:
        """Share of a drive's file that lies in the page cache; None where nobody can tell."""
        return cached_share(self._files[drive].fileno(), self.written)

    def _steps(self, request_bytes: int, drives: Sequence[int]) -> list[Wanted]:
        """Fetches that ask each drive for `DEPTHS` reads, in a random order of all of them.

        Between two reads lies as much that is not read, so that they do not become one.
        """
        count, depth = request_bytes // ENTRY_BYTES, DEPTHS[request_bytes]
        random = torch.Generator().manual_seed(request_bytes)
        parts = []
        for drive in drives:
            units = self._places[drive].view(-1, 2 * count)[:, :count]
            order = torch.randperm(len(units), generator=random)
            rounds = units[order[: len(order) // depth * depth]].flatten()
            parts.append(torch.split(rounds, depth * count))
        segments, total = tuple(self._segments), sum(part.entries for part in self._segments)
        return [
            Wanted(segments, NOTHING, torch.cat(entries), total)
            for entries in zip(*parts, strict=True)
        ]

    def _fetch(self, wanted: Wanted) -> Fetch:
        return self._store.fetch([wanted], purpose="stream")

    @staticmethod
    def _finish(fetch: Fetch) -> None:
        with fetch:
            fetch.complete()

    def _counts(self) -> tuple[int, int]:
        drives = self._store.counters()["drives"]
        return sum(one["reads"] for one in drives), sum(one["read_bytes"] for one in drives)


def release(fetches: Iterable[Fetch]) -> None:
    """End fetches that nobody waits for."""
    for fetch in fetches:
        fetch.release()


@contextlib.contextmanager
def unnamed_file(folder: str) -> Iterator[Any]:
    """A file on the drive of `folder` that no name leads to: it ends with this process at last.

    Raises:
        StorageError: it cannot be made; the message names the folder.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        except OSError as error:
            raise StorageError(f"'{folder}' cannot hold a file: {error.strerror}") from None
        yield file


@contextlib.contextmanager
def quiet_store(config: SwarmConfig) -> Iterator[Store]:
    """A store that does not warn of its notes: they are for the caller to look at."""
    logger = logging.getLogger("swarm_kv.store")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        store = Store(config)
    finally:
        logger.setLevel(level)
    try:
        yield store
    finally:
        store.close()


def cached_share(descriptor: int, size: int) -> float | None:
    """Share of the first `size` bytes of an open file that lie in the page cache.

    None where the file cannot be mapped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
    try:
        view = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    try:
        first = ctypes.c_char.from_buffer(view)
        address = ctypes.c_void_p(ctypes.addressof(first))
        answer = libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        del first  # or the view could not be closed
    finally:
        view.close()
    return float((pages & 1).mean()) if answer == 0 else None


def speeds(
    paths: Sequence[str],
    size: int = DEFAULT_BYTES,
    on_step: Callable[[str], object] = lambda what: None,
) -> list[Speed]:
    """Of each drive alone; arguments as for `DriveTest`."""
    with DriveTest(paths, size, on_step=on_step) as test:
        return [test.speed(number) for number in range(len(paths))]


def steps_of(drives: int, size: int = DEFAULT_BYTES) -> int:
    """How often `speeds` calls `on_step` at most, for progress bars."""
    return size // PIECE_BYTES + 2 * drives
