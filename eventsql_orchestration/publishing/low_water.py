"""The low-water mark of the buffer: the id below which no event can appear any more."""

from __future__ import annotations

import time
from typing import Final

from eventsql_orchestration.database import Connection, Queries, is_pooled, tables
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.storage import sequences

OBSERVE_SECONDS: Final = 0.05
"""The shortest time between two lists of the transactions that may have written to the buffer. A mark that is late
costs only a step over dead index entries."""

LEAST_MARKS: Final = 1_000
"""The least number of marks before those of deleted topics are dropped. A look sends every mark. Measured with marks of
10,000 topics that came and went: a look takes 30 ms instead of 0.3."""


class LowWater:
    """The largest buffer id that is decided: no event with that id or a smaller one can appear any more.

    An event gets its id from a sequence, one by one, before its transaction commits. A transaction that drew an id
    holds `ROW EXCLUSIVE` on the buffer from before the draw until its end, and other sessions see its end before the
    lock goes. So read the newest id that was given out, then list the transactions that hold the lock. When all of them
    have ended, every id up to that one is decided. A transaction that only keeps a snapshot open is not in the list and
    does not hold the mark back. A prepared transaction stays in the list.

    The knowledge belongs to one connection to one server process. A server that crashed or failed over may give out ids
    again, and a connection pooler may put another server behind the same connection.
    """

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._queries = Queries("log", schema)
        self._forget("")

    def _forget(self, process: str) -> None:
        """Start anew with the server process that `process` identifies."""
        self._process = process
        self._observed_at = 0.0
        self._decided = 0
        self._candidate = 0
        self._writers: frozenset[str] | None = None
        self.marks: dict[str, int] = {}
        """The mark of each topic: no event with this buffer id or a smaller one is left, or can still appear."""
        self._most_marks = LEAST_MARKS

    def look(self, connection: Connection, wanted: list[str] | None) -> tuple[int, list[str]]:
        """The newest buffer id that was given out, and the topics with buffered events, of `wanted` or of all."""
        process, newest, topics = self._read(connection, wanted)
        # Through a pooler, a server that crashes and gives ids out again between two transactions goes unnoticed.
        known_server = not is_pooled(connection)
        if process != self._process or newest < self._candidate:
            self._forget(process)
            if known_server:
                sequences.advance_buffer(connection, self._schema)
            process, newest, topics = self._read(connection, wanted)

        if topics and known_server and time.monotonic() - self._observed_at >= OBSERVE_SECONDS:
            self._observed_at = time.monotonic()
            # List the writers after reading `newest`: a transaction that drew an id up to it and is not listed has
            # ended.
            relation = f'"{self._schema}".event_buffer'
            writers = connection.execute(self._queries("writers"), {"relation": relation})
            self._observe(newest, frozenset(str(writer) for (writer,) in writers))
        return newest, topics

    def _read(self, connection: Connection, wanted: list[str] | None) -> tuple[str, int, list[str]]:
        if len(self.marks) > self._most_marks:
            self._drop_marks_of_deleted_topics(connection)
        looked = {"marked": list(self.marks), "low_waters": list(self.marks.values()), "wanted": wanted}
        process, newest, topics, in_order = fetch_one(connection, self._queries("look"), looked)
        if not in_order:
            sequences.check(connection, self._schema, tables.event_buffer.name)
        return process, newest, topics

    def _drop_marks_of_deleted_topics(self, connection: Connection) -> None:
        present = connection.execute(self._queries("present_topics"), {"topics": list(self.marks)}).fetchall()
        self.marks = {topic: self.marks[topic] for (topic,) in present}
        # The next time, at least half of the marks have come since.
        self._most_marks = max(LEAST_MARKS, 2 * len(self.marks))

    def _observe(self, newest: int, writers: frozenset[str]) -> None:
        if self._writers is not None:
            self._writers &= writers
            if self._writers:
                return
            self._decided = self._candidate

        self._candidate, self._writers = newest, writers
        if not writers:
            self._decided, self._writers = newest, None

    def moved(self, topic: str, upto: int) -> None:
        """Note that the events of `topic` up to buffer id `upto` are moved: all events that the last look could see."""
        self.marks[topic] = max(self.marks.get(topic, 0), min(self._decided, upto))
