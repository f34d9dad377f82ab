"""A process keeps the platforms of its ticks for a while, for the next ticks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent
from threading import Barrier

import dagster as dg
import psycopg
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster import EventSQLResource
from eventsql_orchestration.dagster.kept_platforms import KeptPlatforms
from eventsql_orchestration.errors import ClosedError, DatabaseError
from tests.dagster.conftest import Workbench, registering, sql
from tests.dagster.location import eager
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.prepared.with_args(registering(eager))


@pytest.fixture
def kept() -> Iterator[KeptPlatforms]:
    """Platforms that are kept for as long as the test."""
    platforms = KeptPlatforms(PATIENCE)
    yield platforms
    platforms.close()


def backend(platform: EventSQL) -> int:
    """The server process of a platform's connection."""
    return int(sql(platform, "SELECT pg_backend_pid()")[0][0])


def is_closed(platform: EventSQL) -> bool:
    try:
        platform.database.check_open()
    except ClosedError:
        return True
    return False


def test_ticks_that_find_nothing_use_one_connection(bench: Workbench) -> None:
    def sessions() -> int:
        """The sessions that were begun in the database of the test, without those that look."""
        with psycopg.connect(bench.eventsql.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_stat_force_next_flush()")
            row = connection.execute("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
            return int(row.fetchall()[0][0])

    bench.tick(eager.sensors[0])
    before = sessions()
    for _ in range(5):
        assert "no events" in bench.tick(eager.sensors[0])
    assert sessions() == before + 1


def test_the_limit_on_statements_holds_in_each_tick(eventsql: EventSQLResource) -> None:
    for _ in range(2):
        with eventsql.for_tick(0.3) as platform:
            assert sql(platform, "SHOW statement_timeout") == [("300ms",)]
            with pytest.raises((DatabaseError, psycopg.Error), match="statement timeout"):
                sql(platform, "SELECT pg_sleep(20)")


def test_each_configuration_has_a_platform(eventsql: EventSQLResource) -> None:
    with eventsql.for_tick(5.0) as first:
        pass
    others = [
        eventsql.for_tick(6.0),
        EventSQLResource(dsn=eventsql.dsn, db_schema="other").for_tick(5.0),
        EventSQLResource(dsn=f"{eventsql.dsn}?application_name=other").for_tick(5.0),
    ]
    for other in others:
        with other as platform:
            assert platform is not first
    with EventSQLResource(dsn=eventsql.dsn).for_tick(5.0) as platform:
        assert platform is first


def test_a_variable_with_another_url_leads_the_next_tick_there(
    bench: Workbench, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventsql = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN"))
    monkeypatch.setenv("EVENTSQL_TEST_DSN", bench.eventsql.dsn)
    assert "no events" in bench.tick(eager.sensors[0], eventsql=eventsql)
    monkeypatch.setenv("EVENTSQL_TEST_DSN", fresh)
    assert "eventsql migrate" in bench.tick(eager.sensors[0], eventsql=eventsql)


def test_a_platform_whose_time_is_over_is_closed_at_the_end_of_its_tick(eventsql: EventSQLResource) -> None:
    platforms = KeptPlatforms(0.0)
    with platforms.use("it", lambda: eventsql.bounded(5.0)) as platform:
        wait_until(lambda: "eventsql-kept-platform" not in {each.name for each in threading.enumerate()}, "its time")
        backend(platform)
    assert is_closed(platform)


def test_a_platform_that_no_tick_uses_is_closed_in_the_end(kept: KeptPlatforms, eventsql: EventSQLResource) -> None:
    with kept.use("it", lambda: eventsql.bounded(5.0)) as platform:
        backend(platform)
    assert not is_closed(platform)
    kept.close()
    wait_until(lambda: is_closed(platform), "the end of the platform")
    with kept.use("it", lambda: eventsql.bounded(5.0)) as another:
        assert another is not platform


def test_a_tick_that_fails_leaves_no_platform_to_the_next(kept: KeptPlatforms, eventsql: EventSQLResource) -> None:
    with pytest.raises(LookupError), kept.use("it", lambda: eventsql.bounded(5.0)) as platform:
        raise LookupError
    with kept.use("it", lambda: eventsql.bounded(5.0)) as another:
        assert another is not platform
    wait_until(lambda: is_closed(platform), "the end of the platform")


def test_a_platform_that_lost_its_connection_serves_only_the_tick_that_found_out(
    kept: KeptPlatforms, eventsql: EventSQLResource
) -> None:
    with kept.use("it", lambda: eventsql.bounded(5.0)) as first:
        lost = backend(first)
    sql(eventsql.platform, "SELECT pg_terminate_backend(%s, 5000)", lost)
    with kept.use("it", lambda: eventsql.bounded(5.0)) as second:
        assert backend(second) != lost
        assert sql(second, "SHOW statement_timeout") == [("5s",)]
    with kept.use("it", lambda: eventsql.bounded(5.0)) as third:
        assert third is not first


def test_a_tick_claims_in_a_schema_that_was_dropped_and_made_anew(bench: Workbench) -> None:
    bench.publish("rides", 3)
    assert len(bench.tick(eager.sensors[0])) == 1
    with psycopg.connect(bench.eventsql.dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA eventsql CASCADE")
    assert "eventsql migrate" in bench.tick(eager.sensors[0])
    with EventSQL(bench.eventsql.dsn, transfer=False) as anew:
        eager.register(anew)
        assert "no events" in bench.tick(eager.sensors[0])
        Workbench(anew, bench.eventsql, bench.instance).publish("rides", 3)
        assert len(bench.tick(eager.sensors[0])) == 1


def test_ticks_at_once_have_a_platform_each_and_the_next_ticks_use_these(
    kept: KeptPlatforms, eventsql: EventSQLResource
) -> None:
    at_once = Barrier(4)

    def tick(_: int) -> EventSQL:
        with kept.use("it", lambda: eventsql.bounded(5.0)) as platform:
            backend(platform)
            at_once.wait(PATIENCE)
            return platform

    with ThreadPoolExecutor(4) as pool:
        first, second = (set(pool.map(tick, range(4))) for _ in range(2))
    assert len(first) == 4
    assert first == second


def test_a_forked_process_leaves_the_platforms_to_its_parent(dsn: str) -> None:
    program = """
        import os, sys
        from eventsql_orchestration.dagster import EventSQLResource

        resource = EventSQLResource(dsn=sys.argv[1])

        def backend():
            with resource.for_tick(5.0) as platform, platform.database.connection() as connection:
                return connection.info.backend_pid

        before = backend()
        with resource.for_tick(5.0):
            child = os.fork()
            if child == 0:
                os._exit(int(backend() == before))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child used the parent's connection"
        assert backend() == before, "the child closed the parent's connection"
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", dedent(program), dsn], check=True, timeout=PATIENCE, env=dict(os.environ)
    )
