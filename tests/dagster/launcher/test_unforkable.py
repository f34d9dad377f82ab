"""A location that cannot be forked runs as with Dagster's own launcher, and the log of its first run says why."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from tests.dagster.launcher.conftest import deployed

THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, name='poller', daemon=True).start()"


def test_a_location_with_a_thread_is_launched_by_dagsters_launcher_and_this_is_said_once(tmp_path: Path) -> None:
    with deployed(tmp_path, "first", before=THREAD) as deployment:
        first = deployment.launch()
        assert deployment.ended(first) is dg.DagsterRunStatus.SUCCESS
        # The code server watches the process of such a run, and its launcher can end it.
        waiting = deployment.waiting()
        said = [
            [message for message in deployment.said(run) if "default launcher" in message] for run in (first, waiting)
        ]
        assert [len(messages) for messages in said] == [1, 0]
        assert "poller" in said[0][0]
        assert deployment.launcher.check_run_worker_health(deployment.run(waiting)).status.value == "RUNNING"
        assert deployment.launcher.terminate(waiting)
        assert deployment.ended(waiting) is dg.DagsterRunStatus.CANCELED
