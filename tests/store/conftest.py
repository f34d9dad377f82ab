"""Fixtures of the tests of the event store."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from eventsql_orchestration.database import Database
from eventsql_orchestration.store import Store


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
def other_writer() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor
