"""Points at which a real process stops until it is killed, and a daemon that has two of them.

A point is an advisory lock of the events' database, and a test holds the lock. A process that comes to the point waits
for the lock. The name of its session has the point and the process, so that the test can find and kill the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import dagster as dg
import psycopg
from dagster._daemon import controller

from eventsql_orchestration import EventSQL

AFTER_THE_PROBE = "after the probe"
AFTER_THE_CLAIM = "after the claim"
AFTER_THE_TICK_IS_STORED = "after the tick is stored"
AFTER_THE_RUN_IS_CREATED = "after the run is created"
AFTER_LAUNCH = "after launch"
IN_PROCESSING = "in processing"
AFTER_EFFECTS = "after effects"
AFTER_THE_OFFSET = "after the offset"


def stop_at(point: str) -> None:
    """Wait here as long as a test holds the point."""
    name = f"{os.getpid()} {point}"
    with psycopg.connect(os.environ["EVENTSQL_DSN"], autocommit=True, application_name=name) as connection:
        connection.execute("SELECT pg_advisory_lock_shared(hashtext(%s))", (point,))


@contextmanager
def held(platform: EventSQL, point: str) -> Iterator[None]:
    """Stop each process that comes to a point during the block."""
    connection = platform.database.dedicated()
    try:
        connection.execute("SELECT pg_advisory_lock(hashtext(%s))", (point,))
        yield
    finally:
        connection.close()


def stopped(platform: EventSQL, point: str) -> int | None:
    """The process that stands at a point."""
    with platform.database.connection() as connection:
        row = connection.execute(
            "SELECT application_name FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = "
            "current_database() AND application_name LIKE %s",
            (f"% {point}",),
        ).fetchone()
    return None if row is None else int(row[0].split()[0])


def main() -> None:
    """Dagster's daemon, which may stop before and after it creates the run of a claim."""
    create_run = dg.DagsterInstance.create_run

    def create(instance: dg.DagsterInstance, **options: Any) -> dg.DagsterRun:
        of_a_claim = ".dagster/eventsql_claim" in (options.get("tags") or {})
        if of_a_claim:
            stop_at(AFTER_THE_TICK_IS_STORED)
        run = create_run(instance, **options)
        if of_a_claim:
            stop_at(AFTER_THE_RUN_IS_CREATED)
        return run

    # Each minute, the daemon would start code servers anew.
    controller.RELOAD_WORKSPACE_INTERVAL = 3_600
    dg.DagsterInstance.create_run = create  # type: ignore[assignment, method-assign]  # the forced interleaving
    (daemon,) = entry_points(group="console_scripts", name="dagster-daemon")
    daemon.load()()


if __name__ == "__main__":
    main()
