"""A check of a code location's sources without running them: their syntax, and whether their imports exist.

Loading a location takes seconds, and Dagster loads it anyway. This check takes milliseconds.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """A module that a source imports. If it is not `certain`, the last part may be a name inside of a module."""

    module: str
    certain: bool = True


class _Source(NamedTuple):
    file: Path
    package: str


@dataclass(frozen=True, slots=True)
class Sources:
    """The modules of a location: those in `directories`, and those of `package`, which may be installed elsewhere."""

    directories: Collection[Path]
    package: str | None = None

    def look_broken(self, start: Path | Import) -> bool:
        """Whether a source, or a source that it imports, has wrong syntax or imports a module that does not exist.

        Such a source may still run, if its program changes where Python looks for modules.
        """
        found = [_Source(start, "")] if isinstance(start, Path) else self._find(start)
        if found is None:
            return True
        waiting, seen = found, set[Path]()
        while waiting:
            source = waiting.pop()
            if source.file in seen:
                continue
            seen.add(source.file)
            tree = _parse(source.file)
            if tree is None:
                return True
            for each in _imports(tree, source.package):
                found = self._find(each)
                if found is None:
                    return True
                waiting += found
        return False

    def _find(self, wanted: Import) -> list[_Source] | None:
        """The sources of a module and of the packages around it, if they are the location's; None if it is missing."""
        first, *rest = wanted.module.split(".")
        home = self._home(first)
        if home is None:
            return None if _spec(first) is None else []

        found: list[_Source] = []
        place, package = home, ""
        for name in (first, *rest):
            place /= name
            file = _file(place)
            if file is None and not place.is_dir():
                return None if wanted.certain else found
            if file is None or file.name == "__init__.py":
                package = f"{package}.{name}".lstrip(".")
            if file is not None:
                found.append(_Source(file, package))
        return found

    def _home(self, name: str) -> Path | None:
        """The directory of a module of the location. Modules that run in this process already are left out."""
        if name in sys.modules:
            return None
        for each in self.directories:
            if _file(each / name) is not None:
                return each
        found = _spec(name)
        if found is None or found.origin is None:
            # An installed package takes precedence over a directory without __init__.py.
            return next((each for each in self.directories if (each / name).is_dir()), None)
        places = found.submodule_search_locations if name == self.package else None
        return Path(next(iter(places))).parent if places else None


def _parse(file: Path) -> ast.Module | None:
    try:
        # The module shows its own warnings when it runs.
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
            compile(tree, str(file), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None
    return tree


def _imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """The imports that always run. Imports in a function or in `try` are left out: they may be meant to fail."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from (Import(name.name) for name in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            names = package.split(".")
            around = names[: len(names) - statement.level + 1] if statement.level else []
            base = ".".join(filter(None, [*around, statement.module]))
            if base:
                yield Import(base)
                yield from (Import(f"{base}.{name.name}", certain=False) for name in statement.names)


def _file(place: Path) -> Path | None:
    """The file of a module, from its path without an ending."""
    candidates = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((each for each in candidates if each.is_file()), None)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
