"""Housekeeping deletes this package's own old history, and no other."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.dagster import (
    EventSQLResource,
    HistoryRetention,
    build_backfill,
    build_definitions,
    build_delivered_check,
    build_housekeeping_schedule,
    consumer_asset,
)
from eventsql_orchestration.dagster.housekeeping import schedule
from eventsql_orchestration.dagster.housekeeping.prune import (
    delete_claims,
    delete_reports,
    delete_runs,
    delete_windows,
    purge_ticks,
)
from eventsql_orchestration.dagster.local.instance import STORAGE_SCHEMA
from eventsql_orchestration.dagster.shards import on_each
from eventsql_orchestration.dagster.tags import (
    BACKFILL_OF_TAG,
    BACKFILL_TAG,
    HOUSEKEEPING_BACKFILL,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_INTERNAL,
    HOUSEKEEPING_TAG,
    INTERNAL_RUN,
)
from eventsql_orchestration.errors import ClaimLostError, ValidationError
from eventsql_orchestration.model import Retention
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import ReplayRange
from eventsql_orchestration.storage import segments
from eventsql_orchestration.topics.positions import Earliest
from tests.dagster.conftest import Workbench, sql
from tests.dagster.location import eager, record

ASSET = dg.AssetKey("ledger")
DAY = 86_400


@dg.op
def nothing() -> None: ...


@dg.op
def fail() -> None:
    raise RuntimeError("no")


@dg.job
def idle() -> None:
    nothing()


@dg.job
def failing() -> None:
    fail()


def execute(instance: dg.DagsterInstance, kind: str | None, job: dg.JobDefinition = idle) -> str:
    tags = {} if kind is None else {HOUSEKEEPING_TAG: kind}
    return job.execute_in_process(instance=instance, tags=tags, raise_on_error=False).run_id


def ids(instance: dg.DagsterInstance) -> set[str]:
    return {run.run_id for run in instance.get_runs()}


def test_finished_runs_of_a_kind_are_deleted_with_their_events(instance: dg.DagsterInstance) -> None:
    own = [execute(instance, HOUSEKEEPING_INTERNAL), execute(instance, HOUSEKEEPING_INTERNAL, failing)]
    others = {execute(instance, HOUSEKEEPING_CONSUMER), execute(instance, None)}
    running = instance.create_run_for_job(
        idle, tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL}, status=dg.DagsterRunStatus.STARTED
    )

    later = datetime.now(UTC) + timedelta(seconds=1)
    assert delete_runs(instance, HOUSEKEEPING_INTERNAL, before=later - timedelta(hours=1)) == 0, "they are young"
    assert delete_runs(instance, HOUSEKEEPING_INTERNAL, before=later, page=1) == 2, "more than a page"
    assert ids(instance) == {*others, running.run_id}
    assert not list(instance.all_logs(own[0]))


def test_logs_that_another_location_deletes_at_the_same_moment_fail_nothing(
    shared_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        execute(shared_instance, HOUSEKEEPING_INTERNAL)
    remove = shutil.rmtree
    removed: list[str] = []

    def remove_second(directory: str) -> None:
        """Dagster has seen that the directory is there. Another location is faster."""
        remove(directory)
        removed.append(directory)
        remove(directory)

    monkeypatch.setattr(shutil, "rmtree", remove_second)
    later = datetime.now(UTC) + timedelta(seconds=1)
    assert delete_runs(shared_instance, HOUSEKEEPING_INTERNAL, before=later) == len(removed) == 2
    assert not ids(shared_instance)


def test_runs_from_before_the_tag_was_renamed_are_deleted(instance: dg.DagsterInstance) -> None:
    idle.execute_in_process(instance=instance, tags={"eventsql/housekeeping": HOUSEKEEPING_CONSUMER})
    kept = execute(instance, HOUSEKEEPING_INTERNAL)
    later = datetime.now(UTC) + timedelta(seconds=1)
    assert delete_runs(instance, HOUSEKEEPING_CONSUMER, before=later) == 1
    assert ids(instance) == {kept}


@pytest.mark.parametrize("hours", [1.0, math.inf])
def test_the_job_keeps_history_by_its_retention(instance: dg.DagsterInstance, dsn: str, hours: float) -> None:
    history = HistoryRetention(**{**{field.name: hours for field in fields(HistoryRetention)}, "internal_hours": 0.0})
    location = build_definitions([], history=history, eventsql=EventSQLResource(dsn=dsn))
    execute(instance, HOUSEKEEPING_INTERNAL)
    kept = {execute(instance, HOUSEKEEPING_CONSUMER), execute(instance, None)}
    result = location.resolve_job_def("housekeeping").execute_in_process(instance=instance)
    assert ids(instance) == {*kept, result.run_id}


def test_each_kind_of_history_is_kept_for_its_own_time(
    instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours: dict[str, int] = {}

    def noting(name: str) -> Callable[..., int]:
        def note(*given: Any, before: datetime) -> int:
            kind = given[1] if name == "delete_runs" else name
            hours[kind] = round((datetime.now(UTC) - before) / timedelta(hours=1))
            return 0

        return note

    for name in ("delete_runs", "delete_reports", "delete_claims", "delete_publications"):
        monkeypatch.setattr(schedule, name, noting(name))
    history = HistoryRetention(
        internal_hours=1, consumer_hours=2, backfill_hours=3, observation_hours=4, claim_hours=5, publication_hours=6
    )
    location = build_definitions([], history=history, eventsql=EventSQLResource(dsn=dsn))
    assert location.resolve_job_def("housekeeping").execute_in_process(instance=instance).success
    assert hours == {
        HOUSEKEEPING_INTERNAL: 1, HOUSEKEEPING_CONSUMER: 2, HOUSEKEEPING_BACKFILL: 3, "delete_reports": 4,
        "delete_claims": 5, "delete_publications": 6,
    }  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(HistoryRetention)])
def test_a_negative_retention_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        HistoryRetention(**{field: -1.0})


def test_the_job_applies_the_retention_of_topics(
    instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    location = dg.Definitions(
        schedules=[build_housekeeping_schedule()], resources={"eventsql": EventSQLResource(dsn=dsn)}
    )
    with EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", retention=Retention(events=5)))
        for _ in range(4):
            platform.publisher.publish_all(Publication("orders", b"") for _ in range(5))
            platform.transfer.run_once()
            assert location.resolve_job_def("housekeeping").execute_in_process(instance=instance).success
        assert platform.reader.count("orders") == 5


def test_claims_that_ended_long_ago_are_deleted_and_live_ones_stay(bench: Workbench) -> None:
    eager.register(bench.platform)
    for _ in range(4):
        bench.publish("rides", 1)
        request = bench.request(eager)
        assert bench.run(eager, request).success
    bench.publish("rides", 1)
    bench.tick(eager.sensors[0])
    sql(
        bench.platform,
        "UPDATE eventsql.consumer_claim SET eql_created_at = now() - interval '31 days', "
        "eql_finished_at = eql_finished_at - interval '31 days' WHERE eql_id <> 2",
    )
    before = datetime.now(UTC) - timedelta(days=30)
    assert delete_claims(bench.platform.shards[0], before=before, batch=2) == 1, (
        "ids grow with time: claims after a young claim are young"
    )
    sql(bench.platform, "UPDATE eventsql.consumer_claim SET eql_created_at = now() - interval '31 days'")
    assert delete_claims(bench.platform.shards[0], before=before, batch=2) == 2
    assert [state for _, _, state in bench.claims()] == ["committed", "claimed"], (
        "one claim ended just now, and one has not ended"
    )
    with pytest.raises(ClaimLostError, match="ended long ago"):
        bench.platform.claims.get(1)


def test_the_windows_of_a_backfill_are_deleted_with_its_last_run(bench: Workbench) -> None:
    backfill = build_backfill(eager)
    name = str(backfill.partitions.name)
    location = dg.Definitions(
        assets=[eager.asset, backfill.asset],
        jobs=[eager.job, *backfill.jobs],
        resources={"eventsql": bench.eventsql},
    )
    eager.register(bench.platform)
    bench.publish("rides", 4)
    configured = {"ops": {"plan_eager_backfill_windows": {"config": {"window_events": 2}}}}
    planning = location.resolve_job_def("plan_eager_backfill")
    assert planning.execute_in_process(instance=bench.instance, run_config=configured).success
    windows = bench.instance.get_dynamic_partitions(name)
    assert len(windows) == 2
    bench.instance.add_dynamic_partitions(name, ["somebody's own", "older:0-2"])
    backfill_id = windows[0].partition(":")[0]

    def keep_house(*, after_days: int = 2) -> dict[str, int]:
        delete_runs(bench.instance, HOUSEKEEPING_BACKFILL, before=datetime.now(UTC) + timedelta(seconds=1))
        registered = on_each(bench.platform.shards, lambda shard: Backfills([shard]).registered())
        now = datetime.now(UTC) + timedelta(days=after_days)
        return delete_windows(registered, bench.instance, [*eager.asset.specs, *backfill.asset.specs], now=now)

    assert keep_house(after_days=0) == {name: 1}, "another backfill is over"
    assert keep_house() == {}, "it is registered"
    bench.instance.add_dynamic_partitions(name, ["older:2-4"])
    replay = location.resolve_job_def("backfill_eager")
    for key in windows:
        assert replay.execute_in_process(instance=bench.instance, partition_key=key).success
    running = bench.instance.create_run_for_job(
        replay,
        tags={BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: "rides/eager"},
        status=dg.DagsterRunStatus.STARTED,
    )
    assert keep_house() == {name: 1}, "a run of it is not over"
    bench.instance.delete_run(running.run_id)

    # Another consumer has a backfill of the same id.
    bench.platform.registry.register_consumer(Consumer("rides", "other"))
    backfills = Backfills(bench.platform.shards)
    backfills.register(backfills.plan("rides", "other", ReplayRange(Earliest())), backfill_id)
    bench.instance.create_run_for_job(
        replay,
        tags={BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: "rides/other"},
        status=dg.DagsterRunStatus.STARTED,
    )
    assert keep_house(after_days=0) == {}, "a run that plans a backfill registers it after its partitions"
    assert keep_house() == {name: 2}
    assert bench.instance.get_dynamic_partitions(name) == ["somebody's own"]


ledger_check = build_delivered_check(consumer_asset(topic=Topic("orders"), consumer="ledger", name="ledger")(record))


def report(instance: dg.DagsterInstance, *, passed: bool = True, own: bool = True) -> None:
    """An observation and the result of a check."""
    instance.report_runless_asset_event(
        dg.AssetObservation(asset_key=ASSET, metadata={"Lag events": 1}, tags=INTERNAL_RUN if own else {})
    )
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=ASSET, check_name="delivered" if own else "theirs", passed=passed)
    )


def counts(platform: EventSQL) -> dict[str, int]:
    """The rows of the tables of Dagster's history."""
    return {table: sql(platform, f"SELECT count(*) FROM {STORAGE_SCHEMA}.{table}")[0][0] for table in TABLES}


