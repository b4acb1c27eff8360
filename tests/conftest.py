"""Fixtures shared by all tests."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

from swarm_kv import models

# How long an example takes says something about the machine only.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
if not settings.default.derandomize:  # hypothesis has a profile of its own where CI is set
    settings.load_profile("any machine")

torch.set_num_threads(1)  # spinning threads of parallel runs slow each other down tenfold

TINY_KINDS = ("qwen3", "qwen3_sliding", "qwen3_moe", "llama", "gpt_oss", "gemma3", "qwen3_next")
"""Each way in which layers make and rotate their queries."""
FURTHER_KINDS = (
    *("qwen2", "gemma2", "mistral", "ministral"),
    *("phi3", "olmo2", "smollm3", "granite"),
)
WINDOWED = ["sliding_attention", "full_attention"]
EAGER_KINDS = ("gpt_oss", "gemma2")
"""Those of which transformers' sdpa would leave out something: sinks, a soft cap."""


def tiny_config(kind: str, layers: int = 4) -> transformers.PretrainedConfig:
    """Four layers, 8 query heads, 2 KV heads of 16, 128 words: any kind of layer, quickly.

    Where there are two kinds of layers, they take turns, so that `layers` is even.
    """
    common: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    windowed = {"sliding_window": 20, "layer_types": WINDOWED * (layers // 2)}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if kind == "qwen3":
        return transformers.Qwen3Config(**common)
    if kind == "qwen3_sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 20}
        return transformers.Qwen3Config(**common, **sliding, max_window_layers=layers // 2)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**common, **experts, decoder_sparse_step=1)
    if kind == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
        return transformers.LlamaConfig(**common, rope_parameters=rope)
    if kind == "gpt_oss":
        return transformers.GptOssConfig(
            **common, sliding_window=20, num_local_experts=4, num_experts_per_tok=2
        )
    if kind == "gemma3":
        return transformers.Gemma3TextConfig(**common, **windowed, query_pre_attn_scalar=16)
    if kind == "qwen3_next":
        return transformers.Qwen3NextConfig(
            **common,
            **experts,
            shared_expert_intermediate_size=32,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"] * (layers // 2),
        )
    if kind == "qwen2":
        return transformers.Qwen2Config(**common)
    if kind == "gemma2":  # the soft cap is low enough to change every score
        return transformers.Gemma2Config(
            **common, **windowed, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
        )
    if kind == "mistral":  # as its newer versions are; with a window, no layer attends to all
        return transformers.MistralConfig(**common, sliding_window=None)
    if kind == "ministral":
        return transformers.MinistralConfig(**common, **windowed)
    if kind == "phi3":
        return transformers.Phi3Config(**common)
    if kind == "olmo2":
        return transformers.Olmo2Config(**common)
    if kind == "smollm3":  # every second layer has no positions
        return transformers.SmolLM3Config(**common, no_rope_layer_interval=2)
    if kind == "granite":
        return transformers.GraniteConfig(
            **common, attention_multiplier=0.25, residual_multiplier=0.8, logits_scaling=2.0
        )
    raise ValueError(f"unknown kind `{kind}`: one of {TINY_KINDS + FURTHER_KINDS}")


def make_tiny_model(
    kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, layers: int = 4
) -> Any:
    """A random model of architecture `kind`, in evaluation mode.

    Weights have a standard deviation of 1.5/sqrt(fan-in). The usual 0.02 makes attention uniform,
    and under uniform attention a lost block of the cache does not show.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        tiny_config(kind, layers),
        dtype=dtype,
        attn_implementation="eager" if kind in EAGER_KINDS else "sdpa",
    ).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default has no float64 kernel
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 1)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model(kind, dtype=torch.float64, seed=0, layers=4)`: fresh, to be patched at will."""
    return make_tiny_model


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer. Shared: undo what a test does to it."""
    try:
        return models.load("smollm2")
    except models.ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def drives(tmp_path: pathlib.Path) -> list[str]:
    """Four directories, as four drives."""
    paths = [tmp_path / f"drive{number}" for number in range(4)]
    for path in paths:
        path.mkdir()
    return [str(path) for path in paths]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests left to be printed (`record_property("print", text)`), in any process."""
    for report in itertools.chain(*terminalreporter.stats.values()):
        if getattr(report, "when", None) == "call":
            for name, text in report.user_properties:
                if name == "print":
                    terminalreporter.write(f"\n{text}\n")
