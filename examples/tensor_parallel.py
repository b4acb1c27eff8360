"""Tensor parallel: each process has a part of the heads, and keeps their KV on drives of its own.

torchrun --nproc-per-node 2 examples/tensor_parallel.py /mnt/nvme0 /mnt/nvme1 /mnt/nvme2 /mnt/nvme3

A random model of 4 KV heads, which 1, 2 or 4 processes share: on the CPU by gloo, on GPUs by nccl.
Transformers splits it, and each process patches its part like any model.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

import swarm_kv

PROMPT, STEPS = 1024, 16


def save_model(folder: str) -> None:
    """The same model in every process."""
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    for weight in model.parameters():
        if weight.ndim == 2:  # wide enough that attention is not uniform
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)


def answer(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Generated ids, and the logits that chose them."""
    output = model.generate(
        ids.to(model.device),
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences.cpu(), torch.cat(output.logits).cpu()


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    given = sys.argv[1:]
    if given and len(given) < ranks:
        sys.exit(f"{ranks} processes need {ranks} drives, each at least one; {len(given)} given")
    own = given[rank::ranks] or [tempfile.mkdtemp() for _ in range(2)]

    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        whole = load(folder)
        # Older transformers take `tp_plan="auto"` instead.
        part = load(folder, distributed_config=DistributedConfig(tp_size=ranks))
    ids = torch.randint(1, 512, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    expected, expected_logits = answer(whole, ids)

    # At sparsity 1.0 everything is read, so that the answer is the one of full attention. Below it,
    # every process reads what its own heads attend to most.
    config = swarm_kv.SwarmConfig(own, sparsity=1.0, window=64, dram_bytes="16MiB")
    with swarm_kv.patch(part, config) as swarm:
        got, logits = answer(part, ids)
        stats = swarm.stats()
    difference = (logits - expected_logits).abs().max().item()
    print(
        f"process {rank + 1} of {ranks}: {stats.written_bytes / 2**20:.2f} MiB of KV written to "
        f"{len(own)} drives; logits within {difference:.0e} of one process",
        flush=True,
    )
    assert torch.equal(got, expected)
    assert difference < 1e-3
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
