"""What tests of handlers share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from eventsql_orchestration import Consumer, ConsumerState, EventSQL, Topic
from tests.effects import make_table
from tests.waiting import PATIENCE


def prepare(platform: EventSQL) -> None:
    """A topic with partitions and one without, a consumer of each, and the table for their effects."""
    make_table(platform)
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("payments"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    platform.registry.register_consumer(Consumer("payments", "mailer"), max_attempts=3)


def state_of(platform: EventSQL) -> ConsumerState:
    """The state of the consumer `mailer` of the topic `orders`, in its first partition."""
    return platform.registry.consumer("orders", "mailer")[0]


def levels(caplog: pytest.LogCaptureFixture, *modules: ModuleType) -> list[str]:
    """The levels of what these modules logged."""
    names = {module.__name__ for module in modules}
    return [record.levelname for record in caplog.records if record.name in names]


class Halt:
    """A handler, or a part of one, that stands still until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._over = threading.Event(), threading.Event()

    def __call__(self, *_arguments: object) -> None:
        self._reached.set()
        self._over.wait()

    def await_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "no handler runs"

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def halt() -> Iterator[Halt]:
    """Ends with the test at the latest, so that no handler waits for ever."""
    halt = Halt()
    yield halt
    halt.end()
