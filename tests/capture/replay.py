"""A table as its captured changes tell it, and as it stands, read in one snapshot of the database."""

from __future__ import annotations

import json
from typing import Any

import psycopg

EVENTS = """
    SELECT eql_partition, eql_key, eql_value FROM (
        SELECT 1 AS place, eql_id, eql_partition, eql_key, eql_value FROM eventsql.changes_event
        UNION ALL
        SELECT 2, eql_id, coalesce(eql_block_partition, eql_partition), own.key, own.value
        FROM eventsql.event_buffer
        CROSS JOIN LATERAL unnest(coalesce(eql_keys, ARRAY[eql_key]), coalesce(eql_values, ARRAY[eql_value]))
            AS own (key, value)
        WHERE eql_topic = 'changes'
    ) events ORDER BY place, eql_id
"""
"""The events of the topic `changes`: those of its log, then those that wait in the buffer."""


def events(connection: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    """The envelopes of all changes, each with the event's key and partition."""
    rows = connection.execute(EVENTS).fetchall()
    return [{**json.loads(value), "key": key, "partition": partition} for partition, key, value in rows]


def replayed(changes: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows by key after all changes."""
    rows: dict[str, tuple[int, Any]] = {}
    for change in changes:
        if change["op"] == "t":
            rows = {key: row for key, row in rows.items() if row[0] != change["partition"]}
        elif change["op"] == "d":
            rows.pop(change["key"], None)
        else:
            rows[change["key"]] = change["partition"], change["after"]
    return {key: after for key, (_, after) in rows.items()}


def differences(connection: psycopg.Connection[Any], table: str, key: str) -> list[str]:
    """How the rows that changes tell differ from those of `table`, in one snapshot, as PostgreSQL reads them back."""
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
