"""Consumers hand events over in order, in batches as asked for, each partition to one consumption at a time."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from unittest.mock import Mock

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import failures as failure_module
from eventsql_orchestration.consuming import queue_consumption
from eventsql_orchestration.consuming import worker_pool as running
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.consuming.throttle import Throttle
from eventsql_orchestration.consuming.worker_pool import Consumption, PollOptions
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.notifications import BUFFER, Listener
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    PartitionOutOfRangeError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.threads import in_thread, start_thread
from tests.consuming.conftest import levels
from tests.effects import DISK_IS_FULL, effects, make_table, write
from tests.forms import change_time, ids_in, reading
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.consuming.conftest import Halt
    from tests.fixtures import SaidBy, Sessions, Spawn, Until


def prepare(platform: EventSQL) -> None:
    make_table(platform)
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("payments"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    platform.registry.register_consumer(Consumer("orders", "auditor"))
    platform.registry.register_consumer(Consumer("payments", "mailer"))


pytestmark = pytest.mark.prepared.with_args(prepare)


def fill(platform: EventSQL, count: int, topic: str = "orders") -> list[int]:
    """Publish and transfer events; gives their offsets."""
    before = platform.reader.end(topic)
    partitioned = topic == "orders"
    platform.publisher.publish_all(
        Publication(topic, b"%d" % number, partition=number % 3 if partitioned else None) for number in range(count)
    )
    platform.transfer.run_once()
    return [event.id for event in platform.reader.read(topic, after=before)]


class Seen:
    """A handler that keeps its events."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []
        self._lock = threading.Lock()

    def __call__(self, events: Sequence[Event], connection: Connection) -> None:
        with self._lock:
            self.batches.append(list(events))

    def one(self, event: Event, connection: Connection) -> None:
        self([event], connection)

    @property
    def ids(self) -> list[int]:
        return [event.id for batch in self.batches for event in batch]


def offsets(platform: EventSQL, topic: str = "orders", consumer: str = "mailer") -> list[int]:
    return [state.last_event_id for state in platform.registry.consumer(topic, consumer)]


# One pass


def test_a_pass_hands_over_the_waiting_events_and_commits_their_offset(platform: EventSQL) -> None:
    ids = fill(platform, 5, "payments")
    seen = Seen()
    assert platform.shards[0].consumers.consume_once("payments", "mailer", seen) == 5
    assert [event.value for event in seen.batches[0]] == [b"0", b"1", b"2", b"3", b"4"]
    assert offsets(platform, "payments") == [ids[-1]]
    assert platform.shards[0].consumers.consume_once("payments", "mailer", seen) == 0


def test_a_pass_over_a_partitioned_consumer_takes_its_partitions_in_turn(platform: EventSQL) -> None:
    fill(platform, 9)
    seen = Seen()
    assert platform.shards[0].consumers.consume_once("orders", "mailer", seen) == 9
    assert [sorted({event.partition for event in batch}) for batch in seen.batches] == [[0], [1], [2]]
    assert [batch == sorted(batch, key=lambda event: event.id) for batch in seen.batches] == [True] * 3


def test_a_consumer_that_is_not_partitioned_reads_the_whole_topic_in_its_order(platform: EventSQL) -> None:
    ids = fill(platform, 9)
    seen = Seen()
    platform.shards[0].consumers.consume_once("orders", "auditor", seen)
    assert seen.ids == ids


def test_the_state_of_a_consumer_says_what_it_has_consumed(platform: EventSQL) -> None:
    ids = fill(platform, 4, "payments")
    before = platform.registry.consumer("payments", "mailer")[0]
    assert (before.consumed_events, before.last_consumption_at) == (0, None)
    platform.shards[0].consumers.consume_once("payments", "mailer", Seen(), max_events=3)
    platform.shards[0].consumers.consume_once("payments", "mailer", Seen())
    after = platform.registry.consumer("payments", "mailer")[0]
    assert (after.consumed_events, after.last_event_id) == (4, ids[-1])
    assert after.last_consumption_at is not None
    with platform.database.connection() as connection:
        row = connection.execute(
            "SELECT eql_first_event_id FROM eventsql.consumer WHERE eql_topic = 'payments'"
        ).fetchone()
    assert row == (ids[0],)


def test_a_missing_topic_consumer_or_partition_is_named(platform: EventSQL) -> None:
    with pytest.raises(TopicNotFoundError):
        platform.shards[0].consumers.consume_once("nowhere", "mailer", Seen())
    with pytest.raises(ConsumerNotFoundError):
        platform.shards[0].consumers.consume_once("orders", "nobody", Seen())
    with pytest.raises(PartitionOutOfRangeError):
        platform.shards[0].consumers.consume_once("orders", "mailer", Seen(), partition=3)
    with pytest.raises(ConsumerNotFoundError):
        platform.shards[0].consumers.start("orders", "nobody", Seen().one)