def reported(platform: EventSQL) -> tuple[int, int]:
    """The events that are stored, and the results of checks."""
    found = counts(platform)
    return found["event_logs"], found["asset_check_executions"]


def test_old_reports_are_deleted_except_the_newest_and_the_reports_of_others(
    stored: dg.DagsterInstance, platform: EventSQL
) -> None:
    for _ in range(3):
        report(stored, own=False)
    for passed in (True, True, False):
        report(stored, passed=passed)
    assert reported(platform) == (12, 6)

    later = datetime.now(UTC) + timedelta(seconds=1)
    assert delete_reports(stored, [ledger_check.key], before=later - timedelta(hours=1)) == 0
    assert delete_reports(stored, [ledger_check.key], before=later, batch=2) == 4, "in several batches"
    assert reported(platform) == (8, 4)
    assert delete_reports(stored, [ledger_check.key], before=later) == 0

    newest = stored.get_latest_asset_check_evaluation_record(ledger_check.key)
    assert newest is not None
    assert newest.evaluation is not None
    assert not newest.evaluation.passed
    records = stored.fetch_observations(ASSET, limit=100).records
    assert len(records) == 4
    assert records[0].asset_observation is not None
    assert records[0].asset_observation.tags == INTERNAL_RUN


def test_reports_of_others_are_not_deleted_whatever_they_contain(
    stored: dg.DagsterInstance, platform: EventSQL
) -> None:
    tag = f'"{HOUSEKEEPING_TAG}": "{HOUSEKEEPING_INTERNAL}"'
    for _ in range(3):
        stored.report_runless_asset_event(
            dg.AssetObservation(asset_key=ASSET, description=tag, metadata={"json": INTERNAL_RUN, "text": tag})
        )
        stored.report_runless_asset_event(dg.AssetMaterialization(asset_key=ASSET, metadata={"json": INTERNAL_RUN}))
    assert delete_reports(stored, [], before=datetime.now(UTC) + timedelta(seconds=1)) == 0
    stored.report_runless_asset_event(dg.AssetMaterialization(asset_key=ASSET, tags=INTERNAL_RUN))
    stored.report_runless_asset_event(dg.AssetMaterialization(asset_key=ASSET))
    assert delete_reports(stored, [], before=datetime.now(UTC) + timedelta(seconds=1)) == 1
    assert counts(platform)["event_logs"] == 7


