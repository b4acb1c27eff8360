"""Calls that do not fit: the error says what was found and what to do, and all goes on after it."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import StaticCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import swarm_kv
from swarm_kv import attention, compat
from swarm_kv.errors import ArgumentError, StateError
from tests.conftest import tiny_config
from tests.hf.helpers import settings

PROMPT = 120
IDS = torch.randint(3, 128, (2, PROMPT + 8), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def call(model: Any, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    logits: Tensor = model(ids, **{compat.cache_arg(model): cache}, **more).logits
    return logits


class Begun:
    """A cache that holds a prompt, of a patched model."""

    def __init__(self, swarm: swarm_kv.Swarm) -> None:
        self.model = swarm.model
        self.cache: Any = swarm.new_cache()
        call(self.model, IDS[:, :PROMPT], self.cache)
        self.expected = call(self.model, IDS[:, PROMPT:], copy.deepcopy(self.cache))

    def goes_on(self, within: float = 1e-9) -> bool:
        """Whether the next tokens come out as if nothing had happened."""
        got = call(self.model, IDS[:, PROMPT:], self.cache)
        return bool((got - self.expected).abs().max() < within)


@pytest.fixture(params=["qwen3", "gemma3", "qwen3_next"])
def begun(request: pytest.FixtureRequest, tiny_model: Any, drives: list[str]) -> Iterator[Begun]:
    """Of a model whose first layer is the cache's, a sliding one, a linear one."""
    with swarm_kv.patch(tiny_model(request.param, layers=2), settings(drives)) as swarm:
        yield Begun(swarm)


def test_the_control(begun: Begun) -> None:
    assert begun.goes_on()


# ---- another cache than swarm_kv's


def test_a_static_cache_asked_for(tiny_model: Any, drives: list[str]) -> None:
    model = tiny_model("qwen3", torch.float32)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        with pytest.raises(ArgumentError, match=r"StaticCache.*leave `cache_implementation` unset"):
            model.generate(IDS, **GREEDY, cache_implementation="static")
        assert swarm.stats().written_bytes == 0
        model.generate(IDS, **GREEDY)
    model.generate(IDS, **GREEDY, cache_implementation="static")


def test_a_static_cache_given(begun: Begun) -> None:
    static = StaticCache(config=begun.model.config, max_cache_len=300)
    with pytest.raises(ArgumentError, match=r"StaticCache \(it offers \d+ keys, 128 exist\)"):
        call(begun.model, IDS, static)
    assert begun.goes_on()


# ---- another attention than swarm_kv's


def test_attention_changed_after_patch(begun: Begun) -> None:
    begun.model.set_attn_implementation("eager")
    words = r'runs with "eager": .*set_attn_implementation\("swarm_kv"\)'
    with pytest.raises(StateError, match=words):
        call(begun.model, IDS[:, PROMPT:], begun.cache)
    with pytest.raises(StateError, match=words):
        begun.model.generate(IDS, **GREEDY)
    begun.model.set_attn_implementation("swarm_kv")
    assert begun.goes_on()


def test_a_swarm_cache_in_a_model_that_is_not_patched(tiny_model: Any, drives: list[str]) -> None:
    model = tiny_model("qwen3", torch.float32)
    cache = swarm_kv.SwarmCache(model.config, settings(drives))
    with pytest.raises(StateError, match=r'"sdpa": call swarm_kv\.patch'):
        call(model, IDS, cache)
    assert cache.get_seq_length() == 0


# ---- the cache of another model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "made for a model with 3 layers, this one has 2",
        ),
        ({"num_key_value_heads": 4}, "made for a model with 4 KV heads, this one has 2"),
        ({"head_dim": 32}, "made for a model with 32 numbers per head, this one has 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_cache_of_another_model(
    change: dict[str, int], words: str, tiny_model: Any, drives: list[str]
) -> None:
    model = tiny_model("qwen3", layers=2)
    other = transformers.Qwen3Config.from_dict({**tiny_config("qwen3", 2).to_dict(), **change})
    with swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm_kv.SwarmCache(other, store=swarm.store)
        with pytest.raises(ArgumentError, match=rf"{words}.*new_cache"):
            call(model, IDS, cache)
        assert cache.get_seq_length() == 0
        assert Begun(swarm).goes_on()


