"""The exceptions of swarm_kv, and how failures in C++ become them.

Only the text of a C++ exception crosses an operator's border, so the kind of a failure travels as a
prefix, "[swarm_kv.StorageError] ...". `convert` and `typed_errors` turn it back into a class.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = [
    "ArgumentError",
    "CapacityError",
    "StateError",
    "StorageError",
    "SwarmError",
    "convert",
    "converted",
    "typed_errors",
]

P = ParamSpec("P")
R = TypeVar("R")


class SwarmError(RuntimeError):
    """Base class of every error that swarm_kv raises on purpose."""


class StorageError(SwarmError):
    """A drive failed: I/O error, short transfer, time-out, no space or a wrong checksum."""


class CapacityError(SwarmError):
    """A memory budget or a bounded table is exhausted."""


class ArgumentError(SwarmError, ValueError):
    """A value is outside its limits; the message names the value, the limit and the way out."""


class StateError(SwarmError):
    """The call does not fit the object's state, such as a store that is closed."""


_CLASSES: dict[str, type[SwarmError]] = {
    cls.__name__: cls
    for cls in (SwarmError, StorageError, CapacityError, ArgumentError, StateError)
}
_PREFIX = re.compile(r"\[swarm_kv\.(\w+)\] ")
# What torch may append to the text of an exception.
_BACKTRACE = re.compile(r"\nException raised from .*|\n(?:C\+\+ )?CapturedTraceback:?.*", re.DOTALL)


def convert(error: BaseException) -> BaseException:
    """The typed error that `error` stands for, or `error` itself.

    Args:
        error: an exception raised by a `torch.ops.swarm_kv` operator.

    Returns:
        An instance of a `SwarmError` class with the plain message where the text carries a kind,
        else the same object.
    """
    if isinstance(error, SwarmError):
        return error
    text = str(error)
    match = _PREFIX.search(text)
    if match is None:
        return error
    cls = _CLASSES.get(match[1], SwarmError)
    return cls(_BACKTRACE.sub("", text[match.end() :]).rstrip())


class converted:
    """Context in which failures of operators come out as `SwarmError` classes."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise the typed error instead of the text that carries it."""
        if isinstance(error, RuntimeError):
            typed = convert(error)
            if typed is not error:
                raise typed from None


def typed_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a wrapper around an operator: its failures come out as `SwarmError` classes."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with converted():
            return function(*args, **kwargs)

    return wrapper
