"""Runs whose process stands still for longer than its lease, with Dagster's run retries on: nothing is lost or doubled.

A process is stopped (SIGSTOP) in one window of its run. A tick, or a monitor of processes, reports to Dagster that the
process is dead, and Dagster launches a retry. The process wakes (SIGCONT) and writes its own end over that report
before the retry begins.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import psutil
import pytest

from eventsql_orchestration.dagster import write_instance
from eventsql_orchestration.dagster.consumers.reexecution import RETRY_NUMBER_TAG
from eventsql_orchestration.dagster.launcher.worker import Worker
from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, CONSUMER_TAG, REPLAY_TAG, SHARED_TAG
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import ReplayRange
from eventsql_orchestration.orchestration.owners import owner_of_run
from eventsql_orchestration.topics.positions import Earliest
from tests.dagster import windows
from tests.dagster.conftest import Workbench, sql
from tests.dagster.pausing_consumers import CONSUMERS, ORDERS, STEADY, replayed, replayed_backfill
from tests.dagster.processes import Machine
from tests.dagster.stopping import held, stopped
from tests.waiting import ended, wait_until

SLOW = 900.0
"""Seconds that a busy machine may take for a step of many processes at once."""

BY_TICKS = [
    windows.BEFORE_ADOPTION, windows.BETWEEN_BATCHES, windows.AFTER_NEXT_CLAIM, windows.IN_RANGE, windows.SHARED,
    windows.HANDED_OVER,
]  # fmt: skip
"""Windows in which a tick finds that the run's lease has ended, and reports it as failed."""

BY_OTHERS = [
    windows.AFTER_ADOPTION, windows.IN_HANDLER, windows.BEFORE_NEXT_CLAIM, windows.AFTER_LAST_COMMIT, windows.REPLAYED,
]  # fmt: skip
"""Windows in which a launcher, Dagster's monitoring or a person reports it as failed."""

SAMPLE = [windows.BETWEEN_BATCHES, windows.AFTER_LAST_COMMIT]
"""A window of each kind: all windows together take many minutes."""

ENDS_WELL = {windows.BEFORE_NEXT_CLAIM, windows.AFTER_LAST_COMMIT, windows.REPLAYED}
"""Windows in which a run has no claim to lose, or may find its work done."""

ENDS_EITHER_WAY = {windows.IN_HANDLER}
"""The window in which a run holds the lock of its partition. A tick can release the claim only between two batches."""


@pytest.fixture
def home(tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STORAGE_VARIABLE, "of another instance")
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    return write_instance(tmp_path, dsn, max_concurrent_runs=24)


@dataclass
class Paused:
    """The runs that stand in their windows, by process."""

    bench: Workbench
    holding: dict[str, ExitStack] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)

    def hold(self, point: str) -> None:
        self.holding[point] = ExitStack()
        self.holding[point].enter_context(held(self.bench.platform, point))

    def release(self, point: str) -> None:
        self.holding.pop(point).close()

    def stop(self, window: str) -> None:
        """Stop the process that comes to a window; others pass."""
        wait_until(lambda: stopped(self.bench.platform, window) is not None, f"a run {window}", seconds=SLOW)
        pid = stopped(self.bench.platform, window)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        self.processes[window] = pid
        self.stopped[window] = next(run.run_id for run in self.runs(window) if _forked(run, pid))
        self.release(window)

    def wake(self, window: str) -> None:
        """Let it go on, and wait for its end."""
        process = psutil.Process(self.processes[window])
        process.resume()
        wait_until(lambda: ended(process), f"the end of the run that was paused {window}", seconds=SLOW)

    def run(self, window: str) -> dg.DagsterRun:
        """The run that was paused."""
        return next(run for run in self.runs(window) if run.run_id == self.stopped[window])

    def has_claim(self, window: str) -> bool:
        """Whether the run that was paused still has a claim. A tick takes it back some time after the verdict."""
        owner = owner_of_run(self.stopped[window])
        claimed = "SELECT FROM eventsql.consumer_claim WHERE eql_owner = %s AND eql_state = 'claimed'"
        return bool(sql(self.bench.platform, claimed, owner))

    def runs(self, window: str) -> Sequence[dg.DagsterRun]:
        """All runs of a window's consumer, the latest first."""
        tags = {
            windows.REPLAYED: {BACKFILL_OF_TAG: f"orders/{window}"},
            # A shared run has the name of the consumer that a tick claimed for, which is either of the two.
            windows.SHARED: {SHARED_TAG: "true"},
        }.get(window, {CONSUMER_TAG: window})
        return self.bench.instance.get_runs(dg.RunsFilter(tags=tags))


def _forked(run: dg.DagsterRun, pid: int) -> bool:
    """Whether the launcher forked a process for a run."""
    worker = Worker.of(run.run_id, run.tags)
    return worker is not None and worker.pid == pid


