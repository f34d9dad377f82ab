"""Publishing the output of a run, once, with its origin in every event.

All forms of output are published alike: events are staged under an attempt that nobody reads, then one transaction
records the publication under its writer and moves the events into the buffer. A recorded writer does not publish again,
so a repetition by Spark, an orchestrator or a user changes nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import psycopg

from eventsql_orchestration import Shard
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.orchestration.access import PlatformAccess
from eventsql_orchestration.orchestration.provenance import Provenance
from eventsql_orchestration.orchestration.shards import rows_of
from eventsql_orchestration.publishing.two_phase_participant import TwoPhaseParticipant
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.shards.shard_state import first_shard
from eventsql_orchestration.spark import FORMAT, eventsql_error
from eventsql_orchestration.storage.ranges import LoggedPublication, LogRanges
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.validation import counted

logger = logging.getLogger(__name__)

FIND_SECONDS: Final = 30.0
"""Seconds for which the record of a publication is looked for while the database cannot be reached."""

TRANSFER_TIMEOUT: Final = 5.0
"""Seconds to wait until a transfer has given the published events their offsets, which only metadata needs."""


@dataclass(frozen=True, slots=True)
class Span:
    """The offsets of the first and the last event that were published to a shard; None if there is one database."""

    shard: str | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Published:
    """A publication to a topic. `spans` is empty if nothing was published, and if the offsets are not known yet.

    The events name `run_id`, `asset` and `partition`. `repeated` says that they had been published before.
    """

    topic: str
    events: int
    run_id: str
    asset: str | None = None
    repeated: bool = False
    spans: tuple[Span, ...] = ()
    partition: str | None = None

    def __str__(self) -> str:
        if self.repeated:
            return f"run {self.run_id} had published the {counted(self.events, 'event')} for topic {self.topic} before"
        return f"published {counted(self.events, 'event')} to topic {self.topic}"


def publish(
    origin: Provenance,
    value: object,
    *,
    access: PlatformAccess,
    topic: str,
    claim: Claim | None = None,
    batch: int = 0,
    output: str | None = None,
) -> Published:
    """Publish the output of a run: any of the forms of `frames.event_batches`, or a DataFrame of Spark.

    It is published once for each asset, partition, topic, `output` and `batch` of a run and its repetitions, or of a
    `claim`. The claim is committed in the same transaction. Raises `ClaimLostError`, `TopicNotFoundError`,
    `ValidationError` or `DatabaseError`; then nothing was published.
    """
    from eventsql_orchestration.orchestration.frames import is_spark_frame  # noqa: PLC0415 - pyarrow takes 0.2 s to load

    if claim is not None:
        origin = replace(origin, shard=claim.shard)
    writer = origin.writer(topic, claim=None if claim is None else claim.id, output=output)
    write = _Write(access, topic, origin.metadata(), writer, batch, claim)
    record = _Record(write, origin)
    # With a claim, go on even if it is recorded: the caller must learn whether the claim is committed or lost.
    repeated = claim is None and record.is_finished()
    if not repeated:
        if is_spark_frame(type(value)):
            write.write_frame(value)
        else:
            repeated = not write.stage_and_publish(value)
    return record.outcome(repeated=repeated)


@dataclass(frozen=True, slots=True)
class _Write:
    """The destination and the identity of a publication."""

    access: PlatformAccess
    topic: str
    headers: Mapping[str, str]
    writer: str
    batch: int
    claim: Claim | None

    def write_frame(self, frame: Any) -> None:
        """Publish a DataFrame of Spark by the data source."""
        options = {
            **self.access.spark_options(),
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
        # These imports load Arrow's drivers.
        from eventsql_orchestration.orchestration.frames import event_batches  # noqa: PLC0415
        from eventsql_orchestration.spark.commit_protocol import Publications  # noqa: PLC0415
        from eventsql_orchestration.spark.staging import stage  # noqa: PLC0415

        batches = event_batches(value, self.topic)
        with Publications(self.access.source()) as publications:
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


class _Record:
    """The record of a publication to a topic, and its events in the log."""

    def __init__(self, write: _Write, origin: Provenance) -> None:
        """The claim's shard has the publication's record. Without a claim, the first shard has it."""
        self._topic = write.topic
        self._origin = origin
        self._named = {"writer": write.writer, "batch": write.batch}
        self._shards = write.access.shards
        shard = None if write.claim is None else write.claim.shard
        self._alone = len(self._shards) == 1
        if shard is None and not self._alone:
            shard = first_shard(each.database for each in self._shards if each.name is not None)
        self._decider = write.access.shard(shard)

    def find(self) -> tuple[int, datetime] | None:
        """The number of events and the time of the publication; None if it is not published."""
        rows = rows_of(self._decider, "lineage", "publication", self._named)
        return (rows[0][0], rows[0][1]) if rows else None

    def _found_after(self) -> tuple[int, datetime] | None:
        """As `find`, after the publication: asks again while the database cannot be reached."""
        retry = Backoff(FIND_SECONDS)
        while True:
            try:
                return self.find()
            except DatabaseUnavailableError as error:
                if not retry.lasts():
                    raise EventSQLError(
                        f"the output for topic {self._topic} is published, but its record cannot be read: publish it "
                        f"again, which publishes nothing twice ({error.message})"
                    ) from error

    def is_finished(self) -> bool:
        """Whether there is nothing left to publish."""
        if self.find() is None:
            return False
        left = () if self._alone else TwoPhaseParticipant(self._decider.database).announced()
        return not any({"writer": each.writer, "batch": each.batch} == self._named for each in left)

    def outcome(self, *, repeated: bool) -> Published:
        """The result of the publication, with the offsets of its events if they are transferred in time."""
        events, at = self._found_after() or (0, None)
        origin = self._origin
        published = Published(self._topic, events, origin.run_id, origin.asset, repeated, partition=origin.partition)
        if not events or at is None:
            return published
        try:
            return self._with_offsets(published, at)
        except (EventSQLError, psycopg.Error) as error:
            # The events are published: an error would tell the user to publish them again.
            logger.warning("the offsets of %d events of topic %s are not known: %s", events, self._topic, error)
            return published

    def _with_offsets(self, published: Published, at: datetime) -> Published:
        portions = self._portions(published.events, at)
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        while True:
            spans, run = [], None
            for portion in portions:
                portion.shard.transfer.run_once([self._topic])
                count, first, last, found_run = self._offsets(portion)
                run = run or found_run
                if count >= portion.events and first is not None and last is not None:
                    spans.append(Span(portion.shard.name, first, last))
            published = replace(published, run_id=run or published.run_id)
            if len(spans) == len(portions):
                return replace(published, spans=tuple(spans))
            if time.monotonic() >= deadline:
                return published
            time.sleep(0.1)

    def _portions(self, events: int, at: datetime) -> list[_Portion]:
        if self._alone:
            return [_Portion(self._decider, events, at)]
        portions = []
        for shard in self._shards:
            if shard is not self._decider:
                rows = rows_of(shard, "two_phase", "published_part", {"decider": self._decider.name, **self._named})
                portions += [_Portion(shard, row[0], row[1]) for row in rows]
        left = events - sum(portion.events for portion in portions)
        return [_Portion(self._decider, left, at), *portions] if left else portions

    def _offsets(self, portion: _Portion) -> LoggedPublication:
        # Events enter the log after they were published.
        database = portion.shard.database
        with database.connection() as connection:
            before = LogReader(database.schema).before_time(connection, self._topic, portion.at)
            return LogRanges(database.schema).publication(
                connection, self._topic, after=before, at=portion.at, asset=self._origin.asset,
                run_partition=self._origin.partition, events=portion.events,
            )  # fmt: skip