def test_reports_from_before_the_tag_was_renamed_are_deleted(stored: dg.DagsterInstance, platform: EventSQL) -> None:
    for _ in range(2):
        former = {"eventsql/housekeeping": HOUSEKEEPING_INTERNAL}
        stored.report_runless_asset_event(dg.AssetMaterialization(asset_key=ASSET, tags=former))
    assert delete_reports(stored, [], before=datetime.now(UTC) + timedelta(seconds=1)) == 1, "the newest stays"
    assert counts(platform)["event_logs"] == 1


def test_the_result_of_a_check_in_a_run_goes_after_its_run_unless_it_is_the_newest(
    stored: dg.DagsterInstance, platform: EventSQL
) -> None:
    @dg.asset(key=ASSET)
    def ledger() -> None: ...

    @dg.asset_check(asset=ASSET, name="delivered")
    def delivered() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    gone, kept, newest = (dg.materialize([ledger, delivered], instance=stored).run_id for _ in range(3))
    stored.delete_run(gone)
    stored.delete_run(newest)

    later = datetime.now(UTC) + timedelta(seconds=1)
    assert delete_reports(stored, [ledger_check.key], before=later - timedelta(hours=1)) == 0
    assert delete_reports(stored, [ledger_check.key], before=later) == 1
    left = sql(platform, f"SELECT run_id FROM {STORAGE_SCHEMA}.asset_check_executions ORDER BY id")
    assert left == [(kept,), (newest,)]


