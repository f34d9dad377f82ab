"""One shard's server is stopped for real: its keys fail clearly or wait, and everything else goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.cli.application import main
from eventsql_orchestration.client.consumers import ClusterConsumption
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.consuming.running import Running
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    ShardSetError,
    ShardUnavailableError,
)
from eventsql_orchestration.queue import NewMessage, Queue
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.shards.barriers import Barriers
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.topics.positions import Latest
from tests.conftest import TEMPLATE, Administrator, hash_password, own_server
from tests.effects import effects, make_table, write
from tests.shard_keys import shard_of_key
from tests.shards.adding import KEYS
from tests.shards.conftest import Databases, Open, Until, publication
from tests.waiting import PATIENCE

LOST = [key for key in KEYS if shard_of_key(key, ["shard-1", "shard-2"]) == "shard-2"]
LEFT = [key for key in KEYS if shard_of_key(key, ["shard-1", "shard-2"]) == "shard-1"]


class Begun(Running):
    """A consumer on one shard, which only notes that it was stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop_soon(self) -> None:
        self.stopped.set()

    def threads(self) -> list[threading.Thread]:
        return []

    def _end(self, deadline: float) -> bool:
        return self.stopped.is_set()


@pytest.fixture(scope="module")
def second() -> Iterator[EmbeddedPostgres]:
    """A server of its own with a template of migrated databases, which the tests stop and start."""
    with own_server() as embedded:
        with embedded.start().connect() as connection:
            hash_password(connection, times=1)
        with Database(embedded.create_database(TEMPLATE)) as database:
            database.migrate()
        yield embedded


@pytest.fixture(scope="module")
def other(second: EmbeddedPostgres) -> Iterator[Administrator]:
    """Makes databases on the second server, which go with it."""
    administrator = Administrator(second)
    yield administrator
    administrator.close()


@pytest.fixture
def dsns(databases: Databases, other: Administrator, request: pytest.FixtureRequest) -> list[str]:
    """Shards on two servers, with a topic and a consumer; the second server is running."""
    dsns = [*databases(1), other.copy(f"db_{abs(hash(request.node.name))}")]
    with EventSQL(*dsns) as platform:
        platform.registry.register_topic(Topic("orders", 2))
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    return dsns


def test_the_transfer_tells_that_it_could_not_look_after_all_shards_and_that_it_can_again(
    databases: Databases, opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    caplog.set_level("INFO")
    platform, stop, release = opened(*databases(2)).open(), threading.Event(), Barriers.release

    def fail(_barriers: Barriers) -> NoReturn:
        monkeypatch.setattr(Barriers, "release", release)
        raise DatabaseBusyError("somebody adds a shard")

    monkeypatch.setattr(Barriers, "release", fail)
    running = start_thread("transfer", platform.transfer.run, stop)
    until(lambda: "consumers of new shards go on" in caplog.text)
    stop.set()
    running.join(PATIENCE)
    assert "trying again: somebody adds a shard" in caplog.text


def test_a_stop_does_not_wait_for_a_shard_on_which_the_consumer_is_just_beginning(
    databases: Databases, opened: Open, until: Until
) -> None:
    platform = opened(*databases(2)).open()
    first, slow = platform.shards
    begun, entered, go_on = {first: Begun(), slow: Begun()}, threading.Event(), threading.Event()

    def begin(shard: Shard) -> Begun:
        if shard is slow:
            entered.set()
            assert go_on.wait(PATIENCE)
        return begun[shard]

    slow.down = DatabaseUnavailableError("gone")
    consumption = ClusterConsumption(platform.consumers._cluster, begin)
    slow.down = None
    assert entered.wait(PATIENCE)
    assert not consumption.stop(timeout=0.0)
    assert begun[first].stopped.is_set()
    go_on.set()
    until(begun[slow].stopped.is_set)
    assert consumption.stop(PATIENCE)


@pytest.mark.parametrize("way", ["start", "start_queue"])
def test_handlers_on_two_shards_that_stop_their_consumption_at_once_do_not_wait_for_each_other(
    databases: Databases, opened: Open, way: str
) -> None:
    platform = opened(*databases(2)).open()
    platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "mailer"))
    platform.publisher.publish_all(publication(key) for key in (LOST[0], LEFT[0]))
    platform.transfer.run_once()
    for shard in platform.shards:
        make_table(shard)
    started, together, stopped = threading.Event(), threading.Barrier(3), list[bool]()

    def handle(event: Event, connection: Connection) -> None:
        assert started.wait(PATIENCE)
        together.wait(PATIENCE)
        stopped.append(consumption.stop(timeout=3_600))
        write([event], connection)
        together.wait(PATIENCE)

    consumption = getattr(platform.consumers, way)("orders", "mailer", handle, workers=1)
    started.set()
    together.wait(PATIENCE)
    together.wait(PATIENCE)
    assert consumption.stop(timeout=PATIENCE)
    assert stopped == [False] * 2
    assert [len(effects(shard)) for shard in platform.shards] == [1, 1]


