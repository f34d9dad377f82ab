"""Every kind of process of a whole Dagster is killed while consumers and backfills are at work.

The daemon, its code server, the fork server, runs, the webserver and the command `eventsql backfill` die by SIGKILL;
runs also stand still for longer than their leases. Dagster's run retries are on. Every event of every range takes
effect once in each consumer, and in order within a partition.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from dagster._core.execution.backfill import BulkActionStatus

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.dagster import write_instance
from eventsql_orchestration.dagster.launcher.worker import Worker
from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE
from eventsql_orchestration.dagster.local.webserver import Webserver
from eventsql_orchestration.model import Retention
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import ReplayRange, Window, read_key
from eventsql_orchestration.orchestration.errors import LocalDagsterError
from eventsql_orchestration.orchestration.local_processes import free_port
from eventsql_orchestration.topics.positions import AtOffset, Earliest
from tests.dagster import killed_location as location
from tests.dagster.conftest import sql
from tests.dagster.processes import PATIENT, ROOT
from tests.waiting import wait_until

SECONDS: Final = 600.0
"""Seconds that the system may take after the kills."""

BY_COMMAND, BY_DAGSTER = "by-command", "by-dagster"

LAUNCH = """
mutation ($asset: AssetKeyInput!, $keys: [String!]!) {
    launchPartitionBackfill(backfillParams: {assetSelection: [$asset], partitionNames: $keys}) {
        __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message }
    }
}
"""


class Processes:
    """Programs of Dagster on one instance, each in a session of its own."""

    def __init__(self, home: Path, dsn: str) -> None:
        self._home = home
        self._dsn = dsn
        self.log = home / "processes.log"
        self.port = free_port(0)
        self.url = f"http://127.0.0.1:{self.port}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        module = ["-m", "tests.dagster.killed_location"]
        commands: dict[str, list[str | Path]] = {
            "daemon": [Path(sys.executable).with_name("dagster-daemon"), "run", *module],
            "webserver": [sys.executable, "-m", "dagster_webserver", "-h", "127.0.0.1", "-p", str(self.port), *module],
            "backfill": [
                Path(sys.executable).with_name("eventsql"), "backfill", "orders", "ledger", "--resume", BY_COMMAND,
                "--execute", "--parallel", "3", "--dagster-url", self.url,
            ],
        }  # fmt: skip
        with self.log.open("ab") as output:
            self._running[name] = subprocess.Popen(
                commands[name], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **PATIENT, "DAGSTER_HOME": str(self._home)}, start_new_session=True,
            )  # fmt: skip

    def keep(self, name: str) -> None:
        """Restart a program that has ended."""
        if name not in self._running or self._running[name].poll() is not None:
            self.start(name)

    def ended(self, name: str) -> bool:
        return self._running[name].poll() == 0

    def kill(self, name: str) -> bool:
        process = self._running.get(name)
        if process is None or process.poll() is not None:
            return False
        process.kill()
        process.wait(60)
        return True

    def kill_group(self, name: str) -> bool:
        """The program with the processes that it started, as when its container ends."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running[name].pid, signal.SIGKILL)
        return self._running[name].wait() is not None

    def kill_one(self, part: str, chosen: random.Random) -> bool:
        """A process on this database whose command line has a part."""
        found = [pid for pid in self.all() if part in _read(pid, "cmdline").replace("\0", " ")]
        return _kill(chosen.choice(found)) if found else False

    def all(self) -> list[int]:
        mark = f"EVENTSQL_DSN={self._dsn}\0"
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and mark in _read(pid, "environ")]

    def end(self) -> None:
        for name in list(self._running):
            self.kill_group(name)
        while left := self.all():
            for pid in left:
                _kill(pid)


