"""A run whose process is killed or stopped in mid-batch: nothing is lost, and nothing takes effect twice."""

from __future__ import annotations

import signal
import subprocess
from contextlib import AbstractContextManager

import dagster as dg
import pytest

from eventsql_orchestration.queue import Queue
from tests.dagster import location, working_location
from tests.dagster.conftest import Workbench, sql
from tests.dagster.processes import run_process
from tests.waiting import wait_until


@pytest.fixture
def bench(bench: Workbench, shared_instance: dg.DagsterInstance) -> Workbench:
    bench.instance = shared_instance
    location.slow.register(bench.platform)
    working_location.thumbnails.register(bench.platform)
    return bench


def process(
    bench: Workbench, request: dg.RunRequest, module: str, job: str, *, delay: float
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """The run of a request in a process of its own."""
    return run_process(
        bench.instance.root_directory, bench.eventsql.dsn, module, job,
        config=request.run_config, tags=request.tags, delay=delay,
    )  # fmt: skip


def kill_in_third_batch(bench: Workbench, request: dg.RunRequest, module: str, job: str, *, batch: int) -> None:
    """Execute a request, and kill its process between the effects of the third batch and their commit."""
    with process(bench, request, module, job, delay=1.0):
        # Effects of a batch are not visible before its commit.
        wait_until(lambda: len(bench.effects()) >= 2 * batch, "two batches")
        wait_until(lambda: writes(bench), "the effects of a third, before their commit")
    (run,) = bench.instance.get_runs()
    assert run.status == dg.DagsterRunStatus.STARTED, "Dagster believes that it runs"


def writes(bench: Workbench) -> bool:
    """Whether another session has written effects that it has not committed."""
    locks = "SELECT FROM pg_locks WHERE relation = 'effect'::regclass AND mode = 'RowExclusiveLock'"
    return bool(sql(bench.platform, locks))


def finish(bench: Workbench, reached: int) -> None:
    """Execute the run that the next tick requests, from the offset reached."""
    request = bench.request(location.slow)
    assert request.tags[".dagster/eventsql_after"] == str(reached)
    assert bench.run(location.slow, request).success


def test_a_killed_run_that_dagster_reports_gives_its_claim_back_at_once(bench: Workbench) -> None:
    ids = bench.publish("orders", 100)
    request = bench.request(location.slow)
    kill_in_third_batch(bench, request, "location", "consume_slow", batch=location.SLOW_BATCH)
    reached = bench.effects()[-1]
    assert 2 * location.SLOW_BATCH <= len(bench.effects()) < 100
    (run,) = bench.instance.get_runs()
    bench.instance.report_run_failed(run)

    sql(bench.platform, "UPDATE eventsql.consumer SET eql_lease_expires_at = now() + interval '1 hour'")
    finish(bench, reached)
    assert bench.effects() == ids


@pytest.mark.nightly
def test_a_run_that_was_only_stopped_for_a_while_commits_nothing_after_its_claim_went_to_another(
    bench: Workbench,
) -> None:
    ids = bench.publish("orders", 100)
    with process(bench, bench.request(location.slow), "location", "consume_slow", delay=0.2) as stopped:
        wait_until(lambda: len(bench.effects()) >= location.SLOW_BATCH, "a batch")
        stopped.send_signal(signal.SIGSTOP)
        # The connection of a stopped process keeps its row lock, like a connection that is lost in the network. After a
        # while, the database ends it.
        sql(
            bench.platform,
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend'",
        )
        reached = bench.effects()[-1]
        wait_until(lambda: bench.lease_is_over(location.slow), "the lease of 2 s")
        finish(bench, reached)
        stopped.send_signal(signal.SIGCONT)
        stopped.wait(60)
    assert bench.effects() == ids


@pytest.mark.nightly
def test_the_messages_of_a_killed_run_go_to_the_next_run_after_their_visibility_timeout(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, queue = working_location.thumbnails, Queue(bench.platform, "pictures")
    ids = queue.send_all([b"%d" % number for number in range(20)])
    (request,) = bench.tick(worker.sensor)
    kill_in_third_batch(bench, request, "working_location", "work_thumbnails", batch=working_location.BATCH)
    assert 2 * working_location.BATCH <= len(bench.effects()) < len(ids)

    # The run gives no further sign of life, whether Dagster notices its death or not.
    wait_until(lambda: isinstance(bench.tick(worker.sensor), list), "the end of the lease")
    wait_until(lambda: queue.statistics().in_flight == 0, "the end of the visibility timeout")
    monkeypatch.setenv("EVENTSQL_DSN", bench.eventsql.dsn)
    job = working_location.defs.resolve_job_def("work_thumbnails")
    assert job.execute_in_process(instance=bench.instance).success
    assert sorted(bench.effects()) == ids
    assert queue.statistics().depth == 0
