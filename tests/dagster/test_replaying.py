"""Runs that a person or Dagster executes again: a committed range is repeated only on request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import dagster as dg
import psycopg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.consumer import EVERY_EVENT, EventFilter
from eventsql_orchestration.consuming.claims import Claim, Claims
from eventsql_orchestration.dagster import AssetOptions, ConsumerDefinition, EventSQLResource, RunLimits, consumer_asset
from eventsql_orchestration.dagster.consumers.reexecution import ancestors, is_automatic_retry, repeats_success
from eventsql_orchestration.dagster.tags import LATE_TAG
from eventsql_orchestration.database import Connection
from tests.dagster.conftest import Metadata, Workbench, registering
from tests.dagster.location import cut_off, record, slow
from tests.dagster.test_ranges import SUMS, sums, total
from tests.dagster.test_ranges import define as define_range
from tests.forms import drop_events

TOPIC = Topic("rides")


def define(
    function: Any = record, *, batch: int = 1_000, retry_policy: dg.RetryPolicy | None = None, **limits: Any
) -> ConsumerDefinition:
    return consumer_asset(
        topic=TOPIC, consumer="c", name="c", batch=batch, options=AssetOptions(retry_policy=retry_policy),
        limits=RunLimits(**{"max_wait": 0.0, "drain_seconds": 0.0, **limits}),
    )(function)  # fmt: skip


pytestmark = pytest.mark.prepared.with_args(registering(define()))


def committed(bench: Workbench, definition: ConsumerDefinition) -> dg.RunRequest:
    """A request whose run has succeeded."""
    requested = bench.request(definition)
    assert bench.run(definition, requested).success
    return requested


def again(
    bench: Workbench,
    definition: ConsumerDefinition,
    requested: dg.RunRequest,
    *,
    replay: bool,
    tags: dict[str, str] | None = None,
) -> dg.ExecuteInProcessResult:
    """A run with the config of another run, to which a person has added `replay`."""
    (op, config) = next(iter(requested.run_config["ops"].items()))
    replaying = {"ops": {op: {"config": {**config["config"], "replay": replay}}}}
    return bench.run(definition, dg.RunRequest(run_config=replaying, tags=tags))


# Real re-execution needs a job that another process could load.


def slow_job() -> dg.JobDefinition:
    """The job of consumer `slow` of the tests' location."""
    return dg.Definitions(
        assets=[slow.asset], jobs=[slow.job], resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))}
    ).resolve_job_def("consume_slow")