def _read(pid: int, file: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    return ""


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@pytest.fixture
def home(tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STORAGE_VARIABLE, "of another instance")
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    directory = write_instance(tmp_path, dsn, max_concurrent_runs=10)
    file = directory / "dagster.yaml"
    config = yaml.safe_load(file.read_text())
    # A run whose process died before it began is reported sooner.
    config["run_monitoring"] |= {"start_timeout_seconds": 30, "poll_interval_seconds": 5}
    file.write_text(yaml.safe_dump(config))
    return directory


@pytest.fixture
def processes(home: Path, dsn: str) -> Iterator[Processes]:
    started = Processes(home, dsn)
    yield started
    started.end()


@contextlib.contextmanager
def publishing(platform: EventSQL, ids: list[int], *, count: int) -> Iterator[None]:
    """Publish events one by one, move them, and drop old ones, until the block ends; `count` of them at least."""
    stop = threading.Event()

    def publish() -> None:
        published = 0
        while published < count or not stop.is_set():
            platform.publisher.publish(Publication("orders", b"%d" % published, key=str(published % 7)))
            platform.transfer.run_once()
            ids.extend(event.id for event in platform.reader.read("orders", after=ids[-1], limit=100))
            platform.retention.run_once(["orders"])
            published += 1
            stop.wait(0.4)

    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish)
        try:
            yield
        finally:
            stop.set()
            published.result()


class Killer:
    """Kills, and lets runs stand still for longer than their leases."""

    def __init__(self, processes: Processes, instance: dg.DagsterInstance, seed: int) -> None:
        self._processes = processes
        self._instance = instance
        self._chosen = random.Random(seed)
        self._standing: list[tuple[float, int]] = []
        self.done: Counter[str] = Counter()

    def kill(self, victim: str) -> None:
        processes = self._processes
        done = {
            "run": lambda: self._signal_run(signal.SIGKILL),
            "paused run": lambda: self._signal_run(signal.SIGSTOP),
            "fork server": lambda: processes.kill_one("dagster.launcher.server", self._chosen),
            "code server": lambda: processes.kill_one(" api grpc ", self._chosen),
            "daemon": lambda: processes.kill("daemon"),
            "daemon's container": lambda: processes.kill_group("daemon"),
            "webserver": lambda: processes.kill_group("webserver"),
            "backfill": lambda: processes.kill("backfill"),
        }[victim]()
        if done:
            self.done[victim] += 1
        for name in ("daemon", "webserver", "backfill"):
            processes.keep(name)
        self.wake()

    def wake(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for at, pid in list(self._standing):
            if all_of_them or at <= now:
                _kill(pid, signal.SIGCONT)
                self._standing.remove((at, pid))

    def _signal_run(self, number: signal.Signals) -> bool:
        runs = self._instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        workers = [worker for run in runs if (worker := Worker.of(run.run_id, run.tags)) and worker.is_alive()]
        if not workers:
            return False
        pid = self._chosen.choice(workers).pid
        if number == signal.SIGSTOP:
            self._standing.append((time.monotonic() + 2 * location.LEASE, pid))
        return _kill(pid, number)


VICTIMS = [
    "run", "run", "run", "paused run", "paused run", "fork server", "code server", "daemon", "daemon's container",
    "webserver", "backfill",
]  # fmt: skip


class Backfilled:
    """A backfill of each consumer over the same range: one by the command, one by Dagster's own daemon."""

    def __init__(self, processes: Processes, platform: EventSQL, instance: dg.DagsterInstance, upto: int) -> None:
        self._processes = processes
        self._instance = instance
        self._backfills = Backfills(platform.shards)
        for consumer, backfill_id in (("ledger", BY_COMMAND), ("totals", BY_DAGSTER)):
            plan = self._backfills.plan("orders", consumer, ReplayRange(Earliest(), AtOffset(upto), window_events=30))
            self._backfills.register(plan, backfill_id)
            self.keys = [run.key(backfill_id) for run in plan.runs]
        self.launched = 0

    def launch(self) -> None:
        """Have Dagster's daemon replay the remaining windows, unless it already does."""
        partitions = location.totals_backfill.partitions.name
        assert partitions is not None
        self._instance.add_dynamic_partitions(partitions, self.keys)
        left = self.left()
        runs = self._instance.get_runs(dg.RunsFilter(tags={"eventsql/backfill_of": "orders/totals"}))
        under_way = {run.tags["dagster/partition"] for run in runs if not run.is_finished}
        open_ = self._instance.get_backfills(status=BulkActionStatus.REQUESTED)
        if open_ or under_way or not left:
            return
        with contextlib.suppress(LocalDagsterError):
            answer = Webserver(self._processes.url, timeout=5.0).ask(
                LAUNCH, asset={"path": [location.totals_backfill.asset.key.path[-1]]}, keys=left
            )["launchPartitionBackfill"]
            assert answer["__typename"] == "LaunchBackfillSuccess", answer
            self.launched += 1

    def left(self) -> list[str]:
        found = self._backfills.find("orders", BY_DAGSTER, "totals")
        if found is None:
            return []
        done = {(part.window, part.partition) for part in found.parts if part.done}
        return [key for key in self.keys if _window_of(key) not in done]

    def done(self) -> bool:
        return all(
            self._backfills.find("orders", backfill_id, consumer) is None
            for consumer, backfill_id in (("ledger", BY_COMMAND), ("totals", BY_DAGSTER))
        )


def _window_of(key: str) -> tuple[Window, int]:
    _, window, partition = read_key(key)
    return window, partition


def effects(platform: EventSQL, consumer: str) -> list[tuple[int, int]]:
    return sql(platform, "SELECT id, partition FROM effect_of WHERE consumer = %s ORDER BY position", consumer)


def under_way(instance: dg.DagsterInstance) -> Iterator[str]:
    """The runs that have not ended, with their processes."""
    for run in instance.get_runs():
        if not run.is_finished:
            worker = Worker.of(run.run_id, run.tags)
            process = "" if worker is None else _read(worker.pid, "stat")[:60]
            yield f"{run.run_id} {run.status.value} {run.job_name} {dict(run.tags)} {worker} {process!r}"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1])
