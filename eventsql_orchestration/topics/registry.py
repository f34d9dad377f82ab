"""Topics and consumers of one database: registered, listed, changed and deleted."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final, TypedDict, Unpack

from sqlalchemy import Connection, delete, func, null, select, update
from sqlalchemy.dialects.postgresql import insert

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.consumer import Consumer, ConsumerState, DeclaredFilter, EventFilter
from eventsql_orchestration.database import Database, Queries, driver_connection, role_statements, tables
from eventsql_orchestration.database.held_by_handlers import check_not_held
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.database.sessions import let_last, read_committed
from eventsql_orchestration.errors import (
    InvalidNameError,
    PermissionDeniedError,
    RedefinitionError,
    RegistryError,
    ValidationError,
)
from eventsql_orchestration.forks import ProcessLock
from eventsql_orchestration.model import (
    BLOCKS,
    COMPRESSIONS,
    DEAD_LETTER_SUFFIX,
    NOT_PARTITIONED,
    ROWS,
    STORAGES,
    Compression,
    Retention,
    Storage,
    Topic,
)
from eventsql_orchestration.storage import compressing, log_form, log_table, segment_drops, segments
from eventsql_orchestration.topics import layouts
from eventsql_orchestration.topics.catalog import (
    all_topics,
    check_form,
    consumer_states,
    existing_topic,
    find_topic,
    lock_empty,
    lock_log,
    lock_registry,
    lock_topic,
    no_consumer,
    refuse_capitals,
    schema_of,
)
from eventsql_orchestration.topics.changing import change_compression, change_storage
from eventsql_orchestration.topics.consumer_rows import change_settings, insert_consumer
from eventsql_orchestration.topics.positions import Start, starting_at
from eventsql_orchestration.topics.registration import Registration, consumer_registration, topic_registration
from eventsql_orchestration.validation import Duration, check_choice, check_text, counted, in_seconds


class ConsumerSettings(TypedDict, total=False):
    """The settings of a consumer that a registration declares. See `ClusterRegistry.declare_consumer`."""

    max_attempts: int | None
    start: Start
    filter: DeclaredFilter
    held: bool


DEFAULT_STORAGE: Storage = BLOCKS
"""The form of a new topic that names none, and takes no dead letters."""

RETRY_SECONDS: Final = 30.0
"""Seconds for which a change of the form or the compression is tried."""

CACHE_SECONDS: Final = 5.0
"""How long a publisher goes on with a topic's definition before it looks again."""

LAYOUTS_OF_GENERATION: Final = 1_000_000
"""For each shard that was added, the layouts of new topics begin with a number that is higher by this. So a publisher
that knows fewer shards, or a former topic of this name, never knows a layout of the same number."""

_t, _c = tables.topic.c, tables.consumer.c


