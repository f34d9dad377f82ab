"""Airflow's tests run where it is installed: `make airflow`. Elsewhere nothing is collected."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.airflow.local import connection_of

collect_ignore_glob = [] if importlib.util.find_spec("airflow") else ["test_*.py"]

# Airflow reads its configuration when it is imported, and would make a directory in the home of the user.
if "AIRFLOW_HOME" not in os.environ:
    _home = tempfile.TemporaryDirectory(prefix="eventsql-airflow-", ignore_cleanup_errors=True)
    os.environ["AIRFLOW_HOME"] = _home.name
os.environ.setdefault("AIRFLOW__CORE__UNIT_TEST_MODE", "True")


@pytest.fixture
def connected(dsn: str, platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> EventSQL:
    """The platform that Airflow's default connection leads to."""
    monkeypatch.setenv("AIRFLOW_CONN_EVENTSQL_DEFAULT", connection_of([dsn], "eventsql"))
    return platform


def context_of(
    task_id: str = "task", *, run_id: str = "manual__1", map_index: int = -1, try_number: int = 1, payloads: Any = (),
    conf: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """The context of a task of DAG `dag`, whose run has a configuration and these payloads of asset events."""
    task = SimpleNamespace(dag_id="dag", run_id=run_id, task_id=task_id, map_index=map_index, try_number=try_number)
    events = [SimpleNamespace(extra={"from_trigger": True, "payload": payload}) for payload in payloads]
    return {
        "ti": task, "dag_run": SimpleNamespace(conf=conf), "outlet_events": {},
        "triggering_asset_events": {"asset": events} if events else {},
    }  # fmt: skip
