"""A consumer is moved to another place in its log, also while it consumes, and the plan shows the result before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy

from eventsql_orchestration import NOT_PARTITIONED, Consumer, ConsumerState, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    PartitionLeasedError,
    PartitionOutOfRangeError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.maintenance import seek as seek_module
from eventsql_orchestration.maintenance.seek import Move, Seeker
from eventsql_orchestration.topics.catalog import lock_registry
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Earliest, Latest, Position, ShiftBy
from tests.forms import stored

if TYPE_CHECKING:
    from tests.fixtures import Sessions, Until, UntilBlocked

EVENTS = 12


def prepare(platform: EventSQL) -> None:
    """A topic of two partitions whose events 1 to 12 alternate, consumed up to the end by two consumers."""
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_consumer(Consumer("orders", "fares", partitioned=True), max_attempts=1)
    platform.registry.register_consumer(Consumer("orders", "whole"), max_attempts=1)
    # One by one: the events of one partition in a publication lie together in a log in blocks.
    for n in range(EVENTS):
        platform.publisher.publish(Publication("orders", b"%d" % n, partition=n % 2))
        platform.transfer.run_once()
    assert [event.id for event in platform.reader.read("orders")] == list(range(1, EVENTS + 1))
    for consumer in ("fares", "whole"):
        assert platform.consumers.consume_once("orders", consumer, nothing) == EVENTS


pytestmark = pytest.mark.prepared.with_args(prepare)


def nothing(_events: Sequence[Event], _connection: Connection) -> None:
    pass


def states(platform: EventSQL, consumer: str) -> list[ConsumerState]:
    return platform.registry.consumer("orders", consumer)


def offsets(platform: EventSQL, consumer: str) -> list[int]:
    return [state.last_event_id for state in states(platform, consumer)]


def consumed(platform: EventSQL, consumer: str) -> list[int]:
    """The events that a consumer is handed until nothing is left, in order."""
    seen: list[int] = []
    while platform.consumers.consume_once(
        "orders", consumer, lambda events, _: seen.extend(event.id for event in events), max_events=3
    ):
        pass
    return seen


def claim(platform: EventSQL, consumer: str = "whole", partition: int = NOT_PARTITIONED, owner: str = "run 7") -> Claim:
    claimed = platform.claims.claim("orders", consumer, partition, owner=owner, max_events=3)
    assert isinstance(claimed, Claim), claimed
    return claimed


def move(partition: int, offset: int, target: int, *, again: int = 0, skipped: int = 0, clamped: bool = False) -> Move:
    consumer = "whole" if partition == NOT_PARTITIONED else "fares"
    return Move("orders", consumer, partition, offset, target, again, skipped, clamped, None)


# Plans


def test_a_plan_says_what_is_consumed_again_and_changes_nothing(platform: EventSQL) -> None:
    before = states(platform, "fares")
    assert platform.seeker.plan("orders", "fares", AtOffset(5)) == [
        move(0, 11, 4, again=4),
        move(1, 12, 4, again=4),
    ]
    assert states(platform, "fares") == before


def test_a_plan_says_what_is_skipped(platform: EventSQL) -> None:
    platform.seeker.execute("orders", "fares", Earliest())
    assert platform.seeker.plan("orders", "fares", AtOffset(5)) == [
        move(0, 0, 4, skipped=2),
        move(1, 0, 4, skipped=2),
    ]
    assert platform.seeker.plan("orders", "fares", Latest(), partition=1) == [move(1, 0, 12, skipped=6)]


def test_a_plan_says_where_the_log_ends_before_the_place(platform: EventSQL) -> None:
    assert platform.seeker.plan("orders", "whole", AtOffset(50)) == [move(NOT_PARTITIONED, 12, 12, clamped=True)]
    assert platform.seeker.plan("orders", "whole", ShiftBy(-50)) == [
        move(NOT_PARTITIONED, 12, 0, again=EVENTS, clamped=True)
    ]


def test_a_plan_names_who_leases_a_partition(platform: EventSQL) -> None:
    platform.seeker.execute("orders", "fares", Earliest())
    claim(platform, "fares", 1)
    assert [each.owner for each in platform.seeker.plan("orders", "fares", Latest())] == [None, "run 7"]


@pytest.mark.parametrize("position", [Earliest(), Latest(), AtOffset(3), AtOffset(50), ShiftBy(-2), ShiftBy(1)])
def test_a_seek_does_what_its_plan_says(platform: EventSQL, position: Position) -> None:
    platform.seeker.execute("orders", "fares", AtOffset(7))
    plan = platform.seeker.plan("orders", "fares", position)
    assert platform.seeker.execute("orders", "fares", position) == plan
    assert offsets(platform, "fares") == [each.target for each in plan]
    after = {each.partition: each.target for each in plan}
    left = [event.id for event in platform.reader.read("orders") if event.id > after[event.partition]]
    assert sorted(consumed(platform, "fares")) == left


# Moves


def test_a_seek_does_not_fail_because_no_thread_can_wake_others(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    plan = platform.seeker.plan("orders", "whole", Earliest())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        assert platform.seeker.execute("orders", "whole", Earliest()) == plan
        changed = platform.repartitioner.repartition("orders", 3)
    assert changed is not None
    assert changed.partitions == 3


def test_a_seek_that_cannot_count_after_its_commit_says_where_the_consumer_is(platform: EventSQL) -> None:
    shard = platform.shards[0]
    seeker = Seeker(shard.database, shard.registry, announce=lambda _: shard.database.close())
    (moved,) = seeker.execute("orders", "whole", AtOffset(5))
    assert (moved.offset, moved.target, moved.again, moved.skipped) == (12, 4, None, None)
    shard.database.open()
    assert offsets(platform, "whole") == [4]


def test_each_seek_back_has_its_events_consumed_once_again(platform: EventSQL) -> None:
    for first in (4, 12, 1, 7):
        platform.seeker.execute("orders", "whole", AtOffset(first))
        assert consumed(platform, "whole") == list(range(first, EVENTS + 1))
    for first in (10, 2, 9):
        platform.seeker.execute("orders", "whole", AtOffset(first))
    assert consumed(platform, "whole") == [9, 10, 11, 12]
    (state,) = states(platform, "whole")
    assert state.consumed_events == EVENTS + 9 + 1 + 12 + 6 + 4


def test_a_shift_moves_each_partition_over_events_of_its_own(platform: EventSQL) -> None:
    platform.seeker.execute("orders", "fares", ShiftBy(-2))
    assert sorted(consumed(platform, "fares")) == [9, 10, 11, 12]
    platform.seeker.execute("orders", "fares", Earliest())
    platform.seeker.execute("orders", "fares", ShiftBy(5))
    assert sorted(consumed(platform, "fares")) == [11, 12]


def test_a_time_is_where_its_event_entered_the_log(platform: EventSQL) -> None:
    platform.publisher.publish(Publication("orders", b"", partition=0))
    platform.transfer.run_once()
    consumed(platform, "whole")
    last = platform.reader.read("orders")[-1]
    platform.seeker.execute("orders", "whole", AtTime(last.created_at))
    assert consumed(platform, "whole") == [last.id]


def test_one_partition_moves_alone(platform: EventSQL, sessions: Sessions) -> None:
    # The other is being consumed, which does not matter.
    sessions().execute("SELECT FROM eventsql.consumer WHERE eql_name = 'fares' AND eql_partition = 0 FOR UPDATE")
    platform.seeker.execute("orders", "fares", Earliest(), partition=1)
    assert offsets(platform, "fares") == [11, 0]


def test_other_consumers_stay_where_they_are(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("payments"))
    platform.registry.register_consumer(Consumer("payments", "whole"), start="latest")
    before = platform.registry.consumers()
    platform.seeker.execute("orders", "whole", Earliest())
    changed = [new for old, new in zip(before, platform.registry.consumers(), strict=True) if old != new]
    assert [(state.topic, state.name) for state in changed] == [("orders", "whole")]


def test_a_seek_leaves_nothing_of_a_failing_event(platform: EventSQL) -> None:
    def fail(events: Sequence[Event], connection: Connection) -> None:
        raise ValueError("no")

    platform.seeker.execute("orders", "whole", AtOffset(5))
    platform.consumers.consume_once("orders", "whole", fail)
    (state,) = states(platform, "whole")
    assert (state.failed_event_id, state.spent) == (5, True)
    platform.seeker.execute("orders", "whole", AtOffset(5))
    (state,) = states(platform, "whole")
    assert (state.failed_event_id, state.attempts, state.failure, state.retry_at) == (None, 0, None, None)
    assert consumed(platform, "whole") == list(range(5, EVENTS + 1))


def test_a_running_consumption_goes_on_from_there(platform: EventSQL, until: Until) -> None:
    seen: list[int] = []
    with platform.consumers.start("orders", "whole", lambda event, _: seen.append(event.id), polling_delay=0.01):
        platform.seeker.execute("orders", "whole", AtOffset(11))
        until(lambda: seen == [11, 12])
        platform.seeker.execute("orders", "whole", AtOffset(10))
        until(lambda: seen == [11, 12, 10, 11, 12])


# Leases


def test_a_leased_partition_is_not_moved_and_neither_are_the_others(platform: EventSQL) -> None:
    platform.seeker.execute("orders", "fares", AtOffset(7))
    claimed = claim(platform, "fares", 1)
    before = states(platform, "fares")
    with pytest.raises(PartitionLeasedError, match=r"partition 1 did not move: run 7 leases it"):
        platform.seeker.execute("orders", "fares", Earliest())
    assert states(platform, "fares") == before
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, claimed)


def test_a_forced_seek_fences_the_owner_off(platform: EventSQL) -> None:
    platform.seeker.execute("orders", "whole", Earliest())
    claimed = claim(platform)
    (planned,) = platform.seeker.execute("orders", "whole", Latest(), force=True)
    assert planned.owner == "run 7"
    with platform.database.transaction() as connection, pytest.raises(ClaimLostError):
        platform.claims.commit(connection, claimed)
    with pytest.raises(ClaimLostError):
        platform.claims.renew(claimed)
    with pytest.raises(ClaimLostError):
        platform.claims.adopt(claimed.id, owner="run 7, once more")
    assert platform.claims.get(claimed.id)[1] == "released"
    (state,) = states(platform, "whole")
    assert (state.last_event_id, state.lease_owner, state.lease_expires_at) == (12, None, None)
    assert platform.claims.live("orders", "whole") is None


@pytest.mark.parametrize("back", [False, True])
def test_an_owner_whose_lease_has_ended_cannot_go_on_after_a_seek(platform: EventSQL, back: bool) -> None:
    platform.seeker.execute("orders", "whole", Earliest())
    claimed = claim(platform)
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 s'")
    platform.seeker.execute("orders", "whole", Latest())
    if back:
        # The offset is where the claim began: the epoch alone tells the two apart.
        platform.seeker.execute("orders", "whole", Earliest())
    with platform.database.transaction() as connection, pytest.raises(ClaimLostError):
        platform.claims.commit(connection, claimed)
    with pytest.raises(ClaimLostError):
        platform.claims.adopt(claimed.id, owner="run 7, once more")


def test_after_a_seek_the_partition_can_be_claimed_from_there(platform: EventSQL) -> None:
    platform.seeker.execute("orders", "whole", Earliest())
    first = claim(platform)
    platform.seeker.execute("orders", "whole", AtOffset(10), force=True)
    second = claim(platform, owner="run 8")
    assert (second.range.after, second.range.upto) == (9, 12)
    assert second.epoch > first.epoch
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, second)
    assert offsets(platform, "whole") == [12]


# At once


def test_a_seek_waits_for_the_batch_under_way_and_moves_from_where_that_ends(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    platform.seeker.execute("orders", "whole", Earliest())
    batch = sessions()
    batch.execute("UPDATE eventsql.consumer SET eql_last_event_id = 8 WHERE eql_name = 'whole'")
    with ThreadPoolExecutor(1) as executor:
        seeking = executor.submit(platform.seeker.execute, "orders", "whole", ShiftBy(2))
        until_blocked()
        batch.commit()
        assert seeking.result() == [move(NOT_PARTITIONED, 8, 10, skipped=2)]
    assert offsets(platform, "whole") == [10]


@pytest.mark.parametrize("force", [False, True])
def test_a_batch_that_takes_too_long_is_left_alone(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    batch = sessions()
    batch.execute("SELECT FROM eventsql.consumer WHERE eql_name = 'fares' AND eql_partition = 1 FOR UPDATE")
    with monkeypatch.context() as patched:
        patched.setattr(seek_module, "LOCK_SECONDS", 0.05)
        with pytest.raises(DatabaseBusyError, match=r"'fares' of topic 'orders' did not move"):
            platform.seeker.execute("orders", "fares", Earliest(), force=force)
    assert offsets(platform, "fares") == [11, 12]
    batch.rollback()
    platform.seeker.execute("orders", "fares", Earliest())
    assert offsets(platform, "fares") == [0, 0]


def test_the_limit_holds_for_the_wait_alone(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    moves = Seeker._moves

    def look(seeker: Seeker, connection: sqlalchemy.Connection, *arguments: Any) -> list[Move]:
        found.append(connection.exec_driver_sql("SHOW statement_timeout").scalar())
        return moves(seeker, connection, *arguments)

    monkeypatch.setattr(Seeker, "_moves", look)
    platform.seeker.execute("orders", "whole", Earliest())
    assert found == ["0"]
    with platform.database.connection() as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_a_seek_and_a_change_of_the_registry_follow_one_another(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    changing = sessions()
    lock_registry(changing)
    with ThreadPoolExecutor(1) as executor:
        seeking = executor.submit(platform.seeker.execute, "orders", "whole", Earliest())
        until_blocked()
        # Retention, for example, drops what the seek would have gone back to.
        changing.execute(f"DELETE FROM eventsql.{stored('orders')} WHERE eql_id <= 6")
        changing.commit()
        assert seeking.result() == [move(NOT_PARTITIONED, 12, 6, again=6)]


def test_a_seek_and_a_pause_wait_for_one_another(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    batch = sessions()
    batch.execute("SELECT FROM eventsql.consumer WHERE eql_name = 'fares' AND eql_partition = 1 FOR UPDATE")
    with ThreadPoolExecutor(2) as executor:
        seeking = executor.submit(platform.seeker.execute, "orders", "fares", Earliest())
        until_blocked()
        pausing = executor.submit(platform.registry.pause, "orders", "fares")
        until_blocked(2)
        batch.rollback()
        seeking.result()
        pausing.result()
    assert [(state.last_event_id, state.paused) for state in states(platform, "fares")] == [(0, True), (0, True)]


def test_a_consumer_that_is_deleted_meanwhile_is_not_moved(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    deleting = sessions()
    deleting.execute("DELETE FROM eventsql.consumer WHERE eql_name = 'fares' AND eql_partition = 1")
    with ThreadPoolExecutor(1) as executor:
        seeking = executor.submit(platform.seeker.execute, "orders", "fares", Earliest())
        until_blocked()
        deleting.commit()
        with pytest.raises(ConsumerNotFoundError, match="deleted meanwhile"):
            seeking.result()
    assert offsets(platform, "fares") == [11]


# What cannot be


def test_a_missing_topic_consumer_or_partition_is_named(platform: EventSQL) -> None:
    for act in (platform.seeker.plan, platform.seeker.execute):
        with pytest.raises(TopicNotFoundError, match="'nowhere' does not exist"):
            act("nowhere", "whole", Earliest())
        with pytest.raises(ConsumerNotFoundError, match="`eventsql consumer create orders nobody`"):
            act("orders", "nobody", Earliest())
        with pytest.raises(PartitionOutOfRangeError, match="partitions 0 to 1"):
            act("orders", "fares", Earliest(), partition=2)
        with pytest.raises(PartitionOutOfRangeError, match="not partitioned"):
            act("orders", "whole", Earliest(), partition=0)
        with pytest.raises(ValidationError):
            act("orders", "whole", 7)  # type: ignore[arg-type]  # refused
    assert offsets(platform, "fares") + offsets(platform, "whole") == [11, 12, 12]
