"""A topic consumed as a queue: every event is acknowledged by itself, in the order of its key where that is asked."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import Mock

import psycopg
import pytest

from eventsql_orchestration import (
    Consumer,
    DeadLetterCause,
    Event,
    EventFilter,
    EventSQL,
    Publication,
    Topic,
    dead_letter,
)
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming import deliveries, lost_connections, queue_backlog, queue_consumption
from eventsql_orchestration.consuming import failures as failure_module
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.deliveries import OWNER, Deliveries
from eventsql_orchestration.consuming.delivery import Delivery, HandOut
from eventsql_orchestration.consuming.lag_values import LagCause
from eventsql_orchestration.consuming.lost_connections import FREE_LOSSES
from eventsql_orchestration.consuming.queue_consumption import QueueConsumption
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.notifications import Listener
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
    PartitionLeasedError,
    RedefinitionError,
    ValidationError,
)
from eventsql_orchestration.maintenance import seek
from eventsql_orchestration.model import STORAGES, Storage
from eventsql_orchestration.topics.positions import AtOffset
from tests.consuming.conftest import levels, prepare
from tests.effects import DISK_IS_FULL, FullDiskError, effects, write
from tests.forms import stored
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.consuming.conftest import Halt
    from tests.fixtures import SaidBy, Sessions, Spawn, Until, UntilBlocked

POLLING = 0.02


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_module, "FIRST_BACKOFF", 0.01)


pytestmark = pytest.mark.prepared.with_args(prepare)


def fill(platform: EventSQL, keys: str | int, topic: str = "payments") -> list[int]:
    """Publish an event for each key, or so many with keys of their own; gives their ids."""
    before = platform.reader.end(topic)
    names = [str(n) for n in range(keys)] if isinstance(keys, int) else list(keys)
    platform.publisher.publish_all(Publication(topic, name.encode(), key=name) for name in names)
    platform.transfer.run_once()
    return [event.id for event in platform.reader.read(topic, after=before)]


def states(platform: EventSQL, topic: str = "payments") -> list[ConsumerState]:
    return platform.registry.consumer(topic, "mailer")


def kept(platform: EventSQL) -> list[int]:
    """The events that are handed out and not acknowledged."""
    with platform.database.connection() as connection:
        return [row[0] for row in connection.execute("SELECT eql_id FROM eventsql.consumer_delivery ORDER BY eql_id")]


def at_rest(platform: EventSQL, topic: str = "payments") -> bool:
    """Whether everything is acknowledged and the offsets say so."""
    return not kept(platform) and all(lag.events == 0 for lag in platform.lag(topic)) and not leased(platform, topic)


def leased(platform: EventSQL, topic: str = "payments") -> bool:
    return any(state.lease_owner is not None for state in states(platform, topic))


def workers(platform: EventSQL) -> int:
    """The processes whose lease holds."""
    with platform.database.connection() as connection:
        return connection.execute("SELECT FROM eventsql.consumer_worker").rowcount


def handed_out(platform: EventSQL) -> int:
    """The events that a process holds whose lease holds."""
    held = "SELECT FROM eventsql.consumer_delivery d JOIN eventsql.consumer_worker w ON w.eql_id = d.eql_worker"
    with platform.database.connection() as connection:
        return connection.execute(held).rowcount


def process(platform: EventSQL, *, by_key: bool = True, most: int = 9) -> deliveries.Deliveries:
    """What a process has to consume `payments` with."""
    shard = platform.shards[0]
    return deliveries.Deliveries(
        shard.database, shard.dead_letters, "payments", "mailer", by_key=by_key, lease=60, most=most
    )  # fmt: skip


class Seen:
    """A handler that notes the events that it was handed, and waits or fails as it is told to."""

    def __init__(self, then: Callable[[Event], object] = lambda _event: None) -> None:
        self.ids: list[int] = []
        self._then = then

    def __call__(self, event: Event) -> None:
        self.ids.append(event.id)
        self._then(event)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("by_key", [True, False])
def test_every_event_is_handled_once(platform: EventSQL, until: Until, storage: Storage, *, by_key: bool) -> None:
    platform.registry.register_topic(Topic("clicks", 3, storage=storage))
    platform.registry.register_consumer(Consumer("clicks", "mailer", partitioned=True))
    ids = fill(platform, "abcdefghij" * 30, "clicks")
    seen = Seen()
    with platform.consumers.start_queue("clicks", "mailer", seen, by_key=by_key, polling_delay=POLLING):
        until(lambda: at_rest(platform, "clicks"))
        ids += fill(platform, "abcdefghij" * 30, "clicks")
        until(lambda: at_rest(platform, "clicks"))
    assert sorted(seen.ids) == ids
    assert sum(state.consumed_events for state in states(platform, "clicks")) == len(ids)


def test_effects_and_acknowledgement_are_one_transaction(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 50)
    refused: set[int] = set()

    def handle(event: Event, connection: Connection) -> None:
        write([event], connection)
        if event.id not in refused and event.id % 5 == 0:
            refused.add(event.id)
            raise ValueError("not yet")

    with platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert sorted(effects(platform)) == ids
    assert len(refused) == 10


def test_a_handler_that_commits_has_acknowledged_its_event(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 3)

    def handle(event: Event, connection: Connection) -> None:
        write([event], connection)
        connection.execute("COMMIT")

    with platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert sorted(effects(platform)) == ids


def test_a_slow_event_holds_up_its_key_alone(platform: EventSQL, until: Until, halt: Halt) -> None:
    ids = fill(platform, "abcabcabc")
    seen = Seen(lambda event: halt() if event.id == ids[0] else None)
    with platform.consumers.start_queue("payments", "mailer", seen, workers=4, polling_delay=POLLING):
        until(lambda: len(seen.ids) == 7 and kept(platform) == [ids[0], ids[3], ids[6]])
        assert states(platform)[0].last_event_id < ids[0]
        assert leased(platform)
        halt.end()
        until(lambda: at_rest(platform))
    assert [each for each in seen.ids if each in ids[::3]] == ids[::3]
    assert states(platform)[0].last_event_id == ids[-1]


def test_without_order_a_slow_event_holds_up_none(platform: EventSQL, until: Until, halt: Halt) -> None:
    ids = fill(platform, "aaaa")
    seen = Seen(lambda event: halt() if event.id == ids[0] else None)
    with platform.consumers.start_queue("payments", "mailer", seen, by_key=False, workers=2, polling_delay=POLLING):
        until(lambda: kept(platform) == ids[:1])
        halt.end()


def test_a_failing_event_is_tried_again_before_the_later_ones_of_its_key(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but its delay causes the next call for it.
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", 3_600.0)
    ids = fill(platform, "abaab")
    failures = iter([ValueError("one"), ValueError("two")])

    def fail(event: Event) -> None:
        if event.id == ids[0] and (error := next(failures, None)):
            raise error

    seen = Seen(fail)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=3_600.0):
        until(lambda: at_rest(platform))
    assert [each for each in seen.ids if each in {ids[0], ids[2], ids[3]}] == [ids[0]] * 3 + ids[2:4]


@pytest.mark.parametrize(
    "failures",
    [
        # A busy database costs no attempt.
        [DatabaseBusyError("no connection is free") for _ in range(4)],
        [FullDiskError() for _ in range(4)],
        [ClaimLostError("of another consumer")],
    ],
)
def test_an_event_whose_handler_fails_for_something_else_is_tried_again(
    platform: EventSQL, until: Until, failures: list[Exception]
) -> None:
    ids, left = fill(platform, "a"), list(failures)

    def handle(_event: Event) -> None:
        if left:
            raise left.pop()

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert seen.ids == ids * (len(failures) + 1)


def test_an_event_whose_handler_finds_no_room_is_one_line_in_the_log_and_waits_longer_until_it_is_resumed(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: dict[int, list[float]] = {}
    fail, note, full, clock = deliveries.Deliveries.fail, deliveries.Deliveries._note_failure, [True], count()

    def keep(own: deliveries.Deliveries, delivery: Delivery, *given: Any, **named: Any) -> float:
        delay = fail(own, delivery, *given, **named)
        failed.setdefault(delivery.event.id, []).append(delay)
        return delay

    def wait_less(own: deliveries.Deliveries, delivery: Delivery, **named: Any) -> bool:
        # After the last failure, no event is under way while the disk gets room.
        delay = 0.0 if len(failed.get(delivery.event.id, ())) < 3 else 3_600.0
        return note(own, delivery, **named | {"delay": delay})

    def handle(event: Event, connection: Connection) -> None:
        # Events without an effect go on.
        if event.key != "c" and full:
            connection.execute(DISK_IS_FULL)

    monkeypatch.setattr(deliveries.Deliveries, "fail", keep)
    monkeypatch.setattr(deliveries.Deliveries, "_note_failure", wait_less)
    monkeypatch.setattr(deliveries, "monotonic", lambda: next(clock))
    ids = fill(platform, "abcc")
    with (
        caplog.at_level(logging.INFO, deliveries.__name__),
        platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING),
    ):
        until(lambda: all(len(failed.get(each, ())) == 4 for each in ids[:2]))
        full.clear()
        platform.registry.resume("payments", "mailer")
        until(lambda: at_rest(platform))
    for delays in failed.values():
        assert delays == sorted(delays)
        assert delays[0] < delays[3]
    assert levels(caplog, deliveries) == ["WARNING", "INFO"]


def test_the_next_full_disk_is_a_line_in_the_log_although_another_process_has_handled_the_events_of_the_first(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(failure_module, "FIRST_BACKOFF", 0.0)
    monkeypatch.setattr(deliveries, "monotonic", lambda: clock[0])
    fill(platform, "ab")
    own, other = process(platform), process(platform)
    worker, other_worker = own.register("a process"), other.register("another one")

    def meet_a_full_disk() -> None:
        (delivery,) = own.hand_out(worker, -1, 1).deliveries
        own.fail(delivery, FullDiskError(), counts=False, behind=())

    meet_a_full_disk()
    other.acknowledge(other.hand_out(other_worker, -1, 1).deliveries)
    clock[0] += 3_600
    meet_a_full_disk()
    assert levels(caplog, deliveries) == ["WARNING"] * 2


def test_an_event_whose_database_was_away_does_not_wait_again_for_as_long(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(failure_module, "FIRST_BACKOFF", 0.0)
    monkeypatch.setattr(deliveries, "monotonic", lambda: clock[0])
    fill(platform, "a")
    own, away = process(platform), DatabaseUnavailableError("the server restarts")
    (delivery,) = own.hand_out(own.register("a process"), -1, 1).deliveries

    def find_it_away(*_: object, **__: object) -> NoReturn:
        raise away

    with monkeypatch.context() as outage, pytest.raises(DatabaseUnavailableError):
        outage.setattr(deliveries.Deliveries, "_note_failure", find_it_away)
        own.fail(delivery, away, counts=False, behind=())
    clock[0] += 3_600
    assert own.fail(delivery, away, counts=False, behind=()) == 0.0


@pytest.mark.parametrize("in_transaction", [True, False])
def test_an_event_whose_handler_always_meets_a_conflict_becomes_a_dead_letter(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    in_transaction: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    platform.registry.register_topic(Topic("payments_dlt"))
    fill(platform, "a")
    calls: list[int] = []

    def meet_a_deadlock(event: Event, connection: Connection) -> None:
        calls.append(event.id)
        connection.execute("DO $$ BEGIN RAISE 'deadlock' USING ERRCODE = 'deadlock_detected'; END $$")

    def meet_a_busy_database(event: Event) -> None:
        calls.append(event.id)
        raise DatabaseBusyError("another database was too busy")

    handler = meet_a_deadlock if in_transaction else meet_a_busy_database
    with platform.consumers.start_queue("payments", "mailer", handler, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert len(calls) == FREE_LOSSES + 3
    assert platform.transfer.run_once() == {"payments_dlt": 1}
    told = [each.name for each in caplog.records if each.levelno >= logging.WARNING]
    assert told.count(lost_connections.__name__) == 3
    assert told.count(deliveries.__name__) == 4


@pytest.mark.parametrize(
    "error", [DatabaseBusyError("no connection is free"), DatabaseError("the database takes no writes")], ids=str
)
def test_an_event_whose_handler_was_not_called_keeps_its_attempts(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, error: DatabaseError
) -> None:
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(lost_connections, "FREE_LOSSES", 0)
    handle, left = deliveries.Deliveries.handle, [error] * 4

    def find_no_connection(*arguments: Any) -> None:
        if left:
            raise left.pop()
        handle(*arguments)

    monkeypatch.setattr(deliveries.Deliveries, "handle", find_no_connection)
    ids = fill(platform, "a")
    with platform.consumers.start_queue(
        "payments", "mailer", lambda event, connection: write([event], connection), polling_delay=POLLING
    ):
        until(lambda: at_rest(platform) or platform.lag("payments")[0].cause is LagCause.BLOCKED)
    assert effects(platform) == ids


def test_spent_attempts_make_a_dead_letter_and_the_key_goes_on(
    platform: EventSQL, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    platform.registry.register_topic(Topic("payments_dlt"))
    ids = fill(platform, "aba")

    def handle(event: Event) -> None:
        if event.id == ids[0]:
            raise ValueError("never")

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert seen.ids.count(ids[0]) == 3
    platform.transfer.run_once()
    (letter,) = platform.dead_letters.list("payments")
    assert (letter.consumer, letter.key, letter.value) == ("mailer", "a", b"a")
    # The tracebacks of the first attempt and of the last one.
    assert caplog.text.count('raise ValueError("never")') == 2


def test_a_failure_is_noted_in_one_transaction(platform: EventSQL, said_by: SaidBy) -> None:
    """It asks once whether the event was erased meanwhile."""
    fill(platform, "a")
    shard = platform.shards[0]
    queue = Deliveries(shard.database, shard.dead_letters, "payments", "mailer", by_key=True, lease=60.0, most=10)
    (delivery,) = queue.hand_out(queue.register("here"), -1, 10).deliveries
    said = said_by(shard.database)
    queue.fail(delivery, ValueError("once"), counts=True, behind=())
    statements = said.statements()
    assert statements.count("COMMIT") == 1
    assert len([each for each in statements if "pg_advisory_xact_lock_shared" in each]) == 1


@pytest.mark.parametrize("refused", [False, True], ids=["no topic", "no letter of the factory"])
def test_without_dead_letters_a_spent_event_holds_up_its_key_until_the_consumer_is_resumed(
    platform: EventSQL, until: Until, caplog: pytest.LogCaptureFixture, *, refused: bool
) -> None:
    if refused:
        platform.registry.register_topic(Topic("payments_dlt"))
        platform.dead_letters.configure(lambda _event, _cause: None)
    ids = fill(platform, "aba")
    mended = threading.Event()

    def handle(event: Event) -> None:
        if event.id == ids[0] and not mended.is_set():
            raise ValueError("not mended")

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: [lag.cause for lag in platform.lag("payments")] == [LagCause.BLOCKED])
        assert seen.ids.count(ids[0]) == 3
        until(lambda: kept(platform) == [ids[0], ids[2]])
        mended.set()
        platform.registry.resume("payments", "mailer")
        until(lambda: at_rest(platform))
    assert [seen.ids.count(each) for each in ids] == [4, 1, 1]
    assert [each in caplog.text for each in ("dead letter factory", "create topic")] == [refused, not refused]


@pytest.mark.parametrize(
    "error", [LookupError("no"), psycopg.Rollback(), SystemExit(2), asyncio.CancelledError()], ids=repr
)
def test_a_factory_of_dead_letters_that_fails_keeps_no_other_event_from_its_acknowledgement(
    platform: EventSQL, until: Until, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    problems = iter((error,))

    def factory(event: Event, cause: DeadLetterCause) -> Publication:
        for problem in problems:
            raise problem
        return dead_letter(event, cause)

    def handle(event: Event) -> None:
        if event.id == ids[0]:
            raise ValueError("never")

    platform.registry.register_topic(Topic("payments_dlt"))
    platform.registry.register_consumer(Consumer("payments", "mailer"), max_attempts=1)
    platform.dead_letters.configure(factory)
    ids = fill(platform, "ab")
    with platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert platform.transfer.run_once() == {"payments_dlt": 1}
    assert f"will try event {ids[0]} again" in caplog.text
    assert f"keeps event {ids[0]} back" not in caplog.text


def test_a_dead_letter_whose_consumer_is_locked_for_too_long_is_made_later_and_costs_no_further_attempt(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "LOCK_SECONDS", 0.05)
    platform.registry.register_topic(Topic("payments_dlt"))
    platform.registry.register_consumer(Consumer("payments", "mailer"), max_attempts=1)
    ids, own, holder = fill(platform, "a"), process(platform), sessions()
    (delivery,) = own.hand_out(own.register("a process"), -1, 1).deliveries
    holder.execute("SELECT FROM eventsql.consumer FOR UPDATE")
    with pytest.raises(DatabaseBusyError):
        own.fail(delivery, ValueError("never"), counts=True, behind=[])
    holder.rollback()
    assert kept(platform) == ids
    assert own.fail(delivery, ValueError("never"), counts=True, behind=[]) == 0.0
    assert platform.transfer.run_once() == {"payments_dlt": 1}


def test_a_topic_for_dead_letters_takes_a_spent_event_later(platform: EventSQL, until: Until) -> None:
    fill(platform, "a")

    def handle(_event: Event) -> None:
        raise ValueError("never")

    with platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: [lag.cause for lag in platform.lag("payments")] == [LagCause.BLOCKED])
        platform.registry.register_topic(Topic("payments_dlt"))
        until(lambda: at_rest(platform))
    platform.transfer.run_once()
    assert len(platform.dead_letters.list("payments")) == 1


def test_a_spent_event_that_is_due_waits_until_somebody_takes_dead_letters(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_consumer(Consumer("payments", "mailer"), max_attempts=1)
    ids, own = fill(platform, "aab"), process(platform)
    worker = own.register("a process")
    spent, behind, _ = own.hand_out(worker, -1, 9).deliveries
    own.fail(spent, ValueError("never"), counts=True, behind=[behind])
    session.execute("UPDATE eventsql.consumer_delivery SET eql_due_at = clock_timestamp() WHERE eql_attempts > 0")
    assert own.hand_out(worker, -1, 9).deliveries == []
    platform.registry.register_topic(Topic("payments_dlt"))
    assert [each.event.id for each in own.hand_out(worker, -1, 9).deliveries] == ids[:2]


def test_events_that_a_filter_leaves_out_are_passed(platform: EventSQL, until: Until) -> None:
    platform.registry.register_consumer(Consumer("payments", "mailer"), filter=EventFilter(keys=frozenset({"a"})))
    ids = fill(platform, "abab")
    seen = Seen()
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert sorted(seen.ids) == ids[::2]
    assert states(platform)[0].last_event_id == ids[-1]


def test_unhandled_events_that_a_new_filter_leaves_out_are_passed_too(platform: EventSQL) -> None:
    ids, own = fill(platform, "ab"), process(platform)
    leaving = own.register("a process that leaves")
    own.hand_out(leaving, -1, 9)
    own.leave(leaving)
    platform.registry.register_consumer(Consumer("payments", "mailer"), filter=EventFilter(keys=frozenset({"b"})))
    worker = own.register("a process")
    handed = own.hand_out(worker, -1, 9).deliveries
    assert [each.event.id for each in handed] == ids[1:]
    own.acknowledge(handed)
    own.move_offset(worker, -1)
    assert at_rest(platform)


def test_a_partly_acknowledged_partition_is_not_consumed_in_another_way(
    platform: EventSQL, until: Until, halt: Halt
) -> None:
    ids = fill(platform, "ab")
    seen = Seen(lambda event: halt() if event.id == ids[0] else None)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: kept(platform) == ids[:1])
        assert platform.consumers.consume_once("payments", "mailer", lambda *_: None) == 0
        (lag,) = platform.lag("payments")
        assert (lag.cause, lag.detail) == (LagCause.LEASED, f"by {OWNER}")
        halt.end()
        until(lambda: at_rest(platform))
    ids += fill(platform, "a")
    assert platform.consumers.consume_once("payments", "mailer", lambda *_: None) == 1


@pytest.mark.parametrize("how", ["a paused consumer", "a locked partition", "an ended lease"])
def test_a_process_that_has_acknowledged_everything_leaves_no_lease(
    platform: EventSQL, until: Until, until_blocked: UntilBlocked, sessions: Sessions,
    halt: Halt, *, how: str,
) -> None:  # fmt: skip
    ids = fill(platform, "a")
    other = sessions()
    seen = Seen(halt)
    running = platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING)
    until(lambda: seen.ids)
    running.stop_soon()
    if how == "a paused consumer":
        platform.registry.pause("payments", "mailer")
    elif how == "an ended lease":
        other.execute("DELETE FROM eventsql.consumer_worker")
        other.commit()
    else:
        other.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE")
    halt.end()
    until(lambda: not kept(platform))
    running.stop(0.0)
    if how == "a locked partition":
        until_blocked()
        other.rollback()
    until(lambda: not leased(platform))
    assert states(platform)[0].last_event_id == ids[-1]


def test_a_partition_that_is_locked_for_too_long_keeps_no_lease_of_the_others(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_offset, locked = Deliveries.move_offset, list[int]()

    def find_the_first_locked(own: Deliveries, worker: int, partition: int) -> None:
        if not locked:
            locked.append(partition)
            raise DatabaseBusyError("locked")
        move_offset(own, worker, partition)

    monkeypatch.setattr(Deliveries, "move_offset", find_the_first_locked)
    platform.publisher.publish_all(Publication("orders", b"", partition=partition) for partition in range(3))
    platform.transfer.run_once()
    seen = Seen(halt)
    with platform.consumers.start_queue("orders", "mailer", seen, polling_delay=POLLING) as running:
        until(lambda: len(seen.ids) == 3)
        running.stop_soon()
        halt.end()
    assert locked
    # A call for events that was under way may have moved the offset of the locked partition.
    assert {state.partition for state in states(platform, "orders") if state.lease_owner is not None} <= {*locked}
    assert workers(platform) == 0


def test_the_offset_stays_before_an_event_under_way_while_later_ones_are_handed_out(platform: EventSQL) -> None:
    ids, own = fill(platform, "ab"), process(platform)
    worker = own.register("a process")
    assert [own.hand_out(worker, -1, 1).deliveries[0].event.id for _ in ids] == ids
    assert states(platform)[0].last_event_id < ids[0]


def test_a_process_that_takes_up_an_offset_does_not_wait_for_ever_for_a_handler_from_before(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "LOCK_SECONDS", 0.05)
    ids, own = fill(platform, "ab"), process(platform)
    worker = own.register("a process")
    (delivery,) = own.hand_out(worker, -1, 1).deliveries
    session.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s WHERE eql_topic = 'payments'", ids[:1])
    session.autocommit = False
    own._acknowledge_in(session, delivery)
    with pytest.raises(DatabaseBusyError):
        own.hand_out(worker, -1, 1)
    session.rollback()
    assert [each.event.id for each in own.hand_out(worker, -1, 1).deliveries] == ids[1:]


@pytest.mark.parametrize("by", ["a pause", "a claim"])
def test_a_partition_that_was_taken_away_since_the_look_hands_nothing_out(platform: EventSQL, by: str) -> None:
    ids, own = fill(platform, "a"), process(platform)
    worker = own.register("a process")
    if by == "a pause":
        platform.registry.pause("payments", "mailer")
    else:
        assert isinstance(platform.claims.claim("payments", "mailer", owner="another"), Claim)
    assert own.hand_out(worker, -1, 9) == HandOut((), taken=False)
    own.move_offset(worker, -1)
    assert leased(platform) == (by == "a claim")
    if by == "a pause":
        platform.registry.resume("payments", "mailer")
        assert [each.event.id for each in own.hand_out(worker, -1, 9).deliveries] == ids


def test_a_partition_that_is_handed_out_has_no_live_claim(platform: EventSQL) -> None:
    fill(platform, "a")
    claim = platform.claims.claim("payments", "mailer", owner="a process that was killed", lease=1e-6)
    assert isinstance(claim, Claim)
    own = process(platform)
    assert own.hand_out(own.register("a process"), -1, 1).deliveries
    assert platform.claims.live("payments", "mailer") is None


def test_an_offset_that_others_moved_is_taken_up(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, "ab")
    seen = Seen()
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    ids += fill(platform, "cd")
    assert platform.consumers.consume_once("payments", "mailer", lambda *_: None, max_events=1) == 1
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert sorted(seen.ids) == [*ids[:2], ids[3]]


def test_a_seek_needs_force_while_events_are_not_acknowledged(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, "abcd")
    mended = threading.Event()

    def handle(event: Event) -> None:
        if event.id == ids[1] and not mended.is_set():
            raise ValueError("not yet")

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: kept(platform) == [ids[1]] and seen.ids.count(ids[1]) == 3)
    with pytest.raises(PartitionLeasedError):
        platform.seeker.execute("payments", "mailer", AtOffset(ids[0]))
    platform.seeker.execute("payments", "mailer", AtOffset(ids[0]), force=True)
    assert not kept(platform)
    assert not leased(platform)
    mended.set()
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert [seen.ids.count(each) for each in ids] == [2, 4, 2, 2]


def test_the_number_of_unacknowledged_events_is_limited(platform: EventSQL, until: Until, halt: Halt) -> None:
    ids = fill(platform, 30)
    with platform.consumers.start_queue(
        "payments", "mailer", lambda _event: halt(), workers=8, polling_delay=POLLING, max_unacknowledged=5
    ):
        until(lambda: kept(platform) == ids[:5])
        halt.end()
        until(lambda: at_rest(platform))


def test_a_stopped_consumption_gives_back_what_it_has(platform: EventSQL, until: Until, halt: Halt) -> None:
    ids = fill(platform, 20)
    seen = Seen(halt)
    first = platform.consumers.start_queue("payments", "mailer", seen, workers=1, polling_delay=POLLING)
    until(lambda: kept(platform) and seen.ids)
    first.stop_soon()
    halt.end()
    first.stop()
    assert len(seen.ids) == 1
    later = Seen()
    with platform.consumers.start_queue("payments", "mailer", later, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert sorted(seen.ids + later.ids) == ids


def test_a_process_takes_events_of_an_ended_one_that_had_the_same_number(platform: EventSQL) -> None:
    ids = fill(platform, "ab")
    own = process(platform)
    ended = own.register("a process of the server before")
    own.hand_out(ended, -1, 9)
    own.leave(ended)

    # As on a logical replica, which has no values of sequences.
    with platform.database.connection() as connection:
        connection.execute("ALTER SEQUENCE eventsql.consumer_worker_eql_id_seq RESTART")
    again = own.register("a process")
    assert again == ended
    assert [each.event.id for each in own.hand_out(again, -1, 9).deliveries] == ids


def test_a_process_does_not_wait_for_another_that_renews_its_late_lease(
    platform: EventSQL, session: Connection, direct_dsn: str
) -> None:
    ids, own = fill(platform, "ab"), process(platform)
    late, worker = own.register("a late process"), own.register("a process")
    own.hand_out(late, -1, 1)
    session.execute("UPDATE eventsql.consumer_worker SET eql_expires_at = 'epoch'")
    session.autocommit = False
    session.execute("UPDATE eventsql.consumer_worker SET eql_expires_at = 'infinity' WHERE eql_id = %s", [late])
    with Database(f"{direct_dsn}?options=-clock_timeout%3D100") as impatient:
        own._database = impatient
        assert [each.event.id for each in own.hand_out(worker, -1, 9).deliveries] == ids[1:]
        session.commit()
        assert own.renew(late)


def test_an_offset_moves_at_once_although_the_last_event_is_acknowledged_during_a_call_for_others(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", 3_600.0)
    fill(platform, "a")
    hand_out, held = Deliveries.hand_out, list[bool]()

    def outlast_the_handler(own: Deliveries, worker: int, partition: int, limit: int, *known: Any) -> HandOut:
        handed = hand_out(own, worker, partition, limit, *known)
        if handed.held and not handed.deliveries:
            held.append(True)
            halt.end()
            until(lambda: started._backlog.idle(partition))
        return handed

    monkeypatch.setattr(Deliveries, "hand_out", outlast_the_handler)
    consumers = platform.shards[0].consumers
    monkeypatch.setattr(consumers, "_listener", Mock(spec=Listener, listening=False))
    with consumers.start_queue("payments", "mailer", Seen(halt), lease=3_600.0, polling_delay=3_600.0) as started:
        halt.await_reached()
        started._wake()
        until(lambda: at_rest(platform))
    assert held == [True]


def test_an_event_whose_handler_outlasts_the_stop_is_not_handed_out_beside_it(
    platform: EventSQL, until: Until, halt: Halt
) -> None:
    ids = fill(platform, "aab")
    seen = Seen(halt)
    started = platform.consumers.start_queue("payments", "mailer", seen, workers=1, polling_delay=POLLING)
    until(lambda: seen.ids and len(kept(platform)) == 3)
    started.stop(timeout=0.2)
    until(lambda: handed_out(platform) == 1)
    later = Seen()
    with platform.consumers.start_queue("payments", "mailer", later, polling_delay=POLLING):
        until(lambda: kept(platform) == ids[:2])
    assert later.ids == ids[2:]


def test_an_event_whose_transaction_outlasts_the_stop_is_handed_out_again_at_once(
    platform: EventSQL, until: Until, halt: Halt
) -> None:
    ids = fill(platform, "a")
    started = platform.consumers.start_queue(
        "payments", "mailer", lambda _event, _connection: halt(), lease=3_600.0, polling_delay=POLLING
    )
    halt.await_reached()
    assert not started.stop(timeout=0.01)
    later = Seen()
    with platform.consumers.start_queue("payments", "mailer", later, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert later.ids == ids


def test_a_handler_may_stop_its_consumption(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 5)
    begun = threading.Event()
    seen = Seen(lambda _event: begun.wait() and started.stop())
    started = platform.consumers.start_queue("payments", "mailer", seen, workers=1, polling_delay=POLLING)
    begun.set()
    until(lambda: not workers(platform))
    later = Seen()
    with platform.consumers.start_queue("payments", "mailer", later, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert seen.ids == ids[:1]
    assert sorted(later.ids) == ids[1:]


def test_consumptions_with_and_without_order_exclude_each_other(platform: EventSQL, until: Until, halt: Halt) -> None:
    fill(platform, "aa")
    with platform.consumers.start_queue("payments", "mailer", lambda _event: halt(), polling_delay=POLLING):
        until(lambda: kept(platform))
        with pytest.raises(RedefinitionError):
            platform.consumers.start_queue("payments", "mailer", lambda _event: None, by_key=False)
        halt.end()
        until(lambda: at_rest(platform))
    fill(platform, "aa")
    with platform.consumers.start_queue("payments", "mailer", lambda _event: None, by_key=False, polling_delay=POLLING):
        until(lambda: at_rest(platform))


def test_a_process_takes_nothing_beside_one_that_began_in_the_other_order_meanwhile(platform: EventSQL) -> None:
    fill(platform, "aa")
    one, other = process(platform), process(platform, by_key=False)
    workers = one.register("one"), other.register("other")
    assert one.hand_out(workers[0], -1, 1).deliveries
    with pytest.raises(RedefinitionError):
        other.hand_out(workers[1], -1, 1)


def test_a_repartitioned_topic_is_worked_off_layout_by_layout(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, "abcdefgh" * 5, "orders")
    platform.repartitioner.repartition("orders", 5)
    ids += fill(platform, "abcdefgh" * 5, "orders")
    seen = Seen()
    with platform.consumers.start_queue("orders", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform, "orders"))
        platform.repartitioner.repartition("orders", 2)
        ids += fill(platform, "abcdefgh" * 5, "orders")
        until(lambda: at_rest(platform, "orders"))
    assert sorted(seen.ids) == ids
    events = {event.id: event.key for event in platform.reader.read("orders")}
    for key in "abcdefgh":
        of_key = [each for each in seen.ids if events[each] == key]
        assert of_key == sorted(of_key)


def test_a_deleted_consumer_leaves_nothing(platform: EventSQL, until: Until) -> None:
    fill(platform, "ab")
    mended = threading.Event()

    def handle(_event: Event) -> None:
        if not mended.is_set():
            raise ValueError("never")

    with platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING):
        until(lambda: kept(platform))
    platform.registry.unregister_consumer("payments", "mailer")
    with platform.database.connection() as connection:
        for table in ("consumer_delivery", "consumer_cursor", "consumer_worker"):
            assert connection.execute(f"SELECT FROM eventsql.{table}").rowcount == 0


def test_the_events_of_a_killed_process_are_taken_over(platform: EventSQL, until: Until, spawn: Spawn) -> None:
    ids = fill(platform, "abcabc")
    dying = spawn("hold_delivery", "payments", "mailer", 3_600.0)
    assert dying.line() == "at work"
    dying.kill()
    seen = Seen()
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        # Nothing is taken over while the lease lasts.
        until(lambda: platform.lag("payments")[0].cause is LagCause.LEASED)
        fill(platform, "x")
        until(lambda: len(seen.ids) == 1)
        assert seen.ids[0] not in ids
        with platform.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.consumer_worker SET eql_expires_at = now() - interval '1 s' "
                "WHERE eql_id = (SELECT min(eql_id) FROM eventsql.consumer_worker)"
            )
        until(lambda: at_rest(platform))
    assert sorted(seen.ids[1:]) == ids


def test_a_retry_is_on_time_though_the_process_asks_for_events_before_it_is_due(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", 3_600.0)
    monkeypatch.setattr(failure_module, "FIRST_BACKOFF", 1.0)
    ids = fill(platform, "ab")
    failures = iter([ValueError("one")])

    def waits() -> bool:
        with platform.database.connection() as connection:
            return bool(connection.execute("SELECT FROM eventsql.consumer_delivery WHERE eql_attempts = 1").rowcount)

    def handle(event: Event) -> None:
        if event.id == ids[0] and (error := next(failures, None)):
            raise error
        if event.id == ids[1]:
            # Its end is followed by a call for events of the partition.
            until(waits)

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, workers=2, polling_delay=3_600.0):
        until(lambda: at_rest(platform))
    assert sorted(seen.ids) == [ids[0], *ids]


def test_a_process_that_lost_its_lease_commits_nothing_and_begins_anew(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_consumption, "HEARTBEATS", 100_000)
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", 3_600.0)
    ids = fill(platform, "aab")
    gate = threading.Event()
    first = iter([gate.wait])

    def handle(event: Event) -> None:
        if event.id == ids[0]:
            next(first, halt)()

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, lease=3_600.0, polling_delay=3_600.0):
        until(lambda: kept(platform) == ids[:2])
        with platform.database.connection() as connection:
            connection.execute("DELETE FROM eventsql.consumer_worker")
        until(lambda: handed_out(platform) == 2)
        gate.set()
        until(lambda: seen.ids.count(ids[0]) == 2)
        # What the lost handler did is not acknowledged: the event is handled again, before the next of its key.
        assert kept(platform) == ids[:2]
        halt.end()
        until(lambda: at_rest(platform))
    assert [seen.ids.count(each) for each in ids] == [2, 1, 1]


def test_a_process_that_lost_its_lease_begins_no_event_that_it_had_before(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_consumption, "HEARTBEATS", 100_000)
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", POLLING)
    ids = fill(platform, "ab")
    seen = Seen(lambda event: halt() if event.id == ids[0] else None)
    with platform.consumers.start_queue("payments", "mailer", seen, workers=1, lease=3_600.0, polling_delay=POLLING):
        until(lambda: seen.ids and handed_out(platform) == 2)
        with platform.database.connection() as connection:
            connection.execute("DELETE FROM eventsql.consumer_worker")
        until(lambda: handed_out(platform))
        halt.end()
        until(lambda: at_rest(platform))
    assert [seen.ids.count(each) for each in ids] == [2, 1]


@pytest.mark.parametrize("renew", [QueueConsumption._renew, QueueConsumption._wake])
def test_no_event_is_begun_after_the_end_of_a_lease_before_the_lease_is_renewed(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch,
    renew: Callable[[QueueConsumption], None],
) -> None:  # fmt: skip
    consumers = platform.shards[0].consumers
    # Nothing else causes a call for further events, which renews the lease, too.
    monkeypatch.setattr(consumers, "_listener", Mock(spec=Listener, listening=False))
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", 3_600.0)
    ids, seen = fill(platform, "aa"), Seen(halt)
    with consumers.start_queue("payments", "mailer", seen, workers=2, lease=3_600.0, polling_delay=3_600.0) as started:

        def workers_that_wait() -> int:
            return len(started._working._waiters)  # type: ignore[attr-defined]  # its condition's

        until(lambda: seen.ids and workers_that_wait() == 1)
        # As after a pause of the machine.
        started._lease_until = 0.0
        halt.end()
        until(lambda: len(kept(platform)) < 2 and workers_that_wait() == 2)
        assert seen.ids == ids[:1]
        renew(started)
        until(lambda: not kept(platform))


def test_no_event_is_begun_whose_call_outlasts_the_lease(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumers, hand_out, passed = platform.shards[0].consumers, Deliveries.hand_out, [0.0]
    monkeypatch.setattr(consumers, "_listener", Mock(spec=Listener, listening=False))
    monkeypatch.setattr(queue_consumption, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))

    def take_too_long(own: Deliveries, worker: int, partition: int, limit: int, *known: Any) -> HandOut:
        handed = hand_out(own, worker, partition, limit, *known)
        passed[0] = 7_200.0
        return handed

    monkeypatch.setattr(Deliveries, "hand_out", take_too_long)
    ids, seen = fill(platform, "a"), Seen()
    with consumers.start_queue("payments", "mailer", seen, workers=1, lease=3_600.0, polling_delay=3_600.0) as started:

        def decided() -> bool:
            with started._lock:
                waits = bool(started._working._waiters)  # type: ignore[attr-defined]  # its condition's
                return bool(seen.ids or (started._backlog.ready and waits))

        until(decided)
        assert seen.ids == []
        started._renew()
        until(lambda: seen.ids == ids)


def test_events_of_a_failed_call_are_handed_out_again_and_those_under_way_are_not(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_out = deliveries.Deliveries.hand_out
    failures: list[bool] = []

    def fail_after_the_commit(own: deliveries.Deliveries, worker: int, partition: int, limit: int, *known: Any) -> Any:
        handed = hand_out(own, worker, partition, limit, *known)
        if handed.deliveries and failures:
            failures.pop()
            raise DatabaseUnavailableError("the answer was lost")
        return handed

    monkeypatch.setattr(deliveries.Deliveries, "hand_out", fail_after_the_commit)
    monkeypatch.setattr(queue_consumption, "FAULT_DELAY", 0.01)
    ids = fill(platform, "c")
    seen = Seen(lambda event: halt() if event.id == ids[0] else None)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        halt.await_reached()
        failures.append(True)
        ids += fill(platform, "aab")
        until(lambda: kept(platform) == ids[:1] and len(seen.ids) == len(ids))
        halt.end()
        until(lambda: at_rest(platform))
    assert sorted(seen.ids) == ids


GO_BACK = """
    UPDATE eventsql.consumer c SET eql_last_event_id = k.eql_last_event_id, eql_lease_owner = k.eql_lease_owner,
        eql_lease_expires_at = k.eql_lease_expires_at
    FROM kept_consumer k WHERE (c.eql_topic, c.eql_name) = (k.eql_topic, k.eql_name);
    UPDATE eventsql.consumer_cursor c SET eql_offset = k.eql_offset, eql_claimed_upto = k.eql_claimed_upto,
        eql_unacknowledged = k.eql_unacknowledged
    FROM kept_cursor k WHERE c.eql_id = k.eql_id;
    INSERT INTO eventsql.consumer_delivery SELECT k.* FROM kept_delivery k
    WHERE NOT EXISTS (SELECT FROM eventsql.consumer_delivery d WHERE d.eql_id = k.eql_id);
