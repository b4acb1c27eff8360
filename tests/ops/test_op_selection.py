"""Scoring and selection operators against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_kv import ops, reference
from swarm_kv.errors import ArgumentError


def make_codes(heads=6, kv_heads=2, dim=32, parts=4, codewords=256, items=700, queries=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return dict(
        q=torch.randn(heads, queries, dim, generator=generator),
        codebooks=torch.randn(kv_heads, parts, codewords, dim // parts, generator=generator),
        codes=torch.randint(
            0, codewords, (kv_heads, parts, items), generator=generator, dtype=torch.uint8
        ),
        scale=dim**-0.5,
    )


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_clusters(entries, clusters, seed=0, max_size=9):
    """Overlapping clusters, some of them empty, and entries in none of them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, max_size, (clusters,), generator=generator)
    lists = [torch.randperm(entries, generator=generator)[:n] for n in sizes.tolist()]
    offsets = torch.tensor([0, *(len(x) for x in lists)]).cumsum(0, dtype=torch.int32)
    loose = torch.randperm(entries, generator=generator)[: entries // 3]
    return offsets, torch.cat([*lists, loose]).int()


@pytest.mark.parametrize("items", [1, 15, 512, 513, 2000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "parts"),
    [(9, 3, 1, 8), (2, 2, 1, 4), (16, 1, 3, 2), (8, 2, 5, 16), (5, 1, 1, 1)],
)
def test_score_codes_matches_reference(heads, kv_heads, queries, parts, items):
    case = make_codes(heads, kv_heads, 32, parts, items=items, queries=queries)
    actual, expected = ops.score_codes(**case), reference.score_codes(**case)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-9)
    assert math.isclose(actual.sum().item(), 1, rel_tol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_score_codes_dtypes(dtype):
    case = make_codes()
    case["q"] = case["q"].to(dtype)
    torch.testing.assert_close(
        ops.score_codes(**case), reference.score_codes(**case), rtol=2e-5, atol=1e-9
    )


@settings(max_examples=30, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 10),
    queries=st.integers(1, 3),
    parts=st.integers(1, 5),
    part_dim=st.integers(1, 9),
    codewords=st.integers(1, 256),
    items=st.integers(1, 1100),
    seed=st.integers(0, 1000),
)
def test_score_codes_random_shapes(
    kv_heads, group, queries, parts, part_dim, codewords, items, seed
):
    case = make_codes(
        kv_heads * group, kv_heads, parts * part_dim, parts, codewords, items, queries, seed
    )
    torch.testing.assert_close(
        ops.score_codes(**case), reference.score_codes(**case), rtol=5e-5, atol=1e-8
    )


def test_score_codes_looks_at_every_head_and_part():
    case = make_codes()
    expected = ops.score_codes(**case)
    for name, index in (("q", (5, 0, 31)), ("codebooks", (1, 3, slice(None), 7))):
        changed = {**case, name: case[name].clone()}
        changed[name][index] *= -2
        assert not torch.allclose(ops.score_codes(**changed), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("score", [1e4, -1e4])
def test_score_codes_survives_large_scores(score):
    case = make_codes()
    case["scale"] = score
    actual = ops.score_codes(**case)
    assert actual.isfinite().all()
    assert math.isclose(actual.sum().item(), 1, rel_tol=1e-5)


def test_score_codes_does_not_depend_on_threads():
    case = make_codes(items=40000, queries=3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = ops.score_codes(**case)
        torch.set_num_threads(3)
        assert torch.equal(ops.score_codes(**case), expected)
    finally:
        torch.set_num_threads(threads)


def test_no_items():
    case = make_codes(items=0)
    assert ops.score_codes(**case).shape == (0,)
    assert ops.score_clusters(case["q"], torch.empty(2, 0, 32), 1.0).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "dim", "count"),
    [(9, 3, 1, 64, 600), (4, 4, 2, 37, 10), (32, 2, 1, 128, 1), (1, 1, 1, 5, 513)],
)
def test_score_clusters_matches_reference(dtype, heads, kv_heads, queries, dim, count):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(heads, queries, dim, generator=generator).to(dtype)
    keys = torch.randn(count, kv_heads, dim, generator=generator).to(dtype).transpose(0, 1)
    actual = ops.score_clusters(q, keys, 0.2)
    torch.testing.assert_close(actual, reference.score_clusters(q, keys, 0.2), rtol=2e-5, atol=1e-9)
    wrong = reference.score_clusters(q, keys, 0.3)
    assert count == 1 or not torch.allclose(actual, wrong, rtol=2e-5, atol=1e-9)


