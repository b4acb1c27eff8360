"""Profiles by probe texts: the probes' own activations, each seen alone, for one context only."""

from __future__ import annotations

import dataclasses
import pathlib
import stat
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import swarm_kv
from swarm_kv import ops, profile, trace
from swarm_kv.cache import full_attention_layers
from swarm_kv.errors import ArgumentError
from swarm_kv.profile import Profile, merge, profile_context

CONTEXT = 80
SETTINGS: dict[str, Any] = {"sparsity": 0.15, "window": 8, "sinks": 2}


def some_ids(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


IDS = some_ids(CONTEXT, 0)
PROBES = (some_ids(12, 1), some_ids(70, 2))


def signatures(model: Any, probe: torch.Tensor, between: torch.Tensor) -> dict[int, torch.Tensor]:
    """Of a probe that follows the context and `between`, by one pass without any cache."""
    ids = torch.cat([IDS, between, probe], dim=1)
    seen: dict[int, tuple[Any, ...]] = {}

    def take(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        seen[layer] = (q, k, scale)

    with torch.no_grad(), trace.capturing(model, take):
        model(ids, use_cache=False)
    return {
        layer: ops.activation_signatures(
            q[:, -probe.shape[1] :],
            k[:, :CONTEXT],
            torch.arange(CONTEXT, CONTEXT + probe.shape[1]),
            scale=scale,
            **SETTINGS,
        )
        for layer, (q, k, scale) in seen.items()
    }


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "gemma3", "qwen3_next"])
def test_each_probe_is_asked_right_behind_the_context(
    tiny_model: Callable[..., Any], kind: str
) -> None:
    model = tiny_model(kind)
    made = profile_context(model, None, IDS, PROBES, **SETTINGS)
    alone = [profile_context(model, None, IDS[0], [probe[0]], **SETTINGS) for probe in PROBES]
    assert list(made.bits) == full_attention_layers(model.config)
    assert (made.entries, made.queries) == (CONTEXT, 82)
    for number, probe in enumerate(PROBES):
        want = signatures(model, probe, IDS[:, :0])
        after_other = signatures(model, probe, PROBES[1 - number])
        for layer in made.bits:
            bits = alone[number].bits_for(layer)
            assert torch.equal(bits, want[layer])
            # Control: probes that saw each other would activate something else.
            assert not torch.equal(bits, after_other[layer])
    counts = [counts_of(one.bits_for(layer)) for one in (made, *alone)]
    assert torch.equal(counts[0], counts[1] + counts[2])
    assert (counts[0][:2] == 0).all()  # sinks
    assert counts[0].sum() == 82 * round(0.15 * CONTEXT)


def counts_of(bits: torch.Tensor) -> torch.Tensor:
    """Set bits of each row."""
    return torch.from_numpy(np.unpackbits(bits.numpy().view(np.uint8), axis=1).sum(1).astype(int))


