"""Events of many threads share commits: each is acknowledged after its own, in order, and hears of its own error."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventsql_orchestration import NOT_PARTITIONED, Acknowledgement, BufferedPublisher, EventSQL, Publication, Topic
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseError,
    PartitionOutOfRangeError,
    PublisherClosedError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.publishing.buffer_limits import BufferLimits
from eventsql_orchestration.publishing.lanes import Lanes
from eventsql_orchestration.publishing.placements import Placements
from eventsql_orchestration.threads import Wake, in_thread, start_thread
from eventsql_orchestration.topics import registry
from eventsql_orchestration.topics.partitioner import partition_of_key
from tests.forms import none_is, stored
from tests.interrupting import interrupted
from tests.publishing.conftest import order, published
from tests.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from tests.fixtures import Sessions, Until, UntilBlocked
    from tests.publishing.conftest import Hold

NEVER = 3_600.0
PARTITIONS = 4

Open = Callable[..., BufferedPublisher]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", PARTITIONS)).register_topic(Topic("payments"))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def opened(platform: EventSQL) -> Iterator[Open]:
    """Makes publishers; none outlives the test."""
    made: list[BufferedPublisher] = []

    def make(**options: Any) -> BufferedPublisher:
        made.append(platform.buffered_publisher(**options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
        for lane in publisher._collectors.all()[0]._lanes._lanes:
            # A flush that was given up ends by itself.
            if lane.thread is not None:
                lane.thread.join(PATIENCE)


def log(platform: EventSQL, topic: str = "orders") -> list[tuple[int, bytes]]:
    """Partition and value of all events that are published, in the order of the log."""
    platform.transfer.run_once()
    return [(event.partition, event.value) for event in platform.reader.read(topic)]


def check_placements(platform: EventSQL, given: dict[Acknowledgement, bytes], *, after: int = 0) -> None:
    """Assert that acknowledgements of committed events, with these values, tell where the events are.

    The first `after` events of the log are older.
    """
    found = {event.value: event for event in list(platform.reader.read("orders"))[after:]}
    for each, value in given.items():
        if each.exception() is None:
            assert each.result().partition == found[value].partition
            assert each.result().offset in (None, found[value].id)


def waits_for_room(publisher: BufferedPublisher) -> bool:
    """Whether a thread waits in `publish`."""
    return bool(publisher._collectors.all()[0]._lanes._settled._waiters)  # type: ignore[attr-defined]  # its condition's


# Acknowledged after the commit


def test_an_event_is_not_acknowledged_while_its_commit_is_under_way(
    platform: EventSQL, opened: Open, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    session = sessions()
    session.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql "
        "AS 'BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END'"
    )
    session.execute(
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON eventsql.event_buffer DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    session.commit()
    session.execute("SELECT pg_advisory_xact_lock(7)")
    future = opened().publish(order(b"one"))
    until_blocked()
    assert not future.done()
    session.commit()
    future.result(PATIENCE)
    assert published(platform) == [b"one"]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"max_events": 3, "flushes": 1}, [b"1", b"2", b"3"]),
        ({"max_bytes": 10}, [b"123456", b"1234"]),
        ({"max_events": 1}, [b"1"]),
        ({"max_pending_events": 2, "flushes": 1}, [b"1", b"2"]),
        ({"max_pending_bytes": 2, "flushes": 1}, [b"1", b"2"]),
    ],
    ids=["count", "bytes", "one", "as many as may wait", "as many bytes as may wait"],
)
def test_a_lane_flushes_when_enough_waits_in_it(opened: Open, options: dict[str, Any], values: list[bytes]) -> None:
    publisher = opened(max_age=NEVER, **options)
    for future in [publisher.publish(order(value, partition=0)) for value in values]:
        future.result(PATIENCE)


@pytest.mark.parametrize("options", [{"max_events": 3}, {"max_bytes": 200}], ids=["count", "bytes"])
def test_a_lane_that_waits_flushes_as_soon_as_enough_waits_in_it_and_not_before(options: dict[str, Any]) -> None:
    publisher, settled = Mock(hashes_keys=True), list[int]()
    publisher.publish_batch.return_value = Placements()
    limits = BufferLimits(flushes=1, max_age=NEVER, **options)
    lanes: Lanes[int] = Lanes(publisher, limits, lambda numbers, _outcome: settled.extend(numbers))
    (lane,) = lanes._lanes
    for number in range(3):
        assert publisher.publish_batch.call_count == 0
        lanes.put(lanes.assign(Publication("orders", bytes(70), key="k"), Topic("orders")), number)
        if number < 2:
            wait_until(lambda: lane.wake._waiters)  # type: ignore[attr-defined]  # of CPython
    wait_until(lambda: settled)
    assert settled == [0, 1, 2]
    lanes.close(PATIENCE)


def test_a_lane_flushes_when_its_oldest_event_is_of_age(opened: Open) -> None:
    publisher = opened(max_age=0.02)
    for _ in range(3):
        publisher.publish(order(b"")).result(PATIENCE)


def test_events_that_come_during_a_flush_share_the_next_commit(
    platform: EventSQL, opened: Open, hold: Hold, until_blocked: UntilBlocked, sessions: Sessions
) -> None:
    publisher = opened(max_age=0, flushes=1)
    with hold():
        publisher.publish(order(b"first"))
        until_blocked()
        for number in range(20):
            publisher.publish(order(b"%d" % number))
    publisher.flush(timeout=PATIENCE)
    transactions = sessions().execute("SELECT DISTINCT xmin::text FROM eventsql.event_buffer").fetchall()
    assert len(transactions) == 2


@pytest.mark.parametrize("flushes", [1, 3])
def test_as_many_flushes_are_under_way_as_are_allowed(
    platform: EventSQL, opened: Open, hold: Hold, until_blocked: UntilBlocked, flushes: int
) -> None:
    platform.registry.register_topic(Topic("many", 12))
    # Threads whose start another test has interrupted stay.
    before = set(threading.enumerate())
    publisher = opened(max_events=1, flushes=flushes)
    with hold():
        for number in range(24):
            publisher.publish(Publication("many", b"", partition=number % 12))
        until_blocked(flushes)
        started = set(threading.enumerate()) - before
        assert sum(thread.name == "eventsql-flush" for thread in started) == flushes
    publisher.flush(timeout=PATIENCE)
    assert len(log(platform, "many")) == 24


def test_an_event_goes_where_the_partitioner_says_and_is_what_it_was_when_it_was_given(
    platform: EventSQL, opened: Open
) -> None:
    platform.publisher.configure_partitioner(lambda publication, partitions: len(publication.value) % partitions)
    publisher = opened(max_age=NEVER)
    metadata = {"source": "web"}
    publisher.publish(order(b"four", key="🚕", metadata=metadata))
    publisher.publish(order(b"three", partition=0))
    metadata["source"] = "changed"
    publisher.flush()
    platform.transfer.run_once()
    events = platform.reader.read("orders")
    assert {(event.partition, event.key, event.value, event.metadata.get("source")) for event in events} == {
        (0, "🚕", b"four", "web"),
        (0, None, b"three", None),
    }


# Order


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(2), asyncio.CancelledError()], ids=repr)
def test_an_error_of_the_partitioner_fails_the_flush_and_no_later_one(
    platform: EventSQL, opened: Open, error: BaseException
) -> None:
    def choose(publication: Publication, _partitions: int) -> int:
        if publication.value == b"bad" and threading.current_thread() is not threading.main_thread():
            raise error
        return 0

    platform.publisher.configure_partitioner(choose)
    publisher = opened()
    assert publisher.publish(order(b"bad")).exception(PATIENCE) is not None
    assert publisher.publish(order(b"good")).result(PATIENCE).partition == 0


def test_events_of_a_partition_are_committed_in_the_order_in_which_threads_gave_them(
    platform: EventSQL, opened: Open
) -> None:
    publisher = opened(max_events=7, max_age=0.001, flushes=3, max_pending_events=40)
    given_order: dict[int, list[bytes]] = {partition: [] for partition in range(PARTITIONS)}
    locks = [threading.Lock() for _ in range(PARTITIONS)]

    def publish(thread: int) -> None:
        drawn = random.Random(thread)
        for number in range(150):
            partition = drawn.randrange(PARTITIONS)
            value = b"%d-%d" % (thread, number)
            with locks[partition]:
                given_order[partition].append(value)
                publisher.publish(order(value, partition=partition))

    with ThreadPoolExecutor(8) as executor:
        for done in [executor.submit(publish, thread) for thread in range(8)]:
            done.result()
    publisher.flush(timeout=PATIENCE)
    events = log(platform)
    for partition, values in given_order.items():
        assert [value for its, value in events if its == partition] == values


# Errors


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(st.tuples(st.integers(0, PARTITIONS - 1), st.booleans()), min_size=1, max_size=70),
    flushes=st.integers(1, 3),
    max_events=st.sampled_from([1, 5, 1_000]),
)
def test_exactly_the_events_that_the_database_refuses_fail(
    platform: EventSQL, sessions: Sessions, events: list[tuple[int, bool]], flushes: int, max_events: int
) -> None:
    with sessions() as session:
        session.execute("ALTER TABLE eventsql.event_buffer DROP CONSTRAINT IF EXISTS no_bad")
        session.execute("ALTER TABLE eventsql.event_buffer ADD CONSTRAINT no_bad CHECK (eql_key <> 'bad')")
        log_table = f"eventsql.{stored('orders')}"
        session.execute(f"ALTER TABLE {log_table} DROP CONSTRAINT IF EXISTS no_bad")
        session.execute(f"ALTER TABLE {log_table} ADD CONSTRAINT no_bad CHECK ({none_is('key', 'bad')})")
    before = len(log(platform))
    with platform.buffered_publisher(max_age=NEVER, flushes=flushes, max_events=max_events) as publisher:
        futures = [
            publisher.publish(order(b"%d" % number, key="bad" if bad else "good", partition=partition))
            for number, (partition, bad) in enumerate(events)
        ]
    for future, (_, bad) in zip(futures, events, strict=True):
        assert type(future.exception(PATIENCE)) is (DatabaseError if bad else type(None))
    committed = log(platform)[before:]
    check_placements(platform, {future: b"%d" % number for number, future in enumerate(futures)}, after=before)
    for partition in range(PARTITIONS):
        assert [value for its, value in committed if its == partition] == [
            b"%d" % number for number, (its, bad) in enumerate(events) if its == partition and not bad
        ]


@pytest.mark.parametrize("form", ["rows", "blocks"], indirect=True)
@pytest.mark.parametrize("events", [20, 12_000])
@pytest.mark.usefixtures("form")
def test_an_acknowledgement_tells_the_partition_and_the_offset_where_it_is_known(
    platform: EventSQL, opened: Open, events: int, request: pytest.FixtureRequest
) -> None:
    platform.registry.register_topic(Topic("placed", PARTITIONS))
    platform.publisher.publish_all([Publication("placed", b"before")] * 100)
    publisher = opened(max_age=NEVER, max_events=events, flushes=1, max_pending_events=events)
    given = [publisher.publish(Publication("placed", b"%d" % number, key=str(number))) for number in range(events)]
    publisher.flush()
    platform.transfer.run_once()
    found = {event.value: event for event in platform.reader.read("placed")}

    # A small batch goes through the buffer, and rows get their ids from the server.
    known = events > 20 and request.node.callspec.params["form"] == "blocks"
    for number, acknowledgement in enumerate(given):
        event = found[b"%d" % number]
        assert acknowledgement.result() == (event.partition, event.id if known else None)


def test_an_acknowledgement_tells_the_partition_beside_events_of_another_topic(opened: Open) -> None:
    publisher = opened(max_age=NEVER, flushes=1)
    given = [
        publisher.publish(each)
        for number in range(PARTITIONS)
        for each in (order(b"", partition=number), Publication("payments", b""))
    ]
    publisher.flush()
    expected = [each for number in range(PARTITIONS) for each in (number, NOT_PARTITIONED)]
    assert [acknowledgement.result().partition for acknowledgement in given] == expected


def test_an_event_that_a_trigger_refuses_at_the_commit_fails_alone(
    platform: EventSQL, opened: Open, sessions: Sessions
) -> None:
    with sessions() as session:
        session.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql "
            "AS $$BEGIN IF NEW.eql_value = 'bad' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NULL; END$$"
        )
        session.execute(
            "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON eventsql.event_buffer DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    publisher = opened(max_age=NEVER, flushes=1)
    futures = [publisher.publish(order(value)) for value in (b"1", b"2", b"bad", b"3")]
    publisher.flush()
    assert [future.exception() is None for future in futures] == [True, True, False, True]
    with pytest.raises(psycopg.errors.RaiseException, match="not this one"):
        futures[2].result()
    assert sorted(value for _, value in log(platform)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("by", ["another process", "this one"])
@pytest.mark.parametrize("while_there_are", ["no events", "events"])
def test_events_given_before_a_redefinition_of_their_topic_go_by_the_new_definition(
    platform: EventSQL, opened: Open, dsn: str, by: str, while_there_are: str
) -> None:
    if while_there_are == "events":
        platform.publisher.publish(order(b"before", key="0"))
    publisher = opened(max_age=NEVER, flushes=2)
    published = [publisher.publish(order(b"%d" % number, key=str(number % 20))) for number in range(60)]
    with EventSQL(dsn, transfer=False) as elsewhere:
        changing = platform if by == "this one" else elsewhere
        changing.repartitioner.repartition("orders", 7)
    published += [publisher.publish(order(b"%d" % number, key=str(number % 20))) for number in range(60, 80)]
    publisher.flush()
    assert [each.exception() for each in published] == [None] * 80
    platform.transfer.run_once()
    events = [event for event in platform.reader.read("orders") if event.value != b"before"]
    assert all(event.partition == partition_of_key(event.key or "", 7) for event in events)
    for key in map(str, range(20)):
        numbers = [int(event.value) for event in events if event.key == key]
        assert numbers == [int(key) + 20 * turn for turn in range(4)]
    check_placements(platform, {each: b"%d" % number for number, each in enumerate(published)})


def test_events_whose_topic_is_gone_fail_and_those_of_other_topics_do_not(platform: EventSQL, opened: Open) -> None:
    publisher = opened(max_age=NEVER, flushes=1)
    published, other = [], []
    for number in range(3):
        published.append(publisher.publish(order(b"%d" % number)))
        other.append(publisher.publish(Publication("payments", b"%d" % number)))
    platform.registry.unregister_topic("orders")
    publisher.flush()
    assert [type(each.exception()) for each in published] == [TopicNotFoundError] * 3
    assert [each.exception() for each in other] == [None] * 3
    assert [value for _, value in log(platform, "payments")] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("partitions", [2, 7])
def test_events_whose_partition_is_gone_fail_and_others_do_not(
    platform: EventSQL, opened: Open, dsn: str, partitions: int
) -> None:
    publisher = opened(max_age=NEVER, flushes=1)
    published, other = [], []
    for number in range(30):
        published.append(publisher.publish(order(b"old", partition=number % PARTITIONS)))
        other.append(publisher.publish(Publication("payments", b"%d" % number)))
    with EventSQL(dsn, transfer=False) as elsewhere:
        elsewhere.repartitioner.repartition("orders", partitions)
    publisher.flush()
    gone = [number % PARTITIONS >= partitions for number in range(30)]
    assert [isinstance(each.exception(), PartitionOutOfRangeError) for each in published] == gone
    assert {each.exception() for each in other} == {None}
    assert [value for _, value in log(platform, "payments")] == [b"%d" % number for number in range(30)]
    assert len(log(platform)) == 30 - sum(gone)


def test_a_lane_whose_thread_cannot_start_is_started_by_the_next_event(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = opened()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more threads")))
        with pytest.raises(RuntimeError, match="no more threads"):
            publisher.publish(order(b""))
    assert publisher.publish(order(b"")).exception(PATIENCE) is None


@pytest.mark.parametrize("before", [0, 1])
def test_an_interrupt_at_any_moment_of_a_publication_keeps_no_other_event_from_its_commit(
    platform: EventSQL, opened: Open, until: Until, before: int
) -> None:
    """The first event of a publisher starts its thread."""

    def asleep() -> bool:
        (lane,) = publisher._collectors.all()[0]._lanes._lanes
        waiters = lane.wake._waiters  # type: ignore[attr-defined]  # a condition has them
        return lane.thread is None or (bool(waiters) and waiters[-1].locked())

    for after in count():
        publisher = opened(flushes=1, max_age=0.001)
        for _ in range(before):
            publisher.publish(order(b"before", key="a")).result(PATIENCE)
        if not interrupted(after, partial(publisher.publish, order(b"interrupted", key="a"))):
            break
        until(asleep)
        later = [publisher.publish(order(b"later", key="a")) for _ in range(3)]
        assert [each.exception(PATIENCE) for each in later] == [None] * 3
        publisher.flush(timeout=PATIENCE)
        publisher.close(PATIENCE)
    assert after > 10
    assert published(platform).count(b"later") == 3 * after


def test_an_interrupt_at_any_moment_of_a_wait_for_an_acknowledgement_keeps_no_other_event_from_its_commit(
    opened: Open, hold: Hold
) -> None:
    publisher = opened(flushes=1, max_age=0.001)
    for after in count():
        with hold():
            event = publisher.publish(order(b"one", key="a"))
            try:
                assert interrupted(after, partial(event.result, 0.001))
            except TimeoutError:
                break
        assert publisher.publish(order(b"later", key="a")).exception(PATIENCE) is None
        assert event.done()
    assert after > 5


@pytest.mark.parametrize("before", [0, 1])
def test_a_signal_at_any_moment_of_a_publication_may_close_the_publisher(
    platform: EventSQL, opened: Open, before: int
) -> None:
    """The signal's handler runs in the thread that publishes, which may have the lock of the lanes."""

    def publish(publisher: BufferedPublisher) -> None:
        with suppress(PublisherClosedError):
            given.append(publisher.publish(order(b"interrupted", key="a")))

    def close(publisher: BufferedPublisher) -> None:
        publisher.close(PATIENCE)
        closed.append(publisher)

    closed: list[BufferedPublisher] = []
    given: list[Acknowledgement] = []
    for after in count():
        publisher = opened(flushes=1, max_age=0.001)
        for _ in range(before):
            publisher.publish(order(b"before", key="a"))
        call = partial(interrupted, after, partial(publish, publisher), handler=partial(close, publisher))
        if not in_thread("publishing", call).result(PATIENCE):
            break
        assert closed[-1] is publisher
    assert after > 10
    assert [each.exception(PATIENCE) for each in given] == [None] * len(given)
    assert published(platform).count(b"interrupted") == len(given)


