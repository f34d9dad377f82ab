"""Reading topics as streams: offsets, progress and limits."""

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
from eventsql_orchestration.spark.offset_bounds import FIRST
from eventsql_orchestration.spark.ranges import shares
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.reader import Reading
from eventsql_orchestration.spark.shards import ALONE, naming

if TYPE_CHECKING:
    from eventsql_orchestration.spark.log_planner import Extent, TopicPartition
    from eventsql_orchestration.spark.multi_log_planner import AllLogs, Log
    from eventsql_orchestration.spark.progress import StreamProgress


CREATED: Final = "created at"
"""The key of the times when the topics were created, beside the topics in a stream's offset. No topic has this name."""


class StreamReader(Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. A stream's offset is the next offset to read, as in the option.

    The checkpoint has {topic: {shard: offset}}, or {topic: {shard: {partition: offset}}} if partitions have their own
    offsets, and under `CREATED` {topic: {shard: time}}. A database that is not a shard is called "0".

    `commit` and `latestOffset` both write a consumer's progress. Spark does not call `commit` after the last batch of
    AvailableNow or after a restart, but it calls `latestOffset` with a start up to which everything is processed.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._opened: AllLogs | None = None
        self._consuming: dict[str | None, StreamProgress] = {}
        self._last: dict[TopicPartition, int] | None = None
        self._planned: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        logs, progress = self._open(), self._progress()
        logs.check_bounds()
        if progress and not self._options.starting.given:
            return self._offset({tp: max(progress[tp.shard].start(tp), FIRST) for tp in logs.topic_partitions})
        return self._offset(logs.starts(logs.extents()))

    def getDefaultReadLimit(self) -> ReadLimit:
        most, least = self._options.max_events, len(self._open().topic_partitions)
        if most is None:
            return ReadAllAvailable()
        if most < least:
            raise ValidationError(
                f"option maxOffsetsPerTrigger: {most} is too few for {least} topics and partitions with an offset each"
            )
        return ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._settled()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        logs = self._open()
        logs.refresh()
        starts = self._nexts(start)
        self._write_progress(starts)

        held_back, extents = logs.held_back(starts), logs.extents()
        _check_reached(starts, extents)
        after = {tp: first - 1 for tp, first in starts.items()}
        upto: dict[TopicPartition, int] = {}
        for tp in starts:
            # A partition that is newer than the trigger has no event from before it.
            last = extents[tp.log].settled if self._last is None else self._last.get(tp, 0)
            upto[tp] = after[tp] if tp.log in held_back else max(last, after[tp])

        upto = _within_layouts(logs, after, upto)
        if isinstance(limit, ReadMaxRows):
            upto = _limited(logs, after, upto, limit.max_rows)
        self._planned = self._offset({tp: last + 1 for tp, last in upto.items()})
        return self._planned

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._offset({tp: settled + 1 for tp, settled in self._settled().items()})

    def _settled(self) -> dict[TopicPartition, int]:
        logs = self._open()
        extents = logs.extents()
        return {tp: extents[tp.log].settled for tp in logs.topic_partitions}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        from eventsql_orchestration.spark.input_splits import Wanted, even_splits  # noqa: PLC0415 - see `_open`

        # After a restart, this may be the first call.
        every, starts, ends = self._open(), self._nexts(start), self._nexts(end)
        if end != self._planned:
            # An earlier run has planned this batch, maybe on another server.
            _check_reached(ends, every.extents())
        progress = self._progress()
        wanted = []
        for logs in every:
            filters = progress[logs.name].filters if progress else {}
            for tp in logs.topic_partitions:
                if starts[tp] < ends[tp]:
                    offsets = OffsetRange(tp.topic, tp.partition, starts[tp] - 1, ends[tp] - 1)
                    rows = Conditions().with_consumer(filters.get(tp.topic), self._options.source.schema).rows
                    # A partition that the checkpoint does not have yet is read from its beginning.
                    wanted.append(Wanted(logs, offsets, rows, complete=self._found(start, tp) is not None))
        return [InputPartition(pieces) for pieces in even_splits(self._options, wanted)]

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.consumer is not None:
            # A topic that was created again since the batch was planned has another consumer of this name.
            self._open().refresh()
            self._write_progress(self._nexts(end))

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _open(self) -> AllLogs:
        if self._opened is None:
            # Tasks import this module, too, and must not wait for the database floor to load.
            from eventsql_orchestration.spark.multi_log_planner import AllLogs  # noqa: PLC0415

            self._opened = AllLogs(self._options)
        return self._opened

    def _progress(self) -> Mapping[str | None, StreamProgress]:
        """The consumer's progress on each shard; empty without a consumer."""
        if not self._consuming and self._options.consumer is not None:
            from eventsql_orchestration.spark.progress import StreamProgress  # noqa: PLC0415 - see `_open`

            for logs in self._open():
                with naming(logs.shard):
                    self._consuming[logs.name] = StreamProgress(logs, self._options.consumer)
        return self._consuming

    def _write_progress(self, nexts: Mapping[TopicPartition, int]) -> None:
        progress = self._progress()
        for tp, following in nexts.items() if progress else ():
            with naming(self._open().of(tp).shard):
                progress[tp.shard].write(tp, following - 1)

    # The checkpoint's offsets

    def _offset(self, nexts: Mapping[TopicPartition, int]) -> dict[str, Any]:
        offset: dict[str, Any] = {}
        created: dict[str, dict[str, str]] = {}
        for tp, following in nexts.items():
            shards, mark = offset.setdefault(tp.topic, {}), self._open().marks(tp)[0]
            if tp.partition == NOT_PARTITIONED:
                shards[mark] = following
            else:
                shards.setdefault(mark, {})[str(tp.partition)] = following
            created.setdefault(tp.topic, {})[mark] = self._open().of(tp).created[tp.topic]
        return {**offset, CREATED: created}

    def _nexts(self, checkpoint: Mapping[str, Any]) -> dict[TopicPartition, int]:
        """The next offset of each topic partition; the first offset if the checkpoint has none."""
        offset = {topic: shards for topic, shards in checkpoint.items() if topic != CREATED}
        if gone := sorted(offset.keys() - self._options.topics.keys()):
            raise ValidationError(
                f"option subscribe: the checkpoint has offsets of {', '.join(gone)}, which this stream does not read: "
                "begin with a new checkpoint"
            )
        topic_partitions = self._open().topic_partitions
        known = {mark for tp in topic_partitions for mark in self._open().marks(tp)}
        if gone := sorted({shard for shards in offset.values() for shard in shards} - known):
            raise ValidationError(
                f"option dsn: the checkpoint has offsets of {_called(gone)}, which no URL names: give the URLs of all "
                "shards, or begin with a new checkpoint"
            )
        self._check_partitions(offset)
        self._check_created(checkpoint.get(CREATED, {}))
        return {tp: FIRST if (found := self._found(offset, tp)) is None else found for tp in topic_partitions}

    def _check_partitions(self, offset: Mapping[str, Any]) -> None:
        """Raise `ValidationError` if the checkpoint has the offset of a partition that this stream does not read.

        The next offset would lack this partition, and a later stream with the partition would read it from its
        beginning. That is right only for a partition that the topic has lost, with all of its events.
        """
        logs = self._open()
        known = {(tp.topic, mark, str(tp.partition)) for tp in logs.topic_partitions for mark in logs.marks(tp)}
        gone = {
            f"topic {topic!r} partition {partition}"
            for topic, shards in offset.items()
            for mark, found in shards.items()
            if isinstance(found, dict) and (topic, mark, str(NOT_PARTITIONED)) not in known
            for partition in found
            if (topic, mark, partition) not in known and any(each.has_partition(topic, int(partition)) for each in logs)
        }
        if gone:
            raise ValidationError(
                f"option assign: the checkpoint has offsets of {', '.join(sorted(gone))}, which this stream does not "
                "read: begin with a new checkpoint"
            )

    def _check_created(self, created: Mapping[str, Any]) -> None:
        """Raise `EventSQLError` if a topic was created again: the offsets of the checkpoint are of another log.

        A topic or a shard that is new to the stream has no time yet.
        """
        for tp in self._open().topic_partitions:
            before, now = self._of_shard(created, tp), self._open().of(tp).created[tp.topic]
            if before not in (None, now):
                raise EventSQLError(
                    f"{tp.whole} was created again at {now}, and this stream has read the topic that was created at "
                    f"{before}: begin with a new checkpoint"
                )

    def _of_shard(self, found: Mapping[str, Any], tp: TopicPartition) -> Any:
        """What the checkpoint has for a topic on its shard, if anything."""
        shards = found.get(tp.topic, {})
        return next((shards[mark] for mark in self._open().marks(tp) if mark in shards), None)

    def _found(self, offset: Mapping[str, Any], tp: TopicPartition) -> int | None:
        """The checkpoint's next offset of a topic partition, if it has one."""
        found = self._of_shard(offset, tp)
        if isinstance(found, dict):
            if tp.partition == NOT_PARTITIONED:
                raise ValidationError(
                    f"option assign: the checkpoint has offsets of single partitions of {tp.whole}, but this stream "
                    "reads the whole topic: begin with a new checkpoint"
                )
            found = found.get(str(tp.partition))
        return None if found is None else int(found)


def _called(marks: Sequence[str]) -> str:
    return ", ".join("a database that was not a shard" if mark == ALONE else f"shard {mark!r}" for mark in marks)


def _check_reached(nexts: Mapping[TopicPartition, int], extents: Mapping[Log, Extent]) -> None:
    """Raise `EventSQLError` if a log is shorter than the checkpoint's offset."""
    for tp, following in nexts.items():
        extent = extents[tp.log]
        if following - 1 > extent.newest:
            raise EventSQLError(
                f"{tp.whole} ends at offset {extent.end}, but the checkpoint is at offset {following}. If the topic "
                "was recreated or restored, begin with a new checkpoint. If this server is a standby that is behind, "
                "start again"
            )


def _within_layouts(
    logs: AllLogs, after: Mapping[TopicPartition, int], upto: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """The end of each range, so that no partition gives later events of a key that another partition still has.

    The number of partitions may have changed: then a key has earlier events in another partition.
    """
    ends = dict(upto)
    for log in dict.fromkeys(tp.log for tp in upto if tp.partition != NOT_PARTITIONED):
        read = {tp: offset for tp, offset in after.items() if tp.log == log}
        last = logs.of(next(iter(read))).end_of_layout(log[1], read)
        ends |= {tp: max(offset, min(upto[tp], last)) for tp, offset in read.items()}
    return ends


def _limited(
    logs: AllLogs, after: Mapping[TopicPartition, int], upto: Mapping[TopicPartition, int], most: int
) -> dict[TopicPartition, int]:
    """The end of each range, so that all ranges together hold at most `most` events, as evenly as possible."""
    waiting, parts = [most], [most]
    if len(upto) > 1:
        waiting = [logs.of(tp).waiting(tp, after[tp], upto[tp], most) for tp in upto]
        parts = shares(waiting, most)
    ends: dict[TopicPartition, int] = {}
    for tp, left, part in zip(upto, waiting, parts, strict=True):
        if part:
            ends[tp] = logs.of(tp).offset_of_nth(tp, after[tp], upto[tp], part) or upto[tp]
        else:
            # A range without events is passed: retention may drop its segments.
            ends[tp] = after[tp] if left else upto[tp]
    return ends
