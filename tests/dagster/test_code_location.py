"""A code location whose sources cannot be loaded is noticed before Dagster starts, without running the location."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.orchestration.errors import LocalDagsterError


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory. The modules that a test loads are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(directory: Path, sources: dict[str, str]) -> None:
    for name, text in sources.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("sources", "place"),
    [
        ({"definitions.py": "defs = (\n"}, "definitions.py, line 1"),
        ({"definitions.py": "import os\nreturn\n"}, "definitions.py, line 2"),
        ({"definitions.py": "\nimport no_such_module\n"}, "definitions.py, line 2"),
        ({"definitions.py": "from shop import orders\n", "shop/__init__.py": "", "shop/orders.py": "1 +\n"},
         "shop/orders.py, line 1"),
        ({"definitions.py": "import shop.orders\n", "shop/orders.py": "\n\nfrom . import ruled\nfrom .gone import x\n"},
         "shop/orders.py, line 3"),
        ({"definitions.py": "from shop.orders import x\n", "shop/orders.py": "from .rules.late import x\n",
          "shop/rules/__init__.py": "", "shop/rules/late.py": "from ..gone import x\n"}, "shop/rules/late.py, line 1"),
    ],
)  # fmt: skip
def test_wrong_syntax_and_missing_modules_are_found_wherever_they_are(
    directory: Path, sources: dict[str, str], place: str
) -> None:
    write(directory, sources)
    with pytest.raises(LocalDagsterError) as raised:
        CodeLocation(Path("definitions.py")).check()
    assert isinstance(raised.value.__cause__, ImportError | SyntaxError)
    assert f"{place}: " in raised.value.message


def test_a_module_is_found_broken_as_a_file_is(directory: Path) -> None:
    write(directory, {"src/shop/__init__.py": "", "src/shop/definitions.py": "import no_such_module\n"})
    for location in (
        CodeLocation(module="nowhere.definitions"),
        CodeLocation(module="shop.definitions", imports=Path("src")),
    ):
        with pytest.raises(LocalDagsterError) as raised:
            location.check()
        assert isinstance(raised.value.__cause__, ModuleNotFoundError)


RUNS = "raise RuntimeError('it runs')\n"


@pytest.mark.parametrize(
    "source",
    [
        "import os.path, dagster as dg\nfrom eventsql_orchestration.queue import Queue\n",
        "try:\n    import no_such_module\nexcept ImportError:\n    pass\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such_module\n",
        "def later():\n    import no_such_module\n",
        "import spaces.inner\nfrom spaces import inner\nfrom spaces.inner import name\n",
        "import beside\n",
    ],
)
def test_sources_without_visible_faults_are_not_run(directory: Path, source: str) -> None:
    write(directory, {"definitions.py": source + RUNS, "spaces/inner.py": "name = 1\n", "lib/beside.py": ""})
    location = CodeLocation(Path("definitions.py"), imports=Path("lib"))
    location.check()
    with pytest.raises(LocalDagsterError) as raised:
        location.load()
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_location_that_is_loaded_changes_no_paths_of_later_imports(directory: Path) -> None:
    source = "import beside, sys\nfrom dagster import Definitions\ndefs = Definitions()\nsys.path.append('its own')\n"
    write(directory, {"definitions.py": source, "lib/beside.py": ""})
    before = list(sys.path)
    CodeLocation(Path("definitions.py"), imports=Path("lib")).load()
    assert sys.path == [*before, "its own"]


def test_a_program_that_finds_its_modules_by_itself_is_no_error(directory: Path) -> None:
    given = "import sys\nsys.path.insert(0, 'vendored')\nimport of_a_vendor\n"
    write(directory, {"definitions.py": given + RUNS, "vendored/of_a_vendor.py": ""})
    CodeLocation(Path("definitions.py")).check()