def test_a_signal_at_any_moment_of_a_wait_for_an_acknowledgement_may_close_the_publisher(opened: Open) -> None:
    for after in count():
        publisher = opened(flushes=1, max_age=NEVER)
        event = publisher.publish(order(b"one", key="a"))
        call = partial(interrupted, after, partial(event.exception, 0.001), handler=partial(publisher.close, PATIENCE))
        try:
            assert in_thread("waiting", call).result(PATIENCE)
        except TimeoutError:
            if not publisher.closed:
                break
        assert event.exception(PATIENCE) is None
    assert after > 5


PUBLISHES = """
import sys
from eventsql_orchestration import EventSQL, Publication
from tests.interrupting import interrupt_where_it_waits

interrupt_where_it_waits()
platform = EventSQL(sys.argv[1], transfer=False)
publisher = platform.buffered_publisher(max_age=0, max_pending_events=1)
event = publisher.publish(Publication("orders", b""))
%s
"""


@pytest.mark.parametrize(
    "wait",
    ["publisher.flush()", "publisher.close(None)", "event.result()", "publisher.publish(Publication('orders', b''))"],
)
def test_ctrl_c_ends_every_wait_for_a_commit(dsn: str, hold: Hold, until_blocked: UntilBlocked, wait: str) -> None:
    with hold():
        process = subprocess.Popen([sys.executable, "-c", PUBLISHES % wait, dsn], stdin=subprocess.PIPE)
        try:
            until_blocked()
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(PATIENCE) == -signal.SIGINT
        finally:
            process.kill()
            process.wait()


