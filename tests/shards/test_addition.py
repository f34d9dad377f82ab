"""A shard is added while events flow: keys keep their order, and publishers with the old set are refused."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeAlias

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventFilter, EventSQL, Publication, Retention, Shard, Topic
from eventsql_orchestration.consuming.claims import NoClaim
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.database import Queries
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    PartlyPublishedError,
    PartlySentError,
    ShardPendingError,
    ShardSetError,
    WrongShardError,
)
from eventsql_orchestration.queue import NewMessage, Queue
from eventsql_orchestration.shards import cluster
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.shard_state import ShardStore
from eventsql_orchestration.storage.appending import LogAppender
from eventsql_orchestration.threads import in_thread, start_thread
from eventsql_orchestration.topics import registry
from eventsql_orchestration.topics.catalog import lock_registry
from eventsql_orchestration.topics.positions import Earliest, Latest
from tests.conftest import Prepared
from tests.forms import drop_events, stored
from tests.shard_keys import shard_of_key
from tests.shards.adding import KEYS, add_shard, start
from tests.shards.conftest import Databases, Open, Until, publication
from tests.waiting import PATIENCE, wait_until

Adding: TypeAlias = Callable[..., ShardAddition]

BEFORE = ["shard-1", "shard-2"]
# From the shard that is fenced first.
MOVING = next(
    key
    for key in KEYS
    if (shard_of_key(key, BEFORE), shard_of_key(key, [*BEFORE, "shard-3"])) == ("shard-1", "shard-3")
)
STAYING = [next(key for key in KEYS if shard_of_key(key, [*BEFORE, "shard-3"]) == name) for name in BEFORE]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))


@pytest.fixture
def dsns(databases: Databases, prepared: Prepared) -> list[str]:
    """Two shards with a topic and a consumer, and a database that is to be the third."""
    return databases(3, prepared(prepare, databases=2))


@pytest.fixture
def addition() -> Iterator[Adding]:
    """Makes an addition of the last database to those before it."""
    with ExitStack() as stack:

        def add(dsns: Sequence[str], on_step: Callable[[str], None] = lambda _step: None) -> ShardAddition:
            shards = [stack.enter_context(Shard(dsn, transfer=False)) for dsn in dsns]
            return ShardAddition(shards[:-1], shards[-1], on_step=on_step)

        yield add


def numbers(platform: EventSQL, key: str) -> dict[str, list[int]]:
    """The numbers of a key's events, by shard, in the order of the logs."""
    platform.transfer.run_once()
    found = {
        str(shard.name): [int(event.value) for event in shard.reader.read("orders") if event.key == key]
        for shard in platform.shards
    }
    return {shard: events for shard, events in found.items() if events}


def test_a_shard_that_joins_is_retained_too(dsns: list[str], addition: Adding, opened: Open, until: Until) -> None:
    platform, stop = opened(*dsns[:2]).open(), threading.Event()
    platform.registry.register_topic(Topic("small", retention=Retention(events=1)))
    retaining = start_thread("retaining", platform.retention.run, stop, every=0.05)
    addition(dsns).execute()
    platform.add_url(dsns[2])
    joined = platform.shards[2]

    def dropped() -> bool:
        joined.publisher.publish_all([Publication("small", b"x")] * 3)
        joined.transfer.run_once()
        return joined.reader.read("small")[0].id > 1

    until(dropped)
    stop.set()
    retaining.join(PATIENCE)
    assert not retaining.is_alive()


def test_a_topic_that_was_made_anew_takes_no_event_by_the_shards_of_its_predecessor(
    dsns: list[str], addition: Adding, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "CACHE_SECONDS", PATIENCE)
    platform = opened(*dsns[:2]).open()
    platform.publisher.publish(publication(MOVING, 0))
    addition(dsns).execute()
    other = opened(*dsns)
    other.registry.unregister_topic("orders", force=True)
    other.registry.register_topic(Topic("orders", 2))
    # It has no URL of the key's new shard.
    with pytest.raises(ShardSetError):
        platform.publisher.publish(publication(MOVING, 1))
    assert numbers(other, MOVING) == {}


def test_a_plan_says_what_will_move_and_changes_nothing(dsns: list[str], addition: Adding) -> None:
    plan = addition(dsns).plan()
    assert (plan.name, plan.names, plan.topics, plan.consumers) == ("shard-3", ("shard-1", "shard-2"), 1, 1)
    assert plan.share == pytest.approx(1 / 3)
    assert not plan.prepared
    assert not plan.active
    with EventSQL(dsns[2]) as new:
        assert ShardStore(new.database).state().shards is None


