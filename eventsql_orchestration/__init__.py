"""Events over SQL databases, operated from Dagster.

`EventSQL` is the whole platform on one database, or over several; it takes and gives the other names. Neither
pyspark nor dagster is imported by this package: the data source lives in `eventsql_orchestration.spark`, the
orchestration in `eventsql_orchestration.dagster`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from eventsql_orchestration.consumer import EVERY_EVENT, Consumer, ConsumerState, EventFilter
from eventsql_orchestration.model import NOT_PARTITIONED, Event, OffsetRange, Publication, Retention, Topic

if TYPE_CHECKING:
    from eventsql_orchestration.client.buffered import AsyncPublisher, BufferedPublisher
    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.consuming.claims import Claim
    from eventsql_orchestration.consuming.lag import ConsumerLag
    from eventsql_orchestration.consuming.snapshot_reader import Checkpoint, SnapshotReader
    from eventsql_orchestration.database import Connection, Database
    from eventsql_orchestration.publishing.buffered import Acknowledgement
    from eventsql_orchestration.shards.shard import Shard
    from eventsql_orchestration.topics.offsets import AtOffset, AtTime, Back, Earliest, Latest, ShiftBy

__all__ = [
    "EVERY_EVENT", "NOT_PARTITIONED", "Acknowledgement", "AsyncPublisher", "AtOffset", "AtTime", "Back",
    "BufferedPublisher", "Checkpoint", "Claim", "Connection", "Consumer", "ConsumerLag", "ConsumerState", "Database",
    "Earliest", "Event", "EventFilter", "EventSQL", "Latest", "OffsetRange", "Publication", "Retention", "Shard",
    "ShiftBy", "SnapshotReader", "Topic",
]  # fmt: skip

_ON_FIRST_USE = {
    "client.buffered": ("AsyncPublisher", "BufferedPublisher"),
    "client.eventsql": ("EventSQL",),
    "consuming.claims": ("Claim",),
    "consuming.lag": ("ConsumerLag",),
    "consuming.snapshot_reader": ("Checkpoint", "SnapshotReader"),
    "database": ("Connection", "Database"),
    "publishing.buffered": ("Acknowledgement",),
    "shards.shard": ("Shard",),
    "topics.offsets": ("AtOffset", "AtTime", "Back", "Earliest", "Latest", "ShiftBy"),
}
"""Where the names are that need SQLAlchemy. Each of Spark's Python workers imports this package, and SQLAlchemy would
make that six times as long."""


def __getattr__(name: str) -> Any:
    for room, names in _ON_FIRST_USE.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{room}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