def test_a_failure_after_the_commit_does_not_publish_twice(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_committed: bool) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(platform.shards[0].publisher, "_on_published", fail)
    with platform.buffered_publisher(max_age=NEVER, flushes=1) as publisher:
        futures = [publisher.publish(order(b"")) for _ in range(4)]
    for future in futures:
        with pytest.raises(DatabaseError, match="ZeroDivisionError"):
            future.result()
    assert len(log(platform)) == 4


# Backpressure


@pytest.mark.parametrize(
    "options", [{"max_pending_events": 2}, {"max_pending_bytes": 8}], ids=["by events", "by bytes"]
)
def test_a_thread_waits_while_as_many_events_wait_as_may(
    platform: EventSQL, opened: Open, hold: Hold, until: Until, options: dict[str, Any]
) -> None:
    publisher = opened(**options)
    with ThreadPoolExecutor(1) as executor:
        with hold():
            for _ in range(2):
                publisher.publish(order(b"four"))
            for timeout in (0, 0.01):
                with pytest.raises(DatabaseBusyError, match="max_pending"):
                    publisher.publish(order(b"four"), timeout=timeout)
            third = executor.submit(publisher.publish, order(b"four"))
            until(lambda: waits_for_room(publisher))
            assert not third.done()
        third.result(PATIENCE).result(PATIENCE)
    assert len(log(platform)) == 3


