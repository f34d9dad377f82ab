"""A whole code location: `EVENTSQL_DSN=… dagster dev -f docs/examples/ledger.py`; run its job `register` once."""

from eventsql_orchestration import Event, EventSQL, Topic
from eventsql_orchestration.dagster import build_definitions, consumer_asset
from eventsql_orchestration.database import Connection


@consumer_asset(topic=Topic("orders", partitions=4), consumer="ledger", partitioned=True)
def ledger(events: list[Event], connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO ledger VALUES (%s, %s)", [(event.id, event.value) for event in events])


def create_tables(platform: EventSQL) -> None:
    with platform.database.transaction() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS ledger (id bigint PRIMARY KEY, value bytea NOT NULL)")


defs = build_definitions([ledger], prepare=create_tables, backfills=True)
