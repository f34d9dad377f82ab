"""A run of tests that a signal ends while a test waits: `test_ended_run.py` starts it, and nothing else collects it."""

from __future__ import annotations

import contextlib
import sys
import time

from eventsql_orchestration.database.embedded import EmbeddedPostgres


def wait() -> None:
    """Wait for a signal. A signal just before `signal.pause()` would not end its wait."""
    while True:
        time.sleep(0.05)


def test_it_waits(server: EmbeddedPostgres) -> None:
    sys.stdout.write(f"\nwaits beside {server.start().pid} {server.directory}\n")
    sys.stdout.flush()
    # As a command that heeds Ctrl-C.
    with contextlib.suppress(KeyboardInterrupt):
        wait()


def test_it_would_wait_for_ever() -> None:
    wait()
