"""A partition under steady traffic goes from one run to the next, and always has a run."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim, PartitionClaims
from eventsql_orchestration.dagster import EventSQLResource, RunLimits, consumer_asset
from eventsql_orchestration.dagster.consumers import handover
from eventsql_orchestration.dagster.consumers.consumer_tick import ConsumerWatch, PartitionTick
from eventsql_orchestration.dagster.consumers.handover import RunDraining, comes_soon
from eventsql_orchestration.dagster.tags import SUCCEEDS_TAG
from eventsql_orchestration.orchestration.batch import BatchConsumer
from eventsql_orchestration.orchestration.owners import owner_of_run
from eventsql_orchestration.orchestration.tracebacks import Tracebacks
from eventsql_orchestration.topics.positions import Earliest
from tests.dagster.conftest import Workbench, registering, sql
from tests.dagster.location import record
from tests.waiting import wait_until

RIDES = Topic("rides", partitions=2)

draining = consumer_asset(
    topic=RIDES,
    consumer="draining",
    partitioned=True,
    name="draining",
    limits=RunLimits(max_wait=0.0, drain_seconds=600.0, drain_idle=5.0),
)(record)
long = consumer_asset(
    topic=Topic("long"), consumer="long", name="long", limits=RunLimits(max_wait=0.0, drain_seconds=600.0)
)(record)

pytestmark = pytest.mark.prepared.with_args(registering(draining, long))


class Traffic:
    """Publishes an event into partition 0 every 20 ms, until it is ended."""

    def __init__(self, platform: EventSQL) -> None:
        self.published = 0
        self._platform = platform
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._publish)

    def _publish(self) -> None:
        while not self._end.wait(0.02):
            self._platform.publisher.publish(Publication("rides", b"%d" % self.published, partition=0))
            self._platform.transfer.run_once()
            self.published += 1

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@pytest.mark.usefixtures("bench")
def test_a_successor_begins_before_the_run_that_drains_has_ended(
    platform: EventSQL, dsn: str, shared_instance: dg.DagsterInstance
) -> None:
    bench = Workbench(platform, EventSQLResource(dsn=dsn), shared_instance)
    watch = ConsumerWatch(RIDES, draining.consumer, "draining", draining.limits, "s")
    successors: list[dg.RunRequest] = []

    def tick(ahead: float) -> Sequence[dg.RunRequest]:
        answer = watch.evaluate(bench.at(ahead))
        return [] if isinstance(answer, dg.SkipReason) else answer

    def requested() -> bool:
        # For this tick, the windows of runs end sooner.
        successors.extend(tick(595.0))
        assert all(SUCCEEDS_TAG in request.tags for request in successors), "it claimed beside a run that drains"
        return bool(successors)

    with ThreadPoolExecutor(max_workers=2) as pool, Traffic(platform) as traffic:
        wait_until(lambda: traffic.published > 0, "an event")
        (request,) = tick(0.0)
        first = pool.submit(bench.run, draining, request)
        wait_until(lambda: len(_claims(platform)) > 1, "a range that it claims by itself")
        wait_until(requested, "a successor to be requested")
        assert not first.done()
        second = pool.submit(bench.run, draining, successors[0])
        run_id = first.result().run_id
    ended = second.result()

    assert ended.success
    assert first.result().success
    assert successors[0].run_key == f"succeeds-{run_id}"
    assert successors[0].tags[SUCCEEDS_TAG] == run_id
    assert bench.effects() == [event.id for event in platform.reader.read("rides", partition=0)]
    assert len(bench.effects()) == traffic.published
    record_of_first = shared_instance.get_run_record_by_id(run_id)
    assert record_of_first is not None
    assert record_of_first.end_time is not None
    taken = min(at for owner, at in _claims(platform) if owner == f"run {ended.run_id}")
    assert taken < record_of_first.end_time, "the partition always had a run"
    bench.eventsql.platform.close()


def _claims(platform: EventSQL) -> list[tuple[str, float]]:
    found = "SELECT eql_owner, extract(epoch FROM eql_created_at) FROM eventsql.consumer_claim ORDER BY eql_id"
    return [(owner, float(at)) for owner, at in sql(platform, found)]


@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "not adopted in time"])
def test_a_run_that_commits_between_the_looks_of_a_tick_is_left_alone(bench: Workbench, *, adopted: bool) -> None:
    bench.publish("long", 3)
    request = bench.request(long)
    run_id = bench.requested(long, request, dg.DagsterRunStatus.STARTED)
    (seen,) = (standing.claim for standing in bench.platform.claims.standings(long.consumer))
    claim = bench.platform.claims.adopt(int(request.tags[".dagster/eventsql_claim"]), owner=f"run {run_id}")
    record = bench.instance.get_run_record_by_id(run_id)
    with bench.platform.database.transaction() as connection:
        bench.platform.claims.commit(connection, claim)
    bench.publish("long", 3)

    watch = ConsumerWatch(Topic("long"), long.consumer, "long", long.limits, "s")
    # With a clock an hour ahead, the time in which a run has to adopt its claim is over.
    tick = bench.at(0.0 if adopted else 3600.0)
    standing = PartitionClaims(-1, waiting=True, leased=True, claim=claim if adopted else seen)
    answer = PartitionTick(watch, -1, tick).attend(standing, record)
    assert isinstance(answer, dg.SkipReason), answer
    assert len(bench.claims()) == 1
    assert bench.instance.get_runs(dg.RunsFilter([run_id], statuses=[dg.DagsterRunStatus.STARTED]))


def test_after_a_seek_back_a_tick_that_takes_the_partition_from_a_run_that_drains_repeats_nothing(
    bench: Workbench,
) -> None:
    shard = bench.platform.shards[0]
    ids = bench.publish("long", 6)
    assert bench.run(long).success
    sql(bench.platform, "UPDATE eventsql.consumer_claim SET eql_finished_at = now() - interval '1 minute'")
    bench.platform.seeker.execute("long", "long", Earliest())

    run_id = bench.requested(long, dg.RunRequest(), dg.DagsterRunStatus.STARTED)
    limits = RunLimits(max_wait=0.0, max_events=3, drain_seconds=600.0)
    consume = BatchConsumer(shard, record, batch=1_000, lease=limits.lease, tracebacks=Tracebacks(logging.getLogger()))
    run = RunDraining(shard, long.consumer, consume, limits, owner=owner_of_run(run_id))
    claim = run.claim(-1)
    assert isinstance(claim, Claim)
    assert run.consume_one(claim)
    request = bench.request(long)
    run.go_on([-1])
    assert bench.effects() == [*ids, *ids[:3]], "the run has left the partition to the next one"
    assert bench.run(long, request).success
    assert bench.effects() == [*ids, *ids]


def test_a_tick_waits_for_a_starting_successor_and_not_for_an_ended_or_repeated_one(bench: Workbench) -> None:
    bench.publish("long", 3)
    ended = bench.run(long)
    bench.publish("long", 3)
    successor = bench.instance.create_run_for_job(
        bench.job(long), status=dg.DagsterRunStatus.STARTING, tags={SUCCEEDS_TAG: ended.run_id}
    )
    reason = bench.tick(long.sensors[0])
    assert reason == f"run {successor.run_id} takes over from run {ended.run_id}"

    bench.instance.report_run_failed(successor)
    # It replays the range of the successor, and takes nothing over.
    bench.instance.create_run_for_job(
        bench.job(long), status=dg.DagsterRunStatus.STARTING, tags={SUCCEEDS_TAG: ended.run_id},
        parent_run_id=successor.run_id, root_run_id=successor.run_id,
    )  # fmt: skip
    request = bench.request(long)
    assert ".dagster/eventsql_claim" in request.tags


def test_a_tick_takes_nothing_from_a_run_that_drains_unless_the_run_died_between_two_ranges(bench: Workbench) -> None:
    bench.publish("long", 3)
    run_id, claim = bench.adopted(long, bench.request(long))
    with bench.platform.database.transaction() as connection:
        bench.platform.claims.commit(connection, claim)
    bench.publish("long", 3)
    assert bench.tick(long.sensors[0]).startswith(f"run {run_id} drains the partition, for ")
    assert len(bench.claims()) == 1

    sql(bench.platform, "UPDATE eventsql.consumer_claim SET eql_finished_at = now() - interval '1 minute'")
    request = bench.request(long)
    assert ".dagster/eventsql_claim" in request.tags


def test_a_run_goes_on_after_its_window_until_a_successor_that_was_launched_has_claimed(bench: Workbench) -> None:
    asked = threading.Event()

    def comes() -> bool:
        asked.set()
        return True

    def draining_of(run_id: str, limits: RunLimits, **options: Any) -> RunDraining:
        shard = bench.platform.shards[0]
        consume = BatchConsumer(
            shard, record, batch=1_000, lease=limits.lease, tracebacks=Tracebacks(logging.getLogger())
        )
        return RunDraining(shard, long.consumer, consume, limits, owner=owner_of_run(run_id), **options)

    ids = bench.publish("long", 1)
    first = draining_of("first", RunLimits(max_wait=0.0, drain_seconds=0.1, drain_idle=60.0), successor_comes=comes)
    second = draining_of("second", RunLimits(max_wait=0.0, drain_idle=0.0))
    claim = first.claim(-1)
    assert isinstance(claim, Claim)
    with ThreadPoolExecutor(max_workers=2) as pool:
        ending = pool.submit(first.run, claim)
        wait_until(asked.is_set, "the end of the window")
        ids += bench.publish("long", 2)
        wait_until(lambda: bench.effects() == ids, "what comes after it")
        assert not ending.done()
        taking = pool.submit(second.succeed, "first", -1, is_over=lambda: False)
        while not taking.done():
            ids += bench.publish("long", 1)
        ending.result()
    taken = taking.result()
    assert isinstance(taken, Claim)
    second.run(taken)
    assert bench.effects() == ids


def test_a_successor_comes_soon_once_it_has_left_the_queue(bench: Workbench) -> None:
    succession = {SUCCEEDS_TAG: "first"}
    for status, soon in (
        (dg.DagsterRunStatus.NOT_STARTED, False), (dg.DagsterRunStatus.FAILURE, False),
        (dg.DagsterRunStatus.STARTING, True),
    ):  # fmt: skip
        bench.instance.create_run_for_job(bench.job(long), status=status, tags=succession)
        assert comes_soon("first", bench.instance) is soon
    assert not comes_soon("other", bench.instance)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_successor_that_gets_no_events_ends_with_the_run_before_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, *, deleted: bool
) -> None:
    monkeypatch.setattr(handover, "PATIENCE", math.inf)
    succeeded = bench.run(long)
    if deleted:
        bench.instance.delete_run(succeeded.run_id)
    config = {"ops": {"long": {"config": {"partition": -1, "succeeds": succeeded.run_id}}}}
    assert bench.run(long, dg.RunRequest(run_config=config)).success
    assert bench.claims() == []
