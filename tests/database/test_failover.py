"""A primary whose standby is away, or was promoted: no process that knows of a promotion writes to the primary."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.cli.doctor_database import (
    commit_findings,
    server_finding,
    servers_finding,
    transaction_findings,
)
from eventsql_orchestration.cli.doctor_store import store_findings
from eventsql_orchestration.cli.findings import Finding, Status
from eventsql_orchestration.database import Connection, Database, sessions
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.urls import parse_dsn, render
from eventsql_orchestration.errors import DatabaseError, DatabaseUnavailableError
from eventsql_orchestration.store import Change
from tests.conftest import own_server
from tests.fixtures import Until
from tests.log.servers import Pair
from tests.waiting import wait_until


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary with the database `app`, and its standby."""
    with ExitStack() as stack:
        primary, standby = (stack.enter_context(own_server()) for _ in range(2))
        primary.create_database("app")
        yield Pair(primary, standby)


@pytest.fixture
def platform(pair: Pair) -> Iterator[EventSQL]:
    with EventSQL(pair.url("app"), transfer=False) as opened:
        opened.registry.register_topic(Topic("orders", 2))
        yield opened


def is_read_only(connection: Connection) -> bool:
    """Whether a session takes no writes: it heeds a setting of the server a moment after the server takes it."""
    return connection.execute("SHOW transaction_read_only").fetchone() == ("on",)


def test_connections_to_a_server_that_takes_no_more_writes_are_replaced_by_those_to_another_server(
    pair: Pair, platform: EventSQL
) -> None:
    """As a failover ends that lets the former primary run, read only."""
    with ExitStack() as held:
        connections = [held.enter_context(platform.database.connection()) for _ in range(4)]
        with pair.primary.start().connect("postgres") as administrator:
            administrator.execute("ALTER SYSTEM SET default_transaction_read_only TO on")
            administrator.execute("ALTER SYSTEM RESET synchronous_standby_names")
            administrator.execute("SELECT pg_reload_conf()")
        for connection in connections:
            wait_until(partial(is_read_only, connection), "the session heeds the setting")
    pair.promote(lose=False)

    def insist(call: Callable[[], object]) -> int:
        """Call it until it succeeds; gives how often it was refused."""
        for refused in range(10):
            with suppress(DatabaseError):
                call()
                return refused
        raise AssertionError("connections stay with the former primary")

    assert insist(lambda: platform.registry.register_topic(Topic("refunds"))) > 0
    assert insist(lambda: platform.publisher.publish(Publication("orders", b"1"))) > 0
    with ExitStack() as held:
        for _ in range(4):
            connection = held.enter_context(platform.database.connection())
            insist(lambda: platform.publisher.publish(Publication("orders", b"2")))
            assert connection.execute("SHOW transaction_read_only").fetchone() == ("off",)
    assert platform.transfer.run_once() == {"orders": 5}


