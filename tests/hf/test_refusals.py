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
import transformers

import swarm_kv
from tests.hf.test_equivalence import settings


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
            model(ids, cache=cache)
        with pytest.raises(swarm_kv.StateError, match="start a new cache"):
            model(ids, cache=cache)
    assert os.listdir(full_drive) == ["filler"]


def test_an_encoder_decoder_model(drives: list[str]) -> None:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32
    )
    model = transformers.T5ForConditionalGeneration(config)
    refused(model, settings(drives), swarm_kv.ArgumentError, "T5", "encoder-decoder")


def test_multi_head_latent_attention(drives: list[str]) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    refused(model, settings(drives), swarm_kv.ArgumentError, "DeepseekV3", "kv_lora_rank")


@pytest.mark.parametrize(
    "config",
    [
        transformers.MistralConfig(sliding_window=8, num_key_value_heads=2),
        transformers.MambaConfig(state_size=4),
    ],
    ids=["sliding", "linear"],
)
def test_no_full_attention_layer(config: Any, drives: list[str]) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    for name, value in {**small, "intermediate_size": 32}.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    refused(model, settings(drives), swarm_kv.ArgumentError, "no full-attention layer")


def test_a_model_without_the_attention_interface(drives: list[str]) -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    refused(model, settings(drives), swarm_kv.ArgumentError, "Bloom", "attention interface")


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


def test_a_static_cache(model: Any, drives: list[str]) -> None:
    ids = torch.arange(3, 103)[None]
    call = {"max_new_tokens": 4, "do_sample": False}
    with swarm_kv.patch(model, settings(drives)) as swarm:
        with pytest.raises(swarm_kv.ArgumentError, match=r"StaticCache.*cache_implementation"):
            model.generate(ids, **call, cache_implementation="static")
        assert swarm.stats().written_bytes == 0
        model.generate(ids, **call)  # and the model still works
    assert model.generate(ids, **call, cache_implementation="static").shape[1] > 100


def test_a_swarm_cache_in_a_model_that_is_not_patched(model: Any, drives: list[str]) -> None:
    cache = swarm_kv.SwarmCache(model.config, settings(drives))
    with pytest.raises(swarm_kv.StateError, match=r'"sdpa": call swarm_kv\.patch'):
        model(torch.arange(3, 103)[None], cache=cache)
    assert cache.get_seq_length() == 0
