"""The progress of Spark's stages in the log of a run, and their figures in its metadata."""

from __future__ import annotations

import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import requests

from eventsql_orchestration.dagster.lineage.origin import ExecutionContext
from eventsql_orchestration.threads import start_thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

EVERY_SECONDS: Final = 2.0
"""Seconds between two lines about a stage: each line of Dagster's log is a row of its storage."""

UNKNOWN: Final = "the progress of Spark is not known"

ANSWER_SECONDS: Final = 5.0
"""Seconds that an answer of a Spark Connect server may take, if nothing but the display depends on it."""

_BEGUN: Final = {"ACTIVE", "COMPLETE", "FAILED"}

SPARK_JOBS: Final = "spark jobs"
SPARK_STAGES: Final = "spark stages"
SPARK_TASKS: Final = "spark tasks"
SPARK_FAILED_TASKS: Final = "spark failed tasks"
SPARK_ROWS: Final = "spark rows by stage"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """A stage as it is now: its tasks, and the rows that it has read and written, shuffles included."""

    id: int
    name: str
    status: str = field(compare=False)  # no line has it
    tasks: int
    done: int
    failed: int
    rows_in: int
    rows_out: int

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        rows = f", {self.rows_in:,} rows in, {self.rows_out:,} rows out" if self.rows_in or self.rows_out else ""
        return f"Spark stage {self.id} ({self.name}): {self.done} of {self.tasks} tasks{failed}{rows}"


class SparkProgress(ABC):
    """The progress of the jobs that a block of code has started."""

    @abstractmethod
    def look(self) -> tuple[int, list[StageProgress]]:
        """The number of jobs so far, and their stages that have begun or are done, in order."""

    def stages(self) -> list[StageProgress]:
        """The stages that have begun or are done, in order."""
        _, stages = self.look()
        return stages

    def metadata(self) -> dict[str, Any]:
        """Metadata for a materialization: the numbers of jobs, stages and tasks, and each stage's rows in and out.

        Empty if Spark gives no figures: that must not fail a run whose work is done.
        """
        try:
            jobs, stages = self.look()
        except _unavailable() as error:
            logger.warning("%s: %s", UNKNOWN, error)
            return {}
        if not jobs:
            return {}
        return {
            SPARK_JOBS: jobs,
            SPARK_STAGES: len(stages),
            SPARK_TASKS: sum(stage.done for stage in stages),
            SPARK_FAILED_TASKS: sum(stage.failed for stage in stages),
            SPARK_ROWS: [{"stage": each.name, "in": each.rows_in, "out": each.rows_out} for each in stages],
        }


def _unavailable() -> tuple[type[Exception], ...]:
    """The errors by which Spark shows that it gives no figures."""
    # py4j comes with Spark, and assets without Spark import this module, too.
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - an optional package

    return (Py4JError, requests.RequestException)


class _OwnProgress(SparkProgress):
    """The jobs of a job group, in a Spark session of this process."""

    def __init__(self, spark: SparkSession, group: str) -> None:
        self._context: Any = spark.sparkContext
        self._group = group

    def look(self) -> tuple[int, list[StageProgress]]:
        if _is_stopped(self._context):
            return 0, []
        tracker = self._context.statusTracker()
        jobs = tracker.getJobIdsForGroup(self._group)
        store = self._context._jsc.sc().statusStore()  # noqa: SLF001 - py4j's entry point; no public name has them
        known: set[int] = set()
        for job in jobs:
            info = tracker.getJobInfo(job)
            known.update(() if info is None else info.stageIds)
        found = []
        for stage in sorted(known):
            # Leave out stages that have not begun, or were skipped because their shuffle exists.
            if tracker.getStageInfo(stage) is not None:
                data = store.lastStageAttempt(stage)
                if data.numTasks() and data.status().toString() in _BEGUN:
                    found.append(_own_stage(stage, data))
        return len(jobs), found


def _is_stopped(context: Any) -> bool:
    """Whether the block has stopped its session. It then has no figures any more."""
    return context._jsc is None  # noqa: SLF001 - no public method tells


def _own_stage(stage: int, data: Any) -> StageProgress:
    return StageProgress(
        id=stage,
        name=str(data.name()).partition(" at ")[0],
        status=str(data.status().toString()),
        tasks=data.numTasks(),
        done=data.numCompleteTasks(),
        failed=data.numFailedTasks(),
        rows_in=data.inputRecords() + data.shuffleReadRecords(),
        rows_out=data.outputRecords() + data.shuffleWriteRecords(),
    )


