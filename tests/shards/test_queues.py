"""A queue over several shards: one definition, and each deduplication id on one shard."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import main
from eventsql_orchestration.cli import queue as queue_commands
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    ClosedError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    PartlySentError,
    QueueInUseError,
    RedefinitionError,
    ShardError,
    ShardUnavailableError,
)
from eventsql_orchestration.queue import (
    Message,
    NewMessage,
    Queue,
    QueueDefinition,
    held_messages,
    list_queues,
    queue_shards,
)
from eventsql_orchestration.queue.queue_table import QueueTable
from eventsql_orchestration.queue.upkeep import QueueUpkeep
from tests.shards.conftest import Databases, Open, Until
from tests.waiting import PATIENCE


@pytest.fixture
def platform(databases: Databases, opened: Open) -> EventSQL:
    return opened(*databases(3)).open()


def definitions(platform: EventSQL) -> list[QueueDefinition]:
    return [Queue(shard, "jobs").definition() for shard in platform.shards]


def test_a_definition_is_made_on_every_shard(platform: EventSQL) -> None:
    Queue(platform, "jobs", ordered=True, max_receives=3).definition()
    assert {(each.ordered, each.max_receives, each.dead_letters) for each in definitions(platform)} == {
        (True, 3, "jobs_dead")
    }


def test_a_shard_takes_over_the_options_of_the_others(platform: EventSQL) -> None:
    Queue(platform, "jobs", ordered=True, max_receives=3, retention=60).send(b"1", key="a")
    plain = Queue(platform, "jobs")
    plain.send_all([NewMessage(b"2", key=f"{number}") for number in range(50)])
    found = definitions(platform)
    assert {(each.ordered, each.max_receives, each.retention) for each in found} == {(True, 3, 60)}


def test_no_shard_gets_a_queue_of_another_order(platform: EventSQL) -> None:
    Queue(platform.shards[2], "jobs", ordered=True).definition()
    with pytest.raises(RedefinitionError):
        Queue(platform, "jobs", ordered=False).definition()
    assert {each.ordered for each in definitions(platform)[2:]} == {True}


def test_threads_may_use_a_queue_for_the_first_time_at_once(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    Queue(platform, "jobs").send_all([NewMessage(b"1", key=f"{number}") for number in range(50)])
    queue, both = Queue(platform, "jobs"), threading.Barrier(2, timeout=PATIENCE)

    def make(*args: Any, **options: Any) -> QueueTable:
        both.wait()
        return QueueTable(*args, **options)

    monkeypatch.setattr(queue_shards, "QueueTable", make)
    with ThreadPoolExecutor() as threads:
        received = [threads.submit(queue.receive, max_messages=50) for _ in range(2)]
        assert sum(len(each.result()) for each in received) == 50


def test_messages_of_a_shard_are_received_though_others_fail(
    platform: EventSQL, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue(platform, "jobs", visibility_timeout=3_600)
    queue.definition()
    for shard in platform.shards[1:]:
        with shard.database.connection() as connection:
            connection.execute("ALTER FUNCTION eventsql.take_messages RENAME TO taken_away")
    for _ in range(10):
        # The shards are asked in any order.
        Queue(platform.shards[0], "jobs").send(b"1")
        assert [message.body for message in queue.receive(max_messages=2)] == [b"1"]
    with pytest.raises(DatabaseError):
        queue.receive()
    assert sum("nothing was received" in record.message for record in caplog.records) == 20


def test_a_full_shard_keeps_no_receiver_from_the_messages_of_the_others(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs")
    for shard in platform.shards:
        Queue(shard, "jobs").send_all([b"x"] * 30)
    # By chance, one try in a billion asks a single shard first each time.
    assert len({message.shard for _ in range(20) for message in queue.receive()}) > 1


def test_a_queue_is_deleted_on_every_shard_or_on_none(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs")
    queue.definition()
    Queue(platform.shards[2], "jobs").send(b"x")
    with pytest.raises(QueueInUseError):
        queue.delete()
    platform.shards[1].down = DatabaseUnavailableError("gone")
    with pytest.raises(ShardUnavailableError):
        queue.delete(force=True)
    platform.shards[1].down = None
    assert [len(list_queues(shard.database)) for shard in platform.shards] == [1, 1, 1]

    # As if an earlier call had ended there.
    Queue(platform.shards[0], "jobs").delete()
    queue.delete(force=True)
    assert [len(list_queues(shard.database)) for shard in platform.shards] == [0, 0, 0]


def test_the_messages_of_a_key_are_deleted_on_every_shard(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs")
    # A key may have messages on the shard that it had before a shard was added.
    for shard in platform.shards:
        queue_of_shard = Queue(shard.database, "jobs")
        queue_of_shard.send_all([NewMessage(b"1", key="a"), NewMessage(b"2")])
    platform.shards[1].down = DatabaseUnavailableError("gone")
    with pytest.raises(ShardUnavailableError):
        queue.erase(["a"])
    platform.shards[1].down = None
    assert queue.erase(["a"]).messages == queue.statistics().depth == 3


def test_a_deduplication_id_without_a_key_is_sent_once(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs")
    ids = {queue.send(b"once", deduplication_id="x") for _ in range(20)}
    assert len(ids) == 1
    assert queue.statistics().depth == 1


def test_the_only_shard_that_is_up_takes_no_keys_of_the_others(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs")
    queue.definition()
    up = platform.shard_of("a")
    theirs = next(f"{n}" for n in range(1_000) if platform.shard_of(f"{n}") is not up)
    for shard in platform.shards:
        if shard is not up:
            shard.down = DatabaseUnavailableError("gone")
    with pytest.raises(PartlySentError) as raised:
        queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key=theirs)])
    assert raised.value.ids[1] is None
    assert raised.value.failed.keys() == {platform.shard_of(theirs).name}
    for shard in platform.shards:
        shard.down = None
    assert [(message.body, message.shard) for message in queue.receive(max_messages=9)] == [(b"1", up.name)]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_batch_that_one_shard_refuses_says_which_messages_were_sent(platform: EventSQL, broken: int) -> None:
    queue = Queue(platform, "jobs")
    queue.definition()
    messages = [NewMessage(b"%d" % number, key=f"{number}") for number in range(30)]
    refusing = platform.shards[broken]
    with refusing.database.connection() as connection:
        connection.execute("ALTER TABLE eventsql.queue_message ADD CONSTRAINT no CHECK (false)")
        with pytest.raises(PartlySentError) as caught:
            queue.send_all(messages)
        connection.execute("ALTER TABLE eventsql.queue_message DROP CONSTRAINT no")
    assert list(caught.value.failed) == [refusing.name]
    unsent = [message for message, sent in zip(messages, caught.value.ids, strict=True) if sent is None]
    assert {platform.shard_of(message.key or "") for message in unsent} == {refusing}

    queue.send_all(unsent)
    received = queue.receive(max_messages=100)
    assert sorted(int(message.body) for message in received) == list(range(30))
    assert {message.id for message in received} >= {sent for sent in caught.value.ids if sent is not None}


def test_the_command_names_the_lines_that_a_shard_has_refused(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = itertools.count()
    monkeypatch.setattr(queue_commands, "_SENT_AT_ONCE", 10)
    # On a busy machine, fewer lines than that may come in time.
    monkeypatch.setattr("eventsql_orchestration.cli.input._LINGER", math.inf)
    monkeypatch.setattr(random, "choice", lambda tables: tables[next(places) // 2 % 3])
    queue = Queue(platform, "jobs")
    queue.definition()
    with platform.shards[2].database.connection() as connection:
        connection.execute("ALTER TABLE eventsql.queue_message ADD CONSTRAINT no CHECK (eql_body <> '17')")
    urls = [word for shard in platform.shards for word in ("--dsn", shard.database.dsn)]
    lines = [f"{number}" for number in range(1, 31)]
    result = CliRunner().invoke(main, [*urls, "queue", "send", "jobs"], input="\n".join(lines))
    assert result.exit_code == 1
    assert "lines 11-12, 17-18, and all lines after line 20" in result.stderr
    sent = {message.body.decode() for message in queue.receive(max_messages=100)}
    assert sent == {*lines[:20]} - {"11", "12", "17", "18"}


def test_an_id_that_dead_letters_of_several_shards_have_is_redriven_on_none(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs", max_receives=1)
    queue.definition()
    first, second, third = (Queue(shard, "jobs") for shard in platform.shards)
    third.send(b"acknowledged")
    third.acknowledge(third.receive()[0])
    for each in (first, second, third):
        each.send(b"x")
        each.release(each.receive()[0])
        each.receive()
    ids = [Queue(shard, "jobs_dead").peek()[0].id for shard in platform.shards]
    assert ids[0] == ids[1] != ids[2]
    with pytest.raises(ShardError):
        queue.redrive(ids=[ids[0], ids[2]])
    assert queue.redrive(ids=[ids[2]]) == 1
    assert second.redrive(ids=[ids[1]]) == 1
    assert [each.statistics().visible for each in (first, second, third)] == [0, 1, 1]


def test_a_look_at_the_next_messages_sees_those_of_every_shard(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs", ordered=True)
    queue.definition()
    keys = {platform.shard_of(key).name: key for key in map(str, range(100))}
    first, second, third = platform.shards
    queue.send_all([NewMessage(b"%d" % number, key=keys[first.name]) for number in (1, 2)])
    queue.send_all([NewMessage(b"%d" % number, key=keys[second.name]) for number in (3, 4)])
    Queue(third, "jobs").send(b"5", priority=9)
    assert [message.body for message in queue.peek(3)] == [b"5", b"1", b"3"]
    assert [message.state for message in queue.peek()] == ["visible", "visible", "visible", "blocked", "blocked"]


def test_a_limit_of_dead_letters_is_for_all_shards_together(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs", max_receives=1)
    queue.definition()
    for shard in platform.shards:
        each = Queue(shard, "jobs")
        each.send_all([b"x", b"y"])
        for message in each.receive(max_messages=2):
            each.release(message)
        each.receive()
    assert (queue.redrive(3), queue.statistics().dead, queue.statistics().visible) == (3, 3, 3)
    assert (queue.redrive(0), queue.redrive(9)) == (0, 3)


@pytest.mark.parametrize(
    ("name", "call", "done"),
    [
        ("jobs_dead", Queue.purge, "with 4 messages deleted:"),
        ("jobs_dead", lambda queue: queue.erase(["a"]), "with 4 messages deleted:"),
        ("jobs", Queue.redrive, "with 4 dead letters moved back:"),
        ("jobs", lambda queue: queue.redrive(5), "with 4 dead letters moved back:"),
    ],
    ids=["purge", "erase", "redrive", "redrive with a limit"],
)
def test_a_call_that_gives_up_on_the_last_shard_says_how_much_all_shards_have_done(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[Queue], object], done: str
) -> None:
    Queue(platform, "jobs", max_receives=1).definition()
    for shard in platform.shards:
        each = Queue(shard, "jobs")
        each.send_all([NewMessage(b"x", key="a"), NewMessage(b"y", key="a")])
        for message in each.receive(max_messages=2):
            each.release(message)
        each.receive()
    giving_way, last = QueueUpkeep._giving_way, platform.shards[2].database

    def give_up(own: QueueUpkeep, work: Callable[[Connection], Any], outcome: str) -> Any:
        if own._database is not last:
            return giving_way(own, work, outcome)
        raise DatabaseBusyError(f"{outcome}: a transaction does not end")

    monkeypatch.setattr(QueueUpkeep, "_giving_way", give_up)
    with pytest.raises(DatabaseBusyError, match=done):
        call(Queue(platform, name))


def test_the_rates_of_all_shards_are_added(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs", retention=60)
    for shard in platform.shards:
        each = Queue(shard, "jobs", retention=60)
        each.send_all([b"x", b"y"])
        each.acknowledge(each.receive()[0])
    found = queue.statistics()
    assert found.sent_per_second == pytest.approx(6 / 60)
    assert found.acknowledged_per_second == pytest.approx(3 / 60)
    assert Queue(platform, "others").statistics().sent_per_second is None


def test_a_batch_that_every_shard_refuses_raises_the_refusal_itself(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs")
    queue.definition()
    for shard in platform.shards:
        with shard.database.connection() as connection:
            connection.execute("ALTER TABLE eventsql.queue_message ADD CONSTRAINT no CHECK (false)")
    with pytest.raises(DatabaseError) as caught:
        queue.send_all([NewMessage(b"1", key=f"{number}") for number in range(30)])
    assert not isinstance(caught.value, ShardError)


def test_messages_of_other_shards_are_held_on_while_one_is_down(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_messages, "HEARTBEATS", 100_000)
    queue, go_on = Queue(platform, "jobs"), threading.Event()
    queue.definition()
    for shard in platform.shards:
        Queue(shard, "jobs").send(b"x")

    def slow(_message: Message, _connection: Connection) -> None:
        assert go_on.wait(60)

    with queue.work(slow, workers=3, visibility_timeout=3_600) as workers:
        until(lambda: len(workers._held.messages()) == 3)
        # Heartbeats ask it first.
        asked = workers._held.messages()[0].shard
        gone, other, _ = sorted(platform.shards, key=lambda shard: shard.name != asked)
        gone.down = DatabaseUnavailableError("gone")
        with other.database.connection() as connection:
            times: set[object] = set()

            def look() -> int:
                times.add(connection.execute("SELECT eql_visible_at FROM eventsql.queue_message").fetchone())
                return len(times)

            # The second time may be that of a heartbeat that was under way.
            until(lambda: look() > 2)
        gone.down = None
        go_on.set()
        until(lambda: workers.handled >= 3)


def test_a_shard_that_counts_as_down_fails_no_message_that_a_worker_holds(
    platform: EventSQL, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    queue, gone = Queue(platform, "jobs", max_receives=1), platform.shards[0]
    queue.definition()
    Queue(gone, "jobs").send_all([b"1", b"2"])

    def handle(message: Message, _connection: Connection) -> None:
        if message.body == b"1":
            # As another thread finds it out, while the connection of this handler still works.
            gone.down = DatabaseUnavailableError("gone")

    with queue.work(handle) as workers:
        until(lambda: "waits for the database" in caplog.text)
        assert workers.handled == 1
        gone.down = None
        until(lambda: workers.handled == 2)
        assert workers.failed == 0


def test_messages_are_given_back_on_the_other_shards_while_one_is_down(platform: EventSQL) -> None:
    queue = Queue(platform, "jobs")
    queue.definition()
    for shard in platform.shards:
        Queue(shard, "jobs").send(b"x")
    held = sorted(queue.receive(max_messages=3), key=lambda message: message.shard or "")
    first = next(shard for shard in platform.shards if shard.name == held[0].shard)
    first.down = DatabaseUnavailableError("gone")
    with pytest.raises(ShardError):
        queue.give_back(held)
    first.down = None
    assert {message.shard for message in queue.receive(max_messages=3)} == {each.shard for each in held[1:]}


def test_a_subscription_that_one_shard_refuses_is_left_on_none(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ClosedError

    queue = Queue(platform, "jobs")
    queue.definition()
    monkeypatch.setattr(platform.shards[-1].listener, "subscribe", refuse)
    with pytest.raises(ClosedError):
        queue.subscribe(lambda: None)
    assert "queue:jobs" not in platform.shards[0].listener._callbacks


def test_workers_end_with_their_platform_and_do_not_open_it_again(platform: EventSQL, until: Until) -> None:
    queue = Queue(platform, "jobs")
    with queue.work(lambda message, connection: None) as workers:
        platform.close()
        until(lambda: not workers.running)
    with pytest.raises(ClosedError):
        queue.send(b"x")