def test_a_process_that_has_used_a_promoted_standby_publishes_nothing_to_the_former_primary(
    pair: Pair, platform: EventSQL, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    database = platform.database
    orders = list(platform.registry.topics())

    def finds_the_promoted_server() -> bool:
        with suppress(DatabaseUnavailableError), database.connection() as connection:
            # Its own standby is the former primary, and commits would wait for it.
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
            return True
        return False

    assert list(servers_finding(database)) == []
    port = int((pair.standby.directory / "port").read_text())
    standby = parse_dsn(pair.primary.start().dsn_for("app")).set(port=port)
    with Database(render(standby)) as read_only:
        finding = server_finding(read_only)
    assert (finding.status, "is a standby" in finding.message) == (Status.PROBLEM, True)
    pair.promote()
    until(finds_the_promoted_server)
    assert [each for each in caplog.records if each.levelno == logging.WARNING and "promoted" in each.getMessage()]

    # It is the first server of the URL, and takes writes.
    former = pair.primary.start()
    refused: list[DatabaseUnavailableError] = []
    with ExitStack() as held:
        for _ in range(5):
            try:
                connection = held.enter_context(database.transaction())
                platform.publisher.publish(Publication("orders", b"1"), connection=connection)
            except DatabaseUnavailableError as error:
                refused.append(error)
    assert refused
    assert all(f"127.0.0.1:{former.port} is a former primary" in each.message for each in refused)
    with former.connect("app") as connection:
        assert connection.execute("SELECT FROM eventsql.event_buffer").rowcount == 0

    (finding,) = servers_finding(database)
    assert finding.status is Status.PROBLEM
    assert str(former.port) in finding.message
    pair.primary.stop()
    assert list(servers_finding(database)) == []
    assert list(platform.registry.topics()) == orders


def waiting(platform: EventSQL) -> list[Finding]:
    """The doctor's findings of commits that wait for a standby."""
    return list(commit_findings(platform.database, longer_than=0.0))


@contextmanager
def commit_that_waits(server: EmbeddedPostgres, platform: EventSQL, commit: Callable[[], object]) -> Iterator[None]:
    """Let a server wait for a standby that is absent, and commit in a thread until a commit waits.

    The server heeds the setting a moment after it takes the setting: a commit before that does not wait.
    """
    ended = threading.Event()

    def commit_on() -> None:
        while not ended.is_set():
            commit()

    with server.start().connect("postgres") as administrator, ThreadPoolExecutor() as executor:

        def reload(statement: str) -> None:
            administrator.execute(statement)
            administrator.execute("SELECT pg_reload_conf()")

        reload("ALTER SYSTEM SET synchronous_standby_names TO 'absent'")
        committing = executor.submit(commit_on)
        try:
            wait_until(lambda: waiting(platform), "a commit waits for a standby")
            yield
        finally:
            ended.set()
            reload("ALTER SYSTEM RESET synchronous_standby_names")
        committing.result()


def test_commits_that_wait_for_a_standby_are_named_and_not_as_transactions_that_may_be_ended() -> None:
    """Whoever ends such a session lets others see events that a failover loses."""
    with own_server() as server, EventSQL(server.create_database("app"), transfer=False) as platform:
        platform.registry.register_topic(Topic("orders"))
        assert waiting(platform) == []
        with commit_that_waits(server, platform, lambda: platform.publisher.publish(Publication("orders", b"1"))):
            (finding,) = waiting(platform)
            assert finding.status is Status.PROBLEM
            assert "'absent'" in finding.message
            assert list(transaction_findings(platform.database, longer_than=0.0)) == []
        assert waiting(platform) == []


def test_a_subscription_that_waits_for_a_commit_that_waits_for_a_standby_asks_for_the_standby() -> None:
    """Changes that need no standby are committed behind a change that waits for it."""
    with own_server() as server, EventSQL(server.create_database("app"), transfer=False) as platform:
        store = platform.store
        ids = map(str, itertools.count())
        store.subscribe("mailer", lambda _change, _connection: None, background=False).run_once()

        def place(connection: Connection | None = None) -> None:
            store.append("order", next(ids), [Change("placed", {})], expected_version=0, connection=connection)

        with commit_that_waits(server, platform, place):
            with platform.database.transaction() as connection:
                connection.execute("SET LOCAL synchronous_commit TO local")
                place(connection)
            (found,) = store_findings(platform.shards[0], stalled_after=0.0)
            assert found.remedy is not None
            assert "pg_terminate_backend" not in found.remedy
            (lag,) = store.subscriptions()
            assert "its commit waits for a standby" in str(lag.why)


def test_a_server_that_the_url_names_twice_is_one_server(direct_dsn: str) -> None:
    """As two poolers before one primary, or an address that moves to the primary beside the primary's own."""
    url = parse_dsn(direct_dsn)
    twice = url.set(host=None, port=None, query={"host": "127.0.0.1,localhost", "port": f"{url.port},{url.port}"})
    with Database(render(twice)) as database:
        assert list(servers_finding(database)) == []


def test_a_thread_that_still_finds_the_former_primary_does_not_hide_the_promoted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread connects to the promoted server while another thread notes the timeline of the former primary."""
    asked = threading.Event()

    def find(timeline: int) -> None:
        def execute(*_: object, **__: object) -> Any:
            if timeline == 2:
                asked.set()
            return SimpleNamespace(fetchone=lambda: ("cluster", timeline, 0.0))

        connection: Any = SimpleNamespace(
            autocommit=True, execute=execute, info=SimpleNamespace(host=f"db{timeline}", port=5432)
        )
        sessions._check_timeline(connection, "db1,db2")

    other = threading.Thread(target=find, args=(2,))

    class Timelines(dict[tuple[str, str], int]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if threading.current_thread() is not other:
                other.start()
                wait_until(lambda: not other.is_alive() or (asked.is_set() and sessions._TURN.lock.locked()))
            return found

    timelines = Timelines()
    monkeypatch.setattr(sessions, "_TIMELINES", timelines)
    find(1)
    other.join()
    assert timelines == {("db1,db2", "cluster"): 2}