def test_keys_of_the_shard_that_is_down_fail_and_all_others_go_on(
    dsns: list[str], opened: Open, second: EmbeddedPostgres, until: Until
) -> None:
    platform = opened(*dsns, transfer=True)
    handled: list[str | None] = []

    def handle(events: Sequence[Event], _connection: object) -> None:
        handled.extend(event.key for event in events)

    platform.consumers.start_batch("orders", "mailer", handle, polling_delay=0.05)
    platform.publisher.publish_all([publication(LOST[0]), publication(LEFT[0])])
    until(lambda: len(handled) == 2)
    second.stop()
    with pytest.raises(DatabaseUnavailableError):
        platform.publisher.publish(publication(LOST[0]))
    with pytest.raises(ShardUnavailableError, match="shard 'shard-2' is down") as told:
        platform.publisher.publish(publication(LOST[0]))
    assert told.value.shard == "shard-2"
    with pytest.raises(ShardUnavailableError):
        platform.publisher.publish_all([publication(LEFT[1]), publication(LOST[0])])
    platform.publisher.publish(publication(LEFT[0]))
    for _ in range(3):
        platform.publisher.publish(publication(None))
    platform.publisher.publish_all([publication(LEFT[0]), publication(None)])
    until(lambda: len(handled) == 8)
    assert LEFT[1] not in handled, "what was refused was refused whole"

    def causes(shard: str) -> set[LagCause]:
        return {lag.cause for lag in platform.lag("orders") if lag.shard == shard}

    assert causes("shard-2") == {LagCause.UNREACHABLE}
    # The handler has the last events before their offset is committed.
    until(lambda: causes("shard-1") == {LagCause.NONE})
    second.start()
    until(lambda: platform.status()[1].state == "takes events")
    platform.publisher.publish(publication(LOST[1]))
    until(lambda: LOST[1] in handled)


def test_messages_of_the_shard_that_is_down_fail_with_its_name_and_others_go_to_shards_that_are_up(
    dsns: list[str], opened: Open, second: EmbeddedPostgres, until: Until
) -> None:
    queue = Queue(platform := opened(*dsns).open(), "jobs", visibility_timeout=3_600)
    queue.send_all([NewMessage(b"0", key=LOST[0]), NewMessage(b"0", key=LEFT[0])])
    assert len(queue.receive(max_messages=2)) == 2
    second.stop()
    with pytest.raises(ShardUnavailableError) as told:
        queue.send(b"1", key=LOST[0])
    assert told.value.shard == "shard-2"
    for _ in range(20):
        queue.send(b"1")
    assert {message.shard for message in queue.receive(max_messages=20)} == {"shard-1"}
    second.start()
    until(lambda: platform.status()[1].state == "takes events")
    queue.send(b"2", key=LOST[0])
    assert [message.shard for message in queue.receive()] == ["shard-2"]


