"""Cutting the ranges of a read into even tasks, over all databases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.model import OffsetRange
from eventsql_orchestration.spark.log_planner import Logs
from eventsql_orchestration.spark.log_tasks import Piece
from eventsql_orchestration.spark.ranges import PROBES, Interval, even_tasks
from eventsql_orchestration.spark.read_options import ReadOptions

_LEAST_PROBES: Final = 4
"""The least number of parts of each range, if many ranges are planned together."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range to read, the logs of its database, and SQL conditions that its events must meet.

    `complete`: events of the range that retention has dropped are a loss.
    """

    logs: Logs
    offsets: OffsetRange
    rows: Sequence[str] = ()
    complete: bool = False


def even_splits(options: ReadOptions, wanted: Sequence[Wanted]) -> list[tuple[Piece, ...]]:
    """The pieces of each task. Together they are the ranges, without parts that have no events.

    Raises `DataLossError` or logs a warning, as failOnDataLoss says, for a range that is to be complete and is not.
    """
    probes = max(_LEAST_PROBES, PROBES // max(1, len(wanted)))
    occupied = [each.logs.occupied(each.offsets, probes) for each in wanted]
    cut = even_tasks(occupied, options.tasks.number(sum(each.events for each in occupied)))
    parts: dict[int, list[Interval]] = {}
    for task in cut:
        for index, bounds in task:
            parts.setdefault(index, []).append(bounds)
    firsts = {
        (index, bounds): first
        for index, all_bounds in parts.items()
        for bounds, first in zip(all_bounds, wanted[index].logs.firsts(wanted[index].offsets, all_bounds), strict=True)
    }
    # From behind, so that the first event of the next piece that has one is known.
    ends: dict[tuple[int, Interval], int] = {}
    following = {index: occupied[index].stretches[-1].last for index in parts}
    for (index, bounds), first in reversed(firsts.items()):
        ends[index, bounds] = following[index]
        if first is not None:
            following[index] = first
    # Check only now: tasks notice by their first events if retention drops anything from here on.
    _check_complete(wanted)
    tasks = [
        tuple(
            _piece(wanted[index], bounds, first, ends[index, bounds])
            for index, bounds in task
            if (first := firsts[index, bounds]) is not None
        )
        for task in cut
    ]
    return [task for task in tasks if task]


def _check_complete(wanted: Sequence[Wanted]) -> None:
    floors: dict[tuple[Logs, str], int] = {}
    for each in wanted:
        if each.complete:
            log = each.logs, each.offsets.topic
            if log not in floors:
                floors[log] = each.logs.floor(each.offsets.topic)
            each.logs.check_complete(each.offsets, floors[log])


def _piece(wanted: Wanted, bounds: Interval, first: int, end: int) -> Piece:
    offsets, logs = OffsetRange(wanted.offsets.topic, wanted.offsets.partition, *bounds), wanted.logs
    created = logs.registry.cached_topic(offsets.topic).created_at
    return Piece(offsets, logs.table(offsets.topic), first, wanted.rows, logs.shard, created, end)
