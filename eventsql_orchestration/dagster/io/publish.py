"""Publishing the output of an asset, once, with its origin in every event.

All forms of output are published alike: events are staged under an attempt that nobody reads, then one transaction
records the publication under its writer and moves the events into the buffer. A recorded writer does not publish again,
so a repetition by Spark, Dagster or a user changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from eventsql_orchestration import Shard
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster.lineage.origin import ExecutionContext, Origin, step_of
from eventsql_orchestration.dagster.lineage.published import Published, Span
from eventsql_orchestration.dagster.register import require_topic
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.orchestration.shards import rows_of
from eventsql_orchestration.publishing.two_phase_participant import TwoPhaseParticipant
from eventsql_orchestration.shards.shard_state import ShardStore
from eventsql_orchestration.spark import FORMAT, eventsql_error
from eventsql_orchestration.storage.ranges import LogRanges
from eventsql_orchestration.storage.ranges import Publication as LoggedPublication
from eventsql_orchestration.storage.reading import LogReader

TRANSFER_TIMEOUT: Final = 5.0
"""Seconds to wait until a transfer has given the published events their offsets, which only metadata needs."""


def publish_events(
    context: ExecutionContext,
    events: object,
    *,
    eventsql: EventSQLResource,
    topic: str,
    claim: Claim | None = None,
    batch: int = 0,
) -> dict[str, Any]:
    """Publish the output of an asset in one transaction; gives metadata for the materialization.

    `events` is a DataFrame of Spark or pandas, an Arrow table or RecordBatchReader, with a column `value` and
    optionally `key`, `partition` and `headers`, or an iterable of publications or of mappings. The metadata of each
    event names the run, the asset and its partition. `claim` is committed in the same transaction, so its events are
    consumed and the output is published exactly once. Without a claim, each step publishes once per run, partition,
    topic and `batch`, also when it is retried or its run re-executed: a second call in a step for the same topic needs
    another `batch`.

    The events are transferred at once, so that the metadata can say their offsets. Raises `ClaimLostError`,
    `TopicNotFoundError`, `ValidationError` or `DatabaseError`; then nothing was published.
    """
    output = f"step {step_of(context)}"
    published = publish(
        Origin.of(context), events, eventsql=eventsql, topic=topic, claim=claim, batch=batch, output=output
    )
    context.log.info("%s", published)
    return published.metadata()


publish_dataframe = publish_events
"""`publish_events`, by the name that says what most Spark assets publish."""


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
    from eventsql_orchestration.dagster.io.frames import is_spark_frame  # noqa: PLC0415 - pyarrow takes 0.2 s to load

    require_topic(eventsql.platform, topic)
    if claim is not None:
        origin = replace(origin, shard=claim.shard)
    writer = origin.writer(topic, claim=None if claim is None else claim.id, output=output)
    publications = _Publications(eventsql, topic, None if claim is None else claim.shard)
    # With a claim, go on even if it is recorded: the caller must learn whether the claim is committed or lost.
    repeated = claim is None and publications.is_finished(writer, batch)
    if not repeated:
        write = _Write(eventsql, topic, origin.metadata(), writer, batch, claim)
        if is_spark_frame(type(value)):
            write.write_frame(value)
        else:
            repeated = not write.stage_and_publish(value)
    return publications.outcome(writer, batch, origin, repeated=repeated)


@dataclass(frozen=True, slots=True)
class _Write:
    """The destination and the identity of a publication."""

    eventsql: EventSQLResource
    topic: str
    headers: Mapping[str, str]
    writer: str
    batch: int
    claim: Claim | None

    def write_frame(self, frame: Any) -> None:
        """Publish a DataFrame of Spark by the data source."""
        options = {
            **self.eventsql.spark_options(),
            "topic": self.topic,
            "writerId": self.writer,
            "batchId": str(self.batch),
            "headers": json.dumps(dict(self.headers)),
        }
        if self.claim is not None:
            options["claim"] = str(self.claim.id)
            if self.claim.shard is not None:
                options["claimShard"] = self.claim.shard
        try:
            frame.write.format(FORMAT).mode("append").options(**options).save()
        except Exception as error:
            found = eventsql_error(error)
            if found is None:
                raise
            raise found from error

    def stage_and_publish(self, value: object) -> bool:
        """Do in this process the work of a Spark write's tasks and driver. False if it had been published before."""
        # These load Arrow's drivers.
        from eventsql_orchestration.dagster.io.frames import event_batches  # noqa: PLC0415
        from eventsql_orchestration.spark.commit_protocol import Publications  # noqa: PLC0415
        from eventsql_orchestration.spark.staging import stage  # noqa: PLC0415

        batches = event_batches(value, self.topic)
        with Publications(self.eventsql.source()) as publications:
            hold = None if self.claim is None else publications.hold(self.claim.id, self.claim.shard)
            attempt = stage(publications.write_targets(self.topic, self.headers), batches)
            try:
                return publications.publish(self.writer, self.batch, [attempt], hold)
            except BaseException:
                publications.discard([attempt])
                raise


