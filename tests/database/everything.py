"""One way through all that the platform does with a database, for tests of databases that are set up in odd ways."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import psycopg

from eventsql_orchestration import Consumer, Event, EventFilter, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.consuming.snapshot_reader import SnapshotReader
from eventsql_orchestration.database import Connection
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.storage import segments
from eventsql_orchestration.store import Change, Store
from eventsql_orchestration.topics.positions import AtOffset, AtTime
from eventsql_orchestration.views import LogEntry, Logs, Rollup, RollupEntry, Timeline, Views

NOON = datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
KEYS = ("é", "ключ", "鍵", "plain")
SECONDS = 0.1 + 0.2


def use(platform: EventSQL, dsn: str) -> None:
    """Use topics in every way, from their registration to an erasure and retention, and queues, the store and views."""
    register(platform)
    publish(platform, dsn)
    consume(platform)
    claim(platform)
    erase(platform)
    change(platform)
    use_the_ways(platform)
    for topic in ("clicks", "clicks_dlt", "whole"):
        platform.registry.unregister_topic(topic, force=True)


def register(platform: EventSQL) -> None:
    registry = platform.registry
    for _ in range(2):
        registry.register_topic(Topic("clicks", partitions=3, retention=Retention(seconds=SECONDS * 1e6)))
        registry.register_topic(Topic("clicks_dlt")).register_topic(Topic("whole", partitions=-1))
        registry.register_consumer(Consumer("clicks", "reports"), max_attempts=1)
        registry.register_consumer(Consumer("clicks", "few"), filter=EventFilter(keys=frozenset(KEYS[:1])))
        registry.register_consumer(Consumer("whole", "all", partitioned=False))
        registry.register_consumer(Consumer("whole", "queue"))
    retention = registry.topic("clicks").retention
    assert retention is not None
    assert retention.seconds == SECONDS * 1e6


def publish(platform: EventSQL, dsn: str) -> None:
    events = [Publication("clicks", b"\x00\xff\\", key=key, metadata={key: key}) for key in KEYS]
    for event in events:
        platform.publisher.publish(event)
    platform.publisher.publish_all(events)
    with psycopg.connect(dsn, client_encoding="UTF8") as mine:
        for event in events:
            platform.publisher.publish(event, connection=mine)
            mine.execute(*platform.publisher.statement(event))
        platform.publisher.publish_all(events, connection=mine)
        mine.commit()
    platform.publisher.publish(Publication("whole", b"1"))
    assert platform.buffered()
    platform.transfer.run_once()
    # Nothing is in the buffer any more: these go straight into the log.
    platform.publisher.publish_all(events)
    platform.transfer.run_once()
    stored = platform.reader.read("clicks")
    assert {event.key for event in stored} == set(KEYS)
    assert all(event.value == b"\x00\xff\\" and event.metadata == {event.key: event.key} for event in stored)
    assert all(abs(event.created_at - datetime.now(UTC)) < timedelta(minutes=10) for event in stored)
    placed = {event.key: event.partition for event in stored}
    assert all(placed[event.key] == event.partition for event in stored)


def consume(platform: EventSQL) -> None:
    def refuse(events: Sequence[Event], _connection: Connection) -> None:
        raise KeyError(events[0].key)

    platform.consumers.consume_once("clicks", "few", lambda *_: None)
    assert platform.consumers.consume_once("whole", "all", lambda *_: None) == 1
    handled = threading.Event()
    with platform.consumers.start_queue("whole", "queue", lambda _event: handled.set(), polling_delay=0.02):
        assert handled.wait(60.0)
    platform.consumers.consume_once("clicks", "reports", refuse)
    platform.transfer.run_once()
    assert platform.lag()
    letters = platform.dead_letters.list("clicks", LetterFilter(metadata={"dlt_consumer": "reports"}))
    assert letters
    assert letters[0].redriven_at is None
    assert platform.dead_letters.redrive("clicks", LetterFilter(consumer="reports"), limit=1) == 1
    assert platform.dead_letters.list("clicks", limit=1)[0].redriven_at is not None
    platform.transfer.run_once()
    platform.dead_letters.prune()


def claim(platform: EventSQL) -> None:
    for state in platform.registry.consumer("clicks", "reports"):
        claimed = platform.claims.claim("clicks", "reports", state.partition, owner="me", max_wait=0)
        if isinstance(claimed, Claim):
            platform.claims.renew(claimed)
            platform.claims.standings(Consumer("clicks", "reports"))
            with platform.database.transaction() as connection:
                platform.claims.commit(connection, claimed)
            assert platform.claims.get(claimed.id)[1] == "committed"
            assert platform.claims.last("clicks", "reports", state.partition) is not None


def erase(platform: EventSQL) -> None:
    key = KEYS[0]
    erased = platform.eraser.execute("clicks", [key])
    assert erased.events > 0
    assert erased.dead_letters > 0
    of_topic, of_letters = (
        [event for event in platform.reader.read(topic) if event.key == key] for topic in ("clicks", "clicks_dlt")
    )
    assert all(event.erased for event in of_topic + of_letters)
    assert all(event.metadata["dlt_consumer"] == "reports" for event in of_letters)


def change(platform: EventSQL) -> None:
    platform.seeker.execute("clicks", "reports", AtTime(NOON))
    platform.seeker.execute("clicks", "reports", AtOffset(2))
    platform.repartitioner.repartition("clicks", 2)
    if platform.registry.topic("clicks").storage == "rows":
        write_past(platform)
    for _ in range(3):
        platform.consumers.consume_once("clicks", "few", lambda *_: None)
        platform.consumers.consume_once("clicks", "reports", lambda *_: None)
    platform.registry.set_retention("clicks", Retention(events=1))
    with platform.database.connection() as connection:
        segments.roll(connection, "eventsql", "clicks", (segments.segments(connection, "eventsql", "clicks") or [])[0])
    platform.publisher.publish(Publication("clicks", b"1"))
    platform.transfer.run_once()
    assert platform.retention.run_once(["clicks"], force=True)[0].segments


def write_past(platform: EventSQL) -> None:
    """Write to the log as a program that knows nothing of the repartitioning."""
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.clicks_event (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata) "
            "VALUES (2, 'é', '', pg_catalog.now(), '{}'), (2, NULL, '', pg_catalog.now(), '{}')"
        )
    late = platform.reader.read("clicks")[-2:]
    assert all(event.partition in (0, 1) for event in late)


def use_the_ways(platform: EventSQL) -> None:
    database = platform.database
    queue = Queue(database, "commands")
    queue.send(b"\x00\\", key="é", metadata={"é": "é"})
    (message,) = queue.receive()
    assert (message.body, message.key, message.metadata) == (b"\x00\\", "é", {"é": "é"})
    queue.acknowledge(message)
    store = Store(database)
    views = Views(database)
    amounts = Rollup(
        "amounts", MINUTE, ("kind",), ("cents",), distinct=("who",), quantiles=("cents",), indexed=("kind",)
    )
    definitions = (Timeline("everything"), amounts, Logs("runs", "english"))
    views.declare(*definitions)
    timeline, rollup, logs = views.timeline(definitions[0]), views.rollup(definitions[1]), views.logs(definitions[2])
    with database.transaction() as connection:
        store.append("order", "é", [Change("placed", {"é": 1})], expected_version=0, connection=connection)
        store.save_snapshot("order", "é", 1, {"é": 1}, connection=connection)
        timeline.append(connection, [("é", {"é": 1}, NOON)])
        rollup.add(connection, [RollupEntry(NOON, {"kind": "é"}, {"cents": SECONDS}, {"who": "é"})], slot=3)
        logs.write(connection, [LogEntry("é", "a line\\ é", NOON, attributes={"é": 1})])
    assert store.load("order", "é")[0].data == {"é": 1}
    assert store.snapshot("order", "é") is not None
    assert timeline.read("é")[0].occurred_at == NOON
    assert logs.search(text="line\\", words="line", attributes={"é": 1}, level="info")[0].written_at == NOON
    (day,) = rollup.read(since=NOON - DAY, until=NOON + DAY, every=DAY, where={"kind": "é"})
    assert (day.count, float(day.values["cents"].sum)) == (1, SECONDS)
    assert all((*day.distinct.values(), *day.quantiles.values()))
    declared = Timeline("everything", retention=DAY)
    assert views.declare(declared) == ["everything"]
    assert views.retain()[0].dropped == 1
    for view in views.definitions():
        views.drop(view.name)
    with database.connection() as connection:
        connection.execute(
            "CREATE TABLE eventsql.notes (eql_transaction pg_catalog.xid8 DEFAULT pg_catalog.pg_current_xact_id(), "
            "eql_id bigint, note pg_catalog.text)"
        )
        connection.execute("INSERT INTO eventsql.notes (eql_id, note) VALUES (1, 'é')")
        connection.execute("CREATE TABLE public.eventsql_seen (id integer PRIMARY KEY, note pg_catalog.text)")
        connection.execute("INSERT INTO public.eventsql_seen VALUES (1, 'é')")
    platform.registry.register_topic(Topic("seen", 2))
    platform.capture("public.eventsql_seen", "seen", columns=["note"])
    with database.connection() as connection:
        connection.execute("UPDATE public.eventsql_seen SET id = 2, note = NULL")
        connection.execute("TRUNCATE public.eventsql_seen")
    platform.transfer.run_once()
    assert [event.key for event in platform.reader.read("seen")] == ["1", "1", "2", None, None]
    platform.captures.drop("public.eventsql_seen", "seen")
    reader = SnapshotReader(database, "notes", ["note"])
    assert [row.values for row in reader.read(only={"note": "é"})] == [("é",)]
    assert reader.held_back() == 0
