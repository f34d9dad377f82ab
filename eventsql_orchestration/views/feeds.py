"""How views follow from the events of topics, for handlers and for rebuilds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, TypeAlias

from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.model import Event
from eventsql_orchestration.views.definitions import Definition
from eventsql_orchestration.views.view_table import make_periods


class ViewFeed(ABC):
    """How a view follows from the events of a topic: the consumer's handler calls `apply`, and so does a rebuild.

    A subclass names the view's definition, the topic and the consumer, and writes the view in `apply`. docs/views.md
    has an example.
    """

    view: ClassVar[Definition]
    topic: ClassVar[str]
    consumer: ClassVar[str]

    @abstractmethod
    def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
        """Write the entries of events to `view`, a `TimelineView`, `RollupView` or `LogsView`.

        The events are in order, and of one partition if the consumer is partitioned. Write with `connection`, and
        nothing but the view: a rebuild applies all events again, to another table.
        """


@dataclass(frozen=True, slots=True)
class ViewFilling:
    """The task of a fill: write the entries of a topic's events, up to the consumer's offsets, to a view.

    The view is `definition`, empty and in the schema of `database`. Entries at `oldest` or before are left out, and ids
    are larger than `after_id`. `offsets` has the offset of each partition, or of -1 for a consumer without partitions.
    A partition that is missing there is read up to the largest offset. Events that `filter` does not take are left out,
    and so are events that were redriven for the feed's consumer.

    Each transaction that writes to the view first adds a row to the table `ledger`: the name of the view's table, and a
    number of its own. If the row is there, it writes nothing.
    """

    feed: ViewFeed
    database: Database
    definition: Definition
    ledger: str
    offsets: Mapping[int, int]
    filter: EventFilter | None
    oldest: datetime | None
    after_id: int

    def make_periods(self, starts: Iterable[datetime]) -> None:
        """Make the partitions that begin at these times."""
        with self.database.transaction() as connection:
            make_periods(connection, self.database.schema, self.definition, starts)


ViewFill: TypeAlias = Callable[[ViewFilling], object]
"""Writes the entries of events in bulk. `spark.views.SparkViewFill` is one."""
