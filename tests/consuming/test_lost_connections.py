"""A handler that loses its connection: a restart of the server costs nothing, a handler that is to blame has failed."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import (
    batch,
    deliveries,
    failures,
    lost_connections,
    queue_consumption,
    worker_pool,
)
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.consuming.lost_connections import FREE_LOSSES, LostConnections
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseFullError, DatabaseUnavailableError
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.store import subscription
from tests.consuming.conftest import Halt, state_of
from tests.effects import DISK_IS_FULL, effects, fail_and_close, make_table, stand_still, take_too_long, write
from tests.fixtures import Terminate, Until
from tests.relay import relayed
from tests.waiting import PATIENCE

OTHERS = [1, 2, 3, 5, 6, 7, 8, 9, 10]
"""The events whose handler keeps its connection."""


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=2)
    make_table(platform)
    platform.publisher.publish_all(Publication("orders", b"%d" % number, key="k") for number in range(1, 11))
    platform.transfer.run_once()


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture(autouse=True)
def _within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 3_600.0)


class Losing:
    """A handler that writes effects, and loses its connection at event 4."""

    def __init__(self, lose: Callable[[Connection], object]) -> None:
        self.lose = lose
        self.calls = 0

    def __call__(self, events: Sequence[Event], connection: Connection) -> None:
        self.calls += 1
        for event in events:
            self.one(event, connection)

    def one(self, event: Event, connection: Connection) -> None:
        write([event], connection)
        if event.id == 4:
            self.lose(connection)
            connection.execute("SELECT 1")


def stand_still_and_say_otherwise(connection: Connection) -> None:
    try:
        stand_still(connection)
    except psycopg.Error:
        raise ValueError("not sent") from None


def consume(platform: EventSQL, handler: Losing, *, times: int) -> int:
    """Consume so often, with no pause after a failure; gives how often that raised an error."""
    raised = 0
    for _ in range(times):
        try:
            platform.consumers.consume_once("orders", "mailer", handler)
        except (DatabaseUnavailableError, ValueError):
            raised += 1
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() WHERE eql_retry_at IS NOT NULL")
    return raised


def reasons(platform: EventSQL) -> list[str]:
    platform.transfer.run_once()
    return [letter.metadata["dlt_message"] for letter in platform.dead_letters.list("orders")]


@pytest.mark.parametrize(
    ("lose", "cause"),
    [
        (stand_still, "idle_in_transaction_session_timeout"),
        (take_too_long, "_timeout of the role"),
        (stand_still_and_say_otherwise, "not sent"),
        (Connection.close, "closed"),
        (fail_and_close, "not sent"),
    ],
)
def test_an_event_whose_handler_ends_its_connection_fails_alone_and_names_the_cause(
    platform: EventSQL, lose: Callable[[Connection], object], cause: str
) -> None:
    # On a busy machine, the driver does not hear the reason in each of the tries.
    for _ in range(100):
        consume(platform, Losing(lose), times=1)
        if state_of(platform).last_event_id == 10:
            break
    assert effects(platform) == OTHERS
    (reason,) = reasons(platform)
    assert cause in reason


def test_a_batch_that_takes_too_long_is_followed_by_half_of_its_events(platform: EventSQL) -> None:
    sizes: list[int] = []

    def handle(events: Sequence[Event], connection: Connection) -> None:
        sizes.append(len(events))
        if len(events) > 5:
            take_too_long(connection)

    # On a busy machine, the driver does not hear the reason in each of the tries.
    while not state_of(platform).last_event_id:
        with suppress(DatabaseUnavailableError):
            platform.consumers.consume_once("orders", "mailer", handle)
    assert set(sizes[:-1]) == {10}
    assert (sizes[-1], state_of(platform).last_event_id) == (5, 5)


def test_a_lost_connection_of_an_event_that_others_have_handled_meanwhile_is_no_failure_of_the_next(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = "UPDATE eventsql.consumer SET eql_last_event_id = %s, eql_max_attempts = 1"
    session.execute(move, [3])
    counts = LostConnections.counts

    def handle_elsewhere(own: LostConnections, key: tuple[object, int], *named: Any) -> bool:
        alone.append(key[1])
        if alone == [4, 4]:
            session.execute(move, [4])
        return counts(own, key, *named)

    alone: list[int] = []
    monkeypatch.setattr(LostConnections, "counts", handle_elsewhere)
    consume(platform, Losing(Connection.close), times=10)
    assert alone == [4, 4]
    assert effects(platform) == OTHERS[3:]
    assert state_of(platform).last_event_id == 10
    assert reasons(platform) == []


def test_an_event_that_loses_its_connection_again_and_again_becomes_a_dead_letter(
    platform: EventSQL, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    handler = Losing(terminate)
    # The first events have the batch to themselves once its losses count; then event 4 has losses of its own.
    assert consume(platform, handler, times=FREE_LOSSES + 3 + FREE_LOSSES) == 2 * FREE_LOSSES
    assert (state_of(platform).last_event_id, state_of(platform).failed_event_id) == (3, None)
    assert consume(platform, handler, times=1) == 0
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (4, 1)
    assert consume(platform, handler, times=10) == 0
    assert effects(platform) == OTHERS
    assert len(reasons(platform)) == 1


def test_each_that_waited_for_the_server_tells_that_it_goes_on(
    platform: EventSQL, server: EmbeddedPostgres, until: Until, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for module in (worker_pool, queue_consumption):
        monkeypatch.setattr(module, "IDLE_POLLING", 0.02)
    for module in (worker_pool, queue_consumption, subscription):
        monkeypatch.setattr(module, "FAULT_DELAY", 0.1)
    waiting = (
        "consumer 'mailer' of topic 'orders'", "consumer 'returns' of topic 'orders'", "a worker of queue 'jobs'",
        "subscription letters", "the transfer",
    )  # fmt: skip

    def told(level: int, what: str = "") -> set[str]:
        texts = [each.getMessage() for each in caplog.records if each.levelno == level]
        return {who for who in waiting for text in texts if text.startswith(f"{who} {what}")}

    platform.registry.register_consumer(Consumer("orders", "returns"))
    stop = threading.Event()
    transferring = threading.Thread(target=platform.transfer.run, args=(stop,), kwargs={"polling_delay": 0.02})
    with (
        caplog.at_level(logging.INFO),
        platform.consumers.start_batch("orders", "mailer", write, polling_delay=0.02),
        platform.consumers.start_queue("orders", "returns", lambda _event: None, polling_delay=0.02),
        Queue(platform, "jobs").work(lambda _message, _connection: None),
        platform.store.subscribe("letters", lambda _change, _connection: None),
    ):
        transferring.start()
        server.stop(mode="immediate")
        try:
            until(lambda: told(logging.WARNING) == set(waiting))
        finally:
            server.start()
        until(lambda: told(logging.INFO, "goes on") == set(waiting))
        assert f"the transfer goes on with {platform.database}" in caplog.text
        stop.set()
        transferring.join()


def test_losses_count_from_the_first_one_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 60.0)
    monkeypatch.setattr(lost_connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    losses = LostConnections()
    found: list[bool] = []
    for now[0] in (0.0, 30.0, 58.0, 59.0, 59.0, 59.0, 60.0):
        found.append(losses.too_often("event 1", "event 1 lost its connection"))
    assert found == [False] * 6 + [True]
    assert losses.so_far("event 1") == 7
    assert "event 1 lost its connection 7 times" in caplog.text


def test_the_losses_of_the_events_that_lost_their_connections_last_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_connections, "_MOST_KNOWN", 2)
    losses = LostConnections()
    for event in (1, 2, 3):
        losses.too_often(event, f"event {event} lost its connection")
    assert [losses.so_far(event) for event in (1, 2, 3)] == [0, 1, 1]


def test_connections_that_are_lost_within_a_minute_cost_nothing(platform: EventSQL, terminate: Terminate) -> None:
    assert consume(platform, Losing(terminate), times=2 * FREE_LOSSES) == 2 * FREE_LOSSES
    assert (state_of(platform).last_event_id, state_of(platform).failed_event_id) == (0, None)


def test_a_connection_that_is_lost_before_its_events_are_read_is_reported_as_such(
    platform: EventSQL, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_reader: LogReader, connection: Connection, *_: object, **_named: object) -> None:
        terminate(connection)
        connection.execute("SELECT 1")

    monkeypatch.setattr(LogReader, "read_batch", lose)
    with pytest.raises(DatabaseUnavailableError):
        platform.consumers.consume_once("orders", "mailer", lambda *_: None)


def test_a_full_disk_is_no_failure_of_an_event_whose_handler_closes_its_connection(platform: EventSQL) -> None:
    def fill_the_disk(_: Sequence[Event], connection: Connection) -> None:
        with connection:
            connection.execute(DISK_IS_FULL)

    with pytest.raises(DatabaseFullError):
        platform.consumers.consume_once("orders", "mailer", fill_the_disk)
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (None, 0)


def test_an_exit_that_closes_the_connection_of_its_handler_ends_the_program_and_fails_no_event(
    platform: EventSQL,
) -> None:
    def leave(connection: Connection) -> None:
        with connection:
            raise SystemExit

    with pytest.raises(SystemExit):
        platform.consumers.consume_once("orders", "mailer", Losing(leave))
    assert (state_of(platform).last_event_id, state_of(platform).attempts) == (0, 0)


def test_a_connection_that_a_stop_has_ended_is_not_reported_as_lost(
    platform: EventSQL, halt: Halt, caplog: pytest.LogCaptureFixture
) -> None:
    consumption = platform.consumers.start_batch("orders", "mailer", Losing(halt), polling_delay=0.02)
    halt.await_reached()
    assert not consumption.stop(timeout=0.01)
    halt.end()
    assert consumption.stop(timeout=60)
    assert "lost its connection" not in caplog.text
    assert state_of(platform).last_event_id == 0


def test_an_event_that_takes_the_server_down_has_failed_when_the_server_is_back(
    platform: EventSQL, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(lost_connections, "FREE_LOSSES", 0)
    with suppress(DatabaseUnavailableError):
        platform.consumers.consume_once("orders", "mailer", Losing(lambda _: None), max_events=3)
    handler = Losing(lambda _: server.stop(mode="immediate"))
    try:
        with pytest.raises(DatabaseUnavailableError):
            platform.consumers.consume_once("orders", "mailer", handler, max_events=1)
    finally:
        server.start()
    platform.consumers.consume_once("orders", "mailer", handler, max_events=1)
    assert handler.calls == 1
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (4, 1)
    consume(platform, Losing(lambda _: None), times=2)
    assert state_of(platform).last_event_id == 10


def test_a_connection_that_is_lost_while_a_failure_is_recorded_is_not_the_failure(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(lost_connections, "FREE_LOSSES", 0)
    platform.consumers.consume_once("orders", "mailer", Losing(lambda _: None), max_events=3)

    def record(connection: Connection, *given: Any, **named: Any) -> failures.Failure:
        monkeypatch.setattr(batch, "record_failure", failures.record_failure)
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return failures.record_failure(connection, *given, **named)

    monkeypatch.setattr(batch, "record_failure", record)
    handler = Losing(fail_and_close)
    with pytest.raises(DatabaseUnavailableError):
        platform.consumers.consume_once("orders", "mailer", handler, max_events=1)
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (None, 0)
    platform.consumers.consume_once("orders", "mailer", handler, max_events=1)
    assert (state_of(platform).failed_event_id, state_of(platform).attempts) == (4, 1)
    assert "not sent" in str(state_of(platform).failure)


@pytest.mark.parametrize("lose", [stand_still, Connection.close, fail_and_close, None])
def test_an_event_of_a_queue_whose_handler_ends_its_connection_or_always_loses_it_becomes_a_dead_letter(
    platform: EventSQL,
    terminate: Terminate,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Connection], object] | None,
) -> None:
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.01)
    if lose is None:
        monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    handler = Losing(lose or terminate)
    with platform.consumers.start_queue("orders", "mailer", handler.one, workers=1, polling_delay=0.02):
        until(lambda: reasons(platform))
        until(lambda: state_of(platform).last_event_id == 10)
    assert effects(platform) == OTHERS


def test_an_event_of_a_queue_whose_handler_wraps_the_error_of_a_lost_connection_keeps_its_attempts(
    platform: EventSQL, terminate: Terminate, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.01)
    losses = iter(range(2))

    def handle(event: Event, connection: Connection) -> None:
        write([event], connection)
        if event.id == 4 and next(losses, None) is not None:
            terminate(connection)
            try:
                connection.execute("SELECT 1")
            except psycopg.Error:
                raise ValueError("not sent") from None

    with platform.consumers.start_queue("orders", "mailer", handle, workers=1, polling_delay=0.02):
        until(lambda: state_of(platform).last_event_id == 10)
    assert reasons(platform) == []
    assert sorted(effects(platform)) == list(range(1, 11))


def test_an_event_whose_lost_connection_the_server_has_not_missed_yet_holds_no_other_event_of_a_queue_up(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(deliveries, "LOCK_SECONDS", 0.05)
    url = platform.database.url
    assert url.port is not None
    with relayed(url.port) as relay:
        cuts = iter([relay.cut])

        def handle(event: Event, connection: Connection) -> None:
            write([event], connection)
            if event.id == 4 and (cut := next(cuts, None)) is not None:
                cut()
                # To send a statement would wake the server.
                assert select.select([connection], [], [], PATIENCE)[0]
                connection.pgconn.consume_input()

        with (
            EventSQL(url.set(port=relay.port).render_as_string(hide_password=False), transfer=False) as remote,
            remote.consumers.start_queue("orders", "mailer", handle, workers=1, by_key=False, polling_delay=0.02),
        ):
            until(lambda: sorted(effects(platform)) == OTHERS)
            with platform.database.connection() as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND state = 'idle in transaction' ORDER BY xact_start LIMIT 1"
                )
            until(lambda: state_of(platform).last_event_id == 10)
    assert sorted(effects(platform)) == list(range(1, 11))
    assert reasons(platform) == []


@pytest.mark.parametrize(
    ("lose", "cause"),
    [(stand_still, "idle_in_transaction_session_timeout"), (Connection.close, "closed"), (None, "closed")],
)
def test_an_event_whose_leased_handler_ends_its_connection_or_always_loses_it_becomes_a_dead_letter(
    platform: EventSQL,
    terminate: Terminate,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    *,
    lose: Callable[[Connection], object] | None,
    cause: str,
) -> None:
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    if lose is None:
        monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    handler = Losing(lose or terminate)

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            handler(events, connection)

    with platform.consumers.start_leased("orders", "mailer", handle, polling_delay=0.02):
        until(lambda: state_of(platform).last_event_id == 10)
    assert effects(platform) == OTHERS
    (reason,) = reasons(platform)
    assert cause in reason


def test_events_whose_leased_handler_loses_its_connection_once_each_keep_their_attempts(
    platform: EventSQL, terminate: Terminate, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=1)
    met: list[int] = []

    def handle(events: Sequence[Event], lease: Lease) -> None:
        met.extend(event.id for event in events)
        with lease.transaction() as connection:
            write(events, connection)
            if met.count(events[0].id) == 1:
                terminate(connection)

    with platform.consumers.start_leased("orders", "mailer", handle, max_events=1, polling_delay=0.02):
        until(lambda: state_of(platform).last_event_id == 10)
    assert len(met) == 20 > FREE_LOSSES
    assert effects(platform) == list(range(1, 11))


def test_an_event_whose_leased_handler_wraps_the_error_of_a_lost_connection_keeps_its_attempts(
    platform: EventSQL, terminate: Terminate, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    losses = iter(range(2))

    def handle(events: Sequence[Event], lease: Lease) -> None:
        try:
            with lease.transaction() as connection:
                write(events, connection)
                if next(losses, None) is not None:
                    terminate(connection)
        except DatabaseUnavailableError:
            raise ValueError("not sent") from None

    with platform.consumers.start_leased("orders", "mailer", handle, polling_delay=0.02):
        until(lambda: state_of(platform).last_event_id == 10 or state_of(platform).attempts)
    assert effects(platform) == list(range(1, 11))


def test_an_event_whose_leased_handler_cannot_begin_its_next_transaction_keeps_its_attempts(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "FAULT_DELAY", 0.01)
    away = iter([DatabaseUnavailableError])

    def handle(events: Sequence[Event], lease: Lease) -> None:
        if (error := next(away, None)) is not None:
            with suppress(DatabaseUnavailableError), lease.transaction() as connection:
                connection.close()
            with monkeypatch.context() as patched:
                patched.setattr(Database, "transaction", Mock(side_effect=error))
                lease.commit()

    with platform.consumers.start_leased("orders", "mailer", handle, max_events=1, polling_delay=0.02):
        until(lambda: state_of(platform).last_event_id == 10 or state_of(platform).attempts)
    assert state_of(platform).attempts == 0
