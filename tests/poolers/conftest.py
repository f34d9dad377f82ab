"""What the tests through a pooler share: a PgBouncer, and a database behind it, looked through after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.poolers.pgbouncer import MISSING, PROGRAM, PgBouncer, left_behind, running


@pytest.fixture(scope="session")
def pgbouncer(server: EmbeddedPostgres) -> Iterator[PgBouncer]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with running(server.start().dsn) as pooler:
        yield pooler


@pytest.fixture
def pooled_dsn(direct_dsn: str, pgbouncer: PgBouncer) -> Iterator[str]:
    """The URL that leads to the pooler. Whatever the test did, it leaves nothing on the server's sessions."""
    dsn = pgbouncer.url(direct_dsn)
    yield dsn
    assert left_behind(dsn) == []


@pytest.fixture
def pooled_database(pooled_dsn: str) -> Iterator[Database]:
    with Database(pooled_dsn) as database:
        yield database


@pytest.fixture
def pooled(pooled_dsn: str) -> Iterator[EventSQL]:
    """The platform behind the pooler; events move only when the test transfers them."""
    with EventSQL(pooled_dsn, transfer=False) as platform:
        yield platform