def test_the_same_shape_is_fine(tiny_model: Any, drives: list[str]) -> None:
    """A copy of the model, or one that was trained further, takes a cache over."""
    with swarm_kv.patch(tiny_model("qwen3"), settings(drives)) as swarm:
        begun = Begun(swarm)
        begun.model = tiny_model("qwen3")
        begun.model.set_attn_implementation("swarm_kv")
        assert begun.goes_on()


def test_models_that_are_not_patched(tiny_model: Any, drives: list[str]) -> None:
    """No hook looks at the call: the layers do."""
    model, wide = tiny_model("qwen3", layers=2), tiny_model("qwen3", layers=4)
    for each in (model, wide):
        each.set_attn_implementation("swarm_kv")
    cache = swarm_kv.SwarmCache(model.config, settings(drives))
    with pytest.raises(ArgumentError, match=r"a model with 2 layers, the model has a layer 2"):
        call(wide, IDS, cache)
    cache.reset()
    whole = model(IDS, use_cache=False).logits
    call(model, IDS[:, :PROMPT], cache)
    with pytest.raises(ArgumentError, match=r"dtype torch\.float64 before, torch\.float32 now"):
        call(model.float(), IDS[:, PROMPT:], cache)
    got = call(model.double(), IDS[:, PROMPT:], cache)
    assert (got - whole[:, PROMPT:]).abs().max() < 1e-3  # the weights have been in float32


# ---- something that changes in the middle


def test_a_model_that_was_cast(begun: Begun) -> None:
    begun.model.float()
    with pytest.raises(ArgumentError, match=r"in torch\.float64, which is in torch\.float32 now"):
        call(begun.model, IDS[:, PROMPT:], begun.cache)
    begun.model.double()
    assert begun.goes_on(within=1e-3)  # the weights have been in float32


@pytest.mark.parametrize("how", ["input_ids", "position", "inputs_embeds"])
def test_another_batch(how: str, begun: Begun) -> None:
    ids, name = IDS[:1, PROMPT:], compat.cache_arg(begun.model)
    embedded = begun.model.get_input_embeddings()(ids)
    args = (ids,) if how == "position" else ()
    kwargs = {} if args else {how: {"input_ids": ids, "inputs_embeds": embedded}[how]}
    with pytest.raises(ArgumentError, match=r"from 2 to 1 sequences: select rows"):
        begun.model(*args, **kwargs, **{name: begun.cache})
    assert begun.goes_on()


def test_weights_of_attention(begun: Begun) -> None:
    with pytest.raises(ArgumentError, match="`output_attentions` is not supported"):
        call(begun.model, IDS[:, PROMPT:], begun.cache, output_attentions=True)
    with pytest.raises(ArgumentError, match="`output_attentions` is not supported"):
        begun.model.generate(IDS, **GREEDY, return_dict_in_generate=True, output_attentions=True)
    assert begun.goes_on()


# ---- going back


def test_more_is_cropped_than_there_is(begun: Begun) -> None:
    words = rf"crop\(-{PROMPT + 1}\) would remove {PROMPT + 1} tokens, but the cache has {PROMPT}"
    with pytest.raises(ArgumentError, match=words):
        begun.cache.crop(-PROMPT - 1)
    assert begun.goes_on()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gemma3", "layer 0 keeps the last 19 tokens of its sliding window of 20 only"),
        ("qwen3_sliding", "layer 1 keeps the last 19 tokens"),
        ("qwen3_next", "layer 0 keeps a recurrent state, which cannot go back"),
    ],
)
def test_a_layer_that_cannot_go_back(
    kind: str, words: str, tiny_model: Any, drives: list[str]
) -> None:
    """The layers before it must not have gone back then; a copy is the way out."""
    with swarm_kv.patch(tiny_model(kind, layers=2), settings(drives)) as swarm:
        begun = Begun(swarm)
        if kind == "qwen3_next":
            compat.keep_past(begun.cache)  # of no use: it would keep convolutions alone
        with pytest.raises(ArgumentError, match=rf"3 tokens cannot be cropped: {words}.*deepcopy"):
            begun.cache.crop(-3)
        begun.cache.crop(0 if compat.crop_takes_removals() else PROMPT)
        assert begun.goes_on()


