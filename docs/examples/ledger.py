"""A whole code location: `EVENTSQL_DSN=… dagster dev -f docs/examples/ledger.py`; run its job `register` once."""

from eventsql_orchestration import Connection, Event, Shard, Topic
from eventsql_orchestration.dagster import build_definitions, consumer_asset


@consumer_asset(topic=Topic("orders", partitions=4), consumer="ledger", partitioned=True)
def ledger(events: list[Event], connection: Connection) -> None:
    with connection.cursor() as cursor:
        # A backfill hands an event over again: the second time changes nothing.
        cursor.executemany(
            "INSERT INTO ledger VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET value = excluded.value",
            [(event.id, event.value) for event in events],
        )


def create_tables(shard: Shard) -> None:
    with shard.database.transaction() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS ledger (id bigint PRIMARY KEY, value bytea NOT NULL)")


defs = build_definitions([ledger], prepare=create_tables, backfills=True)
