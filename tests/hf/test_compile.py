"""torch.compile: loops of operators in one graph, store calls in their order, patched models."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import swarm_kv
from swarm_kv import compat
from swarm_kv.store_ops import EFFECTFUL
from tests.hf.test_equivalence import settings
from tests.store.helpers import Data, open_store

OPS = torch.ops.swarm_kv
HEADS, KV_HEADS, DIM, ENTRIES, BUDGET = 4, 2, 16, 64, 10
ENTRY, SCALE = 2 * KV_HEADS * DIM, DIM**-0.5
PROMPT, STEPS = 120, 3
COLD = {"initial_fill": "none"}  # so that decoding reads from the drives

backends = pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


# ---- a loop of one's own


def attend(q: Tensor, codebooks: Tensor, codes: Tensor, members: Tensor, pool: Tensor) -> Tensor:
    """Score, select, attend to what was selected and to the last entries, merge."""
    probabilities = OPS.score_codes(q.transpose(0, 1), codebooks, codes, SCALE)
    selected = OPS.select_intervals(probabilities, members, BUDGET, 1.5)
    attended = []
    for entries in (selected, members[-4:].long()):
        rows = torch.arange(2) * entries.size(0)
        attended.append(OPS.sparse_attention(q, pool, entries * ENTRY, rows, KV_HEADS, SCALE))
    return OPS.merge_attention(*attended[0], *attended[1])[0] * 2


def loop_arguments() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    codes = torch.randint(0, 8, (KV_HEADS, 4, ENTRIES - 4), generator=generator, dtype=torch.uint8)
    members = torch.arange(ENTRIES, dtype=torch.int32)
    return (
        random(1, HEADS, DIM),
        random(KV_HEADS, 4, 8, DIM // 4),
        torch.cat([codes, codes[..., :4]], -1),
        members,
        random(ENTRIES * ENTRY),
    )


@backends
@torch.no_grad()
def test_a_loop_of_operators_is_one_graph(backend: str) -> None:
    arguments = loop_arguments()
    expected = attend(*arguments)
    got = torch.compile(attend, fullgraph=True, backend=backend)(*arguments)
    torch.testing.assert_close(got, expected)
    arguments[0].neg_()  # the control: another query, another result
    assert not torch.allclose(attend(*arguments), expected)


# ---- the order of calls with effects


def give_back_and_take(handle: int, k: Tensor) -> tuple[Tensor, Tensor]:
    """The second append gets the first one's memory, if the release lies between them."""
    first = OPS.window_append(handle, k, k)
    OPS.window_release(handle, first)
    second = OPS.window_append(handle, 2 * k, k)
    return first, second


@backends
def test_store_calls_keep_their_order(backend: str, drives: list[str]) -> None:
    store, data = open_store(drives), Data.random(10)
    store.append(data.k, data.v)
    handle = store._handle
    compiled = torch.compile(
        lambda k: give_back_and_take(handle, k), fullgraph=True, backend=backend
    )
    for _ in range(3):
        first, second = compiled(data.k)
        assert set(first.tolist()) == set(second.tolist())
        store.release(second)
    other = OPS.window_append(handle, data.k, data.k)  # the control: what no release came before
    assert set(OPS.window_append(handle, data.k, data.k).tolist()).isdisjoint(other.tolist())


