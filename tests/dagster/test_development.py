"""Dagster on this machine: one owner at a time, the remains of a killed owner, ports, proxies, and clear failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg
import pytest

from eventsql_orchestration.dagster.local import dagster_process
from eventsql_orchestration.dagster.local import webserver as webserver_client
from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.dagster.local.dagster_process import LocalDagster, failure_of, last_line, running_url
from eventsql_orchestration.orchestration import local_processes
from eventsql_orchestration.orchestration.errors import LocalDagsterError, LocalProcessError, RunFailedError
from eventsql_orchestration.orchestration.local_processes import (
    PROCESSES_LOCK,
    SPARK_LOCK,
    free_port,
    only_one,
    start_group,
    temporary_directory,
)
from tests.conftest import is_setting
from tests.waiting import PATIENCE


def test_an_instance_has_one_owner_at_a_time(tmp_path: Path) -> None:
    with only_one(tmp_path), pytest.raises(LocalProcessError, match="another `eventsql dev` runs"), only_one(tmp_path):
        pass
    with only_one(tmp_path):
        pass


def test_temporary_files_are_deleted_with_the_processes_even_if_the_owner_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with temporary_directory(tmp_path / "home") as made:
        (made / "left").mkdir()
    assert not made.exists()
    # As a killed owner leaves it.
    (made / "left").mkdir(parents=True)
    with temporary_directory(tmp_path / "home") as again, temporary_directory(tmp_path / "other") as other:
        assert (again, list(again.iterdir())) == (made, [])
        assert other != again
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", [PROCESSES_LOCK, SPARK_LOCK])
def test_the_processes_of_an_owner_that_was_killed_are_ended(tmp_path: Path, name: str) -> None:
    orphan = start_group(
        tmp_path / name, lambda lock: subprocess.Popen(["sleep", "600"], pass_fds=(lock,), start_new_session=True)
    )
    with pytest.raises(LocalProcessError, match=r"run on .* already"):
        start_group(tmp_path / name, lambda _: pytest.fail("it started"))
    with only_one(tmp_path):
        assert orphan.wait(PATIENCE) < 0


def test_the_number_of_an_earlier_process_group_is_deleted_before_a_new_group_starts(tmp_path: Path) -> None:
    lock = tmp_path / PROCESSES_LOCK
    lock.write_text("12345")
    noted = []

    def start(descriptor: int) -> subprocess.Popen[bytes]:
        noted.append(lock.read_text())
        return subprocess.Popen(["sleep", "0"], pass_fds=(descriptor,), start_new_session=True)

    process = start_group(lock, start)
    assert (noted, lock.read_text()) == ([""], str(process.pid))
    process.wait(60)


def test_the_pid_of_an_ended_owner_is_not_killed(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        (tmp_path / "processes.lock").write_text(str(bystander.pid))
        with only_one(tmp_path):
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(60)


def test_the_session_of_a_new_owner_is_not_killed(tmp_path: Path) -> None:
    """A group that has ended may have had the number of the session or group in which the new owner runs."""
    lock = tmp_path / PROCESSES_LOCK
    orphan = start_group(
        lock, lambda lock: subprocess.Popen(["sleep", "600"], pass_fds=(lock,), start_new_session=True)
    )
    lock.write_text(f"{os.getsid(0)} {os.getpgrp()} {orphan.pid}")
    killed = []

    def kill(group: int) -> None:
        killed.append(group)
        orphan.kill()

    with only_one(tmp_path, kill=kill):
        orphan.wait(PATIENCE)
    assert killed == [orphan.pid]


def test_processes_that_cannot_be_killed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_processes, "_KILL_TIMEOUT", 0.1)
    orphan = start_group(
        tmp_path / PROCESSES_LOCK,
        lambda lock: subprocess.Popen(["sleep", "600"], pass_fds=(lock,), start_new_session=True),
    )
    still_run = f"still run \\(groups {orphan.pid}\\)"
    with pytest.raises(LocalProcessError, match=still_run), only_one(tmp_path, kill=lambda _: None):
        pytest.fail("it goes on beside them")
    orphan.kill()
    orphan.wait(PATIENCE)


def test_a_taken_port_is_not_chosen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port
    assert free_port(port) == port


RESERVING = """
import sys
from eventsql_orchestration.orchestration.local_processes import reserved_port
with reserved_port(int(sys.argv[1])) as port:
    print(port, flush=True)
    sys.stdin.read()