"""


def keep(session: Connection) -> None:
    """Keep the state of the consumers, to go back to it."""
    for table in ("consumer", "consumer_cursor", "consumer_delivery"):
        name = table.rpartition("consumer_")[2]
        session.execute(f"CREATE TEMPORARY TABLE kept_{name} AS TABLE eventsql.{table}".encode())


def test_events_whose_acknowledgements_the_database_has_lost_are_handed_out_again_in_the_order_of_their_key(
    platform: EventSQL, until: Until, halt: Halt, session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a restore, a failover to a standby that was behind, or a crash without synchronous commits."""
    ids = fill(platform, "aaa")
    seen = Seen(lambda _event: halt())
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        halt.await_reached()
        keep(session)
        halt.end()
        until(lambda: at_rest(platform))
        session.execute(f"BEGIN; {GO_BACK} COMMIT".encode())
        later = fill(platform, "a")
        until(lambda: at_rest(platform))
    assert seen.ids == [*ids, *ids, *later]
    assert levels(caplog, queue_consumption) == ["WARNING"]


def test_an_event_that_a_process_handles_while_the_database_goes_back_is_handled_again_after_those_before_it(
    platform: EventSQL, until: Until, halt: Halt, session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    ids = fill(platform, "aaaa")
    gate = threading.Event()

    def handle(event: Event) -> None:
        if event.id == ids[0]:
            gate.wait()
        elif event.id == ids[2]:
            halt()

    seen = Seen(handle)
    with (
        platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING),
        ExitStack() as stack,
    ):
        stack.callback(gate.set)
        until(lambda: kept(platform) == ids)
        keep(session)
        gate.set()
        halt.await_reached()
        until(lambda: kept(platform) == ids[2:])
        session.execute(f"BEGIN; {GO_BACK} COMMIT".encode())
        fill(platform, "b")
        until(lambda: levels(caplog, queue_consumption) and kept(platform) == ids and handed_out(platform) == len(ids))
        halt.end()
        until(lambda: at_rest(platform))
    assert [each for each in seen.ids if each in ids] == [*ids[:3], *ids]


