"""What is attended does not depend on what was read ahead, nor does a ticket ever stay behind."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import swarm_kv
from swarm_kv import compat, predictors, selectors, texts
from swarm_kv.cache import full_attention_layers
from swarm_kv.layer import SwarmLayer
from swarm_kv.predictors import Hint, Projection
from swarm_kv.prefetch import (
    FIRST_PERIOD,
    LONGEST_PERIOD,
    SHARES,
    TRIAL,
    USUAL,
    Controller,
    Rope,
    source_of,
)
from swarm_kv.sequence import Sequence
from swarm_kv.step import Cost
from tests.conftest import TINY_KINDS
from tests.hf.helpers import left_padded, settings, teacher_forced

PROMPT, STEPS = 200, 12
SPARSE = {"sparsity": 0.3, "initial_fill": "none", "request_cost": 1.5}


def noise(hint: Hint) -> Tensor:
    """A predictor that knows nothing."""
    assert hint.previous is not None
    batch, heads, _, dim = hint.previous.shape
    return torch.randn(batch, heads, hint.hidden.shape[1], dim, dtype=hint.hidden.dtype)


def of_tomorrow(hint: Hint) -> Tensor:
    raise ZeroDivisionError("no such day")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the decoding steps selected, one sorted list per sequence, layer and step."""
    selections: list[Tensor] = []
    observe = Sequence.observe

    def record(self: Sequence, query: Tensor, wanted: Tensor) -> None:
        selections.append(wanted.sort().values)
        observe(self, query, wanted)

    monkeypatch.setattr(Sequence, "observe", record)
    return selections


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_projection_of_a_layers_own_input_is_its_query(
    kind: str, ids: Tensor, tiny_model: Any
) -> None:
    """Norms, gates, and the rotation of each kind of layer; layer 1's is not layer 3's."""
    model = tiny_model(kind)
    decoder = model.get_decoder()
    inputs: dict[int, tuple[Tensor, dict[str, Any]]] = {}
    queries: dict[int, Tensor] = {}

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        queries[module.layer_idx] = query
        return query.transpose(1, 2).contiguous(), None

    for number, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, number=number: inputs.update({number: (args[0], kwargs)}),
            with_kwargs=True,
        )
    with torch.no_grad(), compat.registered("recorder", attention, lambda **_: None):
        model.set_attn_implementation("recorder")
        model(ids, use_cache=False)
        # Where only some layers count, the rotation comes from the arguments of the one before.
        for number, query in queries.items():
            project, hidden = Projection(decoder.layers[number]), inputs[number][0]
            rope = Rope(decoder, number)(hidden, inputs[source_of(number)][1])
            assert torch.equal(project(hidden, rope), query)
            other = Projection(decoder.layers[max(set(queries) - {number})])
            assert not torch.equal(other(hidden, rope), query)


@pytest.mark.parametrize(
    ("kind", "padded"),
    [*((kind, False) for kind in TINY_KINDS), ("qwen3", True), ("gemma3", True)],
)
def test_logits_and_selections_are_the_same_with_and_without(
    kind: str, padded: bool, ids: Tensor, drives: list[str], tiny_model: Any, attended: list[Tensor]
) -> None:
    model, mask = tiny_model(kind), torch.ones_like(ids)
    if padded:
        ids, mask = left_padded(ids)

    def run(**choice: Any) -> tuple[Tensor, list[Tensor], Any]:
        attended.clear()
        with swarm_kv.patch(model, settings(drives, **SPARSE, **choice)) as swarm:
            logits = teacher_forced(model, ids, mask)
            return logits, list(attended), swarm.stats().prefetch

    expected, selected, stats = run(prefetch="off")
    assert stats.prefetches == 0
    for mode, predictor in (
        ("post_attention", "projection"),
        ("decoder_input", "previous"),
        ("post_attention", noise),
        ("auto", "projection"),
    ):
        logits, chosen, stats = run(prefetch=mode, predictor=predictor)
        assert (logits - expected).abs().max() < 1e-9
        assert same(chosen, selected)
        assert stats.prefetches > 0
        if mode != "auto":
            assert stats.prefetches == STEPS * len(full_attention_layers(model.config))


