"""A drop of a segment that is interrupted, or that a writer comes into, loses no event that has not been read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.cli.doctor_consumers import leftover_findings
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.database.tables import DROPPED
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseError
from eventsql_orchestration.maintenance import retention
from eventsql_orchestration.model import Retention
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.storage import segment_drops, segments
from eventsql_orchestration.storage.segment_drops import SegmentDrops
from eventsql_orchestration.topics.leftovers import Leftovers
from tests.forms import in_blocks, stored
from tests.maintenance.test_retention import age, consume, fill, first, last_before, retained
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.fixtures import Sessions, UntilBlocked

SCHEMA = "eventsql"

Late: TypeAlias = Callable[[Callable[[], object]], None]

pytestmark = pytest.mark.usefixtures("small_segments")


def test_a_drop_that_is_cut_off_is_finished_by_the_next_run(
    platform: EventSQL, sessions: Sessions, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained(platform, events=27)
    last = last_before(platform, 20)
    reading = sessions()
    reading.execute("SELECT count(*) FROM eventsql.orders_event")

    def is_cut_off() -> bool:
        with pytest.raises(DatabaseBusyError, match="next run"):
            platform.retention.run_once()
        return (segments.segments(session, SCHEMA, "orders") or [])[0].detaching

    with monkeypatch.context() as patched:
        patched.setattr(retention, "WAIT_SECONDS", 0.2)
        # On a busy machine, a run may end before it has begun to detach.
        wait_until(is_cut_off, "a run is cut off while it detaches")
    reading.commit()
    platform.retention.run_once()
    assert first(platform) == last + 1
    tables = session.execute("SELECT count(*) FROM pg_class WHERE relname LIKE 'orders%segment%' AND relkind = 'r'")
    assert tables.fetchone() == (len(segments.segments(session, SCHEMA, "orders") or ()),)


def make_anew(platform: EventSQL) -> None:
    """Delete `orders`, and make a topic of the same name that keeps everything, with 5 events."""
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.register_topic(Topic("orders", 2))
    fill(platform, 5)


def test_a_topic_that_is_made_anew_after_its_former_segments_were_found_due_keeps_its_events(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained(platform, events=27)
    found_due = retention.Retainer._due

    def late(*arguments: Any, **named: Any) -> Any:
        due = found_due(*arguments, **named)
        assert due
        make_anew(platform)
        return due

    monkeypatch.setattr(retention.Retainer, "_due", late)
    platform.retention.run_once()
    assert len(platform.reader.read("orders")) == 5


def test_nobody_makes_a_topic_anew_while_an_earlier_drop_is_finished(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained(platform, events=27)
    session.execute(f"COMMENT ON TABLE eventsql.{detach_first(session)} IS '{DROPPED}'")
    found_detached, free = segment_drops._detached, list[bool]()

    def late(*arguments: Any) -> Any:
        detached = found_detached(*arguments)
        (is_free,) = session.execute("SELECT pg_try_advisory_xact_lock(%s)", [REGISTRY_LOCK]).fetchone() or ()
        free.append(is_free)
        if is_free:
            make_anew(platform)
        return detached

    with monkeypatch.context() as patch:
        patch.setattr(segment_drops, "_detached", late)
        platform.retention.run_once()
    if not any(free):
        make_anew(platform)
    assert free
    assert len(platform.reader.read("orders")) == 5


def test_the_plan_of_a_run_leaves_a_drop_that_an_earlier_run_has_begun(platform: EventSQL, session: Connection) -> None:
    retained(platform, events=27)
    detached = detach_first(session)
    session.execute(f"COMMENT ON TABLE eventsql.{detached} IS '{DROPPED}'")
    platform.retention.run_once(execute=False)
    assert session.execute("SELECT to_regclass(%s)", [f"eventsql.{detached}"]).fetchone() != (None,)
    platform.retention.run_once()
    assert session.execute("SELECT to_regclass(%s)", [f"eventsql.{detached}"]).fetchone() == (None,)


def test_a_run_for_one_topic_leaves_the_drop_that_a_run_for_another_topic_has_begun(
    platform: EventSQL, session: Connection
) -> None:
    retained(platform, events=27)
    platform.registry.register_topic(Topic("payments", retention=Retention(events=27)))
    detached = detach_first(session)
    session.execute(f"COMMENT ON TABLE eventsql.{detached} IS '{DROPPED}'")
    platform.retention.run_once(["payments"])
    assert session.execute("SELECT to_regclass(%s)", [f"eventsql.{detached}"]).fetchone() != (None,)


def test_a_segment_that_is_detached_and_not_dropped_yet_is_dropped_by_the_next_run(
    platform: EventSQL, session: Connection
) -> None:
    retained(platform, events=27)
    ours, theirs = detach_first(session), segments.segment_name("orders", 10)
    session.execute(f"COMMENT ON TABLE eventsql.{ours} IS '{DROPPED}'")
    session.execute(f"ALTER TABLE eventsql.{stored('orders')} DETACH PARTITION eventsql.{theirs} CONCURRENTLY")
    platform.retention.run_once()
    left = session.execute(
        "SELECT to_regclass(%s) IS NULL, to_regclass(%s) IS NULL", [f"eventsql.{ours}", f"eventsql.{theirs}"]
    )
    assert left.fetchone() == (True, False), "somebody detached the second one to keep it"


def detach_first(connection: Connection) -> str:
    """Detach the first segment of `orders`, as an operator who wants to keep it does. Gives its name."""
    segment = segments.segment_name("orders", 0)
    connection.execute(f"ALTER TABLE eventsql.{stored('orders')} DETACH PARTITION eventsql.{segment} CONCURRENTLY")
    return segment


def left_over(platform: EventSQL, connection: Connection) -> str:
    """Have a segment that is to be dropped, of a topic that another program deleted. Gives its name."""
    platform.registry.register_topic(Topic("orders", 2))
    segment = detach_first(connection)
    platform.registry.unregister_topic("orders", force=True)
    connection.execute(f"COMMENT ON TABLE eventsql.{segment} IS '{DROPPED}'")
    return segment


@pytest.fixture
def kept_aside(platform: EventSQL, session: Connection) -> Callable[[], bool]:
    """Makes a topic whose first segment is due; tells whether the segment's table is still there."""
    retained(platform, events=27)
    table = f"eventsql.{segments.segment_name('orders', 0)}"
    return lambda: session.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone() == (True,)