def test_a_token_passes_from_store_call_to_store_call(drives: list[str]) -> None:
    """Calls that share no tensor: only this keeps a compiler from moving them."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    store, data = open_store(drives), Data.random(10)
    handle, slots = store._handle, store.append(data.k, data.v)

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    def step(k: Tensor) -> Tensor:
        OPS.window_retain(handle, slots)
        own = OPS.window_append(handle, k, k)
        OPS.window_release(handle, slots)
        OPS.window_release(handle, own)
        return OPS.gather_entries(k.flatten(), slots[:1] * 0, 4) + 1

    step(data.k)
    (graph,) = graphs
    with_effects = torch.ops.higher_order.with_effects
    calls = [node for node in graph.graph.nodes if node.target is with_effects]
    names = ["window_retain", "window_append", "window_release", "window_release"]
    assert [call.args[1] for call in calls] == [getattr(OPS, name).default for name in names]
    for before, call in itertools.pairwise(calls):
        token = call.args[0]
        assert token.target is operator.getitem
        assert token.args == (before, 0)
    plain = [node for node in graph.graph.nodes if node.target is OPS.gather_entries.default]
    assert len(plain) == 1  # the control: what changes nothing needs no token


def test_every_call_that_changes_a_store_has_an_effect() -> None:
    reading = {"pool", "stats", "notes", "clusters", "drives"}
    schemas = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("swarm_kv::")
    }
    prefixes = ("device_", "store_", "window_", "segment_", "fetch_")
    of_stores = {name for name in schemas if name.startswith(prefixes)}
    assert {name for name in of_stores if name.split("_")[-1] not in reading} == set(EFFECTFUL)


# ---- patched models


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(call: Callable[..., Any], name: str, ids: Tensor) -> Tensor:
    """A prompt, then one token at a time."""
    output = call(ids[:, :PROMPT], use_cache=True)
    logits, cache = [output.logits], compat.cache_of(output)
    for end in range(PROMPT + 1, PROMPT + STEPS + 1):
        logits.append(call(ids[:, end - 1 : end], use_cache=True, **{name: cache}).logits)
    return torch.cat(logits, 1)


def two_layers(tiny_model: Any, kind: str) -> Any:
    """Half of a tiny model: every layer is compiled."""
    model = tiny_model(kind)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:2]
    return model


def in_place(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def forward_only(model: Any, backend: str) -> Any:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def wrapped(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize(
    ("how", "kind", "backend"),
    [
        (wrapped, "qwen3", "eager"),
        pytest.param(forward_only, "qwen3", "aot_eager", marks=pytest.mark.slow),
        pytest.param(in_place, "qwen3", "eager", marks=pytest.mark.slow),
        pytest.param(wrapped, "gemma3", "eager", marks=pytest.mark.slow),
        pytest.param(wrapped, "gpt_oss", "aot_eager", marks=pytest.mark.slow),
        pytest.param(wrapped, "llama", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_patched_model_equals_the_stock_one(
    how: Any, kind: str, backend: str, ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = two_layers(tiny_model, kind)
    name = compat.cache_arg(model)
    expected = logits_of(model, name, ids)
    with swarm_kv.patch(model, settings(drives, **COLD)) as swarm:
        got = logits_of(how(model, backend), name, ids)
        assert swarm.stats().steps == STEPS
        assert swarm.stats().bytes_per_step > 0
    # Inductor rounds what the model computes in float32, norms and rotations, in another way.
    assert (got - expected).abs().max() < (1e-4 if backend == "inductor" else 1e-9)


@pytest.mark.slow
def test_a_model_that_was_compiled_before(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    """Compiled code must not go on as if the model were not patched, nor as if it still were."""
    model = two_layers(tiny_model, "qwen3")
    name = compat.cache_arg(model)
    compiled = torch.compile(model, backend="eager")
    expected = logits_of(compiled, name, ids)
    with swarm_kv.patch(compiled, settings(drives, **COLD)) as swarm:
        assert swarm.model is model
        assert (logits_of(compiled, name, ids) - expected).abs().max() < 1e-9
        assert swarm.stats().bytes_per_step > 0
        written = swarm.stats().written_bytes
    assert "_prepare_cache_for_generation" not in vars(model)
    assert (logits_of(compiled, name, ids) - expected).abs().max() < 1e-9
    assert written > 0


@pytest.mark.slow
def test_a_compiled_model_generates(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = two_layers(tiny_model, "qwen3")
    call = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    expected = model.generate(ids[:, :PROMPT], **call)
    with swarm_kv.patch(model, settings(drives, **COLD)) as swarm:
        model.compile(backend="eager")
        assert torch.equal(model.generate(ids[:, :PROMPT], **call), expected)
        assert swarm.stats().bytes_per_step > 0
