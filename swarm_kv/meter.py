"""What decoding did, counted where it happens, and the figures that users ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

from .miss_ratio import MissRatioCurve


@dataclasses.dataclass
class Meter:
    """Counters of one store's caches."""

    steps: int = 0
    """Decoding steps."""
    fetched_mass: float = 0.0
    best_mass: float = 0.0
    recall_samples: int = 0

    def add_recall(self, fetched: float, best: float) -> None:
        """Add one measurement of one layer and sequence."""
        self.fetched_mass += fetched
        self.best_mass += best
        self.recall_samples += 1


@dataclasses.dataclass(frozen=True)
class DriveStats:
    """One drive.

    `decode_bytes` and `decode_requests` are totals of what decoding steps read; percentiles are in
    microseconds from submission; `t_base` and `t_transfer` in seconds per request and per byte.
    """

    name: str
    engine: str
    direct: bool
    decode_bytes: int
    decode_requests: int
    read_bytes: int
    write_bytes: int
    read_p50_us: float
    read_p99_us: float
    t_base: float
    t_transfer: float
    errors: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """State of a store and totals since it opened.

    Attributes:
        dram_bytes: the limit. dram_used_bytes, dram_peak_bytes: held now and at most.
        dram: held now by use: `staging`, `window`, `index`, `cache`.
        stored_bytes: bytes of KV on the drives now, copies included.
        plain_bytes: the same entries, each once and not coded.
        padding_bytes: what the drives hold beyond `stored_bytes`, because space is taken in blocks.
        written_bytes: bytes written.
        steps: decoding steps. bytes_per_step, requests_per_step: read from the drives by one.
        hit_rate: share of the wanted entries that the cluster cache served.
        recall: attention mass of the fetched entries over that of the exact best ones, over the
            sampled steps (`recall_every`); None without samples.
        wait_seconds: time that decoding waited for reads.
        repaired: entries that were served by another copy after a failure.
        drives: one `DriveStats` per drive.
        miss_ratio: what a cluster cache of each size would miss, see `MissRatioCurve`.
    """

    dram_bytes: int
    dram_used_bytes: int
    dram_peak_bytes: int
    dram: dict[str, int]
    stored_bytes: int
    plain_bytes: int
    padding_bytes: int
    written_bytes: int
    steps: int
    bytes_per_step: float
    requests_per_step: float
    hit_rate: float
    recall: float | None
    recall_samples: int
    wait_seconds: float
    repaired: int
    drives: tuple[DriveStats, ...]
    miss_ratio: MissRatioCurve

    @property
    def engine(self) -> str:
        """Engines in use, as in "io_uring, O_DIRECT"."""
        kinds = {f"{d.engine}, {'O_DIRECT' if d.direct else 'buffered'}" for d in self.drives}
        return " / ".join(sorted(kinds))

    @property
    def overhead(self) -> float:
        """Stored bytes per byte of plain KV: 1.0 without replicas, less with a codec."""
        return self.stored_bytes / self.plain_bytes if self.plain_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "engine": self.engine, "overhead": self.overhead}


def make_stats(counters: dict[str, Any], meter: Meter) -> Stats:
    """Combine the store's counters with the caches' meter."""
    dram, decode = counters["dram"], counters["decode"]
    steps = max(meter.steps, 1)
    drives = tuple(
        DriveStats(**{field.name: drive[field.name] for field in dataclasses.fields(DriveStats)})
        for drive in counters["drives"]
    )
    return Stats(
        dram_bytes=dram["limit"],
        dram_used_bytes=dram["used"],
        dram_peak_bytes=dram["peak"],
        dram={use: dram[use] for use in ("staging", "window", "index", "cache")},
        stored_bytes=counters["stored_bytes"],
        plain_bytes=counters["stored_entries"] * counters["entry_bytes"],
        padding_bytes=counters["padding_bytes"],
        written_bytes=counters["written_bytes"],
        steps=meter.steps,
        bytes_per_step=decode["bytes"] / steps,
        requests_per_step=decode["requests"] / steps,
        hit_rate=decode["hits"] / max(decode["wanted"], 1),
        recall=meter.fetched_mass / meter.best_mass if meter.best_mass > 0 else None,
        recall_samples=meter.recall_samples,
        wait_seconds=decode["wait_seconds"],
        repaired=decode["repaired"] + counters["stream"]["repaired"],
        drives=drives,
        miss_ratio=MissRatioCurve.of(
            counters["reuse"]["distances"],
            counters["reuse"]["first"],
            counters["reuse"]["expected"],
            counters["stored_entries"] * counters["cached_entry_bytes"],
        ),
    )
