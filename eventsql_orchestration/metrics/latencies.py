"""How long publishing and handling take in this process, as histograms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from eventsql_orchestration.consuming.handlers import check_handler
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import MissingExtraError
from eventsql_orchestration.model import Placement, Publication
from eventsql_orchestration.publishing.batches import check_publication
from eventsql_orchestration.publishing.publisher import EventPublisher, check_many

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Histogram
except ModuleNotFoundError:
    raise MissingExtraError("metrics", "measuring latencies") from None

if TYPE_CHECKING:
    from eventsql_orchestration.database import CallersConnection

Events = TypeVar("Events")

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds. Publishing takes about a millisecond if the database is near; a handler may wait for other services."""

SEVERAL: Final = "(several)"
"""The label of a batch with events of several topics."""


class Latencies:
    """Measures the publishers and handlers that are given to it. All others cost nothing.

    Make one for each registry: `eventsql_publish_seconds{topic, outcome}` is the time of a call of `publish` or
    `publish_all`, `eventsql_handle_seconds{topic, consumer, outcome}` is the time of a call of a handler, without its
    commit. `outcome` is `done` or `failed`. The series of a topic begin with its first call.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._publish = Histogram(
            "eventsql_publish_seconds", "Time of a call that publishes.", ("topic", "outcome"),
            registry=registry, buckets=BUCKETS,
        )  # fmt: skip
        self._handle = Histogram(
            "eventsql_handle_seconds", "Time of a call of a handler.", ("topic", "consumer", "outcome"),
            registry=registry, buckets=BUCKETS,
        )  # fmt: skip

    def publisher(self, publisher: EventPublisher) -> MeasuredPublisher:
        """A publisher that measures the calls of another publisher, such as `platform.publisher`."""
        return MeasuredPublisher(publisher, self._publish)

    def handler(
        self, topic: str, consumer: str, handler: Callable[[Events, Connection], object]
    ) -> Callable[[Events, Connection], object]:
        """A handler of events, or of batches, that measures the calls of another handler.

        Raises `ValidationError` for a function that is not a handler.
        """
        check_handler(handler, "events", "connection")

        def measured(events: Events, connection: Connection) -> object:
            with _timed(self._handle, lambda: (topic, consumer)):
                return handler(events, connection)

        return measured


class MeasuredPublisher:
    """Publishes as the publisher that it measures."""

    def __init__(self, publisher: EventPublisher, histogram: Histogram) -> None:
        self._publisher = publisher
        self._histogram = histogram

    def publish(self, publication: Publication, *, connection: CallersConnection | None = None) -> Placement:
        """See `ClusterPublisher.publish`."""
        check_publication(publication)
        with _timed(self._histogram, lambda: (publication.topic,)):
            return self._publisher.publish(publication, connection=connection)

    def publish_all(self, publications: Iterable[Publication], *, connection: CallersConnection | None = None) -> int:
        """See `ClusterPublisher.publish_all`. The time of making the publications counts, too."""
        check_many(publications)
        topics: set[str] = set()

        def noted() -> Iterator[Publication]:
            for publication in publications:
                if isinstance(publication, Publication):
                    topics.add(publication.topic)
                yield publication

        with _timed(self._histogram, lambda: (topics.pop() if len(topics) == 1 else SEVERAL,)):
            return self._publisher.publish_all(noted(), connection=connection)


@contextmanager
def _timed(histogram: Histogram, labels: Callable[[], tuple[str, ...]]) -> Iterator[None]:
    began, outcome = time.perf_counter(), "failed"
    try:
        yield
        outcome = "done"
    finally:
        histogram.labels(*labels(), outcome).observe(time.perf_counter() - began)