@dataclass(frozen=True, slots=True)
class _Portion:
    """The number of a publication's events on a shard, and the time when they were published."""

    shard: Shard
    events: int
    at: datetime


class _Publications:
    """Finds the record of a publication to a topic, and its events in the log."""

    def __init__(self, eventsql: EventSQLResource, topic: str, shard: str | None) -> None:
        """`shard` is the claim's shard, which has the publication's record. Without a claim, the first shard has it."""
        self._topic = topic
        self._shards = eventsql.shards
        self._alone = len(self._shards) == 1
        if shard is None and not self._alone:
            states = (ShardStore(each.database).state() for each in self._shards if each.name is not None)
            shard = next(states).first
        self._decider = eventsql.shard(shard)

    def find(self, writer: str, batch: int) -> tuple[int, datetime] | None:
        """The number of events in a writer's batch and the time of its publication; None if it is not published."""
        rows = rows_of(self._decider, "lineage", "publication", {"writer": writer, "batch": batch})
        return (rows[0][0], rows[0][1]) if rows else None

    def is_finished(self, writer: str, batch: int) -> bool:
        """Whether there is nothing left to publish."""
        if self.find(writer, batch) is None:
            return False
        left = () if self._alone else TwoPhaseParticipant(self._decider.database).announced()
        return not any((each.writer, each.batch) == (writer, batch) for each in left)

    def outcome(self, writer: str, batch: int, origin: Origin, *, repeated: bool) -> Published:
        """The result of a publication, with the offsets of its events if they are transferred in time."""
        found = self.find(writer, batch)
        if found is None or not found[0]:
            return Published(self._topic, 0, origin.run_id, origin.asset, repeated)
        events, at = found
        portions = self._portions(writer, batch, events, at)
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        while True:
            spans, run = [], None
            for portion in portions:
                portion.shard.transfer.run_once([self._topic])
                count, first, last, found_run = self._offsets(portion, origin)
                run = run or found_run
                if count >= portion.events and first is not None and last is not None:
                    spans.append(Span(portion.shard.name, first, last))
            published = Published(self._topic, events, run or origin.run_id, origin.asset, repeated)
            if len(spans) == len(portions):
                return replace(published, spans=tuple(spans))
            if time.monotonic() >= deadline:
                return published
            time.sleep(0.1)

    def _portions(self, writer: str, batch: int, events: int, at: datetime) -> list[_Portion]:
        if self._alone:
            return [_Portion(self._decider, events, at)]
        portions = []
        for shard in self._shards:
            if shard is not self._decider:
                named = {"decider": self._decider.name, "writer": writer, "batch": batch}
                rows = rows_of(shard, "two_phase", "published_part", named)
                portions += [_Portion(shard, row[0], row[1]) for row in rows]
        left = events - sum(portion.events for portion in portions)
        return [_Portion(self._decider, left, at), *portions] if left else portions

    def _offsets(self, portion: _Portion, origin: Origin) -> LoggedPublication:
        # Events enter the log after they were published.
        database = portion.shard.database
        with database.connection() as connection:
            before = LogReader(database.schema).before_time(connection, self._topic, portion.at)
            return LogRanges(database.schema).publication(
                connection, self._topic, after=before, at=portion.at, asset=origin.asset,
                run_partition=origin.partition, events=portion.events,
            )  # fmt: skip
