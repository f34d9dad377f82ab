"""Reading topics as they grow: a stream's offsets, its progress and its limits."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from eventsql_orchestration.errors import EventSQLError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.spark.filters import Conditions
from eventsql_orchestration.spark.read_options import FIRST, ReadOptions
from eventsql_orchestration.spark.reader import Reading, Split
from eventsql_orchestration.spark.splits import shares

if TYPE_CHECKING:
    from eventsql_orchestration.spark.planning import Extent, Lane, Logs
    from eventsql_orchestration.spark.progress import Progress

_SHARD: Final = "0"
"""A stream's offsets are {topic: {shard: offset}}, so that a checkpoint outlives a second shard. Where partitions have
offsets of their own, they are {topic: {shard: {partition: offset}}}."""


class StreamReader(Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. A stream's offset is the next one to read, as in the option.

    Spark calls `latestOffset` with a start up to which everything is processed, also after the last batch of
    AvailableNow and after a restart, for which `commit` is not called: a consumer's progress is written in both.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._opened: Logs | None = None
        self._consuming: Progress | None = None
        self._last: dict[Lane, int] | None = None

    def initialOffset(self) -> dict[str, Any]:
        logs, progress = self._open(), self._progress()
        logs.check_edges()
        starting, extents = self._options.starting, self._extents(logs)
        if progress is not None and not starting.given:
            return _offset({lane: max(progress.start(lane), FIRST) for lane in logs.lanes})
        return _offset({lane: logs.start(starting, lane, extents[lane.topic]) for lane in logs.lanes})

    def getDefaultReadLimit(self) -> ReadLimit:
        most, lanes = self._options.max_events, len(self._open().lanes)
        if most is None:
            return ReadAllAvailable()
        if most < lanes:
            raise ValidationError(
                f"option maxOffsetsPerTrigger: {most} is too few for {lanes} topics and partitions with an offset each"
            )
        return ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        logs = self._open()
        extents = self._extents(logs)
        self._last = {lane: extents[lane.topic].settled for lane in logs.lanes}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        logs = self._open()
        logs.refresh()
        starts = self._nexts(start)
        self._write_progress(starts)
        extents = self._extents(logs)
        after = {lane: starts[lane] - 1 for lane in logs.lanes}
        upto: dict[Lane, int] = {}
        for lane in logs.lanes:
            extent = extents[lane.topic]
            if after[lane] > extent.newest:
                raise EventSQLError(
                    f"topic {lane.topic!r} ends at offset {extent.end}, and this stream has read on to "
                    f"{starts[lane]}: the topic was made anew or restored, begin with a new checkpoint"
                )
            # A partition that is newer than the trigger has nothing that is older.
            last = extent.settled if self._last is None else self._last.get(lane, 0)
            upto[lane] = max(last, after[lane])
        if isinstance(limit, ReadMaxRows):
            upto = _limited(logs, after, upto, limit.max_rows)
        return _offset({lane: upto[lane] + 1 for lane in logs.lanes})

    def reportLatestOffset(self) -> dict[str, Any]:
        logs = self._open()
        extents = self._extents(logs)
        return _offset({lane: extents[lane.topic].settled + 1 for lane in logs.lanes})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        # A batch that is replayed after a restart is asked for here before anything else.
        logs, starts, ends = self._open(), self._nexts(start), self._nexts(end)
        floors = {topic: logs.floor(topic) for topic in self._options.topics}
        ranges = []
        for lane in logs.lanes:
            if ends[lane] <= starts[lane]:
                continue
            floor = floors[lane.topic]
            if starts[lane] < floor and _known(start, lane):
                logs.lost(lane, starts[lane], floor)
            after = max(starts[lane], floor) - 1
            if after < ends[lane] - 1:
                ranges.append(OffsetRange(lane.topic, lane.partition, after, ends[lane] - 1))
        progress = self._progress()
        filters = {} if progress is None else progress.filters
        rows = {topic: Conditions().with_consumer(chosen).rows for topic, chosen in filters.items()}
        return [Split(pieces) for pieces in logs.tasks(ranges, rows)]

    def commit(self, end: dict[str, Any]) -> None:
        self._write_progress(self._nexts(end))

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _open(self) -> Logs:
        if self._opened is None:
            self._opened = self.logs()
        return self._opened

    def _extents(self, logs: Logs) -> dict[str, Extent]:
        return {topic: logs.extent(topic) for topic in self._options.topics}

    def _progress(self) -> Progress | None:
        if self._consuming is None and self._options.consumer is not None:
            # Not for the tasks, as in `Reading.logs`.
            from eventsql_orchestration.spark.progress import Progress  # noqa: PLC0415

            self._consuming = Progress(self._open(), self._options.consumer)
        return self._consuming

    def _write_progress(self, nexts: Mapping[Lane, int]) -> None:
        progress = self._progress()
        if progress is not None:
            for lane, following in nexts.items():
                progress.write(lane, following - 1)

    def _nexts(self, offset: dict[str, Any]) -> dict[Lane, int]:
        """The next offset of each lane; of a topic that the checkpoint does not have yet, the first."""
        if gone := sorted(offset.keys() - self._options.topics.keys()):
            raise ValidationError(
                f"option subscribe: the checkpoint is one of {', '.join(sorted(offset))}, and {', '.join(gone)} is not "
                "read any more: begin with a new checkpoint"
            )
        return {lane: _next(offset, lane) for lane in self._open().lanes}


def _offset(nexts: Mapping[Lane, int]) -> dict[str, Any]:
    offset: dict[str, Any] = {}
    for lane, following in nexts.items():
        if lane.partition == NOT_PARTITIONED:
            offset[lane.topic] = {_SHARD: following}
        else:
            offset.setdefault(lane.topic, {_SHARD: {}})[_SHARD][str(lane.partition)] = following
    return offset


def _known(offset: Mapping[str, Any], lane: Lane) -> bool:
    """Whether a checkpoint has read of a lane already."""
    found = offset.get(lane.topic, {}).get(_SHARD)
    return str(lane.partition) in found if isinstance(found, dict) else found is not None


def _next(offset: Mapping[str, Any], lane: Lane) -> int:
    if lane.topic not in offset:
        return FIRST
    found = offset[lane.topic][_SHARD]
    if isinstance(found, dict) and lane.partition != NOT_PARTITIONED:
        return int(found.get(str(lane.partition), FIRST))
    if isinstance(found, dict):
        raise ValidationError(
            f"option assign: the checkpoint has offsets of single partitions of topic {lane.topic!r}, and this stream "
            "reads the topic as a whole: begin with a new checkpoint"
        )
    return int(found)


def _limited(logs: Logs, after: Mapping[Lane, int], upto: Mapping[Lane, int], most: int) -> dict[Lane, int]:
    """Ends of ranges that hold at most so many events together, as evenly as there are events."""
    if len(upto) == 1:
        parts = [most]
    else:
        parts = shares([logs.waiting(lane, after[lane], upto[lane], most) for lane in upto], most)
    return {
        lane: (logs.offset_of_nth(lane, after[lane], upto[lane], part) or upto[lane]) if part else after[lane]
        for lane, part in zip(upto, parts, strict=True)
    }
