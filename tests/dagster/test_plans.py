"""Queries of ticks, traces and housekeeping find rows through an index, however long log and history are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import sql

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.dagster import write_instance
from eventsql_orchestration.dagster.housekeeping import prune
from eventsql_orchestration.dagster.local.instance import STORAGE_SCHEMA, STORAGE_VARIABLE
from eventsql_orchestration.dagster.tags import FORMER_HOUSEKEEPING_TAG, HOUSEKEEPING_INTERNAL, HOUSEKEEPING_TAG
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.storage.log_queries import LogQueries

EVENTS = 100_000
REPORTS = 50_000
NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def filled(server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventSQL]:
    """A log of many events in partitions of very different sizes, and a long history of Dagster's beside it."""
    dsn = server.create_database("dagster_plans")
    with pytest.MonkeyPatch.context() as patch, EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 10, storage="rows"))
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
        platform.registry.register_consumer(Consumer("orders", "auditor"))
        patch.setenv(STORAGE_VARIABLE, "of another instance")
        write_instance(tmp_path_factory.mktemp("instance"), dsn)
        with platform.database.connection() as connection:
            connection.execute(
                """
                INSERT INTO eventsql.orders_event (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata)
                SELECT CASE WHEN n %% 100 = 0 THEN 3 WHEN n %% 10 = 0 THEN 5 ELSE n %% 3 END, n::text, 'x', now(),
                       json_build_object('dagster_run_id', n / 100)
                FROM generate_series(1, %s) n
                """,
                (EVENTS,),
            )
            connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s", (EVENTS - 1_000,))
            connection.execute(
                "INSERT INTO eventsql.consumer (eql_topic, eql_name, eql_partition, eql_consumed_events) "
                "SELECT 'topic ' || n / 10, 'mailer', n %% 10, 0 FROM generate_series(1, 5000) n",
                (),
            )
            connection.execute(
                "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
                "eql_events, eql_epoch, eql_owner, eql_state) SELECT 'orders', 'mailer', n %% 10, n, n + 1, 1, n, "
                "'run ' || n, 'committed' FROM generate_series(1, 20000) n",
                (),
            )
            connection.execute(
                f"INSERT INTO {STORAGE_SCHEMA}.event_logs (run_id, event, dagster_event_type, timestamp, asset_key) "
                "SELECT '', '{}', 'ASSET_OBSERVATION', now() - n * interval '1 second', '[\"asset' || n %% 20 || '\"]' "
                "FROM generate_series(%s, 1, -1) n",
                (REPORTS,),
            )
            # Segments that were made ahead are empty, and no index is faster than a scan of them.
            for (segment,) in connection.execute(
                "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'eventsql.orders_event'::regclass "
                "ORDER BY inhrelid OFFSET 1"
            ).fetchall():
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.SQL(segment)))
            connection.execute("VACUUM ANALYZE")
        yield platform
    server.drop_database("dagster_plans")


def plan(platform: EventSQL, file: str, name: str, **values: Any) -> str:
    with platform.database.connection() as connection:
        explained = "EXPLAIN (ANALYZE, BUFFERS) " + LogQueries(file, "eventsql")(name, topic="orders").as_string()
        rows = connection.execute(explained.encode(), values, prepare=False).fetchall()
    return "\n".join(str(row[0]) for row in rows)


@pytest.mark.parametrize(("name", "consumer"), [("standings", "mailer"), ("standings_topic", "auditor")])
def test_reading_all_partitions_of_a_consumer_takes_an_index_step_for_each(
    filled: EventSQL, name: str, consumer: str
) -> None:
    found = plan(filled, "consumers", name, topic="orders", consumer=consumer)
    assert "Seq Scan" not in found, found
    assert "consumer_claim_live" in found, found


@pytest.mark.parametrize("name", ["publishers", "publishers_partition"])
def test_a_trace_reads_the_range_of_a_claim_and_no_more(filled: EventSQL, name: str) -> None:
    found = plan(filled, "ranges", name, partition=3, after=EVENTS - 5_000, upto=EVENTS - 4_000)
    assert "Seq Scan" not in found, found
    assert "Rows Removed" not in found, found


def test_the_search_for_published_events_starts_at_their_time(filled: EventSQL) -> None:
    values = {"after": EVENTS - 500, "at": NOW, "asset": "a", "partition": None, "events": 10}
    found = plan(filled, "ranges", "publication", **values)
    assert "Seq Scan" not in found, found


@pytest.mark.parametrize("age", [timedelta(days=1), timedelta(seconds=REPORTS // 2)])
def test_housekeeping_finds_the_oldest_reports_and_stops_at_the_first_batch(filled: EventSQL, age: timedelta) -> None:
    values = {
        "asset": '["asset7"]', "type": "ASSET_OBSERVATION", "run": prune.NO_RUN, "before": NOW - age, "batch": 100,
        "entry": "asset_observation", "tag": HOUSEKEEPING_TAG, "former": FORMER_HOUSEKEEPING_TAG,
        "own": HOUSEKEEPING_INTERNAL,
    }  # fmt: skip
    with filled.database.core() as connection, connection.begin_nested() as nothing_changes:
        connection.execute(sa.text(f"SET LOCAL search_path TO {STORAGE_SCHEMA}"))
        rows = connection.execute(sa.text(f"EXPLAIN {prune._DELETE_EVENTS.text}"), values).scalars().all()
        nothing_changes.rollback()
    found = "\n".join(rows)
    assert "Seq Scan on event_logs" not in found, found
