"""Generated calls of every operator that has a CUDA kernel, and how its results compare."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swarm_kv import ops, reference
from swarm_kv.store_ops import decode_entries, encode_entries, gather_entries

Results = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, its arguments on the CPU.

    Attributes:
        call: the operator.
        arguments: by name.
        compare: raises AssertionError where the results of two devices differ; `close` with the
            bounds that the operator is held to.
    """

    call: Callable[..., Any]
    arguments: dict[str, Any]
    compare: Callable[[Results, Results], None]

    def on(self, device: str) -> dict[str, Any]:
        """The arguments, on a device."""
        return {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }

    def results(self, device: str) -> Results:
        """Computed on a device, returned on the CPU."""
        results = self.call(**self.on(device))
        results = (results,) if isinstance(results, Tensor) else results
        return tuple(result.cpu() for result in results)


def close(bound: float, least: float | None = None) -> Callable[[Results, Results], None]:
    """Compares with a relative bound, and an absolute one of `least` or the same."""

    def compare(actual: Results, expected: Results) -> None:
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=bound, atol=bound if least is None else least
            )

    return compare


def equal(actual: Results, expected: Results) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other), (one, other)


def nearly_all_bits(actual: Results, expected: Results) -> None:
    """An entry whose probability is nearly that of the last one taken may go either way."""
    wrong = (reference.unpack_bits(actual[0]) != reference.unpack_bits(expected[0])).sum()
    assert wrong <= max(2, 1e-4 * 64 * expected[0].numel()), f"{wrong} bits differ"


