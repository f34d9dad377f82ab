"""`eventsql bench dagster`: a real daemon is measured, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.bench import dagster_daemon, dagster_measurements
from eventsql_orchestration.bench.dagster_daemon import Handled
from eventsql_orchestration.bench.dagster_measurements import Traffic, steady_traffic
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import BenchmarkError
from tests.cli.conftest import Run


@pytest.mark.nightly
def test_a_daemon_is_measured_and_leaves_nothing(platform: EventSQL) -> None:
    reported: list[tuple[str, int, int]] = []

    def report(step: str, done: int, events: int) -> None:
        reported.append((step, done, events))

    with (
        Session(platform, report=report) as session,
        dagster_daemon.daemon(session, "tiny", partitions=2, sensor="consumer", drain=2.0) as running,
    ):
        (first, second) = dagster_measurements.drained(running, 2, 0.1)
        (cold,) = dagster_measurements.cold_starts(running, 1, within=0.0)
        looks = dagster_measurements.ticks_per_minute(running, 1.0)
        # The run that drains would take one of these.
        running.await_quiet()
        rate = dagster_measurements.runs_at_once(running, 2)
    per_second, processor = rate
    assert per_second > 0
    assert processor is None or processor > 0
    assert 0 < min(first, second) < cold
    assert looks >= 0
    assert reported == [("draining", 1, 2), ("draining", 2, 2), ("cold starts", 1, 1)]
    assert platform.registry.topics() == []
    with platform.database.connection() as connection:
        assert not connection.execute("SELECT FROM pg_namespace WHERE nspname LIKE '%_dagster'").fetchall()
    assert not [each for each in psutil.Process().children(recursive=True) if "dagster-daemon" in " ".join(_of(each))]


def _of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def test_a_gap_between_two_runs_is_told_from_the_gaps_within_one() -> None:
    first, last = Handled(10.0, 10.25, process=1), Handled(10.5, 10.75, process=1)
    late, after = Handled(11.0, 12.75, process=2), Handled(14.0, 14.25, process=2)
    found = Traffic([first, last, late, after])
    assert (found.runs, found.hand_overs) == (2, [(last, late)])
    assert Traffic([first, late, last]).runs == 2, "both may have a turn while they overlap"
    assert (found.gaps, found.gaps_within) == ([2.0], [0.5, 1.5])
    assert found.delays == [0.25, 0.25, 1.75, 0.25]
    assert found.delays_around == [0.25, 0.25, 1.75], "the last one was published long after"
    assert (Traffic([first]).runs, Traffic([first]).delays_around) == (1, [])


class Handler:
    """Stands for a daemon whose runs are given what is published, as `deliver` says."""

    def __init__(self, deliver: Callable[[list[float]], list[float]]) -> None:
        self.session = SimpleNamespace(report=lambda *_: None)
        self._deliver = deliver
        self._published: list[float] = []

    def publish(self, partition: int) -> float:
        self._published.append(float(len(self._published)) + partition)
        return self._published[-1]

    def handled(self) -> list[Handled]:
        return [Handled(at, at, process=1) for at in self._deliver(self._published)]

    def await_(self, condition: Callable[[], bool], what: str) -> None:
        assert condition(), what


@pytest.mark.parametrize(
    "deliver",
    [lambda events: [*events[:-2], *events[:-3:-1]], lambda events: [*events, *events[-1:]]],
    ids=["out of order", "twice"],
)
def test_steady_traffic_that_is_not_handled_in_order_and_once_is_no_figure(
    deliver: Callable[[list[float]], list[float]],
) -> None:
    whole: Any = Handler(list)
    assert len(steady_traffic(whole, 0.03, 0.01).events) == 3
    broken: Any = Handler(lambda events: deliver(events) if len(events) > 3 else list(events))
    with pytest.raises(BenchmarkError):
        steady_traffic(broken, 0.03, 0.01)


def test_every_part_is_measured_or_the_chosen_one(
    run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures and their order; only a daemon tells real values."""
    for name, value in (("cold_starts", [1.0, 3.0]), ("drained", [0.02]), ("ticks_per_minute", 60.0)):
        monkeypatch.setattr(dagster_measurements, name, lambda *_, value=value: value)
    monkeypatch.setattr(dagster_measurements, "runs_at_once", lambda *_: (0.5, 1.0))
    monkeypatch.setattr(dagster_measurements, "transfer_at_rest", lambda *_: (0.0, 720.0))
    monkeypatch.setattr(dagster_measurements, "transfer_delays", lambda *_: [0.2])
    monkeypatch.setattr(dagster_daemon, "daemon", lambda *_, **__: contextlib.nullcontext())
    runs = Traffic([Handled(float(n), n + 0.05, process=n // 2) for n in range(4)])
    monkeypatch.setattr(dagster_measurements, "steady_traffic", lambda *_: runs)
    result = run("bench", "dagster", "--quick", "--json")
    assert result.exit_code == 0, result.stderr
    *figures, _ = json.loads(result.stdout)
    assert {figure["name"]: figure["value"] for figure in figures} == {
        "dagster_cold_start": 1_000.0, "dagster_draining": 20.0,
        "dagster_steady": pytest.approx(50.0), "dagster_steady_around_handover": pytest.approx(50.0),
        "dagster_gap_at_handover": pytest.approx(1_000.0), "dagster_transfer_at_rest": 0.0,
        "dagster_transfer": 200.0, "dagster_transferred_and_consumed": pytest.approx(50.0),
        "dagster_ticks_3_sensors": 20.0, "dagster_ticks_1_sensor_3_partitions": 60.0, "dagster_runs": 0.5,
        "dagster_launcher_cost": 1.0,
    }  # fmt: skip
    (only, _) = json.loads(run("bench", "dagster", "--quick", "--json", "--only", "draining").stdout)[:2]
    assert only["name"] == "dagster_draining"
