"""What a model, a context and a set of drives take and reach, before anything is bought or run.

    plan = make(model.config, 131072, parse_drives("4x pm9a3"))
    for row in plan.rows:
        print(row.dram_bytes, row.bytes_per_step, row.tokens_per_second)

Sizes follow from the configuration. Reads are those of steps whose entries are drawn at random, in
runs as long as the selected runs of real models are, and go through the planner of a real fetch
(`swarm_kv.simulate`) and the drives' model. What the cluster cache serves depends on the text: give
its hit rate where it is known.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import models
from .cache import (
    check_dram,
    entry_bytes,
    entry_shape,
    full_attention_layers,
    kv_bytes,
    minimum_dram_bytes,
)
from .config import SwarmConfig
from .errors import ArgumentError, CapacityError
from .index import sequence_blocks
from .maintenance import SAMPLES
from .measure import Speed, speeds
from .patch import refusal
from .replay import Drive
from .simulate import simulate_selections
from .store import NOTHING
from .store_ops import stored_entry_bytes

DATA_SHEETS = {"pm9a3": (1.1e6, 6.9e9), "900p": (0.55e6, 2.5e9)}
"""Drives by name: random reads of 4 KiB and sequential bytes per second (Samsung PM9A3, Intel
Optane 900P)."""

CACHE_SHARES = (0.0, 0.10, 0.25, 0.50)
"""Of the stored entries, for which a plan has rows."""
HIT_RATES = ((0.0, 0.0), (0.05, 0.43), (0.10, 0.69), (0.15, 0.82), (0.25, 0.94), (1.0, 1.0))
"""Share of the stored entries that is cached, and share of the selected ones that it serves: middle
of what `python -m benchmarks fig15` measured for exact and default selections (0.40 to 0.45, 0.63
to 0.74, 0.78 to 0.87, 0.92 to 0.96)."""
SLOT_BYTES = 44
"""What the cluster cache takes per entry beside the entry."""
INDEX_BYTES = 34
"""Of a stored entry, its codes not counted; `LEAST_INDEX_BYTES`, which a store asks for before it
begins, also holds what building takes for a while."""
RUNS = ((0.03, 0.65), (0.10, 0.85), (0.25, 1.05), (1.0, 3.6))
"""Share of the selected entries that is not cached, and the mean length of the runs in which what
is read of them lies, in entries per (1 + cost of a request in entries). Measured on layers 2, 10,
18 and 26 of SmolLM2 with entries of 768 and 3,840 bytes, at 2,048 and 7,168 tokens; single layers
are off by up to a half."""
GROWTH, AT_TOKENS = 0.3, 5000
"""Runs grow with this power of the context, and are as above at so many tokens: a tenth of a longer
context is longer passages. From 3,072 tokens (SmolLM2) to 31,488 (Gemma 3) their length doubles,
whatever is cached."""
TAIL = 3
"""Power of an exponential variable by which runs differ in length: few long ones, many short."""
STEPS = 16
"""Drawn."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATES = re.compile(r"([\d.]+)\s*([kmgt]?)b/s\s*,\s*([\d.]+)\s*([kmg]?)\s*iops", re.IGNORECASE)
_GROUP = re.compile(r"\s*(?:(\d+)\s*[x×*])?\s*(.*?)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class PlannedDrive:
    """A drive of a plan.

    Attributes:
        name: of its kind, or its path.
        model: what its requests cost.
    """

    name: str
    model: Drive


@dataclasses.dataclass(frozen=True)
class Row:
    """What one amount of memory gives; all per decoding step, of all sequences of the batch.

    Attributes:
        dram_bytes: `SwarmConfig.dram_bytes`.
        cache_share: of the stored entries, that the cluster cache holds.
        hit_rate: share of the selected entries that it serves.
        bytes_per_step, requests_per_step: read from the drives.
        io_seconds: that the busiest drive takes for it, layer after layer.
        tokens_per_second: of the whole batch, if nothing but reads took time; None if none do.
        with_compute: the same with the time that computing takes: nothing of the reads hidden
            behind it, and all of what can be; None where that time is not known.
    """

    dram_bytes: int
    cache_share: float
    hit_rate: float
    bytes_per_step: float
    requests_per_step: float
    io_seconds: float
    tokens_per_second: float | None
    with_compute: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a model, a context and drives take and reach.

    Attributes:
        context, batch, sparsity: as asked for.
        dtype: of keys and values.
        layers: with full attention, whose entries lie on drives. other_layers: that do not grow.
        entry_bytes: K and V of one token in one layer. stored_entry_bytes: the same on a drive.
        kv_bytes: of all layers and sequences.
        stored_entries: per layer and sequence; sinks and window stay in memory.
        disk_bytes_per_drive: that a context takes.
        selected_entries, selected_bytes: what a step attends to of them, cached or read; entries
            per layer and sequence, bytes of all.
        dram: bytes that must be there: `staging`, `window`, `index`.
        compute_seconds: per step, as given or by `weights_bytes`.
        drives: the drives.
        assumed_hits: whether hit rates are ours (`HIT_RATES`) and not given.
        rows: by memory.
        notes: what a reader should know.
    """

    context: int
    batch: int
    sparsity: float
    dtype: str
    layers: int
    other_layers: int
    entry_bytes: int
    stored_entry_bytes: int
    kv_bytes: int
    stored_entries: int
    disk_bytes_per_drive: float
    selected_entries: int
    selected_bytes: int
    dram: dict[str, int]
    compute_seconds: float | None
    drives: tuple[PlannedDrive, ...]
    assumed_hits: bool
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


# ---- what is asked for


def load_config(name: str) -> Any:
    """Configuration of a model: a name of `models.PACKAGED`, a directory, a hub id or a JSON file.

    Raises:
        ModelUnavailable: the package of a packaged model is missing.
        ArgumentError: a file that is no configuration.
        OSError: nothing of that name is there.
    """
    from transformers import AutoConfig

    if name in models.PACKAGED:
        return AutoConfig.from_pretrained(models.converted(name), local_files_only=True)
    path = pathlib.Path(name).expanduser()
    try:
        if path.is_file():
            return AutoConfig.for_model(**json.loads(path.read_text()))
        return AutoConfig.from_pretrained(name)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"`{name}` has no config.json that this transformers knows: {error}"
        ) from None


def parse_drives(
    text: str, measured: Callable[[Sequence[str]], Sequence[Speed]] = speeds
) -> list[PlannedDrive]:
    """Drives of a specification.

    Args:
        text: `4x pm9a3`, `4x 6.9GB/s,1.1MIOPS`, several with `+` between them, or directories with
            commas between them, which are measured.
        measured: measures directories.

    Raises:
        ArgumentError: it is none of these.
        StorageError: a directory cannot be used.
    """
    if text.lstrip().startswith(("/", ".", "~")):
        paths = [str(pathlib.Path(part.strip()).expanduser()) for part in text.split(",")]
        return [PlannedDrive(speed.path, speed.model) for speed in measured(paths)]
    drives = []
    for group in text.split("+"):
        found = _GROUP.fullmatch(group)
        number, kind = (found[1], found[2]) if found else (None, group)
        drives += [_drive_of_kind(kind)] * int(number or 1)
    if not drives:
        raise ArgumentError(f"`drives` ({text}) are none: give at least one")
    return drives


def _drive_of_kind(kind: str) -> PlannedDrive:
    if kind.lower() in DATA_SHEETS:
        return PlannedDrive(kind.lower(), Drive.of_rates(*DATA_SHEETS[kind.lower()]))
    rates = _RATES.fullmatch(kind)
    try:
        if rates is None:
            raise ValueError
        size, unit, reads, thousands = rates.groups()
        iops = float(reads) * _UNITS[thousands.lower()]
        model = Drive.of_rates(iops, float(size) * _UNITS[unit.lower()])
    except ValueError:
        raise ArgumentError(
            f'`drives` ("{kind}") must be a name of {sorted(DATA_SHEETS)}, rates as in '
            '"6.9GB/s,1.1MIOPS", or directories to measure, as in "/mnt/a,/mnt/b"'
        ) from None
    return PlannedDrive(kind, model)


def skeleton(model_config: Any) -> Any:
    """The model without weights.

    Raises:
        ArgumentError: no causal language model, or one that `swarm_kv.patch` refuses.
    """
    from transformers import AutoModelForCausalLM

    text = model_config.get_text_config(decoder=True)
    factory: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = factory.from_config(text)
    except ValueError as error:
        raise ArgumentError(
            f"`{text.model_type}` is no causal language model that transformers knows: {error}"
        ) from None
    reason = refusal(model)
    if reason is not None:
        raise ArgumentError(f"`{type(model).__name__}` cannot be planned for: {reason}")
    return model


def dtype_of(model_config: Any) -> torch.dtype:
    """Of a model's keys and values; bfloat16 where its configuration does not tell."""
    text = model_config.get_text_config(decoder=True)
    found = getattr(text, "dtype", None) or getattr(model_config, "dtype", None)
    found = getattr(torch, found) if isinstance(found, str) else found
    return found or torch.bfloat16


def weights_bytes(model: Any, dtype: torch.dtype) -> int:
    """Bytes of weights that a decoding step of one sequence reads.

    All but the table of input embeddings, and of experts only the active ones.

    Args:
        model: may be a `skeleton`.
        dtype: of the weights.
    """
    config = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    active = (getattr(config, "num_experts_per_tok", None) or 0) / experts if experts else 1.0
    head = model.get_output_embeddings()
    table = model.get_input_embeddings().weight
    total = 0.0
    for name, weight in model.named_parameters():
        if weight is table and (head is None or head.weight is not table):
            continue
        total += weight.numel() * (active if ".experts." in name else 1.0)
    return int(total * dtype.itemsize)


# ---- what follows


def make(
    model_config: Any,
    context: int,
    drives: Sequence[PlannedDrive],
    *,
    dtype: torch.dtype | None = None,
    batch: int = 1,
    dram_bytes: int | None = None,
    hit_rate: float | None = None,
    compute_seconds: float | None = None,
    **settings: Any,
) -> Plan:
    """Work a plan out.

    Args:
        model_config (`PretrainedConfig`): of the model.
        context: tokens per sequence.
        drives: at least one.
        dtype: of the model's keys and values; its own if not given, bfloat16 if it has none.
        batch: sequences, which share nothing.
        dram_bytes: plan for this much memory; if not given, for `CACHE_SHARES`.
        hit_rate: share of the selected entries that the cluster cache serves; `HIT_RATES` if not
            given.
        compute_seconds: that a step takes without reads.
        settings: of `SwarmConfig`.

    Raises:
        ArgumentError: a value outside its limits.
        CapacityError: `dram_bytes` does not hold window and index.
    """
    if context < 1 or batch < 1 or not drives:
        raise ArgumentError(
            f"`context` ({context}), `batch` ({batch}) and the number of drives ({len(drives)}) "
            "must be at least 1"
        )
    if hit_rate is not None and not 0 <= hit_rate <= 1:
        raise ArgumentError(f"`hit_rate` ({hit_rate}) must be in [0, 1]")
    config = SwarmConfig(paths=[f"/{number}" for number in range(len(drives))], **settings)
    text = model_config.get_text_config(decoder=True)
    dtype = config.stored_dtype(dtype or dtype_of(model_config))
    layers = len(full_attention_layers(model_config))
    entry = entry_bytes(model_config, dtype)
    heads, dim = entry_shape(model_config)
    on_drive = stored_entry_bytes(torch.empty(heads, 1, dim, dtype=dtype), config.codec)
    stored = context - config.sinks - config.window
    stored = stored if stored >= config.flush else 0
    selected = min(max(1, round(config.sparsity * context)), stored)
    resident = min(context, config.sinks + config.window + config.flush)
    fixed = {
        "window": batch * kv_bytes(model_config, dtype, resident),
        "index": batch * layers * _index_bytes(text, config, dtype, stored),
    }
    slots = batch * layers * stored * (entry + SLOT_BYTES)  # of a cache of everything
    if dram_bytes is None:
        least = minimum_dram_bytes(model_config, config, dtype, context)
        caches = [int(share * slots) for share in CACHE_SHARES]
        sizes = [max(least, config.dram_beside(sum(fixed.values()) + cache)) for cache in caches]
    else:
        sizes = [dram_bytes]
        config = dataclasses.replace(config, dram_bytes=dram_bytes)
        check_dram(model_config, config, dtype, context)
    rows = []
    for size in sizes:
        share = _cached_share(config, size, sum(fixed.values()), slots)
        hits = expected_hits(share) if hit_rate is None else hit_rate
        read = reads(
            entries=batch * stored,
            wanted=round(batch * selected * (1 - hits)),
            missed=1 - hits,
            entry_bytes=on_drive,
            drives=[drive.model for drive in drives],
            config=config,
        )
        rows.append(_row(size, share, hits, layers, read, batch, compute_seconds))
    return Plan(
        context=context,
        batch=batch,
        sparsity=config.sparsity,
        dtype=str(dtype).removeprefix("torch."),
        layers=layers,
        other_layers=text.num_hidden_layers - layers,
        entry_bytes=entry,
        stored_entry_bytes=on_drive,
        kv_bytes=batch * kv_bytes(model_config, dtype, context),
        stored_entries=stored,
        disk_bytes_per_drive=batch * layers * stored * on_drive / len(drives),
        selected_entries=selected,
        selected_bytes=batch * layers * selected * entry,
        dram={"staging": config.staging_of(sizes[0]), **fixed},
        compute_seconds=compute_seconds,
        drives=tuple(drives),
        assumed_hits=hit_rate is None,
        rows=tuple(rows),
        notes=tuple(_notes(text, context, stored)),
    )


def _notes(text: Any, context: int, stored: int) -> list[str]:
    notes = []
    longest = getattr(text, "max_position_embeddings", None)
    if longest and context > longest:
        notes.append(f"the model is configured for {longest} tokens, fewer than this context")
    if stored == 0:
        notes.append("this context fits into window and sinks: nothing goes to the drives")
    return notes


def _index_bytes(text: Any, config: SwarmConfig, dtype: torch.dtype, entries: int) -> int:
    """Of one layer of one sequence: what every entry takes, the codebook, and recent queries."""
    heads, dim = entry_shape(text)
    each = heads * config.code_size(dim) + INDEX_BYTES
    codebook = heads * dim * (2**config.code_bits * 4 + dim * 2)
    queries = SAMPLES * text.num_attention_heads * dim * dtype.itemsize
    return entries * each + codebook + queries if entries else 0


def _cached_share(config: SwarmConfig, dram_bytes: int, fixed: int, slots: int) -> float:
    left = dram_bytes - config.staging_of(dram_bytes) - fixed
    if left < 0:
        raise CapacityError(
            f"`dram_bytes` ({dram_bytes}) does not hold window and index of this context: "
            f"{config.dram_beside(fixed)} are needed, and more for a cluster cache"
        )
    return min(1.0, left / slots) if slots else 1.0


def expected_hits(cache_share: float) -> float:
    """Hit rate of a cluster cache of this share of the stored entries, by `HIT_RATES`."""
    for (before, low), (share, high) in itertools.pairwise(HIT_RATES):
        if cache_share <= share:
            return low + (high - low) * (cache_share - before) / (share - before)
    return 1.0


def _row(
    dram_bytes: int,
    share: float,
    hits: float,
    layers: int,
    read: Reads,
    batch: int,
    compute: float | None,
) -> Row:
    seconds = layers * read.seconds
    return Row(
        dram_bytes=dram_bytes,
        cache_share=share,
        hit_rate=hits,
        bytes_per_step=layers * read.bytes,
        requests_per_step=layers * read.requests,
        io_seconds=seconds,
        tokens_per_second=batch / seconds if seconds else None,
        with_compute=(
            None
            if compute is None
            else (batch / (seconds + compute), batch / max(seconds, compute))
        ),
    )


# ---- reads of one layer


@dataclasses.dataclass(frozen=True)
class Reads:
    """Of one step in one layer, means over steps; `seconds` are the busiest drive's."""

    requests: float
    bytes: float
    seconds: float


def reads(
    entries: int,
    wanted: int,
    missed: float,
    entry_bytes: int,
    drives: Sequence[Drive],
    config: SwarmConfig,
    block: int = 512,
) -> Reads:
    """What a fetch of `wanted` of `entries` entries in one layer costs on these drives.

    Args:
        entries: stored. wanted: and not in memory.
        missed: share that these are of what the step selected.
        entry_bytes: of one on a drive.
        drives: what their requests cost.
        config: of the store: cluster size, placement, router, request cost.
        block: bytes that requests are rounded to.
    """
    if wanted == 0:
        return Reads(0.0, 0.0, 0.0)
    random = torch.Generator().manual_seed(1)
    run = run_length(entries, config.selection_request_cost(entry_bytes), missed)
    requests, size, seconds = simulate_selections(
        *sequence_blocks(entries, config.cluster_size),
        [(NOTHING, scattered(entries, wanted, run, random)) for _ in range(STEPS)],
        entries=entries,
        entry_bytes=entry_bytes,
        drives=[(drive.t_base, drive.t_transfer) for drive in drives],
        block=block,
        placement=config.placement,
        router=config.router,
    )
    return Reads(
        requests.sum(1).double().mean().item(),
        size.sum(1).double().mean().item(),
        seconds.mean().item(),
    )


def run_length(entries: int, request_cost: float, missed: float = 1.0) -> float:
    """Entries of a run that is read, on average.

    Selected runs are the longer the costlier a request, see `ops.select_intervals`; what is cached
    of them cuts them to pieces.

    Args:
        entries: of the context.
        request_cost: in entries, by which the selector weighs.
        missed: share of the selected entries that is read.
    """
    shares, lengths = zip(*RUNS, strict=True)
    found = np.interp(math.log(max(missed, shares[0])), np.log(shares), lengths)
    return max(1.0, (entries / AT_TOKENS) ** GROWTH * (1 + request_cost) * float(found))


def scattered(entries: int, wanted: int, run: float, random: torch.Generator) -> torch.Tensor:
    """int64 [wanted], ascending: positions below `entries`, in runs of `run` on average.

    Runs lie anywhere, at least one position apart.
    """
    count = min(max(1, round(wanted / run)), entries - wanted + 1)
    lengths = _parts(wanted, count, random)
    # Before which of the other positions each run lies.
    places = torch.randperm(entries - wanted + 1, generator=random)[:count].sort().values
    return places.repeat_interleave(lengths) + torch.arange(wanted)


def _parts(total: int, count: int, random: torch.Generator) -> torch.Tensor:
    """int64 [count]: positive numbers that add up to `total`, a few of them large."""
    weights = torch.empty(count, dtype=torch.float64).exponential_(generator=random) ** TAIL
    ends = (weights.cumsum(0) / weights.sum() * (total - count)).round().long()
    return torch.diff(ends, prepend=torch.zeros(1).long()) + 1
