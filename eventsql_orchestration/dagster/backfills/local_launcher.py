"""Backfills without a running Dagster: each run is a local process that executes a file of definitions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import dagster as dg
from dagster.components.definitions import LazyDefinitions

from eventsql_orchestration.dagster.backfills.assets import ASSETS_METADATA, backfill_of
from eventsql_orchestration.dagster.backfills.launcher import DEFINE_IT, BackfillJob, Ended
from eventsql_orchestration.dagster.local.dagster_process import failure_of, last_line
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, DAGSTER_PARTITION_TAG
from eventsql_orchestration.errors import LocalDagsterError, RunFailedError, ValidationError

GRACE: Final = 15.0
"""Seconds that an interrupted run has to give its claim back before it is killed."""


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """Where definitions are: a Python file or an importable module. Exactly one of the two is given."""

    file: Path | None = None
    module: str | None = None

    def __str__(self) -> str:
        return str(self.file or self.module)

    def arguments(self) -> list[str]:
        """The options by which Dagster's commands find it."""
        where = ["-m", str(self.module)] if self.file is None else ["-f", str(self.file.resolve())]
        return [*where, "-d", self._directory]

    @property
    def _directory(self) -> str:
        return str(Path.cwd() if self.file is None else self.file.resolve().parent)

    def load(self) -> tuple[str, dg.Definitions]:
        """Its definitions, loaded into this process, and their name there.

        As in Dagster, a function with `@dg.definitions` goes before other definitions. Raises `LocalDagsterError` if
        there are none or several, and if they cannot be loaded.
        """
        if self._directory not in sys.path:
            sys.path.insert(0, self._directory)
        try:
            name, found = self._found(self._import())
            return name, found if isinstance(found, dg.Definitions) else found()
        except LocalDagsterError:
            raise
        except Exception as error:
            raise LocalDagsterError(f"{self} cannot be loaded: {type(error).__name__}: {error}") from error

    def _found(self, module: ModuleType) -> tuple[str, dg.Definitions | LazyDefinitions[dg.Definitions]]:
        for kind in (LazyDefinitions, dg.Definitions):
            # One object may have several names.
            found = {id(value): (name, value) for name, value in vars(module).items() if isinstance(value, kind)}
            if len(found) > 1:
                names = ", ".join(sorted(name for name, _ in found.values()))
                raise LocalDagsterError(f"{self} has {len(found)} Definitions at its top level, not one: {names}")
            for only in found.values():
                return only
        raise LocalDagsterError(
            f"{self} has no Definitions at its top level: give it `defs = dg.Definitions(…)`, or a function with "
            "`@dg.definitions`"
        )

    def _import(self) -> ModuleType:
        if self.file is None:
            return importlib.import_module(str(self.module))
        spec = importlib.util.spec_from_file_location(self.file.stem, self.file)
        if spec is None or spec.loader is None:
            raise LocalDagsterError(f"{self} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


class LocalRuns:
    """Launches each run as a process, on the instance of DAGSTER_HOME, else on one that lasts as long as this object.

    `environment` is added to the environment of the processes.
    """

    outlives = False

    def __init__(self, location: CodeLocation, *, environment: Mapping[str, str]) -> None:
        self.location = location
        self._directory = tempfile.TemporaryDirectory(prefix="eventsql-backfill-")
        home = os.environ.get("DAGSTER_HOME")
        if not home:
            home = self._directory.name
            Path(home, "dagster.yaml").write_text("telemetry:\n  enabled: false\n", encoding="utf-8")
        self._environment = {**os.environ, **environment, "DAGSTER_HOME": home}
        self._instance = dg.DagsterInstance.from_config(home)
        self._processes: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def job(self, topic: str, consumer: str) -> BackfillJob:
        of = backfill_of(topic, consumer)
        name, definitions = self.location.load()
        for job in definitions.resolve_all_job_defs():
            if job.tags.get(BACKFILL_OF_TAG) == of:
                executable = job.asset_layer.executable_asset_keys
                specs = (each for each in definitions.resolve_all_asset_specs() if each.key in executable)
                asset = next(each for each in specs if ASSETS_METADATA in each.metadata)
                assert isinstance(asset.partitions_def, dg.DynamicPartitionsDefinition), "given with the metadata"
                assets = tuple(asset.metadata[ASSETS_METADATA].value)
                return BackfillJob(job.name, str(asset.partitions_def.name), assets, of, repository=name)
        raise ValidationError(f"{self.location} has no job for backfills of {topic}/{consumer}: {DEFINE_IT}")

    def require_running(self) -> None:
        """Nothing needs to run."""

    def prepare(self, job: BackfillJob, keys: Sequence[str]) -> None:
        self._instance.add_dynamic_partitions(job.partitions, list(keys))

    def was_run(self, job: BackfillJob, backfill_id: str) -> bool:
        return bool(self._instance.get_runs(dg.RunsFilter(tags=job.tags(backfill_id)), limit=1))

    def under_way(self, job: BackfillJob, backfill_id: str) -> dict[str, str]:  # noqa: ARG002 - as of any launcher
        """None: nothing tells whether the process of another command is alive. The lease of its window does."""
        return {}

    def launch(self, job: BackfillJob, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        number = uuid.uuid4().hex
        # fmt: off
        command = [
            sys.executable, "-m", "dagster", "job", "execute", *self.location.arguments(), "-a", job.repository,
            "-j", job.name, "--tags", json.dumps(job.run_tags(backfill_id, key)),
        ]
        # fmt: on
        if config := job.config(max_failures):
            file = Path(self._directory.name, f"{number}.json")
            file.write_text(json.dumps(config), encoding="utf-8")
            command += ["-c", str(file)]
        try:
            with self._log(number).open("wb") as log:
                # In a session of its own: Ctrl-C reaches this process only, which then ends the others.
                process = subprocess.Popen(
                    command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise RunFailedError(f"no process could be started for {key}: {error}") from error
        self._processes[number] = process, key
        return number

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        ended = {}
        for number in runs:
            process, key = self._processes[number]
            code = process.poll()
            if code is not None:
                ended[number] = Ended(True) if code == 0 else Ended(False, self._why(number, key, code))
        return ended

    def close(self) -> None:
        """Interrupt the runs, and kill those that do not end within 15 s."""
        running = [process for process, _ in self._processes.values() if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._instance.dispose()
        self._directory.cleanup()

    def _log(self, number: str) -> Path:
        return Path(self._directory.name, f"{number}.log")

    def _why(self, number: str, key: str, code: int) -> str:
        if code < 0:
            return f"its process was killed by signal {-code}"
        for run in self._instance.get_runs(dg.RunsFilter(tags={DAGSTER_PARTITION_TAG: key}), limit=1):
            if (why := failure_of(self._instance, run.run_id)) is not None:
                return why
        return f"its process ended with {code}: {last_line(self._log(number))}"
