"""Publishing what an asset computed, once, and with its origin in every event.

One way for all forms: events are staged under an attempt that nobody reads, then one transaction records the
publication as its writer's and moves them into the buffer. A writer that is recorded publishes no more, so what repeats
a publication, be it Spark's, Dagster's or a user's doing, changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import dagster as dg
from psycopg.rows import tuple_row

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.lineage import ExecutionContext, Origin, step_of
from eventsql_orchestration.dagster.metadata import (
    PUBLISHED_AS,
    PUBLISHED_EVENTS,
    PUBLISHED_FIRST,
    PUBLISHED_LAST,
    PUBLISHED_RUN,
    PUBLISHED_TO,
    PUBLISHED_TOPIC,
    PUBLISHED_TRACE,
    trace_command,
)
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.topics import topic_key
from eventsql_orchestration.database import Queries
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.spark import FORMAT, eventsql_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LINKS: Final = (PUBLISHED_RUN, PUBLISHED_AS, PUBLISHED_TO, PUBLISHED_TRACE)

PUBLISHED: Final = frozenset({PUBLISHED_TOPIC, PUBLISHED_EVENTS, PUBLISHED_FIRST, PUBLISHED_LAST, *_LINKS})

TRANSFER_TIMEOUT: Final = 5.0
"""Seconds to wait for another transfer to give the published events their offsets, which only metadata asks for."""


@dataclass(frozen=True, slots=True)
class Published:
    """What was published to a topic; the offsets of its first and last event are None where they are not known yet.

    `run_id` and `asset` are those that the events name, and `repeated` whether they had been published before.
    """

    topic: str
    events: int
    first: int | None
    last: int | None
    run_id: str
    asset: str | None = None
    repeated: bool = False

    def metadata(self) -> dict[str, Any]:
        """For a materialization. Other events may lie between the first and the last."""
        metadata: dict[str, Any] = {
            PUBLISHED_TOPIC: self.topic,
            PUBLISHED_EVENTS: self.events,
            PUBLISHED_RUN: dg.MetadataValue.dagster_run(self.run_id),
            PUBLISHED_TO: dg.MetadataValue.asset(topic_key(self.topic)),
        }
        if self.asset is not None:
            metadata[PUBLISHED_AS] = self.asset
        if self.first is not None and self.last is not None:
            metadata[PUBLISHED_FIRST] = self.first
            metadata[PUBLISHED_LAST] = self.last
            metadata[PUBLISHED_TRACE] = trace_command(self.topic, self.last)
        return metadata

    def __str__(self) -> str:
        if self.repeated:
            return (
                f"{self.events} events for topic {self.topic} were published before, by run {self.run_id}: none is "
                "published again"
            )
        return f"published {self.events} events to topic {self.topic}"


def publish_events(
    context: ExecutionContext,
    events: object,
    *,
    eventsql: EventSQLResource,
    topic: str,
    claim: Claim | None = None,
    batch: int = 0,
) -> dict[str, Any]:
    """Publish what an asset computed, in one transaction; gives metadata for the materialization.

    `events` is a DataFrame of Spark or pandas, an Arrow table or RecordBatchReader, with a column `value` and, as
    wanted, `key`, `partition` and `headers`, or an iterable of publications or of mappings. Each event's metadata names
    the run, the asset and its partition. With `claim` the claim is committed in the same transaction: consumed and
    published exactly once. Without one, each step publishes once per run, partition, topic and `batch`, however often
    it is retried or the run re-executed: a second call in it for the same topic needs another `batch`.

    The events are transferred at once, so that the metadata can say their offsets. Raises `ClaimLostError`,
    `TopicNotFoundError`, `ValidationError` or `DatabaseError`; then nothing was published.
    """
    output = f"step {step_of(context)}"
    published = publish(
        Origin.of(context), events, eventsql=eventsql, topic=topic, claim=claim, batch=batch, output=output
    )
    context.log.info("%s", published)
    return published.metadata()


def publish_dataframe(
    context: ExecutionContext,
    dataframe: DataFrame,
    *,
    eventsql: EventSQLResource,
    topic: str,
    claim: Claim | None = None,
    batch: int = 0,
) -> dict[str, Any]:
    """`publish_events` for a DataFrame of Spark."""
    return publish_events(context, dataframe, eventsql=eventsql, topic=topic, claim=claim, batch=batch)


def publish(
    origin: Origin,
    value: object,
    *,
    eventsql: EventSQLResource,
    topic: str,
    claim: Claim | None = None,
    batch: int = 0,
    output: str | None = None,
) -> Published:
    """Publish what an asset computed: any of the forms of `frames.event_batches`, or a DataFrame of Spark.

    Once for each asset, partition, topic, `output` and `batch` of a run and its re-executions, or of a `claim`. Raises
    as `publish_events`.
    """
    from eventsql_orchestration.dagster.frames import is_spark_frame  # noqa: PLC0415 - pyarrow takes 0.2 s to load

    platform = eventsql.platform
    platform.registry.topic(topic)
    writer = origin.writer(topic, claim=None if claim is None else claim.id, output=output)
    publications = _Publications(platform, topic)
    # Whoever has a claim must hear what became of it, published before or not.
    repeated = claim is None and publications.find(writer, batch) is not None
    if not repeated:
        write = _Write(eventsql, topic, origin.metadata(), writer, batch, None if claim is None else claim.id)
        if is_spark_frame(type(value)):
            _write_frame(value, write)
        else:
            repeated = not _stage_and_publish(value, write)
    return publications.outcome(writer, batch, origin, repeated=repeated)


@dataclass(frozen=True, slots=True)
class _Write:
    """What a publication is written as."""

    eventsql: EventSQLResource
    topic: str
    headers: Mapping[str, str]
    writer: str
    batch: int
    claim: int | None

    def options(self) -> dict[str, str]:
        """For the data source of Spark."""
        options = {
            **self.eventsql.spark_options(),
            "topic": self.topic,
            "writerId": self.writer,
            "batchId": str(self.batch),
            "headers": json.dumps(dict(self.headers)),
        }
        return options if self.claim is None else {**options, "claim": str(self.claim)}


def _write_frame(frame: Any, write: _Write) -> None:
    try:
        frame.write.format(FORMAT).mode("append").options(**write.options()).save()
    except Exception as error:
        found = eventsql_error(error)
        if found is None:
            raise
        raise found from error


def _stage_and_publish(value: object, write: _Write) -> bool:
    """What the tasks and the driver of a Spark write do, here; False when it had been published before."""
    # These load Arrow's drivers.
    from eventsql_orchestration.dagster.frames import event_batches  # noqa: PLC0415
    from eventsql_orchestration.spark.publication import Publications  # noqa: PLC0415
    from eventsql_orchestration.spark.staging import Encoder, stage  # noqa: PLC0415

    batches = event_batches(value, write.topic)
    source = write.eventsql.source()
    with Publications(source) as publications:
        hold = None if write.claim is None else publications.hold(write.claim)
        encoder = Encoder(publications.partitions(write.topic), write.topic, write.headers)
        attempt = stage(source, encoder, batches)
        try:
            return publications.publish(write.writer, write.batch, [attempt], hold)
        except BaseException:
            publications.discard([attempt])
            raise


class _Publications:
    """Finds a publication to a topic again, and its events in the log."""

    def __init__(self, platform: EventSQL, topic: str) -> None:
        self._platform = platform
        self._topic = topic
        self._queries = Queries("lineage", platform.database.schema)
        self._seek = Queries("seek", platform.database.schema)

    def find(self, writer: str, batch: int) -> tuple[int, datetime] | None:
        """How many events a writer published with a batch, and when; None where it did not yet."""
        with self._platform.database.connection() as connection:
            row = (
                connection.cursor(row_factory=tuple_row)
                .execute(self._queries("publication"), {"writer": writer, "batch": batch})
                .fetchone()
            )
        return None if row is None else (row[0], row[1])

    def outcome(self, writer: str, batch: int, origin: Origin, *, repeated: bool) -> Published:
        """What has become of a publication, with the offsets that the transfer gives its events."""
        found = self.find(writer, batch)
        if found is None or not found[0]:
            return Published(self._topic, 0, None, None, origin.run_id, origin.asset, repeated)
        events, at = found
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        while True:
            self._platform.transfer.run_once([self._topic])
            count, first, last, run = self._offsets(events, at, origin)
            if count >= events:
                return Published(self._topic, events, first, last, run or origin.run_id, origin.asset, repeated)
            if time.monotonic() >= deadline:
                return Published(self._topic, events, None, None, run or origin.run_id, origin.asset, repeated)
            time.sleep(0.1)

    def _offsets(self, events: int, at: datetime, origin: Origin) -> tuple[int, int | None, int | None, str | None]:
        with self._platform.database.connection() as connection:
            cursor = connection.cursor(row_factory=tuple_row)
            # Events enter the log after they were published.
            before = cursor.execute(self._seek("before_time", topic=self._topic), {"time": at}).fetchone()
            found = cursor.execute(
                self._queries("published", topic=self._topic),
                {
                    "after": 0 if before is None else before[0],
                    "at": at,
                    "asset": origin.asset,
                    "partition": origin.partition,
                    "events": events,
                },
            ).fetchone()
        assert found is not None
        count, first, last, run = found
        return count, first, last, run


def add_up(published: Iterable[Mapping[str, Any]], topic: str) -> dict[str, Any]:
    """The metadata of several publications to a topic as those of one."""
    mine = [metadata for metadata in published if metadata.get(PUBLISHED_TOPIC) == topic]
    if not mine:
        return {}
    firsts = [metadata[PUBLISHED_FIRST] for metadata in mine if PUBLISHED_FIRST in metadata]
    lasts = [metadata[PUBLISHED_LAST] for metadata in mine if PUBLISHED_LAST in metadata]
    offsets = {PUBLISHED_FIRST: min(firsts), PUBLISHED_LAST: max(lasts)} if firsts and lasts else {}
    return {
        PUBLISHED_TOPIC: topic,
        PUBLISHED_EVENTS: sum(int(metadata.get(PUBLISHED_EVENTS, 0)) for metadata in mine),
        **offsets,
        # Those of the last: all are of one run and one topic.
        **{name: metadata[name] for metadata in mine for name in _LINKS if name in metadata},
    }


def leave_out(metadata: Mapping[str, Any], topics: Collection[str]) -> dict[str, Any]:
    """Metadata without what it says of a publication to one of `topics`."""
    if metadata.get(PUBLISHED_TOPIC) not in topics:
        return dict(metadata)
    return {name: value for name, value in metadata.items() if name not in PUBLISHED}
