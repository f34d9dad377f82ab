"""What a tick of a partition's sensor does."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.build_resources import wrap_resources_for_execution
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteRepositoryOrigin

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource, RunLimits, TickOptions, consumer_asset
from eventsql_orchestration.dagster.consumers.consumer_tick import ConsumerWatch
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS
from eventsql_orchestration.dagster.consumers.tick import evaluate
from eventsql_orchestration.dagster.tags import CLAIMED_AT_TAG, FINISHED, LATE_TAG, location_tags
from eventsql_orchestration.errors import RedefinitionError
from eventsql_orchestration.orchestration.owners import owner_of_run
from tests.dagster.conftest import Workbench, registering, request_of, sql
from tests.dagster.location import ledger, record
from tests.fixtures import SaidBy

TOPIC = Topic("rides")

lazy = consumer_asset(
    topic=TOPIC, consumer="lazy", name="lazy",
    limits=RunLimits(min_events=10, max_events=50, max_wait=3600.0, drain_seconds=0.0),
)(record)  # fmt: skip
EAGER = RunLimits(max_events=50, max_wait=0.0, drain_seconds=0.0)


def defined(function: Any = record, **ticks: Any) -> ConsumerDefinition:
    return consumer_asset(topic=TOPIC, consumer="eager", name="eager", limits=EAGER, ticks=TickOptions(**ticks))(
        function
    )


eager = defined()

pytestmark = pytest.mark.prepared.with_args(registering(lazy, eager, ledger))


def test_a_tick_claims_a_range_and_requests_one_run_for_it(bench: Workbench) -> None:
    ids = bench.publish("rides", 60)
    request = bench.request(eager)

    claim = bench.platform.claims.live("rides", "eager")
    assert claim is not None
    assert (claim.range.after, claim.range.upto, claim.events) == (0, ids[49], 50)
    assert request.run_key == f"eventsql-claim-{claim.id}-{request.tags['.dagster/eventsql_claimed_at']}"
    assert request.run_config == {"ops": {"eager": {"config": {"claim": claim.id}}}}
    assert request.tags["eventsql/topic"] == "rides"
    assert request.tags["eventsql/consumer"] == "eager"
    assert request.tags["eventsql/partition"] == "-1"
    assert request.tags[".dagster/eventsql_claim"] == str(claim.id)


def test_each_partition_has_a_sensor_that_claims_its_own_events(bench: Workbench) -> None:
    assert [sensor.name for sensor in ledger.sensors] == ["consume_ledger_0", "consume_ledger_1"]
    bench.publish("orders", 3, partition=1)

    assert bench.tick(ledger.sensors[0]) == "no events wait after offset 0"
    assert bench.claims() == []
    assert request_of(bench.tick(ledger.sensors[1])).tags["eventsql/partition"] == "1"


def test_a_tick_of_a_partition_without_events_is_one_statement(bench: Workbench, said_by: SaidBy) -> None:
    bench.tick(ledger.sensors[0])
    with bench.eventsql.for_tick(DEFAULT_TICKS.statement_timeout) as platform:
        said = said_by(platform.database)
    assert bench.tick(ledger.sensors[0]) == "no events wait after offset 0"
    assert said.verbs() == ["SELECT"]


def test_a_paused_partition_without_events_says_that_it_is_paused(bench: Workbench) -> None:
    bench.platform.registry.pause("orders", "ledger")
    assert "the consumer is paused" in bench.tick(ledger.sensors[0])


def test_too_few_events_wait_for_more(bench: Workbench) -> None:
    bench.publish("rides", 9)
    reason = bench.tick(lazy.sensors[0])
    assert reason.startswith("9 of 10 events wait")

    bench.publish("rides", 1)
    bench.request(lazy)


def test_a_row_that_another_transaction_has_locked_is_left_alone_at_once(bench: Workbench) -> None:
    bench.publish("rides", 5)
    with bench.platform.database.transaction() as connection:
        connection.execute("SELECT FROM eventsql.consumer WHERE eql_name = 'eager' FOR UPDATE")
        # A tick that waited for the row would not end in this block.
        assert bench.tick(eager.sensors[0]) == "another consumption has the partition locked"
    bench.request(eager)


def test_a_claim_without_a_run_waits_for_its_lease_and_then_goes_to_the_next_tick(bench: Workbench) -> None:
    """The daemon died, or gave the tick up, between the claim and storing the tick."""
    ids = bench.publish("rides", 5)
    lost = bench.request(eager)

    assert "sensor consume_eager leases the partition" in bench.tick(eager.sensors[0])

    bench.end_lease(eager)
    again = bench.request(eager)
    assert again.run_key != lost.run_key, "a reused key would swallow the run"
    assert bench.claims() == [(0, ids[-1], "released"), (0, ids[-1], "claimed")]

    # Dagster resumes a stored tick up to a day later. A run that comes too late for its claim is not retried.
    late = bench.run(eager, lost)
    assert not late.success
    assert not late.get_asset_materialization_events()
    assert bench.effects() == []
    assert bench.run(eager, again).success
    assert bench.effects() == ids


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING])
def test_a_run_that_waits_keeps_its_claim_beyond_the_lease(bench: Workbench, status: dg.DagsterRunStatus) -> None:
    ids = bench.publish("rides", 5)
    request = bench.request(eager)
    run_id = bench.requested(eager, request, status)
    bench.end_lease(eager)

    assert bench.tick(eager.sensors[0]) == f"run {run_id} of claim {request.tags['.dagster/eventsql_claim']} is " + (
        status.value.lower().replace("_", " ")
    )
    assert bench.claims() == [(0, ids[-1], "claimed")]
    # The lease was prolonged, for consumers that do not know of runs.
    (state,) = bench.platform.registry.consumer("rides", "eager")
    assert state.lease_expires_at is not None
    assert state.lease_expires_at > datetime.now(UTC) + timedelta(seconds=30)


def later(bench: Workbench, seconds: float) -> Any:
    """A tick of `eager`'s sensor, so many seconds from now."""
    watch = ConsumerWatch(TOPIC, eager.consumer, "eager", EAGER, "consume_eager", partition=-1)
    answer = watch.evaluate(bench.at(seconds))
    return answer.skip_message if isinstance(answer, dg.SkipReason) else answer


