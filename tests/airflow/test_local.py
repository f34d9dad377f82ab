"""A whole Airflow on this machine: what `eventsql dev --dags` makes of a connection, of asset events and of signals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from airflow.sdk import Connection
from click.testing import CliRunner
from cryptography.fernet import Fernet
from rich.progress import Progress

from eventsql_orchestration.airflow.api import TIMEOUT, AirflowApi
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.airflow.local import LocalAirflow, connection_of, kill_session
from eventsql_orchestration.airflow.round_runs import run_counts
from eventsql_orchestration.cli import airflow_development, main
from eventsql_orchestration.cli.airflow_development import _metadata_database, _Running
from eventsql_orchestration.database.urls import parse_dsn
from eventsql_orchestration.orchestration.errors import AirflowAnswerError, LocalAirflowError
from eventsql_orchestration.orchestration.local_processes import PROCESSES_LOCK, free_port, only_one, start_group
from tests.airflow.served import FakeAirflow, serving
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    "urls",
    [
        ["postgresql://me:a%2Fb%40c@db:5433/app?connect_timeout=5&sslmode=require"],
        ["postgresql://me@pool/app?direct=db%3A5433"],
        ["postgresql://me@one/app", "postgresql://me:x@two:1/app", "postgresql://three/app"],
    ],
)
def test_a_connection_leads_to_the_same_databases(urls: list[str]) -> None:
    hook = hook_of(connection_of(urls, "mine"))
    assert hook.urls == tuple(urls)
    assert hook.db_schema == "mine"


def hook_of(connection: str) -> EventSQLHook:
    """The hook of a connection that is given as JSON."""
    given = json.loads(connection)
    return EventSQLHook(connection=Connection(conn_id="c", **{**given, "extra": json.dumps(given["extra"])}))


class Answers:
    """Answers requests of the REST API from lists, two objects a page."""

    def __init__(self, **lists: list[dict[str, Any]]) -> None:
        self.lists = lists

    def pages(self, _path: str, field: str, **_query: Any) -> list[dict[str, Any]]:
        return self.lists[field]


def running_with(api: object) -> _Running:
    nothing = cast("Any", None)
    return _Running(
        context=nothing, platform=nothing, progress=Progress(disable=True), ui="", log=Path("logs"),
        check=lambda: None, airflow=cast("LocalAirflow", SimpleNamespace(api=api)), started=datetime.now(UTC),
        orders=None,
    )  # fmt: skip


def test_a_simulation_whose_run_was_deleted_has_ended() -> None:
    with serving(FakeAirflow()) as url:
        assert running_with(AirflowApi(url)).has_ended(("billing", "deleted"))


def test_a_round_waits_longer_for_runs_if_an_answer_is_lost() -> None:
    fake = FakeAirflow()
    with serving(fake) as url:
        running = running_with(AirflowApi(url))
        fake.lost = 1
        assert running.is_busy()
        assert not running.is_busy()

        fake.lost = 1
        assert running._wait("billing", "gone", deadline=math.inf) == "deleted"


def test_a_round_does_not_ask_again_what_airflow_refuses() -> None:
    fake = FakeAirflow()
    fake.login = {"username": "me", "password": "secret"}
    with serving(fake) as url:
        running = running_with(AirflowApi(url))
        with pytest.raises(AirflowAnswerError):
            running.is_busy()
        with pytest.raises(AirflowAnswerError):
            running._wait("billing", "run", deadline=math.inf)


def test_a_round_names_the_checks_that_did_not_pass() -> None:
    lists = {
        "dags": [{"dag_id": "checks"}],
        "task_instances": [{"task_id": "sums", "state": "failed"}, {"task_id": "fares", "state": "success"}],
    }
    answers = SimpleNamespace(
        trigger=lambda _dag: "manual__1", state=lambda _dag, _run: "failed",
        pages=lambda _path, field, **_query: lists[field],
    )  # fmt: skip
    faults = running_with(answers).verify(deadline=0.0)
    assert faults == ["check sums of DAG checks did not pass: see its log in logs"]


def test_a_round_counts_runs_by_their_claims_and_events_by_their_publications() -> None:
    claim = {"topic": "rides", "consumer": "billing", "partition": 0, "claim": 1, "after": 0, "upto": 9, "events": 9}
    run = {"dag_id": "billing", "run_id": "asset__1"}
    events: list[dict[str, Any]] = [
        # Airflow put two claims into one run.
        {"extra": {"from_trigger": True, "payload": claim}, "created_dagruns": [run]},
        {"extra": {"from_trigger": True, "payload": claim}, "created_dagruns": [run]},
        {"extra": {"from_trigger": True, "payload": claim}, "created_dagruns": [{**run, "run_id": "asset__2"}]},
        {"extra": {"from_trigger": True, "payload": {"of": "another trigger"}}, "created_dagruns": [run]},
        {"extra": {"topic": "sums", "events": 4, "repeated": False}, "created_dagruns": []},
        {"extra": {"topic": "sums", "events": 3, "repeated": False}, "created_dagruns": []},
        {"extra": {"topic": "sums", "events": 4, "repeated": True}, "created_dagruns": []},
        {"extra": {"something": "else"}, "created_dagruns": []},
        {"extra": None, "created_dagruns": []},
    ]
    runs = [
        {"state": "success", "run_type": "asset_triggered", "dag_id": "billing"},
        {"state": "failed", "run_type": "asset_triggered", "dag_id": "sums"},
        {"state": "failed", "run_type": "scheduled", "dag_id": "lag"},
    ]
    counts = run_counts(cast("AirflowApi", Answers(asset_events=events, dag_runs=runs)), datetime.now(UTC))
    assert (dict(counts.runs), dict(counts.published), counts.failed) == ({"rides": 2}, {"sums": 7}, ("sums",))


def test_an_interrupt_while_it_stops_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    airflow = LocalAirflow(tmp_path, tmp_path, "postgresql://nowhere/airflow")
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    airflow.parts["scheduler"] = process
    wait = process.wait

    def interrupted(_timeout: float) -> int:
        monkeypatch.setattr(process, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        airflow.stop()
    assert process.poll() == -9
    process.stdout.close()


RESERVING = """
import sys
from pathlib import Path
from eventsql_orchestration.airflow.local import LocalAirflow
airflow = LocalAirflow(Path(sys.argv[1]), Path(sys.argv[1]), "postgresql://nowhere/airflow", port=int(sys.argv[2]))
print(airflow.port, flush=True)
sys.stdin.read()
"""


def test_two_that_start_at_once_choose_different_ports(tmp_path: Path) -> None:
    port = free_port(0)
    command = [sys.executable, "-c", RESERVING, str(tmp_path), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == port
        with LocalAirflow(tmp_path, tmp_path, "postgresql://nowhere/airflow", port=port) as own:
            assert own.port != port
        other.communicate()


def test_a_later_start_reads_what_an_earlier_one_has_encrypted(tmp_path: Path) -> None:
    keys = {
        LocalAirflow(tmp_path, tmp_path, "postgresql://nowhere/airflow")._environment["AIRFLOW__CORE__FERNET_KEY"]
        for _ in range(2)
    }
    (key,) = keys
    Fernet(key)
    assert (tmp_path / "fernet.key").stat().st_mode & 0o077 == 0


def test_tasks_wait_for_an_api_server_that_is_slow_at_the_first_one(tmp_path: Path) -> None:
    with LocalAirflow(tmp_path, tmp_path, "postgresql://nowhere/airflow") as airflow:
        given = subprocess.run(
            [sys.executable, "-c", "from airflow.sdk.api.client import API_TIMEOUT; print(API_TIMEOUT)"],
            env=airflow._environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
    assert given.stdout.strip() == str(TIMEOUT)


def test_airflow_gets_a_database_beside_that_of_the_events_and_keeps_it(dsn: str) -> None:
    made = _metadata_database(dsn)
    assert parse_dsn(made).database == f"{parse_dsn(dsn).database}_airflow"
    assert _metadata_database(dsn) == made


def test_tasks_get_the_option_direct_and_airflow_itself_does_not(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str]] = []

    def make(_home: Path, _dags: Path, metadata_url: str, *, connections: dict[str, str], **_: object) -> LocalAirflow:
        made.append((metadata_url, connections["eventsql_default"]))
        raise LocalAirflowError("it is not started")

    monkeypatch.setattr(airflow_development, "LocalAirflow", make)
    given = f"{dsn}?direct=127.0.0.1:{parse_dsn(dsn).port}"
    options = ["--dags", str(tmp_path), "--once", "--cold-spark"]
    CliRunner().invoke(main, ["--dsn", given, "--home", str(tmp_path / "home"), "dev", *options])
    ((metadata_url, connection),) = made
    assert "direct" not in metadata_url
    assert [parse_dsn(url) for url in hook_of(connection).urls] == [parse_dsn(given)]


def test_airflow_has_as_long_to_start_as_the_option_gives(dsn: str, tmp_path: Path) -> None:
    home, dags = tmp_path / "home", tmp_path / "dags"
    dags.mkdir()
    options = ["--dags", str(dags), "--once", "--cold-spark", "--timeout", "1"]
    late = CliRunner().invoke(main, ["--dsn", dsn, "--home", str(home), "dev", *options])
    assert late.exit_code == 1
    assert "airflow db migrate took over 1 s" in late.stderr


PART = """
import subprocess, sys, time
task = subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0, pass_fds=[int(sys.argv[2])])
# The death of the task does not end it.
time.sleep(300)
"""
TASK = """
import subprocess
command = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
print(command.pid, flush=True)
command.wait(300)
"""


def started(directory: Path) -> subprocess.Popen[bytes]:
    """A part with a task, whose command's number it prints."""
    return start_group(
        directory / PROCESSES_LOCK,
        lambda lock: subprocess.Popen(
            [sys.executable, "-c", PART, TASK, str(lock)], pass_fds=(lock,), stdout=subprocess.PIPE,
            start_new_session=True,
        ),
    )  # fmt: skip


