"""A whole Airflow on this machine, for the demo and for tests: its four processes over a PostgreSQL database."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import requests
from cryptography.fernet import Fernet

from eventsql_orchestration.errors import EventSQLError

PARTS: Final = ("api-server", "scheduler", "dag-processor", "triggerer")

STOP_TIMEOUT: Final = 15.0
"""Seconds that a part has to end by itself. The triggerer waits for its triggers."""


class LocalAirflowError(EventSQLError):
    """Airflow did not start, or one of its parts has ended."""


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class LocalAirflow:
    """Airflow's API server, scheduler, DAG processor and triggerer, as processes of this one.

    `home` has its configuration and logs, `dags` its DAGs. `metadata_url` is an empty PostgreSQL database of its own,
    as `postgresql://…`. `connections` are connections by their names, as URIs or JSON; `environment` is added to that
    of the parts.
    """

    home: Path
    dags: Path
    metadata_url: str
    connections: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    parts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    port: int = field(default_factory=free_port, init=False)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
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
                "fernet_key": Fernet.generate_key().decode(),
            },
            "database": {"sql_alchemy_conn": driver},
            "api": {"host": "127.0.0.1", "port": str(self.port), "workers": "1", "secret_key": os.urandom(16).hex()},
            "api_auth": {"jwt_secret": os.urandom(32).hex()},
            "logging": {
                "base_log_folder": str(self.home / "logs"),
                "worker_log_server_port": str(free_port()),
                "trigger_log_server_port": str(free_port()),
            },
            "dag_processor": {"refresh_interval": "5", "min_file_process_interval": "10"},
            "scheduler": {"scheduler_idle_sleep_time": "0.5", "task_instance_heartbeat_timeout": "60"},
        }
        self._environment = {
            **os.environ,
            # Programs of this environment, also where it is not active.
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

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def migrate(self) -> None:
        """Create Airflow's tables. Raises `LocalAirflowError`."""
        self.run("db", "migrate")

    def run(self, *command: str) -> str:
        """Run a command of `airflow`; gives its output. Raises `LocalAirflowError`."""
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *command], env=self._environment, capture_output=True, check=False
        )
        if done.returncode:
            raise LocalAirflowError(f"airflow {' '.join(command)} failed: {done.stderr.decode()[-2000:]}")
        return done.stdout.decode()

    def start(self, parts: Sequence[str] = PARTS) -> None:
        """Start parts that do not run."""
        for part in parts:
            with (self.home / f"{part}.log").open("ab") as log:
                self.parts[part] = subprocess.Popen(
                    [sys.executable, "-m", "airflow", part], env=self._environment, stdout=log, stderr=log,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip

    def kill(self, part: str) -> None:
        """Kill a part and the processes that it has started, at once."""
        process = self.parts.pop(part)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End all parts, the API server last."""
        parts = sorted(self.parts.items(), key=lambda item: item[0] == "api-server")
        for _, process in parts:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        for _, process in parts:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.parts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self, timeout: float = 180.0) -> None:
        """Wait until the API server answers and every other part has reported. Raises `LocalAirflowError`."""
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            try:
                health = requests.get(f"{self.url}/api/v2/monitor/health", timeout=10).json()
                wanted = ("scheduler", "dag_processor", "triggerer")
                if all((health.get(part) or {}).get("status") == "healthy" for part in wanted):
                    return
            except (requests.RequestException, ValueError):
                pass
            if time.monotonic() >= deadline:
                raise LocalAirflowError(f"Airflow did not start within {timeout:.0f} s: see the logs in {self.home}")
            time.sleep(0.5)

    def check(self) -> None:
        """Raises `LocalAirflowError` if a part has ended by itself."""
        for part, process in self.parts.items():
            if process.poll() is not None:
                end = (self.home / f"{part}.log").read_text(errors="replace")[-2000:]
                raise LocalAirflowError(f"airflow {part} ended with {process.returncode}: {end}")

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """Ask the public REST API, for example `ask("GET", "/dags")`. Raises `LocalAirflowError`."""
        token = requests.get(f"{self.url}/auth/token", timeout=30).json()["access_token"]
        answer = requests.request(
            method, f"{self.url}/api/v2{path}", json=body or None, timeout=30,
            headers={"Authorization": f"Bearer {token}"},
        )  # fmt: skip
        if not answer.ok:
            raise LocalAirflowError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer.json() if answer.content else None