def test_a_run_that_never_starts_loses_its_claim_in_the_end(bench: Workbench) -> None:
    ids = bench.publish("rides", 5)
    request = bench.request(eager)
    bench.requested(eager, request, dg.DagsterRunStatus.STARTING)
    assert isinstance(later(bench, 290.0), str)
    request_of(later(bench, 310.0))
    assert bench.claims() == [(0, ids[-1], "released"), (0, ids[-1], "claimed")]


def test_a_run_gets_more_time_to_adopt_its_claim_after_each_run_that_came_too_late(bench: Workbench) -> None:
    bench.publish("rides", 5)
    slow = bench.request(eager)
    bench.requested(eager, slow, dg.DagsterRunStatus.STARTED)
    again = request_of(later(bench, 90.0))
    assert not bench.run(eager, slow).success, "it finds its claim lost, and ends"
    assert bench.effects() == []

    run_id = bench.requested(eager, again, dg.DagsterRunStatus.STARTED)
    assert later(bench, 90.0).startswith(f"run {run_id} of claim")
    request_of(later(bench, 150.0))


def test_a_run_that_came_too_late_does_not_count_among_those_that_failed(bench: Workbench) -> None:
    bench.publish("rides", 5)
    late = bench.requested(eager, bench.request(eager), dg.DagsterRunStatus.STARTED)
    again = request_of(later(bench, 90.0))
    assert bench.stored(late).status == dg.DagsterRunStatus.FAILURE
    # The run does so when it finds its claim lost.
    bench.instance.add_run_tags(late, {LATE_TAG: "true"})
    run_id = bench.requested(eager, again, dg.DagsterRunStatus.STARTED)
    bench.instance.report_run_failed(bench.stored(run_id))
    assert bench.request(eager).tags[".dagster/eventsql_after"] == "0"


def in_a_full_pool(bench: Workbench, instance: dg.DagsterInstance) -> Any:
    """Let a run of another asset have the only place of the pool `gpu`, and events wait."""
    bench.instance = instance
    pools = instance.event_log_storage
    pools.set_concurrency_slots("gpu", 1)
    pools.claim_concurrency_slot("gpu", "another run", "train")
    bench.publish("rides", 5)
    return pools


