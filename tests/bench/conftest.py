"""A session of benchmarks on the test's database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.bench.session import Session


@pytest.fixture
def session(platform: EventSQL) -> Iterator[Session]:
    with Session(platform) as entered:
        yield entered
