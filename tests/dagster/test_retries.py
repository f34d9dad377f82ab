"""Dagster's own retries: of a step, by a policy, and of a run, by a tag; neither loses nor repeats an event."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.consuming import claims as claims_module
from eventsql_orchestration.consuming.claims import Claim, Claims
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLIOManager,
    EventSQLResource,
    RunLimits,
    consumer_asset,
    topic_key,
)
from eventsql_orchestration.dagster.consumers.reexecution import FROM_FAILURE_TAG, RETRY_NUMBER_TAG
from eventsql_orchestration.dagster.local.instance import instance_config
from eventsql_orchestration.dagster.metadata_keys import PUBLISHED_FIRST, PUBLISHED_LAST
from eventsql_orchestration.errors import ClaimLostError, DatabaseUnavailableError
from eventsql_orchestration.orchestration.owners import owner_of_run
from tests.dagster.conftest import Workbench, registering
from tests.dagster.location import AT_ONCE, cut_off, record
from tests.dagster.test_ranges import SUMS, sums, total
from tests.dagster.test_ranges import define as define_range

RETRIES = dg.RetryPolicy(max_retries=2)


def steadily(
    function: Callable[..., Any] = record, *, batch: int = 1_000, limits: RunLimits = AT_ONCE,
    retries: dg.RetryPolicy | None = RETRIES,
) -> ConsumerDefinition:  # fmt: skip
    return consumer_asset(
        topic=Topic("rides", 2), consumer="steady", name="steady", batch=batch,
        limits=limits, options=AssetOptions(retry_policy=retries),
    )(function)  # fmt: skip


steady = steadily()

pytestmark = pytest.mark.prepared.with_args(registering(SUMS, define_range(total), steady))


def restarts(result: dg.ExecuteInProcessResult) -> int:
    return sum(event.event_type == dg.DagsterEventType.STEP_RESTARTED for event in result.all_events)


def test_a_run_that_fails_after_a_part_of_its_range_goes_on_where_it_was(bench: Workbench) -> None:
    """Its connection breaks in the second batch."""
    ids = bench.publish("rides", 6)
    result = bench.run(steadily(cut_off(2), batch=2), bench.request(steady))
    assert result.success
    assert restarts(result) == 1
    assert bench.effects() == ids
    assert bench.offset(steady) == ids[-1]


def test_an_event_that_fails_has_its_own_attempts_whatever_the_policy(bench: Workbench) -> None:
    def stumble(events: Any, connection: Any) -> None:
        raise ValueError("no")

    broken = steadily(stumble)
    bench.publish("rides", 1)
    result = bench.run(broken, bench.request(broken))
    assert not result.success
    assert restarts(result) == 0


def test_a_range_is_tried_again_where_the_database_was_away(bench: Workbench) -> None:
    cut = iter([True])

    def unlucky(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
        if next(cut, False):
            raise DatabaseUnavailableError
        return total(context, claim, eventsql)

    definition = define_range(unlucky, options=AssetOptions(retry_policy=RETRIES))
    bench.publish("rides", 3)
    result = bench.run(definition, bench.request(definition))
    assert result.success
    assert restarts(result) == 1
    assert sums(bench) == [b"3"]


def test_a_step_reads_what_each_attempt_of_the_step_before_it_has_published(bench: Workbench) -> None:
    """The database is away in the second range of the first attempt, whose claim the second attempt takes over."""
    ranges = itertools.count()
    loaded: list[list[bytes]] = []

    def unlucky(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
        if next(ranges) == 1:
            raise DatabaseUnavailableError
        told = total(context, claim, eventsql)
        eventsql.platform.transfer.run_once()
        last = eventsql.platform.reader.end("sums")
        return {**told, PUBLISHED_FIRST: last, PUBLISHED_LAST: last}

    reads = dg.AssetIn(topic_key("sums"), input_manager_key="events", metadata={"reads": "materialization"})

    @dg.asset(ins={"events": reads})
    def reading(events: list[Event]) -> None:
        loaded.append([event.value for event in events])

    retried = AssetOptions(retry_policy=RETRIES)
    definition = define_range(unlucky, options=retried, max_events=2, drain_seconds=3_600.0, drain_idle=0.0)
    bench.publish("rides", 4)
    result = dg.materialize(
        [definition.asset, reading], instance=bench.instance,
        resources={"eventsql": bench.eventsql, "events": EventSQLIOManager(eventsql=bench.eventsql)},
    )  # fmt: skip
    assert restarts(result) == 1
    assert loaded == [[b"2", b"2"]]


# A later attempt, and the claim that an earlier attempt has left


@pytest.mark.parametrize(
    "config",
    [{}, {"partition": -1}, {"partition": -1, "succeeds": "a run that has ended"}],
    ids=["every partition", "one partition", "as a successor"],
)
def test_a_run_without_a_claim_in_its_config_goes_on_with_the_claim_of_its_first_attempt(
    bench: Workbench, config: dict[str, Any]
) -> None:
    ids = bench.publish("rides", 6)
    request = dg.RunRequest(run_config={"ops": {"steady": {"config": config}}})
    result = bench.run(steadily(cut_off(2), batch=2), request)
    assert result.success
    assert restarts(result) == 1
    assert bench.effects() == ids


def test_a_run_goes_on_with_the_last_claim_of_its_first_attempt(bench: Workbench) -> None:
    """The claim that it was requested for is committed."""
    definition = steadily(cut_off(2), limits=RunLimits(max_events=2, max_wait=0.0, drain_idle=0.0, drain_seconds=3_600))
    ids = bench.publish("rides", 4)
    result = bench.run(definition, bench.request(definition))
    assert result.success
    assert restarts(result) == 1
    assert bench.effects() == ids


def again(bench: Workbench, parent: str, **tags: str) -> dg.JobExecutionResult:
    """A run that executes a run again that was launched by hand."""
    job = bench.job(steady)
    run = bench.instance.create_run_for_job(job, parent_run_id=parent, root_run_id=parent, tags=tags)
    return execute_run(InMemoryJob(job), run, bench.instance)


@pytest.mark.parametrize("tags", [{}, {FROM_FAILURE_TAG: "true"}, {RETRY_NUMBER_TAG: "1"}])
def test_a_run_that_is_executed_again_goes_on_with_the_claim_that_it_has_left(
    bench: Workbench, tags: dict[str, str]
) -> None:
    ids = bench.publish("rides", 6)
    failed = bench.run(steadily(cut_off(2), batch=2, retries=None))
    assert not failed.success
    assert again(bench, failed.run_id, **tags).success
    assert bench.effects() == ids


def test_a_run_leaves_the_claim_of_a_run_alone_that_is_executed_again_and_has_not_ended(bench: Workbench) -> None:
    bench.publish("rides", 6)
    alive = bench.requested(steady, dg.RunRequest(), dg.DagsterRunStatus.STARTED)
    claim = bench.platform.claims.claim("rides", "steady", owner=owner_of_run(alive))
    assert isinstance(claim, Claim)
    result = again(bench, alive)
    assert result.success
    bench.platform.claims.renew(claim)
    assert f"run {alive} leases the partition" in notes(bench, result)


def test_a_run_leaves_a_claim_to_another_run_that_has_just_taken_it_over(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs execute a failed run again at once."""
    ids = bench.publish("rides", 6)
    failed = bench.run(steadily(cut_off(2), batch=2, retries=None))
    live, faster = Claims.live, list[Claim]()

    def late(self: Claims, *args: Any, **options: Any) -> Claim | None:
        monkeypatch.setattr(Claims, "live", live)
        found = live(self, *args, **options)
        assert found is not None
        faster.append(self.adopt(found.id, owner="the faster run"))
        return found

    monkeypatch.setattr(Claims, "live", late)
    result = again(bench, failed.run_id)
    assert result.success
    assert "the faster run leases the partition" in notes(bench, result)
    assert bench.effects() == ids[:2]
    bench.platform.claims.process(faster[0], record)
    assert bench.effects() == ids


