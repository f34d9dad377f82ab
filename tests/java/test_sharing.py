"""A Java service on EventSQL's library and this package share a database, in every division of work between the two."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import ClaimLostError, InvalidNameError, RedefinitionError
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.legacy_writer_trigger import Order, order, stranded
from tests.fixtures import Until
from tests.java.conftest import Open
from tests.java.sides import JavaError, Side, Written

pytestmark = pytest.mark.in_rows

ODD = 'żółw "quoted" back\\slash /slash\nline\ttab \u2028 \u007f 🐢'
"""What a JSON writer of one's own may get wrong."""


def moved(platform: EventSQL, topic: str, count: int, until: Until) -> list[Event]:
    """The topic's log, once it has this number of events."""
    until(lambda: platform.reader.count(topic) >= count)
    events = platform.reader.read(topic)
    assert len(events) == count
    return events


# Java publishes


def test_events_of_java_are_transferred_and_consumed_by_python(java: Side, platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("orders", 3)).register_consumer(Consumer("orders", "sums", partitioned=True))
    java.publish("orders", [Written("k", b"one", (("source", "java"),)), Written(None, b""), Written(ODD, b"\x00\xff")])
    with EventSQL(platform.database.dsn) as other:
        other.publisher.publish(Publication("orders", b"ours"))
        events = moved(platform, "orders", 4, until)
        seen: list[Event] = []
        with other.consumers.start_batch("orders", "sums", lambda batch, _: seen.extend(batch), polling_delay=0.05):
            until(lambda: len(seen) == 4)
    assert {(event.key, event.value) for event in seen} == {
        ("k", b"one"), (None, b""), (ODD, b"\x00\xff"), (None, b"ours")
    }  # fmt: skip
    first = next(event for event in events if event.value == b"one")
    assert first.metadata == {"source": "java"}
    # Whatever its own time zone is.
    assert abs(first.buffered_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert abs(first.created_at - datetime.now(UTC)) < timedelta(minutes=5)


def test_java_moves_the_buffered_events_of_both(java: Side, platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    platform.publisher.publish(Publication("orders", b"ours", key="k"))
    java.publish("orders", [Written("k", b"java's")])
    events = moved(platform, "orders", 2, until)
    assert [event.value for event in events] == [b"ours", b"java's"]
    assert platform.buffered() == {}


# Python publishes


def test_java_consumes_events_of_python(java: Side, platform: EventSQL, until: Until) -> None:
    java.register_topic("orders", 3)
    java.register_consumer("orders", "sums", partitioned=True)
    java.start("orders", "sums")
    platform.publisher.publish(Publication("orders", b"\x00\xff", key=ODD, metadata={"odd": ODD, "empty": ""}))
    platform.publisher.publish(Publication("orders", b""))
    platform.publisher.publish_all(Publication("orders", b"%d" % number, key=str(number)) for number in range(100))
    platform.transfer.run_once()
    until(lambda: len(java.seen) == 102)
    expected = {event.id: event for event in platform.reader.read("orders")}
    for seen in java.seen:
        event = expected.pop(seen.id)
        assert (seen.topic, seen.partition, seen.key, seen.value, seen.metadata) == (
            event.topic, event.partition, event.key, event.value, event.metadata,
        )  # fmt: skip
    java.stop()
    states = platform.registry.consumer("orders", "sums")
    assert sum(state.consumed_events for state in states) == 102
    assert all(lag.events == 0 for lag in platform.lag("orders"))


def test_metadata_of_java_arrives_as_it_was(java: Side, platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("orders"))
    java.publish("orders", [Written("k", b"", (("odd", ODD), ("empty", "")))])
    (event,) = moved(platform, "orders", 1, until)
    assert event.metadata == {"odd": ODD, "empty": ""}
    assert event.as_publication().metadata == event.metadata


# Both


def test_a_key_has_the_same_partition_for_every_publisher(java: Side, platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("orders", 7))
    keys = ["", "k", ODD, *(f"key {number}" for number in range(60))]
    java.publish("orders", [Written(key, b"java") for key in keys])
    platform.publisher.publish_all(Publication("orders", b"python", key=key) for key in keys)
    platform.transfer.run_once()
    found: defaultdict[str | None, set[int]] = defaultdict(set)
    for event in moved(platform, "orders", 2 * len(keys), until):
        found[event.key].add(event.partition)
    assert {len(partitions) for partitions in found.values()} == {1}
    assert len(set.union(*found.values())) == 7


def test_a_topic_registered_by_one_is_the_others_as_well(java: Side, platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("ours", 3)).register_consumer(Consumer("ours", "sums", partitioned=True))
    java.register_topic("ours", 3)
    java.register_consumer("ours", "sums", partitioned=True)
    java.register_topic("java_s", NOT_PARTITIONED)
    java.register_consumer("java_s", "sums", partitioned=False)
    platform.registry.register_topic(Topic("java_s")).register_consumer(Consumer("java_s", "sums"))
    assert platform.registry.topics() == [Topic("java_s"), Topic("ours", 3)]
    with pytest.raises(JavaError, match="has events or consumers"):
        java.register_topic("ours", 4)
    with pytest.raises(RedefinitionError):
        platform.registry.register_topic(Topic("java_s", 2))
    for topic in ("ours", "java_s"):
        java.start(topic, "sums")
        java.publish(topic, [Written("k", b"java")])
        platform.publisher.publish_all([Publication(topic, b"python", key="k")] * 60)
    platform.transfer.run_once()
    until(lambda: len(java.seen) == 2 * 61)


def test_instances_of_both_consume_one_consumer_and_nothing_is_lost_or_doubled(
    java: Side, open_java: Open, platform: EventSQL, until: Until
) -> None:
    platform.registry.register_topic(Topic("orders", 4)).register_consumer(Consumer("orders", "sums", partitioned=True))
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.effect (id bigint, key text, value bytea)")

    def handle(events: Sequence[Event], connection: Connection) -> None:
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO public.effect VALUES (%s, %s, %s)", [(each.id, each.key, each.value) for each in events]
            )

    def effects() -> list[tuple[int, str, bytes]]:
        with platform.database.connection() as connection:
            return connection.execute("SELECT id, key, value FROM public.effect").fetchall()

    other = open_java(platform.database.dsn)
    with (
        EventSQL(platform.database.dsn) as ours,
        ours.consumers.start_batch("orders", "sums", handle, polling_delay=0.02, max_events=10),
    ):
        publishing = threading.Thread(target=publish_here, args=(ours,))
        publishing.start()
        until(effects)
        for side in (java, other):
            side.start("orders", "sums", batch=10)
        for part in range(10):
            java.publish("orders", [Written(str(key), b"java %d" % part) for key in range(20)])
        publishing.join()
        consumers = ("orders", "sums")
        until(lambda: sum(state.consumed_events for state in platform.registry.consumer(*consumers)) >= 400)
        for side in (java, other):
            side.stop()
    handed = [(seen.id, seen.key, seen.value) for side in (java, other) for seen in side.seen]
    log = [(event.id, event.key, event.value) for event in platform.reader.read("orders")]
    assert Counter([*effects(), *handed]) == Counter(log)
    assert len(log) == 400
    assert handed, "the Java side had a part of it"
    for key in range(20):
        # Of each publisher, in the order in which it published.
        for publisher in (b"java", b"python"):
            values = [value for _, of, value in log if of == str(key) and value.startswith(publisher)]
            assert values == [publisher + b" %d" % part for part in range(10)]


def publish_here(platform: EventSQL) -> None:
    for part in range(10):
        platform.publisher.publish_all(Publication("orders", b"python %d" % part, key=str(key)) for key in range(20))


def test_a_claim_that_java_overtakes_has_no_effects(java: Side, platform: EventSQL, until: Until) -> None:
    """It knows nothing of leases; the offset that it moved gives the owner of the lease away."""
    platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "sums"))
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.effect (id bigint)")
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(60))
    platform.transfer.run_once()
    claim = platform.claims.claim("orders", "sums", owner="me")
    assert isinstance(claim, Claim)
    java.start("orders", "sums")
    until(lambda: len(java.seen) == 60)
    java.stop()

    def handle(events: Sequence[Event], connection: Connection) -> None:
        connection.execute("INSERT INTO public.effect SELECT unnest(%s::bigint[])", [[each.id for each in events]])

    with pytest.raises(ClaimLostError):
        platform.claims.process(claim, handle)
    with platform.database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM public.effect").fetchone() == (0,)
    assert platform.registry.consumer("orders", "sums")[0].consumed_events == 60


