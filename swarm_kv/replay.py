"""Replays one way of clustering and selecting on a recorded layer: recall, error and I/O.

    index = ...                                    # offsets, members over layer.settings.entries
    result = evaluate(layer, offsets, members, select)

`evaluate` reads whole clusters and single entries from a layout by clusters, with the same routing
and joining of requests as a real fetch. `evaluate_tokens` is the baseline: entries chosen one by
one and read in token order, over gaps where that is cheaper than another request. Both read from
the drives only: no entry is cached.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from .errors import ArgumentError
from .index import members_of
from .simulate import simulate_selections
from .trace import LayerTrace

Select = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a scaled query [Hq, 1, D] to clusters and single entries, both int64."""
Choose = Callable[[torch.Tensor], torch.Tensor]
"""From a scaled query [Hq, 1, D] to entries, int64."""
SMALL_READ = 4096
"""Bytes of the reads that data sheets count per second."""
LEAST_TRANSFER = 1e-13
"""Seconds per byte: 10 TB/s."""


@dataclasses.dataclass(frozen=True)
class Drive:
    """What a drive's requests cost: seconds = requests * t_base + bytes * t_transfer."""

    t_base: float
    """Seconds per request."""
    t_transfer: float
    """Seconds per byte."""

    @classmethod
    def of_rates(cls, iops: float, bytes_per_second: float, long_read: float = math.inf) -> Drive:
        """What fits reads of 4 KiB and long ones.

        Args:
            iops: random reads of 4 KiB per second, as data sheets give them.
            bytes_per_second: in long reads.
            long_read: bytes of these; by default so many that the request costs nothing.

        Raises:
            ArgumentError: a rate is not positive and finite.
        """
        if not (0 < iops < math.inf and 0 < bytes_per_second < math.inf):
            raise ArgumentError(
                f"a drive of {iops:g} reads and {bytes_per_second:g} bytes per second: both must "
                "be positive"
            )
        per_byte = (1 / bytes_per_second - 1 / (iops * long_read)) / (1 - SMALL_READ / long_read)
        t_transfer = max(per_byte, LEAST_TRANSFER)  # noise can push either below what is physical
        return cls(max(1 / iops - SMALL_READ * t_transfer, t_transfer), t_transfer)

    def seconds(self, requests: float, size: float) -> float:
        """Of `requests` that read `size` bytes together."""
        return requests * self.t_base + size * self.t_transfer

    def request_cost(self, entry_bytes: int) -> float:
        """What one more request costs, in transfer times of one entry."""
        return self.t_base / (entry_bytes * self.t_transfer)


PM9A3 = Drive(t_base=0.9e-6, t_transfer=1 / 6.9e9)
"""Samsung PM9A3, from its data sheet: 1.1 M random reads of 4 KiB per second, 0.9 µs each, and
6.9 GB/s. A request costs as much as transferring 1.5 entries of 4 KiB, or 6 of 1 KiB. The sum of
both terms makes single 4 KiB reads slower (0.67 M per second) than the data sheet, where they
overlap: what counts is the ratio."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over the test queries of one layer.

    Attributes:
        recall: share of the attention mass outside sinks and recent tokens (mean over heads) that
            the fetched entries hold.
        err: relative L2 error of the attention output, mean over heads.
        reads: requests, all drives together.
        volume: entries' worth of bytes read: copies read twice and gaps read over count.
        bytes: bytes read.
        seconds: until the slowest drive is done, by the device model.
        overhead: stored copies per entry.
        index_bytes: bytes that choosing and finding entries takes in memory.
        index_bytes_per_entry: the same per entry.
        index_share: the same as a share of the keys' bytes in 16 bits.
    """

    recall: float
    err: float
    reads: float
    volume: float
    bytes: float
    seconds: float
    overhead: float
    index_bytes: int
    index_bytes_per_entry: float
    index_share: float


