"""A consuming run whose process is killed or stopped in mid-batch: nothing is lost, nothing takes effect twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from tests.dagster import location
from tests.dagster.conftest import Workbench
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(bench: Workbench, shared_instance: dg.DagsterInstance) -> Workbench:
    bench.instance = shared_instance
    location.slow.register(bench.platform)
    return bench


@contextmanager
def run_process(
    bench: Workbench, request: dg.RunRequest, *, delay: float, module: str = "tests.dagster.location",
    job: str = "consume_slow",
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """The run of a request in a process of its own, which takes `delay` seconds over each batch."""
    home = Path(bench.instance.root_directory)
    config = home / "run_config.yaml"
    config.write_text(json.dumps(request.run_config))
    # fmt: off
    command = [
        sys.executable, "-m", "dagster", "job", "execute", "-m", module, "-j", job,
        "--config", str(config), "--tags", json.dumps(dict(request.tags)),
    ]
    # fmt: on
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "EVENTSQL_DSN": bench.eventsql.dsn,
        "EVENTSQL_TEST_DELAY": str(delay),
    }
    with (home / "run.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    except BaseException:
        sys.stderr.write((home / "run.log").read_text())
        raise
    finally:
        process.kill()
        process.wait(60)


def writes(bench: Workbench) -> bool:
    """Whether another session has written effects that it has not committed."""
    with bench.platform.database.connection() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_locks WHERE relation = 'effect'::regclass AND mode = 'RowExclusiveLock'"
        ).fetchone()
    return row is not None and row[0] > 0


def finish(bench: Workbench, reached: int) -> dg.RunRequest:
    """The next tick's run, from the offset reached."""
    answer = bench.tick(location.slow.sensors[0])
    assert isinstance(answer, list), answer
    request: dg.RunRequest = answer[0]
    assert request.tags[".dagster/eventsql_after"] == str(reached)
    assert bench.run(location.slow, request).success
    return request


def test_a_killed_run_that_dagster_reports_gives_its_claim_back_at_once(bench: Workbench) -> None:
    ids = bench.publish("orders", 100)
    request = bench.request(location.slow)
    with run_process(bench, request, delay=1.0) as process:
        # Effects of a batch are not visible before its commit: two batches are through here, and a third is under way.
        wait_until(lambda: len(bench.effects()) >= 2 * location.SLOW_BATCH, "two batches")
        wait_until(lambda: writes(bench), "the effects of a third, before their commit")
        process.kill()
        process.wait(60)
    reached = bench.effects()[-1]
    assert 2 * location.SLOW_BATCH <= len(bench.effects()) < 100
    (run,) = bench.instance.get_runs()
    assert run.status == dg.DagsterRunStatus.STARTED, "Dagster believes that it runs"
    bench.instance.report_run_failed(run)

    with bench.platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() + interval '1 hour'")
    finish(bench, reached)
    assert bench.effects() == ids


@pytest.mark.nightly
def test_a_run_that_was_only_stopped_for_a_while_commits_nothing_after_its_claim_went_to_another(
    bench: Workbench,
) -> None:
    ids = bench.publish("orders", 100)
    request = bench.request(location.slow)
    with run_process(bench, request, delay=0.2) as process:
        wait_until(lambda: len(bench.effects()) >= location.SLOW_BATCH, "a batch")
        process.send_signal(signal.SIGSTOP)
        # The connection of a stopped process keeps its row lock, like a connection that is lost in the network. After a
        # while, the database ends it.
        with bench.platform.database.connection() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        reached = bench.effects()[-1]
        wait_until(lambda: bench.lease_is_over(location.slow), "the lease of 2 s")
        finish(bench, reached)
        process.send_signal(signal.SIGCONT)
        process.wait(60)
    assert bench.effects() == ids
