"""Topics and consumers as a transaction sees them: reading, locking and checking their definitions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from sqlalchemy import Connection, any_, func, select, true

from eventsql_orchestration.consumer import Consumer, ConsumerState, EventFilter
from eventsql_orchestration.database import Queries, driver_connection, tables
from eventsql_orchestration.database.held_by_handlers import check_not_held
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    DatabaseBusyError,
    InvalidNameError,
    PartitionOutOfRangeError,
    RedefinitionError,
    TopicNotFoundError,
)
from eventsql_orchestration.model import NOT_PARTITIONED, Retention, Topic
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.storage import log_table
from eventsql_orchestration.storage.exchanging import attempt
from eventsql_orchestration.validation import advised

logger = logging.getLogger(__name__)

LOCK_SECONDS: Final = 10
"""The most seconds that a redefinition waits for publishers, and that later publishers wait behind it."""

GIVE_WAY_SECONDS: Final = 4.0
"""Seconds for which a redefinition gives way to transactions that hold one of its locks and wait for another lock."""

_t, _c, _s, _g = tables.topic.c, tables.consumer.c, tables.shard.c, tables.shard_layout.c

_TOPICS: Final = select(
    _t.eql_name, _t.eql_partitions, _t.eql_created_at,
    _t.eql_retention_seconds, _t.eql_retention_bytes, _t.eql_retention_events, _t.eql_layout, _t.eql_storage,
    _t.eql_compression,
    select(
        func.json_build_object(
            "set", _s.eql_set, "name", _s.eql_name, "active", _s.eql_active,
            "generation", _g.eql_generation, "shards", _g.eql_shards,
        )
    )
    .select_from(tables.shard.join(tables.shard_layout, true()))
    .order_by(_g.eql_generation.desc())
    .limit(1)
    .scalar_subquery(),
)  # fmt: skip


def find_topic(connection: Connection, name: str) -> Topic | None:
    """A topic as the caller's transaction sees it now."""
    row = connection.execute(_TOPICS.where(_t.eql_name == name)).one_or_none()
    return None if row is None else _as_topic(row)


def existing_topic(connection: Connection, name: str) -> Topic:
    """A topic as the caller's transaction sees it now. Raises `TopicNotFoundError`."""
    topic = find_topic(connection, name)
    if topic is None:
        raise TopicNotFoundError(
            f"topic {name!r} does not exist: create it with `eventsql topic create {name}`, or look its name up with "
            "`eventsql topic list`"
        )
    return topic


def no_consumer(topic: str, name: str) -> ConsumerNotFoundError:
    """The error for a consumer that does not exist."""
    return ConsumerNotFoundError(
        f"topic {topic!r} has no consumer {name!r}: create it with `{advised('consumer create', topic, name)}`, or "
        f"look its name up with `eventsql consumer list {topic}`"
    )


def all_topics(connection: Connection) -> list[Topic]:
    """All topics by name, except those of EventSQL's Java library with names that only it can use."""
    topics = []
    for row in connection.execute(_TOPICS.order_by(_t.eql_name)):
        try:
            topics.append(_as_topic(row))
        except InvalidNameError as error:
            logger.warning("a topic of EventSQL's Java library is left out: %s", error)
    return topics


def _as_topic(row: Sequence[Any]) -> Topic:
    name, partitions, created_at, *bounds, layout, storage, compression, shards = row
    retention = Retention(*bounds)
    return Topic(
        name, partitions, created_at, retention=None if retention.for_ever else retention, layout=layout,
        shards=ShardSet.from_json(shards), storage=storage, compression=compression,
    )  # fmt: skip


def consumer_states(
    connection: Connection, topic: str | None, consumer: str | None = None,
    *, partitions: Sequence[int] | None = None, lock: bool = False,
) -> list[ConsumerState]:  # fmt: skip
    """Consumer partitions by topic, name and partition. With `lock`, waits for their consumptions and locks them.

    Every lock of several partitions is taken here: in different orders, two transactions could wait for each other.
    Raises `ValidationError` if a handler of this thread has locked one of them.
    """
    if lock:
        names = [name for name in (topic, consumer) if name is not None]
        keys = [names] if partitions is None else [[*names, str(partition)] for partition in partitions]
        for key in keys:
            check_not_held(driver_connection(connection), schema_of(connection), "consumer", *key)
    query = select(
        _c.eql_topic, _c.eql_name, _c.eql_partition, func.coalesce(_c.eql_last_event_id, 0), _c.eql_consumed_events,
        _c.eql_last_consumption_at, _c.eql_paused, _c.eql_epoch, _c.eql_lease_owner, _c.eql_lease_expires_at,
        _c.eql_failed_event_id, _c.eql_attempts, _c.eql_failure, _c.eql_retry_at, _c.eql_max_attempts,
        func.clock_timestamp(), _c.eql_filter, _c.eql_until,
    ).order_by(_c.eql_topic, _c.eql_name, _c.eql_partition)  # fmt: skip
    if topic is not None:
        query = query.where(_c.eql_topic == topic)
    if consumer is not None:
        query = query.where(_c.eql_name == consumer)
    if partitions is not None:
        query = query.where(_c.eql_partition.in_(partitions))
    if lock:
        query = query.with_for_update()
    rows: Sequence[Sequence[Any]] = connection.execute(query).all()
    return [
        ConsumerState(*(*columns, EventFilter.from_json(conditions), until)) for *columns, conditions, until in rows
    ]


