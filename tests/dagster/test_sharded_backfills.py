"""Backfills and traces over shards: each shard has its own offsets, and one id covers all shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result

from eventsql_orchestration import Publication, Topic
from eventsql_orchestration.cli import main
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import build_backfill
from eventsql_orchestration.dagster.backfills.job import DagsterJob
from eventsql_orchestration.errors import PartitionLeasedError, RegistryError, ShardSetError, ValidationError
from eventsql_orchestration.orchestration.backfills.driver import BackfillDriver, DriverProgress
from eventsql_orchestration.orchestration.backfills.launcher import Ended, Launcher
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import Plan, ReplayRange
from eventsql_orchestration.orchestration.shards import shards_of
from eventsql_orchestration.orchestration.trace.tracer import Tracer
from eventsql_orchestration.topics.positions import AtOffset, Earliest
from tests.conftest import Prepared
from tests.dagster.conftest import ONE, OTHER, Workbench
from tests.dagster.test_shards import ledger

ledger_backfill = build_backfill(ledger)
JOB = DagsterJob("backfill_ledger", ("ledger",), "ledger_backfill", "orders/ledger", "orders")


@pytest.fixture
def shard_templates(prepared: Prepared) -> tuple[str, ...]:
    return prepared(ledger.register, databases=2)


@pytest.fixture
def backfills(shards: dict[str, Workbench]) -> Backfills:
    platform = shards[ONE].eventsql.platform
    for bench, count in zip(shards.values(), (3, 5), strict=True):
        bench.publish("orders", count, partition=0)
    return Backfills(shards_of(platform))


@pytest.fixture
def location(shards: dict[str, Workbench]) -> dg.Definitions:
    return dg.Definitions(
        assets=[ledger.asset, ledger_backfill.asset],
        jobs=[ledger.job, *ledger_backfill.jobs],
        resources={"eventsql": shards[ONE].eventsql},
    )


def everything(backfills: Backfills, **cut: Any) -> Plan:
    return backfills.plan("orders", "ledger", ReplayRange(Earliest(), **cut))


class InProcess(Launcher):
    """Executes each run when it is launched."""

    orchestrator = "a test"

    def __init__(self, location: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self.replays = location.resolve_job_def(JOB.name)
        self.instance = instance
        self.results: dict[str, Ended] = {}

    @property
    def job(self) -> DagsterJob:
        return JOB

    def prepare(self, keys: Any) -> None:
        self.instance.add_dynamic_partitions(JOB.partitions, list(keys))

    def was_run(self, backfill_id: str) -> bool:
        return False

    def launch(self, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        result = self.replays.execute_in_process(instance=self.instance, partition_key=key, raise_on_error=False)
        self.results[result.run_id] = Ended(result.success, "it failed")
        return result.run_id

    def ended(self, runs: Any) -> dict[str, Ended]:
        return {run: self.results[run] for run in runs}


def test_each_shard_is_replayed_by_runs_of_its_own_and_live_offsets_stay(
    shards: dict[str, Workbench], backfills: Backfills, location: dg.Definitions
) -> None:
    plan = everything(backfills, window_events=3)
    assert [(run.window.shard, run.events) for run in plan.runs] == [(ONE, 3), (OTHER, 3), (OTHER, 2)]
    assert (plan.events, plan.range) == (8, None)
    instance = shards[ONE].instance
    done: list[int] = []

    def note(standing: DriverProgress) -> None:
        done.append(standing.done_events)

    outcome = BackfillDriver(
        backfills, backfills.register(plan, "may"), plan.runs,
        launcher=InProcess(location, instance), parallel=1,
    ).run(note)  # fmt: skip
    assert (outcome.done, done[-1]) == (True, 8)
    assert backfills.find("orders", "may") is None
    for bench, count in zip(shards.values(), (3, 5), strict=True):
        assert len(bench.effects()) == count
        assert bench.offset(ledger, 0) == 0
    tagged = [run.tags["eventsql/shard"] for run in instance.get_runs(dg.RunsFilter(tags={"eventsql/backfill": "may"}))]
    assert sorted(tagged) == [ONE, OTHER, OTHER]


def test_a_backfill_ends_on_each_shard_by_itself(
    shards: dict[str, Workbench], backfills: Backfills, location: dg.Definitions
) -> None:
    plan = everything(backfills)
    found = backfills.register(plan, "may")
    instance = shards[ONE].instance
    keys = [run.key("may") for run in plan.runs]
    instance.add_dynamic_partitions("ledger_backfill", keys)
    assert location.resolve_job_def(JOB.name).execute_in_process(instance=instance, partition_key=keys[0]).success
    assert shards[OTHER].effects() == []
    left = backfills.get("orders", "may")
    assert set(left.by_shard()) == {OTHER}
    assert backfills.registered() == [left]
    assert found.created_at <= left.created_at
    backfills.delete(left)
    with pytest.raises(RegistryError, match="has no backfill"):
        backfills.get("orders", "may")


def test_a_backfill_that_one_shard_refuses_is_registered_on_none(
    shards: dict[str, Workbench], backfills: Backfills
) -> None:
    plan = everything(backfills)
    shards[OTHER].platform.registry.unregister_consumer("orders", "ledger")
    with pytest.raises(RegistryError, match="deleted or registered again"):
        backfills.register(plan, "may")
    assert backfills.registered() == []


def test_offsets_and_into_need_a_single_shard(shards: dict[str, Workbench], backfills: Backfills) -> None:
    with pytest.raises(ValidationError, match="--shard"):
        backfills.plan("orders", "ledger", ReplayRange(AtOffset(1)))
    with pytest.raises(ValidationError, match="would not be on all shards"):
        backfills.check_into("copy")
    with pytest.raises(ValidationError, match="would not be on all shards"):
        backfills.register(everything(backfills), "may", into="copy")
    alone = Backfills([shards[OTHER].eventsql.shard(OTHER)])
    plan = alone.plan("orders", "ledger", ReplayRange(AtOffset(1)))
    assert [run.window.shard for run in plan.runs] == [OTHER]


def test_a_take_over_moves_the_offsets_of_each_shard(shards: dict[str, Workbench], backfills: Backfills) -> None:
    found = backfills.register(everything(backfills), "may")
    claim = shards[OTHER].platform.claims.claim("orders", "ledger", 0, owner="somebody", max_wait=0.0)
    moved = []
    with pytest.raises(PartitionLeasedError):
        moved += list(backfills.take_over(found))
    assert shards[ONE].offset(ledger, 0) > 0, "the shards before the one that fails have moved"
    assert isinstance(claim, Claim)
    shards[OTHER].platform.claims.release(claim)
    assert [move.partition for move in backfills.take_over(found)] == [0]
    assert shards[OTHER].offset(ledger, 0) > 0


def test_a_plan_from_the_ui_is_for_all_shards_and_leaves_nothing_if_refused(
    shards: dict[str, Workbench], backfills: Backfills, location: dg.Definitions
) -> None:
    job, instance = location.resolve_job_def("plan_ledger_backfill"), shards[ONE].instance

    def plan(**config: Any) -> bool:
        configured = {"ops": {"plan_ledger_backfill_windows": {"config": config}}}
        return job.execute_in_process(instance=instance, run_config=configured, raise_on_error=False).success

    assert not plan(into="copy")
    assert instance.get_dynamic_partitions("ledger_backfill") == []
    assert plan()
    keys = instance.get_dynamic_partitions("ledger_backfill")
    assert sorted(key.partition("@")[2] for key in keys) == [ONE, OTHER]
    (found,) = backfills.registered()
    assert {run.key(found.id) for run in backfills.runs_of(found)} == set(keys)


# The program


@pytest.fixture
def run(shards: dict[str, Workbench], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    # Without the settings and the instance of a directory that is in use.
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setenv("EVENTSQL_DSN", " ".join(bench.platform.database.dsn for bench in shards.values()))

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, list(arguments))

    return invoke


def test_the_command_plans_for_all_shards_or_for_the_named_one(
    run: Callable[..., Result], backfills: Backfills
) -> None:
    module = ("-m", "tests.dagster.backfill_location", "--json")
    result = run("backfill", "orders", "ledger", "--from", "earliest", *module)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [(each["shard"], each["events"]) for each in plan["runs"]] == [(ONE, 3), (OTHER, 5)]
    assert (plan["from"], plan["events"]) == (None, 8)
    alone = json.loads(run("--shard", OTHER, "backfill", "orders", "ledger", "--from", "1", *module).stdout)
    assert [each["shard"] for each in alone["runs"]] == [OTHER]
    assert run("--shard", "shard-9", "backfill", "orders", "ledger", "--from", "1", *module).exit_code == 2

    backfills.register(everything(backfills), "may")
    (listed,) = json.loads(run("backfill", "list", "--json").stdout)
    assert (listed["id"], listed["windows"]) == ("may", 2)
    assert run("backfill", "delete", "orders", "ledger", "may", "--execute").exit_code == 0
    assert backfills.registered() == []


def test_a_take_over_that_a_later_shard_refuses_keeps_the_backfill_and_names_the_command_that_replays_the_rest(
    run: Callable[..., Result], shards: dict[str, Workbench], backfills: Backfills
) -> None:
    claims = shards[OTHER].platform.claims
    assert isinstance(claims.claim("orders", "ledger", 0, owner="somebody", max_wait=0.0, lease=3_600.0), Claim)
    refused = run(
        "backfill", "orders", "ledger", "--from", "earliest", "--id", "may", "--take-over", "--execute", "-m",
        "tests.dagster.backfill_location",
    )  # fmt: skip
    assert refused.exit_code == 1
    assert "`eventsql backfill --resume may --execute" in refused.stderr
    assert shards[ONE].offset(ledger, 0) > 0
    assert [each.id for each in backfills.registered()] == ["may"]


# Traces


def test_an_event_is_traced_to_the_claim_of_its_run_on_another_shard(
    shards: dict[str, Workbench], run: Callable[..., Result], backfills: Backfills
) -> None:
    platform, here = shards[ONE].eventsql.platform, shards[OTHER]
    platform.registry.register_topic(Topic("echoes"))
    claimed = here.platform.claims.claim("orders", "ledger", 0, owner="run 1234", max_wait=0.0)
    assert isinstance(claimed, Claim)
    here.platform.publisher.publish(Publication("echoes", b"", metadata={"dagster_run_id": "1234"}))
    here.platform.transfer.run_once()
    origin = Tracer(platform).trace("echoes", 1, shard=OTHER)
    (read,) = origin.inputs
    assert (origin.shard, read.range.shard, read.range.claim) == (OTHER, OTHER, claimed.id)
    with pytest.raises(ShardSetError, match=r"name one of shard-1, shard-2 \(--shard NAME\)"):
        Tracer(platform).trace("echoes", 1)

    traced = json.loads(run("--shard", OTHER, "trace", "echoes", "1", "--json").stdout)
    assert (traced["shard"], traced["inputs"][0]["shard"]) == (OTHER, OTHER)
    assert "on shard-2" in run("--shard", OTHER, "trace", "echoes", "1").stdout
    assert run("--shard", ONE, "trace", "echoes", "1").exit_code == 2, "it is not there"
