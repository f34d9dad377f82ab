"""Repartitioning: giving a topic another number of partitions while its events flow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database, Queries, driver_connection
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.database.roles import act_as_owner
from eventsql_orchestration.errors import DatabaseBusyError, RedefinitionError, ValidationError
from eventsql_orchestration.log import guards, segments, sequences
from eventsql_orchestration.log.layouts import layouts
from eventsql_orchestration.log.parts import OpenPartsError, refuse_open_parts
from eventsql_orchestration.log.patience import Patience
from eventsql_orchestration.log.registry import Registry, consumer_states, find_topic, lock_registry
from eventsql_orchestration.log.transfer import Transfer
from eventsql_orchestration.model import NOT_PARTITIONED, Topic

logger = logging.getLogger(__name__)

CONSUMER_SECONDS: Final = 3.0
"""How long the consumers' partitions are kept waiting at most, in one attempt, for one whose batch does not end."""

BUFFER_SECONDS: Final = 0.5
"""How long publishers are kept waiting at most for one of them that does not end, in one attempt."""

PATIENCE_SECONDS: Final = 30.0
"""How long attempts go on."""

MOST_BUFFERED: Final = 20_000
"""Events that are moved while publishers wait; what is more is moved before."""

PART_BYTES: Final = 8 * 1024 * 1024
"""The values that one statement moves meanwhile: large events must not take it past a `statement_timeout`."""


class TooManyBufferedError(Exception):
    """Internal: events came faster than they were moved."""


@dataclass(frozen=True, slots=True)
class Repartitioning:
    """What a change came to: the topic has `partitions` after offset `after`, and had `before` up to there.

    `consumers` are those that go on with the new partitions when all of theirs have come to that offset.
    """

    topic: str
    before: int
    partitions: int
    after: int
    consumers: tuple[str, ...]


