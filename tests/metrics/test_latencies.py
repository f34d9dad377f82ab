"""Publishers and handlers that are given to `Latencies` are measured, whether they succeed or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import TopicNotFoundError, ValidationError
from eventsql_orchestration.metrics import Latencies


def test_calls_are_counted_by_topic_consumer_and_outcome(platform: EventSQL) -> None:
    for name in ("orders", "payments"):
        platform.registry.register_topic(Topic(name)).register_consumer(Consumer(name, "mailer"))
    registry = CollectorRegistry()
    latencies = Latencies(registry)
    publisher = latencies.publisher(platform.publisher)
    publisher.publish(Publication("orders", b"1"))
    assert publisher.publish_all(Publication("orders", b"") for _ in range(3)) == 3
    assert publisher.publish_all([Publication("orders", b""), Publication("payments", b"")]) == 2
    with pytest.raises(TopicNotFoundError):
        publisher.publish(Publication("nowhere", b""))

    def published(topic: str, outcome: str) -> float | None:
        return registry.get_sample_value("eventsql_publish_seconds_count", {"topic": topic, "outcome": outcome})

    assert [published("orders", "done"), published("(several)", "done"), published("nowhere", "failed")] == [2, 1, 1]
    platform.transfer.run_once()
    assert platform.reader.count("orders") == 5

    handled: list[int] = []

    def handle(events: Sequence[Event], _connection: Connection) -> None:
        handled.extend(event.id for event in events)
        if len(events) > 1:
            raise ValueError

    platform.consumers.consume_once("orders", "mailer", latencies.handler("orders", "mailer", handle))

    def counted(outcome: str) -> float | None:
        own = {"topic": "orders", "consumer": "mailer", "outcome": outcome}
        return registry.get_sample_value("eventsql_handle_seconds_count", own)

    assert counted("failed") == 1
    assert counted("done") == len(handled) - 5


def test_a_function_that_is_no_handler_is_refused() -> None:
    async def handle(_events: object, _connection: object) -> None:
        pass

    with pytest.raises(ValidationError):
        Latencies(CollectorRegistry()).handler("orders", "mailer", handle)


@pytest.mark.parametrize("wrong", [None, {"topic": "orders"}, "orders", Publication("orders", b"")])
def test_an_object_that_is_no_publication_is_refused_as_by_the_publisher(platform: EventSQL, wrong: Any) -> None:
    platform.registry.register_topic(Topic("orders"))
    measured = Latencies(CollectorRegistry()).publisher(platform.publisher)

    def refused(publish: Callable[[Any], object], given: object) -> tuple[type[Exception], str]:
        with pytest.raises(ValidationError) as error:
            publish(given)
        return type(error.value), str(error.value)

    for given in (wrong, [wrong]) if not isinstance(wrong, Publication) else (wrong,):
        assert refused(measured.publish_all, given) == refused(platform.publisher.publish_all, given)
    if not isinstance(wrong, Publication):
        assert refused(measured.publish, wrong) == refused(platform.publisher.publish, wrong)