@pytest.fixture
def paused(bench: Workbench, home: Path) -> Iterator[Paused]:
    bench.platform.registry.register_topic(ORDERS).register_topic(STEADY)
    sql(bench.platform, windows.EFFECTS)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        bench.instance = instance
        found = Paused(bench)
        yield found
        for each in found.holding.values():
            each.close()


def register(paused: Paused, chosen: Sequence[str]) -> None:
    """Register the consumers of some windows, and hold their runs there."""
    for window in chosen:
        paused.hold(window)
        if window == windows.REPLAYED:
            replayed.register(paused.bench.platform)
            continue
        paused.hold(windows.retry_of(window))
        CONSUMERS[window].register(paused.bench.platform)
        if window == windows.SHARED:
            CONSUMERS[windows.SHARING].register(paused.bench.platform)


def begin_backfill(bench: Workbench) -> None:
    backfills = Backfills(bench.platform.shards)
    plan = backfills.plan("orders", windows.REPLAYED, ReplayRange(Earliest()))
    backfills.register(plan, "b")
    assert replayed_backfill.partitions.name is not None
    bench.instance.add_dynamic_partitions(replayed_backfill.partitions.name, [run.key("b") for run in plan.runs])


def topic_of(window: str) -> str:
    return "steady" if window == windows.HANDED_OVER else "orders"


def hand_over(paused: Paused) -> list[int]:
    """Publish, one event after the other, until the successor of a run has claimed one."""
    ids: list[int] = []

    def claimed() -> bool:
        ids.extend(paused.bench.publish("steady", 1))
        return stopped(paused.bench.platform, windows.HANDED_OVER) is not None

    wait_until(claimed, "a successor that has claimed", seconds=SLOW)
    return ids


def expect(paused: Paused, window: str, ids: Sequence[int]) -> None:
    """Each event took effect once, none is left, and no run says otherwise."""
    consumers = [window, windows.SHARING] if window == windows.SHARED else [window]
    for consumer in consumers:
        wait_until(
            lambda consumer=consumer: len(effects(paused, consumer)) >= len(ids),  # type: ignore[misc]
            f"every effect of {consumer}",
            seconds=SLOW,
        )
    wait_until(
        lambda: all(run.is_finished for run in paused.runs(window)), f"the end of all runs of {window}", seconds=SLOW
    )
    for consumer in consumers:
        assert effects(paused, consumer) == ids, consumer
    if window != windows.REPLAYED:
        lags = [lag for lag in paused.bench.platform.lag(topic_of(window)) if lag.consumer in consumers]
        assert [lag.events for lag in lags] == [0] * len(consumers), window
    if window not in ENDS_EITHER_WAY:
        assert (paused.run(window).status is dg.DagsterRunStatus.SUCCESS) is (window in ENDS_WELL), window
    assert not any(REPLAY_TAG in run.tags for run in paused.runs(window)), window


def effects(paused: Paused, consumer: str) -> list[int]:
    return windows.effects_of(paused.bench.platform, consumer)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(BY_TICKS, id="reported by ticks", marks=pytest.mark.nightly),
        pytest.param(BY_OTHERS, id="reported by others", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_paused_in_any_window_and_retried_loses_nothing_and_doubles_nothing(
    paused: Paused, home: Path, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = paused.bench
    monkeypatch.setenv(windows.CHOSEN, " ".join([*chosen, *([windows.SHARING] if windows.SHARED in chosen else [])]))
    register(paused, chosen)
    ids = {"orders": bench.publish("orders", 4 * windows.BATCH), "steady": bench.publish("steady", windows.BATCH)}
    with Machine(home, location="pausing_location"):
        if windows.REPLAYED in chosen:
            begin_backfill(bench)
        for window in chosen:
            if window != windows.HANDED_OVER:
                paused.stop(window)
        if windows.HANDED_OVER in chosen:
            ids["steady"] += hand_over(paused)
            paused.stop(windows.HANDED_OVER)

        # While the other runs stand still: Dagster's daemon passes over a failure that commits after a later one.
        for window in chosen:
            if window in BY_OTHERS:
                bench.instance.report_run_failed(paused.run(window))
        for window in chosen:
            wait_until(lambda window=window: paused.run(window).is_finished, f"the verdict on {window}", seconds=SLOW)  # type: ignore[misc]
        for window in chosen:
            if window == windows.REPLAYED:
                wait_until(lambda: effects(paused, windows.REPLAYED) == ids["orders"], "the retry's", seconds=SLOW)
                paused.wake(window)
                continue
            point = windows.retry_of(window)
            wait_until(lambda point=point: stopped(bench.platform, point) is not None, point, seconds=SLOW)  # type: ignore[misc]
            assert any(RETRY_NUMBER_TAG in run.tags for run in paused.runs(window))
            if window not in ENDS_WELL | ENDS_EITHER_WAY:
                wait_until(lambda window=window: not paused.has_claim(window), f"the claim of {window}", seconds=SLOW)  # type: ignore[misc]
            paused.wake(window)
            paused.release(point)

        for window in chosen:
            expect(paused, window, ids[topic_of(window)])
