"""What tests of handlers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def gates() -> Iterator[Callable[[], threading.Event]]:
    """Events that are set at the end of the test at the latest, so that no handler waits for ever."""
    opened: list[threading.Event] = []

    def gate() -> threading.Event:
        opened.append(threading.Event())
        return opened[-1]

    yield gate
    for each in opened:
        each.set()
