"""`eventsql dev --dags DIRECTORY --once`: a bounded round that ends by itself and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from eventsql_orchestration.airflow.local import PARTS
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.orchestration.local_processes import PROCESSES_LOCK
from tests.conftest import is_setting
from tests.fixtures import memory_disk
from tests.waiting import wait_until

DAGS = Path(__file__).parent / "round_dags"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    # Not in pytest's own directory: the embedded server runs as another user, whom the next start of pytest locks out.
    root = Path(tempfile.mkdtemp(prefix="eventsql-airflow-", dir=memory_disk()))
    root.chmod(0o755)
    yield root / "home"
    EmbeddedPostgres(root / "home" / "postgres").destroy()
    shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@contextmanager
def running(home: Path, dags: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `eventsql dev --dags` with everything that it starts in `home`."""
    environment = {name: value for name, value in os.environ.items() if not is_setting(name)}
    program = str(Path(sys.executable).with_name("eventsql"))
    command = [program, "--home", str(home), "dev", "--dags", str(dags), *options]
    with home.with_name("stdout").open("w") as stdout, home.with_name("stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=stdout, stderr=stderr)
        try:
            yield process
        finally:
            # It ends what it has started.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait(10)


def once(home: Path, dags: Path, *options: str, timeout: float) -> Ended:
    """Run a round."""
    with running(home, dags, "--once", *options) as process:
        process.wait(timeout)
    output, errors = home.with_name("stdout"), home.with_name("stderr")
    return Ended(process.returncode, output.read_text(), errors.read_text())


def left(home: Path) -> list[str]:
    """The processes that name a directory. Those of Spark in Python end by themselves when their Spark has ended."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if str(home) in str(process.info["environ"] or {}) and process.pid != os.getpid()
    ]
    _, alive = psutil.wait_procs(found, timeout=20)
    return [" ".join(process.info["cmdline"]) for process in alive]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_round_is_exact_and_ends_by_itself(home: Path) -> None:
    done = once(home, DAGS, "--orders", "20", timeout=580)
    assert done.returncode == 0, done.stderr
    header, row = (line.split() for line in done.stdout.splitlines() if line.strip())
    assert header == ["topic", "published", "transferred", "consumed", "consumers", "runs", "lag", "result"]
    assert (row[:5], row[6:]) == (["rides", "20", "20", "20", "1"], ["0", "exact"])
    assert left(home) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_reference_location_has_an_exact_round(home: Path) -> None:
    """Two pipelines, three of their consumers with Spark."""
    done = once(home, REPOSITORY / "deploy" / "airflow" / "dags", "--orders", "20", timeout=880)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()][1:]
    assert sorted(row[0] for row in rows) == [
        "directory_churn", "driver_utilisation", "file_changes", "ride_orders", "zone_fares",
    ]  # fmt: skip
    assert {tuple(row[-2:]) for row in rows} == {("0", "exact")}
    assert left(home) == []


STUCK = """
import os, pathlib, time
from airflow.sdk import DAG, task

with DAG("stuck", schedule=None, tags=["eventsql:setup"]):

    @task
    def wait() -> None:
        pathlib.Path({file!r}).write_text(str(os.getpid()))
        time.sleep(600)

    wait()
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_next_command_ends_what_a_killed_one_left(home: Path, tmp_path: Path) -> None:
    """Airflow's parts, and a task in the middle, which leads a process group of its own."""
    stuck = tmp_path / "stuck"
    stuck.mkdir()
    file = tmp_path / "task.pid"
    (stuck / "stuck.py").write_text(STUCK.format(file=str(file)))
    with running(home, stuck) as process:
        wait_until(lambda: file.exists() and file.read_text() != "", "the task begins", seconds=300)
        process.kill()
        process.wait(10)
    orphans = [psutil.Process(int(file.read_text())), *parts(home)]
    # All but the triggerer, which begins after the setup, and the task.
    assert len(orphans) == len(PARTS)

    done = once(home, DAGS, "--orders", "5", timeout=400)
    assert done.returncode == 0, done.stderr
    _, alive = psutil.wait_procs(orphans, timeout=0)
    assert alive == []
    assert left(home) == []


def parts(home: Path) -> list[psutil.Process]:
    """The processes of an Airflow."""
    numbers = (home / "airflow" / PROCESSES_LOCK).read_text().split()
    return [psutil.Process(int(number)) for number in numbers]
