"""Sweeps clustering settings over a recorded trace: what `swarm-kv tune` shows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import ops
from .codes import train
from .config import code_size
from .errors import ArgumentError
from .index import Index, build, sequence_blocks
from .replay import PM9A3, Drive, Evaluation, Select, evaluate, mean
from .trace import LayerTrace, Trace


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting and what it gave, per layer."""

    tau: float
    max_size: int
    layers: dict[int, Evaluation]

    @property
    def mean(self) -> Evaluation:
        """Over layers."""
        return mean(list(self.layers.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "tau": self.tau,
            "max_size": self.max_size,
            "mean": dataclasses.asdict(self.mean),
            "layers": {str(n): dataclasses.asdict(one) for n, one in self.layers.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        """Inverse of `to_dict`."""
        layers = {int(number): Evaluation(**one) for number, one in values["layers"].items()}
        return cls(values["tau"], values["max_size"], layers)


def signatures(layer: LayerTrace, queries: int = 1024) -> torch.Tensor:
    """int64 [entries, words]: what the context's last `queries` queries activate."""
    settings = layer.settings
    positions = torch.arange(max(layer.first, settings.context - queries), settings.context)
    bits = ops.activation_signatures(
        layer.at(positions),
        layer.k[:, : settings.context],
        positions,
        sparsity=settings.sparsity,
        window=settings.window,
        sinks=settings.sinks,
        scale=layer.scale,
    )
    return bits[settings.sinks :]


def coded(
    layer: LayerTrace, queries: int = 1024, code_bytes: int | None = None, code_bits: int = 4
) -> Index:
    """Index of the layer's entries in token order, by codes fitted to the last `queries` queries.

    Args:
        layer (`LayerTrace`): recorded activity.
        queries, code_bytes, code_bits: `profile_queries` and the others as in `SwarmConfig`.
    """
    keys = layer.keys.float()
    context = layer.settings.context
    profile = layer.q[:, max(0, context - queries) : context]
    codebook = train(keys, code_size(keys.shape[2], code_bytes, code_bits), profile, code_bits)
    return build(codebook, keys, *sequence_blocks(keys.shape[1], 16))


def sweep(
    trace: Trace,
    taus: Sequence[float],
    max_sizes: Sequence[int],
    *,
    profile_queries: int = 1024,
    max_replicas: int = 3,
    min_activation: int = 8,
    code_bytes: int | None = None,
    code_bits: int = 4,
    request_cost: float = 1.5,
    single_share: float = 0.3,
    entry_bytes: int | None = None,
    drives: Sequence[Drive] = (PM9A3,),
    on_point: Callable[[], object] | None = None,
) -> list[Point]:
    """Evaluate every pair of `taus` and `max_sizes` on every layer with two-level selection.

    Args:
        trace (`Trace`): recorded activity.
        taus, max_sizes: settings to try, at least one each.
        profile_queries, max_replicas, min_activation, code_bytes, code_bits, request_cost,
            single_share: as in `SwarmConfig`.
        entry_bytes, drives: as for `swarm_kv.replay.evaluate`.
        on_point (`Callable`, *optional*): called after each pair on each layer, for progress bars.

    Raises:
        ArgumentError: nothing to try, or a value outside its limits.
    """
    if not taus or not max_sizes:
        raise ArgumentError("give at least one `tau` and one `max_size` to try")
    found: dict[tuple[float, int], dict[int, Evaluation]] = {
        (tau, size): {} for tau in taus for size in max_sizes
    }
    for number, layer in trace.layers.items():
        bits = signatures(layer, profile_queries)
        by_codes = coded(layer, profile_queries, code_bytes, code_bits)
        for (tau, size), results in found.items():
            offsets, members = ops.cluster(
                bits,
                tau=tau,
                max_size=size,
                max_replicas=max_replicas,
                min_activation=min_activation,
            )
            index = dataclasses.replace(by_codes, offsets=offsets, members=members)
            results[number] = evaluate(
                layer,
                offsets,
                members,
                two_level(index, layer.settings.budget, request_cost, single_share),
                entry_bytes=entry_bytes,
                drives=drives,
                index_bytes=index.nbytes(),
            )
            if on_point is not None:
                on_point()
    return [Point(tau, size, layers) for (tau, size), layers in found.items()]


def two_level(index: Index, budget: int, request_cost: float, single_share: float) -> Select:
    """Selection by `swarm_kv.ops.select_two_level` on an index, as `evaluate` takes it."""

    def select(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.select_two_level(
            index.probabilities(query),
            index.offsets,
            index.members,
            budget,
            request_cost,
            single_share,
        )

    return select


def plot(points: Sequence[Point], title: str, path: str | os.PathLike[str]) -> None:
    """Draw means over layers: recall against seconds and against storage overhead.

    Needs matplotlib. The format follows the name's ending, such as .png or .svg.

    Raises:
        ArgumentError: matplotlib does not know the ending.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for size in sorted({point.max_size for point in points}):
        line = sorted((p for p in points if p.max_size == size), key=lambda p: p.tau)
        recall = [p.mean.recall for p in line]
        for axes, across in (
            (left, [p.mean.seconds * 1e6 for p in line]),
            (right, [p.mean.overhead for p in line]),
        ):
            axes.plot(across, recall, marker="o", label=f"max_size {size}")
            for p, x, y in zip(line, across, recall, strict=True):
                label = f"τ {p.tau:g}"
                axes.annotate(label, (x, y), (4, 4), textcoords="offset points", fontsize="small")
    for axes in (left, right):
        axes.margins(x=0.15)
    left.set(xlabel="µs of I/O per layer and query", ylabel="recall")
    right.set(xlabel="stored copies per entry")
    right.legend()
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except ValueError as error:  # which names the known endings
        raise ArgumentError(f"cannot draw `{path}`: {error}") from None
