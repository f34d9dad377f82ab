"""A code location on this machine: a file or a module with definitions."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import dagster as dg
from dagster.components.definitions import LazyDefinitions

from eventsql_orchestration.dagster.local.sources import Import, Sources
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
        """The options by which Dagster's commands find the location."""
        where = ["-m", str(self.module)] if self.file is None else ["-f", str(self.file.resolve())]
        return [*where, "-d", self._directory]

    @property
    def directory(self) -> Path:
        """The working directory of its processes: the file's directory, or the working directory of this process."""
        return Path.cwd() if self.file is None else self.file.resolve().parent

    @property
    def _directory(self) -> str:
        return str(self.directory if self.imports is None else self.imports.resolve())

    @property
    def directories(self) -> list[Path]:
        """The directories from which its processes import, in the order of the search."""
        return list(dict.fromkeys([Path(self._directory), self.directory]))

    def load(self) -> tuple[str, dg.Definitions]:
        """Its definitions, loaded into this process, and their name there.

        As in Dagster, a function with `@dg.definitions` takes precedence over other definitions. Raises
        `LocalDagsterError` if there are no definitions or several, and if they cannot be loaded.
        """
        added = [directory for directory in map(str, self.directories) if directory not in sys.path]
        sys.path[:0] = added
        try:
            name, found = self._found(self._import())
            return name, found if isinstance(found, dg.Definitions) else found()
        except LocalDagsterError:
            raise
        except Exception as error:
            raise LocalDagsterError(f"{self} cannot be loaded: {self._described(error)}") from error
        finally:
            # Paths that the location itself has added stay.
            sys.path[:] = [directory for directory in sys.path if directory not in added]

    def check(self) -> None:
        """Raise `LocalDagsterError`, as `load` does, for wrong syntax and for a missing module, before anything starts.

        Sources without such a fault are not loaded here: that would take seconds, and Dagster loads them anyway.
        Dagster then shows the errors that they raise when they run.
        """
        if not self._look_broken():
            return
        try:
            self.load()
        except LocalDagsterError as error:
            # The location's processes have other environment variables, so other errors may occur only in this process.
            if isinstance(error.__cause__, ImportError | SyntaxError):
                raise

    def _look_broken(self) -> bool:
        if self.file is not None:
            return Sources(self.directories).look_broken(self.file.resolve())
        module = str(self.module)
        return Sources(self.directories, module.partition(".")[0]).look_broken(Import(module))

    def _described(self, error: Exception) -> str:
        """An error of the location in one line, with its place in the location's sources."""
        kind = type(error).__name__
        if isinstance(error, SyntaxError) and error.filename is not None:
            return f"{os.path.relpath(error.filename)}, line {error.lineno}: {kind}: {error.msg}"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if self.has(Path(frame.filename))]
        place = f"{os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}: " if frames else ""
        advice = "; install it, or correct the import" if isinstance(error, ModuleNotFoundError) else ""
        return f"{place}{kind}: {error}{advice}"

    def has(self, file: Path) -> bool:
        """Whether a file belongs to this location. The Python environment does not, even inside of its directories."""
        return any(map(file.is_relative_to, self.directories)) and not file.is_relative_to(sys.prefix)

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
            raise LocalDagsterError(f"{self} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
