"""The files that a loaded location depends on, and which changes of them are noticed, each in its own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eventsql_orchestration.dagster.launcher import loaded_files
from tests.waiting import wait_until

LOAD = """
import importlib.util, os, runpy, sys, sysconfig
sys.prefix = os.environ.get("EVENTSQL_TEST_PREFIX", sys.prefix)
if packages := os.environ.get("EVENTSQL_TEST_PACKAGES"):
    sysconfig.get_path = lambda name: packages
files = runpy.run_path(sys.argv[2])["LoadedFiles"](int(sys.argv[1]))
# Python lists the directory. A fork server looks for its own modules there before it loads the location.
importlib.util.find_spec("location_module")
with files.recorded():
    import location_module
files.watch(".env")
print("loaded", flush=True)
sys.stdin.readline()
print(files.changed())
"""

CHANGES = {
    "an imported module": lambda directory: (directory / "imported_module.py").write_text("VALUE = 2"),
    "a module with the same size and time": lambda directory: _replace(directory / "imported_module.py", "VALUE = 3"),
    "a file that the location read": lambda directory: (directory / "read.yaml").write_text("changed: true"),
    "a module that has gone": lambda directory: (directory / "imported_module.py").unlink(),
    "a new module": lambda directory: (directory / "new_module.py").touch(),
    "a new package": lambda directory: _write(directory / "new_package" / "new_module.py"),
    "a new component": lambda directory: _write(directory / "new_group" / "new_component" / "defs.yaml"),
    "a new .env": lambda directory: (directory / ".env").write_text("NEW=1"),
}

NO_CHANGES = {
    "nothing": lambda directory: None,
    "a file that the location wrote": lambda directory: (directory / "written.txt").write_text("again"),
    "a compiled module": lambda directory: (directory / "module.pyc").touch(),
    "the lock file of an editor": lambda directory: (directory / ".#location_module.py").touch(),
    "a file of no interest": lambda directory: (directory / "output.parquet").touch(),
    "a new directory of a run": lambda directory: _write(directory / "output" / "2026-01-01" / "part.parquet"),
    "a new directory of hidden files": lambda directory: _write(directory / "new" / ".idea" / "hidden.py"),
}


def _write(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.touch()


def _replace(file: Path, text: str) -> None:
    """Replace a file, and give the new file the times of the old one."""
    before = file.stat()
    assert len(text) == before.st_size
    file.write_text(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "imported_module.py").write_text("VALUE = 1")
    (tmp_path / "read.yaml").write_text("changed: false")
    (tmp_path / "location_module.py").write_text(
        "import os, imported_module\nopen('read.yaml').close()\nopen('written.txt', 'w').close()\n"
    )
    return tmp_path


def changed(
    directory: Path, change: object, *, since: int | None = None, environment: dict[str, str] | None = None
) -> str:
    """The path that is reported after a change; "None" for none."""
    assert callable(change)
    variables = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", LOAD, str(since or time.time_ns()), loaded_files.__file__], cwd=directory,
        env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        change(directory)
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().strip()


def test_a_change_of_a_directory_names_the_new_file(directory: Path) -> None:
    assert changed(directory, CHANGES["a new module"]) == str(directory / "new_module.py")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(directory: Path, change: object) -> None:
    assert changed(directory, change) != "None"


@pytest.mark.parametrize("change", NO_CHANGES.values(), ids=NO_CHANGES)
def test_no_change_is_seen_in(directory: Path, change: object) -> None:
    assert changed(directory, change) == "None"


def test_compiled_modules_that_have_gone_are_no_change(directory: Path) -> None:
    compiling = {"PYTHONDONTWRITEBYTECODE": ""}
    assert changed(directory, NO_CHANGES["nothing"], environment=compiling) == "None"
    assert changed(directory, lambda _: shutil.rmtree(directory / "__pycache__"), environment=compiling) == "None"


def test_a_module_that_changed_while_it_was_imported_counts_as_changed(directory: Path) -> None:
    before = (directory / "imported_module.py").stat().st_ctime_ns
    assert changed(directory, lambda _: None, since=before) != "None"


def test_a_module_with_a_time_in_the_future_is_not_taken_for_changed(directory: Path) -> None:
    future = time.time_ns() + 3_600_000_000_000
    os.utime(directory / "imported_module.py", ns=(future, future))
    assert changed(directory, lambda _: None) == "None"


def test_a_new_module_is_noticed_in_a_directory_below_the_prefix_of_the_environment(directory: Path) -> None:
    """The code may be in /usr/src, or in a project that is its own virtual environment."""
    prefixed = {"EVENTSQL_TEST_PREFIX": str(directory)}
    assert changed(directory, CHANGES["a new module"], environment=prefixed) != "None"


def test_a_link_to_a_package_of_the_environment_is_no_change(directory: Path) -> None:
    """Installers link one copy into several environments. Each link sets the time of the inode's last change."""
    module = directory / "imported_module.py"

    def link(_: Path) -> None:
        before = module.stat().st_ctime_ns
        wait_until(lambda: _links(module) and module.stat().st_ctime_ns > before, "a later time of the inode's change")

    assert changed(directory, link, environment={"EVENTSQL_TEST_PACKAGES": str(directory)}) == "None"
    assert changed(
        directory, CHANGES["an imported module"], environment={"EVENTSQL_TEST_PACKAGES": str(directory)}
    ) == str(module)


def _links(file: Path) -> bool:
    link = file.with_name("link")
    link.hardlink_to(file)
    link.unlink()
    return True