def test_a_run_that_is_executed_again_fails_while_a_transaction_of_the_first_run_lingers(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "LOCK_TIMEOUT", 0.1)
    ids = bench.publish("rides", 6)
    failed = bench.run(steadily(cut_off(2), batch=2, retries=None))
    with bench.platform.database.transaction() as lingering:
        lingering.execute("SELECT 1 FROM eventsql.consumer WHERE eql_name = 'steady' FOR UPDATE")
        second = again(bench, failed.run_id)
        assert not second.success
    assert again(bench, second.run_id).success
    assert bench.effects() == ids


def notes(bench: Workbench, result: dg.JobExecutionResult) -> str:
    """The note of the only materialization of a run."""
    (entry,) = bench.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    assert entry.asset_materialization is not None
    return str(entry.asset_materialization.metadata["note"].value)


def test_a_run_that_is_resumed_takes_its_claim_from_the_process_that_seemed_dead(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bench.publish("rides", 6)
    job = bench.job(steady)
    run = bench.instance.create_run_for_job(job)
    claims, adopt = bench.platform.claims, Claims.adopt
    first = claims.claim("rides", "steady", owner=owner_of_run(run.run_id))
    assert isinstance(first, Claim)

    def wake(self: Claims, *args: Any, **options: Any) -> Claim:
        taken = adopt(self, *args, **options)
        with pytest.raises(ClaimLostError):
            claims.process(first, record)
        return taken

    monkeypatch.setattr(Claims, "adopt", wake)
    assert execute_run(InMemoryJob(job), run, bench.instance).success
    assert bench.effects() == ids


@pytest.mark.parametrize("policy", [RETRIES, None])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        dg.Failure("out of memory", metadata={"free": 0}),
        dg.RetryRequested(max_retries=1),
    ],
    ids=["an error", "Dagster's failure", "a request to retry"],
)
def test_a_range_whose_function_fails_is_given_back_and_its_run_fails(
    bench: Workbench, error: Exception, policy: dg.RetryPolicy | None
) -> None:
    """A retry would find its claim gone, and blame a process that stood still."""

    def stumble(claim: Claim) -> None:
        raise error

    broken = define_range(stumble, options=AssetOptions(retry_policy=policy))
    bench.publish("rides", 3)
    result = bench.run(broken, bench.request(broken))
    assert not result.success
    assert restarts(result) == 0
    failure = result.failure_data_for_node("c").user_failure_data  # type: ignore[union-attr]
    assert failure is not None
    assert type(error).__name__ in str(failure.description)
    assert failure.metadata.keys() == (error.metadata.keys() if isinstance(error, dg.Failure) else set())


