"""Retention drops whole segments that need not be kept, and never what a registered consumer has not passed."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseFullError, TopicNotFoundError
from eventsql_orchestration.maintenance import retention
from eventsql_orchestration.maintenance.compaction import Compactor
from eventsql_orchestration.maintenance.retention import Dropped, Retainer
from eventsql_orchestration.model import Retention
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.segment_drops import SegmentDrops
from tests.forms import stored
from tests.plain import REPLACE_ORDERS
from tests.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from tests.fixtures import Sessions, UntilBlocked

SCHEMA = "eventsql"

pytestmark = pytest.mark.usefixtures("small_segments")


def fill(platform: EventSQL, count: int, topic: str = "orders", **fields: Any) -> None:
    for number in range(0, count, 5):
        platform.publisher.publish_all(Publication(topic, b"%d" % (number + n), **fields) for n in range(5))
        platform.transfer.run_once()


def retained(platform: EventSQL, count: int = 50, *, consumer: str | None = None, **kept: Any) -> None:
    """Make `orders`, of which so much is kept, and a consumer if one is named, and publish."""
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(**kept)))
    if consumer is not None:
        platform.registry.register_consumer(Consumer("orders", consumer))
    fill(platform, count)


def age(session: Connection, seconds: float, upto: int) -> None:
    """Let events up to an offset be so much older. A block is as old as its last event."""
    session.execute(
        f"UPDATE eventsql.{stored('orders')} SET eql_created_at = eql_created_at - make_interval(secs => %s) "
        "WHERE eql_id <= %s",
        [seconds, upto],
    )


def first(platform: EventSQL) -> int:
    return platform.reader.read("orders", limit=1)[0].id


def last_before(platform: EventSQL, border: int, topic: str = "orders") -> int:
    """The last event of the segment that ends at a border. A block lies in the segment of its last event."""
    with platform.database.connection() as connection:
        query = f"SELECT max(eql_id) FROM eventsql.{stored(topic)} WHERE eql_id < %s"
        found = connection.execute(query, [border]).fetchone()
    assert found is not None
    return int(found[0])


def consume(platform: EventSQL, consumer: str, count: int = 1_000) -> int:
    return platform.consumers.consume_once("orders", consumer, lambda *_: None, max_events=count)


def test_everything_is_kept_where_nothing_else_is_said(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    fill(platform, 40)
    assert platform.retention.run_once() == []
    assert platform.reader.count("orders") == 40


def test_segments_beyond_a_number_of_events_go(platform: EventSQL) -> None:
    retained(platform, 60, events=27)
    last = last_before(platform, 30)
    (dropped,) = platform.retention.run_once()
    assert (dropped.topic, dropped.segments, dropped.upto, dropped.held_by) == ("orders", 3, last, None)
    assert dropped.bytes > 0
    assert [event.id for event in platform.reader.read("orders")] == list(range(last + 1, 61))
    assert platform.retention.run_once()[0].segments == 0
    fill(platform, 10)
    assert platform.retention.run_once()[0].segments == 1


def test_redrives_of_dead_letters_go_with_their_letters(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_topic(Topic("orders_dlt", retention=Retention(events=27)))
    fill(platform, 60, "orders_dlt")
    redriven = "INSERT INTO eventsql.redriven_dead_letter (eql_topic, eql_letter_id) VALUES ('orders_dlt', %s)"
    for letter in (1, 60):
        session.execute(redriven, [letter])
    platform.retention.run_once()
    assert session.execute("SELECT eql_letter_id FROM eventsql.redriven_dead_letter").fetchall() == [(60,)]


def test_segments_beyond_an_age_go(platform: EventSQL, session: Connection) -> None:
    retained(platform, seconds=3600)
    assert platform.retention.run_once()[0].segments == 0
    last = last_before(platform, 20)
    age(session, 7200, upto=24)
    assert platform.retention.run_once()[0].upto == last, "the third segment has an event that is young enough"
    assert first(platform) == last + 1


def test_an_event_of_a_clock_that_was_ahead_keeps_no_old_segments(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(seconds=3600)))
    fill(platform, 50)
    ahead, last = last_before(platform, 10), last_before(platform, 20)
    age(session, 7200, upto=24)
    age(session, -10 * 365 * 86_400, upto=ahead)
    assert platform.retention.run_once()[0].upto == last


def test_a_segment_that_begins_with_an_event_of_a_clock_that_was_ahead_is_closed(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(seconds=3600)))
    fill(platform, 5)
    age(session, -10 * 365 * 86_400, upto=5)
    for _ in range(2):
        platform.retention.run_once()
    fill(platform, 5)
    platform.retention.run_once()
    assert [event.id for event in platform.reader.read("orders")] == [*range(1, 6), *range(10, 15)]
    age(session, 7200, upto=14)
    assert platform.retention.run_once()[0].upto == 14


def test_segments_beyond_a_size_go(platform: EventSQL) -> None:
    retained(platform, 20, bytes=200_000)
    fill(platform, 20, key="k" * 10_000)
    for _ in range(3):
        platform.publisher.publish_all(Publication("orders", os.urandom(30_000)) for _ in range(10))
        platform.transfer.run_once()
    (dropped,) = platform.retention.run_once()
    assert dropped.segments >= 3
    assert first(platform) == dropped.upto + 1


def test_a_topic_of_few_events_loses_them_too_because_its_segment_is_closed_in_time(
    platform: EventSQL, session: Connection
) -> None:
    retained(platform, 5, seconds=3600)
    age(session, 3600 / retention.ROLL_SHARE + 1, upto=5)
    assert platform.retention.run_once()[0].segments == 0
    fill(platform, 5)
    assert [event.id for event in platform.reader.read("orders")] == [1, 2, 3, 4, 5, 10, 11, 12, 13, 14]
    age(session, 3600, upto=5)
    assert platform.retention.run_once()[0].segments == 1
    assert first(platform) == 10


def test_the_last_segment_that_a_log_can_have_is_not_closed_in_time(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(seconds=3600)))
    session.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', %s)", [2**63 - 20])
    session.execute("SELECT eventsql.make_segments('orders', 10, 2)")
    fill(platform, 10)
    age(session, 3600, upto=2**63 - 1)
    platform.retention.run_once()
    fill(platform, 5)
    assert platform.reader.end("orders") == 2**63 - 5


@pytest.mark.parametrize("partitioned", [False, True])
def test_segments_that_a_consumer_has_not_passed_are_kept(platform: EventSQL, partitioned: bool) -> None:
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(events=10)))
    platform.registry.register_consumer(Consumer("orders", "slow", partitioned))
    fill(platform, 50)
    (dropped,) = platform.retention.run_once()
    assert dropped.segments == 0
    assert dropped.held_by is not None
    assert "slow" in dropped.held_by
    assert platform.retention.held() == {"orders": dropped.held_by}
    consumed = consume(platform, "slow", 12)
    platform.retention.run_once()
    assert sum(lag.events for lag in platform.lag("orders")) == 50 - consumed
    assert first(platform) > 1
    while consume(platform, "slow"):
        pass
    last = last_before(platform, 40)
    (dropped,) = platform.retention.run_once()
    assert dropped.held_by is None
    assert first(platform) == last + 1


@pytest.mark.parametrize("passed", [0, 10])
def test_a_partition_without_further_events_in_a_segment_does_not_hold_it(platform: EventSQL, passed: int) -> None:
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(events=10)))
    platform.registry.register_consumer(Consumer("orders", "both", partitioned=True))
    fill(platform, passed, partition=0)
    fill(platform, 50 - passed, partition=1)
    assert consume(platform, "both") == 50
    assert platform.registry.consumer("orders", "both")[0].last_event_id == passed
    assert platform.retention.run_once()[0].segments == 4


def test_force_drops_what_a_consumer_has_not_passed_and_it_goes_on_with_what_is_left(platform: EventSQL) -> None:
    retained(platform, consumer="slow", events=10)
    last = last_before(platform, 40)
    assert platform.retention.run_once(["orders"], force=True)[0].segments == 4
    assert consume(platform, "slow") == 50 - last


def test_a_consumer_that_stands_still_does_not_let_segments_grow_in_number(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MOST_SEGMENTS", 8)

    def publish_and_retain() -> int:
        fill(platform, 5)
        platform.retention.run_once()
        return len(segments.segments(session, SCHEMA, "orders") or ())

    retained(platform, 0, consumer="slow", events=8)
    numbers = [publish_and_retain() for _ in range(11)]
    # At first each run closes a segment. From 8 on, a segment ends only with its own ids, after two publications.
    assert numbers == [3, 4, 5, 6, 7, 8, 9, 9, 10, 10, 11]
    (planned,) = platform.retention.run_once(execute=False)
    assert (planned.segments, planned.held_by) == (0, "consumer 'slow'")

    assert consume(platform, "slow") == 55
    assert publish_and_retain() == 3


def test_a_look_changes_nothing(platform: EventSQL) -> None:
    retained(platform, events=10)
    last = last_before(platform, 40)
    (planned,) = platform.retention.run_once(execute=False)
    assert platform.reader.count("orders") == 50
    (done,) = platform.retention.run_once()
    assert (planned.segments, planned.upto) == (done.segments, done.upto) == (4, last)


def test_a_look_has_the_current_segment_that_the_run_closes_and_drops(platform: EventSQL, session: Connection) -> None:
    retained(platform, 5, seconds=3600)
    age(session, 3600, upto=5)
    (planned,) = platform.retention.run_once(execute=False)
    assert platform.reader.count("orders") == 5
    (done,) = platform.retention.run_once()
    assert (planned.segments, planned.upto) == (done.segments, done.upto) == (1, 5)


def test_topics_without_a_retention_cost_no_sessions(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        platform.registry.register_topic(Topic(f"orders_{number}", storage="blocks"))
    opened, dedicated = list[Database](), Database.dedicated

    def open_session(self: Database) -> Connection:
        opened.append(self)
        return dedicated(self)

    monkeypatch.setattr(Database, "dedicated", open_session)
    platform.retention.run_once()
    assert opened == []
    platform.shards[0].compactor.run_once()
    assert len(opened) == 1


def test_an_unknown_topic_is_refused(platform: EventSQL) -> None:
    with pytest.raises(TopicNotFoundError):
        platform.retention.run_once(["nobody"])


def test_readers_and_publishers_go_on_while_a_segment_waits_for_a_transaction_that_reads_it(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    retained(platform, events=27)
    gone, last = last_before(platform, 10), last_before(platform, 20)
    reading = sessions()
    reading.execute("SELECT count(*) FROM eventsql.orders_event")
    with ThreadPoolExecutor() as executor:
        retaining = executor.submit(platform.retention.run_once)
        until_blocked()
        assert platform.reader.read("orders", limit=1)[0].id > gone
        fill(platform, 5)
        assert not retaining.done()
        assert reading.execute("SELECT count(*) FROM eventsql.orders_event WHERE eql_id > 40").fetchone() is not None
        reading.commit()
        retaining.result()
    assert first(platform) == last + 1


def test_a_seek_back_waits_for_a_drop_and_a_drop_for_a_seek(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    retained(platform, consumer="all", events=27)
    consume(platform, "all")
    seeking = sessions()
    seeking.execute("SELECT pg_advisory_xact_lock(%s)", [REGISTRY_LOCK])
    seeking.execute("UPDATE eventsql.consumer SET eql_last_event_id = 0")
    with ThreadPoolExecutor() as executor:
        retaining = executor.submit(platform.retention.run_once)
        until_blocked()
        seeking.commit()
        (dropped,) = retaining.result()
    assert dropped.segments == 0
    assert consume(platform, "all") == 50


def test_a_plain_table_gets_segments_with_its_retention(platform: EventSQL, session: Connection) -> None:
    # A log in blocks always has segments.
    platform.registry.register_topic(Topic("orders", 2, storage="rows"))
    session.execute(REPLACE_ORDERS)
    fill(platform, 50)
    platform.registry.set_retention("orders", Retention(events=10))
    assert platform.retention.run_once()[0].segments == 0, "the plain table became one segment, and was closed"
    fill(platform, 15)
    (dropped,) = platform.retention.run_once()
    assert dropped == Dropped("orders", 1, 50, dropped.bytes, dropped.upto, None)
    assert platform.reader.count("orders") == 15


def test_a_topic_that_cannot_lose_its_segments_now_does_not_keep_others_from_it(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in ("busy", "orders"):
        platform.registry.register_topic(Topic(topic, 2, retention=Retention(events=27)))
        fill(platform, 50, topic)
    last = last_before(platform, 20)
    (pending, gone) = (last_before(platform, border, "busy") for border in (10, 20))
    reading = sessions()
    reading.execute("SELECT count(*) FROM eventsql.busy_event")

    def drops(schema: str, topic: str, *, wait: float) -> SegmentDrops:
        return SegmentDrops(schema, topic, wait=0.2 if topic == "busy" else wait)

    def is_pending() -> bool:
        with pytest.raises(DatabaseBusyError):
            platform.retention.run_once()
        assert first(platform) == last + 1
        return platform.reader.read("busy", limit=1)[0].id == pending + 1

    with monkeypatch.context() as patched:
        patched.setattr(retention, "SegmentDrops", drops)
        # On a busy machine, a run may end before it has begun to detach.
        wait_until(is_pending, "a segment is detached as far as its reader lets it be")
        assert is_pending()
    reading.commit()
    platform.retention.run_once()
    assert platform.reader.read("busy", limit=1)[0].id == gone + 1


@pytest.mark.parametrize("year", ["0044-03-15 BC", "20000-01-01"])
def test_a_time_that_python_cannot_represent_counts_by_its_age(
    platform: EventSQL, session: Connection, year: str
) -> None:
    retained(platform, seconds=3600)
    last = last_before(platform, 10)
    session.execute(f"UPDATE eventsql.{stored('orders')} SET eql_created_at = '{year}' WHERE eql_id = %s", [last])
    assert platform.retention.run_once()[0].segments == (1 if year.endswith("BC") else 0)


@pytest.mark.parametrize("error", [DatabaseBusyError, RuntimeError])
def test_an_error_of_retention_keeps_no_log_from_its_compaction_and_both_errors_are_told(
    platform: EventSQL, error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compacted, stop = list[Compactor](), threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        raise error("an open transaction still reads a segment")

    def compact(self: Compactor) -> None:
        compacted.append(self)
        stop.set()
        raise DatabaseFullError("no room for merged blocks")

    monkeypatch.setattr(Retainer, "run_once", fail)
    monkeypatch.setattr(Compactor, "run_once", compact)
    running = threading.Thread(target=platform.retention.run, args=[stop], kwargs={"every": 0.01}, daemon=True)
    running.start()
    running.join(PATIENCE)
    stop.set()
    assert compacted
    assert "an open transaction still reads a segment" in caplog.text
    assert "no room for merged blocks" in caplog.text


def test_two_that_retain_at_once_do_not_disturb_each_other(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, dsn: str
) -> None:
    retained(platform, events=27)
    reading = sessions()
    reading.execute("SELECT count(*) FROM eventsql.orders_event")
    with ThreadPoolExecutor() as executor, EventSQL(dsn, transfer=False) as other:
        retaining = executor.submit(platform.retention.run_once)
        until_blocked()
        assert other.retention.run_once() == [], "the other one is at it"
        reading.commit()
        assert retaining.result()[0].segments == 2


def test_a_retention_that_is_interrupted_leaves_no_thread_that_goes_on(platform: EventSQL) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().wait(timeout)

    with pytest.raises(KeyboardInterrupt):
        platform.retention.run(Interrupted())
    wait_until(lambda: "eventsql-retention" not in {each.name for each in threading.enumerate()}, "the thread's end")
