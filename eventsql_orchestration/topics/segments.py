"""The segments of a topic's log: its event table is partitioned by ranges of ids, so that old events go at once.

Segments are made ahead, by whoever holds the topic, and there is no default one: it would have to be locked and
searched whenever another is added. A log is rolled by letting its ids go on at the next segment's start. A table that
EventSQL's Java library made, or an earlier version of this package, is one plain table until its topic gets a
retention.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import RegistryError
from eventsql_orchestration.log import guards, sequences

SEGMENT_EVENTS: Final = 5_000_000
"""Ids of a segment: planning a read takes longer with each one that it may touch. Measured: one is dropped in 30 ms."""

SEGMENTS_AHEAD: Final = 2
"""Empty segments that are kept after the one that is written to."""

DROPPED: Final = "eventsql: dropped by retention"
"""The comment on a segment from before it is detached: whoever finds it detached may drop it."""


LOCK_SECONDS: Final = 5
"""How long making a plain table a segment waits for others at each step, and keeps those who come after it waiting."""

ADOPTION_CHECK: Final = "eql_within_segment"
"""The constraint that a plain table has while it is made a segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a topic's log: the table of the ids with `start <= id < end`. `bytes` counts its indexes too."""

    table: str
    start: int
    end: int
    bytes: int
    detaching: bool


def segment_name(topic: str, start: int) -> str:
    """The name of the table for ids from `start` on, within PostgreSQL's 63 bytes for any topic and id."""
    digest = hashlib.sha256(topic.encode()).hexdigest()[:8]
    return f"{topic[:26]}_{digest}_segment_{start}"


def segments(connection: Connection, schema: str, topic: str) -> list[Segment] | None:
    """The segments of a topic's log by their ids; None where it is one plain table."""
    queries = Queries("retention", schema)
    cursor = connection.cursor(row_factory=tuple_row)
    parameters = _log(connection, schema, topic)
    row = cursor.execute(queries("is_segmented"), parameters).fetchone()
    if row is None or not row[0]:
        return None
    return [Segment(*row) for row in cursor.execute(queries("segments"), parameters)]


def _log(connection: Connection, schema: str, topic: str) -> dict[str, object]:
    """A topic's event table, as the statements on segments take it."""
    return {"log": sql.Identifier(schema, event_table(topic)).as_string(connection)}


def newest_id(connection: Connection, schema: str, topic: str) -> int:
    """The newest id that was given out in a topic's log; 0 before the first."""
    row = (
        connection.cursor(row_factory=tuple_row)
        .execute(
            Queries("retention", schema)("newest_id"),
            _log(connection, schema, topic),
        )
        .fetchone()
    )
    return 0 if row is None or row[0] is None else int(row[0])


def ensure_ahead(connection: Connection, schema: str, topic: str) -> None:
    """Create what segments lack after the newest id, in the caller's transaction that holds the topic.

    Attaching lets reads and writes of the log go on. Nothing is done for a log that is one plain table. The function
    `make_segments` in the database has the statements.
    """
    row = (
        connection.cursor(row_factory=tuple_row)
        .execute(Queries("retention", schema)("makes_segments"), _log(connection, schema, topic))
        .fetchone()
    )
    # Other roles, such as one that transfers or a member of the owner, have the owner's function make them.
    statement = "make_segments" if row == (True,) else "ensure_segments"
    connection.execute(
        Queries("retention", schema)(statement),
        {"topic": topic, "events": SEGMENT_EVENTS, "ahead": SEGMENTS_AHEAD},
    )


def roll(connection: Connection, schema: str, topic: str, segment: Segment) -> None:
    """Let the ids of the log go on after `segment`, in the caller's transaction that holds the topic."""
    connection.execute(
        Queries("retention", schema)("skip_to"),
        {**_log(connection, schema, topic), "newest": segment.end - 1},
    )


