"""Traces: what is recorded is what the model did, the model stays as it was, files are checked."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import stat
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AttentionInterface, AttentionMaskInterface

import swarm_kv
from swarm_kv import compat, trace
from swarm_kv.cache import full_attention_layers
from swarm_kv.errors import ArgumentError, StateError

TOKENS, CONTEXT, WINDOW, SINKS = 96, 60, 10, 3
SETTINGS: dict[str, Any] = {
    "context": CONTEXT,
    "window": WINDOW,
    "sinks": SINKS,
    "sparsity": 0.2,
    "stride": 5,
}


def some_ids(tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def recorded(tiny_model: Callable[..., Any]) -> trace.Trace:
    return trace.record(tiny_model("qwen3"), some_ids(), **SETTINGS)


@pytest.mark.parametrize(
    "kind", ["qwen3", "qwen3_sliding", "qwen3_moe", "llama", "gemma3", "qwen3_next"]
)
def test_recording_attends_exactly_and_records_full_attention_layers(
    tiny_model: Callable[..., Any], kind: str
) -> None:
    model = tiny_model(kind)
    with torch.no_grad():
        plain = model(some_ids(), use_cache=False).logits
        seen: list[int] = []
        with trace.capturing(model, lambda layer, *_: seen.append(layer)):
            captured = model(some_ids(), use_cache=False).logits
    torch.testing.assert_close(captured, plain, rtol=1e-9, atol=1e-9)
    assert seen == full_attention_layers(model.config)
    done: list[int] = []
    made = trace.record(model, some_ids(), on_layer=done.append, **SETTINGS)
    assert list(made.layers) == done == seen


def true_attention(model: Any) -> dict[int, torch.Tensor]:
    """[Hq, tests, entries] of each layer, by transformers' own eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(some_ids(), use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    tests = list(range(CONTEXT + WINDOW, TOKENS, 5))
    return {
        layer: weights[layer][0, :, tests, SINKS:CONTEXT]
        for layer in full_attention_layers(model.config)
    }