def test_timeouts_may_be_lengths_of_time(opened: Open, hold: Hold) -> None:
    publisher, moment = opened(max_pending_events=1), timedelta(milliseconds=1)
    with hold():
        waiting = publisher.publish(order(b""))
        with pytest.raises(DatabaseBusyError):
            publisher.publish(order(b""), timeout=moment)
        for wait in (waiting.result, waiting.exception):
            with pytest.raises(TimeoutError):
                wait(timeout=moment)


def test_memory_is_bounded_however_many_threads_publish(platform: EventSQL, opened: Open, hold: Hold) -> None:
    publisher = opened(max_pending_events=10, max_events=4)
    accepted: list[Acknowledgement] = []

    def publish() -> None:
        for _ in range(5):
            try:
                accepted.append(publisher.publish(order(b""), timeout=0.01))
            except DatabaseBusyError:
                continue

    with hold():
        with ThreadPoolExecutor(8) as executor:
            for done in [executor.submit(publish) for _ in range(8)]:
                done.result()
        assert len(accepted) == 10
    for future in accepted:
        future.result(PATIENCE)
    assert len(log(platform)) == 10


def test_an_event_that_is_larger_than_what_may_wait_is_let_in_alone(
    opened: Open, hold: Hold, until_blocked: UntilBlocked
) -> None:
    publisher = opened(max_pending_bytes=100)
    with hold():
        large = publisher.publish(order(b"x" * 1_000), timeout=0)
        until_blocked()
        with pytest.raises(DatabaseBusyError):
            publisher.publish(order(b""), timeout=0)
    large.result(PATIENCE)
    publisher.publish(order(b""), timeout=PATIENCE).result(PATIENCE)