# Dead letters


def test_an_event_that_fails_in_java_is_a_dead_letter_for_python_and_is_redriven(
    java: Side, platform: EventSQL, until: Until
) -> None:
    platform.registry.register_topic(Topic("orders")).register_topic(Topic("orders_dlt"))
    java.register_consumer("orders", "sums", partitioned=False)
    platform.publisher.publish_all(Publication("orders", b"%d" % n, key="k", metadata={"n": str(n)}) for n in range(5))
    platform.transfer.run_once()
    java.start("orders", "sums", poison="2")
    moved(platform, "orders_dlt", 1, until)
    (letter,) = platform.dead_letters.list("orders")
    assert (letter.key, letter.value, letter.metadata["n"]) == ("k", b"2", "2")
    assert letter.metadata["consumerName"] == "sums"
    assert letter.metadata["exceptionMessage"] == "not today"
    until(lambda: len(java.seen) == 4)
    java.stop()
    assert platform.dead_letters.redrive("orders") == 1
    platform.transfer.run_once()
    assert [event.value for event in platform.reader.read("orders")] == [b"0", b"1", b"2", b"3", b"4", b"2"]


def test_an_event_that_fails_in_python_is_a_dead_letter_for_java(java: Side, platform: EventSQL, until: Until) -> None:
    java.register_topic("orders", 2)
    java.register_topic("orders_dlt", NOT_PARTITIONED)
    java.register_consumer("orders_dlt", "letters", partitioned=False)
    platform.registry.register_consumer(Consumer("orders", "sums", partitioned=True), max_attempts=1)
    platform.publisher.publish(Publication("orders", b"bad", key="k", metadata={"source": "here"}))
    platform.transfer.run_once()

    def fail(_events: Sequence[Event], _connection: Connection) -> None:
        raise ValueError("not today")

    platform.consumers.consume_once("orders", "sums", fail)
    platform.transfer.run_once()
    java.start("orders_dlt", "letters")
    until(lambda: java.seen)
    (letter,) = java.seen
    assert (letter.key, letter.value) == ("k", b"bad")
    assert letter.metadata["source"] == "here"
    assert letter.metadata["dlt_exception"] == "ValueError"
    assert letter.metadata["dlt_message"] == "not today"


