"""A run that handles a queue's messages and is killed in mid-batch: no message is lost, none takes effect twice."""

from __future__ import annotations

import dagster as dg
import pytest

from eventsql_orchestration.queue import Queue
from tests.dagster import working_location as location
from tests.dagster.conftest import Workbench
from tests.dagster.test_killed_run import run_process, writes
from tests.waiting import wait_until


@pytest.mark.nightly
def test_the_messages_of_a_killed_run_go_to_the_next_run_after_their_visibility_timeout(
    bench: Workbench, shared_instance: dg.DagsterInstance
) -> None:
    bench.instance = shared_instance
    location.thumbnails.register(bench.platform)
    queue = Queue(bench.platform, "pictures")
    ids = queue.send_all([b"%d" % number for number in range(20)])
    (request,) = bench.tick(location.thumbnails.sensor)
    with run_process(
        bench, request, delay=1.0, module="tests.dagster.working_location", job="work_thumbnails"
    ) as process:
        wait_until(lambda: len(bench.effects()) >= 2 * location.BATCH, "two batches")
        wait_until(lambda: writes(bench), "the effects of a third, before their commit")
        process.kill()
        process.wait(60)
    done = len(bench.effects())
    assert 2 * location.BATCH <= done < len(ids)
    (run,) = shared_instance.get_runs()
    assert run.status == dg.DagsterRunStatus.STARTED, "Dagster believes that it runs"

    # The run gives no further sign of life, whether Dagster notices its death or not.
    wait_until(lambda: isinstance(bench.tick(location.thumbnails.sensor), list), "the end of the lease")
    wait_until(lambda: queue.statistics().in_flight == 0, "the end of the visibility timeout")
    job = location.defs.resolve_job_def("work_thumbnails")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENTSQL_DSN", bench.eventsql.dsn)
        assert job.execute_in_process(instance=shared_instance).success
    assert sorted(bench.effects()) == ids
    assert queue.statistics().depth == 0
