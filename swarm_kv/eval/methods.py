"""Methods by name, as settings of `SwarmConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import baselines, selectors
from ..config import SwarmConfig
from ..errors import ArgumentError

DEFAULT = "default"
"""The settings as they are given."""


def names() -> list[str]:
    """What `settings` takes: `DEFAULT`, every baseline, every registered selector.

    The selector that `SwarmConfig` has anyway is left out, because it is `DEFAULT`.
    """
    usual = next(f.default for f in dataclasses.fields(SwarmConfig) if f.name == "selector")
    return [DEFAULT, *(name for name in selectors.names() if name != usual)]


def settings(name: str) -> dict[str, Any]:
    """What a method changes in a configuration: all of a baseline, the selector else.

    Raises:
        ArgumentError: there is no such method.
    """
    if name == DEFAULT:
        return {}
    if name in baselines.names():
        return baselines.settings(name)
    if name in selectors.names():
        return {"selector": name}
    raise ArgumentError(f"unknown method ({name!r}); choose one of {names()}")
