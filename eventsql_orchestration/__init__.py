"""An event log in PostgreSQL, operated from Dagster.

`EventSQL` is the whole platform on one database, or over several; its methods take and return objects of the other
names. Neither pyspark nor dagster is imported by this package: the data source lives in `eventsql_orchestration.spark`,
the orchestration in `eventsql_orchestration.dagster`.
"""

from typing import TYPE_CHECKING

from eventsql_orchestration.consumer import EVERY_EVENT, Consumer, ConsumerState, EventFilter
from eventsql_orchestration.first_use import on_first_use
from eventsql_orchestration.model import NOT_PARTITIONED, Event, OffsetRange, Placement, Publication, Retention, Topic

if TYPE_CHECKING:
    from eventsql_orchestration.client.buffered import AsyncPublisher, BufferedPublisher
    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.consuming.claims import Claim
    from eventsql_orchestration.consuming.dead_letter_values import (
        DeadLetter,
        DeadLetterCause,
        LetterFilter,
        dead_letter,
    )
    from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
    from eventsql_orchestration.consuming.leases import Lease
    from eventsql_orchestration.consuming.running import Running
    from eventsql_orchestration.consuming.snapshot_reader import Checkpoint, SnapshotReader
    from eventsql_orchestration.database import Connection, Database
    from eventsql_orchestration.publishing.buffered import Acknowledgement
    from eventsql_orchestration.shards.shard import Shard
    from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest, ShiftBy

__all__ = [
    "EVERY_EVENT", "NOT_PARTITIONED", "Acknowledgement", "AsyncPublisher", "AtOffset", "AtTime", "Back",
    "BufferedPublisher", "Checkpoint", "Claim", "Connection", "Consumer", "ConsumerLag", "ConsumerState", "Database",
    "DeadLetter", "DeadLetterCause", "Earliest", "Event", "EventFilter", "EventSQL", "LagCause", "Latest", "Lease",
    "LetterFilter", "OffsetRange", "Placement", "Publication", "Retention", "Running", "Shard", "ShiftBy",
    "SnapshotReader", "Topic", "dead_letter",
]  # fmt: skip

# Each of Spark's Python workers imports this package, and SQLAlchemy would make that six times as long.
__getattr__ = on_first_use(
    __name__,
    {
        ".client.buffered": ("AsyncPublisher", "BufferedPublisher"),
        ".client.eventsql": ("EventSQL",),
        ".consuming.claims": ("Claim",),
        ".consuming.dead_letter_values": ("DeadLetter", "DeadLetterCause", "LetterFilter", "dead_letter"),
        ".consuming.lag_values": ("ConsumerLag", "LagCause"),
        ".consuming.leases": ("Lease",),
        ".consuming.running": ("Running",),
        ".consuming.snapshot_reader": ("Checkpoint", "SnapshotReader"),
        ".database": ("Connection", "Database"),
        ".publishing.buffered": ("Acknowledgement",),
        ".shards.shard": ("Shard",),
        ".topics.positions": ("AtOffset", "AtTime", "Back", "Earliest", "Latest", "ShiftBy"),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
