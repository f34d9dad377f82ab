"""The DAGs of deploy/airflow: they are imported without warnings, soon, and without Spark or Dagster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import task

ROOT = Path(__file__).parents[2]
DAGS = sorted((ROOT / "deploy" / "airflow" / "dags").glob("*.py"))

IMPORT = """
import sys, time
# What Airflow's own process has loaded before it parses a file.
import airflow.models, airflow.sdk, airflow.triggers.shared_stream
before = time.process_time()
import runpy
names = [name for name, value in runpy.run_path(sys.argv[1]).items()]
took = time.process_time() - before
loaded = [name for name in ("pyspark", "dagster", "pyarrow") if name in sys.modules]
assert not loaded, loaded
print(took)
"""


def processor_seconds(path: Path) -> float:
    """Run a DAG file as Airflow's DAG processor does; gives the processor time it took."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", IMPORT, str(path)],
        cwd=ROOT, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return float(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.stem)
def test_a_dag_file_loads_no_large_library(path: Path) -> None:
    assert processor_seconds(path) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.stem)
def test_a_dag_file_takes_less_than_a_second_of_processor_time(path: Path) -> None:
    # The least of several: other processes on the machine only add to it.
    assert min(processor_seconds(path) for _ in range(3)) < 1.0


def test_the_code_of_the_document_runs() -> None:
    text = (ROOT / "docs" / "airflow.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/airflow.md", "exec"), names)
    with names["DAG"]("with_the_decorator_of_airflow"):
        decorated = task.eventsql_consume(topic="rides", consumer="billing")(names["bill"])
    assert callable(decorated)
    assert names["claims_asset"]("rides", "billing").watchers[0].trigger.topic == "rides"