def choose_partitions(states: Sequence[ConsumerState], partition: int | None) -> list[int]:
    """The chosen partition of a consumer, or all of its partitions with None.

    Raises `PartitionOutOfRangeError`.
    """
    own = [state.partition for state in states]
    if partition is None:
        return own
    if partition not in own:
        having = "is not partitioned" if own == [NOT_PARTITIONED] else f"has partitions 0 to {len(own) - 1}"
        raise PartitionOutOfRangeError(f"partition {partition} is out of range: consumer {states[0].name!r} {having}")
    return [partition]


def check_form(consumer: Consumer, existing: Sequence[ConsumerState]) -> None:
    """Raise `RedefinitionError` for a consumer that exists in the other form: its offsets mean nothing in this form."""
    name, topic = consumer.name, consumer.topic
    if all((state.partition != NOT_PARTITIONED) == consumer.partitioned for state in existing):
        return
    form, option = ("not partitioned", "without") if consumer.partitioned else ("partitioned", "with")
    raise RedefinitionError(
        f"consumer {name!r} of topic {topic!r} exists and is {form}: register it {option} `--partitioned` (in Python "
        f"partitioned=True), or delete it and its offsets first with "
        f"`{advised('consumer delete --execute', topic, name)}`"
    )


def refuse_capitals(connection: Connection, name: str) -> None:
    """Refuse capitals, which EventSQL's Java library allows: topics that differ only in case would share a table."""
    folded = func.lower(_t.eql_name.collate("C"))
    known = list(connection.scalars(select(_t.eql_name).where(folded == name.lower())))
    if name not in known and (known or name != name.lower()):
        raise InvalidNameError(
            f"topic name {name!r} is not usable: "
            + (f"topic {known[0]!r} has its table" if known else f"use lower-case letters, as in {name.lower()!r}")
        )


def has_events(connection: Connection, name: str) -> bool:
    """Whether a topic has events in its log, in the buffer, or in a decided publication."""
    buffered = select(tables.event_buffer.c.eql_id).where(tables.event_buffer.c.eql_topic == name).limit(1)
    block, part = tables.spark_staged_event.c, tables.spark_part.c
    decided = (
        select(block.eql_attempt)
        .join(tables.spark_part, block.eql_attempt == any_(part.eql_attempts))
        .where(block.eql_topic == name, part.eql_published_at.is_(None))
        .limit(1)
    )
    return log_table.holds_events(driver_connection(connection), schema_of(connection), name) or any(
        connection.execute(found).first() is not None for found in (buffered, decided)
    )


def lock_registry(connection: Connection | psycopg.Connection[Any]) -> None:
    """Let no other topic, consumer, seek or retention of this database change until the caller's transaction ends.

    Such changes are rare, and two at once would collide in their DDL, or read rows that the other is about to change. A
    transaction with the lock must not wait long for anything else: all other such changes wait with it.
    """
    driver = driver_connection(connection)
    driver.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (REGISTRY_LOCK,))
    wait_at_most(driver, LOCK_SECONDS)


def lock_topic(connection: Connection, name: str) -> None:
    """Wait for the transfer that holds the topic, and keep other writers out of its table."""
    lock = tables.event_buffer_lock.c.eql_topic
    connection.execute(select(lock).where(lock == name).with_for_update())


def lock_buffer(connection: Connection) -> None:
    """Wait until publishers have committed their events, and keep them from writing by old definitions.

    Publishers of all topics wait too, as long as this call waits for an open transaction that has published.
    """
    driver_connection(connection).execute(Queries("layouts", schema_of(connection))("lock_buffer"))


def lock_log(connection: Connection, name: str) -> None:
    """Keep readers and writers from a topic that the caller's transaction holds. See `hold_log` and `lock_buffer`.

    A transaction that has published may read the log then, and the two would wait for each other. So this call gives
    way at first, again and again. If transactions that read the log or publish follow one another without a pause, it
    then waits in the queue for them. Raises `DatabaseBusyError` if they do not end in `LOCK_SECONDS`.
    """

    def hold(driver: psycopg.Connection[Any]) -> None:
        log_table.hold_log(driver, schema_of(connection), name)
        lock_buffer(connection)

    def queue(driver: psycopg.Connection[Any]) -> None:
        wait_at_most(driver, LOCK_SECONDS - GIVE_WAY_SECONDS)
        hold(driver)

    driver = driver_connection(connection)
    if not attempt(driver, hold, seconds=GIVE_WAY_SECONDS) and not attempt(driver, queue):
        raise DatabaseBusyError(
            f"topic {name!r} stays as it is, because transactions that read its log, or publish, did not end in "
            f"{LOCK_SECONDS} s: try again. `eventsql doctor` names transactions that have been open for a minute"
        )
    wait_at_most(driver, LOCK_SECONDS)


def lock_empty(connection: Connection, name: str) -> bool:
    """As `lock_log`, if a topic has no events. False if it has events: then nothing is locked, and nobody waits."""
    looking = connection.begin_nested()
    found = has_events(connection, name)
    # This also releases the lock of the look.
    looking.rollback()
    if found:
        return False
    lock_log(connection, name)
    return not has_events(connection, name)


def schema_of(connection: Connection) -> str:
    """The schema of the tables in a transaction of `Database.core`."""
    return str(connection.get_execution_options()["schema_translate_map"][None])
