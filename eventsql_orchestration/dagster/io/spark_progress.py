"""The progress of Spark's stages in the log of a run, and their figures in its metadata."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from eventsql_orchestration.dagster.lineage.origin import ExecutionContext

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

EVERY_SECONDS: Final = 2.0
"""Seconds between two lines about a stage: each line of Dagster's log is a row of its storage."""

THREAD: Final = "eventsql-spark-progress"

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
    status: str
    tasks: int
    done: int
    failed: int
    rows_in: int
    rows_out: int

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        rows = f", {self.rows_in:,} rows in, {self.rows_out:,} rows out" if self.rows_in or self.rows_out else ""
        return f"Spark stage {self.id} ({self.name}): {self.done} of {self.tasks} tasks{failed}{rows}"


class SparkProgress:
    """The stages of the jobs that a block of code has started."""

    def __init__(self, spark: SparkSession, group: str) -> None:
        self._context: Any = spark.sparkContext
        self._group = group

    def jobs(self) -> list[int]:
        """The jobs of the block so far."""
        return sorted(self._context.statusTracker().getJobIdsForGroup(self._group))

    def stages(self) -> list[StageProgress]:
        """Their stages that have begun or are done, in order."""
        tracker = self._context.statusTracker()
        store = self._context._jsc.sc().statusStore()  # noqa: SLF001 - py4j's way in; no public one has the rows
        known: set[int] = set()
        for job in self.jobs():
            info = tracker.getJobInfo(job)
            known.update(() if info is None else info.stageIds)
        found = []
        for stage in sorted(known):
            # Leave out stages that have not begun, or were skipped because their shuffle exists.
            if tracker.getStageInfo(stage) is not None:
                data = store.lastStageAttempt(stage)
                if data.numTasks() and data.status().toString() in {"ACTIVE", "COMPLETE", "FAILED"}:
                    found.append(_progress(stage, data))
        return found

    def metadata(self) -> dict[str, Any]:
        """For a materialization: how many jobs, stages and tasks, and each stage's rows in and out."""
        stages = self.stages()
        return {
            SPARK_JOBS: len(self.jobs()),
            SPARK_STAGES: len(stages),
            SPARK_TASKS: sum(stage.done for stage in stages),
            SPARK_FAILED_TASKS: sum(stage.failed for stage in stages),
            SPARK_ROWS: [{"stage": each.name, "in": each.rows_in, "out": each.rows_out} for each in stages],
        }


def _progress(stage: int, data: Any) -> StageProgress:
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


@contextmanager
def spark_progress(
    context: ExecutionContext, spark: SparkSession, *, every: float = EVERY_SECONDS
) -> Iterator[SparkProgress]:
    """Log the progress of Spark's stages while the block runs: the changes, `every` so many seconds.

    The Spark jobs that this thread starts in the block are one group. Spark's own UI shows it under the run's id. Give
    `metadata()` to the materialization.
    """
    # It comes with Spark, and assets without Spark import this module, too.
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - an optional package

    group = f"{context.run.run_id}/{uuid.uuid4().hex[:8]}"
    spark.sparkContext.setJobGroup(group, f"run {context.run.run_id}")
    progress = SparkProgress(spark, group)
    told: dict[int, StageProgress] = {}
    ended = threading.Event()

    def tell() -> None:
        try:
            for stage in progress.stages():
                if told.get(stage.id) != stage:
                    told[stage.id] = stage
                    context.log.info("%s", stage)
        except Py4JError as error:
            # A failure to report must not fail Spark's work.
            logger.warning("the progress of Spark is not known: %s", error)

    def watch() -> None:
        while not ended.wait(every):
            tell()

    watching = threading.Thread(target=watch, name=THREAD, daemon=True)
    watching.start()
    try:
        yield progress
    finally:
        ended.set()
        watching.join()
        tell()
        for name in ("spark.jobGroup.id", "spark.job.description"):
            spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]  # None removes it
