"""A primary whose standby was promoted, and that comes back: no process that knows of the promotion writes to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.cli.doctor_database import servers_finding
from eventsql_orchestration.cli.findings import Status
from eventsql_orchestration.errors import DatabaseUnavailableError
from tests.conftest import own_server
from tests.fixtures import Until
from tests.log.servers import Pair


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