# Who came first


@pytest.fixture
def empty(server: EmbeddedPostgres) -> Iterator[str]:
    """A database in which nobody has made anything."""
    dsn = server.create_database("java_first")
    yield dsn
    server.drop_database("java_first")


def test_a_database_that_java_made_goes_on_with_both(open_java: Open, empty: str, until: Until) -> None:
    java = open_java(empty, "public")
    java.register_topic("orders", 3)
    java.register_consumer("orders", "sums", partitioned=True)
    java.publish("orders", [Written(str(number), b"before") for number in range(30)])
    java.start("orders", "sums")
    until(lambda: len(java.seen) == 30)
    with EventSQL(empty, schema="public", transfer=False) as platform:
        assert platform.registry.topics() == [Topic("orders", 3)]
        platform.publisher.publish_all(Publication("orders", b"after", key=str(number)) for number in range(60))
        platform.transfer.run_once()
        until(lambda: len(java.seen) == 90)
        java.publish("orders", [Written("1", b"and on")])
        until(lambda: len(java.seen) == 91)
        java.stop()
        assert sum(state.consumed_events for state in platform.registry.consumer("orders", "sums")) == 91
        assert platform.reader.count("orders") == 91


def test_a_java_service_starts_on_a_database_that_was_made_here_and_changes_nothing(
    java: Side, open_java: Open, platform: EventSQL
) -> None:
    def tables() -> list[tuple[object, ...]]:
        with platform.database.connection() as connection:
            return connection.execute(
                "SELECT table_name, column_name, data_type FROM information_schema.columns "
                "WHERE table_schema = 'eventsql' ORDER BY 1, 2"
            ).fetchall()

    platform.registry.register_topic(Topic("orders", 3))
    before = tables()
    other = open_java(platform.database.dsn)
    other.register_topic("orders", 3)
    assert tables() == before


