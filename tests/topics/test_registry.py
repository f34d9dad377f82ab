"""Topics and consumers are registered once by any number of processes, and change while nothing depends on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import make_url

from eventsql_orchestration import (
    EVERY_EVENT,
    NOT_PARTITIONED,
    AtOffset,
    AtTime,
    Back,
    Consumer,
    Earliest,
    Event,
    EventFilter,
    EventSQL,
    Latest,
    Publication,
    ShiftBy,
    Topic,
)
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    InvalidNameError,
    RedefinitionError,
    RegistryError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import STORAGES, Retention, Storage
from eventsql_orchestration.storage import exchanging, log_table
from eventsql_orchestration.topics import catalog
from eventsql_orchestration.topics.positions import Place, Start
from tests.forms import stored

if TYPE_CHECKING:
    from tests.fixtures import SaidBy, Sessions, Spawn, Until, UntilBlocked


def fill(platform: EventSQL, topic: str, count: int = 3) -> None:
    platform.publisher.publish_all(Publication(topic, b"") for _ in range(count))
    platform.transfer.run_once()


def use(platform: EventSQL, what: str) -> None:
    """Have topic `orders` used by a consumer, or by an event in the log or in the buffer."""
    if what == "consumer":
        platform.registry.register_consumer(Consumer("orders", "mailer"))
        return
    platform.publisher.publish(Publication("orders", b""))
    if what == "log":
        platform.transfer.run_once()


def nothing(_events: Sequence[Event], _connection: Connection) -> None:
    pass


PLATFORM = {"spark_staged_event"}
"""Tables of the platform with names like those of logs."""


def tables(platform: EventSQL) -> set[str]:
    with platform.database.connection() as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE tablename ~ '_(event|block)$'")
        return {name for (name,) in rows} - PLATFORM


# Topics


def test_topics_are_listed_by_name(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("payments")).register_topic(Topic("orders", 3))
    assert platform.registry.topics() == [Topic("orders", 3), Topic("payments")]
    assert platform.registry.topic("orders").created_at is not None
    assert tables(platform) == {stored("orders"), stored("payments")}


def test_registering_a_topic_again_changes_nothing(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    fill(platform, "orders")
    created = platform.registry.topic("orders").created_at
    platform.registry.register_topic(Topic("orders", 3))
    assert platform.reader.count("orders") == 3
    assert platform.registry.topic("orders").created_at == created


def test_a_topic_that_is_not_there_is_named_with_the_command_that_makes_it(platform: EventSQL) -> None:
    with pytest.raises(TopicNotFoundError, match="`eventsql topic create orders`"):
        platform.registry.topic("orders")


def test_a_topic_without_events_and_consumers_may_change_its_partitions(platform: EventSQL) -> None:
    for partitions in (3, NOT_PARTITIONED, 1, 5):
        platform.registry.register_topic(Topic("orders", partitions))
        assert platform.registry.topics() == [Topic("orders", partitions)]
        assert platform.registry.cached_topic("orders").partitions == partitions
    fill(platform, "orders")
    assert platform.reader.count("orders") == 3


def test_a_definition_that_was_read_before_the_topic_was_forgotten_is_not_kept(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a publisher that tries a redefined topic again would use the former definition a second time."""
    registry = platform.shards[0].registry
    registry.register_topic(Topic("orders", 3))
    read = registry.topic

    def slow(name: str) -> Topic:
        topic = read(name)
        registry.register_topic(Topic("orders", 5))
        return topic

    with monkeypatch.context() as patched:
        patched.setattr(registry, "topic", slow)
        assert registry.cached_topic("orders").partitions == 3
    assert registry.cached_topic("orders").partitions == 5


