"""What runners of model-level peers share: prefill a text, then decode it token by token.

Runs in any environment with torch and transformers 4.57 or newer.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import gc
import inspect
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from benchmarks.peers.channel import Channel


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a peer gets.

    Attributes:
        folders: one on each drive that it may use.
        options: its own, from the registry.
        context: tokens before the first decoded one.
    """

    folders: Sequence[pathlib.Path]
    options: dict[str, Any]
    context: int


@dataclasses.dataclass(frozen=True)
class Session:
    """What a peer makes of it.

    Attributes:
        cache: as the model takes it.
        prefill: active during the prefill.
    """

    cache: Any
    prefill: contextlib.AbstractContextManager[Any] = dataclasses.field(
        default_factory=contextlib.nullcontext
    )


def serve(make: Callable[[Any, Setting], Session]) -> None:
    """Answer requests: the first loads, the second prefills, the others decode.

    First: `model` (a directory), `ids`, `context`, `folders`, `options`, `logits` (a file that gets
    float32 rows). Second: `keep`, a file that gets the context's keys and values; `given`, a file
    with them, which are then not computed; or empty. Others: `steps`, and `evict`, whether the page
    cache loses the peer's files before each step; or `ask`, lists of tokens, each of which is fed
    in one call to a copy of the cache and gives a row per token. The answers have `memory`, bytes
    by which this process grew since the model was loaded, and `peak`, the most that it grew during
    the request.
    """
    channel = Channel()
    requests = channel.requests()
    first = next(requests)
    ids = torch.tensor([first["ids"]])
    setting = Setting(
        [pathlib.Path(folder) for folder in first["folders"]], first["options"], first["context"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        first["model"], dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad(), open(first["logits"], "wb") as logits:
        model(ids[:, :8], use_cache=False)  # touches all weights
        memory = Memory()
        session = make(model, setting)
        channel.answer(version=transformers.__version__)
        request = next(requests)
        given = torch.load(request["given"]) if "given" in request else []
        position = setting.context - 1
        begin = time.perf_counter()
        for number, (keys, values) in enumerate(given):
            session.cache.update(keys, values, number)
        if not given:
            with session.prefill:
                feed(model, session.cache, ids[:, :position], 0)
        seconds = time.perf_counter() - begin
        if "keep" in request:
            layers = [(layer.keys, layer.values) for layer in session.cache.layers]
            torch.save(layers, request["keep"])
            del layers
        del given
        channel.answer(seconds=seconds, **memory.grown())
        for request in requests:
            for asked in request.get("ask", ()):
                fork = copy.deepcopy(session.cache)
                rows = feed(model, fork, torch.tensor([asked]), position, keep=len(asked))
                rows.numpy().tofile(logits)
            seconds, read = 0.0, bytes_read()
            for _ in range(request.get("steps", 0)):
                if request["evict"]:
                    evict(setting.folders)
                begin = time.perf_counter()
                row = feed(model, session.cache, ids[:, position : position + 1], position)
                seconds += time.perf_counter() - begin
                row.numpy().tofile(logits)
                position += 1
            logits.flush()
            channel.answer(seconds=seconds, read_bytes=bytes_read() - read, **memory.grown())


def feed(
    model: Any, cache: Any, ids: torch.Tensor, position: int, *, keep: int = 1
) -> torch.Tensor:
    """Logits `[keep, vocabulary]` after the last of `ids`, the first of which is token `position`.

    Positions are given because a cache that keeps less than it has seen cannot tell them.
    """
    names = inspect.signature(model.forward).parameters
    given = {"cache" if "cache" in names else "past_key_values": cache}
    positions = torch.arange(position, position + ids.shape[1])[None]
    output = model(ids, position_ids=positions, use_cache=True, logits_to_keep=keep, **given)
    rows: torch.Tensor = output.logits[0, -keep:]
    return rows


def evict(folders: Sequence[pathlib.Path]) -> None:
    """Let the page cache forget the files below `folders`, which nobody may have mapped."""
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    os.fsync(descriptor)  # what is not written yet stays
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def bytes_read() -> int:
    """What this process has caused to be read from drives: not what the page cache had."""
    with open("/proc/self/io") as lines:
        return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


class Memory:
    """Memory of this process beyond what it has now, without mapped files, such as libraries."""

    def __init__(self) -> None:
        self._before = 0
        self._before = self.grown()["memory"]

    def grown(self) -> dict[str, int]:
        """`memory` now and `peak` since the last call, in bytes."""
        peak = status("VmHWM") - status("RssFile")
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        memory = status("RssAnon") + status("RssShmem")
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        return {"peak": peak - self._before, "memory": memory - self._before}


def status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