def test_every_call_of_a_queue_that_finds_a_shard_down_names_it(
    dsns: list[str], opened: Open, second: EmbeddedPostgres
) -> None:
    queue = Queue(platform := opened(*dsns).open(), "jobs", max_receives=9, retention=3_600)
    queue.send_all([NewMessage(b"0", key=LOST[0]), NewMessage(b"0", key=LEFT[0])])
    held = {message.shard: message for message in queue.receive(max_messages=2)}["shard-2"]
    calls: list[Callable[[], object]] = [
        lambda: queue.send(b"1", key=LOST[0]),
        queue.definition, queue.pause, queue.peek, queue.purge, queue.statistics, queue.depth, queue.archived,
        queue.redrive, lambda: queue.redrive(ids=[1]), queue.delete, lambda: queue.delete(force=True),
        lambda: queue.erase([LOST[0]]), lambda: queue.count_of_keys([LOST[0]]),
        lambda: queue.acknowledge(held), lambda: queue.acknowledge_all([held]), lambda: queue.release(held),
        lambda: queue.release_failed(held, delay=0.0, reason="no"), lambda: queue.give_back([held]),
        lambda: queue.extend(held, 30), lambda: queue.extend_all([held], 30),
        lambda: queue.transaction(held).__enter__(),
    ]  # fmt: skip
    second.stop()
    try:
        for call in calls:
            with pytest.raises(ShardUnavailableError) as told:
                call()
            assert told.value.shard == "shard-2"
            assert platform.shards[1].down is not None
            # The next call finds it out anew.
            platform._cluster.health.close(platform.shards)
    finally:
        second.start()


def test_a_new_queue_is_made_on_a_shard_that_is_up_though_another_is_found_down(
    dsns: list[str], opened: Open, second: EmbeddedPostgres
) -> None:
    platform = opened(*dsns).open()
    second.stop()
    try:
        Queue(platform, "jobs").send(b"1", key=LEFT[0])
    finally:
        second.start()
    assert platform.shards[0].down is None


