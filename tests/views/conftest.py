"""What the tests of views share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.util import find_spec

import pytest

from eventsql_orchestration.database import Database
from eventsql_orchestration.views import Views

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)

SKETCHES = find_spec("datasketches") is not None
"""Whether the package of the extra [sketches] is there: it has no wheels for Python 3.14 yet."""


@pytest.fixture
def views(database: Database) -> Views:
    return Views(database)
