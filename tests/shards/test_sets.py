"""A platform opens with the shards of one set, and with nothing else; what does not fit is refused before a write."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from eventsql_orchestration import Consumer, EventFilter, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import (
    ClosedError,
    DatabaseUnavailableError,
    InvalidNameError,
    RedefinitionError,
    RegistryError,
    SchemaOutdatedError,
    ShardError,
    ShardsDifferError,
    ShardSetError,
    ValidationError,
)
from eventsql_orchestration.model import Compression
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.shards.bootstrap import compare
from eventsql_orchestration.shards.shard_state import ShardState, ShardStore
from eventsql_orchestration.storage import compressing
from tests.conftest import Administrator
from tests.shards.conftest import Databases, Open
from tests.waiting import PATIENCE, wait_until


def named(platform: EventSQL) -> dict[str, str]:
    return {str(shard.database): str(shard.name) for shard in platform.shards}


class ComeTogether:
    """A lock that two threads with names that begin with `name` first take when both have come to it."""

    def __init__(self, lock: Any, name: str) -> None:
        self._lock, self._name = lock, name
        self._both, self._came = threading.Barrier(2), set[int]()

    def __enter__(self) -> None:
        own = threading.get_ident()
        if threading.current_thread().name.startswith(self._name) and own not in self._came:
            self._came.add(own)
            self._both.wait(PATIENCE)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def written(dsn: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return [
            row
            for table in ("shard", "shard_layout", "topic")
            for row in connection.execute(f"SELECT * FROM eventsql.{table}")
        ]


def test_the_first_platform_makes_databases_shards_and_their_urls_order_never_matters_again(
    databases: Databases, opened: Open
) -> None:
    one, other, third = databases(3)
    first = named(opened(one, other, third).open())
    assert list(first.values()) == ["shard-1", "shard-2", "shard-3"]
    assert named(opened(third, one, other).open()) == first


def test_nothing_is_made_where_that_is_left_to_migrate(databases: Databases, opened: Open) -> None:
    dsns = databases(2)
    with pytest.raises(SchemaOutdatedError, match="run `eventsql migrate` with the URLs of all of them"):
        opened(*dsns, migrate=False).open()
    assert [written(dsn) for dsn in dsns] == [[], []]


def test_processes_that_make_a_set_at_once_make_one(databases: Databases, opened: Open) -> None:
    dsns = databases(3)
    platforms = [opened(*order) for order in (dsns, dsns[::-1], [dsns[1], dsns[2], dsns[0]])]
    threads = [threading.Thread(target=platform.open) for platform in platforms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({frozenset(named(platform.open()).items()) for platform in platforms}) == 1


def test_a_set_whose_making_was_cut_short_is_finished_by_the_next(databases: Databases, opened: Open) -> None:
    one, other = databases(2)
    opened(one, other).open()
    # The last that is written is the one that decides: without it, and the other not yet active, it was cut short.
    states = {dsn: written(dsn) for dsn in (one, other)}
    with psycopg.connect(min(one, other, key=_identity)) as connection:
        connection.execute("DELETE FROM eventsql.shard")
        connection.execute("DELETE FROM eventsql.shard_layout")
    with psycopg.connect(max(one, other, key=_identity)) as connection:
        connection.execute("UPDATE eventsql.shard SET eql_active = false")
    opened(other, one).open()
    for dsn in (one, other):
        assert [row[:2] for row in written(dsn)] == [row[:2] for row in states[dsn]]
        assert written(dsn)[0][2] is True


def _identity(dsn: str) -> str:
    with EventSQL(dsn) as platform:
        return ShardStore(platform.database).state().identity


def test_urls_that_are_not_the_set_are_refused_before_anything_is_written(
    databases: Databases, opened: Open, administrator: Administrator
) -> None:
    one, other, third, empty = databases(4)
    opened(one, other).open().registry.register_topic(Topic("orders", 2))
    with administrator.copied() as foreign, EventSQL(third, foreign) as theirs:
        theirs.open()
        before = {dsn: written(dsn) for dsn in (one, other, third, empty)}
        for dsns, message in (
            ((one, empty), "is none of the shards shard-1, shard-2"),
            ((one, other, empty), "is none of the shards shard-1, shard-2"),
            ((one, f"{one}?application_name=x"), "are one database"),
            ((one, third), "belongs to another set"),
        ):
            with EventSQL(*dsns) as platform, pytest.raises(ShardSetError, match=message):
                platform.registry.register_topic(Topic("refused"))
        assert {dsn: written(dsn) for dsn in before} == before


def test_a_shard_that_is_left_out_is_named(databases: Databases, opened: Open) -> None:
    one, other, third = databases(3)
    opened(one, other, third).open()
    with pytest.raises(ShardSetError, match="no URL leads to shard-3"):
        opened(one, other).open()


def test_a_url_that_is_refused_leaves_no_connection_open(
    databases: Databases, opened: Open, session: Connection
) -> None:
    one, other, third = databases(3)
    platform = opened(one, other).open()
    with pytest.raises(ShardSetError) as refused:
        platform.add_url(third)
    name = conninfo_to_dict(third)["dbname"]
    sessions = "SELECT FROM pg_stat_activity WHERE datname = %s"
    # A backend takes a moment to notice that its client has gone.
    wait_until(lambda: session.execute(sessions, [name]).rowcount == 0, "the connection is closed")
    assert len(platform.shards) == 2
    del refused


def test_a_shard_that_two_threads_name_at_once_is_known_once(
    databases: Databases, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = databases(3)
    platform = opened(one, other).open()
    with Shard(one) as first, Shard(other) as second, Shard(third) as new:
        ShardAddition([first, second], new).execute()
    with monkeypatch.context() as patched, ThreadPoolExecutor(2, "adding") as pool:
        patched.setattr(platform._cluster, "_lock", ComeTogether(platform._cluster._lock, "adding"))
        added = [pool.submit(platform.add_url, third) for _ in range(2)]
    assert sorted(isinstance(each.exception(), ShardSetError) for each in added) == [False, True]
    assert [shard.name for shard in platform.shards] == ["shard-1", "shard-2", "shard-3"]


def test_an_error_of_closing_a_shard_is_raised_after_the_others_are_closed(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    platform = EventSQL(*databases(2), transfer=False).open()
    broken, other = platform.shards
    monkeypatch.setattr(broken.notifier, "close", fail)
    with pytest.raises(ZeroDivisionError):
        platform.close()
    with pytest.raises(ClosedError):
        other.database.check_open()
    broken.database.close()


def test_a_shard_that_is_closed_while_its_state_is_read_keeps_no_connection(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, taken = ShardStore._state, list[Connection]()

    def close_first(store: ShardStore, connection: Connection) -> ShardState:
        taken.append(connection)
        shard.close()
        return read(store, connection)

    monkeypatch.setattr(ShardStore, "_state", close_first)
    with Shard(dsn, transfer=False) as shard:
        assert shard.store.state().topics == 0
    (connection,) = taken
    assert connection.closed


def test_a_database_becomes_a_shard_on_one_connection(databases: Databases) -> None:
    (dsn,) = databases(1)
    with Database(dsn, pool_size=1, max_overflow=0) as database:
        store = ShardStore(database)
        with store.bootstrap() as (state, connection):
            assert state.name is None
            store.become(connection, "one", str(uuid.uuid4()), [frozenset({"one"})], active=True)
        assert store.state().name == "one"


def test_an_erasure_on_one_of_several_shards_is_refused(databases: Databases, opened: Open) -> None:
    one, other = databases(2)
    opened(one, other).registry.register_topic(Topic("orders"))
    alone = opened(one)
    for erase in (alone.eraser.plan, alone.eraser.execute):
        with pytest.raises(ShardSetError):
            erase("orders", ["ann"])
    assert alone.eraser.records() == []


def test_dead_letters_of_several_shards_are_not_chosen_by_offsets(databases: Databases, opened: Open) -> None:
    letters = opened(*databases(2)).dead_letters
    for chosen in (LetterFilter(ids=[1]), LetterFilter(after=1), LetterFilter(upto=1)):
        for use in (letters.plan_redrive, letters.redrive, letters.dismiss, letters.list):
            with pytest.raises(ValidationError, match="each shard counts its dead letters by itself"):
                use("orders", chosen)


def test_a_database_with_topics_does_not_become_a_shard_when_a_platform_opens(
    databases: Databases, opened: Open
) -> None:
    one, other = databases(2)
    with EventSQL(one) as platform:
        platform.registry.register_topic(Topic("orders"))
    with pytest.raises(ShardSetError, match="has topics and is not a shard"):
        opened(one, other).open()
    assert written(other) == []


def test_a_copy_of_a_shard_is_told_from_it() -> None:
    state = ShardState("1", 0, "set", "a", True, (frozenset({"a", "b"}),))
    copy = ShardState("2", 0, "set", "a", True, (frozenset({"a", "b"}),))
    with pytest.raises(ShardSetError, match="both say that they are shard 'a': one is a copy"):
        compare([("db1", state), ("db2", copy)])


def test_topics_and_consumers_that_differ_are_refused_when_they_are_used(databases: Databases, opened: Open) -> None:
    platform = opened(*databases(2))
    platform.registry.register_topic(Topic("orders", 2)).register_consumer(Consumer("orders", "mailer", True))
    one, other = platform.shards
    one.registry.register_topic(Topic("lonely"))
    one.registry.register_consumer(Consumer("orders", "ledger", True))
    other.registry.register_topic(Topic("sizes", 2))
    one.registry.register_topic(Topic("sizes", 3))
    for topic, message in (("lonely", "missing on 'shard-2'"), ("sizes", "3 partitions on 'shard-1', 2 partitions")):
        with pytest.raises(ShardsDifferError, match=message):
            platform.publisher.publish(Publication(topic, b"", key="1"))
        with pytest.raises(ShardsDifferError, match=message):
            platform.publisher.publish_all([Publication(topic, b"", key="1")])
        assert platform.buffered() == {}
    with pytest.raises(ShardsDifferError, match="is missing on shard 'shard-2': complete it"):
        platform.consumers.start("orders", "ledger", print)
    platform.registry.register_topic(Topic("lonely")).register_consumer(Consumer("orders", "ledger", True))
    platform.publisher.publish(Publication("lonely", b""))
    platform.consumers.start("orders", "ledger", print).stop()


def test_a_consumer_starts_and_is_deleted_while_a_shard_comes_back(
    databases: Databases, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*databases(2))
    platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "mailer"))
    one, other = platform.shards
    consumers = one.registry.consumers

    def listed(topic: str) -> list[ConsumerState]:
        other.down = None
        return consumers(topic)

    other.down = DatabaseUnavailableError("it does not answer")
    monkeypatch.setattr(one.registry, "consumers", listed)
    platform.consumers.start("orders", "mailer", print).stop()

    other.down = DatabaseUnavailableError("it does not answer")
    platform.registry.unregister_consumer("orders", "mailer")
    assert other.registry.consumers("orders") == []


def test_a_topic_is_looked_up_on_the_first_shard_that_is_up_and_has_it(
    databases: Databases, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*databases(2)).open()
    one, other = platform.shards
    other.registry.register_topic(Topic("late", 2))
    assert platform.registry.topic("late") == platform.registry.cached_topic("late") == Topic("late", 2)

    def lost(_name: str) -> Topic:
        raise DatabaseUnavailableError("it does not answer")

    # Both go down, and are back at the next look.
    monkeypatch.setattr(platform._cluster.health, "lose", lambda *_: None)
    for shard in (one, other):
        monkeypatch.setattr(shard.registry, "topic", lost)
    with pytest.raises(DatabaseUnavailableError):
        platform.registry.topic("late")


def test_a_shard_that_lacks_a_consumer_gets_its_settings_from_the_others(databases: Databases, opened: Open) -> None:
    platform = opened(*databases(2))
    platform.registry.register_topic(Topic("orders", 2))
    mailer, conditions = Consumer("orders", "mailer", True), EventFilter(key_prefix="a")
    platform.shards[1].registry.register_consumer(mailer, max_attempts=9, filter=conditions)
    platform.registry.register_consumer(mailer)
    states = platform.registry.consumer("orders", "mailer")
    assert {(each.shard, each.max_attempts, each.filter) for each in states} == {
        ("shard-1", 9, conditions),
        ("shard-2", 9, conditions),
    }


def test_a_consumer_in_the_other_form_on_any_shard_is_refused_before_one_is_written(
    databases: Databases, opened: Open
) -> None:
    platform = opened(*databases(2))
    platform.registry.register_topic(Topic("orders", 2))
    platform.shards[1].registry.register_consumer(Consumer("orders", "mailer", True))
    with pytest.raises(RedefinitionError):
        platform.registry.register_consumer(Consumer("orders", "mailer"), start="latest")
    assert {each.shard for each in platform.registry.consumers("orders")} == {"shard-2"}


def test_an_addition_names_what_is_in_its_way(databases: Databases, opened: Open) -> None:
    one, other, new, third = databases(4)
    opened(one, other).open()
    with Shard(one) as a, Shard(other) as b, Shard(new) as c, Shard(third) as d:
        with pytest.raises(ShardSetError, match="no URL leads to shard-2"):
            ShardAddition([a], c).plan()
        with pytest.raises(ShardSetError, match="one database"):
            ShardAddition([a, b], a).plan()
        with pytest.raises(ShardSetError, match="there is a shard 'shard-2' already"):
            ShardAddition([a, b], c, name="shard-2").plan()
        with pytest.raises(InvalidNameError):
            ShardAddition([a, b], c, name="0").plan()
        c.registry.register_topic(Topic("orders"))
        with pytest.raises(ShardSetError, match="add an empty database"):
            ShardAddition([a, b], c).plan()
        c.registry.unregister_topic("orders")
        addition = ShardAddition([a, b], c, name="west", on_step=_dies_after("shard 'shard-1' is fenced"))
        with pytest.raises(KeyboardInterrupt):
            addition.execute()
        with pytest.raises(ShardSetError, match="finish the addition of shard west"):
            ShardAddition([a, b], d).execute()
        with pytest.raises(ShardSetError, match="'west' that is being added is another database"):
            ShardAddition([a, b], d, name="west").execute()
        assert written(third) == []


def test_an_addition_refuses_databases_that_are_not_one_set(databases: Databases, opened: Open) -> None:
    one, other, new, third, fourth = databases(5)
    opened(one, other).open()
    with Shard(one) as a, Shard(other) as b, Shard(new) as c, Shard(third) as d, Shard(fourth) as e:
        with pytest.raises(ShardSetError, match="not a set of shards yet"):
            ShardAddition([c, d], e).plan()
        ShardAddition([a, b], c, name="west").execute(only_prepare=True)
        with pytest.raises(ShardSetError, match="keeps that name"):
            ShardAddition([a, b], c, name="east").plan()
        with pytest.raises(ShardSetError, match="no URL leads to shard-1, shard-2"):
            ShardAddition([c], c).plan()
        with pytest.raises(ShardSetError, match="not all active"):
            ShardAddition([a, b, c], d).plan()
        opened(third, fourth).open()
        with pytest.raises(ShardSetError, match="another set of shards"):
            ShardAddition([a, b], d).plan()


def _dies_after(step: str) -> Callable[[str], None]:
    def on_step(done: str) -> None:
        if done == step:
            raise KeyboardInterrupt

    return on_step


def test_a_compression_that_one_server_lacks_changes_nothing_on_any(
    databases: Databases, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = databases(2)
    registry = opened(one, other).registry
    registry.register_topic(Topic("rides", compression="none"))
    lacking = conninfo_to_dict(other)["dbname"]

    def available(connection: psycopg.Connection[Any], _schema: str) -> tuple[Compression, ...]:
        return ("pglz", "none") if connection.info.dbname == lacking else ("pglz", "lz4", "none")

    # The tests have one server, so its databases stand for servers that are built differently.
    monkeypatch.setattr(compressing, "available", available)
    calls = (
        lambda: registry.set_compression("rides", "lz4"),
        lambda: registry.register_topic(Topic("fresh", compression="lz4")),
    )
    for call in calls:
        with pytest.raises(RegistryError) as refused:
            call()
        assert not isinstance(refused.value, ShardError)
        assert "shard-2" in str(refused.value)
    for shard in opened(one, other).shards:
        assert [(topic.name, topic.compression) for topic in shard.registry.topics()] == [("rides", "none")]
