"""Reading a topic's log by offsets, on a caller's connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice, repeat
from operator import attrgetter, lt
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow, tuple_row
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import TextBinaryLoader

from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.rows import fetch_first, fetch_one
from eventsql_orchestration.errors import BrokenBlockError
from eventsql_orchestration.model import ERASED, NOT_PARTITIONED, Event
from eventsql_orchestration.storage.log_form import MOST_IDS, form
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.segments import SEGMENT_EVENTS

MAX_OFFSET: Final = 2**63 - 1

_FIRST_BLOCKS: Final = 64
"""The number of blocks that are read first for the events of a batch."""

WINDOW: Final = SEGMENT_EVENTS
"""The number of ids that are searched first for the events of a partition: the number of ids of a new segment."""

_NEAR: Final = 64
"""Events whose ids are at most this far apart are read together."""

BATCH_BYTES: Final = 32 * 2**20
"""The bytes of values that end a batch. The value that reaches them still belongs to it, and may have 64 MiB."""

_ANY_BYTES: Final = 2**62
"""More bytes than a log has."""

_MORE: Final = 8
"""Factor by which each further look reads more blocks than the look before: blocks may be small."""


class Extent(NamedTuple):
    """The number of events in a range, and the offset of the first; None without events."""

    events: int
    first: int | None


class Waiting(NamedTuple):
    """The next events of a range: their number, the offset of the last, and seconds since the first entered the log."""

    events: int
    upto: int | None
    seconds: float | None


def cursor_of_events(connection: Connection) -> psycopg.Cursor[Any]:
    """A cursor for the columns of events in binary form. Events decode their times and metadata when these are read.

    So an event with a time or metadata that Python lacks holds up no other.
    """
    # The connection may be a caller's, with a row factory of its own.
    cursor = connection.cursor(row_factory=tuple_row)
    cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)
    cursor.adapters.register_loader("json", TextBinaryLoader)
    return cursor


class LogReader:
    """Reads the logs of one database schema. It holds no connection, so any thread may use it.

    A range is `after < offset <= upto` of one partition or, with -1, of all partitions.
    """

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._queries = LogQueries("read", schema)

    def read(
        self, connection: Connection, topic: str, *, partition: int = NOT_PARTITIONED, after: int = 0,
        upto: int = MAX_OFFSET, limit: int | None = None,
    ) -> list[Event]:  # fmt: skip
        """The events of a range in order, at most `limit`."""
        values = {"partition": partition, "after": after, "upto": upto, "limit": limit, "bytes": _ANY_BYTES}
        return self._read(connection, topic, values)[0]

    def read_batch(
        self, connection: Connection, topic: str, *, partition: int, after: int, upto: int, limit: int
    ) -> tuple[list[Event], bool]:
        """The next events of a range in order, and whether more of them may follow in the range.

        They end with event `limit`, or with the event whose value makes `BATCH_BYTES` full.
        """
        values = {"partition": partition, "after": after, "upto": upto, "limit": limit, "bytes": BATCH_BYTES}
        return self._read(connection, topic, values)

    def _read(self, connection: Connection, topic: str, values: dict[str, Any]) -> tuple[list[Event], bool]:
        """The events of a range, and whether they ended at its `limit` or `bytes`. Changes `values` to the rest."""
        partition, limit, most = values["partition"], values["limit"], values["bytes"]
        cursor = cursor_of_events(connection)
        known, of_range = form(connection, self._schema, topic), _of("read", partition)
        if known.blocks:
            events, more = list[Event](), True
            if partition != NOT_PARTITIONED and limit is not None and not known.both:
                events, more = self._read_window(cursor, topic, values, limit)
            if more:
                query, between = (self._queries(each, topic=topic, form=known) for each in (of_range, "read_between"))
                events += _read_blocks(cursor, query, between, topic, values)
            return events, len(events) == limit or values["bytes"] <= 0
        query = self._queries(of_range, topic=topic, form=known)
        cursor.execute(query, values, binary=True, prepare=False)
        events = [Event(topic, *row) for row in cursor.fetchall()]
        return events, len(events) == limit or bytes_of(events) >= most

    def _read_window(
        self, cursor: psycopg.Cursor[Any], topic: str, values: dict[str, Any], limit: int
    ) -> tuple[list[Event], bool]:
        """The first events of a range in the window that it begins in, and whether there may be more behind them.

        Changes `values` to the rest of the range. Measured: the server takes 0.1 ms, because it keeps the plan, and 0.8
        ms if it plans the statement each time.
        """
        begin = values["after"] // WINDOW * WINDOW
        behind = begin + WINDOW
        query = self._queries.in_window("read_window", topic, begin=begin, behind=behind)
        rows = cursor.execute(query, {**values, "blocks": _FIRST_BLOCKS}, binary=True).fetchall()
        events = [event for *block, _, _ in rows for event in _events_of_block(topic, *block)]
        # A block that ends behind the range may have events of it.
        ends = values["upto"] + MOST_IDS < behind
        stored = rows[-1][-2] if rows else 0
        if events:
            values["after"], values["limit"] = events[-1].id, limit - len(events)
            values["bytes"] -= stored
            # The sequence may be behind the log's events, as after some restores. So it may end only a read without an
            # upper bound: the caller of such a read goes on later. For the caller of a range, fewer events than `limit`
            # are the end of the range.
            if values["upto"] == MAX_OFFSET and (newest := rows[0][-1]) is not None:
                ends = events[-1].id <= newest < behind
        if values["limit"] <= 0 or values["bytes"] <= 0 or (ends and len(rows) < _FIRST_BLOCKS):
            return events, False
        _unpack(values, stored, events)
        return events, values["bytes"] > 0

    def read_ids(
        self, connection: Connection, topic: str, ids: Sequence[int], *, partition: int = NOT_PARTITIONED
    ) -> Iterator[Event]:
        """The events with these ascending ids that are in the log, in order. Reads the ranges that they lie in.

        Reads a batch of a range when its first event is wanted.
        """
        wanted, start = set(ids), 0
        for place in range(1, len(ids) + 1):
            if place < len(ids) and ids[place] - ids[place - 1] <= _NEAR:
                continue
            after, upto, more = ids[start] - 1, ids[place - 1], True
            while more and after < upto:
                events, more = self.read_batch(
                    connection, topic, partition=partition, after=after, upto=upto, limit=upto - after
                )
                yield from (event for event in events if event.id in wanted)
                after = events[-1].id if events else upto
            start = place

    def end(self, connection: Connection, topic: str, partition: int = NOT_PARTITIONED) -> int:
        """The newest offset of a log or of one partition; 0 without events."""
        (end,) = self._row(connection, "end", topic, partition, {})
        return int(end)

    def bounds(self, connection: Connection, topic: str) -> tuple[int, int]:
        """The first and the newest offset of a log; 1 and 0 without events."""
        first, end = self._row(connection, "bounds", topic, NOT_PARTITIONED, {})
        return first, end

    def count(
        self, connection: Connection, topic: str, *, partition: int = NOT_PARTITIONED, after: int = 0,
        upto: int = MAX_OFFSET, most: int | None = None,
    ) -> int:  # fmt: skip
        """The number of events in a range; with `most`, the server counts no further than that."""
        values: dict[str, object] = {"after": after, "upto": upto, "most": most}
        (events,) = self._row(connection, "count" if most is None else "count_upto", topic, partition, values)
        return int(events)

    def extent(
        self, connection: Connection, topic: str, *, partition: int = NOT_PARTITIONED, after: int, upto: int
    ) -> Extent:
        """The number of events in a range, and the first of them."""
        return Extent(*self._row(connection, "extent", topic, partition, {"after": after, "upto": upto}))

    def waiting(
        self, connection: Connection, topic: str, *, partition: int, after: int, upto: int, limit: int
    ) -> Waiting:
        """The next events of a range, at most `limit`, without their content."""
        values: dict[str, object] = {"after": after, "upto": upto, "most": limit}
        return Waiting(*self._row(connection, "waiting", topic, partition, values))

    def seconds_behind(
        self, connection: Connection, topic: str, *, partition: int = NOT_PARTITIONED, after: int
    ) -> float | None:
        """Seconds since the first event after an offset was published; None without such an event."""
        query = self._queries.on(connection, _of("oldest", partition), topic)
        values = {"partition": partition, "after": after, "upto": MAX_OFFSET}
        row = fetch_first(connection, query, values, prepare=False)
        return None if row is None else float(row[0])

    def before_time(self, connection: Connection, topic: str, time: datetime) -> int:
        """The offset of the last event that entered the log before `time`; else the offset before the first event."""
        (offset,) = self._row(connection, "before_time", topic, NOT_PARTITIONED, {"time": time})
        return int(offset)

    def nth(
        self, connection: Connection, topic: str, n: int, *, partition: int = NOT_PARTITIONED, after: int,
        upto: int = MAX_OFFSET,
    ) -> int | None:  # fmt: skip
        """The offset of the `n`-th event of a range, counted from 1; None if the range has fewer."""
        values = {"partition": partition, "after": after, "upto": upto, "most": n}
        query = self._queries.on(connection, _of("nth", partition), topic)
        row = fetch_first(connection, query, values, prepare=False)
        return None if row is None else int(row[0])

    def nth_before(
        self, connection: Connection, topic: str, n: int, *, partition: int = NOT_PARTITIONED, offset: int
    ) -> int | None:
        """The offset of the `n`-th event from `offset` backwards; an event at `offset` is the first."""
        values = {"partition": partition, "offset": offset, "skip": n - 1}
        query = self._queries.on(connection, _of("nth_before", partition), topic)
        row = fetch_first(connection, query, values, prepare=False)
        return None if row is None else int(row[0])

    def _row(
        self, connection: psycopg.Connection[Any], name: str, topic: str, partition: int, values: Mapping[str, object]
    ) -> TupleRow:
        # Planned for its values: `read_partition` says why.
        query = self._queries.on(connection, _of(name, partition), topic)
        return fetch_one(connection, query, {**values, "partition": partition}, prepare=False)


def _of(name: str, partition: int) -> str:
    """The name of a statement that exists for all partitions and for one."""
    return name if partition == NOT_PARTITIONED else f"{name}_partition"


def _read_blocks(
    cursor: psycopg.Cursor[Any], query: sql.SQL, between: sql.SQL, topic: str, values: dict[str, Any]
) -> list[Event]:
    """The events of a range of a log in blocks; `between` is the statement for blocks whose ranges overlap.

    Changes `values` to the rest of the range.
    """
    events: list[Event] = []
    limit: int | None = values["limit"]
    blocks = None if limit is None else _FIRST_BLOCKS
    whole = values["partition"] == NOT_PARTITIONED
    while True:
        left = None if limit is None else limit - len(events)
        asked = max(1, int(values["bytes"] * values.get("packed", 1.0)))
        cursor.execute(query, {**values, "limit": left, "blocks": blocks, "bytes": asked}, binary=True, prepare=False)
        rows = cursor.fetchall()
        more = bool(rows and rows[0][-1])
        if more and query is not between and whole:
            query = between
            continue
        found = [event for *block, _, _ in rows for event in _events_of_block(topic, *block)]
        if query is between:
            # Events of other partitions lie in the gaps.
            found.sort(key=attrgetter("id"))
        events += found
        stored = rows[-1][-2] if rows else 0
        values["bytes"] = 0 if stored >= asked else values["bytes"] - stored
        if blocks is None or len(events) == limit or values["bytes"] <= 0 or (not more and len(rows) < blocks):
            return events
        _unpack(values, stored, found)
        if values["bytes"] <= 0:
            return events
        # All events up to the last one were read.
        values["after"] = events[-1].id
        blocks *= _MORE


def _unpack(values: dict[str, Any], stored: int, events: Iterable[Event]) -> None:
    """Take the bytes off that the values of a look have beyond those that are `stored`, for a further look.

    Compressed blocks of several events count as they are stored. `packed` estimates how much further blocks are packed.
    """
    size = bytes_of(events)
    if size > stored:
        values["bytes"] -= size - stored
        values["packed"] = stored / size


def bytes_of(events: Iterable[Event]) -> int:
    """The bytes of the values of events."""
    return sum(len(event.value or b"") for event in events)


def _events_of_block(  # noqa: PLR0917 - in the order of the columns
    topic: str, base: int, partition: int, nth: int, events: int, buffered_at: int, created_at: int,
    keys: list[str | None] | None, contents: list[bytes | None], metadata: list[str] | None, times: list[int] | None,
    places: list[int] | None, entered: list[int] | None,
) -> list[Event]:  # fmt: skip
    ids: Iterable[int] = range(base + nth + 1, base + nth + 1 + events)
    whole = len(contents) == events
    if places is not None:
        ids = [base + place for place in places]
        # Ids that do not ascend would be read twice, or never.
        whole = whole and all(map(lt, ids, islice(ids, 1, None)))
    if not whole or any(
        array is not None and len(array) != events for array in (keys, metadata, times, places, entered)
    ):
        raise BrokenBlockError(topic=topic, partition=partition, first=base + nth + 1)
    if metadata is not None and b"" in contents:
        contents = [
            None if value == b"" and text.startswith(ERASED) else value
            for value, text in zip(contents, metadata, strict=True)
        ]  # fmt: skip
    return list(
        map(
            Event, repeat(topic), ids, repeat(partition), repeat(None, events) if keys is None else keys, contents,
            repeat(buffered_at) if times is None else times, repeat(created_at) if entered is None else entered,
            repeat("{}") if metadata is None else metadata,
        )
    )  # fmt: skip