@pytest.fixture
def reexecuting(
    bench: Workbench, shared_instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> Workbench:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    bench.instance = shared_instance
    bench.platform.registry.register_topic(slow.topic)
    slow.register(bench.platform)
    return bench


def execute(bench: Workbench, **options: Any) -> str:
    """A run that succeeds; gives its id."""
    with dg.execute_job(dg.reconstructable(slow_job), instance=bench.instance, **options) as result:
        assert result.success
        return result.run_id


def reexecute(bench: Workbench, parent: str, **options: Any) -> str:
    return execute(bench, reexecution_options=dg.ReexecutionOptions(parent_run_id=parent), **options)


def test_a_run_that_succeeded_and_is_executed_again_replays_its_range_and_leaves_the_offset(
    reexecuting: Workbench,
) -> None:
    ids = reexecuting.publish("orders", 25)
    requested = reexecuting.request(slow)
    first = execute(reexecuting, run_config=requested.run_config, tags=dict(requested.tags))
    reexecuting.publish("orders", 5)

    second = reexecute(reexecuting, first)
    assert reexecuting.effects() == [*ids, *ids], "its own range, not what came later"
    assert reexecuting.offset(slow) == ids[-1]
    assert reexecuting.stored(second).tags["eventsql/replay"] == "true"
    (entry,) = reexecuting.instance.all_logs(second, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    assert entry.asset_materialization is not None
    assert entry.asset_materialization.metadata["replayed"].value is True

    # The live consumer goes on where it was.
    assert reexecuting.request(slow).tags[".dagster/eventsql_after"] == str(ids[-1])


def test_a_run_that_took_over_from_another_and_is_executed_again_replays_its_first_range(
    reexecuting: Workbench,
) -> None:
    ids = reexecuting.publish("orders", 25)
    config = {"ops": {"slow": {"config": {"partition": -1, "succeeds": "one-that-ended"}}}}
    first = execute(reexecuting, run_config=config)
    assert reexecuting.effects() == ids
    reexecuting.publish("orders", 5)

    reexecute(reexecuting, first)
    assert reexecuting.effects() == [*ids, *ids], "its own range, not what came later"
    assert reexecuting.offset(slow) == ids[-1]


def test_a_run_that_failed_after_its_commit_and_is_executed_again_repeats_nothing(reexecuting: Workbench) -> None:
    """Dagster's run retries, and a person, only know that the run failed."""
    ids = reexecuting.publish("orders", 5)
    requested = reexecuting.request(slow)
    first = execute(reexecuting, run_config=requested.run_config, tags=dict(requested.tags))
    reexecuting.instance.report_run_failed(reexecuting.stored(first))

    reexecute(reexecuting, first)
    assert reexecuting.effects() == ids


def test_a_run_that_failed_before_its_commit_and_is_executed_again_consumes_its_range(reexecuting: Workbench) -> None:
    ids = reexecuting.publish("orders", 5)
    requested = reexecuting.request(slow)
    dead, _ = reexecuting.adopted(slow, requested, dg.DagsterRunStatus.FAILURE)

    reexecute(reexecuting, dead)
    assert reexecuting.effects() == ids
    assert reexecuting.offset(slow) == ids[-1]


AUTOMATIC = {"dagster/retry_number": "1"}
"""The tag that Dagster's daemon gives a run that it launches as a retry."""


@pytest.mark.parametrize("reported", [False, True])
def test_a_run_that_is_executed_again_and_has_lost_its_range_succeeds_unless_it_was_reported_as_dead(
    reexecuting: Workbench, monkeypatch: pytest.MonkeyPatch, *, reported: bool
) -> None:
    reexecuting.publish("orders", 5)
    dead, _ = reexecuting.adopted(slow, reexecuting.request(slow), dg.DagsterRunStatus.FAILURE)
    adopt = Claims.adopt

    def lose(self: Claims, claim_id: int, **options: Any) -> Claim:
        monkeypatch.setattr(Claims, "adopt", adopt)
        (run,) = reexecuting.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        if reported:
            reexecuting.instance.report_run_failed(run)
        self.release(self.get(claim_id)[0])
        return adopt(self, claim_id, **options)

    monkeypatch.setattr(Claims, "adopt", lose)
    again = dg.ReexecutionOptions(parent_run_id=dead)
    with dg.execute_job(
        dg.reconstructable(slow_job), instance=reexecuting.instance, reexecution_options=again, raise_on_error=False
    ) as result:
        assert result.success is not reported
        assert LATE_TAG not in reexecuting.stored(result.run_id).tags
    assert reexecuting.effects() == []


def test_an_automatic_retry_of_a_run_that_succeeded_after_all_replays_nothing(reexecuting: Workbench) -> None:
    """Its process stood still, and was reported as dead and retried. Then it succeeded before the retry began."""
    ids = reexecuting.publish("orders", 5)
    requested = reexecuting.request(slow)
    first = execute(reexecuting, run_config=requested.run_config, tags=dict(requested.tags))

    retry = reexecute(reexecuting, first, tags=AUTOMATIC)
    assert reexecuting.effects() == ids

    # A person who executes the retry again wants its range once more.
    reexecute(reexecuting, retry)
    assert reexecuting.effects() == [*ids, *ids]


def test_an_automatic_retry_of_a_run_that_took_over_replays_nothing(reexecuting: Workbench) -> None:
    ids = reexecuting.publish("orders", 5)
    config = {"ops": {"slow": {"config": {"partition": -1, "succeeds": "one-that-ended"}}}}
    first = execute(reexecuting, run_config=config)

    reexecute(reexecuting, first, tags=AUTOMATIC)
    assert reexecuting.effects() == ids
    more = reexecuting.publish("orders", 5)
    retry = reexecute(reexecuting, first, tags=AUTOMATIC)
    assert reexecuting.effects() == [*ids, *more], "a retry goes on where the offset is"

    for parent, claimed in ((retry, more), (reexecute(reexecuting, first), ids)):
        before = reexecuting.effects()
        reexecute(reexecuting, parent)
        assert reexecuting.effects() == [*before, *claimed]


def test_a_run_that_wrote_its_success_over_a_report_of_its_failure_is_not_replayed_without_a_request(
    reexecuting: Workbench,
) -> None:
    """The person may have executed it again while Dagster showed it as failed."""
    ids = reexecuting.publish("orders", 5)
    requested = reexecuting.request(slow)
    first = execute(reexecuting, run_config=requested.run_config, tags=dict(requested.tags))
    instance = reexecuting.instance
    run = reexecuting.stored(first)
    instance.report_run_failed(run)
    success = dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, run.job_name)
    instance.report_dagster_event(success, run_id=first)
    assert reexecuting.stored(first).status is dg.DagsterRunStatus.SUCCESS

    reexecute(reexecuting, first)
    assert reexecuting.effects() == ids


def test_a_run_that_succeeds_after_a_person_has_executed_it_again_is_not_replayed(bench: Workbench) -> None:
    job = bench.job(define())
    instance = bench.instance
    paused = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)

    def child() -> dg.DagsterRun:
        run = instance.create_run_for_job(job, parent_run_id=paused.run_id, root_run_id=paused.run_id)
        starting = dg.DagsterEvent(dg.DagsterEventType.RUN_STARTING.value, run.job_name)
        instance.report_dagster_event(starting, run_id=run.run_id)
        return run

    early = child()
    success = dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, paused.job_name)
    instance.report_dagster_event(success, run_id=paused.run_id)
    late = child()
    assert [repeats_success(run, instance) for run in (early, late)] == [False, True]