def test_an_event_whose_handler_ends_while_the_process_starts_over_is_handled_again_after_those_before_it(
    platform: EventSQL, until: Until, session: Connection, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The former lease has ended, and nobody has taken its events yet."""
    ids, leave = fill(platform, "aaa"), Deliveries.leave
    gates = {ids[0]: threading.Event(), ids[1]: threading.Event()}

    def let_the_handler_end(own: Deliveries, worker: int) -> None:
        leave(own, worker)
        gates[ids[1]].set()
        until(lambda: levels(caplog, queue_consumption) or ids[1] not in kept(platform))

    monkeypatch.setattr(Deliveries, "leave", let_the_handler_end)
    seen = Seen(lambda event: event.id in gates and gates[event.id].wait())
    with (
        platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING),
        ExitStack() as stack,
    ):
        for gate in gates.values():
            stack.callback(gate.set)
        until(lambda: kept(platform) == ids)
        keep(session)
        gates[ids[0]].set()
        until(lambda: seen.ids == ids[:2] and kept(platform) == ids[1:])
        session.execute(f"BEGIN; {GO_BACK} COMMIT".encode())
        fill(platform, "b")
        until(lambda: at_rest(platform))
    assert [each for each in seen.ids if each in ids] == [*ids[:2], *ids]


def test_events_that_have_the_ids_of_lost_events_are_handled(
    platform: EventSQL, until: Until, halt: Halt, session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """The database went back to a state from before the events that the process has."""
    seen: list[bytes | None] = []

    def handle(event: Event) -> None:
        seen.append(event.value)
        if event.value == b"lost 1":
            halt()

    def publish(*values: bytes) -> None:
        platform.publisher.publish_all(Publication("payments", value, key="a") for value in values)
        platform.transfer.run_once()

    def held(ids: list[int]) -> bool:
        return kept(platform) == ids and handed_out(platform) == len(ids)

    with platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING):
        publish(b"kept")
        until(lambda: len(seen) == 1 and at_rest(platform))
        keep(session)
        end = platform.reader.end("payments")
        publish(b"lost 1", b"lost 2")
        halt.await_reached()
        until(lambda: held([end + 1, end + 2]))
        session.execute(
            f"""BEGIN; {GO_BACK}
            DELETE FROM eventsql.consumer_delivery d
            WHERE NOT EXISTS (SELECT FROM kept_delivery k WHERE k.eql_id = d.eql_id);
            DELETE FROM eventsql.{stored("payments")} WHERE eql_id > {end};
            SELECT setval(pg_get_serial_sequence('eventsql.{stored("payments")}', 'eql_id'), {end}); COMMIT""".encode()
        )
        publish(b"new 1", b"new 2")
        until(lambda: held([end + 1, end + 2]))
        halt.end()
        until(lambda: at_rest(platform))
    assert seen == [b"kept", b"lost 1", b"new 1", b"new 2"]
    assert "WARNING" in levels(caplog, queue_consumption)


def test_a_handler_in_a_transaction_holds_no_other_event_up_while_the_database_goes_back(
    platform: EventSQL, until: Until, halt: Halt, session: Connection
) -> None:
    ids = fill(platform, "ab")
    gate, handled = threading.Event(), list[int]()

    def handle(event: Event, _connection: Connection) -> None:
        handled.append(event.id)
        if event.id == ids[1]:
            halt()
        else:
            gate.wait()

    with (
        platform.consumers.start_queue("payments", "mailer", handle, polling_delay=POLLING),
        ExitStack() as stack,
    ):
        stack.callback(gate.set)
        until(lambda: sorted(handled) == ids)
        keep(session)
        gate.set()
        until(lambda: kept(platform) == ids[1:])
        session.execute(f"BEGIN; {GO_BACK} COMMIT".encode())
        ids += fill(platform, "c")
        until(lambda: sorted(handled) == [ids[0], *ids])
        halt.end()
        until(lambda: at_rest(platform))
    assert sorted(handled) == [ids[0], *ids]


def test_waiting_events_are_handed_out_again_after_the_database_went_back(
    platform: EventSQL, until: Until, session: Connection, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Those behind a waiting event of their key, and those behind one that is under way."""
    # The process fetches all of them, however slow it is.
    monkeypatch.setattr(queue_backlog, "AHEAD_SECONDS", 3_600.0)
    ids = fill(platform, "1abcca")
    first, others, handled = threading.Event(), threading.Event(), list[int]()

    def handle(event: Event, _connection: Connection) -> None:
        handled.append(event.id)
        (first if event.id == ids[0] else others).wait()

    with (
        platform.consumers.start_queue("payments", "mailer", handle, workers=2, polling_delay=POLLING),
        ExitStack() as stack,
    ):
        stack.callback(first.set)
        stack.callback(others.set)
        until(lambda: sorted(handled) == ids[:2] and kept(platform) == ids)
        keep(session)
        first.set()
        until(lambda: handled[2:] == [ids[2]] and kept(platform) == ids[1:])
        session.execute(f"BEGIN; {GO_BACK} COMMIT".encode())
        ids += fill(platform, "d")
        until(lambda: levels(caplog, queue_consumption))
        others.set()
        until(lambda: at_rest(platform))
    assert sorted(handled) == [ids[0], *ids]
    assert [each for each in handled if each in ids[3:5]] == ids[3:5]


def test_acknowledgements_that_find_the_disk_full_are_one_line_in_the_log_until_they_are_written(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    acknowledge, full = deliveries.Deliveries.acknowledge, [True] * 5

    def refuse(own: deliveries.Deliveries, done: Sequence[Delivery]) -> Any:
        if full:
            full.pop()
            raise DatabaseFullError("no room is left")
        return acknowledge(own, done)

    monkeypatch.setattr(deliveries.Deliveries, "acknowledge", refuse)
    monkeypatch.setattr(queue_consumption, "SETTLE_RETRY", 5 * POLLING)
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", POLLING)
    fill(platform, "a")
    with (
        caplog.at_level(logging.INFO, queue_consumption.__name__),
        platform.consumers.start_queue("payments", "mailer", Seen(), polling_delay=POLLING),
    ):
        until(lambda: not full and levels(caplog, queue_consumption)[-1] == "INFO")
    assert levels(caplog, queue_consumption) == ["ERROR", "INFO"]


def test_a_partition_that_cannot_be_fetched_stops_no_other_and_is_one_line_in_the_log(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hand_out, seen, left = deliveries.Deliveries.hand_out, Seen(), [True] * 3
    ids, asked = fill(platform, 12, "orders"), list[int]()

    def refuse(own: deliveries.Deliveries, worker: int, partition: int, limit: int, *known: Any) -> HandOut:
        if later := platform.reader.read("orders", after=ids[11]):
            asked.append(partition)
            others = {event.id for event in later if event.partition != asked[0]}
            if partition == asked[0] and (left or not others.issubset(seen.ids)):
                del left[:1]
                raise DatabaseBusyError("another session keeps the events")
        return hand_out(own, worker, partition, limit, *known)

    monkeypatch.setattr(deliveries.Deliveries, "hand_out", refuse)
    monkeypatch.setattr(queue_consumption, "FAULT_DELAY", 5 * POLLING)
    # A notification wakes all partitions at once.
    monkeypatch.setattr(queue_consumption, "IDLE_POLLING", 3_600.0)
    with (
        caplog.at_level(logging.INFO, queue_consumption.__name__),
        platform.consumers.start_queue("orders", "mailer", seen, polling_delay=POLLING),
    ):
        until(lambda: at_rest(platform, "orders"))
        ids += fill(platform, 12, "orders")
        until(lambda: sorted(seen.ids) == ids)
    assert levels(caplog, queue_consumption) == ["WARNING", "INFO"]


def test_a_partition_that_could_not_be_fetched_goes_on_if_others_have_consumed_its_events(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> HandOut:
        raise DatabaseBusyError("another session keeps the events")

    monkeypatch.setattr(deliveries.Deliveries, "hand_out", refuse)
    monkeypatch.setattr(queue_consumption, "FAULT_DELAY", POLLING)
    fill(platform, "a")
    with (
        caplog.at_level(logging.INFO, queue_consumption.__name__),
        platform.consumers.start_queue("payments", "mailer", Seen(), polling_delay=POLLING),
    ):
        until(lambda: levels(caplog, queue_consumption))
        assert platform.consumers.consume_once("payments", "mailer", lambda _events, _connection: None) == 1
        until(lambda: levels(caplog, queue_consumption) == ["WARNING", "INFO"])


def test_a_seek_under_a_running_handler_stops_no_settling(
    platform: EventSQL, until: Until, halt: Halt, caplog: pytest.LogCaptureFixture
) -> None:
    ids = fill(platform, "ab")
    seen = Seen(lambda event: halt() if event.id == ids[0] else None)
    with platform.consumers.start_queue("payments", "mailer", seen, by_key=False, polling_delay=POLLING):
        until(lambda: kept(platform) == ids[:1])
        platform.seeker.execute("payments", "mailer", AtOffset(0), force=True)
        # This process has the same event twice now, once from before the seek.
        until(lambda: [seen.ids.count(each) for each in ids] == [2, 2])
        halt.end()
        until(lambda: at_rest(platform))
    assert not [record for record in caplog.records if record.exc_text], "an unexpected error"


def test_a_seek_does_not_wait_for_ever_for_a_handler(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seek, "LOCK_SECONDS", 0.1)
    fill(platform, "a")
    own = process(platform)
    (delivery,) = own.hand_out(own.register("a process"), -1, 1).deliveries
    with ThreadPoolExecutor(1) as threads, sessions() as handling:
        own._acknowledge_in(handling, delivery)
        seeking = threads.submit(platform.seeker.execute, "payments", "mailer", AtOffset(0), force=True)
        with pytest.raises(DatabaseBusyError, match="did not move, because other transactions held its partitions"):
            seeking.result(PATIENCE)


def move_by_a_seek(platform: EventSQL, _own: Deliveries, _worker: int) -> None:
    platform.seeker.execute("payments", "mailer", AtOffset(0), force=True)


def find_the_offset_moved(platform: EventSQL, own: Deliveries, worker: int) -> None:
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 1")
    own.hand_out(worker, -1, 3)


def acknowledge(own: Deliveries, _worker: int, settled: list[Delivery], _others: list[Delivery]) -> None:
    assert own.acknowledge(settled) == set()


def give_back(own: Deliveries, worker: int, _settled: list[Delivery], others: list[Delivery]) -> None:
    own.give_back_others(worker, -1, others)


@pytest.mark.parametrize(("handled", "settled"), [(1, [2, 0]), (2, [0, 1])])
@pytest.mark.parametrize("settle", [acknowledge, give_back])
@pytest.mark.parametrize("move", [move_by_a_seek, find_the_offset_moved])
def test_settling_several_events_does_not_deadlock_with_a_move(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch,
    *, move: Callable[[EventSQL, Deliveries, int], None], settle: Callable[..., None], handled: int, settled: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr(deliveries, "LOCK_SECONDS", PATIENCE)
    first, *_ = fill(platform, 3)
    own = process(platform)
    worker = own.register("a process")
    handed = own.hand_out(worker, -1, 3).deliveries
    with platform.database.connection() as connection:
        # Its row comes last in the table, as rows do that take the places of vacuumed rows.
        connection.execute(
            "WITH moved AS (DELETE FROM eventsql.consumer_delivery WHERE eql_id = %s RETURNING *) "
            "INSERT INTO eventsql.consumer_delivery SELECT * FROM moved",
            [first],
        )
        # The server reads a small table from its start to its end.
        connection.execute("ANALYZE eventsql.consumer_delivery")
    with ThreadPoolExecutor(2) as threads, sessions() as handling:
        own._acknowledge_in(handling, handed[handled])
        moving = threads.submit(move, platform, own, worker)
        until_blocked()
        settling = threads.submit(settle, own, worker, [handed[each] for each in settled], [handed[handled]])
        until_blocked(2)
        handling.rollback()
        assert moving.exception(PATIENCE) is None
        settling.result(PATIENCE)


def test_a_seek_of_a_partition_leaves_no_event_of_another_partition_behind(
    platform: EventSQL, until: Until, halt: Halt
) -> None:
    platform.publisher.publish(Publication("orders", b"0", key="a", partition=0))
    platform.transfer.run_once()
    seen = Seen(lambda event: halt() if event.partition == 0 else None)
    with platform.consumers.start_queue("orders", "mailer", seen, workers=3, polling_delay=POLLING):
        until(lambda: seen.ids)
        platform.publisher.publish(Publication("orders", b"1", key="a", partition=1))
        platform.transfer.run_once()
        # Beside the event of its key in the other partition.
        until(lambda: len(seen.ids) == 2 and len(kept(platform)) == 1)
        platform.seeker.execute("orders", "mailer", AtOffset(0), partition=0, force=True)
        halt.end()
        until(lambda: at_rest(platform, "orders"))


def test_a_handler_from_before_a_seek_settles_nothing_after_it(platform: EventSQL) -> None:
    ids = fill(platform, "aa")
    own = process(platform)
    worker = own.register("a process")
    before = own.hand_out(worker, -1, 9).deliveries
    platform.seeker.execute("payments", "mailer", AtOffset(0), force=True)
    after = own.hand_out(worker, -1, 9).deliveries
    assert [each.event.id for each in after] == ids

    assert own.acknowledge([*before, after[0]]) == {after[0]}
    with pytest.raises(ClaimLostError):
        own.fail(before[1], ValueError("late"), counts=True, behind=[])
    with pytest.raises(ClaimLostError):
        own.handle(before[1], lambda *_: pytest.fail("it was handed out again"), Cancellation(threading.Event()))
    assert kept(platform) == ids[1:]


def test_a_lost_answer_after_a_seek_leaves_no_event_with_a_process_that_does_not_know_it(platform: EventSQL) -> None:
    ids = fill(platform, "ab")
    own = process(platform)
    worker = own.register("a process")
    before = own.hand_out(worker, -1, 9).deliveries
    platform.seeker.execute("payments", "mailer", AtOffset(0), force=True)
    own.hand_out(worker, -1, 9)
    own.give_back_others(worker, -1, before)
    assert [each.event.id for each in own.hand_out(own.register("another"), -1, 9).deliveries] == ids


@pytest.mark.parametrize("limit", [1, 2], ids=["on another page", "on the same page"])
def test_an_acknowledgement_that_a_lost_process_has_under_way_holds_up_its_key_alone(
    platform: EventSQL, session: Connection, limit: int
) -> None:
    ids = fill(platform, "aabc")
    own = process(platform, most=4)
    lost = own.register("a lost process")
    held = own.hand_out(lost, -1, 4).deliveries
    session.autocommit = False
    own._acknowledge_in(session, held[0])
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.consumer_worker")

    worker = own.register("a process")
    assert [each.event.id for _ in range(2) for each in own.hand_out(worker, -1, limit).deliveries] == ids[2:]
    assert own.hand_out(worker, -1, limit).deliveries == []
    session.rollback()
    assert [each.event.id for each in own.hand_out(worker, -1, 2).deliveries] == ids[:2]


def test_no_event_overtakes_one_of_its_key_that_becomes_free_meanwhile(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = fill(platform, "aba")
    own = process(platform, most=3)
    leaving, lost = own.register("a process that leaves"), own.register("a lost process")
    held = [own.hand_out(each, -1, 1).deliveries[0] for each in (leaving, lost, leaving)]
    assert [each.event.id for each in held] == ids
    session.autocommit = False
    own._acknowledge_in(session, held[1])
    own.leave(lost)

    def leave_after_the_first_page(connection: Connection, query: Any, values: Any, **options: Any) -> Any:
        rows = fetch_all(connection, query, values, **options)
        if "after" in values:
            own.leave(leaving)
        return rows

    monkeypatch.setattr(deliveries, "fetch_all", leave_after_the_first_page)
    worker = own.register("a process")
    assert own.hand_out(worker, -1, 1).deliveries == []
    assert [each.event.id for each in own.hand_out(worker, -1, 2).deliveries] == [ids[0], ids[2]]


def test_events_of_a_key_begin_anew_in_their_order_after_a_seek(platform: EventSQL, until: Until, halt: Halt) -> None:
    ids = fill(platform, "aaa")
    seen = Seen(halt)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: seen.ids)
        platform.seeker.execute("payments", "mailer", AtOffset(0), force=True)
        until(lambda: kept(platform) == ids)
        halt.end()
        until(lambda: at_rest(platform))
    assert seen.ids == [ids[0], *ids]


def test_a_process_keeps_its_lease_while_its_handlers_have_every_connection(
    platform: EventSQL, until: Until, session: Connection, halt: Halt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(queue_consumption, "HEARTBEATS", 100_000)
    ids = fill(platform, "ab")
    seen = Seen(halt)

    def renewals() -> list[Any]:
        return session.execute("SELECT eql_id, eql_expires_at FROM eventsql.consumer_worker").fetchall()

    with (
        platform.consumers.start_queue("payments", "mailer", seen, lease=3_600.0, polling_delay=POLLING),
        ExitStack() as handlers,
    ):
        until(lambda: len(seen.ids) == 2)
        while not platform.database.exhausted:
            handlers.enter_context(platform.database.connection())
        (first,) = renewals()
        until(lambda: renewals()[0][1] > first[1])
        assert renewals()[0][0] == first[0]
        handlers.close()
        halt.end()
        until(lambda: at_rest(platform))
    assert sorted(seen.ids) == ids


def test_more_workers_than_connections_are_refused_where_each_needs_one(platform: EventSQL) -> None:
    most = int(platform.database.most_connections)
    with pytest.raises(ValidationError):
        platform.consumers.start_queue("payments", "mailer", lambda _event, _connection: None, workers=most + 1)
    assert not workers(platform)
    with platform.consumers.start_queue("payments", "mailer", lambda _event: None, workers=most + 1):
        assert workers(platform) == 1


def test_no_event_overtakes_one_of_its_key_that_another_process_took(
    platform: EventSQL, until: Until, halt: Halt
) -> None:
    """As after a pause of the machine: the server ended a lease that this process believes to hold."""
    ids = fill(platform, "baa")
    handled: list[int] = []
    other = process(platform)

    def handle(event: Event, _connection: Connection) -> None:
        handled.append(event.id)
        if event.id == ids[0]:
            halt()

    taken: list[Delivery] = []

    def take() -> bool:
        with platform.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.consumer_worker SET eql_expires_at = 'epoch' WHERE eql_id <> %s", [worker]
            )
        taken.extend(other.hand_out(worker, -1, 1).deliveries)
        return bool(taken)

    with platform.consumers.start_queue("payments", "mailer", handle, workers=1, polling_delay=POLLING):
        until(lambda: handled and kept(platform) == ids)
        worker = other.register("another process")
        until(take)
        assert taken[0].event.id == ids[1]
        halt.end()
        until(lambda: kept(platform) == ids[1:])
        more = fill(platform, "c")
        until(lambda: handled == [ids[0], *more])
        other.acknowledge(taken)
        until(lambda: at_rest(platform))
    assert handled == [ids[0], *more, ids[2]]


def test_a_failure_whose_answer_was_lost_lets_no_later_event_of_its_key_go(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, begun = deliveries.Deliveries.fail, list[bool]()

    def fail_after_the_commit(own: deliveries.Deliveries, *arguments: Any, **named: Any) -> float:
        begun.append(True)
        delay = fail(own, *arguments, **named)
        if len(begun) == 1:
            raise DatabaseUnavailableError("the answer was lost")
        return delay

    monkeypatch.setattr(deliveries.Deliveries, "fail", fail_after_the_commit)
    monkeypatch.setattr(failure_module, "FIRST_BACKOFF", 3_600.0)
    monkeypatch.setattr(failure_module, "MAX_BACKOFF", 3_600.0)
    ids = fill(platform, "aaa")
    failures = [ValueError("not yet")]

    def handle(event: Event) -> None:
        if event.id == ids[0] and failures:
            raise failures.pop()

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: len(begun) == 2)
        other = fill(platform, "b")
        # It is handed out after the failure is settled.
        until(lambda: len(seen.ids) > 1)
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer_delivery SET eql_due_at = now()")
        until(lambda: at_rest(platform))
    assert seen.ids == [ids[0], *other, *ids]


def test_an_acknowledgement_whose_answer_was_lost_repeats_no_other_event(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledge, begun = deliveries.Deliveries.acknowledge, list[bool]()

    def fail_after_the_commit(own: deliveries.Deliveries, done: Sequence[Delivery]) -> set[Delivery]:
        begun.append(True)
        acknowledged = acknowledge(own, done)
        if len(begun) == 1:
            raise DatabaseUnavailableError("the answer was lost")
        return acknowledged

    monkeypatch.setattr(deliveries.Deliveries, "acknowledge", fail_after_the_commit)
    ids = fill(platform, "baa")
    under_way = threading.Event()

    def handle(event: Event) -> None:
        if event.id == ids[0]:
            under_way.set()
            halt()
        else:
            under_way.wait()

    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, workers=2, polling_delay=POLLING):
        halt.await_reached()
        until(lambda: ids[2] in seen.ids)
        halt.end()
        until(lambda: at_rest(platform))
    assert sorted(seen.ids) == ids


def takes_no_writes() -> DatabaseError:
    error = DatabaseError("the database takes no writes")
    error.__cause__ = psycopg.errors.ReadOnlySqlTransaction()
    return error


@pytest.mark.parametrize("error", [DatabaseUnavailableError("the database is away"), takes_no_writes()], ids=str)
def test_a_database_that_is_away_is_asked_about_one_failed_event_at_a_time(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, error: DatabaseError
) -> None:
    """A process has up to a thousand of them, and each call that fails is a connection and a line in the log."""
    await_outcomes, fail = QueueConsumption._await_outcomes, deliveries.Deliveries.fail
    rounds: list[bool] = []
    refused: list[int] = []
    back = threading.Event()

    def count(own: QueueConsumption) -> Any:
        rounds.append(True)
        return await_outcomes(own)

    def refuse(own: deliveries.Deliveries, delivery: Delivery, *arguments: Any, **named: Any) -> float:
        if not back.is_set():
            refused.append(delivery.event.id)
            raise error
        return fail(own, delivery, *arguments, **named)

    monkeypatch.setattr(QueueConsumption, "_await_outcomes", count)
    monkeypatch.setattr(deliveries.Deliveries, "fail", refuse)
    ids = fill(platform, 4)
    failing = set(ids)

    def handle(event: Event) -> None:
        if event.id in failing:
            failing.remove(event.id)
            raise ValueError("once")

    with platform.consumers.start_queue("payments", "mailer", Seen(handle), polling_delay=POLLING):
        # Each event is the first of a round: one whose failure always ends the session holds up no other.
        until(lambda: set(refused) == set(ids))
        assert len(refused) <= len(rounds)
        back.set()
        until(lambda: at_rest(platform))


def test_two_failures_that_the_database_does_not_take_at_once_are_both_noted_later(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    await_outcomes, fail = QueueConsumption._await_outcomes, deliveries.Deliveries.fail
    ids = fill(platform, "ab")
    gathered, failing, refused = list[Any](), set(ids), list[int]()

    def gather(own: QueueConsumption) -> Any:
        if gathered:
            return await_outcomes(own)
        while len(gathered) < 2 and (outcomes := await_outcomes(own)) is not None:
            gathered.extend(outcomes)
        return list(gathered) or None

    def refuse_once(own: deliveries.Deliveries, delivery: Delivery, *arguments: Any, **named: Any) -> float:
        if delivery.event.id not in refused:
            refused.append(delivery.event.id)
            raise DatabaseBusyError("locked")
        return fail(own, delivery, *arguments, **named)

    def handle(event: Event) -> None:
        if event.id in failing:
            failing.remove(event.id)
            raise ValueError("once")

    monkeypatch.setattr(QueueConsumption, "_await_outcomes", gather)
    monkeypatch.setattr(deliveries.Deliveries, "fail", refuse_once)
    monkeypatch.setattr(queue_consumption, "SETTLE_RETRY", 0.01)
    seen = Seen(handle)
    with platform.consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING):
        until(lambda: at_rest(platform))
    assert sorted(refused) == ids
    assert sorted(seen.ids) == sorted(ids * 2)


class Exchange:
    """A lock that knows whether a thread waits for it."""

    def __init__(self) -> None:
        self.awaited = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.awaited += 1
        self._lock.acquire()
        self.awaited -= 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_no_later_event_of_a_key_comes_while_an_earlier_one_is_given_back(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, hand_out = deliveries.Deliveries.fail, deliveries.Deliveries.hand_out
    exchange, later, came = Exchange(), list[int](), list[Delivery]()

    def fail_while_more_come(own: deliveries.Deliveries, *arguments: Any, **named: Any) -> float:
        later.extend(fill(platform, "a"))
        until(lambda: exchange.awaited or came)
        return fail(own, *arguments, **named)

    def hand_out_more(own: deliveries.Deliveries, *arguments: Any) -> HandOut:
        handed = hand_out(own, *arguments)
        came.extend(handed.deliveries if later else [])
        return handed

    monkeypatch.setattr(deliveries.Deliveries, "fail", fail_while_more_come)
    monkeypatch.setattr(deliveries.Deliveries, "hand_out", hand_out_more)
    failures = [ValueError("not yet")]

    def handle(_event: Event) -> None:
        if failures:
            raise failures.pop()

    seen, consumers = Seen(handle), platform.shards[0].consumers
    with consumers.start_queue("payments", "mailer", seen, polling_delay=POLLING) as started:
        monkeypatch.setattr(started, "_exchange", exchange)
        # The later event may be in the log before these two are read.
        ids = fill(platform, "aa")[:2]
        until(lambda: later and at_rest(platform))
    assert seen.ids == [ids[0], *ids, *later]


def test_wrong_arguments_are_refused_before_anything_runs(platform: EventSQL) -> None:
    async def later(_event: Event) -> None: ...

    handlers: list[Any] = [later, lambda: None, lambda _a, _b, _c: None]
    for handler in handlers:
        with pytest.raises(ValidationError):
            platform.consumers.start_queue("payments", "mailer", handler)
    wrongs: list[dict[str, Any]] = [{"lease": 0}, {"workers": 0}, {"max_unacknowledged": 0}, {"polling_delay": -1}]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            platform.consumers.start_queue("payments", "mailer", lambda _event: None, **wrong)
    with pytest.raises(ConsumerNotFoundError):
        platform.consumers.start_queue("payments", "nobody", lambda _event: None)
