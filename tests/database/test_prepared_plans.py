"""No statement on a table that grows keeps the plan of a time when the table was empty.

PostgreSQL settles on one plan for a prepared statement after a few executions. It keeps the plan until the table is
analyzed: a sequential scan of an empty queue would stay through a burst of messages.
"""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.consuming.snapshot_reader import SnapshotReader
from eventsql_orchestration.database import Database
from eventsql_orchestration.model import BLOCKS, NOT_PARTITIONED, ROWS, Storage
from eventsql_orchestration.publishing.log_writer import LogWriter
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.store import Change, Store
from eventsql_orchestration.views import LogEntry, Logs, Rollup, RollupEntry, Timeline, Views
from tests.database.everything import NOON

pytestmark = pytest.mark.both_forms

ROUNDS = 12
"""psycopg prepares a statement after 5 executions, and PostgreSQL settles on a plan after 5 more."""

BRIEF = "^eventsql_(append|load|snapshot|timeline|search)_"
"""Names of statements whose plans stay for a second: see tests/database/test_single_statement.py."""

GROWS = re.compile(
    r'(?:FROM|JOIN|UPDATE) "?eventsql"?\."?'
    r"(?:\w+_event|\w+_block|event_buffer|consumer_claim|consumer_delivery|queue_message|aggregate\w*|view_(?:entries|amounts|runs)|notes|redriven_dead_letter)\b"
)


def settled(database: Database) -> set[str]:
    """The statements of the pool's one connection whose plan PostgreSQL keeps."""
    with database.connection() as connection:
        rows = connection.execute(
            "SELECT statement FROM pg_prepared_statements WHERE generic_plans > 0 AND name !~ %s",
            [BRIEF],
            prepare=False,
        )
        return {statement for (statement,) in rows}


def reading(statements: set[str]) -> set[str]:
    return {statement for statement in statements if GROWS.search(statement)}


@pytest.fixture
def platform(platform: EventSQL) -> EventSQL:
    platform.registry.register_topic(Topic("orders", partitions=1)).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    platform.registry.register_consumer(Consumer("orders", "reports"))
    with platform.database.connection() as connection:
        connection.execute(
            "CREATE TABLE eventsql.notes (eql_transaction xid8 DEFAULT pg_current_xact_id(), eql_id bigint)"
        )
    return platform


@pytest.mark.parametrize("partitions", [NOT_PARTITIONED, 2])
@pytest.mark.parametrize(("storage", "burst"), [(ROWS, 1_000), (BLOCKS, 2_500)])
def test_the_transfer_makes_no_new_plan_for_each_batch(
    platform: EventSQL, storage: Storage, burst: int, partitions: int
) -> None:
    """Its session lets it read the buffer by its indexes alone."""
    platform.registry.register_topic(Topic("moved", partitions, storage=storage))
    with platform.database.connection() as connection:
        # The server has seen a burst, and expects more than one row in each batch.
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
            "SELECT 'moved', 0, 'a', '1', '{}' FROM generate_series(1, %s)",
            [burst],
        )
        connection.execute("ANALYZE eventsql.event_buffer")
        connection.execute("DELETE FROM eventsql.event_buffer")
    writer = LogWriter(platform.database)
    with writer.session():
        for _ in range(2 * ROUNDS):
            platform.publisher.publish(Publication("moved", b"1", key="a"))
            newest, _ = writer.look(["moved"])
            assert writer.move("moved", newest) == 1
        assert writer._connection is not None
        (kept,) = writer._connection.execute(
            "SELECT sum(generic_plans) FROM pg_prepared_statements WHERE statement ~ 'DELETE FROM .*event_buffer'"
        ).fetchone()  # type: ignore[misc]
    writer.close()
    assert kept > 0


def test_publishing_and_consuming_keep_no_plan_of_an_empty_log(platform: EventSQL) -> None:
    for _ in range(ROUNDS):
        platform.publisher.publish(Publication("orders", b"1", key="a"))
        platform.buffered()
        platform.transfer.run_once()
        platform.publisher.publish_all([Publication("orders", b"2", key="a")] * 3)
        assert platform.consumers.consume_once("orders", "mailer", lambda *_: None)
        assert platform.lag()
        assert platform.reader.read("orders", limit=1)
    found = settled(platform.database)
    assert found, "some statements are prepared: those that read no table that grows"
    assert not reading(found)