class _ServerProgress(SparkProgress):
    """The jobs with a tag, on a Spark Connect server. They come from the monitoring API of its UI, if it has a UI."""

    def __init__(self, spark: SparkSession, tag: str) -> None:
        self._tag = tag
        host, port, application = (
            spark.conf.get(name, None) for name in ("spark.driver.host", "spark.ui.port", "spark.app.id")
        )
        self._url = f"http://{host}:{port}/api/v1/applications/{application}" if port else None

    def look(self) -> tuple[int, list[StageProgress]]:
        jobs = [job for job in self._get("jobs") if any(tag.endswith(self._tag) for tag in job["jobTags"])]
        known = {stage for job in jobs for stage in job["stageIds"]}
        # The last attempt of each stage.
        attempts = sorted(self._get("stages"), key=lambda stage: (stage["stageId"], stage["attemptId"]))
        latest = {data["stageId"]: data for data in attempts if data["stageId"] in known}
        found = [data for data in latest.values() if data["numTasks"] and data["status"] in _BEGUN]
        return len(jobs), [_server_stage(data) for data in found]

    def _get(self, what: str) -> list[dict[str, Any]]:
        if self._url is None:
            return []
        with requests.Session() as http:
            # The server is on this machine or in its cluster, and no proxy leads there.
            http.trust_env = False
            answer = http.get(f"{self._url}/{what}", timeout=ANSWER_SECONDS)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()
        return found


def _server_stage(data: dict[str, Any]) -> StageProgress:
    return StageProgress(
        id=data["stageId"],
        # The stage's own name is the text of the plan.
        name="Spark Connect",
        status=data["status"],
        tasks=data["numTasks"],
        done=data["numCompleteTasks"],
        failed=data["numFailedTasks"],
        rows_in=data["inputRecords"] + data["shuffleReadRecords"],
        rows_out=data["outputRecords"] + data["shuffleWriteRecords"],
    )


@contextmanager
def _grouped(spark: SparkSession, run_id: str) -> Iterator[SparkProgress]:
    """Put the Spark jobs that this thread starts in the block into one group, and yield their progress."""
    from pyspark.sql.utils import is_remote  # noqa: PLC0415 - an optional package

    group = f"{run_id}/{uuid.uuid4().hex[:8]}"
    if is_remote():
        # A tag of Spark Connect has no comma. It is per thread, as a job group is.
        spark.addTag(group)
        try:
            yield _ServerProgress(spark, group)
        except BaseException:
            # Otherwise the server would go on working for a run that has ended. Do not wait for a server that is gone.
            start_thread("interrupt", spark.interruptTag, group).join(ANSWER_SECONDS)
            raise
        finally:
            spark.removeTag(group)
        return

    spark.sparkContext.setJobGroup(group, f"run {run_id}")
    try:
        yield _OwnProgress(spark, group)
    finally:
        for name in () if _is_stopped(spark.sparkContext) else ("spark.jobGroup.id", "spark.job.description"):
            spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]  # None removes it


@contextmanager
def spark_progress(
    context: ExecutionContext, spark: SparkSession, *, every: float = EVERY_SECONDS
) -> Iterator[SparkProgress]:
    """Log the progress of Spark's stages while the block runs: every `every` seconds, the stages that changed.

    The Spark jobs that this thread starts in the block are one group. Spark's own UI shows it under the run's id. Give
    `metadata()` to the materialization. With Spark Connect, the figures come from the server's UI, and if the block
    fails, its work on the server ends.
    """
    with _grouped(spark, context.run.run_id) as progress:
        told: dict[int, StageProgress] = {}
        ended = threading.Event()

        def tell() -> None:
            try:
                for stage in progress.stages():
                    if told.get(stage.id) != stage:
                        told[stage.id] = stage
                        context.log.info("%s", stage)
            except _unavailable() as error:
                # A failure to report must not fail Spark's work.
                logger.warning("%s: %s", UNKNOWN, error)

        def watch() -> None:
            while not ended.wait(every):
                tell()

        watching = start_thread("spark-progress", watch)
        try:
            yield progress
        finally:
            ended.set()
            watching.join()
            tell()