def test_a_topic_that_has_changed_its_partitions_is_a_new_topic(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders"))
    session.execute("INSERT INTO eventsql.shard_fence VALUES (1, 'orders', 9)")
    first = platform.registry.topic("orders")
    platform.registry.register_topic(Topic("orders", 3))
    second = platform.registry.topic("orders")
    assert first.created_at is not None
    assert second.created_at is not None
    assert first.created_at < second.created_at
    assert second.layout > first.layout
    assert session.execute("SELECT FROM eventsql.shard_fence").rowcount == 0


@pytest.mark.parametrize("what", ["log", "buffer", "consumer"])
def test_a_topic_with_events_or_a_consumer_keeps_its_partitions(platform: EventSQL, what: str) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    use(platform, what)
    with pytest.raises(RedefinitionError):
        platform.registry.register_topic(Topic("orders"))
    assert platform.registry.topic("orders") == Topic("orders", 3)


def test_a_name_that_a_table_of_the_platform_has_taken_is_refused(platform: EventSQL) -> None:
    with pytest.raises(InvalidNameError, match="spark_staged"):
        platform.registry.register_topic(Topic("spark_staged"))


def test_an_event_table_that_is_missing_is_made_when_its_topic_is_registered(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    with platform.database.connection() as connection:
        connection.execute(f"DROP TABLE eventsql.{stored('orders')} CASCADE")
    platform.registry.register_topic(Topic("orders", 3))
    fill(platform, "orders")
    assert platform.reader.count("orders") == 3


@pytest.mark.parametrize("storage", STORAGES)
def test_a_log_that_is_there_before_its_topic_keeps_its_form(platform: EventSQL, storage: Storage) -> None:
    platform.registry.register_topic(Topic("orders", 3, storage=storage))
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.topic")
    platform.registry.forget("orders")
    platform.registry.register_topic(Topic("orders", 3))
    assert platform.registry.topic("orders").storage == storage
    fill(platform, "orders")
    assert platform.reader.count("orders") == 3


# Retention


def test_everything_of_a_topic_is_kept_until_a_retention_is_set(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    assert platform.registry.cached_topic("orders").retention is None
    week = Retention(seconds=604_800, bytes=10 * 2**30, events=1_000_000)
    platform.registry.set_retention("orders", week)
    assert platform.registry.cached_topic("orders").retention == week
    assert [topic.retention for topic in platform.registry.topics()] == [week]
    for nothing_bounded in (None, Retention()):
        platform.registry.set_retention("orders", Retention(events=5))
        platform.registry.set_retention("orders", nothing_bounded)
        assert platform.registry.topic("orders").retention is None
    with pytest.raises(TopicNotFoundError):
        platform.registry.set_retention("nowhere", Retention(events=5))


def test_registering_a_topic_again_changes_its_retention_only_where_it_names_one(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3, retention=Retention(seconds=0.5, events=5)))
    platform.registry.register_topic(Topic("orders", 3))
    assert platform.registry.topic("orders").retention == Retention(seconds=0.5, events=5)
    platform.registry.register_topic(Topic("orders", 4))
    assert platform.registry.topic("orders").retention == Retention(seconds=0.5, events=5)
    fill(platform, "orders")
    with pytest.raises(RedefinitionError):
        platform.registry.register_topic(Topic("orders", 5, retention=Retention(events=6)))
    assert platform.registry.topic("orders").retention == Retention(seconds=0.5, events=5)
    platform.registry.register_topic(Topic("orders", 4, retention=Retention(bytes=7)))
    assert platform.registry.topic("orders").retention == Retention(bytes=7)
    platform.registry.register_topic(Topic("orders", 4, retention=Retention()))
    assert platform.registry.topic("orders").retention is None


# Deleting topics


def test_a_topic_without_anything_is_deleted(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.unregister_topic("orders")
    assert platform.registry.topics() == []
    assert tables(platform) == set()
    with pytest.raises(TopicNotFoundError):
        platform.registry.unregister_topic("orders")
    with pytest.raises(TopicNotFoundError):
        platform.publisher.publish(Publication("orders", b""))


@pytest.mark.parametrize("what", ["log", "buffer", "consumer"])
def test_a_topic_that_is_used_is_kept_unless_forced(platform: EventSQL, what: str) -> None:
    platform.registry.register_topic(Topic("orders"))
    use(platform, what)
    with pytest.raises(RegistryError, match="mailer" if what == "consumer" else "it has events") as kept:
        platform.registry.unregister_topic("orders")
    assert "eventsql topic delete orders --execute --force" in kept.value.message
    assert platform.registry.topics() == [Topic("orders")]
    platform.registry.unregister_topic("orders", force=True)
    assert platform.registry.topics() == []


def test_a_deleted_topic_leaves_nothing_to_one_of_its_name(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    fill(platform, "orders")
    assert isinstance(platform.claims.claim("orders", "mailer", owner="me"), Claim)
    platform.publisher.publish(Publication("orders", b"in the buffer"))
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.register_topic(Topic("orders"))
    assert platform.transfer.run_once() == {}
    assert platform.reader.read("orders") == []
    assert platform.registry.consumers("orders") == []
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    assert platform.claims.live("orders", "mailer") is None
    fill(platform, "orders", 1)
    assert platform.consumers.consume_once("orders", "mailer", nothing) == 1


def test_deleting_a_topic_waits_for_its_transfer_and_its_consumption(
    platform: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked
) -> None:
    session.execute("SET lock_timeout TO '5s'")
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    for lock in ("event_buffer_lock", "consumer"):
        holder = sessions()
        holder.execute(f"SELECT FROM eventsql.{lock} WHERE eql_topic = 'orders' FOR UPDATE".encode())
        with ThreadPoolExecutor(1) as executor:
            deleted = executor.submit(platform.registry.unregister_topic, "orders", force=True)
            until_blocked()
            assert not deleted.done()
            # Readers and publishers do not wait.
            session.execute("SELECT FROM eventsql.orders_event")
            session.execute("SELECT eventsql.publish('orders', NULL, 'x')")
            holder.rollback()
            deleted.result()
        platform.registry.register_topic(Topic("orders"))
        platform.registry.register_consumer(Consumer("orders", "mailer"))


@pytest.mark.both_forms
@pytest.mark.parametrize("step", ["delete", "redefine"])
def test_publishers_do_not_wait_while_a_topic_that_is_read_waits_to_be_dropped(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, step: str
) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("payments"))
    reader, payment = sessions(), Publication("payments", b"")
    reader.execute("SELECT FROM eventsql.orders_event")
    with ThreadPoolExecutor(1) as executor:
        if step == "delete":
            dropped: Future[object] = executor.submit(platform.registry.unregister_topic, "orders")
        else:
            dropped = executor.submit(platform.registry.register_topic, Topic("orders", 3))
        until_blocked()
        platform.publisher.publish(payment)
        # As a handler does that publishes what it has read.
        platform.publisher.publish(payment, connection=reader)
        assert not dropped.done()
        reader.commit()
        dropped.result()
    assert platform.transfer.run_once() == {"payments": 2}


@pytest.mark.both_forms
@pytest.mark.parametrize("force", [True, False])
def test_a_transaction_that_has_published_may_read_a_topic_that_waits_to_be_dropped(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, force: bool
) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("payments"))
    handler = sessions()
    platform.publisher.publish(Publication("payments", b""), connection=handler)
    with ThreadPoolExecutor(1) as executor:
        dropped = executor.submit(platform.registry.unregister_topic, "orders", force=force)
        until_blocked()
        assert handler.execute("SELECT FROM eventsql.orders_event").fetchall() == []
        assert not dropped.done()
        handler.commit()
        dropped.result()
    assert platform.registry.topics() == [Topic("payments")]


def test_a_deletion_outlasts_the_limit_of_a_statement(platform: EventSQL, direct_dsn: str, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders"))
    session.execute("CREATE TABLE eventsql.limits (value text)")
    session.execute(
        "CREATE FUNCTION eventsql.look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO eventsql.limits VALUES (current_setting('statement_timeout')); RETURN OLD; END $$"
    )
    session.execute("CREATE TRIGGER look BEFORE DELETE ON eventsql.topic FOR EACH ROW EXECUTE FUNCTION eventsql.look()")
    options = {"options": "-c statement_timeout=60s"}
    dsn = make_url(direct_dsn).update_query_dict(options).render_as_string(False)
    with EventSQL(dsn, transfer=False) as limited:
        limited.registry.unregister_topic("orders")
    assert session.execute("SELECT value FROM eventsql.limits").fetchall() == [("0",)]
    assert platform.registry.topics() == []


@pytest.mark.parametrize("changed", [False, True], ids=["one form", "both forms"])
def test_a_reader_that_comes_while_a_topic_is_dropped_does_not_stop_it(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    if changed:
        fill(platform, "orders")
        platform.registry.set_storage("orders", "rows")
    reader, drop_log, reading = sessions(), log_table.drop_log, list[Future[object]]()
    with ThreadPoolExecutor(1) as executor:

        def drop_beside_a_reader(*given: Any, **named: Any) -> None:
            reading.append(executor.submit(reader.execute, "SELECT FROM eventsql.orders_event"))
            until_blocked()
            drop_log(*given, **named)

        monkeypatch.setattr(log_table, "drop_log", drop_beside_a_reader)
        platform.registry.unregister_topic("orders", force=True)
        with pytest.raises(psycopg.errors.UndefinedTable):
            reading.pop().result()
    assert platform.registry.topics() == []


@pytest.mark.both_forms
@pytest.mark.parametrize("statement", ["SELECT FROM eventsql.orders_event", "DELETE FROM eventsql.event_buffer"])
def test_a_topic_that_waits_to_be_dropped_keeps_its_place_before_later_transactions_in_the_end(
    platform: EventSQL, sessions: Sessions, until: Until, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.setattr(catalog, "GIVE_WAY_SECONDS", 0.0)
    platform.registry.register_topic(Topic("orders"))
    before, looking = sessions(), sessions()
    before.execute(statement)
    waits = (
        "SELECT FROM pg_locks WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        f"AND NOT granted AND waitstart < clock_timestamp() - interval '{2 * exchanging.WAIT_SECONDS} s'"
    )
    with ThreadPoolExecutor(1) as executor:
        dropped = executor.submit(platform.registry.unregister_topic, "orders", force=True)
        until(lambda: looking.execute(waits).rowcount == 1)
        before.commit()
        dropped.result()
    assert platform.registry.topics() == []


@pytest.mark.both_forms
def test_a_topic_whose_events_keep_it_is_not_locked(platform: EventSQL, sessions: Sessions) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.publisher.publish(Publication("orders", b""))
    platform.transfer.run_once()
    reader = sessions()
    reader.execute("SELECT FROM eventsql.orders_event")
    with pytest.raises(RegistryError):
        platform.registry.unregister_topic("orders")
    with pytest.raises(RedefinitionError):
        platform.registry.register_topic(Topic("orders", 3))


def test_deleting_a_topic_does_not_wait_for_other_topics(platform: EventSQL, sessions: Sessions) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("payments"))
    platform.registry.register_consumer(Consumer("payments", "mailer"))
    holder = sessions()
    holder.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'payments' FOR UPDATE")
    holder.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE")
    platform.registry.unregister_topic("orders")
    assert platform.registry.topics() == [Topic("payments")]


# Consumers


def test_a_partitioned_consumer_has_an_offset_for_each_partition(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    platform.registry.register_consumer(Consumer("orders", "auditor"), max_attempts=7)
    states = platform.registry.consumers()
    assert [(state.name, state.partition, state.last_event_id, state.max_attempts) for state in states] == [
        ("auditor", NOT_PARTITIONED, 0, 7),
        ("mailer", 0, 0, 5),
        ("mailer", 1, 0, 5),
        ("mailer", 2, 0, 5),
    ]
    assert platform.registry.consumer("orders", "auditor") == states[:1]


def test_registering_a_consumer_again_keeps_its_offsets(platform: EventSQL) -> None:
    mailer = Consumer("orders", "mailer")
    platform.registry.register_topic(Topic("orders"))
    fill(platform, "orders", 10)
    platform.registry.register_consumer(mailer, start=5)
    platform.registry.register_consumer(mailer, start=8)
    assert platform.registry.consumer("orders", "mailer")[0].last_event_id == 4
    platform.consumers.consume_once("orders", "mailer", nothing)
    platform.registry.register_consumer(mailer, max_attempts=9, start="earliest")
    (state,) = platform.registry.consumer("orders", "mailer")
    assert (state.last_event_id, state.consumed_events, state.max_attempts) == (10, 6, 9)


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_consumer_starts_at_a_place(platform: EventSQL, partitioned: bool) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    fill(platform, "orders", 4)
    fill(platform, "orders", 3)
    second, day = platform.reader.read("orders")[4].created_at, timedelta(days=1)
    starts: list[tuple[Start, int]] = [
        ("earliest", 7), (Earliest(), 7), ("latest", 0), (Latest(), 0), (0, 7), (1, 7), (6, 2), (8, 0), (500, 0),
        (AtOffset(6), 2), (second, 3), (AtTime(second), 3), (second - day, 7), (second + day, 0), (Back(day), 7),
    ]  # fmt: skip
    for number, (start, left) in enumerate(starts):
        platform.registry.register_consumer(Consumer("orders", f"reader {number}", partitioned), start=start)
        assert platform.consumers.consume_once("orders", f"reader {number}", nothing) == left, start
    fill(platform, "orders", 2)
    for number, (start, left) in enumerate(starts):
        if left == 0:
            assert platform.consumers.consume_once("orders", f"reader {number}", nothing) == 2, start


def test_a_consumer_of_a_topic_that_is_not_there_or_not_partitioned_is_refused(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    with pytest.raises(TopicNotFoundError, match="nowhere"):
        platform.registry.register_consumer(Consumer("nowhere", "mailer"))
    with pytest.raises(ValidationError, match="not partitioned"):
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    with pytest.raises(ValidationError, match="max_attempts"):
        platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=0)
    with pytest.raises(ValidationError, match="start"):
        platform.registry.register_consumer(Consumer("orders", "mailer"), start="now")  # type: ignore[arg-type]  # wrong
    with pytest.raises(ValidationError, match="start"):
        platform.registry.register_consumer(Consumer("orders", "mailer"), start=ShiftBy(1))  # type: ignore[arg-type]  # wrong
    with pytest.raises(ValidationError, match="no time zone"):
        platform.registry.register_consumer(
            Consumer("orders", "mailer"),
            start=datetime(2024, 1, 1),  # noqa: DTZ001 - what is refused
        )
    with pytest.raises(ValidationError, match="start"):
        platform.registry.register_consumer(Consumer("orders", "mailer"), start=-1)
    assert platform.registry.consumers() == []


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_consumer_in_the_other_form_is_refused_and_its_offsets_stay(platform: EventSQL, partitioned: bool) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    fill(platform, "orders", 9)
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned), start=5, max_attempts=7)
    before = platform.registry.consumer("orders", "mailer")
    starts: list[Place] = [Earliest(), Latest()]
    for start in starts:
        with pytest.raises(RedefinitionError):
            platform.registry.register_consumer(
                Consumer("orders", "mailer", not partitioned), start=start, max_attempts=2
            )
    assert platform.registry.consumer("orders", "mailer") == before


def test_a_consumer_keeps_the_settings_that_are_not_declared(platform: EventSQL) -> None:
    def settings() -> tuple[int, EventFilter | None]:
        (state,) = platform.registry.consumer("orders", "mailer")
        return state.max_attempts, state.filter

    mailer, conditions = Consumer("orders", "mailer"), EventFilter(key_prefix="a")
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(mailer, max_attempts=7, filter=conditions)
    platform.registry.register_consumer(mailer)
    assert settings() == (7, conditions)
    platform.registry.register_consumer(mailer, max_attempts=2)
    assert settings() == (2, conditions)
    platform.registry.register_consumer(mailer, filter=EVERY_EVENT)
    assert settings() == (2, None)


def test_a_registration_tells_what_it_changed(platform: EventSQL) -> None:
    mailer = Consumer("orders", "mailer")
    assert platform.registry.declare_topic(Topic("orders")).created
    assert platform.registry.declare_consumer(mailer, max_attempts=7).created
    assert platform.registry.declare_topic(Topic("orders")).changes == ()
    assert platform.registry.declare_consumer(mailer, start="latest").changes == ()
    changed = platform.registry.declare_consumer(mailer, max_attempts=2, filter=EventFilter(key_prefix="a"))
    assert changed.changes == ("max attempts: 2 (was 7)", "filter: key a* (was every event)")
    kept = platform.registry.declare_topic(Topic("orders", retention=Retention(events=10)))
    assert kept.changes == ("retention: 10 events (was for ever)",)


def test_a_registration_that_changes_nothing_does_not_wait_for_a_consumption(
    platform: EventSQL, sessions: Sessions
) -> None:
    mailer = Consumer("orders", "mailer")
    platform.registry.register_topic(Topic("orders")).register_consumer(mailer, max_attempts=7)
    holder = sessions()
    holder.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'orders' FOR UPDATE")
    platform.registry.register_consumer(mailer)
    platform.registry.register_consumer(mailer, max_attempts=7, filter=EVERY_EVENT)


def test_a_change_of_settings_locks_the_partitions_of_a_consumer_in_their_order(
    platform: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    mailer = Consumer("orders", "mailer", partitioned=True)
    platform.registry.register_topic(Topic("orders", 3)).register_consumer(mailer)
    # Partition 0 gets the last place in the table, and after ANALYZE, an UPDATE alone goes by places.
    session.execute("UPDATE eventsql.consumer SET eql_paused = false WHERE eql_partition = 0")
    session.execute("ANALYZE eventsql.consumer")
    holder = sessions()
    holder.execute("SELECT FROM eventsql.consumer WHERE eql_partition = 0 FOR UPDATE")
    with ThreadPoolExecutor(1) as executor:
        changing = executor.submit(platform.registry.register_consumer, mailer, max_attempts=9)
        until_blocked()
        holder.execute("SELECT FROM eventsql.consumer WHERE eql_partition = 1 FOR UPDATE NOWAIT")
        holder.commit()
        changing.result()
    assert {state.max_attempts for state in platform.registry.consumer("orders", "mailer")} == {9}


def test_a_deleted_consumer_begins_anew_when_it_is_registered_again(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    fill(platform, "orders")
    platform.consumers.consume_once("orders", "mailer", nothing)
    platform.registry.unregister_consumer("orders", "mailer")
    with pytest.raises(ConsumerNotFoundError):
        platform.registry.consumer("orders", "mailer")
    with pytest.raises(ConsumerNotFoundError):
        platform.registry.unregister_consumer("orders", "mailer")
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    assert platform.consumers.consume_once("orders", "mailer", nothing) == 3


def test_consumers_that_are_not_there_are_named(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    for use in (platform.registry.pause, platform.registry.resume, platform.registry.consumer):
        with pytest.raises(ConsumerNotFoundError, match="`eventsql consumer create orders mailer`"):
            use("orders", "mailer")
        with pytest.raises(TopicNotFoundError):
            use("nowhere", "mailer")


def test_a_consumer_is_read_in_one_transaction(platform: EventSQL, said_by: SaidBy) -> None:
    platform.registry.register_topic(Topic("orders"))
    for name in ("biller", "mailer"):
        platform.registry.register_consumer(Consumer("orders", name))
    said = said_by(platform.database)
    assert [state.name for state in platform.registry.consumer("orders", "mailer")] == ["mailer"]
    assert said.verbs() == ["BEGIN", "SELECT", "SELECT", "SELECT", "COMMIT"]


# Many at once


def test_processes_that_register_at_once_register_once(platform: EventSQL, spawn: Spawn) -> None:
    workers = [spawn("register", 3, 5) for _ in range(4)]
    for worker in workers:
        assert worker.line() == "ready"
    for worker in workers:
        worker.tell("now")
    for worker in workers:
        assert worker.line() == "registered"
        assert worker.end() == 0
    assert platform.registry.topics() == [Topic(f"topic_{number}", 3) for number in range(5)]
    assert len(platform.registry.consumers()) == 5 * 3
    fill(platform, "topic_4")
    assert platform.reader.count("topic_4") == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda platform: platform.registry.register_topic(Topic("payments")),
        lambda platform: platform.registry.set_retention("orders", Retention(events=7)),
        lambda platform: platform.registry.set_storage("orders", "rows"),
        lambda platform: platform.registry.register_consumer(Consumer("orders", "mailer")),
        lambda platform: platform.repartitioner.repartition("orders", 3),
        lambda platform: platform.capture("public.purchase", "orders", snapshot=False),
        lambda platform: platform.registry.unregister_topic("orders"),
    ],
)
def test_changes_of_topics_and_consumers_follow_one_another(
    platform: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked,
    change: Callable[[EventSQL], object],
) -> None:  # fmt: skip
    platform.registry.register_topic(Topic("orders", 2, storage="blocks"))
    session.execute("CREATE TABLE public.purchase (id integer PRIMARY KEY)")
    other = sessions()
    other.execute("SELECT pg_advisory_xact_lock(%s)", [REGISTRY_LOCK])
    with ThreadPoolExecutor(1) as executor:
        changing = executor.submit(change, platform)
        until_blocked()
        other.rollback()
        changing.result()


def test_threads_that_register_contradicting_definitions_get_one_of_them(platform: EventSQL) -> None:
    gate = threading.Barrier(4)

    def register(partitions: int) -> None:
        gate.wait()
        platform.registry.register_topic(Topic("orders", partitions))

    with ThreadPoolExecutor(4) as executor:
        for registered in [executor.submit(register, partitions) for partitions in (1, 2, 3, 4)]:
            registered.result()
    (topic,) = platform.registry.topics()
    platform.publisher.publish(Publication("orders", b"", partition=topic.partitions - 1))
    assert platform.transfer.run_once() == {"orders": 1}


@pytest.mark.parametrize(
    ("table", "storage"), [("orders_event", "rows"), ("orders_event", "blocks"), ("orders_block", "blocks")]
)
def test_a_table_of_others_is_taken_for_no_log(
    platform: EventSQL, session: Connection, table: str, storage: Storage
) -> None:
    session.execute(f"CREATE TABLE eventsql.{table} (id integer)".encode())
    with pytest.raises(RegistryError):
        platform.registry.register_topic(Topic("orders", storage=storage))
    assert platform.registry.topics() == []
