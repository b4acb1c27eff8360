"""Every CUDA operator against its CPU twin; on the CPU, the comparison itself."""

from __future__ import annotations

import math
import pathlib
import re
from typing import Any

import pytest
import torch

from benchmarks.gpu import layout
from swarm_kv import _library, ops
from swarm_kv.errors import ArgumentError
from swarm_kv.store_ops import decode_entries, encode_entries, gather_entries

from .cases import CASES, Source

ROOT = pathlib.Path(__file__).parents[2]
SHAPES = {"cuda": 200, "cpu": 5}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads"), layout.SHAPES)
def test_layout_of_the_matrix_products(
    device: str, dtype: torch.dtype, rows: int, heads: int
) -> None:
    assert layout.errors(device, dtype, rows, heads).abs().max() < layout.GOAL


SWAPS = {
    "a pair of features": lambda q: q.view(*q.shape[:-1], -1, 2).flip(-1).flatten(-2),
    "halves of a block": lambda q: q.view(*q.shape[:-1], -1, 2, 8).flip(-2).flatten(-3),
    "two heads": lambda q: torch.cat([q[:, 1:2], q[:, :1], q[:, 2:]], dim=1),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_a_wrong_layout_shows(monkeypatch: pytest.MonkeyPatch, swap: str) -> None:
    right = ops.sparse_attention

    def wrong(q: torch.Tensor, *others: Any) -> Any:
        return right(SWAPS[swap](q), *others)

    monkeypatch.setattr(ops, "sparse_attention", wrong)
    assert layout.errors("cpu", torch.bfloat16, 1, 8).abs().max() > 10 * layout.GOAL


@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu(device: str, name: str) -> None:
    for seed in range(SHAPES[device]):
        case = CASES[name](Source(seed))
        try:
            case.compare(case.results(device), case.results("cpu"))
        except (AssertionError, RuntimeError) as error:
            shapes = {
                key: (tuple(value.shape), value.dtype) if torch.is_tensor(value) else value
                for key, value in case.arguments.items()
            }
            raise AssertionError(f"{name}, seed {seed}, {shapes}: {error}") from error


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_result_shows(name: str) -> None:
    found = False
    for seed in range(20):
        case = CASES[name](Source(seed))
        expected = case.results("cpu")
        wrong = tuple(
            result.flip(0) if result.dtype == torch.int64 else result + 1 for result in expected
        )
        try:
            case.compare(wrong, expected)
        except AssertionError:
            found = True
    assert found


def test_cases_cover_every_cuda_operator() -> None:
    """Each that a file of csrc/ops/cuda registers, but what opens a device and computes nothing."""
    sources = list((ROOT / "csrc/ops/cuda").glob("*_cuda.cpp"))
    if not sources:
        pytest.skip("the sources are not here")
    text = "".join(path.read_text() for path in sources)
    registered = re.findall(r'm\.impl\("(\w+)"', text)
    assert sorted(registered) == sorted([*CASES, "device_open"])


def test_the_library_is_loaded(gpu: str) -> None:
    assert _library.cuda_status().reason == ""


@pytest.mark.parametrize("name", CASES)
def test_opcheck(device: str, name: str) -> None:
    for seed in range(2):
        case = CASES[name](Source(seed))
        operator = getattr(torch.ops.swarm_kv, name).default
        torch.library.opcheck(operator, (), case.on(device))


@pytest.mark.parametrize("queries", [130])
def test_signatures_of_a_long_context(device: str, queries: int) -> None:
    entries, dim = 3000, 64
    source = Source(0)
    arguments = {
        "q": source.normal(4, queries, dim),
        "k": source.normal(2, entries, dim),
        "q_positions": torch.arange(entries - queries, entries),
        "scale": dim**-0.5,
    }
    expected = ops.activation_signatures(**arguments)
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    actual = ops.activation_signatures(**moved).cpu()
    assert (actual != expected).float().mean() < 1e-2  # words of 64 bits
    moved["q"][0, 0, 0] = math.nan
    with pytest.raises(ArgumentError, match="q holds NaN"):
        ops.activation_signatures(**moved)


def test_attention_to_a_long_list(device: str) -> None:
    """Cut into pieces that are merged."""
    source = Source(0)
    dim, heads, kv_heads = 128, 64, 8
    entry, entries = 2 * kv_heads * dim, 4000
    lengths = torch.tensor([0, 1, 17, 3000, 0, 20000])
    arguments = (
        source.normal(len(lengths), heads, dim).half(),
        source.normal(entries * entry).half(),
        source.integers(entries, int(lengths.sum())) * entry,
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )
    expected = ops.sparse_attention(*arguments, kv_heads, dim**-0.5)
    actual = ops.sparse_attention(*(each.to(device) for each in arguments), kv_heads, dim**-0.5)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-2, atol=2e-2)


# ---- what only a GPU refuses


