"""Writing to the end of a topic's log. The caller's transaction holds the topic: it is the log's one writer."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

import psycopg

from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.grants import TRIGGER
from eventsql_orchestration.database.rows import fetch_first, fetch_one, send_copy
from eventsql_orchestration.storage import log_form
from eventsql_orchestration.storage.log_queries import LogQueries


class ForeignIdsError(psycopg.errors.UniqueViolation):
    """Internal: another program drew ids of the log at the same time, or set its sequence back."""


class TopicState(NamedTuple):
    """A topic as the transaction that holds it sees it.

    `definition` is [partitions, layout], None if the topic does not exist. `upto` is the last id of the `buffered`
    events, 0 without events, and `bytes` is their size, without staged blocks. `last_id` is the last id of the log,
    None if its sequence does not give ids one by one and upwards. `blocks`: the log takes blocks. `allowed`: the
    current role may publish to the topic. The rights of a transfer do not tell, because it writes to every log.
    `drawn` is the first of the ids that were taken for the caller's events. It is None if no ids were taken, if
    another program took ids too, or if the ids are not larger than `last_id`.
    """

    definition: list[int] | None
    now: datetime
    upto: int
    buffered: int
    bytes: int
    last_id: int | None
    blocks: bool
    allowed: bool
    drawn: int | None


class BufferedBatch(NamedTuple):
    """The next rows of a topic in the buffer: the last buffer id, 0 without rows, and the number.

    A row is an event, holds a block, or refers to a staged block. `mixed`: some rows are not events. `full`: more rows
    may follow. `partitions` is None if the topic does not exist. The other fields are as in `TopicState`.
    """

    upto: int
    rows: int
    partitions: int | None
    mixed: bool
    last_id: int | None
    blocks: bool
    full: bool


class MovedBlocks(NamedTuple):
    """Blocks that left the buffer: the number of their rows, and the last id of these rows, None without rows.

    `blocks` is the number of sound blocks, and `events` the number of events that all of them should have. `entered` is
    the number of events that entered the log.
    """

    rows: int
    upto: int | None
    blocks: int
    events: int
    entered: int

    @property
    def whole(self) -> bool:
        return self.rows == self.blocks and self.events == self.entered


class LogAppender:
    """Appends to the logs of one database schema, on its callers' connections."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._queries = LogQueries("append", schema)

    def state(self, connection: Connection, topic: str, *, low_water: int, limit: int, events: int) -> TopicState:
        """The state of a topic. Counts the events in at most `limit` rows of the buffer.

        If the buffer has no event of the topic, takes ids of the log for `events` events.
        """
        values = {"topic": topic, "low_water": low_water, "limit": limit, "events": events, "trigger": TRIGGER}
        *row, form, allowed, drawn, usable = fetch_one(connection, self._queries("append_state", topic=topic), values)
        blocks = log_form.learn(connection, self._schema, topic, form).writes_blocks
        return TopicState._make((*row, blocks, allowed, drawn if usable else None))

    def batch(
        self, connection: Connection, topic: str, *, low_water: int, newest: int, limit: int, size: int
    ) -> BufferedBatch:
        """The next rows of a topic in the buffer, with `low_water < buffer id <= newest`.

        They are at most `limit`, and have at most `size` bytes of events, unless a single event has more.
        """
        while True:
            values = {"topic": topic, "low_water": low_water, "newest": newest, "limit": limit}
            *row, held, form = fetch_one(connection, self._queries("batch_end", topic=topic), values)
            blocks, rows = log_form.learn(connection, self._schema, topic, form).writes_blocks, row[1]
            if held <= size or rows == 1:
                return BufferedBatch._make((*row, blocks, rows == limit))
            limit = min(rows // 2, max(1, rows * size // held))

    def first_row(self, connection: Connection, topic: str, *, low_water: int, upto: int) -> tuple[int, int] | None:
        """The id and partition of the first row with `low_water < buffer id <= upto`; None without a row.

        The row of a block has a partition below -1.
        """
        values = {"topic": topic, "low_water": low_water, "upto": upto}
        row = fetch_first(connection, self._queries("first_row"), values, prepare=False)
        return None if row is None else (row[0], row[1])

    def move(
        self, connection: Connection, topic: str, *, low_water: int, upto: int, partitions: int, after: int
    ) -> int:
        """Move events with `low_water < buffer id <= upto`, up to the first block, to the end of the log.

        They keep their order. Gives their number.

        `partitions` is the topic's number of partitions: an event that names none of them gets the partition of its
        key. `after` is the last id of the log. If its sequence is set back at that moment, a log in blocks refuses the
        events (`CheckViolation`), and a log in rows does not: see `last_id`.
        """
        blocks = log_form.form(connection, self._schema, topic).writes_blocks
        values = {"topic": topic, "low_water": low_water, "upto": upto, "partitions": partitions, "after": after}
        moved = connection.execute(self._queries.writing(connection, "move", topic), values)
        return sum(events for (events,) in moved) if blocks else moved.rowcount

    def move_blocks(
        self, connection: Connection, topic: str,
        *, low_water: int, upto: int, most: int, size: int, partitions: int, reference: int, after: int,
    ) -> MovedBlocks:  # fmt: skip
        """Move the next blocks with `low_water < buffer id <= upto`, up to the first event, at most `most`.

        Their values have at most `size` bytes, unless a single block has more. `reference` is the partition that marks
        a row of the buffer as a block, `partitions` the topic's number of partitions. `after` is as in `move`.
        """
        values = {
            "topic": topic, "low_water": low_water, "upto": upto, "most": most, "size": size, "partitions": partitions,
            "reference": reference, "after": after,
        }  # fmt: skip
        query = self._queries.writing(connection, "move_blocks", topic)
        return MovedBlocks(*fetch_one(connection, query, values, prepare=False))

    def draw(self, connection: Connection, topic: str, events: int, *, after: int) -> int:
        """Take ids for `events` events of a log in blocks. Returns the first.

        Raises `ForeignIdsError` if another program took ids too, or if the ids are not larger than `after`, the last id
        of the log.
        """
        query = self._queries.writing(connection, "draw", topic)
        last, usable = fetch_one(connection, query, {"events": events, "after": after})
        if not usable:
            raise ForeignIdsError(f"other ids of the log of topic {topic!r} were drawn at this moment")
        return int(last) - events + 1

    def now(self, connection: Connection) -> datetime:
        """The server's time, for events that enter a log after other events of the caller's transaction."""
        now: datetime = fetch_one(connection, self._queries("now"))[0]
        return now

    def last_id(self, connection: Connection, topic: str) -> int | None:
        """The last id of the log. None if its sequence does not give ids one by one and upwards.

        The table of a log in rows draws its ids by itself. If this id is smaller than the last id before plus the
        number of rows that were written since, the sequence was set back meanwhile.
        """
        last: int | None = fetch_one(connection, self._queries("end_of_log", topic=topic))[0]
        return last

    def count_after(self, connection: Connection, topic: str, after: int) -> int:
        """The number of events of a log in rows with ids above `after`."""
        return int(fetch_one(connection, self._queries.writing(connection, "count_after", topic), {"after": after})[0])

    def append(self, connection: Connection, topic: str, rows: Iterable[bytes]) -> None:
        """COPY encoded events to the end of the log: rows of `publishing/copy_format.py`.

        A log in blocks takes blocks of `publishing/block_format.py`.
        """
        send_copy(connection.cursor(), self._queries.writing(connection, "append", topic), rows)
