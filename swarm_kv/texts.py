"""Text for long-context tests and demonstrations that needs no download."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from .errors import ArgumentError


def python_topics() -> str:
    """The help topics of the Python language reference: about 465 KB of prose in every CPython.

    The text differs a little between Python versions, so figures that rest on it do too.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


LIBRARY_MODULES = ("argparse", "ast", "dataclasses", "inspect", "typing")
"""Modules whose source `python_library` joins, in this order."""


def python_library() -> str:
    """Source code of five modules of the standard library: about 420 KB in every CPython.

    Like the topics it differs a little between Python versions.
    """
    return "\n".join(inspect.getsource(importlib.import_module(m)) for m in LIBRARY_MODULES)


NAMED: dict[str, Callable[[], str]] = {"topics": python_topics, "stdlib": python_library}
"""Texts that need no file. Prose and code: models attend to them differently."""


def read_text(source: str | pathlib.Path | None = None) -> str:
    """A text: one of `NAMED`, else the contents of the file `source`; `python_topics()` for None.

    A name goes before a file of that name; write "./topics" for the file.
    """
    if source is None:
        return python_topics()
    if isinstance(source, str) and source in NAMED:
        return NAMED[source]()
    return pathlib.Path(source).expanduser().read_text(encoding="utf-8", errors="replace")


def digest(ids: torch.Tensor) -> str:
    """SHA-256 of token ids, in hexadecimal: tells whether two contexts are the same tokens."""
    numbers = ids.detach().reshape(-1).to(device="cpu", dtype=torch.int64).contiguous()
    return hashlib.sha256(numbers.numpy().astype("<i8").tobytes()).hexdigest()


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without the special tokens that a tokenizer may put in front."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def opening(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts in front of every text."""
    return list(tokenizer("").input_ids)


def token_ids(
    tokenizer: Any, length: int, source: str | pathlib.Path | None = None, *, start: int = 0
) -> torch.Tensor:
    """Tokens `start` to `start + length` of a text.

    Args:
        tokenizer: a transformers tokenizer.
        length (`int`): number of tokens wanted.
        source (`str` or `Path`, *optional*): "topics", "stdlib" or a text file, as `read_text`
            takes it; the Python topics if not given.
        start (`int`, *optional*, defaults to 0): first token.

    Returns:
        int64 tensor `[1, length]`, without the special tokens that a tokenizer may put in front.

    Raises:
        ArgumentError: the text has fewer than `start + length` tokens.
    """
    if length < 1 or start < 0:
        raise ArgumentError(
            f"`length` ({length}) must be at least 1 and `start` ({start}) at least 0"
        )
    ids = encode(tokenizer, read_text(source))
    if len(ids) < start + length:
        name = "the Python topics" if source is None else f"`{source}`"
        raise ArgumentError(
            f"{name} has {len(ids)} tokens, but tokens {start} to {start + length} are wanted: "
            "give a longer text file as `source` or a smaller `length`"
        )
    return torch.tensor([ids[start : start + length]])
