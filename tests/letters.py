"""A tokenizer whose tokens are single letters, for models with a vocabulary of 128."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any


class Letters:
    """As much of a transformers tokenizer as evaluation uses; what is not ASCII becomes `?`."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        return types.SimpleNamespace(input_ids=list(text.encode("ascii", "replace")))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("ascii")
