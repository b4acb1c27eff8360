"""Gradients of sparse_attention and merge_attention; every other operator refuses them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from swarm_kv import autograd, ops, reference

OPS = torch.ops.swarm_kv
DIFFERENTIABLE = {"sparse_attention", "merge_attention"}
INTEGERS_ONLY = {
    "cluster",
    "device_open",  # only looks at where a tensor is
    "fetch_submit",
    "join_clusters",
    "store_attach",
    "window_release",
    "window_retain",
}


def make_case(
    lengths,
    heads=4,
    kv_heads=2,
    dim=3,
    entries=6,
    step=None,
    sinks=False,
    softcap=None,
    repeated=False,
    dtype=torch.float64,
    seed=0,
):
    """Inputs that take gradients, and the function of them.

    `step` elements lie between two entries, fewer than an entry has where they overlap.
    """
    generator = torch.Generator().manual_seed(seed)
    size = 2 * kv_heads * dim
    step = size if step is None else step

    def random(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    chosen = [
        torch.randint(entries, (n,), generator=generator)
        if repeated
        else torch.randperm(entries, generator=generator)[:n]
        for n in lengths
    ]
    slots = step * torch.cat([torch.empty(0, dtype=torch.int64), *chosen])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    inputs = [random(len(lengths), heads, dim), random(step * (entries - 1) + size)]
    if sinks:
        inputs.append(random(heads))

    def attend(q, pool, sinks=None, op=ops.sparse_attention):
        return op(q, pool, slots, offsets, kv_heads, dim**-0.5, sinks, softcap)

    return inputs, attend


def finite(results):
    """Without minus infinity, whose numerical derivative is not a number."""
    out, lse = results
    return out, lse.masked_fill(lse == -math.inf, 0)


CASES = {
    "ragged": dict(lengths=[3, 1, 5]),
    "one entry": dict(lengths=[1]),
    "an empty list": dict(lengths=[2, 0, 3]),
    "empty lists only": dict(lengths=[0, 0]),
    "as many heads": dict(lengths=[4, 2], heads=3, kv_heads=3),
    "one KV head": dict(lengths=[4, 2], heads=3, kv_heads=1),
    "sinks": dict(lengths=[3, 0, 1], sinks=True),
    "soft cap": dict(lengths=[3, 2], softcap=0.7),
    "sinks and soft cap": dict(lengths=[3, 0, 2], sinks=True, softcap=0.7),
    "repeated slots": dict(lengths=[5, 4], entries=2, repeated=True),
    "overlapping entries": dict(lengths=[4, 3], step=5),
}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    inputs, attend = make_case(**CASES[name])
    assert gradcheck(lambda *x: finite(attend(*x)), inputs)


@pytest.mark.parametrize("name", ["ragged", "sinks and soft cap", "repeated slots"])
def test_second_derivatives(name):
    inputs, attend = make_case(**{**CASES[name], "dim": 2})
    assert gradgradcheck(lambda *x: finite(attend(*x)), inputs)


@pytest.mark.parametrize("result", [0, 1])
def test_each_result_alone_is_differentiable(result):
    inputs, attend = make_case([3, 1, 4], sinks=True)
    assert gradcheck(lambda *x: attend(*x)[result], inputs)


def gradients(inputs, attend, op, weights):
    out, lse = finite(attend(*inputs, op=op))
    loss = (out * weights[0].to(out)).sum() + (lse * weights[1].to(lse)).sum()
    return torch.autograd.grad(loss, inputs)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.integers(1, 9),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 20.0]),
    repeated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gradients_are_those_of_the_reference(
    lengths, kv_heads, group, dim, sinks, softcap, repeated, seed
):
    inputs, attend = make_case(
        lengths,
        kv_heads * group,
        kv_heads,
        dim,
        entries=12,
        sinks=sinks,
        softcap=softcap,
        repeated=repeated,
        seed=seed,
    )
    shape = inputs[0].shape
    weights = torch.randn(shape, dtype=torch.float64), torch.randn(shape[:2], dtype=torch.float64)
    got = gradients(inputs, attend, ops.sparse_attention, weights)
    expected = gradients(inputs, attend, reference.sparse_attention, weights)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_no_rows():
    inputs, attend = make_case([])
    out, lse = attend(*inputs)
    got = torch.autograd.grad(out.sum() + lse.sum(), inputs)
    assert got[0].shape == (0, 4, 3)
    assert (got[1] == 0).all()


def test_a_missing_entry_shows():
    """The negative control of the tests above."""
    inputs, attend = make_case([5])
    other, attend_less = make_case([4])
    assert torch.equal(inputs[0], other[0])
    weights = torch.ones(1, 4, 3), torch.ones(1, 4)
    whole = gradients(inputs, attend, ops.sparse_attention, weights)
    less = gradients(other, attend_less, ops.sparse_attention, weights)
    assert (whole[0] - less[0]).abs().max() > 1e-3
    assert (whole[1] - less[1]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_have_the_dtype_of_their_argument(dtype):
    inputs, attend = make_case([9, 4], dim=16, entries=12, sinks=True, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    weights = torch.randn(2, 4, 16), torch.randn(2, 4)
    got = gradients(inputs, attend, ops.sparse_attention, weights)
    expected = gradients(exact, attend, reference.sparse_attention, weights)
    tolerance = 2 * torch.finfo(dtype).eps
    for given_, one, other in zip(inputs, got, expected, strict=True):
        assert one.dtype == given_.dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=4 * tolerance)


def test_keys_and_values_get_the_gradients_of_dense_attention():
    kv_heads, heads, dim, entries = 2, 6, 16, 40
    k, v = (torch.randn(entries, kv_heads, dim, dtype=torch.float64) for _ in range(2))
    q = torch.randn(1, heads, dim, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    pool = torch.stack([k, v], 1).flatten()
    slots = torch.randperm(entries) * 2 * kv_heads * dim
    out, _ = ops.sparse_attention(q, pool, slots, torch.tensor([0, entries]), kv_heads, dim**-0.5)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1).repeat_interleave(3, 0)[None],
        v.transpose(0, 1).repeat_interleave(3, 0)[None],
    )[0].transpose(0, 1)
    weights = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad((out * weights).sum(), inputs),
        torch.autograd.grad((dense * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_what_a_store_reads_later_does_not_change_the_gradient():
    """A store's memory holds other entries by the time of the backward, unknown to autograd."""
    (q, pool), attend = make_case([3, 5])
    (expected,) = torch.autograd.grad(attend(q, pool)[0].sum(), q)
    memory = pool.detach().clone()
    out, _ = attend(q, memory)
    memory.numpy().fill(math.nan)  # as a drive writes there: no version is counted
    (got,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(got, expected)


def partials(shape, infinite=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, shape[:-1], shape, shape[:-1])
    values = [2 * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    for side, row in infinite:
        values[2 * side + 1].view(-1)[row] = -math.inf
    return [x.requires_grad_() for x in values]


MERGES = {
    "no rows": dict(shape=(5,)),
    "several dimensions": dict(shape=(2, 3, 4)),
    "one side is empty": dict(shape=(3, 4), infinite=[(0, 1), (1, 2)]),
    "both sides are empty": dict(shape=(3, 4), infinite=[(0, 1), (1, 1)]),
}


@pytest.mark.parametrize("name", MERGES)
def test_merge_gradcheck(name):
    inputs = partials(**MERGES[name])
    assert gradcheck(lambda *x: finite(ops.merge_attention(*x)), inputs)


def test_merge_second_derivatives():
    assert gradgradcheck(ops.merge_attention, partials((2, 3)))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    dim=st.integers(1, 6),
    infinite=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=4),
    seed=st.integers(0, 1000),
)
def test_merge_gradients_are_those_of_the_formula(rows, dim, infinite, seed):
    infinite = [(side, row) for side, row in infinite if row < rows]
    inputs = partials((rows, dim), infinite, seed)
    out_a, lse_a, out_b, lse_b = inputs
    weights = torch.randn(rows, dim, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)
    out, lse = finite(ops.merge_attention(*inputs))
    got = torch.autograd.grad((out * weights[0]).sum() + (lse * weights[1]).sum(), inputs)
    # With e for exp: (e_a out_a + e_b out_b) / (e_a + e_b), where a row without entries stays 0.
    e_a, e_b = lse_a.exp(), lse_b.exp()
    total = e_a + e_b
    none = total == 0
    total = total.masked_fill(none, 1)
    expected_out = (e_a[:, None] * out_a + e_b[:, None] * out_b) / total[:, None]
    expected_lse = total.log()
    loss = (expected_out * weights[0]).sum() + (expected_lse * weights[1]).sum()
    expected = torch.autograd.grad(loss, inputs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_two_halves_merged_have_the_gradients_of_the_whole():
    (q, pool), attend = make_case([6])
    order = torch.randperm(6) * 12
    offsets = torch.tensor([0, 3])

    def halves(q, pool):
        parts = [
            ops.sparse_attention(q, pool, half, offsets, 2, 3**-0.5)
            for half in (order[:3], order[3:])
        ]
        return ops.merge_attention(*parts[0], *parts[1])

    weights = torch.randn(1, 4, 3, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((halves(q, pool)[0] * weights).sum(), (q, pool)),
        torch.autograd.grad((attend(q, pool)[0] * weights).sum(), (q, pool)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ragged", "sinks and soft cap", "repeated slots"])
def test_opcheck_with_gradients(name):
    """Among its tests: registration, and compiled gradients against eager ones."""
    inputs, attend = make_case(**CASES[name], dtype=torch.float32)
    recorded = []
    attend(*inputs, op=lambda *args: recorded.append(args))
    torch.library.opcheck(OPS.sparse_attention.default, recorded[0])
    if name == "ragged":
        torch.library.opcheck(OPS.sparse_attention.default, (inputs[0], *recorded[0][1:6]))


def test_opcheck_of_merge_with_gradients():
    torch.library.opcheck(OPS.merge_attention.default, tuple(partials((2, 3, 4))))


def test_a_compiled_training_step_has_the_gradients_of_the_eager_one():
    inputs, attend = make_case([3, 1, 4], sinks=True, softcap=5.0)

    def loss(*inputs):
        out, lse = attend(*inputs)
        merged, total = ops.merge_attention(out, lse, 2 * out, lse - 1)
        return (merged * merged).sum() + total.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(*inputs), inputs),
        torch.autograd.grad(loss(*inputs), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


# ---- the other operators


def schemas():
    found = {
        schema.name.split("::")[1]: schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("swarm_kv::")
    }
    return {
        name: schema
        for name, schema in found.items()
        if any("Tensor" in str(argument.type) for argument in schema.arguments)
    }


def test_every_operator_is_differentiable_refuses_or_takes_integers():
    known = DIFFERENTIABLE | set(autograd.WITHOUT_BACKWARD) | INTEGERS_ONLY
    assert set(schemas()) == known
    assert len(known) == len(DIFFERENTIABLE) + len(autograd.WITHOUT_BACKWARD) + len(INTEGERS_ONLY)


def arguments(schema, tensor):
    """Something of each argument's type, which no operator would accept."""
    some = {"Tensor": tensor, "int": 0, "float": 0.0, "str": "", "bool": False}
    some["List[int]"] = []
    return [some.get(str(argument.type)) for argument in schema.arguments]


@pytest.mark.parametrize("name", autograd.WITHOUT_BACKWARD)
def test_gradients_are_refused_before_anything_happens(name):
    schema = schemas()[name]
    wrong = arguments(schema, torch.zeros(1))
    with pytest.raises(RuntimeError) as refused:  # the control: the operator itself was reached
        getattr(OPS, name)(*wrong)
    assert not isinstance(refused.value, NotImplementedError)
    wrong = arguments(schema, torch.zeros(1, requires_grad=True))
    with pytest.raises(NotImplementedError, match=f"swarm_kv::{name} has no backward.*no_grad"):
        getattr(OPS, name)(*wrong)
    with torch.no_grad(), pytest.raises(RuntimeError) as under_no_grad:
        getattr(OPS, name)(*wrong)
    assert str(under_no_grad.value) == str(refused.value)
