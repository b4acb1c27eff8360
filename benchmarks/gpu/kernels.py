"""The kernels against torch's attention, against copies of memory, and against `gpu_model`."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import gpu_model
from benchmarks.gpu.timing import Clock
from benchmarks.harness import Report
from swarm_kv import ops
from swarm_kv.store_ops import (
    decode_entries,
    encode_entries,
    gather_entries,
    stored_entry_bytes,
)

if TYPE_CHECKING:
    from benchmarks.gpu.check import Parameters

SAME = 2e-2
"""Distance from torch's attention in bfloat16, relative."""
SDPA, GATHERED = "SDPA, entries together", "gather, then SDPA"
CODECS = ("int8", "kivi4")


class Layer:
    """One layer of the model that `gpu_model` reckons with, on a device."""

    def __init__(self, parameters: Parameters) -> None:
        self.shape = dataclasses.replace(gpu_model.Parameters(), context=parameters.context)
        device, p = parameters.device, self.shape
        self._generator = torch.Generator(device).manual_seed(parameters.seed)
        self.device, self.scale = device, p.dim**-0.5
        self.entry = 2 * p.kv_heads * p.dim
        self.taken = int(p.share * p.context) + min(p.resident, p.context // 10)
        self.pool = self.normal(p.context * self.entry).to(torch.bfloat16)
        self.chosen = torch.randperm(p.context, generator=self._generator, device=device)
        self.chosen = self.chosen[: self.taken]
        self.slots = self.chosen * self.entry
        self.rows = torch.tensor([0, self.taken], device=device)
        self.q = self.normal(1, p.query_heads, p.dim).to(torch.bfloat16)
        self.queries = self.q.transpose(0, 1).float()  # [Hq, 1, D]
        self.codebooks = self.normal(p.kv_heads, 32, 16, p.dim // 32)
        self.codes = self.bytes(p.kv_heads, 16, p.context)
        clusters = p.context // p.cluster
        self.medoids = self.normal(p.kv_heads, clusters, p.dim).to(torch.bfloat16)
        self.offsets = torch.arange(clusters + 1, dtype=torch.int32, device=device) * p.cluster
        self.members = torch.arange(clusters * p.cluster, dtype=torch.int32, device=device)
        self.keys, self.values = (part.contiguous() for part in self.gathered())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device)

    def bytes(self, *shape: int) -> Tensor:
        return torch.randint(
            256, shape, generator=self._generator, device=self.device, dtype=torch.uint8
        )

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values [1, Hkv, taken, D]."""
        p = self.shape
        found = self.pool.view(-1, 2, p.kv_heads, p.dim)[self.chosen]
        return found[:, 0].transpose(0, 1)[None], found[:, 1].transpose(0, 1)[None]

    def coded(self, codec: str) -> tuple[Any, ...]:
        """Arguments of `decode_entries` for the same places: codes of a few entries, repeated."""
        p, few = self.shape, 256
        generator = torch.Generator().manual_seed(0)
        k, v = torch.randn(2, p.kv_heads, few, p.dim, generator=generator)
        codes, channels = encode_entries(k, v, codec)
        memory = codes.to(self.device).repeat(-(-p.context // few), 1)
        slots, channels = self.chosen * codes.shape[1], channels.to(self.device)
        return memory.flatten(), slots, codec, p.kv_heads, p.dim, torch.bfloat16, channels

    def sparse(self) -> Tensor:
        p = self.shape
        return ops.sparse_attention(
            self.q, self.pool, self.slots, self.rows, p.kv_heads, self.scale
        )[0]

    def dense(self, keys: Tensor, values: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(
            self.q.transpose(0, 1)[None], keys, values, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)  # [1, Hq, D]


def share(name: str, moved: float, taken: Sequence[float], rate: float, report: Report) -> None:
    report.measure(
        f"kernels: {name}: share of a copy's bandwidth", "share", [moved / t / rate for t in taken]
    )


def copy_rate(clock: Clock, parameters: Parameters, report: Report) -> float:
    """Bytes per second, read and written, of a copy of memory."""
    source = torch.zeros(parameters.copy_bytes, dtype=torch.uint8, device=parameters.device)
    target = torch.empty_like(source)
    copies = clock.in_turn({"copy": lambda: target.copy_(source)}, parameters.repeats)["copy"]
    rates = [2 * parameters.copy_bytes / taken for taken in copies]
    report.measure(
        "kernels: copy of memory, read and written", "GB/s", [1e-9 * rate for rate in rates]
    )
    return statistics.median(rates)


def run(parameters: Parameters, report: Report) -> None:
    clock = Clock(parameters.device)
    repeats = parameters.repeats
    rate = copy_rate(clock, parameters, report)

    layer = Layer(parameters)
    # What the model expects, at the bandwidth that copies attain here.
    p = dataclasses.replace(layer.shape, memory=rate / layer.shape.attained)
    if parameters.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        p = dataclasses.replace(p, processors=gpu.multi_processor_count)
    model = {kernel.name: kernel for kernel in gpu_model.step(p)}
    scoring = ("tables", "code scan", "softmax mean")

    report.note(
        f"one layer of {p.query_heads}/{p.kv_heads} heads of {p.dim} features in bfloat16, "
        f"{p.context} entries, {layer.taken} of them at random places attended to; caches cold"
    )
    dense = layer.dense(layer.keys, layer.values).float()
    distance = (layer.sparse() - dense).norm() / dense.norm()
    report.at_most("kernels: attention: distance from SDPA", float(distance), SAME)
    calls: dict[str, Callable[[], Any]] = {
        "attention": layer.sparse,
        SDPA: lambda: layer.dense(layer.keys, layer.values),
        GATHERED: lambda: layer.dense(*layer.gathered()),
    }
    taken = clock.in_turn(calls, repeats)
    calls = {
        "scores by codes": lambda: ops.score_packed_codes(
            layer.queries, layer.codebooks, layer.codes, layer.scale
        ),
        "scores by medoids": lambda: ops.score_clusters(layer.queries, layer.medoids, layer.scale),
        "gather": lambda: gather_entries(layer.pool, layer.slots, layer.entry),
    }
    scores = layer.normal(len(layer.offsets) - 1)
    calls["select clusters"] = lambda: ops.select_clusters(
        scores, layer.offsets, layer.members, layer.taken
    )
    out, lse = layer.normal(p.query_heads, p.dim), layer.normal(p.query_heads)
    calls["merge"] = lambda: ops.merge_attention(out, lse, out, lse)
    over_the_link: dict[str, int] = {}  # bytes
    if parameters.device == "cuda":
        count = min(parameters.link_bytes // (2 * layer.entry), p.context)
        pinned = torch.zeros(count * layer.entry, dtype=torch.bfloat16).pin_memory()
        places = layer.chosen[layer.chosen < count] * layer.entry
        calls["gather from pinned memory"] = lambda: gather_entries(pinned, places, layer.entry)
        over_the_link["gather from pinned memory"] = len(places) * p.entry
    code_bytes: dict[str, int] = {}
    for codec in CODECS:
        code_bytes[codec] = stored_entry_bytes(torch.empty(p.kv_heads, 0, p.dim), codec)
        memory, *form = layer.coded(codec)
        calls[f"decode {codec}"] = functools.partial(decode_entries, memory, *form)
        if parameters.device == "cuda":
            name = f"decode {codec} from pinned memory"
            calls[name] = functools.partial(decode_entries, memory.cpu().pin_memory(), *form)
            over_the_link[name] = layer.taken * code_bytes[codec]
    taken |= clock.in_turn(calls, repeats)
    for name, seconds in taken.items():
        report.measure(f"kernels: {name}: time", "us", [1e6 * one for one in seconds])
    for name, moved in over_the_link.items():
        report.measure(
            f"kernels: {name}: rate", "GB/s", [1e-9 * moved / one for one in taken[name]]
        )
    share("attention", model["attention"].memory, taken["attention"], rate, report)
    share("gather", 2 * layer.taken * p.entry, taken["gather"], rate, report)
    for codec in CODECS:
        moved = layer.taken * (code_bytes[codec] + p.entry)
        share(f"decode {codec}", moved, taken[f"decode {codec}"], rate, report)
    codes = sum(model[name].memory for name in scoring)
    share("scores by codes", codes, taken["scores by codes"], rate, report)
    share(
        "scores by medoids", model["medoid scan"].memory, taken["scores by medoids"], rate, report
    )
    for name, parts in {
        "attention": ("attention",),
        "scores by codes": scoring,
        "scores by medoids": ("medoid scan",),
    }.items():
        expected = sum(model[part].expected(p) for part in parts)
        report.measure(
            f"kernels: {name}: time, of what gpu_model expects",
            "x",
            [one / expected for one in taken[name]],
        )
        report.at_most(
            f"kernels: {name}: time, of what gpu_model expects (median)",
            statistics.median(taken[name]) / expected,
            1,
        )
    for name in (SDPA, GATHERED):
        pairs = zip(taken["attention"], taken[name], strict=True)
        ratios = [ours / other for ours, other in pairs]
        report.measure(f"kernels: attention, of {name}", "of its time", ratios)
        if name == GATHERED:
            report.at_most(f"kernels: attention, of {name} (median)", statistics.median(ratios), 1)
