"""File changes in, churn per directory and month out: a topic, a Spark asset, a second topic and a table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from assets.churn import sums, verification
from assets.churn.effects import DIRECTORY_CHURN, FILE_CHANGES, add_churn
from assets.churn.git_history import LAST_COMMIT, new_changes
from assets.churn.published import last_commit
from assets.range_sums import SPARK_LIMITS, check_result, publish_sums
from eventsql_orchestration import Claim, Connection, Event
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLResource,
    RunLimits,
    consumer_asset,
    publish_events,
    range_asset,
    topic_key,
)


class HistoryConfig(dg.Config):
    """Which repository's history a round publishes, and how many of its newest commits.

    The working directory, which is the default, need not have a history.
    """

    repository: str = "."
    commits: int = 50


@dg.asset(
    key=topic_key(FILE_CHANGES.name),
    group_name="topics",
    kinds={"topic", "postgresql", "git"},
    description="File changes of a git repository; `eventsql publish file_changes --key path` publishes any others.",
    metadata={"partitions": FILE_CHANGES.partitions},
    # Two runs at once would publish the same commits. The instance lets one run at a time use a pool.
    pool=FILE_CHANGES.name,
)
def file_changes(
    context: dg.AssetExecutionContext, config: HistoryConfig, eventsql: EventSQLResource
) -> dg.MaterializeResult[None]:
    """Publish the file changes of the commits that came since the last time, each commit once."""
    repository = Path(config.repository)
    last = last_commit(eventsql.platform, repository)
    try:
        changes = new_changes(repository, since=last, limit=config.commits)
    except ValueError as error:
        if config.repository != ".":
            raise dg.Failure(str(error), allow_retries=False) from error
        context.log.warning("there are no file changes to publish: %s", error)
        changes = []
    events = (
        {
            "key": change["path"],
            "value": json.dumps(change, ensure_ascii=False).encode(),
            "metadata": {LAST_COMMIT: changes[-1]["commit"]},
        }
        for change in changes
    )
    # A run that is executed again publishes nothing: new commits come with the next run.
    published = publish_events(context, events, eventsql=eventsql, topic=FILE_CHANGES.name)
    last = last_commit(eventsql.platform, repository)
    return dg.MaterializeResult(metadata={**published, **({} if last is None else {LAST_COMMIT: last})})


@range_asset(
    topic=FILE_CHANGES,
    consumer="directory_churn",
    name="directory_churn_sums",
    publishes=DIRECTORY_CHURN,
    limits=SPARK_LIMITS,
    options=AssetOptions(group_name="churn"),
)
def directory_churn(
    context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource, spark: LazyPySparkResource
) -> Mapping[str, Any]:
    """Changes, lines added and lines deleted per directory and month, as Spark sums up a range of file_changes."""
    return publish_sums(
        context, claim, eventsql=eventsql, spark=spark,
        compute=lambda events: sums.churn(sums.changes_of(events)), topic=DIRECTORY_CHURN, key="directory",
    )  # fmt: skip


@consumer_asset(
    topic=DIRECTORY_CHURN,
    consumer="directory_churn_table",
    partitioned=True,
    limits=RunLimits(max_wait=2.0),
    options=AssetOptions(group_name="churn"),
)
def directory_churn_table(events: Sequence[Event], connection: Connection) -> None:
    """Table churn.directory_churn: all changes per repository, directory and month."""
    add_churn(events, connection)


@dg.asset_check(
    asset=directory_churn_table.key,
    description="The table holds what plain Python counts over the whole log of file_changes.",
)
def directory_churn_table_matches_log(eventsql: EventSQLResource) -> dg.AssetCheckResult:
    """Count without Spark and compare row by row."""
    return check_result(verification.directory_churn_matches_log(eventsql.platform))
