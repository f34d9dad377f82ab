"""Topics and consumers: registering them, listing them, and what may be redefined."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, any_, delete, func, null, select, true, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.schema import DropTable

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import Database, Queries, driver_connection, roles, tables
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    InvalidNameError,
    PartitionOutOfRangeError,
    RedefinitionError,
    RegistryError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.log import layouts, segments, sequences
from eventsql_orchestration.log.positions import Earliest, Start, resolve, starting_at
from eventsql_orchestration.model import (
    NOT_PARTITIONED,
    Consumer,
    ConsumerState,
    DeclaredFilter,
    EventFilter,
    EveryEvent,
    Retention,
    Topic,
)
from eventsql_orchestration.rules import check_text
from eventsql_orchestration.sharding import HELD, ShardSet

logger = logging.getLogger(__name__)

CACHE_SECONDS: Final = 5.0
"""How long a publisher goes on with a topic's definition before it looks again."""

LOCK_SECONDS: Final = 10
"""How long a redefinition waits for publishers at most, and keeps them waiting."""

REGISTRY_LOCK: Final = 0x6576_656E_7472_6567
"""The advisory lock that everything takes which changes topics, their logs or where consumers stand."""

_t, _c, _s, _g = tables.topic.c, tables.consumer.c, tables.shard.c, tables.shard_layout.c

