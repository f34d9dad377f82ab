"""A session of benchmarks on the test's database, and what benchmarks have in a database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.bench.session import PREFIX, Session


@pytest.fixture
def session(platform: EventSQL) -> Iterator[Session]:
    with Session(platform) as entered:
        yield entered


def tables(platform: EventSQL) -> set[str]:
    """The tables of benchmarks."""
    with platform.database.connection() as connection:
        rows = connection.execute(
            "SELECT relname FROM pg_class WHERE starts_with(relname, %s) AND relkind IN ('r', 'p')", [PREFIX]
        )
        return {str(name) for (name,) in rows}


def queues(platform: EventSQL) -> list[str]:
    """All queues."""
    with platform.database.connection() as connection:
        return [str(name) for (name,) in connection.execute("SELECT eql_name FROM eventsql.queue")]