@pytest.mark.slow
def test_a_real_model_is_predicted_well_and_says_the_same(
    smollm2: tuple[Any, Any], drives: list[str]
) -> None:
    model, tokenizer = smollm2
    ids = texts.token_ids(tokenizer, 1024)
    generated, stats = {}, {}
    for mode in ("off", "post_attention", "decoder_input"):
        config = swarm_kv.SwarmConfig(
            drives, dram_bytes="64MiB", initial_fill="none", prefetch=mode
        )
        with swarm_kv.patch(model, config) as swarm:
            generated[mode] = model.generate(ids, max_new_tokens=20, do_sample=False)
            stats[mode] = swarm.stats().prefetch
    assert torch.equal(generated["post_attention"], generated["off"])
    assert torch.equal(generated["decoder_input"], generated["off"])
    assert stats["post_attention"].accuracy > 0.8
    assert stats["post_attention"].accuracy > stats["decoder_input"].accuracy
    assert stats["post_attention"].used_entries > stats["post_attention"].late_entries


def test_a_changed_selection_shows(
    ids: Tensor, drives: list[str], tiny_model: Any, attended: list[Tensor]
) -> None:
    """The negative control of the test above: attending what was predicted is something else."""
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)
    results = []

    def blind(query: Tensor, *rest: Any) -> Any:
        return selectors.interval(torch.ones_like(query), *rest)

    for selector in ("interval", blind):
        attended.clear()
        with swarm_kv.patch(model, settings(drives, **SPARSE, selector=selector)):
            results.append((teacher_forced(model, ids, mask), list(attended)))
    assert (results[0][0] - results[1][0]).abs().max() > 1e-3
    assert not same(results[0][1], results[1][1])


def test_what_a_noisy_predictor_misses_is_read_late(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)

    def run(predictor: Any) -> Any:
        # A budget that a guess seldom meets, and hardly any cache.
        config = settings(
            drives,
            **{**SPARSE, "sparsity": 0.1},
            prefetch="post_attention",
            predictor=predictor,
            dram_bytes="2400KiB",
            staging_bytes="1MiB",
        )
        with swarm_kv.patch(model, config) as swarm:
            teacher_forced(model, ids, mask)
            return swarm.stats().prefetch

    good, bad = run("projection"), run(noise)
    assert good.accuracy > bad.accuracy
    assert bad.late_entries > good.late_entries
    assert bad.wasted_entries > good.wasted_entries
    assert bad.late_requests > 0
    assert bad.late_bytes > 0
    assert good.used_entries > 0


