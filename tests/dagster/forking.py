"""Code servers whose runs are forks: a run that starts as a new process imports Dagster for seconds."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import sys


def fork_runs(location: str) -> None:
    """Let this code server fork its runs from a process that has imported the location."""
    if "multiprocessing.forkserver" in sys.orig_argv[-1]:
        # This is the process that forks them.
        return
    multiprocessing.set_forkserver_preload([location, "dagster_postgres", "dagster._grpc.server"])
    # A run that is launched would wait until it has.
    multiprocessing.forkserver.ensure_running()
    multiprocessing.context.SpawnContext.Process = multiprocessing.context.ForkServerProcess  # type: ignore[assignment]
