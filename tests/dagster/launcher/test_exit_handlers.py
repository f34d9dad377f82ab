"""Exit handlers and finalizers of a location's import run once, when its server ends."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from tests.dagster.launcher.conftest import deployed
from tests.waiting import wait_until

REGISTERING = """
import atexit, os, pathlib, tempfile

KEPT = tempfile.TemporaryDirectory()


@atexit.register
def leave():
    with (pathlib.Path(__file__).parent / "left").open("a") as left:
        left.write(f"{os.getpid()}\\n")
"""


def test_runs_execute_their_own_exit_handlers_and_the_server_executes_those_of_the_import(tmp_path: Path) -> None:
    with deployed(tmp_path, "first", before=REGISTERING) as deployment:
        runs = [deployment.launch("use")]
        assert deployment.ended(runs[0]) is dg.DagsterRunStatus.SUCCESS
        wait_until((tmp_path / "first" / f"{runs[0]}.ended").exists, "the run's own exit handler")
        wait_until((tmp_path / "first" / f"{runs[0]}.freed").exists, "the deletion of an object that refers to itself")
        runs.append(deployment.launch("use"))
        assert [deployment.ended(run) for run in runs] == [dg.DagsterRunStatus.SUCCESS] * 2

        (server,) = deployment.servers()
        processes = {deployment.seen(run)[0] for run in runs}
        deployment.launcher.join(60)
        left = {int(line) for line in (tmp_path / "first" / "left").read_text().splitlines()}
        assert server in left
        assert not left & processes
