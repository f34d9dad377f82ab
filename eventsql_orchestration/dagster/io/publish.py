"""Publishing the output of an asset, once, with its origin in every event (`orchestration/publication.py`)."""

from __future__ import annotations

from typing import Any

from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster.lineage.origin import ExecutionContext, Origin, step_of
from eventsql_orchestration.dagster.lineage.published import metadata_of
from eventsql_orchestration.dagster.register import require_topic
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.orchestration import publication


def publish_events(
    context: ExecutionContext,
    events: object,
    *,
    eventsql: EventSQLResource,
    topic: str,
    claim: Claim | None = None,
    batch: int = 0,
) -> dict[str, Any]:
    """Publish the output of an asset in one transaction. Returns metadata for the materialization.

    `events` is a DataFrame of Spark or pandas, an Arrow table or RecordBatchReader, with a column `value` and
    optionally `key`, `partition` and `headers`, or an iterable of publications or of mappings. The metadata of each
    event names the run, the asset and its partition. `claim` is committed in the same transaction, so its events are
    consumed and the output is published exactly once. Without a claim, each step publishes once per run, partition,
    topic and `batch`, even if it is retried or its run is re-executed. So a second call in a step for the same topic
    needs another `batch`.

    The events are transferred at once, so that the metadata can name their offsets. Raises `ClaimLostError`,
    `TopicNotFoundError`, `ValidationError` or `DatabaseError`; then nothing was published.
    """
    require_topic(eventsql.platform, topic)
    published = publication.publish(
        Origin.of(context), events, access=eventsql, topic=topic, claim=claim, batch=batch,
        output=f"step {step_of(context)}",
    )  # fmt: skip
    context.log.info("%s", published)
    return metadata_of(published)


publish_dataframe = publish_events
"""Another name of `publish_events`, for Spark assets, which publish DataFrames."""
