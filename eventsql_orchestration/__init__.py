"""Events over SQL databases, operated from Dagster.

`EventSQL` is the whole platform on one database; the other names are what it takes and gives. Neither pyspark nor
dagster is imported by this package: the data source lives in `eventsql_orchestration.spark`, the orchestration in
`eventsql_orchestration.dagster`.
"""

from eventsql_orchestration.model import (
    NOT_PARTITIONED,
    Consumer,
    ConsumerState,
    Event,
    OffsetRange,
    Publication,
    Topic,
)
from eventsql_orchestration.platform import EventSQL

__all__ = [
    "NOT_PARTITIONED",
    "Consumer",
    "ConsumerState",
    "Event",
    "EventSQL",
    "OffsetRange",
    "Publication",
    "Topic",
]