@checked
class Registry:
    """The topics and consumers of one database. Every registration is idempotent."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[str, tuple[float, Topic]] = {}
        self._forgotten = 0
        """How often a topic was forgotten. A definition that was read before that is not kept."""
        self._turn = ProcessLock()

    # Topics

    def register_topic(self, topic: Topic) -> Registry:
        """See `ClusterRegistry.register_topic`."""
        self.declare_topic(topic)
        return self

    def declare_topic(self, topic: Topic) -> Registration:
        """See `ClusterRegistry.declare_topic`."""
        if not log_table.is_usable_name(topic.name):
            raise InvalidNameError(f"topic name {topic.name!r} is not usable: the platform has a table of that name")
        try:
            return self._declare_topic(topic)
        except PermissionDeniedError:
            # A service that registers its topics at each start needs no right to do so if nothing changes.
            with self._database.core() as connection:
                existing = find_topic(connection, topic.name)
                if existing is None or not _is_declared(connection, existing, topic):
                    raise
            return topic_registration(existing, existing, topic)

    def _declare_topic(self, topic: Topic) -> Registration:
        with self._database.by_admin(), self._database.core() as connection:
            has_roles = role_statements.act_as_owner(driver_connection(connection), self._database.schema)
            lock_registry(connection)
            refuse_capitals(connection, topic.name)
            before = find_topic(connection, topic.name)
            compressing.check_available(driver_connection(connection), self._database.schema, topic.compression)
            if before is None:
                _insert_topic(connection, topic)
            connection.execute(insert(tables.event_buffer_lock).values(eql_topic=topic.name).on_conflict_do_nothing())

            existing = existing_topic(connection, topic.name)
            _check_stored(existing, topic)
            if existing.partitions != topic.partitions and self._redefine(connection, existing, topic):
                existing = replace(existing, partitions=topic.partitions)
            if topic.retention is not None:
                _keep(connection, existing, topic.retention)
            stored = replace(
                topic, partitions=existing.partitions, storage=existing.storage, compression=existing.compression
            )
            segments.create_log(driver_connection(connection), self._database.schema, stored)
            if has_roles:
                role_statements.grant(driver_connection(connection), self._database.schema, [topic.name])
            registration = topic_registration(before, existing_topic(connection, topic.name), topic)
        self.forget(topic.name)
        return registration

    def _redefine(self, connection: Connection, existing: Topic, topic: Topic) -> bool:
        """Give a topic its declared partitions, if it has neither events nor consumers.

        False if it was repartitioned and had this number before: a program with the former number may start again.
        """
        had, wanted = _partitions(existing.partitions), _partitions(topic.partitions)
        remedy = "register another topic"
        if existing.partitioned and topic.partitioned:
            remedy = f"change the topic with `eventsql topic alter {topic.name} --partitions {topic.partitions}`"

        lock_topic(connection, topic.name)
        consumers = connection.scalar(select(func.count(_c.eql_name.distinct())).where(_c.eql_topic == topic.name))
        reason = f"{counted(consumers, 'consumer')}, whose offsets would be lost" if consumers else None
        if reason is None and not lock_empty(connection, topic.name):
            reason = "events, whose keys would change their partition"
        if reason is not None and _had(connection, topic):
            return False
        if reason is not None:
            raise RedefinitionError(
                f"topic {topic.name!r} has {had} and cannot get {wanted}, because it has {reason}: "
                f"register it with {had}, or {remedy}"
            )
        # The ids of its log begin anew, so it is another log.
        for kept_by in (tables.topic_layout, tables.shard_fence):
            connection.execute(delete(kept_by).where(kept_by.c.eql_topic == topic.name))
        _forget_redrives(connection, topic.name)
        connection.execute(
            update(tables.topic)
            .where(_t.eql_name == topic.name)
            .values(eql_partitions=topic.partitions, eql_layout=_t.eql_layout + 1, eql_created_at=func.now())
        )
        log_table.drop_log(driver_connection(connection), schema_of(connection), topic.name)
        return True

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        with self._database.core() as connection:
            return all_topics(connection)

    def topic(self, name: str) -> Topic:
        """One topic. Raises `TopicNotFoundError`."""
        with self._database.core() as connection:
            return existing_topic(connection, name)

    @checks_itself
    def cached_topic(self, name: str) -> Topic:
        """One topic, from memory if it was looked up within `CACHE_SECONDS`, for publishers."""
        if (known := self.known(name)) is not None:
            return known
        now, forgotten = time.monotonic(), self._forgotten
        topic = self.topic(name)
        with self._turn.lock:
            if self._forgotten == forgotten:
                self._cache[name] = (now, topic)
        return topic

    @checks_itself
    def known(self, name: str) -> Topic | None:
        """One topic from memory; None when it would have to be looked up."""
        if type(name) is not str:
            check_text("name", name)
        entry = self._cache.get(name)
        return entry[1] if entry is not None and time.monotonic() - entry[0] < CACHE_SECONDS else None

    def forget(self, name: str) -> None:
        """Look a topic up anew at its next use."""
        with self._turn.lock:
            self._forgotten += 1
            self._cache.pop(name, None)

    def set_retention(self, name: str, retention: Retention | None) -> None:
        """See `ClusterRegistry.set_retention`."""
        with self._database.by_admin(), self._database.core() as connection:
            lock_registry(connection)
            _keep(connection, existing_topic(connection, name), retention or Retention())
        self.forget(name)

    def set_storage(self, name: str, storage: Storage, *, timeout: Duration = RETRY_SECONDS) -> bool:
        """See `ClusterRegistry.set_storage`."""
        check_choice("storage", storage, STORAGES)
        if Topic(name, storage=storage).storage == self.topic(name).storage:
            return False
        with self._database.by_admin():
            changed = change_storage(self._database, name, storage, timeout=in_seconds(timeout))
        self.forget(name)
        return changed

    def set_compression(self, name: str, compression: Compression, *, timeout: Duration = RETRY_SECONDS) -> bool:
        """See `ClusterRegistry.set_compression`."""
        check_choice("compression", compression, COMPRESSIONS)
        with self._database.by_admin():
            changed = change_compression(self._database, name, compression, timeout=in_seconds(timeout))
        self.forget(name)
        return changed

    def compressions(self) -> tuple[Compression, ...]:
        """The compressions that the server has, and "none"."""
        with self._database.connection() as connection:
            return compressing.available(connection, self._database.schema)

    def unregister_topic(self, name: str, *, force: bool = False) -> None:
        """See `ClusterRegistry.unregister_topic`."""
        # Refuse an unknown topic before anything is locked.
        self.topic(name)
        with self._database.by_admin(), self._database.core() as connection:
            lock_registry(connection)
            lock_topic(connection, name)
            driver, schema = driver_connection(connection), self._database.schema
            check_not_held(driver, schema, "delivery", name)
            captured = fetch_all(driver, Queries("capture", schema)("captured_tables"), {"topic": name})
            if captured and not force:
                tables_of = ", ".join(table for (table,) in captured)
                raise _kept(name, f"tables that are captured to it ({tables_of}), whose changes nobody would get")
            consumers = sorted({state.name for state in consumer_states(connection, name, lock=True)})
            if consumers and not force:
                raise _kept(name, f"consumers ({', '.join(consumers)}), which would lose their offsets")
            if force:
                lock_log(connection, name)
            elif not lock_empty(connection, name):
                raise _kept(name, "events, which would be lost")
            # Everything is locked, and a limit of the role would end the same deletion at each attempt.
            let_last(driver)
            # A staged block goes before the row of the buffer that stands for it.
            for statement in ("drop_of_topic", "empty_buffer"):
                driver.execute(Queries("blocks", schema)(statement), {"topic": name})
            # The trigger `topic_forgotten` deletes the topic's rows in all other tables.
            connection.execute(delete(tables.topic).where(_t.eql_name == name))
            log_table.drop_log(driver, schema, name)
            segment_drops.drop_leftovers(driver, schema, segment_drops.detached(driver, schema, name))
        self.forget(name)

    # Consumers

    def register_consumer(self, consumer: Consumer, **settings: Unpack[ConsumerSettings]) -> Registry:
        """See `ClusterRegistry.register_consumer`."""
        self.declare_consumer(consumer, **settings)
        return self

    def declare_consumer(self, consumer: Consumer, **settings: Unpack[ConsumerSettings]) -> Registration:
        """See `ClusterRegistry.declare_consumer`."""
        position, held = starting_at(settings.get("start", "earliest")), settings.get("held", False)
        max_attempts, filtered = settings.get("max_attempts"), settings.get("filter")
        stored: dict[str, Any] = {} if max_attempts is None else {"eql_max_attempts": max_attempts}
        if filtered is not None:
            stored["eql_filter"] = filtered.as_json() if isinstance(filtered, EventFilter) else null()

        with self._database.by_admin(), self._database.core() as connection:
            lock_registry(connection)
            topic = existing_topic(connection, consumer.topic)
            if consumer.partitioned and not topic.partitioned:
                raise ValidationError(
                    f"consumer {consumer.name!r} cannot be partitioned: topic {topic.name!r} is not partitioned"
                )
            before = consumer_states(connection, topic.name, consumer.name)
            check_form(consumer, before)
            if before:
                if consumer.partitioned:
                    layouts.complete(driver_connection(connection), self._database.schema, topic.name, consumer.name)
                change_settings(connection, before, stored)
            else:
                insert_consumer(connection, consumer, topic, position, stored, held=held)
            return consumer_registration(consumer, before, consumer_states(connection, topic.name, consumer.name))

    def consumers(self, topic: str | None = None) -> list[ConsumerState]:
        """Every consumer partition, of one topic or of all, by topic, name and partition."""
        with self._database.core() as connection:
            if topic is not None:
                existing_topic(connection, topic)
            return consumer_states(connection, topic)

    def consumer(self, topic: str, name: str) -> list[ConsumerState]:
        """The partitions of one consumer. Raises `TopicNotFoundError` or `ConsumerNotFoundError`."""
        with self._database.core() as connection:
            existing_topic(connection, topic)
            states = consumer_states(connection, topic, name)
            if not states:
                log_table.check_readable(driver_connection(connection), self._database.schema, topic)
                raise no_consumer(topic, name)
        return states

    def unregister_consumer(self, topic: str, name: str) -> None:
        """See `ClusterRegistry.unregister_consumer`."""
        with self._database.by_admin():
            self.consumer(topic, name)
            with self._database.core() as connection:
                check_not_held(driver_connection(connection), self._database.schema, "delivery", topic, name)
                consumer_states(connection, topic, name, lock=True)
                # The trigger `consumer_forgotten` deletes its claims.
                connection.execute(delete(tables.consumer).where(_c.eql_topic == topic, _c.eql_name == name))

    def pause(self, topic: str, name: str) -> None:
        """See `ClusterRegistry.pause`."""
        self._set(topic, name, eql_paused=True)

    def resume(self, topic: str, name: str) -> None:
        """See `ClusterRegistry.resume`."""
        self._set(
            topic, name, eql_paused=False, eql_attempts=0, eql_failed_event_id=None, eql_failure=None, eql_retry_at=None
        )
        with self._database.connection() as connection, read_committed(connection):
            resumed = Queries("deliveries", self._database.schema)("resume")
            connection.execute(resumed, {"topic": topic, "consumer": name}, prepare=False)

    def _set(self, topic: str, name: str, **values: object) -> None:
        change = update(tables.consumer).where(_c.eql_topic == topic, _c.eql_name == name).values(values)
        with self._database.by_admin():
            self.consumer(topic, name)
            with self._database.core() as connection:
                consumer_states(connection, topic, name, lock=True)
                connection.execute(change)


def default_storage(topic: str) -> Storage:
    """The form of a new topic of this name."""
    return ROWS if topic.endswith(DEAD_LETTER_SUFFIX) else DEFAULT_STORAGE


def _check_stored(existing: Topic, wanted: Topic) -> None:
    """Raise `RedefinitionError` if a topic is not stored as it is declared."""
    for option, found, given in (
        ("storage", existing.storage, wanted.storage),
        ("compression", existing.compression, wanted.compression),
    ):
        if given not in {None, found}:
            raise RedefinitionError(
                f"topic {existing.name!r} has {option} {found!r}, not {given!r}: change it with "
                f"`eventsql topic alter {existing.name} --{option} {given}`"
            )


def _is_declared(connection: Connection, existing: Topic, wanted: Topic) -> bool:
    """Whether a topic is as it is declared. Raises `RedefinitionError` if it is not stored as it is declared."""
    _check_stored(existing, wanted)
    retention = existing.retention or Retention()
    same = existing.partitions == wanted.partitions or _had(connection, wanted)
    return same and wanted.retention in {None, retention}


def _had(connection: Connection, topic: Topic) -> bool:
    """Whether a topic had this number of partitions before a repartitioning. Retention forgets the oldest layouts."""
    known = layouts.layouts(driver_connection(connection), schema_of(connection), topic.name)
    return topic.partitions in {each.partitions for each in known}


def _insert_topic(connection: Connection, topic: Topic) -> None:
    """Insert the row of a new topic. EventSQL's Java library registers topics too, without the registry's lock."""
    compression = topic.compression or compressing.default(driver_connection(connection), schema_of(connection))
    generations = select(func.count()).select_from(tables.shard_layout).scalar_subquery()
    connection.execute(
        insert(tables.topic)
        .values(
            eql_name=topic.name,
            eql_partitions=topic.partitions,
            eql_storage=_storage(connection, topic),
            eql_compression=compression,
            eql_layout=1 + LAYOUTS_OF_GENERATION * func.greatest(generations - 1, 0),
        )
        .on_conflict_do_nothing()
    )
    _forget_redrives(connection, topic.name)


def _storage(connection: Connection, topic: Topic) -> Storage:
    """The form of a new topic's log. Programs that share the database may have made the log already."""
    driver, schema = driver_connection(connection), schema_of(connection)
    if log_table.exists(driver, schema, topic.name):
        return BLOCKS if log_form.form_now(driver, schema, topic.name).writes_blocks else ROWS
    return topic.storage or default_storage(topic.name)


def _partitions(count: int) -> str:
    return "no partitions" if count == NOT_PARTITIONED else f"{count} partition{'s' if count > 1 else ''}"


def _kept(name: str, what: str) -> RegistryError:
    return RegistryError(
        f"topic {name!r} is kept, because it has {what}: delete all of it with `eventsql topic delete {name} --execute "
        "--force` (in Python force=True)"
    )


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
    """Forget which dead letters were redriven: their ids begin anew with the log."""
    redriven = tables.redriven_dead_letter
    connection.execute(delete(redriven).where(redriven.c.eql_topic == name))
