"""The parts of a location over shards beside its sensors: topics, lag, checks, the transfer, inputs, registration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import dagster as dg
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from eventsql_orchestration import Event, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLIOManager,
    EventSQLResource,
    RangeLimits,
    RunLimits,
    TopicResource,
    build_delivered_check,
    build_lag_check,
    build_register_job,
    build_transfer_schedule,
    consumer_asset,
    publish_events,
    range_asset,
    topic_asset,
    topic_key,
)
from eventsql_orchestration.dagster.metadata_keys import PUBLISHED_EVENTS, PUBLISHED_RANGES, PUBLISHED_TOPIC
from eventsql_orchestration.dagster.monitoring.lag_sensor import observe_lag
from eventsql_orchestration.dagster.topics import topic_observations
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ConfigurationError, ShardSetError, WrongShardError
from eventsql_orchestration.orchestration.provenance import SHARD
from eventsql_orchestration.shards.add_shard import ShardAddition
from tests.conftest import Administrator, Prepared
from tests.dagster.conftest import EFFECTS, NOWHERE, ONE, OTHER, Workbench, sql
from tests.dagster.location import record
from tests.dagster.test_shards import ORDERS, ledger
from tests.shard_keys import shard_of_key

LETTERS = Topic(ORDERS.dead_letter_topic)
KEYS = {shard_of_key(key, [ONE, OTHER]): key for key in "abcdefgh"}


@pytest.fixture
def shard_templates(
    request: pytest.FixtureRequest, prepared: Prepared, shard_templates: tuple[str, ...]
) -> tuple[str, ...]:
    return prepared(ledger.register, databases=2) if "platform" in request.fixturenames else shard_templates


@pytest.fixture
def platform(shards: dict[str, Workbench]) -> EventSQL:
    """The platform over both shards, with the registered consumer."""
    return shards[ONE].eventsql.platform.open()


@contextmanager
def without_the_other(shards: dict[str, Workbench]) -> Iterator[EventSQL]:
    """The platform while the second shard is down."""
    with EventSQL(shards[ONE].platform.database.dsn, NOWHERE, migrate=False, transfer=False) as platform:
        yield platform


# A topic


def test_a_topic_is_published_to_on_the_shard_of_the_key_and_read_from_one(
    platform: EventSQL, shards: dict[str, Workbench]
) -> None:
    topic = TopicResource(eventsql=shards[ONE].eventsql, topic="orders", partitions=2)
    assert topic.register() == Topic("orders", 2)
    topic.publish(b"1", key=KEYS[OTHER])
    assert topic.publish_all(Publication("orders", b"2", key=key) for key in KEYS.values()) == 2
    platform.transfer.run_once()
    assert [event.value for event in topic.read(shard=OTHER)] == [b"1", b"2"]
    assert [event.key for event in topic.read(shard=ONE)] == [KEYS[ONE]]
    with pytest.raises(ShardSetError):
        topic.read()
    assert {(lag.shard, lag.partition) for lag in topic.lag()} == {(s, p) for s in (ONE, OTHER) for p in (0, 1)}
    with (
        shards[ONE].platform.database.transaction() as connection,
        pytest.raises(WrongShardError, match=f"belongs to shard '{OTHER}'"),
    ):
        topic.publish(b"3", key=KEYS[OTHER], connection=connection)


def test_new_events_of_a_topic_are_reported_for_each_shard_and_later_for_a_shard_that_was_down(
    platform: EventSQL, shards: dict[str, Workbench]
) -> None:
    first = topic_observations(platform, ["orders", "nowhere"], seen={})
    assert first.seen == {f"{shard}/{topic}": 0 for shard in (ONE, OTHER) for topic in ("orders", "nowhere")}
    assert len(first.missing) == 1
    ids = shards[OTHER].publish("orders", 2)
    with without_the_other(shards) as alone:
        meanwhile = topic_observations(alone, ["orders"], seen=first.seen)
    assert (meanwhile.materializations, meanwhile.seen) == ((), first.seen)
    (arrival,) = topic_observations(platform, ["orders"], seen=meanwhile.seen).materializations
    told = {name: value.value for name, value in arrival.metadata.items()}
    assert (told["shard"], told["published events"], told["published last offset"]) == (OTHER, 2, ids[-1])
    assert told["trace published"] == f"eventsql --shard {OTHER} trace orders {ids[-1]}"


# Lag and checks


def test_lag_is_observed_for_each_partition_of_each_shard(platform: EventSQL, shards: dict[str, Workbench]) -> None:
    shards[ONE].publish("orders", 2, partition=1)
    shards[OTHER].publish("orders", 3, partition=1)
    first = observe_lag(platform, [ledger], cursor=None, now=1_000.0)
    (observed,) = first.asset_events
    assert isinstance(observed, dg.AssetObservation)
    assert observed.metadata["Lag events"].value == 5
    assert observed.metadata["Lag events [shard-2/1]"].value == 3
    assert "[shard-1/1] waiting" in str(observed.metadata["cause"].value)

    # The partition that moves is told by its shard too.
    platform.shards[1].consumers.consume_once("orders", "ledger", record, max_events=1)
    (observed,) = observe_lag(platform, [ledger], cursor=first.cursor, now=1_015.0).asset_events
    assert isinstance(observed, dg.AssetObservation)
    cause = str(observed.metadata["cause"].value)
    assert "[shard-2/1] slow" in cause
    assert "[shard-1/1] waiting" in cause


def test_the_lag_on_a_shard_that_is_down_is_unknown_and_the_check_is_red(
    platform: EventSQL, shards: dict[str, Workbench]
) -> None:
    checks = [build_lag_check(ledger, max_events=10), build_delivered_check(ledger)]
    shards[OTHER].publish("orders", 2, partition=1)
    platform.shards[1].consumers.consume_once("orders", "ledger", record, max_events=1)
    with without_the_other(shards) as alone:
        seen = observe_lag(alone, [ledger], checks=checks, cursor=None, now=1_000.0)
        observed, lag, delivered = seen.asset_events
        assert isinstance(observed, dg.AssetObservation)
        assert "[shard-2/0] unreachable" in str(observed.metadata["cause"].value)
        assert "Lag events [shard-2/0]" not in observed.metadata
        assert isinstance(lag, dg.AssetCheckEvaluation)
        assert (lag.passed, str(lag.description).startswith("0 events")) == (False, True)
        assert isinstance(delivered, dg.AssetCheckEvaluation)
        assert delivered.passed
        assert delivered.description == "every event was delivered, as far as is known: no answer in time from shard-2"
        # While the shard is down, the lag is observed at each look, and not every five minutes.
        again = observe_lag(alone, [ledger], cursor=seen.cursor, now=1_015.0)
        assert [type(event) for event in again.asset_events] == [dg.AssetObservation]
    back = observe_lag(platform, [ledger], checks=checks, cursor=seen.cursor, now=1_030.0)
    evaluations = [event for event in back.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
    assert [event.passed for event in evaluations] == [True, True]
    observed = back.asset_events[0]
    assert isinstance(observed, dg.AssetObservation)
    # Nobody knows whether the partition has moved meanwhile.
    assert "[shard-2/1] waiting" in str(observed.metadata["cause"].value)


def test_a_dead_letter_is_named_with_its_shard_and_stays_red_while_the_shard_is_down(
    platform: EventSQL, shards: dict[str, Workbench]
) -> None:
    def refuse(events: Sequence[Event], connection: Connection) -> None:
        raise ValueError("not a number")

    picky = consumer_asset(
        topic=ORDERS, consumer="picky", name="picky", max_attempts=1, limits=RunLimits(max_wait=0.0)
    )(refuse)
    platform.registry.register_topic(LETTERS)
    picky.register(platform)
    checks = [build_delivered_check(picky)]

    def judge(over: EventSQL, cursor: str | None, now: float) -> tuple[dg.AssetCheckEvaluation, str | None]:
        seen = observe_lag(over, [picky], checks=checks, cursor=cursor, now=now)
        (evaluation,) = [event for event in seen.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
        return evaluation, seen.cursor

    (offset,) = shards[OTHER].publish("orders", 1, partition=0)
    (request,) = shards[ONE].tick(picky.sensors[0])
    assert shards[ONE].run(picky, request).success
    shards[OTHER].platform.transfer.run_once()
    red, cursor = judge(platform, None, 1_000.0)
    assert not red.passed
    assert red.description == (
        f"1 dead letter is open: event `{offset}` of topic `orders[0]` on shard shard-2 failed once "
        "(`ValueError: not a number`)"
    )
    (letter,) = platform.dead_letters.list("orders")
    assert red.metadata["show"].value == f"eventsql --shard {OTHER} dlt show orders {letter.id}"

    with without_the_other(shards) as alone:
        unsure, cursor = judge(alone, cursor, 1_015.0)
    assert not unsure.passed
    assert "from shard-2, which had undelivered events" in str(unsure.description)

    shards[OTHER].platform.dead_letters.redrive("orders", LetterFilter(ids=(letter.id,)))
    green, _ = judge(platform, cursor, 1_030.0)
    assert (green.passed, green.description) == (True, "every event was delivered")


def test_what_is_known_of_shards_stays_while_several_are_down(administrator: Administrator) -> None:
    """Then their databases cannot be told apart."""
    with ExitStack() as stack:
        dsns = [stack.enter_context(administrator.copied()) for _ in range(3)]
        platform = stack.enter_context(EventSQL(*dsns, transfer=False)).open()
        alone = stack.enter_context(EventSQL(dsns[0], NOWHERE, f"{NOWHERE}2", migrate=False, transfer=False))
        ledger.register(platform)
        last = platform.shards[2]

        def look(over: EventSQL, now: float, cursor: str | None = None) -> tuple[list[bool], list[Any], str | None]:
            seen = observe_lag(
                over, [ledger], checks=[build_delivered_check(ledger)], topics=[ORDERS], cursor=cursor, now=now
            )
            checked = [event.passed for event in seen.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
            arrived = [event for event in seen.asset_events if isinstance(event, dg.AssetMaterialization)]
            return checked, [event.metadata["shard"].value for event in arrived], seen.cursor

        checked, _, cursor = look(platform, 1_000.0)
        assert checked == [True]
        last.publisher.publish(Publication("orders", b"x", partition=0))
        last.transfer.run_once()
        sql(last, "UPDATE eventsql.consumer SET eql_failed_event_id = 1, eql_attempts = 5")
        checked, _, cursor = look(platform, 1_015.0, cursor)
        assert checked == [False]
        checked, arrived, cursor = look(alone, 1_075.0, cursor)
        assert (checked, arrived) == ([False], [])
        _, arrived, _ = look(platform, 1_150.0, cursor)
        assert arrived == [last.name]


# The transfer, and registration


def transfer(shards: dict[str, Workbench], dsn: str) -> dg.ExecuteInProcessResult:
    schedule = build_transfer_schedule(limit_seconds=0.5, polling_delay=0.05)
    location = dg.Definitions(schedules=[schedule], resources={"eventsql": EventSQLResource(dsn=dsn)})
    return location.resolve_job_def("transfer").execute_in_process(instance=shards[ONE].instance, raise_on_error=False)


def test_the_transfer_moves_events_on_each_shard_and_does_not_wait_for_one_that_is_down(
    platform: EventSQL, shards: dict[str, Workbench]
) -> None:
    def publish() -> None:
        for shard in platform.shards:
            shard.publisher.publish_all(Publication("orders", b"", partition=0) for _ in range(3))

    def waiting() -> dict[str | None, int]:
        return {shard.name: sum(shard.buffered().values()) for shard in platform.shards}

    publish()
    result = transfer(shards, shards[ONE].eventsql.dsn)
    assert result.success
    (output,) = [event for event in result.all_events if event.event_type == dg.DagsterEventType.STEP_OUTPUT]
    assert output.step_output_data.metadata["events"].value == 6
    assert waiting() == {ONE: 0, OTHER: 0}

    publish()
    assert transfer(shards, f"{shards[ONE].platform.database.dsn} {NOWHERE}").success
    assert waiting() == {ONE: 0, OTHER: 3}
    assert not transfer(shards, f"{NOWHERE} {NOWHERE}2").success

    # A run fails with the fault of a shard after it has moved the events of the other shards.
    publish()
    sql(shards[OTHER].platform, "ALTER TABLE eventsql.event_buffer_lock RENAME TO gone")
    broken = transfer(shards, shards[ONE].eventsql.dsn)
    assert "event_buffer_lock" in str(broken.failure_data_for_node("move_events"))
    assert waiting()[ONE] == 0


def test_registering_makes_topics_and_consumers_on_all_shards_and_prepares_each(shards: dict[str, Workbench]) -> None:
    prepared: list[tuple[str | None, str]] = []

    def prepare(shard: Shard) -> None:
        prepared.append((shard.name, str(shard.database)))

    job = build_register_job([ledger], topics=[ORDERS], prepare=prepare)
    assert job.execute_in_process(resources={"eventsql": shards[ONE].eventsql}).success
    for bench in shards.values():
        assert {topic.name for topic in bench.platform.registry.topics()} == {"orders", LETTERS.name}
        assert len(bench.platform.registry.consumer("orders", "ledger")) == 2
    assert prepared == [(name, str(bench.platform.database)) for name, bench in shards.items()]


@pytest.mark.nightly
def test_a_shard_that_is_added_is_consumed_once_the_others_are_consumed_up_to_then(
    platform: EventSQL, shards: dict[str, Workbench], administrator: Administrator
) -> None:
    bench, added = shards[ONE], "shard-3"
    ids = {name: each.publish("orders", 2, partition=0) for name, each in shards.items()}
    with administrator.copied() as dsn, EventSQL(dsn, transfer=False) as alone:
        ShardAddition(platform.shards, alone.shards[0]).execute()
        over = EventSQLResource(dsn=f"{bench.eventsql.dsn} {dsn}")
        sql(alone, EFFECTS)
        third = Workbench(alone, over, bench.instance)
        ids[added] = third.publish("orders", 2, partition=0)

        def requests() -> dict[str, dg.RunRequest]:
            answer = third.tick(ledger.sensors[0])
            return {each.tags["eventsql/shard"]: each for each in answer} if isinstance(answer, list) else {}

        requested = requests()
        assert set(requested) == {ONE, OTHER}
        for each in requested.values():
            assert third.run(ledger, each).success
        assert requests() == {}, "its consumers are not released yet"
        assert transfer(shards, over.dsn).success
        requested = requests()
        assert set(requested) == {added}
        assert third.run(ledger, requested[added]).success
        assert {name: each.effects() for name, each in {**shards, added: third}.items()} == ids


def test_runs_of_two_shards_both_publish_although_their_claims_have_the_same_id(
    platform: EventSQL, shards: dict[str, Workbench]
) -> None:
    platform.registry.register_topic(Topic("sums", 2))

    def count(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
        rows = [{"key": key, "value": str(claim.events)} for key in KEYS.values()]
        return publish_events(context, rows, eventsql=eventsql, topic="sums", claim=claim)

    counter = range_asset(
        topic=ORDERS,
        consumer="counter",
        name="counter",
        publishes="sums",
        limits=RangeLimits(max_wait=0.0, drain_seconds=0.0),
        options=AssetOptions(kinds=()),
    )(count)
    counter.register(platform)
    for number, bench in enumerate(shards.values(), start=1):
        bench.publish("orders", number)
    requests = shards[ONE].tick(counter.sensors[0])
    assert {request.tags[".dagster/eventsql_claim"] for request in requests} == {"1"}
    for request in [*requests, *requests]:
        assert shards[ONE].run(counter, request).success
    platform.transfer.run_once()
    published = {
        name: sorted((event.key, event.value, event.metadata[SHARD]) for event in bench.platform.reader.read("sums"))
        for name, bench in shards.items()
    }
    # Each shard has the events of its key, from both runs.
    assert published == {name: [(KEYS[name], b"1", ONE), (KEYS[name], b"2", OTHER)] for name in shards}


# Inputs


@pytest.fixture
def load(shards: dict[str, Workbench]) -> Callable[..., Any]:
    """Load topic `orders` as an input of a type and with metadata. Returns the input that the asset got."""

    def run(kind: Any, *records: Any, **metadata: Any) -> Any:
        got: list[Any] = []

        def compute(orders: Any) -> None:
            got.append(orders)

        compute.__annotations__ = {"orders": kind, "return": None}
        loaded = dg.asset(
            name="loaded",
            ins={"orders": dg.AssetIn(key=topic_key("orders"), input_manager_key="topics", metadata=metadata)},
        )(compute)
        instance = shards[ONE].instance
        for each in records:
            instance.report_runless_asset_event(each)
        dg.materialize(
            [topic_asset(ORDERS), loaded],
            selection=[loaded],
            instance=instance,
            resources={"topics": EventSQLIOManager(eventsql=shards[ONE].eventsql)},
        )
        (found,) = got
        return found

    return run


def test_an_input_has_the_topic_of_all_shards_or_of_one(
    platform: EventSQL, shards: dict[str, Workbench], load: Callable[..., Any]
) -> None:
    ids = {name: bench.publish("orders", 2 + n) for n, (name, bench) in enumerate(shards.items())}
    table = load(pa.Table)
    assert table.column_names == ["key", "value", "topic", "partition", "offset", "timestamp", "shard"]
    found = list(zip(table["shard"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert found == [(name, offset) for name, offsets in ids.items() for offset in offsets]
    assert len(load(list[Event])) == 5
    assert [event.id for event in load(list[Event], shard=OTHER, after=ids[OTHER][0])] == ids[OTHER][1:]
    with pytest.raises(ConfigurationError, match="name it in metadata shard, one of shard-1, shard-2"):
        load(list[Event], after=1)


def test_an_input_has_the_events_that_a_materialization_names_on_each_shard(
    platform: EventSQL, shards: dict[str, Workbench], load: Callable[..., Any]
) -> None:
    ids = {name: bench.publish("orders", 4) for name, bench in shards.items()}
    ranges = [{"shard": name, "first": offsets[1], "last": offsets[2]} for name, offsets in ids.items()]
    told = dg.AssetMaterialization(
        topic_key("orders"), metadata={PUBLISHED_TOPIC: "orders", PUBLISHED_EVENTS: 4, PUBLISHED_RANGES: ranges}
    )
    found = load(list[Event], told, reads="materialization")
    assert [event.id for event in found] == [offset for name in ids for offset in ids[name][1:3]]
    nothing = dg.AssetMaterialization(topic_key("orders"), metadata={PUBLISHED_TOPIC: "orders", PUBLISHED_EVENTS: 0})
    assert load(pa.Table, nothing, reads="materialization").num_rows == 0