@pytest.mark.parametrize("how", ["beams", "prompt lookup", "sampled batch"])
def test_generated_ids_are_the_same(
    how: str, ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    common = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": -1}
    arguments = {
        "beams": {"input_ids": ids[:2, :120], "num_beams": 3, "do_sample": False},
        "prompt lookup": {
            "input_ids": ids[:1, :100].repeat(1, 2),
            "prompt_lookup_num_tokens": 4,
            "do_sample": False,
        },
        "sampled batch": {"input_ids": ids[:1, :120], "num_return_sequences": 3, "do_sample": True},
    }[how]
    texts = []
    for mode in ("off", "post_attention", "decoder_input"):
        torch.manual_seed(3)
        with swarm_kv.patch(model, settings(drives, **SPARSE, prefetch=mode)) as swarm:
            texts.append(model.generate(**arguments, **common))
            assert (swarm.stats().prefetch.prefetches > 0) == (mode != "off")
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@torch.no_grad()
def test_several_caches_of_one_model_take_turns(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("gemma3")
    name = compat.cache_arg(model)

    def run(mode: str) -> list[Tensor]:
        with swarm_kv.patch(model, settings(drives, **SPARSE, prefetch=mode)) as swarm:
            caches = [swarm.new_cache() for _ in range(2)]
            for number, cache in enumerate(caches):
                model(ids[number : number + 1, :150], **{name: cache})
            caches.append(copy.deepcopy(caches[0]))
            rows = [0, 1, 2]
            return [
                model(ids[row : row + 1, step : step + 1], **{name: cache}).logits
                for step in range(150, 156)
                for row, cache in zip(rows, caches, strict=True)
            ]

    for one, other in zip(run("off"), run("post_attention"), strict=True):
        assert (one - other).abs().max() < 1e-9


@torch.no_grad()
def test_compiled_layers(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)
    with swarm_kv.patch(model, settings(drives, **SPARSE, prefetch="off")):
        expected = teacher_forced(model, ids[:, : PROMPT + 3], mask[:, : PROMPT + 3])
    with swarm_kv.patch(model, settings(drives, **SPARSE, prefetch="post_attention")) as swarm:
        model.model.layers[1].compile(backend="eager")
        got = teacher_forced(model, ids[:, : PROMPT + 3], mask[:, : PROMPT + 3])
        assert swarm.stats().prefetch.prefetches > 0
    assert (got - expected).abs().max() < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_ends_early_leaves_no_ticket(
    error: type[BaseException], ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    """Ended by Ctrl-C between a hook and its layer: the store closes, and other caches go on."""
    model = tiny_model("qwen3")
    name = compat.cache_arg(model)

    def interrupt(*_: Any) -> None:
        raise error

    with swarm_kv.patch(model, settings(drives, **SPARSE, prefetch="post_attention")) as swarm:
        cache, other = swarm.new_cache(), swarm.new_cache()
        model(ids[:, :PROMPT], **{name: cache})
        model(ids[:, :PROMPT], **{name: other})
        hook = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(error):
            model(ids[:, PROMPT : PROMPT + 1], **{name: cache})
        hook.remove()
        left: Any = cache.layers[2]
        assert left._ahead is not None
        with pytest.raises(swarm_kv.StateError, match="outstanding"):
            swarm.store.close()
        model(ids[:, PROMPT : PROMPT + 1], **{name: other})
        with pytest.raises(swarm_kv.StateError):
            model(ids[:, PROMPT : PROMPT + 1], **{name: cache})
    assert swarm.store.closed


@torch.no_grad()
@pytest.mark.parametrize("how", ["reset", "drop", "crop", "select", "nothing"])
def test_what_becomes_of_a_ticket_that_no_step_came_for(
    how: str, ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    with swarm_kv.patch(model, settings(drives, **SPARSE)) as swarm:
        cache: Any = swarm.new_cache()
        model(ids[:, :PROMPT], **{compat.cache_arg(model): cache})
        layer: SwarmLayer = cache.layers[2]
        layer.read_ahead(torch.randn(3, 8, 1, 16, dtype=torch.float64), 1.0, 0.0)
        fork = copy.deepcopy(cache)
        assert fork.layers[2]._ahead is None
        if how == "reset":
            cache.reset()
        elif how == "drop":
            del cache, layer
            gc.collect()
        elif how == "crop":
            cache.crop(-2)
        elif how == "select":
            cache.batch_select_indices(torch.tensor([1]))
        if how == "nothing":
            with pytest.raises(swarm_kv.StateError, match="outstanding"):
                swarm.store.close()
            layer.drop_ahead()
        swarm.store.close()


def test_unpatch_takes_the_hooks_away(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("gemma3")

    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    before = hooks()
    with swarm_kv.patch(model, settings(drives)):
        assert hooks() > before + 1
    assert hooks() == before
    with swarm_kv.patch(model, settings(drives, prefetch="off")):
        assert hooks() == before + 1


def test_a_cache_without_patch_is_not_prefetched(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    model.set_attn_implementation("swarm_kv")
    cache = swarm_kv.SwarmCache(model.config, settings(drives), dtype=model.dtype)
    teacher_forced(model, ids, torch.ones_like(ids), cache=cache)
    assert cache.stats().prefetch.prefetches == 0
    assert cache.stats().bytes_per_step > 0


def test_a_model_whose_queries_are_made_in_another_way(
    ids: Tensor, drives: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=256)
    model = AutoModelForCausalLM.from_config(config).eval()
    with caplog.at_level(logging.WARNING), swarm_kv.patch(model, settings(drives)) as swarm:
        teacher_forced(model, ids, torch.ones_like(ids))
        assert swarm.stats().prefetch.prefetches == 0
    assert sum("nothing is prefetched" in record.message for record in caplog.records) == 1


def test_a_predictor_that_fails_is_reported_once_and_left_out(
    ids: Tensor, drives: list[str], tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, mask = tiny_model("gemma3"), torch.ones_like(ids)
    with swarm_kv.patch(model, settings(drives, **SPARSE, prefetch="off")):
        expected = teacher_forced(model, ids, mask)

    def of_another_shape(hint: Hint) -> Tensor:
        return torch.zeros(1, 2, 3)

    for predictor, message in (
        (of_tomorrow, "no such day"),
        (of_another_shape, "predicted query must be"),
    ):
        caplog.clear()
        config = settings(drives, **SPARSE, prefetch="post_attention", predictor=predictor)
        with caplog.at_level(logging.WARNING), swarm_kv.patch(model, config):
            assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9
        assert sum(message in record.message for record in caplog.records) == 2  # layers 1 and 3


def test_an_unknown_predictor_is_refused(drives: list[str], tiny_model: Any) -> None:
    with pytest.raises(swarm_kv.ArgumentError, match=r"unknown `predictor`.*'projection'"):
        swarm_kv.patch(tiny_model("qwen3"), settings(drives, predictor="oracle"))
    assert predictors.names() == ["previous", "projection"]


def steps(controller: Controller, count: int, cost: dict[float, float]) -> list[float]:
    """The shares that it chose over `count` steps, of which each costs what `cost` says."""
    shares = []
    for _ in range(count):
        shares.append(controller.next())
        controller.add(Cost(shares[-1], 0.0, 0.0, cost[shares[-1]]))
    return shares


@pytest.mark.parametrize("best", SHARES)
def test_the_controller_settles_on_what_costs_least(best: float) -> None:
    shares = steps(Controller(), 1000, {share: 1.0 if share == best else 2.0 for share in SHARES})
    others = 800 - shares[200:].count(best)
    assert 0 < others <= 800 * 1.5 * TRIAL / LONGEST_PERIOD  # it still tries


def test_the_controller_changes_its_mind() -> None:
    controller = Controller()
    steps(controller, 300, {0.0: 2.0, USUAL: 1.0, SHARES[-1]: 1.5})
    shares = steps(controller, 900, {0.0: 1.0, USUAL: 2.0, SHARES[-1]: 2.0})
    assert shares[4 * LONGEST_PERIOD :].count(0.0) > 330
    assert FIRST_PERIOD < LONGEST_PERIOD


def test_the_controller_leaves_out_what_brings_nothing() -> None:
    """Where all cost the same, the drives are spared what is read for nothing."""
    shares = steps(Controller(), 500, dict.fromkeys(SHARES, 1.0))
    assert shares[100:].count(0.0) > 360


@pytest.mark.parametrize(("predicting", "least", "most"), [(1.0, 1, 2), (0.5, 4, 9)])
def test_the_controller_rarely_tries_what_cannot_win(
    predicting: float, least: int, most: int
) -> None:
    """Where predicting costs what all reads do; the control could win, and is tried at first."""
    controller, shares = Controller(), []
    for _ in range(300):
        shares.append(share := controller.next())
        ahead = predicting if share else 0.0
        controller.add(Cost(share, ahead, 0.0, 1.0))
    tries = shares[2 * TRIAL :]
    started = sum(now > 0 and before == 0 for before, now in itertools.pairwise(tries))
    assert least <= started <= most


def test_the_controller_does_not_need_what_cannot_be_had() -> None:
    """Where staging memory has no room, the step that was to read ahead did not."""
    controller = Controller()
    for _ in range(200):
        controller.next()
        controller.add(Cost(0.0, 0.0, 0.0, 1.0))
    assert [controller.next() for _ in range(20)].count(0.0) >= 17