class Source:
    """Random numbers and tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.plain = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def one_of(self, *choices: Any) -> Any:
        return self.plain.choice(choices)

    def count(self, most: int) -> int:
        """Of items: often none, one, or just beside a power of two."""
        return min(most, self.one_of(0, 1, 2, 31, 33, 127, 128, 129, self.plain.randint(0, most)))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, dtype=dtype)

    def heads(self) -> tuple[int, int]:
        """Query heads and the KV heads that they share."""
        kv_heads = self.one_of(1, 1, 2, 3)
        return kv_heads * self.one_of(1, 2, 3, 4, 7, 8, 9, 18), kv_heads

    def floating(self, *also: torch.dtype) -> torch.dtype:
        return self.one_of(torch.float16, torch.bfloat16, torch.float32, *also)

    def strided(self, tensor: Tensor) -> Tensor:
        """The same numbers, now and then not contiguous."""
        if tensor.ndim < 2 or self.one_of(True, False):
            return tensor
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def sparse_attention(source: Source) -> Case:
    dtype, dim = source.floating(), source.one_of(64, 64, 128, 256)
    heads, kv_heads = source.heads()
    entry = 2 * kv_heads * dim
    step = entry + 8 * source.one_of(0, 0, 1, 5)  # 16 bytes in the narrowest dtype
    entries, rows = source.plain.randint(1, 300), source.one_of(1, 1, 2, 5, 32)
    pool = source.normal(entries * step)
    q = source.normal(rows, heads, dim)
    blocked = source.one_of(0.0, 0.0, 0.2, 1.0)
    if blocked:  # their score is -inf
        keys = pool.view(entries, step)[:, : kv_heads * dim].view(entries, kv_heads, dim)
        keys[torch.rand(entries, generator=source.generator) < blocked, :, 0] = -math.inf
        q[..., 0] = 1.0
    lengths = torch.tensor([source.count(300) for _ in range(rows)])
    slots = source.integers(entries, int(lengths.sum())) * step
    arguments = {
        "q": q.to(dtype),
        "pool": pool.to(dtype),
        "slots": slots,
        "row_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "kv_heads": kv_heads,
        "scale": source.one_of(0.05, 0.1, 0.3),
        "sinks": source.normal(heads) if source.one_of(True, False) else None,
        "softcap": source.one_of(None, None, 5.0),
    }
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    return Case(ops.sparse_attention, arguments, close(bound))


def merge_attention(source: Source) -> Case:
    dtype = source.one_of(torch.float32, torch.float64)
    shape = source.one_of((5,), (3, 4, 64), (0, 4, 8), (source.count(3000), 3, 33))
    sides = {}
    for side in "ab":
        lse = source.normal(*shape[:-1])
        sides[f"out_{side}"] = source.strided(source.normal(*shape)).to(dtype)
        sides[f"lse_{side}"] = lse.where(lse < 1, -math.inf).to(dtype)
    return Case(ops.merge_attention, sides, close(1e-5))


def turn(source: Source, kv_heads: int, dim: int) -> Tensor | None:
    if source.one_of(True, False):
        return None
    return source.normal(kv_heads, dim, dim).to(source.floating()) * dim**-0.5


def score_codes(source: Source) -> Case:
    heads, kv_heads = source.heads()
    parts, codewords = source.one_of(1, 4, 8, 16), source.one_of(16, 100, 256)
    dim = parts * source.one_of(1, 4, 8)
    arguments = {
        "q": source.normal(heads, source.one_of(1, 1, 3), dim).to(source.floating()),
        "codebooks": source.normal(kv_heads, parts, codewords, dim // parts),
        "codes": source.integers(codewords, kv_heads, parts, source.count(3000), dtype=torch.uint8),
        "scale": dim**-0.5,
        "turn": turn(source, kv_heads, dim),
    }
    return Case(ops.score_codes, arguments, close(2e-5, 1e-9))


def score_packed_codes(source: Source) -> Case:
    heads, kv_heads = source.heads()
    parts = source.one_of(2, 8, 16, 32)
    dim = parts * source.one_of(2, 4)
    codes = source.integers(256, kv_heads, parts // 2, source.count(3000), dtype=torch.uint8)
    arguments = {
        "q": source.normal(heads, source.one_of(1, 1, 3), dim).to(source.floating()),
        "codebooks": source.normal(kv_heads, parts, 16, dim // parts),
        "codes": codes,
        "scale": dim**-0.5,
        "turn": turn(source, kv_heads, dim),
    }
    # Steps of the rounded tables may go either way.
    return Case(ops.score_packed_codes, arguments, close(3e-2, 1e-9))


def score_clusters(source: Source) -> Case:
    heads, kv_heads = source.heads()
    dim = source.one_of(1, 37, 64, 128, 130)
    keys = source.normal(kv_heads, source.count(2000), dim)
    arguments = {
        "q": source.normal(heads, source.one_of(1, 1, 3), dim).to(source.floating()),
        "keys": source.strided(keys.to(source.floating(torch.float64))),
        "scale": dim**-0.5,
    }
    return Case(ops.score_clusters, arguments, close(2e-5, 1e-9))


def score_coded_clusters(source: Source) -> Case:
    heads, kv_heads = source.heads()
    dim = source.one_of(2, 64, 128, 130)
    arguments = {
        "q": source.normal(heads, source.one_of(1, 1, 3), dim).to(source.floating()),
        "keys": source.integers(256, kv_heads, source.count(2000), dim // 2, dtype=torch.uint8),
        "scales": torch.rand(kv_heads, dim, generator=source.generator) / 15,
        "scale": dim**-0.5,
    }
    return Case(ops.score_coded_clusters, arguments, close(2e-5, 1e-9))


def clusters(source: Source, entries: int) -> dict[str, Tensor]:
    """Overlapping clusters, some of them empty, and entries in none of them."""
    sizes = source.integers(9, source.count(900)).clamp(max=entries)
    lists = [torch.randperm(entries, generator=source.generator)[:n] for n in sizes.tolist()]
    loose = torch.randperm(entries, generator=source.generator)[: entries // 3]
    offsets = torch.tensor([0, *sizes.tolist()]).cumsum(0, dtype=torch.int32)
    return {"offsets": offsets, "members": torch.cat([*lists, loose]).int()}


def select_clusters(source: Source) -> Case:
    entries = source.plain.randint(1, 4000)
    lists = clusters(source, entries)
    scores = source.normal(len(lists["offsets"]) - 1)
    if source.one_of(True, False):
        scores = scores.round()  # equal ones go by their ids
    arguments = {"scores": scores, **lists, "budget": source.count(2 * entries)}
    return Case(ops.select_clusters, arguments, equal)


def select_two_level(source: Source) -> Case:
    entries = source.plain.randint(1, 4000)
    arguments = {
        "probs": torch.rand(entries, generator=source.generator),
        **clusters(source, entries),
        "budget": source.count(2 * entries),
        "request_cost": source.one_of(0.0, 0.75, 1.5),
        "single_share": source.one_of(0.0, 0.3, 1.0),
    }
    return Case(ops.select_two_level, arguments, equal)


def gathered(source: Source) -> Case:
    size = source.one_of(1, 3, 64, 4096, 5001)
    pool = source.normal(20000).to(source.floating())
    slots = source.integers(len(pool) - size, source.count(60))
    arguments = {"pool": pool, "slots": slots, "entry_elements": size}
    return Case(gather_entries, arguments, equal)


def decoded(source: Source) -> Case:
    codec, dtype = source.one_of("int8", "kivi4"), source.floating()
    kv_heads, dim = source.one_of(1, 2, 3, 8), source.one_of(1, 5, 33, 64, 80, 128, 256)
    count = source.plain.randint(1, 60)
    codes, channels = encode_entries(*source.normal(2, kv_heads, count, dim), codec)
    before = source.one_of(0, 0, 1, 7)  # bytes
    arguments = {
        "codes": torch.cat([codes.new_zeros(before), codes.flatten()]),
        "slots": before + source.integers(count, source.count(60)) * codes.shape[1],
        "codec": codec,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "dtype": dtype,
        "channels": channels,
    }
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    return Case(decode_entries, arguments, close(bound))


def activation_signatures(source: Source) -> Case:
    heads, kv_heads = source.heads()
    entries = source.plain.randint(1, 700)
    queries = source.plain.randint(1, min(140, entries))
    dim = source.one_of(16, 64, 128)
    arguments = {
        "q": source.normal(heads, queries, dim),
        "k": source.normal(kv_heads, entries, dim).to(source.floating(torch.float64)),
        "q_positions": torch.arange(entries - queries, entries),
        "sparsity": source.one_of(0.01, 0.1, 0.5, 1.0),
        "window": source.one_of(0, 8, 30),
        "sinks": source.one_of(0, 4),
        "scale": dim**-0.5,
        "heads": source.one_of("mean", "max", "union"),
    }
    return Case(ops.activation_signatures, arguments, nearly_all_bits)


CASES: dict[str, Callable[[Source], Case]] = {
    "activation_signatures": activation_signatures,
    "decode_entries": decoded,
    "gather_entries": gathered,
    "merge_attention": merge_attention,
    "score_clusters": score_clusters,
    "score_coded_clusters": score_coded_clusters,
    "score_codes": score_codes,
    "score_packed_codes": score_packed_codes,
    "select_clusters": select_clusters,
    "select_two_level": select_two_level,
    "sparse_attention": sparse_attention,
}
