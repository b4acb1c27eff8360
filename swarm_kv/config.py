"""What a user chooses: where entries lie, how many are read, how much memory is held."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch

from .errors import ArgumentError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

FILE_NAME = "swarm_kv_config.json"
LONGEST_TIMEOUT = 1e6
"""Seconds."""
REQUEST_BYTES = 6144
"""What an NVMe drive transfers in the time of one request: 6.9 GB/s, 0.9 µs (PM9A3)."""
LEAST_CODE = 16
"""Bytes. Codes of 8 for heads of 64 features tell too little to find what a few keys say: they lose
up to 6 points in tasks where those of 16 lose 1 at most."""

WITH_RADIUS = ("swarm", "no_replica", "medoid_only")
"""Clusterers whose clusters have a radius: Algorithm 1 and its ablations."""


def parse_bytes(value: int | str, name: str, least: int = 1) -> int:
    """Bytes of `value`: an integer, or text such as "8GiB" or "500 MB".

    Raises:
        ArgumentError: not a size, or below `least`, which is 0 or 1.
    """
    size: float
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2] not in _UNITS:
            units = ", ".join(unit for unit in _UNITS if unit)
            raise ArgumentError(
                f'`{name}` ("{value}") is not a size: give bytes, or a number with one of {units}'
            )
        size = float(match[1]) * _UNITS[match[2]]
    else:
        size = value
    whole = isinstance(size, (int, float)) and not isinstance(value, bool)
    if not (whole and least <= size < math.inf):
        known = "a positive number" if least else "0 or a positive number"
        raise ArgumentError(f"`{name}` ({value!r}) must be {known} of bytes")
    return int(size)


LARGEST_STAGING = 64 << 20
"""The most that staging takes unless `staging_bytes` says otherwise."""


def code_size(head_dim: int, code_bytes: int | None, code_bits: int) -> int:
    """Bytes of a key's code per KV head of `head_dim` features: `code_bytes` or its default.

    Raises:
        ArgumentError: its parts of `code_bits` bits do not divide `head_dim`.
    """
    wanted = code_bytes or max(LEAST_CODE, head_dim // 8)
    for size in range(wanted, 0, -1):
        if head_dim % (size * 8 // code_bits) == 0:
            break
        if code_bytes is not None:
            raise ArgumentError(
                f"`code_bytes` ({size}) are {size * 8 // code_bits} parts of `code_bits` "
                f"({code_bits}), which must divide the head size ({head_dim})"
            )
    return size


def default_staging(dram_bytes: int) -> int:
    """Bytes of `dram_bytes` that reads and writes go through, unless the user says otherwise."""
    return min(max(dram_bytes // 16, 1 << 20), LARGEST_STAGING)


@dataclasses.dataclass(frozen=True)
class SwarmConfig:
    """Settings of a store and of the caches in it.

    Args:
        paths (`list[str]`): one directory per drive; on each an unlinked file holds the drive's
            share. `raw:/dev/nvme1n1` uses a block device or an existing file in place and
            overwrites it.
        sparsity (`float`, *optional*, defaults to 0.10): share of the context that a decoding step
            reads, in (0, 1]. 1.0 reads everything and equals full attention.
        dram_bytes (`int` or `str`, *optional*, defaults to "8GiB"): all fast memory that is held
            for KV: window, index, cluster cache and staging.
        hbm_bytes (`int` or `str`, *optional*, defaults to 0): memory of the GPU, for a model on
            one, that keeps entries from step to step: sinks and windows first, then a cluster
            cache. A quarter is for codes, so that they are scored there. 0 keeps nothing. Two
            batches of copies come on top, of three sixteenths of `staging_bytes` together.
        window (`int`, *optional*, defaults to 256): most recent tokens, always attended.
        sinks (`int`, *optional*, defaults to 4): first tokens, always attended.
        selector (`str` or callable, *optional*, defaults to "interval"): what chooses the entries
            to read; see `swarm_kv.selectors` and `swarm_kv.baselines`.
        request_cost (`float`, *optional*): cost of one read request, in entries, that selectors
            weigh attention against. If not given, half of what a drive transfers in the time of
            one, 6 KiB on an NVMe drive: 0.75 for entries of 4 KiB. Half, because strong single
            entries are worth more than the time that they cost: at the whole of it pass keys are
            lost. Fixed rather than measured, so that the same prompt gives the same text on every
            machine.
        single_share (`float`, *optional*, defaults to 0.3): share of the budget that `two_level`
            spends on entries outside the chosen clusters.
        layout (`str`, *optional*, defaults to "auto"): how entries lie on the drives: `clusters`,
            `sequence` (in token order), or per layer what serves held-out queries of the profile
            best, see `swarm_kv.layout`.
        clusterer (`str` or callable, *optional*, defaults to "hypergraph"): what groups entries;
            see `swarm_kv.clusterers`.
        tau (`float` or "auto", *optional*, defaults to "auto"): cluster radius; `auto` chooses it
            per layer with the layout.
        max_overhead (`float`, *optional*, defaults to 2.0): most copies per entry that a layer may
            have on the drives; clusterings above it are not considered.
        max_size (`int`, *optional*): entries of a cluster at most. If not given, 64 for Algorithm 1
            and its ablations, whose clusters are as large as `tau` lets them be, and 16 for
            clusterers that cut an order of all entries: what a step reads of it spreads over the
            drives more evenly the finer it is cut.
        distance, max_replicas, min_activation, cold, max_index_bytes: clustering, see
            `swarm_kv.ops.cluster`. `cold="auto"` is `coded` for selectors that go by codes and
            `packed` for others, which would never find what is in no cluster.
        heads (`str`, *optional*, defaults to "mean"): how query heads agree on what a query
            activates, see `swarm_kv.ops.activation_signatures`.
        representative (`str`, *optional*, defaults to "medoid"): the key that stands for a cluster:
            `medoid`, or `weighted_mean` of the members' keys. medoid_bits (`int`, *optional*,
            defaults to 16): 16 or 4 per number of it. Only for selectors that rank by it.
        estimate_unfetched (`bool`, *optional*, defaults to False): let what is not read contribute
            through a mean key and value of every 64 neighbours, held in memory (2 % of the KV).
        kv_dtype (`str`, *optional*, defaults to "auto"): of keys and values in memory and on the
            drives: the model's, `float16` or `bfloat16`. Half of a float32 model's bytes: the same
            memory holds twice the entries. Attention is computed in float32, prefill's with what
            the model gives; what decoding reads is rounded.
        codec (`str`, *optional*, defaults to "none"): form of entries on the drives: as they are,
            `int8`, or `kivi4`; see csrc/core/codec.h.
        initial_fill (`str`, *optional*, defaults to "printed"): what the cluster cache holds before
            the first step: clusters by Eq. 6 as `printed`, by the other reading of it, `product`,
            or `none`.
        profile_queries (`int`, *optional*, defaults to 1024): last queries of the prefill that
            tell which entries are activated together.
        block (`int`, *optional*, defaults to 16): neighbours per cluster where no profile exists.
        code_bytes (`int`, *optional*): bytes of a key's code per KV head; one per 8 features, and
            at least 16, if not given. Its parts of `code_bits` must divide the head size.
        code_bits (`int`, *optional*, defaults to 4): 4, or 8, which tell keys apart a little better
            at the same bytes, are scored a third as fast, and have a codebook 16 times as large.
        flush (`int`, *optional*, defaults to 64): tokens that leave the window together.
        maintenance (`str` or callable, *optional*, defaults to "sequence"): where entries go that
            leave the window; see `swarm_kv.maintenance`. tau_online (`float`, *optional*, defaults
            to 0.5): radius of Eq. 9 for `swarm`, in [0, 1].
        recluster (`str`, *optional*, defaults to "auto"): `auto` groups entries anew by what recent
            queries activate together, in the background: those that have left the window whenever
            there are some hundreds of them, all of them when recall has fallen. `off` merges what
            has left the window without looking.
        staging_bytes (`int` or `str`, *optional*): memory that reads and writes go through; a
            sixteenth of `dram_bytes`, between 1 MiB and 64 MiB, if not given.
        disk_bytes (`int` or `str`, *optional*): cap on what is stored, over all drives.
        engine (`str`, *optional*, defaults to "auto"): `io_uring`, `threads`, `gds`,
            `memory`, `simulated`, or `auto`: io_uring where the kernel allows it, else threads.
            `gds`, GPUDirect Storage, is as `auto` where cuFile does not work.
        direct (`bool`, *optional*, defaults to True): bypass the page cache where that works.
        shared_ring (`bool`, *optional*, defaults to True): one io_uring for all drives.
        timeout (`float`, *optional*, defaults to 30): seconds that a read or write may take.
        placement, router, cache_policy (`str`): strategies by name; a wrong name lists the choices.
        verify (`bool`, *optional*, defaults to True): compare every entry read with its checksum.
        device_model (`tuple[float, float]`, *optional*): seconds per request and per byte of every
            drive; measured when the store opens, if not given.
        prefetch (`str`, *optional*, defaults to "auto"): where a patched model predicts a layer's
            query to start its reads early: behind attention of the layer before
            (`post_attention`), at that layer's input (`decoder_input`: earlier, and predicted less
            well), or nowhere (`off`). `auto` is `post_attention` in the layers and at the times in
            which that saves more than it costs. What is attended is the same.
        predictor (`str` or callable, *optional*, defaults to "projection"): what predicts the
            query; see `swarm_kv.prefetch`.
        recall_every (`int`, *optional*, defaults to 64): measure at every so many steps, per layer,
            how much attention the read entries hold; 0 never does.
        recall_sample (`int`, *optional*, defaults to 128): entries that a measurement reads, and
            estimates the rest of the context by; 0 reads the whole context and is exact.

    Raises:
        ArgumentError: a value outside its limits; the message names it and the limit.
    """

    paths: Sequence[str | os.PathLike[str]]
    sparsity: float = 0.10
    dram_bytes: int | str = "8GiB"
    hbm_bytes: int | str = 0
    window: int = 256
    sinks: int = 4
    selector: Any = "interval"
    request_cost: float | None = None
    single_share: float = 0.3
    layout: str = "auto"
    clusterer: Any = "hypergraph"
    tau: float | str = "auto"
    max_overhead: float = 2.0
    distance: str = "jaccard"
    max_size: int | None = None
    max_replicas: int = 3
    min_activation: int = 8
    cold: str = "auto"
    max_index_bytes: int = 0
    heads: str = "mean"
    representative: str = "medoid"
    medoid_bits: int = 16
    estimate_unfetched: bool = False
    kv_dtype: str = "auto"
    codec: str = "none"
    initial_fill: str = "printed"
    profile_queries: int = 1024
    block: int = 16
    code_bytes: int | None = None
    code_bits: int = 4
    flush: int = 64
    maintenance: Any = "sequence"
    tau_online: float = 0.5
    recluster: str = "auto"
    staging_bytes: int | str | None = None
    disk_bytes: int | str | None = None
    engine: str = "auto"
    direct: bool = True
    shared_ring: bool = True
    timeout: float = 30.0
    placement: str = "sequential"
    router: str = "swarm"
    cache_policy: str = "decayed_frequency"
    verify: bool = True
    device_model: tuple[float, float] | None = None
    prefetch: str = "auto"
    predictor: Any = "projection"
    recall_every: int = 64
    recall_sample: int = 128

    def __post_init__(self) -> None:
        """Check every value and bring sizes and paths to their plain form."""
        paths = [self.paths] if isinstance(self.paths, (str, os.PathLike)) else self.paths
        self._set("paths", tuple(os.fspath(path) for path in paths))
        if not self.paths:
            raise ArgumentError("`paths` is empty: give one directory per drive")
        if len(set(self.paths)) != len(self.paths):
            raise ArgumentError(f"`paths` names a drive twice: {list(self.paths)}")
        self._set("dram_bytes", parse_bytes(self.dram_bytes, "dram_bytes"))
        self._set("hbm_bytes", parse_bytes(self.hbm_bytes, "hbm_bytes", least=0))
        if self.disk_bytes is not None:
            self._set("disk_bytes", parse_bytes(self.disk_bytes, "disk_bytes"))
        if self.staging_bytes is not None:
            self._set("staging_bytes", parse_bytes(self.staging_bytes, "staging_bytes"))
        if not 0 < self.sparsity <= 1:
            raise ArgumentError(
                f"`sparsity` ({self.sparsity}) must be in (0, 1]: 0.1 reads a tenth of the "
                "context per step, 1.0 all of it"
            )
        if not 0 <= self.single_share <= 1:
            raise ArgumentError(f"`single_share` ({self.single_share}) must be in [0, 1]")
        if not 0 <= self.tau_online <= 1:
            raise ArgumentError(f"`tau_online` ({self.tau_online}) must be in [0, 1]")
        if self.tau != "auto" and not (isinstance(self.tau, (int, float)) and 0 <= self.tau < 1):
            raise ArgumentError(f'`tau` ({self.tau!r}) must be "auto" or in [0, 1)')
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    f"unknown `{name}` ({getattr(self, name)!r}); choose one of {choices}"
                )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if name not in _FRACTIONAL:
                try:
                    self._set(name, operator.index(value))
                except TypeError:
                    raise ArgumentError(f"`{name}` ({value!r}) must be a whole number") from None
            if not least <= value < math.inf:
                raise ArgumentError(f"`{name}` ({value}) must be at least {least}, and finite")
        if self.timeout > LONGEST_TIMEOUT:
            raise ArgumentError(
                f"`timeout` ({self.timeout}) must be at most {LONGEST_TIMEOUT:.0f} seconds"
            )
        if self.device_model is not None:
            self._set("device_model", tuple(self.device_model))
            if len(self.device_model) != 2 or not all(0 < s < math.inf for s in self.device_model):
                raise ArgumentError(
                    f"`device_model` ({self.device_model}) must be two positive numbers: seconds "
                    "per request and seconds per byte"
                )

    @property
    def staging(self) -> int:
        """Bytes of `staging_bytes`, or of its default."""
        return self.staging_of(int(self.dram_bytes))

    def staging_of(self, dram_bytes: int) -> int:
        """`staging` if `dram_bytes` were so many."""
        if self.staging_bytes is not None:
            return int(self.staging_bytes)
        return default_staging(dram_bytes)

    def dram_beside(self, rest: int) -> int:
        """The least `dram_bytes` that leaves `rest` bytes beside staging memory."""
        total = rest
        while total < rest + self.staging_of(total):  # which grows with the total, more slowly
            total = rest + self.staging_of(total)
        return total

    @property
    def cluster_size(self) -> int:
        """`max_size`, or its default for the clusterer."""
        if self.max_size is not None:
            return self.max_size
        return 64 if callable(self.clusterer) or self.clusterer in WITH_RADIUS else 16

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """`kv_dtype`, for a model whose keys and values are `dtype`."""
        found: torch.dtype = dtype if self.kv_dtype == "auto" else getattr(torch, self.kv_dtype)
        return found

    def code_size(self, head_dim: int) -> int:
        """`code_size` of these settings."""
        return code_size(head_dim, self.code_bytes, self.code_bits)

    def entry_request_cost(self, stored_bytes: int) -> float:
        """Time of one request, in transfer times of an entry of `stored_bytes` on the drives."""
        if self.request_cost is not None:
            return self.request_cost
        return REQUEST_BYTES / stored_bytes

    def selection_request_cost(self, stored_bytes: int) -> float:
        """`request_cost`, or its default for entries of `stored_bytes` on the drives."""
        if self.request_cost is not None:
            return self.request_cost
        return REQUEST_BYTES / 2 / stored_bytes

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` takes them.

        Raises:
            ArgumentError: a strategy is a function, which a file cannot hold.
        """
        values = dataclasses.asdict(self)
        for name in ("selector", "clusterer", "maintenance", "predictor"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(f"a `{name}` that is a function cannot be saved: give its name")
        values["paths"] = list(values["paths"])
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SwarmConfig:
        """Inverse of `to_dict`.

        Raises:
            ArgumentError: an unknown name or a value outside its limits.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ArgumentError(f"unknown settings {unknown}; known are {sorted(known)}")
        return cls(**values)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write `swarm_kv_config.json` into `directory`."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        folder = pathlib.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(text)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> SwarmConfig:
        """Read `swarm_kv_config.json` from `directory`."""
        return cls.from_dict(json.loads((pathlib.Path(directory) / FILE_NAME).read_text()))


_LEAST = {
    "window": 1,
    "sinks": 0,
    "request_cost": 0,
    "max_overhead": 1,
    "max_size": 1,
    "max_replicas": 1,
    "min_activation": 1,
    "max_index_bytes": 0,
    "profile_queries": 1,
    "block": 1,
    "code_bytes": 1,
    "flush": 1,
    "recall_every": 0,
    "recall_sample": 0,
    "timeout": 1e-3,
}
_FRACTIONAL = {"request_cost", "max_overhead", "timeout"}
_OPTIONAL = {"request_cost", "code_bytes", "max_size"}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": ("auto", "clusters", "sequence"),
    "distance": ("jaccard", "conditional", "global"),
    "cold": ("auto", "coded", "packed", "single"),
    "heads": ("mean", "max", "union"),
    "representative": ("medoid", "weighted_mean"),
    "medoid_bits": (16, 4),
    "code_bits": (8, 4),
    "kv_dtype": ("auto", "float16", "bfloat16"),
    "codec": ("none", "int8", "kivi4"),
    "initial_fill": ("printed", "product", "none"),
    "recluster": ("auto", "off"),
    "prefetch": ("auto", "post_attention", "decoder_input", "off"),
}