def test_a_retry_is_known_by_its_own_tag_or_by_that_of_its_parent(bench: Workbench) -> None:
    job = bench.job(define())

    def child(parent: str, **tags: str) -> dg.DagsterRun:
        return bench.instance.create_run_for_job(job, parent_run_id=parent, root_run_id=parent, tags=tags)

    first = bench.instance.create_run_for_job(job, status=dg.DagsterRunStatus.SUCCESS)
    persons, tagged = child(first.run_id), child(first.run_id, **AUTOMATIC)
    untagged, from_failure = child(first.run_id), child(first.run_id, **{"dagster/is_resume_retry": "true"})
    bench.instance.add_run_tags(first.run_id, {"dagster/auto_retry_run_id": untagged.run_id})
    found = {
        run.run_id: repeats_success(run, bench.instance) for run in (first, persons, tagged, untagged, from_failure)
    }
    assert [run_id for run_id, repeats in found.items() if repeats] == [persons.run_id]
    assert [is_automatic_retry(run, bench.instance) for run in (first, persons, tagged, untagged)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_ancestors_are_told_once_whatever_the_tags_say(bench: Workbench) -> None:
    job = bench.job(define())
    loop = bench.instance.create_run_for_job(
        job, run_id="00000000-0000-0000-0000-000000000001", root_run_id="gone",
        parent_run_id="00000000-0000-0000-0000-000000000001",
    )  # fmt: skip
    child = bench.instance.create_run_for_job(job, parent_run_id=loop.run_id, root_run_id="gone")
    assert list(ancestors(child, bench.instance)) == [loop.run_id, "gone"]
    assert list(ancestors(loop, bench.instance)) == ["gone"]


# Requested replays


def test_a_requested_replay_hands_over_the_events_that_match_the_filter(bench: Workbench, metadata: Metadata) -> None:
    definition = define(batch=2)
    bench.platform.registry.register_consumer(definition.consumer, filter=EventFilter(keys=frozenset({"nobody"})))
    bench.publish("rides", 5)
    requested = committed(bench, definition)
    assert again(bench, definition, requested, replay=True).success
    assert bench.effects() == []

    bench.platform.registry.register_consumer(definition.consumer, filter=EVERY_EVENT)
    found = again(bench, definition, requested, replay=True)
    assert len(bench.effects()) == 5
    assert metadata(found, definition.key)["events"] == 5


def test_a_run_with_the_tags_of_another_claim_replays_the_claim_of_its_config(bench: Workbench) -> None:
    """A person has executed a run again, and has put another claim in its config."""
    definition = define()
    bench.publish("rides", 3)
    first = bench.request(definition)
    assert bench.run(definition, first).success
    ids = bench.publish("rides", 2)
    second = bench.request(definition)
    assert bench.run(definition, second).success
    assert again(bench, definition, second, replay=True, tags=dict(first.tags)).success
    assert bench.effects()[-4:] == [*ids, *ids]


def test_a_run_whose_config_forbids_a_replay_does_nothing(bench: Workbench) -> None:
    definition = define()
    ids = bench.publish("rides", 5)
    requested = committed(bench, definition)
    assert again(bench, definition, requested, replay=False).success
    assert bench.effects() == ids


def test_a_range_that_was_not_committed_cannot_be_replayed(bench: Workbench) -> None:
    definition = define()
    bench.publish("rides", 5)
    requested = bench.request(definition)
    assert not again(bench, definition, requested, replay=True).success
    assert bench.effects() == []


def test_a_replay_without_a_claim_is_refused_and_consumes_no_waiting_events(bench: Workbench) -> None:
    definition = define()
    bench.publish("rides", 5)
    config = {"ops": {"c": {"config": {"replay": True}}}}
    assert not bench.run(definition, dg.RunRequest(run_config=config)).success
    assert bench.effects() == []


def test_a_replay_whose_events_are_gone_is_refused_before_anything_happens(bench: Workbench) -> None:
    definition = define()
    ids = bench.publish("rides", 5)
    requested = committed(bench, definition)
    with bench.platform.database.connection() as connection:
        drop_events(connection, "rides", ids[0])
    found = again(bench, definition, requested, replay=True)
    assert not found.success
    assert "retention deleted 1 of its 5 events" in str(found.failure_data_for_node("c"))
    assert bench.effects() == ids


def test_a_batch_that_fails_ends_a_replay_and_the_offset_stays(bench: Workbench) -> None:
    definition = define(batch=2)
    ids = bench.publish("rides", 6)
    requested = committed(bench, definition)

    def stumble(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        if events[0].id == ids[2]:
            raise ValueError("no")

    assert not again(bench, define(stumble, batch=2), requested, replay=True).success
    assert bench.effects() == [*ids, *ids[:2]]
    (state,) = bench.platform.registry.consumer("rides", "c")
    assert (state.last_event_id, state.attempts) == (ids[-1], 0), "a failure of a replay does not count as an attempt"


@pytest.mark.parametrize("how", ["ROLLBACK", "rolled back", "closed"])
def test_a_replay_whose_effects_were_rolled_back_fails(bench: Workbench, how: str) -> None:
    def undo(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        if how == "rolled back":
            raise psycopg.Rollback
        if how == "closed":
            connection.close()
        else:
            connection.execute("ROLLBACK")

    bench.publish("rides", 3)
    requested = committed(bench, define())
    effects = bench.effects()
    assert not again(bench, define(undo), requested, replay=True).success
    assert bench.effects() == effects


def test_a_replay_whose_step_dagster_retries_does_not_begin_anew(bench: Workbench) -> None:
    calls = itertools.count()
    definition = define(batch=2)
    ids = bench.publish("rides", 6)
    requested = committed(bench, definition)

    def stumble(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        if next(calls) == 1:
            raise ValueError("no")

    found = again(bench, define(stumble, batch=2, retry_policy=dg.RetryPolicy(max_retries=3)), requested, replay=True)
    assert not found.success
    assert bench.effects() == [*ids, *ids[:2]], "the batch before the one that failed, once"


def test_a_run_whose_step_dagster_retries_does_not_replay_the_range_that_it_has_just_committed(
    bench: Workbench,
) -> None:
    """It executes a run again that had succeeded without a commit. Its connection breaks in its second range."""
    definition = define(cut_off(2), retry_policy=dg.RetryPolicy(max_retries=1), max_events=2, drain_seconds=600.0)
    ids = bench.publish("rides", 4)
    requested, job = bench.request(definition), bench.job(definition)
    parent = bench.requested(definition, requested, dg.DagsterRunStatus.SUCCESS)
    run = bench.instance.create_run_for_job(
        job, run_config=requested.run_config, tags=dict(requested.tags), parent_run_id=parent, root_run_id=parent
    )
    assert execute_run(InMemoryJob(job), run, bench.instance).success
    assert bench.effects() == ids


@pytest.mark.parametrize("tags", [AUTOMATIC, {}])
def test_dagster_does_not_retry_a_replay_that_the_config_requests(bench: Workbench, tags: dict[str, str]) -> None:
    """Its automatic retry would have the same config."""
    definition = define()
    ids = bench.publish("rides", 6)
    requested = committed(bench, definition)

    found = again(bench, definition, requested, replay=True, tags={"dagster/max_retries": "3", **tags})
    assert found.success is (not tags)
    assert bench.effects() == ids * (1 if tags else 2)
    assert bench.stored(found.run_id).tags["dagster/max_retries"] == "0"


def test_a_range_asset_commits_by_itself_and_is_not_replayed(bench: Workbench) -> None:
    definition = define_range(total)
    bench.platform.registry.register_topic(SUMS)
    bench.platform.registry.unregister_consumer("rides", "c")
    bench.platform.registry.unregister_topic("rides", force=True)
    definition.register(bench.platform)
    bench.publish("rides", 4)
    requested = committed(bench, definition)
    assert not again(bench, definition, requested, replay=True).success
    assert sums(bench) == [b"4"]


# Deleted runs, renamed sensors, unseen deaths


def test_a_queued_run_that_was_deleted_from_history_leaves_its_range_to_the_next(bench: Workbench) -> None:
    definition = define()
    ids = bench.publish("rides", 5)
    requested = bench.request(definition)
    run_id = bench.requested(definition, requested, dg.DagsterRunStatus.NOT_STARTED)
    assert run_id in bench.tick(definition.sensors[0])
    bench.instance.delete_run(run_id)

    assert "leases the partition" in bench.tick(definition.sensors[0])
    bench.end_lease(definition)
    assert bench.run(definition, bench.request(definition)).success
    assert bench.effects() == ids


def test_a_run_that_was_deleted_while_it_runs_keeps_its_range(bench: Workbench) -> None:
    definition = define()
    bench.publish("rides", 5)
    run_id, _ = bench.adopted(definition, bench.request(definition))
    bench.instance.delete_run(run_id)
    assert bench.tick(definition.sensors[0]).startswith(f"run {run_id} leases the partition")


def test_a_sensor_that_was_renamed_waits_for_the_run_that_the_old_one_requested(bench: Workbench) -> None:
    old, new = (
        define(),
        consumer_asset(topic=TOPIC, consumer="c", name="renamed", limits=RunLimits(max_wait=0.0))(record),
    )
    ids = bench.publish("rides", 5)
    requested = bench.request(old)
    bench.requested(old, requested, dg.DagsterRunStatus.NOT_STARTED)
    assert f"of claim {requested.tags['.dagster/eventsql_claim']} is not started" in bench.tick(new.sensors[0])

    assert bench.run(old, requested).success
    more = bench.publish("rides", 5)
    following = bench.request(new)
    assert following.run_key != requested.run_key
    assert bench.run(new, following).success
    assert bench.effects() == [*ids, *more]


def test_a_run_that_dies_unseen_is_reported_as_failed_once_its_partition_is_claimed_anew(bench: Workbench) -> None:
    """Dagster's default launcher does not see it, and the queue would count it for ever."""
    definition = define()
    bench.publish("rides", 5)
    run_id, claim = bench.adopted(definition, bench.request(definition))
    assert bench.tick(definition.sensors[0]).startswith(f"run {run_id} leases the partition for")
    assert bench.stored(run_id).status is dg.DagsterRunStatus.STARTED, "its lease goes on"

    bench.end_lease(definition)
    assert bench.request(definition).tags[".dagster/eventsql_after"] == str(claim.position)
    assert bench.stored(run_id).status is dg.DagsterRunStatus.FAILURE
