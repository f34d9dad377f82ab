"""Logs whose segments are so small that a test can fill several of them."""

from __future__ import annotations

import pytest

from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.storage import segments


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