def test_a_run_whose_step_waits_for_a_place_in_a_pool_keeps_its_claim(
    bench: Workbench, shared_instance: dg.DagsterInstance
) -> None:
    pools = in_a_full_pool(bench, shared_instance)
    run_id = bench.requested(eager, bench.request(eager), dg.DagsterRunStatus.STARTED)
    pools.claim_concurrency_slot("gpu", run_id, "eager")
    assert later(bench, 3600.0) == f"run {run_id} of claim 1 is waiting for a place in a pool"

    # From its place in the pool on, it has the usual time to adopt its claim.
    pools.free_concurrency_slot_for_step("another run", "train")
    record = shared_instance.get_run_record_by_id(run_id)
    assert record is not None
    long_ago = record._replace(update_timestamp=datetime.now(UTC) - timedelta(hours=1))
    assert bench.at(0.0).state(long_ago, patience=60.0).unchanged < 1800.0
    request_of(later(bench, 90.0))


def test_a_run_whose_retried_step_waits_for_a_place_in_a_pool_is_not_reported_as_dead(
    bench: Workbench, shared_instance: dg.DagsterInstance
) -> None:
    pools = in_a_full_pool(bench, shared_instance)
    run_id, _ = bench.adopted(eager, bench.request(eager))
    pools.claim_concurrency_slot("gpu", run_id, "eager")
    bench.end_lease(eager)

    bench.request(eager)
    assert bench.stored(run_id).status == dg.DagsterRunStatus.STARTED


@pytest.mark.parametrize("status", [status for status in FINISHED if status != dg.DagsterRunStatus.SUCCESS])
def test_the_claim_of_a_dead_run_is_released_and_the_range_claimed_from_the_same_offset(
    bench: Workbench, status: dg.DagsterRunStatus
) -> None:
    ids = bench.publish("rides", 5)
    bench.adopted(eager, bench.request(eager), status)
    bench.publish("rides", 3)

    request = bench.request(eager)
    assert [(after, state) for after, _, state in bench.claims()] == [(0, "released"), (0, "claimed")]
    assert bench.run(eager, request).success
    assert bench.effects()[:5] == ids
    assert len(bench.effects()) == 8


def test_a_run_that_is_executed_again_has_the_time_of_any_run_to_adopt_the_claim(bench: Workbench) -> None:
    bench.publish("rides", 5)
    requested = bench.request(eager)
    first, _ = bench.adopted(eager, requested, dg.DagsterRunStatus.CANCELED)
    again = bench.instance.create_run_for_job(
        bench.job(eager), run_config=requested.run_config, tags=requested.tags, status=dg.DagsterRunStatus.STARTED,
        parent_run_id=first, root_run_id=first,
    ).run_id  # fmt: skip
    bench.end_lease(eager)

    assert bench.tick(eager.sensors[0]) == f"run {again} of claim 1 is started"
    assert bench.stored(again).status == dg.DagsterRunStatus.STARTED
    assert bench.platform.claims.adopt(1, owner=owner_of_run(again)).range.upto == 5


def test_a_claim_made_while_draining_is_found_by_its_owner(bench: Workbench) -> None:
    """Such a claim has no run that was requested for it."""
    bench.publish("rides", 5)
    request = bench.request(eager)
    result = bench.run(eager, request)
    bench.publish("rides", 5)
    drained = bench.platform.claims.claim("rides", "eager", owner=f"run {result.run_id}")
    assert isinstance(drained, Claim)

    again = bench.request(eager)
    assert again.tags[".dagster/eventsql_after"] == str(drained.range.after)


def test_runs_that_fail_from_the_same_offset_again_and_again_are_requested_less_often(bench: Workbench) -> None:
    bench.publish("rides", 5)
    first = bench.request(eager)
    bench.requested(eager, first, dg.DagsterRunStatus.FAILURE)
    second = bench.request(eager)
    run_id = bench.requested(eager, second, dg.DagsterRunStatus.STARTED)
    bench.instance.report_run_failed(bench.stored(run_id))

    reason = bench.tick(eager.sensors[0])
    assert reason.startswith(f"2 runs failed from offset 0, the last run is {run_id}; the next is requested")


