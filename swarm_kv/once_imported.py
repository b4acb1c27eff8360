"""`once_imported`: calls that wait for a module, as it takes seconds to import for who needs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def once_imported(name: str, call: Callable[[Any], None]) -> None:
    """Let `call(module)` run as soon as the module `name` has been imported: now, or later.

    Args:
        name: in full, as in `sys.modules`.
        call: what it raises is raised by the import.
    """
    if name in sys.modules:
        call(importlib.import_module(name))  # waits for a thread that is importing it
    else:
        sys.meta_path.insert(0, _Awaited(name, call))


class _Awaited(MetaPathFinder):
    """Lets the others find its module, and sees to it that its import ends with a call."""

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_call(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # its module may be executed again
                    sys.meta_path.remove(self)
                self._call(module)

            spec.loader.exec_module = and_call  # type: ignore[method-assign]
        return spec
