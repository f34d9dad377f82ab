"""A run of tests that a signal ends while a test waits: `test_ended_run.py` starts it, and nothing else collects it."""

from __future__ import annotations

import contextlib
import signal
import sys

from eventsql_orchestration.database.embedded import EmbeddedPostgres


def test_it_waits(server: EmbeddedPostgres) -> None:
    sys.stdout.write(f"\nwaits beside {server.start().pid} {server.directory}\n")
    sys.stdout.flush()
    # As a command that heeds Ctrl-C.
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def test_it_would_wait_for_ever() -> None:
    signal.pause()