def test_a_receiver_that_finds_a_shard_down_asks_it_no_more_until_it_is_back(
    dsns: list[str], opened: Open, second: EmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue(opened(*dsns).open(), "jobs")
    queue.send_all([NewMessage(b"0", key=key) for key in (LEFT[0], LOST[0])])
    second.stop()
    try:
        assert [message.shard for message in queue.receive(max_messages=2, visibility_timeout=0.01)] == ["shard-1"]
        assert "shard 'shard-2' is down" in caplog.text
        caplog.clear()
        for _ in range(10):
            queue.receive(max_messages=2, visibility_timeout=0.01)
        assert "nothing was received" not in caplog.text
    finally:
        second.start()


def test_keys_wait_for_their_shard_where_the_platform_was_told_so(
    dsns: list[str], opened: Open, second: EmbeddedPostgres, until: Until
) -> None:
    platform = opened(*dsns, on_shard_down="wait", shard_timeout=60.0)
    platform.publisher.publish(publication(LOST[0], 1))
    second.stop()
    waiting = threading.Thread(target=platform.publisher.publish, args=(publication(LOST[0], 2),))
    waiting.start()
    until(lambda: platform.status()[1].state == "down")
    platform.publisher.publish(publication(LEFT[0], 3))
    assert waiting.is_alive()
    second.start()
    waiting.join(60)
    platform.transfer.run_once()
    assert [event.value for event in platform.shards[1].reader.read("orders")] == [b"1", b"2"]


def test_messages_wait_for_their_shard_where_the_platform_was_told_so(
    dsns: list[str], opened: Open, second: EmbeddedPostgres, until: Until
) -> None:
    platform = opened(*dsns, on_shard_down="wait", shard_timeout=60.0)
    queue = Queue(platform, "jobs")
    queue.send(b"1", key=LOST[0])
    second.stop()
    both = [NewMessage(b"2", key=LOST[0]), NewMessage(b"3", key=LEFT[0])]
    waiting = threading.Thread(target=queue.send_all, args=(both,))
    waiting.start()
    until(lambda: platform.status()[1].state == "down")
    queue.send(b"4", key=LEFT[0])
    assert waiting.is_alive()
    second.start()
    waiting.join(60)
    assert sorted(message.body for message in queue.receive(max_messages=9)) == [b"1", b"2", b"3", b"4"]


def test_keys_wait_for_their_shard_for_shard_timeout_at_most(
    dsns: list[str], opened: Open, second: EmbeddedPostgres
) -> None:
    platform = opened(*dsns, on_shard_down="wait", shard_timeout=0.1).open()
    second.stop()
    with pytest.raises(ShardUnavailableError):
        platform.publisher.publish(publication(LOST[0]))
    with pytest.raises(ShardUnavailableError):
        Queue(platform, "jobs").send(b"1", key=LOST[0])


def test_a_platform_opens_with_a_shard_that_is_down_and_takes_it_up_when_it_is_there(
    dsns: list[str], opened: Open, second: EmbeddedPostgres, until: Until
) -> None:
    with EventSQL(*dsns, transfer=False) as before:
        before.publisher.publish_all([publication(key) for key in (LOST[0], LEFT[0])])
        before.transfer.run_once()
    second.stop()
    platform = opened(*dsns).open()
    assert [each.state for each in platform.status()] == ["takes events", "down"]
    handled: list[str | None] = []
    platform.consumers.start("orders", "mailer", lambda event, _: handled.append(event.key), polling_delay=0.05)
    until(lambda: handled == [LEFT[0]])
    with pytest.raises(ShardUnavailableError):
        platform.registry.register_topic(Topic("refused"))
    assert [topic.name for topic in platform.registry.topics()] == ["orders"], "nothing is done on half of the shards"
    assert platform.transfer.run_once() == {}
    second.start()
    until(lambda: handled == [LEFT[0], LOST[0]])
    platform.registry.register_topic(Topic("taken"))


def test_a_platform_opens_while_the_server_of_a_prepared_shard_is_down(
    databases: Databases, opened: Open, second: EmbeddedPostgres, other: Administrator, until: Until
) -> None:
    one, two, new = *databases(2), other.copy("prepared")
    with EventSQL(one, two) as platform:
        platform.registry.register_topic(Topic("orders", 2)).register_consumer(Consumer("orders", "mailer"))
    with Shard(one) as first, Shard(two) as next_one, Shard(new) as prepared:
        ShardAddition([first, next_one], prepared).execute(only_prepare=True)
    second.stop()

    platform = opened(one, two, new).open()
    assert sorted(each.state for each in platform.status()) == ["down", "takes events", "takes events"]
    assert [shard.name for shard in platform.members()] == ["shard-1", "shard-2"]
    platform.publisher.publish_all(publication(key) for key in KEYS)
    assert platform.transfer.run_once() == {"orders": len(KEYS)}
    assert {lag.shard for lag in platform.lag()} == {"shard-1", "shard-2"}
    platform.registry.register_topic(Topic("taken"))
    second.start()
    until(lambda: platform.status()[-1].state == "prepared")


def test_a_platform_that_is_opened_again_finds_out_anew_which_shards_are_down(
    dsns: list[str], opened: Open, second: EmbeddedPostgres
) -> None:
    platform = opened(*dsns).open()
    second.stop()
    with pytest.raises(DatabaseUnavailableError):
        platform.publisher.publish(publication(LOST[0]))
    platform.close()
    second.start()
    platform.open().publisher.publish(publication(LOST[0]))


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda platform: len(platform.lag()) == 4, id="lag"),
        pytest.param(lambda platform: platform.registry.topics(), id="topics"),
        pytest.param(lambda platform: platform.registry.consumer("orders", "mailer"), id="consumer"),
        pytest.param(lambda platform: platform.seeker.plan("orders", "mailer", Latest()), id="plan"),
    ],
)
def test_a_look_that_finds_a_shard_down_shows_the_others(
    dsns: list[str], opened: Open, second: EmbeddedPostgres, look: Callable[[EventSQL], object]
) -> None:
    platform = opened(*dsns).open()
    assert look(platform)
    second.stop()
    assert look(platform)
    assert [shard.down is None for shard in platform.shards] == [True, False]


