"""`eventsql dev` in its parts: what ends it, and that simulations do not overlap."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import dagster as dg
import pytest
from rich.console import Console
from rich.progress import Progress

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import dev
from eventsql_orchestration.dagster.local.dagster_process import LocalDagster
from eventsql_orchestration.dagster.local.instance import instance_directory
from eventsql_orchestration.dagster.local.round_report import TopicRound
from eventsql_orchestration.signals import handling
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE, spark_config


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_service_manager_or_a_closed_terminal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), handling(dev._interrupt, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_under_nohup_it_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(dev._interrupt, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_spark_reads_the_settings_for_short_sessions_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance_directory(tmp_path).mkdir()
    monkeypatch.setenv(SPARK_CONFIG_VARIABLE, str(dev._spark_settings(tmp_path)))
    assert dev.SPARK_SETTINGS.items() <= spark_config().items()


@dg.op
def simulate() -> None: ...


@dg.job
def simulation() -> None:
    simulate()


class Launching:
    """Launches runs that nothing executes."""

    url = "http://127.0.0.1"

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.launched: list[str] = []

    def require_running(self) -> None: ...

    def launch(self, _job: str, **_: object) -> str:
        run = self.instance.create_run_for_job(simulation, status=dg.DagsterRunStatus.STARTED)
        self.launched.append(run.run_id)
        return run.run_id


def test_a_simulation_starts_after_the_previous_one_has_ended(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def a_second_passes(_seconds: float) -> None:
        seen.append(len(dagster.launched))
        if len(seen) == 3:
            instance.report_run_canceled(next(iter(instance.get_runs())))
        if len(seen) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(dev, "SIMULATION_SECONDS", 0.0)
    # The clock of this module alone: other threads of this process sleep too.
    monkeypatch.setattr(dev, "time", SimpleNamespace(monotonic=time.monotonic, sleep=a_second_passes))
    with dg.DagsterInstance.ephemeral() as instance, pytest.raises(KeyboardInterrupt):
        dagster = Launching(instance)
        dev._Running(platform, cast("LocalDagster", dagster), instance, Progress(), {}).serve(Console(quiet=True))
    assert seen == [1, 1, 1, 2, 2]


def test_the_summary_shows_a_topic_of_dead_letters_only_when_it_has_some(capsys: pytest.CaptureFixture[str]) -> None:
    def entry(topic: str, *, published: int = 0, consumers: int = 0, faults: tuple[str, ...] = ()) -> TopicRound:
        return TopicRound(topic, published, published, published * consumers, consumers, 0, 0, faults)

    dev._show([entry("quiet", consumers=1), entry("quiet_dlt"), entry("rides_dlt", published=1, faults=("1 letter",))])
    shown = capsys.readouterr().out
    assert "quiet_dlt" not in shown
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["quiet", "rides_dlt"]
