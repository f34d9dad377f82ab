"""A code location on this machine: a file or a module with definitions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import dagster as dg
from dagster.components.definitions import LazyDefinitions

from eventsql_orchestration.orchestration.errors import LocalDagsterError


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """Where definitions are: a Python file or an importable module. Exactly one of the two is given.

    `imports` is the directory from which the module is imported, by default the working directory.
    """

    file: Path | None = None
    module: str | None = None
    imports: Path | None = None

    def __str__(self) -> str:
        return str(self.file or self.module)

    def arguments(self) -> list[str]:
        """The options by which Dagster's commands find it."""
        where = ["-m", str(self.module)] if self.file is None else ["-f", str(self.file.resolve())]
        return [*where, "-d", self._directory]

    @property
    def directory(self) -> Path:
        """The working directory of its processes: that of the file, or this one."""
        return Path.cwd() if self.file is None else self.file.resolve().parent

    @property
    def _directory(self) -> str:
        return str(self.directory if self.imports is None else self.imports.resolve())

    def load(self) -> tuple[str, dg.Definitions]:
        """Its definitions, loaded into this process, and their name there.

        As in Dagster, a function with `@dg.definitions` goes before other definitions. Raises `LocalDagsterError` if
        there are none or several, and if they cannot be loaded.
        """
        if self._directory not in sys.path:
            sys.path.insert(0, self._directory)
        try:
            name, found = self._found(self._import())
            return name, found if isinstance(found, dg.Definitions) else found()
        except LocalDagsterError:
            raise
        except Exception as error:
            raise LocalDagsterError(f"{self} cannot be loaded: {type(error).__name__}: {error}") from error

    def _found(self, module: ModuleType) -> tuple[str, dg.Definitions | LazyDefinitions[dg.Definitions]]:
        for kind in (LazyDefinitions, dg.Definitions):
            # One object may have several names.
            found = {id(value): (name, value) for name, value in vars(module).items() if isinstance(value, kind)}
            if len(found) > 1:
                names = ", ".join(sorted(name for name, _ in found.values()))
                raise LocalDagsterError(f"{self} has {len(found)} Definitions at its top level, not one: {names}")
            for only in found.values():
                return only
        raise LocalDagsterError(
            f"{self} has no Definitions at its top level: give it `defs = dg.Definitions(…)`, or a function with "
            "`@dg.definitions`"
        )

    def _import(self) -> ModuleType:
        if self.file is None:
            return importlib.import_module(str(self.module))
        spec = importlib.util.spec_from_file_location(self.file.stem, self.file)
        if spec is None or spec.loader is None:
            raise LocalDagsterError(f"{self} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
