"""What the tests of shards share: several databases on the session's one server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import psycopg
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.conftest import copy_database
from tests.fixtures import Spawn, Until, Worker, until

__all__ = ["Databases", "Open", "Spawn", "Until", "Worker", "until"]

Databases: TypeAlias = Callable[[int], list[str]]
Open: TypeAlias = Callable[..., EventSQL]


@contextmanager
def database_of(server: EmbeddedPostgres) -> Iterator[str]:
    """A migrated database of its own; gives its URL."""
    running, name = server.start(), f"shard_{uuid.uuid4().hex}"
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        copy_database(connection, name)
    try:
        yield running.dsn_for(name)
    finally:
        server.drop_database(name)


@pytest.fixture
def databases(server: EmbeddedPostgres) -> Iterator[Databases]:
    """Makes migrated databases that hold nothing."""
    with ExitStack() as stack:
        yield lambda number: [stack.enter_context(database_of(server)) for _ in range(number)]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens platforms on several databases, in which events move only when the test transfers them."""
    with ExitStack() as stack:

        def open_platform(*dsns: str, transfer: bool = False, **options: object) -> EventSQL:
            return stack.enter_context(EventSQL(*dsns, transfer=transfer, **options))  # type: ignore[arg-type]

        yield open_platform
