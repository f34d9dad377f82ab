"""Reading topics as streams: offsets, progress and limits."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from eventsql_orchestration.errors import EventSQLError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.spark.filters import Conditions
from eventsql_orchestration.spark.offset_bounds import FIRST
from eventsql_orchestration.spark.ranges import shares
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.reader import Reading
from eventsql_orchestration.spark.shards import ALONE, naming

if TYPE_CHECKING:
    from eventsql_orchestration.spark.log_planner import Lane
    from eventsql_orchestration.spark.multi_log_planner import AllLogs
    from eventsql_orchestration.spark.progress import StreamProgress


class StreamReader(Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. A stream's offset is the next offset to read, as in the option.

    The checkpoint has {topic: {shard: offset}}, or {topic: {shard: {partition: offset}}} if partitions have their own
    offsets. A database that is no shard is called "0".

    `commit` and `latestOffset` both write a consumer's progress. Spark does not call `commit` after the last batch of
    AvailableNow or after a restart, but it calls `latestOffset` with a start up to which everything is processed.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._opened: AllLogs | None = None
        self._consuming: dict[str | None, StreamProgress] = {}
        self._last: dict[Lane, int] | None = None

    def initialOffset(self) -> dict[str, Any]:
        logs, progress = self._open(), self._progress()
        logs.check_bounds()
        if progress and not self._options.starting.given:
            return self._offset({lane: max(progress[lane.shard].start(lane), FIRST) for lane in logs.lanes})
        return self._offset(logs.starts(logs.extents()))

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
        extents = logs.extents()
        self._last = {lane: extents[lane.log].settled for lane in logs.lanes}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        logs = self._open()
        logs.refresh()
        starts = self._nexts(start)
        self._write_progress(starts)
        held_back = logs.held_back(starts)
        extents = logs.extents()
        after = {lane: starts[lane] - 1 for lane in logs.lanes}
        upto: dict[Lane, int] = {}
        for lane in logs.lanes:
            extent = extents[lane.log]
            if after[lane] > extent.newest:
                raise EventSQLError(
                    f"{lane.whole} ends at offset {extent.end}, but this stream has read up to {starts[lane]}. The "
                    "topic was recreated or restored: begin with a new checkpoint"
                )
            # A partition that is newer than the trigger has no event from before it.
            last = extent.settled if self._last is None else self._last.get(lane, 0)
            upto[lane] = after[lane] if lane.log in held_back else max(last, after[lane])
        if isinstance(limit, ReadMaxRows):
            upto = _limited(logs, after, upto, limit.max_rows)
        return self._offset({lane: upto[lane] + 1 for lane in logs.lanes})

    def reportLatestOffset(self) -> dict[str, Any]:
        logs = self._open()
        extents = logs.extents()
        return self._offset({lane: extents[lane.log].settled + 1 for lane in logs.lanes})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        from eventsql_orchestration.spark.input_splits import Wanted  # noqa: PLC0415 - as in `Reading.logs`

        # After a restart, this may be the first call.
        every, starts, ends = self._open(), self._nexts(start), self._nexts(end)
        progress = self._progress()
        wanted = []
        for logs in every:
            filters = progress[logs.name].filters if progress else {}
            floors = {topic: logs.floor(topic) for topic in self._options.topics}
            for lane in logs.lanes:
                if ends[lane] <= starts[lane]:
                    continue
                floor = floors[lane.topic]
                if starts[lane] < floor and self._found(start, lane) is not None:
                    logs.lost(lane, starts[lane], floor)
                after = max(starts[lane], floor) - 1
                if after < ends[lane] - 1:
                    offsets = OffsetRange(lane.topic, lane.partition, after, ends[lane] - 1)
                    rows = Conditions().with_consumer(filters.get(lane.topic)).rows
                    wanted.append(Wanted(logs, offsets, rows))
        return self.splits(wanted)

    def commit(self, end: dict[str, Any]) -> None:
        self._write_progress(self._nexts(end))

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _open(self) -> AllLogs:
        if self._opened is None:
            self._opened = self.logs()
        return self._opened

    def _progress(self) -> Mapping[str | None, StreamProgress]:
        """The consumer's progress on each shard; empty without a consumer."""
        if not self._consuming and self._options.consumer is not None:
            # Tasks import this module, too; see `Reading.logs`.
            from eventsql_orchestration.spark.progress import StreamProgress  # noqa: PLC0415

            for logs in self._open():
                with naming(logs.shard):
                    self._consuming[logs.name] = StreamProgress(logs, self._options.consumer)
        return self._consuming

    def _write_progress(self, nexts: Mapping[Lane, int]) -> None:
        progress = self._progress()
        for lane, following in nexts.items() if progress else ():
            with naming(self._open().of(lane).shard):
                progress[lane.shard].write(lane, following - 1)

    # The checkpoint's offsets

    def _offset(self, nexts: Mapping[Lane, int]) -> dict[str, Any]:
        offset: dict[str, Any] = {}
        for lane, following in nexts.items():
            shards, mark = offset.setdefault(lane.topic, {}), self._open().marks(lane)[0]
            if lane.partition == NOT_PARTITIONED:
                shards[mark] = following
            else:
                shards.setdefault(mark, {})[str(lane.partition)] = following
        return offset

    def _nexts(self, offset: dict[str, Any]) -> dict[Lane, int]:
        """The next offset of each lane. The first offset for a lane that the checkpoint does not have."""
        if gone := sorted(offset.keys() - self._options.topics.keys()):
            raise ValidationError(
                f"option subscribe: the checkpoint has offsets of {', '.join(gone)}, which this stream does not read: "
                "begin with a new checkpoint"
            )
        lanes = self._open().lanes
        known = {mark for lane in lanes for mark in self._open().marks(lane)}
        if gone := sorted({shard for shards in offset.values() for shard in shards} - known):
            raise ValidationError(
                f"option dsn: the checkpoint has offsets of {_called(gone)}, and no URL leads there: give the URLs of "
                "all shards, or begin with a new checkpoint"
            )
        return {lane: FIRST if (found := self._found(offset, lane)) is None else found for lane in lanes}

    def _found(self, offset: Mapping[str, Any], lane: Lane) -> int | None:
        """The next offset of a lane; None if the checkpoint does not have the lane."""
        shards = offset.get(lane.topic, {})
        found = next((shards[mark] for mark in self._open().marks(lane) if mark in shards), None)
        if isinstance(found, dict):
            if lane.partition == NOT_PARTITIONED:
                raise ValidationError(
                    f"option assign: the checkpoint has offsets of single partitions of {lane.whole}, but this stream "
                    "reads the whole topic: begin with a new checkpoint"
                )
            found = found.get(str(lane.partition))
        return None if found is None else int(found)


def _called(marks: Sequence[str]) -> str:
    return ", ".join("a database that was no shard" if mark == ALONE else f"shard {mark!r}" for mark in marks)


def _limited(logs: AllLogs, after: Mapping[Lane, int], upto: Mapping[Lane, int], most: int) -> dict[Lane, int]:
    """The end of each lane's range, so that all ranges together hold at most `most` events, as evenly as possible."""
    if len(upto) == 1:
        parts = [most]
    else:
        parts = shares([logs.of(lane).waiting(lane, after[lane], upto[lane], most) for lane in upto], most)
    return {
        lane: (logs.of(lane).offset_of_nth(lane, after[lane], upto[lane], part) or upto[lane]) if part else after[lane]
        for lane, part in zip(upto, parts, strict=True)
    }
