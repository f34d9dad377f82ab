"""`eventsql init`: the files that it writes, and its refusals. tests/system/test_project.py runs such a project."""

from __future__ import annotations

import ast
import errno
import re
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from eventsql_orchestration.cli.location import location_of
from eventsql_orchestration.dagster.local.code_location import CodeLocation
from tests.cli.conftest import Run


def written(root: Path) -> set[str]:
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}


def test_it_makes_a_project_that_dev_finds(invoke: Run, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = invoke("init", "corner shop")
    assert made.exit_code == 0
    assert made.stderr.endswith("run it with `cd 'corner shop' && eventsql dev`\n")
    root = directory / "corner shop"
    assert written(root) == {
        ".gitignore", "README.md", "pyproject.toml", "src/corner_shop/__init__.py", "src/corner_shop/definitions.py",
        "src/corner_shop/stock.py", "tests/test_stock.py",
    }  # fmt: skip
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["name"] == "corner-shop"
    for file in root.rglob("*.py"):
        ast.parse(file.read_text())
    monkeypatch.chdir(root)
    assert location_of(None, None) == CodeLocation(module="corner_shop.definitions", imports=Path("src"))


@pytest.mark.parametrize("name", ["Corner Shop", 'corner"shop', "corner\nshop", "corner_shop", "{corner} shop"])
def test_a_name_of_any_characters_becomes_one_that_packages_may_have(invoke: Run, directory: Path, name: str) -> None:
    made = invoke("init", "made", "--name", name)
    assert made.exit_code == 0
    project = tomllib.loads((directory / "made" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "corner-shop"


def test_this_directory_is_named_by_nothing(invoke: Run, directory: Path) -> None:
    assert invoke("init", "--name", "bakery").stderr.endswith("run it with `eventsql dev`\n")
    assert (directory / "src" / "bakery" / "definitions.py").exists()


def test_no_file_is_overwritten(invoke: Run, directory: Path) -> None:
    (directory / "README.md").write_text("mine")
    refused = invoke("init", "--name", "bakery")
    assert (refused.exit_code, written(directory)) == (2, {"README.md"})
    assert (directory / "README.md").read_text() == "mine"
    assert refused.stderr.endswith("this one has README.md\n")


def test_a_directory_that_cannot_be_made_is_named(invoke: Run, directory: Path) -> None:
    (directory / "README.md").write_text("mine")
    refused = invoke("init", "README.md/shop")
    assert (refused.exit_code, written(directory)) == (2, {"README.md"})
    assert refused.stderr == "eventsql: README.md/shop cannot be written: Not a directory\n"


def test_a_file_that_does_not_fit_on_the_disk_is_named(
    invoke: Run, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    refused = invoke("init", "shop")
    assert (refused.exit_code, written(directory)) == (2, set())
    assert re.fullmatch(r"eventsql: shop/\S+ cannot be written: No space left on device\n", refused.stderr)


@pytest.mark.parametrize("name", ["2nd-shop", "class", "json", "dagster", "-"])
def test_a_name_that_is_no_free_module_name_is_refused(invoke: Run, directory: Path, name: str) -> None:
    refused = invoke("init", f"--name={name}")
    assert (refused.exit_code, written(directory)) == (2, set())
    assert "name the project with --name" in refused.stderr