def test_publishers_and_consumers_go_on_and_each_key_stays_in_order(
    dsns: list[str], opened: Open, until: Until, addition: Adding
) -> None:
    platform = opened(*dsns[:2], transfer=True)
    handled: defaultdict[str, list[int]] = defaultdict(list)
    handling = threading.Lock()

    def handle(events: Sequence[Event], _connection: object) -> None:
        with handling:
            for event in events:
                handled[str(event.key)].append(int(event.value))

    stop, published = threading.Event(), dict.fromkeys(KEYS, 0)

    def publish_one_by_one(keys: list[str]) -> None:
        while not stop.is_set():
            for key in keys:
                platform.publisher.publish(publication(key, published[key]))
                published[key] += 1

    def publish_batches(keys: list[str]) -> None:
        while not stop.is_set():
            batch = [publication(key, published[key] + number) for number in range(10) for key in keys]
            assert platform.publisher.publish_all(batch) == len(batch)
            for key in keys:
                published[key] += 10

    platform.consumers.start_batch("orders", "mailer", handle, polling_delay=0.05, max_events=50)
    threads = [
        threading.Thread(target=publish_one_by_one, args=(KEYS[:8],)),
        threading.Thread(target=publish_batches, args=(KEYS[8:],)),
    ]
    for thread in threads:
        thread.start()
    adding = addition(dsns)
    until(lambda: len(handled) == len(KEYS))
    adding.execute(only_prepare=True)
    platform.add_url(dsns[2])
    adding.execute()
    moved = [key for key in KEYS if shard_of_key(key, [*BEFORE, "shard-3"]) == "shard-3"]
    counts = {key: published[key] for key in moved}
    until(lambda: all(published[key] > count + 10 for key, count in counts.items()))
    stop.set()
    for thread in threads:
        thread.join()
    until(lambda: {key: len(found) for key, found in handled.items()} == published)
    for key, found in handled.items():
        assert found == list(range(published[key])), f"{key} was handled out of order"
    assert {key: set(numbers(platform, key)) for key in moved} == {
        key: {shard_of_key(key, BEFORE), "shard-3"} for key in moved
    }
    assert platform.held_back() == []


@pytest.mark.parametrize("step", ["is prepared", "'shard-1' is fenced", "'shard-2' is fenced", "is active"])
def test_an_operator_who_is_killed_after_any_step_is_followed_by_one_who_finishes(
    dsns: list[str], opened: Open, step: str, addition: Adding
) -> None:
    platform = opened(*dsns[:2], shard_timeout=0.2)
    for number in range(3):
        platform.publisher.publish_all([publication(key, number) for key in (MOVING, *STAYING)])
    operator = start(add_shard, dsns[:2], dsns[2], step)
    operator.join(60)
    assert operator.exitcode == -9, "it was killed in the middle"
    with EventSQL(dsns[2]) as new:
        assert ShardStore(new.database).state().active == (step == "is active")
    platform.add_url(dsns[2])
    for key in STAYING:
        platform.publisher.publish(publication(key, 3))
    if "fenced" in step:
        with pytest.raises(ShardPendingError, match=r"not finished: finish it with `eventsql shard add"):
            platform.publisher.publish(publication(MOVING, 3))
        with pytest.raises(ShardPendingError):
            platform.publisher.publish_all([publication(MOVING, 3)])
    else:
        platform.publisher.publish(publication(MOVING, 3))
    assert addition(dsns).execute().active
    if "fenced" in step:
        platform.publisher.publish(publication(MOVING, 3))
    platform.publisher.publish(publication(MOVING, 4))
    old = shard_of_key(MOVING, BEFORE)
    last = 4 if step == "is prepared" else 3
    assert numbers(platform, MOVING) == {old: [*range(last)], "shard-3": [*range(last, 5)]}
    for key in STAYING:
        assert numbers(platform, key) == {shard_of_key(key, BEFORE): [0, 1, 2, 3]}
    addition(dsns).execute()


