"""Strategies of one stage by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(dict[str, F]):
    """Functions that a setting of `SwarmConfig` may name.

    Args:
        setting: its name, for errors.
    """

    def __init__(self, setting: str) -> None:
        super().__init__()
        self._setting = setting

    def register(self, name: str) -> Callable[[F], F]:
        """Add the decorated function under `name`."""

        def register(function: F) -> F:
            self[name] = function
            return function

        return register

    def names(self) -> list[str]:
        """What the setting may be."""
        return sorted(self)

    def resolve(self, choice: Any) -> F:
        """The function that `choice` names or is.

        Raises:
            ArgumentError: neither a known name nor callable.
        """
        if callable(choice):
            return cast(F, choice)
        if choice not in self:
            raise ArgumentError(
                f"unknown `{self._setting}` ({choice!r}); choose one of {self.names()}"
            )
        return self[choice]
