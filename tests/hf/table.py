"""Models and ways to call them: each pair is equal to the stock model, or refused with a reason.

`python -m tests.hf.table` runs all of them and writes the tables of `docs/supported.md`, which
`tests/hf/test_table.py` compares with what it finds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import swarm_kv
from swarm_kv import compat
from tests.conftest import make_tiny_model
from tests.hf.helpers import left_padded, settings, teacher_forced

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "supported.md"
PROMPT, STEPS, NEW = 72, 6, 6
IDS = torch.randint(3, 128, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
PADDED, MASK = left_padded(IDS, (13, 0))
ONE = IDS[:1]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""transformers makes losses and the logits that `generate` returns float32 in every model."""

MODELS = {
    "llama": "Llama 3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_sliding": "Qwen3, sliding",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "gpt_oss": "GPT-OSS",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2",
    "smollm3": "SmolLM3",
    "granite": "Granite",
}
SLIDING = ("qwen3_sliding", "gpt_oss", "gemma2", "gemma3", "ministral")
"""Those with layers that attend to a window, which transformers keeps in memory."""


@dataclasses.dataclass
class Run:
    """A model to be called, and how a cache for it is made."""

    model: Any
    new_cache: Callable[[], Any]
    assistant: Any

    def logits(self, ids: Tensor, cache: Any) -> Tensor:
        """Of a call with a cache that is kept."""
        logits: Tensor = self.model(ids, **{compat.cache_arg(self.model): cache}).logits
        return logits

    def generate(self, ids: Tensor | None = None, cache: Any = None, **how: Any) -> Any:
        """Greedy, unless `how` says otherwise, and of a fixed length."""
        common = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": -1}
        kept = {} if cache is None else {compat.cache_arg(self.model): cache}
        return self.model.generate(ids, **{**common, **kept, **how})


CALLS: dict[str, Callable[[Run], Any]] = {}
READING_NOTHING = {
    "`model(ids, labels=ids)`",
    "`model(ids, output_hidden_states=True)`",
    "`generate`, `use_cache=False`",
}
"""Calls in which no decoding step follows a prefill."""


