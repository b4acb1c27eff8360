"""What decoding did, counted where it happens, and the figures that users ask for."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import statistics
from typing import Any

from .errors import ArgumentError
from .miss_ratio import MissRatioCurve

ACCURACY_EVERY = 17
"""Of so many prefetches one is compared with what the true query wants: a prime, so that all layers
have their turn."""
RECENT = 1 / 8
"""Weight of the newest measurement in a moving mean."""


@dataclasses.dataclass(frozen=True)
class Mass:
    """Attention mass of one step in one layer, outside sinks and window; mean over heads.

    Attributes:
        share: of the mass on all stored entries, what the read ones hold.
        error: standard error of `share`; 0 where nothing was estimated.
        exact: where all entries were read, the mass on those that the step read and on the best
            ones, as many as the budget.
    """

    share: float
    error: float = 0.0
    exact: tuple[float, float] | None = None


@dataclasses.dataclass
class MassMeter:
    """Measurements of the mass: their mean, and how they move.

    Attributes:
        recent: moving mean. Both means are 0 before the first measurement.
    """

    samples: int = 0
    total: float = 0.0
    variance: float = 0.0
    recent: float = 0.0

    def add(self, mass: Mass) -> None:
        """Add one measurement."""
        self.samples += 1
        self.total += mass.share
        self.variance += mass.error**2
        weight = max(RECENT, 1 / self.samples)
        self.recent += weight * (mass.share - self.recent)

    @property
    def mean(self) -> float:
        """Mean of all measurements."""
        return self.total / max(self.samples, 1)

    @property
    def error(self) -> float:
        """Standard error of `mean` by what was estimated, steps being as they are."""
        return math.sqrt(self.variance) / max(self.samples, 1)


@dataclasses.dataclass
class PrefetchMeter:
    """Counters of reads that were started ahead in one store."""

    prefetches: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    caught: int = 0
    judged: int = 0

    def take_step(self, seconds: float, waited: float) -> bool:
        """Count a step of one layer that rode on a prefetch.

        Args:
            seconds: time that predicting, selecting and submitting took.
            waited: time that the step waited for reads all the same.

        Returns:
            Whether the prediction is to be judged this time.
        """
        self.prefetches += 1
        self.seconds += seconds
        self.waited += waited
        return self.prefetches % ACCURACY_EVERY == 1

    def add_accuracy(self, caught: int, wanted: int) -> None:
        """Add one comparison of one layer and sequence, in entries."""
        self.caught += caught
        self.judged += wanted


@dataclasses.dataclass
class Meter:
    """Counters of one store's caches."""

    steps: int = 0
    """Decoding steps."""
    masses: dict[int, MassMeter] = dataclasses.field(default_factory=dict)
    """Per layer, over all sequences."""
    fetched_mass: float = 0.0
    best_mass: float = 0.0
    recall_samples: int = 0
    prefetch: PrefetchMeter = dataclasses.field(default_factory=PrefetchMeter)

    def add_mass(self, layer: int, mass: Mass) -> None:
        """Add one measurement of one layer and sequence."""
        self.masses.setdefault(layer, MassMeter()).add(mass)
        if mass.exact is not None:
            self.fetched_mass += mass.exact[0]
            self.best_mass += mass.exact[1]
            self.recall_samples += 1