"""


def test_two_commands_that_start_at_once_choose_different_ports() -> None:
    port = free_port(0)
    command = [sys.executable, "-c", RESERVING, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == port
        with local_processes.reserved_port(port) as chosen:
            assert chosen != port
        other.communicate()
    with local_processes.reserved_port(port) as chosen:
        assert chosen == port


def test_a_lock_that_another_user_may_hold_for_ever_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"eventsql-ports-{os.getuid()}.lock").symlink_to(tmp_path / "made elsewhere")
    with pytest.raises(LocalProcessError), local_processes.reserved_port(0):
        pass
    assert not (tmp_path / "made elsewhere").exists()

    other = os.getuid() + 1
    (tmp_path / f"eventsql-ports-{other}.lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(LocalProcessError, match="belongs to another user"), local_processes.reserved_port(0):
        pass


def test_a_temporary_directory_that_another_user_has_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with local_processes.temporary_directory(tmp_path) as made:
        # Another user's directory cannot be removed.
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(LocalProcessError, match=made.name), local_processes.temporary_directory(tmp_path):
            pass


class Answering(BaseHTTPRequestHandler):
    """Answers queries, and says nothing."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"data": self.data(asked["query"], asked["variables"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def data(self, query: str, variables: dict[str, Any]) -> object: ...

    def log_message(self, *_: object) -> None: ...


class Webserver(Answering):
    """Answers as Dagster's does when the location is loaded, or has failed with an error.

    `healthy`: the daemon has reported that it takes runs out of the queue.
    """

    error: ClassVar[dict[str, object]] = {}
    healthy = True

    def data(self, *_: object) -> object:
        entries = [{"name": "x", "loadStatus": "LOADED", "locationOrLoadError": self.error}]
        jobs = [
            {"name": "transfer", "tags": [{"key": "eventsql/transfer", "value": "transfer"}]},
            {"name": "setup", "tags": []},
        ]
        daemon = {"daemonType": "QUEUED_RUN_COORDINATOR", "required": True, "healthy": self.healthy}
        return {
            "workspaceOrError": {"locationEntries": entries},
            "repositoriesOrError": {"nodes": [{"jobs": jobs}]},
            "instance": {"daemonHealth": {"allDaemonStatuses": [daemon]}},
        }


@pytest.fixture
def webserver() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Webserver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def local(home: Path, port: int = 1) -> LocalDagster:
    return LocalDagster(CodeLocation(home / "definitions.py"), instance_home=home, port=port)