def test_backfills_and_live_runs_lose_nothing_and_double_nothing_whatever_is_killed(
    processes: Processes, platform: EventSQL, stored: dg.DagsterInstance, seed: int
) -> None:
    sql(platform, location.EFFECTS)
    platform.registry.register_topic(location.ORDERS).register_topic(location.SUMS)
    # Fewer events than are published meanwhile, so that retention drops the first 300 in the end.
    platform.registry.set_retention("orders", Retention(events=40))
    platform.publisher.publish_all(Publication("orders", b"%d" % n, key=str(n % 7)) for n in range(300))
    platform.transfer.run_once()
    ids = [event.id for event in platform.reader.read("orders", limit=1_000)]
    for consumer in location.CONSUMERS:
        platform.registry.register_consumer(consumer.consumer, start="latest")

    backfilled = Backfilled(processes, platform, stored, ids[-1])
    for name in ("daemon", "webserver"):
        processes.start(name)
    wait_until(lambda: bool(_answers(processes.url)), "the webserver")
    killer, chosen = Killer(processes, stored, seed), random.Random(seed)
    old = ids[-1]
    with publishing(platform, ids, count=60):
        processes.start("backfill")
        backfilled.launch()
        wait_until(lambda: len(effects(platform, "ledger")) > 0, "the first effects")
        victims = list(VICTIMS)
        chosen.shuffle(victims)
        for victim in victims:
            time.sleep(chosen.uniform(1.0, 6.0))
            killer.kill(victim)
            backfilled.launch()
    killer.wake(all_of_them=True)

    def finished() -> bool:
        processes.keep("daemon")
        processes.keep("webserver")
        if not processes.ended("backfill"):
            processes.keep("backfill")
        backfilled.launch()
        time.sleep(1.0)
        return backfilled.done() and all(
            len(effects(platform, each.consumer.name)) >= len(ids) for each in location.CONSUMERS
        )

    try:
        wait_until(finished, f"all effects, after {killer.done}", seconds=SECONDS)
    except AssertionError:
        sys.stderr.write("".join(f"{line}\n" for line in under_way(stored)))
        raise
    done = f"{killer.done.total()} kills {dict(killer.done)}, {len(ids)} events, {backfilled.launched} launches"
    sys.stderr.write(f"{done}\n")
    for each in location.CONSUMERS:
        found = effects(platform, each.consumer.name)
        assert sorted(event for event, _ in found) == ids, each.consumer.name
        for partition in (0, 1):
            live = [event for event, of in found if of == partition and event > old]
            assert live == sorted(live), (each.consumer.name, partition)
    assert [lag.events for lag in platform.lag("orders")] == [0] * 4
    platform.transfer.run_once()
    assert sum(int(event.value) for event in platform.reader.read("sums", limit=10_000)) == len(ids)
    platform.retention.run_once(["orders"])
    assert platform.reader.read("orders", limit=1)[0].id > old, "retention has dropped what was replayed"


def _answers(url: str) -> bool:
    with contextlib.suppress(LocalDagsterError):
        return bool(Webserver(url, timeout=20.0).repositories())
    return False