# Flushing and closing


def test_flush_waits_for_what_was_given_and_says_when_it_takes_too_long(
    platform: EventSQL, opened: Open, hold: Hold
) -> None:
    publisher = opened(max_age=NEVER)
    publisher.flush()
    with hold():
        futures = [publisher.publish(order(b"%d" % number, partition=number)) for number in range(PARTITIONS)]
        with pytest.raises(DatabaseBusyError, match="4 events"):
            publisher.flush(timeout=0.01)
        assert not any(future.done() for future in futures)
    publisher.flush()
    assert all(future.done() for future in futures)
    assert sorted(published(platform)) == [b"0", b"1", b"2", b"3"]


def test_flush_does_not_wait_for_what_is_given_later(opened: Open, hold: Hold, until_blocked: UntilBlocked) -> None:
    publisher = opened(max_age=NEVER, flushes=1)
    with hold():
        publisher.publish(order(b"one"))
        flushing = start_thread("flushing", publisher.flush)
        until_blocked()
        later = publisher.publish(order(b"later"))
    flushing.join(PATIENCE)
    assert (flushing.is_alive(), later.done()) == (False, False)


def test_closing_commits_what_was_given_and_takes_no_more(platform: EventSQL, opened: Open) -> None:
    with opened(max_age=NEVER) as publisher:
        futures = [publisher.publish(order(b"")) for _ in range(10)]
    assert all(future.done() for future in futures)
    assert len(published(platform)) == 10
    with pytest.raises(PublisherClosedError, match="open another"):
        publisher.publish(order(b""))
    publisher.flush()
    publisher.close()
    assert len(published(platform)) == 10


