"""Leased consumers work outside of transactions for as long as it takes, and commit offset and effects together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consumer import ConsumerState, EventFilter
from eventsql_orchestration.consuming import claims, failures, leases, worker_pool
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.claim_processing import finish_claim
from eventsql_orchestration.consuming.claims import Claim, Claims, NoClaim
from eventsql_orchestration.consuming.leases import Lease, LeasedPolls
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.consuming.worker_pool import PollOptions
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    ConsumptionError,
    DatabaseFullError,
    DatabaseUnavailableError,
    ValidationError,
)
from eventsql_orchestration.model import NOT_PARTITIONED
from tests.consuming.conftest import prepare
from tests.effects import FullDiskError, effects, take_too_long, write
from tests.forms import change_time, ids_in

if TYPE_CHECKING:
    from tests.consuming.conftest import Halt
    from tests.fixtures import Sessions, Spawn, Terminate, Until

POLLING = 0.02


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.01)


pytestmark = pytest.mark.prepared.with_args(prepare)


def fill(platform: EventSQL, count: int, topic: str = "payments") -> list[int]:
    before = platform.reader.end(topic)
    platform.publisher.publish_all(
        Publication(topic, b"%d" % n, key=str(n), partition=n % 3 if topic == "orders" else None) for n in range(count)
    )
    platform.transfer.run_once()
    return [event.id for event in platform.reader.read(topic, after=before)]


def write_leased(events: Sequence[Event], lease: Lease) -> None:
    with lease.transaction() as connection:
        write(events, connection)


def state(platform: EventSQL) -> ConsumerState:
    return platform.registry.consumer("payments", "mailer")[0]


def unleased(platform: EventSQL) -> bool:
    return state(platform).lease_owner is None


class Seen:
    """A leased handler that keeps its events, and fails as `fail` says."""

    def __init__(self, fail: Callable[[Sequence[Event]], None] = lambda _events: None) -> None:
        self.batches: list[list[int]] = []
        self._fail = fail

    def __call__(self, events: Sequence[Event], lease: Lease) -> None:
        self.batches.append([event.id for event in events])
        self._fail(events)

    @property
    def ids(self) -> list[int]:
        return [event_id for batch in self.batches for event_id in batch]


# Effects and offset


def test_effects_of_the_leases_transaction_commit_with_the_offset(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 5)
    with platform.consumers.start_leased("payments", "mailer", write_leased, max_events=2, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    assert effects(platform) == ids
    assert (state(platform).consumed_events, unleased(platform)) == (5, True)


def test_every_partition_is_consumed_in_its_order(platform: EventSQL, until: Until) -> None:
    fill(platform, 60, "orders")
    with platform.consumers.start_leased("orders", "mailer", write_leased, max_events=7, polling_delay=POLLING):
        until(lambda: len(effects(platform)) == 60)
    for partition in range(3):
        ids = ids_in(platform, "orders", partition)
        assert [event_id for event_id in effects(platform) if event_id in ids] == ids


def test_the_handler_works_outside_of_any_transaction(
    platform: EventSQL, sessions: Sessions, until: Until, halt: Halt
) -> None:
    fill(platform, 3)
    # No heartbeat meets the lock that is asked for below.
    with platform.consumers.start_leased("payments", "mailer", halt, lease=3_600.0, polling_delay=POLLING):
        halt.await_reached()
        watching = sessions()
        watching.autocommit = True
        until(
            lambda: (
                watching.execute(
                    "SELECT 1 FROM pg_stat_activity "
                    "WHERE datname = current_database() AND state LIKE '%in transaction%'"
                ).fetchone()
                is None
            )
        )
        watching.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE NOWAIT")
        halt.end()


def test_effects_of_a_block_that_fails_are_undone_and_may_be_written_again(platform: EventSQL, until: Until) -> None:
    ids, said = fill(platform, 3), list[tuple[bool, bool]]()

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with pytest.raises(ValueError, match="first"), lease.transaction() as connection:
            write(events, connection)
            raise ValueError("first")
        said.append((lease.committed, lease.rolled_back))
        write_leased(events, lease)
        said.append((lease.committed, lease.rolled_back))

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    assert effects(platform) == ids
    assert said == [(False, True), (True, False)]
    assert state(platform).attempts == 0


def test_a_block_that_rolls_back_has_failed(platform: EventSQL, until: Until) -> None:
    fill(platform, 1)

    def handle(_events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction():
            raise psycopg.Rollback

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: state(platform).failure)
    assert "rolled its effects back" in (state(platform).failure or "")
    assert state(platform).last_event_id == 0


def test_the_offset_is_committed_once_alone(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 3)
    refused: list[Exception] = []

    def handle(_events: Sequence[Event], lease: Lease) -> None:
        lease.commit()
        lease.commit()
        try:
            with lease.transaction():
                pass
        except ValidationError as error:
            refused.append(error)

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: refused)
    assert state(platform).last_event_id == ids[-1]


def test_a_handler_that_fails_after_it_committed_repeats_nothing(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 3)
    calls: list[int] = []

    def handle(events: Sequence[Event], lease: Lease) -> None:
        calls.append(len(events))
        write_leased(events, lease)
        raise RuntimeError("too late")

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: calls)
        until(lambda: unleased(platform))
        ids += fill(platform, 1)
        until(lambda: len(calls) == 2)
    assert effects(platform) == ids
    assert (calls, state(platform).failed_event_id) == ([3, 1], None)


def test_the_lease_is_renewed_while_the_handler_works(platform: EventSQL, until: Until, halt: Halt) -> None:
    ids = fill(platform, 1)
    with platform.consumers.start_leased("payments", "mailer", halt, lease=0.6, polling_delay=POLLING):
        halt.await_reached()
        first = state(platform).lease_expires_at
        assert first is not None
        until(lambda: (state(platform).lease_expires_at or first) > first)
        halt.end()
        until(lambda: state(platform).last_event_id == ids[-1])


# What is handed over


def test_events_that_do_not_match_the_consumers_filter_are_passed_over(platform: EventSQL, until: Until) -> None:
    platform.registry.register_consumer(Consumer("payments", "picky"), filter=EventFilter(keys=frozenset({"1", "3"})))
    ids = fill(platform, 6)
    seen = Seen()
    with platform.consumers.start_leased("payments", "picky", seen, polling_delay=POLLING):
        until(lambda: platform.registry.consumer("payments", "picky")[0].last_event_id == ids[-1])
    assert seen.batches == [[ids[1], ids[3]]]
    assert platform.registry.consumer("payments", "picky")[0].consumed_events == 2


def test_an_event_between_others_that_do_not_match_fails_its_attempts(platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("payments_dlt"))
    platform.registry.register_consumer(
        Consumer("payments", "picky"), filter=EventFilter(keys=frozenset({"0", "3", "5"})), max_attempts=3
    )
    ids = fill(platform, 7)

    def fail(events: Sequence[Event]) -> None:
        if ids[3] in [event.id for event in events]:
            raise ValueError("no")

    seen = Seen(fail)
    with platform.consumers.start_leased("payments", "picky", seen, polling_delay=POLLING):
        until(lambda: platform.registry.consumer("payments", "picky")[0].last_event_id == ids[-1])
    assert seen.batches == [[ids[0], ids[3], ids[5]], [ids[0]], [ids[3]], [ids[3]], [ids[3]], [ids[5]]]


def test_a_filter_that_changes_while_an_event_is_handled_blames_no_other(platform: EventSQL, until: Until) -> None:
    mailer = Consumer("payments", "mailer")
    platform.registry.register_topic(Topic("payments_dlt"))
    platform.registry.register_consumer(mailer, max_attempts=1, filter=EventFilter(keys=frozenset("1")))
    ids = fill(platform, 2)

    def handle(_events: Sequence[Event], _lease: Lease) -> None:
        platform.registry.register_consumer(mailer, filter=EventFilter(keys=frozenset("01")))
        raise ValueError("never")

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    platform.transfer.run_once()
    assert [letter.origin for letter in platform.dead_letters.list("payments")] == [f"payments:-1:{ids[1]}"]


def test_fewer_events_than_min_events_wait_for_more(platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.shards[0].consumers.start_leased(
        "payments", "mailer", seen, min_events=3, max_events=4, polling_delay=POLLING, max_polling_delay=1e6
    ) as consumption:
        ids = fill(platform, 2)
        until(lambda: any(slot.least == 3 for slot in list(consumption._idle.values())))
        ids += fill(platform, 2)
        until(lambda: len(seen.ids) == 4)
    assert seen.batches == [ids]


def test_fewer_than_the_least_number_are_handed_over_when_they_have_waited_long_enough(
    platform: EventSQL, until: Until
) -> None:
    ids = fill(platform, 2)
    seen = Seen()
    with platform.consumers.start_leased(
        "payments", "mailer", seen, min_events=3, polling_delay=1e6, max_polling_delay=0.2
    ):
        until(lambda: seen.batches == [ids])


def test_a_batch_is_followed_by_the_next_without_a_delay(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 5)
    with platform.consumers.start_leased("payments", "mailer", Seen(), max_events=2, polling_delay=1e6):
        until(lambda: state(platform).last_event_id == ids[-1])


def test_a_partition_that_another_transaction_holds_is_not_polled_at_each_event(
    platform: EventSQL, sessions: Sessions, until: Until
) -> None:
    ids, seen = fill(platform, 3), Seen()
    holder = sessions()
    holder.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE")
    consumers = platform.shards[0].consumers
    with consumers.start_leased("payments", "mailer", seen, polling_delay=POLLING) as consumption:
        until(lambda: any(slot.deaf for slot in list(consumption._idle.values())))
        holder.rollback()
        until(lambda: seen.ids == ids)


@pytest.mark.parametrize("lease", [0.0, float("nan")])
def test_an_invalid_lease_is_refused(platform: EventSQL, lease: float) -> None:
    with pytest.raises(ValidationError):
        platform.consumers.start_leased("payments", "mailer", Seen(), lease=lease)


def test_a_leased_consumer_that_is_not_registered_is_named(platform: EventSQL) -> None:
    with pytest.raises(ConsumerNotFoundError):
        platform.consumers.start_leased("payments", "nobody", Seen())


# Failures


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_handler_names_the_event_that_failed_and_those_before_it_are_done(
    platform: EventSQL, until: Until, max_attempts: int
) -> None:
    platform.registry.register_topic(Topic("payments_dlt"))
    platform.registry.register_consumer(Consumer("payments", "mailer"), max_attempts=max_attempts)
    ids = fill(platform, 5)
    named = iter([True])

    def fail(events: Sequence[Event]) -> None:
        if next(named, False):
            raise ConsumptionError(events[2]) from ValueError("no such account")

    seen = Seen(fail)
    with platform.consumers.start_leased("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    # The last attempt makes a dead letter of the event.
    assert seen.batches == [ids, *[[ids[2]]] * (max_attempts - 1), ids[3:]]
    assert state(platform).consumed_events == 5


def test_a_poll_tells_how_many_events_were_done_and_which_failed(platform: EventSQL) -> None:
    ids = fill(platform, 4)

    def fail(events: Sequence[Event], _lease: Lease) -> None:
        if events[-1].id == ids[3]:
            raise ConsumptionError(events[-1]) from ValueError("no such account")

    polls = LeasedPolls(platform.database, platform.claims, fail, PollOptions.of(max_events=2), lease=3_600.0)
    key = ConsumerPartition("payments", "mailer", NOT_PARTITIONED)
    done, failed = (polls.poll(key, Cancellation()).result for _ in range(2))
    assert done == BatchResult(2, ids[1])
    assert failed is not None
    assert failed.failure is not None
    assert (failed.consumed, failed.offset, failed.failure.event_id) == (1, ids[2], ids[3])


def test_a_failed_event_that_is_named_in_the_transaction_takes_no_effects_of_earlier_events_along(
    platform: EventSQL, until: Until
) -> None:
    ids = fill(platform, 5)
    named = iter([True])

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            write(events, connection)
            if next(named, False):
                raise ConsumptionError(events[2])

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    assert effects(platform) == ids
    assert state(platform).consumed_events == 5


def test_a_lost_connection_costs_an_event_no_attempt(
    platform: EventSQL, until: Until, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    ids = fill(platform, 1)
    losses = [True] * 4

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            write(events, connection)
            if losses:
                losses.pop()
                terminate(connection)

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1] or state(platform).attempts)
    assert (effects(platform), losses) == (ids, [])


def test_a_failure_that_finds_the_database_away_is_recorded_when_it_is_back(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    ids = fill(platform, 1)
    settle, away = Claims.settle, [DatabaseUnavailableError("the event has taken the server down")]

    def settle_when_it_is_back(*arguments: Any, **named: Any) -> Any:
        if away:
            raise away.pop()
        return settle(*arguments, **named)

    def fail(_events: Sequence[Event]) -> None:
        raise ValueError("never")

    monkeypatch.setattr(Claims, "settle", settle_when_it_is_back)
    seen = Seen(fail)
    with platform.consumers.start_leased("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: state(platform).spent)
    assert seen.ids == ids * 3


def test_a_batch_that_finds_the_database_away_gives_its_lease_back_when_it_is_back(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    ids = fill(platform, 1)
    release, away = Claims.release, [DatabaseUnavailableError("the server restarts")] * 3

    def release_when_it_is_back(*arguments: Any) -> Any:
        if away:
            raise away.pop()
        return release(*arguments)

    def fail(_events: Sequence[Event]) -> None:
        if away:
            raise away.pop()

    monkeypatch.setattr(Claims, "release", release_when_it_is_back)
    with platform.consumers.start_leased("payments", "mailer", Seen(fail), lease=3_600.0, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])


def test_a_transaction_of_the_handlers_own_that_took_too_long_spends_the_attempts_of_its_event(
    platform: EventSQL, until: Until
) -> None:
    fill(platform, 1)

    def handle(_events: Sequence[Event], _lease: Lease) -> None:
        with platform.database.transaction() as connection:
            take_too_long(connection)

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: state(platform).spent)


def test_a_lease_that_cannot_be_given_back_hides_no_error(
    platform: EventSQL, sessions: Sessions, until: Until, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(claims, "LOCK_TIMEOUT", 0.01)
    fill(platform, 1)
    other = sessions()

    def find_it_away(_events: Sequence[Event], _lease: Lease) -> None:
        other.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE")
        raise DatabaseUnavailableError("the server restarts")

    with platform.consumers.start_leased("payments", "mailer", find_it_away, polling_delay=POLLING):
        until(lambda: "the server restarts" in caplog.text)
        other.rollback()


def test_a_handler_that_loses_a_claim_of_its_own_spends_the_attempts_of_its_event(
    platform: EventSQL, until: Until
) -> None:
    platform.registry.register_topic(Topic("payments_dlt"))
    ids = fill(platform, 2)

    def handle(events: Sequence[Event], _lease: Lease) -> None:
        if events[0].id == ids[0]:
            raise ClaimLostError("of another consumer")

    with platform.consumers.start_leased("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    platform.transfer.run_once()
    assert [letter.origin for letter in platform.dead_letters.list("payments")] == [f"payments:-1:{ids[0]}"]


@pytest.mark.parametrize("error", [psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure])
def test_a_batch_that_loses_to_another_transaction_after_the_server_was_away_gives_its_lease_back(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, error: type[psycopg.Error]
) -> None:
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    ids = fill(platform, 1)
    monkeypatch.setattr(leases, "pause_while_away", lambda _failures: 0.01)
    away = [DatabaseUnavailableError("the server restarts")]
    stopped = DatabaseUnavailableError("the server stops")
    stopped.__cause__ = psycopg.errors.AdminShutdown()
    errors = [*[stopped] * leases.BUSY_ATTEMPTS, error("two transactions are in each other's way")]

    def finish_after_errors(*arguments: Any) -> bool:
        if errors:
            raise errors.pop(0)
        return finish_claim(*arguments)

    def find_it_away(_events: Sequence[Event]) -> None:
        if away:
            raise away.pop()

    monkeypatch.setattr(claims, "finish_claim", finish_after_errors)
    seen = Seen(find_it_away)
    with platform.consumers.start_leased("payments", "mailer", seen, lease=3_600.0, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])


@pytest.mark.parametrize("error", [FullDiskError(), DatabaseFullError("the server is out of memory")])
def test_a_full_disk_fails_no_event_and_leaves_no_lease(platform: EventSQL, until: Until, error: Exception) -> None:
    fill(platform, 1)

    def find_it_full(_: Sequence[Event]) -> None:
        raise error

    seen = Seen(find_it_full)
    with platform.consumers.start_leased("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: bool(seen.batches) and state(platform).lease_owner is None)
    assert state(platform).failed_event_id is None


def test_an_event_that_is_due_again_at_once_waits_for_no_polling_delay(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.0)
    errors = [ValueError("once")]

    def fail(_events: Sequence[Event]) -> None:
        if errors:
            raise errors.pop()

    with platform.consumers.start_leased("payments", "mailer", Seen(fail), polling_delay=1e6):
        # A consumption that is not notified looks again at once.
        until(lambda: platform.shards[0].listener.listening)
        ids = fill(platform, 1)
        until(lambda: state(platform).last_event_id == ids[-1])


def test_a_range_that_fails_is_handed_over_one_by_one_and_only_the_guilty_event_is_tried_again(
    platform: EventSQL, until: Until
) -> None:
    ids = fill(platform, 4)
    failures = iter([ValueError("range"), ValueError("alone")])

    def fail(events: Sequence[Event]) -> None:
        if ids[2] in [event.id for event in events] and (failure := next(failures, None)) is not None:
            raise failure

    seen = Seen(fail)
    with platform.consumers.start_leased("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    assert seen.batches == [ids, [ids[0]], [ids[1]], [ids[2]], [ids[2]], [ids[3]]]
    assert (state(platform).attempts, state(platform).consumed_events) == (0, 4)


def test_an_event_that_has_failed_its_attempts_becomes_a_dead_letter_and_the_rest_is_consumed(
    platform: EventSQL, until: Until
) -> None:
    platform.registry.register_topic(Topic("payments_dlt"))
    ids = fill(platform, 4)

    def fail(events: Sequence[Event]) -> None:
        for event in events:
            if event.id == ids[1]:
                raise ConsumptionError(event) from ValueError("never")

    seen = Seen(fail)
    with platform.consumers.start_leased("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    assert seen.batches == [ids, [ids[1]], [ids[1]], ids[2:]]
    platform.transfer.run_once()
    (letter,) = platform.dead_letters.list("payments")
    assert (letter.value, letter.metadata["dlt_attempts"], letter.metadata["dlt_exception"]) == (
        b"1",
        "3",
        "ValueError",
    )
    assert state(platform).consumed_events == 4


def test_an_event_that_has_failed_its_attempts_blocks_its_partition_where_there_is_no_topic_for_it(
    platform: EventSQL, until: Until
) -> None:
    ids = fill(platform, 3)

    def fail(events: Sequence[Event]) -> None:
        if broken and ids[1] in [event.id for event in events]:
            raise ValueError("broken")

    broken = True
    with platform.consumers.start_leased("payments", "mailer", Seen(fail), polling_delay=POLLING):
        until(lambda: state(platform).spent)
        assert (state(platform).last_event_id, state(platform).failed_event_id) == (ids[0], ids[1])
        assert unleased(platform)
        broken = False
        platform.registry.resume("payments", "mailer")
        until(lambda: state(platform).last_event_id == ids[-1])


# Owners that die, or are thought dead


@pytest.mark.parametrize("where", ["at work", "committing"])
def test_the_events_of_a_process_that_is_killed_are_taken_over_when_its_lease_has_ended(
    platform: EventSQL, spawn: Spawn, until: Until, where: str
) -> None:
    ids = fill(platform, 10)
    doomed = spawn("hold_leased", "payments", "mailer", 3_600.0, where)
    assert doomed.line() == f"{where} {'on ' if where == 'at work' else ''}10 events"
    doomed.kill()
    assert isinstance(platform.claims.claim("payments", "mailer", owner="another"), NoClaim)
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() WHERE eql_topic = 'payments'")
    with platform.consumers.start_leased("payments", "mailer", write_leased, max_events=4, polling_delay=POLLING):
        until(lambda: state(platform).last_event_id == ids[-1])
    assert effects(platform) == ids
    assert state(platform).consumed_events == 10


def test_a_handler_that_was_thought_dead_commits_nothing(platform: EventSQL, until: Until, halt: Halt) -> None:
    ids = fill(platform, 3)
    said: list[object] = []

    def handle(events: Sequence[Event], lease: Lease) -> None:
        halt()
        said.append(lease.lost.wait(60))
        try:
            write_leased(events, lease)
        except ClaimLostError as error:
            said.append(error)
            raise

    taken: list[Claim] = []

    def take() -> bool:
        """Claim what the lease holds as if it were over. A heartbeat may come between, and renew it."""
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() WHERE eql_topic = 'payments'")
        claim = platform.claims.claim("payments", "mailer", owner="another")
        taken.extend([claim] if isinstance(claim, Claim) else [])
        return bool(taken)

    with platform.consumers.start_leased("payments", "mailer", handle, lease=1.0, polling_delay=1e6):
        halt.await_reached()
        until(take)
        platform.claims.process(taken[0], write)
        halt.end()
        until(lambda: len(said) == 2)
    assert said[0] is True
    assert effects(platform) == ids
    assert (state(platform).consumed_events, state(platform).failed_event_id) == (3, None)


def test_a_handler_that_fails_because_its_lease_is_lost_is_noted_as_no_failure(
    platform: EventSQL, until: Until
) -> None:
    fill(platform, 3)
    inside, ended, calls = threading.Event(), threading.Event(), list[int]()

    def handle(events: Sequence[Event], lease: Lease) -> None:
        calls.append(len(events))
        inside.set()
        lease.lost.wait(60)
        ended.set()
        raise RuntimeError("gave up")

    consumers = platform.shards[0].consumers
    with consumers.start_leased("payments", "mailer", handle, lease=0.3, polling_delay=1e6) as consumption:
        assert inside.wait(60)
        # As another process takes the partition over. Until its lease ends, the handler is not called again.
        with platform.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.consumer SET eql_epoch = eql_epoch + 1, "
                "eql_lease_expires_at = now() + interval '1 hour' WHERE eql_topic = 'payments'"
            )
        assert ended.wait(60)
        until(lambda: consumption._idle)
    assert (calls, state(platform).failed_event_id, state(platform).last_event_id) == ([3], None, 0)


def test_a_handler_that_finds_its_lease_lost_is_not_called_again(platform: EventSQL, until: Until) -> None:
    fill(platform, 3)
    calls: list[int] = []

    def handle(events: Sequence[Event], lease: Lease) -> None:
        calls.append(len(events))
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer SET eql_epoch = eql_epoch + 1 WHERE eql_topic = 'payments'")
        with lease.transaction():
            pytest.fail("the loss is known before the effects are written")

    consumers = platform.shards[0].consumers
    with consumers.start_leased("payments", "mailer", handle, lease=3_600.0, polling_delay=1e6) as consumption:
        until(lambda: calls and consumption._idle)
    assert (calls, state(platform).failed_event_id) == ([3], None)


# Stopping


def test_stopping_lets_the_handler_finish(platform: EventSQL, halt: Halt) -> None:
    ids = fill(platform, 6)

    def handle(events: Sequence[Event], lease: Lease) -> None:
        halt()
        write_leased(events, lease)

    consumption = platform.consumers.start_leased("payments", "mailer", handle, max_events=3)
    halt.await_reached()
    consumption.stop_soon()
    halt.end()
    assert consumption.stop(timeout=60)
    assert effects(platform) == ids[:3]
    assert unleased(platform)


def test_a_handler_that_does_not_end_in_time_loses_its_lease_to_others_at_once(platform: EventSQL, halt: Halt) -> None:
    ids, told = fill(platform, 3), list[bool]()

    def handle(events: Sequence[Event], lease: Lease) -> None:
        halt()
        told.append(lease.lost.is_set())
        write_leased(events, lease)

    consumption = platform.consumers.start_leased("payments", "mailer", handle, lease=3600.0)
    halt.await_reached()
    assert not consumption.stop(timeout=0.01)
    claim = platform.claims.claim("payments", "mailer", owner="another")
    assert isinstance(claim, Claim)
    halt.end()
    assert consumption.stop(timeout=60)
    assert (told, effects(platform)) == ([True], [])
    platform.claims.process(claim, write)
    assert effects(platform) == ids
    assert state(platform).failed_event_id is None


def test_a_transaction_that_does_not_end_in_time_is_rolled_back_and_gives_its_partition_to_others(
    platform: EventSQL, halt: Halt
) -> None:
    fill(platform, 3)

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            write(events, connection)
            halt()

    consumption = platform.consumers.start_leased("payments", "mailer", handle, lease=3600.0)
    halt.await_reached()
    assert not consumption.stop(timeout=0.01)
    assert isinstance(platform.claims.claim("payments", "mailer", owner="another"), Claim)
    halt.end()
    assert consumption.stop(timeout=60)
    assert (effects(platform), state(platform).last_event_id) == ([], 0)


@pytest.mark.parametrize("broken", [False, True])
def test_stopping_while_events_are_handed_over_one_by_one_gives_the_rest_back(
    platform: EventSQL, until: Until, *, broken: bool
) -> None:
    platform.registry.register_topic(Topic("payments_dlt"))
    platform.registry.register_consumer(Consumer("payments", "mailer"), max_attempts=1)
    ids = fill(platform, 4)

    def fail(events: Sequence[Event]) -> None:
        if len(events) > 1:
            raise ValueError("not all of them")
        started.stop_soon()
        if broken:
            raise ValueError("never")

    seen = Seen(fail)
    started = platform.consumers.start_leased("payments", "mailer", seen)
    until(lambda: len(seen.batches) == 2)
    assert started.stop(timeout=60)
    assert seen.batches == [ids, ids[:1]]
    assert (state(platform).last_event_id, unleased(platform)) == (ids[0], True)


def test_a_range_that_is_claimed_in_the_moment_of_a_stop_is_given_back_as_it_is(platform: EventSQL) -> None:
    fill(platform, 1)
    seen, cancellation = Seen(), Cancellation()
    cancellation.stopping.set()
    polls = LeasedPolls(platform.database, platform.claims, seen, PollOptions.of(), lease=3_600.0)
    polls.poll(ConsumerPartition("payments", "mailer", NOT_PARTITIONED), cancellation)
    assert (seen.batches, unleased(platform)) == ([], True)


# Claims


def test_a_claim_may_be_committed_in_parts(platform: EventSQL) -> None:
    ids = fill(platform, 5)
    claim = platform.claims.claim("payments", "mailer", owner="me")
    assert isinstance(claim, Claim)
    assert [event.id for event in platform.claims.read(claim)] == ids
    with platform.database.transaction() as connection:
        rest = platform.claims.commit(connection, claim, upto=ids[1])
    assert (rest.position, state(platform).last_event_id, unleased(platform)) == (ids[1], ids[1], False)
    assert [event.id for event in platform.claims.read(rest)] == ids[2:]
    with platform.database.transaction() as connection, pytest.raises(ClaimLostError, match="moved the offset"):
        platform.claims.commit(connection, claim)
    for outside in (ids[0], ids[-1] + 1):
        with platform.database.transaction() as connection, pytest.raises(ValidationError):
            platform.claims.commit(connection, rest, upto=outside)
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, rest)
    assert (state(platform).consumed_events, unleased(platform)) == (5, True)


def test_an_event_that_failed_is_claimed_alone_where_that_is_asked_for(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 5)
    claim = platform.claims.claim("payments", "mailer", owner="me")
    assert isinstance(claim, Claim)
    event = platform.claims.read(claim)[1]
    platform.claims.settle(claim, event, ValueError("no"), done=platform.claims.read(claim)[:1])
    claims: list[Claim] = []

    def claimed() -> bool:
        again = platform.claims.claim(
            "payments", "mailer", owner="me", min_events=3, max_events=5, max_wait=3_600.0, isolate=True
        )
        if isinstance(again, Claim):
            claims.append(again)
        return bool(claims)

    until(claimed)
    assert (claims[0].range.after, claims[0].range.upto, claims[0].events) == (ids[0], ids[1], 1)


def test_no_claim_says_how_many_events_wait_and_when_they_are_enough(platform: EventSQL, sessions: Sessions) -> None:
    def refused() -> NoClaim:
        claim = platform.claims.claim("payments", "mailer", owner="me", min_events=3, max_wait=1e6)
        assert isinstance(claim, NoClaim)
        return claim

    assert (refused().waiting, refused().due_in) == (0, None)
    ids = fill(platform, 2)
    assert refused().waiting == 2
    assert refused().due_in == pytest.approx(1e6, abs=1e3)
    with platform.database.connection() as connection:
        change_time(connection, "payments", ids[0], datetime.now(UTC) - timedelta(seconds=6e5))
    assert refused().due_in == pytest.approx(4e5, abs=1e3)
    sessions().execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE")
    assert (refused().waiting, refused().due_in) == (None, None)


def test_a_cancelled_consumption_takes_nothing_that_it_has_given_back_and_begins_nothing(platform: EventSQL) -> None:
    cancellation, lost, released = Cancellation(), threading.Event(), list[bool]()
    with platform.database.transaction() as connection:
        with cancellation.connection(connection), cancellation.lease(lost, lambda: released.append(True)):
            pass
        cancellation.cancel()
        connection.execute("SELECT")
    assert (lost.is_set(), released) == (False, [])
    with (
        platform.database.connection() as connection,
        pytest.raises(ClaimLostError, match="stopped"),
        cancellation.connection(connection),
    ):
        pytest.fail("it was cancelled")
    with pytest.raises(ClaimLostError, match="stopped"), cancellation.lease(threading.Event(), lambda: None):
        pytest.fail("it was cancelled")
