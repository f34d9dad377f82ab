"""Dagster's storage keeps its connections, survives their end and a fork, and leaves none behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from threading import Barrier
from typing import Any

import dagster as dg
import psycopg
import pytest
import sqlalchemy as sa
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage
from dagster._core.storage.schedules.sql_schedule_storage import SqlScheduleStorage
from dagster_postgres import DagsterPostgresStorage

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster import write_instance
from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE, storage_url
from eventsql_orchestration.dagster.pooled_storage import PooledPostgresStorage
from eventsql_orchestration.database import sessions as database_sessions
from tests.dagster.conftest import sql
from tests.waiting import PATIENCE, wait_until


def prepare(platform: EventSQL) -> None:
    """Make Dagster's tables."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as home:
        patch.setenv(STORAGE_VARIABLE, "of another instance")
        write_instance(Path(home), platform.database.dsn)


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="home")


@pytest.fixture
def instance(stored: dg.DagsterInstance) -> dg.DagsterInstance:
    return stored


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The connections that SQLAlchemy's engines of this process open."""
    made: list[object] = []

    def count(connection: object, _: object) -> None:
        made.append(connection)

    sa.event.listen(sa.Engine, "connect", count)
    yield made
    sa.event.remove(sa.Engine, "connect", count)


@dg.op
def said() -> None:
    dg.get_dagster_logger().info("said")


@dg.job
def saying() -> None:
    said()


OF_DAGSTER = (
    "FROM pg_stat_activity WHERE datname = current_database() AND query ~ 'event_logs|runs' AND pid <> pg_backend_pid()"
)


def sessions(platform: EventSQL) -> int:
    """The connections of psycopg 2, which only Dagster's storage uses."""
    return len(sql(platform, f"SELECT {OF_DAGSTER}"))


def test_a_run_uses_one_or_two_connections(instance: dg.DagsterInstance, connects: list[object]) -> None:
    assert saying.execute_in_process(instance=instance).success
    assert 1 <= len(connects) <= 2


def test_a_url_without_a_driver_has_psycopg_2(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, rest = os.environ[STORAGE_VARIABLE].split("://", 1)
    assert driver == "postgresql+psycopg2"
    monkeypatch.setenv(STORAGE_VARIABLE, f"postgresql://{rest}")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert saying.execute_in_process(instance=instance).success


def test_a_closed_instance_leaves_no_connection(home: Path, platform: EventSQL) -> None:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs_count()
        wait_until(lambda: sessions(platform) == 1, "the end of the connections of others")
    wait_until(lambda: sessions(platform) == 0, "the end of the server's process")


def test_threads_get_more_connections_than_are_kept(instance: dg.DagsterInstance, connects: list[object]) -> None:
    threads = 9
    storage = instance.run_storage
    at_once = Barrier(threads)

    def access() -> None:
        with storage.connect() as connection:  # type: ignore[attr-defined]  # of the storages with SQL
            at_once.wait(PATIENCE)
            connection.execute(sa.text("SELECT 1"))

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(access) for _ in range(threads)]:
            done.result()
    assert len(connects) == threads
    del connects[:]
    instance.get_runs_count()
    assert not connects


def test_an_access_after_the_end_of_all_connections_succeeds(
    instance: dg.DagsterInstance, platform: EventSQL, connects: list[object]
) -> None:
    assert saying.execute_in_process(instance=instance).success
    sql(platform, f"SELECT pg_terminate_backend(pid, 5000) {OF_DAGSTER}")
    del connects[:]
    assert instance.get_runs_count() == 1
    assert connects


def test_an_access_asks_for_the_connection_only_after_a_pause(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage: Any = instance.run_storage
    instance.get_runs_count()
    pings: list[object] = []
    monkeypatch.setattr(storage._engine.dialect, "do_ping", pings.append)
    instance.get_runs_count()
    assert not pings
    monkeypatch.setattr(database_sessions, "ASKED_AFTER", 0.0)
    instance.get_runs_count()
    assert len(pings) == 1


def test_a_fork_leaves_the_connection_of_its_parent(home: Path) -> None:
    program = """
        import os, sys
        import dagster as dg
        import sqlalchemy as sa

        def backend(instance):
            with instance.run_storage.connect() as connection:
                return connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()

        with dg.DagsterInstance.from_config(sys.argv[1]) as instance:
            before = backend(instance)
            child = os.fork()
            if child == 0:
                os._exit(int(backend(instance) == before))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child used the parent's connection"
            assert backend(instance) == before, "the child closed the parent's connection"
    """
    subprocess.run([sys.executable, "-c", dedent(program), str(home)], check=True, timeout=120)


def test_tables_are_created_where_they_are_missing(dsn: str, platform: EventSQL) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA dagster_dev")
    storage = PooledPostgresStorage(storage_url(dsn))
    assert storage.run_storage.get_runs_count() == 0
    wait_until(lambda: sessions(platform) == 1, "the end of the connections that created the tables")
    storage.run_storage.dispose()


def test_a_look_at_a_sensors_state_is_one_statement(
    instance: dg.DagsterInstance,
) -> None:
    said: list[str] = []
    taken: list[object] = []
    storage: Any = instance.schedule_storage
    assert instance.get_instigator_state("origin", "selector") is None

    sa.event.listen(storage._engine, "before_cursor_execute", lambda _, __, statement, *___: said.append(statement))
    sa.event.listen(storage._engine, "checkout", lambda connection, *_: taken.append(connection))
    assert instance.get_instigator_state("origin", "selector") is None
    assert len(said) == len(taken) == 1, said


def test_a_column_that_a_migration_adds_is_seen(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Any = instance.run_storage
    events: Any = instance.event_log_storage
    schedules: Any = instance.schedule_storage
    for owner, storage, name, arguments in (
        (SqlRunStorage, runs, "has_run_stats_index_cols", ()),
        (SqlEventLogStorage, events, "has_asset_key_col", ("column",)),
        (SqlScheduleStorage, schedules, "has_built_index", ("index",)),
    ):
        answers = iter([False, True])
        monkeypatch.setattr(owner, name, lambda *_, answers=answers: next(answers))
        assert [getattr(storage, name)(*arguments) for _ in range(4)] == [False, True, True, True]


def test_the_storages_still_have_the_private_names_that_are_replaced(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA dagster_dev")
    storage = DagsterPostgresStorage(storage_url(dsn))
    for part in ("_run_storage", "_event_log_storage", "_schedule_storage"):
        assert isinstance(vars(vars(storage)[part])["_engine"], sa.Engine)
    assert callable(SqlRunStorage.has_run_stats_index_cols)
    assert callable(SqlEventLogStorage.has_asset_key_col)
    assert callable(SqlScheduleStorage.has_built_index)
    assert callable(SqlScheduleStorage.has_instigators_table)
    assert callable(SqlScheduleStorage._has_instigators_table)


def test_the_configuration_is_that_of_dagsters_storage(home: Path) -> None:
    file = home / "dagster.yaml"
    config = yaml.safe_load(file.read_text())
    custom = config["storage"]["custom"]
    custom["config"]["auth_provider"] = {"gcp_wif": {}}
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(dg.DagsterInvalidConfigError):
        dg.DagsterInstance.from_config(str(home)).get_runs_count()
    config["storage"] = {"postgres": {"postgres_url": {"env": STORAGE_VARIABLE}}}
    file.write_text(yaml.safe_dump(config))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert instance.get_runs_count() == 0