def test_a_proxy_of_the_environment_is_not_used_for_loopback(
    tmp_path: Path, webserver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert local(tmp_path, webserver)._not_ready() is None


def test_an_empty_file_that_a_killed_process_has_left_leads_to_no_dagster(tmp_path: Path) -> None:
    (tmp_path / "dagster.url").touch()
    assert running_url(tmp_path) is None


def test_dagster_is_not_ready_until_its_daemon_starts_runs(
    tmp_path: Path, webserver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Webserver, "healthy", False)
    assert local(tmp_path, webserver)._not_ready() == "the daemon"


def test_dagster_is_not_ready_if_its_webserver_does_not_tell_the_state_of_the_daemon(
    tmp_path: Path, webserver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_webserver: webserver_client.Webserver) -> bool:
        raise LocalDagsterError("no Dagster answers")

    monkeypatch.setattr(webserver_client.Webserver, "starts_runs", late)
    assert local(tmp_path, webserver)._not_ready() == "the webserver"


def test_a_location_that_fails_when_it_runs_is_named_with_its_place(
    tmp_path: Path, webserver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    source = compile("\nprint(undefined)\n", str(tmp_path / "orders.py"), "exec")
    with pytest.raises(NameError) as raised:
        exec(source, {})
    cause = {"message": f"NameError: {raised.value}\n", "stack": traceback.format_tb(raised.value.__traceback__)}
    wrapped = {"message": "dagster.Wrapper: Error in\nmodule_name=orders\n", "stack": [], "causes": [cause]}
    monkeypatch.setattr(Webserver, "error", wrapped)
    with pytest.raises(LocalDagsterError) as refused:
        local(tmp_path, webserver)._not_ready()
    assert "orders.py, line 2: NameError: name 'undefined' is not defined" in refused.value.message


def test_jobs_are_found_by_their_tags(tmp_path: Path, webserver: int) -> None:
    dagster = local(tmp_path, webserver)
    assert dagster.jobs_with("eventsql/transfer") == ["transfer"]
    assert dagster.jobs_with("eventsql/claim") == []
    with pytest.raises(LocalDagsterError):
        local(tmp_path, free_port(0)).jobs_with("eventsql/transfer")


@dg.op
def fails() -> None:
    raise ValueError("no such file")


@dg.job
def failing() -> None:
    fails()


def test_the_error_of_a_failed_run_is_shown(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    run = failing.execute_in_process(instance=instance, raise_on_error=False)
    assert failure_of(instance, run.run_id) == "ValueError: no such file"
    with pytest.raises(RunFailedError, match="'failing' ended as FAILURE: ValueError: no such file"):
        local(tmp_path).wait(instance, run.run_id, timeout=5)


def test_waiting_for_a_run_ends_with_the_processes_that_would_run_it(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    run = instance.create_run_for_job(failing, status=dg.DagsterRunStatus.STARTED)
    with pytest.raises(LocalDagsterError, match="does not run any more"):
        local(tmp_path).wait(instance, run.run_id, timeout=60)


def test_the_last_words_of_dagster_have_no_colours(tmp_path: Path) -> None:
    log = tmp_path / "dagster.log"
    log.write_text("before\n\x1b[1;91mException: \x1b[0mthe webserver ended with code \x1b[1;36m1\x1b[0m\n\n")
    assert last_line(log) == "Exception: the webserver ended with code 1"


class Refusing(Answering):
    """Answers as a webserver behind a proxy that asks for a password, or whose storage is down."""

    answer: ClassVar = (401, b"<h1>Unauthorized</h1>")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, text = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (401, "<h1>Unauthorized</h1>", "<h1>Unauthorized</h1>"),
        (200, '{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        # The data may be long, and the errors stand behind them.
        (500, json.dumps({"data": ["orders"] * 500, "errors": [{"message": "gone"}]}), '[{"message": "gone"}]'),
    ],
)
def test_a_refusal_of_a_webserver_is_told_with_its_words(
    monkeypatch: pytest.MonkeyPatch, status: int, text: str, told: str
) -> None:
    monkeypatch.setattr(Refusing, "answer", (status, text.encode()))
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        client = webserver_client.Webserver(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(LocalDagsterError) as refused:
            client.repositories()
        thread.join()
    assert str(refused.value).endswith(f"refused a query (HTTP status {status}): {told}")


class Ending(Answering):
    """Answers as a webserver with one run, which ends when it is told to."""

    under_way: ClassVar[list[dict[str, object]]] = []

    def data(self, query: str, variables: dict[str, Any]) -> object:
        if "terminateRun" in query:
            assert variables == {"run": "r1"}
            self.under_way.clear()
            return {"terminateRun": {"__typename": "TerminateRunSuccess"}}
        assert "STARTED" in variables["filter"]["statuses"]
        return {"runsOrError": {"results": list(self.under_way)}}


class Silent(Ending):
    """Never answers, as a webserver whose database is down."""

    over: ClassVar = threading.Event()

    def do_POST(self) -> None:
        self.over.wait()


@pytest.mark.parametrize(
    ("handler", "seconds", "says"),
    [
        (Ending, PATIENCE, ["ending Dagster's processes", "waiting for 1 run (mail)"]),
        (Silent, dagster_process.STOP_SECONDS, ["ending Dagster's processes"]),
    ],
)
def test_the_end_tells_runs_and_does_not_wait_for_a_webserver_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: type[Ending], seconds: float, says: list[str]
) -> None:
    monkeypatch.setattr(dagster_process, "STOP_SECONDS", seconds)
    Ending.under_way[:] = [{"runId": "r1", "jobName": "mail", "status": "STARTED", "tags": []}]
    Silent.over.clear()
    said: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        dagster = LocalDagster(
            CodeLocation(tmp_path / "definitions.py"), instance_home=tmp_path, port=server.server_port,
            on_stop=said.append,
        )  # fmt: skip
        # It heeds no signal, like a daemon whose tick is under way.
        dagster._process = subprocess.Popen(["sh", "-c", "trap '' INT TERM; exec sleep 600"], start_new_session=True)
        process = dagster._process
        dagster.stop()
        Silent.over.set()
        server.shutdown()
        thread.join()
    assert said == says
    assert process.poll() == -signal.SIGKILL


def test_a_second_dev_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").touch()
    command = [str(Path(sys.executable).with_name("eventsql")), "--home", str(tmp_path / "home"), "dev"]
    environment = {name: value for name, value in os.environ.items() if not is_setting(name)}
    with only_one(tmp_path / "home" / "dagster"):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "another `eventsql dev` runs" in done.stderr
    assert not (tmp_path / "home" / "postgres").exists(), "it would have stopped the first one's server"
