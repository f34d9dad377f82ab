"""The DAGs of deploy/airflow: they are imported without warnings, soon, and without Spark or Dagster."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import task

from assets.churn.effects import FILE_CHANGES
from eventsql_orchestration import EventSQL
from tests.airflow.conftest import context_of

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


def test_each_commit_is_published_once_whenever_a_task_is_killed(
    connected: EventSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected.registry.register_topic(FILE_CHANGES)

    def commit(name: str) -> None:
        (tmp_path / name).write_text("a line\n")
        author = ["-c", "user.name=someone", "-c", "user.email=someone@example.com", "-c", "commit.gpgsign=false"]
        for command in (["init", "--quiet"], ["add", name], [*author, "commit", "--quiet", "--message", name]):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True)

    publish = runpy.run_path(str(ROOT / "deploy" / "airflow" / "dags" / "churn.py"))["file_changes"].function

    def tried(run: str) -> Any:
        """A try of the task in a run. It has published when it gives its first report."""
        monkeypatch.setitem(publish.__globals__, "get_current_context", lambda: context_of("file_changes", run_id=run))
        return next(publish(params={"repository": str(tmp_path), "commits": 50}), None)

    commit("first")
    assert tried("one").extra["events"] == 1
    # Airflow has stored no report of the run: its task was killed.
    assert tried("two") is None
    commit("second")
    assert tried("one").extra["repeated"]
    assert tried("three").extra["events"] == 1
    assert tried("four") is None
    assert [event.key for event in connected.reader.read(FILE_CHANGES.name)] == ["first", "second"]
