"""A scrape finds the events that wait through indexes, by any plan."""

from __future__ import annotations

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.storage.log_queries import LogQueries
from tests.plans import plans


def test_waiting_events_are_counted_and_dated_through_indexes(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 10, storage="rows")).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    platform.registry.register_consumer(Consumer("orders", "auditor"))
    with platform.database.connection() as connection:
        for log, partitions in (("orders_event", 10), ("orders_dlt_event", 1)):
            connection.execute(
                f"INSERT INTO eventsql.{log} (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata) "
                f"SELECT n % {partitions}, n::text, convert_to(repeat('x', 100), 'UTF8'), now(), '{{}}' "
                "FROM generate_series(1, 50000) n".encode()
            )
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 20000")
        connection.execute("VACUUM ANALYZE")
        on_log = LogQueries("metrics", "eventsql")
        for name, topic in (("waiting", "orders"), ("log", "orders"), ("open_letters", "orders_dlt")):
            values = {"topic": topic, "most": 10_000, "log": f"eventsql.{topic}_event"}
            for plan in plans(connection, on_log(name, topic=topic), values):
                assert "Index" in plan
                assert f"Seq Scan on {topic}_event" not in plan, plan
                assert f"Seq Scan on {topic}_segment" not in plan, plan
