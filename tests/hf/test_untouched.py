"""What is not patched, or not any more, is as if swarm_kv did not exist: bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import swarm_kv
from swarm_kv import compat
from tests.hf.helpers import settings
from tests.hf.table import MODELS
from tests.hf.test_refusals import state_of

IDS = torch.randint(3, 128, (2, 64), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs(model: Any) -> list[Tensor]:
    """Of the calls in which a trace of a patch would show: whole, in steps, generated."""
    name, cache, steps = compat.cache_arg(model), None, []
    for begin, end in ((0, 60), (60, 61), (61, 64)):
        kept = {} if cache is None else {name: cache}
        output = model(IDS[:, begin:end], use_cache=True, **kept)
        cache = compat.cache_of(output)
        steps.append(output.logits)
    generated = model.generate(IDS, do_sample=False, max_new_tokens=4, pad_token_id=0)
    return [model(IDS).logits, *steps, generated]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_was_patched_is_bit_equal_to_one_never_touched(
    kind: str, drives: list[str], tiny_model: Any
) -> None:
    stock, model = (tiny_model(kind, torch.float32, layers=2) for _ in range(2))
    state, config = state_of(model), model.config.to_dict()
    with swarm_kv.patch(model, settings(drives)):
        outputs(model)
    assert state_of(model) == state
    assert model.config.to_dict() == config
    weights = zip(model.state_dict().values(), stock.state_dict().values(), strict=True)
    assert all(torch.equal(mine, its) for mine, its in weights)
    assert type(model)._prepare_cache_for_generation is type(stock)._prepare_cache_for_generation
    for one, other in zip(outputs(model), outputs(stock), strict=True):
        assert torch.equal(one, other)


IMPORT = """
    import json, logging, random, signal, sys, warnings
    import torch
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, initializer_range=0.2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(3, 63)[None]

    MAPPINGS = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping

    def outputs():
        with torch.no_grad():
            logits = model(ids).logits
        return logits, model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)

    def defaults():
        return {
            "dtype": str(torch.get_default_dtype()),
            "device": str(torch.get_default_device()),
            "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "gradients": torch.is_grad_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "random": torch.random.get_rng_state().tolist(),
            "python's random": hash(random.getstate()),
            "sdpa": (
                torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
            ),
            "signal": str(signal.getsignal(signal.SIGINT)),
            "logging": (len(logging.root.handlers), logging.root.level),
            "verbosity": transformers.utils.logging.get_verbosity(),
            "hook": sys.excepthook is sys.__excepthook__,
            "interfaces": [
                {name: id(function) for name, function in mapping.items() if name != "swarm_kv"}
                for mapping in MAPPINGS
            ],
            "attention of the model": model.config._attn_implementation,
            "generate": id(type(model)._prepare_cache_for_generation),
            "cache": id(transformers.DynamicCache.update),
        }

    before, expected = defaults(), outputs()
    if sys.argv[1] == "import":
        import swarm_kv
    elif sys.argv[1] == "change":  # the control
        torch.set_float32_matmul_precision("high")
        model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    after, got = defaults(), outputs()
    print(json.dumps({
        "equal": all(torch.equal(*pair) for pair in zip(expected, got)),
        "changed": [name for name in before if before[name] != after[name]],
        "known": ["swarm_kv" in mapping for mapping in MAPPINGS],
    }))
"""


def run(what: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMPORT), what],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_import_changes_nothing_but_its_own_name() -> None:
    found = run("import")
    assert found["equal"]
    assert found["changed"] == []
    assert found["known"] == [True, True]


def test_a_change_would_show() -> None:
    found = run("change")
    assert not found["equal"]
    assert found["changed"] == ["precision"]
    assert found["known"] == [False, False]
