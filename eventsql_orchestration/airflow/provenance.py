"""The publishers and the owners of claims in Airflow: a run of a DAG, and a task of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from eventsql_orchestration.orchestration.owners import airflow_run
from eventsql_orchestration.orchestration.provenance import (
    AIRFLOW_DAG,
    AIRFLOW_MAP_INDEX,
    AIRFLOW_RUN,
    AIRFLOW_TASK,
    Provenance,
)

NOT_MAPPED: Final = -1


@dataclass(frozen=True, slots=True)
class TaskOrigin(Provenance):
    """The origin of events in Airflow: a run of a DAG, a task as `asset`, and its map index as `partition`."""

    dag_id: str = ""
    dag_run_id: str = ""

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> TaskOrigin:
        """The origin of the events that a task publishes. It is the same in each try of the task."""
        task = context["ti"]
        run = airflow_run(task.dag_id, task.run_id)
        index = None if task.map_index in (None, NOT_MAPPED) else str(task.map_index)
        return cls(run, run, task.task_id, index, None, task.dag_id, task.run_id)

    def _names(self) -> dict[str, str | None]:
        return {
            AIRFLOW_DAG: self.dag_id, AIRFLOW_RUN: self.dag_run_id, AIRFLOW_TASK: self.asset,
            AIRFLOW_MAP_INDEX: self.partition,
        }  # fmt: skip