def test_codes_of_their_own_codewords_score_like_keys():
    """With as many codewords as entries the codes lose nothing."""
    keys = torch.randn(2, 200, 32)
    q = torch.randn(6, 1, 32)
    codebooks = keys.view(2, 200, 4, 8).transpose(1, 2).contiguous()
    codes = torch.arange(200, dtype=torch.uint8).expand(2, 4, 200)
    torch.testing.assert_close(
        ops.score_codes(q, codebooks, codes, 0.3), ops.score_clusters(q, keys, 0.3)
    )


def make_packed_codes(heads, kv_heads, dim, parts, items, queries=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return dict(
        q=torch.randn(heads, queries, dim, generator=generator),
        codebooks=torch.randn(kv_heads, parts, 16, dim // parts, generator=generator),
        codes=torch.randint(
            0, 256, (kv_heads, parts // 2, items), generator=generator, dtype=torch.uint8
        ),
        scale=dim**-0.5,
    )


@pytest.mark.parametrize("items", [1, 15, 64, 513, 2000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "parts"),
    [(9, 3, 1, 16), (2, 2, 1, 4), (16, 1, 3, 2), (8, 2, 5, 32), (5, 1, 1, 8)],
)
def test_score_packed_codes_matches_reference(heads, kv_heads, queries, parts, items):
    case = make_packed_codes(heads, kv_heads, 32, parts, items, queries)
    actual, expected = ops.score_packed_codes(**case), reference.score_packed_codes(**case)
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=1e-9)
    assert math.isclose(actual.sum().item(), 1, rel_tol=0.01)
    if items > 1:
        for name, index in (("q", -1), ("codebooks", (-1, -1))):
            changed = {**case, name: case[name].clone()}
            changed[name][index] *= -5
            assert not torch.allclose(ops.score_packed_codes(**changed), actual, rtol=0.02, atol=0)


def test_score_packed_codes_are_those_of_score_codes_but_for_rounding():
    case = make_packed_codes(8, 2, 64, 16, 900)
    codes = case["codes"]
    plain = {**case, "codes": torch.stack([codes & 15, codes >> 4], 2).flatten(1, 2)}
    expected = ops.score_codes(**plain)
    torch.testing.assert_close(ops.score_packed_codes(**case), expected, rtol=0.1, atol=0)
    swapped = {**case, "codes": codes >> 4 | codes << 4}
    assert not torch.allclose(ops.score_packed_codes(**swapped), expected, rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [make_codes, make_packed_codes])
def test_queries_are_turned_first(make, dtype):
    case = make(6, 2, 32, 8, items=700, queries=3)
    name = "score_codes" if make is make_codes else "score_packed_codes"
    turn = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    actual = getattr(ops, name)(**case, turn=turn)
    tolerance = {"rtol": 0.02 if make is make_packed_codes else 1e-4, "atol": 1e-8}
    expected = getattr(reference, name)(**case, turn=turn)
    torch.testing.assert_close(actual, expected, **tolerance)
    turned = (case["q"].view(2, -1, 32) @ turn.float()).view(6, 3, 32)
    by_hand = getattr(ops, name)(**{**case, "q": turned})
    torch.testing.assert_close(actual, by_hand, **tolerance)
    for wrong in (None, turn.mT):
        assert not torch.allclose(getattr(ops, name)(**case, turn=wrong), actual, **tolerance)


@pytest.mark.parametrize("score", [1e4, -1e4, 0.0])
def test_score_packed_codes_survives_extreme_scores(score):
    case = {**make_packed_codes(4, 2, 32, 8, 700), "scale": score}
    actual = ops.score_packed_codes(**case)
    assert actual.isfinite().all()
    assert math.isclose(actual.sum().item(), 1, rel_tol=0.01)


def test_score_packed_codes_does_not_depend_on_threads():
    case = make_packed_codes(8, 2, 32, 8, 40000)  # enough for several
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = ops.score_packed_codes(**case)
        torch.set_num_threads(3)
        assert torch.equal(ops.score_packed_codes(**case), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(codebooks=torch.randn(2, 8, 15, 4)), "must have codewords of four bits = 16"),
        (dict(codebooks=torch.randn(2, 7, 16, 4)), "must have 2 to 516 parts, an even number"),
        (dict(codebooks=torch.randn(2, 8, 16, 5)), "must split q's features into equal parts"),
        (dict(codes=torch.zeros(2, 8, 7, dtype=torch.uint8)), "codes must have parts / 2 = 4"),
        (dict(codes=torch.zeros(2, 4, 7)), "codes must be uint8"),
        (dict(q=torch.randn(5, 1, 32)), "the KV heads (2) must divide the query heads of q"),
        (dict(turn=torch.randn(3, 32, 32)), "turn must have KV heads = 2 in dimension 0"),
        (dict(turn=torch.randn(2, 32, 31)), "turn must have features of q = 32 in dimension 2"),
        (dict(turn=torch.ones(2, 32, 32).int()), "turn must be float16, bfloat16, float32"),
    ],
)
def test_score_packed_codes_errors(change, message):
    case = make_packed_codes(4, 2, 32, 8, 7)
    ops.score_packed_codes(**case)
    with pytest.raises(ArgumentError) as error:
        ops.score_packed_codes(**{**case, **change})
    assert str(error.value).startswith("score_packed_codes: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "dim", "count"),
    [(9, 3, 1, 64, 600), (4, 4, 2, 38, 10), (32, 2, 1, 128, 1), (1, 1, 1, 2, 513), (2, 1, 1, 8, 0)],
)
def test_score_coded_clusters_matches_reference(heads, kv_heads, queries, dim, count):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(heads, queries, dim, generator=generator)
    keys = torch.randint(
        0, 256, (kv_heads, count, dim // 2), generator=generator, dtype=torch.uint8
    )
    scales = torch.rand(kv_heads, dim, generator=generator) / 8
    actual = ops.score_coded_clusters(q, keys, scales, 0.2)
    expected = reference.score_coded_clusters(q, keys, scales, 0.2)
    torch.testing.assert_close(actual, expected, rtol=5e-5, atol=1e-9)
    for changed in ((keys >> 4 | keys << 4, scales), (keys, scales.flip(1))):
        wrong = ops.score_coded_clusters(q, *changed, 0.2)
        assert count <= 1 or not torch.allclose(wrong, actual, rtol=5e-5, atol=1e-9)


def test_score_coded_clusters_errors():
    q, keys, scales = (
        torch.randn(4, 1, 8),
        torch.zeros(2, 5, 4, dtype=torch.uint8),
        torch.ones(2, 8),
    )
    ops.score_coded_clusters(q, keys, scales, 1.0)
    for args, message in (
        ((q, keys, torch.ones(3, 8)), "scales must have KV heads of keys = 2"),
        ((q, keys, torch.ones(2, 4)), "scales must have features of q = 8"),
        ((q, keys[..., :3], scales), "keys must hold two features per byte"),
        ((q, keys.int(), scales), "keys must be uint8"),
        ((q[:3], keys, scales), "the KV heads .2. must divide the query heads"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ops.score_coded_clusters(*args, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    entries=st.integers(1, 120),
    clusters=st.integers(0, 60),
    budget=st.integers(0, 130),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_select_clusters_matches_reference(entries, clusters, budget, ties, seed):
    offsets, members = make_clusters(entries, clusters, seed)
    scores = torch.randn(clusters, generator=torch.Generator().manual_seed(seed))
    if ties:
        scores = scores.round()
    actual = ops.select_clusters(scores, offsets, members, budget)
    assert actual.tolist() == reference.select_clusters(scores, offsets, members, budget).tolist()


def test_select_clusters_counts_distinct_entries():
    offsets, members = int32(0, 3, 6, 8), int32(0, 1, 2, 0, 1, 2, 3, 4)
    scores = torch.tensor([3.0, 2.0, 1.0])
    assert ops.select_clusters(scores, offsets, members, 3).tolist() == [0]
    assert ops.select_clusters(scores, offsets, members, 4).tolist() == [0, 1, 2]
    assert ops.select_clusters(scores, offsets, members, 99).tolist() == [0, 1, 2]
    assert ops.select_clusters(scores, offsets, members, 0).tolist() == []


@settings(max_examples=80, deadline=None)
@given(
    entries=st.integers(1, 120),
    clusters=st.integers(0, 60),
    budget=st.integers(0, 130),
    request_cost=st.sampled_from([0.0, 1.5, 6.0]),
    single_share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_select_two_level_matches_reference(
    entries, clusters, budget, request_cost, single_share, ties, seed
):
    offsets, members = make_clusters(entries, clusters, seed)
    probs = torch.rand(entries, generator=torch.Generator().manual_seed(seed))
    if ties:
        probs = (probs * 4).round() / 4
    args = (probs, offsets, members, budget, request_cost, single_share)
    actual, expected = ops.select_two_level(*args), reference.select_two_level(*args)
    assert [x.tolist() for x in actual] == [x.tolist() for x in expected]


def test_select_two_level_by_hand():
    # Clusters of gain 1.0/3.5, 1.2/3.5, 0.7/4.5; the last one repeats two entries of the first.
    offsets, members = int32(0, 2, 4, 7), int32(0, 1, 2, 3, 0, 1, 4)
    probs = torch.tensor([0.3, 0.7, 0.9, 0.3, 0.1, 0.25, 0.05, 0.0])
    taken = ops.select_two_level(probs, offsets, members, 4, 1.5, 0.0)
    assert [x.tolist() for x in taken] == [[1, 0], []]
    taken = ops.select_two_level(probs, offsets, members, 6, 1.5, 0.2)
    assert [x.tolist() for x in taken] == [[1, 0, 2], [5]]
    taken = ops.select_two_level(probs, offsets, members, 4, 1.5, 0.5)
    assert [x.tolist() for x in taken] == [[1], [0, 1]]
    taken = ops.select_two_level(probs, offsets, members, 4, 1.5, 1.0)
    assert [x.tolist() for x in taken] == [[], [0, 1, 2, 3]]
    taken = ops.select_two_level(probs, offsets, members, 8, 1.5, 0.1)
    assert [x.tolist() for x in taken] == [[], list(range(8))]


def test_select_two_level_counts_only_what_is_new():
    """Without that the second cluster, nearly a copy of the first, would come before the third."""
    offsets, members = int32(0, 3, 6, 8), int32(0, 1, 2, 0, 1, 3, 4, 5)
    probs = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1, 0.1, 0.0, 0.0])
    clusters, _ = ops.select_two_level(probs, offsets, members, 7, 1.5, 0.0)
    assert clusters.tolist() == [0, 2, 1]
    apart = int32(0, 1, 2, 6, 7, 3, 4, 5)  # the same gains, nothing in common
    probs = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1, 0.1, 0.3, 0.3, 0.0])
    clusters, _ = ops.select_two_level(probs, offsets, apart, 8, 1.5, 0.0)
    assert clusters.tolist() == [0, 1, 2]


def test_entries_in_no_cluster_are_read_one_by_one():
    offsets, members = int32(0, 2), int32(0, 1, 2, 3)
    probs = torch.tensor([0.1, 0.1, 0.7, 0.1])
    clusters, entries = ops.select_two_level(probs, offsets, members, 3, 1.5, 0.4)
    assert (clusters.tolist(), entries.tolist()) == ([0], [2])
    assert ops.select_clusters(torch.tensor([1.0]), offsets, members, 4).tolist() == [0]
    offsets = int32(0, 2, 4)  # the same entries as a cluster
    assert ops.select_two_level(probs, offsets, members, 3, 1.5, 0.4)[0].tolist() == [1]
    assert ops.select_clusters(torch.tensor([1.0, 0.5]), offsets, members, 4).tolist() == [0, 1]


def test_clusters_that_gain_nothing_are_not_taken():
    offsets, members = int32(0, 2, 4), int32(2, 3, 0, 1)
    probs = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    clusters, entries = ops.select_two_level(probs, offsets, members, 4, 1.5, 0.0)
    assert (clusters.tolist(), entries.tolist()) == ([1], [2, 3])


def test_select_two_level_prefers_small_clusters_when_requests_are_cheap():
    offsets, members = int32(0, 1, 4), int32(0, 1, 2, 3)
    probs = torch.tensor([0.4, 0.25, 0.25, 0.25, 0.0, 0.0])
    assert ops.select_two_level(probs, offsets, members, 1, 0.0, 0.0)[0].tolist() == [0]
    assert ops.select_two_level(probs, offsets, members, 1, 6.0, 0.0)[0].tolist() == [1]


def test_zero_and_negative_zero_are_equal():
    offsets, members = int32(0, 1, 2, 3), int32(0, 1, 2)
    scores = torch.tensor([-0.0, 0.0, -0.0])
    assert ops.select_clusters(scores, offsets, members, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.randn(6, 32)), "q must have 3 dimensions, got float32 [6, 32]"),
        (dict(q=torch.randn(5, 1, 32)), "the KV heads (2) must divide the query heads of q"),
        (dict(q=torch.randn(6, 0, 32)), "q must have at least one query"),
        (dict(q=torch.randn(6, 1, 33)), "must split q's features into equal parts"),
        (dict(codebooks=torch.randn(2, 4, 300, 8)), "must have 1 to 256 codewords"),
        (dict(codebooks=torch.randn(2, 4, 256, 8).half()), "codebooks must be float32"),
        (dict(codebooks=torch.randn(2, 4, 200, 8)), "codes must be below the 200 codewords"),
        (dict(codes=torch.zeros(2, 3, 7, dtype=torch.uint8)), "codes must have parts = 4"),
        (dict(codes=torch.zeros(3, 4, 7, dtype=torch.uint8)), "codes must have KV heads = 2"),
        (dict(codes=torch.zeros(2, 4, 7)), "codes must be uint8, got float32 [2, 4, 7]"),
    ],
)
def test_score_codes_errors(change, message):
    case = make_codes()
    ops.score_codes(**case)
    with pytest.raises(ArgumentError) as error:
        ops.score_codes(**{**case, **change})
    assert str(error.value).startswith("score_codes: ")
    assert message in str(error.value)


