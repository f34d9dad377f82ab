"""Blocks of a log as Arrow columns of their events: arrays come as lists, which are flattened.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration.errors import BrokenBlockError
from eventsql_orchestration.model import ERASED, OffsetRange
from eventsql_orchestration.storage.copy_out import ARRAYS

MOST_EVENTS: Final = 262_144
"""The most events that are flattened at once, unless a single block has more. A batch of blocks whose arrays are not
read has hundreds of millions of events in 4 MiB."""


def parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch of blocks, cut so that each part has at most `MOST_EVENTS` events."""
    start = events = 0
    for row, count in enumerate(batch.column(1).to_pylist()):
        if events and events + count > MOST_EVENTS:
            yield batch.slice(start, row - start)
            start, events = row, 0
        events += count
    if events:
        yield batch.slice(start)


def flatten(batch: pa.RecordBatch, offsets: OffsetRange, columns: Sequence[str]) -> pa.RecordBatch:
    """The events of a range that a batch of blocks has, with these columns.

    The blocks are rows of `copy_out.blocks_query`. Raises `BrokenBlockError` for an array of another length than its
    block's number of events.
    """
    last, events, partition, published, span, places, *lists = batch.columns
    marks = lists.pop() if "value" in columns else None
    arrays = dict(zip((name for name in columns if name in ARRAYS), lists, strict=True))
    for array in (places, *arrays.values()):
        _check_lengths(array, events, last, partition, offsets.topic)

    ends = pc.cumulative_sum(events.cast(pa.int32()))
    total = ends[-1].as_py()
    starts = pc.subtract(ends, events)
    bounds = pa.concat_arrays([starts[:1], ends])
    block = pc.list_parent_indices(pa.ListArray.from_arrays(bounds, pa.nulls(total)))

    # Each event's place in the batch, and the difference between its offset and its place.
    place = pa.arange(1, total + 1)
    further = pc.subtract(pc.subtract(last, events), starts).take(block)
    offset = pc.add(place, further)
    gapped = _elements(places, events)
    if gapped is not None:
        offset = pc.coalesce(pc.add(gapped, pc.subtract(last, span).take(block)), offset)
    found: dict[str, Any] = {}
    for name in columns:
        if name == "offset":
            found[name] = offset
        elif name == "partition":
            found[name] = partition.take(block)
        elif name == "timestamp":
            times = _elements(arrays[name], events)
            found[name] = published.take(block) if times is None else pc.coalesce(times, published.take(block))
        elif name == "headers":
            texts = _elements(arrays[name], events)
            none = pa.repeat(pa.scalar("{}"), total)
            found[name] = none if texts is None else texts.fill_null("{}")
        else:
            elements = _elements(arrays[name], events)
            found[name] = pa.nulls(total, arrays[name].type.value_type) if elements is None else elements
    if marks is not None and (texts := _elements(marks, events)) is not None:
        # An erased event has no value.
        erased = pc.and_(pc.equal(pc.binary_length(found["value"]), 0), pc.starts_with(texts, ERASED).fill_null(False))
        found["value"] = pc.if_else(erased, None, found["value"])

    whole = pa.RecordBatch.from_arrays(list(found.values()), names=list(found))
    if gapped is not None:
        inside = pc.and_(pc.greater(offset, offsets.after), pc.less_equal(offset, offsets.upto))
        return whole.filter(inside)
    before = max(0, offsets.after - (last[0].as_py() - events[0].as_py()))
    behind = max(0, last[-1].as_py() - offsets.upto)
    return whole.slice(before, total - before - behind)


def _check_lengths(array: Any, events: Any, last: Any, partition: Any, topic: str) -> None:
    wrong = pc.indices_nonzero(pc.not_equal(pc.list_value_length(array), events))
    if wrong:
        row = wrong[0].as_py()
        first = last[row].as_py() - events[row].as_py() + 1
        raise BrokenBlockError(topic=topic, partition=partition[row].as_py(), first=first)


def _elements(array: Any, events: Any) -> Any:
    """The elements of all arrays, those of a missing array as null; None if all are missing."""
    if array.null_count == len(array):
        return None
    if not array.null_count:
        return array.flatten()
    kind = array.type.value_type
    parts = [
        pa.nulls(count, kind) if each.values is None else each.values
        for each, count in zip(array, events.to_pylist(), strict=True)
    ]
    return pa.concat_arrays(parts)
