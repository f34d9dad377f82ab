"""A run of tests that a signal ends leaves nothing on the machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import PATIENCE, ended, wait_until

ROOT = Path(__file__).parents[2]


def test_a_run_that_is_terminated_stops_its_server_and_removes_its_files() -> None:
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "tests/database/ended_run.py"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            words = next(line for line in run.stdout if line.startswith("waits beside ")).split()
            server, directory = psutil.Process(int(words[2])), Path(words[3])
            assert directory.exists()
            run.send_signal(signal.SIGTERM)
            run.communicate(timeout=PATIENCE)
        finally:
            run.kill()
    wait_until(lambda: ended(server), "the end of the server")
    assert not directory.exists()
