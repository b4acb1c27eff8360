"""How close does sparse decoding stay to full attention, and how close do other methods?

    python examples/evaluation.py --context 4096 --steps 256 --passkeys 4 infllm pqcache quest

All methods read the same share of the context from the same kind of store. Perplexity and KL come
from the true next tokens of a text, pass keys from keys hidden in it. Everything is decoded one
token at a time: that is what reads sparsely.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import swarm_kv
from swarm_kv import baselines, models, texts
from swarm_kv import eval as evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=["quest"], help=", ".join(baselines.names()))
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, a directory or hub id")
    parser.add_argument("--text", help="text file; Python's manual if not given")
    parser.add_argument("--context", type=int, default=640, help="tokens")
    parser.add_argument("--steps", type=int, default=16, help="tokens that are predicted")
    parser.add_argument("--passkeys", type=int, default=1, help="keys that are hidden")
    parser.add_argument("--sparsity", type=float, default=0.10)
    parser.add_argument("--dram-bytes", default="48MiB")
    parser.add_argument("--drive", action="append", help="directory of a drive; repeat for more")
    options = parser.parse_args()

    model, tokenizer = models.load(options.model)
    ids = texts.token_ids(tokenizer, options.context + options.steps, options.text)

    def passkeys() -> str:
        found = evaluation.passkey(
            model, tokenizer, options.context, n=options.passkeys, source=options.text
        )
        return f"{found.found} of {found.total}"

    reference = evaluation.full_attention(model, ids, options.context, options.steps)
    targets = ids[0, options.context :]
    print("method          perplexity      KL  same token  pass keys")
    exact = evaluation.perplexity(reference, targets)
    print(f"{'full attention':14}  {exact:10.3f}  {0:6.4f}  {1:10.0%}  {passkeys():>9}")

    settings: dict[str, dict[str, Any]] = {"swarm_kv": {}}
    settings |= {name: baselines.settings(name) for name in options.methods}
    for name, changes in settings.items():
        config = swarm_kv.SwarmConfig(
            options.drive or [tempfile.mkdtemp() for _ in range(2)],
            sparsity=options.sparsity,
            dram_bytes=options.dram_bytes,
            **changes,
        )
        with swarm_kv.patch(model, config):
            close = evaluation.perplexity_kl(
                model, ids, options.context, options.steps, reference=reference
            )
            print(
                f"{name:14}  {close.ppl_sparse:10.3f}  {close.mean_kl:6.4f}  "
                f"{close.top1_agreement:10.0%}  {passkeys():>9}"
            )


if __name__ == "__main__":
    main()
