"""Backfills without a running Dagster: each run is a local process that executes a file of definitions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import dagster as dg

from eventsql_orchestration.dagster.backfills.assets import ASSETS_METADATA, backfill_of
from eventsql_orchestration.dagster.backfills.job import DEFINE_IT, DagsterJob
from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.dagster.local.dagster_process import failure_of, last_line
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, HIDDEN
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.backfills.launcher import Ended, Launcher
from eventsql_orchestration.orchestration.errors import RunFailedError
from eventsql_orchestration.signals import ending

GRACE: Final = 15.0
"""Seconds in which an interrupted run may give its claim back. After them, the run is killed."""

_PROCESS_TAG: Final = f"{HIDDEN}process"
"""On a run; its value is the number of the process here. Other runs may have been of the same partition."""


class LocalRuns(Launcher):
    """Launches each run of a consumer's backfills as a process, on the instance of DAGSTER_HOME.

    Without DAGSTER_HOME, the instance lasts as long as this object. `environment` is added to the environment of the
    processes.
    """

    orchestrator = "Dagster"
    outlives = False

    def __init__(self, location: CodeLocation, topic: str, consumer: str, *, environment: Mapping[str, str]) -> None:
        self.location = location
        self._of = backfill_of(topic, consumer)
        self._directory = tempfile.TemporaryDirectory(prefix="eventsql-backfill-")
        home = os.environ.get("DAGSTER_HOME")
        if not home:
            home = self._directory.name
            Path(home, "dagster.yaml").write_text("telemetry:\n  enabled: false\n", encoding="utf-8")
        self._environment = {**os.environ, **environment, "DAGSTER_HOME": home}
        self._instance = dg.DagsterInstance.from_config(home)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @cached_property
    def job(self) -> DagsterJob:
        of = self._of
        name, definitions = self.location.load()
        for job in definitions.resolve_all_job_defs():
            if job.tags.get(BACKFILL_OF_TAG) != of:
                continue
            for asset in definitions.resolve_all_asset_specs():
                if asset.key in job.asset_layer.executable_asset_keys and ASSETS_METADATA in asset.metadata:
                    assert isinstance(asset.partitions_def, dg.DynamicPartitionsDefinition), "given with the metadata"
                    assets = tuple(asset.metadata[ASSETS_METADATA].value)
                    return DagsterJob(job.name, assets, str(asset.partitions_def.name), of, name)
        raise ValidationError(f"{self.location} has no job for backfills of {of}: {DEFINE_IT}")

    def prepare(self, keys: Sequence[str]) -> None:
        self._instance.add_dynamic_partitions(self.job.partitions, list(keys))

    def was_run(self, backfill_id: str) -> bool:
        return bool(self._instance.get_runs(dg.RunsFilter(tags=self.job.tags(backfill_id)), limit=1))

    def launch(self, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        job, number = self.job, uuid.uuid4().hex
        # fmt: off
        command = [
            sys.executable, "-m", "dagster", "job", "execute", *self.location.arguments(), "-a", job.repository,
            "-j", job.name, "--tags", json.dumps({**job.run_tags(backfill_id, key), _PROCESS_TAG: number}),
        ]
        # fmt: on
        if config := job.config(max_failures):
            file = Path(self._directory.name, f"{number}.json")
            file.write_text(json.dumps(config), encoding="utf-8")
            command += ["-c", str(file)]
        try:
            with self._log(number).open("wb") as log:
                # In a session of its own: Ctrl-C reaches only this process, and this process ends the others.
                process = subprocess.Popen(
                    command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise RunFailedError(f"no process could be started for {key}: {error}") from error
        self._processes[number] = process
        return number

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        ended = {}
        for number in runs:
            code = self._processes[number].poll()
            if code is not None:
                ended[number] = Ended(True) if code == 0 else Ended(False, self._why(number, code))
        return ended

    def close(self) -> None:
        """Interrupt the runs, and kill the runs that do not end within 15 s."""
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._instance.dispose()
        self._directory.cleanup()

    def _log(self, number: str) -> Path:
        return Path(self._directory.name, f"{number}.log")

    def _why(self, number: str, code: int) -> str:
        if code < 0:
            return f"its process {ending(code)}"
        for run in self._instance.get_runs(dg.RunsFilter(tags={_PROCESS_TAG: number}), limit=1):
            if (why := failure_of(self._instance, run.run_id)) is not None:
                return why
        return f"its process {ending(code)}: {last_line(self._log(number))}"