def test_failed_runs_of_another_location_delay_no_run(bench: Workbench) -> None:
    """A location on another database may have a consumer of the same name, and Dagster may serve both."""
    bench.publish("rides", 5)
    job, tags = bench.job(eager), bench.request(eager).tags
    ours, theirs = RegisteredCodeLocationOrigin("ours"), RegisteredCodeLocationOrigin("theirs")
    for location, claim in ((ours, {}), (theirs, {CLAIMED_AT_TAG: "1"}), (theirs, {CLAIMED_AT_TAG: "2"})):
        origin = RemoteRepositoryOrigin(location, "__repository__").get_job_origin(job.name)
        run = bench.instance.create_run_for_job(
            job, tags={**tags, **claim}, status=dg.DagsterRunStatus.STARTED, remote_job_origin=origin
        )
        bench.instance.report_run_failed(run)

    watch = ConsumerWatch(TOPIC, eager.consumer, "eager", EAGER, "s")
    own_runs = location_tags(ours, "__repository__")
    answer = evaluate(watch, bench.platform, bench.instance, logging.getLogger, own_runs=own_runs)
    assert not isinstance(answer, dg.SkipReason), answer


def test_retries_that_find_nothing_to_do_do_not_hide_that_runs_keep_failing(bench: Workbench) -> None:
    """Dagster retries each run with its tags, and a retry that comes after the next tick succeeds."""
    bench.publish("rides", 5)
    for _ in range(2):
        requested = bench.request(eager)
        run_id = bench.requested(eager, requested, dg.DagsterRunStatus.STARTED)
        bench.instance.report_run_failed(bench.stored(run_id))
        bench.instance.create_run_for_job(
            bench.job(eager), run_config=requested.run_config, status=dg.DagsterRunStatus.SUCCESS,
            tags={**requested.tags, "dagster/retry_number": "1"}, parent_run_id=run_id, root_run_id=run_id,
        )  # fmt: skip
    reason = bench.tick(eager.sensors[0])
    assert reason.startswith("2 runs failed from offset 0, "), reason


def test_two_evaluations_at_once_make_one_claim(bench: Workbench, dsn: str) -> None:
    bench.publish("rides", 50)
    together = threading.Barrier(8)

    def evaluate(_: int) -> Any:
        together.wait()
        return bench.tick(eager.sensors[0], eventsql=EventSQLResource(dsn=dsn))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(evaluate, range(8)))
    assert sum(isinstance(answer, list) for answer in answers) == 1
    assert len(bench.claims()) == 1


def test_a_missing_topic_or_consumer_is_a_skip_reason_that_names_the_job(bench: Workbench, platform: EventSQL) -> None:
    topic = Topic("elsewhere", 2)
    elsewhere = consumer_asset(topic=topic, consumer="c", partitioned=True, name="elsewhere")(record)
    for create, missing in (
        (lambda: None, "topic 'elsewhere'"),
        (lambda: platform.registry.register_topic(topic), "consumer 'c' of topic 'elsewhere'"),
    ):
        create()
        reason = bench.tick(elsewhere.sensors[0])
        assert reason.startswith(f"{missing} is not registered")
        assert "`register`" in reason
        assert "dagster job launch" in reason
        assert "eventsql consumer create" not in reason
        assert "eventsql topic create" not in reason
    elsewhere.register(platform)
    assert "`register`" not in bench.tick(elsewhere.sensors[0])


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_consumer_in_another_form_than_its_asset_declares_is_a_skip_reason(
    bench: Workbench, platform: EventSQL, partitioned: bool
) -> None:
    topic = Topic("elsewhere", 2)
    elsewhere = consumer_asset(topic=topic, consumer="c", partitioned=partitioned, name="elsewhere")(record)
    platform.registry.register_topic(topic).register_consumer(Consumer("elsewhere", "c", not partitioned))
    reason = bench.tick(elsewhere.sensors[0])
    assert "`eventsql consumer delete --execute elsewhere c`" in reason
    assert "`register`" in reason
    platform.registry.unregister_consumer("elsewhere", "c")
    elsewhere.register(platform)
    assert "`register`" not in bench.tick(elsewhere.sensors[0])


def test_a_topic_without_the_partitions_that_an_asset_declares_is_a_skip_reason(
    bench: Workbench, platform: EventSQL
) -> None:
    elsewhere = consumer_asset(topic=Topic("elsewhere", 2), consumer="c", partitioned=True, name="elsewhere")(record)
    platform.registry.register_topic(Topic("elsewhere"))
    assert "registered without partitions" in bench.tick(elsewhere.sensors[0])
    elsewhere.register(platform)
    assert "`register`" not in bench.tick(elsewhere.sensors[0])


def test_a_run_of_a_consumer_that_is_not_registered_fails_and_names_the_job(bench: Workbench) -> None:
    elsewhere = consumer_asset(topic=Topic("elsewhere", 2), consumer="c", partitioned=True, name="elsewhere")(record)
    result = bench.run(elsewhere)
    assert "`register`" in str(result.failure_data_for_node("elsewhere"))


