"""What SwarmConfig accepts, how it refuses, and that it survives a file."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import pytest

from swarm_kv import SwarmConfig
from swarm_kv.config import FILE_NAME, parse_bytes
from swarm_kv.errors import ArgumentError

FULL: dict[str, Any] = {
    "paths": ["/mnt/a", "raw:/dev/nvme1n1"],
    "sparsity": 0.25,
    "dram_bytes": 3 << 30,
    "hbm_bytes": 1 << 30,
    "window": 100,
    "sinks": 0,
    "selector": "medoid",
    "request_cost": 2.5,
    "single_share": 0.0,
    "layout": "clusters",
    "clusterer": "swarm",
    "tau": 0.5,
    "max_overhead": 1.5,
    "distance": "conditional",
    "max_size": 32,
    "max_replicas": 2,
    "min_activation": 4,
    "cold": "packed",
    "max_index_bytes": 1 << 20,
    "heads": "union",
    "representative": "weighted_mean",
    "medoid_bits": 4,
    "estimate_unfetched": True,
    "kv_dtype": "bfloat16",
    "codec": "int8",
    "initial_fill": "product",
    "profile_queries": 64,
    "block": 8,
    "code_bytes": 4,
    "code_bits": 8,
    "flush": 16,
    "maintenance": "swarm",
    "tau_online": 0.25,
    "recluster": "off",
    "staging_bytes": 2 << 20,
    "disk_bytes": 1 << 40,
    "engine": "threads",
    "direct": False,
    "shared_ring": False,
    "timeout": 2.5,
    "placement": "weighted",
    "router": "static",
    "cache_policy": "lru",
    "verify": False,
    "device_model": (1e-4, 1e-9),
    "prefetch": "decoder_input",
    "predictor": "previous",
    "recall_every": 7,
    "recall_sample": 99,
}


def test_the_full_sample_names_every_field_and_no_default() -> None:
    """So that the round trips below would notice a field that is lost."""
    assert set(FULL) == {field.name for field in dataclasses.fields(SwarmConfig)}
    defaults = SwarmConfig(paths=["/mnt/b"])
    same = {name for name, value in FULL.items() if getattr(defaults, name) == value}
    assert not same


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (4096, 4096),
        (1.5e3, 1500),
        ("4096", 4096),
        ("7B", 7),
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        (" 500 MB ", 500_000_000),
        ("1.5KiB", 1536),
        ("2TB", 2_000_000_000_000),
        ("1TiB", 1 << 40),
        ("3kB", None),
    ],
)
def test_sizes(text: Any, size: int | None) -> None:
    if size is None:
        with pytest.raises(ArgumentError, match=r'`x` \("3kB"\) is not a size: .*KiB, KB, MiB'):
            parse_bytes(text, "x")
    else:
        assert parse_bytes(text, "x") == size
        assert SwarmConfig(paths="/a", dram_bytes=text).dram_bytes == size


@pytest.mark.parametrize("value", ["", "GiB", "-1GiB", "1e9", "8 GB free", "eight"])
def test_text_that_is_no_size(value: str) -> None:
    with pytest.raises(ArgumentError, match=rf'`dram_bytes` \("{value}"\) is not a size: give'):
        SwarmConfig(paths="/a", dram_bytes=value)


@pytest.mark.parametrize("value", [0, -1, 0.5, True, math.nan, math.inf, "0", None, [1]])
@pytest.mark.parametrize("name", ["dram_bytes", "staging_bytes", "disk_bytes"])
def test_sizes_that_are_not_positive(name: str, value: Any) -> None:
    if value is None and name != "dram_bytes":
        SwarmConfig(paths="/a", **{name: None})
        return
    with pytest.raises(ArgumentError) as caught:
        SwarmConfig(paths="/a", **{name: value})
    assert str(caught.value) == f"`{name}` ({value!r}) must be a positive number of bytes"


@pytest.mark.parametrize("value", [-1, True, math.nan, math.inf, None, [1]])
def test_hbm_bytes_may_be_none(value: Any) -> None:
    for zero in (0, "0", "0 GiB"):
        assert SwarmConfig(paths="/a", hbm_bytes=zero).hbm_bytes == 0
    assert SwarmConfig(paths="/a", hbm_bytes="2GiB").hbm_bytes == 2 << 30
    with pytest.raises(ArgumentError, match="must be 0 or a positive number of bytes"):
        SwarmConfig(paths="/a", hbm_bytes=value)


def test_paths() -> None:
    assert SwarmConfig(paths="/a").paths == ("/a",)
    assert SwarmConfig(paths=pathlib.Path("/a")).paths == ("/a",)
    assert SwarmConfig(paths=[pathlib.Path("/a"), "/b"]).paths == ("/a", "/b")
    with pytest.raises(ArgumentError, match="`paths` is empty: give one directory per drive"):
        SwarmConfig(paths=[])
    with pytest.raises(ArgumentError, match=r"`paths` names a drive twice: \['/a', '/a'\]"):
        SwarmConfig(paths=["/a", pathlib.Path("/a")])


@pytest.mark.parametrize(
    ("dram", "staging"), [("8GiB", 64 << 20), ("512MiB", 32 << 20), ("4MiB", 1 << 20)]
)
def test_staging_is_a_sixteenth_within_bounds(dram: str, staging: int) -> None:
    assert SwarmConfig(paths="/a", dram_bytes=dram).staging == staging
    assert SwarmConfig(paths="/a", dram_bytes=dram, staging_bytes="2MiB").staging == 2 << 20


@pytest.mark.parametrize(
    ("name", "good", "bad", "limit"),
    [
        ("sparsity", [1e-9, 0.5, 1, 1.0], [0, -0.1, 1.0001, math.nan], "must be in (0, 1]"),
        ("single_share", [0, 0.5, 1], [-0.1, 1.1, math.nan], "must be in [0, 1]"),
        ("tau", [0, 0.999, "auto"], [-0.1, 1, math.nan], 'must be "auto" or in [0, 1)'),
        ("max_overhead", [1, 2.5], [0.9, math.nan, math.inf], "must be at least 1, and finite"),
        ("max_index_bytes", [0, 1], [-1], "must be at least 0"),
        ("window", [1, 10**6], [0, -1], "must be at least 1"),
        ("sinks", [0, 4], [-1], "must be at least 0"),
        ("request_cost", [0, 1.5], [-0.1, math.nan, math.inf], "must be at least 0, and finite"),
        ("max_size", [1], [0], "must be at least 1"),
        ("max_replicas", [1], [0], "must be at least 1"),
        ("min_activation", [1], [0], "must be at least 1"),
        ("profile_queries", [1], [0], "must be at least 1"),
        ("block", [1], [0], "must be at least 1"),
        ("code_bytes", [None, 1], [0], "must be at least 1"),
        ("flush", [1], [0], "must be at least 1"),
        ("recall_every", [0, 1], [-1], "must be at least 0"),
        ("recall_sample", [0, 1], [-1], "must be at least 0"),
        ("timeout", [0.001, 30, 1e6], [0, -1, math.nan, math.inf], "must be at least 0.001"),
        ("timeout", [1e6], [1.1e6], "must be at most 1000000 seconds"),
    ],
)
def test_limits(name: str, good: list[Any], bad: list[Any], limit: str) -> None:
    for value in good:
        assert getattr(SwarmConfig(paths="/a", **{name: value}), name) == value
    for value in bad:
        with pytest.raises(ArgumentError) as caught:
            SwarmConfig(paths="/a", **{name: value})
        assert str(caught.value).startswith(f"`{name}` ({value}) ")
        assert limit in str(caught.value)


@pytest.mark.parametrize(
    ("head_dim", "of_4_bits", "of_8_bits"),
    [(8, 4, 8), (32, 16, 16), (64, 16, 16), (80, 10, 16), (128, 16, 16), (256, 32, 32)],
)
def test_bytes_of_a_code(head_dim: int, of_4_bits: int, of_8_bits: int) -> None:
    """One per 8 features and at least 16, in parts that divide the head."""
    assert SwarmConfig(paths="/a").code_size(head_dim) == of_4_bits
    assert SwarmConfig(paths="/a", code_bits=8).code_size(head_dim) == of_8_bits
    assert SwarmConfig(paths="/a", code_bytes=4).code_size(head_dim) == 4
    with pytest.raises(ArgumentError, match=r"`code_bytes` \(7\) are 14 parts of"):
        SwarmConfig(paths="/a", code_bytes=7).code_size(head_dim)


@pytest.mark.parametrize("value", [1.5, "4", None])
@pytest.mark.parametrize(
    "name", ["window", "sinks", "max_replicas", "block", "flush", "recall_every"]
)
def test_counts_are_whole(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        SwarmConfig(paths="/a", **{name: value})
    assert str(caught.value) == f"`{name}` ({value!r}) must be a whole number"


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("layout", ["auto", "clusters", "sequence"]),
        ("distance", ["jaccard", "conditional", "global"]),
        ("cold", ["auto", "coded", "packed", "single"]),
        ("heads", ["mean", "max", "union"]),
        ("representative", ["medoid", "weighted_mean"]),
        ("medoid_bits", [16, 4]),
        ("code_bits", [8, 4]),
        ("kv_dtype", ["auto", "float16", "bfloat16"]),
        ("codec", ["none", "int8", "kivi4"]),
        ("initial_fill", ["printed", "product", "none"]),
        ("prefetch", ["auto", "post_attention", "decoder_input", "off"]),
    ],
)
def test_choices(name: str, choices: list[Any]) -> None:
    for value in choices:
        assert getattr(SwarmConfig(paths="/a", **{name: value}), name) == value
    for value in ("best", 5, None):
        with pytest.raises(ArgumentError) as caught:
            SwarmConfig(paths="/a", **{name: value})
        assert str(caught.value) == (
            f"unknown `{name}` ({value!r}); choose one of {tuple(choices)}"
        )


def test_request_cost_goes_by_what_an_entry_takes_on_the_drives() -> None:
    assert SwarmConfig(paths="/a").entry_request_cost(4096) == 1.5
    assert SwarmConfig(paths="/a").entry_request_cost(1024) == 6
    assert SwarmConfig(paths="/a").selection_request_cost(1024) == 3
    given = SwarmConfig(paths="/a", request_cost=2)
    assert given.entry_request_cost(1024) == given.selection_request_cost(1024) == 2


@pytest.mark.parametrize("value", [(0, 1e-9), (1e-4, -1), (1e-4,), (1e-4, 1e-9, 1), (math.inf, 1)])
def test_device_model(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"`device_model` \(.*\) must be two positive numbers"):
        SwarmConfig(paths="/a", device_model=value)


def test_values_are_fixed() -> None:
    config = SwarmConfig(paths="/a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3  # type: ignore[misc]
    assert dataclasses.replace(config, window=3).window == 3
    with pytest.raises(ArgumentError, match="`window`"):
        dataclasses.replace(config, window=0)


def test_dict_round_trip() -> None:
    config = SwarmConfig(**FULL)
    values = config.to_dict()
    for name, value in FULL.items():
        assert values[name] == value, name
    assert SwarmConfig.from_dict(values) == config
    assert SwarmConfig.from_dict(json.loads(json.dumps(values))) == config
    assert SwarmConfig.from_dict({**values, "window": 3}) != config


def test_file_round_trip(tmp_path: pathlib.Path) -> None:
    for number, config in enumerate((SwarmConfig(**FULL), SwarmConfig(paths=["/a", "/b"]))):
        folder = tmp_path / f"new/{number}"
        config.save_pretrained(folder)
        assert [file.name for file in folder.iterdir()] == [FILE_NAME]
        assert SwarmConfig.from_pretrained(folder) == config
        assert SwarmConfig.from_pretrained(str(folder)) == config


def test_a_file_is_checked_as_arguments_are(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        SwarmConfig.from_pretrained(tmp_path)
    file = tmp_path / FILE_NAME
    file.write_text('{"paths": ["/a"], "sparsity": 2}')
    with pytest.raises(ArgumentError, match=r"`sparsity` \(2\) must be in"):
        SwarmConfig.from_pretrained(tmp_path)
    file.write_text('{"paths": ["/a"], "colour": 1, "angle": 2}')
    with pytest.raises(ArgumentError, match=r"unknown settings \['angle', 'colour'\]; known"):
        SwarmConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["selector", "clusterer", "predictor"])
def test_a_function_works_but_is_not_saved(name: str, tmp_path: pathlib.Path) -> None:
    config = SwarmConfig(paths="/a", **{name: lambda *args: args})
    with pytest.raises(ArgumentError, match=f"`{name}` that is a function cannot be saved"):
        config.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_clusters_are_cut_finer_where_they_only_cut_an_order():
    assert SwarmConfig(paths=["/a"]).cluster_size == 16
    assert SwarmConfig(paths=["/a"], clusterer="swarm").cluster_size == 64
    assert SwarmConfig(paths=["/a"], max_size=7).cluster_size == 7
