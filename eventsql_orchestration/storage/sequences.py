"""The sequences of ids: they give out ids one by one, upwards, above every existing id.

Readers follow the ids of a log, and the transfer follows the ids of the buffer. A sequence with CACHE above 1 gives
each session ids of its own in advance, so a smaller id appears after a larger one, when readers or the low-water mark
have passed it. A sequence that counts downwards, starts again or was set back has the same effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Queries, tables
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import SequenceError
from eventsql_orchestration.storage.log_form import form, stored_table, written_table
from eventsql_orchestration.storage.log_queries import LogQueries

logger = logging.getLogger(__name__)

SETTINGS: Final = "CACHE 1 INCREMENT BY 1 NO CYCLE"
"""The settings of each sequence. ALTER SEQUENCE makes other sessions drop the ids that they hold in advance."""

NEARLY: Final = 0.9
"""The share of a sequence's values after which it is reported as nearly used up."""

TRUST_SECONDS: Final = 1.0
"""Seconds for which a writer trusts a sequence that stands where its last batch left it. Nobody sets a sequence back to
an id so soon after it was given out. Measured: the look that this saves takes 0.1 of 0.96 ms of a batch of 50 events.
"""

LOCK_SECONDS: Final = 0.25
"""The most seconds that publishers wait while the buffer's sequence is advanced."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence as it is set, and the table that it belongs to.

    `last` is its last value: 0 before the first, None if the current role may not read it.
    """

    schema: str
    name: str
    table: str
    cache: int
    increment: int
    cycles: bool
    limit: int
    last: int | None

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    def __str__(self) -> str:
        return self.identifier.as_string()

    @property
    def wrong(self) -> str | None:
        """The settings that break the order of ids."""
        found = (
            f"CACHE {self.cache}" if self.cache != 1 else "",
            f"INCREMENT BY {self.increment}" if self.increment < 1 else "",
            "CYCLE" if self.cycles else "",
        )
        return " ".join(filter(None, found)) or None

    def error(self) -> SequenceError | None:
        """The error for its settings; None if they are right."""
        if self.wrong is None:
            return None
        finding = f"sequence {self} has {self.wrong}: ids would not grow in commit order, and events would be lost"
        return SequenceError(finding, sequence=str(self), remedy=f"ALTER SEQUENCE {self} {SETTINGS}")

    def behind(self, highest: int, *, relation: str | None = None, after: int = 0) -> SequenceError | None:
        """The error for a sequence that gives out ids below `highest`, the largest id in its table or in `relation`.

        New ids also have to be above `after`, the last id of the segments in another form.
        """
        value = max(highest, after)
        if self.last is None or self.last >= value:
            return None
        remedy = f"SELECT pg_catalog.setval('{self}', greatest({value}, last_value)) FROM {self}"  # noqa: S608 - to be read
        reason = f"{relation or self.table} has id {highest}: new ids would be smaller"
        if self.last >= highest:
            reason = f"the ids up to {after} are of segments of another form"
        finding = f"sequence {self} is at {self.last}, and {reason}"
        return SequenceError(finding, sequence=str(self), remedy=remedy)

    def nearly_used_up(self, relation: str) -> SequenceError | None:
        """The error for a sequence with few values left. `relation` has its ids."""
        if self.last is None or self.last < self.limit * NEARLY:
            return None
        finding = f"sequence {self} is nearly used up: it has given out {self.last} of {self.limit}"
        remedy = f"ALTER SEQUENCE {self} AS bigint NO MAXVALUE"
        if self.limit == 2**63 - 1:
            # Nobody counts so far. A call of `setval` with a wrong value does it.
            ids = sql.Identifier(self.schema, relation).as_string()
            largest = "greatest(1, pg_catalog.max(eql_id))"
            remedy = f"SELECT pg_catalog.setval('{self}', {largest}) FROM {ids}"  # noqa: S608 - to be read
        return SequenceError(finding, sequence=str(self), remedy=remedy)