def test_score_clusters_errors():
    with pytest.raises(ArgumentError, match="keys must have features of q = 8 in dimension 2"):
        ops.score_clusters(torch.randn(2, 1, 8), torch.randn(1, 5, 9), 1.0)
    with pytest.raises(ArgumentError, match="must divide the query heads"):
        ops.score_clusters(torch.randn(2, 1, 8), torch.randn(3, 5, 8), 1.0)


OFFSETS, MEMBERS = int32(0, 2, 3), int32(0, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(offsets=int32(0, 2, 4)), "run from 0 to at most members' length 3, got 0 to 4"),
        (dict(offsets=int32(1, 2, 3)), "run from 0 to at most members' length 3, got 1 to 3"),
        (dict(offsets=int32(0, 4, 3)), "offsets must not decrease"),
        (dict(offsets=OFFSETS.long()), "offsets must be int32, got int64 [3]"),
        (dict(members=MEMBERS.long()), "members must be int32, got int64 [3]"),
        (dict(members=int32(0, -1, 1)), "members must not be negative, got -1"),
        (dict(budget=-1), "budget must not be negative, got -1"),
    ],
)
def test_selection_errors(change, message):
    lists = dict(offsets=OFFSETS, members=MEMBERS, budget=1)
    for op, first in (
        (ops.select_clusters, torch.rand(2)),
        (ops.select_two_level, torch.rand(3)),
    ):
        op(first, **lists)
        with pytest.raises(ArgumentError) as error:
            op(first, **{**lists, **change})
        assert str(error.value).startswith(op.__name__)
        assert message in str(error.value)


def test_selection_errors_of_one_op():
    with pytest.raises(ArgumentError, match=r"offsets must have scores \+ 1 = 4"):
        ops.select_clusters(torch.rand(3), OFFSETS, MEMBERS, 1)
    with pytest.raises(ArgumentError, match="scores must not be NaN"):
        ops.select_clusters(torch.tensor([0.1, math.nan]), OFFSETS, MEMBERS, 1)
    with pytest.raises(ArgumentError, match="probs must not be NaN"):
        ops.select_two_level(torch.tensor([0.1, math.nan]), OFFSETS, MEMBERS, 1)
    with pytest.raises(ArgumentError, match="members must be below the 1 entries of probs, got 1"):
        ops.select_two_level(torch.rand(1), OFFSETS, MEMBERS, 1)
    with pytest.raises(ArgumentError, match=r"single_share must be within \[0, 1\], got 1.5"):
        ops.select_two_level(torch.rand(3), OFFSETS, MEMBERS, 1, 1.5, 1.5)
    with pytest.raises(ArgumentError, match="request_cost must be finite and not negative, got -1"):
        ops.select_two_level(torch.rand(3), OFFSETS, MEMBERS, 1, -1.0, 0.5)
