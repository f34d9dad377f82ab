"""Erasing the events of a key: wherever they are stored, beside everything that moves and copies events."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claim_values import Claim
from eventsql_orchestration.consuming.dead_letter_values import DeadLetterCause
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.consuming.handlers import BatchHandler
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.tables import DROPPED
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.maintenance import erasure
from eventsql_orchestration.maintenance.erasure import Erasure, digest_of
from eventsql_orchestration.model import BLOCKS, ROWS, OffsetRange, Storage
from eventsql_orchestration.publishing.staged_blocks import StagedBlocks
from eventsql_orchestration.storage import erasing, exchanging, log_form, log_table, segments
from eventsql_orchestration.storage.copy_out import range_query
from eventsql_orchestration.storage.erasing import FAILURE, LogEraser
from eventsql_orchestration.storage.metrics import LogMetrics
from tests.fixtures import Sessions, Until, UntilBlocked
from tests.staging import stage_blocks
from tests.waiting import PATIENCE

SECRET = b"the secret of ann"

FORMS = (ROWS, BLOCKS)

HOLDERS = (
    "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""The sessions with locks that keep others away from a topic."""


def prepare(platform: EventSQL, form: Storage) -> None:
    """Make a topic of three partitions, with a dead letter topic."""
    platform.registry.register_topic(Topic("orders", 3, storage=form)).register_topic(Topic("orders_dlt"))


@pytest.fixture(params=[pytest.param(form, marks=pytest.mark.prepared.with_args(prepare, form)) for form in FORMS])
def form(request: pytest.FixtureRequest) -> Storage:
    found: Storage = request.param
    return found


def publish(platform: EventSQL, *keys: str | None, value: bytes = SECRET) -> None:
    platform.publisher.publish_all(
        Publication("orders", value + b" %d" % number, key=key, metadata={"of": value.decode()} if number % 2 else {})
        for number, key in enumerate(keys)
    )


def store(platform: EventSQL, *keys: str, attempts: int = 1, partitioned: bool = False) -> None:
    """Register a consumer, and have an event of each key in the log."""
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned), max_attempts=attempts)
    publish(platform, *keys)
    platform.transfer.run_once()


def refuse(events: Sequence[Event], _connection: Connection | None = None) -> None:
    """A handler whose error quotes the event."""
    raise ValueError("no value" if events[0].erased else events[0].value.decode())


def give_up(platform: EventSQL, handler: BatchHandler = refuse) -> None:
    """Let the consumer make dead letters of all its events."""
    while platform.consumers.consume_once("orders", "mailer", handler):
        pass
    platform.transfer.run_once()


@pytest.fixture
def erase_and_refuse(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> BatchHandler:
    """A handler that erases the event that it holds, and fails."""
    # It would wait for its own transaction, which sees the former rows.
    monkeypatch.setattr(erasing, "VACUUM_SECONDS", 0.0)

    def handle(events: Sequence[Event], connection: Connection) -> None:
        platform.eraser.execute("orders", ["ann"])
        refuse(events, connection)

    return handle


def events(platform: EventSQL, topic: str = "orders") -> list[Event]:
    platform.transfer.run_once()
    return platform.reader.read(topic)


def tables_with(platform: EventSQL, secret: bytes = SECRET) -> set[str]:
    """The tables of the database with a row that holds the bytes, as text or as bytea."""
    found = set()
    with platform.database.connection() as connection:
        names = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'eventsql' AND tablename !~ '_segment_'"
        ).fetchall()
        for (name,) in names:
            query = sql.SQL("SELECT FROM eventsql.{} AS t WHERE t::text ~ %s LIMIT 1").format(sql.Identifier(name))
            if connection.execute(query, [f"{secret.decode()}|{secret.hex()}"]).fetchone() is not None:
                found.add(name)
    return found


def stage(platform: EventSQL, *keys: str | Publication) -> uuid.UUID:
    """Stage a block with an event of each key, as Spark's tasks do."""
    return stage_blocks(
        platform, [Publication("orders", SECRET, key=each) if isinstance(each, str) else each for each in keys]
    )


def publish_staged(connection: Connection, attempt: uuid.UUID) -> None:
    staged = StagedBlocks("eventsql")
    staged.publish(connection, [attempt], staged.find(connection, [attempt]))


# What is erased