class Ids:
    """A log writer's knowledge of the sequences of its topics."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._queries = LogQueries("sequences", schema)
        self._last: dict[str, int] = {}
        self._seen_at: dict[str, float] = {}

    def holds(self, connection: Connection, topic: str, last: int | None) -> bool:
        """False if a sequence was set back since the last look; `last` is its last id.

        If other writers took ids since, or the last look is long ago, this looks for a larger id in the log: the
        sequence may have been set back between the ids of other writers, or to the last id that this writer took. The
        caller's transaction holds the topic.
        """
        known = self._last.get(topic, 0)
        if last is None or last < known:
            return False
        if last > known or time.monotonic() - self._seen_at[topic] >= TRUST_SECONDS:
            later = self._queries.writing(connection, "later_id", topic)
            if fetch_first(connection, later, {"topic": topic, "last": last}) is not None:
                return False
        self._see(topic, last)
        return True

    def _see(self, topic: str, last: int) -> None:
        """Note the last id of a sequence."""
        self._last[topic], self._seen_at[topic] = last, time.monotonic()

    def last(self, topic: str) -> int:
        """The last id of a log, as far as this writer knows. Only larger ids may be used."""
        return self._last[topic]

    def drew(self, topic: str, ids: int) -> None:
        """Note that this number of ids of a log was taken."""
        self._last[topic] += ids

    def look(self, connection: Connection, topic: str) -> bool:
        """Check the sequence of a log in the caller's transaction, which holds the topic; advance it if it is behind.

        Returns whether the times of the log have time zones. Raises `SequenceError`.
        """
        table = written_table(connection, self._schema, topic)
        log = sql.Identifier(self._schema, table).as_string(connection)
        query = self._queries.on(connection, "log_state", topic)
        zoned, sequence, last, highest = fetch_one(connection, query, {"topic": topic, "log": log}, prepare=False)
        # Check after the statement above, which finds out whether the topic was deleted.
        check(connection, self._schema, table)
        after = _end_of_other_form(connection, self._schema, topic)
        least = max(highest, after)
        if last < least:
            (state,) = states(connection, self._schema, [table])
            try:
                # Nobody else gives out ids of this log meanwhile, so it cannot be set back by this.
                connection.execute(self._queries("advance"), {"sequence": sequence, "value": least})
            except psycopg.errors.InsufficientPrivilege as error:
                # A transfer role may draw ids, but may not set a sequence.
                raise state.behind(highest, after=after) or error from error
            logger.warning("the ids of topic %r go on after %d: its sequence was set back to %d", topic, least, last)
        self._see(topic, max(last, least))
        return bool(zoned)


def advance_buffer(connection: Connection, schema: str) -> None:
    """Advance the buffer's sequence to the ids in the buffer, on a connection in autocommit mode.

    It is behind them after a restore without sequences, or a `setval`. Raises `SequenceError` if publishers'
    transactions are in the way, or if the current role may not set it.
    """
    queries = LogQueries("sequences", schema)
    if connection.execute(queries("buffer_highest")).fetchone() is None:
        return
    try:
        with connection.transaction():
            wait_at_most(connection, LOCK_SECONDS)
            connection.execute(Queries("layouts", schema)("lock_buffer"))
            found = connection.execute(queries("buffer_highest")).fetchone()
            if found is not None:
                connection.execute(queries("advance_buffer"), {"value": found[0]})
                logger.warning("the ids of the buffer go on after %d: its sequence was set back", found[0])
    except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege) as error:
        (state,) = states(connection, schema, [tables.event_buffer.name])
        found = connection.execute(queries("buffer_highest")).fetchone()
        behind = None if found is None else state.behind(found[0])
        if behind is not None:
            raise behind from error


def states(connection: Connection, schema: str, names: Sequence[str]) -> list[SequenceState]:
    """The sequences of the tables of these names, by table."""
    values = {"tables": list(names)}
    return [SequenceState(*row) for row in fetch_all(connection, LogQueries("sequences", schema)("settings"), values)]


def check(connection: Connection, schema: str, table: str) -> None:
    """Raise `SequenceError` unless a table's ids come one by one and upwards from a sequence of its own."""
    found = states(connection, schema, [table])
    for state in found:
        if (error := state.error()) is not None:
            raise error
    if not found:
        name = sql.Identifier(schema, table).as_string(connection)
        remedy = f"ALTER SEQUENCE … OWNED BY {name}.eql_id"
        raise SequenceError(f"no sequence belongs to {name}.eql_id", remedy=remedy)


def settle(connection: Connection, schema: str, table: str) -> None:
    """Correct the settings of a table's sequence in the caller's transaction."""
    for state in states(connection, schema, [table]):
        if state.wrong is not None:
            connection.execute(sql.SQL(f"ALTER SEQUENCE {{}} {SETTINGS}").format(state.identifier))
            logger.warning("sequence %s had %s, and has %s now", state, state.wrong, SETTINGS)


def _highest(connection: Connection, schema: str, table: str) -> int:
    """The largest id in a table, as far as the current role may read it; 0 if there is none."""
    queries, name = LogQueries("sequences", schema), sql.Identifier(schema, table).as_string(connection)
    if fetch_first(connection, queries("readable"), {"table": name}) != (True,):
        return 0
    row = fetch_first(connection, queries("highest", table=table))
    return 0 if row is None or row[0] is None else int(row[0])


def _end_of_other_form(connection: Connection, schema: str, topic: str) -> int:
    """The last id of the segments of a log that are not in the form of its new events; 0 without such segments."""
    if not form(connection, schema, topic).both:
        return 0
    written = written_table(connection, schema, topic)
    found = fetch_all(connection, LogQueries("segments", schema)("segments", topic=topic))
    return max((end - 1 for _, _, end, _, _, log in found if log != written), default=0)


def _behind(connection: Connection, state: SequenceState, relation: str, after: int = 0) -> SequenceError | None:
    """The error for a sequence that gives out ids below those in `relation`, or up to `after`."""
    highest = _highest(connection, state.schema, relation)
    if state.behind(highest, relation=relation, after=after) is None:
        return None
    # A writer may have drawn ids since the first look at the sequence.
    again = states(connection, state.schema, [state.table])
    return next((each.behind(highest, relation=relation, after=after) for each in again), None)


def faults(connection: Connection, schema: str, topics: Iterable[str]) -> list[SequenceError]:
    """The faults of the sequences of the platform's tables and of the logs of `topics`."""
    logs = {written_table(connection, schema, topic): topic for topic in topics}
    found: list[SequenceError] = []
    for state in states(connection, schema, [*tables.NAMES, *logs]):
        relation, after = state.table, 0
        if (topic := logs.get(state.table)) is not None:
            # A log in both forms has ids in the table without the sequence, too.
            relation = stored_table(connection, schema, topic)
            after = _end_of_other_form(connection, schema, topic)
        behind = _behind(connection, state, relation, after)
        found += filter(None, (state.error(), behind, state.nearly_used_up(relation)))
    return found


def unused(connection: Connection, schema: str, names: Sequence[str]) -> list[SequenceError]:
    """The faults of the sequences of tables that have rows, whose sequences have never given an id.

    They are of a logical replica, which has no values of sequences. Only such a table is read.
    """
    never = [state for state in states(connection, schema, names) if state.last == 0]
    found = (_behind(connection, state, state.table) for state in never)
    return [fault for fault in found if fault is not None]