def test_a_chunked_context_gives_the_same_profile(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gemma3")
    whole = profile_context(model, None, IDS, PROBES, **SETTINGS)
    monkeypatch.setattr(profile, "PREFILL_CHUNK", 23)
    chunked = profile_context(model, None, IDS, PROBES, **SETTINGS)
    assert all(torch.equal(bits, chunked.bits[layer]) for layer, bits in whole.bits.items())


def test_merging_adds_queries_and_names_what_differs(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    one, other = (profile_context(model, None, IDS, [probe], **SETTINGS) for probe in PROBES)
    both = merge(one, other)
    assert both.queries == one.queries + other.queries
    for layer in one.bits:
        joined = torch.cat([one.bits_for(layer), other.bits_for(layer)], dim=1)
        assert torch.equal(both.bits_for(layer), joined)
    together = profile_context(model, None, IDS, PROBES, **SETTINGS)
    for size in (4, 64):  # how queries lie in words makes no difference to clusters
        clusters = [
            ops.cluster(p.bits_for(1), max_size=size, min_activation=2) for p in (both, together)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*clusters, strict=True))
    changes: list[tuple[str, Any]] = [
        ("tokens", "0" * 64),
        ("entries", 81),
        ("sparsity", 0.2),
        ("window", 9),
        ("sinks", 3),
        ("model", "other"),
    ]
    for name, value in changes:
        with pytest.raises(ArgumentError, match=f"profiles differ in `{name}`"):
            merge(one, dataclasses.replace(other, **{name: value}))
    with pytest.raises(ArgumentError, match="profiles differ in `layers`"):
        merge(one, dataclasses.replace(other, bits={0: other.bits[0]}))


def test_matches_the_context_and_what_follows_it_but_no_other(
    tiny_model: Callable[..., Any],
) -> None:
    made = profile_context(tiny_model("qwen3"), None, IDS, PROBES, **SETTINGS)
    assert made.matches(IDS)
    assert made.matches(IDS[0].int())
    assert made.matches(torch.cat([IDS, PROBES[0]], dim=1))
    assert not made.matches(IDS[:, :-1])
    for place in (0, 40, CONTEXT - 1):
        other = IDS.clone()
        other[0, place] += 1
        assert not made.matches(other)


def test_round_trip_is_exact_and_private(
    tiny_model: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "profile.safetensors"
    made = profile_context(tiny_model("qwen3"), None, IDS, PROBES, **SETTINGS)
    made.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = Profile.load(path)
    assert dataclasses.replace(loaded, bits={}) == dataclasses.replace(made, bits={})
    assert all(torch.equal(bits, loaded.bits_for(layer)) for layer, bits in made.bits.items())
    with pytest.raises(ArgumentError, match=r"no layer 7, only \[0, 1, 2, 3\]"):
        loaded.bits_for(7)


@pytest.mark.parametrize(
    ("bits", "says"),
    [
        ({0: torch.zeros(CONTEXT, 2, dtype=torch.int64)}, None),
        ({}, "without layers"),
        ({0: torch.zeros(CONTEXT, 1, dtype=torch.int64)}, "82 queries take 2"),
        ({0: torch.zeros(CONTEXT - 1, 2, dtype=torch.int64)}, "a profile has int64"),
        ({0: torch.zeros(CONTEXT, 2)}, "a profile has int64"),
        ({"x": torch.zeros(CONTEXT, 2, dtype=torch.int64)}, "a profile has int64"),
    ],
)
def test_ill_shaped_files_are_refused(tmp_path: pathlib.Path, bits: Any, says: str | None) -> None:
    path = tmp_path / "profile.safetensors"
    Profile("m", "0" * 64, CONTEXT, 82, 0.1, 8, 2, bits).save(path)
    if says is None:  # control
        assert Profile.load(path).queries == 82
        return
    with pytest.raises(ArgumentError, match=says):
        Profile.load(path)


def test_a_file_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "profile.safetensors"
    save_file({"0": torch.zeros(2, 2)}, path, {"kind": trace.KIND, "version": "1"})
    with pytest.raises(ArgumentError, match="is no swarm_kv profile file"):
        Profile.load(path)


def test_bad_input_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ArgumentError, match="`probes` is empty"):
        profile_context(model, None, IDS, [])
    with pytest.raises(ArgumentError, match="a probe is empty"):
        profile_context(model, None, IDS, [IDS[:, :0]])
    with pytest.raises(ArgumentError, match="`context_ids` is empty"):
        profile_context(model, None, IDS[:, :0], PROBES)
    with pytest.raises(ArgumentError, match="sink logits"):
        profile_context(tiny_model("gpt_oss"), None, IDS, PROBES)


def test_a_cache_clusters_by_its_profile_too(tiny_model: Any, drives: list[str]) -> None:
    model = tiny_model("qwen3").float()
    ids = torch.randint(3, 128, (1, 400), generator=torch.Generator().manual_seed(3))
    settings = {
        "paths": drives,
        "dram_bytes": "16MiB",
        "window": 32,
        "flush": 8,
        "sinks": 2,
        "layout": "clusters",
        "min_activation": 2,
        "profile_queries": 32,
    }
    probes = [ids[:, 100:140], ids[:, 200:260]]
    made = profile.profile_context(model, None, ids, probes, sparsity=0.1, window=32, sinks=2)

    def members(chosen: profile.Profile | None, **changes: Any) -> torch.Tensor:
        with swarm_kv.patch(model, swarm_kv.SwarmConfig(**{**settings, **changes})) as swarm:
            cache = swarm.new_cache(profile=chosen)
            model(ids, past_key_values=cache)
            return cache.layers[0].rows[0].stored.index.members.clone()

    plain, probed = members(None), members(made)
    assert sorted(plain.tolist()) == sorted(probed.tolist()) == list(range(400 - 2 - 32))
    assert not torch.equal(plain, probed)
    assert torch.equal(members(made), probed)
    with pytest.raises(ArgumentError, match="`window` 32, this cache has 16: make"):
        members(made, window=16)
