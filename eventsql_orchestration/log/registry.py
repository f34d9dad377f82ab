"""Topics and consumers: registering them, listing them, and what may be redefined."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

from sqlalchemy import Connection, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.schema import DropTable

from eventsql_orchestration.database import tables
from eventsql_orchestration.database.database import Database
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    InvalidNameError,
    RedefinitionError,
    RegistryError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import NOT_PARTITIONED, Consumer, ConsumerState, Topic

CACHE_SECONDS: Final = 5.0
"""How long a publisher goes on with a topic's definition before it looks again."""

LOCK_SECONDS: Final = 10
"""How long a redefinition waits for publishers at most, and keeps them waiting."""

# All registrations of a database follow one another: they are rare, and DDL of two at once would collide.
_REGISTRY_LOCK: Final = 0x6576_656E_7472_6567

_HAS_INDEX: Final = """
SELECT EXISTS (
    SELECT FROM pg_index WHERE indrelid = CAST(:log AS regclass) AND pg_get_indexdef(indexrelid) LIKE :columns
)
"""

_t, _c = tables.topic.c, tables.consumer.c


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
        otherwise. Raises `InvalidNameError` for a name that a table of the platform has taken, and `DatabaseBusyError`
        when publishers do not let it be changed.
        """
        if event_table(topic.name) in tables.metadata.tables:
            raise InvalidNameError(f"topic name {topic.name!r} is not usable: the platform has a table of that name")
        with self._database.core() as connection:
            _lock(connection)
            # EventSQL's Java library registers topics too, and knows nothing of our lock.
            connection.execute(
                insert(tables.topic)
                .values(eql_name=topic.name, eql_partitions=topic.partitions)
                .on_conflict_do_nothing()
            )
            connection.execute(insert(tables.event_buffer_lock).values(eql_topic=topic.name).on_conflict_do_nothing())
            existing = _topic(connection, topic.name)
            if existing is not None and existing.partitions != topic.partitions:
                self._redefine(connection, existing, topic)
            _create_log(connection, topic)
        self.forget(topic.name)
        return self

    def _redefine(self, connection: Connection, existing: Topic, topic: Topic) -> None:
        had, wanted = _partitions(existing.partitions), _partitions(topic.partitions)
        change = f"topic {topic.name!r} has {had} and cannot get {wanted}"
        _lock_topic(connection, topic.name)
        consumers = connection.scalar(select(func.count(_c.eql_name.distinct())).where(_c.eql_topic == topic.name))
        if consumers:
            raise RedefinitionError(f"{change}: it has {consumers} consumer(s), whose offsets are per partition")
        _lock_buffer(connection)
        if _has_events(connection, topic.name):
            raise RedefinitionError(f"{change}: it has events, whose keys would change their partition")
        connection.execute(
            update(tables.topic).where(_t.eql_name == topic.name).values(eql_partitions=topic.partitions)
        )
        connection.execute(DropTable(tables.event_log(topic.name, partitioned=False)))

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        with self._database.core() as connection:
            rows = connection.execute(select(_t.eql_name, _t.eql_partitions, _t.eql_created_at).order_by(_t.eql_name))
            return [Topic(*row) for row in rows]

    def topic(self, name: str) -> Topic:
        """One topic. Raises `TopicNotFoundError`."""
        with self._database.core() as connection:
            topic = _topic(connection, name)
        if topic is None:
            raise _no_topic(name)
        return topic

    def cached_topic(self, name: str) -> Topic:
        """The same from memory when it was looked up within the last seconds, for publishers."""
        now = time.monotonic()
        with self._cache_lock:
            entry = self._cache.get(name)
        if entry is not None and now - entry[0] < CACHE_SECONDS:
            return entry[1]
        topic = self.topic(name)
        with self._cache_lock:
            self._cache[name] = (now, topic)
        return topic

    def forget(self, name: str) -> None:
        """Look a topic up anew when it is asked for next."""
        with self._cache_lock:
            self._cache.pop(name, None)

    def unregister_topic(self, name: str, *, force: bool = False) -> None:
        """Delete a topic with all its events.

        Waits for a transfer and a consumption that are under way. Raises `TopicNotFoundError`, `RegistryError` while it
        has consumers or events, unless `force` is set, and `DatabaseBusyError` when publishers or readers do not let it
        go.
        """
        topic = self.topic(name)
        with self._database.core() as connection:
            _lock(connection)
            _lock_topic(connection, name)
            consumers = sorted({state.name for state in _states(connection, name, lock=True)})
            if consumers and not force:
                raise RegistryError(f"topic {name!r} is kept: it has the consumers {', '.join(consumers)}")
            _lock_buffer(connection)
            if not force and _has_events(connection, name):
                raise RegistryError(f"topic {name!r} is kept: it has events, which would be lost")
            connection.execute(delete(tables.consumer_claim).where(tables.consumer_claim.c.eql_topic == name))
            connection.execute(delete(tables.consumer).where(_c.eql_topic == name))
            connection.execute(delete(tables.event_buffer).where(tables.event_buffer.c.eql_topic == name))
            connection.execute(delete(tables.event_buffer_lock).where(tables.event_buffer_lock.c.eql_topic == name))
            connection.execute(delete(tables.topic).where(_t.eql_name == name))
            connection.execute(DropTable(tables.event_log(name, partitioned=topic.partitioned), if_exists=True))
        self.forget(name)

    # Consumers

    def register_consumer(
        self,
        consumer: Consumer,
        *,
        max_attempts: int = 5,
        start: Literal["earliest", "latest"] = "earliest",
    ) -> Registry:
        """Create `consumer`, or find it as it is, offsets untouched.

        `max_attempts` (at least 1) is how often an event is tried before it goes to the dead letter topic. `start` says
        where a new consumer begins. Raises `TopicNotFoundError`; `ValidationError` for a partitioned consumer of a
        topic that is not; `RedefinitionError` for one that has consumed events in the other form.
        """
        if max_attempts < 1:
            raise ValidationError(f"max_attempts must be at least 1, not {max_attempts}")
        if start not in ("earliest", "latest"):
            raise ValidationError(f"start must be 'earliest' or 'latest', not {start!r}")
        with self._database.core() as connection:
            _lock(connection)
            topic = _topic(connection, consumer.topic)
            if topic is None:
                raise _no_topic(consumer.topic)
            if consumer.partitioned and not topic.partitioned:
                raise ValidationError(
                    f"consumer {consumer.name!r} cannot be partitioned: topic {topic.name!r} is not partitioned"
                )
            wanted = topic.all_partitions if consumer.partitioned else (NOT_PARTITIONED,)
            existing = _states(connection, topic.name, consumer.name)
            if existing and {state.partition for state in existing} != set(wanted):
                # Wait for a consumption under way: it may be about to commit the first events.
                existing = _states(connection, topic.name, consumer.name, lock=True)
                if any(state.consumed_events for state in existing):
                    raise RedefinitionError(
                        f"consumer {consumer.name!r} of topic {topic.name!r} stays "
                        f"{'partitioned' if existing[0].partition >= 0 else 'not partitioned'}: it has consumed events"
                    )
                connection.execute(
                    delete(tables.consumer).where(_c.eql_topic == topic.name, _c.eql_name == consumer.name)
                )
                existing = []
            if existing:
                connection.execute(
                    update(tables.consumer)
                    .where(
                        _c.eql_topic == topic.name,
                        _c.eql_name == consumer.name,
                        _c.eql_max_attempts != max_attempts,
                    )
                    .values(eql_max_attempts=max_attempts)
                )
                return self
            offset = _end(connection, topic) if start == "latest" else None
            connection.execute(
                insert(tables.consumer).on_conflict_do_nothing(),
                [
                    {
                        "eql_topic": topic.name,
                        "eql_name": consumer.name,
                        "eql_partition": partition,
                        "eql_last_event_id": offset,
                        "eql_consumed_events": 0,
                        "eql_max_attempts": max_attempts,
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
            return _states(connection, topic)

    def consumer(self, topic: str, name: str) -> list[ConsumerState]:
        """The partitions of one consumer. Raises `TopicNotFoundError` or `ConsumerNotFoundError`."""
        states = [state for state in self.consumers(topic) if state.name == name]
        if not states:
            raise ConsumerNotFoundError(
                f"topic {topic!r} has no consumer {name!r}: create it with `eventsql consumer create {topic} {name}`"
            )
        return states

    def unregister_consumer(self, topic: str, name: str) -> None:
        """Delete a consumer with its offsets. Waits for a consumption that is under way."""
        self.consumer(topic, name)
        claims = tables.consumer_claim.c
        with self._database.core() as connection:
            connection.execute(delete(tables.consumer).where(_c.eql_topic == topic, _c.eql_name == name))
            connection.execute(
                delete(tables.consumer_claim).where(claims.eql_topic == topic, claims.eql_consumer == name)
            )

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
            connection.execute(update(tables.consumer).where(_c.eql_topic == topic, _c.eql_name == name).values(values))


def _partitions(count: int) -> str:
    return "no partitions" if count == NOT_PARTITIONED else f"{count} partition{'s' if count > 1 else ''}"


def _no_topic(name: str) -> TopicNotFoundError:
    return TopicNotFoundError(f"topic {name!r} does not exist: create it with `eventsql topic create {name}`")


def _lock(connection: Connection) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _REGISTRY_LOCK})


def _lock_topic(connection: Connection, name: str) -> None:
    """Wait for the transfer that holds the topic, and keep others out of its table."""
    lock = tables.event_buffer_lock.c.eql_topic
    connection.execute(select(lock).where(lock == name).with_for_update())


def _lock_buffer(connection: Connection) -> None:
    """Wait until all that publishers have written is committed, and keep them from writing on old definitions.

    All publishers wait with it, of all topics, so it must not wait for long itself: for a caller's transaction that
    published and stays open.
    """
    connection.execute(text(f"SET LOCAL lock_timeout TO '{LOCK_SECONDS}s'"))
    connection.execute(text("LOCK TABLE event_buffer IN SHARE ROW EXCLUSIVE MODE"))


def _topic(connection: Connection, name: str) -> Topic | None:
    row = connection.execute(
        select(_t.eql_name, _t.eql_partitions, _t.eql_created_at).where(_t.eql_name == name)
    ).one_or_none()
    return None if row is None else Topic(*row)


def _create_log(connection: Connection, topic: Topic) -> None:
    log = tables.event_log(topic.name, partitioned=topic.partitioned)
    log.create(connection, checkfirst=True)
    for index in log.indexes:
        # A table of EventSQL's Java library has no index for partitions. While it is built, the topic's transfers wait.
        if connection.scalar(text(_HAS_INDEX), {"log": log.name, "columns": f"%({', '.join(index.columns.keys())})"}):
            continue
        index.create(connection)


def _end(connection: Connection, topic: Topic) -> int:
    log = tables.event_log(topic.name, partitioned=topic.partitioned)
    return int(connection.scalar(select(func.coalesce(func.max(log.c.eql_id), 0))) or 0)


def _has_events(connection: Connection, name: str) -> bool:
    log = tables.event_log(name, partitioned=False)
    buffered = select(tables.event_buffer.c.eql_id).where(tables.event_buffer.c.eql_topic == name).limit(1)
    return (
        connection.execute(select(log.c.eql_id).limit(1)).first() is not None
        or connection.execute(buffered).first() is not None
    )


def _states(
    connection: Connection, topic: str | None, consumer: str | None = None, *, lock: bool = False
) -> list[ConsumerState]:
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
    ).order_by(_c.eql_topic, _c.eql_name, _c.eql_partition)
    if topic is not None:
        query = query.where(_c.eql_topic == topic)
    if consumer is not None:
        query = query.where(_c.eql_name == consumer)
    if lock:
        query = query.with_for_update()
    rows: Sequence[Sequence[Any]] = connection.execute(query).all()
    return [ConsumerState(*row) for row in rows]
