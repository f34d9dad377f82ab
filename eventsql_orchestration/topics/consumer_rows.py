"""The rows of a consumer: one for each of its partitions."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, update
from sqlalchemy.dialects.postgresql import insert

from eventsql_orchestration.consumer import Consumer, ConsumerState, EventFilter
from eventsql_orchestration.database import driver_connection, tables
from eventsql_orchestration.model import NOT_PARTITIONED, Topic
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.topics import layouts
from eventsql_orchestration.topics.catalog import consumer_states, schema_of
from eventsql_orchestration.topics.offsets import offset_of
from eventsql_orchestration.topics.positions import Earliest, Position

_c: Final = tables.consumer.c


def change_settings(connection: Connection, states: list[ConsumerState], settings: dict[str, Any]) -> None:
    """Set the declared settings that differ. Leaves the others: an update waits for the consumption under way.

    Raises `ValidationError` if a handler of this thread has locked one of the consumer's partitions.
    """
    declared = EventFilter.from_json(settings["eql_filter"]) if isinstance(settings.get("eql_filter"), dict) else None
    if any(
        settings.get("eql_max_attempts", state.max_attempts) != state.max_attempts
        or ("eql_filter" in settings and state.filter != declared)
        for state in states
    ):
        topic, name = states[0].topic, states[0].name
        consumer_states(connection, topic, name, lock=True)
        own = (_c.eql_topic == topic, _c.eql_name == name)
        connection.execute(update(tables.consumer).where(*own).values(settings))


def insert_consumer(
    connection: Connection, consumer: Consumer, topic: Topic, start: Position, settings: dict[str, Any], *, held: bool
) -> None:
    """Insert the rows of a new consumer, for the partitions of the layout where it begins and of all later layouts."""
    driver, schema = driver_connection(connection), schema_of(connection)
    offset = None
    if not isinstance(start, Earliest):
        offset = offset_of(driver, schema, topic.name, start)
    partitions, until = topic.all_partitions, None
    if not consumer.partitioned:
        partitions = (NOT_PARTITIONED,)
    elif known := layouts.layouts(driver, schema, topic.name):
        bounds = layouts.bounds_at(known, offset or 0)
        partitions, until = tuple(range(bounds.partitions)), bounds.until
    connection.execute(
        insert(tables.consumer).values(eql_consumed_events=0, **settings).on_conflict_do_nothing(),
        [
            {
                "eql_topic": topic.name, "eql_name": consumer.name, "eql_partition": partition,
                "eql_last_event_id": offset, "eql_until": HELD if held else until,
            }
            for partition in partitions
        ],
    )  # fmt: skip