@pytest.mark.parametrize(
    "options",
    [
        {"min_events": 0},
        {"min_events": 5, "max_events": 4},
        {"polling_delay": 0.0},
        {"max_polling_delay": -1.0},
        {"workers": 0},
        {"workers": 1.5},
    ],
    ids=str,
)
def test_a_batch_consumer_that_cannot_work_is_refused(platform: EventSQL, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        platform.shards[0].consumers.start_batch("orders", "mailer", Seen(), **options)
    with pytest.raises(ValidationError):
        platform.shards[0].consumers.start_leased("orders", "mailer", lambda _events, _lease: None, **options)


# Effects and offset are one transaction


def test_effects_of_an_interrupted_batch_are_rolled_back_and_it_is_handed_over_again(platform: EventSQL) -> None:
    ids = fill(platform, 3, "payments")

    def interrupted(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        platform.shards[0].consumers.consume_once("payments", "mailer", interrupted)
    assert (effects(platform), offsets(platform, "payments")) == ([], [0])
    platform.shards[0].consumers.consume_once("payments", "mailer", write)
    assert effects(platform) == ids


def test_a_batch_whose_offset_moves_under_it_is_rolled_back(platform: EventSQL) -> None:
    fill(platform, 3, "payments")

    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 2 WHERE eql_topic = 'payments'")

    with pytest.raises(ClaimLostError, match="not at offset 0 any more"):
        platform.shards[0].consumers.consume_once("payments", "mailer", handle)
    assert (effects(platform), offsets(platform, "payments")) == ([], [0])


def test_a_handler_may_set_another_style_of_times_in_its_session(platform: EventSQL) -> None:
    def handle(_events: Sequence[Event], connection: Connection) -> None:
        connection.execute("SET datestyle TO 'SQL, DMY'")

    for _ in range(2):
        fill(platform, 1, "payments")
        assert platform.shards[0].consumers.consume_once("payments", "mailer", handle) == 1


def test_a_handler_may_publish_in_its_transaction(platform: EventSQL) -> None:
    fill(platform, 3)

    def forward(events: Sequence[Event], connection: Connection) -> None:
        platform.publisher.publish_all((event.as_publication("payments") for event in events), connection=connection)

    platform.shards[0].consumers.consume_once("orders", "auditor", forward)
    assert platform.transfer.run_once() == {"payments": 3}


# One consumption at a time


def test_a_partition_is_consumed_by_one_process_at_a_time(platform: EventSQL, spawn: Spawn) -> None:
    fill(platform, 30)
    other = spawn("hold", "orders", "mailer", 1, 0)
    assert other.line() == "in mid-batch after 10 events"
    seen = Seen()
    assert platform.shards[0].consumers.consume_once("orders", "mailer", seen) == 20
    assert {event.partition for batch in seen.batches for event in batch} == {0, 2}
    assert platform.shards[0].consumers.consume_once("orders", "mailer", seen, partition=1) == 0
    other.tell("go on")
    assert other.line() == "ended"
    assert other.end() == 0
    assert effects(platform) == ids_in(platform, "orders", 1)
    assert platform.shards[0].consumers.consume_once("orders", "mailer", seen) == 0


def test_a_process_that_is_killed_in_mid_batch_loses_and_repeats_nothing(
    platform: EventSQL, spawn: Spawn, until: Until
) -> None:
    ids = fill(platform, 105, "payments")
    doomed = spawn("hold", "payments", "mailer", -1, 4)
    assert doomed.line() == "in mid-batch after 10 events"
    doomed.kill()
    # The fifth batch of ten was written, and died with its transaction.
    assert effects(platform) == ids[:40]
    until(lambda: platform.shards[0].consumers.consume_once("payments", "mailer", write, max_events=10))
    while platform.shards[0].consumers.consume_once("payments", "mailer", write, max_events=10):
        pass
    assert effects(platform) == ids
    assert platform.registry.consumer("payments", "mailer")[0].consumed_events == 105


# Pause and resume


def test_a_paused_consumer_consumes_nothing_until_it_is_resumed(platform: EventSQL) -> None:
    fill(platform, 3)
    platform.registry.pause("orders", "mailer")
    assert platform.shards[0].consumers.consume_once("orders", "mailer", Seen()) == 0
    assert platform.shards[0].consumers.consume_once("orders", "auditor", Seen()) == 3
    platform.registry.resume("orders", "mailer")
    assert platform.shards[0].consumers.consume_once("orders", "mailer", Seen()) == 3


# Threads


@pytest.mark.parametrize("workers", [2, 10])
def test_as_many_partitions_are_consumed_side_by_side_as_there_are_workers(platform: EventSQL, workers: int) -> None:
    platform.registry.register_topic(Topic("wide", 6))
    platform.registry.register_consumer(Consumer("wide", "mailer", partitioned=True))
    platform.publisher.publish_all(Publication("wide", b"", partition=number) for number in range(6))
    platform.transfer.run_once()
    side_by_side = threading.Barrier(min(workers, 6) + 1)

    def handle(_events: Sequence[Event], _connection: Connection) -> None:
        side_by_side.wait(60)

    with platform.shards[0].consumers.start_batch(
        "wide", "mailer", handle, polling_delay=0.01, workers=workers
    ) as consumption:
        assert len(consumption._threads) == min(workers, 6) + 1
        for _ in range(6 // min(workers, 6)):
            side_by_side.wait(60)


def test_a_batch_waits_for_its_least_number_of_events(platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.shards[0].consumers.start_batch(
        "payments", "mailer", seen, min_events=3, max_events=4, polling_delay=0.005, max_polling_delay=1e6
    ) as consumption:
        ids = fill(platform, 2, "payments")
        until(lambda: any(slot.least == 3 for slot in list(consumption._idle.values())))
        ids += fill(platform, 4, "payments")
        until(lambda: len(seen.ids) == 4)
        ids += fill(platform, 1, "payments")
        until(lambda: len(seen.ids) == 7)
    assert seen.ids == ids
    assert [len(batch) for batch in seen.batches] == [4, 3]


def test_stopping_finishes_the_batch_under_way(platform: EventSQL, halt: Halt) -> None:
    ids = fill(platform, 20, "payments")

    def handle(events: Sequence[Event], connection: Connection) -> None:
        halt()
        write(events, connection)

    consumption = platform.shards[0].consumers.start_batch(
        "payments", "mailer", handle, max_events=10, polling_delay=0.01
    )
    halt.await_reached()
    consumption.stop_soon()
    halt.end()
    assert consumption.stop(timeout=60)
    assert effects(platform) == ids[:10]
    assert offsets(platform, "payments") == [ids[9]]


def test_a_handler_may_stop_its_own_consumption_after_so_many_events(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 10, "payments")
    started = threading.Event()
    stopped: list[bool] = []

    def handle(event: Event, connection: Connection) -> None:
        assert started.wait(60)
        write([event], connection)
        if event.id == ids[3]:
            stopped.append(consumption.stop())

    consumption = platform.shards[0].consumers.start("payments", "mailer", handle)
    started.set()
    until(lambda: not any(thread.is_alive() for thread in consumption._threads))
    assert consumption.stop()
    assert len(stopped) == 1
    # The batch that was under way is finished.
    assert effects(platform) == ids
    assert platform.registry.consumer("payments", "mailer")[0].failed_event_id is None


def test_handlers_that_stop_their_consumption_at_once_do_not_wait_for_each_other(platform: EventSQL) -> None:
    ids = fill(platform, 3)
    together = threading.Barrier(4)
    stopped: list[bool] = []

    def handle(events: Sequence[Event], connection: Connection) -> None:
        together.wait(60)
        write(events, connection)
        stopped.append(consumption.stop(timeout=3600))
        together.wait(60)

    consumption = platform.shards[0].consumers.start_batch("orders", "mailer", handle)
    together.wait(60)
    together.wait(60)
    assert consumption.stop(timeout=60)
    assert stopped == [False] * 3
    assert sorted(effects(platform)) == ids


def test_a_handler_that_ends_its_thread_is_tried_again(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "FAULT_DELAY", 0.01)
    seen = Seen()
    exits = iter([SystemExit(1)])

    def handle(event: Event, connection: Connection) -> None:
        if (leaving := next(exits, None)) is not None:
            raise leaving
        seen.one(event, connection)

    with platform.shards[0].consumers.start("payments", "mailer", handle, polling_delay=0.01):
        ids = fill(platform, 3, "payments")
        until(lambda: seen.ids == ids)
    assert "SystemExit" in caplog.text


def test_a_topic_that_is_deleted_under_a_consumer_is_one_line_in_the_log_until_it_is_there_again(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "FAULT_DELAY", 0.01)
    seen = Seen()

    def said(level: int) -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno == level and "'payments'" in record.getMessage()]

    with caplog.at_level(logging.DEBUG), platform.shards[0].consumers.start("payments", "mailer", seen.one):
        platform.registry.unregister_topic("payments", force=True)
        until(lambda: len(said(logging.DEBUG)) > 2)
        (line,) = said(logging.ERROR)
        assert line.exc_text is None
        platform.registry.register_topic(Topic("payments"))
        platform.registry.register_consumer(Consumer("payments", "mailer"))
        ids = fill(platform, 3, "payments")
        until(lambda: seen.ids == ids)


def test_a_disk_that_stays_full_is_one_line_in_the_log_of_a_consumer_until_it_goes_on(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "FAULT_DELAY", 0.01)
    full, seen = [True] * 5, Seen()

    def handle(events: Sequence[Event], connection: Connection) -> None:
        if full:
            full.pop()
            connection.execute(DISK_IS_FULL)
        seen(events, connection)

    ids = fill(platform, 3, "payments")
    with (
        caplog.at_level(logging.INFO, running.__name__),
        platform.consumers.start_batch("payments", "mailer", handle, max_events=1, polling_delay=0.01),
    ):
        until(lambda: seen.ids == ids)
    assert levels(caplog, running) == ["ERROR", "INFO"]


@pytest.mark.parametrize("way", ["start", "start_queue"])
def test_a_consumer_that_gets_no_connection_warns_once_and_goes_on(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    for module in (running, queue_consumption):
        monkeypatch.setattr(module, "FAULT_DELAY", 0.01)
    handled: list[int] = []

    def handle(event: Event, _connection: Connection) -> None:
        handled.append(event.id)

    with (
        caplog.at_level(logging.DEBUG),
        getattr(platform.consumers, way)("payments", "mailer", handle, polling_delay=0.01),
        ExitStack() as others,
    ):
        for _ in range(int(platform.database.most_connections)):
            others.enter_context(platform.database.connection())
        monkeypatch.setattr(platform.database.engine.pool, "_timeout", 0.01)
        until(lambda: len(levels(caplog, running, queue_consumption)) > 3)
        others.close()
        ids = fill(platform, 3, "payments")
        until(lambda: sorted(handled) == ids)
    assert [level for level in levels(caplog, running, queue_consumption) if level != "DEBUG"] == ["WARNING", "INFO"]


@pytest.mark.parametrize("way", ["start", "start_queue"])
def test_an_error_that_is_back_after_another_one_is_a_line_in_the_log_of_a_consumer(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    for module in (running, queue_consumption):
        monkeypatch.setattr(module, "FAULT_DELAY", 0.01)
    consumers = platform.shards[0].consumers
    ready, errors = consumers._ready, [DatabaseBusyError("full"), ValueError("odd"), DatabaseBusyError("full")]

    def look(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return ready(*arguments, **named)

    monkeypatch.setattr(consumers, "_ready", look)
    with (
        caplog.at_level(logging.INFO),
        getattr(consumers, way)("payments", "mailer", lambda _event, _connection: None, polling_delay=0.01),
    ):
        until(lambda: "INFO" in levels(caplog, running, queue_consumption))
    assert levels(caplog, running, queue_consumption) == ["WARNING", "ERROR", "WARNING", "INFO"]


@pytest.mark.both_forms
@pytest.mark.parametrize("partitioned", [True, False])
@pytest.mark.parametrize("way", ["start", "start_batch", "start_leased", "start_queue"])
def test_a_consumer_that_is_registered_anew_in_the_other_form_is_consumed(
    platform: EventSQL, until: Until, way: str, partitioned: bool
) -> None:
    consumer = Consumer("orders", "mailer" if partitioned else "auditor", partitioned)
    handled: set[int] = set()
    handlers: dict[str, Callable[..., None]] = {
        "start": lambda event, connection: handled.add(event.id),
        "start_batch": lambda events, connection: handled.update(event.id for event in events),
        "start_leased": lambda events, lease: handled.update(event.id for event in events),
        "start_queue": lambda event: handled.add(event.id),
    }
    first = set(fill(platform, 3))
    with getattr(platform.consumers, way)("orders", consumer.name, handlers[way], polling_delay=0.02):
        until(lambda: handled == first)
        platform.registry.unregister_consumer("orders", consumer.name)
        platform.registry.register_consumer(replace(consumer, partitioned=not partitioned), start="latest")
        second = set(fill(platform, 3))
        until(lambda: handled == first | second)
        own = [lag for lag in platform.lag("orders") if lag.consumer == consumer.name]
        assert len(own) == (1 if partitioned else 3)


def test_a_consumption_that_has_stopped_is_not_kept(platform: EventSQL, until: Until) -> None:
    running = platform.shards[0].consumers.start("orders", "mailer", Seen().one)
    assert platform.shards[0].consumers.start("payments", "mailer", Seen().one).stop(timeout=60)
    until(lambda: gc.collect() >= 0 and platform.shards[0].consumers.running.all() == [running])


def test_consumers_of_many_processes_share_the_partitions_and_repeat_nothing(
    platform: EventSQL, spawn: Spawn, until: Until
) -> None:
    workers = [spawn("consume", "mailer") for _ in range(3)]
    ids = fill(platform, 600)
    until(lambda: len(effects(platform)) >= 600)
    for worker in workers:
        worker.tell("end")
        assert worker.end() == 0
    assert sorted(effects(platform)) == ids
    with platform.database.connection() as connection:
        rows = connection.execute(
            "SELECT partition, array_agg(event_id ORDER BY id) FROM effects GROUP BY 1"
        ).fetchall()
    assert all(event_ids == sorted(event_ids) for _, event_ids in rows)


# Waking up

NEVER = 1e6
"""A polling delay that no test waits for."""


def until_idle(consumption: Consumption, until: Until) -> None:
    """Wait until every partition is found to have nothing, by a look after which it listens."""

    def idle() -> bool:
        slots = list(consumption._idle.values())
        return len(slots) == len(consumption._keys) and all(slot.empty for slot in slots) and not consumption._woken

    # Called once when listening begins.
    until(lambda: consumption._wakes)
    until(idle)


Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Rest = ParamSpec("Rest")


def noting(
    asked: list[Asked], function: Callable[Concatenate[Asked, Rest], Answer]
) -> Callable[Concatenate[Asked, Rest], Answer]:
    """The same function, which notes what it is called for."""

    def noted(first: Asked, /, *rest: Rest.args, **named: Rest.kwargs) -> Answer:
        asked.append(first)
        return function(first, *rest, **named)

    return noted


def test_a_process_that_transfers_wakes_consumers_of_another(dsn: str, platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.shards[0].consumers.start("payments", "mailer", seen.one, polling_delay=NEVER) as consumption:
        until_idle(consumption, until)
        with EventSQL(dsn) as publishing:
            publishing.publisher.publish(Publication("payments", b""))
            until(lambda: len(seen.ids) == 1)


def test_a_publisher_without_a_transfer_wakes_that_of_another_process(
    dsn: str, platform: EventSQL, until: Until
) -> None:
    with EventSQL(dsn) as transferring:
        transferring.publisher.publish(Publication("payments", b""))
        until(lambda: platform.reader.count("payments") == 1)
        until(lambda: transferring.listener.listening)
        woken = threading.Event()
        transferring.listener.subscribe(BUFFER, None, woken.set)
        platform.publisher.publish(Publication("payments", b""))
        assert woken.wait(60)
        until(lambda: platform.reader.count("payments") == 2)


def test_a_notification_during_a_pass_leads_to_another_look_at_once(
    platform: EventSQL, until: Until, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "IDLE_POLLING", NEVER)
    seen = Seen()

    def handle(events: Sequence[Event], connection: Connection) -> None:
        halt()
        seen(events, connection)

    with platform.shards[0].consumers.start_batch("payments", "mailer", handle, polling_delay=NEVER) as consumption:
        until_idle(consumption, until)
        ids = fill(platform, 1, "payments")
        halt.await_reached()
        heard = consumption._wakes
        ids += fill(platform, 1, "payments")
        until(lambda: consumption._wakes > heard)
        halt.end()
        until(lambda: len(seen.ids) == 2)
    assert seen.ids == ids


def test_a_notification_during_a_look_leads_to_another_look(platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.shards[0].consumers.start_batch("payments", "mailer", seen, polling_delay=NEVER) as consumption:
        until_idle(consumption, until)
        look = consumption._look
        published = threading.Event()

        def slow(asked: dict[int, int]) -> dict[int, float | None]:
            found = look(asked)
            if not published.is_set():
                # It has looked, and its notification comes before the look has been taken in.
                published.set()
                heard = consumption._wakes
                fill(platform, 1, "payments")
                until(lambda: consumption._wakes > heard)
            return found

        consumption._look = slow
        platform.shards[0].announce(["payments"])
        until(lambda: len(seen.ids) == 1)


def test_events_that_nobody_notifies_of_are_found_by_polling_which_then_goes_on_at_its_pace(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "IDLE_POLLING", 0.05)
    seen = Seen()
    with platform.shards[0].consumers.start_batch("payments", "mailer", seen, polling_delay=0.01) as consumption:
        until_idle(consumption, until)
        assert consumption._idle_delay() == 0.05
        platform.publisher.publish(Publication("payments", b""))
        with closing(Transfer(platform.database)) as silent:
            silent.run_once()
        until(lambda: len(seen.ids) == 1)
        assert consumption._idle_delay() == 0.01
        platform.shards[0].announce(["payments"])
        until(lambda: consumption._idle_delay() == 0.05)


def test_a_consumer_polls_at_its_pace_while_its_listener_is_cut_off(platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.shards[0].consumers.start("payments", "mailer", seen.one, polling_delay=0.01) as consumption:
        until_idle(consumption, until)
        assert consumption._idle_delay() == running.IDLE_POLLING
        platform.listener.close()
        until(lambda: consumption._idle_delay() == 0.01)
        fill(platform, 3, "payments")
        until(lambda: len(seen.ids) == 3)


def test_an_event_that_failed_is_retried_when_it_is_due_though_nobody_notifies(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_module, "FIRST_BACKOFF", 0.05)
    seen = Seen()
    failures = iter([ValueError("once"), ValueError("twice")])

    def handle(event: Event, connection: Connection) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        seen.one(event, connection)

    with platform.shards[0].consumers.start("payments", "mailer", handle, polling_delay=NEVER):
        ids = fill(platform, 1, "payments")
        until(lambda: seen.ids == ids)


def test_too_few_events_are_handed_over_when_they_have_waited_long_enough_though_nobody_notifies(
    platform: EventSQL, until: Until
) -> None:
    seen = Seen()
    with platform.shards[0].consumers.start_batch(
        "payments", "mailer", seen, min_events=5, polling_delay=NEVER, max_polling_delay=3_600.0
    ) as consumption:
        until_idle(consumption, until)
        (slot,) = consumption._idle.values()
        ids = fill(platform, 2, "payments")
        until(lambda: slot.least == 5)
        # A look that finds too few must not forget since when they wait.
        with consumption._poller:
            slot.due = math.inf
        ids += fill(platform, 1, "payments")
        until(lambda: slot.due == slot.enough_at)

        with platform.database.connection() as connection:
            change_time(connection, "payments", ids[0], datetime.now(UTC) - timedelta(hours=1))
        with consumption._poller:
            slot.due = slot.enough_at = time.monotonic()
            consumption._poller.notify()
        until(lambda: seen.ids == ids)
    assert [len(batch) for batch in seen.batches] == [3]


def test_too_few_events_from_before_the_clock_went_back_are_handed_over_at_once(
    platform: EventSQL, until: Until
) -> None:
    ids = fill(platform, 2, "payments")
    with platform.database.connection() as connection:
        change_time(connection, "payments", ids[0], datetime.now(UTC) + timedelta(hours=2))
    seen = Seen()
    with platform.shards[0].consumers.start_batch(
        "payments", "mailer", seen, min_events=5, polling_delay=NEVER, max_polling_delay=3_600.0
    ):
        until(lambda: seen.ids == ids)


def test_too_few_events_cause_looks_but_no_polls(platform: EventSQL, until: Until) -> None:
    with platform.shards[0].consumers.start_batch(
        "payments", "mailer", Seen(), min_events=50, polling_delay=NEVER, max_polling_delay=NEVER
    ) as consumption:
        polls: list[ConsumerPartition] = []
        consumption._poll = noting(polls, consumption._poll)
        until_idle(consumption, until)
        for _ in range(5):
            looked = consumption._wakes
            fill(platform, 5, "payments")
            until(lambda looked=looked: consumption._wakes > looked)  # type: ignore[misc]  # bound
            until(lambda: not consumption._woken and consumption._idle)
        assert len(polls) == 1


@pytest.mark.both_forms
def test_too_few_events_are_handed_over_once_their_layout_has_an_end(platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.shards[0].consumers.start_batch(
        "orders", "mailer", seen, min_events=50, polling_delay=NEVER, max_polling_delay=NEVER
    ) as consumption:
        until_idle(consumption, until)
        slots = list(consumption._idle.values())
        ids = fill(platform, 3)
        until(lambda: [slot.least for slot in slots] == [50] * 3)
        assert seen.ids == []
        platform.repartitioner.repartition("orders", 5)
        until(lambda: sorted(seen.ids) == ids)


def test_a_partition_that_another_transaction_held_is_looked_at_again(
    platform: EventSQL, sessions: Sessions, until: Until
) -> None:
    ids = fill(platform, 3, "payments")
    holder = sessions()
    holder.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE")
    seen = Seen()
    with platform.shards[0].consumers.start("payments", "mailer", seen.one, polling_delay=0.05) as consumption:
        until(lambda: any(slot.deaf for slot in list(consumption._idle.values())))
        assert seen.ids == []
        holder.rollback()
        until(lambda: seen.ids == ids)


def test_a_resumed_consumer_goes_on_after_its_polling_delay(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 3, "payments")
    platform.registry.pause("payments", "mailer")
    seen = Seen()
    with platform.shards[0].consumers.start("payments", "mailer", seen.one, polling_delay=0.05) as consumption:
        until(lambda: platform.listener.listening)
        until(lambda: not any(slot.empty for slot in list(consumption._idle.values())))
        platform.registry.resume("payments", "mailer")
        until(lambda: seen.ids == ids)


def test_partitions_with_more_events_than_a_batch_take_slots(platform: EventSQL, until: Until) -> None:
    fill(platform, 18)
    seen = Seen()
    with platform.shards[0].consumers.start_batch(
        "orders", "mailer", seen, max_events=2, polling_delay=0.01, workers=1
    ):
        until(lambda: len(seen.ids) == 18)
    assert [batch[0].partition for batch in seen.batches] == [0, 1, 2] * 3


# Stopping in time


def test_a_batch_that_does_not_end_in_time_is_rolled_back_and_its_partition_is_free(
    platform: EventSQL, until: Until, halt: Halt, caplog: pytest.LogCaptureFixture
) -> None:
    ids = fill(platform, 10, "payments")
    raised: list[Exception] = []

    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        halt()
        try:
            write(events, connection)
        except psycopg.OperationalError as error:
            raised.append(error)

    consumption = platform.shards[0].consumers.start_batch("payments", "mailer", handle)
    halt.await_reached()
    assert not consumption.stop(timeout=0.01)
    until(lambda: platform.shards[0].consumers.consume_once("payments", "mailer", write))
    halt.end()
    assert consumption.stop(timeout=60)
    assert len(raised) == 1
    assert effects(platform) == ids
    (state,) = platform.registry.consumer("payments", "mailer")
    assert (state.consumed_events, state.attempts) == (10, 0)
    assert "lost its connection" not in caplog.text


def test_a_statement_that_does_not_end_in_time_is_cancelled_and_no_failure_of_its_event(
    platform: EventSQL, until: Until
) -> None:
    ids = fill(platform, 10, "payments")
    inside = threading.Event()

    def handle(_events: Sequence[Event], connection: Connection) -> None:
        inside.set()
        connection.execute("SELECT pg_sleep(3600)")

    consumption = platform.shards[0].consumers.start_batch("payments", "mailer", handle)
    assert inside.wait(60)
    consumption.stop(timeout=0.01)
    assert consumption.stop(timeout=60)
    until(lambda: platform.shards[0].consumers.consume_once("payments", "mailer", write))
    assert effects(platform) == ids
    assert platform.registry.consumer("payments", "mailer")[0].failed_event_id is None


def test_a_handler_that_ends_too_late_commits_nothing_though_it_needs_no_database(
    platform: EventSQL, halt: Halt
) -> None:
    fill(platform, 3, "payments")
    consumption = platform.shards[0].consumers.start("payments", "mailer", halt)
    halt.await_reached()
    assert not consumption.stop(timeout=0.01)
    halt.end()
    assert consumption.stop(timeout=60)
    assert offsets(platform, "payments") == [0]
    assert platform.shards[0].consumers.consume_once("payments", "mailer", Seen()) == 3


def test_closing_stops_all_consumers_at_once_and_says_whether_they_ended(dsn: str, platform: EventSQL) -> None:
    fill(platform, 3)
    fill(platform, 3, "payments")
    inside = threading.Barrier(3)
    go_on = threading.Event()

    def handle(_events: Sequence[Event], _connection: Connection) -> None:
        inside.wait(60)
        go_on.wait(60)

    with EventSQL(dsn, transfer=False) as other:
        consumptions = [
            other.consumers.start_batch(topic, consumer, handle)
            for topic, consumer in (("orders", "auditor"), ("payments", "mailer"))
        ]
        inside.wait(60)
        assert not other.close(timeout=0.01)
        go_on.set()
        assert all(consumption.stop(timeout=60) for consumption in consumptions)
        assert other.close()
    assert offsets(platform, "payments") == [0]
    assert offsets(platform, "orders", "auditor") == [0]


# What it asks of the server


def test_an_idle_poll_takes_two_statements_and_a_batch_three_whatever_its_size(
    platform: EventSQL, said_by: SaidBy
) -> None:
    partition = platform.shards[0].consumers._keys("payments", "mailer")[0]
    options, seen = PollOptions.of(max_events=1_000, max_polling_delay=1.0), Seen()
    # A process learns the form of a log at its first look.
    assert platform.reader.count("payments") == 0
    said = said_by(platform.database)
    platform.shards[0].consumers._poll(partition, seen, options, Cancellation())
    assert said.verbs() == ["BEGIN", "SELECT", reading(), "COMMIT"]
    for count in (1, 900):
        fill(platform, count, "payments")
        said.statements()
        platform.shards[0].consumers._poll(partition, seen, options, Cancellation())
        assert said.verbs() == ["BEGIN", "SELECT", reading(), "UPDATE", "COMMIT"]


def test_a_look_is_one_statement_for_all_partitions(platform: EventSQL, said_by: SaidBy) -> None:
    fill(platform, 2)
    said = said_by(platform.database)
    consumers = platform.shards[0].consumers
    for _ in range(8):
        assert consumers._ready("orders", "mailer", {0: 1, 1: 1, 2: 1}, partitioned=True) == {
            0: 0.0,
            1: 0.0,
        }
    assert said.verbs() == ["SELECT"] * 8


def test_an_idle_consumer_of_many_partitions_says_nothing_until_it_is_due_or_woken(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "IDLE_POLLING", 3_600.0)
    looks: list[dict[int, int]] = []
    polls: list[ConsumerPartition] = []
    with platform.shards[0].consumers.start_batch("orders", "mailer", Seen()) as consumption:
        consumption._look = noting(looks, consumption._look)
        consumption._poll = noting(polls, consumption._poll)
        until_idle(consumption, until)
        slowly = running.IDLE_POLLING / 2
        until(lambda: all(slot.due - time.monotonic() > slowly for slot in list(consumption._idle.values())))
        looks.clear()
        assert polls == []
        platform.shards[0].announce(["orders"])
        until(lambda: looks)
        assert looks == [{0: 1, 1: 1, 2: 1}]
        assert polls == []
        assert consumption.stop(PATIENCE)


def test_a_look_says_when_each_partition_may_be_consumed(platform: EventSQL) -> None:
    fill(platform, 9)
    ready = platform.shards[0].consumers._ready
    with platform.database.connection() as connection:
        set_where = "UPDATE eventsql.consumer SET {} WHERE eql_name = 'mailer' AND eql_partition = {}"
        connection.execute(set_where.format("eql_paused = true", 0))
        connection.execute(
            set_where.format("eql_lease_owner = 'me', eql_lease_expires_at = now() + interval '1 hour'", 1)
        )
        connection.execute(set_where.format("eql_failed_event_id = 3, eql_retry_at = now() + interval '2 hours'", 2))
    found = ready("orders", "mailer", {0: 1, 1: 1, 2: 1}, partitioned=True)
    assert found[0] is None
    assert found[1] == pytest.approx(3600, abs=60)
    assert found[2] == pytest.approx(7200, abs=60)
    # Of partition 0, which nobody asked about, one event is enough.
    assert ready("orders", "mailer", {1: 3, 2: 4}, partitioned=True).keys() == {0, 1}
    assert ready("orders", "auditor", {-1: 9}, partitioned=False) == {-1: 0.0}
    assert ready("orders", "auditor", {-1: 10}, partitioned=False) == {}


@pytest.mark.parametrize("started", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["start", "start_queue"])
def test_a_consumer_whose_threads_cannot_all_start_leaves_neither_threads_nor_subscriptions(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, way: str, started: int
) -> None:
    threads: list[threading.Thread] = []

    def start(*given: Any) -> threading.Thread:
        if len(threads) == started:
            raise RuntimeError("can't start new thread")
        threads.append(start_thread(*given))
        return threads[-1]

    for room in ("worker_pool", "queue_consumption"):
        monkeypatch.setattr(f"eventsql_orchestration.consuming.{room}.start_thread", start)
    with pytest.raises(RuntimeError):
        getattr(platform.consumers, way)("orders", "mailer", write)
    assert len(threads) == started
    until(lambda: not any(thread.is_alive() for thread in threads))
    assert platform.shards[0].listener._callbacks == {}


@pytest.mark.parametrize("way", ["start", "start_queue"])
def test_the_close_of_a_platform_ends_a_consumer_whose_start_ctrl_c_interrupted(
    platform: EventSQL, until: Until, way: str
) -> None:
    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "mailer" in thread.name]

    consumers = platform.shards[0].consumers
    for after in itertools.count():
        call = partial(getattr(consumers, way), "orders", "mailer", write)
        goes_on = interrupted(after, call, module="consuming/consumers.py")
        consumers.close()
        until(lambda: running() == [])
        if not goes_on:
            break
    assert after > 1


def test_a_consumer_goes_on_with_its_threads_and_says_so_only_once_a_new_partition_has_one(
    until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads, polled, said, free = list[threading.Thread](), list[int](), list[None](), threading.Event()

    def start(*given: Any) -> threading.Thread:
        if len(threads) == 2 and not free.is_set():
            raise RuntimeError("can't start new thread")
        threads.append(start_thread(*given))
        return threads[-1]

    def poll(key: ConsumerPartition, _cancellation: Cancellation) -> running.PollOutcome:
        polled.append(key.partition)
        return running.PollOutcome()

    monkeypatch.setattr(running, "start_thread", start)
    monkeypatch.setattr(running, "FAULT_DELAY", 0.01)
    known = [ConsumerPartition("orders", "mailer", 0)]
    with Consumption(
        known, where="here", look=lambda _asked: {0: 0.0, 1: 0.0}, poll=poll, polling_delay=0.01, workers=2,
        listener=Mock(spec=Listener, listening=False), throttle=Throttle(),
    ).start() as consumption:  # fmt: skip

        def stop_it(*_: object, **_named: object) -> None:
            said.append(in_thread("stop", consumption.stop_soon).result(PATIENCE))

        # Another thread may be stopping the consumer while the line is written.
        monkeypatch.setattr(running.logger, "info", stop_it)
        until(lambda: min(map(polled.count, (0, 1))) > 1 and len(caplog.records) > 1)
        assert not said
        free.set()
        until(lambda: said)
