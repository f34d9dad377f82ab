"""A whole Airflow whose parts are killed under load: the table of effects is exact."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.airflow.local import PARTS, LocalAirflow, connection_of
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.conftest import own_server

DAGS = Path(__file__).parent / "dags"
DEADLINE = 150.0
"""Seconds for a step on a busy machine; no step waits for them when it is done."""


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, which it stops and starts."""
    with own_server() as embedded:
        embedded.start()
        yield embedded


@pytest.fixture
def stops(tmp_path: Path) -> Path:
    (tmp_path / "stops").mkdir()
    return tmp_path / "stops"


@pytest.fixture
def started(server: EmbeddedPostgres, tmp_path: Path, stops: Path) -> Iterator[tuple[LocalAirflow, str]]:
    dsn = server.create_database("events")
    with EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("rides", partitions=2))
        platform.registry.register_consumer(Consumer("rides", "billing", partitioned=True))
        with platform.database.transaction() as connection:
            connection.execute("CREATE TABLE effect (event bigint)")
    airflow = LocalAirflow(
        tmp_path / "airflow", DAGS, server.create_database("airflow"),
        connections={"eventsql_default": connection_of([dsn], "eventsql")},
        environment={"EVENTSQL_TEST_STOPS": str(stops)},
    )  # fmt: skip
    airflow.migrate()
    with airflow:
        airflow.start()
        airflow.wait_until_ready()
        yield airflow, dsn


def effects(dsn: str) -> Counter[int]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return Counter(event for (event,) in connection.execute("SELECT event FROM effect"))


def await_(condition: Callable[[], bool], airflow: LocalAirflow, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what}; the logs are in {airflow.home}"
        for part in PARTS:
            if airflow.parts[part].poll() is not None:
                # As any supervisor of processes does: the triggerer ends without its database.
                airflow.start([part])
        time.sleep(0.2)


@pytest.mark.nightly
@pytest.mark.timeout(1_500)
def test_effects_are_exact_when_everything_is_killed(
    started: tuple[LocalAirflow, str], server: EmbeddedPostgres, stops: Path
) -> None:
    """SIGKILL for a task in mid-batch, the triggerer, the scheduler; and the database stops at once."""
    airflow, dsn = started
    published = 0

    def publish(count: int) -> None:
        nonlocal published
        with EventSQL(dsn, transfer=False) as platform:
            platform.publisher.publish_all(
                Publication("rides", b"%d" % number, key=str(number)) for number in range(published, published + count)
            )
            while platform.buffered():
                platform.transfer.run_once()
        published += count

    def all_consumed() -> bool:
        return len(effects(dsn)) == published

    publish(1_000)
    await_(all_consumed, airflow, "the first events are consumed")

    # A task in mid-batch: Airflow tries it again, and it takes its claim over.
    (stops / "stop-1").touch()
    publish(1_000)
    await_(lambda: bool(list(stops.glob("stopped-*"))), airflow, "a task is in the middle of a batch")
    (stopped,) = stops.glob("stopped-*")
    os.kill(int(stopped.name.removeprefix("stopped-")), signal.SIGKILL)
    await_(all_consumed, airflow, "the events of the killed task are consumed")

    # The triggerer, with claims that no task has; then the scheduler, with its tasks.
    publish(1_000)
    airflow.kill("triggerer")
    publish(1_000)
    airflow.start(["triggerer"])
    await_(lambda: len(effects(dsn)) > 2_000, airflow, "a new triggerer claims")
    airflow.kill("scheduler")
    publish(500)
    airflow.start(["scheduler"])
    await_(all_consumed, airflow, "a new scheduler runs the DAG")

    # The database of the events and of Airflow, at once.
    publish(1_000)
    server.stop(mode="immediate")
    server.start()
    publish(500)
    await_(all_consumed, airflow, "events are consumed after the database was away")

    assert effects(dsn) == Counter(range(published))
    with EventSQL(dsn, transfer=False) as platform:
        await_(lambda: not any(lag.events for lag in platform.lag()), airflow, "there is no lag")