def call(name: str) -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:
    """Makes a function a row of the table."""

    def add(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
        CALLS[name] = function
        return function

    return add


@call("`model(ids, labels=ids)`")
def evaluation(run: Run) -> Any:
    output = run.model(IDS, labels=IDS)
    return output.loss, output.logits


@call("`model(ids, output_hidden_states=True)`")
def hidden_states(run: Run) -> Any:
    return run.model(ONE, output_hidden_states=True).hidden_states


@call("`model(...)`, token by token")
def loop(run: Run) -> Any:
    return teacher_forced(run.model, ONE, torch.ones_like(ONE), prompt=PROMPT)


@call("the same, left-padded batch")
def padded_loop(run: Run) -> Any:
    return teacher_forced(run.model, PADDED, MASK, prompt=PROMPT)


@call("the same, prompt in pieces")
def loop_in_pieces(run: Run) -> Any:
    return teacher_forced(run.model, PADDED, MASK, chunk=40, prompt=PROMPT)


@call("`model(...)`, right-padded batch, and on")
def right_padded(run: Run) -> Any:
    mask = torch.ones(2, PROMPT + 1, dtype=torch.long)
    mask[0, 50:PROMPT] = 0
    before = mask[:, :PROMPT]
    prompt = IDS[:, :PROMPT].masked_fill(before == 0, 0)
    output = run.model(prompt, attention_mask=before, use_cache=True)
    kept = {compat.cache_arg(run.model): compat.cache_of(output)}
    last = run.model(IDS[:, PROMPT : PROMPT + 1], attention_mask=mask, **kept)
    return output.logits[before.bool()], last.logits


@call("`generate`, greedy")
def greedy(run: Run) -> Any:
    return run.generate(ONE[:, :PROMPT])


@call("`generate`, left-padded batch")
def padded(run: Run) -> Any:
    ends = run.model.generation_config.eos_token_id
    return run.generate(
        PADDED[:, :PROMPT], attention_mask=MASK[:, :PROMPT], max_new_tokens=10, eos_token_id=ends
    )


@call("`generate`, sampled")
def sampled(run: Run) -> Any:
    torch.manual_seed(3)
    return run.generate(ONE[:, :PROMPT], do_sample=True)


@call("`generate`, beams")
def beams(run: Run) -> Any:
    return run.generate(ONE[:, :PROMPT], num_beams=3)


@call("`generate`, `num_return_sequences`")
def several(run: Run) -> Any:
    torch.manual_seed(4)
    return run.generate(ONE[:, :PROMPT], do_sample=True, num_return_sequences=3)


@call("`generate`, `assistant_model`")
def assisted(run: Run) -> Any:
    return run.generate(ONE[:, :PROMPT], assistant_model=run.assistant)


@call("`generate`, `prompt_lookup_num_tokens`")
def prompt_lookup(run: Run) -> Any:
    again = ONE[:, : PROMPT // 2].repeat(1, 2)
    return run.generate(again, prompt_lookup_num_tokens=4)


@call("`generate`, `prefill_chunk_size`")
def chunked_prefill(run: Run) -> Any:
    mask = MASK[:, :PROMPT]
    return run.generate(PADDED[:, :PROMPT], attention_mask=mask, prefill_chunk_size=40)


class Streamed(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")


@call("`generate`, `streamer`")
def streamed(run: Run) -> Any:
    streamer = Streamed()
    return run.generate(ONE[:, :PROMPT], streamer=streamer), streamer.tokens


class FarEnough(transformers.StoppingCriteria):
    """Ends a sequence by a sum over what was generated."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, PROMPT:].sum(1) > 200


@call("`generate`, `stopping_criteria`")
def stopped(run: Run) -> Any:
    criteria = transformers.StoppingCriteriaList([FarEnough()])
    return run.generate(IDS[:, :PROMPT], stopping_criteria=criteria)


@call("`generate`, `inputs_embeds`")
def embeddings(run: Run) -> Any:
    embedded = run.model.get_input_embeddings()(ONE[:, :PROMPT])
    return run.generate(inputs_embeds=embedded)


@call("`generate`, `use_cache=False`")
def uncached(run: Run) -> Any:
    return run.generate(ONE[:, :PROMPT], use_cache=False, max_new_tokens=3)


@call("`pipeline`, batch of prompts")
def pipeline(run: Run) -> Any:
    pipe = transformers.pipeline(
        "text-generation", model=run.model, tokenizer=tokenizer(), device="cpu"
    )
    prompts = [" ".join(f"w{word}" for word in row) for row in (IDS[0, 20:72], IDS[1, :72])]
    return pipe(prompts, batch_size=2, max_new_tokens=NEW, do_sample=False)


def tokenizer() -> Any:
    """A word for every token of the tiny models."""
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w3")
    plain = tokenizers.Tokenizer(words)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w0", eos_token="w2", padding_side="left"
    )


@call("a second turn, cache from the first one's output")
def second_turn(run: Run) -> Any:
    first = run.generate(ONE[:, :50], return_dict_in_generate=True, output_logits=True)
    longer = torch.cat([first.sequences, ONE[:, 50:PROMPT]], 1)
    return torch.stack(first.logits), run.generate(longer, compat.cache_of(first))


@call("many turns, one cache")
def many_turns(run: Run) -> Any:
    cache, said = run.new_cache(), ONE[:, :40]
    for turn in range(4):
        said = run.generate(said, cache, max_new_tokens=3)
        said = torch.cat([said, ONE[:, 40 + 8 * turn :][:, :8]], 1)
    return run.generate(said, cache, max_new_tokens=3)


@call("`copy.deepcopy(cache)`")
def fork(run: Run) -> Any:
    cache = run.new_cache()
    run.logits(ONE[:, :PROMPT], cache)
    other = copy.deepcopy(cache)
    turns = (ONE[:, PROMPT:], cache), (ONE[:, :STEPS], other)
    return [run.logits(ids[:, i : i + 1], kept) for i in range(4) for ids, kept in turns]


@call("`cache.crop`, and on")
def crop(run: Run) -> Any:
    """Back by more than the window holds, which is 16."""
    cache = run.new_cache()
    if any(cache.is_sliding):
        compat.keep_past(cache)
    run.logits(ONE[:, :PROMPT], cache)
    run.logits(ONE[:, PROMPT : PROMPT + 1], cache)
    cache.crop(-40)
    start = PROMPT + 1 - 40
    ends = [start + 9, *range(start + 10, start + 14)]
    pieces = itertools.pairwise([start, *ends])
    return [run.logits(ONE[:, begin:end], cache) for begin, end in pieces]


@call("`output_attentions=True`")
def weights(run: Run) -> Any:
    return run.model(IDS, output_attentions=True).attentions


@call('`cache_implementation="static"`')
def static(run: Run) -> Any:
    return run.generate(IDS[:, :PROMPT], cache_implementation="static")


REASONS = {
    "output_attentions": "attention weights are never built",
    "StaticCache": "a static cache has no place for drives, and is of no use beside them",
    "stateful models": "transformers refuses it: recurrent states cannot go back",
    "a recurrent state": "recurrent states cannot go back",
    "sliding window of": "sliding layers cannot go back before transformers 5.17",
}
"""What stands in a refusal, and how the table says it."""


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same; floating-point numbers, within `TOLERANCE`."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        return bool((one - other).abs().max() < TOLERANCE[one.dtype])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@dataclasses.dataclass
class Pair:
    """One model twice, of which the second is patched."""

    stock: Run
    patched: Run
    swarm: swarm_kv.Swarm


@contextlib.contextmanager
def pair(kind: str, paths: list[str]) -> Iterator[Pair]:
    """The models of one column."""
    assistant = make_tiny_model("qwen3", seed=5, layers=2)
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.assistant_confidence_threshold = 0.0
    stock, patched = (make_tiny_model(kind, layers=2) for _ in range(2))
    quick = {"initial_fill": "none", "layout": "clusters", "device_model": (1e-4, 1e-9)}
    config = settings(paths, **quick)
    with torch.no_grad(), all_in_float64(kind), swarm_kv.patch(patched, config) as swarm:
        yield Pair(
            Run(stock, lambda: DynamicCache(config=stock.config), assistant),
            Run(patched, swarm.new_cache, assistant),
            swarm,
        )


@contextlib.contextmanager
def all_in_float64(kind: str) -> Iterator[None]:
    """Let Gemma 2's eager attention, the only one with a soft cap, not round to float32."""
    functional = torch.nn.functional
    softmax = functional.softmax

    def exact(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(scores, dim, dtype=scores.dtype if dtype == torch.float32 else dtype)

    if kind == "gemma2":
        functional.softmax = exact
    try:
        yield
    finally:
        functional.softmax = softmax


def outcome(of: Pair, name: str) -> str:
    """Run one cell: "equal", "refused: reason", or what else came out.

    Raises:
        Exception: the patched model failed in a way that is not a known refusal.
    """
    function = CALLS[name]
    before = of.swarm.store.counters()["decode"]["wanted"]
    try:
        got = function(of.patched)
    except (RuntimeError, ValueError) as error:
        for words, reason in REASONS.items():
            if words in str(error):
                return f"refused: {reason}"
        raise
    if not equal(got, function(of.stock)):
        return "different"
    read = of.swarm.store.counters()["decode"]["wanted"] > before
    if read == (name in READING_NOTHING):
        return "equal, and the store read" if read else "equal, but the store was not read"
    return "equal"


Cells = dict[tuple[str, str], str]
"""Outcome of each kind of model and call."""

GOING_BACK = (
    "`generate`, `assistant_model`",
    "`generate`, `prompt_lookup_num_tokens`",
    "`cache.crop`, and on",
)
"""Calls that crop a cache."""


def for_every_version(cells: Cells) -> Cells:
    """The cells as the page has them: where versions differ, with a note."""
    here = "equal" if compat.crop_takes_removals() else f"refused: {REASONS['sliding window of']}"
    since = "equal since transformers 5.17, refused before: sliding layers could not go back"
    return {
        (kind, name): since if kind in SLIDING and name in GOING_BACK and found == here else found
        for (kind, name), found in cells.items()
    }


def markdown(cells: Cells) -> str:
    """The table of models and calls, and its notes."""
    notes: dict[str, int] = {}

    def cell(found: str) -> str:
        word, _, note = found.partition(" ")
        word = word.rstrip(":")
        return f"{word} [{notes.setdefault(note, len(notes) + 1)}]" if note else word

    rows = [["call", *MODELS.values()], ["---"] * (len(MODELS) + 1)]
    rows += [[name, *(cell(cells[kind, name]) for kind in MODELS)] for name in CALLS]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())])


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
REFUSED: dict[str, Callable[[], Any]] = {
    "DeepSeek-V3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "Gemma 3n": lambda: transformers.Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=8,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        sliding_window=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "T5": lambda: transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=64
    ),
    "BART": lambda: transformers.BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    ),
    "Mamba": lambda: transformers.MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4
    ),
    "Mistral before v0.3, all layers sliding": lambda: transformers.MistralConfig(
        **SMALL, sliding_window=8
    ),
    "Falcon-H1": lambda: transformers.FalconH1Config(
        **SMALL, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
    "Llama 4": lambda: transformers.Llama4TextConfig(
        **SMALL, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=16, head_dim=8
    ),
    "MiniMax-Text-01": lambda: transformers.MiniMaxConfig(
        **SMALL, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
    ),
    "DiffLlama": lambda: transformers.DiffLlamaConfig(**SMALL),
    "Doge": lambda: transformers.DogeConfig(**SMALL),
    "JetMoe": lambda: transformers.JetMoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=2,
    ),
    "BLOOM": lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4),
}
"""Models that `patch` refuses, by their name: makes the configuration."""


