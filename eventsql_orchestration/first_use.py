"""Names of a module that are imported at their first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def on_first_use(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """A `__getattr__` for the module `package`: `modules` maps each module to its names.

    A module whose name begins with a dot belongs to `package`. Once a name was asked for, the package has it.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(module_of[name], package), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
