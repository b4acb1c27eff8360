"""A patched model on the device against the same one on the CPU, by public calls alone."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import swarm_kv
from benchmarks.gpu.timing import settle
from benchmarks.harness import Report
from swarm_kv import eval as evaluation
from swarm_kv import models, texts
from swarm_kv.demo import drive_paths

if TYPE_CHECKING:
    from benchmarks.gpu.check import Parameters

EXACT = 1e-5
"""Mean KL to stock attention at sparsity 1: the order of sums."""
SPARSE = 1e-3
"""Mean KL between devices: entries of nearly the same score may change places."""


@dataclasses.dataclass(frozen=True)
class Text:
    """What a model wrote.

    Attributes:
        tokens: int64 [steps].
        log_probs: [steps, vocabulary], float32 on the CPU.
        seconds: per token, prefill included.
    """

    tokens: Tensor
    log_probs: Tensor
    seconds: float

    def kl(self, other: Text) -> Tensor:
        """KL(self || other) of each token, up to the first after which the texts differ."""
        differing = (self.tokens != other.tokens).nonzero()
        common = int(differing[0]) + 1 if len(differing) else len(self.tokens)
        return evaluation.kl_divergence(self.log_probs[:common], other.log_probs[:common])


def random_model(seed: int) -> Any:
    """Four layers whose heads have a size that kernels know."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # the usual ones make attention uniform, which hides errors
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


def loaded(parameters: Parameters, report: Report) -> tuple[Any, Tensor]:
    """The model on the CPU, and a prompt."""
    if parameters.model != "random":
        try:
            model, tokenizer = models.load(parameters.model, dtype=torch.float32)
            report.note(f"{parameters.model} in float32, {parameters.prompt} tokens of context")
            return model, texts.token_ids(tokenizer, parameters.prompt)
        except models.ModelUnavailable as error:
            report.note(f"a random model instead of {parameters.model}: {error}")
    model = random_model(parameters.seed)
    generator = torch.Generator().manual_seed(parameters.seed)
    return model, torch.randint(3, 256, (1, parameters.prompt), generator=generator)


def written(model: Any, prompt: Tensor, device: str, tokens: int) -> Text:
    """Greedy."""
    ids = prompt.to(device)
    settle(device)
    began = time.perf_counter()
    output = model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    settle(device)
    seconds = (time.perf_counter() - began) / tokens
    logits = torch.cat(output.logits).float().cpu()
    return Text(output.sequences[0, prompt.shape[1] :].cpu(), logits.log_softmax(-1), seconds)


def run(parameters: Parameters, report: Report) -> None:
    model, prompt = loaded(parameters, report)
    tokens = parameters.tokens
    found: dict[str, Text] = {}
    with drive_paths(report.paths, 4) as paths:

        def patched(device: str, **settings: Any) -> Text:
            config = swarm_kv.SwarmConfig(paths=paths, dram_bytes="64MiB", **settings)
            with swarm_kv.patch(model, config):
                return written(model, prompt, device, tokens)

        found["stock, cpu"] = written(model, prompt, "cpu", tokens)
        found["sparse, cpu"] = patched("cpu")
        device = parameters.device
        model.to(device)
        found[f"stock, {device}"] = written(model, prompt, device, tokens)
        found[f"exact, {device}"] = patched(device, sparsity=1.0)
        found[f"sparse, {device}"] = patched(device)
    for name, text in found.items():
        report.measure(f"model: {name}: token", "s", text.seconds)
    for kind, base, goal in (
        ("stock", "stock", EXACT),
        ("exact", "stock", EXACT),
        ("sparse", "sparse", SPARSE),
    ):
        kl = found[f"{base}, cpu"].kl(found[f"{kind}, {device}"])
        report.measure(f"model: {kind} on {device}: tokens compared", "tokens", len(kl))
        report.at_most(f"model: {kind} on {device}, KL to {base} on cpu", float(kl.mean()), goal)
