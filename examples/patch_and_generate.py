"""Patch a model, generate, look at the figures.

python examples/patch_and_generate.py /mnt/nvme0 /mnt/nvme1
"""

from __future__ import annotations

import sys
import tempfile

import swarm_kv
from swarm_kv import models, texts


def main() -> None:
    drives = sys.argv[1:] or [tempfile.mkdtemp() for _ in range(2)]
    model, tokenizer = models.load("smollm2")
    inputs = texts.token_ids(tokenizer, 2048)
    with swarm_kv.patch(model, swarm_kv.SwarmConfig(drives, dram_bytes="64MiB")) as swarm:
        # Kept, so that a second turn goes on where the first ended (before transformers 5.24 the
        # argument is `past_key_values`).
        cache = swarm.new_cache()
        output = model.generate(inputs, cache=cache, max_new_tokens=32, do_sample=False)
        print(tokenizer.decode(output[0, inputs.shape[1] :]))
        stats = swarm.stats()
        print(
            f"{stats.stored_bytes >> 20} MiB on drives, {stats.dram_used_bytes >> 20} MiB in memory"
        )
        print(
            f"{stats.bytes_per_step / 2**20:.1f} MiB in {stats.requests_per_step:.0f} reads a step"
        )


if __name__ == "__main__":
    main()