_TOPICS: Final = select(
    _t.eql_name,
    _t.eql_partitions,
    _t.eql_created_at,
    _t.eql_retention_seconds,
    _t.eql_retention_bytes,
    _t.eql_retention_events,
    _t.eql_layout,
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


@checked
class Registry:
    """The topics and consumers of one database. Every registration is idempotent."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[str, tuple[float, Topic]] = {}
        self._cache_lock = threading.Lock()

    # Topics

    def register_topic(self, topic: Topic) -> Registry:
        """Create `topic`, or find it as it is.

        Its number of partitions can be changed while it has neither events nor consumers; `RedefinitionError`
        otherwise. Its retention can always be changed; a topic that names none keeps the one that it has. Raises
        `InvalidNameError` for a name that a table of the platform has taken, and `DatabaseBusyError` when publishers do
        not let it be changed.
        """
        if event_table(topic.name) in tables.metadata.tables:
            raise InvalidNameError(f"topic name {topic.name!r} is not usable: the platform has a table of that name")
        with self._database.core() as connection:
            has_roles = roles.act_as_owner(driver_connection(connection), self._database.schema)
            lock_registry(connection)
            _refuse_capitals(connection, topic.name)
            # EventSQL's Java library registers topics too, and knows nothing of our lock.
            created = connection.execute(
                insert(tables.topic)
                .values(eql_name=topic.name, eql_partitions=topic.partitions)
                .on_conflict_do_nothing()
            )
            if created.rowcount:
                _forget_redrives(connection, topic.name)
            connection.execute(insert(tables.event_buffer_lock).values(eql_topic=topic.name).on_conflict_do_nothing())
            existing = find_topic(connection, topic.name)
            if existing is not None and existing.partitions != topic.partitions:
                self._redefine(connection, existing, topic)
            if existing is not None and topic.retention is not None:
                _keep(connection, existing, topic.retention)
            _create_log(connection, topic)
            if has_roles:
                roles.grant(driver_connection(connection), self._database.schema, [topic.name])
        self.forget(topic.name)
        return self

    def _redefine(self, connection: Connection, existing: Topic, topic: Topic) -> None:
        had, wanted = _partitions(existing.partitions), _partitions(topic.partitions)
        change = f"topic {topic.name!r} has {had} and cannot get {wanted}"
        _lock_topic(connection, topic.name)
        consumers = connection.scalar(select(func.count(_c.eql_name.distinct())).where(_c.eql_topic == topic.name))
        if consumers:
            raise RedefinitionError(
                f"{change}: it has {consumers} consumer(s), whose offsets are per partition; "
                f"{_repartition(existing, topic)}"
            )
        _lock_buffer(connection)
        if _has_events(connection, topic.name):
            raise RedefinitionError(
                f"{change}: it has events, whose keys would change their partition; {_repartition(existing, topic)}"
            )
        # The ids of its log begin anew.
        for kept_by in (tables.topic_layout, tables.shard_fence):
            connection.execute(delete(kept_by).where(kept_by.c.eql_topic == topic.name))
        _forget_redrives(connection, topic.name)
        connection.execute(
            update(tables.topic)
            .where(_t.eql_name == topic.name)
            .values(eql_partitions=topic.partitions, eql_layout=_t.eql_layout + 1)
        )
        connection.execute(DropTable(tables.event_log(topic.name, partitioned=False)))

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        with self._database.core() as connection:
            return _usable(connection.execute(_TOPICS.order_by(_t.eql_name)))

    def topic(self, name: str) -> Topic:
        """One topic. Raises `TopicNotFoundError`."""
        with self._database.core() as connection:
            topic = find_topic(connection, name)
        if topic is None:
            raise _no_topic(name)
        return topic

    @checks_itself
    def cached_topic(self, name: str) -> Topic:
        """The same from memory when it was looked up within the last seconds, for publishers."""
        known = self.known(name)
        if known is not None:
            return known
        now = time.monotonic()
        topic = self.topic(name)
        with self._cache_lock:
            self._cache[name] = (now, topic)
        return topic

    @checks_itself
    def known(self, name: str) -> Topic | None:
        """The same without asking the database; None when it would have to be looked up."""
        if type(name) is not str:
            check_text("name", name)
        with self._cache_lock:
            entry = self._cache.get(name)
        return entry[1] if entry is not None and time.monotonic() - entry[0] < CACHE_SECONDS else None

    def forget(self, name: str) -> None:
        """Look a topic up anew when it is asked for next."""
        with self._cache_lock:
            self._cache.pop(name, None)

    def set_retention(self, name: str, retention: Retention | None) -> None:
        """Say how much of a topic is kept; with None, or without a bound, everything is, for ever.

        Nothing is dropped by this itself. Raises `TopicNotFoundError`.
        """
        with self._database.core() as connection:
            lock_registry(connection)
            existing = find_topic(connection, name)
            if existing is None:
                raise _no_topic(name)
            _keep(connection, existing, retention or Retention())
        self.forget(name)

    def unregister_topic(self, name: str, *, force: bool = False) -> None:
        """Delete a topic with all its events.

        Waits for a transfer and a consumption that are under way. Raises `TopicNotFoundError`, `RegistryError` while it
        has consumers or events, unless `force` is set, and `DatabaseBusyError` when publishers or readers do not let it
        go.
        """
        topic = self.topic(name)
        with self._database.core() as connection:
            lock_registry(connection)
            _lock_topic(connection, name)
            consumers = sorted({state.name for state in consumer_states(connection, name, lock=True)})
            if consumers and not force:
                raise RegistryError(
                    f"topic {name!r} is kept: it has consumers ({', '.join(consumers)}), which would lose their "
                    f"offsets; {_by_force(name)}"
                )
            _lock_buffer(connection)
            if not force and _has_events(connection, name):
                raise RegistryError(f"topic {name!r} is kept: it has events, which would be lost; {_by_force(name)}")
            # A block goes before the row of the buffer that stands for it.
            driver_connection(connection).execute(
                Queries("blocks", self._database.schema)("drop_of_topic"), {"topic": name}
            )
            connection.execute(delete(tables.event_buffer).where(tables.event_buffer.c.eql_topic == name))
            # The trigger `topic_forgotten` deletes what all other tables have of the topic.
            connection.execute(delete(tables.topic).where(_t.eql_name == name))
            connection.execute(DropTable(tables.event_log(name, partitioned=topic.partitioned), if_exists=True))
        self.forget(name)

    # Consumers

    def register_consumer(
        self,
        consumer: Consumer,
        *,
        max_attempts: int | None = None,
        start: Start = "earliest",
        filter: DeclaredFilter = None,  # noqa: A002 - the field's word
        held: bool = False,
    ) -> Registry:
        """Create `consumer`, or find it as it is. The offsets of one that exists never move: only a seek moves them.

        `max_attempts` (at least 1, and 5 for a new consumer) is how often an event is tried before it goes to the dead
        letter topic.

        `start` says where a new consumer begins: at the earliest event, after the latest, at the first event from an
        offset on, or at the first that entered the log at a time or later, so long ago for `Back`. Where that lies
        outside of the log, it begins at the end that is nearest.

        With a `filter`, the consumer's functions get the events that match; its offset moves past the others, which
        count as lag until then. Who reads the range of a claim for himself gets them all.

        A consumer that exists takes the `max_attempts` and the `filter` that are given, from its next batch on;
        `EVERY_EVENT` ends a filter. It keeps a setting that is None. Events that it passed over do not come back. A new
        one that is `held` gets no events until it is let go (log/shard_store.py).

        A partitioned consumer that lacks partitions of its topic gets them, from their earliest events on.

        Raises `TopicNotFoundError`; `ValidationError` for a partitioned consumer of a topic that is not, or a start or
        filter that cannot be; `RedefinitionError` for one that exists in the other form.
        """
        position = starting_at(start)
        with self._database.core() as connection:
            lock_registry(connection)
            topic = find_topic(connection, consumer.topic)
            if topic is None:
                raise _no_topic(consumer.topic)
            if consumer.partitioned and not topic.partitioned:
                raise ValidationError(
                    f"consumer {consumer.name!r} cannot be partitioned: topic {topic.name!r} is not partitioned"
                )
            own = (_c.eql_topic == topic.name, _c.eql_name == consumer.name)
            existing = consumer_states(connection, topic.name, consumer.name)
            check_form(consumer, existing)
            declared: dict[str, Any] = {} if max_attempts is None else {"eql_max_attempts": max_attempts}
            conditions = filter if isinstance(filter, EventFilter) else None
            if filter is not None:
                declared["eql_filter"] = null() if conditions is None else conditions.as_json()
            if existing:
                if consumer.partitioned:
                    layouts.complete(driver_connection(connection), self._database.schema, topic.name, consumer.name)
                # An update waits for the consumption under way: one that changes nothing need not.
                if any(
                    max_attempts not in {None, state.max_attempts}
                    or (filter is not None and state.filter != conditions)
                    for state in existing
                ):
                    connection.execute(update(tables.consumer).where(*own).values(declared))
                return self
            offset = None
            if not isinstance(position, Earliest):
                resolved = resolve(
                    driver_connection(connection), self._database.schema, topic.name, position, {NOT_PARTITIONED: 0}
                )
                offset = resolved[NOT_PARTITIONED].offset
            wanted, until = [NOT_PARTITIONED], None
            if consumer.partitioned:
                known = layouts.layouts(driver_connection(connection), self._database.schema, topic.name)
                place = layouts.place(known, offset or 0) if known else None
                wanted = list(range(topic.partitions if place is None else place.partitions))
                until = None if place is None else place.until
            connection.execute(
                insert(tables.consumer).values(eql_consumed_events=0, **declared).on_conflict_do_nothing(),
                [
                    {
                        "eql_topic": topic.name,
                        "eql_name": consumer.name,
                        "eql_partition": partition,
                        "eql_last_event_id": offset,
                        "eql_until": HELD if held else until,
                    }
                    for partition in wanted
                ],
            )
        return self

    def consumers(self, topic: str | None = None) -> list[ConsumerState]:
        """Every consumer partition, of one topic or of all, by topic, name and partition."""
        if topic is not None:
            self.topic(topic)
        with self._database.core() as connection:
            return consumer_states(connection, topic)

    def consumer(self, topic: str, name: str) -> list[ConsumerState]:
        """The partitions of one consumer. Raises `TopicNotFoundError` or `ConsumerNotFoundError`."""
        states = [state for state in self.consumers(topic) if state.name == name]
        if not states:
            with self._database.connection() as connection:
                check_readable(connection, self._database.schema, topic)
            raise ConsumerNotFoundError(
                f"topic {topic!r} has no consumer {name!r}: create it with `eventsql consumer create {topic} {name}`"
            )
        return states

    def unregister_consumer(self, topic: str, name: str) -> None:
        """Delete a consumer with its offsets. Waits for a consumption that is under way."""
        self.consumer(topic, name)
        with self._database.core() as connection:
            consumer_states(connection, topic, name, lock=True)
            # The trigger `consumer_forgotten` deletes its claims.
            connection.execute(delete(tables.consumer).where(_c.eql_topic == topic, _c.eql_name == name))

    def pause(self, topic: str, name: str) -> None:
        """Let no consumption of this consumer start until `resume`; one that is under way goes on."""
        self._set(topic, name, eql_paused=True)

    def resume(self, topic: str, name: str) -> None:
        """End a pause, and give an event that blocks a partition a fresh set of attempts."""
        self._set(
            topic, name, eql_paused=False, eql_attempts=0, eql_failed_event_id=None, eql_failure=None, eql_retry_at=None
        )

    def _set(self, topic: str, name: str, **values: object) -> None:
        self.consumer(topic, name)
        with self._database.core() as connection:
            consumer_states(connection, topic, name, lock=True)
            connection.execute(update(tables.consumer).where(_c.eql_topic == topic, _c.eql_name == name).values(values))


def check_readable(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Fail where the current role may not read a topic's log: its consumers are hidden from a role of other topics."""
    queries, log = Queries("log", schema), f'"{schema}"."{event_table(topic)}"'
    if connection.execute(queries("is_refused"), {"log": log}).fetchone() == (True,):
        connection.execute(queries("check_readable", topic=topic))


def choose_partitions(states: Sequence[ConsumerState], partition: int | None) -> list[int]:
    """The partitions of a consumer that are meant: the one that is asked for, or all.

    Raises `PartitionOutOfRangeError`.
    """
    own = [state.partition for state in states]
    if partition is None or [partition] == own:
        return own
    name = states[0].name
    if own == [NOT_PARTITIONED]:
        raise PartitionOutOfRangeError(
            f"partition {partition} is out of range: consumer {name!r} is not partitioned, it reads all of them as one"
        )
    if partition not in own:
        raise PartitionOutOfRangeError(
            f"partition {partition} is out of range: consumer {name!r} has partitions 0 to {len(own) - 1}"
        )
    return [partition]


def check_filter(declared: object) -> None:
    """Raises `ValidationError` for what declares no filter."""
    if declared is not None and not isinstance(declared, EventFilter | EveryEvent):
        raise ValidationError(f"filter must be an EventFilter, EVERY_EVENT or None, not {type(declared).__name__}")


def check_form(consumer: Consumer, existing: Sequence[ConsumerState]) -> None:
    """Raises `RedefinitionError` for a consumer that exists in the other form: its offsets mean nothing in this one."""
    name, topic = consumer.name, consumer.topic
    if all((state.partition != NOT_PARTITIONED) == consumer.partitioned for state in existing):
        return
    form = "not partitioned" if consumer.partitioned else "partitioned"
    option = "without `--partitioned`" if consumer.partitioned else "with `--partitioned`"
    raise RedefinitionError(
        f"consumer {name!r} of topic {topic!r} exists and is {form}, so nothing was changed: register it {option} "
        f"(in Python partitioned={not consumer.partitioned}), or delete it and its offsets first with "
        f"`eventsql consumer delete {shlex.quote(topic)} {shlex.quote(name)}`"
    )


def _partitions(count: int) -> str:
    return "no partitions" if count == NOT_PARTITIONED else f"{count} partition{'s' if count > 1 else ''}"


def _repartition(existing: Topic, topic: Topic) -> str:
    if not (existing.partitioned and topic.partitioned):
        return "register another topic"
    return f"`eventsql topic alter {topic.name} --partitions {topic.partitions}` changes them in order"


def _by_force(name: str) -> str:
    return f"`eventsql topic delete {name} --force`, in Python force=True, deletes all of it"


def _no_topic(name: str) -> TopicNotFoundError:
    return TopicNotFoundError(f"topic {name!r} does not exist: create it with `eventsql topic create {name}`")


def lock_registry(connection: Connection | psycopg.Connection[Any]) -> None:
    """Let no other topic, consumer, seek or retention of this database change until the caller's transaction ends.

    They are rare, and two at once would collide in their DDL, or look at what the other is about to change. Whoever has
    it does not wait for anything else for long: everybody waits with it.
    """
    driver = driver_connection(connection)
    driver.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (REGISTRY_LOCK,))
    driver.execute(f"SET LOCAL lock_timeout TO '{LOCK_SECONDS}s'")