def test_an_event_that_closing_does_not_wait_for_hears_whether_its_outcome_is_known(
    platform: EventSQL, opened: Open, hold: Hold, until: Until, until_blocked: UntilBlocked
) -> None:
    publisher = opened(max_age=0, flushes=1)
    with hold():
        under_way = publisher.publish(order(b"under way"))
        until_blocked()
        waiting = publisher.publish(order(b"waiting"))
        publisher.close(timeout=0.01)
        with pytest.raises(PublisherClosedError, match="not known"):
            under_way.result(0)
        with pytest.raises(PublisherClosedError, match="not published"):
            waiting.result(0)
        publisher.close()
    until(lambda: log(platform))
    assert [value for _, value in log(platform)] == [b"under way"]
    assert isinstance(under_way.exception(), PublisherClosedError)
    publisher.flush(timeout=PATIENCE)


def test_closing_refuses_an_event_that_waits_for_room(opened: Open, hold: Hold, until: Until) -> None:
    publisher = opened(max_pending_events=1)
    with hold(), ThreadPoolExecutor(1) as executor:
        publisher.publish(order(b""))
        turned_away = executor.submit(publisher.publish, order(b""))
        until(lambda: waits_for_room(publisher))
        publisher.close(timeout=0)
        with pytest.raises(PublisherClosedError):
            turned_away.result(PATIENCE)


