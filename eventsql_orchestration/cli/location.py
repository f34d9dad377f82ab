"""The code location that a command works with: the one that its options name, or the one of this directory."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import click

from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.errors import ConfigurationError

NO_LOCATION: Final = "there is no code location here, neither a `dg` project nor definitions.py"


def location_of(file: Path | None, module: str | None) -> CodeLocation:
    """The location that the options or this directory name.

    Raises `ConfigurationError` for a pyproject.toml that cannot be read, and `click.UsageError` if there is none.
    """
    if file is not None and module is not None:
        raise click.UsageError("-f and -m both name the code location: give one of them")
    if module is not None:
        return _imported(module)
    if file is not None:
        if not file.exists():
            raise click.UsageError(f"{file} does not exist")
        return CodeLocation(file)
    if (here := location_here()) is None:
        raise click.UsageError(f"{NO_LOCATION}: name one with -f or -m, or make a project with `eventsql init`")
    return here


def location_here() -> CodeLocation | None:
    """The location of this directory: its `dg` project, else its definitions.py; None without both.

    Raises `ConfigurationError` for a pyproject.toml that cannot be read.
    """
    if (module := _module_of(Path("pyproject.toml"))) is not None:
        return _imported(module)
    file = Path("definitions.py")
    return CodeLocation(file) if file.exists() else None


def _imported(module: str) -> CodeLocation:
    # A project that is not installed is imported from where its sources are.
    sources = Path("src")
    return CodeLocation(module=module, imports=sources if (sources / module.partition(".")[0]).exists() else None)


def _module_of(file: Path) -> str | None:
    """The module of definitions of a project for `dg` or `dagster dev`; None if the file names none."""
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    named = tool.get("dg", {}).get("project", {})
    root = named.get("root_module")
    module: str | None = named.get("code_location_target_module") or (f"{root}.definitions" if root else None)
    return module or tool.get("dagster", {}).get("module_name")
