"""`eventsql backfill`: the plan, the runs in processes and in a running Dagster, and what an interrupted one leaves."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
import requests

from eventsql_orchestration import Claim, EventSQL, Publication, Topic
from eventsql_orchestration.cli.backfill import run as run_command
from eventsql_orchestration.cli.backfill_output import conclude
from eventsql_orchestration.dagster.backfills import local_launcher
from eventsql_orchestration.dagster.backfills.assets import ASSETS_METADATA
from eventsql_orchestration.dagster.backfills.job import DagsterJob
from eventsql_orchestration.dagster.backfills.local_launcher import LocalRuns
from eventsql_orchestration.dagster.backfills.remote_launcher import RemoteDagster
from eventsql_orchestration.dagster.local import webserver
from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.dagster.local.dagster_process import LocalDagster, running_url
from eventsql_orchestration.dagster.local.instance import write_instance
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, ValidationError
from eventsql_orchestration.orchestration.backfills import driver
from eventsql_orchestration.orchestration.backfills.driver import BackfillDriver, DriverProgress, Outcome
from eventsql_orchestration.orchestration.backfills.launcher import BackfillJob, Ended
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import Backfill, Plan, ReplayRange, resume_command
from eventsql_orchestration.orchestration.errors import AirflowAnswerError, LocalDagsterError, RunFailedError
from eventsql_orchestration.topics.positions import Earliest
from tests.cli.conftest import Run, Start, one_line
from tests.dagster import backfill_location as location
from tests.forms import change_value
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
MODULE = ("-m", "tests.dagster.backfill_location")
LEDGER = ("backfill", "orders", "ledger")


class Ledger:
    """Publishes orders, and looks at their effects."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform = platform

    def publish(self, count: int, value: bytes = b"", *, partition: int | None = None) -> list[int]:
        before = self.platform.reader.end("orders")
        self.platform.publisher.publish_all(Publication("orders", value, partition=partition) for _ in range(count))
        self.platform.transfer.run_once()
        return [event.id for event in self.platform.reader.read("orders", after=before)]

    def effects(self) -> list[int]:
        with self.platform.database.connection() as connection:
            return sorted(row[0] for row in connection.execute("SELECT id FROM effect"))

    def offsets(self, consumer: str = "ledger") -> list[int]:
        return [state.last_event_id for state in self.platform.registry.consumer("orders", consumer)]

    def consumers(self) -> list[str]:
        return sorted({state.name for state in self.platform.registry.consumers("orders")})