def refused_model(name: str) -> Any:
    """A random model that `patch` refuses."""
    config = REFUSED[name]()
    kind = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    return kind.from_config(config)


def reason_of(name: str, paths: list[str]) -> str:
    """What `patch` says of a model that it refuses."""
    try:
        swarm_kv.patch(refused_model(name), settings(paths)).unpatch()
    except swarm_kv.ArgumentError as error:
        return str(error).partition("cannot be patched: ")[2]
    raise AssertionError(f"{name} was not refused")


def refused_markdown(reasons: dict[str, str]) -> str:
    """The table of models that are refused."""
    rows = [["model", "what `patch` says"], ["---", "---"], *map(list, reasons.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def section(page: str, name: str) -> re.Match[str]:
    """A part of the page between two marks."""
    found = re.search(rf"(<!-- {name} -->\n\n)(.*?)(\n\n<!-- end of {name} -->)", page, re.DOTALL)
    assert found is not None, f"{PAGE} has no part `{name}`"
    return found


def main() -> None:
    """Run all cells, and write the tables of the page."""
    transformers.logging.set_verbosity_error()
    cells: Cells = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in MODELS:
            with pair(kind, [folder]) as of:
                cells.update({(kind, name): outcome(of, name) for name in CALLS})
            print(kind, flush=True)
        reasons = {name: reason_of(name, [folder]) for name in REFUSED}
    page = PAGE.read_text()
    for name, text in (
        ("models and calls", markdown(for_every_version(cells))),
        ("refused models", refused_markdown(reasons)),
    ):
        old = section(page, name)
        page = page[: old.start(2)] + text + page[old.end(2) :]
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
