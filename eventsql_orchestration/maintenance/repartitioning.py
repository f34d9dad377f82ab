"""Repartitioning: giving a topic another number of partitions while its events flow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database, Queries, driver_connection
from eventsql_orchestration.database.role_statements import act_as_owner
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import DatabaseBusyError, RedefinitionError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED, Topic
from eventsql_orchestration.publishing.buffer_mover import BufferMover
from eventsql_orchestration.publishing.log_room import LogRoom
from eventsql_orchestration.publishing.transfer import Announce, Transfer
from eventsql_orchestration.publishing.two_phase_participant import OpenPartsError, refuse_open_parts
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.storage import legacy_writer_trigger, log_form, segments
from eventsql_orchestration.threads import after_commit
from eventsql_orchestration.topics.catalog import consumer_states, find_topic, lock_registry
from eventsql_orchestration.topics.layouts import layouts
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import Duration, in_seconds

logger = logging.getLogger(__name__)

CONSUMER_SECONDS: Final = 3.0
"""The most seconds for which one attempt makes consumer partitions wait, if a batch does not end."""

BUFFER_SECONDS: Final = 0.5
"""The most seconds for which one attempt makes publishers wait, if a transaction does not end."""

RETRY_SECONDS: Final = 30.0
"""Seconds for which a change is retried."""

Step: TypeAlias = Callable[[], object]
"""A step that is called before each attempt."""

MOST_BUFFERED: Final = 20_000
MOST_BYTES: Final = 64 * 1024 * 1024
"""The most events, and bytes of them, that are moved while publishers wait. More events are moved before."""

PART_BYTES: Final = 8 * 1024 * 1024
"""The bytes of values that one statement moves: large events must not exceed a `statement_timeout`."""


class TooManyBufferedError(Exception):
    """Internal: events come faster than they are moved."""


class IdsChangedError(DatabaseBusyError):
    """Internal: the sequence of a log was set back, or another program drew ids from it, while events were moved."""


@dataclass(frozen=True, slots=True)
class Repartitioning:
    """A change: the topic has `before` partitions up to offset `after`, and `partitions` from there on.

    `consumers` go on with the new partitions once all of their old partitions have reached that offset.
    """

    topic: str
    before: int
    partitions: int
    after: int
    consumers: tuple[str, ...]


@checked
class Repartitioner:
    """Changes the number of partitions of topics that have events and consumers."""

    def __init__(self, database: Database, registry: Registry, transfer: Transfer, *, announce: Announce) -> None:
        """`announce` is called with the changed topic."""
        self._database = database
        self._registry = registry
        self._transfer = transfer
        self._announce = after_commit(announce)
        self._log = Queries("log", database.schema)
        self._layouts = Queries("layouts", database.schema)

    def repartition(
        self, topic: str, partitions: int, *, finish: Step = lambda: None, timeout: Duration = RETRY_SECONDS
    ) -> Repartitioning | None:
        """See `ClusterRepartitioner.repartition`.

        `finish` is called before each attempt, and finishes publications over several shards.
        """
        if partitions == NOT_PARTITIONED:
            raise ValidationError("a topic cannot lose its partitions while it has events: give a number of at least 1")
        Topic(topic, partitions)
        retry = Backoff(in_seconds(timeout))
        while True:
            found = self._registry.topic(topic)
            if not found.partitioned:
                raise RedefinitionError(
                    f"topic {topic!r} is not partitioned, and its events have no partitions: register another topic"
                )
            if found.partitions == partitions:
                return None
            # Do as much as possible before publishers have to wait.
            finish()
            with self._database.by_admin():
                self._transfer.run_once([topic])
            try:
                with self._database.by_admin():
                    changed = self._attempt(topic, partitions)
            except (DatabaseBusyError, TooManyBufferedError) as error:
                if not retry.lasts():
                    raise _busy(found, error) from error
                continue
            self._registry.forget(topic)
            if changed is not None:
                logger.info("%s", changed)
                self._announce([topic])
            return changed

    def _attempt(self, topic: str, partitions: int) -> Repartitioning | None:
        """Make the change in one transaction. Raises `DatabaseBusyError`, `TooManyBufferedError`."""
        with self._database.core() as connection:
            driver = driver_connection(connection)
            act_as_owner(driver, self._database.schema)
            lock_registry(connection)
            wait_at_most(driver, CONSUMER_SECONDS)
            # Lock consumers, then the topic, then the buffer: the order of a handler that publishes.
            states = [state for state in consumer_states(connection, topic, lock=True) if state.partition >= 0]
            row = driver.execute(self._log("await_topic"), {"topic": topic}).fetchone()
            current = find_topic(connection, topic)
            if row is None or current is None or current.partitions == partitions:
                return None
            schema = self._database.schema
            guarded = partitions < current.partitions or legacy_writer_trigger.is_guarded(driver, schema, topic)
            if guarded:
                legacy_writer_trigger.hold(driver, schema, topic)
            drain(driver, schema, [(topic, current.partitions)])
            after = segments.newest_id(driver, schema, topic)
            changed = {
                "topic": topic, "layout": current.layout + 1, "partitions": partitions, "after": after, "since": None
            }  # fmt: skip
            if not layouts(driver, schema, topic):
                first = {
                    "layout": current.layout, "partitions": current.partitions, "after": 0, "since": current.created_at
                }  # fmt: skip
                driver.execute(self._layouts("add_layout"), {**changed, **first})
            for statement in ("add_layout", "lay_out", "hold_all"):
                driver.execute(self._layouts(statement), changed)
            if guarded:
                # Guard the log only after the events with old partitions have entered it.
                legacy_writer_trigger.guard(driver, schema, topic, partitions)
            consumers = tuple(sorted({state.name for state in states}))
            for consumer in consumers:
                added = {"consumer": consumer, "least": current.partitions}
                driver.execute(self._layouts("add_partitions"), {**changed, **added})
            return Repartitioning(topic, current.partitions, partitions, after, consumers)


def drain(connection: psycopg.Connection[Any], schema: str, topics: Iterable[tuple[str, int]]) -> None:
    """Empty the buffer and lock it until the caller's transaction ends, which holds `topics`.

    `topics` are names with their partitions. Raises `TooManyBufferedError`, `IdsChangedError`,
    `OpenPartsError` if decided events of publications over several shards are not in the buffer yet, and the driver's
    error if a publisher's transaction does not end in time.
    """
    mover, room, layout_queries = BufferMover(schema), LogRoom(schema), Queries("layouts", schema)
    wait_at_most(connection, BUFFER_SECONDS)
    logs = []
    for topic, partitions in topics:
        blocks = log_form.form_now(connection, schema, topic).writes_blocks
        # Advances a sequence that is behind its log: the caller takes the sequence's last id for the end of the log.
        room.make(connection, topic, None, blocks=blocks)
        logs.append((topic, partitions, blocks))
    connection.execute(layout_queries("lock_buffer"))
    refuse_open_parts(connection, schema)
    for topic, partitions, blocks in logs:
        counted = {"topic": topic, "limit": MOST_BUFFERED + 1}
        buffered, size = fetch_one(connection, layout_queries("count_buffered"), counted)
        if buffered > MOST_BUFFERED or size > MOST_BYTES:
            raise TooManyBufferedError
        if not buffered:
            continue
        low_water = 0
        parts = {"topic": topic, "bytes": PART_BYTES}
        try:
            for (upto,) in connection.execute(layout_queries("buffered_parts"), parts, prepare=False).fetchall():
                moved = mover.move(
                    connection, topic, low_water=low_water, upto=upto, partitions=partitions, mixed=True,
                    most=MOST_BUFFERED, after=room.last_id(topic),
                )  # fmt: skip
                room.drew(topic, moved.events)
                low_water = upto
            if not blocks:
                room.check(connection, topic)
        except (psycopg.errors.CheckViolation, psycopg.errors.UniqueViolation) as error:
            # A block without usable ids, or rows with ids that another program drew. The next attempt looks at the
            # sequence.
            raise IdsChangedError(f"events of topic {topic!r} could not be moved: {describe(error)}") from error


def _busy(topic: Topic, error: Exception) -> DatabaseBusyError:
    why = (
        "transactions of consumers or publishers did not end in time: try again later. `eventsql doctor` names "
        "transactions that have been open for a minute"
    )
    if isinstance(error, TooManyBufferedError):
        why = (
            f"more than {MOST_BUFFERED:,} events, or {MOST_BYTES >> 20} MiB, came while the buffer was emptied: try "
            "again with less traffic"
        )
    elif isinstance(error, OpenPartsError):
        why = str(error)
    elif isinstance(error, IdsChangedError):
        why = f"{error}; run it again"
    return DatabaseBusyError(f"topic {topic.name!r} keeps its {topic.partitions} partitions: {why}")
