"""The log and the metadata of a run show what Spark does for the run."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest
import requests
from dagster_pyspark import LazyPySparkResource
from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark.sql import SparkSession

from eventsql_orchestration.dagster.io.spark_progress import (
    SPARK_FAILED_TASKS,
    SPARK_JOBS,
    SPARK_ROWS,
    SPARK_TASKS,
    spark_progress,
)
from eventsql_orchestration.spark import spark_config
from eventsql_orchestration.spark.java import ensure_java
from tests.waiting import PATIENCE, wait_until

ROWS = 1_000


@dg.asset
def counted(context: dg.AssetExecutionContext, spark: LazyPySparkResource) -> dg.MaterializeResult[None]:
    session = spark.spark_session
    session.range(5).count()  # not in the block
    with spark_progress(context, session, every=0.05) as progress:
        session.range(ROWS).selectExpr("id % 7 AS key").groupBy("key").count().collect()
        stages = progress.stages()
    session.range(5).count()  # not in the block either
    assert all(stage.status == "COMPLETE" for stage in stages)
    return dg.MaterializeResult(metadata=progress.metadata())


@dg.asset
def unused(spark: LazyPySparkResource) -> None:
    """Asks for the resource and does not use it."""


def watching() -> int:
    """The threads that tell of the progress of a block."""
    return sum(thread.name == "eventsql-spark-progress" for thread in threading.enumerate())


@pytest.fixture
def resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    ensure_java(tmp_path)
    shared = SparkSession.getActiveSession()
    yield {"spark": LazyPySparkResource(spark_config=spark_config(**{"spark.master": "local[2]"}))}
    started = SparkSession.getActiveSession()
    if started is not None and shared is None:
        started.stop()


@pytest.mark.nightly
def test_stages_and_rows_of_a_run_s_own_jobs_are_logged_and_become_metadata(resources: dict[str, Any]) -> None:
    with dg.instance_for_test() as instance:
        result = dg.materialize([counted], resources=resources, instance=instance)
        assert result.success
        (materialization,) = result.asset_materializations_for_node("counted")
        metadata: dict[str, Any] = {name: value.value for name, value in materialization.metadata.items()}
        assert metadata[SPARK_JOBS] >= 1
        assert metadata[SPARK_TASKS] >= 2
        assert metadata[SPARK_FAILED_TASKS] == 0
        rows = metadata[SPARK_ROWS]
        assert isinstance(rows, list)
        # Seven groups of each of the two tasks go through the shuffle; jobs outside the block count five rows.
        assert {"in": 14, "out": 0} in [{"in": row["in"], "out": row["out"]} for row in rows]
        messages = [record.user_message for record in instance.all_logs(result.run_id)]
    told = [message for message in messages if message.startswith("Spark stage")]
    assert len(told) >= 2
    assert any("14 rows in" in message for message in told)
    assert watching() == 0


def test_a_block_may_stop_its_session() -> None:
    session, context = Mock(), Mock()
    with spark_progress(context, session, every=PATIENCE) as progress:
        assert watching() == 1
        # `SparkContext.stop` leaves no Java context to ask.
        session.sparkContext.configure_mock(_jsc=None, **{
            "statusTracker.side_effect": AttributeError, "setLocalProperty.side_effect": AttributeError,
        })  # fmt: skip
    assert watching() == 0
    assert progress.metadata() == {}


@pytest.mark.parametrize("error", [Py4JError("no answer"), requests.ConnectionError("no answer")])
def test_a_block_does_not_fail_if_spark_gives_no_figures(error: Exception) -> None:
    session, context = Mock(), Mock()
    session.sparkContext.statusTracker.side_effect = error
    with spark_progress(context, session, every=0.01) as progress:
        wait_until(lambda: session.sparkContext.statusTracker.call_count > 1, "Spark is asked again")
    assert progress.metadata() == {}


def test_a_stage_is_told_again_only_if_its_line_has_changed() -> None:
    session, context, data = Mock(), Mock(), Mock()
    spark = session.sparkContext
    spark.statusTracker().getJobIdsForGroup.return_value = [0]
    spark.statusTracker().getJobInfo.return_value.stageIds = [3]
    spark._jsc.sc().statusStore().lastStageAttempt.return_value = data
    data.configure_mock(**{
        "name.return_value": "count at ledger.py:7", "status.return_value.toString.return_value": "ACTIVE",
        "numTasks.return_value": 4, "numCompleteTasks.return_value": 4, "numFailedTasks.return_value": 0,
        "inputRecords.return_value": 9, "shuffleReadRecords.return_value": 0,
        "outputRecords.return_value": 0, "shuffleWriteRecords.return_value": 0,
    })  # fmt: skip
    with spark_progress(context, session, every=0.01):
        wait_until(lambda: context.log.info.called, "the stage is told")
        data.status().toString.return_value = "COMPLETE"
    assert [str(stage) for (_, stage), _ in context.log.info.call_args_list] == [
        "Spark stage 3 (count): 4 of 4 tasks, 9 rows in, 0 rows out"
    ]


def test_a_session_starts_when_it_is_used_and_not_before(
    resources: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: SparkSession.Builder) -> SparkSession:
        raise RuntimeError("a session was started")

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", start)
    assert dg.materialize([unused], resources=resources).success
    with pytest.raises(RuntimeError, match="a session was started"):
        dg.materialize([counted], resources=resources)
