"""Everything works through a pooler in transaction mode, and leaves nothing on the server's sessions (see conftest)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import make_url

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.cli import dagster_here
from eventsql_orchestration.cli.warm_spark import spark_environment
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.database import Connection, Database, is_pooled
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.notifications import LOG
from eventsql_orchestration.errors import ClaimLostError, ConfigurationError, DatabaseUnavailableError
from eventsql_orchestration.model import Retention
from eventsql_orchestration.publishing.log_writer import LogWriter
from eventsql_orchestration.queue import Message, Queue
from eventsql_orchestration.storage import segments
from eventsql_orchestration.store import Change, Store
from eventsql_orchestration.topics.positions import AtOffset
from eventsql_orchestration.validation import split_urls
from eventsql_orchestration.views import LogEntry, Logs, Rollup, RollupEntry, Timeline, Views
from tests.database import everything
from tests.database.test_session_settings import ODD, setting
from tests.fixtures import Until, UntilBlocked
from tests.forms import check_order
from tests.plain import REPLACE_ORDERS
from tests.poolers.pgbouncer import running

if TYPE_CHECKING:
    from tests.fixtures import Terminate
    from tests.poolers.pgbouncer import PgBouncer


def orders(count: int, start: int = 0) -> list[Publication]:
    return [Publication("orders", b"%d" % number, key=str(number)) for number in range(start, start + count)]


def register(platform: EventSQL, partitions: int = 3, *, retention: Retention | None = None) -> None:
    platform.registry.register_topic(Topic("orders", partitions, retention=retention))
    platform.registry.register_consumer(Consumer("orders", "sums", partitioned=True))


def keep_effects(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.effect (value bytea NOT NULL)")


def effect(events: Sequence[Event], connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO public.effect VALUES (%s)", [(event.value,) for event in events])


def effects(platform: EventSQL) -> Counter[bytes]:
    with platform.database.connection() as connection:
        return Counter(bytes(value) for (value,) in connection.execute("SELECT value FROM public.effect"))


# Finding out


def test_a_pooler_is_noticed_and_a_server_is_not_taken_for_one(pooled_dsn: str, direct_dsn: str) -> None:
    for dsn, expected in ((pooled_dsn, True), (direct_dsn, False)):
        with Database(dsn) as database, database.connection() as connection, closing(database.dedicated()) as own:
            assert is_pooled(connection) is is_pooled(own) is expected


def test_nothing_is_prepared_however_often_it_is_asked(pooled: EventSQL) -> None:
    register(pooled)
    for number in range(12):
        pooled.publisher.publish(Publication("orders", b"%d" % number))
        pooled.transfer.run_once()
        pooled.consumers.consume_once("orders", "sums", lambda _events, _connection: None)
        pooled.lag("orders")


def test_an_empty_database_is_migrated_through_it_by_several_at_once(
    server: EmbeddedPostgres, pgbouncer: PgBouncer
) -> None:
    dsn = pgbouncer.url(server.create_database("pooled_from_nothing"))

    def migrate(_: int) -> str | None:
        with Database(dsn) as database:
            database.migrate()
            return database.revision()

    with ThreadPoolExecutor() as executor:
        assert len(set(executor.map(migrate, range(4)))) == 1
    with EventSQL(dsn, transfer=False) as platform:
        register(platform)
        platform.publisher.publish_all(orders(3))
        assert platform.transfer.run_once() == {"orders": 3}
    server.drop_database("pooled_from_nothing")


def test_a_pooler_by_sessions_lets_notifications_through(
    server: EmbeddedPostgres, direct_dsn: str, until: Until, pgbouncer: PgBouncer
) -> None:
    heard = threading.Event()
    with (
        running(server.start().dsn, servers=30, mode="session") as by_sessions,
        EventSQL(by_sessions.url(direct_dsn), transfer=False) as platform,
    ):
        platform.listener.subscribe(LOG, "orders", heard.set)
        until(lambda: platform.listener.listening)
        heard.clear()
        register(platform)
        platform.publisher.publish_all(orders(60))
        until(heard.is_set)


# Past it


def test_connections_that_need_a_session_go_past_the_pooler_if_the_url_names_the_server(
    pooled_dsn: str, direct_dsn: str, until: Until
) -> None:
    server = make_url(direct_dsn)
    dsn = f"{pooled_dsn}?direct={server.host}:{server.port}"
    heard = threading.Event()
    with EventSQL(dsn, transfer=False) as platform:
        with platform.database.connection() as shared, closing(platform.database.dedicated()) as own:
            assert is_pooled(shared)
            assert not is_pooled(own)
        assert "direct" not in platform.database.dsn
        platform.listener.subscribe(LOG, "orders", heard.set)
        until(lambda: platform.listener.listening)
        heard.clear()
        register(platform)
        platform.publisher.publish_all(orders(5))
        assert platform.transfer.run_once() == {"orders": 5}
        until(heard.is_set)


def test_processes_that_a_command_starts_go_past_the_pooler_too(
    pooled_dsn: str, direct_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, given = make_url(direct_dsn), list[str]()
    monkeypatch.setattr(
        dagster_here, "LocalRuns", lambda *_, environment: given.extend(split_urls(environment["EVENTSQL_DSN"]))
    )
    with EventSQL(f"{pooled_dsn}?direct={server.host}:{server.port}", transfer=False) as platform:
        dagster_here.dagster_launcher(tmp_path, platform, "orders", "mailer", url=None, file=None, module="definitions")
        with Session(platform) as session:
            told = [*session.dsns, spark_environment(platform)["EVENTSQL_DSN"], *given]
        assert len(told) == 3
        for dsn in told:
            with Database(dsn) as database, closing(database.dedicated()) as own:
                assert not is_pooled(own)


@pytest.mark.parametrize(
    "direct", [":5432", "db:port", "db:0", "db:65536", "a@db:5432", "db:1,db:2", "db 1:5432", "[::1"]
)
def test_an_option_that_names_no_server_is_refused_before_anything_connects(direct: str) -> None:
    with pytest.raises(ConfigurationError, match="names the server behind a pooler as host:port"):
        Database(f"postgresql://someone:secret@127.0.0.1:1/nowhere?direct={direct}")


@pytest.mark.parametrize(
    ("direct", "expected"),
    [
        ("db.internal:5433", ("db.internal", 5433, "events")),
        ("db.internal", ("db.internal", 5432, "events")),
        ("[::1]:5433", ("::1", 5433, "events")),
        ("db:5433/behind", ("db", 5433, "behind")),
    ],
)
def test_an_option_that_names_a_server_is_understood(direct: str, expected: tuple[str, int, str]) -> None:
    database = Database(f"postgresql://someone:secret@pooler:6432/events?direct={direct}&sslmode=require")
    url = database._direct_url
    assert (url.host, url.port, url.database) == expected
    assert (url.password, dict(url.query)) == ("secret", {"sslmode": "require", "client_encoding": "UTF8"})
    assert database.dsn == "postgresql://someone:secret@pooler:6432/events?client_encoding=UTF8&sslmode=require"
    assert str(database) == "postgresql://someone:***@pooler:6432/events"


# The log


def test_events_of_every_kind_of_publisher_are_consumed_once_by_many_at_once(
    pooled: EventSQL, pooled_dsn: str, until: Until
) -> None:
    register(pooled)
    keep_effects(pooled)
    with EventSQL(pooled_dsn) as first, EventSQL(pooled_dsn) as second:
        running = [
            platform.consumers.start_batch("orders", "sums", effect, polling_delay=0.05, max_events=40)
            for platform in (first, second)
        ]

        def publish(lane: int) -> None:
            platform = (first, second)[lane % 2]
            for part in range(3):
                start = 1_000 * lane + 100 * part
                platform.publisher.publish_all(orders(60, start))
                for single in orders(5, start + 60):
                    platform.publisher.publish(single)
                with platform.database.transaction() as connection:
                    platform.publisher.publish_all(orders(5, start + 65), connection=connection)

        with ThreadPoolExecutor() as executor:
            list(executor.map(publish, range(4)))
        with first.buffered_publisher() as buffered:
            for acknowledgement in [buffered.publish(each) for each in orders(50, 8_000)]:
                acknowledgement.result(60)

        async def send() -> None:
            async with second.async_publisher() as publisher:
                await asyncio.gather(*(publisher.publish(each) for each in orders(50, 9_000)))

        asyncio.run(send())
        expected = Counter(
            each.value
            for start in (*(1_000 * lane + 100 * part for lane in range(4) for part in range(3)),)
            for each in orders(70, start)
        ) + Counter(each.value for start in (8_000, 9_000) for each in orders(50, start))
        until(lambda: effects(pooled).total() >= expected.total())
        for consumption in running:
            assert consumption.stop()
    assert effects(pooled) == expected


def test_a_transaction_of_a_callers_takes_its_events_with_it(pooled: EventSQL) -> None:
    register(pooled)
    with pytest.raises(ZeroDivisionError), pooled.database.transaction() as connection:
        pooled.publisher.publish_all(orders(3), connection=connection)
        raise ZeroDivisionError
    assert pooled.transfer.run_once() == {}


def test_a_publisher_that_may_not_wait_for_a_topic_uses_the_buffer_and_bounds_nobody_elses_waiting(
    pooled: EventSQL, direct_dsn: str
) -> None:
    """Its lock timeout, and its memory for sorting, end with its own transaction."""
    register(pooled)
    pooled.publisher.publish_all(orders(60))
    assert pooled.reader.count("orders") == 60
    with psycopg.connect(direct_dsn) as holder:
        holder.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
        pooled.publisher.publish_all(orders(60, 60))
        assert pooled.buffered() == {"orders": 60}
    assert pooled.transfer.run_once() == {"orders": 60}
    check_order(pooled.reader.read("orders"), [each.value.decode() for each in orders(120)])


def test_no_mark_is_kept_of_a_server_that_could_be_another(pooled: EventSQL) -> None:
    register(pooled)
    for turn in range(3):
        pooled.publisher.publish_all(orders(20, 20 * turn))
        pooled.transfer.run_once()
    writer: LogWriter = pooled.shards[0].transfer._writer
    assert set(writer._low_water.marks.values()) <= {0}
    assert pooled.reader.count("orders") == 60


def test_consumers_poll_where_no_notification_arrives(
    pooled: EventSQL, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    register(pooled)
    seen: list[bytes] = []
    with pooled.consumers.start_batch(
        "orders", "sums", lambda events, _: seen.extend(event.value for event in events), polling_delay=0.05
    ):
        until(lambda: "consumers poll" in caplog.text)
        assert not pooled.listener.listening
        pooled.publisher.publish_all(orders(5))
        pooled.transfer.run_once()
        until(lambda: len(seen) == 5)
    assert "direct=host:port" in caplog.text


def test_dead_letters_are_written_and_redriven(pooled: EventSQL) -> None:
    register(pooled, 1)
    pooled.registry.register_topic(Topic("orders_dlt"))
    pooled.registry.register_consumer(Consumer("orders", "sums", partitioned=True), max_attempts=1)
    pooled.publisher.publish_all(orders(3))
    pooled.transfer.run_once()
    broken = {b"1"}

    def handle(events: Sequence[Event], _connection: Connection) -> None:
        if any(event.value in broken for event in events):
            raise ValueError("not today")

    while pooled.consumers.consume_once("orders", "sums", handle):
        pass
    pooled.transfer.run_once()
    (letter,) = pooled.dead_letters.list("orders")
    assert letter.value == b"1"
    broken.clear()
    assert pooled.dead_letters.redrive("orders") == 1
    pooled.transfer.run_once()
    assert pooled.consumers.consume_once("orders", "sums", handle) == 1


def test_claims_are_made_renewed_fenced_and_committed(pooled: EventSQL, until: Until) -> None:
    register(pooled, 1)
    keep_effects(pooled)
    pooled.publisher.publish_all(orders(30))
    pooled.transfer.run_once()
    claim = pooled.claims.claim("orders", "sums", 0, owner="one", max_events=20)
    assert isinstance(claim, Claim)
    pooled.claims.renew(claim)
    adopted = pooled.claims.adopt(claim.id, owner="two")
    with pytest.raises(ClaimLostError):
        pooled.claims.process(claim, effect)
    assert pooled.claims.process(adopted, effect, batch=7).consumed == 20

    def work(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            effect(events, connection)

    with pooled.consumers.start_leased("orders", "sums", work, polling_delay=0.05):
        until(lambda: effects(pooled).total() >= 30)
    assert effects(pooled) == Counter(each.value for each in orders(30))


def test_offsets_are_moved(pooled: EventSQL) -> None:
    register(pooled)
    pooled.publisher.publish_all(orders(30))
    pooled.transfer.run_once()
    pooled.consumers.consume_once("orders", "sums", lambda _events, _connection: None)
    pooled.seeker.execute("orders", "sums", AtOffset(10))
    assert sum(lag.events for lag in pooled.lag("orders")) == 21


def test_old_segments_go_while_others_publish_and_read(pooled: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    register(pooled, 2, retention=Retention(events=25))
    for start in range(0, 60, 10):
        pooled.publisher.publish_all(orders(10, start))
        pooled.transfer.run_once()
    assert pooled.retention.run_once()[0].held_by is not None, "the consumer has not passed anything"
    while pooled.consumers.consume_once("orders", "sums", lambda _events, _connection: None):
        pass
    (dropped,) = pooled.retention.run_once()
    assert dropped.segments
    assert dropped.held_by is None
    assert 25 <= pooled.reader.count("orders") < 60


@pytest.mark.in_rows
def test_a_plain_table_is_made_a_segment(pooled: EventSQL) -> None:
    register(pooled)
    with pooled.database.connection() as connection:
        connection.execute(REPLACE_ORDERS)
    pooled.publisher.publish_all(orders(10))
    pooled.transfer.run_once()
    pooled.registry.set_retention("orders", Retention(events=1_000))
    pooled.retention.run_once()
    with pooled.database.connection() as connection:
        assert segments.segments(connection, "eventsql", "orders") is not None
    assert pooled.reader.count("orders") == 10


def test_topics_and_consumers_are_changed_and_deleted(pooled: EventSQL) -> None:
    register(pooled)
    pooled.registry.pause("orders", "sums")
    pooled.registry.resume("orders", "sums")
    pooled.registry.unregister_consumer("orders", "sums")
    pooled.registry.register_topic(Topic("orders", 5))
    pooled.registry.unregister_topic("orders")
    assert pooled.registry.topics() == []


# The ways to use the log


def test_everything_works_in_a_database_with_odd_settings(pooled_dsn: str, direct_dsn: str) -> None:
    # A pooler's sessions keep these two.
    setting(direct_dsn, **{name: ODD[name] for name in ODD.keys() - {"array_nulls", "IntervalStyle"}})
    with EventSQL(pooled_dsn, transfer=False) as platform:
        everything.use(platform, pooled_dsn)


def test_a_database_whose_arrays_have_no_nulls_is_refused(pooled_dsn: str, direct_dsn: str) -> None:
    setting(direct_dsn, array_nulls="off")
    with Database(pooled_dsn) as database, pytest.raises(ConfigurationError, match="array_nulls"):
        database.revision()


def test_queues_stores_and_views_work(pooled_database: Database) -> None:
    queue = Queue(pooled_database, "commands")
    for number in range(8):
        queue.send(b"%d" % number)
    received = queue.receive(max_messages=8)
    assert len(received) == 8
    for message in received:
        queue.acknowledge(message)
    assert queue.receive() == []

    store, views = Store(pooled_database), Views(pooled_database)
    definitions = Timeline("orders"), Rollup("changes", timedelta(hours=1), ("kind",)), Logs("tracking")
    views.declare(*definitions)
    timeline, rollup, logs = views.timeline(definitions[0]), views.rollup(definitions[1]), views.logs(definitions[2])
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for version in range(8):
        with pooled_database.transaction() as connection:
            store.append(
                "order", "1", [Change("raised", {"price": version})], expected_version=version, connection=connection
            )
            timeline.append(connection, [("1", {"version": version}, noon)])
            rollup.add(connection, [RollupEntry(noon, {"kind": "raised"})])
            logs.write(connection, [LogEntry("1", f"version {version}", noon)])
    assert [change.version for change in store.load("order", "1")] == list(range(1, 9))
    assert len(timeline.read("1")) == 8
    assert [bucket.count for bucket in rollup.read(since=noon, until=noon.replace(hour=13))] == [8]
    assert len(logs.search(since=noon, until=noon.replace(hour=13))) == 8


@pytest.fixture
def repeatable_read(direct_dsn: str) -> None:
    """Transactions of the database begin at another level."""
    with psycopg.connect(direct_dsn, autocommit=True) as server:
        name = sql.Identifier(server.info.dbname)
        server.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'").format(name))


@pytest.mark.parametrize(
    "settle",
    [
        lambda queue, message: queue.extend(message, 60),
        lambda queue, message: queue.release(message),
        lambda queue, message: queue.release_failed(message, delay=0, reason="no"),
        lambda queue, message: queue.give_back([message]),
    ],
    ids=["extend", "release", "release_failed", "give_back"],
)
def test_a_message_is_settled_after_the_commit_that_it_waited_for_also_at_another_level(
    pooled_dsn: str,
    direct_dsn: str,
    repeatable_read: None,
    until_blocked: UntilBlocked,
    settle: Callable[[Queue, Message], None],
) -> None:
    with Database(pooled_dsn) as database, psycopg.connect(direct_dsn) as changing, ThreadPoolExecutor() as executor:
        queue = Queue(database, "commands")
        queue.send(b"1")
        (message,) = queue.receive()
        changing.execute("UPDATE eventsql.queue_message SET eql_priority = eql_priority")
        settling = executor.submit(settle, queue, message)
        until_blocked()
        changing.commit()
        settling.result()


@contextmanager
def consumed_as_queue(dsn: str) -> Iterator[Deliveries]:
    """A topic with three events, and a consumer that acknowledges each by itself."""
    with EventSQL(dsn, transfer=False) as platform:
        register(platform)
        platform.publisher.publish_all(orders(3))
        platform.transfer.run_once()
        (shard,) = platform.shards
        yield Deliveries(shard.database, shard.dead_letters, "orders", "sums", by_key=True, lease=60.0, most=10)


def test_an_event_is_acknowledged_after_the_commit_that_it_waited_for_also_at_another_level(
    pooled_dsn: str, direct_dsn: str, repeatable_read: None, until_blocked: UntilBlocked
) -> None:
    with (
        consumed_as_queue(pooled_dsn) as own,
        psycopg.connect(direct_dsn) as changing,
        ThreadPoolExecutor() as executor,
    ):
        worker = own.register("worker")
        handed = [each for partition in range(3) for each in own.hand_out(worker, partition, 10).deliveries]
        changing.execute("UPDATE eventsql.consumer_delivery SET eql_due_at = eql_due_at")
        acknowledging = executor.submit(own.acknowledge, handed)
        until_blocked()
        changing.commit()
        assert acknowledging.result() == set(handed)


def test_a_process_gets_its_number_after_the_commit_that_it_waited_for_also_at_another_level(
    pooled_dsn: str, direct_dsn: str, repeatable_read: None, until_blocked: UntilBlocked
) -> None:
    with (
        consumed_as_queue(pooled_dsn) as own,
        psycopg.connect(direct_dsn) as changing,
        ThreadPoolExecutor() as executor,
    ):
        worker = own.register("an ended worker")
        for partition in range(3):
            own.hand_out(worker, partition, 10)
        own.leave(worker)
        # As on a logical replica: the next process has the number of the ended one, and frees its events.
        changing.execute("ALTER SEQUENCE eventsql.consumer_worker_eql_id_seq RESTART")
        changing.commit()
        changing.execute("UPDATE eventsql.consumer_delivery SET eql_due_at = eql_due_at")
        registering = executor.submit(own.register, "worker")
        until_blocked()
        changing.commit()
        assert registering.result() == worker


def test_an_ordered_queue_works_where_transactions_begin_at_another_level(
    pooled_dsn: str, repeatable_read: None
) -> None:
    with Database(pooled_dsn) as database:
        queue = Queue(database, "commands", ordered=True)
        for number in range(4):
            queue.send(b"%d" % number, key="k")
        received = []
        while messages := queue.receive(max_messages=4):
            received += [message.body for message in messages]
            queue.acknowledge_all(messages)
    assert received == [b"0", b"1", b"2", b"3"]


# Its end


def test_a_session_that_ends_behind_the_pooler_before_the_commit_is_a_database_that_is_unavailable(
    pooled: EventSQL, terminate: Terminate
) -> None:
    register(pooled)
    with (
        pytest.raises(DatabaseUnavailableError, match="closed the connection"),
        pooled.database.transaction() as connection,
    ):
        pooled.publisher.publish_all(orders(3), connection=connection)
        terminate(connection)
    pooled.publisher.publish_all(orders(60, 3))
    pooled.transfer.run_once()
    assert pooled.reader.count("orders") == 60


def test_a_pooler_that_restarts_raises_an_error_of_the_package_and_is_found_again(
    pooled: EventSQL, pgbouncer: PgBouncer, until: Until
) -> None:
    register(pooled)
    pooled.publisher.publish_all(orders(3))
    pooled.transfer.run_once()
    pgbouncer.stop()
    try:
        with pytest.raises(DatabaseUnavailableError):
            pooled.publisher.publish(orders(1)[0])
        with pytest.raises(DatabaseUnavailableError):
            pooled.transfer.run_once()
    finally:
        pgbouncer.start()
    pooled.publisher.publish_all(orders(60, 3))
    pooled.transfer.run_once()
    assert pooled.reader.count("orders") == 63
