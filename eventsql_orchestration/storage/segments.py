"""The segments of a topic's log: its event table is partitioned by ranges of ids, so that old events are dropped fast.

The transaction that holds the topic makes segments ahead. There is no default segment: it would have to be locked and
searched whenever another is added. A log is rolled by letting its ids go on at the next segment's start. A table of
EventSQL's Java library, or of an earlier version of this package, is one plain table until its topic gets a retention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Queries, replaced_tables, role_statements
from eventsql_orchestration.database.log_names import block_table, event_table, holds_blocks
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import RegistryError
from eventsql_orchestration.model import BLOCKS, Topic
from eventsql_orchestration.storage import legacy_writer_trigger, log_form, log_table, sequences
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.log_table import identifier

SEGMENT_EVENTS: Final = 5_000_000
"""Ids of a segment: planning a read takes longer with each segment that it may touch. Dropping a segment takes 30
ms."""

LARGEST_ID: Final = 2**63 - 1
"""The last segment of a log ends at this id."""

SEGMENTS_AHEAD: Final = 2
"""Empty segments that are kept after the current one."""

LOCK_SECONDS: Final = 5
"""Seconds that each step of an adoption waits for other transactions. Later transactions wait behind it."""

ADOPTION_CHECK: Final = "eql_within_segment"
"""The constraint that a plain table has while it is made a segment or another partition."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a topic's log: the table of the ids with `start <= id < end`. `bytes` counts its indexes too.

    `log` is the log's table that it is attached to.
    """

    table: str
    start: int
    end: int
    bytes: int
    detaching: bool
    log: str

    @property
    def in_blocks(self) -> bool:
        """Whether it holds blocks of events."""
        return holds_blocks(self.log)


def create_log(connection: Connection, schema: str, topic: Topic) -> None:
    """Create what a topic's log lacks: its table, indexes, first segments, and right settings of its sequence."""
    if not log_form.form_now(connection, schema, topic.name).blocks:
        if log_table.exists(connection, schema, topic.name):
            _complete_rows(connection, schema, topic)
        elif topic.storage == BLOCKS:
            log_table.create_blocks(connection, schema, topic)
        else:
            log_table.create_row_table(connection, schema, topic, event_table(topic.name))
    sequences.settle(connection, schema, log_form.written_table(connection, schema, topic.name))
    if segments(connection, schema, topic.name) == []:
        ensure_ahead(connection, schema, topic.name)


def _complete_rows(connection: Connection, schema: str, topic: Topic) -> None:
    """Create the index that a log in rows lacks. Raises `RegistryError` for a table that is no log."""
    queries, log = LogQueries("segments", schema), identifier(schema, topic.name).as_string(connection)
    columns = {"log": log, "columns": list(log_table.ROW_COLUMNS)}
    if fetch_one(connection, queries("has_columns"), columns) != (True,):
        raise RegistryError(
            f"there is a table {log} already, which is not a log: name the topic differently, or rename the table "
            "if it is your own"
        )
    # A table of EventSQL's Java library has no index for partitions. The topic's transfers wait while it is built.
    columns = {"log": log, "columns": ["eql_partition", "eql_id"]}
    if topic.partitioned and fetch_one(connection, queries("has_index"), columns) != (True,):
        # A large table takes long, and this cannot be done in parts.
        connection.execute("SET LOCAL statement_timeout TO 0")
        connection.execute(LogQueries("forms", schema)("create_partition_index", table=event_table(topic.name)))


def segment_name(topic: str, start: int) -> str:
    """The name of the table for ids from `start` on, within PostgreSQL's 63 bytes for any topic and id."""
    digest = hashlib.sha256(topic.encode()).hexdigest()[:8]
    return f"{topic[:26]}_{digest}_segment_{start}"


def segments(connection: Connection, schema: str, topic: str) -> list[Segment] | None:
    """The segments of a topic's log by their ids; None if it is one plain table."""
    queries = LogQueries("segments", schema)
    row = fetch_first(connection, queries("is_segmented", topic=topic))
    if row is None or not row[0]:
        return None
    return [Segment(*row) for row in fetch_all(connection, queries("segments", topic=topic))]


