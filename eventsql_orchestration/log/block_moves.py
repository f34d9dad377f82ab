"""Moving a block of events (`log/blocks.py`) out of the buffer's order into the log of its topic."""

from __future__ import annotations

import zlib
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.log import blocks, encoding

_POSTGRESQL_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


class BlockMoves:
    """Moves blocks for the log's writer, in its transaction."""

    def __init__(self, schema: str) -> None:
        self._blocks = Queries("blocks", schema)
        self._log = Queries("log", schema)

    def move(self, connection: Connection, topic: str, reference: int, *, zoned: bool) -> int:
        """Copy the block to which the buffer's row `reference` refers to the end of the log; gives its events.

        The connection's transaction holds the topic. `zoned` says whether the log's times are points in time. Raises
        `psycopg.DataError` where the block is not what was published.
        """
        row = connection.execute(self._blocks("take"), {"id": reference, "zoned": zoned}, binary=True).fetchone()
        if row is None:
            raise _broken(reference, "is gone")
        packed, events, published, now = row
        try:
            rows = blocks.unpack(packed, encoding.log_prefix(_microseconds(now), _microseconds(published)))
        except zlib.error as error:
            raise _broken(reference, f"cannot be unpacked ({error})") from error
        with connection.cursor() as cursor:
            with cursor.copy(self._log("append", topic=topic)) as copy:
                copy.write(encoding.HEADER)
                copy.write(rows)
                copy.write(encoding.TRAILER)
            if cursor.rowcount != events:
                raise _broken(reference, f"has {cursor.rowcount} events instead of {events}")
        return int(events)


def _microseconds(time: datetime) -> int:
    return (time - _POSTGRESQL_EPOCH) // timedelta(microseconds=1)


def _broken(reference: int, what: str) -> psycopg.DataError:
    return psycopg.DataError(f"the block of events that row {reference} of the buffer stands for {what}")