def test_reports_outside_of_postgresql_are_left(shared_instance: dg.DagsterInstance) -> None:
    report(shared_instance)
    assert delete_reports(shared_instance, [ledger_check.key], before=datetime.now(UTC) + timedelta(days=1)) is None


def test_ticks_that_failed_are_kept_longer(stored: dg.DagsterInstance, platform: EventSQL) -> None:
    now = datetime.now(UTC)
    for status in ("SKIPPED", "STARTED", "SUCCESS", "FAILURE"):
        _repeat_tick(platform, count=7, end=now, status=status)
    state = SimpleNamespace(instigator_origin_id="origin", selector_id="selector")

    def left() -> dict[str, int]:
        return dict(sql(platform, f"SELECT status, count(*) FROM {STORAGE_SCHEMA}.job_ticks GROUP BY 1"))

    purge_ticks(stored, [state], before=now, failures_before=now - timedelta(days=4))
    # There was one a day.
    assert left().keys() == {"FAILURE"}
    assert 3 <= left()["FAILURE"] <= 4


def test_a_job_outside_of_a_location_logs_that_it_purges_no_ticks(instance: dg.DagsterInstance, dsn: str) -> None:
    job = build_housekeeping_schedule().job
    assert isinstance(job, dg.JobDefinition)
    result = job.execute_in_process(instance=instance, resources={"eventsql": EventSQLResource(dsn=dsn)})
    assert result.success
    messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert any("no ticks are deleted" in message for message in messages)


