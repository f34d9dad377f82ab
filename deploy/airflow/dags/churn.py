"""Code churn in Airflow: the pipeline of `assets/churn`, with the consumers of the Dagster location."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from airflow.sdk import DAG, Metadata, Param, get_current_context, task

from assets.churn.effects import DIRECTORY_CHURN, FILE_CHANGES, add_churn
from assets.churn.git_history import LAST_COMMIT, new_changes
from assets.churn.published import last_commit
from eventsql_orchestration import Publication
from eventsql_orchestration.airflow import (
    EventSQLHook,
    claims_asset,
    eventsql_consume,
    publish_output,
    topic_asset,
)

CHANGES: Final = topic_asset(FILE_CHANGES.name)

with DAG(
    "publish_history", schedule=None, catchup=False, max_active_runs=1, tags=["churn", "eventsql:simulation"],
    params={"repository": ".", "commits": Param(50, type="integer", minimum=1)},
):  # fmt: skip

    @task(outlets=[CHANGES])
    def file_changes(params: Mapping[str, Any] | None = None) -> Iterator[Metadata]:
        """Publish the file changes of the commits that came since the last time, each commit once."""
        assert params is not None, "Airflow gives the parameters"
        repository = Path(params["repository"])
        with EventSQLHook() as hook:
            changes = new_changes(repository, since=last_commit(hook.platform, repository), limit=params["commits"])
            publications = [
                Publication(
                    FILE_CHANGES.name, json.dumps(change, ensure_ascii=False).encode(), key=change["path"],
                    metadata={LAST_COMMIT: changes[-1]["commit"]},
                )
                for change in changes
            ]  # fmt: skip
            # A second try publishes nothing: new commits come with the next run.
            published = publish_output(get_current_context(), publications, topic=FILE_CHANGES.name, eventsql=hook)
        if published["events"]:
            yield Metadata(CHANGES, published)

    file_changes()

with DAG(
    "directory_churn_table", schedule=[claims_asset(DIRECTORY_CHURN.name, "directory_churn_table", max_wait=2.0)],
    catchup=False, default_args={"retries": 2, "retry_delay": 10.0}, tags=["churn"],
):  # fmt: skip
    eventsql_consume(topic=DIRECTORY_CHURN.name, consumer="directory_churn_table")(add_churn)()