def test_no_thread_runs_before_the_first_event_or_after_closing(opened: Open) -> None:
    def running() -> int:
        return sum(thread.name == "eventsql-flush" for thread in threading.enumerate())

    # Threads whose start another test has interrupted stay.
    before = running()
    publisher = opened()
    assert running() == before
    publisher.publish(order(b""))
    assert running() == before + 1
    publisher.close()
    assert running() == before


def test_closing_the_platform_commits_and_transfers_what_its_publishers_were_given(
    dsn: str, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventSQL(dsn) as publishing:
        publisher = publishing.buffered_publisher(max_age=NEVER)
        future = publisher.publish(order(b"last"))
    assert future.exception(0) is None
    assert platform.reader.count("orders") == 1
    # The publisher would look up the topic again in a database that is closed.
    monkeypatch.setattr(registry, "CACHE_SECONDS", 0.0)
    with pytest.raises(PublisherClosedError):
        publisher.publish(order(b""))


# Acknowledgements


def waiting_for(acknowledgement: Acknowledgement) -> int:
    """The number of threads that wait for an acknowledgement."""
    frames = sys._current_frames().values()
    return sum(
        frame.f_code is Wake.wait.__code__ and frame.f_locals["self"] is acknowledgement._waited for frame in frames
    )


def test_acknowledgements_are_waited_for_by_any_number_of_threads_and_tell_their_callbacks(
    opened: Open, hold: Hold, until: Until
) -> None:
    publisher = opened(max_age=0)
    done = publisher.publish(order(b""))
    publisher.flush()
    heard: list[Acknowledgement] = []
    with ThreadPoolExecutor(3) as executor:
        with hold():
            pending = publisher.publish(order(b""))
            for acknowledgement in (done, pending, pending):
                acknowledgement.add_done_callback(heard.append)
            assert heard == [done]
            assert (done.done(), pending.done()) == (True, False)
            done.result(0)
            assert done.exception(0) is None
            for wait in (pending.result, pending.exception):
                with pytest.raises(TimeoutError, match="may be committed later"):
                    wait(timeout=0.01)
            waiting = [executor.submit(wait, PATIENCE) for wait in (pending.result, pending.exception, pending.result)]
            until(lambda: waiting_for(pending) == 3)
        assert [each.result(PATIENCE) for each in waiting] == [pending.result(), None, pending.result()]
    publisher.flush()
    assert heard == [done, pending, pending]


def test_an_acknowledgement_that_comes_in_the_moment_when_somebody_begins_to_wait_is_heard(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, own_lock = opened(max_age=NEVER), Acknowledgement._own_lock

    def commit_first(acknowledgement: Acknowledgement) -> threading.Lock:
        publisher.flush()
        return own_lock(acknowledgement)

    monkeypatch.setattr(Acknowledgement, "_own_lock", commit_first)
    heard: list[Acknowledgement] = []
    publisher.publish(order(b"")).add_done_callback(heard.append)
    assert len(heard) == 1
    waiting = start_thread("waiting", publisher.publish(order(b"")).result)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_an_acknowledgement_raises_the_same_error_each_time(opened: Open, sessions: Sessions) -> None:
    with sessions() as session:
        session.execute("ALTER TABLE eventsql.event_buffer ADD CONSTRAINT no_bad CHECK (eql_value <> 'bad')")
    acknowledgement = opened().publish(order(b"bad"))
    error = acknowledgement.exception(PATIENCE)
    assert isinstance(error, DatabaseError)
    for _ in range(2):
        with pytest.raises(DatabaseError) as raised:
            acknowledgement.result()
        assert raised.value is error


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, asyncio.CancelledError])
def test_a_callback_that_raises_keeps_nobody_else_from_hearing(
    opened: Open, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Acknowledgement) -> None:
        raise error

    publisher = opened(max_age=NEVER, flushes=1)
    heard: list[Acknowledgement] = []
    first, second = publisher.publish(order(b"")), publisher.publish(order(b""))
    for callback in (fail, heard.append):
        first.add_done_callback(callback)
        second.add_done_callback(callback)
    publisher.flush()
    first.add_done_callback(fail)
    assert heard == [first, second]
    assert caplog.text.count("a callback of an acknowledgement failed") == 3
    publisher.publish(order(b""))
    publisher.flush(timeout=PATIENCE)