TABLES = ("event_logs", "asset_check_executions", "asset_event_tags", "runs", "run_tags", "job_ticks")
"""Where Dagster's history is."""

TICK = {
    "__class__": "TickData", "auto_materialize_evaluation_id": None, "consecutive_failure_count": 0, "cursor": None,
    "dynamic_partitions_request_results": [], "end_timestamp": 1795251319.2394009, "error": None, "failure_count": 0,
    "job_name": "consume_ledger_1", "job_origin_id": "origin", "job_type": {"__enum__": "InstigatorType.SENSOR"},
    "log_key": ["__repository__", "consume_ledger_1", "1"], "origin_run_ids": [], "reserved_run_ids": [],
    "run_ids": [], "run_keys": [], "run_requests": [], "selector_id": "selector",
    "skip_reason": "no events wait after offset 1234567", "status": {"__enum__": "TickStatus.SKIPPED"},
    "timestamp": 1795251318.513728, "user_interrupted": False,
}  # fmt: skip
"""A tick of a sensor as Dagster stores it: there is no public way to make one."""

PER_HOUR = int(os.environ.get("EVENTSQL_TEST_RUNS_PER_HOUR", "1"))
"""Runs of the transfer in each hour of the simulated week. A real hour has 60; deleting a week of them takes
minutes."""


