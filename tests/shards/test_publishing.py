"""Each event goes to the shard of its key, in order, in one commit a shard; what cannot go there says so."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.client import consumers, streaming
from eventsql_orchestration.client.registry import ClusterRegistry
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import (
    ClosedError,
    ConnectionLostError,
    InvalidPublicationError,
    PartitionOutOfRangeError,
    PartlyPublishedError,
    ShardError,
    ShardSetError,
    ValidationError,
    WrongShardError,
)
from eventsql_orchestration.publishing import batches
from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.threads import in_thread
from tests.conftest import Administrator, Prepared
from tests.forms import stored
from tests.relay import held_commits, relayed
from tests.shard_keys import shard_of_key
from tests.shards.conftest import Databases, Open, Until
from tests.waiting import PATIENCE

KEYS = [f"key {number}" for number in range(30)]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("whole"))


@pytest.fixture
def platform(databases: Databases, prepared: Prepared, opened: Open) -> EventSQL:
    return opened(*databases(2, prepared(prepare, databases=2))).open()


def events(number: int, *, keyed: bool = True, start: int = 0) -> Iterator[Publication]:
    for each in range(start, start + number):
        yield Publication("orders", b"%d" % each, key=KEYS[each % len(KEYS)] if keyed else None)


def read(platform: EventSQL) -> dict[str, list[tuple[str | None, int]]]:
    """Key and number of each event, by shard, in the order of the logs."""
    platform.transfer.run_once()
    return {
        str(shard.name): [(event.key, int(event.value)) for event in shard.reader.read("orders")]
        for shard in platform.shards
    }


def check_in_order(found: dict[str, list[tuple[str | None, int]]], number: int) -> None:
    for name, events in found.items():
        assert {shard_of_key(key, list(found)) for key, _ in events if key is not None} == {name}
        for key in {key for key, _ in events if key is not None}:
            numbers = [each for of, each in events if of == key]
            assert numbers == sorted(numbers)
    assert sorted(each for events in found.values() for _, each in events) == list(range(number))


@pytest.mark.parametrize("batch", [1, 40, 400])
def test_events_go_to_the_shards_of_their_keys_in_order(platform: EventSQL, batch: int) -> None:
    for start in range(0, 800, batch):
        if batch == 1:
            platform.publisher.publish(next(events(1, start=start)))
        else:
            assert platform.publisher.publish_all(events(batch, start=start)) == batch
    check_in_order(read(platform), 800)


def test_a_batch_that_is_longer_than_memory_is_read_as_it_is_written(platform: EventSQL) -> None:
    assert platform.publisher.publish_all(events(25_000)) == 25_000
    check_in_order(read(platform), 25_000)


def test_events_without_a_key_take_turns_over_shards_and_stay_one_commit(platform: EventSQL) -> None:
    for publication in events(4, keyed=False):
        platform.publisher.publish(publication)
    assert {name: len(found) for name, found in read(platform).items()} == {"shard-1": 2, "shard-2": 2}
    platform.publisher.publish_all(events(100, keyed=False, start=4))
    assert sorted(len(found) for found in read(platform).values()) == [2, 102]


def test_events_with_and_without_a_key_keep_the_order_of_their_batch_on_each_shard(platform: EventSQL) -> None:
    platform.publisher.publish_all(
        Publication("whole", b"%d" % each, key=KEYS[each] if each % 2 else None) for each in range(30)
    )
    platform.transfer.run_once()
    found = [[int(event.value) for event in shard.reader.read("whole")] for shard in platform.shards]
    assert found == [sorted(values) for values in found]
    assert sorted(chain(*found)) == list(range(30))


@pytest.mark.parametrize("number", [10, 30_000])
def test_when_the_iterator_raises_nothing_is_published(platform: EventSQL, number: int) -> None:
    def broken() -> Iterator[Publication]:
        yield from events(number)
        raise InvalidPublicationError("no more")

    with pytest.raises(InvalidPublicationError, match="no more"):
        platform.publisher.publish_all(broken())
    assert read(platform) == {"shard-1": [], "shard-2": []}


def test_an_event_that_cannot_be_published_is_found_before_any_shard_commits(platform: EventSQL) -> None:
    wrong = Publication("orders", b"", key=KEYS[0], partition=9)
    with pytest.raises(PartitionOutOfRangeError):
        platform.publisher.publish_all([*events(60), wrong])
    assert read(platform) == {"shard-1": [], "shard-2": []}


@pytest.mark.parametrize("number", [60, 30_000])
def test_a_shard_that_fails_where_another_commits_is_named_with_what_is_published(
    platform: EventSQL, number: int
) -> None:
    broken = platform.shards[1]
    with broken.database.connection() as connection:
        for table in ("event_buffer", stored("orders")):
            # Deferred, so that it fails when the other shard may have committed.
            connection.execute(
                f"""
                CREATE FUNCTION eventsql.fail_{table}() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'no luck' USING ERRCODE = '23000'; END $$;
                CREATE CONSTRAINT TRIGGER unlucky AFTER INSERT ON eventsql.{table}
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION eventsql.fail_{table}()
                """
            )
    with pytest.raises(
        PartlyPublishedError, match=r"events on 'shard-1', and nothing on the other shards.*no luck"
    ) as told:
        platform.publisher.publish_all(events(number))
    assert told.value.failed.keys() == {"shard-2"}
    found = read_first(platform)
    assert told.value.committed == {"shard-1": len(found)}
    assert {shard_of_key(key, ["shard-1", "shard-2"]) for key in found} == {"shard-1"}


def test_a_shard_whose_connection_is_lost_in_the_commit_may_have_published(
    platform: EventSQL, opened: Open, until: Until
) -> None:
    near, far = (shard.database for shard in platform.shards)
    assert far.url.port is not None
    with (
        relayed(far.url.port) as relay,
        psycopg.connect(far.dsn, autocommit=True) as session,
        ThreadPoolExecutor(1) as executor,
    ):
        other = opened(near.dsn, far.url.set(port=relay.port).render_as_string(False))
        with held_commits(session, "event_buffer", stored("orders")):
            publishing = executor.submit(other.publisher.publish_all, list(events(300)))
            waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            until(lambda: session.execute(waiting).rowcount == 1)
            relay.cut()
            told = publishing.exception()
        assert isinstance(told, PartlyPublishedError)
        assert told.committed.keys() == {"shard-1"}
        assert isinstance(told.failed["shard-2"], ConnectionLostError)
        until(lambda: sum(map(len, read(platform).values())) == 300)
        check_in_order(read(platform), 300)


def read_first(platform: EventSQL) -> list[str]:
    platform.shards[0].transfer.run_once()
    return [str(event.key) for event in platform.shards[0].reader.read("orders")]


def test_an_outbox_takes_the_keys_of_its_shard_alone(platform: EventSQL) -> None:
    key = next(key for key in KEYS if shard_of_key(key, ["shard-1", "shard-2"]) == "shard-2")
    right = platform.shard_of(key)
    assert right.name == "shard-2"
    (wrong,) = (shard for shard in platform.shards if shard is not right)
    mine, keyless = Publication("orders", b"1", key=key), Publication("orders", b"2")
    with right.database.transaction() as connection:
        platform.publisher.publish(mine, connection=connection)
        platform.publisher.publish_all([keyless], connection=connection)
    for publish in (platform.publisher.publish, wrong.publisher.publish):
        with (
            pytest.raises(WrongShardError, match=f"of key '{key}' belongs to shard 'shard-2', not to 'shard-1'"),
            wrong.database.transaction() as connection,
        ):
            publish(mine, connection=connection)
    with pytest.raises(WrongShardError), wrong.database.transaction() as connection:
        platform.publisher.publish_all([keyless, mine], connection=connection)
    assert read(platform) == {"shard-1": [], "shard-2": [(key, 1), (None, 2)]}


def test_a_connection_that_cannot_take_an_event_now_says_so(platform: EventSQL) -> None:
    event = Publication("orders", b"")
    with psycopg.connect(platform.shards[0].database.dsn) as mine:
        with pytest.raises(psycopg.errors.SyntaxError):
            mine.execute("no SQL")
        with pytest.raises(ValidationError, match="roll back"):
            platform.publisher.publish(event, connection=mine)
        mine.rollback()
        with mine.pipeline(), pytest.raises(ValidationError, match="is in pipeline mode"):
            platform.publisher.publish(event, connection=mine)
        platform.publisher.publish(event, connection=mine)


def test_a_connection_to_no_shard_takes_nothing(platform: EventSQL, dsn: str, server: EmbeddedPostgres) -> None:
    # Another that has the tables, and one that has none.
    for other in (dsn, server.start().dsn):
        with psycopg.connect(other) as connection:
            connection.execute("SELECT 1")
            with pytest.raises(ShardSetError, match="which is not a shard"):
                platform.publisher.publish(Publication("orders", b""), connection=connection)
            assert connection.execute("SELECT 1").fetchone() == (1,), "the caller's transaction is not spoilt"


def test_a_platform_on_one_shard_alone_refuses_the_keys_of_another(platform: EventSQL) -> None:
    one = platform.shards[0].database.dsn
    names = [str(shard.name) for shard in platform.shards]
    with EventSQL(one, transfer=False) as alone:
        foreign = [key for key in KEYS if shard_of_key(key, names) == "shard-2"]
        with pytest.raises(WrongShardError, match="publish it through a platform on all shards"):
            alone.publisher.publish(Publication("orders", b"", key=foreign[0]))
        with pytest.raises(WrongShardError):
            alone.publisher.publish_all([Publication("orders", b"", key=key) for key in KEYS * 4])
        assert alone.buffered() == {}
        own = [key for key in KEYS if shard_of_key(key, names) == "shard-1"]
        assert alone.publisher.publish_all([Publication("orders", b"1", key=key) for key in own * 10]) == len(own) * 10


def test_buffered_events_of_many_callers_are_acknowledged_by_the_shards_of_their_keys(
    platform: EventSQL,
) -> None:
    with platform.buffered_publisher(max_age=0.001) as publisher:
        acknowledgements = [publisher.publish(each) for each in events(300)]
        publisher.flush(timeout=60)
        assert all(each.done() and each.exception() is None for each in acknowledgements)
    check_in_order(read(platform), 300)


def test_buffered_events_of_tasks_are_acknowledged_by_the_shards_of_their_keys(platform: EventSQL) -> None:
    async def publish() -> None:
        async with platform.async_publisher(max_age=0.001) as publisher:
            for future in [await publisher.enqueue(each) for each in events(200)]:
                await future
            await publisher.publish(Publication("orders", b"200"))

    asyncio.run(publish())
    check_in_order(read(platform), 201)


@pytest.fixture
def first_waits(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first event that is given waits for its shard: an event says that it does, the other lets it go on."""
    looking, go_on = threading.Event(), threading.Event()
    check_same = ClusterRegistry.check_same

    def hold_the_first(registry: ClusterRegistry, topic: str) -> None:
        if not looking.is_set():
            looking.set()
            assert go_on.wait(PATIENCE)
        check_same(registry, topic)

    monkeypatch.setattr(ClusterRegistry, "check_same", hold_the_first)
    return looking, go_on


