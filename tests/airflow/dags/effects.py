"""DAGs of the system test: a claimed range at a time, into a table of effects."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from airflow.sdk import DAG

from eventsql_orchestration import Connection, Event
from eventsql_orchestration.airflow import RunLimits, claims_asset, eventsql_consume

STOPS = Path(os.environ["EVENTSQL_TEST_STOPS"])
"""A file here makes the batch that removes it wait in the middle, after its effects and before its commit."""

LIMITS = RunLimits(max_wait=0.0, drain_idle=0.0, lease=15.0)

claims = claims_asset("rides", "billing", max_events=500, max_wait=0.5, poll_interval=0.5, start_timeout=20.0)

with DAG("billing", schedule=[claims], catchup=False, max_active_runs=4, default_args={"retries": 3, "retry_delay": 1}):

    @eventsql_consume(topic="rides", consumer="billing", batch=100, limits=LIMITS)
    def bill(events: Sequence[Event], connection: Connection) -> None:
        """Record each event."""
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO effect (event) VALUES (%s)", [(int(event.value),) for event in events])
        for stop in STOPS.glob("stop-*"):
            try:
                stop.rename(STOPS / f"stopped-{os.getpid()}")
            except FileNotFoundError:
                continue
            time.sleep(600)

    bill()
