"""The driver's part of a batch read: the ranges of the logs that the tasks read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_PARTITIONS, NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.spark.filters import Conditions
from eventsql_orchestration.spark.input_splits import Wanted, even_splits
from eventsql_orchestration.spark.log_planner import Logs
from eventsql_orchestration.spark.log_tasks import Piece
from eventsql_orchestration.spark.multi_log_planner import AllLogs
from eventsql_orchestration.spark.read_options import ReadOptions


def plan_batch(options: ReadOptions, conditions: Conditions) -> list[tuple[Piece, ...]]:
    """The pieces of each task, of the events that may meet the conditions.

    Raises as `AllLogs` and `even_splits`, `ValidationError` for a range that is out of bounds, and `ClaimNotFoundError`
    or `ClaimLostError`.
    """
    with AllLogs(options, conditions.shards) as every:
        if options.claim is not None:
            (logs,) = every
            offsets, chosen = logs.claimed(options.claim)
            # A consumer goes on with the events that a forced retention has left.
            ranges = [Wanted(logs, offsets)]
        else:
            chosen, ranges = options.filter, list(_ranges(options, every))
        conditions = conditions.with_consumer(chosen, options.source.schema)
        wanted = [
            replace(each, offsets=narrow, rows=conditions.rows)
            for each in ranges
            for narrow in _narrowed(each.offsets, conditions, each.logs)
        ]
        return even_splits(options, wanted)


def _ranges(options: ReadOptions, every: AllLogs) -> Iterator[Wanted]:
    """The range of each topic and partition between the bounds of the read."""
    every.check_bounds()
    extents = every.extents()
    for tp, start in every.starts(extents).items():
        logs, extent = every.of(tp), extents[tp.log]
        end = logs.end(tp, extent)
        if end < start and options.starting.given and options.ending.given:
            raise ValidationError(
                f"option {options.ending.option}: {end} lies before {options.starting.option}, {start}, of {tp}"
            )
        # An open transaction may have got offsets before the end. Its events must not appear during the read.
        end = min(end, max(extent.settled + 1, extent.floor))
        offsets = OffsetRange(tp.topic, tp.partition, start - 1, max(end, start) - 1)
        yield Wanted(logs, offsets, complete=logs.begins_at_offset(tp))


def _narrowed(offsets: OffsetRange, conditions: Conditions, logs: Logs) -> list[OffsetRange]:
    """The part of a range that can meet the conditions, split by partition if they name some."""
    if conditions.topics is not None and offsets.topic not in conditions.topics:
        return []
    after = max(offsets.after, conditions.after)
    narrow = replace(offsets, after=after, upto=max(after, min(offsets.upto, conditions.upto)))
    if conditions.partitions is None:
        return [narrow]
    if offsets.partition != NOT_PARTITIONED:
        return [narrow] if offsets.partition in conditions.partitions else []
    topic = logs.registry.cached_topic(offsets.topic)
    if not topic.partitioned:
        return [narrow]
    # Include partitions that the topic has lost: events keep their partition.
    possible = sorted(partition for partition in conditions.partitions if 0 <= partition < MAX_PARTITIONS)
    return [replace(narrow, partition=partition) for partition in possible]