def test_a_run_that_was_reported_as_dead_does_not_succeed_and_is_not_retried(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still before it took its claim over."""
    adopt = Claims.adopt
    ids = bench.publish("rides", 3)
    late = bench.request(steady)
    following: list[dg.RunRequest] = []

    def wake(self: Claims, *args: Any, **options: Any) -> Claim:
        monkeypatch.setattr(Claims, "adopt", adopt)
        (run,) = bench.instance.get_runs()
        bench.instance.report_run_failed(run)
        bench.end_lease(steady)
        following.append(bench.request(steady))
        return adopt(self, *args, **options)

    monkeypatch.setattr(Claims, "adopt", wake)
    result = bench.run(steady, late)
    assert not result.success
    assert bench.stored(result.run_id).tags["dagster/max_retries"] == "0"
    assert bench.effects() == []
    assert bench.run(steady, following[0]).success
    assert bench.effects() == ids


def test_a_claim_that_is_lost_in_the_middle_fails_the_run_and_no_policy_tries_it_again(bench: Workbench) -> None:
    def steal(events: Any, connection: Any) -> None:
        record(events, connection)
        connection.execute("UPDATE eventsql.consumer SET eql_epoch = eql_epoch + 1 WHERE eql_name = 'steady'")

    stolen = steadily(steal, batch=2)
    ids = bench.publish("rides", 4)
    result = bench.run(stolen, bench.request(stolen))
    assert not result.success
    assert restarts(result) == 0
    assert bench.stored(result.run_id).tags["dagster/max_retries"] == "0"
    assert bench.effects() == ids[:2], "what was committed before stays"
    assert bench.offset(steady) == ids[1]


@pytest.fixture
def shipped(bench: Workbench) -> Iterator[Workbench]:
    """An instance with the retries of the dagster.yaml that is shipped."""
    settings = {"run_retries": instance_config()["run_retries"]}
    with dg.instance_for_test(overrides=settings) as instance:
        bench.instance = instance
        yield bench


@pytest.mark.parametrize(
    ("tags", "retried"), [({"dagster/max_retries": "2"}, True), pytest.param({}, False, marks=pytest.mark.nightly)]
)
def test_a_tag_asks_dagster_to_retry_a_run(shipped: Workbench, tags: dict[str, str], *, retried: bool) -> None:
    def cut_off(claim: Claim) -> None:
        raise DatabaseUnavailableError

    broken, mended = define_range(cut_off, options=AssetOptions(tags=tags)), define_range(total)
    shipped.publish("rides", 3)
    requested = shipped.request(broken)
    result = shipped.run(broken, requested)
    assert not result.success
    assert shipped.stored(result.run_id).tags["dagster/will_retry"] == str(retried).lower()

    # Dagster's daemon then launches a run with the config and the tags of the first run.
    assert shipped.run(mended, requested).success
    assert sums(shipped) == [b"3"]
    assert shipped.run(mended, requested).success
    assert sums(shipped) == [b"3"]