def adopt(connection: Connection, schema: str, topic: str) -> None:
    """Make a plain event table the first segment of its topic's log.

    On a connection in autocommit mode. Its rows are read once, to know that they are within the segment, while others
    read and write; nothing is rewritten. Others wait for the end only, in which the names change hands.

    Raises `RegistryError` where something hangs on the table that would stay with the segment, such as a view or a
    policy of row security, and `LockNotAvailable` of the driver where others keep it for `LOCK_SECONDS`.
    """
    if segments(connection, schema, topic) is not None:
        return
    queries = Queries("retention", schema)
    cursor = connection.cursor(row_factory=tuple_row)
    log, name = sql.Identifier(schema, event_table(topic)), segment_name(topic, 0)
    dependents = cursor.execute(queries("dependents"), {"table": log.as_string(connection)}).fetchall()
    if dependents:
        raise RegistryError(
            f"topic {topic!r} cannot have a retention yet: {', '.join(name for (name,) in dependents)} would stay "
            "with its first segment; drop what hangs on its event table, and make it anew afterwards"
        )
    sequence = cursor.execute(queries("sequence"), {"log": log.as_string(connection)}).fetchone()
    assert sequence is not None, "an event table's ids come from a sequence"
    names: dict[str, sql.Composable | int] = {
        "log": log,
        "segment": sql.Identifier(schema, name),
        "name": sql.Identifier(name),
        "sequence": sql.Identifier(*sequence),
        "check": sql.Identifier(ADOPTION_CHECK),
        "end": newest_id(connection, schema, topic) + SEGMENT_EVENTS,
    }

    def alter(*statements: str) -> None:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout TO '{round(LOCK_SECONDS * 1000)}ms'")
            for statement in statements:
                connection.execute(sql.SQL(statement).format(**names))

    try:
        alter(
            "ALTER TABLE {log} DROP CONSTRAINT IF EXISTS {check}",
            "ALTER TABLE {log} ADD CONSTRAINT {check} CHECK (eql_id OPERATOR(pg_catalog.<) {end}) NOT VALID",
        )
        # It reads every row, in one statement that cannot be cut into parts.
        alter("SET LOCAL statement_timeout TO 0", "ALTER TABLE {log} VALIDATE CONSTRAINT {check}")
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout TO '{round(LOCK_SECONDS * 1000)}ms'")
            cursor.execute(Queries("log", schema)("await_topic"), {"topic": topic})
            partitions = guards.release(connection, schema, topic)
            alter(
                "ALTER TABLE {log} RENAME TO {name}",
                "CREATE TABLE {log} (LIKE {segment} INCLUDING ALL EXCLUDING CONSTRAINTS) PARTITION BY RANGE (eql_id)",
                "ALTER SEQUENCE {sequence} OWNED BY {log}.eql_id",
                "ALTER TABLE {segment} ALTER COLUMN eql_id DROP DEFAULT",
                "ALTER TABLE {log} ATTACH PARTITION {segment} FOR VALUES FROM (MINVALUE) TO ({end})",
                "ALTER TABLE {segment} DROP CONSTRAINT {check}",
            )
            if partitions is not None:
                guards.guard(connection, schema, topic, partitions)
            sequences.settle(connection, schema, event_table(topic))
            _pass_on_rights(connection, schema, topic, segment_name(topic, 0))
            ensure_ahead(connection, schema, topic)
    except BaseException:
        # Where that fails too, whoever reaches its end does it.
        with suppress(psycopg.Error):
            give_adoption_up(connection, schema, topic)
        raise


def give_adoption_up(connection: Connection, schema: str, topic: str) -> None:
    """Remove what an adoption that was cut off has left: it would keep a plain table from growing past its end."""
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout TO '{round(LOCK_SECONDS * 1000)}ms'")
        connection.execute(
            sql.SQL("ALTER TABLE {} DROP CONSTRAINT IF EXISTS {}").format(
                sql.Identifier(schema, event_table(topic)), sql.Identifier(ADOPTION_CHECK)
            )
        )


def _pass_on_rights(connection: Connection, schema: str, topic: str, segment: str) -> None:
    """Give those who had rights on the plain table the same on the log that took its place."""
    queries = Queries("retention", schema)
    cursor = connection.cursor(row_factory=tuple_row)
    log, table = sql.Identifier(schema, event_table(topic)), sql.Identifier(schema, segment).as_string(connection)
    for privilege, grantee, grantable in cursor.execute(queries("grants"), {"table": table}).fetchall():
        connection.execute(
            sql.SQL("GRANT {} ON {} TO {}{}").format(
                sql.SQL(privilege),
                log,
                sql.SQL("PUBLIC") if grantee is None else sql.Identifier(grantee),
                sql.SQL(" WITH GRANT OPTION" if grantable else ""),
            )
        )
    owner = cursor.execute(queries("owner"), {"table": table}).fetchone()
    mine = cursor.execute(queries("owner"), {"table": log.as_string(connection)}).fetchone()
    if owner is not None and owner != mine:
        connection.execute(sql.SQL("ALTER TABLE {} OWNER TO {}").format(log, sql.Identifier(owner[0])))
