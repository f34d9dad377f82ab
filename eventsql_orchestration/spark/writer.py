"""Writing events: tasks stage them, and the driver publishes them in one transaction."""

# ruff: noqa: N803 - the parameters have Spark's names

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from eventsql_orchestration.errors import ConfigurationError, PublicationUnfinishedError, ValidationError
from eventsql_orchestration.spark.options import WriteOptions
from eventsql_orchestration.spark.staging import QUERY_IS_WRITER, Attempt, ClaimHold, StreamBatch, WriteTarget, stage
from eventsql_orchestration.validation import MAX_BIGINT

if TYPE_CHECKING:
    from eventsql_orchestration.spark.commit_protocol import Publications

logger = logging.getLogger(__name__)

_COLUMNS: Final = {
    "value": ("binary", "string"),
    "key": ("string",),
    "topic": ("string",),
    "partition": ("int", "smallint", "tinyint", "bigint"),
    "headers": ("map<string,string>",),
}

_GIVEN_BY_THE_LOG: Final = ("offset", "timestamp", "shard")

_QUERY_ID: Final = "sql.streaming.queryId"
"""A property of a streaming query's thread and its tasks. Spark Connect runs `foreachBatch` in another thread."""

_OF_A_STREAM: Final = "spark.sql.streaming.internal.stateStore.partitions"
"""A setting that Spark gives the session of each streaming query, where `foreachBatch` writes too."""


def check_schema(schema: StructType, *, topic: str | None) -> None:
    """Raises `ValidationError` that names the first column that cannot be written, or that is missing.

    `topic` is the option of that name.
    """
    for column in schema.fields:
        if column.name in _GIVEN_BY_THE_LOG:
            continue
        accepted = _COLUMNS.get(column.name)
        if accepted is None:
            raise ValidationError(
                f"column {column.name!r} is not a part of an event: write {', '.join(_COLUMNS)}, the rest within value"
            )
        if column.dataType.simpleString() not in accepted:
            raise ValidationError(
                f"column {column.name!r} must be {' or '.join(accepted)}, not {column.dataType.simpleString()}"
            )
    names = schema.fieldNames()
    for name in _COLUMNS:
        # A join has such columns.
        if names.count(name) > 1:
            raise ValidationError(f"column {name!r} occurs twice: keep one of them")
    if "value" not in names:
        raise ValidationError("column 'value' is missing: write the event's bytes or text to it")
    if topic is None and "topic" not in names:
        raise ConfigurationError("there is neither an option nor a column 'topic': name the topic with one of them")


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """A task's message to the driver: its attempt, its streaming query, and a checksum of its rows if one is needed.

    `query` is None outside of streams, and if Spark does not name the query.
    """

    attempt: Attempt
    query: str | None
    checksum: int | None = None


class _Writing:
    """The common part of a batch and a stream writer. Spark pickles it into the tasks."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool, plan: bool = True) -> None:
        """Without `plan`, it only commits or aborts: asking a database that is down would hide an earlier error."""
        if overwrite:
            raise ConfigurationError("mode overwrite is not possible, because a topic only grows: use mode append")
        check_schema(schema, topic=options.topic)
        self._options = options
        self._targets: tuple[WriteTarget, ...] = ()
        self._claim: ClaimHold | None = None
        if plan:
            with self._publications() as publications:
                self._targets = publications.write_targets(options.topic, options.headers)
                self._claim = None if options.claim is None else publications.hold(options.claim, options.claim_shard)

    def _publications(self) -> Publications:
        # Tasks import this module, too, and must not wait for the database floor to load.
        from eventsql_orchestration.spark.commit_protocol import Publications  # noqa: PLC0415

        return Publications(self._options.source)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        query, streaming = _stream_of_task()
        if self._options.writer is None or not streaming:
            return Staged(stage(self._targets, iterator), query, None)

        # A writer with a name may outlive the checkpoint of its stream.
        checksums: list[int] = []
        return Staged(stage(self._targets, _summed(iterator, checksums)), query, sum(checksums))

    def _publish(self, writer: str | None, batch: int, messages: Sequence[Staged], stream: StreamBatch | None) -> None:
        attempts = [message.attempt for message in messages]
        with self._publications() as publications:
            publications.publish(writer, batch, attempts, self._claim, stream=stream)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: ARG002 - Spark gives it
        with self._publications() as publications:
            publications.discard([message.attempt for message in _staged(messages)])

    def _stream(self, messages: Sequence[Staged]) -> StreamBatch | None:
        """The stream of a batch, which only the messages know: Spark plans and commits with different instances."""
        query = next((message.query for message in messages if message.query), None)
        checksums = [message.checksum for message in messages if message.checksum is not None]
        if query is None and not checksums:
            return None
        return StreamBatch(query, sum(checksums) % MAX_BIGINT)


class BatchWriter(_Writing, DataSourceArrowWriter):
    """Writes one batch of a writer, or of a new writer if the options name none."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        named = self._options.writer is not None and self._options.claim is None
        if named and self._options.batch is None and _stream_of_task()[1]:
            # Each batch would be a repetition of batch 0.
            raise ConfigurationError("option batchId is missing: within foreachBatch, give the number of the batch")
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        staged = _staged(messages)
        try:
            # Within foreachBatch, the batch is a stream's.
            self._publish(self._options.writer, self._options.batch or 0, staged, self._stream(staged))
        except PublicationUnfinishedError as error:
            if self._options.writer is not None:
                raise
            # Repeating the write would publish everything twice, as another writer. A transfer finishes this write.
            logger.warning("%s", error)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Writes each batch of a stream. The default writer is the streaming query, whose id lives in its checkpoint.

    A writer with a name may outlive the checkpoint. Batches of another query are then compared by their checksums.
    """

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        staged = _staged(messages)
        stream = self._stream(staged)
        if self._options.writer is not None:
            self._publish(self._options.writer, batchId, staged, stream or StreamBatch())
        elif stream is not None and stream.query is not None:
            self._publish(stream.query, batchId, staged, QUERY_IS_WRITER)
        elif any(message.attempt.events for message in staged):
            raise ConfigurationError(
                "option writerId is missing: give it, because Spark does not tell the query's id here"
            )


def _stream_of_task() -> tuple[str | None, bool]:
    """The streaming query of this task, if Spark names it, and whether the task is of a stream."""
    context = TaskContext.get()
    query, setting = (None if context is None else context.getLocalProperty(name) for name in (_QUERY_ID, _OF_A_STREAM))
    return query, (query, setting) != (None, None)


def _summed(batches: Iterable[pa.RecordBatch], checksums: list[int]) -> Iterator[pa.RecordBatch]:
    """The same batches; adds the checksum of each to `checksums`."""
    for batch in batches:
        checksums.append(zlib.crc32(memoryview(batch.serialize())))
        yield batch


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    # A failed task has no message.
    return [message for message in messages if isinstance(message, Staged)]
