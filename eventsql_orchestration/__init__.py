"""Events over SQL databases, operated from Dagster.

`EventSQL` is the whole platform on one database, or over several; the other names are what it takes and gives. Neither
pyspark nor dagster is imported by this package: the data source lives in `eventsql_orchestration.spark`, the
orchestration in `eventsql_orchestration.dagster`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from eventsql_orchestration.model import (
    EVERY_EVENT,
    NOT_PARTITIONED,
    Consumer,
    ConsumerState,
    Event,
    EventFilter,
    OffsetRange,
    Publication,
    Retention,
    Topic,
)

if TYPE_CHECKING:
    from eventsql_orchestration.log.asynchronous import AsyncPublisher
    from eventsql_orchestration.log.buffered import Acknowledgement, BufferedPublisher
    from eventsql_orchestration.log.horizon import Checkpoint, HorizonReader
    from eventsql_orchestration.log.lag import ConsumerLag
    from eventsql_orchestration.log.positions import AtOffset, AtTime, Back, Earliest, Latest, ShiftBy
    from eventsql_orchestration.platform import EventSQL

__all__ = [
    "EVERY_EVENT",
    "NOT_PARTITIONED",
    "Acknowledgement",
    "AsyncPublisher",
    "AtOffset",
    "AtTime",
    "Back",
    "BufferedPublisher",
    "Checkpoint",
    "Consumer",
    "ConsumerLag",
    "ConsumerState",
    "Earliest",
    "Event",
    "EventFilter",
    "EventSQL",
    "HorizonReader",
    "Latest",
    "OffsetRange",
    "Publication",
    "Retention",
    "ShiftBy",
    "Topic",
]

_ON_FIRST_USE = {
    "Acknowledgement": "log.buffered",
    "AsyncPublisher": "log.asynchronous",
    "AtOffset": "log.positions",
    "AtTime": "log.positions",
    "Back": "log.positions",
    "BufferedPublisher": "log.buffered",
    "Checkpoint": "log.horizon",
    "ConsumerLag": "log.lag",
    "Earliest": "log.positions",
    "EventSQL": "platform",
    "HorizonReader": "log.horizon",
    "Latest": "log.positions",
    "ShiftBy": "log.positions",
}
"""Where the names are that need SQLAlchemy. Each of Spark's Python workers imports this package, and SQLAlchemy would
make that six times as long."""


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