def test_the_events_of_a_key_lose_value_and_metadata_and_keep_their_offsets(platform: EventSQL, form: Storage) -> None:
    publish(platform, *["ann", "bob", None] * 20)
    before = events(platform)
    publish(platform, "ann", "bob")

    assert platform.eraser.plan("orders", ["ann"]) == Erasure("orders", 1, 20, 1, 0)
    assert [each.value for each in platform.reader.read("orders")] == [each.value for each in before]
    done = platform.eraser.execute("orders", ["ann"])
    assert done == Erasure("orders", 1, 20, 1, 0, vacuumed=True)

    after = events(platform)
    assert len(after) == 62
    for old, new in zip(before, after, strict=False):
        kept = (new.id, new.partition, new.key, new.buffered_at, new.created_at)
        assert kept == (old.id, old.partition, old.key, old.buffered_at, old.created_at)
        assert new.erased == (new.key == "ann")
        assert (new.value, list(new.metadata)) == (
            (None, ["eventsql_erased"]) if new.erased else (old.value, list(old.metadata))
        )
    assert Counter(each.key for each in after if each.erased) == {"ann": 21}
    with platform.database.connection() as connection:
        assert log_table.broken_blocks(connection, "eventsql", "orders") == []


def test_nothing_of_the_events_is_left_in_any_table(platform: EventSQL, form: Storage) -> None:
    store(platform, *["ann"] * 5)
    while platform.consumers.consume_once("orders", "mailer", refuse):
        if platform.buffered():
            break
    publish(platform, "ann")
    stage(platform, "ann", "ann")
    published = stage(platform, "ann")
    with platform.database.transaction() as connection:
        staged = StagedBlocks("eventsql")
        found = staged.find(connection, [published])
        connection.execute(staged._blocks("place"), {"attempts": [published], "reference": -3})
    assert len(found) == 1
    assert tables_with(platform) >= {"event_buffer"}

    done = platform.eraser.execute("orders", ["ann"])
    assert done.dead_letters >= 1
    assert tables_with(platform) == set()
    # Staged values are compressed, so look at them once they are in the log.
    platform.transfer.run_once()
    assert all(each.erased for each in platform.reader.read("orders"))
    assert tables_with(platform) == set()


def test_metadata_that_a_handler_gave_a_copy_of_an_erased_event_is_erased(platform: EventSQL, form: Storage) -> None:
    publish(platform, "ann")
    platform.eraser.execute("orders", ["ann"])
    (erased,) = events(platform)
    copied = erased.as_publication(name=SECRET.decode())
    platform.publisher.publish(copied)
    platform.transfer.run_once()
    platform.publisher.publish(copied)
    stage(platform, copied)
    found = platform.eraser.execute("orders", ["ann"])
    assert (found.events, found.buffered) == (1, 2)
    assert tables_with(platform) == set()
    assert platform.eraser.plan("orders", ["ann"]) == Erasure("orders", 1, 0, 0, 0)


def test_nothing_of_the_events_is_left_in_the_statistics_of_the_planner(platform: EventSQL, form: Storage) -> None:
    def quoting() -> set[str]:
        """The tables whose statistics hold the secret."""
        with platform.database.connection() as connection:
            found = connection.execute(
                "SELECT DISTINCT tablename FROM pg_stats WHERE schemaname = 'eventsql' AND "
                "concat(most_common_vals::text, histogram_bounds::text, most_common_elems::text) ~ %s",
                [SECRET.hex()],
            ).fetchall()
        return {table for (table,) in found}

    publish(platform, *["ann"] * 30)
    publish(platform, *["bob"] * 30, value=b"nothing")
    platform.transfer.run_once()
    publish(platform, "ann", "ann")
    publish(platform, "bob", value=b"nothing")
    with platform.database.connection() as connection:
        # As autovacuum does, and people do for all tables.
        connection.execute("ANALYZE")
        log = log_form.tables(connection, "eventsql", "orders")
    # The arrays of blocks have no statistics.
    of_log = {segments.segment_name("orders", 0), *log} if form == "rows" else set()
    assert quoting() == {"event_buffer", *of_log}
    assert platform.eraser.execute("orders", ["ann"]).vacuumed
    assert quoting() == set()


def test_a_staged_block_keeps_the_events_of_others(platform: EventSQL, form: Storage, session: Connection) -> None:
    # psycopg changes an array of bytes that it writes as text in such a session.
    session.execute(f"ALTER DATABASE {session.info.dbname} SET standard_conforming_strings TO off".encode())
    attempt = stage(platform, "ann", "bob", "ann")
    assert platform.eraser.execute("orders", ["ann"]).buffered == 2
    assert platform.eraser.execute("orders", ["ann"]).buffered == 0
    with platform.database.transaction() as connection:
        publish_staged(connection, attempt)
    found = events(platform)
    assert [(each.key, each.value) for each in found] == [("ann", None), ("bob", SECRET), ("ann", None)]


def test_a_second_erasure_finds_only_new_events(platform: EventSQL, form: Storage) -> None:
    publish(platform, "ann", "bob")
    platform.transfer.run_once()
    platform.eraser.execute("orders", ["ann", "carl"])
    publish(platform, "ann")
    assert platform.eraser.plan("orders", ["ann"]) == Erasure("orders", 1, 0, 1, 0)
    assert platform.eraser.execute("orders", ["bob", "ann"]).events == 1


