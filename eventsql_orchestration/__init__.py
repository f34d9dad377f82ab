"""Events over SQL databases, operated from Dagster.

`EventSQL` is the whole platform on one database; the other names are what it takes and gives. Neither pyspark nor
dagster is imported by this package: the data source lives in `eventsql_orchestration.spark`, the orchestration in
`eventsql_orchestration.dagster`.
"""

from typing import TYPE_CHECKING, Any

from eventsql_orchestration.model import (
    NOT_PARTITIONED,
    Consumer,
    ConsumerState,
    Event,
    OffsetRange,
    Publication,
    Topic,
)

if TYPE_CHECKING:
    from eventsql_orchestration.log.asynchronous import AsyncPublisher
    from eventsql_orchestration.log.buffered import Acknowledgement, BufferedPublisher
    from eventsql_orchestration.platform import EventSQL

__all__ = [
    "NOT_PARTITIONED",
    "Acknowledgement",
    "AsyncPublisher",
    "BufferedPublisher",
    "Consumer",
    "ConsumerState",
    "Event",
    "EventSQL",
    "OffsetRange",
    "Publication",
    "Topic",
]


def __getattr__(name: str) -> Any:
    # Each of Spark's Python workers imports this package. SQLAlchemy and Alembic, which only the platform needs, would
    # make that six times as long.
    if name == "EventSQL":
        from eventsql_orchestration.platform import EventSQL  # noqa: PLC0415 - on first use

        return EventSQL
    if name == "BufferedPublisher":
        from eventsql_orchestration.log.buffered import BufferedPublisher  # noqa: PLC0415 - on first use

        return BufferedPublisher
    if name == "Acknowledgement":
        from eventsql_orchestration.log.buffered import Acknowledgement  # noqa: PLC0415 - on first use

        return Acknowledgement
    if name == "AsyncPublisher":
        from eventsql_orchestration.log.asynchronous import AsyncPublisher  # noqa: PLC0415 - on first use

        return AsyncPublisher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
