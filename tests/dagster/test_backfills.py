"""Backfills: the contents of a plan, and that a range takes effect once, whether it is cut, killed or started twice."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.consuming import claims as claims_module
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.dead_letter_values import BACKFILL, LetterFilter
from eventsql_orchestration.dagster import BackfillDefinition, ConsumerDefinition, RunLimits
from eventsql_orchestration.dagster.backfills.job import DagsterJob
from eventsql_orchestration.dagster.local.instance import instance_config
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    PartitionLeasedError,
    PartitionOutOfRangeError,
    RegistryError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.orchestration.backfills import replay as replay_module
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import (
    Backfill,
    Plan,
    Replayed,
    ReplayRange,
    Window,
    check_id,
    new_id,
    partition_key,
    read_key,
)
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest
from eventsql_orchestration.topics.side_consumers import MARK
from tests.dagster import backfill_location as location
from tests.dagster.conftest import Workbench, registering, sql
from tests.dagster.location import record
from tests.dagster.processes import run_process
from tests.forms import change_time, change_value, drop_events
from tests.waiting import wait_until

pytestmark = pytest.mark.prepared.with_args(registering(*location.CONSUMERS))


@pytest.fixture
def backfills(platform: EventSQL) -> Backfills:
    return Backfills(platform.shards)


def job_of(bench: Workbench, definition: BackfillDefinition, job: str | None = None) -> dg.JobDefinition:
    return dg.Definitions(
        assets=[definition.asset, definition.consumer.asset],
        jobs=definition.jobs,
        resources={"eventsql": bench.eventsql},
    ).resolve_job_def(job or definition.job.name)


def replay(
    bench: Workbench,
    definition: BackfillDefinition,
    key: str,
    *,
    max_failures: int | None = None,
    run_id: str | None = None,
) -> dg.ExecuteInProcessResult:
    """The run of one partition key."""
    assert definition.partitions.name is not None
    bench.instance.add_dynamic_partitions(definition.partitions.name, [key])
    return job_of(bench, definition).execute_in_process(
        instance=bench.instance, partition_key=key, raise_on_error=False, run_id=run_id,
        run_config=DagsterJob(definition.job.name, (), definition.partitions.name, "", "").config(max_failures),
    )  # fmt: skip


def replay_all(bench: Workbench, definition: BackfillDefinition, plan: Plan, backfill: Backfill) -> None:
    for run in plan.runs:
        assert replay(bench, definition, run.key(backfill.id)).success


def everything(backfills: Backfills, consumer: str = "ledger", **cut: Any) -> Plan:
    return backfills.plan("orders", consumer, ReplayRange(Earliest(), **cut))


def begin(backfills: Backfills, consumer: str = "ledger") -> str:
    """Register a backfill of the whole topic; gives the key of its first run."""
    plan = everything(backfills, consumer)
    return plan.runs[0].key(backfills.register(plan, "one").id)


def failure(result: dg.ExecuteInProcessResult) -> str:
    (step,) = [event for event in result.all_events if event.event_type == dg.DagsterEventType.STEP_FAILURE]
    error = step.step_failure_data.error
    assert error is not None
    return (error.cause or error).message


def test_live_runs_go_before_backfills_in_the_queue(bench: Workbench) -> None:
    backfill, live = location.BACKFILLS[0].job, location.BACKFILLS[0].consumer.job
    assert int((backfill.tags or {})["dagster/priority"]) < int((live.tags or {}).get("dagster/priority", 0))
    limits = instance_config(max_concurrent_runs=6)["concurrency"]["runs"]["tag_concurrency_limits"]
    (limit,) = [each["limit"] for each in limits if each["key"] in (backfill.tags or {})]
    assert limit == 3, "half of the runs at once"
    assert not any(each["key"] in (live.tags or {}) for each in limits)


def test_a_run_says_what_its_window_waits_for(
    bench: Workbench, backfills: Backfills, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bench.publish("orders", 3, partition=0)
    key = begin(backfills)
    with bench.platform.database.connection() as other, ExitStack() as held:
        held.enter_context(other.transaction())
        other.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'orders' FOR UPDATE")
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: held.close())
        monkeypatch.setattr(replay_module, "time", clock)
        monkeypatch.setattr(replay_module, "PROGRESS_SECONDS", 0.0)
        result = replay(bench, location.BACKFILLS[0], key)
    assert result.success
    assert bench.effects() == ids
    messages = [entry.user_message for entry in bench.instance.all_logs(result.run_id)]
    assert any("another consumption has the partition locked" in message for message in messages)


# Plans


def test_a_plan_counts_the_events_of_each_window_and_partition(bench: Workbench, backfills: Backfills) -> None:
    first = bench.publish("orders", 30, partition=0)
    second = bench.publish("orders", 20, partition=1)
    plan = everything(backfills, window_events=25)
    assert [(run.window, run.partition, run.events) for run in plan.runs] == [
        (Window(first[0] - 1, first[24]), 0, 25),
        (Window(first[24], second[-1]), 0, 5),
        (Window(first[24], second[-1]), 1, 20),
    ]
    assert plan.events == 50
    assert [(run.partition, run.events) for run in everything(backfills, "fragile").runs] == [(-1, 50)]
    assert plan.first_at is not None
    assert plan.last_at is not None
    assert plan.first_at <= plan.last_at
    assert any("across windows" in remark for remark in plan.remarks)
    assert backfills.registered() == []


def test_a_range_includes_its_first_and_its_last_offset(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 20)
    plan = backfills.plan("orders", "fragile", ReplayRange(AtOffset(ids[4]), AtOffset(ids[9])))
    assert (plan.range, plan.events) == ((ids[3], ids[9]), 6)


def test_a_range_of_time_ends_before_its_end(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 5)
    middle = bench.publish("orders", 5)
    bench.publish("orders", 5)
    begin, end = (
        bench.platform.reader.read("orders", after=each - 1, limit=1)[0] for each in (middle[0], middle[-1] + 1)
    )
    plan = backfills.plan("orders", "fragile", ReplayRange(AtTime(begin.created_at), AtTime(end.created_at)))
    assert plan.range == (middle[0] - 1, middle[-1])
    recent = backfills.plan("orders", "fragile", ReplayRange(Back(timedelta(hours=1)), Latest()))
    assert recent.events == 15


def test_windows_of_time_hold_the_events_that_were_logged_in_the_same_period(
    bench: Workbench, backfills: Backfills
) -> None:
    ids = bench.publish("orders", 6)
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    with bench.platform.database.connection() as connection:
        for minutes, event in zip((0, 10, 59, 60, 61, 240), ids, strict=True):
            change_time(connection, "orders", event, noon + timedelta(minutes=minutes))
    plan = everything(backfills, "fragile", window=timedelta(hours=1))
    assert [(run.window.upto, run.events) for run in plan.runs] == [(ids[2], 3), (ids[4], 2), (ids[5], 1)]


def test_a_plan_of_one_partition_leaves_the_others_out(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 5, partition=0)
    bench.publish("orders", 7, partition=1)
    plan = everything(backfills, partition=1, window_events=5)
    assert {run.partition for run in plan.runs} == {1}
    assert plan.events == 7
    backfill = backfills.register(plan, "one")
    assert {part.partition for part in backfill.parts} == {1}
    with pytest.raises(PartitionOutOfRangeError):
        everything(backfills, partition=2)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (AtOffset(9), AtOffset(8)),
        (AtTime(datetime(2026, 5, 2, tzinfo=UTC)), AtTime(datetime(2026, 5, 1, tzinfo=UTC))),
        (Back(timedelta(hours=1)), Back(timedelta(hours=2))),
        (Latest(), AtOffset(3)),
        (AtOffset(9), AtTime(datetime(2020, 5, 1, tzinfo=UTC))),
    ],
)
def test_a_range_that_ends_before_it_begins_is_refused(
    bench: Workbench, backfills: Backfills, start: Any, end: Any
) -> None:
    bench.publish("orders", 10)
    with pytest.raises(ValidationError, match="before it begins"):
        backfills.plan("orders", "ledger", ReplayRange(start, end))


def test_an_empty_range_is_planned_and_not_registered(bench: Workbench, backfills: Backfills) -> None:
    assert everything(backfills).runs == ()
    end = bench.publish("orders", 3)[-1]
    plan = backfills.plan("orders", "ledger", ReplayRange(AtOffset(end + 1), AtOffset(end + 9)))
    assert plan.events == 0
    assert plan.remarks == [f"the log ends at offset {end}, before the range begins"]
    with pytest.raises(ValidationError, match="nothing to replay"):
        backfills.register(plan, "none")


def test_a_plan_names_events_beyond_the_end_and_in_the_buffer(bench: Workbench, backfills: Backfills) -> None:
    end = bench.publish("orders", 3)[-1]
    plan = backfills.plan("orders", "ledger", ReplayRange(Earliest(), AtOffset(end + 100)))
    assert (plan.range, plan.events) == ((0, end), 3)
    assert f"the log ends at offset {end}: the range ends there" in plan.remarks
    bench.platform.publisher.publish(Publication("orders", b"waits"))
    assert any("1 event in the buffer" in remark for remark in everything(backfills).remarks)


def test_a_plan_names_events_that_retention_dropped(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 10)
    with bench.platform.database.connection() as connection:
        drop_events(connection, "orders", ids[5])
    plan = backfills.plan("orders", "ledger", ReplayRange(AtOffset(ids[2])))
    assert plan.events == 4
    (gone,) = plan.remarks
    assert f"offsets {ids[2]} to {ids[5]} of the range (4) are gone" in gone
    timed = backfills.plan("orders", "ledger", ReplayRange(Back(timedelta(days=1)), Latest()))
    assert timed.remarks == [f"the log now begins at offset {ids[6]}: earlier events are gone"]


def test_registering_refuses_a_plan_whose_events_retention_dropped(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 10)
    plan = everything(backfills)
    with bench.platform.database.connection() as connection:
        drop_events(connection, "orders", ids[0])
    with pytest.raises(RegistryError, match="make the plan again"):
        backfills.register(plan, "late")
    assert backfills.registered() == []


def test_a_plan_says_that_the_consumer_is_paused_or_filters(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 1)
    bench.platform.registry.pause("orders", "fragile")
    bench.platform.registry.register_consumer(
        location.fragile.consumer, filter=EventFilter(key_prefix="a"), max_attempts=2
    )
    paused, filtered = everything(backfills, "fragile").remarks
    assert "is paused" in paused
    assert "key a*" in filtered


def test_impossible_plans_are_refused(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 1_001)
    with pytest.raises(TopicNotFoundError):
        backfills.plan("nothing", "ledger", ReplayRange(Earliest()))
    with pytest.raises(ConsumerNotFoundError):
        everything(backfills, "nobody")
    with pytest.raises(ValidationError, match="by both"):
        everything(backfills, window_events=1, window=timedelta(hours=1))
    with pytest.raises(ValidationError, match="use larger"):
        everything(backfills, window_events=1)
    with pytest.raises(ValidationError, match="from a second"):
        everything(backfills, window=timedelta(milliseconds=1))
    backfills.register(everything(backfills), "one")
    with pytest.raises(ValidationError, match="window of a backfill"):
        everything(backfills, backfills.registered()[0].names[0])


def test_keys_and_ids_are_read_as_they_were_written() -> None:
    for partition in (-1, 0, 12):
        assert read_key(partition_key("a-1", Window(3, 9), partition)) == ("a-1", Window(3, 9), partition)
    for wrong in ("", "a", "a:1", "a:1-2:", "A:1-2", "a_b:1-2:0"):
        with pytest.raises(ValidationError):
            read_key(wrong)
    assert check_id(new_id())
    for wrong in ("", "A", "a_b", "a/b", "-a", "a" * 41):
        with pytest.raises(ValidationError):
            check_id(wrong)


# Registered backfills


def test_a_backfill_takes_over_the_form_the_attempts_and_the_filter_of_the_consumer(
    bench: Workbench, backfills: Backfills
) -> None:
    bench.publish("orders", 4)
    bench.platform.registry.register_consumer(
        location.fragile.consumer, filter=EventFilter(key_prefix="a"), max_attempts=2
    )
    backfill = backfills.register(everything(backfills, "fragile"), "one")
    (name,) = backfill.names
    (state,) = bench.platform.registry.consumer("orders", name)
    assert (state.partition, state.max_attempts, state.filter) == (-1, 2, EventFilter(key_prefix="a"))


def test_an_id_is_taken_once_and_another_consumer_may_have_the_same(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 4)
    backfills.register(everything(backfills), "one")
    with pytest.raises(RegistryError, match="--resume one"):
        backfills.register(everything(backfills), "one")
    backfills.register(everything(backfills, "fragile"), "one")
    assert [(each.consumer, each.id) for each in backfills.registered("orders")] == [
        ("fragile", "one"),
        ("ledger", "one"),
    ]
    assert backfills.get("orders", "one", "ledger").consumer == "ledger"
    with pytest.raises(RegistryError, match="no backfill 'two'"):
        backfills.get("orders", "two", "ledger")


def test_a_consumer_of_a_similar_name_is_no_backfill(bench: Workbench, backfills: Backfills) -> None:
    bench.platform.registry.register_consumer(Consumer("orders", f"mine{MARK}of_may"))
    assert backfills.registered() == []


def test_an_unfinished_backfill_does_not_end(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 4)
    backfills.register(everything(backfills), "one")
    assert not backfills.finish(backfills.get("orders", "one"))
    backfills.delete(backfills.get("orders", "one"))
    assert backfills.find("orders", "one") is None
    assert bench.claims() == []


# Replays


@pytest.mark.parametrize(
    ("events", "cut"),
    [
        (70, {}), (28, {"window_events": 7}), pytest.param(70, {"window_events": 40}, marks=pytest.mark.nightly),
        (70, {"window": timedelta(seconds=1)}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("definition", location.BACKFILLS, ids=lambda each: each.consumer.consumer.name)
def test_however_a_range_is_cut_each_event_takes_effect_once(
    bench: Workbench, backfills: Backfills, definition: BackfillDefinition, events: int, cut: dict[str, Any]
) -> None:
    ids = bench.publish("orders", events)
    plan = everything(backfills, definition.consumer.consumer.name, **cut)
    before = offsets(bench, definition.consumer)
    replay_all(bench, definition, plan, backfills.register(plan, "one"))
    assert sorted(bench.effects()) == ids
    assert offsets(bench, definition.consumer) == before
    assert backfills.registered() == [], "the last run ends it"


def offsets(bench: Workbench, consumer: ConsumerDefinition) -> list[tuple[int, int, int]]:
    states = bench.platform.registry.consumer("orders", consumer.consumer.name)
    return [(state.partition, state.last_event_id, state.epoch) for state in states]


def test_a_backfill_reports_materializations_of_the_consumers_asset_and_its_topics(
    bench: Workbench, backfills: Backfills
) -> None:
    ids = bench.publish("orders", 30)
    plan = everything(backfills, "ranges")
    result = replay(bench, location.ranges_backfill, plan.runs[0].key(backfills.register(plan, "one").id))
    assert result.success
    reported = []
    for key in (["ranges"], ["topic", "sums"], ["ranges_backfill"]):
        event = bench.instance.get_latest_materialization_event(dg.AssetKey(key))
        assert event is not None
        assert event.asset_materialization is not None
        reported.append(event.asset_materialization)
    assert [each.metadata["backfill"].value for each in reported] == ["one"] * 3
    metadata = reported[-1].metadata
    assert metadata["events"].value == len(ids)
    assert [entry["events"] for entry in metadata["ranges"].value] == [25, 5]  # type: ignore[union-attr,index,call-overload]
    assert reported[-1].partition == plan.runs[0].key("one")
    assert bench.instance.get_runs(dg.RunsFilter(tags={"eventsql/backfill": "one"}))


def test_live_consumption_goes_on_beside_a_backfill(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 20)
    plan = everything(backfills)
    backfill = backfills.register(plan, "one")
    assert bench.run(location.ledger).success
    replay_all(bench, location.ledger_backfill, plan, backfill)
    assert sorted(bench.effects()) == sorted([*ids, *ids])


def test_a_window_that_is_done_is_not_replayed_again(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 20)
    plan = everything(backfills, "fragile", window_events=10)
    first, second = (run.key("one") for run in plan.runs)
    backfills.register(plan, "one")
    for _ in range(2):
        assert replay(bench, location.fragile_backfill, first).success
    assert bench.effects() == ids[:10]
    assert replay(bench, location.fragile_backfill, second).success
    # The backfill is done, and no failure is to be reported for a window that a run has replayed.
    again = replay(bench, location.fragile_backfill, second)
    assert again.success
    assert not again.get_asset_materialization_events()
    # Another Dagster does not know the runs of the first one.
    for run in bench.instance.get_runs():
        bench.instance.delete_run(run.run_id)
    assert replay(bench, location.fragile_backfill, second).success
    assert bench.effects() == ids


def test_a_run_of_no_or_several_windows_says_that_each_needs_a_run_of_its_own(
    bench: Workbench, backfills: Backfills
) -> None:
    ids = bench.publish("orders", 20)
    plan = everything(backfills, "fragile", window_events=10)
    first, second = (run.key("one") for run in plan.runs)
    backfills.register(plan, "one")
    definition = location.fragile_backfill
    assert definition.partitions.name is not None
    bench.instance.add_dynamic_partitions(definition.partitions.name, [first, second])
    ranged = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": second}
    for tags in (ranged, {}):
        refused = bench.execute(job_of(bench, definition), dg.RunRequest(tags=tags))
        assert not refused.success
        assert "a run of its own" in failure(refused)
    assert bench.effects() == []

    # A range may name one window as its start and its end.
    alone = {"dagster/asset_partition_range_start": second, "dagster/asset_partition_range_end": second}
    assert bench.execute(job_of(bench, definition), dg.RunRequest(tags=alone)).success
    assert bench.effects() == ids[10:]


def test_a_finished_backfill_is_known_until_its_id_is_used_again(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 5)
    plan = everything(backfills, "fragile")
    (run,) = plan.runs
    backfills.register(plan, "one")
    assert replay(bench, location.fragile_backfill, run.key("one")).success
    assert backfills.finished("orders", "one", "fragile") == {None}
    assert backfills.finished("orders", "one", "ranges") == set()
    backfills.register(plan, "another")
    assert backfills.finished("orders", "one", "fragile") == {None}
    backfills.delete(backfills.register(plan, "one"))
    assert backfills.finished("orders", "one", "fragile") == set()


def test_a_window_of_a_deleted_backfill_cannot_be_replayed(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 5)
    plan = everything(backfills, "fragile")
    (run,) = plan.runs
    backfills.delete(backfills.register(plan, "one"))
    # Another consumer's window of that id and range was replayed.
    other = everything(backfills, "ranges")
    backfills.register(other, "one")
    assert replay(bench, location.ranges_backfill, run.key("one")).success
    refused = replay(bench, location.fragile_backfill, run.key("one"))
    assert not refused.success
    assert "no longer has window" in failure(refused)
    assert bench.effects() == [event.id for event in bench.platform.reader.read("orders")]


def test_registering_refuses_a_plan_for_a_topic_that_was_created_anew(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 10)
    plan = everything(backfills)
    bench.platform.registry.unregister_topic("orders", force=True)
    location.ledger.register(bench.platform)
    bench.publish("orders", 10)
    assert everything(backfills).events == plan.events
    with pytest.raises(RegistryError, match="created again meanwhile: make the plan again"):
        backfills.register(plan, "late")
    assert backfills.registered() == []


def test_an_event_that_keeps_failing_becomes_a_dead_letter(bench: Workbench, backfills: Backfills) -> None:
    bench.platform.registry.register_topic(Topic("orders_dlt"))
    ids = bench.publish("orders", 12)
    poison = publish_poison(bench)
    ids += bench.publish("orders", 3)
    plan = everything(backfills, "fragile")
    backfill = backfills.register(plan, "one")
    replay_all(bench, location.fragile_backfill, plan, backfill)
    assert bench.effects() == ids
    bench.platform.transfer.run_once()
    assert bench.platform.dead_letters.list("orders") == [], "letters of backfills are listed separately"
    (letter,) = bench.platform.dead_letters.list("orders", LetterFilter(backfill="one"))
    assert letter.origin is not None
    assert str(poison) in letter.origin


def test_letters_of_a_backfill_are_redriven_only_on_request(bench: Workbench, backfills: Backfills) -> None:
    letters, end = bench.platform.dead_letters, bench.platform.reader.end
    bench.platform.registry.register_topic(Topic("orders_dlt"))
    bench.platform.registry.register_consumer(location.fragile.consumer, max_attempts=1)
    poison = publish_poison(bench)
    assert bench.run(location.fragile).success, "the live consumer gives it up too"
    plan = everything(backfills, "fragile")
    replay_all(bench, location.fragile_backfill, plan, backfills.register(plan, "one"))
    bench.platform.transfer.run_once()

    assert letters.of_backfills("orders") == {"one": 1}
    assert letters.redrive("orders") == 1
    bench.platform.transfer.run_once()
    (redriven,) = bench.platform.reader.read("orders", after=poison)
    assert redriven.metadata["redriven_consumer"] == "fragile"
    assert letters.plan_redrive("orders", again=True).letters == 1

    assert letters.redrive("orders", LetterFilter(backfill="another")) == 0
    assert letters.redrive("orders", LetterFilter(backfill="one")) == 1
    bench.platform.transfer.run_once()
    (again,) = bench.platform.reader.read("orders", after=redriven.id)
    assert BACKFILL not in again.metadata
    assert (end("orders"), letters.of_backfills("orders")) == (again.id, {})


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_backfill_stops_after_a_number_of_failures_and_goes_on_when_it_is_resumed(
    bench: Workbench, backfills: Backfills, attempts: int
) -> None:
    bench.platform.registry.register_topic(Topic("orders_dlt"))
    bench.platform.registry.register_consumer(location.fragile.consumer, max_attempts=attempts)
    ids = bench.publish("orders", 3)
    poison = [publish_poison(bench) for _ in range(3)]
    ids += bench.publish("orders", 2)
    key = begin(backfills, "fragile")

    def given_up() -> list[str | None]:
        bench.platform.transfer.run_once()
        return [letter.origin for letter in bench.platform.dead_letters.list("orders", LetterFilter(backfill="one"))]

    origins = [f"orders:{bench.platform.reader.read('orders', after=each - 1)[0].partition}:{each}" for each in poison]
    stopped = failure(replay(bench, location.fragile_backfill, key, max_failures=2))
    assert f"event {poison[0]} (ValueError: it is poison)" in stopped
    assert "--resume one" in stopped
    assert given_up() == origins[:2]
    assert bench.effects() == ids[:3]
    # A run that is started once more has no failures of its own.
    failure(replay(bench, location.fragile_backfill, key, max_failures=2))
    assert given_up() == origins[:2]

    backfills.renew(backfills.get("orders", "one"))
    assert replay(bench, location.fragile_backfill, key, max_failures=2).success
    assert given_up() == origins
    assert bench.effects() == ids


def publish_poison(bench: Workbench) -> int:
    bench.platform.publisher.publish(Publication("orders", location.POISON))
    bench.platform.transfer.run_once()
    return bench.platform.reader.end("orders")


def test_an_event_that_blocks_its_window_fails_the_run_and_resuming_gives_it_new_attempts(
    bench: Workbench, backfills: Backfills
) -> None:
    ids = bench.publish("orders", 12)
    poison = publish_poison(bench)
    more = bench.publish("orders", 3)
    key = begin(backfills, "fragile")
    for _ in range(2):
        blocked = replay(bench, location.fragile_backfill, key)
        assert f"event {poison} failed as often" in failure(blocked)
        assert "--resume one" in failure(blocked)
    assert bench.effects() == ids

    backfills.renew(backfills.get("orders", "one"))
    with bench.platform.database.connection() as connection:
        change_value(connection, "orders", poison, b"mended")
    assert replay(bench, location.fragile_backfill, key).success
    assert bench.effects() == [*ids, poison, *more]


@pytest.mark.nightly
def test_a_run_leaves_a_leased_window_alone_and_takes_it_after_the_lease(
    bench: Workbench, backfills: Backfills
) -> None:
    ids = bench.publish("orders", 5)
    plan = everything(backfills, "fragile")
    backfill = backfills.register(plan, "one")
    key, (name,) = plan.runs[0].key("one"), backfill.names
    claim = bench.platform.claims.claim("orders", name, owner="run elsewhere", lease=6.0)
    with bench.platform.claims.heartbeat(claim, lease=6.0):  # type: ignore[arg-type]
        assert "run elsewhere replays this window now" in failure(replay(bench, location.fragile_backfill, key))
    assert replay(bench, location.fragile_backfill, key).success, "its lease ends"
    assert bench.effects() == ids


def test_a_run_that_another_run_overtakes_before_its_claim_replays_nothing_behind_its_window(
    bench: Workbench, backfills: Backfills, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bench.publish("orders", 6)
    plan = everything(backfills, "fragile", window_events=3)
    backfill = backfills.register(plan, "one")

    def overtaken(self: Backfills, topic: str, part: Replayed, limit: int) -> int:
        found = left(self, topic, part, limit)
        monkeypatch.undo()
        assert bench.platform.consumers.consume_once(topic, part.name, record, max_events=2) == 2
        return found

    left = Backfills.left
    monkeypatch.setattr(Backfills, "left", overtaken)
    replay_all(bench, location.fragile_backfill, plan, backfill)
    assert bench.effects() == ids


def test_a_run_does_not_wait_for_the_lease_of_an_ended_run(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 5)
    plan = everything(backfills, "fragile")
    (name,) = backfills.register(plan, "one").names
    ended = bench.instance.create_run_for_job(
        job_of(bench, location.fragile_backfill), status=dg.DagsterRunStatus.FAILURE
    )
    bench.platform.claims.claim("orders", name, owner=f"run {ended.run_id}", lease=3_600.0)
    assert replay(bench, location.fragile_backfill, plan.runs[0].key("one")).success
    assert bench.effects() == ids


def test_a_run_that_is_resumed_does_not_wait_for_its_own_lease(
    bench: Workbench, backfills: Backfills, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bench.publish("orders", 5)
    plan = everything(backfills, "fragile")
    (name,) = backfills.register(plan, "one").names
    run_id = str(uuid4())
    bench.platform.claims.claim("orders", name, owner=f"run {run_id}", lease=3_600.0)

    def waits(_replay: object, reason: str) -> None:
        raise AssertionError(reason)

    monkeypatch.setattr(replay_module.WindowReplay, "_wait", waits)
    assert replay(bench, location.fragile_backfill, plan.runs[0].key("one"), run_id=run_id).success
    assert bench.effects() == ids


@pytest.mark.parametrize("resumed", [True, False])
def test_a_run_waits_for_a_transaction_that_lingers_although_its_run_has_ended(
    bench: Workbench, backfills: Backfills, monkeypatch: pytest.MonkeyPatch, *, resumed: bool
) -> None:
    """The machine of the run, or of the earlier process of a run that is resumed, is gone."""
    monkeypatch.setattr(claims_module, "LOCK_TIMEOUT", 0.1)
    ids = bench.publish("orders", 5)
    plan = everything(backfills, "fragile")
    (name,) = backfills.register(plan, "one").names
    job = job_of(bench, location.fragile_backfill)
    ended = bench.instance.create_run_for_job(job, status=dg.DagsterRunStatus.FAILURE).run_id
    run_id = str(uuid4())
    bench.platform.claims.claim("orders", name, owner=f"run {run_id if resumed else ended}", lease=3_600.0)

    def waits(_replay: object, _reason: str) -> None:
        lingering.close()
        sql(bench.platform, "UPDATE eventsql.consumer SET eql_lease_expires_at = now() WHERE eql_name = %s", name)

    monkeypatch.setattr(replay_module.WindowReplay, "_wait", waits)
    with ExitStack() as lingering:
        transaction = lingering.enter_context(bench.platform.database.transaction())
        transaction.execute("SELECT 1 FROM eventsql.consumer WHERE eql_name = %s FOR UPDATE", [name])
        assert replay(bench, location.fragile_backfill, plan.runs[0].key("one"), run_id=run_id).success
    assert bench.effects() == ids


def test_a_run_does_not_take_a_window_back_from_the_run_that_has_just_claimed_it(
    bench: Workbench, backfills: Backfills, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.publish("orders", 5)
    plan = everything(backfills, "fragile")
    (name,) = backfills.register(plan, "one").names
    claims = bench.platform.claims
    ended = claims.claim("orders", name, owner="run that has ended", lease=3_600.0)
    assert isinstance(ended, Claim)

    def has_ended(owner: str) -> bool:
        # The owner that the look at the window has found. Another run is faster.
        assert owner == "run that has ended"
        claims.release(ended)
        claims.claim("orders", name, owner="faster run", lease=3_600.0)
        return True

    def consume(_claim: Claim) -> BatchResult:
        raise AssertionError("it claims nothing")

    class LookedAgainError(Exception):
        pass

    def looked_again(_reason: str) -> None:
        raise LookedAgainError

    replay = replay_module.WindowReplay(
        bench.platform.shards[0], "orders", "fragile", consume, RunLimits(), "one", plan.runs[0].window,
        plan.runs[0].partition, "slower run", logging.getLogger(),
    )  # fmt: skip
    monkeypatch.setattr(replay, "_wait", looked_again)
    with pytest.raises(LookedAgainError):
        replay.run(has_ended)
    live = claims.live("orders", name)
    assert live is not None
    assert live.owner == "faster run"


# What a finished backfill leaves


def test_a_side_consumer_is_left_at_the_end_of_the_range(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 20)
    plan = backfills.plan("orders", "ledger", ReplayRange(Earliest(), AtOffset(ids[14]), window_events=10))
    backfill = backfills.register(plan, "one", into="ledger_2")
    assert backfill.into == "ledger_2"
    replay_all(bench, location.ledger_backfill, plan, backfill)
    states = bench.platform.registry.consumer("orders", "ledger_2")
    assert [(state.partition, state.last_event_id) for state in states] == [(0, ids[14]), (1, ids[14])]
    with pytest.raises(RegistryError, match="name a new consumer"):
        backfills.register(everything(backfills), "two", into="ledger_2")


def test_a_side_consumer_also_has_the_partitions_without_events(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 10, partition=1)
    plan = everything(backfills, window_events=5)
    backfill = backfills.register(plan, "one", into="ledger_2")
    assert backfills.runs_of(backfill) == plan.runs, "nothing runs for the others"
    replay_all(bench, location.ledger_backfill, plan, backfill)
    states = bench.platform.registry.consumer("orders", "ledger_2")
    assert [(state.partition, state.last_event_id) for state in states] == [(0, ids[-1]), (1, ids[-1])]

    one = backfills.plan("orders", "ledger", ReplayRange(Earliest(), partition=1))
    replay_all(bench, location.ledger_backfill, one, backfills.register(one, "two", into="ledger_3"))
    assert [state.partition for state in bench.platform.registry.consumer("orders", "ledger_3")] == [1]


@pytest.mark.parametrize("partitions", [1, 5])
def test_a_range_is_cut_where_the_topic_was_repartitioned(
    bench: Workbench, backfills: Backfills, partitions: int
) -> None:
    ids = bench.publish("orders", 30)
    changed = bench.platform.repartitioner.repartition("orders", partitions)
    assert changed is not None
    ids += bench.publish("orders", 30)
    while bench.platform.consumers.consume_once("orders", "ledger", lambda _events, _connection: None):
        pass
    plan = everything(backfills)
    assert [window.upto for window in plan.logs[0].windows] == [changed.after, ids[-1]]
    assert sum(run.events for run in plan.runs) == 60
    replay_all(bench, location.ledger_backfill, plan, backfills.register(plan, "one", into="ledger_2"))
    assert sorted(bench.effects()) == ids
    states = bench.platform.registry.consumer("orders", "ledger_2")
    assert [(state.partition, state.until) for state in states] == [(number, None) for number in range(partitions)]
    before = backfills.plan("orders", "ledger", ReplayRange(Earliest(), AtOffset(ids[29])))
    assert before.logs[0].partitions == (0, 1)
    assert sum(run.events for run in before.runs) == 30
    one = backfills.plan("orders", "ledger", ReplayRange(Earliest(), AtOffset(ids[29]), partition=1))
    with pytest.raises(ValidationError, match="was repartitioned"):
        backfills.register(one, "two", into="ledger_3")
    backfills.register(one, "two")


def test_a_side_consumer_of_one_partition_keeps_it_when_the_topic_is_repartitioned(
    bench: Workbench, backfills: Backfills
) -> None:
    bench.publish("orders", 30)
    plan = backfills.plan("orders", "ledger", ReplayRange(Earliest(), partition=1))
    backfill = backfills.register(plan, "one", into="ledger_2")
    assert bench.platform.repartitioner.repartition("orders", 5) is not None
    replay_all(bench, location.ledger_backfill, plan, backfill)
    assert [state.partition for state in bench.platform.registry.consumer("orders", "ledger_2")] == [1]


def test_a_side_consumer_named_like_a_window_is_refused(bench: Workbench, backfills: Backfills) -> None:
    bench.publish("orders", 5)
    with pytest.raises(ValidationError, match="window of a backfill"):
        backfills.register(everything(backfills), "one", into=f"next{MARK}two_1_2")
    assert backfills.registered() == []


@pytest.mark.parametrize("anew", [False, True])
def test_registering_refuses_a_plan_for_a_consumer_that_was_deleted_or_changed(
    bench: Workbench, backfills: Backfills, anew: bool
) -> None:
    bench.publish("orders", 5)
    plan = everything(backfills)
    bench.platform.registry.unregister_consumer("orders", "ledger")
    if anew:
        bench.platform.registry.register_consumer(Consumer("orders", "ledger", partitioned=False))
    with pytest.raises(RegistryError, match="make the plan again"):
        backfills.register(plan, "one")


def test_a_take_over_moves_all_partitions_or_none(bench: Workbench, backfills: Backfills) -> None:
    for partition in (0, 1):
        bench.publish("orders", 5, partition=partition)
    backfill = backfills.register(everything(backfills), "one")
    bench.platform.claims.claim("orders", "ledger", 1, owner="somebody")
    with pytest.raises(PartitionLeasedError):
        list(backfills.take_over(backfill))
    assert [bench.offset(location.ledger, partition) for partition in (0, 1)] == [0, 0]


def test_a_take_over_of_one_partition_leaves_the_others_where_they_are(bench: Workbench, backfills: Backfills) -> None:
    ids = [bench.publish("orders", 5, partition=partition)[-1] for partition in (1, 0)]
    list(backfills.take_over(backfills.register(everything(backfills, partition=0), "one")))
    assert [bench.offset(location.ledger, partition) for partition in (0, 1)] == [ids[-1], 0]


def test_a_take_over_skips_no_event_of_a_partition_whose_first_event_is_in_the_range(
    bench: Workbench, backfills: Backfills
) -> None:
    last = bench.publish("orders", 5, partition=0)[-1]
    bench.platform.consumers.consume_once("orders", "ledger", lambda _events, _connection: None, partition=0)
    end = bench.publish("orders", 5, partition=1)[-1]
    plan = backfills.plan("orders", "ledger", ReplayRange(AtOffset(last + 1)))
    assert plan.events == 5
    list(backfills.take_over(backfills.register(plan, "one")))
    assert bench.offset(location.ledger, 1) == end


def test_a_take_over_does_not_move_a_consumer_back(
    bench: Workbench, backfills: Backfills, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.publish("orders", 5)
    backfill = backfills.register(everything(backfills, "fragile"), "one")
    beyond = bench.publish("orders", 5)[-1]
    (shard,) = bench.platform.shards
    seeker, seek = shard.seeker, shard.seeker.execute

    def consume_first(*arguments: Any, **options: Any) -> Any:
        bench.platform.consumers.consume_once("orders", "fragile", lambda _events, _connection: None)
        return seek(*arguments, **options)

    monkeypatch.setattr(seeker, "execute", consume_first)
    assert list(backfills.take_over(backfill)) == []
    assert bench.offset(location.fragile) == beyond


def test_a_backfill_that_takes_over_moves_the_offset_and_nothing_is_consumed_twice(
    bench: Workbench, backfills: Backfills
) -> None:
    ids = bench.publish("orders", 20)
    plan = backfills.plan("orders", "fragile", ReplayRange(Earliest(), AtOffset(ids[14])))
    backfill = backfills.register(plan, "one")
    (move,) = backfills.take_over(backfill)
    assert (move.target, move.skipped) == (ids[14], 15)
    assert list(backfills.take_over(backfill)) == []
    assert bench.run(location.fragile).success
    replay_all(bench, location.fragile_backfill, plan, backfill)
    assert sorted(bench.effects()) == ids


def test_a_take_over_refuses_to_skip_events_or_to_move_a_leased_partition(
    bench: Workbench, backfills: Backfills
) -> None:
    ids = bench.publish("orders", 20)
    late = backfills.plan("orders", "fragile", ReplayRange(AtOffset(ids[5])))
    with pytest.raises(RegistryError, match="would be skipped"):
        list(backfills.take_over(backfills.register(late, "late")))
    bench.platform.claims.claim("orders", "fragile", owner="somebody")
    with pytest.raises(PartitionLeasedError):
        list(backfills.take_over(backfills.register(everything(backfills, "fragile"), "all")))
    assert bench.offset(location.fragile) == 0


def test_the_plan_job_makes_windows_that_the_ui_can_materialize(bench: Workbench, backfills: Backfills) -> None:
    ids = bench.publish("orders", 20)
    definition = location.fragile_backfill
    result = job_of(bench, definition, definition.plan_job.name).execute_in_process(
        instance=bench.instance,
        run_config={
            "ops": {
                f"{definition.plan_job.name}_windows": {
                    "config": {"start": str(ids[0]), "end": "latest", "window_events": 10}
                }
            }
        },
    )
    assert result.success
    assert definition.partitions.name is not None
    keys = bench.instance.get_dynamic_partitions(definition.partitions.name)
    assert len(keys) == 2
    for key in keys:
        assert replay(bench, definition, key).success
    assert bench.effects() == ids


# A killed process


Process = Callable[..., AbstractContextManager[subprocess.Popen[bytes]]]


@pytest.fixture
def process(bench: Workbench, shared_instance: dg.DagsterInstance) -> Process:
    """The run of a partition key in a process of its own."""

    def start(key: str, *, delay: float) -> AbstractContextManager[subprocess.Popen[bytes]]:
        shared_instance.add_dynamic_partitions("ledger_backfill", [key])
        return run_process(
            shared_instance.root_directory, bench.eventsql.dsn, "backfill_location", "backfill_ledger",
            tags={"dagster/partition": key}, delay=delay,
        )  # fmt: skip

    return start


def test_the_next_run_replays_the_rest_of_a_killed_run_and_nothing_twice(
    bench: Workbench, backfills: Backfills, process: Process
) -> None:
    ids = bench.publish("orders", 60, partition=0)
    key = begin(backfills)
    with process(key, delay=2.0):
        wait_until(lambda: len(bench.effects()) >= 2 * location.BATCH, "two batches")
    reached = len(bench.effects())
    assert reached < len(ids)
    assert replay(bench, location.ledger_backfill, key).success
    assert bench.effects() == ids
    assert backfills.registered() == []


@pytest.mark.nightly
def test_an_interrupted_run_gives_its_window_back_at_once(
    bench: Workbench, backfills: Backfills, process: Process
) -> None:
    bench.publish("orders", 60, partition=0)
    key = begin(backfills)
    with process(key, delay=2.0) as interrupted:
        wait_until(lambda: len(bench.effects()) >= location.BATCH, "a batch")
        interrupted.send_signal(signal.SIGINT)
        interrupted.wait(60)
    (part,) = backfills.get("orders", "one").parts
    assert (part.owner, part.done) == (None, False)


def test_two_runs_of_one_window_at_once_replay_it_once(
    bench: Workbench, backfills: Backfills, process: Process
) -> None:
    ids = bench.publish("orders", 60, partition=0)
    key = begin(backfills)
    # Two runs that begin in threads of one process may wait for ever for each other's locks of `logging`.
    with process(key, delay=0.2) as one, process(key, delay=0.2) as other:
        codes = [each.wait(120) for each in (one, other)]
    assert 0 in codes
    assert bench.effects() == ids
