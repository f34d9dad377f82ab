"""The run tags by which this package finds its own runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import dagster as dg

HIDDEN: Final = ".dagster/eventsql_"
"""The beginning of tags that only this package reads. Dagster's UI hides tags that begin with `.dagster/`."""

FORMER: Final = "eventsql/"
"""The beginning of the same tags on older runs, from before they were hidden."""

TOPIC_TAG: Final = "eventsql/topic"
CONSUMER_TAG: Final = "eventsql/consumer"
PARTITION_TAG: Final = "eventsql/partition"
SHARD_TAG: Final = "eventsql/shard"
"""The shard that a run consumes on, if there are several."""

CLAIM_TAG: Final = f"{HIDDEN}claim"
CLAIMED_AT_TAG: Final = f"{HIDDEN}claimed_at"
"""The time of the run's claim, in microseconds since 1970. A restored or recreated database uses ids of claims
again."""

AFTER_TAG: Final = f"{HIDDEN}after"
"""The offset before the run's claim. Ticks find the failed runs from one offset by this tag."""

SUCCEEDS_TAG: Final = f"{HIDDEN}succeeds"
"""On a run that takes over the partition of a draining run; its value is the draining run."""

SHARED_TAG: Final = f"{HIDDEN}shared"
"""On runs that several consumers share. A consumer without a claim consumes its waiting events."""

REPLAY_TAG: Final = "eventsql/replay"
"""On a run that replayed a committed range. The run moved no offset."""

REPLAY_BEGUN_TAG: Final = f"{HIDDEN}replay_begun"
"""On a run that has begun a replay; its value is the run and the claim. Dagster copies tags to re-executions of a run,
so the value must name the run."""

LATE_TAG: Final = f"{HIDDEN}late"
"""On a run that found its claim lost when it tried to take the claim over."""

QUEUE_TAG: Final = "eventsql/queue"
"""On the runs that handle a queue's messages."""

ALIVE_TAG: Final = f"{HIDDEN}alive"
"""A sign of life of a run that handles a queue's messages: a number that grows."""

HANDLED_TAG: Final = f"{HIDDEN}handled"
"""On a run that failed because messages failed, and handled all other messages. Its value is the run."""

BACKFILL_TAG: Final = "eventsql/backfill"
"""On every run of a backfill; its value is the backfill's id."""

BACKFILL_OF_TAG: Final = "eventsql/backfill_of"
"""On the job of a consumer's backfills and on its runs; its value is `<topic>/<consumer>`."""

DAGSTER_PARTITION_TAG: Final = "dagster/partition"

DAGSTER_ROOT_TAG: Final = "dagster/root_run_id"
"""The tag that Dagster gives each re-execution; its value is the first run."""

DAGSTER_REPOSITORY_TAG: Final = ".dagster/repository"
"""The tag that Dagster gives every run of a code location."""

TRANSFER_TAG: Final = "eventsql/transfer"
"""On every run of the transfer, and on its schedule."""

SPARK_POOL: Final = "eventsql/spark"
"""The Dagster pool of assets that start a Spark session. The run queue limits all runs of these assets by the pool,
wherever the runs are launched."""

HOUSEKEEPING_TAG: Final = f"{HIDDEN}housekeeping"
"""The kind of a run, for housekeeping: `consumer`, `internal` or `backfill`."""

FORMER_HOUSEKEEPING_TAG: Final = f"{FORMER}housekeeping"
"""The name of the same tag on older history, from before it was hidden. Housekeeping deletes this history too."""

HOUSEKEEPING_CONSUMER: Final = "consumer"
HOUSEKEEPING_INTERNAL: Final = "internal"
HOUSEKEEPING_BACKFILL: Final = "backfill"

CONSUMER_RUN: Final = {HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER}
INTERNAL_RUN: Final = {HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL}
"""Also the tags of the observations, materializations, sensors and schedules of this package."""

BACKFILL_RUN: Final = {HOUSEKEEPING_TAG: HOUSEKEEPING_BACKFILL}

DEV_TAG: Final = "eventsql/dev"
"""On the jobs of a location that `eventsql dev` runs by itself; its value is one of the following."""

DEV_SETUP: Final = "setup"
"""At the start, before anything else: the job registers topics and consumers."""

DEV_SIMULATION: Final = "simulation"
"""While `eventsql dev` runs, again and again: the job publishes sample events."""

DEV_VERIFICATION: Final = "verification"
"""At the end of a round of `--once` that has a simulation: the job evaluates asset checks."""

PRIORITY_TAG: Final = "dagster/priority"

FINISHED: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
UNFINISHED: Final = tuple(status for status in dg.DagsterRunStatus if status not in FINISHED)


def shard_tags(shard: str | None) -> dict[str, str]:
    """The tag that names the shard of a run; no tag if there is one database."""
    return {} if shard is None else {SHARD_TAG: shard}


def location_tags(origin: Any, repository: str | None) -> dict[str, str]:
    """The tag of the runs of a repository in the code location of this origin; no tag without an origin."""
    return {} if origin is None else {DAGSTER_REPOSITORY_TAG: f"{repository}@{origin.location_name}"}


def partition_tags(topic: str, consumer: str, partition: int, shard: str | None) -> Mapping[str, str]:
    """The tags of every run of a consumer partition."""
    return {TOPIC_TAG: topic, CONSUMER_TAG: consumer, PARTITION_TAG: str(partition), **shard_tags(shard)}