def test_spark_reads_an_erased_value_as_null(platform: EventSQL, form: Storage) -> None:
    publish(platform, "ann", "bob", "ann", "bob")
    platform.transfer.run_once()
    platform.eraser.execute("orders", ["ann"])
    with platform.database.connection() as connection:
        table = log_form.stored_table(connection, "eventsql", "orders")
        for columns in (["key", "value"], ["value", "headers", "key"]):
            query = range_query("eventsql", table, OffsetRange("orders", -1, 0, 100), columns)
            rows = [dict(zip(columns, row, strict=True)) for row in connection.execute(sql.SQL(query))]
            assert {(row["key"], row["value"] is None) for row in rows} == {("ann", True), ("bob", False)}
            assert len(rows) == 4


def test_events_in_several_ranges_and_segments_are_erased(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 50)
    monkeypatch.setattr(erasure, "RANGE_IDS", 30)
    monkeypatch.setattr(erasure, "BUFFERED_ROWS", 3)
    for _ in range(8):
        publish(platform, *["ann", "bob"] * 5, "carl")
        platform.transfer.run_once()
    publish(platform, *["ann", "bob"] * 5)
    assert platform.eraser.execute("orders", ["ann", "carl"]) == Erasure("orders", 2, 48, 5, 0, vacuumed=True)
    found = events(platform)
    assert [each.erased for each in found] == [each.key != "bob" for each in found]


# Consumers


def test_a_consumer_gets_an_erased_event_and_its_dead_letter_stays_erased(platform: EventSQL, form: Storage) -> None:
    store(platform, "ann")
    platform.eraser.execute("orders", ["ann"])
    seen: list[Event] = []

    def see_and_refuse(events: Sequence[Event], connection: Connection) -> None:
        seen.extend(events)
        refuse(events, connection)

    give_up(platform, see_and_refuse)
    assert [(each.erased, each.value) for each in seen] == [(True, None)]
    (letter,) = platform.dead_letters.list("orders")
    assert letter.erased
    assert letter.consumer == "mailer"
    assert platform.dead_letters.plan_redrive("orders").redrives == 0
    assert platform.dead_letters.redrive("orders") == 0


def test_dead_letters_keep_their_cause_and_lose_what_quotes_the_event(platform: EventSQL, form: Storage) -> None:
    store(platform, "ann", "bob")
    give_up(platform)
    assert platform.eraser.execute("orders", ["ann"]).dead_letters == 1
    letters = {each.key: each for each in platform.dead_letters.list("orders")}
    assert letters["ann"].erased
    assert not letters["bob"].erased
    assert letters["ann"].origin is not None
    assert letters["ann"].metadata["dlt_exception"] == "ValueError"
    assert "dlt_message" not in letters["ann"].metadata
    assert platform.dead_letters.redrive("orders") == 1


def test_an_erased_dead_letter_is_not_open_any_more(platform: EventSQL, form: Storage) -> None:
    store(platform, "ann", "bob")
    give_up(platform)
    platform.eraser.execute("orders", ["ann"])
    assert sorted(letter.key or "" for letter in platform.dead_letters.list("orders")) == ["ann", "bob"]
    assert [letter.key for letter in platform.dead_letters.list("orders", redriven=False)] == ["bob"]
    with platform.database.connection() as connection:
        assert LogMetrics("eventsql").open_letters(connection, "orders_dlt") == 1
    assert platform.dead_letters.redrive("orders") == 1
    assert platform.dead_letters.list("orders", redriven=False) == []
    with platform.database.connection() as connection:
        assert LogMetrics("eventsql").open_letters(connection, "orders_dlt") == 0


def test_the_failure_of_an_erased_event_is_not_shown_any_more(platform: EventSQL, form: Storage) -> None:
    store(platform, "ann", attempts=5)
    for _ in range(3):
        platform.consumers.consume_once("orders", "mailer", refuse)
    assert "consumer" in tables_with(platform)
    platform.eraser.execute("orders", ["ann"])
    assert FAILURE in {each.failure for each in platform.registry.consumer("orders", "mailer")}
    assert tables_with(platform) == set()


def test_the_failures_of_a_topic_consumed_as_a_queue_are_not_shown_any_more(
    platform: EventSQL, form: Storage, until: Until
) -> None:
    store(platform, "ann", "bob", attempts=5, partitioned=True)
    with platform.consumers.start_queue("orders", "mailer", lambda event: refuse([event]), polling_delay=0.02):
        until(lambda: "consumer_delivery" in tables_with(platform, b"the secret of ann 0"))
    platform.eraser.execute("orders", ["ann"])
    assert tables_with(platform, b"the secret of ann 0") == set()
    assert "consumer_delivery" in tables_with(platform, b"the secret of ann 1")