def prepare(platform: EventSQL) -> None:
    for consumer in location.CONSUMERS:
        consumer.register(platform)
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE effect (position bigserial, id bigint NOT NULL, partition int NOT NULL)")


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def ledger(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    return Ledger(platform)


# Plans


def test_a_plan_names_the_assets_and_the_runs_and_changes_nothing(run: Run, ledger: Ledger) -> None:
    ids = ledger.publish(20)
    result = run(*LEDGER, "--from", "earliest", "--window-events", "10", *MODULE, "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["executed"] is False
    assert (plan["from"], plan["to"], plan["events"]) == (ids[0], ids[-1], 20)
    assert plan["assets"] == ["ledger"]
    assert plan["job"] == "backfill_ledger"
    assert sum(each["events"] for each in plan["runs"]) == 20
    assert "a plan, nothing runs" in result.stderr

    table = run(*LEDGER, "--from", str(ids[5]), "--to", str(ids[6]), *MODULE)
    assert "backfill_ledger" in table.stdout
    assert str(ids[5]) in table.stdout
    assert ledger.consumers() == ["fragile", "ledger", "ranges"]
    assert ledger.effects() == []


def test_the_assets_of_a_consumer_that_publishes_are_all_named(run: Run, ledger: Ledger) -> None:
    ledger.publish(1)
    result = run("backfill", "orders", "ranges", "--from", "1h", *MODULE, "--json")
    assert json.loads(result.stdout)["assets"] == ["ranges", "topic/sums"]


def test_an_empty_range_is_no_error_and_starts_nothing(run: Run, ledger: Ledger) -> None:
    result = run(*LEDGER, "--from", "earliest", "--execute", *MODULE)
    assert result.exit_code == 0
    assert "there is nothing to replay" in result.stderr
    assert ledger.consumers() == ["fragile", "ledger", "ranges"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--from"),
        (("--from", "earliest", "--resume", "x"), "--from"),
        (("--resume", "x", "--window-events", "3"), "--window-events is not for --resume"),
        (("--resume", "x", "--to", "500", "--execute"), "--to is not for --resume"),
        (("--from", "noon"), "neither earliest, latest, an offset, a time nor a duration"),
        (("--from", "2026-05-01T12:00:00"), "no time zone"),
        (("--from", "9", "--to", "8"), "before it begins"),
        (("--from", "1h", "--to", "2h"), "before it begins"),
        (("--from", "1", "--window", "1h", "--window-events", "3"), "not by both"),
        (("--from", "1", "--id", "A B"), "backfill id"),
        (("--from", "1", "--into", "ledger"), "--into"),
        (("--from", "1", "--parallel", "0"), "--parallel"),
        (("--from", "1", "--dagster-url", "nowhere"), "is not the URL"),
        (("--from", "1", "--dagster-url", "http://127.0.0.1:1"), "give one of"),
        (("--from", "1", "--partition", "7"), "out of range"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    run: Run, ledger: Ledger, arguments: tuple[str, ...], says: str
) -> None:
    ledger.publish(3)
    definitions = () if "nowhere" in arguments else MODULE
    result = run(*LEDGER, *arguments, *definitions)
    assert result.exit_code == 2, result.stderr
    assert says in one_line(result)
    assert ledger.consumers() == ["fragile", "ledger", "ranges"]


def test_missing_objects_fail_in_one_line(run: Run, ledger: Ledger, closed_port: int) -> None:
    ledger.publish(3)
    unknown = run("backfill", "orders", "nobody", "--from", "1", *MODULE)
    assert (unknown.exit_code, "no consumer 'nobody'" in one_line(unknown)) == (1, True)
    gone = run(*LEDGER, "--resume", "x", *MODULE)
    assert (gone.exit_code, "no backfill 'x'" in one_line(gone)) == (1, True)
    silent = run(*LEDGER, "--from", "1", "--dagster-url", f"http://127.0.0.1:{closed_port}")
    assert (silent.exit_code, "eventsql dev" in one_line(silent)) == (1, True)
    nowhere = run(*LEDGER, "--from", "1")
    assert (nowhere.exit_code, "--dagster-url" in one_line(nowhere)) == (2, True)
    broken = run(*LEDGER, "--from", "1", "-m", "tests.no_such_module")
    assert (broken.exit_code, "cannot be loaded" in one_line(broken)) == (1, True)
    without = run(*LEDGER, "--from", "1", "-m", "tests.dagster.location")
    assert (without.exit_code, "build_backfill" in one_line(without)) == (2, True)


# This process imports a module once, so each case has a module of its own.
@pytest.mark.parametrize(
    ("module", "options"), [("shop_found", ()), ("shop_named", ("-m", "shop_named.definitions"))]
)  # fmt: skip
def test_the_project_of_the_directory_is_imported_from_its_sources(
    run: Run, ledger: Ledger, directory: Path, module: str, options: tuple[str, ...]
) -> None:
    ledger.publish(3)
    (directory / "pyproject.toml").write_text(f'[tool.dg.project]\nroot_module = "{module}"\n')
    sources = directory / "src" / module
    sources.mkdir(parents=True)
    (sources / "definitions.py").write_text("from tests.dagster.backfill_location import defs as defs\n")
    planned = run(*LEDGER, "--from", "earliest", "--json", *options)
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["job"] == "backfill_ledger"


# Definitions of a file


DEFINED = {
    "a function with @dg.definitions": "@dg.definitions\ndef location() -> dg.Definitions:\n    return defs\n",
    "a context": "@dg.definitions\ndef location(context: dg.ComponentLoadContext):\n    return defs\n",
    "two names": "other = defs\n",
    "two": "other = dg.Definitions()\n",
    "none": "del defs\n",
}


def location_file(directory: Path, kind: str) -> Path:
    file = directory / "some_definitions.py"
    text = "import dagster as dg\nfrom tests.dagster.backfill_location import defs\n\n"
    file.write_text(text + DEFINED[kind])
    return file


@pytest.mark.nightly
def test_definitions_that_a_function_makes_are_found_and_run(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    ids = ledger.publish(50)
    file = location_file(tmp_path, "a function with @dg.definitions")
    result = run(*LEDGER, "--from", "earliest", "--parallel", "1", "--partition", "0", "--execute", "-f", file)
    assert result.exit_code == 0, result.stderr
    mine = {event.id for event in ledger.platform.reader.read("orders", partition=0)}
    assert ledger.effects() == sorted(mine & set(ids))
    assert mine


def test_one_object_with_two_names_is_found(ledger: Ledger, tmp_path: Path) -> None:
    name, found = CodeLocation(location_file(tmp_path, "two names")).load()
    assert found is location.defs
    assert name in {"defs", "other"}
    launcher = LocalRuns(CodeLocation(location_file(tmp_path, "two names")), "orders", "ledger", environment={})
    try:
        assert launcher.job.repository == name
    finally:
        launcher.close()


def test_a_job_that_has_the_tag_of_backfills_and_no_asset_of_theirs_is_none(ledger: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "tagged.py"
    file.write_text(
        "import dagster as dg\n"
        "from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG\n"
        "defs = dg.Definitions(jobs=[dg.GraphDefinition('own').to_job(tags={BACKFILL_OF_TAG: 'orders/ledger'})])\n"
    )
    launcher = LocalRuns(CodeLocation(file), "orders", "ledger", environment={})
    try:
        with pytest.raises(ValidationError):
            _ = launcher.job
    finally:
        launcher.close()


def test_a_process_that_dies_before_its_run_does_not_give_the_reason_of_an_earlier_run(
    ledger: Ledger, tmp_path: Path
) -> None:
    ledger.publish(1)
    (planned,) = Backfills(ledger.platform.shards).plan("orders", "fragile", ReplayRange(Earliest())).runs
    file = location_file(tmp_path, "two names")
    launcher = LocalRuns(CodeLocation(file), "orders", "fragile", environment={})

    @dg.op
    def broken() -> None:
        raise ValueError("the fault of the earlier run")

    @dg.job(tags=launcher.job.run_tags("may", planned.key("may")))
    def earlier() -> None:
        broken()

    try:
        earlier.execute_in_process(instance=launcher._instance, raise_on_error=False)
        file.write_text("raise RuntimeError('the location is broken now')\n")
        run = launcher.launch("may", planned.key("may"))
        wait_until(lambda: launcher.ended([run]), "the end of the process")
        why = launcher.ended([run])[run].why
    finally:
        launcher.close()
    assert why.startswith("its process ended with exit code 1")
    assert "the location is broken now" in why


class Stubborn:
    """A process that does not heed an interrupt. Waiting for it moves the `clock`."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.killed = False

    def poll(self) -> None: ...

    def send_signal(self, _number: int) -> None: ...

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None:
            self._clock[0] += timeout
            raise subprocess.TimeoutExpired("dagster", timeout)


def test_all_runs_that_do_not_heed_an_interrupt_are_killed_after_one_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(local_launcher, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    launcher = LocalRuns(CodeLocation(tmp_path / "any.py"), "orders", "ledger", environment={})
    stubborn = [Stubborn(clock) for _ in range(3)]
    launcher._processes = dict(zip("abc", cast("Any", stubborn), strict=True))
    launcher.close()
    assert [each.killed for each in stubborn] == [True] * 3
    assert clock[0] == 100.0 + local_launcher.GRACE


@pytest.mark.parametrize(
    ("kind", "says"),
    [("two", "not one: defs, other"), ("none", "no Definitions"),
     ("a context", "cannot be loaded")],
)  # fmt: skip
def test_several_or_no_definitions_are_refused(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(LocalDagsterError, match=says):
        CodeLocation(location_file(tmp_path, kind)).load()


# Runs in processes


@pytest.mark.nightly
def test_a_range_is_replayed_in_processes_side_by_side_and_the_offset_stays(run: Run, ledger: Ledger) -> None:
    ids = ledger.publish(40)
    result = run(*LEDGER, "--from", "earliest", "--parallel", "2", "--execute", "--id", "may", *MODULE, "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["id"], answer["done"], answer["executed"]) == ("may", True, True)
    assert {each["state"] for each in answer["runs"]} == {"done"}
    assert ledger.effects() == ids
    assert ledger.offsets() == [0, 0]
    assert ledger.consumers() == ["fragile", "ledger", "ranges"]


@pytest.mark.nightly
def test_a_range_that_fails_is_listed_resumed_and_deleted(run: Run, ledger: Ledger) -> None:
    ids = ledger.publish(5)
    (poison,) = ledger.publish(1, location.POISON)
    failed = run("backfill", "orders", "fragile", "--from", "earliest", "--execute", "--id", "may", *MODULE)
    assert failed.exit_code == 1
    assert f"event {poison} failed as often" in failed.stderr
    assert "--resume may" in failed.stderr.splitlines()[-1]
    assert ledger.effects() == ids

    (listed,) = json.loads(run("backfill", "list", "orders", "--json").stdout)
    assert (listed["id"], listed["replayed"], listed["failing"], listed["done"]) == ("may", 5, 1, 0)
    taken = run("backfill", "orders", "fragile", "--from", "earliest", "--execute", "--id", "may", *MODULE)
    assert (taken.exit_code, "--resume may" in taken.stderr) == (1, True)

    with ledger.platform.database.connection() as connection:
        change_value(connection, "orders", poison, b"mended")
    planned = run("backfill", "orders", "fragile", "--resume", "may", *MODULE, "--json")
    assert (planned.exit_code, json.loads(planned.stdout)["executed"]) == (0, False)
    assert ledger.effects() == ids, "without --execute nothing runs"
    resumed = run("backfill", "orders", "fragile", "--resume", "may", "--execute", *MODULE)
    assert resumed.exit_code == 0, resumed.stderr
    assert ledger.effects() == [*ids, poison]
    assert json.loads(run("backfill", "list", "--json").stdout) == []
    again = run("backfill", "orders", "fragile", "--resume", "may", "--execute", *MODULE, "--json")
    assert (again.exit_code, json.loads(again.stdout)["done"]) == (0, True)
    assert ledger.effects() == [*ids, poison]


@pytest.mark.nightly
def test_a_range_whose_events_all_fail_stops_and_its_letters_are_not_redriven(
    run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.cli.backfill_output.PROGRESS_SECONDS", 0.0)
    ledger.platform.registry.register_topic(Topic("orders_dlt"))
    ledger.platform.registry.register_consumer(location.fragile.consumer, max_attempts=1)
    ledger.publish(5, location.POISON)
    command = ("backfill", "orders", "fragile", "--max-failures", "2", *MODULE, "--execute", "--json")
    failed = run(*command, "--from", "earliest", "--id", "may")
    assert failed.exit_code == 1
    last = failed.stderr.splitlines()[-1]
    for part in ("--max-failures", "it is poison", "--resume may", "`eventsql dlt list orders --backfill may`"):
        assert part in last
    assert "of 5 events replayed" in failed.stderr
    (listed,) = json.loads(run("backfill", "list", "orders", "--json").stdout)
    assert (listed["replayed"], listed["given_up"]) == (2, 2)
    resumed = run(*command[:3], *command[5:], "--resume", "may")
    assert resumed.exit_code == 0, resumed.stderr
    assert "5 of them given up" in resumed.stderr

    redriven = run("dlt", "redrive", "orders", "--execute")
    assert redriven.exit_code == 0
    assert "5 dead letters of backfill may left out" in redriven.stderr
    assert run("dlt", "list", "orders", "--json").stdout.strip() == "[]"
    assert len(json.loads(run("dlt", "list", "orders", "--backfill", "may", "--json").stdout)) == 5
    assert ledger.platform.reader.count("orders") == 5


def test_a_deleted_backfill_leaves_nothing_behind(run: Run, ledger: Ledger) -> None:
    ledger.publish(5)
    backfills = Backfills(ledger.platform.shards)
    backfills.register(backfills.plan("orders", "ledger", ReplayRange(Earliest())), "may")
    assert "may" in run("backfill", "list").stdout
    assert run("backfill", "delete", "orders", "ledger", "may", "--execute").exit_code == 0
    assert ledger.consumers() == ["fragile", "ledger", "ranges"]
    assert run("backfill", "delete", "orders", "ledger", "may").exit_code == 1


@pytest.mark.parametrize("consumer", ["a reader", "-reader"])
def test_the_command_that_goes_on_can_be_pasted(consumer: str) -> None:
    program, group, *arguments = shlex.split(resume_command("orders", consumer, "may", " --orchestrator airflow"))
    assert (program, group) == ("eventsql", "backfill")
    given = run_command.make_context("run", arguments).params
    chosen = (given["topic"], given["consumer"], given["resume"], given["execute"], given["orchestrator"])
    assert chosen == ("orders", consumer, "may", True, "airflow")


@pytest.mark.nightly
def test_a_range_is_taken_over_on_request(run: Run, ledger: Ledger) -> None:
    ids = ledger.publish(4)
    result = run("backfill", "orders", "fragile", "--from", "earliest", "--take-over", "--execute", *MODULE)
    assert result.exit_code == 0, result.stderr
    assert ledger.offsets("fragile") == [ids[-1]]
    assert ledger.effects() == ids


def test_a_take_over_that_is_refused_leaves_no_new_backfill_and_keeps_a_resumed_one(run: Run, ledger: Ledger) -> None:
    ledger.publish(4)
    claim = ledger.platform.claims.claim("orders", "fragile", owner="somebody", max_wait=0.0, lease=3_600.0)
    assert isinstance(claim, Claim)
    backfills = Backfills(ledger.platform.shards)
    command = ("backfill", "orders", "fragile", "--take-over", "--execute", *MODULE)
    new = run(*command, "--from", "earliest")
    assert (new.exit_code, backfills.registered(), ledger.offsets("fragile")) == (1, [], [0])
    backfills.register(backfills.plan("orders", "fragile", ReplayRange(Earliest())), "may")
    resumed = run(*command, "--resume", "may")
    assert (resumed.exit_code, [each.id for each in backfills.registered()]) == (1, ["may"])
    assert ledger.effects() == []


def test_an_interrupted_backfill_is_resumed_with_nothing_twice(run: Run, start: Start, ledger: Ledger) -> None:
    # Each partition with events has a run, and each run a process with Dagster.
    ids = ledger.publish(50, partition=0)
    process = start(
        *LEDGER, "--from", "earliest", "--execute", "--id", "may", *MODULE,
        EVENTSQL_TEST_DELAY="2",
    )  # fmt: skip
    wait_until(lambda: len(ledger.effects()) >= location.BATCH, "a batch")
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"backfill --resume may --execute orders ledger`" in messages.splitlines()[-1]
    assert len(ledger.effects()) < len(ids)
    resumed = run(*LEDGER, "--resume", "may", "--execute", *MODULE)
    assert resumed.exit_code == 0, resumed.stderr
    assert ledger.effects() == ids


@pytest.mark.nightly
def test_a_backfill_of_a_killed_command_is_resumed_beside_its_last_runs(run: Run, start: Start, ledger: Ledger) -> None:
    ids = ledger.publish(80)
    process = start(
        *LEDGER, "--from", "earliest", "--execute", "--id", "may", *MODULE,
        EVENTSQL_TEST_DELAY="0.5",
    )  # fmt: skip
    wait_until(lambda: len(ledger.effects()) >= location.BATCH, "a batch")
    process.kill()
    process.wait(60)
    resumed = run(*LEDGER, "--resume", "may", "--execute", *MODULE)
    assert resumed.exit_code == 0, resumed.stderr
    assert ledger.effects() == ids


# What drives them


class Recorder:
    """A launcher that notes what is launched, and ends its runs when told."""

    orchestrator = "a test"
    resume_options = ""
    outlives = True

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.results: dict[str, Ended] = {}

    @property
    def job(self) -> BackfillJob:
        return BackfillJob("job", ())

    def require_running(self) -> None: ...

    def prepare(self, keys: Any) -> None: ...

    def was_run(self, backfill_id: str) -> bool:
        return False

    def under_way(self, backfill_id: str) -> dict[str, str]:
        return {key: key for key in self.launched if key not in self.results}

    def launch(self, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        self.launched.append(key)
        return key

    def ended(self, runs: Any) -> dict[str, Ended]:
        return {run: self.results[run] for run in runs if run in self.results}

    def close(self) -> None: ...


@dataclass
class Driven:
    """A backfill of three windows, whose runs end as the launcher is told."""

    platform: EventSQL
    backfills: Backfills
    plan: Plan
    backfill: Backfill
    launcher: Recorder
    progress: list[DriverProgress] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [run.key("one") for run in self.plan.runs]

    def fail(self, *keys: str) -> None:
        self.launcher.results |= dict.fromkeys(keys, Ended(False, "it broke"))

    def succeed(self, *keys: str) -> None:
        self.launcher.results |= dict.fromkeys(keys, Ended(True))

    def replay(self, windows: int = 3) -> None:
        """Replay its first windows, as the runs of another command would."""
        with self.platform.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.consumer SET eql_last_event_id = 30 WHERE eql_name = ANY (%s)",
                [[run.window.consumer("fragile", "one", None) for run in self.plan.runs[:windows]]],
            )

    def lease(self) -> None:
        """Claim events of its first window, as the run of another command would."""
        run = self.plan.runs[0]
        name = run.window.consumer("fragile", "one", None)
        assert isinstance(self.platform.claims.claim("orders", name, run.partition, owner="another"), Claim)

    def finish(self) -> None:
        """Replay and end it as another command would."""
        self.replay()
        assert self.backfills.finish(self.backfill)

    def complete(self) -> None:
        """Replay and end it as its own runs would."""
        self.finish()
        self.succeed(*self.keys)

    def drive(self, on_progress: Callable[[DriverProgress], None], **options: Any) -> Outcome:
        return self.driver(**options).run(on_progress)

    def driver(self, **options: Any) -> BackfillDriver:
        return BackfillDriver(self.backfills, self.backfill, self.plan.runs, launcher=self.launcher, **options)

    def run(self, then: Callable[[], None] = lambda: None, **options: Any) -> Outcome:
        """Drive it; `then` is called when a run is under way."""

        def note(now: DriverProgress) -> None:
            self.progress.append(now)
            if now.running and not self.launcher.results:
                then()

        return self.drive(note, **options)


@pytest.fixture
def driven(ledger: Ledger) -> Driven:
    ledger.publish(30)
    backfills = Backfills(ledger.platform.shards)
    plan = backfills.plan("orders", "fragile", ReplayRange(Earliest(), window_events=10))
    return Driven(ledger.platform, backfills, plan, backfills.register(plan, "one"), Recorder())


@pytest.mark.parametrize(("parallel", "launched"), [(1, 1), (2, 3)])
def test_with_one_run_at_a_time_no_run_overtakes_a_failed_one(driven: Driven, parallel: int, launched: int) -> None:
    driven.fail(*driven.keys)
    outcome = driven.run(parallel=parallel)
    assert not outcome.done
    assert len(driven.launcher.launched) == launched
    assert set(outcome.failures.values()) == {"it broke"}
    assert max(now.running for now in driven.progress) <= parallel


def test_no_run_is_launched_after_too_many_failures(driven: Driven) -> None:
    driven.fail(*driven.keys)
    outcome = driven.run(parallel=2, max_failures=2)
    assert (outcome.stopped, outcome.done) == (True, False)
    assert len(driven.launcher.launched) == 2


def test_no_run_is_launched_after_too_many_dead_letters(driven: Driven) -> None:
    first = driven.plan.runs[0].window

    def give_two_events_up() -> None:
        with driven.platform.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.consumer SET eql_last_event_id = %s, eql_given_up = 2 WHERE eql_name = %s",
                [first.upto, first.consumer("fragile", "one", None)],
            )
        driven.fail(*driven.keys)
        driven.succeed(driven.keys[0])

    outcome = driven.run(give_two_events_up, parallel=1, max_failures=2)
    assert (outcome.stopped, outcome.done, outcome.given_up) == (True, False, 2)
    assert driven.launcher.launched == driven.keys[:1]


def test_a_backfill_whose_last_events_became_dead_letters_is_done(driven: Driven) -> None:
    driven.replay()
    with driven.platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_given_up = 2 WHERE eql_name ~ '__backfill_'")
    outcome = driven.run(max_failures=2, parallel=1)
    assert (outcome.stopped, outcome.done) == (False, True)
    assert outcome.given_up >= 2


def test_a_run_under_way_is_not_done_although_its_events_are_replayed(driven: Driven) -> None:
    def replay_and_then_end() -> None:
        if driven.progress[-1].done_events < 30:
            driven.replay()
        else:
            driven.succeed(*driven.keys)

    assert driven.run(replay_and_then_end, parallel=2).done
    counts = [(now.done_events, now.done_runs, now.running) for now in driven.progress]
    assert counts == [(0, 0, 2), (30, 1, 2), (30, 3, 0)]


def test_no_run_is_launched_while_the_orchestrator_does_not_run(driven: Driven) -> None:
    def refuse() -> None:
        raise LocalDagsterError

    driven.fail(*driven.keys)
    driven.launcher.require_running = refuse  # type: ignore[method-assign]
    with pytest.raises(LocalDagsterError):
        driven.run(parallel=1)
    assert driven.launcher.launched == []


def test_the_progress_shows_the_first_error_while_it_is_being_retried(driven: Driven) -> None:
    shown: list[str | None] = []

    def note(now: DriverProgress) -> None:
        shown.append(now.failing)
        with driven.platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer SET eql_failed_event_id = NULL, eql_failure = NULL")
        if len(shown) == 2:
            driven.complete()

    with driven.platform.database.connection() as connection:
        for run in driven.plan.runs[1:]:
            connection.execute(
                "UPDATE eventsql.consumer SET eql_failed_event_id = %s, eql_failure = 'it breaks' WHERE eql_name = %s",
                [run.window.upto, run.window.consumer("fragile", "one", None)],
            )
    assert driven.drive(note, parallel=3).done
    assert shown[:2] == ["event 20: it breaks", None]


def test_the_progress_counts_no_more_events_of_a_window_than_were_planned(driven: Driven) -> None:
    names = [run.window.consumer("fragile", "one", None) for run in driven.plan.runs]
    with driven.platform.database.connection() as connection:
        for consumed, name in zip((4, 99), names, strict=False):
            connection.execute(
                "UPDATE eventsql.consumer SET eql_consumed_events = %s WHERE eql_name = %s", [consumed, name]
            )

    assert driven.run(driven.complete, parallel=3).done
    assert [(now.done_events, now.events) for now in driven.progress] == [(14, 30), (30, 30)]


def test_the_lease_of_a_run_that_failed_keeps_no_other_run_from_its_turn(driven: Driven) -> None:
    launched: list[int] = []

    def note(_now: DriverProgress) -> None:
        launched.append(len(driven.launcher.launched))
        if len(launched) == 1:
            driven.lease()
            driven.fail(driven.keys[0])
        else:
            driven.fail(*driven.keys)

    assert not driven.drive(note, parallel=2).done
    assert launched[:2] == [2, 3]


def test_runs_that_an_earlier_command_has_launched_are_not_launched_again(driven: Driven) -> None:
    """The runs of its windows, and one of another window of the backfill."""
    driven.launcher.launched = [driven.keys[0], "another window"]

    def finish() -> None:
        driven.complete()
        driven.fail("another window")

    outcome = driven.run(finish, parallel=1)
    assert (outcome.done, outcome.failures) == (True, {})
    assert driven.launcher.launched == [driven.keys[0], "another window"]
    assert driven.progress[0].running == 1


def test_a_run_that_fails_while_the_run_of_a_lost_launch_is_looked_for_has_failed(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "POLL", 0)
    monkeypatch.setattr(driver, "LATE_RUN", 0)
    launch = driven.launcher.launch

    def lose(backfill_id: str, key: str, **options: Any) -> str:
        if key == driven.keys[1] and not driven.launcher.results:
            driven.fail(*driven.keys)
            raise LocalDagsterError
        return launch(backfill_id, key, **options)

    monkeypatch.setattr(driven.launcher, "launch", lose)
    outcome = driven.run(parallel=2)
    assert set(outcome.failures) == set(driven.keys)
    assert driven.launcher.launched == driven.keys


def test_the_window_that_another_command_replays_is_not_launched_and_counts_as_a_run(driven: Driven) -> None:
    driven.lease()
    assert driven.run(driven.complete, parallel=2).done
    assert driven.launcher.launched == driven.keys[1:2]


def test_no_run_is_launched_beside_the_run_of_another_command_with_one_run_at_a_time(driven: Driven) -> None:
    driven.lease()
    driven.fail(*driven.keys)

    def finish_after_a_second_look(_now: DriverProgress) -> None:
        if next(looks) == 1:
            driven.finish()

    looks = count()
    outcome = driven.drive(finish_after_a_second_look, parallel=1)
    assert (outcome.done, driven.launcher.launched) == (True, [])


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_backfill_that_the_runs_of_another_command_finish_is_done(driven: Driven, parallel: int) -> None:
    def finish() -> None:
        driven.finish()
        # The driver's own runs come too late, and fail.
        driven.fail(*driven.keys)

    outcome = driven.run(finish, parallel=parallel)
    assert (outcome.done, outcome.failures) == (True, {})
    assert outcome.done_keys == set(driven.keys)


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_deleted_backfill_is_not_done_even_if_a_new_one_has_its_id(driven: Driven, *, made_anew: bool) -> None:
    def delete() -> None:
        driven.backfills.delete(driven.backfill)
        if made_anew:
            driven.backfills.register(driven.backfills.plan("orders", "fragile", ReplayRange(Earliest())), "one")
        driven.fail(driven.keys[1])

    driven.replay(windows=1)
    outcome = driven.run(delete, parallel=1)
    assert not outcome.done
    assert set(outcome.failures) == set(driven.keys[1:])
    assert outcome.done_keys == {driven.keys[0]}


def test_a_run_that_failed_before_its_backfill_was_deleted_keeps_its_reason(driven: Driven) -> None:
    def delete(now: DriverProgress) -> None:
        if now.failed == 1:
            driven.backfills.delete(driven.backfill)
            driven.fail(*driven.keys)

    driven.fail(driven.keys[0])
    outcome = driven.drive(delete, parallel=2)
    assert not outcome.done
    assert outcome.failures[driven.keys[0]] == "it broke"


def test_a_run_that_succeeded_before_its_backfill_was_deleted_has_replayed_its_window(driven: Driven) -> None:
    def delete() -> None:
        driven.backfills.delete(driven.backfill)
        driven.succeed(driven.keys[0])

    outcome = driven.run(delete, parallel=1)
    assert not outcome.done
    assert set(outcome.failures) == set(driven.keys[1:])
    assert outcome.done_keys == {driven.keys[0]}


def test_a_run_that_succeeds_before_the_end_of_its_window_has_failed(driven: Driven) -> None:
    driven.succeed(*driven.keys)
    outcome = driven.run(parallel=3)
    assert not outcome.done
    assert set(outcome.failures) == set(driven.keys)


def test_a_backfill_that_is_deleted_after_its_last_run_is_not_done(driven: Driven) -> None:
    driven.replay()
    finish = driven.backfills.finish

    def delete_first(backfill: Backfill) -> bool:
        driven.backfills.delete(backfill)
        return finish(backfill)

    driven.backfills.finish = delete_first  # type: ignore[method-assign]
    outcome = driven.run(parallel=1)
    assert (outcome.done, outcome.failures, outcome.done_keys) == (False, {}, frozenset(driven.keys))
    with pytest.raises(RunFailedError):
        conclude(driven.driver(parallel=1), outcome)


def test_a_backfill_that_is_deleted_before_its_end_is_asked_for_is_not_done(driven: Driven) -> None:
    driven.replay()

    def delete(now: DriverProgress) -> None:
        assert now.done_runs == now.runs
        driven.backfills.delete(driven.backfill)

    outcome = driven.drive(delete, parallel=1)
    assert (outcome.done, outcome.failures) == (False, {})


def test_a_run_that_ends_while_its_window_is_looked_at_has_not_failed(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = driven.launcher.ended

    def end(runs: Any) -> dict[str, Ended]:
        if driven.launcher.launched:
            driven.replay()
            driven.succeed(*driven.keys)
        return ended(runs)

    monkeypatch.setattr(driven.launcher, "ended", end)
    outcome = driven.run(parallel=3)
    assert (outcome.done, outcome.failures) == (True, {})


@pytest.mark.parametrize(
    ("of", "request_", "error"),
    [
        ("launcher", "launch", LocalDagsterError),
        ("launcher", "ended", LocalDagsterError),
        ("backfills", "find", DatabaseUnavailableError),
    ],
)
def test_a_backfill_outlasts_a_restart_and_launches_no_run_twice(
    driven: Driven, of: str, request_: str, error: type[EventSQLError], caplog: pytest.LogCaptureFixture
) -> None:
    lost = 0
    answer = getattr(getattr(driven, of), request_)

    def restart(*arguments: Any, **options: Any) -> Any:
        nonlocal lost
        # The server does what it was asked for, and its answer is lost.
        answered = answer(*arguments, **options)
        lost += 1
        if lost in {2, 3}:
            raise error
        return answered

    setattr(getattr(driven, of), request_, restart)
    outcome = driven.run(driven.complete, parallel=3)
    assert (outcome.done, outcome.failures) == (True, {})
    assert driven.launcher.launched == driven.keys
    assert [record.levelname for record in caplog.records if record.name == driver.__name__] == ["WARNING"]


@pytest.mark.parametrize("comes", [True, False])
def test_a_launch_without_an_answer_is_repeated_only_if_its_run_does_not_come(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, *, comes: bool
) -> None:
    monkeypatch.setattr(driver, "POLL", 0)
    if not comes:
        monkeypatch.setattr(driver, "LATE_RUN", 0)
    launcher, looks = driven.launcher, count()
    launch, under_way = launcher.launch, launcher.under_way

    def lose(backfill_id: str, key: str, **options: Any) -> str:
        monkeypatch.setattr(launcher, "launch", launch)
        if comes:
            launch(backfill_id, key, **options)
        raise LocalDagsterError

    # The run is there at the fourth look.
    monkeypatch.setattr(launcher, "under_way", lambda of: under_way(of) if next(looks) > 3 else {})
    monkeypatch.setattr(launcher, "launch", lose)

    outcome = driven.run(driven.complete, parallel=1)
    assert (outcome.done, launcher.launched) == (True, driven.keys[:1])


def test_a_backfill_ends_at_once_if_its_orchestrator_refuses_a_request(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(runs: object) -> dict[str, Ended]:
        asked.append(runs)
        raise AirflowAnswerError(status=403)

    monkeypatch.setattr(driven.launcher, "ended", refuse)
    with pytest.raises(AirflowAnswerError):
        driven.run(parallel=1, max_away=0.5)
    assert len(asked) == 1


def test_a_backfill_ends_if_its_orchestrator_stays_away(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_runs: object) -> dict[str, Ended]:
        raise LocalDagsterError

    monkeypatch.setattr(driven.launcher, "ended", refuse)
    with pytest.raises(LocalDagsterError):
        driven.run(parallel=1, max_away=0.2)
    assert driven.launcher.launched == []


# A running Dagster


@pytest.fixture
def dagster(dsn: str, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalDagster]:
    monkeypatch.setenv("DAGSTER_PG_URL", "of another instance")
    definitions = tmp_path / "definitions.py"
    definitions.write_text("from tests.dagster.backfill_location import defs as defs\n")
    running = LocalDagster(
        CodeLocation(definitions),
        instance_home=write_instance(tmp_path / ".eventsql", dsn),
        port=0,
        environment={"EVENTSQL_DSN": dsn, "PYSPARK_PYTHON": sys.executable},
    )
    with running:
        running.start(timeout=240)
        yield running


@pytest.mark.nightly
def test_a_running_dagster_replays_a_range_as_partitions_of_an_asset(
    run: Run, ledger: Ledger, dagster: LocalDagster
) -> None:
    ids = ledger.publish(20)
    assert running_url(dagster.instance_home) == dagster.url, "a command in this directory finds it"
    result = run(
        *LEDGER, "--from", "earliest", "--window-events", "10", "--parallel", "4", "--max-failures", "3", "--execute",
        "--id", "may",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert ledger.effects() == ids
    with dagster.instance() as instance:
        runs = instance.get_runs(dg.RunsFilter(tags={"eventsql/backfill": "may"}))
        assert runs[0].run_config == {"ops": {"ledger_backfill": {"config": {"max_failures": 3}}}}
        assert {each.status for each in runs} == {dg.DagsterRunStatus.SUCCESS}
        keys = {each.tags["dagster/partition"] for each in runs}
        assert set(instance.get_dynamic_partitions("ledger_backfill")) == keys
        assert instance.get_materialized_partitions(dg.AssetKey("ledger_backfill")) == keys

    ran = run(*LEDGER, "--from", "earliest", "--execute", "--id", "may", "--dagster-url", dagster.url)
    assert (ran.exit_code, "has run before" in ran.stderr) == (1, True)

    of_ledger, of_fragile = (RemoteDagster(dagster.url, "orders", name) for name in ("ledger", "fragile"))
    with dagster.instance() as instance:
        instance.report_run_canceling(runs[0])
    assert of_ledger.under_way("may") == {runs[0].tags["dagster/partition"]: runs[0].run_id}
    assert of_fragile.under_way("may") == {}, "an id is a consumer's own"
    with dagster.instance() as instance:
        # Dagster waits for it else when it ends.
        instance.report_run_canceled(runs[0])

    (poison,) = ledger.publish(1, location.POISON)
    failed = run(
        "backfill", "orders", "fragile", "--from", str(poison), "--execute", "--id", "may", "--dagster-url",
        dagster.url,
    )  # fmt: skip
    assert failed.exit_code == 1
    assert f"event {poison} failed as often" in failed.stderr
    assert f"{dagster.url}/runs/" in failed.stderr


def test_a_url_without_a_webserver_is_refused(closed_port: int) -> None:
    with pytest.raises(ValidationError):
        RemoteDagster("ftp://127.0.0.1", "orders", "ledger")
    with pytest.raises(LocalDagsterError, match="no Dagster answers"):
        RemoteDagster(f"http://127.0.0.1:{closed_port}", "orders", "ledger").require_running()


def test_one_of_several_code_locations_with_the_consumer_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def location(name: str) -> dict[str, Any]:
        tags = [{"key": "eventsql/backfill_of", "value": "orders/ledger"}]
        assets = [{"label": ASSETS_METADATA, "jsonString": '["ledger"]'}]
        node = {"jobNames": ["b"], "partitionDefinition": {"name": "ledger_backfill"}, "metadataEntries": assets}
        return {
            "name": "__repository__", "location": {"name": name}, "jobs": [{"name": "b", "tags": tags}],
            "assetNodes": [node],
        }  # fmt: skip

    locations = [location("live")]
    monkeypatch.setattr(webserver.Webserver, "repositories", lambda _: locations)
    assert RemoteDagster("http://127.0.0.1:3000", "orders", "ledger").job.location == "live"
    locations.append(location("staging"))
    with pytest.raises(ValidationError):
        _ = RemoteDagster("http://127.0.0.1:3000", "orders", "ledger").job


def test_a_job_that_only_has_the_tag_of_a_backfill_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = [{"key": "eventsql/backfill_of", "value": "orders/ledger"}]
    node = {"jobNames": ["own"], "partitionDefinition": None, "metadataEntries": []}
    location = {"name": "__repository__", "location": {"name": "live"}, "jobs": [{"name": "own", "tags": tags}]}
    monkeypatch.setattr(webserver.Webserver, "repositories", lambda _: [{**location, "assetNodes": [node, node]}])
    with pytest.raises(ValidationError, match="'own'"):
        _ = RemoteDagster("http://127.0.0.1:3000", "orders", "ledger").job


@pytest.mark.parametrize(
    ("kind", "error"), [("PythonError", LocalDagsterError), ("PipelineNotFoundError", RunFailedError)]
)
def test_a_launch_that_dagster_cannot_answer_is_not_a_refusal(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: type[EventSQLError]
) -> None:
    answer = {"launchRun": {"__typename": kind, "message": "why"}}
    monkeypatch.setattr(webserver.Webserver, "ask", lambda *_, **__: answer)
    with pytest.raises(EventSQLError, match="'job' could not be launched: why") as raised:
        webserver.Webserver("http://127.0.0.1:3000").launch("repository", "location", "job", config={}, tags={})
    assert type(raised.value) is error


def test_a_run_whose_webserver_was_killed_before_it_submitted_the_run_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    created = webserver.RunOfWebserver("run", "job", "NOT_STARTED", {"dagster/partition": "one:0-3"})
    submitted = webserver.RunOfWebserver("run-2", "job", "QUEUED", {"dagster/partition": "one:3-6"})

    def runs(_: object, *, tags: object, statuses: list[str]) -> list[webserver.RunOfWebserver]:
        return [run for run in [created, submitted] if run.status in statuses]

    dagster = RemoteDagster("http://127.0.0.1:3000", "orders", "ledger")
    monkeypatch.setattr(webserver.Webserver, "runs", runs)
    monkeypatch.setattr(RemoteDagster, "job", DagsterJob("job", (), "partitions", "orders/ledger", "orders"))
    assert dagster.under_way("one") == {"one:3-6": "run-2"}


def test_the_password_of_a_url_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def post(url: str, **_: Any) -> Any:
        asked.append(url)
        answer = requests.Response()
        answer.status_code, answer.raw = 200, io.BytesIO(b"[]")
        return answer

    monkeypatch.setattr(requests, "post", post)
    dagster = RemoteDagster("http://somebody:secret@127.0.0.1:3000/", "orders", "ledger")
    with pytest.raises(LocalDagsterError, match="is not a webserver of Dagster") as raised:
        dagster.require_running()
    assert asked == ["http://somebody:secret@127.0.0.1:3000/graphql"]
    assert dagster.url == "http://127.0.0.1:3000"
    assert "secret" not in str(raised.value)