def _lock_topic(connection: Connection, name: str) -> None:
    """Wait for the transfer that holds the topic, and keep others out of its table."""
    lock = tables.event_buffer_lock.c.eql_topic
    connection.execute(select(lock).where(lock == name).with_for_update())


def _lock_buffer(connection: Connection) -> None:
    """Wait until all that publishers have written is committed, and keep them from writing on old definitions.

    All publishers wait with it, of all topics, as long as it waits itself: for a caller's transaction that published
    and stays open.
    """
    driver_connection(connection).execute(Queries("layouts", _schema(connection))("lock_buffer"))


def find_topic(connection: Connection, name: str) -> Topic | None:
    """A topic as the caller's transaction sees it now."""
    row = connection.execute(_TOPICS.where(_t.eql_name == name)).one_or_none()
    return None if row is None else _as_topic(row)


def _usable(rows: Iterable[Sequence[Any]]) -> list[Topic]:
    """Topics, but for those that EventSQL's Java library made with names that only it can use."""
    topics = []
    for row in rows:
        try:
            topics.append(_as_topic(row))
        except InvalidNameError as error:
            logger.warning("a topic is left out, which another library made: %s", error)
    return topics


def _refuse_capitals(connection: Connection, name: str) -> None:
    """Topics with capitals are Java's: two that differ in nothing else would have one table."""
    folded = func.lower(_t.eql_name.collate("C"))
    known = list(connection.scalars(select(_t.eql_name).where(folded == name.lower())))
    if name not in known and (known or name != name.lower()):
        raise InvalidNameError(
            f"topic name {name!r} is not usable: "
            + (f"topic {known[0]!r} has its table" if known else f"take lower-case letters, as in {name.lower()!r}")
        )