@dataclasses.dataclass(frozen=True)
class DriveStats:
    """One drive.

    `decode_bytes` and `decode_requests` are totals of what decoding steps read, ahead or not;
    percentiles are in microseconds from submission; `t_base` and `t_transfer` in seconds per
    request and per byte.
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
class LayerMass:
    """Attention mass that a layer's reads hold; see `Stats.mass`.

    `mass` is the mean of `samples` measurements, `error` its standard error by the sampling of
    entries, `recent` a mean in which the newest measurement weighs an eighth.
    """

    layer: int
    samples: int
    mass: float
    error: float
    recent: float


@dataclasses.dataclass(frozen=True)
class PrefetchStats:
    """What reading ahead did (`SwarmConfig.prefetch`); totals since the store opened.

    Attributes:
        prefetches: decoding steps of one layer whose reads were started ahead.
        seconds: time that predicting, selecting and submitting took for them.
        wait_seconds: time that these steps waited for reads all the same.
        accuracy: share of the entries that the true query wanted that were predicted, cached ones
            included, by samples; None without samples.
        used_entries: read ahead and wanted. wasted_entries, wasted_bytes: and not wanted.
        late_entries, late_requests, late_bytes: what a step had to read beside its prefetch.
        hidden_seconds: time that the busiest drive needs, by its device model, for all that
            decoding read, less what decoding waited. hidden_share: the same as a share.
    """

    prefetches: int
    seconds: float
    wait_seconds: float
    accuracy: float | None
    used_entries: int
    wasted_entries: int
    wasted_bytes: float
    late_entries: int
    late_requests: int
    late_bytes: int
    hidden_seconds: float
    hidden_share: float


@dataclasses.dataclass(frozen=True)
class Stats:
    """State of a store and totals since it opened.

    Attributes:
        dram_bytes: the limit. dram_used_bytes, dram_peak_bytes: held now and at most.
        dram: held now by use: `staging`, `window`, `index`, `cache`.
        hbm: the same of the GPU: `window` and `cache` with their `limit`, `used` and `peak`, and
            `index` beside them, in bytes; `window_entries`, `cached_entries`, and `hits`, how many
            of the wanted entries its cluster cache served. All 0 without one.
        stored_bytes: bytes of KV on the drives now, copies included.
        plain_bytes: the same entries, each once and not coded.
        padding_bytes: what the drives hold beyond `stored_bytes`, because space is taken in blocks.
        written_bytes: bytes written.
        steps: decoding steps. bytes_per_step, requests_per_step: read from the drives by one.
        hit_rate: share of the wanted entries that a cluster cache served, the GPU's or the host's.
        mass: share of the attention to stored entries (outside sinks and window, mean over heads)
            that the read ones hold: mean over layers and the steps measured (`recall_every`). None
            without measurements. mass_error: its standard error by the sampling of entries
            (`recall_sample`). mass_by_layer: the same per layer.
        recall: attention mass of the fetched entries over that of the exact best ones, over the
            steps measured with `recall_sample=0`; None without them. recall_samples: their number,
            each layer and sequence counted.
        wait_seconds: time that decoding waited for reads.
        repaired: entries that were served by another copy after a failure.
        prefetch: a `PrefetchStats`.
        drives: one `DriveStats` per drive.
        miss_ratio: what a cluster cache of each size would miss, see `MissRatioCurve`.
    """

    dram_bytes: int
    dram_used_bytes: int
    dram_peak_bytes: int
    dram: dict[str, int]
    hbm: dict[str, int]
    stored_bytes: int
    plain_bytes: int
    padding_bytes: int
    written_bytes: int
    steps: int
    bytes_per_step: float
    requests_per_step: float
    hit_rate: float
    mass: float | None
    mass_error: float
    mass_by_layer: tuple[LayerMass, ...]
    recall: float | None
    recall_samples: int
    wait_seconds: float
    repaired: int
    prefetch: PrefetchStats
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
        """Plain values for JSON, as `from_dict` takes them."""
        derived = {"kind": "stats", "engine": self.engine, "overhead": self.overhead}
        return {**derived, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Stats:
        """Inverse of `to_dict`.

        Raises:
            ArgumentError: a figure is missing: another version wrote them.
        """
        try:
            own = {field.name: values[field.name] for field in dataclasses.fields(cls)}
            own["mass_by_layer"] = tuple(LayerMass(**one) for one in own["mass_by_layer"])
            own["prefetch"] = PrefetchStats(**own["prefetch"])
            own["drives"] = tuple(DriveStats(**one) for one in own["drives"])
            curve = own["miss_ratio"]
            own["miss_ratio"] = MissRatioCurve(**{**curve, "misses": tuple(curve["misses"])})
            return cls(**own)
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                f"these are no stats of this version of swarm_kv: {error}; write them anew"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that `swarm-kv stats` shows.

        It is complete at every moment, so that it may be written again while it is watched.
        """
        target = pathlib.Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        partial.replace(target)


def make_stats(counters: dict[str, Any], meter: Meter) -> Stats:
    """Combine the store's counters with the caches' meter."""
    dram, decode, early = counters["dram"], counters["decode"], counters["prefetch"]
    steps = max(meter.steps, 1)
    drives = tuple(
        DriveStats(**{field.name: drive[field.name] for field in dataclasses.fields(DriveStats)})
        for drive in counters["drives"]
    )
    layers = tuple(
        LayerMass(layer, one.samples, one.mean, one.error, one.recent)
        for layer, one in sorted(meter.masses.items())
    )
    return Stats(
        dram_bytes=dram["limit"],
        dram_used_bytes=dram["used"],
        dram_peak_bytes=dram["peak"],
        dram={use: dram[use] for use in ("staging", "window", "index", "cache")},
        hbm=counters["hbm"],
        stored_bytes=counters["stored_bytes"],
        plain_bytes=counters["stored_entries"] * counters["entry_bytes"],
        padding_bytes=counters["padding_bytes"],
        written_bytes=counters["written_bytes"],
        steps=meter.steps,
        bytes_per_step=(decode["bytes"] + early["bytes"]) / steps,
        requests_per_step=(decode["requests"] + early["requests"]) / steps,
        hit_rate=decode["hits"] / max(decode["wanted"], 1),
        mass=statistics.mean(one.mass for one in layers) if layers else None,
        mass_error=math.hypot(*(one.error for one in layers)) / max(len(layers), 1),
        mass_by_layer=layers,
        recall=meter.fetched_mass / meter.best_mass if meter.best_mass > 0 else None,
        recall_samples=meter.recall_samples,
        wait_seconds=decode["wait_seconds"],
        repaired=sum(counters[purpose]["repaired"] for purpose in ("decode", "stream", "prefetch")),
        prefetch=_prefetch_stats(early, decode["wait_seconds"], drives, meter.prefetch),
        drives=drives,
        miss_ratio=MissRatioCurve.of(
            counters["reuse"]["distances"],
            counters["reuse"]["first"],
            counters["reuse"]["expected"],
            counters["stored_entries"] * counters["cached_entry_bytes"],
        ),
    )


def _prefetch_stats(
    ahead: dict[str, Any], waited: float, drives: tuple[DriveStats, ...], meter: PrefetchMeter
) -> PrefetchStats:
    needed = max(
        (d.decode_requests * d.t_base + d.decode_bytes * d.t_transfer for d in drives), default=0.0
    )
    hidden = max(0.0, needed - waited)
    return PrefetchStats(
        prefetches=meter.prefetches,
        seconds=meter.seconds,
        wait_seconds=meter.waited,
        accuracy=meter.caught / meter.judged if meter.judged else None,
        used_entries=ahead["used"],
        wasted_entries=ahead["wasted"],
        wasted_bytes=ahead["bytes"] * ahead["wasted"] / max(ahead["read"], 1),
        late_entries=ahead["late"],
        late_requests=ahead["late_requests"],
        late_bytes=ahead["late_bytes"],
        hidden_seconds=hidden,
        hidden_share=hidden / needed if needed else 0.0,
    )
