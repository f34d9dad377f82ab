"""The facts of DAG runs for `eventsql trace`, by Airflow's public REST API."""

from __future__ import annotations

from datetime import datetime

from eventsql_orchestration.airflow.api import AirflowApi
from eventsql_orchestration.orchestration.owners import read_airflow_run
from eventsql_orchestration.orchestration.trace.runs import RunFacts


class ServedDagRuns:
    def __init__(self, url: str) -> None:
        """Raises `ValidationError` for a URL that is not of HTTP."""
        self._api = AirflowApi(url)

    def run(self, run_id: str) -> RunFacts | None:
        dag, run = read_airflow_run(run_id)
        if (found := self._api.find_run(dag, run)) is None:
            return None
        started, ended = _time(found["start_date"]), _time(found["end_date"])
        return RunFacts(run_id, dag, found["state"].upper(), started, ended, found["partition_key"], None, ())


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