def test_a_due_segment_that_an_operator_is_detaching_stays(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, kept_aside: Callable[[], bool]
) -> None:
    reading, operator = sessions(), sessions()
    operator.autocommit = True
    reading.execute("SELECT count(*) FROM eventsql.orders_event")
    with ThreadPoolExecutor(1) as executor:
        detaching = executor.submit(detach_first, operator)
        until_blocked()
        with pytest.raises(DatabaseError):
            platform.retention.run_once()
        reading.commit()
        detaching.result()
    platform.retention.run_once()
    assert kept_aside()


def test_a_segment_that_a_run_has_marked_before_it_died_may_be_detached_and_kept(
    platform: EventSQL, session: Connection, kept_aside: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for step in ("_detach", "_unmark"):
            patch.setattr(SegmentDrops, step, die)
        with pytest.raises(KeyboardInterrupt):
            platform.retention.run_once()
    platform.registry.set_retention("orders", Retention(events=1_000))
    platform.retention.run_once()
    detach_first(session)
    platform.retention.run_once()
    assert kept_aside()


def test_a_segment_whose_detach_an_earlier_version_began_is_dropped_only_if_it_was_consumed(
    platform: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    """An earlier version noted nothing that would tell whether a segment was written to since."""
    retained(platform, consumer="all", events=27)
    reading, killed = sessions(), sessions()
    killed.autocommit = True
    reading.execute("SELECT count(*) FROM eventsql.orders_event")
    session.execute(f"COMMENT ON TABLE eventsql.{segments.segment_name('orders', 0)} IS '{DROPPED}'")
    with ThreadPoolExecutor(1) as executor:
        detaching = executor.submit(detach_first, killed)
        until_blocked()
        session.execute("SELECT pg_terminate_backend(%s, 60000)", [killed.info.backend_pid])
        assert detaching.exception() is not None
    reading.commit()
    (kept,) = platform.retention.run_once()
    assert (kept.segments, consume(platform, "all")) == (0, 50)
    assert platform.retention.run_once()[0].segments == 2


def test_a_topic_with_a_segment_that_is_kept_aside_can_be_deleted(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    fill(platform, 50)
    kept = detach_first(session)
    held = session.execute(f"SELECT count(*) FROM eventsql.{kept}").fetchone()
    platform.registry.unregister_topic("orders", force=True)
    # The first segment of a topic of this name would have the same name.
    with pytest.raises(DatabaseError):
        platform.registry.register_topic(Topic("orders", 2))
    assert session.execute(f"SELECT count(*) FROM eventsql.{kept}").fetchone() == held
    assert held != (0,)


@pytest.fixture
def written_to_late(platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch) -> Late:
    """Makes a consumed segment that is due, to which a writer comes before retention detaches it.

    A sequence that was set back leads the writer there. The given function is called after the write.
    """

    def prepare(then: Callable[[], object]) -> None:
        platform.registry.register_topic(Topic("orders", retention=Retention(seconds=3600)))
        platform.registry.register_consumer(Consumer("orders", "all"))
        fill(platform, 5)
        assert consume(platform, "all") == 5
        age(session, 7200, upto=5)
        detach = SegmentDrops._detach

        def write(*given: Any) -> None:
            monkeypatch.setattr(SegmentDrops, "_detach", detach)
            session.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 5)")
            platform.publisher.publish_all(Publication("orders", b"late") for _ in range(3))
            platform.transfer.run_once()
            then()
            detach(*given)

        monkeypatch.setattr(SegmentDrops, "_detach", write)

    return prepare


def test_a_closed_segment_into_which_a_sequence_that_was_set_back_led_a_writer_is_kept(
    platform: EventSQL, session: Connection, written_to_late: Late
) -> None:
    written_to_late(lambda: None)
    (kept,) = platform.retention.run_once()
    assert kept.segments == 0
    assert [event.value for event in platform.reader.read("orders", after=5)] == [b"late"] * 3
    assert consume(platform, "all") == 3
    age(session, 7200, upto=8)
    (dropped,) = platform.retention.run_once()
    assert (dropped.segments, platform.reader.read("orders")) == (1, [])
    fill(platform, 5)
    assert consume(platform, "all") == 5


def test_an_empty_segment_into_which_a_sequence_that_was_set_back_led_a_writer_is_kept(
    platform: EventSQL, session: Connection, written_to_late: Late
) -> None:
    written_to_late(lambda: None)
    session.execute(f"DELETE FROM eventsql.{stored('orders')}")
    # The log goes on in the next segment.
    closed = (segments.segments(session, SCHEMA, "orders") or [])[0]
    segments.roll(session, SCHEMA, "orders", closed)
    (kept,) = platform.retention.run_once()
    assert kept.segments == 0
    assert [event.value for event in platform.reader.read("orders")] == [b"late"] * 3


def test_a_closed_segment_that_was_written_to_is_kept_also_if_its_drop_was_cut_off(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, written_to_late: Late
) -> None:
    reading = sessions()
    written_to_late(lambda: reading.execute("SELECT count(*) FROM eventsql.orders_event"))
    with monkeypatch.context() as patched, pytest.raises(DatabaseBusyError):
        patched.setattr(retention, "WAIT_SECONDS", 0.2)
        platform.retention.run_once()
    reading.commit()
    platform.retention.run_once()
    assert consume(platform, "all") == 3


@pytest.mark.parametrize("kept", [True, False], ids=["retained", "without a retention"])
def test_a_run_that_dies_before_the_second_look_loses_no_late_event(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, written_to_late: Late, kept: bool
) -> None:
    newest = SegmentDrops.newest

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    written_to_late(lambda: monkeypatch.setattr(SegmentDrops, "newest", die))
    with pytest.raises(KeyboardInterrupt):
        platform.retention.run_once()
    monkeypatch.setattr(SegmentDrops, "newest", newest)
    if not kept:
        platform.registry.set_retention("orders", None)
    assert Leftovers(platform.shards[0].database).begun_drops() == [segments.segment_name("orders", 0)]
    platform.retention.run_once()
    assert Leftovers(platform.shards[0].database).begun_drops() == []
    assert consume(platform, "all") == 3


def test_a_segment_that_is_attached_again_waits_for_the_deletion_of_its_topic_without_a_lock(
    platform: EventSQL,
    sessions: Sessions,
    until_blocked: UntilBlocked,
    monkeypatch: pytest.MonkeyPatch,
    written_to_late: Late,
) -> None:
    segment, deleting, newest = segments.segment_name("orders", 0), sessions(), SegmentDrops.newest

    def hold_log(*given: Any) -> Any:
        deleting.execute(f"LOCK TABLE ONLY eventsql.{stored('orders')} IN ACCESS EXCLUSIVE MODE")
        return newest(*given)

    written_to_late(lambda: monkeypatch.setattr(SegmentDrops, "newest", hold_log))
    with ThreadPoolExecutor(1) as executor:
        attached = executor.submit(platform.retention.run_once)
        until_blocked()
        deleting.execute(f"LOCK TABLE eventsql.{segment} IN ACCESS EXCLUSIVE MODE NOWAIT")
        deleting.commit()
        attached.result()
    assert consume(platform, "all") == 3


def test_a_topic_is_deleted_with_the_segments_that_retention_has_taken_out(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    segment = detach_first(session)
    session.execute(f"COMMENT ON TABLE eventsql.{segment} IS '{DROPPED}'")
    platform.registry.unregister_topic("orders", force=True)
    assert session.execute(f"SELECT to_regclass('eventsql.{segment}')").fetchone() == (None,)


def test_a_topic_that_is_made_anew_while_leftovers_are_cleared_keeps_its_segments(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_over(platform, session)
    clear = Leftovers.clear

    def make_anew(self: Leftovers) -> int:
        platform.registry.register_topic(Topic("orders", 2))
        fill(platform, 5)
        return clear(self)

    monkeypatch.setattr(Leftovers, "clear", make_anew)
    platform.retention.run_once()
    assert platform.reader.count("orders") == 5


def test_the_segment_of_a_deleted_topic_is_dropped_and_no_plan_drops_it(
    platform: EventSQL, session: Connection
) -> None:
    former = left_over(platform, session)
    session.execute("INSERT INTO eventsql.redriven_dead_letter (eql_topic, eql_letter_id) VALUES ('gone_dlt', 1)")
    platform.retention.run_once(execute=False)
    assert session.execute("SELECT to_regclass(%s)", [f"eventsql.{former}"]).fetchone() != (None,)
    assert len(Leftovers(platform.shards[0].database).find()) == 1
    platform.retention.run_once()
    assert session.execute("SELECT to_regclass(%s)", [f"eventsql.{former}"]).fetchone() == (None,)
    assert Leftovers(platform.shards[0].database).find() == []


def test_nobody_makes_a_topic_anew_while_its_former_segments_are_dropped(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_over(platform, session)
    found_detached, free = segment_drops._detached, list[bool]()

    def late(*arguments: Any) -> Any:
        (is_free,) = session.execute("SELECT pg_try_advisory_xact_lock(%s)", [REGISTRY_LOCK]).fetchone() or ()
        free.append(is_free)
        return found_detached(*arguments)

    monkeypatch.setattr(segment_drops, "_detached", late)
    platform.retention.run_once()
    assert free == [False]


def test_a_leftover_that_cannot_be_dropped_keeps_no_other_one(platform: EventSQL, session: Connection) -> None:
    former = left_over(platform, session)
    session.execute(f"CREATE VIEW eventsql.mine AS SELECT eql_id FROM eventsql.{former}")
    platform.registry.register_topic(Topic("others"))
    platform.eraser.execute("others", ["ann"])
    session.execute("UPDATE eventsql.erasure SET eql_started_at = now() - interval '3651 days'")
    platform.retention.run_once()
    assert platform.eraser.records() == []


def test_a_segment_that_cannot_be_attached_again_is_told_and_attached_by_the_next_run(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, written_to_late: Late
) -> None:
    segment, reading, newest = segments.segment_name("orders", 0), sessions(), SegmentDrops.newest
    monkeypatch.setattr(segment_drops, "LOCK_SECONDS", 0.1)

    def read_directly(*given: Any) -> Any:
        reading.execute(f"SELECT count(*) FROM eventsql.{segment}")
        return newest(*given)

    written_to_late(lambda: monkeypatch.setattr(SegmentDrops, "newest", read_directly))
    with pytest.raises(DatabaseBusyError):
        platform.retention.run_once()
    (finding,) = leftover_findings(platform.shards[0])
    assert segment in finding.message
    reading.commit()
    monkeypatch.setattr(SegmentDrops, "newest", newest)
    platform.retention.run_once()
    assert list(leftover_findings(platform.shards[0])) == []
    assert consume(platform, "all") == 3


def test_a_segment_whose_events_are_not_committed_yet_is_kept(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    """Ids of an open transaction are given out already; its events are there when it ends."""
    platform.registry.register_topic(Topic("orders", retention=Retention(seconds=3600)))
    platform.registry.register_consumer(Consumer("orders", "all"))
    fill(platform, 5)
    writing = sessions()
    writing.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
    writing.execute(
        "INSERT INTO eventsql.orders_block "
        "(eql_id, eql_partition, eql_events, eql_buffered_at, eql_created_at, eql_values) "
        "SELECT max(id), -1, 20, now(), now(), array_agg('x'::bytea) "
        "FROM (SELECT nextval('eventsql.orders_block_eql_id_seq') AS id FROM generate_series(1, 20)) drawn"
        if in_blocks()
        else "INSERT INTO eventsql.orders_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
        "SELECT -1, 'x', now(), '{}' FROM generate_series(1, 20)"
    )
    with ThreadPoolExecutor() as executor:
        retaining = executor.submit(platform.retention.run_once)
        until_blocked()
        writing.commit()
        assert retaining.result()[0].segments == 0
    assert consume(platform, "all") == 25


def fill_disk(session: Connection, command: str) -> None:
    """Let commands of a kind find the server's disk full."""
    session.execute(
        "CREATE FUNCTION public.find_disk_full() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN RAISE disk_full; END'"
    )
    session.execute(
        f"CREATE EVENT TRIGGER full_disk ON ddl_command_start WHEN TAG IN ('{command}') "
        "EXECUTE FUNCTION public.find_disk_full()"
    )


@pytest.mark.parametrize("command", ["CREATE TABLE", "COMMENT", "ALTER TABLE"])
def test_retention_makes_room_on_a_full_disk(platform: EventSQL, session: Connection, command: str) -> None:
    retained(platform, events=10)
    last = last_before(platform, 40)
    fill_disk(session, command)
    (dropped,) = platform.retention.run_once()
    assert (dropped.segments, dropped.upto) == (4, last)
    assert first(platform) == last + 1


def test_a_segment_that_was_written_to_late_is_kept_on_a_full_disk_too(
    platform: EventSQL, session: Connection, written_to_late: Late
) -> None:
    written_to_late(lambda: fill_disk(session, "ALTER TABLE"))
    (kept,) = platform.retention.run_once()
    assert (kept.segments, Leftovers(platform.shards[0].database).begun_drops()) == (0, [])
    session.execute("DROP EVENT TRIGGER full_disk")
    platform.retention.run_once()
    assert consume(platform, "all") == 3


def test_a_segment_that_is_read_too_long_on_a_full_disk_is_kept_without_a_mark(
    platform: EventSQL, session: Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_drops, "LOCK_SECONDS", 0.1)
    retained(platform, events=10)
    fill_disk(session, "ALTER TABLE")
    reading = sessions()
    reading.execute("SELECT count(*) FROM eventsql.orders_event")
    with pytest.raises(DatabaseBusyError):
        platform.retention.run_once()
    assert Leftovers(platform.shards[0].database).begun_drops() == []


def test_a_drop_on_a_full_disk_waits_for_no_other_segment(
    platform: EventSQL, session: Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_drops, "LOCK_SECONDS", 0.1)
    retained(platform, events=10)
    fill_disk(session, "ALTER TABLE")
    sessions().execute(f"SELECT count(*) FROM eventsql.{segments.segment_name('orders', 40)}")
    (dropped,) = platform.retention.run_once()
    assert dropped.segments == 4


def test_nobody_waits_on_a_full_disk_until_the_events_of_a_segment_are_counted(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained(platform, events=10)
    fill_disk(session, "ALTER TABLE")
    newest, waiting = SegmentDrops.newest, list[bool]()

    def look(*given: Any) -> Any:
        held = session.execute(
            "SELECT FROM pg_locks WHERE relation = %s::regclass AND mode = 'AccessExclusiveLock'",
            [f"eventsql.{stored('orders')}"],
        )
        waiting.append(held.fetchone() is not None)
        return newest(*given)

    monkeypatch.setattr(SegmentDrops, "newest", look)
    platform.retention.run_once()
    assert waiting
    assert not any(waiting)


def test_a_deadlock_ends_the_drop_on_a_full_disk_and_not_its_reader(
    platform: EventSQL,
    session: Connection,
    sessions: Sessions,
    until_blocked: UntilBlocked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retained(platform, events=10)
    fill_disk(session, "ALTER TABLE")
    reading, alter = sessions(), SegmentDrops._alter
    reading.execute("SET deadlock_timeout = '1h'")
    reading.execute(f"SELECT count(*) FROM eventsql.{segments.segment_name('orders', 0)}")
    with ThreadPoolExecutor(1) as executor:
        read = list[Any]()

        def read_log(*given: Any, **named: Any) -> None:
            if "DROP TABLE" in given[3]:
                read.append(executor.submit(reading.execute, "SELECT count(*) FROM eventsql.orders_event"))
                until_blocked()
            alter(*given, **named)

        monkeypatch.setattr(SegmentDrops, "_alter", read_log)
        with pytest.raises(DatabaseBusyError, match="next run goes on"):
            platform.retention.run_once()
        assert read[0].result().fetchone() == (50,)


def test_a_topic_goes_on_while_the_disk_has_no_room_for_another_segment(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1_000)
    retained(platform, 2, seconds=3600)
    fill_disk(session, "CREATE TABLE")
    for _ in range(4):
        age(session, 3600 / retention.ROLL_SHARE + 1, upto=platform.reader.end("orders"))
        platform.retention.run_once()
        platform.publisher.publish(Publication("orders", b"more"))
        platform.transfer.run_once()
    assert len(platform.reader.read("orders")) == 9


def test_old_events_make_room_on_a_full_disk_as_long_as_the_log_has_a_segment_after_them(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1_000)
    retained(platform, 2, seconds=3600)
    fill_disk(session, "CREATE TABLE")
    left = []
    for _ in range(3):
        age(session, 3601, upto=platform.reader.end("orders"))
        platform.retention.run_once()
        left.append(len(platform.reader.read("orders")))
        platform.publisher.publish(Publication("orders", b"more"))
        platform.transfer.run_once()
    assert left == [0, 0, 1], "each run drops all old events, until no segment is left for new ones"
    assert len(platform.reader.read("orders")) == 2


def test_a_topic_that_keeps_everything_fails_no_retention_on_a_full_disk(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_topic(Topic("others"))
    fill(platform, 10, topic="others")
    retained(platform, events=10)
    fill_disk(session, "CREATE TABLE")
    (dropped,) = platform.retention.run_once()
    assert (dropped.topic, dropped.segments) == ("orders", 4)
