"""Publishing what an asset computed with Spark, once, and with its origin in every event."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Text, func, select

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.lineage import RUN_ID, ExecutionContext, asset_name, lineage
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.database import tables
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.spark import FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PUBLISHED_TOPIC: Final = "published topic"
PUBLISHED_EVENTS: Final = "published events"
PUBLISHED_FIRST: Final = "published first offset"
PUBLISHED_LAST: Final = "published last offset"

PUBLISHED: Final = frozenset({PUBLISHED_TOPIC, PUBLISHED_EVENTS, PUBLISHED_FIRST, PUBLISHED_LAST})

TRANSFER_TIMEOUT: Final = 5.0
"""Seconds to wait for another transfer to give the published events their offsets, which only metadata asks for."""


@dataclass(frozen=True, slots=True)
class Published:
    """What was published to a topic; the offsets of its first and last event are None where they are not known yet."""

    topic: str
    events: int
    first: int | None
    last: int | None

    def metadata(self) -> dict[str, Any]:
        """For a materialization. Other events may lie between the first and the last."""
        offsets = {PUBLISHED_FIRST: self.first, PUBLISHED_LAST: self.last} if self.first is not None else {}
        return {PUBLISHED_TOPIC: self.topic, PUBLISHED_EVENTS: self.events, **offsets}


def publish_dataframe(
    context: ExecutionContext,
    dataframe: DataFrame,
    *,
    eventsql: EventSQLResource,
    topic: str,
    claim: Claim | None = None,
    batch: int = 0,
) -> dict[str, Any]:
    """Publish a DataFrame's rows as events, in one transaction; gives metadata for the materialization.

    `dataframe` has a column `value` and, as wanted, `key`, `partition` and `headers`. Each event's metadata names the
    run, the asset and its partition. With `claim` the claim is committed in the same transaction: consumed and
    published exactly once. Without one, each asset publishes once per run, topic and `batch`, however often it is
    tried: a second call for the same topic needs another `batch`.

    The events are transferred at once, so that the metadata can say their offsets. Raises `ClaimLostError`,
    `TopicNotFoundError`, `InvalidPublicationError`, `DatabaseError`, as Spark wraps them.
    """
    platform = eventsql.platform
    origin = lineage(context)
    asset = asset_name(context) or "op"
    writer = f"{asset}:{topic}:" + (f"run-{context.run.run_id}" if claim is None else f"claim-{claim.id}")
    before = platform.reader.end(topic)
    options = {
        **eventsql.spark_options(),
        "topic": topic,
        "writerId": writer,
        "batchId": str(batch),
        "headers": json.dumps(origin),
    }
    if claim is not None:
        options["claim"] = str(claim.id)
    dataframe.write.format(FORMAT).mode("append").options(**options).save()
    published = _published(platform, topic, writer, batch, run_id=origin[RUN_ID], after=before)
    context.log.info("published %d events to topic %s", published.events, topic)
    return published.metadata()


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
    }


def leave_out(metadata: Mapping[str, Any], topics: Collection[str]) -> dict[str, Any]:
    """Metadata without what it says of a publication to one of `topics`."""
    if metadata.get(PUBLISHED_TOPIC) not in topics:
        return dict(metadata)
    return {name: value for name, value in metadata.items() if name not in PUBLISHED}


def _published(platform: EventSQL, topic: str, writer: str, batch: int, *, run_id: str, after: int) -> Published:
    publication = tables.spark_publication.c
    with platform.database.core() as connection:
        events = connection.scalar(
            select(publication.eql_events).where(publication.eql_writer == writer, publication.eql_batch == batch)
        )
    events = int(events or 0)
    if not events:
        return Published(topic, 0, None, None)
    partitioned = platform.registry.topic(topic).partitioned
    log = tables.event_log(topic, partitioned=partitioned).c
    offsets = select(func.count(), func.min(log.eql_id), func.max(log.eql_id)).where(
        log.eql_id > after, log.eql_metadata.op("->>")(RUN_ID).cast(Text) == run_id
    )
    deadline = time.monotonic() + TRANSFER_TIMEOUT
    while True:
        platform.transfer.run_once([topic])
        with platform.database.core() as connection:
            count, first, last = connection.execute(offsets).one()
        if count >= events:
            return Published(topic, events, first, last)
        if time.monotonic() >= deadline:
            return Published(topic, events, None, None)
        time.sleep(0.1)