def test_a_shard_knows_all_that_was_registered_while_it_was_added(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    platform = opened(*dsns[:2])

    def register(step: str) -> None:
        if "'shard-1' is fenced" in step:
            # By those who do not know of it, on the shards that they know.
            for shard in platform.shards:
                shard.registry.register_topic(Topic("late", 3)).register_consumer(Consumer("late", "reader", True))

    addition(dsns, register).execute()
    whole = opened(*dsns)
    whole.publisher.publish_all([Publication("late", b"", key=key) for key in KEYS])
    assert {state.shard for state in whole.registry.consumer("late", "reader")} == {*BEFORE, "shard-3"}
    whole.registry.check_same("late")


def test_a_new_shard_stores_topics_as_the_others_do(dsns: list[str], opened: Open, addition: Adding) -> None:
    registry = opened(*dsns[:2]).registry
    registry.register_topic(Topic("shared", 3, storage="rows"))
    registry.register_topic(Topic("packed", 3, storage="blocks", compression="pglz"))
    addition(dsns).execute()
    for shard in opened(*dsns).shards:
        assert shard.registry.topic("shared").storage == "rows"
        packed = shard.registry.topic("packed")
        assert (packed.storage, packed.compression) == ("blocks", "pglz")


def test_the_fence_waits_for_a_transaction_that_has_published(dsns: list[str], opened: Open) -> None:
    platform = opened(*dsns[:2])
    shard = platform.shard_of(MOVING)
    store = ShardStore(shard.database)
    with shard.database.transaction() as connection:
        platform.publisher.publish(publication(MOVING, 0), connection=connection)
        with pytest.raises(DatabaseBusyError, match="run it again"):
            store.fence(2, [*BEFORE, "shard-3"], shard.transfer, timeout=0.0)
        assert store.state().generation == 1
    store.fence(2, [*BEFORE, "shard-3"], shard.transfer)
    with shard.database.connection() as connection:
        fence = connection.execute("SELECT eql_fence FROM eventsql.shard_fence WHERE eql_topic = 'orders'").fetchone()
    assert [(event.id,) for event in shard.reader.read("orders")] == [fence], "what was committed before lies before it"


def test_the_fence_waits_for_those_who_write_to_a_log(dsns: list[str], opened: Open) -> None:
    shard = opened(*dsns[:2]).shards[0]
    store = ShardStore(shard.database)
    with shard.database.transaction() as connection:
        connection.execute(Queries("log", shard.database.schema)("await_topic"), {"topic": "orders"})
        with pytest.raises(DatabaseBusyError):
            store.fence(2, [*BEFORE, "shard-3"], shard.transfer, timeout=0.0)
    assert store.state().generation == 1
    assert store.fence(2, [*BEFORE, "shard-3"], shard.transfer)


def test_a_shard_that_is_fenced_for_one_addition_refuses_another(dsns: list[str], opened: Open) -> None:
    shard = opened(*dsns[:2]).shards[0]
    store = ShardStore(shard.database)
    for begins in (True, False):
        assert store.fence(2, [*BEFORE, "shard-3"], shard.transfer) is begins
    with pytest.raises(ShardSetError):
        store.fence(2, [*BEFORE, "shard-4"], shard.transfer)


def test_the_fence_waits_for_those_who_register_topics(dsns: list[str], opened: Open) -> None:
    shard = opened(*dsns[:2]).shards[0]
    store = ShardStore(shard.database)
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
    with psycopg.connect(dsns[0], autocommit=True) as looking, shard.database.core() as connection:
        lock_registry(connection)
        fenced = in_thread("fence", lambda: store.fence(2, [*BEFORE, "shard-3"], shard.transfer))
        wait_until(lambda: looking.execute(waiting).rowcount == 1)
    assert fenced.result(PATIENCE)


def test_the_fence_is_behind_a_log_whose_sequence_was_set_back(dsns: list[str], opened: Open) -> None:
    platform = opened(*dsns[:2])
    shard = platform.shard_of(MOVING)
    platform.publisher.publish_all(publication(MOVING, number) for number in range(3))
    shard.transfer.run_once()
    with shard.database.connection() as connection:
        connection.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 1)")
        ShardStore(shard.database).fence(2, [*BEFORE, "shard-3"], shard.transfer)
        fence = connection.execute("SELECT eql_fence FROM eventsql.shard_fence WHERE eql_topic = 'orders'").fetchone()
    assert fence == (shard.reader.read("orders")[-1].id,)


def test_the_fence_is_tried_again_if_a_sequence_is_set_back_while_events_are_moved(
    dsns: list[str], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns[:2])
    shard = platform.shard_of(MOVING)
    platform.publisher.publish_all(publication(MOVING, number) for number in range(3))
    shard.transfer.run_once()
    platform.publisher.publish(publication(MOVING, 3))
    # The event comes after the last look before publishers have to wait.
    monkeypatch.setattr(type(shard.transfer), "run_once", lambda *_, **__: {})
    real = LogAppender.move

    def behind(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(LogAppender, "move", real)
        with shard.database.connection() as other:
            other.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 1)")
        return real(*given, **named)

    monkeypatch.setattr(LogAppender, "move", behind)
    assert ShardStore(shard.database).fence(2, [*BEFORE, "shard-3"], shard.transfer)
    assert LogAppender.move is real
    assert [event.value for event in shard.reader.read("orders")][-1] == b"3"