async def step() -> None:
    """Let the other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_flush_waits_for_an_event_that_waits_for_its_shard(
    platform: EventSQL, first_waits: tuple[threading.Event, threading.Event]
) -> None:
    looking, go_on = first_waits

    async def publish() -> None:
        async with platform.async_publisher() as publisher:
            first = asyncio.create_task(publisher.publish(Publication("orders", b"0", key=KEYS[0])))
            await asyncio.to_thread(looking.wait, PATIENCE)
            flushing = asyncio.create_task(publisher.flush())
            await step()
            assert not flushing.done()
            go_on.set()
            await flushing
            await step()
            assert first.done()

    asyncio.run(publish())


def test_an_event_of_a_task_does_not_pass_an_earlier_event_of_its_key_that_waits_for_its_shard(
    platform: EventSQL, first_waits: tuple[threading.Event, threading.Event]
) -> None:
    looking, go_on = first_waits

    async def publish() -> None:
        async with platform.async_publisher(max_age=0.001) as publisher:
            first = asyncio.create_task(publisher.publish(Publication("orders", b"0", key=KEYS[0])))
            await asyncio.to_thread(looking.wait, PATIENCE)
            # The publisher knows the topic from here on: nothing but the first event can keep the second one.
            await publisher.publish(Publication("orders", b"1", key=KEYS[1]))
            second = asyncio.create_task(publisher.publish(Publication("orders", b"2", key=KEYS[0])))
            await step()
            go_on.set()
            await asyncio.gather(first, second)

    asyncio.run(publish())
    assert [number for events in read(platform).values() for key, number in events if key == KEYS[0]] == [0, 2]


def test_the_partitioner_of_a_caller_chooses_within_the_shard(platform: EventSQL) -> None:
    platform.publisher.configure_partitioner(lambda _publication, partitions: partitions - 1)
    platform.publisher.publish_all(events(100))
    check_in_order(read(platform), 100)
    assert {event.partition for shard in platform.shards for event in shard.reader.read("orders")} == {2}


def test_spark_does_not_write_to_one_shard_whatever_the_key(platform: EventSQL) -> None:
    database = platform.shards[0].database
    with (
        Publications(Source(database.dsn, database.schema, str(database))) as publications,
        pytest.raises(ShardError, match="give the URLs of all shards"),
    ):
        publications.write_targets("orders", {})


@pytest.mark.parametrize("last", [False, True])
def test_an_error_of_its_report_ends_the_transfer_of_one_database_and_of_several(
    platform: EventSQL, *, last: bool
) -> None:
    stop = threading.Event()

    def fail(_moved: dict[str, int]) -> None:
        if last:
            stop.set()
        raise ZeroDivisionError

    for transfer in (platform.transfer.run, platform.shards[0].transfer_until):
        stop.clear()
        for each in events(len(KEYS)):
            platform.publisher.publish(each)
        with pytest.raises(ZeroDivisionError):
            transfer(stop, on_moved=fail)


def test_the_transfer_ends_with_its_platform(platform: EventSQL, until: Until) -> None:
    platform.publisher.publish_all(events(len(KEYS)))
    ended = in_thread("transfer", partial(platform.transfer.run, threading.Event()))
    until(lambda: not platform.buffered())
    platform.close()
    with pytest.raises(ClosedError):
        ended.result(PATIENCE)


def test_the_transfer_waits_for_the_first_shard(
    databases: Databases, prepared: Prepared, opened: Open, administrator: Administrator, until: Until,
    *, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, consumers.__name__)
    dsns = databases(2, prepared(prepare, databases=2))
    writing, moving, stop = opened(*dsns).open(), opened(*dsns), threading.Event()
    writing.publisher.publish_all(events(len(KEYS)))
    with ExitStack() as away:
        for dsn in dsns:
            away.enter_context(administrator.refusing(dsn))
        ended = in_thread("transfer", partial(moving.transfer.run, stop))
        until(lambda: ended.done() or all(shard.down for shard in moving.consumers._cluster.shards))
    try:
        until(lambda: ended.done() or not writing.buffered())
    finally:
        stop.set()
    ended.result(PATIENCE)
    assert [each.levelname for each in caplog.records if each.name == consumers.__name__] == ["WARNING", "INFO"]


PUBLISHES = """
import sys
from eventsql_orchestration import EventSQL, Publication
from tests.interrupting import interrupt_where_it_waits