def test_the_history_of_a_simulated_week_is_bounded(stored: dg.DagsterInstance, platform: EventSQL) -> None:
    """One observed consumer under steady traffic: its lag every 15 s, a result of its check each hour, a tick of its
    sensor every 5 s; runs of the transfer, and as many of the consumer.
    """
    report(stored)
    internal, consuming = execute(stored, HOUSEKEEPING_INTERNAL), execute(stored, HOUSEKEEPING_CONSUMER)
    end, hours = datetime.now(UTC), 7 * 24
    _spread(platform, observations=7 * DAY // 15, evaluations=hours, end=end)
    _repeat_runs(platform, [internal, consuming], count=hours * PER_HOUR, end=end)
    _repeat_tick(platform, count=7 * DAY // 5, end=end)
    before, size = counts(platform), _bytes(platform)
    assert before["job_ticks"] == 7 * DAY // 5
    assert before["runs"] == 2 * (hours * PER_HOUR + 1)

    state = SimpleNamespace(instigator_origin_id="origin", selector_id="selector")
    day = end - timedelta(hours=24)
    delete_runs(stored, HOUSEKEEPING_INTERNAL, before=day)
    delete_runs(stored, HOUSEKEEPING_CONSUMER, before=end - timedelta(hours=hours))
    purge_ticks(stored, [state], before=day, failures_before=day)
    delete_reports(stored, [ledger_check.key], before=end - timedelta(hours=72))
    after = counts(platform)

    def kept(found: int, expected: int, of: int = 4) -> bool:
        return expected - of <= found <= expected + of

    assert kept(after["asset_check_executions"], 3 * 24)
    assert kept(after["job_ticks"], DAY // 5)
    assert kept(after["runs"], (24 + hours) * PER_HOUR)
    events_of_a_run = before["event_logs"] - (7 * DAY // 15 + hours + 2)
    assert events_of_a_run > 0
    assert after["event_logs"] < before["event_logs"] * 0.6
    for table in TABLES:
        sql(platform, f"VACUUM FULL {STORAGE_SCHEMA}.{table}")
    left = _bytes(platform)
    print(json.dumps({"before": before, "bytes": size, "after": after, "bytes left": left}))  # noqa: T201 - figures of docs/dagster_operations.md
    assert sum(left.values()) < sum(size.values()) / 2


_AT = "(%(end)s::timestamptz AT TIME ZONE 'UTC') - make_interval(secs => 7 * 86400.0 * n / %(count)s)"
"""The times of so many rows, evenly over the week before `end`."""


def _spread(platform: EventSQL, *, observations: int, evaluations: int, end: datetime) -> None:
    """Repeat the one observation and the one result that are stored."""
    columns = "run_id, event, dagster_event_type, step_key, asset_key, partition"
    with platform.database.transaction() as connection:
        connection.execute(f"SET LOCAL search_path TO {STORAGE_SCHEMA}")
        connection.execute(
            f"INSERT INTO event_logs ({columns}, timestamp) SELECT {columns}, {_AT} FROM event_logs, "
            "generate_series(%(count)s, 1, -1) n WHERE dagster_event_type = 'ASSET_OBSERVATION'",
            {"end": end, "count": observations},
        )
        connection.execute(
            f"WITH copies AS (INSERT INTO event_logs ({columns}, timestamp) SELECT {columns}, {_AT} FROM event_logs, "
            "generate_series(%(count)s, 1, -1) n WHERE dagster_event_type = 'ASSET_CHECK_EVALUATION' "
            "RETURNING id, timestamp) "
            "INSERT INTO asset_check_executions (asset_key, check_name, run_id, execution_status, evaluation_event, "
            "evaluation_event_timestamp, evaluation_event_storage_id) SELECT x.asset_key, x.check_name, x.run_id, "
            "x.execution_status, x.evaluation_event, c.timestamp, c.id FROM copies c, asset_check_executions x",
            {"end": end, "count": evaluations},
        )


def _repeat_runs(platform: EventSQL, runs: Sequence[str], *, count: int, end: datetime) -> None:
    """Repeat runs with their tags and events."""
    copy = "md5(run_id || n)::uuid::text"
    with platform.database.transaction() as connection:
        connection.execute(f"SET LOCAL search_path TO {STORAGE_SCHEMA}")
        for table, columns, values in (
            ("runs", "snapshot_id, pipeline_name, mode, status, run_body, create_timestamp, update_timestamp",
             f"snapshot_id, pipeline_name, mode, status, replace(run_body, run_id, {copy}), {_AT}, {_AT}"),
            ("run_tags", "key, value", "key, value"),
            ("event_logs", "event, dagster_event_type, step_key, asset_key, partition, timestamp",
             f"replace(event, run_id, {copy}), dagster_event_type, step_key, asset_key, partition, {_AT}"),
        ):  # fmt: skip
            connection.execute(
                f"INSERT INTO {table} (run_id, {columns}) SELECT {copy}, {values} FROM {table}, "
                "generate_series(%(count)s, 1, -1) n WHERE run_id = ANY (%(runs)s)",
                {"end": end, "count": count, "runs": list(runs)},
            )


def _repeat_tick(platform: EventSQL, *, count: int, end: datetime, status: str = "SKIPPED") -> None:
    with platform.database.transaction() as connection:
        connection.execute(f"SET LOCAL search_path TO {STORAGE_SCHEMA}")
        connection.execute(
            "INSERT INTO job_ticks (job_origin_id, selector_id, status, type, timestamp, tick_body) "
            f"SELECT 'origin', 'selector', %(status)s, 'SENSOR', {_AT}, %(body)s "
            "FROM generate_series(%(count)s, 1, -1) n",
            {"end": end, "count": count, "status": status, "body": json.dumps(TICK)},
        )


def _bytes(platform: EventSQL) -> dict[str, int]:
    """The size of Dagster's tables of history, with their indexes."""
    found = sql(
        platform,
        "SELECT relname, pg_total_relation_size(c.oid) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
        "WHERE nspname = %s AND relname = ANY (%s)",
        STORAGE_SCHEMA, list(TABLES),
    )  # fmt: skip
    return dict(found)