def test_the_failure_of_a_range_that_quotes_a_later_event_is_not_shown_any_more(
    platform: EventSQL, form: Storage
) -> None:
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=5)
    publish(platform, "bob", value=b"bob's own")
    publish(platform, "ann")
    platform.transfer.run_once()
    claims = platform.shards[0].claims
    claim = claims.claim("orders", "mailer", -1, owner="a run")
    assert isinstance(claim, Claim)
    claims.fail(claim, ValueError(SECRET.decode()))
    assert "consumer" in tables_with(platform)
    platform.eraser.execute("orders", ["ann"])
    assert tables_with(platform) == set()


# Beside others


def test_a_failure_that_is_noted_after_the_erasure_quotes_nothing(
    platform: EventSQL, form: Storage, erase_and_refuse: BatchHandler, caplog: pytest.LogCaptureFixture
) -> None:
    store(platform, "ann", attempts=5)
    platform.consumers.consume_once("orders", "mailer", erase_and_refuse)
    assert [each.failure for each in platform.registry.consumer("orders", "mailer")] == [FAILURE]
    assert tables_with(platform) == set()
    assert FAILURE in caplog.text
    assert SECRET.decode() not in caplog.text


def test_a_failed_delivery_that_is_noted_after_the_erasure_quotes_nothing(
    platform: EventSQL, form: Storage, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(erasing, "VACUUM_SECONDS", 0.0)
    store(platform, "ann", attempts=5)

    def erase_and_refuse(event: Event) -> None:
        value = event.value or SECRET
        platform.eraser.execute("orders", ["ann"])
        raise ValueError(value.decode())

    with platform.consumers.start_queue("orders", "mailer", erase_and_refuse, polling_delay=0.02):
        until(lambda: "consumer_delivery" in tables_with(platform, FAILURE.encode()))
    assert tables_with(platform) == set()
    assert FAILURE in caplog.text
    assert SECRET.decode() not in caplog.text


def test_a_delivery_that_is_given_up_after_the_erasure_quotes_nothing(
    platform: EventSQL, form: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    store(platform, "ann", attempts=1)
    shard = platform.shards[0]
    queue = Deliveries(shard.database, shard.dead_letters, "orders", "mailer", by_key=True, lease=60.0, most=10)
    (delivery,) = queue.hand_out(queue.register("here"), -1, 10).deliveries
    platform.eraser.execute("orders", ["ann"])
    queue.fail(delivery, ValueError(SECRET.decode()), counts=True, behind=())
    assert tables_with(platform) == set()
    assert f"as a dead letter: {FAILURE}" in caplog.text
    assert SECRET.decode() not in caplog.text


def test_a_failure_of_a_delivery_that_is_copied_to_its_consumer_meanwhile_is_not_shown_any_more(
    platform: EventSQL, form: Storage, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    store(platform, "ann", attempts=5)
    shard = platform.shards[0]
    queue = Deliveries(shard.database, shard.dead_letters, "orders", "mailer", by_key=True, lease=60.0, most=10)
    worker = queue.register("here")
    (delivery,) = queue.hand_out(worker, -1, 10).deliveries
    queue.fail(delivery, ValueError(SECRET.decode()), counts=True, behind=())
    # The process has read the text, and has not written it yet.
    gate = sessions()
    gate.execute(
        "CREATE FUNCTION wait_for_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.eql_failure IS NOT NULL THEN PERFORM pg_advisory_xact_lock(1); END IF; RETURN NEW; END $$"
    )
    gate.execute("CREATE TRIGGER gate BEFORE UPDATE ON eventsql.consumer FOR EACH ROW EXECUTE FUNCTION wait_for_gate()")
    gate.commit()
    gate.execute("SELECT pg_advisory_xact_lock(1)")
    copying = threading.Thread(target=queue.hand_out, args=(worker, -1, 10))
    copying.start()
    until_blocked()
    erasing = threading.Thread(target=platform.eraser.execute, args=("orders", ["ann"]))
    erasing.start()
    until_blocked(2)
    gate.commit()
    copying.join()
    erasing.join()
    assert tables_with(platform) == set()


def test_a_dead_letter_factory_sees_nothing_of_an_event_that_was_erased_meanwhile(
    platform: EventSQL, form: Storage, erase_and_refuse: BatchHandler
) -> None:
    store(platform, "ann")
    seen: list[str] = []

    def note(event: Event, cause: DeadLetterCause) -> None:
        seen.append(f"{event.value!r} {cause.message} {cause.error} {cause.error.__cause__}")

    platform.dead_letters.configure(note)
    platform.consumers.consume_once("orders", "mailer", erase_and_refuse)
    assert len(seen) == 1
    assert SECRET.decode() not in seen[0]


def test_staged_events_that_are_copied_to_the_buffer_wait_for_their_erasure(
    platform: EventSQL, form: Storage, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    attempt = stage(platform, "ann", "bob")
    staged, eraser = StagedBlocks("eventsql"), sessions()
    staged.erase(
        eraser, attempt, 0,
        lambda event: event._replace(value=b"", metadata=b"{}") if event.key == b"ann" else event,
    )  # fmt: skip

    def publish_staged() -> None:
        with platform.database.transaction() as connection:
            staged.publish(connection, [attempt], staged.find(connection, [attempt]))
            staged.delete(connection, [attempt])

    publisher = threading.Thread(target=publish_staged)
    publisher.start()
    until_blocked()
    eraser.commit()
    publisher.join(60)
    assert {event.key: event.value for event in events(platform)} == {"ann": b"", "bob": SECRET}


def test_staged_events_that_are_just_being_copied_to_the_buffer_are_counted_once(
    platform: EventSQL, form: Storage, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    attempt = stage(platform, "ann", "bob")
    staged, publisher = StagedBlocks("eventsql"), sessions()
    staged.publish(publisher, [attempt], staged.find(publisher, [attempt]))
    done: list[Erasure] = []
    erasing = threading.Thread(target=lambda: done.append(platform.eraser.execute("orders", ["ann"])))
    erasing.start()
    until_blocked()
    staged.delete(publisher, [attempt])
    publisher.commit()
    erasing.join()
    assert [each.buffered for each in done] == [1]
    assert {each.key: each.erased for each in events(platform)} == {"ann": True, "bob": False}


def test_a_damaged_staged_block_is_named(platform: EventSQL, form: Storage, session: Connection) -> None:
    attempt = stage(platform, "ann", "bob")
    session.execute("UPDATE eventsql.spark_staged_event SET eql_keys = eql_keys[2:]")
    with pytest.raises(DatabaseError, match=f"block 0 of attempt {attempt} has 2 values, 1 keys and 2 metadata"):
        platform.eraser.execute("orders", ["ann"])


def test_a_consumer_that_holds_an_event_makes_no_dead_letter_of_its_value(
    platform: EventSQL, form: Storage, erase_and_refuse: BatchHandler
) -> None:
    store(platform, "ann")
    give_up(platform, erase_and_refuse)
    (letter,) = platform.dead_letters.list("orders")
    assert letter.erased
    assert tables_with(platform) == set()


def test_a_dead_letter_topic_that_is_registered_during_an_erasure_keeps_no_value(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "VACUUM_SECONDS", 0.0)
    platform.registry.unregister_topic("orders_dlt")
    store(platform, "ann")
    erase = LogEraser.erase

    def bury_before(self: LogEraser, connection: Connection, *, after: int, upto: int) -> Counter[str]:
        platform.registry.register_topic(Topic("orders_dlt"))
        while platform.consumers.consume_once("orders", "mailer", refuse):
            pass
        return erase(self, connection, after=after, upto=upto)

    with monkeypatch.context() as patched:
        patched.setattr(LogEraser, "erase", bury_before)
        with pytest.raises(DatabaseBusyError):
            platform.eraser.execute("orders", ["ann"])
    assert [record.finished_at for record in platform.eraser.records("orders")] == [None]
    assert platform.eraser.execute("orders", ["ann"]).dead_letters == 1
    assert tables_with(platform) == set()


def test_an_erasure_waits_for_dead_letters_that_are_being_redriven(
    platform: EventSQL, direct_dsn: str, form: Storage, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    store(platform, "ann")
    give_up(platform)
    # A redrive has read the letter, and stops before it publishes.
    gate = sessions()
    gate.execute("LOCK TABLE eventsql.event_buffer IN SHARE MODE")
    redriven: list[int] = []

    def redrive() -> None:
        with EventSQL(direct_dsn, transfer=False) as other:
            redriven.append(other.dead_letters.redrive("orders"))

    redriving = threading.Thread(target=redrive)
    redriving.start()
    until_blocked()
    done: list[Erasure] = []
    with EventSQL(direct_dsn, transfer=False) as eraser:
        erasing = threading.Thread(target=lambda: done.append(eraser.eraser.execute("orders", ["ann"])))
        erasing.start()
        until_blocked(2)
        gate.commit()
        redriving.join()
        erasing.join()
    assert redriven == [1]
    assert [(each.buffered, each.dead_letters) for each in done] == [(1, 1)]
    assert tables_with(platform) == set()
    assert [each.erased for each in events(platform)] == [True, True]


def test_a_batch_of_the_transfer_under_way_is_erased_where_it_ends(
    platform: EventSQL, form: Storage, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    publish(platform, *["ann"] * 3)
    holder = sessions()
    holder.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
    done: list[Erasure] = []
    erasing = threading.Thread(target=lambda: done.append(platform.eraser.execute("orders", ["ann"])))
    erasing.start()
    until_blocked()
    holder.commit()
    erasing.join()
    assert done[0].events + done[0].buffered == 3
    assert [each.erased for each in events(platform)] == [True] * 3


def test_staged_events_that_are_published_meanwhile_are_erased(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = stage(platform, "ann", "bob")
    buffered_end = LogEraser.buffered_end
    published: list[bool] = []

    def publish_then(self: LogEraser, connection: Connection, *, after: int, limit: int) -> int | None:
        end = buffered_end(self, connection, after=after, limit=limit)
        if end is None and not published:
            # The buffer was looked at.
            published.append(True)
            with platform.database.transaction() as other:
                publish_staged(other, attempt)
                StagedBlocks("eventsql").delete(other, [attempt])
        return end

    monkeypatch.setattr(LogEraser, "buffered_end", publish_then)
    platform.eraser.execute("orders", ["ann"])
    assert {each.key: each.erased for each in events(platform)} == {"ann": True, "bob": False}


@pytest.mark.parametrize("held", ["orders", "orders_dlt"])
def test_two_erasures_of_a_topic_exclude_each_other(
    platform: EventSQL, form: Storage, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setattr(erasure, "RETRY_SECONDS", 0.0)
    publish(platform, "ann")
    holder = sessions()
    holder.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 6074603))", [f"eventsql.{held}"])
    with pytest.raises(DatabaseBusyError):
        platform.eraser.execute("orders", ["ann"])
    holder.commit()
    assert platform.eraser.execute("orders", ["ann"]).buffered == 1


def test_a_range_that_takes_too_long_is_erased_in_parts(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(platform, *["ann", "bob"] * 10)
    platform.transfer.run_once()
    publish(platform, *["ann", "bob"] * 10)
    for name in ("erase", "erase_buffered"):
        original = getattr(LogEraser, name)

        def slow(self: LogEraser, connection: Connection, *, after: int, upto: int, change: Any = original) -> Any:
            found = change(self, connection, after=after, upto=upto)
            if upto - after > 3:
                raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
            return found

        monkeypatch.setattr(LogEraser, name, slow)
    done = platform.eraser.execute("orders", ["ann"])
    assert (done.events, done.buffered) == (10, 10)
    assert [each.erased for each in events(platform)] == [each.key == "ann" for each in events(platform)]


def test_waiting_for_others_ends_before_the_limit_of_a_statement(
    platform: EventSQL, direct_dsn: str, form: Storage, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(platform, "ann")
    erase_buffered, limits = LogEraser.erase_buffered, set[str]()

    def look(self: LogEraser, connection: Connection, **bounds: Any) -> Counter[str]:
        limits.update(*connection.execute("SHOW lock_timeout").fetchall())
        return erase_buffered(self, connection, **bounds)

    with monkeypatch.context() as patched:
        patched.setattr(LogEraser, "erase_buffered", look)
        patched.setattr(erasure, "LOCK_SECONDS", 3_600)
        dsn = make_url(direct_dsn).update_query_dict({"options": "-c statement_timeout=60s"}).render_as_string(False)
        with EventSQL(dsn, transfer=False) as limited:
            assert limited.eraser.execute("orders", ["ann"]).buffered == 1
    assert limits == {"30s"}

    monkeypatch.setattr(erasure, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(erasure, "RETRY_SECONDS", 0.0)
    sessions().execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
    with pytest.raises(DatabaseBusyError, match="other transactions hold events"):
        platform.eraser.execute("orders", ["ann"])


@pytest.mark.parametrize(
    "metadata", [r'{"note": "\u0000", "dlt_consumer": "mailer"}', r'{"dlt_consumer": "\ud800"}', "[1]"]
)
def test_metadata_of_any_json_goes(platform: EventSQL, form: Storage, metadata: str) -> None:
    publish(platform, "ann", "bob")
    platform.transfer.run_once()
    with platform.database.connection() as connection:
        for topic in ("orders", "orders_dlt"):
            connection.execute(
                "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
                "VALUES (%s, 0, 'ann', %s, %s::json)",
                [topic, SECRET, metadata],
            )
    assert platform.eraser.execute("orders", ["ann"]) == Erasure("orders", 1, 1, 1, 1, vacuumed=True)
    assert [each.erased for each in events(platform)] == [each.key == "ann" for each in events(platform)]
    (letter,) = events(platform, "orders_dlt")
    assert letter.erased


@pytest.mark.parametrize("copies", [False, True])
def test_an_erasure_ends_though_events_of_the_key_come_and_not_while_copies_of_them_come(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch, *, copies: bool
) -> None:
    monkeypatch.setattr(erasure, "MOST_ROUNDS", 3)
    visit, of_letter = erasure._Run.visit, {"redriven_from": "orders_dlt:1"} if copies else {}

    def publish_and_visit(self: Any, connection: Connection, name: str, *, execute: bool) -> None:
        if name == "orders":
            platform.publisher.publish(Publication("orders", SECRET, key="ann", metadata=of_letter))
        visit(self, connection, name, execute=execute)

    monkeypatch.setattr(erasure._Run, "visit", publish_and_visit)
    with pytest.raises(DatabaseBusyError) if copies else nullcontext():
        platform.eraser.execute("orders", ["ann"])
    assert [each.finished_at is None for each in platform.eraser.records()] == [copies]


# Interruptions and records


@pytest.mark.parametrize("steps", range(1, 4))
def test_an_interrupted_erasure_goes_on_and_has_one_record(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(erasure, "RANGE_IDS", 5)
    publish(platform, *["ann", "bob"] * 10)
    platform.transfer.run_once()
    publish(platform, "ann")
    stage(platform, "ann")
    left = [steps]
    note = erasure._Run._note

    def die(self: Any, connection: Connection, column: str, counts: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        note(self, connection, column, counts)

    monkeypatch.setattr(erasure._Run, "_note", die)
    with pytest.raises(KeyboardInterrupt):
        platform.eraser.execute("orders", ["ann"], requested_by="ticket 7")
    monkeypatch.setattr(erasure._Run, "_note", note)
    (record,) = platform.eraser.records("orders")
    assert record.finished_at is None
    platform.eraser.execute("orders", ["ann"], requested_by="ticket 8")
    (record,) = platform.eraser.records("orders", key="ann")
    assert record.events + record.buffered == 12
    assert record.finished_at is not None
    assert (record.requested_by, record.key_digest) == ("ticket 7", digest_of("ann"))
    assert all(each.erased == (each.key == "ann") for each in events(platform))


def test_an_erasure_that_was_killed_before_its_end_is_vacuumed_by_the_next(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    vacuum = erasing.vacuum
    vacuumed: list[str] = []

    def die(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    def note(connection: Connection, schema: str, tables: Iterable[str]) -> bool:
        vacuumed.extend(tables)
        return vacuum(connection, schema, tables)

    publish(platform, "ann")
    platform.transfer.run_once()
    monkeypatch.setattr(erasure, "vacuum", die)
    with pytest.raises(KeyboardInterrupt):
        platform.eraser.execute("orders", ["ann"])
    monkeypatch.setattr(erasure, "vacuum", note)
    assert platform.eraser.execute("orders", ["ann"]).vacuumed
    assert segments.segment_name("orders", 0) in vacuumed
    (record,) = platform.eraser.records("orders")
    assert record.events == 1
    assert record.finished_at is not None


def test_rows_that_an_open_transaction_sees_are_not_said_to_be_gone(
    platform: EventSQL, form: Storage, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "VACUUM_SECONDS", 0.0)
    publish(platform, "ann", "bob")
    platform.transfer.run_once()
    reading = sessions()
    reading.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    reading.execute("SELECT count(*) FROM eventsql.orders_event")
    assert not platform.eraser.execute("orders", ["ann"]).vacuumed
    values = reading.execute("SELECT eql_value FROM eventsql.orders_event").fetchall()
    assert [value.startswith(SECRET) for (value,) in values] == [True, True]
    reading.rollback()
    monkeypatch.undo()
    assert platform.eraser.execute("orders", ["bob"]).vacuumed


def test_a_snapshot_of_another_database_keeps_no_row(
    platform: EventSQL, fresh: str, form: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "VACUUM_SECONDS", 0.0)
    publish(platform, "ann")
    with psycopg.connect(fresh) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("SELECT pg_current_snapshot()")
        assert platform.eraser.execute("orders", ["ann"]).vacuumed


def test_an_erasure_does_not_wait_for_ever_for_a_session_that_analyzes_its_tables(
    platform: EventSQL, form: Storage, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "VACUUM_WAIT_SECONDS", 0.05)
    publish(platform, "ann", "bob")
    platform.transfer.run_once()
    analyzing, segment = sessions(), segments.segment_name("orders", 0)
    analyzing.execute(f"LOCK TABLE eventsql.{segment} IN SHARE UPDATE EXCLUSIVE MODE".encode())
    with ThreadPoolExecutor() as threads:
        try:
            done = threads.submit(platform.eraser.execute, "orders", ["ann"]).result(PATIENCE)
        finally:
            analyzing.rollback()
    assert (done.events, done.vacuumed) == (1, False)
    assert platform.eraser.execute("orders", ["bob"]).vacuumed


def test_an_erasure_that_others_may_have_disturbed_is_not_recorded_as_finished(
    platform: EventSQL, form: Storage, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    erase = erasure._Run.erase

    def lose_the_lock(self: Any, connection: Connection) -> None:
        erase(self, connection)
        session.execute(f"SELECT pg_terminate_backend(pid, 60000) FROM ({HOLDERS}) holder")

    publish(platform, "ann")
    with monkeypatch.context() as patch, pytest.raises(DatabaseUnavailableError):
        patch.setattr(erasure._Run, "erase", lose_the_lock)
        platform.eraser.execute("orders", ["ann"])
    assert [each.finished_at for each in platform.eraser.records()] == [None]
    platform.eraser.execute("orders", ["ann"])
    assert [each.finished_at is None for each in platform.eraser.records()] == [False]


def test_an_erasure_outlasts_the_limit_of_a_transaction(
    platform: EventSQL, direct_dsn: str, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    if session.info.server_version < 170000:
        pytest.skip("PostgreSQL has the limit from version 17 on")
    hold, limits = erasure._Run.hold, list[Any]()

    def look(self: Any, holder: Connection) -> None:
        hold(self, holder)
        limits.append(holder.execute("SHOW transaction_timeout").fetchone())

    platform.registry.register_topic(Topic("orders"))
    publish(platform, "ann")
    monkeypatch.setattr(erasure._Run, "hold", look)
    options = {"options": "-c transaction_timeout=60s"}
    dsn = make_url(direct_dsn).update_query_dict(options).render_as_string(False)
    with EventSQL(dsn, transfer=False) as limited:
        assert limited.eraser.execute("orders", ["ann"]).buffered == 1
    assert limits == [("0",)]


def test_a_record_has_no_key_and_outlives_the_topic(platform: EventSQL, form: Storage) -> None:
    publish(platform, "ann@example.org")
    platform.eraser.execute("orders", ["ann@example.org"])
    platform.registry.unregister_topic("orders", force=True)
    assert tables_with(platform, b"ann@example.org") == set()
    (record,) = platform.eraser.records(key="ann@example.org")
    assert (record.topic, record.buffered, record.requested_by) == ("orders", 1, None)


def test_old_records_are_pruned_by_retention(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.eraser.execute("orders", ["ann", "bob"])
    with platform.database.connection() as connection:
        connection.execute(
            "UPDATE eventsql.erasure SET eql_started_at = now() - interval '3651 days' WHERE eql_key_digest = %s",
            [digest_of("ann")],
        )
    platform.retention.run_once()
    assert [each.key_digest for each in platform.eraser.records()] == [digest_of("bob")]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_segment_that_retention_has_detached_is_waited_for(
    platform: EventSQL, form: Storage, monkeypatch: pytest.MonkeyPatch, *, meanwhile: bool
) -> None:
    publish(platform, "ann")
    platform.transfer.run_once()
    # Of the topic and of its dead letters, before the erasure.
    looks: Iterator[list[str]] = iter([[], []] if meanwhile else [])
    monkeypatch.setattr(LogEraser, "leaving", lambda *_: next(looks, ["orders_segment_0"]))
    monkeypatch.setattr(erasure, "RETRY_SECONDS", 0.0)
    with pytest.raises(DatabaseBusyError):
        platform.eraser.execute("orders", ["ann"])
    (record,) = platform.eraser.records()
    assert record.finished_at is None


def test_a_segment_that_comes_back_meanwhile_is_erased_from(
    platform: EventSQL, session: Connection, form: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(platform, "ann")
    platform.transfer.run_once()
    segment, leaving = (segments.segments(session, "eventsql", "orders") or [])[0], LogEraser.leaving
    session.execute(f"COMMENT ON TABLE eventsql.{segment.table} IS '{DROPPED}'".encode())
    session.execute(f"ALTER TABLE eventsql.{segment.log} DETACH PARTITION eventsql.{segment.table}".encode())

    def attach_after_the_look(self: LogEraser, connection: Connection) -> list[str]:
        found = leaving(self, connection)
        if found == [segment.table]:
            session.execute(f"COMMENT ON TABLE eventsql.{segment.table} IS NULL".encode())
            session.execute(
                f"ALTER TABLE eventsql.{segment.log} ATTACH PARTITION eventsql.{segment.table} "
                f"FOR VALUES FROM ({segment.start}) TO ({segment.end})".encode()
            )
        return found

    monkeypatch.setattr(LogEraser, "leaving", attach_after_the_look)
    assert platform.eraser.execute("orders", ["ann"]).events == 1
    assert tables_with(platform) == set()


def test_bad_arguments_are_refused_before_anything_is_written(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    for keys in ([], "ann", ["nul\x00"], ["k"] * 1_001):
        with pytest.raises(ValidationError):
            platform.eraser.execute("orders", keys)
    with pytest.raises(TopicNotFoundError):
        platform.eraser.execute("payments", ["ann"])
    assert platform.eraser.records() == []
