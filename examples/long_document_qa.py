"""Read one long document once, then answer several questions about it.

    python examples/long_document_qa.py report.txt "Who wrote it?" "What does it propose?"
    python examples/long_document_qa.py --batch --drive /mnt/nvme0 --drive /mnt/nvme1

Without a file it reads a part of Python's manual. The document is prefilled and clustered once.
Each question goes to a fork of that cache, which shares what is stored, or all go in one batch.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import swarm_kv
from swarm_kv import models, texts

QUESTIONS = ["What is this text about?", "Which statement does it describe first?"]


def framed(tokenizer: Any, document: torch.Tensor, questions: list[str]) -> list[torch.Tensor]:
    """The beginning that all prompts share, int64 [1, n], and what follows it for each question."""
    mark = "\N{REPLACEMENT CHARACTER}"
    chat = [{"role": "user", "content": mark}]
    before, after = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    ).split(mark)

    def encode(text: str) -> torch.Tensor:
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    asked = [encode(f"\n\n{question} Answer in one sentence.{after}") for question in questions]
    return [torch.cat([encode(before), document], dim=1), *asked]


def answers(
    model: Any, document: torch.Tensor, read: Any, asked: list[torch.Tensor], pad: int, tokens: int
) -> torch.Tensor:
    """New tokens [questions, n], by a fork of the cache `read` that holds `document`."""
    cache = copy.deepcopy(read)
    cache.batch_repeat_interleave(len(asked))  # forks again: nothing is copied
    # Shorter questions are padded on their left, between the document and them.
    rows = [row[0] for row in asked]
    ids = pad_sequence(rows, True, pad, padding_side="left")
    shown = pad_sequence([torch.ones_like(row) for row in rows], True, 0, padding_side="left")
    document = document.expand(len(asked), -1)
    ids = torch.cat([document, ids], dim=1)
    output = model.generate(
        ids,
        attention_mask=torch.cat([torch.ones_like(document), shown], dim=1),
        cache=cache,  # `past_key_values` before transformers 5.24
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=pad,
    )
    return output[:, ids.shape[1] :]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="text file; a part of Python's manual if not given")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--batch", action="store_true", help="answer all questions at once")
    parser.add_argument("--context", type=int, default=1536, help="tokens of the document")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer at most")
    parser.add_argument("--drive", action="append", help="directory of a drive; repeat for more")
    parser.add_argument("--dram-bytes", default="48MiB")
    parser.add_argument("--model", default="smollm2", help="smollm2, a directory or a hub id")
    options = parser.parse_args()

    drives = options.drive or [tempfile.mkdtemp() for _ in range(2)]
    model, tokenizer = models.load(options.model)
    document = texts.token_ids(tokenizer, options.context, options.file)
    document, *asked = framed(tokenizer, document, options.questions)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    config = swarm_kv.SwarmConfig(drives, dram_bytes=options.dram_bytes)
    with swarm_kv.patch(model, config) as swarm:
        began = time.perf_counter()
        read = swarm.new_cache()
        model(document, cache=read, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - began
        stored = swarm.stats().stored_bytes
        print(f"{document.shape[1]} tokens read in {seconds:.1f} s, {stored >> 20} MiB on drives")

        groups = [asked] if options.batch else [[one] for one in asked]
        told = iter(options.questions)
        for group in groups:
            began = time.perf_counter()
            rows = answers(model, document, read, group, pad, options.tokens)
            for row in tokenizer.batch_decode(rows, skip_special_tokens=True):
                print(f"\n{next(told)}\n  {row.strip()}")
            print(f"  ({time.perf_counter() - began:.1f} s)")

        stats = swarm.stats()
        print(
            f"\n{stats.bytes_per_step / 2**20:.1f} MiB read per step, {stats.hit_rate:.0%} of what "
            f"was chosen from memory; {(stats.stored_bytes - stored) >> 20} MiB more on drives"
        )


if __name__ == "__main__":
    main()
