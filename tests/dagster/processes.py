"""Processes of Dagster for tests: a run by itself, and a daemon with its code servers and runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PATIENT = {"DAGSTER_GRPC_TIMEOUT_SECONDS": "600", "DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS": "600"}
"""Code servers of a busy machine answer slowly."""


@contextmanager
def run_process(
    home: str | Path, dsn: str, module: str, job: str, *, config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None, delay: float = 0.0,
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """A run of a job in a process of its own, which takes `delay` seconds over each batch."""
    # fmt: off
    command = [
        sys.executable, "-m", "dagster", "job", "execute", "-m", f"tests.dagster.{module}", "-j", job,
        "--tags", json.dumps(dict(tags or {})),
    ]
    # fmt: on
    if config:
        file = Path(home, "run_config.yaml")
        file.write_text(json.dumps(config))
        command += ["--config", str(file)]
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "EVENTSQL_DSN": dsn,
        "EVENTSQL_TEST_DELAY": str(delay),
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            process.kill()
            process.wait(60)


class Machine:
    """A daemon with its code servers and runs, which can all die at once.

    With `stops`, the daemon may stop before and after it creates the run of a claim (`tests.dagster.stopping`).
    """

    def __init__(
        self, home: Path, *, location: str = "stopping_location", name: str = "daemon", stops: bool = True,
        **environment: str,
    ) -> None:  # fmt: skip
        self.environment = {**os.environ, **PATIENT, **environment, "DAGSTER_HOME": str(home)}
        self._log = home / f"{name}.log"
        daemon = [sys.executable, "-m", "tests.dagster.stopping"]
        if not stops:
            daemon = [str(Path(sys.executable).with_name("dagster-daemon"))]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [*daemon, "run", "-m", f"tests.dagster.{location}"], cwd=ROOT, env=self.environment, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.die()
        if kind is not None:
            sys.stderr.write(self._log.read_text())

    def has(self, pid: int) -> bool:
        return os.getpgid(pid) == self._process.pid

    def die(self) -> None:
        """Kill every process at once, as a power failure does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
