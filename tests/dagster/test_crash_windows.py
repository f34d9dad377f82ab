"""A machine and its processes die at every step between a claim and its offset. Each event takes effect once."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import dagster as dg
import pytest

from eventsql_orchestration.dagster.consumers.reexecution import AUTO_RETRY_TAG
from eventsql_orchestration.dagster.launcher.worker import Worker
from tests.dagster import stopping, stopping_consumer
from tests.dagster.conftest import Workbench
from tests.dagster.processes import Machine
from tests.dagster.stopping import held, stopped
from tests.waiting import wait_until

SLOW = 600.0
"""Seconds that a busy machine may take for a step of many processes."""

IN_TICKS = [
    stopping.AFTER_THE_PROBE,
    stopping.AFTER_THE_CLAIM,
    stopping.AFTER_THE_TICK_IS_STORED,
    stopping.AFTER_THE_RUN_IS_CREATED,
]
IN_RUNS = [stopping.AFTER_LAUNCH, stopping.IN_PROCESSING, stopping.AFTER_EFFECTS, stopping.AFTER_THE_OFFSET]


@pytest.fixture
def orders(bench: Workbench, stored: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    stopping_consumer.steps.register(bench.platform)
    bench.instance = stored
    return bench


def await_stop(bench: Workbench, point: str) -> int:
    wait_until(lambda: stopped(bench.platform, point) is not None, f"a process that stands {point}", seconds=SLOW)
    pid = stopped(bench.platform, point)
    assert pid is not None
    return pid


def consumer_runs(bench: Workbench) -> list[dg.DagsterRun]:
    return list(bench.instance.get_runs(dg.RunsFilter(tags={"eventsql/topic": "orders"})))


def all_retried(bench: Workbench) -> bool:
    """Whether all automatic retries that Dagster is to launch have ended."""
    runs = {run.run_id: run for run in consumer_runs(bench)}
    retries = [run.tags.get(AUTO_RETRY_TAG) for run in runs.values() if run.tags.get("dagster/will_retry") == "true"]
    return bool(retries) and all(retry in runs and runs[retry].is_finished for retry in retries)


def die_at_each(bench: Workbench, home: Path, points: list[str]) -> list[int]:
    """Each machine finds the state that the previous machine left, and dies one step later. Gives the ids of events."""
    ids: list[int] = []
    for point in points:
        ids += bench.publish("orders", 10)
        with held(bench.platform, point), Machine(home) as machine:
            pid = await_stop(bench, point)
            assert machine.has(pid)
            machine.die()
        assert bench.effects() == []
    return ids


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_machine_that_dies_at_any_step_of_a_tick_loses_nothing_and_does_nothing_twice(
    orders: Workbench, home: Path
) -> None:
    ids = die_at_each(orders, home, IN_TICKS)
    with Machine(home):
        wait_until(lambda: orders.offset(stopping_consumer.steps) == ids[-1], "the end of the log", seconds=SLOW)
    assert orders.effects() == ids
    # The run whose tick was stored was created and launched by the machines that came after.
    runs = consumer_runs(orders)
    assert len({run.tags["dagster/run_key"] for run in runs}) == len(runs)
    assert {state for _, _, state in orders.claims()} <= {"released", "committed"}
    started = [run for run in runs if run.status in {dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.SUCCESS}]
    assert started
    assert all(Worker.of(run.run_id, run.tags) is not None for run in started), "the launcher forked them"


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(IN_RUNS, id="each", marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
        pytest.param([stopping.AFTER_EFFECTS], id="sample"),
    ],
)
def test_a_run_whose_process_is_killed_at_any_step_loses_nothing_and_does_nothing_twice(
    orders: Workbench, home: Path, points: list[str]
) -> None:
    """Each run finds the state that the previous run left, and is killed one step later.

    The first run is that of a tick whose machine died before it had created the run.
    """
    ids = die_at_each(orders, home, [stopping.AFTER_THE_TICK_IS_STORED])
    with Machine(home), contextlib.ExitStack() as holding:
        holding.enter_context(held(orders.platform, points[0]))
        for point, following in zip(points, [*points[1:], None], strict=True):
            pid = await_stop(orders, point)
            assert orders.effects() == (ids if point == stopping.AFTER_THE_OFFSET else [])
            os.kill(pid, signal.SIGKILL)
            released = holding.pop_all()
            if following is not None:
                holding.enter_context(held(orders.platform, following))
            released.close()
        ids += orders.publish("orders", 10)
        wait_until(lambda: orders.offset(stopping_consumer.steps) == ids[-1], "the end of the log", seconds=SLOW)
        wait_until(lambda: len(consumer_runs(orders)) >= len(points) + 1, "the last run", seconds=SLOW)
        wait_until(lambda: all_retried(orders), "the end of the retries of the runs that failed", seconds=SLOW)
    assert orders.effects() == ids
    # Dagster copies the key to its automatic retries.
    keys = [run.tags["dagster/run_key"] for run in consumer_runs(orders) if run.parent_run_id is None]
    assert len(set(keys)) == len(keys), "the run whose tick was stored was created once"
    # The killed runs that had a claim do not take up slots of the queue.
    dead = [run for run in consumer_runs(orders) if run.status is dg.DagsterRunStatus.FAILURE]
    assert len(dead) >= max(1, len(points) // 2)
    assert all(Worker.of(run.run_id, run.tags) is not None for run in dead), "the launcher forked them"


def timed_out(bench: Workbench) -> int:
    """How many ticks of sensors failed because their code server did not answer in time."""
    ticks = [
        tick
        for state in bench.instance.all_instigator_state()
        for tick in bench.instance.get_ticks(state.instigator_origin_id, state.selector_id)
    ]
    return sum(tick.error is not None and "DEADLINE_EXCEEDED" in str(tick.error) for tick in ticks)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ticks_that_hang_for_longer_than_dagster_waits_lose_nothing_and_do_nothing_twice(
    orders: Workbench, home: Path
) -> None:
    """Dagster gives a tick up after its claim. The tick goes on in the code server while Dagster evaluates the next."""
    point = stopping.AFTER_THE_CLAIM
    ids = orders.publish("orders", 10)
    with Machine(home, DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS="5"):
        with held(orders.platform, point):
            await_stop(orders, point)
            wait_until(lambda: timed_out(orders) >= 2, "two ticks that Dagster gave up", seconds=SLOW)
        ids += orders.publish("orders", 10)
        wait_until(lambda: orders.offset(stopping_consumer.steps) == ids[-1], "the end of the log", seconds=SLOW)
        wait_until(lambda: all(run.is_finished for run in consumer_runs(orders)), "the end of all runs", seconds=SLOW)
    assert orders.effects() == ids


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_daemons_at_once_consume_each_event_once(orders: Workbench, home: Path) -> None:
    ids: list[int] = []
    with Machine(home, name="one"), Machine(home, name="two"):
        for _ in range(2):
            ids.extend(orders.publish("orders", 20))
            wait_until(lambda: len(orders.effects()) >= len(ids), "every effect", seconds=SLOW)
        wait_until(lambda: all(run.is_finished for run in consumer_runs(orders)), "the end of all runs", seconds=SLOW)
    assert sorted(orders.effects()) == ids
    # Dagster copies the key to its automatic retries.
    keys = [run.tags["dagster/run_key"] for run in consumer_runs(orders) if run.parent_run_id is None]
    assert len(set(keys)) == len(keys)
