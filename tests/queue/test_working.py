"""Workers of a queue handle each message once, hold what they work on, and give back the rest when they stop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import count
from typing import Any, Final

import psycopg
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.consuming import lost_connections
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseUnavailableError, ValidationError
from eventsql_orchestration.queue import Message, Queue, held_messages
from eventsql_orchestration.queue.held_messages import HeldMessages
from eventsql_orchestration.queue.queue_table import QueueTable
from eventsql_orchestration.queue.worker import Handler, exponential
from eventsql_orchestration.threads import in_thread, start_thread
from tests.effects import DISK_IS_FULL, MuteError, stand_still, take_too_long
from tests.fixtures import Terminate, Until
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

LOST: Final = 2
"""Receives whose connection is lost: as many as `max_receives`."""


@pytest.fixture
def queue(platform: EventSQL) -> Queue:
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.effect (body bytea)")
    return Queue(platform, "commands", max_receives=2)


def effects(platform: EventSQL) -> list[bytes]:
    with platform.database.connection() as connection:
        return [row[0] for row in connection.execute("SELECT body FROM public.effect ORDER BY body")]


def write(message: Message, connection: Connection) -> None:
    connection.execute("INSERT INTO public.effect VALUES (%s)", [message.body])


class Slow:
    """A handler that writes its message once it may go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, message: Message, connection: Connection) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        write(message, connection)


def test_more_workers_than_connections_are_refused(dsn: str) -> None:
    with Database(dsn, pool_size=2, max_overflow=0) as database:
        queue = Queue(database, "commands")
        with pytest.raises(ValidationError, match="at most 2 workers"):
            queue.work(write, workers=3)
        queue.work(write, workers=2).stop()


def test_effects_and_acknowledgements_commit_together(platform: EventSQL, queue: Queue, until: Until) -> None:
    queue.send_all([b"%02d" % number for number in range(50)])
    with queue.work(write, workers=4) as workers:
        until(lambda: workers.handled == 50)
    assert effects(platform) == [b"%02d" % number for number in range(50)]
    assert queue.statistics().depth == 0


def test_a_failing_message_is_rolled_back_retried_and_set_aside(platform: EventSQL, queue: Queue, until: Until) -> None:
    def fail(message: Message, connection: Connection) -> None:
        write(message, connection)
        if message.body == b"bad":
            raise ValueError("no\x00pe")

    queue.send_all([b"bad", b"good"])
    with queue.work(fail, backoff=lambda _: 0.0) as workers:
        until(lambda: queue.statistics().dead == 1 and workers.handled == 1)
        assert workers.failed == 2
    assert effects(platform) == [b"good"]
    (letter,) = Queue(platform, "commands_dead").peek()
    assert [entry["reason"] for entry in letter.history][:2] == ["ValueError: no�pe"] * 2


@pytest.mark.parametrize("receives", [1, 2])
def test_the_log_says_whether_a_failed_message_comes_again_or_is_a_dead_letter(
    platform: EventSQL, until: Until, caplog: pytest.LogCaptureFixture, receives: int
) -> None:
    def fail(_message: Message, _connection: Connection) -> None:
        raise ValueError("nope")

    queue = Queue(platform, "commands", max_receives=receives)
    queue.send(b"bad")
    # The receive of a message that nobody began does not count.
    queue.give_back(queue.receive())
    with queue.work(fail, backoff=lambda receive: 0.0 if receive < receives + 1 else 3_600.0) as workers:
        # A dead letter does not wait for the pause.
        until(lambda: queue.statistics().dead == 1)
        assert workers.failed == receives
    said = [record.getMessage() for record in caplog.records if record.name.endswith("queue.worker")]
    assert ["again in 0.0 s" in line for line in said] == [True] * (receives - 1) + [False]
    assert "'commands_dead'" in said[-1]
    assert caplog.text.count('raise ValueError("nope")') == receives