def floor(connection: Connection, schema: str, topic: str) -> int:
    """The first offset that retention has left in a topic's log; 0 if it never dropped anything."""
    return first_kept(segments(connection, schema, topic) or ())


def first_kept(of_log: Iterable[Segment]) -> int:
    """As `floor`, of a log's segments by their ids."""
    return next((each.start for each in of_log if not each.detaching), 0)


def newest_id(connection: Connection, schema: str, topic: str) -> int:
    """The newest id that was given out in a topic's log; 0 before the first."""
    row = fetch_first(connection, LogQueries("segments", schema)("newest_id", topic=topic))
    return 0 if row is None or row[0] is None else int(row[0])


def ensure_ahead(connection: Connection, schema: str, topic: str) -> None:
    """Create missing segments after the newest id, in the caller's transaction that holds the topic.

    Attaching lets reads and writes of the log go on. A log that is one plain table stays as it is. The function
    `make_segments` in the database has the statements.
    """
    queries = LogQueries("segments", schema)
    own = fetch_first(connection, queries("makes_segments", topic=topic)) == (True,)
    # Other roles, such as a transfer role or a member of the owner, call the owner's function.
    statement = queries("make_segments" if own else "ensure_segments")
    connection.execute(statement, {"topic": topic, "events": SEGMENT_EVENTS, "ahead": SEGMENTS_AHEAD})


def roll(connection: Connection, schema: str, topic: str, segment: Segment) -> None:
    """Let the ids of the log go on after `segment`, in the caller's transaction that holds the topic.

    Does nothing for the last segment that a log can have.
    """
    if segment.end == LARGEST_ID:
        return
    query = LogQueries("segments", schema)("skip_to", topic=topic)
    connection.execute(query, {"newest": segment.end - 1})


def vacuum(connection: Connection, schema: str, topic: str) -> None:
    """Vacuum and analyze a log, on a connection in autocommit mode, as autovacuum does a while after writes."""
    for table in log_form.tables(connection, schema, topic):
        connection.execute(LogQueries("exchanging", schema)("vacuum_and_analyze", table=table))


def adopt(connection: Connection, schema: str, topic: str, wanted: str = "a retention") -> None:
    """Make a plain event table the first segment of its topic's log. `wanted` is the reason, for errors.

    The connection is in autocommit mode. The rows are read once, to know that they are within the segment, and nothing
    is rewritten. Meanwhile, other transactions read and write. They wait only at the end, while tables are renamed.

    Raises `RegistryError` if an object, such as a view or a policy of row security, depends on the table and would stay
    with the segment. Raises the driver's `LockNotAvailable` if other transactions keep the table for `LOCK_SECONDS`.
    """
    if segments(connection, schema, topic) is not None:
        return
    check_dependents(connection, schema, topic, identifier(schema, topic), wanted)
    names = _adoption_names(connection, schema, topic)
    try:
        _alter(
            connection, names,
            "ALTER TABLE {log} DROP CONSTRAINT IF EXISTS {check}",
            "ALTER TABLE {log} ADD CONSTRAINT {check} CHECK (eql_id OPERATOR(pg_catalog.<) {end}) NOT VALID",
        )  # fmt: skip
        # It reads every row, in one statement that cannot be cut into parts.
        _alter(connection, names, "SET LOCAL statement_timeout TO 0", "ALTER TABLE {log} VALIDATE CONSTRAINT {check}")
        _replace_log(connection, schema, topic, names)
    except BaseException:
        # Where this fails too, the next writer that reaches the constraint removes it.
        with suppress(psycopg.Error):
            give_adoption_up(connection, schema, topic)
        raise


def give_adoption_up(connection: Connection, schema: str, topic: str) -> None:
    """Remove the constraint of an interrupted adoption: it would keep a plain table from growing past its end."""
    names = {"log": identifier(schema, topic), "check": sql.Identifier(ADOPTION_CHECK)}
    _alter(connection, names, "ALTER TABLE {log} DROP CONSTRAINT IF EXISTS {check}")