interrupt_where_it_waits()
with EventSQL(*sys.argv[1:], transfer=False) as platform:
    platform.publisher.publish_all(Publication("orders", b"", key=key) for key in %r * %d)
"""


@pytest.mark.parametrize("times", [1, 50_000], ids=["in memory", "longer than memory"])
def test_ctrl_c_ends_a_process_while_a_shard_does_not_answer(platform: EventSQL, until: Until, times: int) -> None:
    dsns = [shard.database.dsn for shard in platform.shards]
    keys = [next(key for key in KEYS if platform.shard_of(key) is shard) for shard in platform.shards]
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(dsns[0]) as connection, psycopg.connect(dsns[0], autocommit=True) as looking:
        # The first shard of a batch is written in a thread.
        connection.execute("LOCK TABLE eventsql.event_buffer, eventsql.event_buffer_lock")
        command = [sys.executable, "-c", PUBLISHES % (keys, times), *dsns]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        until(lambda: looking.execute(waiting).rowcount == 1)
        assert process.stdin is not None
        process.stdin.close()
        try:
            # It stands for ever if it waits for the thread.
            assert process.wait(PATIENCE) == -signal.SIGINT
        finally:
            process.kill()
            process.wait()


def interrupted_at(step: int, publish: Callable[[], int]) -> bool:
    """Whether Ctrl-C at a step of giving events to a shard was raised; False if there are fewer steps."""
    steps = 0

    def interrupt(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps
        of_feed = (each for each in (frame, frame.f_back, frame.f_back and frame.f_back.f_back) if each is not None)
        if all(each.f_code is not streaming._Feed.put.__code__ for each in of_feed):
            return None
        steps += 1
        if steps == step + 1:
            raise KeyboardInterrupt
        return interrupt

    traced = sys.gettrace()
    sys.settrace(interrupt)
    try:
        publish()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(traced)
    return False


def test_ctrl_c_at_any_step_of_giving_an_event_to_its_shard_ends_a_long_batch(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "STRAIGHT_MOST", 0)
    monkeypatch.setattr(streaming, "_FEED_EVENTS", 1)
    publishing = in_thread(
        "publishing",
        lambda: [interrupted_at(step, lambda: platform.publisher.publish_all(events(1))) for step in range(60)],
    )
    ended = publishing.result(PATIENCE)
    assert ended[0]
    assert not ended[-1]
    assert platform.publisher.publish_all(events(10)) == 10


def test_ctrl_c_between_the_ends_of_two_shards_leaves_no_transaction_open(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, ended = streaming._Feed.end, list[streaming._Feed]()

    def interrupted(feed: streaming._Feed) -> None:
        if ended:
            raise KeyboardInterrupt
        ended.append(feed)
        end(feed)

    monkeypatch.setattr(streaming._Feed, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        platform.publisher.publish_all(events(25_000))
    until(lambda: all(thread.name != "eventsql-publish" for thread in threading.enumerate()))
    assert platform.publisher.publish_all(events(10)) == 10
