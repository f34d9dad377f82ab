"""The platform as one object: it connects when it is used, transfers what its process published, and closes clean."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psycopg
import pytest

from eventsql_orchestration import Consumer, Database, EventSQL, Publication, Shard, SnapshotReader, Topic
from eventsql_orchestration.capture import Captures
from eventsql_orchestration.client.buffered import BufferedPublisher
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import ClosedError, DatabaseUnavailableError, SingleShardError
from eventsql_orchestration.publishing import transfer
from eventsql_orchestration.queue import AsyncQueue, Queue, drop_expired_archives, list_queues
from eventsql_orchestration.store import Change, Store
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.views import Timeline, Views
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.fixtures import Sessions, Until


def transferring() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "eventsql-transfer"]


def test_nothing_connects_and_no_thread_runs_before_it_is_used() -> None:
    with EventSQL("postgresql://someone:s3cr3t@127.0.0.1:1/nowhere"):
        assert transferring() == []


def made_of(source: EventSQL | Shard | Database) -> list[object]:
    """What an object of each room finds in its database."""
    return [
        Queue(source, "jobs").definition(),
        list_queues(source),
        drop_expired_archives(source),
        Store(source).types(),
        Views(source).definitions(),
        Captures(source).list(),
        SnapshotReader(source, "note", ["text"], schema="public").read(),
    ]


def test_the_objects_of_every_room_are_made_of_a_platform_a_shard_or_a_database(dsn: str) -> None:
    with EventSQL(dsn) as platform:
        with platform.database.connection() as connection:
            connection.execute(
                "CREATE TABLE public.note (eql_id bigint GENERATED ALWAYS AS IDENTITY, text text, "
                "eql_transaction xid8 NOT NULL DEFAULT pg_current_xact_id())"
            )
            connection.execute("INSERT INTO public.note (text) VALUES ('one')")
        platform.store.append("order", "1", [Change("placed", {})], expected_version="any")
        Views(platform).declare(Timeline("steps"))
        of_platform = made_of(platform)
        assert made_of(platform.shards[0]) == made_of(platform.database) == of_platform
        assert len(of_platform[4]) == 1  # type: ignore[arg-type]


def test_an_object_that_needs_one_database_is_not_made_of_several() -> None:
    platform = EventSQL("postgresql://one/x", "postgresql://other/x")
    for make in (Store, Views, Captures, list_queues, drop_expired_archives):
        with pytest.raises(SingleShardError):
            make(platform)


def test_an_event_is_published_and_consumed_by_the_first_lines_of_the_manual(dsn: str, until: Until) -> None:
    handled: list[bytes] = []
    with EventSQL(dsn) as platform:
        platform.registry.register_topic(Topic("account_created", partitions=10))
        platform.registry.register_consumer(Consumer("account_created", "mailer", partitioned=True))
        platform.publisher.publish(Publication("account_created", b"{}", key="42", metadata={"source": "web"}))
        platform.publisher.publish_all(Publication("account_created", b"{}", key=str(key)) for key in range(50))
        platform.consumers.start(
            "account_created", "mailer", lambda event, _: handled.append(event.value), polling_delay=0.01
        )
        until(lambda: sum(lag.events for lag in platform.lag("account_created")) == 0)
    assert len(handled) == 51


def test_a_process_that_publishes_transfers_in_the_background(dsn: str, until: Until) -> None:
    with EventSQL(dsn) as platform:
        platform.registry.register_topic(Topic("orders"))
        assert transferring() == []
        for number in range(3):
            platform.publisher.publish(Publication("orders", b""))
            until(lambda number=number: platform.reader.count("orders") == number + 1)  # type: ignore[misc]  # bound
        assert len(transferring()) == 1
    assert transferring() == []


def test_a_platform_without_transfer_does_not_transfer(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.publisher.publish(Publication("orders", b""))
    assert transferring() == []
    assert platform.reader.count("orders") == 0


def test_events_of_the_callers_transaction_are_transferred_after_its_commit(
    dsn: str, sessions: Sessions, until: Until
) -> None:
    with EventSQL(dsn) as platform:
        platform.registry.register_topic(Topic("orders"))
        mine = sessions()
        platform.publisher.publish(Publication("orders", b""), connection=mine)
        assert platform.reader.count("orders") == 0
        mine.commit()
        until(lambda: platform.reader.count("orders") == 1)


def test_closing_moves_what_was_published_last(dsn: str, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    for _ in range(5):
        with EventSQL(dsn) as publishing:
            publishing.publisher.publish_all(Publication("orders", b"") for _ in range(100))
    assert platform.reader.count("orders") == 500


@pytest.mark.parametrize("ends", [True, False])
def test_closing_moves_the_last_events_though_another_transfer_holds_their_topic_unless_it_never_ends(
    dsn: str, platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """The other transfer may have looked before these events came, and may end without them."""
    platform.registry.register_topic(Topic("orders"))
    other = sessions()
    other.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")

    passed = [0.0]

    def pause(_seconds: float) -> None:
        if ends:
            other.rollback()
        else:
            passed.append(3_600.0)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed), sleep=pause)
    monkeypatch.setattr(transfer, "time", clock)
    with EventSQL(dsn) as closing:
        closing.publisher.publish(Publication("orders", b""))
    assert platform.reader.count("orders") == (1 if ends else 0)


def test_closing_commits_the_events_of_publishers_that_two_threads_have_made_at_once(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.registry.register_topic(Topic("orders"))
    made = [platform.buffered_publisher(max_age=3_600.0)]
    others = 1

    def looked_at(_publisher: BufferedPublisher) -> bool:
        nonlocal others
        if others:
            # Another thread makes a publisher meanwhile.
            others -= 1
            made.append(platform.buffered_publisher(max_age=3_600.0))
        return False

    with monkeypatch.context() as patched:
        patched.setattr(BufferedPublisher, "closed", property(looked_at))
        made.append(platform.buffered_publisher(max_age=3_600.0))
    acknowledged = [each.publish(Publication("orders", b"")) for each in made]
    platform.close()
    assert [each.done() for each in acknowledged] == [True] * len(made)


def test_closing_ends_though_others_go_on_publishing(dsn: str, platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("orders"))
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            platform.publisher.publish_all(Publication("orders", b"") for _ in range(50))

    with ThreadPoolExecutor(1) as executor:
        publishing = executor.submit(publish)
        try:
            with EventSQL(dsn) as closing:
                closing.publisher.publish(Publication("orders", b""))
                until(lambda: platform.reader.count("orders") > 0)
        finally:
            stop.set()
        publishing.result()


def test_closing_while_the_server_is_down_warns_and_loses_nothing(
    dsn: str, server: EmbeddedPostgres, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    platform = EventSQL(dsn)
    platform.registry.register_topic(Topic("orders"))
    platform.publisher.publish(Publication("orders", b"one"))
    until(lambda: platform.reader.count("orders") == 1)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
            "VALUES ('orders', -1, 'two', '{}')"
        )
        server.stop(mode="immediate")
    try:
        with caplog.at_level(logging.WARNING):
            platform.close()
        assert any("stay in the buffer" in record.getMessage() for record in caplog.records)
    finally:
        server.start()
    with platform:
        platform.transfer.run_once()
        assert platform.reader.count("orders") == 2


def test_a_closed_platform_can_be_opened_again(dsn: str, until: Until) -> None:
    platform = EventSQL(dsn)
    for count in (1, 2):
        with platform:
            platform.registry.register_topic(Topic("orders"))
            platform.publisher.publish(Publication("orders", b""))
            until(lambda count=count: platform.reader.count("orders") == count)  # type: ignore[misc]  # bound
        assert transferring() == []
    with pytest.raises(ClosedError):
        platform.publisher.publish(Publication("orders", b""))
    platform.open().publisher.publish(Publication("orders", b""))
    platform.close()


def test_every_use_after_the_closing_says_so_and_connects_to_nothing(dsn: str) -> None:
    def handle(_event: object, _connection: object) -> None:
        pass

    with EventSQL(dsn) as platform:
        platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "mailer"))
        mails = Queue(platform, "mails")
        mails.send(b"first")
        publication = Publication("orders", b"1")
        platform.publisher.publish(publication)
        buffered, asynchronous = platform.buffered_publisher(), platform.async_publisher()
    threads = set(threading.enumerate())

    async def publish() -> None:
        await asynchronous.publish(publication)

    async def receive() -> None:
        await AsyncQueue(mails).receive()

    with psycopg.connect(dsn) as own:
        uses: list[Callable[[], object]] = [
            lambda: platform.publisher.publish(publication),
            lambda: platform.publisher.publish(publication, connection=own),
            lambda: platform.publisher.publish_all([publication] * 2_000),
            lambda: platform.publisher.publish_all(iter([publication])),
            lambda: buffered.publish(publication),
            lambda: asyncio.run(publish()),
            platform.buffered_publisher,
            platform.async_publisher,
            lambda: platform.reader.read("orders"),
            lambda: platform.consumers.consume_once("orders", "mailer", handle),
            lambda: platform.consumers.start("orders", "mailer", handle),
            lambda: platform.claims.claim("orders", "mailer", owner="me"),
            lambda: platform.registry.register_topic(Topic("others")),
            platform.registry.topics,
            platform.lag,
            platform.transfer.run_once,
            platform.retention.run_once,
            lambda: platform.shards[0].announce(["orders"]),
            lambda: platform.listener.subscribe("log", "orders", lambda: None),
            lambda: mails.send(b"hello"),
            lambda: mails.send(b"hello", connection=own),
            mails.receive,
            lambda: asyncio.run(receive()),
            lambda: mails.work(handle),
            lambda: platform.store.append("cat", "1", [Change("born", {})], expected_version=0),
            platform.database.migrate,
            platform.database.revision,
            platform.database.dedicated,
        ]
        for use in uses:
            with pytest.raises(ClosedError):
                use()

    assert set(threading.enumerate()) - threads == set()
    assert platform.database.engine.pool.checkedout() + platform.database.engine.pool.checkedin() == 0  # type: ignore[attr-defined]


def test_closing_leaves_no_connection_open(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        with EventSQL(dsn) as platform:
            platform.registry.register_topic(Topic("orders"))
            platform.registry.register_consumer(Consumer("orders", "mailer"))
            platform.consumers.start("orders", "mailer", lambda _event, _connection: None)
            platform.publisher.publish(Publication("orders", b""))
        gc.collect()
        connection.execute("SELECT pg_stat_clear_snapshot()")
        while others := connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        ).fetchone():
            # A backend takes a moment to notice that its client has gone.
            if others == (0,):
                break


def test_a_commit_does_not_fail_because_no_thread_can_start(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with EventSQL(dsn) as platform:
        platform.registry.register_topic(Topic("orders"))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            platform.publisher.publish(Publication("orders", b""))
            assert platform.publisher.publish_all(Publication("orders", b"") for _ in range(100)) == 100
            assert platform.store.append("order", "1", [Change("placed", {})], expected_version="none") == 1
        platform.transfer.run_once()
        assert platform.reader.count("orders") == 101


def test_closing_does_not_wait_for_a_batch_that_the_server_keeps(dsn: str) -> None:
    with EventSQL(dsn) as platform:
        platform.registry.register_topic(Topic("orders"))
        platform.publisher.publish_all(Publication("orders", b"") for _ in range(100))
        writer = platform.shards[0].publisher._writer
        assert writer is not None
        with writer.session():
            platform.close()
            assert not writer.broken
        assert writer.broken, "its connection is closed after the batch"


def test_a_writer_that_is_closed_before_its_batch_connects_is_closed_after_it(platform: EventSQL) -> None:
    writer = platform.shards[0].publisher._writer
    assert writer is not None
    with writer.session():
        writer.close()
        writer.look(None)
        assert not writer.broken
    assert writer.broken


def test_a_writer_that_is_closed_in_the_moment_when_its_batch_ends_is_closed_after_it(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = platform.shards[0].publisher._writer
    assert writer is not None
    mutex, close = writer._mutex, [writer.close]

    def release() -> None:
        while close:
            close.pop()()
        mutex.release()

    monkeypatch.setattr(writer, "_mutex", SimpleNamespace(acquire=mutex.acquire, release=release))
    with writer.session():
        writer.look(None)
    assert writer.broken


def test_every_part_says_that_the_database_is_down_and_no_password() -> None:
    with EventSQL("postgresql://someone:s3cr3t@127.0.0.1:1/nowhere") as platform:
        for use in (
            platform.registry.topics,
            platform.lag,
            platform.transfer.run_once,
            lambda: platform.publisher.publish(Publication("orders", b"")),
            lambda: platform.reader.read("orders"),
            lambda: platform.consumers.consume_once("orders", "mailer", lambda _e, _c: None),
            lambda: platform.claims.claim("orders", "mailer", owner="me"),
            lambda: platform.dead_letters.redrive("orders"),
        ):
            with pytest.raises(DatabaseUnavailableError) as caught:
                use()
            assert "s3cr3t" not in caught.value.message
            assert "127.0.0.1" in caught.value.message


# Ctrl-C


def prepare_consumer(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))


def ignore(*_: object) -> None:
    pass


STOPS: dict[str, Callable[[EventSQL], Callable[[], object]]] = {
    "consumer": lambda platform: platform.consumers.start("orders", "mailer", ignore).stop_soon,
    "consumer as a queue": lambda platform: platform.consumers.start_queue("orders", "mailer", ignore).stop_soon,
    "workers of a queue": lambda platform: Queue(platform, "jobs").work(ignore).stop_soon,
    "subscription": lambda platform: partial(platform.store.subscribe("mailer", ignore).stop, 0.0),
}
"""Each starts threads, and gives the function that lets them end."""


@pytest.mark.prepared.with_args(prepare_consumer)
@pytest.mark.parametrize("kind", STOPS)
def test_a_platform_closes_after_ctrl_c_at_any_moment_of_a_stop(dsn: str, kind: str) -> None:
    for after in itertools.count():
        platform = EventSQL(dsn, transfer=False)
        goes_on = interrupted(after, STOPS[kind](platform), module="threading.py")
        closing = start_thread("close", platform.close)
        closing.join(PATIENCE)
        assert not closing.is_alive()
        if not goes_on:
            break