def test_claims_keep_no_plan_of_an_empty_log(platform: EventSQL) -> None:
    for number in range(ROUNDS):
        platform.publisher.publish_all([Publication("orders", b"1", key="a")] * 3)
        platform.transfer.run_once()
        claim = platform.claims.claim("orders", "reports", -1, owner="a", max_wait=0)
        assert isinstance(claim, Claim)
        platform.claims.renew(claim)
        adopted = platform.claims.adopt(claim.id, owner="b")
        platform.claims.standings(Consumer("orders", "reports"))
        if number % 2:
            platform.claims.release(adopted)
        else:
            with platform.database.transaction() as connection:
                platform.claims.commit(connection, adopted)
        platform.claims.last("orders", "reports", -1)
    assert not reading(settled(platform.database))


def test_dead_letters_keep_no_plan_of_an_empty_topic(platform: EventSQL) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("refused")

    platform.registry.register_consumer(Consumer("orders", "mailer"), max_attempts=1)
    for number in range(ROUNDS):
        platform.publisher.publish(Publication("orders", b"1", key=str(number)))
        platform.transfer.run_once()
        platform.consumers.consume_once("orders", "mailer", refuse)
        platform.transfer.run_once()
        (letter,) = platform.dead_letters.list("orders", redriven=False)
        assert platform.dead_letters.redrive("orders", LetterFilter(ids=[letter.id])) == 1
        platform.dead_letters.of_backfills("orders")
        platform.dead_letters.prune("orders")
    assert not reading(settled(platform.database))


def test_a_topic_consumed_as_a_queue_keeps_no_plan_of_its_empty_tables(platform: EventSQL) -> None:
    shard = platform.shards[0]
    deliveries = Deliveries(
        shard.database, shard.dead_letters, "orders", "reports", by_key=True, lease=60.0, most=1_000
    )
    worker = deliveries.register("a process")
    for _ in range(ROUNDS):
        platform.publisher.publish_all([Publication("orders", b"1", key="a")] * 3)
        platform.transfer.run_once()
        first, second, third = deliveries.hand_out(worker, -1, 100).deliveries
        deliveries.handle(first, lambda *_: None, Cancellation())
        deliveries.fail(second, ValueError("refused"), counts=False, behind=[third])
        platform.registry.resume("orders", "reports")
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer_delivery SET eql_due_at = NULL", prepare=False)
        assert len(deliveries.acknowledge(deliveries.hand_out(worker, -1, 100).deliveries)) == 2
        deliveries.renew(worker)
    assert not reading(settled(platform.database))


def test_a_queue_keeps_no_plan_of_an_empty_table(platform: EventSQL) -> None:
    queue = Queue(platform.database, "commands")
    for _ in range(ROUNDS):
        queue.send(b"1")
        (message,) = queue.receive()
        queue.release(message)
        (message,) = queue.receive()
        queue.acknowledge(message)
        queue.depth()
    assert not reading(settled(platform.database))


def test_the_store_the_views_and_the_snapshot_reader_keep_no_plan_of_empty_tables(platform: EventSQL) -> None:
    database = platform.database
    store, views = Store(database), Views(database)
    definitions = Timeline("entries"), Rollup("amounts", timedelta(minutes=1), ("kind",)), Logs("runs")
    views.declare(*definitions)
    timeline, rollup, logs = views.timeline(definitions[0]), views.rollup(definitions[1]), views.logs(definitions[2])
    notes = SnapshotReader(database, "notes", [])
    for number in range(ROUNDS):
        order = f"order {number}"
        with database.transaction() as connection:
            store.append("order", order, [Change("placed", {})], expected_version=0, connection=connection)
            store.save_snapshot("order", order, 1, {}, connection=connection)
            timeline.append(connection, [(order, {}, NOON)])
            rollup.add(connection, [RollupEntry(NOON, {"kind": "x"})])
            logs.write(connection, [LogEntry(order, "a line", NOON)])
        assert store.load("order", order)
        assert store.snapshot("order", order)
        assert store.load_from_snapshot("order", order, schema_version=1)[0]
        assert store.count("order")
        assert timeline.read(order)
        assert rollup.read()
        assert logs.search(text="line")
        notes.read()
        notes.held_back()
    assert not reading(settled(database))