def test_a_crop_in_every_convention(tiny_model: Any, drives: list[str]) -> None:
    with swarm_kv.patch(tiny_model("qwen3"), settings(drives)) as swarm:
        begun = Begun(swarm)
        begun.cache.crop(PROMPT + 5)
        begun.cache.crop(PROMPT)
        assert begun.goes_on()
        begun.cache.crop(PROMPT)
        assert begun.goes_on()
        begun.cache.crop(-8)
        assert begun.goes_on()
        begun.cache.crop(-PROMPT - 8)
        assert begun.cache.get_seq_length() == 0


# ---- what a model wants of its attention


def mask(kind: str, make: Any = create_causal_mask, **laid_over: Any) -> Any:
    config = tiny_config(kind)
    config._attn_implementation = "swarm_kv"
    name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(make).parameters)
    embedded = torch.zeros(2, 12, 64)
    return make(
        **{"config": config, "inputs_embeds": embedded, "attention_mask": None, name: None},
        **laid_over,
    )


def test_plain_masks() -> None:
    assert mask("qwen3") is None
    assert mask("gemma3", create_sliding_window_causal_mask) is None


@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize(
    "laid_over",
    [
        {"or_mask_function": lambda b, h, q, k: q < 4},
        {"block_sequence_ids": torch.tensor([[-1, 0, 0] + [-1] * 9] * 2)},
        {"position_ids": torch.tensor([[*range(6), *range(6)]] * 2)},
    ],
    ids=["image tokens", "blocks", "packed sequences"],
)
def test_a_mask_with_something_laid_over_it(make: Any, laid_over: dict[str, Any]) -> None:
    """Blocks and packed sequences were taken for plain text, without a word."""
    if not laid_over.keys() <= inspect.signature(make).parameters.keys():
        pytest.skip("this version of transformers does not have it")
    with pytest.raises(ArgumentError, match="a mask of its own"):
        mask("gemma3", make, **laid_over)


def test_a_term_that_is_not_known(tiny_model: Any) -> None:
    module = tiny_model("qwen3", layers=2).model.layers[0].self_attn
    q, k = torch.zeros(1, 8, 4, 16), torch.zeros(1, 2, 4, 16)
    attention.swarm_attention(module, q, k, k, None)
    with pytest.raises(ArgumentError, match=r"gives its attention `position_bias`.*unpatch"):
        attention.swarm_attention(module, q, k, k, None, position_bias=torch.zeros(1))


def test_a_window_that_is_not_told(tiny_model: Any) -> None:
    """Qwen2-MoE's attention relies on its mask alone: all keys would have been attended to."""
    module = tiny_model("gemma3", layers=2).model.layers[0].self_attn
    q, k = torch.zeros(1, 8, 4, 16), torch.zeros(1, 2, 4, 16)
    attention.swarm_attention(module, q, k, k, None, sliding_window=20)
    with pytest.raises(ArgumentError, match=r"attends to a window.*unpatch"):
        attention.swarm_attention(module, q, k, k, None)


# ---- an old transformers


@pytest.mark.parametrize("found", ["4.57.6", "5.4.9", "5.4.0.dev0"])
def test_an_old_version_is_named(found: str) -> None:
    with pytest.raises(ImportError, match=rf"5\.5 or newer, this is {found}: pip install"):
        compat.check_version(found)


@pytest.mark.parametrize("found", ["5.5.0", "5.10.4", "5.24.0", "6.0.0.dev0"])
def test_a_newer_version_is_not(found: str) -> None:
    compat.check_version(found)


def test_an_old_version_is_found_at_import() -> None:
    script = """
        import transformers
        transformers.__version__ = "4.57.6"
        try:
            import swarm_kv
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "swarm_kv needs transformers 5.5 or newer, this is 4.57.6" in done.stdout
