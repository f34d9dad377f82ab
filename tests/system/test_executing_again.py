"""Runs that a person executes again in the UI, as a whole and by selected steps: failed ones, and successful ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from tests.system import operated_location as location
from tests.system.operated_system import System, publish
from tests.waiting import wait_until


def execute_again(system: System, run_id: str, step: str) -> list[str]:
    """Re-execute a run as a whole, then its step by selection; gives how both runs ended."""
    whole = system.execute_again(run_id, "ALL_STEPS")
    wait_until(lambda: system.ended([whole]), "the end of the run")
    selected = system.execute_steps_again(run_id, [step])
    wait_until(lambda: system.ended([selected]), "the end of the run of a step")
    return [system.status(whole), system.status(selected)]


@pytest.mark.nightly
def test_a_failed_run_that_is_re_executed_in_every_way_of_the_ui_charges_once(system: System) -> None:
    def ids() -> list[int]:
        return [event.id for event in system.platform.reader.read(location.CHARGES.name)]

    job = location.charges.job.name
    publish(system.platform, location.CHARGES.name, [b"1", b"2", b"3"])
    wait_until(lambda: system.runs(job, dg.DagsterRunStatus.FAILURE), "a run that fails")
    failed = system.runs(job, dg.DagsterRunStatus.FAILURE)[-1]
    system.card.touch()
    again = [
        system.execute_again(failed, "ALL_STEPS"),
        system.execute_again(failed, "FROM_FAILURE"),
        system.execute_steps_again(failed, ["charges"]),
    ]
    wait_until(lambda: system.ended(again), "the end of the runs")
    wait_until(lambda: len(system.handled("public.charged")) >= 3, "the charges")
    assert system.handled("public.charged") == ids()


@pytest.mark.nightly
def test_a_run_that_succeeded_is_re_executed_in_the_ui_and_only_a_consumer_replays_its_range(system: System) -> None:
    """By hand, with run retries on. A replay takes effect again knowingly; nothing else is doubled."""
    publish(system.platform, location.TIPS.name, [b"1", b"2", b"3"])
    jobs = [location.tips.job.name, location.tip_totals.job.name]
    wait_until(lambda: all(system.runs(job, dg.DagsterRunStatus.SUCCESS) for job in jobs), "the runs")
    consumed, totalled = (system.runs(job, dg.DagsterRunStatus.SUCCESS)[-1] for job in jobs)
    ids = [event.id for event in system.platform.reader.read(location.TIPS.name)]
    assert system.handled("public.tipped") == ids

    assert execute_again(system, consumed, "tips") == ["SUCCESS", "SUCCESS"]
    assert system.handled("public.tipped") == ids * 3
    assert execute_again(system, totalled, "tip_totals") == ["FAILURE", "FAILURE"]
    assert system.read(location.TIP_TOTALS.name) == [b"3"]

    # Dagster does not try a replay that fails again.
    system.spoilt.touch()
    assert execute_again(system, consumed, "tips") == ["FAILURE", "FAILURE"]
    system.spoilt.unlink()
    publish(system.platform, location.TIPS.name, [b"4"])
    later = [event.id for event in system.platform.reader.read(location.TIPS.name, after=ids[-1])]
    wait_until(lambda: system.handled("public.tipped")[len(ids) * 3 :] == later, "the next event")
    wait_until(lambda: system.read(location.TIP_TOTALS.name) == [b"3", b"1"], "its total")

    bonus = system.materialize("bonus")
    wait_until(lambda: system.ended([bonus]), "the bonus")
    assert execute_again(system, bonus, "bonus") == ["SUCCESS", "SUCCESS"]
    assert system.read(location.TIP_TOTALS.name) == [b"3", b"1", b"a bonus"]


@pytest.mark.nightly
def test_the_window_of_a_backfill_that_is_replayed_is_not_replayed_again_by_re_execution(system: System) -> None:
    publish(system.platform, location.TIPS.name, [b"5", b"6"])
    newest = system.platform.reader.read(location.TIPS.name)[-1].id
    wait_until(lambda: newest in system.handled("public.tipped"), "the events")
    before = system.handled("public.tipped")
    command = [
        str(Path(sys.executable).with_name("eventsql")), "backfill", location.TIPS.name, "tips", "--from", str(newest),
        "--window-events", "1", "--id", "june", "--execute", "--dagster-url", system.dagster.url,
    ]  # fmt: skip
    environment = {**os.environ, "EVENTSQL_DSN": system.platform.database.dsn}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=180)
    replayed = [*before, newest]
    assert system.handled("public.tipped") == replayed
    (run,) = system.runs("backfill_tips", dg.DagsterRunStatus.SUCCESS)
    assert execute_again(system, run, "tips_backfill") == ["SUCCESS", "SUCCESS"]
    assert system.handled("public.tipped") == replayed