def test_a_callback_may_publish_and_does_not_wait_for_what_its_own_thread_must_do(
    platform: EventSQL, opened: Open, hold: Hold, until_blocked: UntilBlocked
) -> None:
    publisher = opened(max_pending_events=2, flushes=1, max_age=0)
    outcomes: list[object] = []

    def callback(_: Acknowledgement) -> None:
        for call in (lambda: publisher.publish(order(b"answer")), publisher.flush, publisher.close):
            try:
                outcomes.append(call())
            except DatabaseBusyError as error:
                outcomes.append(error)

    with hold():
        publisher.publish(order(b"one")).add_done_callback(callback)
        until_blocked()
        publisher.publish(order(b"two"))
    publisher.flush()
    assert [type(outcome) for outcome in outcomes] == [DatabaseBusyError] * 3
    publisher.publish(order(b"three")).add_done_callback(callback)
    publisher.flush()
    publisher.flush()
    assert isinstance(outcomes[3], Acknowledgement)
    assert published(platform)[2:] == [b"three", b"answer"]


# BufferLimits


@pytest.mark.parametrize(
    "options",
    [
        {"max_events": 0},
        {"max_bytes": 0},
        {"flushes": 0},
        {"max_pending_events": 0},
        {"max_pending_bytes": True},
        {"max_events": 1.5},
        {"max_age": -1},
        {"max_age": float("nan")},
        {"max_age": "soon"},
    ],
    ids=str,
)
def test_bounds_that_no_event_could_meet_are_refused(platform: EventSQL, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        platform.buffered_publisher(**options)


@given(flushes=st.integers(1, 9), topic=st.sampled_from(["orders", "payments"]))
def test_neighbouring_partitions_are_spread_over_all_lanes(flushes: int, topic: str) -> None:
    class Partitions:
        def partition_of(self, publication: Publication, topic: Topic) -> int:
            assert topic.partitions == 9
            return int(publication.partition or 0)

    lanes: Lanes[None] = Lanes(Partitions(), BufferLimits(flushes=flushes), lambda *_: None)  # type: ignore[arg-type]  # no database
    chosen = [lanes.assign(Publication(topic, b"", partition=n), Topic(topic, 9)).lane for n in range(9)]
    assert set(chosen) == set(range(flushes))


class Refusing:
    """Refuses every batch, once it is told to go on."""

    hashes_keys = True

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int:
        return publication.partition or 0

    def publish_batch(self, publications: list[Publication]) -> Placements:
        self.asked.set()
        self.go_on.wait()
        raise TopicNotFoundError("payments")


def test_events_of_a_key_take_one_lane_whatever_their_partition_and_other_keys_take_others() -> None:
    lanes: Lanes[None] = Lanes(Refusing(), BufferLimits(flushes=9), lambda *_: None)

    def lanes_of(key: str) -> set[int]:
        events = [Publication("orders", b"", key=key, partition=number) for number in (None, 1, 2)]
        return {lanes.assign(event, Topic("orders", 9)).lane for event in events}

    chosen = [lanes_of(str(number)) for number in range(100)]
    assert all(len(of_key) == 1 for of_key in chosen)
    assert len(set().union(*chosen)) > 1


def test_all_events_of_a_topic_without_partitions_take_one_lane() -> None:
    lanes: Lanes[None] = Lanes(Refusing(), BufferLimits(flushes=9), lambda *_: None)
    events = [Publication("payments", b"", key=key) for key in map(str, range(20))]
    assert len({lanes.assign(event, Topic("payments")).lane for event in events}) == 1


def test_an_event_that_closing_gave_up_is_settled_once() -> None:
    """Though the batch under way fails later, and is tried again in parts."""
    publisher, settled = Refusing(), list[str]()
    limits = BufferLimits(flushes=1, max_events=2, max_age=NEVER)
    lanes: Lanes[str] = Lanes(publisher, limits, lambda names, _outcome: settled.extend(names))
    for topic in ("orders", "payments"):
        lanes.put(lanes.assign(Publication(topic, b""), Topic(topic)), topic)
    publisher.asked.wait(PATIENCE)
    (thread,) = [lane.thread for lane in lanes._lanes]
    assert thread is not None
    lanes.close(0)
    publisher.go_on.set()
    thread.join(PATIENCE)
    assert settled == ["orders", "payments"]
