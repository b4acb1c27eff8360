"""activation_signatures against the reference; C++ tests have the edge cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_kv import ops, reference
from swarm_kv.errors import ArgumentError

HEADS = ["mean", "max", "union"]


def make_layer(heads=4, kv_heads=2, queries=70, entries=150, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return dict(
        q=torch.randn(heads, queries, dim, generator=generator),
        k=torch.randn(kv_heads, entries, dim, generator=generator),
        q_positions=torch.arange(entries - queries, entries),
        sparsity=0.1,
        window=8,
        sinks=2,
        scale=dim**-0.5,
    )


def lse_of(case):
    """What attention over the whole of k computes."""
    k = case["k"].double().repeat_interleave(case["q"].size(0) // case["k"].size(0), dim=0)
    scores = case["scale"] * case["q"].double() @ k.mT
    seen = torch.arange(k.size(1)) <= case["q_positions"][:, None]
    return scores.masked_fill(~seen, -math.inf).logsumexp(-1)


def test_match_reference():
    case = make_layer()
    bits = ops.activation_signatures(**case)
    assert bits.shape == (150, 2)
    assert torch.equal(bits, reference.activation_signatures(**case))
    counts = reference.unpack_bits(bits).sum(0)
    assert (counts[:70] == 15).all()
    assert (counts[70:] == 0).all()
    assert not torch.equal(bits, reference.activation_signatures(**{**case, "window": 9}))


@settings(max_examples=40, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    queries=st.integers(1, 140),
    entries=st.integers(1, 90),
    sparsity=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    window=st.integers(0, 30),
    sinks=st.integers(0, 5),
    given_lse=st.booleans(),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 1000),
)
def test_random_shapes(
    kv_heads, group, queries, entries, sparsity, window, sinks, given_lse, heads, seed
):
    case = make_layer(kv_heads * group, kv_heads, queries, entries, 8, seed)
    case.update(sparsity=sparsity, window=window, sinks=sinks, heads=heads)
    case["q_positions"] = torch.arange(queries) * entries // queries
    if given_lse:
        case["lse"] = lse_of(case)
    bits = ops.activation_signatures(**case)
    assert torch.equal(bits, reference.activation_signatures(**case))


@pytest.mark.parametrize("heads", HEADS)
def test_lse_of_attention_changes_nothing_and_another_does(heads):
    case = {**make_layer(), "heads": heads}
    bits = ops.activation_signatures(**case)
    lse = lse_of(case)
    assert torch.equal(ops.activation_signatures(**case, lse=lse), bits)
    wrong = lse + torch.tensor([0.0, 3.0, 0.0, 6.0])[:, None]
    other = ops.activation_signatures(**case, lse=wrong)
    assert torch.equal(other, reference.activation_signatures(**case, lse=wrong))
    # What one head alone ranks highest does not depend on its mass.
    assert torch.equal(other, bits) == (heads == "union")


def test_head_aggregations_differ():
    results = [ops.activation_signatures(**make_layer(), heads=heads) for heads in HEADS]
    counts = [reference.unpack_bits(bits)[:, :70].sum(0) for bits in results]
    assert not torch.equal(results[0], results[1])
    assert (counts[0] == 15).all()
    assert (counts[1] == 15).all()
    assert (counts[2] > 15).all()
    assert (counts[2] <= 4 * 15).all()


def test_profiles_of_the_same_entries_merge():
    case = make_layer(queries=128)
    halves = [
        ops.activation_signatures(
            **{**case, "q": case["q"][:, part], "q_positions": case["q_positions"][part]}
        )
        for part in (slice(0, 64), slice(64, 128))
    ]
    bits = ops.activation_signatures(**case)
    assert torch.equal(torch.cat(halves, dim=1), bits)
    assert not torch.equal(torch.cat(halves[::-1], dim=1), bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_and_strides(dtype):
    case = make_layer()
    case["q"], case["k"] = case["q"].to(dtype), case["k"].to(dtype)
    widened = {**case, "q": case["q"].float(), "k": case["k"].float()}
    expected = ops.activation_signatures(**widened)
    assert torch.equal(ops.activation_signatures(**case), expected)
    for name in ("q", "k"):
        for axes in ((0, 1), (1, 2), (0, 2)):
            strided = case[name].transpose(*axes).contiguous().transpose(*axes)
            assert not strided.is_contiguous()
            assert torch.equal(ops.activation_signatures(**{**case, name: strided}), expected)
    expanded = {**case, "k": case["k"][:1].expand(2, -1, -1)}
    copied = {**case, "k": expanded["k"].contiguous()}
    assert torch.equal(ops.activation_signatures(**expanded), ops.activation_signatures(**copied))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("queries", "entries", "change"),
    [
        (0, 20, {}),
        (3, 0, {}),
        (5, 5, {}),  # fewer entries than the window
        (5, 20, dict(sinks=50)),
        (5, 20, dict(q_positions=torch.zeros(5).long())),
    ],
)
def test_nothing_to_activate(queries, entries, change, heads):
    case = make_layer(queries=queries, entries=entries)
    case.update(q_positions=torch.arange(queries), heads=heads)
    bits = ops.activation_signatures(**{**case, **change})
    assert bits.shape == (entries, (queries + 63) // 64)
    assert bits.count_nonzero() == 0
    lively = make_layer(queries=5, entries=20)
    assert ops.activation_signatures(**lively, heads=heads).count_nonzero() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.randn(4, 70)), "q must have 3 dimensions"),
        (dict(k=torch.randn(2, 150, 17)), "k must have features of q = 16"),
        (dict(q_positions=torch.arange(70).int()), "q_positions must be int64, got int32 [70]"),
        (dict(q_positions=torch.arange(69)), "q_positions must have queries = 70"),
        (dict(k=torch.randn(3, 150, 16)), "3"),
        (dict(sparsity=0.0), "sparsity"),
        (dict(window=-1), "window"),
        (dict(q=torch.full((4, 70, 16), math.nan)), "q holds NaN or infinity"),
        (dict(k=torch.full((2, 150, 16), math.inf).half()), "k holds NaN or infinity"),
        (dict(k=torch.full((2, 150, 16), 1e300, dtype=torch.float64)), "k holds NaN or infinity"),
        (dict(k=torch.full((2, 150, 16), 1e38)), "scores may overflow float32"),
        (dict(lse=torch.zeros(70, 4)), "lse must have heads of q = 4"),
        (dict(lse=torch.zeros(4, 69)), "lse must have queries = 70"),
        (dict(lse=torch.full((4, 70), -math.inf)), "lse holds NaN or infinity"),
        (dict(lse=torch.zeros(4, 70).long()), "lse must be float16"),
        (dict(heads="median"), 'unknown `heads` "median"; choose one of: mean, max, union'),
    ],
)
def test_errors(change, message):
    case = make_layer()
    ops.activation_signatures(**case)
    with pytest.raises(ArgumentError) as error:
        ops.activation_signatures(**{**case, **change})
    assert message in str(error.value)