def test_the_tasks_of_an_airflow_whose_owner_was_killed_are_ended(tmp_path: Path) -> None:
    """A task leads a process group of its own, and its commands may lead a session."""
    part = started(tmp_path)
    assert part.stdout is not None
    try:
        command = psutil.Process(int(part.stdout.readline()))
        task = command.parent()
        assert task is not None
        assert os.getpgid(task.pid) == task.pid
        with only_one(tmp_path, kill=kill_session):
            _, left = psutil.wait_procs([command, task], timeout=PATIENCE)
        assert left == []
    finally:
        kill_session(part.pid)
        part.stdout.close()
        part.wait(PATIENCE)


def test_a_command_of_another_user_keeps_no_task_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, kill = started(tmp_path), psutil.Process.kill
    assert part.stdout is not None
    command = psutil.Process(int(part.stdout.readline()))

    def refuse(process: psutil.Process) -> None:
        if process.pid == command.pid:
            raise psutil.AccessDenied(process.pid)
        kill(process)

    try:
        task = command.parent()
        assert task is not None
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "kill", refuse)
            kill_session(part.pid)
        assert part.wait(PATIENCE) < 0
        assert psutil.wait_procs([task], timeout=PATIENCE)[1] == []
    finally:
        command.kill()
        kill_session(part.pid)
        part.stdout.close()
        part.wait(PATIENCE)
