"""When a consumer looks at its partitions again and gives them to its workers: without threads and without a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias
from unittest.mock import Mock

import pytest

from eventsql_orchestration.consuming import worker_pool
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.consuming.throttle import MOST_REST, Throttle
from eventsql_orchestration.consuming.worker_pool import (
    FAULT_DELAY,
    IDLE_POLLING,
    UNANNOUNCED_SECONDS,
    Consumption,
    PollOutcome,
)
from eventsql_orchestration.database.notifications import Listener
from eventsql_orchestration.errors import ClaimLostError, DatabaseError

KEY = ConsumerPartition("orders", "mailer", 0)

DONE = BatchResult(3, 3)
"""A batch of three events that succeeded."""

FAST = BatchResult(100_000, 100_000)
"""A batch with so many events that its partition rests."""


class Clock:
    """A clock that stands still until a test puts it forward."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    CLOCK.now = time.monotonic()
    monkeypatch.setattr(worker_pool, "time", CLOCK)
    return CLOCK


@pytest.fixture
def waits() -> list[float]:
    """The seconds that the poller has waited, by the clock."""
    return []


Pool: TypeAlias = Callable[..., Consumption]


@pytest.fixture
def pool(clock: Clock, waits: list[float]) -> Pool:
    """Makes a consumption of partitions. It has no threads: `look` and `poll` do what they do."""

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds

    def make(
        partitions: int = 1, *, listening: bool = True, polling_delay: float = 1.0, throttle: Throttle | None = None
    ) -> Consumption:
        consumption = Consumption(
            [replace(KEY, partition=partition) for partition in range(partitions)], where="a database",
            look=Mock(), poll=Mock(), polling_delay=polling_delay, workers=1,
            listener=Mock(spec=Listener, listening=listening), throttle=throttle or Throttle(),
        )  # fmt: skip
        consumption._workers = 0
        consumption._poller.wait = wait  # type: ignore[method-assign, assignment]
        return consumption

    return make


def look(consumption: Consumption, found: dict[int, float | None]) -> dict[int, int]:
    """Look as the poller does; gives what it asks for."""
    due = consumption._due()
    assert due is not None
    slots, woken = due
    now = consumption._looked_at = CLOCK.now
    asked = {slot.key.partition: slot.needed(now) for slot in slots}
    consumption._queue_ready(slots, asked, found, woken=woken)
    return asked