# Edges


def test_a_topic_that_java_named_with_capitals_is_everybodys(java: Side, platform: EventSQL, until: Until) -> None:
    """Its table is in lower case, since the library writes the name unquoted."""
    java.register_topic("AccountCreated", 2)
    java.register_consumer("AccountCreated", "Mailer", partitioned=True)
    platform.registry.register_topic(Topic("orders"))
    assert platform.registry.topics() == [Topic("AccountCreated", 2), Topic("orders")]
    java.publish("AccountCreated", [Written("k", b"java")])
    platform.publisher.publish(Publication("AccountCreated", b"python", key="k"))
    platform.publisher.publish_all([Publication("AccountCreated", b"straight", key="k")] * 60)
    platform.registry.register_topic(Topic("AccountCreated", 2))
    platform.transfer.run_once()
    assert len(moved(platform, "AccountCreated", 62, until)) == 62
    assert platform.consumers.consume_once("AccountCreated", "Mailer", lambda _e, _c: None) == 62
    assert [lag.events for lag in platform.lag("AccountCreated")] == [0, 0]


def test_a_topic_with_capitals_is_not_made_here(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    with pytest.raises(InvalidNameError, match="topic 'orders' has its table"):
        platform.registry.register_topic(Topic("Orders"))
    with pytest.raises(InvalidNameError, match="use lower-case letters, as in 'rides'"):
        platform.registry.register_topic(Topic("Rides"))
    assert platform.registry.topics() == [Topic("orders")]


def test_a_topic_whose_name_cannot_be_used_here_does_not_stop_the_others(
    java: Side, platform: EventSQL, caplog: pytest.LogCaptureFixture
) -> None:
    java.register_topic("żółw", 2)
    platform.registry.register_topic(Topic("orders"))
    platform.publisher.publish(Publication("orders", b""))
    assert platform.transfer.run_once() == {"orders": 1}
    assert platform.registry.topics() == [Topic("orders")]
    assert "żółw" in caplog.text
    assert platform.lag() == []


def test_java_waits_in_the_buffer_where_the_room_of_a_log_is_used_up_and_goes_on_after_it_was_made(
    java: Side, platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library makes no segments. This package's transfers and retention do, each minute."""
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 100)
    platform.registry.register_topic(Topic("orders"))
    with platform.database.connection() as connection:
        connection.execute("SELECT setval('eventsql.orders_event_eql_id_seq', 295)")
        java.publish("orders", [Written(str(number), b"%d" % number) for number in range(40)])
        # It tried: the ids that it drew are gone.
        until(lambda: segments.newest_id(connection, "eventsql", "orders") >= 300)
    assert platform.reader.count("orders") == 0
    assert platform.buffered() == {"orders": 40}
    platform.retention.run_once()
    java.publish("orders", [Written("40", b"40")])
    events = moved(platform, "orders", 41, until)
    assert [event.value for event in events] == [b"%d" % number for number in range(41)]


def test_a_java_publisher_keeps_the_partitions_of_its_start(java: Side, platform: EventSQL, until: Until) -> None:
    """The library does not learn of the change, so its writes must do no harm for as long as it runs."""
    platform.registry.register_topic(Topic("orders", 2))
    java.publish("orders", [Written(str(number), b"") for number in range(20)])
    moved(platform, "orders", 20, until)
    with psycopg.connect(platform.database.dsn) as connection:
        connection.execute("UPDATE eventsql.topic SET eql_partitions = 7")
    java.publish("orders", [Written(str(number), b"") for number in range(20, 40)])
    with platform.database.connection() as connection:
        until(lambda: platform.reader.count("orders") == 40)
        (newest,) = connection.execute("SELECT max(eql_partition) FROM eventsql.orders_event").fetchone() or (None,)
    assert newest == 1


def test_an_event_of_java_for_a_partition_that_is_gone_lies_where_its_key_does(
    java: Side, open_java: Open, platform: EventSQL, until: Until
) -> None:
    """The library's transfer moves the event as published. The log changes a partition that the topic has lost."""
    platform.registry.register_topic(Topic("orders", 6)).register_consumer(Consumer("orders", "sums", partitioned=True))
    keys = [str(number) for number in range(40)]
    java.publish("orders", [Written(key, b"before") for key in keys])
    moved(platform, "orders", 40, until)
    changed = platform.repartitioner.repartition("orders", 2)
    assert changed is not None
    late = open_java(platform.database.dsn)
    java.publish("orders", [Written(key, b"after") for key in keys] + [Written(None, b"any")] * 20)
    late.publish("orders", [Written(key, b"known") for key in keys])
    events = moved(platform, "orders", 140, until)
    assert {event.partition for event in events if event.id <= changed.after} == set(range(6))
    after = [event for event in events if event.id > changed.after]
    assert {event.partition for event in after} == {0, 1}
    places = {event.key: event.partition for event in after if event.value == b"known"}
    gone = {event.key for event in events if event.id <= changed.after and event.partition > 1}
    assert all(event.partition == places[event.key] for event in after if event.key in gone)
    assert stranded(platform.database, "orders") == []
    seen: list[Event] = []
    while platform.consumers.consume_once("orders", "sums", lambda batch, _: seen.extend(batch)):
        pass
    assert sorted(event.id for event in seen) == [event.id for event in events]


# Order


def test_events_that_java_moved_out_of_order_are_told_from_those_that_were_not(
    java: Side, platform: EventSQL, until: Until
) -> None:
    """Its transfer takes rows as they lie in the buffer's pages, where vacuum has freed some of them."""
    platform.registry.register_topic(Topic("orders", 2))
    assert order(platform.database, "orders") == Order(0, 0, connected=False)
    java.publish("orders", [Written("k", b"1"), Written("k", b"2")])
    moved(platform, "orders", 2, until)
    found = order(platform.database, "orders")
    assert (found.java, found.behind) == (2, 0)
    with platform.database.connection() as connection:
        # Two publications of a key that were moved together, the later one first.
        for seconds in (2, 1):
            connection.execute(
                "INSERT INTO eventsql.orders_event "
                "(eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata) "
                "VALUES (0, 'k', '', to_timestamp(%s), to_timestamp(9), '{}')",
                [seconds],
            )
    found = order(platform.database, "orders")
    assert (found.java, found.behind) == (2, 1)


def test_events_that_python_publishes_and_moves_are_in_order(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    for _ in range(5):
        platform.publisher.publish_all(Publication("orders", b"", key=str(key)) for key in range(60))
        platform.publisher.publish(Publication("orders", b"", key="1"))
    platform.transfer.run_once()
    found = order(platform.database, "orders")
    assert (found.java, found.behind) == (0, 0)