def test_numbers_of_a_shard_that_is_unreachable_are_unknown(
    dsns: list[str], second: EmbeddedPostgres, capfd: pytest.CaptureFixture[str]
) -> None:
    second.stop()
    urls = [part for dsn in dsns for part in ("--dsn", dsn)]
    with pytest.raises(SystemExit):
        main([*urls, "lag", "--json"])
    found = json.loads(capfd.readouterr().out)
    assert {each["shard"]: (each["events"], each["offset"], each["end"], each["buffered"]) for each in found} == {
        "shard-1": (0, 0, 0, 0), "shard-2": (None, None, None, None)
    }  # fmt: skip
    with pytest.raises(SystemExit):
        main([*urls, "lag"])
    assert capfd.readouterr().out.count(" - ") >= 4


@pytest.fixture
def three(
    databases: Databases, second: EmbeddedPostgres, other: Administrator, request: pytest.FixtureRequest
) -> list[str]:
    """Three shards, two of them on the second server, which is stopped."""
    name = f"db_{abs(hash(request.node.name))}"
    dsns = [*databases(1), *(other.copy(f"{name}_{number}") for number in range(2))]
    with EventSQL(*dsns) as platform:
        platform.registry.register_topic(Topic("orders"))
    second.stop()
    return dsns


def of_shard(number: int) -> Publication:
    names = ["shard-1", "shard-2", "shard-3"]
    return publication(next(key for key in KEYS if shard_of_key(key, names) == f"shard-{number}"))


def test_keys_of_two_shards_that_were_never_reached_fail_as_those_of_one_that_is_down(
    three: list[str], opened: Open, second: EmbeddedPostgres
) -> None:
    platform = opened(*three).open()
    assert set(platform.members()) == set(platform.shards), "the lag and commands show that they cannot be reached"
    platform.publisher.publish(of_shard(1))
    for refused in (
        lambda: platform.publisher.publish(of_shard(2)),
        lambda: platform.publisher.publish_all([of_shard(1), of_shard(3)]),
        lambda: platform.registry.register_topic(Topic("refused")),
        lambda: platform.shard_of(str(of_shard(2).key)),
    ):
        with pytest.raises(ShardUnavailableError):
            refused()
    platform.close()
    second.start()
    platform.open()
    for number in (1, 2, 3):
        platform.publisher.publish(of_shard(number))


def test_keys_wait_for_shards_that_were_never_reached(three: list[str], opened: Open, second: EmbeddedPostgres) -> None:
    platform = opened(*three, on_shard_down="wait", shard_timeout=60.0).open()
    # The event without a key goes to the shard of the first one.
    many = [of_shard(3), publication(None), *(publication(key) for key in KEYS)]
    waiting = threading.Thread(target=platform.publisher.publish_all, args=(many,))
    waiting.start()
    platform.publisher.publish(of_shard(1))
    assert waiting.is_alive()
    second.start()
    platform.publisher.publish(of_shard(2))
    waiting.join(PATIENCE)
    assert platform.transfer.run_once() == {"orders": len(many) + 2}


def test_a_platform_whose_shards_are_all_down_cannot_be_opened(closed: list[str], opened: Open) -> None:
    with pytest.raises(DatabaseUnavailableError):
        opened(*closed).open()


def test_databases_are_made_a_set_only_with_all_of_them(databases: Databases, opened: Open, closed: list[str]) -> None:
    with pytest.raises(ShardSetError, match="the set of shards cannot be made"):
        opened(*databases(1), closed[0]).open()


@pytest.fixture
def closed(second: EmbeddedPostgres) -> list[str]:
    """URLs of a server that is stopped."""
    running = second.start()
    second.stop()
    return [running.dsn_for("one"), running.dsn_for("other")]