def poll(consumption: Consumption, outcome: PollOutcome, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Look, find the partition, and take and give it back as a worker does."""
    look(consumption, {0: 0.0})
    slot = consumption._next()
    assert slot is not None
    meanwhile()
    consumption._give_back(slot, outcome)


def state(consumption: Consumption) -> tuple[float, bool]:
    """The seconds until partition 0 is due, and whether it ignores notifications."""
    slot = consumption._idle[0]
    return round(slot.due - CLOCK.now, 6), slot.deaf


@pytest.mark.parametrize(
    ("outcome", "listening", "due_in"),
    [
        (PollOutcome(), True, IDLE_POLLING),
        (PollOutcome(), False, 1.0),
        (PollOutcome(DONE), True, IDLE_POLLING),
        # Nobody tells of events that came meanwhile.
        (PollOutcome(DONE), False, 0.0),
        (PollOutcome(DONE, due_in=0.5), False, 0.5),
        (PollOutcome(due_in=0.5), True, 0.5),
        (PollOutcome(due_in=3_600.0, least=5), True, IDLE_POLLING),
        (PollOutcome(due_in=3_600.0, least=5), False, 1.0),
        (PollOutcome(due_in=0.5, least=5), True, 0.5),
    ],
)
def test_a_partition_is_looked_at_again_when_events_may_be_there(
    pool: Pool, outcome: PollOutcome, listening: bool, due_in: float
) -> None:
    consumption = pool(listening=listening)
    consumption._wake()
    poll(consumption, outcome)
    assert state(consumption) == (due_in, False)


@pytest.mark.parametrize("outcome", [PollOutcome(), PollOutcome(DONE), PollOutcome(due_in=5.0, least=5)])
def test_a_notification_during_a_batch_leads_to_another_look_at_once(pool: Pool, outcome: PollOutcome) -> None:
    consumption = pool()
    poll(consumption, outcome, meanwhile=consumption._wake)
    assert state(consumption) == (0.0, False)
    # And to no further one.
    poll(consumption, outcome)
    due_in, _ = state(consumption)
    assert due_in > 0.0


def test_a_partition_that_is_held_up_ignores_notifications_until_its_next_look(pool: Pool, clock: Clock) -> None:
    consumption = pool()
    poll(consumption, PollOutcome(due_in=5.0, deaf=True), meanwhile=consumption._wake)
    assert state(consumption) == (5.0, True)
    clock.now += 5.0
    assert look(consumption, {}) == {0: 1}
    assert state(consumption) == (IDLE_POLLING, False)


def test_a_partition_that_ignores_notifications_is_not_looked_at_with_others(pool: Pool, clock: Clock) -> None:
    consumption = pool(2)
    poll(consumption, PollOutcome(due_in=15.0, deaf=True))
    consumption._wake()
    assert look(consumption, {}) == {1: 1}
    clock.now += IDLE_POLLING
    assert look(consumption, {}) == {1: 1}
    assert state(consumption) == (5.0, True)


def test_partitions_that_are_not_due_yet_are_looked_at_with_others(pool: Pool, clock: Clock) -> None:
    consumption = pool(2)
    poll(consumption, PollOutcome(due_in=0.5))
    clock.now += 0.5
    assert look(consumption, {}) == {0: 1, 1: 1}


def test_a_notification_that_a_partition_ignores_leads_to_no_look(pool: Pool, waits: list[float]) -> None:
    consumption = pool()
    poll(consumption, PollOutcome(due_in=5.0, deaf=True), meanwhile=consumption._wake)
    assert look(consumption, {}) == {0: 1}
    assert sum(waits) == pytest.approx(5.0)


def test_a_partition_rests_after_many_events_and_ignores_notifications_until_then(pool: Pool) -> None:
    consumption = pool()
    poll(consumption, PollOutcome(FAST), meanwhile=consumption._wake)
    due_in, deaf = state(consumption)
    assert 0.0 < due_in <= 1.5 * MOST_REST
    assert deaf


def test_a_partition_does_not_rest_if_it_is_known_when_it_is_due(pool: Pool) -> None:
    consumption = pool()
    poll(consumption, PollOutcome(FAST, due_in=0.0))
    assert state(consumption) == (0.0, False)


def test_filtered_events_count_for_a_rest(pool: Pool) -> None:
    consumption = pool()
    poll(consumption, PollOutcome(BatchResult(0, 100_000, 100_000)))
    assert state(consumption)[1]


def test_too_few_events_are_asked_for_until_one_is_enough(pool: Pool, clock: Clock) -> None:
    consumption = pool()
    poll(consumption, PollOutcome(due_in=15.0, least=5))
    clock.now += 10.0
    assert look(consumption, {}) == {0: 5}
    # One is enough before the next look would come.
    assert state(consumption) == (5.0, False)
    clock.now += 5.0
    assert look(consumption, {}) == {0: 1}
    assert state(consumption) == (IDLE_POLLING, False)


@pytest.mark.parametrize(("ready_in", "due_in"), [(0.5, 0.5), (60.0, 1.0), (None, 1.0)])
def test_a_partition_that_may_not_be_consumed_yet_is_looked_at_again_after_its_polling_delay_at_the_latest(
    pool: Pool, ready_in: float | None, due_in: float
) -> None:
    consumption = pool()
    look(consumption, {0: ready_in})
    assert state(consumption) == (due_in, False)


def idle_delay(consumption: Consumption) -> float:
    return consumption._idle_delay()


def test_events_that_came_without_a_notification_are_polled_for_until_a_notification_comes(
    pool: Pool, clock: Clock
) -> None:
    consumption = pool()
    look(consumption, {})
    assert idle_delay(consumption) == IDLE_POLLING
    clock.now += IDLE_POLLING
    poll(consumption, PollOutcome())
    assert idle_delay(consumption) == 1.0
    consumption._wake()
    assert idle_delay(consumption) == IDLE_POLLING


def test_events_that_came_without_a_notification_are_polled_for_until_a_minute_later(pool: Pool, clock: Clock) -> None:
    consumption = pool()
    look(consumption, {})
    clock.now += IDLE_POLLING
    poll(consumption, PollOutcome())
    clock.now += UNANNOUNCED_SECONDS / 2
    look(consumption, {})
    clock.now += 1.0
    poll(consumption, PollOutcome())
    clock.now += UNANNOUNCED_SECONDS
    assert idle_delay(consumption) == 1.0
    clock.now += 1.0
    assert idle_delay(consumption) == IDLE_POLLING


def test_events_before_the_first_look_or_with_a_notification_are_no_sign_of_missing_notifications(
    pool: Pool, clock: Clock
) -> None:
    consumption = pool()
    poll(consumption, PollOutcome())
    assert idle_delay(consumption) == IDLE_POLLING
    clock.now += IDLE_POLLING
    look(consumption, {})
    consumption._wake()
    poll(consumption, PollOutcome())
    # The partition was not empty at the last look.
    clock.now += IDLE_POLLING
    poll(consumption, PollOutcome())
    assert idle_delay(consumption) == IDLE_POLLING


@pytest.mark.parametrize("polling_delay", [1.0, 15.0, 60.0])
@pytest.mark.parametrize("outcome", [None, PollOutcome(due_in=3_600.0)], ids=["busy", "not due"])
def test_new_partitions_are_found_at_the_pace_of_an_idle_consumer_whatever_the_others_do(
    pool: Pool, waits: list[float], polling_delay: float, outcome: PollOutcome | None
) -> None:
    consumption = pool(polling_delay=polling_delay)
    if outcome is None:
        look(consumption, {0: 0.0})
    else:
        poll(consumption, outcome)
    assert look(consumption, {1: 0.0}) == ({} if outcome is None else {0: 1})
    assert sum(waits) == pytest.approx(max(IDLE_POLLING, polling_delay))
    assert 1 in consumption._idle
    # The next look finds it, and a later one leaves it to its worker.
    look(consumption, {1: 0.0})
    look(consumption, {1: 0.0})
    assert [slot.key.partition for slot in consumption._queue][-1:] == [1]
    assert 1 not in consumption._idle


def test_a_polling_delay_that_is_longer_than_usual_is_kept(pool: Pool) -> None:
    consumption = pool(polling_delay=60.0)
    look(consumption, {})
    assert state(consumption) == (60.0, False)


def test_partitions_that_have_more_events_than_a_batch_take_turns(pool: Pool) -> None:
    consumption = pool(2)
    look(consumption, {0: 0.0, 1: 0.0})
    turns: list[int] = []
    for _ in range(4):
        slot = consumption._next()
        assert slot is not None
        turns.append(slot.key.partition)
        consumption._give_back(slot, PollOutcome(DONE, more=True))
    assert turns == [0, 1, 0, 1]


def test_the_throttle_knows_how_many_partitions_are_polled(pool: Pool) -> None:
    throttle = Throttle()
    consumption = pool(2, throttle=throttle)
    assert throttle._partitions == 2
    look(consumption, {2: 0.0})
    assert throttle._partitions == 3
    for _ in range(2):
        consumption.stop_soon()
        assert throttle._partitions == 0
    # A look that was under way finds another partition.
    consumption._queue_ready([], {}, {3: 0.0}, woken=False)
    assert throttle._partitions == 0


def test_a_consumer_that_stops_starts_no_worker_for_a_new_partition(pool: Pool) -> None:
    consumption = pool()
    consumption._workers = 4
    consumption.stop_soon()
    consumption._queue_ready([], {}, {1: 0.0}, woken=False)
    assert consumption.threads() == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ClaimLostError("another process has the partition"), PollOutcome(due_in=0.0)),
        (DatabaseError("the server refused a statement"), PollOutcome(due_in=FAULT_DELAY, deaf=True)),
        (ValueError("unexpected"), PollOutcome(due_in=FAULT_DELAY, deaf=True)),
    ],
)
def test_a_partition_that_could_not_be_polled_waits_unless_another_process_has_it(
    pool: Pool, error: Exception, outcome: PollOutcome
) -> None:
    consumption = pool()
    consumption._poll = Mock(side_effect=error)
    assert consumption._consume(KEY) == outcome


def test_looks_that_fail_are_repeated_after_a_pause_whatever_is_notified(pool: Pool, clock: Clock) -> None:
    consumption = pool()
    looks: list[float] = []

    def fail(_asked: object) -> dict[int, float | None]:
        looks.append(clock.now)
        consumption._wake()
        if len(looks) == 3:
            consumption.stop_soon()
        raise DatabaseError("the server refused a statement")

    consumption._look = fail
    consumption._run_poller()
    assert [round(look - looks[0], 6) for look in looks] == [0.0, FAULT_DELAY, 2 * FAULT_DELAY]
