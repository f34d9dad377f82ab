"""A whole Airflow on this machine, for the demo and for tests: its four processes over a PostgreSQL database."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import psutil
from sqlalchemy.engine.url import make_url

from eventsql_orchestration.airflow.api import TIMEOUT, URL_FILE, AirflowApi
from eventsql_orchestration.orchestration.errors import LocalAirflowError
from eventsql_orchestration.orchestration.local_processes import HOST, reserved_port

PARTS: Final = ("api-server", "scheduler", "dag-processor", "triggerer")

STOP_TIMEOUT: Final = 5.0
"""Seconds that parts get to end by themselves. Then they are killed, which loses nothing: their claims are leased."""

KILL_TIMEOUT: Final = 15.0
"""Seconds in which a killed process must be gone, on a busy machine."""


def kill_session(leader: int) -> None:
    """Kill the processes of a session, and the processes that they started. `leader` is the process that began it.

    Each task of Airflow leads its own process group, so it is not enough to kill the group of the scheduler.
    """
    deadline = time.monotonic() + KILL_TIMEOUT
    while members := [process for process in psutil.process_iter() if _is_of(leader, process)]:
        for member in members:
            # Commands of tasks have sessions of their own.
            for process in (*_children(member), member):
                # Commands may have ended meanwhile, or run as another user.
                with suppress(psutil.Error):
                    process.kill()
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _children(process: psutil.Process) -> list[psutil.Process]:
    """The processes that a process has started, and the processes that these have started."""
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _is_of(leader: int, process: psutil.Process) -> bool:
    """Whether a process belongs to a session and has not ended."""
    try:
        return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False


def connection_of(urls: Sequence[str], db_schema: str) -> str:
    """The connection to databases by their URLs, the first shard's first, as JSON for `AIRFLOW_CONN_…`.

    Raises `LocalAirflowError` for a URL without a host.
    """
    first = make_url(urls[0])
    if not first.host:
        raise LocalAirflowError("a connection of Airflow needs a host: name it in the database URL, such as 127.0.0.1")
    query = first.set(drivername="postgresql", username=None, password=None, host=None, port=None, database=None)
    return json.dumps({
        "conn_type": "eventsql", "host": first.host, "port": first.port, "login": first.username,
        "password": first.password, "schema": first.database,
        "extra": {
            "db_schema": db_schema, "parameters": str(query).partition("?")[2], "shards": " ".join(urls[1:]),
        },
    })  # fmt: skip


@dataclass
class LocalAirflow:
    """Airflow's API server, scheduler, DAG processor and triggerer, as child processes.

    `home` has its configuration and logs, `dags` its DAGs. `metadata_url` is an empty PostgreSQL database of its own,
    as `postgresql://…`. `connections` are connections by their names, as URIs or JSON; `environment` is added to the
    environment of the parts. If `port` is 0 or not free, the system chooses one; it is reserved until `stop`. `lock` is
    an open file with a lock, which the processes inherit; the numbers of their groups are written into it. A command,
    or the start of the parts, fails after `start_timeout` seconds; a start takes 15 s on a calm machine. `api` is its
    REST API.
    """

    home: Path
    dags: Path
    metadata_url: str
    connections: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    lock: int | None = None
    start_timeout: float = 180.0
    parts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    api: AirflowApi = field(init=False)
    _ports: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        # Another Airflow that starts meanwhile must not take them.
        self.port, of_workers, of_triggers = (
            self._ports.enter_context(reserved_port(port)) for port in (self.port, 0, 0)
        )
        self.api = AirflowApi(self.url)
        driver = self.metadata_url.replace("postgresql://", "postgresql+psycopg2://", 1)
        settings = {
            "core": {
                "executor": "LocalExecutor",
                "load_examples": "False",
                "dags_folder": str(self.dags.resolve()),
                "dags_are_paused_at_creation": "False",
                "parallelism": "4",
                "simple_auth_manager_all_admins": "True",
                "execution_api_server_url": f"{self.url}/execution/",
                "fernet_key": self._fernet_key(),
                # Tests of operators set it, and processes inherit it.
                "unit_test_mode": "False",
            },
            "database": {"sql_alchemy_conn": driver},
            "api": {"host": HOST, "port": str(self.port), "workers": "1", "secret_key": os.urandom(16).hex()},
            "api_auth": {"jwt_secret": os.urandom(32).hex()},
            "logging": {
                "base_log_folder": str(self.home / "logs"),
                "worker_log_server_port": str(of_workers),
                "trigger_log_server_port": str(of_triggers),
            },
            "dag_processor": {"refresh_interval": "5", "min_file_process_interval": "10"},
            # By default, a task fails after five times 5 s without an answer.
            "workers": {"execution_api_timeout": str(TIMEOUT)},
            "scheduler": {"scheduler_idle_sleep_time": "0.5", "task_instance_heartbeat_timeout": "60"},
        }
        self._environment = {
            **os.environ,
            # Programs of this environment, even if it is not active.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "AIRFLOW_HOME": str(self.home.resolve()),
            **{
                f"AIRFLOW__{section.upper()}__{name.upper()}": value
                for section, values in settings.items()
                for name, value in values.items()
            },
            **{f"AIRFLOW_CONN_{name.upper()}": uri for name, uri in self.connections.items()},
            **self.environment,
        }

    def _fernet_key(self) -> str:
        """The key by which Airflow encrypts values in its tables, such as triggers. A later start has to read them."""
        file = self.home / "fernet.key"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_bytes(base64.urlsafe_b64encode(os.urandom(32)))
        return file.read_text()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def migrate(self) -> None:
        """Create Airflow's tables. Raises `LocalAirflowError`."""
        self.run("db", "migrate")

    def run(self, *command: str) -> str:
        """Run a command of `airflow`; gives its output. Raises `LocalAirflowError`."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "airflow", *command], env=self._environment, capture_output=True, check=False,
                stdin=subprocess.DEVNULL, timeout=self.start_timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LocalAirflowError(f"airflow {' '.join(command)} took over {self.start_timeout:g} s") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise LocalAirflowError(f"airflow {' '.join(command)} failed: {said[-1] if said else done.returncode}")
        return done.stdout.decode()

    def start(self, parts: Sequence[str] = PARTS) -> None:
        """Start parts that do not run."""
        for part in parts:
            with (self.home / f"{part}.log").open("ab") as log:
                self.parts[part] = subprocess.Popen(
                    [sys.executable, "-m", "airflow", part], env=self._environment, stdout=log, stderr=log,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                    pass_fds=() if self.lock is None else (self.lock,),
                )  # fmt: skip
            if self.lock is not None:
                # The most recent groups, if a part was started again and again.
                groups = " ".join(str(process.pid) for process in self.parts.values()).encode()
                os.ftruncate(self.lock, 0)
                os.pwrite(self.lock, groups, 0)

    def kill(self, part: str) -> None:
        """Kill a part and the processes that it has started, at once."""
        process = self.parts.pop(part)
        kill_session(process.pid)
        process.wait(KILL_TIMEOUT)

    def stop(self) -> None:
        """End all parts, the API server last. Whatever is left after 5 s, or after an interrupt, is killed."""
        (self.home / URL_FILE).unlink(missing_ok=True)
        parts = sorted(self.parts.items(), key=lambda item: item[0] == "api-server")
        try:
            for _, process in parts:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT
            for _, process in parts:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for _, process in parts:
                # Tasks may be left of a part that has ended.
                kill_session(process.pid)
                process.wait(KILL_TIMEOUT)
            self.parts.clear()
            self._ports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Wait until the API server answers and every other part has reported. Raises `LocalAirflowError`."""
        deadline = time.monotonic() + self.start_timeout
        while (waiting_for := self._not_ready()) is not None:
            self.require_running()
            if time.monotonic() >= deadline:
                raise LocalAirflowError(
                    f"Airflow did not start within {self.start_timeout:g} s ({waiting_for}): see the logs in "
                    f"{self.home}"
                )
            time.sleep(0.5)

    def _not_ready(self) -> str | None:
        """A started part that is not ready yet, or None."""
        try:
            health = self.api.ask("GET", "/monitor/health")
        except LocalAirflowError:
            return "api-server"
        parts = (part for part in self.parts if part != "api-server")
        return next(
            (part for part in parts if (health.get(part.replace("-", "_")) or {}).get("status") != "healthy"), None
        )

    def require_running(self) -> None:
        """Raises `LocalAirflowError` if a part has ended by itself."""
        for part, process in self.parts.items():
            if process.poll() is not None:
                end = (self.home / f"{part}.log").read_text(errors="replace")[-2000:]
                raise LocalAirflowError(f"airflow {part} ended with {process.returncode}: {end}")
