"""Writing events: the tasks stage them, the driver publishes them in one transaction."""

# ruff: noqa: N803 - the parameters have Spark's names

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from eventsql_orchestration.errors import ConfigurationError, PublicationUnfinishedError, ValidationError
from eventsql_orchestration.spark.options import WriteOptions
from eventsql_orchestration.spark.staging import Attempt, Place, stage

if TYPE_CHECKING:
    from eventsql_orchestration.spark.ledger import ClaimHold
    from eventsql_orchestration.spark.publication import Publications

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
                f"column {column.name!r} has no place in an event: write {', '.join(_COLUMNS)}, the rest within value"
            )
        if column.dataType.simpleString() not in accepted:
            raise ValidationError(
                f"column {column.name!r} must be {' or '.join(accepted)}, not {column.dataType.simpleString()}"
            )
    names = schema.fieldNames()
    if "value" not in names:
        raise ValidationError("column 'value' is missing: it holds the event")
    if topic is None and "topic" not in names:
        raise ConfigurationError("option topic is missing, and so is a column 'topic': one of them names the topic")


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver: its attempt, and the streaming query that it belongs to."""

    attempt: Attempt
    query: str | None


class _Writing:
    """What a batch and a stream have in common; pickled into the tasks."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool, plan: bool = True) -> None:
        """Without `plan`, only for what is left when tasks have staged: whatever it asked of a database that is down
        now would hide why a commit has failed.
        """
        if overwrite:
            raise ConfigurationError("mode overwrite is not possible, a topic only grows: take mode append")
        check_schema(schema, topic=options.topic)
        self._options = options
        self._places: tuple[Place, ...] = ()
        self._claim: ClaimHold | None = None
        if plan:
            with self._publications() as publications:
                self._places = publications.places(options.topic, options.headers)
                self._claim = None if options.claim is None else publications.hold(options.claim, options.claim_shard)

    def _publications(self) -> Publications:
        # Not for the tasks, which import this module too: the database floor loads longer than they stage a few events.
        from eventsql_orchestration.spark.publication import Publications  # noqa: PLC0415

        return Publications(self._options.source)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY_ID)
        return Staged(stage(self._places, iterator), query)

    def _publish(self, writer: str, batch: int, messages: Sequence[Staged], *, replayed: bool = False) -> None:
        attempts = [message.attempt for message in messages]
        with self._publications() as publications:
            publications.publish(writer, batch, attempts, self._claim, replayed=replayed)

    def _discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        with self._publications() as publications:
            publications.discard([message.attempt for message in _staged(messages)])


class BatchWriter(_Writing, DataSourceArrowWriter):
    """Writes one batch of a writer; of a new writer where none is named."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self._writer = options.writer

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        # Not for the tasks, which import this module too.
        from eventsql_orchestration.spark.ledger import unnamed  # noqa: PLC0415

        try:
            self._publish(self._writer or unnamed(), self._options.batch, _staged(messages))
        except PublicationUnfinishedError as error:
            if self._options.writer is not None:
                raise
            # The same write again would be another writer's, and publish all of it twice; a transfer finishes this one.
            logger.warning("%s", error)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Writes each batch of a stream. The writer is the streaming query, whose id lives as long as its checkpoint."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # Spark commits with another instance than the one that was planned with: only the messages know the query.
        staged = _staged(messages)
        writer = self._options.writer or next((message.query for message in staged if message.query), None)
        if writer is not None:
            self._publish(writer, batchId, staged, replayed=True)
        elif any(message.attempt.events for message in staged):
            raise ConfigurationError("option writerId is missing: Spark does not say which streaming query this is")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002 - Spark gives it
        self._discard(messages)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    # A task that failed has no message.
    return [message for message in messages if isinstance(message, Staged)]