@checked
class Repartitioner:
    """Changes the number of partitions of topics that have events and consumers."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        transfer: Transfer,
        *,
        announce: Callable[[Iterable[str]], None] | None = None,
    ) -> None:
        """`announce` is told the topic that was changed."""
        self._database = database
        self._registry = registry
        self._transfer = transfer
        self._announce = announce or (lambda _topics: None)
        self._log = Queries("log", database.schema)
        self._layouts = Queries("layouts", database.schema)

    def repartition(
        self,
        topic: str,
        partitions: int,
        *,
        finish: Callable[[], object] = lambda: None,
        patience: float = PATIENCE_SECONDS,
    ) -> Repartitioning | None:
        """Give a partitioned topic another number of partitions, more or fewer; None when it has that number.

        Publishers and consumers go on. The change takes effect at one offset of the log: every event up to there has
        its partition by the old number, every later one by the new. A publisher that knows the old number finds out in
        its transaction and chooses anew. Every partitioned consumer consumes up to that offset by the old partitions,
        all of them, and then goes on with the new ones, so that each key's events stay in their order.

        Waits up to `patience` seconds for batches and publishers' transactions under way, and keeps other partitions
        waiting for three seconds at most, other publishers for half a second; `DatabaseBusyError`, and nothing changed,
        when they do not end. `finish` is called before each attempt, and is to bring here what is published over
        several shards already. Raises `TopicNotFoundError`, `RedefinitionError` for a topic that is not partitioned,
        `ValidationError`.
        """
        if partitions == NOT_PARTITIONED:
            raise ValidationError("a topic cannot lose its partitions while it has events: give a number of at least 1")
        Topic(topic, partitions)
        trying = Patience(patience)
        while True:
            found = self._registry.topic(topic)
            if not found.partitioned:
                raise RedefinitionError(
                    f"topic {topic!r} is not partitioned, and neither are its events: register another topic"
                )
            if found.partitions == partitions:
                return None
            # As much as can be before publishers have to wait.
            finish()
            self._transfer.run_once([topic])
            try:
                changed = self._attempt(topic, partitions)
            except (DatabaseBusyError, TooManyBufferedError) as error:
                if not trying.lasts():
                    raise _busy(found, error) from error
                continue
            self._registry.forget(topic)
            if changed is not None:
                logger.info("%s", changed)
                self._announce([topic])
            return changed

    def _attempt(self, topic: str, partitions: int) -> Repartitioning | None:
        """The change, in one transaction. Raises `DatabaseBusyError`, `TooManyBufferedError`."""
        with self._database.core() as connection:
            driver = driver_connection(connection)
            act_as_owner(driver, self._database.schema)
            lock_registry(connection)
            _limit(driver, CONSUMER_SECONDS)
            # Consumers first, then the topic, then the buffer: as a handler that publishes takes them.
            states = [state for state in consumer_states(connection, topic, lock=True) if state.partition >= 0]
            row = driver.execute(self._log("await_topic"), {"topic": topic}).fetchone()
            current = find_topic(connection, topic)
            if row is None or current is None or current.partitions == partitions:
                return None
            schema = self._database.schema
            guarded = partitions < current.partitions or guards.is_guarded(driver, schema, topic)
            if guarded:
                guards.hold(driver, schema, topic)
            drain(driver, schema, [(topic, current.partitions, current.layout)])
            after = segments.newest_id(driver, schema, topic)
            own = {"topic": topic}
            if not layouts(driver, schema, topic):
                first = {"layout": current.layout, "partitions": current.partitions, "after": 0}
                driver.execute(self._layouts("add_layout"), {**own, **first})
            changed = {**own, "layout": current.layout + 1, "partitions": partitions, "after": after}
            driver.execute(self._layouts("add_layout"), changed)
            driver.execute(self._layouts("lay_out"), changed)
            driver.execute(self._layouts("hold_all"), changed)
            if guarded:
                # After what came by the old number.
                guards.guard(driver, schema, topic, partitions)
            consumers = tuple(sorted({state.name for state in states}))
            for consumer in consumers:
                added = {"consumer": consumer, "least": current.partitions}
                driver.execute(self._layouts("add_partitions"), {**changed, **added})
            return Repartitioning(topic, current.partitions, partitions, after, consumers)


def drain(connection: psycopg.Connection[Any], schema: str, topics: Iterable[tuple[str, int, int]]) -> None:
    """Move what is in the buffer, and let nothing come into it until the caller's transaction ends, which holds these.

    `topics` are names with their partitions and layouts. Raises `TooManyBufferedError`, `OpenPartsError` where events
    that are published over several shards are not in the buffer yet, and the driver's error where a publisher's
    transaction does not end in time.
    """
    log, layout_queries = Queries("log", schema), Queries("layouts", schema)
    _limit(connection, BUFFER_SECONDS)
    connection.execute(layout_queries("lock_buffer"))
    refuse_open_parts(connection, schema)
    for topic, partitions, layout in topics:
        counted = {"topic": topic, "limit": MOST_BUFFERED + 1}
        row = connection.execute(layout_queries("count_buffered"), counted).fetchone()
        assert row is not None, "an aggregate gives one row"
        if row[0] > MOST_BUFFERED:
            raise TooManyBufferedError
        if row[0]:
            sequences.check(connection, schema, event_table(topic))
            segments.ensure_ahead(connection, schema, topic)
            after = 0
            parts = {"topic": topic, "bytes": PART_BYTES}
            for (upto,) in connection.execute(layout_queries("buffered_parts"), parts, prepare=False).fetchall():
                connection.execute(
                    log("move" if layout == 1 else "move_into_layout", topic=topic),
                    {"topic": topic, "low_water": after, "upto": upto, "partitions": partitions},
                    prepare=False,
                )
                after = upto


def _limit(driver: psycopg.Connection[Any], seconds: float) -> None:
    """Limit the waits of the transaction for a lock."""
    driver.execute("SELECT pg_catalog.set_config('lock_timeout', %s, true)", [f"{round(seconds * 1000)}ms"])


def _busy(topic: Topic, error: Exception) -> DatabaseBusyError:
    why = "transactions of consumers or publishers that do not end are in the way; try again later"
    if isinstance(error, TooManyBufferedError):
        why = f"more than {MOST_BUFFERED:,} events come into the buffer while it is emptied; try when fewer do"
    elif isinstance(error, OpenPartsError):
        why = str(error)
    return DatabaseBusyError(f"topic {topic.name!r} keeps its {topic.partitions} partitions: {why}")
