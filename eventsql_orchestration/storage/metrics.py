"""The readings of topics' logs for a scrape of metrics, with few statements for each topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.storage.log_form import stored
from eventsql_orchestration.storage.log_queries import LogQueries

COUNTED: Final = 10_000
"""Events that are counted for each consumer partition, and dead letters for each topic. Counting a long backlog at each
scrape would cost more than consuming it."""


@dataclass(frozen=True, slots=True)
class LogFigures:
    """A topic's log: its identity, its newest offset, the seconds since its oldest event entered it (None if it is
    empty), and its bytes.
    """

    identity: int
    end: int
    oldest_seconds: float | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The events of a log that a consumer partition has left.

    `events` is at most `COUNTED`, and `furthest` is the offset of the last counted event. `seconds` is the age of the
    oldest event. `bounded` says that the oldest event lies beyond the last offset that the partition may consume now.
    """

    events: int
    furthest: int
    seconds: float
    bounded: bool


class LogMetrics:
    """Reads figures of logs, each method with one statement."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._queries = LogQueries("metrics", schema)

    def readable(self, connection: Connection, topics: Sequence[str]) -> list[str]:
        """The topics among `topics` whose logs exist and may be read by the current role."""
        logs = [stored(connection, self._schema, topic).as_string(connection) for topic in topics]
        rows = fetch_all(connection, self._queries("readable"), {"topics": list(topics), "logs": logs})
        return [topic for (topic,) in rows]

    def log(self, connection: Connection, topic: str) -> LogFigures:
        """The figures of a topic's log."""
        return LogFigures(*fetch_one(connection, self._queries.on(connection, "log", topic), prepare=False))

    def waiting(self, connection: Connection, topic: str) -> dict[tuple[str, int], Waiting]:
        """The events that wait for each consumer of a topic and each of its partitions."""
        values = {"topic": topic, "most": COUNTED}
        rows = fetch_all(connection, self._queries.on(connection, "waiting", topic), values, prepare=False)
        return {
            (consumer, partition): Waiting(events, furthest or 0, max(0.0, seconds or 0.0), below is False)
            for consumer, partition, events, furthest, seconds, below in rows
        }

    def open_letters(self, connection: Connection, topic: str) -> int:
        """How many of the newest letters of a dead letter topic were not redriven."""
        values = {"topic": topic, "most": COUNTED}
        row = fetch_one(connection, self._queries("open_letters", topic=topic), values, prepare=False)
        return int(row[0])
