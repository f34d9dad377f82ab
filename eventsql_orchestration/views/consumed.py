"""The state of a view's consumer: its offsets, its filter, and how its handler gets the events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.consuming.dead_letter_values import REDRIVEN_CONSUMER
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.errors import ViewConflictError
from eventsql_orchestration.model import NOT_PARTITIONED, Event
from eventsql_orchestration.storage import segments
from eventsql_orchestration.topics.catalog import no_consumer
from eventsql_orchestration.views.feeds import ViewFeed


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far the partitions of a topic are consumed. Without offsets, nothing is consumed."""

    by_partition: Mapping[int, int]

    @property
    def most(self) -> int:
        return max(self.by_partition.values(), default=0)

    def of(self, partition: int) -> int:
        # All events of the topic's former partitions come before the events of its present partitions.
        return self.by_partition.get(partition, self.most)


@dataclass(frozen=True, slots=True)
class Consumed:
    """A feed's consumer at one time: its offsets and filter, the topic's layout, and reasons against a rebuild.

    `repartitioned`: a key may have events in several partitions of the topic. `in_former_layout`: an offset bounds the
    consumer until it has consumed all events from before the change of partitions or shards.
    """

    feed: ViewFeed
    offsets: Offsets
    filter: EventFilter | None
    layout: int
    repartitioned: bool
    in_former_layout: bool
    in_queue: bool

    @classmethod
    def read(cls, connection: Connection, schema: str, feed: ViewFeed) -> Consumed:
        """The state of the consumer now. Raises `ConsumerNotFoundError`."""
        values = {"topic": feed.topic, "consumer": feed.consumer}
        rows = fetch_all(connection, Queries("views", schema)("consumer_offsets"), values, prepare=False)
        if not rows:
            raise no_consumer(feed.topic, feed.consumer)
        return cls(
            feed, Offsets({partition: offset for partition, offset, *_ in rows}), EventFilter.from_json(rows[0][3]),
            rows[0][5], rows[0][6], any(row[2] is not None for row in rows), any(row[4] for row in rows),
        )  # fmt: skip

    def check(self, layout: int, since: Consumed | None) -> None:
        """Raise `ViewConflictError` unless the view follows from the events up to these offsets, in their order.

        `layout` is the topic's at the beginning of the rebuild. `since` is an earlier state, whose events were applied.
        """
        before = self if since is None else since
        same_partitions = self.offsets.by_partition.keys() == before.offsets.by_partition.keys()
        for what, wrong in (
            ("is in the middle of a change of the topic's partitions", self.in_former_layout),
            ("is consumed as a queue, out of order", self.in_queue),
            ("got other partitions meanwhile", self.layout != layout or not same_partitions),
            ("got another filter meanwhile", self.filter != before.filter),
            (
                "was moved back meanwhile",
                any(self.offsets.of(each) < offset for each, offset in before.offsets.by_partition.items()),
            ),
        ):
            if wrong:
                raise ViewConflictError(
                    f"view {self.feed.view.name!r} was not recomputed: consumer {self.feed.consumer!r} {what}; try "
                    "again when the consumer has consumed its events in order"
                )

    def takes(self, event: Event) -> bool:
        """Whether the event counts. A redriven event repeats an earlier event, which was counted already."""
        if self.filter is not None and not self.filter.matches(event):
            return False
        return event.metadata.get(REDRIVEN_CONSUMER) != self.feed.consumer

    def groups(self, events: Sequence[Event]) -> Iterable[Sequence[Event]]:
        """Events as the consumer's handler gets them."""
        if NOT_PARTITIONED in self.offsets.by_partition:
            return [events]
        if self.repartitioned:
            # Events of a key come first from one partition, and then from another.
            return [list(group) for _, group in groupby(events, attrgetter("partition"))]
        by_partition: dict[int, list[Event]] = {}
        for event in events:
            by_partition.setdefault(event.partition, []).append(event)
        return by_partition.values()


def check_history(connection: Connection, schema: str, feed: ViewFeed) -> None:
    """Raise `ViewConflictError` if retention has dropped events of the feed's topic."""
    floor = segments.floor(connection, schema, feed.topic)
    if floor > 1:
        raise ViewConflictError(
            f"view {feed.view.name!r} is not recomputed: retention has dropped the events of topic {feed.topic!r} "
            f"before offset {floor}, so entries that follow from them would be lost; give partial=True if that is right"
        )
