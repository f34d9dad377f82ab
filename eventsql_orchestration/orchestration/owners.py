"""The names of claims' owners by which an orchestrator finds its own runs."""

from __future__ import annotations

from typing import Final

from eventsql_orchestration.consuming.claim_pruning import RUN_OWNER


def owner_of_run(run_id: str) -> str:
    """The owner name of a claim that a run has taken over."""
    return RUN_OWNER + run_id


def run_of_owner(owner: str) -> str | None:
    """The run that owns a claim; None for any other owner, for example a tick."""
    return owner.removeprefix(RUN_OWNER) if owner.startswith(RUN_OWNER) else None


AIRFLOW_OWNER: Final = "airflow "
"""Prefix of a claim's owner that is a run of an Airflow DAG."""

AIRFLOW_TRIGGER: Final = "airflow trigger"
"""The owner of a claim that a trigger made, until a task takes it over."""


def airflow_run(dag_id: str, run_id: str) -> str:
    """The name of a run of a DAG, which is also the owner of its claims."""
    return f"{AIRFLOW_OWNER}{dag_id}/{run_id}"


def read_airflow_run(run: str) -> tuple[str, str]:
    """The DAG and the id of a run that `airflow_run` has named."""
    dag_id, _, run_id = run.removeprefix(AIRFLOW_OWNER).partition("/")
    return dag_id, run_id


def owner_of(run: str) -> str:
    """The owner of a run's claims. `run` is the run as events name it: Dagster's id, or `airflow_run`."""
    return run if run.startswith(AIRFLOW_OWNER) else owner_of_run(run)
