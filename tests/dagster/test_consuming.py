"""What a consuming run does with its claim, and after it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim, Claims
from eventsql_orchestration.consuming.lag import LagReader
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource, RunLimits, consumer_asset
from eventsql_orchestration.dagster.consumers import handover
from eventsql_orchestration.dagster.consumers import run as consumers_run
from eventsql_orchestration.database import Connection
from eventsql_orchestration.orchestration import batch, drain
from eventsql_orchestration.storage.metrics import Place
from tests.dagster.conftest import Metadata, Workbench, registering, sql
from tests.dagster.location import cut_off, ledger, record
from tests.effects import PanicException
from tests.waiting import PATIENCE, wait_until

TOPIC = Topic("rides")


def define(function: Callable[..., Any] = record, *, batch: int = 1_000, **limits: Any) -> ConsumerDefinition:
    return consumer_asset(
        topic=TOPIC, consumer="c", name="c", batch=batch,
        limits=RunLimits(**{"max_wait": 0.0, "drain_seconds": 0.0, **limits}),
    )(function)  # fmt: skip


pytestmark = pytest.mark.prepared.with_args(registering(define(), ledger))


def failure_of(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    data = result.failure_data_for_node("c").user_failure_data  # type: ignore[union-attr]
    assert data is not None
    return {"description": data.description, **{name: value.value for name, value in data.metadata.items()}}


def raised(bench: Workbench, result: dg.ExecuteInProcessResult) -> list[str]:
    """The tracebacks of the function in the log of a run."""
    messages = [entry.user_message for entry in bench.instance.all_logs(result.run_id)]
    return [message for message in messages if message.startswith("the function raised ")]


def test_a_run_counts_only_its_own_lag_and_gives_up_if_that_takes_long(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = define()
    bench.platform.registry.register_consumer(Consumer("rides", "other"))
    ids = bench.publish("rides", 5)
    requested = bench.request(definition)
    counted: list[set[Place]] = []

    def too_slow(reader: LagReader, _topic: str, places: set[Place]) -> None:
        counted.append(places)
        with reader._database.connection() as connection:
            connection.execute("SELECT pg_catalog.pg_sleep(60)")

    monkeypatch.setattr(LagReader, "_remaining", too_slow)
    result = bench.run(definition, requested)
    assert result.success
    assert counted == [{(-1, ids[-1])}]
    (found,) = result.asset_materializations_for_node("c")
    assert "Lag events" not in found.metadata


def test_a_run_consumes_exactly_the_claimed_range(
    bench: Workbench, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy server may take longer over a statement than a run waits for its lag.
    monkeypatch.setattr(consumers_run, "LAG_TIMEOUT", PATIENCE)
    definition = define(max_events=30)
    ids = bench.publish("rides", 50)
    requested = bench.request(definition)
    result = bench.run(definition, requested)

    assert result.success
    assert bench.effects() == ids[:30]
    assert bench.offset(definition) == ids[29]
    assert bench.claims() == [(0, ids[29], "committed")]
    shown = metadata(result, definition.key)
    assert (shown.pop("Lag events"), shown.pop("partitions behind")) == (20, 1)
    assert shown.pop("Lag seconds") > 0
    assert shown == {
        "topic": "rides",
        "input": dg.AssetKey(["topic", "rides"]),
        "trace": f"eventsql trace rides {ids[29]}",
        "consumer": "c",
        "events": 30,
        "dagster/row_count": 30,
        "claims": 1,
        "ranges": [
            {
                "claim": int(requested.tags[".dagster/eventsql_claim"]),
                "partition": -1,
                "after": 0,
                "upto": ids[29],
                "events": 30,
            }
        ],
    }


def test_a_run_executes_in_one_process(bench: Workbench) -> None:
    assert bench.job(ledger).executor_def.name == "in_process"


def test_a_run_drains_the_events_that_came_meanwhile_and_commits_each_range_separately(
    bench: Workbench, metadata: Metadata
) -> None:
    definition = define(max_events=10, drain_seconds=30.0, drain_idle=0.0)
    ids = bench.publish("rides", 35)
    result = bench.run(definition, bench.request(definition))

    assert bench.effects() == ids
    assert bench.claims() == [
        (0, ids[9], "committed"),
        (ids[9], ids[19], "committed"),
        (ids[19], ids[29], "committed"),
        (ids[29], ids[34], "committed"),
    ]
    found = metadata(result, definition.key)
    assert (found["events"], found["claims"]) == (35, 4)
    assert [each["events"] for each in found["ranges"]] == [10, 10, 10, 5]


def test_a_run_drains_up_to_its_limit_of_events(bench: Workbench) -> None:
    definition = define(max_events=10, drain_seconds=30.0, drain_events=25)
    ids = bench.publish("rides", 40)
    bench.run(definition, bench.request(definition))
    assert bench.effects() == ids[:25]
    assert isinstance(bench.request(definition), dg.RunRequest), "the rest is the next run's"


def test_a_run_whose_limit_leaves_less_than_a_range_ends_before_it(bench: Workbench) -> None:
    definition = define(min_events=4, max_events=4, drain_seconds=30.0, drain_events=6)
    ids = bench.publish("rides", 12)
    assert bench.run(definition, bench.request(definition)).success
    assert bench.effects() == ids[:4]


def test_a_run_drains_up_to_its_limit_of_seconds(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]

    def slowly(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        passed[0] += 1_200.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    for module in (drain, handover):
        monkeypatch.setattr(module, "time", clock)
    definition = define(slowly, max_events=1, drain_seconds=3_600.0, drain_idle=3_600.0)
    ids = bench.publish("rides", 50)
    bench.run(definition, bench.request(definition))
    assert bench.effects() == ids[:3]


def test_a_run_waits_for_further_events_and_consumes_them_too(bench: Workbench) -> None:
    """Each event is published once the one before has taken effect. Without its limit, the run would wait for hours."""
    definition = define(max_events=100, drain_seconds=7_200.0, drain_idle=7_200.0, drain_events=6)
    bench.publish("rides", 1)

    def publish_one_by_one() -> None:
        for number in range(1, 6):
            wait_until(lambda number=number: len(bench.effects()) == number)  # type: ignore[misc]
            bench.publish("rides", 1)

    with ThreadPoolExecutor(1) as publishing:
        published = publishing.submit(publish_one_by_one)
        bench.run(definition, bench.request(definition))
        published.result()
    assert len(bench.effects()) == 6


def test_a_claim_that_was_committed_before_is_not_consumed_again(bench: Workbench, metadata: Metadata) -> None:
    """A run that Dagster launches twice."""
    definition = define()
    ids = bench.publish("rides", 5)
    requested = bench.request(definition)
    assert bench.run(definition, requested).success
    again = bench.run(definition, requested)

    assert again.success
    assert bench.effects() == ids
    found = metadata(again, definition.key)
    assert found["events"] == 0
    assert found["note"].endswith("was committed before")


def test_a_queued_run_of_a_consumer_that_was_deleted_names_the_consumer(bench: Workbench) -> None:
    definition = define()
    bench.publish("rides", 1)
    request = bench.request(definition)
    bench.platform.registry.unregister_consumer("rides", definition.consumer.name)
    failure = failure_of(bench.run(definition, request))
    assert f"consumer '{definition.consumer.name}' of topic 'rides' is not registered" in failure["description"]


def test_a_claim_lost_in_mid_batch_leaves_no_effect_of_that_batch_and_fails_the_run(bench: Workbench) -> None:
    """A consumer without leases, for example one of the Java library, consumed the same events meanwhile."""
    overtaken = False

    def overtake(events: Sequence[Event], connection: Connection) -> None:
        nonlocal overtaken
        record(events, connection)
        if not overtaken:
            overtaken = True
            connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s", (events[-1].id,))

    definition = define(overtake, batch=10)
    bench.publish("rides", 30)
    result = bench.run(definition, bench.request(definition))
    assert not result.success
    assert "lost" in failure_of(result)
    assert bench.effects() == []


def test_each_commit_of_a_run_renews_its_lease(bench: Workbench) -> None:
    ends: list[datetime] = []

    def look(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        (state,) = bench.platform.registry.consumer("rides", "c")
        assert state.lease_expires_at is not None
        ends.append(state.lease_expires_at)

    definition = define(look, batch=1)
    ids = bench.publish("rides", 5)
    assert bench.run(definition, bench.request(definition)).success
    assert bench.effects() == ids
    assert ends == sorted(set(ends))


def test_an_event_that_fails_fails_the_run_and_is_named(bench: Workbench) -> None:
    definition = define(fail_at(b"3"))
    ids = bench.publish("rides", 6)
    result = bench.run(definition, bench.request(definition))

    assert not result.success
    found = failure_of(result)
    assert found["event"] == ids[3]
    assert found["attempts"] == 1
    assert found["outcome"] == "retry"
    assert found["error"] == "ValueError: 3 is not to be had"
    assert "rides_dlt" in found["advice"]
    assert f"event {ids[3]} of topic rides failed once in consumer c" in found["description"]
    # The batch failed in the same line.
    (shown,) = raised(bench, result)
    assert "raise ValueError" in shown
    # The events before it are handled, and the offset shows it.
    assert bench.effects() == ids[:3]
    assert bench.offset(definition) == ids[2]
    (entry,) = bench.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    assert entry.asset_materialization is not None
    assert entry.asset_materialization.metadata["events"].value == 3


def test_without_a_dead_letter_topic_a_failing_event_fails_the_run_and_blocks_its_partition(bench: Workbench) -> None:
    definition = define(fail_at(b"0"))
    bench.platform.registry.register_consumer(definition.consumer, max_attempts=1)
    ids = bench.publish("rides", 3)
    found = failure_of(bench.run(definition, bench.request(definition)))

    assert found["outcome"] == "blocked"
    assert "eventsql consumer resume rides c" in found["advice"]
    assert bench.effects() == []
    assert f"event {ids[0]} blocks the partition" in bench.tick(definition.sensors[0])


class FactoryOfNone(EventSQLResource):
    """The platform of a location whose dead letter factory makes no dead letters."""

    @property
    def platform(self) -> EventSQL:
        opened = super().platform
        opened.dead_letters.configure(lambda _event, _cause: None)
        return opened


def test_a_failure_says_if_the_factory_made_no_dead_letter_of_the_event(bench: Workbench) -> None:
    definition = define(fail_at(b"0"))
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    bench.platform.registry.register_consumer(definition.consumer, max_attempts=1)
    ids = bench.publish("rides", 3)
    bench.eventsql = FactoryOfNone(dsn=bench.eventsql.dsn)
    found = failure_of(bench.run(definition, bench.request(definition)))
    assert found["outcome"] == "blocked"
    assert "dead letter factory" in found["advice"]
    assert "create topic" not in found["advice"], "it exists, and did not help"
    assert f"event {ids[0]} blocks the partition" in bench.tick(definition.sensors[0])


def test_a_dead_letter_is_passed_and_the_run_succeeds_and_says_so(bench: Workbench, metadata: Metadata) -> None:
    definition = define(fail_at(b"3"))
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    bench.platform.registry.register_consumer(definition.consumer, max_attempts=1)
    ids = bench.publish("rides", 6)
    result = bench.run(definition, bench.request(definition))

    assert result.success
    assert bench.effects() == [*ids[:3], *ids[4:]]
    assert bench.offset(definition) == ids[-1]
    found = metadata(result, definition.key)
    given_up = [{"event": ids[3], "partition": -1, "error": "ValueError: 3 is not to be had"}]
    assert found["dead letters"] == 1
    assert found["events given up"] == given_up
    (observation,) = [
        event.asset_observation_data.asset_observation
        for event in result.all_events
        if event.event_type == dg.DagsterEventType.ASSET_OBSERVATION
    ]
    assert observation.metadata["events given up"].value == given_up
    bench.platform.transfer.run_once()
    assert [letter.value for letter in bench.platform.dead_letters.list("rides")] == [b"3"]


@pytest.mark.parametrize("error", [SystemExit(3), PanicException()])
def test_an_event_whose_function_exits_or_panics_becomes_a_dead_letter(bench: Workbench, error: BaseException) -> None:
    def ends(events: Sequence[Event], connection: Connection) -> None:
        if b"1" in {event.value for event in events}:
            raise error
        record(events, connection)

    definition = define(ends)
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    bench.platform.registry.register_consumer(definition.consumer, max_attempts=1)
    ids = bench.publish("rides", 3)
    assert bench.run(definition, bench.request(definition)).success
    assert bench.effects() == [ids[0], ids[2]]


def test_a_failing_event_is_retried_by_the_next_tick_and_becomes_a_dead_letter_in_the_end(bench: Workbench) -> None:
    definition = define(fail_at(b"1"))
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    bench.platform.registry.register_consumer(definition.consumer, max_attempts=2)
    ids = bench.publish("rides", 3)
    assert not bench.run(definition, bench.request(definition)).success
    bench.end_pause(definition)
    assert bench.run(definition, bench.request(definition)).success
    assert bench.effects() == [ids[0], ids[2]]


def test_a_run_warns_once_of_results_that_nothing_uses(bench: Workbench) -> None:
    def count(events: Sequence[Event], connection: Connection) -> dg.MaterializeResult[Any]:
        record(events, connection)
        return dg.MaterializeResult(metadata={"events": len(events)})

    bench.publish("rides", 3)
    result = bench.run(define(count, batch=1))
    assert result.success
    messages = [entry.user_message for entry in bench.instance.all_logs(result.run_id)]
    assert sum("MaterializeResult" in each for each in messages) == 1


def test_a_result_that_fails_its_events_gets_no_warning_beside_its_error(bench: Workbench) -> None:
    def publish(events: Sequence[Event], connection: Connection) -> list[Publication]:
        return [Publication("sums", event.value or b"") for event in events]

    bench.publish("rides", 1)
    result = bench.run(define(publish))
    assert not result.success
    messages = [entry.user_message for entry in bench.instance.all_logs(result.run_id)]
    assert not any("nothing uses" in each for each in messages)


def test_a_run_that_is_launched_by_hand_claims_the_waiting_events_of_every_partition(
    bench: Workbench, metadata: Metadata
) -> None:
    ids = [*bench.publish("orders", 3, partition=0), *bench.publish("orders", 2, partition=1)]
    result = bench.run(ledger)
    assert sorted(bench.effects()) == sorted(ids)
    found = metadata(result, ledger.key)
    assert (found["events"], found["claims"]) == (5, 2)
    assert "partition" not in found


def test_a_run_that_is_launched_by_hand_leaves_a_leased_partition_alone(bench: Workbench, metadata: Metadata) -> None:
    definition = define()
    bench.publish("rides", 3)
    bench.request(definition)
    assert metadata(bench.run(definition), definition.key)["events"] == 0
    assert bench.effects() == []


# A partition that a repartitioned topic does not have any more


def enter(bench: Workbench, partitions: int) -> None:
    """Give the topic of `ledger` fewer partitions, and let the consumer enter that layout."""
    assert bench.platform.repartitioner.repartition("orders", partitions) is not None
    bench.platform.consumers.consume_once("orders", "ledger", record, partition=0)
    assert len(bench.platform.registry.consumer("orders", "ledger")) == partitions


def on_partition(**config: Any) -> dg.RunRequest:
    return dg.RunRequest(run_config={"ops": {"ledger": {"config": {"partition": 1, **config}}}})


def test_a_run_that_drains_a_partition_which_the_topic_loses_succeeds(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = consumer_asset(
        topic=ledger.topic, consumer="ledger", partitioned=True, name="ledger", sensor="consumer",
        limits=RunLimits(max_wait=0.0, drain_seconds=3_600.0, drain_idle=0.0),
    )(record)  # fmt: skip
    ids = bench.publish("orders", 2, partition=1)
    requested = bench.request(definition)
    claim = Claims.claim

    def late(self: Claims, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Claims, "claim", claim)
        enter(bench, 1)
        return claim(self, *args, **options)

    monkeypatch.setattr(Claims, "claim", late)
    assert bench.run(definition, requested).success
    assert bench.effects() == ids


def test_a_run_that_takes_over_a_partition_which_the_topic_has_lost_succeeds(bench: Workbench) -> None:
    enter(bench, 1)
    assert bench.run(ledger, on_partition(succeeds="a run that has ended")).success


def test_a_run_that_is_launched_by_hand_for_a_partition_which_the_topic_has_lost_fails(bench: Workbench) -> None:
    enter(bench, 1)
    assert not bench.run(ledger, on_partition()).success


def test_a_run_that_is_launched_by_hand_goes_on_with_the_partitions_that_are_left(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = drain.Draining.partitions

    def outdated(self: drain.Draining) -> list[int]:
        monkeypatch.setattr(drain.Draining, "partitions", partitions)
        read = partitions(self)
        enter(bench, 1)
        ids.extend(bench.publish("orders", 2))
        return sorted(read, reverse=True)

    ids: list[int] = []
    monkeypatch.setattr(drain.Draining, "partitions", outdated)
    assert bench.run(ledger).success
    assert bench.effects() == ids != []


def test_a_function_may_take_the_context_and_resources(bench: Workbench) -> None:
    seen: dict[str, Any] = {}

    def curious(
        events: Sequence[Event],
        connection: Connection,
        context: dg.AssetExecutionContext,
        eventsql: EventSQLResource,
        word: dg.ResourceParam[str],
    ) -> None:
        seen.update(run=context.run.run_id, topics=len(eventsql.platform.registry.topics()), word=word)

    definition = define(curious)
    bench.publish("rides", 1)
    result = bench.run(definition, bench.request(definition), word="hello")
    assert result.success
    assert seen == {"run": result.run_id, "topics": 2, "word": "hello"}


@pytest.mark.parametrize("replay", [None, True])
def test_the_claim_of_another_consumer_is_left_to_it(bench: Workbench, replay: bool | None) -> None:
    definition = define()
    bench.platform.registry.register_consumer(Consumer("rides", "other"))
    bench.publish("rides", 5)
    claim = bench.platform.claims.claim("rides", "other", owner="other")
    assert isinstance(claim, Claim)
    if replay:
        bench.platform.claims.process(claim, lambda _events, _connection: None)
    wanted = dg.RunRequest(run_config={"ops": {"c": {"config": {"claim": claim.id, "replay": replay}}}})
    result = bench.run(definition, wanted)
    assert "consumer 'c' of topic 'rides'" in failure_of(result)["description"]
    assert bench.effects() == []
    assert bench.platform.claims.get(claim.id)[1] == ("committed" if replay else "claimed")


def test_a_database_that_goes_away_fails_the_run_and_the_range_is_claimed_again(bench: Workbench) -> None:
    definition = define(cut_off(1))
    ids = bench.publish("rides", 5)
    assert not bench.run(definition, bench.request(definition)).success
    assert bench.effects() == []
    assert bench.run(definition, bench.request(definition)).success
    assert bench.effects() == ids


def test_a_batch_that_stands_still_is_ended_by_the_server(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, given = itertools.count(), batch.STALLED_AFTER

    def stall(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        connection.execute("SELECT")
        if next(calls) == 0:
            alive, session = "SELECT FROM pg_stat_activity WHERE pid = %s", connection.info.backend_pid
            wait_until(lambda: not sql(bench.platform, alive, session), "the end of the batch")
            # On a busy machine, each further batch may stand still for as long.
            monkeypatch.setattr(batch, "STALLED_AFTER", given)

    monkeypatch.setattr(batch, "STALLED_AFTER", 3.0)
    definition = define(stall, lease=0.5)
    ids = bench.publish("rides", 5)
    # The run goes on with smaller batches.
    assert bench.run(definition, bench.request(definition)).success
    assert next(calls) > 2
    assert bench.effects() == ids


def fail_at(value: bytes) -> Callable[[Sequence[Event], Connection], None]:
    """A consumer that cannot take one value."""

    def consume(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        for event in events:
            if event.value == value:
                raise ValueError(f"{value.decode()} is not to be had")

    return consume
