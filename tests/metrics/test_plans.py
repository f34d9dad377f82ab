"""A scrape and the lag find the events that wait through indexes, by any plan."""

from __future__ import annotations

import re

import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.model import Storage
from eventsql_orchestration.storage.log_queries import LogQueries
from tests.plans import plans


def test_waiting_events_are_counted_and_dated_through_indexes(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 10, storage="rows")).register_topic(Topic("orders_dlt"))
    partitions = list(range(-1, 10))
    with platform.database.connection() as connection:
        for log, count in (("orders_event", 10), ("orders_dlt_event", 1)):
            connection.execute(
                f"INSERT INTO eventsql.{log} (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata) "
                f"SELECT n % {count}, n::text, convert_to(repeat('x', 100), 'UTF8'), now(), '{{}}' "
                "FROM generate_series(1, 50000) n".encode()
            )
        connection.execute("VACUUM ANALYZE")
        on_log = LogQueries("metrics", "eventsql")
        for name, topic in (
            ("waiting", "orders"),
            ("ends", "orders"),
            ("log", "orders"),
            ("open_letters", "orders_dlt"),
        ):
            values = {
                "topic": topic, "most": 10_000, "log": f"eventsql.{topic}_event", "partitions": partitions,
                "offsets": [20_000] * len(partitions),
            }  # fmt: skip
            for plan in plans(connection, on_log(name, topic=topic), values):
                assert "Index" in plan
                assert f"Seq Scan on {topic}_event" not in plan, plan
                assert f"Seq Scan on {topic}_segment" not in plan, plan


@pytest.mark.parametrize("storage", ["rows", "blocks"])
def test_no_place_walks_over_the_events_of_other_partitions(platform: EventSQL, storage: Storage) -> None:
    platform.registry.register_topic(Topic("orders", 1_000, storage=storage))
    table, columns, values = {
        "rows": ("orders_event", "eql_metadata, eql_value", "'{}', 'x'"),
        "blocks": ("orders_block", "eql_created_at, eql_events, eql_values", "now(), 1, ARRAY['x'::bytea]"),
    }[storage]
    with platform.database.connection() as connection:
        connection.execute(
            f"INSERT INTO eventsql.{table} (eql_id, eql_partition, eql_buffered_at, {columns}) "
            f"SELECT n, n % 1000, now(), {values} FROM generate_series(1, 10000) n".encode()
        )
        connection.execute("VACUUM ANALYZE")
        given = {"partitions": list(range(1_000)), "offsets": [0] * 1_000, "most": 10_000}
        on_log = LogQueries("metrics", "eventsql")
        for name in ("waiting", "ends"):
            for plan in plans(connection, on_log.on(connection, name, "orders"), given):
                assert "segment_0_eql_partition_eql_id_idx" in plan, plan
                # The comparison of partition and id is a condition of the index, and not a filter on what it gives.
                assert not re.search(r"Filter: .*ROW\(", plan), plan
