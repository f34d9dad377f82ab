"""Dagster on this machine: webserver and daemon as one child process, driven through its GraphQL API."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import dagster as dg
import requests

from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.dagster.local.webserver import RunOfWebserver, Webserver, one_line
from eventsql_orchestration.dagster.tags import TRANSFER_TAG, UNFINISHED
from eventsql_orchestration.orchestration.errors import LocalDagsterError, RunFailedError
from eventsql_orchestration.orchestration.local_processes import (
    HOST,
    PROCESSES_LOCK,
    kill_group,
    reserved_port,
    start_group,
)
from eventsql_orchestration.orchestration.webservers import proxies_of
from eventsql_orchestration.signals import handling
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.validation import counted

_URL_FILE: Final = "dagster.url"

STOP_SECONDS: Final = 0.7
"""Seconds that runs get to end before they are killed. A killed run loses nothing: its effects are rolled back, and its
claim is consumed again."""

UNDER_WAY: Final = dg.RunsFilter(statuses=list(UNFINISHED))

_LOCATIONS = """
{ workspaceOrError {
    ... on Workspace { locationEntries { name loadStatus locationOrLoadError {
        ... on PythonError { message stack causes { message stack } }
    } } }
    ... on PythonError { message }
} }
"""


def running_url(instance_home: Path) -> str | None:
    """The URL of the `eventsql dev` that runs on this instance; None if none answers."""
    with contextlib.suppress(OSError, requests.RequestException):
        url = (instance_home / _URL_FILE).read_text(encoding="utf-8")
        requests.get(f"{url}/server_info", timeout=10, proxies=proxies_of(url)).raise_for_status()
        return url
    return None


class LocalDagster:
    """`dagster dev` on one code location, listening on loopback only.

    `instance_home` is a directory with a dagster.yaml, which `only_one` locks; `environment` is added to the
    environment of the processes. `start` takes another port if `port` is not free, and any free port for 0. Leaving the
    context gives unfinished runs `STOP_SECONDS` to end, and kills the processes. `on_stop` gets a line of text about
    each step of this.
    """

    def __init__(
        self,
        location: CodeLocation,
        *,
        instance_home: Path,
        port: int,
        environment: Mapping[str, str] | None = None,
        on_stop: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.location = location
        self._on_stop = on_stop
        self.instance_home = instance_home.resolve()
        self.port = port
        self.log = self.instance_home / "dagster.log"
        self._environment = {**os.environ, **(environment or {}), "DAGSTER_HOME": str(self.instance_home)}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self, *, timeout: float = 120.0, on_wait: Callable[[str], None] = lambda _: None) -> None:
        """Start the processes and wait at most `timeout` seconds until the location is loaded and runs can start.

        `on_wait` gets the name of the part that is not ready yet. Raises `LocalDagsterError`.
        """
        self._give_up_leftovers()
        # Reserve the port until Dagster listens. Otherwise another `eventsql dev` could take the same port, and each
        # would ask the other's webserver.
        with reserved_port(self.port) as self.port:
            self._start_process()
            self._await(timeout, on_wait)
        (self.instance_home / _URL_FILE).write_text(self.url, encoding="utf-8")

    def _await(self, timeout: float, on_wait: Callable[[str], None]) -> None:
        deadline = time.monotonic() + timeout
        while (waiting_for := self._not_ready()) is not None:
            self.require_running()
            if time.monotonic() > deadline:
                raise LocalDagsterError(f"Dagster did not start within {timeout:g} s ({waiting_for}); see {self.log}")
            on_wait(waiting_for)
            time.sleep(0.25)

    def _start_process(self) -> None:
        # fmt: off
        command = [
            sys.executable, "-m", "dagster", "dev", "-h", HOST, "-p", str(self.port),
            *self.location.arguments(),
            "--log-level", "warning", "--log-format", "rich",
        ]
        # fmt: on
        # In a session of its own: Ctrl-C reaches only this process, and this process ends the others. A shell starts
        # background processes with SIGINT ignored, and children would inherit that: runs have to heed it.
        with self.log.open("wb") as log, handling(signal.default_int_handler, signal.SIGINT):
            self._process = start_group(
                self.instance_home / PROCESSES_LOCK,
                lambda lock: subprocess.Popen(
                    command, cwd=self.location.directory, env=self._environment, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(lock,),
                ),
            )  # fmt: skip

    def require_running(self) -> None:
        """Raises `LocalDagsterError` if the processes have ended by themselves."""
        if self._process is None or self._process.poll() is not None:
            raise LocalDagsterError(f"Dagster does not run any more: {last_line(self.log)}; see {self.log}")

    def _give_up_leftovers(self) -> None:
        """Cancel runs whose processes ended with an earlier start of this instance."""
        with self.instance() as instance:
            for run in instance.get_runs(UNDER_WAY):
                instance.report_run_canceled(run, message="Its processes ended with an earlier `eventsql dev`.")

    def _not_ready(self) -> str | None:
        """The part that is not ready yet, or None. Raises `LocalDagsterError` if the location cannot load."""
        webserver = Webserver(self.url, timeout=10)
        try:
            workspace = webserver.ask(_LOCATIONS)["workspaceOrError"]
            starts_runs = webserver.starts_runs()
        except (LocalDagsterError, KeyError):
            return "the webserver"
        entries = workspace.get("locationEntries")
        if not entries or any(entry["loadStatus"] == "LOADING" for entry in entries):
            return "the code location"
        for entry in entries:
            error = entry["locationOrLoadError"] or {}
            if error.get("message"):
                why = self._cause_of(error)
                raise LocalDagsterError(f"{self.location} cannot be loaded: {why}; see {self.log}")
        return None if starts_runs else "the daemon"

    def _cause_of(self, error: Mapping[str, Any]) -> str:
        """The location's own error, with its place in the location. Dagster wraps it in errors of its own."""
        cause = [error, *error["causes"]][-1]
        frames = re.findall(r'^\s*File "(.+)", line (\d+)', "\n".join(cause["stack"]), flags=re.MULTILINE)
        own = [f"{os.path.relpath(file)}, line {line}: " for file, line in frames if self.location.has(Path(file))]
        return "".join(own[-1:]) + one_line(cause["message"])

    def jobs_with(self, tag: str, value: str | None = None) -> list[str]:
        """The jobs of the location that carry a tag, with any value or with this one.

        Raises `LocalDagsterError` if the webserver does not answer.
        """
        return sorted(
            job["name"]
            for job in self._jobs()
            if any(each["key"] == tag and value in (None, each["value"]) for each in job["tags"])
        )

    def values_of(self, tag: str) -> set[str]:
        """The values of a tag of the location's jobs. Raises as `jobs_with`."""
        return {each["value"] for job in self._jobs() for each in job["tags"] if each["key"] == tag}

    def _jobs(self) -> list[dict[str, Any]]:
        return [job for repository in Webserver(self.url).repositories() for job in repository["jobs"]]

    def instance(self) -> dg.DagsterInstance:
        """The instance of these processes, which the caller closes."""
        return dg.DagsterInstance.from_config(str(self.instance_home))

    def launch(self, job: str, *, run_config: Mapping[str, Any] | None = None) -> str:
        """Launch a run of `job`; gives its id. Raises as `Webserver.launch`."""
        webserver = Webserver(self.url)
        for repository in webserver.repositories():
            if job in {each["name"] for each in repository["jobs"]}:
                name, location = repository["name"], repository["location"]["name"]
                return webserver.launch(name, location, job, config=run_config or {}, tags={})
        raise RunFailedError(f"job {job!r} could not be launched: {self.location} has no such job")

    def wait(self, instance: dg.DagsterInstance, run_id: str, *, timeout: float) -> dg.DagsterRun:
        """Wait until a run has succeeded.

        Raises `RunFailedError` if it does not succeed within `timeout` seconds, `LocalDagsterError` if Dagster ends.
        """
        deadline = time.monotonic() + timeout
        while True:
            run = instance.get_run_by_id(run_id)
            if run is None:
                raise RunFailedError(f"run {run_id} was deleted")
            if run.status is dg.DagsterRunStatus.SUCCESS:
                return run
            where = f"{self.url}/runs/{run_id}"
            if run.is_finished:
                why = failure_of(instance, run_id) or f"see {where}"
                raise RunFailedError(f"the run of job {run.job_name!r} ended as {run.status.value}: {why}")
            if time.monotonic() > deadline:
                raise RunFailedError(f"the run of job {run.job_name!r} took more than {timeout:.0f} s: see {where}")
            self.require_running()
            time.sleep(0.25)

    def stop(self) -> None:
        """End the runs, and kill the processes: all of their state is in the database."""
        process, self._process = self._process, None
        if process is None:
            return
        (self.instance_home / _URL_FILE).unlink(missing_ok=True)
        try:
            if process.poll() is None:
                self._on_stop("ending Dagster's processes")
                self._end_runs(time.monotonic() + STOP_SECONDS)
        finally:
            kill_group(process.pid)
            process.wait()

    def _end_runs(self, deadline: float) -> None:
        # While its database is down, a webserver answers late or never. Then the next start cancels the runs.
        with contextlib.suppress(LocalDagsterError):
            runs = self._runs_before(deadline)
            # Do not mention runs of the transfer: they have nothing to lose.
            if told := [run for run in runs if TRANSFER_TAG not in run.tags]:
                self._on_stop(f"waiting for {_described(told)}")
            for run in runs:
                start_thread("end", self._end_run, run.id)
            while (left := self._runs_before(deadline)) and time.monotonic() < deadline:
                time.sleep(0.05)
            if killed := [run for run in left if TRANSFER_TAG not in run.tags]:
                self._on_stop(f"killing {_described(killed)}: work since the last commit is done again later")

    def _runs_before(self, deadline: float) -> list[RunOfWebserver]:
        """The runs under way. Raises `LocalDagsterError` if no answer comes before `deadline`."""
        webserver = Webserver(self.url, timeout=max(0.1, deadline - time.monotonic()))
        return webserver.runs(statuses=[status.value for status in UNFINISHED])

    def _end_run(self, run_id: str) -> None:
        # A webserver that does not answer ends with the other processes.
        with contextlib.suppress(LocalDagsterError):
            Webserver(self.url, timeout=STOP_SECONDS).terminate(run_id)

    def __enter__(self) -> LocalDagster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _described(runs: Sequence[RunOfWebserver]) -> str:
    jobs = sorted({run.job for run in runs})
    return f"{counted(len(runs), 'run')} ({', '.join(jobs[:3])}{', …' if len(jobs) > 3 else ''})"


_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")


def last_line(log: Path) -> str:
    """The last line of a process's log, without the colours that Dagster gives its errors."""
    with contextlib.suppress(OSError):
        if lines := log.read_text(errors="replace").strip().splitlines():
            return _COLOUR.sub("", lines[-1]).strip()
    return "it left no message"


def failure_of(instance: dg.DagsterInstance, run_id: str) -> str | None:
    """The error of a run's first failed step, in one line; None if no step failed."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        if entry.dagster_event is not None and (error := entry.dagster_event.step_failure_data.error) is not None:
            return one_line((error.cause or error).message)
    return None