def test_a_message_whose_handler_finds_the_disk_full_spends_no_receive(
    queue: Queue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.queue.worker.LONGEST_AWAY", 3_600.0)
    tried = threading.Semaphore(0)

    def find_it_full(_: Message, connection: Connection) -> None:
        tried.release()
        connection.execute(DISK_IS_FULL)

    queue.send(b"1")
    for _ in range(2):
        with queue.work(find_it_full) as workers:
            assert tried.acquire(timeout=PATIENCE)
            until(lambda: queue.statistics().visible == 1)
        assert workers.failed == 0
    (message,) = queue.receive()
    assert (message.receives, message.history) == (3, ())


def test_a_full_disk_is_one_line_in_the_log_while_it_lasts(
    queue: Queue, until: Until, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.queue.worker.LONGEST_AWAY", 0.0)
    caplog.set_level(logging.INFO, logger="eventsql_orchestration.queue.worker")
    tried = 0

    def find_it_full(message: Message, connection: Connection) -> None:
        nonlocal tried
        if message.body == b"large":
            tried += 1
            if tried < 20:
                connection.execute(DISK_IS_FULL)

    queue.send_all([b"large", b"small", b"small"])
    with queue.work(find_it_full, workers=2, max_messages=1) as workers:
        until(lambda: workers.handled == 3)
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == [logging.WARNING, logging.INFO], said
    assert "waits for room" in said[0][1]
    assert "go on" in said[1][1]


@pytest.mark.parametrize("wraps", [False, True])
def test_a_message_whose_connection_is_lost_spends_no_receive(
    queue: Queue, terminate: Terminate, until: Until, *, wraps: bool
) -> None:
    def lose_it(message: Message, connection: Connection) -> None:
        if message.receives <= LOST:
            terminate(connection)
        try:
            write(message, connection)
        except psycopg.Error as error:
            if not wraps:
                raise
            raise ValueError("not sent") from error

    queue.send(b"1")
    with queue.work(lose_it) as workers:
        until(lambda: workers.handled or workers.failed)
        assert (workers.handled, workers.failed) == (1, 0)


def test_a_message_whose_handler_could_not_be_called_spends_no_receive(
    platform: EventSQL, queue: Queue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, transaction = iter(range(LOST)), queue.transaction

    def refuse(message: Message) -> AbstractContextManager[Connection]:
        if next(busy, None) is not None:
            raise DatabaseBusyError("every connection of this process is in use")
        return transaction(message)

    monkeypatch.setattr(queue, "transaction", refuse)
    queue.send(b"1")
    with queue.work(write) as workers:
        until(lambda: workers.handled or workers.failed)
        assert (workers.handled, workers.failed) == (1, 0)
    assert effects(platform) == [b"1"]


def test_a_message_that_waits_for_its_database_is_given_back_when_its_worker_stops(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    def pause(_failures: int) -> float:
        waits.set()
        return 3_600.0

    def refuse(_message: Message) -> AbstractContextManager[Connection]:
        raise DatabaseBusyError("every connection of this process is in use")

    monkeypatch.setattr("eventsql_orchestration.queue.worker.pause_while_away", pause)
    monkeypatch.setattr(queue, "transaction", refuse)
    queue.send(b"1")
    with queue.work(write, visibility_timeout=3_600) as workers:
        assert waits.wait(PATIENCE)
        assert workers.stop(PATIENCE)
    assert queue.statistics().visible == 1


def test_a_message_that_loses_its_connection_again_and_again_becomes_a_dead_letter(
    platform: EventSQL, queue: Queue, terminate: Terminate, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_connections, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(lost_connections, "FREE_LOSSES", 2)
    pauses: list[int] = []

    def pause(failures: int) -> float:
        pauses.append(failures)
        return 0.0

    monkeypatch.setattr("eventsql_orchestration.queue.worker.pause_while_away", pause)

    def lose_it(message: Message, connection: Connection) -> None:
        terminate(connection)
        write(message, connection)

    queue.send(b"1")
    with queue.work(lose_it, backoff=lambda _: 0.0) as workers:
        until(lambda: queue.statistics().dead == 1)
        assert workers.failed == 2
    assert pauses == [1, 2]
    (letter,) = Queue(platform, "commands_dead").peek()
    assert [entry["receive"] for entry in letter.history][:2] == [3, 4]


def idle_for_too_long(_: Message, connection: Connection) -> None:
    stand_still(connection)


def work_for_too_long(_: Message, connection: Connection) -> None:
    take_too_long(connection)


def close_its_connection(_: Message, connection: Connection) -> None:
    connection.close()
    connection.execute("SELECT 1")


def miss_another_database(_: Message, __: Connection) -> None:
    raise DatabaseUnavailableError("the other database cannot be reached")


@pytest.mark.parametrize("handler", [idle_for_too_long, work_for_too_long, close_its_connection, miss_another_database])
def test_a_connection_that_the_handler_ends_and_one_to_another_database_are_failures(
    queue: Queue, until: Until, handler: Handler
) -> None:
    queue.send(b"1")
    with queue.work(handler, backoff=lambda _: 0.0) as workers:
        until(lambda: queue.statistics().dead == 1)
        assert workers.failed == 2


def test_heartbeats_hold_a_message_for_as_long_as_its_handler_takes(
    platform: EventSQL, queue: Queue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_messages, "HEARTBEATS", 100_000)
    slow = Slow()
    queue.send_all([b"1", b"2"])
    with queue.work(slow, visibility_timeout=3_600) as workers:
        assert slow.begun.wait(60)
        with platform.database.connection() as connection:
            look = "SELECT min(eql_visible_at) FROM eventsql.queue_message"
            first = connection.execute(look).fetchone()
            until(lambda: connection.execute(look).fetchone() != first)
            far = "SELECT min(eql_visible_at) > now() + interval '50 minutes' FROM eventsql.queue_message"
            by_own_timeout = connection.execute(far).fetchone()
        # The first timeout was extended.
        until(lambda: queue.statistics().in_flight == 2)
        assert queue.receive(max_messages=5) == []
        slow.go_on.set()
        until(lambda: workers.handled == 2)
    assert effects(platform) == [b"1", b"2"]
    assert by_own_timeout == (True,), "the timeout of the queue is shorter"


def test_heartbeats_hold_messages_while_handlers_have_every_connection(
    platform: EventSQL, queue: Queue, session: Connection, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_messages, "HEARTBEATS", 100_000)
    slow = Slow()

    def visible_at() -> object:
        return session.execute("SELECT eql_visible_at FROM eventsql.queue_message").fetchone()

    queue.send(b"1")
    with queue.work(slow, visibility_timeout=3_600) as workers, ExitStack() as others:
        assert slow.begun.wait(60)
        while not platform.database.exhausted:
            others.enter_context(platform.database.connection())
        first = visible_at()
        until(lambda: visible_at() != first)
        assert not workers.failed
        others.close()
        slow.go_on.set()
        until(lambda: workers.handled == 1)
    assert effects(platform) == [b"1"]


def test_handlers_may_stop_their_workers(platform: EventSQL, queue: Queue, until: Until) -> None:
    queue.send_all([b"%d" % number for number in range(5)])
    ready, together = threading.Event(), threading.Barrier(2)
    stopped: list[bool] = []

    def handle(message: Message, connection: Connection) -> None:
        write(message, connection)
        assert ready.wait(60)
        together.wait(60)
        stopped.append(workers.stop())
        together.wait(60)

    workers = queue.work(handle, workers=2, max_messages=2)
    ready.set()
    until(lambda: not workers.running)
    assert workers.stop()
    assert (stopped, workers.handled, len(effects(platform))) == ([False, False], 2, 2)
    assert queue.statistics().visible == 3


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("ordered", [False, True])
def test_a_stop_finishes_the_message_at_hand_and_spends_no_receive_of_the_others(
    platform: EventSQL, *, ordered: bool
) -> None:
    queue, slow = Queue(platform, "once", ordered=ordered, max_receives=1), Slow()
    queue.send_all([b"1", b"2", b"3"])
    workers = queue.work(slow, max_messages=3)
    assert slow.begun.wait(60)
    assert not workers.stop(timeout=0)
    slow.go_on.set()
    assert workers.stop()
    assert effects(platform) == [b"1"]
    left = [(message.body, message.receives, message.receipt) for message in queue.receive(max_messages=5)]
    assert sorted(left) == [(b"2", 2, 2), (b"3", 2, 2)]


def test_a_stop_gives_all_other_messages_back_with_one_statement(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    give_back = QueueTable.give_back

    def counting(table: QueueTable, messages: Collection[Message]) -> None:
        given.append(len(messages))
        give_back(table, messages)

    monkeypatch.setattr(QueueTable, "give_back", counting)
    slow = Slow()
    queue.send_all([b"%d" % number for number in range(100)])
    workers = queue.work(slow, max_messages=100)
    assert slow.begun.wait(60)
    workers.stop_soon()
    slow.go_on.set()
    assert workers.stop()
    assert (given, queue.statistics().visible) == ([99], 99)


def test_workers_that_wait_for_messages_end_before_their_next_look(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = threading.Event()

    def look_again_in_an_hour() -> float:
        paused.set()
        return 3_600.0

    monkeypatch.setattr(queue, "pause", look_again_in_an_hour)
    with queue.work(write, workers=1) as workers:
        assert paused.wait(PATIENCE)
        assert workers.stop(PATIENCE)


@pytest.mark.parametrize("of_shard", [False, True])
def test_closing_a_platform_or_a_shard_lets_workers_finish_the_message_at_hand(
    dsn: str, until: Until, *, of_shard: bool
) -> None:
    with EventSQL(dsn) as platform:
        with platform.database.connection() as connection:
            connection.execute("CREATE TABLE public.effect (body bytea)")
        (shard,) = platform.shards
        queue, slow = Queue(shard if of_shard else platform, "once", max_receives=1), Slow()
        queue.send_all([b"1", b"2"])
        workers = queue.work(slow, max_messages=2)
        assert slow.begun.wait(60)
        closing = in_thread("close", shard.close if of_shard else platform.close)
        until(lambda: closing.done() or workers._stop.is_set())
        slow.go_on.set()
        assert closing.result(60)
        assert (workers.running, workers.handled, workers.failed) == (False, 1, 0)

    with EventSQL(dsn) as platform:
        assert effects(platform) == [b"1"]
        assert [message.body for message in Queue(platform, "once").receive(max_messages=5)] == [b"2"]


def test_closing_a_platform_stops_at_once_what_runs_on_a_shard(dsn: str, until: Until) -> None:
    with EventSQL(dsn) as platform:
        with platform.database.connection() as connection:
            connection.execute("CREATE TABLE public.effect (body bytea)")
        queue, slow = Queue(platform, "slow"), Slow()
        queue.send(b"1")
        workers = queue.work(slow, workers=1)
        idle = Queue(platform.shards[0], "idle").work(slow, workers=1)
        assert slow.begun.wait(60)
        closing = in_thread("close", platform.close)
        until(lambda: not idle.running)
        assert workers.running
        slow.go_on.set()
        assert closing.result(60)


def test_a_worker_that_lost_its_message_leaves_no_effects(platform: EventSQL, queue: Queue) -> None:
    slow = Slow()
    queue.send(b"1")
    with queue.work(slow, visibility_timeout=600) as workers:
        assert slow.begun.wait(60)
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.queue_message SET eql_visible_at = now()")
        (mine,) = queue.receive(visibility_timeout=600)
        slow.go_on.set()
        assert workers.stop()
    assert (workers.handled, effects(platform)) == (0, [])
    queue.acknowledge(mine)


@pytest.mark.parametrize("error", [SystemExit("3"), asyncio.CancelledError("3"), MuteError()])
def test_a_worker_goes_on_after_any_error_of_its_handler(queue: Queue, until: Until, error: BaseException) -> None:
    def leave(message: Message, _connection: Connection) -> None:
        if message.body == b"bad":
            raise error

    queue.send_all([b"bad", b"good"])
    with queue.work(leave, backoff=lambda _: 600.0) as workers:
        until(lambda: workers.handled == 1)
        assert workers.failed == 1
    (bad,) = queue.peek()
    said = "this error has no text, because its __str__ fails" if isinstance(error, MuteError) else "3"
    assert bad.history[-1]["reason"] == f"{type(error).__name__}: {said}"


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(2)], ids=repr)
def test_a_worker_goes_on_after_any_error_of_its_backoff(queue: Queue, until: Until, error: BaseException) -> None:
    def fail(message: Message, _connection: Connection) -> None:
        if message.body == b"bad":
            raise ValueError("never")

    def pause(_receives: int) -> float:
        raise error

    queue.send_all([b"bad", b"good"])
    with queue.work(fail, max_messages=1, backoff=pause) as workers:
        until(lambda: (workers.handled, workers.failed >= 1) == (1, True))


@pytest.mark.parametrize(("receives", "longest"), [(1, 1), (2, 2), (3, 4), (9, 256), (10, 300), (10_000, 300)])
def test_the_pause_of_a_failing_message_doubles_up_to_five_minutes(receives: int, longest: int) -> None:
    assert longest / 2 <= exponential(receives) <= longest


async def never_run(message: Message, connection: Connection) -> None: ...


def test_a_handler_that_would_never_run_is_refused(queue: Queue) -> None:
    for wrong in (never_run, None, lambda: None):
        with pytest.raises(ValidationError):
            queue.work(wrong)  # type: ignore[arg-type]  # that is the mistake


def rolls_back(message: Message, connection: Connection) -> None:
    raise psycopg.Rollback


def ends_the_transaction(message: Message, connection: Connection) -> None:
    write(message, connection)
    connection.execute("ROLLBACK")


def returns_a_coroutine(message: Message, connection: Connection) -> object:
    return never_run(message, connection)


@pytest.mark.parametrize("handler", [returns_a_coroutine, rolls_back, ends_the_transaction])
def test_a_message_whose_handler_leaves_no_effects_stays(queue: Queue, until: Until, handler: Handler) -> None:
    queue.send(b"one")
    with queue.work(handler, backoff=lambda _: 600.0) as workers:
        until(lambda: workers.handled + workers.failed)
        assert workers.failed == 1
    assert queue.peek()[0].history[-1]["reason"]


def test_a_worker_that_lost_a_message_lets_go_of_its_own_receive_only(
    platform: EventSQL, queue: Queue, until: Until
) -> None:
    lock, turns = threading.Lock(), [threading.Event() for _ in range(3)]
    calls: list[int] = []

    def slow(message: Message, _connection: Connection) -> None:
        with lock:
            calls.append(message.receives)
            turn = turns[len(calls) - 1]
        assert turn.wait(60)

    queue.send(b"1")
    with queue.work(slow, workers=2, visibility_timeout=600) as workers:
        until(lambda: calls == [1])
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.queue_message SET eql_visible_at = now()")
        until(lambda: calls == [1, 2])
        turns[0].set()
        # The first receive is over once its worker can be asked again: only the second is left.
        queue.send(b"2")
        until(lambda: len(calls) == 3)
        assert {message.receives for message in workers._held.messages() if message.body == b"1"} == {2}
        turns[1].set()
        turns[2].set()
        until(lambda: workers.handled == 2)


def test_a_worker_does_not_begin_a_message_that_another_of_its_process_has_by_now(
    platform: EventSQL, queue: Queue, until: Until
) -> None:
    turns = {body: threading.Event() for body in (b"0", b"1", b"2")}
    calls: list[tuple[bytes, int]] = []

    def slow(message: Message, _connection: Connection) -> None:
        calls.append((message.body, message.receives))
        assert turns[message.body].wait(60)

    queue.send(b"0")
    with queue.work(slow, workers=2, max_messages=2, visibility_timeout=600) as workers:
        until(lambda: calls == [(b"0", 1)])
        # The other worker takes both: they become visible at the same time.
        with platform.database.transaction() as connection:
            queue.send_all([b"1", b"2"], connection=connection)
            connection.execute(
                "UPDATE eventsql.queue_message SET eql_visible_at = transaction_timestamp() WHERE eql_receives = 0"
            )
        until(lambda: len(calls) == 2)
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.queue_message SET eql_visible_at = now() WHERE eql_body = '2'")
        turns[b"0"].set()
        until(lambda: len(calls) == 3)
        turns[b"1"].set()
        until(lambda: workers.handled == 2)
        # Its worker has looked at its other message once it holds no message any more.
        until(lambda: [message.receives for message in workers._held.messages()] == [2])
        turns[b"2"].set()
        until(lambda: workers.handled == 3)
    assert calls == [(b"0", 1), (b"1", 1), (b"2", 2)]


def test_a_handler_that_acknowledges_another_message_in_vain_has_failed(queue: Queue, until: Until) -> None:
    queue.send(b"gone")
    (gone,) = queue.receive()
    queue.acknowledge(gone)
    queue.send(b"1")
    with queue.work(lambda _message, _connection: queue.acknowledge(gone), backoff=lambda _: 0.0):
        until(lambda: queue.statistics().dead == 1)


def test_workers_that_cannot_all_start_leave_neither_threads_nor_subscriptions(
    platform: EventSQL, queue: Queue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    def running() -> int:
        return sum(thread.name == "eventsql-queue-commands" for thread in threading.enumerate())

    def start(name: str, *given: Any) -> threading.Thread:
        if running():
            raise RuntimeError("can't start new thread")
        return start_thread(name, *given)

    monkeypatch.setattr("eventsql_orchestration.queue.worker.start_thread", start)
    with pytest.raises(RuntimeError):
        queue.work(write, workers=2)
    until(lambda: not running())
    assert platform.shards[0].listener._callbacks == {}


def test_workers_leave_connections_for_heartbeats(queue: Queue) -> None:
    with pytest.raises(ValidationError):
        queue.work(write, workers=21)


def test_the_close_of_a_platform_ends_workers_whose_start_ctrl_c_interrupted(
    platform: EventSQL, queue: Queue, until: Until
) -> None:
    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "eventsql-queue-commands"]

    for after in count():
        goes_on = interrupted(after, partial(queue.work, write), module="client/consumers.py")
        platform.consumers.close()
        until(lambda: running() == [])
        if not goes_on:
            break
    assert after > 1


def test_heartbeats_whose_start_ctrl_c_interrupted_end(queue: Queue, until: Until) -> None:
    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "eventsql-heartbeat-commands"]

    for after in count():
        with ExitStack() as block:
            begin = partial(block.enter_context, HeldMessages(queue).heartbeat(60.0))
            goes_on = interrupted(after, begin, module="eventsql_orchestration/threads.py", events=["call", "return"])
        until(lambda: running() == [])
        if not goes_on:
            break
    assert after > 1
