"""Blocks that come as lists are read as the events that rows would have, and a cut one is refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from pyspark.sql.types import TimestampType

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import BrokenBlockError
from eventsql_orchestration.model import FIRST_TIME, LAST_TIME, NOT_PARTITIONED, OffsetRange, Storage
from eventsql_orchestration.spark.blocks import MOST_EVENTS
from eventsql_orchestration.spark.log_tasks import Piece, Projection, read_batches
from eventsql_orchestration.spark.options import Source

COLUMNS = ["key", "value", "partition", "offset", "timestamp", "headers"]
PARTITIONS = 3
KEYS: list[list[str | None]] = [[None], ["k", None], ["k", "ä", ""]]

Read = Callable[[Storage, OffsetRange, list[str]], pa.Table]


@pytest.fixture
def read(platform: EventSQL, dsn: str) -> Read:
    """Reads events that both topics have, in blocks with and without keys, metadata and one time for all."""
    rng = random.Random(20261123)
    forms: tuple[Storage, ...] = ("rows", "blocks")
    for form in forms:
        platform.registry.register_topic(Topic(form, PARTITIONS, storage=form))
    for _ in range(12):
        partition, metadata = rng.randrange(PARTITIONS), {"a": "b"} if rng.random() < 0.3 else {}
        keys: list[str | None] = rng.choice(KEYS)
        count = rng.choice([1, 2, 60, 200])
        for form in forms:
            events = [
                Publication(form, b"%d" % each, key=keys[each % len(keys)], metadata=metadata, partition=partition)
                for each in range(count)
            ]
            if count == 2:
                for event in events:
                    platform.publisher.publish(event)
                platform.transfer.run_once()
            else:
                platform.publisher.publish_all(events)
                platform.transfer.run_once()

    def reading(form: Storage, offsets: OffsetRange, columns: list[str]) -> pa.Table:
        table = "blocks_block" if form == "blocks" else "rows_event"
        wanted = Projection(columns, fail_on_data_loss=False)
        named = OffsetRange(form, offsets.partition, offsets.after, offsets.upto)
        batches = list(read_batches(Source(dsn, "eventsql", "the database"), [Piece(named, table, 1)], wanted))
        return pa.Table.from_batches(batches, wanted.schema)

    return reading


def without_erasure_times(table: pa.Table) -> list[dict[str, object]]:
    """The rows of a table; the two topics were erased one after the other."""
    return [
        {**row, "headers": [(name, "" if name == "eventsql_erased" else text) for name, text in row["headers"]]}
        if row.get("headers")
        else row
        for row in table.to_pylist()
    ]


def test_any_columns_of_any_range_are_those_of_rows(platform: EventSQL, read: Read) -> None:
    rng, end = random.Random(7), platform.reader.end("rows")
    for form in ("rows", "blocks"):
        assert platform.eraser.execute(form, ["ä"]).events > 0
    assert platform.reader.end("blocks") == end > 200
    for _ in range(25):
        columns = rng.sample(COLUMNS, rng.randrange(1, len(COLUMNS) + 1))
        after = rng.randrange(0, end)
        upto = rng.choice([2**63 - 1, rng.randrange(after, end + 9)])
        offsets = OffsetRange("either", rng.randrange(-1, PARTITIONS), after, upto)
        rows, blocks = (read(form, offsets, columns) for form in ("rows", "blocks"))
        # The same events were published to both, one after the other.
        without_times = [name for name in columns if name != "timestamp"]
        assert without_erasure_times(blocks.select(without_times)) == without_erasure_times(rows.select(without_times))
        if "timestamp" in columns:
            partition = None if offsets.partition < 0 else offsets.partition
            log = platform.reader.read("blocks", after=after, upto=upto, partition=partition)
            assert blocks.column("timestamp").to_pylist() == [event.buffered_at for event in log]


def test_a_batch_has_a_bounded_number_of_events_however_small_they_are(platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("empty", storage="blocks"))
    events = MOST_EVENTS + 40_000
    platform.publisher.publish_all([Publication("empty", b"")] * events)
    platform.transfer.run_once()
    wanted = [Piece(OffsetRange("empty", -1, 5, 2**63 - 1), "empty_block", 6)]
    batches = list(read_batches(Source(dsn, "eventsql", "the database"), wanted, Projection(["offset"])))
    assert max(batch.num_rows for batch in batches) <= MOST_EVENTS
    assert pa.Table.from_batches(batches)["offset"].to_pylist() == list(range(6, events + 1))


def test_metadata_that_another_program_writes_stops_no_read(
    platform: EventSQL, session: Connection, read: Read
) -> None:
    session.execute(
        "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
        "SELECT topic, 0, ''::bytea, m::json "
        "FROM (VALUES ('rows'), ('blocks')) topics (topic), "
        r"""(VALUES ('{"a": "\ud800b", "\udc00": "é"}'), ('{"c": [1]}'), ('null'), ('[1]'), (%s)) t (m)""",
        ['{"digits": ' + "1" * 5_000 + "}"],
    )
    end = platform.reader.end("rows")
    platform.transfer.run_once()
    for form in ("rows", "blocks"):
        found = read(form, OffsetRange(form, -1, end, end + 5), ["headers"])["headers"].to_pylist()
        assert sorted(map(str, found)) == [*["None"] * 3, "[('a', '?b'), ('?', 'é')]", "[('c', '[1]')]"]


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_a_time_that_python_lacks_is_read_as_the_nearest(
    platform: EventSQL, session: Connection, dsn: str, form: Storage
) -> None:
    platform.registry.register_topic(Topic("orders", storage=form))
    session.execute(
        "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_created_at) "
        "SELECT 'orders', -1, '', '{}', time FROM unnest(%s::timestamptz[]) time",
        [["infinity", "20000-01-01", "2026-01-31 12:00Z", "0100-01-01 BC", "-infinity"]],
    )
    platform.transfer.run_once()
    piece = Piece(OffsetRange("orders", NOT_PARTITIONED, 0, 5), f"orders_{'block' if form == 'blocks' else 'event'}", 1)
    batches = read_batches(Source(dsn, "eventsql", "the database"), [piece], Projection(["timestamp"]))
    found = [time.as_py() for batch in batches for time in batch.column(0)]
    assert found == [LAST_TIME, LAST_TIME, datetime(2026, 1, 31, 12, tzinfo=UTC), FIRST_TIME, FIRST_TIME]


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT-14", "Etc/GMT+12", "Asia/Manila"])
def test_spark_collects_a_time_that_python_lacks_in_every_zone(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    times = [(each - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) for each in (FIRST_TIME, LAST_TIME)]
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert [TimestampType().fromInternal(each).year for each in times] == [1, 9999]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_cut_array_is_refused(session: Connection, read: Read) -> None:
    session.execute("ALTER TABLE eventsql.blocks_block DROP CONSTRAINT eql_whole_values")
    session.execute(
        "UPDATE eventsql.blocks_block SET eql_values = eql_values[1:1] "
        "WHERE eql_id = (SELECT min(eql_id) FROM eventsql.blocks_block WHERE eql_events > 1)"
    )
    with pytest.raises(BrokenBlockError) as caught:
        read("blocks", OffsetRange("either", -1, 0, 2**63 - 1), ["value"])
    assert caught.value.topic == "blocks"