def test_a_publisher_with_the_old_set_is_refused_in_the_transaction_that_would_have_written(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    platform = opened(*dsns[:2], shard_timeout=0.1)
    name = shard_of_key(MOVING, BEFORE)
    (old,) = (dsn for dsn, shard in zip(dsns, platform.open().shards, strict=False) if shard.name == name)
    with EventSQL(old, transfer=False) as alone, psycopg.connect(old) as mine:
        # All of them have looked the topic up, and keep it in memory for seconds.
        platform.publisher.publish_all([publication(key, 0) for key in (MOVING, *STAYING)])
        alone.publisher.publish(publication(MOVING, 1))
        with platform.buffered_publisher(max_age=0.001) as buffered:
            buffered.publish(publication(MOVING, 2)).result(timeout=60)
            mine.execute("SELECT")
            addition(dsns).execute()
            # None of these has been told by anybody.
            moved = buffered.publish(publication(MOVING, 9))
            stays = [buffered.publish(publication(key, 1)) for key in STAYING]
            assert isinstance(moved.exception(timeout=60), WrongShardError)
            assert [each.exception(timeout=60) for each in stays] == [None, None]
        with pytest.raises(WrongShardError, match="belongs to shard 'shard-3'"):
            alone.publisher.publish(publication(MOVING, 9))
        with pytest.raises(WrongShardError):
            alone.publisher.publish_all([publication(MOVING, 9)] * 60)
        with pytest.raises(WrongShardError):
            platform.publisher.publish(publication(MOVING, 9), connection=mine)
        mine.rollback()
        with pytest.raises(WrongShardError):
            alone.publisher.publish_all([publication(MOVING, 9)], connection=mine)
    platform.add_url(dsns[2])
    platform.publisher.publish(publication(MOVING, 3))
    assert numbers(platform, MOVING) == {name: [0, 1, 2], "shard-3": [3]}


def test_a_sender_with_the_old_set_puts_no_message_in_order_on_the_former_shard_of_its_key(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    home, platform, outbox = dsns[0], opened(*dsns[:2]), opened(*dsns[:2])
    jobs, alone = Queue(platform, "jobs", ordered=True), Queue(opened(home), "jobs")
    jobs.send(b"0", key=MOVING)
    assert outbox.shard_of(MOVING).name == "shard-1"
    with psycopg.connect(home) as mine:
        addition(dsns).execute()
        with pytest.raises(WrongShardError):
            Queue(outbox, "jobs").send(b"1", key=MOVING, connection=mine)
        mine.rollback()
        with pytest.raises(ShardSetError, match="no URL of shard 'shard-3'"):
            outbox.shard_of(MOVING)
        with pytest.raises(PartlySentError) as caught:
            jobs.send_all([NewMessage(b"1", key=key) for key in (MOVING, STAYING[1])])
        assert [sent is not None for sent in caught.value.ids] == [False, True]
        with pytest.raises(ShardSetError, match=r"no URL of shard 'shard-3'.*add_url"):
            jobs.send(b"1", key=MOVING)
        for send in (partial(alone.send, b"1", key=MOVING), partial(alone.send, b"1", key=MOVING, connection=mine)):
            with pytest.raises(WrongShardError):
                send()
    platform.add_url(dsns[2])
    jobs.send(b"1", key=MOVING)
    found = {str(shard.name): Queue(shard, "jobs").peek() for shard in platform.shards}
    assert {
        shard: [message.body for message in messages if message.key == MOVING] for shard, messages in found.items()
    } == {"shard-1": [b"0"], "shard-2": [], "shard-3": [b"1"]}


def test_the_error_of_messages_that_were_partly_sent_names_each_shard_that_refused_its_messages(
    databases: Databases, opened: Open, addition: Adding
) -> None:
    dsns, before = databases(4), [*BEFORE, "shard-3"]
    jobs = Queue(opened(*dsns[:3]), "jobs", ordered=True)
    moving = {
        shard_of_key(key, before): key
        for key in map(str, range(200))
        if shard_of_key(key, [*before, "shard-4"]) == "shard-4"
    }
    staying = next(key for key in KEYS if shard_of_key(key, [*before, "shard-4"]) == "shard-3")
    messages = [NewMessage(b"1", key=key) for key in (moving["shard-1"], moving["shard-2"], staying)]
    jobs.send_all(messages)
    addition(dsns).execute()
    with pytest.raises(PartlySentError) as caught:
        jobs.send_all(messages)
    assert [sent is not None for sent in caught.value.ids] == [False, False, True]
    assert caught.value.failed.keys() == {"shard-1", "shard-2"}


def test_a_message_in_order_whose_key_moves_waits_for_its_shard(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    addition(dsns).execute(only_prepare=True)
    platform, hasty = opened(*dsns, shard_timeout=60.0), opened(*dsns, shard_timeout=0.0)
    jobs = Queue(platform, "jobs", ordered=True)
    jobs.send(b"0", key=MOVING)

    def dies(step: str) -> None:
        if "shard-1" in step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        addition(dsns, dies).execute()
    for _ in range(2):
        # The first call finds out that the set has changed.
        with pytest.raises(WrongShardError):
            Queue(hasty, "jobs").send(b"1", key=MOVING)
    Queue(hasty, "jobs").send_all([NewMessage(b"1", key=key) for key in STAYING])
    with ThreadPoolExecutor() as thread:
        sent = thread.submit(jobs.send, b"1", key=MOVING)
        wait_until(lambda: "shard-3" in platform.members()[-1].label)
        addition(dsns).execute()
        sent.result(timeout=PATIENCE)
    third = next(shard for shard in platform.shards if shard.name == "shard-3")
    assert [message.body for message in Queue(third, "jobs").receive(max_messages=9)] == [b"1"]


@pytest.mark.parametrize("shard_timeout", [10.0, 0.0])
def test_a_process_without_the_url_of_the_new_shard_says_what_it_lacks(
    dsns: list[str], opened: Open, addition: Adding, shard_timeout: float
) -> None:
    platform = opened(*dsns[:2], shard_timeout=shard_timeout)
    platform.publisher.publish(publication(MOVING, 0))
    addition(dsns).execute()
    with pytest.raises(ShardSetError, match=r"no URL of shard 'shard-3'.*add_url"):
        platform.publisher.publish(publication(MOVING, 1))
    for key in STAYING:
        platform.publisher.publish(publication(key, 0))
    with pytest.raises(ShardSetError, match="no URL leads to shard-3"):
        opened(*dsns[:2]).open()


def test_a_publisher_whose_deadline_is_long_over_knows_the_new_shards_at_its_next_call(
    dsns: list[str], opened: Open, addition: Adding, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns[:2], shard_timeout=0.0)
    platform.publisher.publish(publication(MOVING, 0))
    addition(dsns).execute()
    monkeypatch.setattr(cluster, "REPLACED_SECONDS", -3_600.0)
    with pytest.raises(WrongShardError):
        platform.publisher.publish(publication(MOVING, 1))
    with pytest.raises(ShardSetError, match="no URL of shard 'shard-3'"):
        platform.publisher.publish(publication(MOVING, 1))


def test_a_batch_that_is_published_in_part_before_it_is_known_that_a_shard_joined_says_so(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    platform = opened(*dsns[:2])
    platform.publisher.publish(publication(MOVING, 0))
    addition(dsns).execute()
    batch = [publication(MOVING, 1), publication(STAYING[1], 0)]
    with pytest.raises(PartlyPublishedError, match="no URL of shard 'shard-3'") as raised:
        platform.publisher.publish_all(batch)
    assert raised.value.committed == {"shard-2": 1}
    assert raised.value.failed.keys() == {"shard-3"}
    platform.add_url(dsns[2])
    platform.publisher.publish(batch[0])
    assert numbers(platform, MOVING) == {"shard-1": [0], "shard-3": [1]}


def busy(_cluster: Cluster) -> None:
    """Reading the shards again fails."""
    raise DatabaseBusyError("every connection of this process is in use")


def test_a_batch_says_what_is_published_though_the_shards_cannot_be_read_again(
    dsns: list[str], opened: Open, addition: Adding, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns[:2])
    platform.publisher.publish(publication(MOVING, 0))
    addition(dsns).execute()
    monkeypatch.setattr(Cluster, "refresh", busy)
    with pytest.raises(PartlyPublishedError) as raised:
        platform.publisher.publish_all([publication(MOVING, 1), publication(STAYING[1], 0)])
    assert raised.value.committed == {"shard-2": 1}
    assert [type(error) for error in raised.value.failed.values()] == [DatabaseBusyError]
    assert raised.value.failed.keys() == {"shard-1"}
    with pytest.raises(DatabaseBusyError):
        platform.publisher.publish_all([publication(MOVING, 1)])


def test_a_key_that_has_moved_is_refused_as_such_though_the_shards_cannot_be_read_again(
    dsns: list[str], opened: Open, addition: Adding, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns[:2])
    shard = platform.shard_of(MOVING)
    with platform.buffered_publisher(max_age=3_600.0) as buffered, shard.database.connection() as mine:
        buffered.publish(publication(MOVING, 0))
        buffered.flush()
        addition(dsns).execute()
        monkeypatch.setattr(Cluster, "refresh", busy)
        moved, stays = buffered.publish(publication(MOVING, 1)), buffered.publish(publication(STAYING[0], 0))
        buffered.flush()
        assert isinstance(moved.exception(), WrongShardError)
        assert stays.exception() is None
        with pytest.raises(WrongShardError):
            platform.publisher.publish(publication(MOVING, 1), connection=mine)


def consume_on(platform: EventSQL, name: str) -> list[int]:
    """The events of the moving key that a consumer gets on one shard now."""
    handled: list[int] = []

    def handle(events: Sequence[Event], _connection: object) -> None:
        handled.extend(int(event.value) for event in events if event.key == MOVING)

    (shard,) = (shard for shard in platform.shards if shard.name == name)
    shard.consumers.consume_once("orders", "mailer", handle)
    return handled


def test_a_consumer_gets_no_event_of_the_new_shard_before_those_of_the_old_ones(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    platform = opened(*dsns[:2])
    old, other = shard_of_key(MOVING, BEFORE), next(name for name in BEFORE if name != shard_of_key(MOVING, BEFORE))
    platform.publisher.publish_all([publication(key, 0) for key in (MOVING, *STAYING)])
    addition(dsns).execute()
    platform.add_url(dsns[2])
    platform.publisher.publish(publication(MOVING, 1))
    platform.transfer.run_once()
    assert consume_on(platform, "shard-3") == []
    (held,) = platform.held_back()
    assert (held.consumer, held.shard, held.waits_for) == ("mailer", "shard-3", ("shard-1", "shard-2"))
    waiting = [lag for lag in platform.lag("orders") if lag.shard == "shard-3" and lag.events]
    assert [(lag.events, lag.cause, lag.detail) for lag in waiting] == [
        (1, LagCause.HELD_BACK, "until it has consumed the earlier events on shard-1, shard-2")
    ]
    (joined,) = (shard for shard in platform.shards if shard.name == "shard-3")
    refused = joined.claims.claim("orders", "mailer", waiting[0].partition, owner="a run")
    assert isinstance(refused, NoClaim)
    assert "held back" in refused.reason, "as a sensor's tick says it"
    assert consume_on(platform, old) == [0]
    assert [each.waits_for for each in platform.held_back()] == [(other,)]
    assert consume_on(platform, "shard-3") == []
    consume_on(platform, other)
    assert platform.held_back() == []
    assert consume_on(platform, "shard-3") == [1]


def test_a_consumer_waits_for_no_event_that_retention_has_deleted(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    platform = opened(*dsns[:2])
    platform.registry.register_consumer(Consumer("orders", "whole"))
    platform.publisher.publish(publication(MOVING, 0))
    addition(dsns).execute()
    platform.add_url(dsns[2])
    assert {each.consumer for each in platform.held_back()} == {"mailer", "whole"}
    with platform.shards[0].database.connection() as connection:
        drop_events(connection, "orders", 1)
    platform.publisher.publish_all([publication(key, 1) for key in STAYING])
    platform.transfer.run_once()
    assert platform.held_back() == []


def test_the_transfer_goes_on_when_a_shard_goes_down_while_it_releases_consumers(
    dsns: list[str], opened: Open, addition: Adding, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns[:2])
    platform.open()
    addition(dsns).execute()
    platform.add_url(dsns[2])
    held, asked = ShardStore.held, []

    def goes_down(store: ShardStore) -> list[tuple[str, str]]:
        asked.append(store)
        if len(asked) == 1:
            raise DatabaseUnavailableError("the server closed the connection")
        return held(store)

    monkeypatch.setattr(ShardStore, "held", goes_down)
    stop = threading.Event()
    transfer = start_thread("transfer", platform.transfer.run, stop)
    try:
        until(lambda: len(asked) > 1)
    finally:
        stop.set()
        transfer.join(PATIENCE)


def test_a_consumer_that_reads_everything_again_is_held_back_again(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    platform = opened(*dsns[:2])
    platform.publisher.publish(publication(MOVING, 0))
    addition(dsns).execute()
    platform.add_url(dsns[2])
    platform.publisher.publish(publication(MOVING, 1))
    platform.transfer.run_once()
    old = shard_of_key(MOVING, BEFORE)

    def consumed_in_order() -> None:
        assert consume_on(platform, "shard-3") == []
        assert consume_on(platform, old) == [0]
        assert platform.held_back() == []
        assert consume_on(platform, "shard-3") == [1]

    consumed_in_order()
    platform.seeker.execute("orders", "mailer", Earliest())
    consumed_in_order()
    platform.registry.unregister_consumer("orders", "mailer")
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    consumed_in_order()
    platform.seeker.execute("orders", "mailer", Earliest())
    platform.seeker.execute("orders", "mailer", Latest())
    assert platform.held_back() == [], "who skips everything waits for nothing"


def test_a_database_alone_becomes_the_first_of_two_shards(databases: Databases, opened: Open, addition: Adding) -> None:
    one, new = databases(2)
    keys = [key for key in KEYS if shard_of_key(key, ["shard-1", "shard-2"]) == "shard-2"][:1]
    with EventSQL(one, transfer=False) as alone:
        alone.registry.register_topic(Topic("orders", 2)).register_consumer(Consumer("orders", "mailer", True))
        alone.publisher.publish(publication(keys[0], 0))
        addition([one, new]).execute()
        with pytest.raises(WrongShardError, match="belongs to shard 'shard-2'"):
            alone.publisher.publish(publication(keys[0], 1))
    platform = opened(one, new)
    platform.publisher.publish(publication(keys[0], 1))
    assert numbers(platform, keys[0]) == {"shard-1": [0], "shard-2": [1]}
    handled: list[int] = []

    def consumed() -> bool:
        platform.consumers.consume_once(
            "orders", "mailer", lambda events, _: handled.extend(int(e.value) for e in events)
        )
        return len(handled) >= 2

    wait_until(consumed)
    assert handled == [0, 1]


def test_a_process_that_may_not_write_leaves_the_release_of_a_consumer_to_others(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    platform = opened(*dsns[:2]).open()
    addition(dsns).execute()
    platform.add_url(dsns[2])
    platform.publisher.publish(publication(MOVING, 1))
    for shard in platform.shards:
        shard.transfer.run_once()
    reader = opened(*(f"{dsn}?options=-c%20default_transaction_read_only%3Don" for dsn in dsns), migrate=False)
    assert [(held.shard, held.waits_for) for held in reader.held_back()] == [("shard-3", ())]
    (waiting,) = (lag for lag in reader.lag("orders") if lag.events)
    assert (waiting.cause, waiting.detail) == (
        LagCause.HELD_BACK, "until a process that consumes or transfers on all shards releases it"
    )  # fmt: skip
    assert platform.held_back() == []
    assert consume_on(platform, "shard-3") == [1]


def test_nobody_releases_a_consumer_while_it_is_moved(dsns: list[str], opened: Open, addition: Adding) -> None:
    platform = opened(*dsns[:2]).open()
    addition(dsns).execute()
    platform.add_url(dsns[2])
    joined = platform.shards[2].store
    assert (platform.held_back(), joined.held()) == ([], [])
    with platform._barriers.moving("orders", "mailer"):
        assert platform.held_back() == []
        assert joined.held() == [("orders", "mailer")]
    assert platform.held_back() == []
    assert joined.held() == []


def test_nobody_releases_a_consumer_that_is_about_to_be_moved(
    dsns: list[str], opened: Open, addition: Adding, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns[:2]).open()
    addition(dsns).execute()
    platform.add_url(dsns[2])
    other, barrier = opened(*dsns), ShardStore.barrier

    def others_come_first(store: ShardStore, *, wait: bool = True) -> AbstractContextManager[bool]:
        if wait:
            assert other.held_back() == []
        return barrier(store, wait=wait)

    monkeypatch.setattr(ShardStore, "barrier", others_come_first)
    with platform._barriers.moving("orders", "mailer"):
        assert platform.shards[2].store.held() == [("orders", "mailer")]


def test_a_consumer_is_held_back_while_an_older_shard_does_not_answer(
    dsns: list[str], opened: Open, addition: Adding, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns[:2]).open()
    addition(dsns).execute()
    platform.add_url(dsns[2])
    first, consumed_before = platform.shards[0], ShardStore.consumed_before

    def go_down(store: ShardStore, generation: int, topic: str, consumer: str) -> bool:
        if store is first.store:
            raise DatabaseUnavailableError("the server closed the connection")
        return consumed_before(store, generation, topic, consumer)

    with monkeypatch.context() as patched:
        patched.setattr(ShardStore, "consumed_before", go_down)
        (held,) = platform.held_back()
    assert (held.shard, held.waits_for) == ("shard-3", (first.name,))
    until(lambda: platform.held_back() == [])


def test_a_shard_that_joins_while_a_consumer_is_moved_back_holds_the_consumer_back(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    addition(dsns).execute(only_prepare=True)
    platform, old = opened(*dsns), shard_of_key(MOVING, BEFORE)
    platform.publisher.publish(publication(MOVING, 0))
    platform.transfer.run_once()
    assert consume_on(platform, old) == [0]
    with platform._barriers.moving("orders", "mailer"):
        addition(dsns).execute()
        assert opened(*dsns).held_back() == [], "another process releases it"
        platform._cluster.fan_out(lambda shard: shard.seeker.execute("orders", "mailer", Earliest()))
    assert [(each.shard, each.waits_for) for each in platform.held_back()] == [("shard-3", (old,))]


def test_a_shard_that_was_restored_from_an_older_backup_is_fenced_again(
    dsns: list[str], databases: Databases, opened: Open, addition: Adding
) -> None:
    (backup,) = databases(1, [dsns[0].rpartition("/")[2]])
    addition(dsns).execute()
    restored = [backup, *dsns[1:]]
    with EventSQL(*restored) as platform:
        platform.registry.unregister_consumer("orders", "mailer")
    addition(restored).execute()
    with pytest.raises(WrongShardError):
        opened(backup).publisher.publish(publication(MOVING, 1))
    for shard in opened(*restored).open().shards:
        assert shard.store.state().generation == 2
        assert shard.registry.consumers() == []


def test_a_shard_that_was_restored_from_before_two_additions_is_fenced_for_each(
    databases: Databases, prepared: Prepared, opened: Open, addition: Adding
) -> None:
    dsns = databases(4, prepared(prepare, databases=2))
    (backup,) = databases(1, [dsns[0].rpartition("/")[2]])
    addition(dsns[:3]).execute()
    addition(dsns).execute()
    restored = [backup, *dsns[1:]]
    addition(restored).execute()
    generations = [shard.store.state().generations for shard in opened(*restored).open().shards]
    assert [len(each) for each in generations] == [3] * 4
    assert len(set(generations)) == 1


def test_a_prepared_shard_follows_all_that_changes_until_it_is_added(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    registry = opened(*dsns[:2]).registry
    registry.register_topic(Topic("dropped")).register_topic(Topic("anew", 2))
    registry.register_consumer(Consumer("orders", "dropped")).register_consumer(Consumer("orders", "anew"))
    addition(dsns).execute(only_prepare=True)
    for topic in ("dropped", "anew"):
        registry.unregister_topic(topic)
        registry.unregister_consumer("orders", topic)
    registry.register_topic(Topic("anew")).register_topic(Topic("orders", 2, retention=Retention(events=9)))
    only_keys = EventFilter(keys=frozenset({"a"}))
    registry.register_consumer(Consumer("orders", "anew", partitioned=True), filter=only_keys)
    registry.register_consumer(Consumer("orders", "mailer", partitioned=True), max_attempts=2)
    registry.pause("orders", "mailer")
    addition(dsns).execute()

    def defined(shard: Shard) -> object:
        topics = [(each.name, each.partitions, each.retention) for each in shard.registry.topics()]
        consumers = shard.registry.consumers()
        return topics, [(c.topic, c.name, c.partition, c.paused, c.max_attempts, c.filter) for c in consumers]

    first, *others = opened(*dsns).open().shards
    assert [defined(shard) for shard in others] == [defined(first)] * 2
    assert "dropped" not in str(defined(first))


def test_a_platform_with_a_prepared_shard_works_with_what_that_shard_lacks(
    dsns: list[str], opened: Open, addition: Adding
) -> None:
    addition(dsns).execute(only_prepare=True)
    platform = opened(*dsns)
    for topic in (Topic("late"), Topic("late_dlt")):
        platform.registry.register_topic(topic)
    platform.registry.register_consumer(Consumer("late", "reader"))
    handled: list[str | None] = []
    with platform.consumers.start("late", "reader", lambda event, _: handled.append(event.key), polling_delay=0.05):
        platform.publisher.publish_all([Publication("late", b"", key=key) for key in KEYS])
        for _ in dsns:
            platform.publisher.publish(Publication("late", b""))
        platform.transfer.run_once()
        wait_until(lambda: sorted(map(str, handled)) == sorted([*KEYS, *["None"] * 3]))
    assert {state.shard for state in platform.registry.consumers("late")} == {*BEFORE}
    assert {move.shard for move in platform.seeker.plan("late", "reader", Earliest())} == {*BEFORE}
    assert platform.consumers.consume_once("late", "reader", lambda *_: None) == 0
    assert platform.dead_letters.redrive("late") == len(platform.dead_letters.list("late")) == 0
    assert platform.retention.run_once(["late"]) == []
    assert [shard.name for shard in platform.members()] == BEFORE
    addition(dsns).execute()
    wait_until(lambda: [shard.name for shard in platform.members()] == [*BEFORE, "shard-3"])


def test_a_topic_without_partitions_stays_so(dsns: list[str], opened: Open, addition: Adding) -> None:
    platform = opened(*dsns[:2])
    platform.registry.register_topic(Topic("whole"))
    for _when in ("before", "after"):
        for shard in platform.shards:
            key = next(key for key in STAYING if shard_of_key(key, BEFORE) == shard.name)
            with shard.database.transaction() as connection:
                for _ in range(2):
                    platform.publisher.publish(Publication("whole", b"", key=key), connection=connection)
        addition(dsns).execute()
    platform.transfer.run_once()
    for shard in platform.shards:
        assert [event.partition for event in shard.reader.read("whole")] == [-1] * 4
