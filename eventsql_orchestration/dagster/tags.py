"""The run tags by which this package finds its own runs again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import dagster as dg

TOPIC_TAG: Final = "eventsql/topic"
CONSUMER_TAG: Final = "eventsql/consumer"
PARTITION_TAG: Final = "eventsql/partition"
SHARD_TAG: Final = "eventsql/shard"
"""The shard that a run consumes on, where the platform is on several databases."""

CLAIM_TAG: Final = "eventsql/claim"
CLAIMED_AT_TAG: Final = "eventsql/claimed_at"
"""When the run's claim was made, in microseconds since 1970: ids of claims come again in a database that is restored or
made anew."""

AFTER_TAG: Final = "eventsql/after"
"""The offset that a run's claim begins after: failures of runs from one offset are counted by it."""

SUCCEEDS_TAG: Final = "eventsql/succeeds"
"""Carried by a run that takes a partition over from one that drains it; its value is that run."""

SHARED_TAG: Final = "eventsql/shared"
"""Carried by runs of a job whose consumers share them: those without a claim consume what waits."""

REPLAY_TAG: Final = "eventsql/replay"
"""Carried by a run that consumed a committed range once more: it moved no offset."""

REPLAY_BEGUN_TAG: Final = "eventsql/replay_begun"
"""Carried by a run that has begun a replay; its value is the run and the claim. Dagster copies tags to runs that
execute this one again, so the run must be named."""

LATE_TAG: Final = "eventsql/late"
"""Carried by a run that found its claim lost when it came to take it over."""

BACKFILL_TAG: Final = "eventsql/backfill"
"""Carried by every run of a backfill; its value is the backfill's id."""

BACKFILL_OF_TAG: Final = "eventsql/backfill_of"
"""Carried by the job of a consumer's backfills, and its runs: `<topic>/<consumer>`."""

DAGSTER_PARTITION_TAG: Final = "dagster/partition"

TRANSFER_TAG: Final = "eventsql/transfer"
"""Carried by every run of the transfer."""

MOVING_TAG: Final = "eventsql/moving"
"""Carried by a run of the transfer once it moves events; its value names the database."""

SPARK_POOL: Final = "eventsql/spark"
"""The pool of Dagster's that assets are in which start a Spark session: a run queue limits their runs by it, whoever
launches them and from where."""

POOL_TAG: Final = "eventsql/pool"
"""Carried by the steps of this package's assets that are in a pool, whose name is its value. Dagster limits either the
runs of a pool or its steps; an executor of several processes limits the steps of one run by their tags."""

HOUSEKEEPING_TAG: Final = "eventsql/housekeeping"
"""Which of this package's runs a run is, for housekeeping: `consumer`, `internal` or `backfill`."""

HOUSEKEEPING_CONSUMER: Final = "consumer"
HOUSEKEEPING_INTERNAL: Final = "internal"
HOUSEKEEPING_BACKFILL: Final = "backfill"

PRIORITY_TAG: Final = "dagster/priority"
MAX_RUNTIME_TAG: Final = "dagster/max_runtime"

FINISHED: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


def shard_tags(shard: str | None) -> dict[str, str]:
    """The tag that names the shard of a run; none where there is one database."""
    return {} if shard is None else {SHARD_TAG: shard}


def pool_tags(pool: str | None) -> dict[str, str]:
    """The tags of a step whose asset is in a pool."""
    return {} if pool is None else {POOL_TAG: pool}


def partition_tags(topic: str, consumer: str, partition: int, shard: str | None = None) -> Mapping[str, str]:
    """The tags that every run of a consumer partition carries."""
    return {TOPIC_TAG: topic, CONSUMER_TAG: consumer, PARTITION_TAG: str(partition), **shard_tags(shard)}
