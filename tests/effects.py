"""The effects of consumers in these tests: a table, with a row for each event that was handled and committed."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Final

import psycopg

from eventsql_orchestration import Event, EventSQL, Shard
from eventsql_orchestration.database import Connection
from tests.waiting import PATIENCE

DISK_IS_FULL: Final = "DO $$ BEGIN RAISE 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
"""A statement of a handler that fails as on a server whose disk is full."""


class FullDiskError(Exception):
    """The error of a handler that wraps the driver's errors, and found the server's disk full."""

    def __init__(self) -> None:
        super().__init__("the order was not stored")
        self.__cause__ = psycopg.errors.DiskFull("could not extend file")


class MuteError(Exception):
    """An error of a handler without a text."""

    def __str__(self) -> str:
        raise AttributeError("message")


class PanicException(BaseException):
    """A panic of a library in Rust."""

    __module__ = "pyo3_runtime"


def make_table(platform: EventSQL | Shard) -> None:
    with platform.database.connection() as connection:
        connection.execute(
            "CREATE TABLE effects (id bigserial PRIMARY KEY, consumer text, partition int, key text, event_id bigint, "
            "value bytea)"
        )


def write(events: Sequence[Event], connection: Connection) -> None:
    """A handler: one row for each event."""
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO effects (event_id) VALUES (%s)", [(event.id,) for event in events])


def effects(platform: EventSQL | Shard) -> list[int]:
    """The ids of the events whose effects were committed, in the order in which they were."""
    with platform.database.connection() as connection:
        return [event_id for (event_id,) in connection.execute("SELECT event_id FROM effects ORDER BY id")]


def stand_still(connection: Connection) -> None:
    """Let the server end the session because its transaction idles for too long, and use it then.

    If a busy machine reads the reason together with the answer to SET, the driver takes it for a notice.
    """
    connection.execute("SET LOCAL idle_in_transaction_session_timeout = 20")
    assert select.select([connection], [], [], PATIENCE)[0]
    connection.execute("SELECT 1")


def fail_and_close(connection: Connection) -> None:
    """Fail in a block of psycopg's, which closes the connection at its end."""
    with connection:
        raise ValueError("not sent")


def take_too_long(connection: Connection) -> None:
    """Let the server end the session because its transaction takes too long. PostgreSQL 16 has no such limit."""
    if connection.info.server_version < 170_000:
        stand_still(connection)
        return
    connection.execute("SET LOCAL transaction_timeout = 20")
    assert select.select([connection], [], [], PATIENCE)[0]
    connection.execute("SELECT 1")
