"""One sensor for all partitions of a consumer: what its ticks do, and what they cost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import dagster as dg
import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claims
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource, TickOptions, consumer_asset
from eventsql_orchestration.dagster.consumers import consumer_tick
from eventsql_orchestration.errors import DatabaseUnavailableError
from tests.dagster.conftest import Workbench, registering
from tests.dagster.location import AT_ONCE, record

PARTITIONS = 300
TOPIC = Topic("orders", PARTITIONS)


def defined(**ticks: Any) -> ConsumerDefinition:
    return consumer_asset(
        topic=TOPIC, consumer="wide", partitioned=True, sensor="consumer", name="wide",
        limits=AT_ONCE, ticks=TickOptions(**ticks),
    )(record)  # fmt: skip


wide = defined()

pytestmark = pytest.mark.prepared.with_args(registering(wide))


def publish(bench: Workbench, *partitions: int) -> None:
    bench.platform.publisher.publish_all(Publication("orders", b"x", partition=partition) for partition in partitions)
    bench.platform.transfer.run_once()


def evaluate(bench: Workbench, definition: ConsumerDefinition = wide) -> dg.SensorExecutionData:
    (sensor,) = definition.sensors
    with dg.build_sensor_context(
        instance=bench.instance, resources={"eventsql": EventSQLResource(dsn=bench.eventsql.dsn)}
    ) as context:
        return sensor.evaluate_tick(context)


def partitions_of(tick: dg.SensorExecutionData) -> list[int]:
    return [int(request.tags["eventsql/partition"]) for request in tick.run_requests or []]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the statements of this process by their first word."""
    statements: Counter[str] = Counter()
    execute = psycopg.Cursor.execute

    def count(cursor: psycopg.Cursor[Any], query: Any, *given: Any, **options: Any) -> psycopg.Cursor[Any]:
        text = query if isinstance(query, str) else query.as_string(cursor)
        statements[str(text).split(maxsplit=1)[0].upper()] += 1
        return execute(cursor, query, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(psycopg.Cursor, "execute", count)
        yield statements


def test_a_consumer_has_one_sensor_that_is_called_like_its_job() -> None:
    (sensor,) = wide.sensors
    assert sensor.name == "consume_wide"


def test_a_tick_requests_a_run_for_each_partition_with_events(bench: Workbench) -> None:
    publish(bench, 7, 7, 250, 299)
    tick = evaluate(bench)
    assert partitions_of(tick) == [7, 250, 299]
    requests = tick.run_requests or []
    assert len({request.run_key for request in requests}) == 3
    claims = [bench.platform.claims.live("orders", "wide", partition) for partition in (7, 250, 299)]
    assert [request.run_config for request in requests] == [
        {"ops": {"wide": {"config": {"claim": claim.id}}}} for claim in claims if claim is not None
    ]
    for request in requests:
        assert bench.run(wide, request).success
    assert len(bench.effects()) == 4
    assert evaluate(bench).run_requests == []


def test_a_look_at_hundreds_of_partitions_takes_few_statements(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process learns the form of a log at its first look.
    evaluate(bench)
    with counted(monkeypatch) as idle:
        tick = evaluate(bench)
    assert tick.skip_message == f"{PARTITIONS} of {PARTITIONS} partitions have no events"
    assert idle.total() <= 12, idle

    publish(bench, *range(10))
    assert len(partitions_of(evaluate(bench))) == 10
    with counted(monkeypatch) as waiting:
        tick = evaluate(bench)
    assert tick.skip_message == f"{PARTITIONS - 10} of {PARTITIONS} partitions have no events; 10 are leased"
    # One more statement reads the times of all claims.
    assert waiting.total() <= idle.total() + 1, "claims without a run wait for their lease, and cost no statement each"


def test_ticks_that_request_a_few_runs_reach_all_partitions(bench: Workbench) -> None:
    four_runs = defined(max_requests=4)
    publish(bench, *range(10))
    ticks = [partitions_of(evaluate(bench, four_runs)) for _ in range(3)]
    assert [len(requested) for requested in ticks] == [4, 4, 2]
    assert {partition for requested in ticks for partition in requested} == {*range(10)}


def test_a_tick_that_is_out_of_time_begins_with_no_partition(bench: Workbench) -> None:
    publish(bench, 3, 4)
    assert evaluate(bench, defined(budget=0.0)).run_requests == []
    assert partitions_of(evaluate(bench)) == [3, 4]


def test_the_range_of_a_dead_run_is_claimed_again_and_a_queued_run_keeps_its_range(bench: Workbench) -> None:
    publish(bench, 1, 2, 3)
    dead, queued, running = evaluate(bench).run_requests or []
    bench.requested(wide, dead, dg.DagsterRunStatus.FAILURE)
    bench.requested(wide, queued, dg.DagsterRunStatus.NOT_STARTED)
    run_id, _ = bench.adopted(wide, running)

    tick = evaluate(bench)
    assert partitions_of(tick) == [1]
    (again,) = tick.run_requests or []
    assert again.run_key != dead.run_key

    # The lease of the queued run was prolonged. The dead run does not renew its lease, which ends.
    bench.end_lease(wide)
    tick = evaluate(bench)
    assert partitions_of(tick) == [1, 3]
    assert bench.stored(run_id).status is dg.DagsterRunStatus.FAILURE


def test_a_partition_that_is_locked_keeps_no_other_from_being_consumed(bench: Workbench) -> None:
    publish(bench, 1, 2)
    with bench.platform.database.transaction() as connection:
        connection.execute("SELECT FROM eventsql.consumer WHERE eql_partition = 1 FOR UPDATE")
        assert partitions_of(evaluate(bench)) == [2]
    assert partitions_of(evaluate(bench)) == [1]


def test_a_skip_reason_says_what_holds_partitions_up(bench: Workbench) -> None:
    publish(bench, 1)
    bench.platform.registry.pause("orders", "wide")
    assert evaluate(bench).skip_message == (
        "299 of 300 partitions have no events; 1: the consumer is paused: resume it with "
        "`eventsql consumer resume orders wide`"
    )


def test_runs_are_requested_for_claims_made_before_the_database_went_away(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(bench, 1, 2, 3)
    claim = Claims.claim
    monkeypatch.setattr(consumer_tick, "in_random_order", list)

    def fail_at_2(claims: Claims, topic: str, consumer: str, partition: int, **options: Any) -> Any:
        if partition == 2:
            raise DatabaseUnavailableError("gone")
        return claim(claims, topic, consumer, partition, **options)

    monkeypatch.setattr(Claims, "claim", fail_at_2)
    assert partitions_of(evaluate(bench)) == [1]
    with pytest.raises(DatabaseUnavailableError):
        evaluate(bench)


def test_overlapping_evaluations_claim_each_partition_once(bench: Workbench) -> None:
    publish(bench, *range(12))
    together = threading.Barrier(4)

    def tick(_: int) -> list[int]:
        together.wait()
        return partitions_of(evaluate(bench))

    with ThreadPoolExecutor(4) as pool:
        claimed = [partition for answer in pool.map(tick, range(4)) for partition in answer]
    assert sorted(claimed) == list(range(12))
    assert len(bench.claims()) == 12


def test_a_consumer_of_a_whole_topic_may_have_one_sensor_for_all_partitions_too(bench: Workbench) -> None:
    whole = consumer_asset(topic=TOPIC, consumer="whole", sensor="consumer", name="whole", limits=AT_ONCE)(record)
    whole.register(bench.platform)
    publish(bench, 5)
    assert partitions_of(evaluate(bench, whole)) == [-1]


def test_a_tick_goes_on_with_the_new_partitions_of_a_repartitioned_topic(bench: Workbench, platform: EventSQL) -> None:
    changing = consumer_asset(
        topic=Topic("changing", 1), consumer="c", partitioned=True, sensor="consumer", name="changing", limits=AT_ONCE
    )(record)
    changing.register(platform)
    ids = bench.publish("changing", 2, partition=0)
    assert platform.repartitioner.repartition("changing", 3) is not None
    ids += bench.publish("changing", 2, partition=2)
    consumed: list[int] = []
    while requests := evaluate(bench, changing).run_requests:
        for request in requests:
            consumed.append(int(request.tags["eventsql/partition"]))
            assert bench.run(changing, request).success
    assert consumed == [0, 2]
    assert bench.effects() == ids
