"""What cannot work is refused before anything changes, with the value and the way out."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import swarm_kv
from swarm_kv import compat
from tests.hf import table
from tests.hf.helpers import settings


def state_of(model: Any) -> dict[str, Any]:
    """Everything that patching could change in a model, apart from its weights."""
    plain = {k: v for k, v in vars(model).items() if k not in ("_modules", "_parameters")}
    hooks = plain.pop("_forward_pre_hooks")
    config = model.config.get_text_config(decoder=True)
    return {**plain, "hooks": len(hooks), "attention": config._attn_implementation}


def refused(
    model: Any, config: Any, kind: type[swarm_kv.SwarmError], *words: str
) -> swarm_kv.SwarmError:
    """Check that `patch` raises `kind` with all `words` and changes nothing."""
    before = state_of(model)
    folders = [path for path in config.paths if os.path.isdir(path)]
    files = [sorted(os.listdir(folder)) for folder in folders]
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind) as caught:
        swarm_kv.patch(model, config)
    for word in words:
        assert word in str(caught.value)
    assert state_of(model) == before
    assert [sorted(os.listdir(folder)) for folder in folders] == files
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    return caught.value


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return tiny_model("qwen3", torch.float32)


@pytest.fixture
def full_drive(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 256 KiB without a free byte."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        (folder / "filler").write_bytes(bytes(256 << 10))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=20, check=True)


def test_a_good_config_is_accepted(model: Any, drives: list[str]) -> None:
    """The control: what the tests below change is what is refused."""
    swarm_kv.patch(model, settings(drives)).unpatch()


def test_a_path_that_does_not_exist(model: Any, drives: list[str]) -> None:
    missing = f"{drives[0]}/missing"
    refused(model, settings([drives[0], missing]), swarm_kv.StorageError, missing, "not exist")


def test_a_path_that_is_a_file(model: Any, drives: list[str]) -> None:
    file = pathlib.Path(drives[0], "file")
    file.write_bytes(b"keep me")
    refused(model, settings([str(file)]), swarm_kv.StorageError, str(file), "directory")
    assert file.read_bytes() == b"keep me"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_path_that_is_not_writable(model: Any, drives: list[str]) -> None:
    os.chmod(drives[0], 0o500)
    refused(model, settings(drives), swarm_kv.StorageError, drives[0])


def test_a_path_that_is_full(model: Any, drives: list[str], full_drive: pathlib.Path) -> None:
    config = settings([drives[0], str(full_drive)])
    refused(model, config, swarm_kv.StorageError, str(full_drive), "space")


def test_a_drive_that_fills_up(model: Any, drives: list[str], full_drive: pathlib.Path) -> None:
    """With a given device model nothing is written when the store opens, but when it is needed."""
    os.truncate(full_drive / "filler", 192 << 10)
    config = settings([drives[0], str(full_drive)], device_model=(1e-4, 1e-9))
    ids = torch.randint(3, 128, (1, 2000))
    with torch.no_grad(), swarm_kv.patch(model, config) as swarm:
        cache = swarm.new_cache()
        with pytest.raises(swarm_kv.StorageError, match=re.escape(str(full_drive))):
            model(ids, **{compat.cache_arg(model): cache})
        with pytest.raises(swarm_kv.StateError, match="start a new cache"):
            model(ids, **{compat.cache_arg(model): cache})
    assert os.listdir(full_drive) == ["filler"]


WORDS = {
    "DeepSeek-V3": ("DeepseekV3", "multi-head latent attention", "kv_lora_rank"),
    "Gemma 3n": ("Gemma3n", "share keys and values", "num_kv_shared_layers"),
    "T5": ("T5", "encoder-decoder"),
    "BART": ("Bart", "encoder-decoder"),
    "Mamba": ("Mamba", "no full-attention layer"),
    "Mistral before v0.3, all layers sliding": ("Mistral", "no full-attention layer"),
    "Falcon-H1": ("FalconH1", "LinearAttentionAndFullAttentionLayer"),
    "Llama 4": ("Llama4", "chunked_attention"),
    "MiniMax-Text-01": ("MiniMax", "cache of a kind of its own"),
    "DiffLlama": ("DiffLlama", "splits values"),
    "Doge": ("Doge", "hides tokens"),
    "JetMoe": ("JetMoe", "repeats keys and values"),
    "BLOOM": ("Bloom", "attention interface"),
}


@pytest.mark.parametrize("name", table.REFUSED)
def test_a_model_that_cannot_work(name: str, drives: list[str]) -> None:
    model = table.refused_model(name)
    refused(model, settings(drives), swarm_kv.ArgumentError, *WORDS[name])


def test_a_module_that_is_no_language_model(drives: list[str]) -> None:
    with pytest.raises(swarm_kv.ArgumentError, match="`Linear` cannot be patched"):
        swarm_kv.patch(torch.nn.Linear(2, 2), settings(drives))


@pytest.mark.parametrize("sparsity", [0, -0.1, 1.5, float("nan")])
def test_sparsity_outside_its_limits(sparsity: float, drives: list[str]) -> None:
    with pytest.raises(swarm_kv.ArgumentError) as caught:
        settings(drives, sparsity=sparsity)
    assert f"({sparsity})" in str(caught.value)
    assert "(0, 1]" in str(caught.value)


@pytest.mark.parametrize(
    ("window", "staging"), [(16, None), (16, "256KiB"), (400_000, None)], ids=str
)
def test_dram_bytes_below_the_minimum(
    model: Any, drives: list[str], window: int, staging: str | None
) -> None:
    """The minimum that the message names is accepted, though the default staging grows with it."""
    changes = {"window": window, "staging_bytes": staging}
    error = refused(
        model,
        settings(drives, dram_bytes=5000, **changes),
        swarm_kv.CapacityError,
        "`dram_bytes` (5000)",
        "raise it",
    )
    found = re.search(r"minimum of (\d+)", str(error))
    assert found is not None
    minimum = int(found[1])
    below = settings(drives, dram_bytes=minimum - 1, **changes)
    refused(model, below, swarm_kv.CapacityError, str(minimum - 1), str(minimum))
    swarm_kv.patch(model, settings(drives, dram_bytes=minimum, **changes)).unpatch()


@pytest.mark.parametrize(
    ("setting", "known"),
    [
        ("selector", "two_level"),
        ("clusterer", "hypergraph"),
        ("router", "swarm"),
        ("placement", "round_robin"),
        ("cache_policy", "lru"),
        ("engine", "io_uring"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(
    setting: str, known: str, model: Any, drives: list[str]
) -> None:
    config = settings(drives, **{setting: "no_such"})
    refused(model, config, swarm_kv.ArgumentError, setting, "no_such", known)


def test_a_second_patch(model: Any, drives: list[str], tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ids = torch.arange(3, 103)[None]
    with swarm_kv.patch(model, settings(drives)) as swarm:
        with pytest.raises(swarm_kv.StateError, match=r"swarm_kv\.unpatch"):
            swarm_kv.patch(model, settings([str(other)]))
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > 100
        assert swarm.stats().steps > 0
    with pytest.raises(swarm_kv.StateError, match="not patched"):
        swarm_kv.unpatch(model)
