"""sparse_attention and merge_attention: the reference, and what the store leans on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_kv import ops, reference
from swarm_kv.errors import ArgumentError

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 2e-5, torch.bfloat16: 2e-5}


def make_case(
    lengths, heads=6, kv_heads=2, dim=32, entries=200, dtype=torch.float32, seed=0, odd_offset=0
):
    """Rows with the given list lengths over a pool whose entries start `odd_offset` elements in."""
    generator = torch.Generator().manual_seed(seed)
    entry = 2 * kv_heads * dim
    pool = torch.randn(entries * entry + odd_offset, generator=generator, dtype=torch.float64)
    slots = [torch.randperm(entries, generator=generator)[:n] * entry + odd_offset for n in lengths]
    q = torch.randn(len(lengths), heads, dim, generator=generator, dtype=torch.float64)
    return dict(
        q=q.to(dtype),
        pool=pool.to(dtype),
        slots=torch.cat([torch.empty(0, dtype=torch.int64), *slots]),
        row_offsets=torch.tensor([0, *lengths]).cumsum(0),
        kv_heads=kv_heads,
        scale=dim**-0.5,
    )


def assert_matches_reference(case):
    out, lse = ops.sparse_attention(**case)
    expected_out, expected_lse = reference.sparse_attention(**case)
    tolerance = TOLERANCE[case["q"].dtype]
    assert out.dtype == expected_out.dtype
    torch.testing.assert_close(out, expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 1, 256), (8, 8, 128), (32, 2, 80), (5, 1, 37), (7, 1, 96), (1, 1, 1)],
)
def test_matches_reference(dtype, heads, kv_heads, dim):
    case = make_case([65, 0, 1, 130], heads, kv_heads, dim, dtype=dtype)
    assert_matches_reference(case)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_sinks_and_softcap(dtype):
    case = make_case([70, 0, 3], dtype=dtype)
    case.update(sinks=torch.linspace(-3, 6, 6).to(dtype), softcap=1.5, scale=0.7)
    assert_matches_reference(case)
    _, with_extras = ops.sparse_attention(**case)
    case.update(sinks=None)
    _, without_sinks = ops.sparse_attention(**case)
    case.update(softcap=None)
    _, plain = ops.sparse_attention(**case)
    assert (with_extras[0] > without_sinks[0]).all()
    assert not torch.allclose(without_sinks[0], plain[0], atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=0, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.integers(1, 70),
    odd_offset=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_random_shapes(lengths, kv_heads, group, dim, odd_offset, seed):
    case = make_case(lengths, kv_heads * group, kv_heads, dim, seed=seed, odd_offset=odd_offset)
    assert_matches_reference(case)


def test_equals_dense_attention_when_everything_is_read():
    heads, kv_heads, dim, entries = 8, 2, 64, 300
    keys = torch.randn(entries, kv_heads, dim)
    values = torch.randn(entries, kv_heads, dim)
    pool = torch.stack([keys, values], 1).flatten()
    q = torch.randn(1, heads, dim)
    slots = torch.randperm(entries) * 2 * kv_heads * dim
    out, _ = ops.sparse_attention(q, pool, slots, torch.tensor([0, entries]), kv_heads, dim**-0.5)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(out, dense, rtol=2e-5, atol=2e-5)
    fewer, _ = ops.sparse_attention(
        q, pool, slots[:-1], torch.tensor([0, entries - 1]), kv_heads, dim**-0.5
    )
    assert not torch.allclose(fewer, dense, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])])
def test_empty_rows(sinks):
    case = make_case([0, 0])
    out, lse = ops.sparse_attention(**case, sinks=sinks)
    assert (out == 0).all()
    expected = torch.full((2, 6), -math.inf) if sinks is None else sinks.expand(2, 6)
    torch.testing.assert_close(lse, expected)


def test_no_rows_and_no_pool():
    case = make_case([])
    out, lse = ops.sparse_attention(**case)
    assert out.shape == (0, 6, 32)
    assert lse.shape == (0, 6)
    case = make_case([0])
    case["pool"] = torch.empty(0)
    out, lse = ops.sparse_attention(**case)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_of_minus_infinity(dtype):
    case = make_case([100], heads=2, kv_heads=1, dim=16, dtype=dtype)
    case["q"] = torch.ones_like(case["q"])
    pool = case["pool"].view(-1, 2, 16)
    pool[:, 0] = -math.inf
    out, lse = ops.sparse_attention(**case)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    pool[int(case["slots"][70]) // 32, 0] = 0.25
    out, lse = ops.sparse_attention(**case)
    torch.testing.assert_close(out[0, 0], pool[int(case["slots"][70]) // 32, 1])
    torch.testing.assert_close(lse, torch.ones_like(lse))


def test_nan_is_not_hidden():
    case = make_case([100, 100])
    case["pool"][int(case["slots"][3])] = math.nan
    out, _ = ops.sparse_attention(**case)
    assert out[0, :3].isnan().all()
    assert not out[0, 3:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_scores_do_not_overflow(dtype):
    case = make_case([150], dtype=dtype)
    case["scale"] = 500.0
    assert_matches_reference(case)


def test_any_strides_of_q_and_lists():
    case = make_case([40, 60])
    expected, _ = ops.sparse_attention(**case)
    case["q"] = case["q"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    case["slots"] = torch.stack([case["slots"], torch.full_like(case["slots"], -1)], 1)[:, 0]
    assert not case["q"].is_contiguous()
    out, _ = ops.sparse_attention(**case)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_splitting_over_threads_changes_only_rounding():
    case = make_case([1900, 0, 300, 700], entries=2000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = ops.sparse_attention(**case)
        torch.set_num_threads(4)
        split = ops.sparse_attention(**case)
        again = ops.sparse_attention(**case)
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(expected, split, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(b, c)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.randn(2, 32)), "q must have 3 dimensions, got float32 [2, 32]"),
        (dict(q=torch.ones(2, 6, 32, dtype=torch.int32)), "q must be float16"),
        (dict(pool=torch.randn(200 * 128).double()), "pool must be float32, got float64 [25600]"),
        (dict(pool=torch.randn(2 * 25600)[::2]), "pool must be contiguous, got stride 2"),
        (dict(kv_heads=4), "kv_heads = 4 must divide the query heads of q float32 [2, 6, 32]"),
        (dict(kv_heads=0), "kv_heads = 0 must divide"),
        (dict(slots=torch.zeros(30, dtype=torch.int32)), "slots must be int64, got int32 [30]"),
        (dict(slots=torch.full((30,), -1)), "slots must be within [0, 25472]"),
        (dict(slots=torch.full((30,), 25473)), "entries of 128), got values from 25473 to 25473"),
        (dict(row_offsets=torch.tensor([0, 30])), "row_offsets must have rows of q + 1 = 3"),
        (dict(row_offsets=torch.tensor([0, 10, 29])), "must run from 0 to slots' length 30"),
        (dict(row_offsets=torch.tensor([1, 10, 30])), "got 1 to 30"),
        (dict(row_offsets=torch.tensor([0, 31, 30])), "must not decrease, got 31 then 30 at row 1"),
        (dict(softcap=0.0), "softcap must be positive, got 0; pass None for no cap"),
        (dict(sinks=torch.zeros(5)), "sinks must have query heads = 6 in dimension 0"),
    ],
)
def test_errors_name_the_argument(change, message):
    case = make_case([10, 20])
    ops.sparse_attention(**case)
    with pytest.raises(ArgumentError) as error:
        ops.sparse_attention(**{**case, **change})
    assert str(error.value).startswith("sparse_attention: ")
    assert message in str(error.value)


def test_last_entry_of_the_pool_is_within_range():
    case = make_case([1], entries=3)
    case["slots"] = torch.tensor([2 * 128])
    assert_matches_reference(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4, 64), (0, 4, 8), (2, 1)])
def test_merge_matches_reference(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    args = [
        torch.randn(s, generator=generator, dtype=dtype) * 3
        for s in (shape, shape[:-1], shape, shape[:-1])
    ]
    for actual, expected in zip(
        ops.merge_attention(*args), reference.merge_attention(*args), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_merge_of_two_halves_is_the_whole():
    case = make_case([120, 90])
    expected = ops.sparse_attention(**case)
    halves = []
    for part in (0, 1):
        lists = [case["slots"][a:b][part::2] for a, b in ((0, 120), (120, 210))]
        own = dict(
            case,
            slots=torch.cat(lists),
            row_offsets=torch.tensor([0, *(len(x) for x in lists)]).cumsum(0),
        )
        halves += ops.sparse_attention(**own)
    out, lse = ops.merge_attention(*halves)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(halves[0], expected[0], rtol=1e-5, atol=1e-5)


def test_merge_with_minus_infinity():
    out = torch.randn(3, 8)
    lse = torch.tensor([0.5, -math.inf, -2.0])
    nothing = torch.full((3,), -math.inf)
    junk = torch.full((3, 8), 7.0)
    for args in ((out, lse, junk, nothing), (junk, nothing, out, lse)):
        merged_out, merged_lse = ops.merge_attention(*args)
        torch.testing.assert_close(merged_lse, lse)
        torch.testing.assert_close(merged_out[[0, 2]], out[[0, 2]])
        assert (merged_out[1] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 3, 8).half()}, "out_a must be float32 or float64, got float16"),
        ({1: torch.zeros(2, 4)}, "lse_a must match out_a float32 [2, 3, 8] without its last"),
        ({2: torch.zeros(2, 3, 9)}, "out_b must match out_a float32 [2, 3, 8] in shape"),
        ({3: torch.zeros(2, 3).double()}, "got float64 [2, 3]"),
        ({0: torch.tensor(1.0)}, "out_a must have at least 1 dimension"),
    ],
)
def test_merge_errors(change, message):
    args = dict(
        enumerate(
            [torch.zeros(2, 3, 8), torch.zeros(2, 3), torch.zeros(2, 3, 8), torch.zeros(2, 3)]
        )
    )
    ops.merge_attention(*args.values())
    with pytest.raises(ArgumentError) as error:
        ops.merge_attention(*{**args, **change}.values())
    assert message in str(error.value)