def mean(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Field by field, such as over layers; index bytes add up.

    Raises:
        ArgumentError: there are none.
    """
    if not evaluations:
        raise ArgumentError("no evaluations to take the mean of: give at least one layer")
    values = {
        field.name: sum(getattr(one, field.name) for one in evaluations) / len(evaluations)
        for field in dataclasses.fields(Evaluation)
    }
    values["index_bytes"] = sum(one.index_bytes for one in evaluations)
    return Evaluation(**values)


def evaluate(
    layer: LayerTrace,
    offsets: torch.Tensor,
    members: torch.Tensor,
    select: Select,
    *,
    entry_bytes: int | None = None,
    drives: Sequence[Drive] = (PM9A3,),
    block: int = 512,
    placement: str = "round_robin",
    router: str = "swarm",
    index_bytes: int | None = None,
) -> Evaluation:
    """Fetch what `select` selects for every test query from a layout by clusters.

    Args:
        layer (`LayerTrace`): recorded activity; its entries are numbered from the first one behind
            the sinks.
        offsets, members: clusters, int32; every entry occurs in `members`.
        select: what to read whole and one by one.
        entry_bytes (`int`, *optional*): K and V of one entry, all KV heads; 16 bits per number if
            not given.
        drives (`Sequence[Drive]`, *optional*): one PM9A3 if not given.
        block (`int`, *optional*): bytes that requests are rounded to.
        placement, router (`str`, *optional*): strategies by name.
        index_bytes (`int`, *optional*): what choosing and finding entries takes in memory; the
            bytes of `offsets` and `members` if not given.

    Raises:
        ArgumentError: the clusters are not of this layer's entries, or a selection or a setting is
            outside its limits.
    """
    entries = layer.settings.entries
    _check_clusters(members, entries)
    entry_bytes = _entry_bytes(layer) if entry_bytes is None else entry_bytes
    index_bytes = offsets.nbytes + members.nbytes if index_bytes is None else index_bytes
    selections = [select(query) for query in _queries(layer)]
    fetched = torch.zeros(len(selections), entries, dtype=torch.bool)
    for row, selection in zip(fetched, selections, strict=True):
        row[members_of(offsets, members, *selection)] = True
    requests, read, seconds = simulate_selections(
        offsets,
        members,
        selections,
        entries=entries,
        entry_bytes=entry_bytes,
        drives=[(drive.t_base, drive.t_transfer) for drive in drives],
        block=block,
        placement=placement,
        router=router,
    )
    return _evaluation(
        layer,
        fetched,
        requests=requests.sum(1).double().mean().item(),
        read=read.sum(1).double().mean().item(),
        seconds=seconds.mean().item(),
        entry_bytes=entry_bytes,
        overhead=members.numel() / entries,
        index_bytes=index_bytes,
    )


def evaluate_tokens(
    layer: LayerTrace,
    choose: Choose,
    *,
    entry_bytes: int | None = None,
    drives: Sequence[Drive] = (PM9A3,),
    index_bytes: int = 0,
) -> Evaluation:
    """Fetch the entries that `choose` chooses for every test query, laid out in token order.

    Entry i lies on drive i mod drives, behind that drive's entry before. Arguments as for
    `evaluate`.
    """
    entries = layer.settings.entries
    entry_bytes = _entry_bytes(layer) if entry_bytes is None else entry_bytes
    chosen = [choose(query) for query in _queries(layer)]
    fetched = torch.zeros(len(chosen), entries, dtype=torch.bool)
    requests = volume = seconds = 0.0
    for row, wanted in enumerate(chosen):
        fetched[row, wanted] = True
        slowest = 0.0
        for number, drive in enumerate(drives):
            own = wanted[wanted % len(drives) == number] // len(drives)
            reads, run = gap_merged(own, drive.request_cost(entry_bytes))
            slowest = max(slowest, reads * drive.t_base + run * entry_bytes * drive.t_transfer)
            requests, volume = requests + reads, volume + run
        seconds += slowest
    return _evaluation(
        layer,
        fetched,
        requests=requests / len(chosen),
        read=volume / len(chosen) * entry_bytes,
        seconds=seconds / len(chosen),
        entry_bytes=entry_bytes,
        overhead=1.0,
        index_bytes=index_bytes,
    )


def gap_merged(entries: torch.Tensor, request_cost: float) -> tuple[int, int]:
    """Requests and entries read when `entries` are read in token order.

    Args:
        entries: numbers, in any order and at most once each.
        request_cost: what one more request costs, in transfer times of one entry: a gap of no more
            entries is read over.
    """
    if entries.numel() == 0:
        return 0, 0
    gaps = entries.sort().values.diff() - 1
    apart = gaps > request_cost
    return int(apart.sum()) + 1, entries.numel() + int(gaps[~apart].sum())


def _queries(layer: LayerTrace) -> list[torch.Tensor]:
    return [query[:, None] for query in layer.queries()]


def _entry_bytes(layer: LayerTrace) -> int:
    return 2 * _key_bytes(layer)


def _key_bytes(layer: LayerTrace) -> int:
    """Bytes of one entry's keys in 16 bits."""
    return layer.k.shape[0] * layer.k.shape[2] * 2


def _check_clusters(members: torch.Tensor, entries: int) -> None:
    inside = members.numel() > 0 and 0 <= int(members.min()) <= int(members.max()) < entries
    if not inside or len(torch.unique(members)) != entries:
        raise ArgumentError(
            f"`members` must hold every entry 0 to {entries - 1} of the layer, and no other: they "
            "are the context's tokens behind the sinks, so that rows `sinks` to `context` of the "
            "signatures are what is clustered"
        )


def _evaluation(
    layer: LayerTrace,
    fetched: torch.Tensor,
    *,
    requests: float,
    read: float,
    seconds: float,
    entry_bytes: int,
    overhead: float,
    index_bytes: int,
) -> Evaluation:
    recall, err = quality(layer, fetched)
    per_entry = index_bytes / layer.settings.entries
    return Evaluation(
        recall=recall,
        err=err,
        reads=requests,
        volume=read / entry_bytes,
        bytes=read,
        seconds=seconds,
        overhead=overhead,
        index_bytes=index_bytes,
        index_bytes_per_entry=per_entry,
        index_share=per_entry / _key_bytes(layer),
    )


def quality(layer: LayerTrace, fetched: torch.Tensor) -> tuple[float, float]:
    """Recall and relative error of attention to resident tokens and to `fetched`.

    Args:
        layer (`LayerTrace`): recorded activity.
        fetched: bool [tests, entries].
    """
    exact = layer.exact
    recall = (exact.mass * fetched).sum(1) / exact.mass.sum(1).clamp(min=1e-30)
    groups = layer.q.shape[0] // layer.k.shape[0]
    stored = slice(layer.settings.sinks, layer.settings.context)
    err = 0.0
    for head, probs in enumerate(exact.probs):
        values = layer.v[head // groups, stored].float()
        weights = probs * fetched
        mass = (weights.sum(1) + exact.rest_mass[head]).clamp(min=1e-30)
        out = (weights @ values + exact.rest_out[head]) / mass[:, None]
        true = exact.out[head]
        err += ((out - true).norm(dim=1) / true.norm(dim=1).clamp(min=1e-30)).mean().item()
    return recall.mean().item(), err / len(exact.probs)
