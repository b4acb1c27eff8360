"""What the tests of the store share: entries, clusters, and reading back by number."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swarm_kv.config import SwarmConfig
from swarm_kv.store import NOTHING, Fetch, Segment, Store, Wanted
from swarm_kv.store_ops import gather_entries

MODEL = (1e-4, 1e-9)  # given, so that opening a store does not measure its drives


def open_store(paths: Sequence[str], **settings: Any) -> Store:
    """A store of 8 MiB, of which 1 MiB is staging, unless `settings` say otherwise."""
    given = {"dram_bytes": "8MiB", "staging_bytes": "1MiB", "device_model": MODEL, **settings}
    return Store(SwarmConfig(paths=paths, **given))


@dataclasses.dataclass(frozen=True)
class Data:
    """Keys and values [kv_heads, n, head_dim], every entry different."""

    k: Tensor
    v: Tensor

    @classmethod
    def random(
        cls,
        entries: int,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Data:
        generator = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, kv_heads, entries, dim, generator=generator, dtype=torch.float64)
        return cls(k.to(dtype), v.to(dtype))

    @property
    def entries(self) -> int:
        return self.k.shape[1]

    @property
    def entry_bytes(self) -> int:
        return 2 * self.k.shape[0] * self.k.shape[2] * self.k.itemsize

    def rows(self) -> Tensor:
        """[n, elements]: each entry as it lies in the pool, [K | V]."""
        both = torch.stack([self.k, self.v]).permute(2, 0, 1, 3)
        return both.reshape(self.entries, -1)

    def write(
        self, store: Store, clusters: tuple[Tensor, Tensor] | None = None, label: str = "layer 0"
    ) -> Segment:
        return store.write(self.k, self.v, *(clusters or blocks(self.entries)), label)


def blocks(entries: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Clusters of neighbours."""
    offsets = [*range(0, entries, size), entries]
    return torch.tensor(offsets, dtype=torch.int32), torch.arange(entries, dtype=torch.int32)


def pack(clusters: Sequence[Sequence[int]], loose: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Offsets and members of a list of clusters, loose entries behind them."""
    sizes = torch.tensor([0, *(len(cluster) for cluster in clusters)])
    members = [*itertools.chain(*clusters), *loose]
    return sizes.cumsum(0, dtype=torch.int32), torch.tensor(members, dtype=torch.int32)


def overlapping(entries: int, seed: int = 0, copies: int = 3) -> list[list[int]]:
    """Random clusters of 1 to 9 that hold every entry, some of them up to `copies` times."""
    rng = random.Random(seed)
    held = [entry for entry in range(entries) for _ in range(rng.randint(1, copies))]
    rng.shuffle(held)
    clusters = []
    while held:
        size = rng.randint(1, 9)
        taken = list(dict.fromkeys(held[:size]))
        clusters.append(taken)
        again = held[:size]
        for entry in taken:
            again.remove(entry)
        held = held[size:] + again
    return clusters


def receive_rows(
    store: Store, fetch: Fetch, dtype: torch.dtype, elements: int
) -> list[dict[int, Tensor]]:
    """Everything that a fetch brings to each row, by number; fails where one comes twice."""
    got: list[dict[int, Tensor]] = [{} for _ in fetch.resident]
    pool = store.pool(dtype)
    for pieces in itertools.chain([fetch.resident], fetch.rounds()):
        for held, (ids, slots) in zip(got, pieces, strict=True):
            # Inside the loop: the slots of a round end with the next one.
            rows = gather_entries(pool, slots // dtype.itemsize, elements)
            for number, row in zip(ids.tolist(), rows, strict=True):
                assert number not in held, f"entry {number} came twice"
                held[number] = row
    return got


def receive(store: Store, fetch: Fetch, dtype: torch.dtype, elements: int) -> dict[int, Tensor]:
    """`receive_rows` of a fetch with one row."""
    (got,) = receive_rows(store, fetch, dtype, elements)
    return got


def fetch_all(
    store: Store,
    segments: Segment | tuple[Segment, ...],
    data: Data,
    clusters: Tensor = NOTHING,
    entries: Tensor = NOTHING,
    limit: int | None = None,
    **how: Any,
) -> dict[int, Tensor]:
    """`Store.fetch`, received in full. `limit` is the number of entries if not given."""
    segments = segments if isinstance(segments, tuple) else (segments,)
    limit = sum(segment.entries for segment in segments) if limit is None else limit
    elements = data.entry_bytes // data.k.itemsize
    with store.fetch([Wanted(segments, clusters, entries, limit)], **how) as fetch:
        return receive(store, fetch, data.k.dtype, elements)


def assert_holds(got: dict[int, Tensor], rows: Tensor, numbers: Sequence[int] | range) -> None:
    """`got` is exactly the entries `numbers` of `rows`, bit for bit."""
    assert sorted(got) == sorted(numbers)
    for number, row in got.items():
        assert torch.equal(row, rows[number]), f"entry {number} has other bytes"


class BadFile:
    """The file of an open store on one drive, and what it takes to spoil and to mend it."""

    def __init__(self, path: str) -> None:
        for link in pathlib.Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(link).startswith(f"{path}/"):
                    self._file = os.open(link, os.O_RDWR)
                    break
        self._saved = b""

    def corrupt(self) -> None:
        """Flip a bit in every 256 bytes."""
        self._save()
        spoiled = bytearray(self._saved)
        spoiled[77::256] = bytes(byte ^ 4 for byte in spoiled[77::256])
        self._write(bytes(spoiled))

    def lose(self) -> None:
        """Cut it off: reads bring nothing."""
        self._save()
        os.ftruncate(self._file, 0)

    def mend(self) -> None:
        self._write(self._saved)

    def close(self) -> None:
        os.close(self._file)

    def _save(self) -> None:
        self._saved = os.pread(self._file, os.fstat(self._file).st_size, 0)

    def _write(self, data: bytes) -> None:
        os.pwrite(self._file, data, 0)
        os.fdatasync(self._file)


def left_behind(paths: Sequence[str]) -> list[str]:
    """Files in the drives' directories, and this process's open files there (unlinked ones too)."""
    files = [str(file) for path in paths for file in pathlib.Path(path).rglob("*")]
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # the listing's own
            continue
        files += [target for path in paths if target.startswith(f"{path}/")]
    return files