def test_replayed_attention_and_selections_are_the_models(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    made = trace.record(model, some_ids(), dtype=torch.float64, **SETTINGS)
    for number, want in true_attention(model).items():
        layer = made.layers[number]
        exact = layer.exact
        torch.testing.assert_close(exact.probs, want.float(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(exact.rest_mass, 1 - want.float().sum(-1), rtol=0, atol=1e-5)
        budget = round(0.2 * CONTEXT)
        assert layer.selections.shape == (want.shape[1], budget)
        for row, mass in zip(layer.selections, want.mean(0), strict=True):
            assert row.tolist() == sorted(mass.topk(budget).indices.tolist())
        # Control: with another scale neither holds.
        other = dataclasses.replace(layer, scale=1.2 * layer.scale).exact
        assert (other.probs - want).abs().max() > 1e-3


def test_parts_of_the_exact_output_add_up(recorded: trace.Trace) -> None:
    for layer in recorded.layers.values():
        exact = layer.exact
        values = layer.v.repeat_interleave(4, 0).float()
        entries = exact.probs @ values[:, SINKS:CONTEXT]
        torch.testing.assert_close(entries + exact.rest_out, exact.out, rtol=1e-4, atol=1e-5)
        assert (entries.norm(dim=-1) > 1e-3 * exact.out.norm(dim=-1)).any()


def test_queries_of_the_last_tokens_are_enough(recorded: trace.Trace) -> None:
    layer = recorded.layers[2]
    late = dataclasses.replace(layer, q=layer.q[:, -TOKENS + CONTEXT + WINDOW :])
    assert late.first == CONTEXT + WINDOW
    assert torch.equal(late.queries(), layer.queries())
    assert torch.equal(late.exact.mass, layer.exact.mass)
    early = dataclasses.replace(layer, q=layer.q[:, : TOKENS - CONTEXT - WINDOW])  # control
    assert not torch.allclose(early.exact.mass, layer.exact.mass, atol=1e-3)


def test_keys_are_those_of_the_cache(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("gemma3")
    made = trace.record(model, some_ids(), dtype=torch.float64, layers=[3], **SETTINGS)
    with torch.no_grad():
        cache = compat.cache_of(model(some_ids(), use_cache=True))
    assert list(made.layers) == [3]
    torch.testing.assert_close(made.layers[3].k, cache.layers[3].keys[0])
    torch.testing.assert_close(made.layers[3].v, cache.layers[3].values[0])
    assert not torch.allclose(made.layers[3].k, cache.layers[1].keys[0])


def test_everything_is_undone_even_after_an_error(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    before = compat.attention_name(model)
    registered: list[bool] = []

    def fail(layer: int) -> None:
        registered.append(trace.RECORDER in AttentionInterface._global_mapping)
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        trace.record(model, some_ids(), on_layer=fail, **SETTINGS)
    assert registered == [True]  # control: while it records, the name is there
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        assert trace.RECORDER not in mapping
    assert compat.attention_name(model) == before == "sdpa"
    trace.record(model, some_ids(), **SETTINGS)
    assert compat.attention_name(model) == before


def test_round_trip_is_exact_and_private(recorded: trace.Trace, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.safetensors"
    path.touch(mode=0o666)
    umask = os.umask(0)
    try:
        recorded.save(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = trace.Trace.load(path)
    assert dataclasses.replace(loaded, layers={}) == dataclasses.replace(recorded, layers={})
    for number, layer in recorded.layers.items():
        same = loaded.layers[number]
        assert (same.scale, same.settings) == (layer.scale, layer.settings)
        for name in ("q", "k", "v", "selections"):
            assert torch.equal(getattr(same, name), getattr(layer, name))
    assert layer.q.dtype == torch.float16
    assert {"torch", "transformers", "python"} == set(loaded.versions)


def rewrite(path: pathlib.Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, str]], Any], str]] = {
    "nothing": (lambda t, m: None, ""),
    "version": (lambda t, m: m.update(version="99"), "version 99"),
    "kind": (lambda t, m: m.update(kind="cake"), "'cake'"),
    "no metadata": (lambda t, m: m.clear(), "kind is None"),
    "no JSON": (lambda t, m: m.update(fields="{"), "is no swarm_kv trace file"),
    "no object": (lambda t, m: m.update(fields="[]"), "no JSON object"),
    "field lost": (lambda t, m: m.update(fields="{}"), "lacks the fields"),
    "scale": (
        lambda t, m: m.update(fields=m["fields"].replace('"1": 0.25', '"x": 0.25')),
        "map of layers to scales",
    ),
    "context": (
        lambda t, m: m.update(fields=m["fields"].replace('"context": 60', '"context": "60"')),
        "field `context`",
    ),
    "no test": (
        lambda t, m: m.update(fields=m["fields"].replace('"context": 60', '"context": 90')),
        "leave no test query",
    ),
    "tensor lost": (lambda t, m: t.pop("1.k"), r"lacks the tensors \['1.k'\]"),
    "tensor added": (lambda t, m: t.update(x=torch.zeros(1)), r"unknown ones \['x'\]"),
    "shape": (lambda t, m: t.update({"1.k": torch.zeros(2, 9, 16)}), "do not match"),
    "too few": (lambda t, m: t.update({"1.q": t["1.q"][:, -9:].clone()}), "9 queries for 96"),
    "too many": (lambda t, m: t.update({"1.q": torch.zeros(8, 99, 16)}), "99 queries for 96"),
    "heads": (lambda t, m: t.update({"1.q": torch.zeros(7, 96, 16)}), "7 query heads"),
    "dtype": (lambda t, m: t.update({"1.q": t["1.q"].int()}), "types torch.int32"),
    "selections": (lambda t, m: t["1.selections"].add_(1000), "selects entries outside"),
    "selected": (lambda t, m: t.update({"1.selections": torch.zeros(3)}), "has selections"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_changed_file_is_refused(
    recorded: trace.Trace, tmp_path: pathlib.Path, name: str
) -> None:
    change, says = BROKEN[name]
    path = tmp_path / "trace.safetensors"
    recorded.save(path)
    rewrite(path, change)
    if name == "nothing":  # control: rewriting alone does no harm
        assert trace.Trace.load(path).tokens == recorded.tokens
        return
    with pytest.raises(ArgumentError, match=says):
        trace.Trace.load(path)


def test_other_files_are_refused(recorded: trace.Trace, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.safetensors"
    recorded.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArgumentError, match="is no swarm_kv trace file"):
        trace.Trace.load(path)
    path.write_bytes(pickle.dumps({"q": 1}))
    with pytest.raises(ArgumentError, match="is no swarm_kv trace file"):
        trace.Trace.load(path)
    with pytest.raises(FileNotFoundError):
        trace.Trace.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        recorded.save(tmp_path / "none" / "trace")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 90}, "leave no test query"),
        ({"context": 3}, "must be longer than `sinks`"),
        ({"stride": 0}, "`stride` \\(0\\)"),
        ({"window": -1}, "`window` \\(-1\\)"),
        ({"sparsity": 0.0}, "`sparsity` \\(0.0\\)"),
        ({"layers": [9]}, r"`layers` \(\[9\]\) must name full-attention layers"),
        ({"layers": []}, r"`layers` \(\[\]\)"),
        ({"layers": [1, 1]}, "each once"),
    ],
)
def test_bad_settings_are_refused_before_the_model_runs(
    tiny_model: Callable[..., Any], change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ArgumentError, match=says):
        trace.record(tiny_model("qwen3"), some_ids(), **{**SETTINGS, **change})


def test_models_that_a_trace_cannot_hold_are_refused(
    tiny_model: Callable[..., Any], drives: list[str]
) -> None:
    with pytest.raises(ArgumentError, match="sink logits"):
        trace.record(tiny_model("gpt_oss"), some_ids(), **SETTINGS)
    with pytest.raises(ArgumentError, match=r"one sequence.*\[2, 96\]"):
        trace.record(tiny_model("qwen3"), some_ids().expand(2, -1), **SETTINGS)
    model = tiny_model("qwen3", torch.float32)
    config = swarm_kv.SwarmConfig(paths=drives, dram_bytes="64MiB", device_model=(1e-5, 1e-9))
    with swarm_kv.patch(model, config), pytest.raises(StateError, match="unpatch"):
        trace.record(model, some_ids(), **SETTINGS)


def test_values_that_16_bits_cannot_hold_are_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(1e6)
    with pytest.raises(ArgumentError, match=r"layer 2 has values that torch\.float16 cannot hold"):
        trace.record(model, some_ids(), **SETTINGS)
    trace.record(model, some_ids(), dtype=torch.float32, **SETTINGS)