def dependents(connection: Connection, schema: str, topic: str, table: sql.Identifier) -> list[str]:
    """Objects that depend on a table or view of a log and would stay with it when another table takes its name."""
    own = [sql.Identifier(schema, name(topic)).as_string(connection) for name in (event_table, block_table)]
    values = {"table": table.as_string(connection), "own": own}
    return [name for (name,) in fetch_all(connection, LogQueries("segments", schema)("dependents"), values)]


def check_dependents(connection: Connection, schema: str, topic: str, table: sql.Identifier, wanted: str) -> None:
    """Raise `RegistryError` if objects depend on a table of a log that gets another name. `wanted` is the reason."""
    if found := dependents(connection, schema, topic, table):
        raise RegistryError(
            f"topic {topic!r} cannot have {wanted} yet, because {', '.join(found)} would stay with its present events: "
            f"drop these objects, set {wanted}, and create them again"
        )


def _adoption_names(connection: Connection, schema: str, topic: str) -> dict[str, sql.Composable | int]:
    log, name = identifier(schema, topic), segment_name(topic, 0)
    sequence = fetch_one(connection, LogQueries("segments", schema)("sequence", topic=topic))
    return {
        "log": log, "segment": sql.Identifier(schema, name), "name": sql.Identifier(name),
        "sequence": sql.Identifier(*sequence), "check": sql.Identifier(ADOPTION_CHECK),
        "end": min(newest_id(connection, schema, topic) + SEGMENT_EVENTS, LARGEST_ID),
    }  # fmt: skip


def _alter(connection: Connection, names: Mapping[str, sql.Composable | int], *statements: str) -> None:
    """Run statements in one transaction, which waits at most `LOCK_SECONDS` for each lock."""
    with connection.transaction():
        wait_at_most(connection, LOCK_SECONDS)
        for statement in statements:
            connection.execute(sql.SQL(statement).format(**names))


def _replace_log(connection: Connection, schema: str, topic: str, names: Mapping[str, sql.Composable | int]) -> None:
    """Let a partitioned table take the plain table's name, rights, sequence and guard, and attach the plain table."""
    with connection.transaction():
        role_statements.act_as_owner(connection, schema)
        wait_at_most(connection, LOCK_SECONDS)
        connection.execute(Queries("log", schema)("await_topic"), {"topic": topic})
        partitions = legacy_writer_trigger.release(connection, schema, topic)
        _alter(
            connection, names,
            "ALTER TABLE {log} RENAME TO {name}",
            "CREATE TABLE {log} (LIKE {segment} INCLUDING ALL EXCLUDING CONSTRAINTS) PARTITION BY RANGE (eql_id)",
            "ALTER SEQUENCE {sequence} OWNED BY {log}.eql_id",
            "ALTER TABLE {segment} ALTER COLUMN eql_id DROP DEFAULT",
            "ALTER TABLE {log} ATTACH PARTITION {segment} FOR VALUES FROM (MINVALUE) TO ({end})",
            "ALTER TABLE {segment} DROP CONSTRAINT {check}",
        )  # fmt: skip
        if partitions is not None:
            legacy_writer_trigger.guard(connection, schema, topic, partitions)
        sequences.settle(connection, schema, event_table(topic))
        log, plain = identifier(schema, topic), sql.Identifier(schema, segment_name(topic, 0))
        replaced_tables.grant_as_on(connection, plain, log)
        pass_on_owner(connection, schema, plain, log)
        ensure_ahead(connection, schema, topic)


def pass_on_owner(connection: Connection, schema: str, source: sql.Identifier, target: sql.Identifier) -> None:
    """Make the owner of a table the owner of another table or view."""
    owner, mine = (
        fetch_first(connection, LogQueries("segments", schema)("owner"), {"table": each.as_string(connection)})
        for each in (source, target)
    )
    if owner is not None and owner != mine:
        connection.execute(sql.SQL("ALTER TABLE {} OWNER TO {}").format(target, sql.Identifier(owner[0])))