def test_attention_refuses(gpu: str) -> None:
    q, pool = torch.zeros(1, 2, 64, device=gpu), torch.zeros(256, device=gpu)
    offsets = torch.tensor([0, 1], device=gpu)
    inside = torch.tensor([0], device=gpu)

    def refused(message: str, *arguments: Any) -> None:
        with pytest.raises(ArgumentError) as error:
            ops.sparse_attention(*arguments, offsets, 1, 1.0)
        assert message in str(error.value)

    refused("slots must be on the CUDA device of q", q, pool, inside.cpu())
    refused("pool must be on the CUDA device of q", q, pool.cpu(), inside)
    double = "must be float16, bfloat16 or float32, got float64"
    refused(double, q.double(), pool.double(), inside)
    wide = torch.zeros(1, 2, 80, device=gpu)
    refused("must have 64, 128 or 256 features, got q", wide, pool, inside)
    refused("must begin at a multiple of 16 bytes", q, pool[1:], inside)
    # A slot outside the pool is seen on the device alone.
    out, lse = ops.sparse_attention(q, pool, torch.tensor([129], device=gpu), offsets, 1, 1.0)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_gather_takes_pinned_memory_only(gpu: str) -> None:
    pool, slots = torch.randn(20000).half(), torch.randint(0, 10000, (50,))
    expected = gather_entries(pool, slots, 4096)
    assert torch.equal(gather_entries(pool.pin_memory(), slots.to(gpu), 4096).cpu(), expected)
    with pytest.raises(ArgumentError, match="in pinned memory"):
        gather_entries(pool, slots.to(gpu), 4096)
    outside = gather_entries(pool.to(gpu), torch.tensor([19990], device=gpu), 4096)
    assert outside.isnan().all()


def test_decoding_takes_pinned_memory_and_short_codes_only(gpu: str) -> None:
    codes, channels = encode_entries(*torch.randn(2, 4, 30, 128), "kivi4")
    memory, slots = codes.flatten(), torch.arange(30) * codes.shape[1]
    form = "kivi4", 4, 128, torch.bfloat16
    expected = decode_entries(memory, slots, *form, channels)
    there = slots.to(gpu), *form, channels.to(gpu)
    rows = decode_entries(memory.pin_memory(), *there)
    assert rows.device.type == gpu
    torch.testing.assert_close(rows.cpu(), expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(ArgumentError, match=r"`codes` must be .* in pinned memory"):
        decode_entries(memory, *there)
    with pytest.raises(ArgumentError, match="channels must be on the CUDA device of slots"):
        decode_entries(memory.to(gpu), *there[:-1], channels)
    with pytest.raises(ArgumentError, match="must have at most 98304 bytes, got 132096"):
        decode_entries(memory.to(gpu), there[0], "int8", 256, 256, torch.float16)
    outside = decode_entries(memory.to(gpu), there[0] + 1, *there[1:])
    assert outside[-1].isnan().all()
    assert not outside[:-1].isnan().all(1).any()


def test_scores_and_selections_refuse(gpu: str) -> None:
    source = Source(0)
    q = source.normal(4, 1, 32).to(gpu)
    codebooks = source.normal(2, 4, 16, 8).to(gpu)
    codes = source.integers(16, 2, 4, 700, dtype=torch.uint8).to(gpu)
    with pytest.raises(ArgumentError, match="codes must be on the CUDA device of q"):
        ops.score_codes(q, codebooks, codes.cpu(), 1.0)
    with pytest.raises(ArgumentError, match="codes must be below the 16 codewords"):
        ops.score_codes(q, codebooks, codes + 16, 1.0)
    offsets, members = (
        torch.tensor(values, dtype=torch.int32, device=gpu) for values in ([0, 2], [0, 1])
    )
    negative = torch.tensor([0, -1], dtype=torch.int32, device=gpu)
    with pytest.raises(ArgumentError, match="scores must not be NaN"):
        ops.select_clusters(torch.tensor([math.nan], device=gpu), offsets, members, 1)
    with pytest.raises(ArgumentError, match="members must not be negative, got -1"):
        ops.select_clusters(torch.tensor([1.0], device=gpu), offsets, negative, 1)


def test_a_graph_captures_scores_and_refuses_selections(gpu: str) -> None:
    source = Source(0)
    q = source.normal(4, 1, 32).to(gpu)
    codebooks = source.normal(2, 4, 256, 8).to(gpu)
    codes = source.integers(256, 2, 4, 3000, dtype=torch.uint8).to(gpu)
    expected = ops.score_codes(q, codebooks, codes, 0.2)
    offsets, members = (
        torch.tensor(values, dtype=torch.int32, device=gpu) for values in ([0, 2], [0, 1])
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = ops.score_codes(q, codebooks, codes, 0.2)
        with pytest.raises(ArgumentError, match="cannot be captured in a CUDA graph"):
            ops.select_clusters(expected[:1], offsets, members, 1)
    graph.replay()
    assert torch.equal(scores, expected)
