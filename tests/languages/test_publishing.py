"""`eventsql.publish` and `publish_all` do in SQL what the library's publisher does: in psql, in Java, in triggers."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.topics.partitioner import partition_of_key
from tests.fixtures import Sessions, UntilBlocked
from tests.refusals import check_refused
from tests.shard_keys import shard_of_key

if TYPE_CHECKING:
    from tests.languages.conftest import Psql
    from tests.shards.conftest import Databases

KEYS = ["", "a", "é ☃ 𝄞", "quote ' \\ \"", "x" * 65_536, *map(str, range(50))]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 7))


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="topic")


@pytest.fixture
def topic(platform: EventSQL) -> EventSQL:
    return platform


Found = tuple[int, str | None, bytes, dict[str, str]]


def published(platform: EventSQL) -> list[Found]:
    """The published events, partition by partition: only the order within a partition is kept."""
    platform.transfer.run_once()
    return by_partition(
        (each.partition, each.key, each.value, dict(each.metadata)) for each in platform.reader.read("orders")
    )


def by_partition(events: Iterable[Found]) -> list[Found]:
    return sorted(events, key=itemgetter(0))


def test_an_event_is_the_one_that_the_library_publishes(topic: EventSQL, session: Connection) -> None:
    metadata = {"é": "☃", "trace": "1"}
    for key in KEYS:
        topic.publisher.publish(Publication("orders", b"\x00\xff", key=key, metadata=metadata))
        session.execute(
            "SELECT eventsql.publish('orders', %s, %s, %s)",
            [key, b"\x00\xff", psycopg.types.json.Json(metadata)],
        )
    found = published(topic)
    assert found[0::2] == found[1::2]
    assert found[0::2] == by_partition((partition_of_key(key, 7), key, b"\x00\xff", metadata) for key in KEYS)


def test_many_events_keep_their_order_and_the_rest_may_be_left_out(topic: EventSQL, session: Connection) -> None:
    values = [b"%d" % number for number in range(300)]
    (number,) = session.execute("SELECT eventsql.publish_all('orders', NULL, %s)", [values]).fetchone() or ()
    assert number == 300
    session.execute("SELECT eventsql.publish('orders', NULL, '')")
    assert session.execute("SELECT eventsql.publish_all('orders', '{}', '{}')").fetchone() == (0,)
    found = published(topic)
    assert sorted(value for _, _, value, _ in found) == sorted([*values, b""])
    for partition in range(7):
        own = [values.index(value) for place, _, value, _ in found if place == partition and value]
        assert own
        assert own == sorted(own)


REFUSED = [
    "'absent', 'k', 'v'", "NULL, 'k', 'v'", "'orders', 'k', NULL", "'orders', repeat('k', 65537), 'v'",
    "'orders', 'k', convert_to(repeat('v', 67108865), 'UTF8')", "'orders', 'k', 'v', '[]'",
    "'orders', 'k', 'v', '1'",
    """'orders', 'k', 'v', '{"a": 1}'""", """'orders', 'k', 'v', '{"a": null}'""",
    """'orders', 'k', 'v', '{"a": "1", "a": "2"}'""",
    "'orders', 'k', 'v', json_build_object('a', repeat('m', 16777216))",
]  # fmt: skip


def test_sql_refuses_what_the_library_refuses(topic: EventSQL, session: Connection) -> None:
    calls = [f"SELECT eventsql.publish({arguments})" for arguments in REFUSED]
    check_refused(session, calls, psycopg.errors.InvalidParameterValue)
    assert published(topic) == []


def test_metadata_with_a_character_that_cannot_be_stored_is_refused(topic: EventSQL, session: Connection) -> None:
    with pytest.raises(psycopg.DataError):
        session.execute(r"""SELECT eventsql.publish('orders', 'k', 'v', '{"a": "\u0000"}')""")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        session.execute("SELECT eventsql.publish_all('orders', ARRAY['a', 'b'], ARRAY['v'::bytea])")
    assert published(topic) == []


def test_a_rolled_back_transaction_publishes_nothing(topic: EventSQL, sessions: Sessions) -> None:
    writer = sessions()
    writer.execute("SELECT eventsql.publish('orders', 'k', 'v')")
    writer.rollback()
    assert published(topic) == []


def test_a_trigger_publishes_in_a_hostile_session(topic: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE account (id integer)")
    session.execute(
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM eventsql.publish('orders', "
        "NEW.id::text, convert_to(to_json(NEW)::text, 'UTF8')); RETURN NULL; END $$"
    )
    session.execute("CREATE TRIGGER tell AFTER INSERT ON account FOR EACH ROW EXECUTE FUNCTION tell()")
    session.execute("CREATE TEMP TABLE event_buffer (eql_topic text)")
    session.execute("CREATE TEMP TABLE topic (eql_name text)")
    session.execute("INSERT INTO account VALUES (1)")
    assert [(key, value) for _, key, value, _ in published(topic)] == [("1", b'{"id":1}')]


def test_a_repartitioning_waits_for_an_open_publication_and_the_next_one_sees_it(
    topic: EventSQL, sessions: Sessions, session: Connection
) -> None:
    topic.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    old = sessions()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("SELECT 1")
    session.execute("SELECT eventsql.publish('orders', 'k', 'before')")
    topic.repartitioner.repartition("orders", 11)
    session.execute("SELECT eventsql.publish('orders', 'k', 'after')")
    assert [partition for partition, *_ in published(topic)] == sorted(partition_of_key("k", each) for each in (7, 11))
    with pytest.raises(psycopg.errors.SerializationFailure):
        old.execute("SELECT eventsql.publish('orders', 'k', 'too old')")


def test_a_publication_that_waits_for_a_repartitioning_goes_by_its_result(
    topic: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, session: Connection
) -> None:
    session.execute("SELECT eventsql.publish('orders', 'k', 'a plan of this session')")
    change = sessions()
    change.execute("LOCK TABLE eventsql.event_buffer IN SHARE ROW EXCLUSIVE MODE")
    change.execute("UPDATE eventsql.topic SET eql_partitions = 11, eql_layout = 2")
    waiting = threading.Thread(target=session.execute, args=("SELECT eventsql.publish('orders', 'k', 'v')",))
    waiting.start()
    until_blocked()
    change.commit()
    waiting.join(60)
    rows = session.execute("SELECT eql_partition FROM eventsql.event_buffer ORDER BY eql_id").fetchall()
    assert rows == [(partition_of_key("k", 7),), (partition_of_key("k", 11),)]


def test_an_event_for_a_topic_that_is_made_a_moment_later_is_refused(
    topic: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, session: Connection
) -> None:
    # The INSERT of the function finds no topic, and then waits until there is one.
    session.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$"
    )
    session.execute(
        "CREATE TRIGGER wait AFTER INSERT ON eventsql.event_buffer FOR EACH STATEMENT EXECUTE FUNCTION wait()"
    )
    gate = sessions()
    gate.execute("SELECT pg_advisory_xact_lock(1)")
    with ThreadPoolExecutor(1) as executor:
        publishing = executor.submit(session.execute, "SELECT eventsql.publish('late', 'k', 'v')")
        until_blocked()
        topic.registry.register_topic(Topic("late"))
        gate.rollback()
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            publishing.result()


def test_a_shard_takes_its_own_keys_alone(databases: Databases) -> None:
    urls = databases(2)
    with EventSQL(*urls, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 3))
        names = [str(shard.name) for shard in platform.shards]
        for shard, url in zip(platform.shards, urls, strict=True):
            with psycopg.connect(url, autocommit=True) as connection:
                # An earlier layout does not count.
                connection.execute("INSERT INTO eventsql.shard_layout VALUES (0, %s)", [names[:1]])
                for key in map(str, range(30)):
                    mine = shard_of_key(key, names) == shard.name
                    try:
                        connection.execute("SELECT eventsql.publish('orders', %s, 'v')", [key])
                        assert mine
                    except psycopg.errors.ObjectNotInPrerequisiteState:
                        assert not mine
                connection.execute("SELECT eventsql.publish('orders', NULL, 'v')")
                # A shard whose addition is under way takes nothing.
                connection.execute("UPDATE eventsql.shard SET eql_active = false")
                with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
                    connection.execute("SELECT eventsql.publish('orders', NULL, 'v')")


# Other programs


def test_psql_publishes(topic: EventSQL, psql: Psql) -> None:
    psql("""
        BEGIN;
        SELECT eventsql.publish('orders', 'from psql', convert_to('{"total": 1}', 'UTF8'), '{"by": "psql"}');
        SELECT eventsql.publish_all('orders', ARRAY['a', NULL], ARRAY['1', '2']::bytea[]);
        COMMIT;
    """)
    found = {value: (key, metadata) for _, key, value, metadata in published(topic)}
    assert found == {b'{"total": 1}': ("from psql", {"by": "psql"}), b"1": ("a", {}), b"2": (None, {})}


def test_javas_driver_publishes(topic: EventSQL, jdbc: Any) -> None:
    one = jdbc.prepareStatement("SELECT eventsql.publish(?, ?, ?, ?::json)")
    for number in range(20):
        one.setString(1, "orders")
        one.setString(2, f"clé {number}")
        one.setBytes(3, bytearray(b"\x00%d" % number))
        one.setString(4, '{"by": "java"}')
        one.execute()
    jdbc.commit()
    one.setString(2, "rolled back")
    one.execute()
    jdbc.rollback()
    assert published(topic) == by_partition(
        (partition_of_key(f"clé {number}", 7), f"clé {number}", b"\x00%d" % number, {"by": "java"})
        for number in range(20)
    )
