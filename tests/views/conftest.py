"""What the tests of views share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from eventsql_orchestration.database import Database
from eventsql_orchestration.views import Views

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)


@pytest.fixture
def views(database: Database) -> Views:
    return Views(database)