def test_a_missing_schema_is_a_skip_reason_again_and_again(bench: Workbench, dsn: str) -> None:
    reason = bench.tick(eager.sensors[0], eventsql=EventSQLResource(dsn=dsn, db_schema="nothing_here"))
    assert "run `eventsql migrate`" in reason
    assert bench.tick(eager.sensors[0], eventsql=EventSQLResource(dsn=dsn, db_schema="nothing_here")) == reason


@pytest.mark.parametrize("partitions", [1, 3])
def test_the_sensors_of_partitions_go_on_consuming_a_topic_that_is_repartitioned(
    bench: Workbench, partitions: int
) -> None:
    ids = bench.publish("orders", 2, partition=0) + bench.publish("orders", 2, partition=1)
    assert bench.platform.repartitioner.repartition("orders", partitions) is not None
    ids += bench.publish("orders", 2, partition=0)
    for _ in range(2):
        for sensor in ledger.sensors:
            with contextlib.suppress(RedefinitionError):
                answer = bench.tick(sensor)
                if isinstance(answer, list):
                    assert bench.run(ledger, request_of(answer)).success
    assert sorted(bench.effects()) == ids
    if partitions == 1:
        assert bench.tick(ledger.sensors[1]).startswith(
            "consumer 'ledger' of topic 'orders' has no partition 1, but partition 0, and is defined for 2"
        )
    else:
        with pytest.raises(
            RedefinitionError, match="consumer 'ledger' of topic 'orders' has 3 partitions and is defined"
        ):
            bench.tick(ledger.sensors[1])


def test_an_event_that_is_due_later_is_not_claimed_before(bench: Workbench) -> None:
    def fail(events: Any, connection: Any) -> None:
        raise ValueError("no")

    failing = defined(fail)
    bench.publish("rides", 1)
    assert not bench.run(failing, bench.request(eager)).success
    bench.prolong_pause(failing)
    assert "is retried in" in bench.tick(eager.sensors[0])


def test_a_tick_on_a_database_that_was_not_migrated_says_what_to_run(bench: Workbench) -> None:
    sql(bench.platform, "DROP TABLE eventsql.consumer CASCADE")
    assert "run `eventsql migrate`" in bench.tick(eager.sensors[0])


def test_a_tick_ends_when_the_database_does_not_answer_in_time(bench: Workbench) -> None:
    """`release` waits for the row's lock; a tick must not do so for ever."""
    hurried = defined(statement_timeout=0.5)
    bench.publish("rides", 5)
    dead = bench.request(eager)
    bench.requested(eager, dead, dg.DagsterRunStatus.FAILURE)
    with bench.platform.database.transaction() as connection:
        connection.execute("SELECT FROM eventsql.consumer WHERE eql_name = 'eager' FOR UPDATE")
        assert "statement timeout" in bench.tick(hurried.sensors[0])
    bench.request(eager)


def test_an_in_process_consumer_and_a_tick_share_a_partition(bench: Workbench) -> None:
    ids = bench.publish("rides", 20)
    bench.platform.consumers.consume_once("rides", "eager", record, max_events=10)
    request = bench.request(eager)
    assert bench.platform.consumers.consume_once("rides", "eager", record) == 0, "the partition is leased"
    assert bench.run(eager, request).success
    assert bench.effects() == ids


def test_a_tick_that_has_nothing_to_say_leaves_no_file(bench: Workbench, shared_instance: dg.DagsterInstance) -> None:
    with dg.SensorEvaluationContext(
        shared_instance.get_ref(), log_key=["ledger", "tick"], repository_name="r", sensor_name="s",
        resources=wrap_resources_for_execution({"eventsql": bench.eventsql}),
    ) as context:  # fmt: skip
        assert ledger.sensors[0].evaluate_tick(context).skip_message == "no events wait after offset 0"
    files = Path(shared_instance.storage_directory())
    assert not [each for each in files.rglob("*") if each.name.startswith("tick")]
    with dg.SensorEvaluationContext(
        shared_instance.get_ref(), log_key=["ledger", "tick"], repository_name="r", sensor_name="s"
    ) as context:
        context.log.info("something")
    assert [each.name for each in files.rglob("*") if each.name.startswith("tick")] == ["tick.err"]
