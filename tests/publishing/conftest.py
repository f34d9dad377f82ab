"""What the tests of publishers share: topics, orders, a held commit, and the events in the buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from tests.fixtures import Sessions

Hold: TypeAlias = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def hold(sessions: Sessions) -> Hold:
    """Keeps every flush from being committed while its block runs."""

    @contextmanager
    def held() -> Iterator[None]:
        session = sessions()
        session.execute("LOCK TABLE eventsql.event_buffer IN SHARE MODE")
        try:
            yield
        finally:
            session.close()

    return held


@pytest.fixture
def elsewhere(dsn: str) -> Iterator[EventSQL]:
    """Another process's platform, which knows nothing of what the test's platform remembers."""
    with EventSQL(dsn, transfer=False) as platform:
        yield platform


def prepare(platform: EventSQL) -> None:
    """The topics of most of these tests."""
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("payments"))


def order(value: object, **fields: Any) -> Publication:
    """An event of `orders`. A value that is not bytes becomes text."""
    return Publication("orders", value if isinstance(value, bytes) else str(value).encode(), **fields)


def published(platform: EventSQL) -> list[bytes]:
    """The values that anybody sees in the buffer."""
    with platform.database.connection() as connection:
        rows = connection.execute(
            "SELECT v FROM eventsql.event_buffer, unnest(coalesce(eql_values, ARRAY[eql_value])) WITH ORDINALITY "
            "AS e (v, n) "
            "ORDER BY eql_id, n"
        )
        return [value for (value,) in rows]
