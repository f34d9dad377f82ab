"""A table as its captured changes tell it, and as it stands, read in one snapshot of the database."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from eventsql_orchestration.topics.partitioner import partition_of_key

EVENTS = """
    SELECT eql_partition, eql_key, eql_value, eql_metadata FROM (
        SELECT 1 AS place, eql_id, eql_partition, eql_key, eql_value, eql_metadata FROM eventsql.changes_event
        UNION ALL
        SELECT 2, eql_id, coalesce(eql_block_partition, eql_partition), own.key, own.value, own.metadata
        FROM eventsql.event_buffer
        CROSS JOIN LATERAL unnest(
            coalesce(eql_keys, ARRAY[eql_key]), coalesce(eql_values, ARRAY[eql_value]),
            coalesce(eql_event_metadata, ARRAY[eql_metadata])
        ) AS own (key, value, metadata)
        WHERE eql_topic = 'changes'
    ) events ORDER BY place, eql_id
"""
"""The events of the topic `changes`: those of its log, then those that wait in the buffer."""


def events(connection: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    """The envelopes of all changes, each with the event's key, partition and metadata."""
    rows = connection.execute(EVENTS).fetchall()
    return [
        {**json.loads(value), "key": key, "partition": partition, "metadata": metadata}
        for partition, key, value, metadata in rows
    ]


def replayed(changes: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows by key after all changes."""
    rows: dict[str, Any] = {}
    for change in changes:
        if change["op"] == "t":
            partition, partitions = change["partition"], int(change["metadata"]["partitions"])
            rows = {
                key: row for key, row in rows.items()
                if partitions > 0 and partition_of_key(key, partitions) != partition
            }  # fmt: skip
        elif change["op"] == "d":
            rows.pop(change["key"], None)
        else:
            rows[change["key"]] = change["after"]
    return rows


def differences(connection: psycopg.Connection[Any], table: str, key: str) -> list[str]:
    """The differences between the rows by the changes and those of `table`, in one snapshot."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    try:
        told = replayed(events(connection))
        stands = dict(connection.execute(f"SELECT {key}, t::text FROM {table} t").fetchall())
        read_back = {
            each: connection.execute(
                f"SELECT json_populate_record(NULL::{table}, %s::json)::text", [json.dumps(after)]
            ).fetchone()
            for each, after in told.items()
        }
    finally:
        connection.execute("ROLLBACK")
    found = [
        f"{each}: {stands.get(each)} is told as {row and row[0]}"
        for each, row in read_back.items()
        if row is None or stands.get(each) != row[0]
    ]
    return found + [f"{each}: {row} is not told" for each, row in stands.items() if each not in read_back]
