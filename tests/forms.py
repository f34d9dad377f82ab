"""The form of the log that topics have in this run of the tests (`--storage`), for tests that name tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from eventsql_orchestration import Event, EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.model import BLOCKS
from eventsql_orchestration.topics import registry

BUFFERED: Final = (
    "SELECT eql_key, eql_value FROM eventsql.event_buffer WHERE eql_partition >= -1 UNION ALL SELECT e.key, e.value "
    "FROM eventsql.event_buffer CROSS JOIN LATERAL unnest(eql_keys, eql_values) AS e (key, value)"
)
"""Keys and values of the events in the buffer, each of which is a row, or a part of one."""


def in_blocks() -> bool:
    """Whether topics that name no form are in blocks."""
    return registry.DEFAULT_STORAGE == BLOCKS


def stored(topic: str) -> str:
    """The table that holds the log of a topic."""
    return f"{topic}_block" if in_blocks() else f"{topic}_event"


def ids_in(platform: EventSQL, topic: str, partition: int) -> list[int]:
    """The offsets of the events of a partition."""
    return [event.id for event in platform.reader.read(topic, partition=partition)]


def reading() -> str:
    """The first word of the statements that read a log."""
    return "WITH" if in_blocks() else "SELECT"


def none_is(column: str, value: str) -> str:
    """An SQL condition on a row of a log: none of its events has this `key` or `value`."""
    return f"'{value}' <> ALL (eql_{column}s)" if in_blocks() else f"eql_{column} <> '{value}'"


def change_value(connection: Connection, topic: str, offset: int, value: bytes) -> None:
    """Change the value of a stored event, in a log without gaps."""
    if in_blocks():
        connection.execute(
            f"UPDATE eventsql.{topic}_block SET eql_values[%(offset)s - (eql_id - eql_events)] = %(value)s "
            "WHERE eql_id >= %(offset)s AND eql_id - eql_events < %(offset)s",
            {"offset": offset, "value": value},
        )
    else:
        connection.execute(f"UPDATE eventsql.{topic}_event SET eql_value = %s WHERE eql_id = %s", [value, offset])


def drop_events(connection: Connection, topic: str, upto: int) -> None:
    """Delete the events up to an offset from a log without gaps, as retention leaves a log."""
    if in_blocks():
        connection.execute(f"DELETE FROM eventsql.{topic}_block WHERE eql_id <= %s", [upto])
        gone = "%(upto)s - (eql_id - eql_events) + 1"
        arrays = ("eql_values", "eql_keys", "eql_metadata", "eql_times", "eql_entered")
        rest = ", ".join(f"{array} = {array}[{gone}:]" for array in arrays)
        connection.execute(
            f"UPDATE eventsql.{topic}_block SET {rest}, eql_events = eql_id - %(upto)s "
            "WHERE eql_id - eql_events < %(upto)s",
            {"upto": upto},
        )
    else:
        connection.execute(f"DELETE FROM eventsql.{topic}_event WHERE eql_id <= %s", [upto])


def change_time(connection: Connection, topic: str, offset: int, at: datetime) -> None:
    """Change the time when a stored event entered the log, in a log without gaps."""
    if in_blocks():
        connection.execute(
            f"""
            UPDATE eventsql.{topic}_block SET eql_entered = ARRAY(
                SELECT CASE WHEN eql_id - eql_events + n = %(offset)s THEN %(at)s
                       ELSE coalesce(eql_entered[n], eql_created_at) END
                FROM generate_series(1, eql_events) n ORDER BY n
            ), eql_created_at = CASE WHEN eql_id - eql_events + 1 = %(offset)s THEN %(at)s ELSE eql_created_at END
            WHERE eql_id >= %(offset)s AND eql_id - eql_events < %(offset)s
            """,
            {"offset": offset, "at": at},
        )
    else:
        connection.execute(f"UPDATE eventsql.{topic}_event SET eql_created_at = %s WHERE eql_id = %s", [at, offset])


def check_order(events: Sequence[Event], expected: Sequence[str], *, staged: bool = False) -> None:
    """Assert that a log has events of these values, each once, and has them in the order that its form promises.

    That is their order within each partition; in rows, their order in the whole log, unless they were staged as blocks.
    """
    found = [event.value.decode() for event in events]
    if not in_blocks() and not staged:
        assert found == list(expected)
        return
    assert sorted(found) == sorted(expected)
    places = {value: place for place, value in enumerate(expected)}
    of_partition: dict[int, list[int]] = {}
    for event in events:
        of_partition.setdefault(event.partition, []).append(places[event.value.decode()])
    for partition, own in of_partition.items():
        assert own == sorted(own), f"partition {partition}"