def _as_topic(row: Sequence[Any]) -> Topic:
    name, partitions, created_at, *bounds, layout, shards = row
    retention = Retention(*bounds)
    return Topic(
        name, partitions, created_at, retention=None if retention.for_ever else retention, layout=layout,
        shards=ShardSet.from_json(shards),
    )  # fmt: skip


def _keep(connection: Connection, existing: Topic, retention: Retention) -> None:
    if retention != (existing.retention or Retention()):
        connection.execute(
            update(tables.topic)
            .where(_t.eql_name == existing.name)
            .values(
                eql_retention_seconds=retention.seconds,
                eql_retention_bytes=retention.bytes,
                eql_retention_events=retention.events,
            )
        )


def _forget_redrives(connection: Connection, name: str) -> None:
    """Which dead letters were redriven is known by their ids, which begin anew with the log."""
    redriven = tables.redriven_dead_letter
    connection.execute(delete(redriven).where(redriven.c.eql_topic == name))


def _schema(connection: Connection) -> str:
    """The schema of the tables in a transaction of `Database.core`."""
    return str(connection.get_execution_options()["schema_translate_map"][None])


def _create_log(connection: Connection, topic: Topic) -> None:
    driver, schema = driver_connection(connection), _schema(connection)
    log = tables.event_log(topic.name, partitioned=topic.partitioned)
    log.create(connection, checkfirst=True)
    name = sql.Identifier(schema, log.name).as_string(driver)
    for index in log.indexes:
        # A table of EventSQL's Java library has no index for partitions. While it is built, the topic's transfers wait.
        columns = {"log": name, "columns": index.columns.keys()}
        if driver.execute(Queries("layouts", schema)("has_index"), columns).fetchone() == (True,):
            continue
        # A large table takes long, and this cannot be done in parts.
        driver.execute("SET LOCAL statement_timeout TO 0")
        index.create(connection)
    sequences.settle(driver, schema, log.name)
    if segments.segments(driver, schema, topic.name) == []:
        segments.ensure_ahead(driver, schema, topic.name)


def _has_events(connection: Connection, name: str) -> bool:
    log = tables.event_log(name, partitioned=False)
    buffered = select(tables.event_buffer.c.eql_id).where(tables.event_buffer.c.eql_topic == name).limit(1)
    block, part = tables.spark_staged_event.c, tables.spark_part.c
    decided = (
        select(block.eql_attempt)
        .join(tables.spark_part, block.eql_attempt == any_(part.eql_attempts))
        .where(block.eql_topic == name, part.eql_published_at.is_(None))
        .limit(1)
    )
    return any(
        connection.execute(found).first() is not None for found in (select(log.c.eql_id).limit(1), buffered, decided)
    )


def consumer_states(
    connection: Connection,
    topic: str | None,
    consumer: str | None = None,
    *,
    partitions: Sequence[int] | None = None,
    lock: bool = False,
) -> list[ConsumerState]:
    """Consumer partitions by topic, name and partition; with `lock`, after the consumptions that have them now.

    Who locks several does so here: in any other order, two of them could wait for each other.
    """
    query = select(
        _c.eql_topic,
        _c.eql_name,
        _c.eql_partition,
        func.coalesce(_c.eql_last_event_id, 0),
        _c.eql_consumed_events,
        _c.eql_last_consumption_at,
        _c.eql_paused,
        _c.eql_epoch,
        _c.eql_lease_owner,
        _c.eql_lease_expires_at,
        _c.eql_failed_event_id,
        _c.eql_attempts,
        _c.eql_failure,
        _c.eql_retry_at,
        _c.eql_max_attempts,
        _c.eql_filter,
        _c.eql_until,
    ).order_by(_c.eql_topic, _c.eql_name, _c.eql_partition)
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
