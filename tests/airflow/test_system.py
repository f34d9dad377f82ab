"""A whole Airflow whose parts are killed under load: the table of effects is exact."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.airflow.local import PARTS, LocalAirflow, connection_of
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.conftest import own_server
from tests.waiting import wait_until

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
    def holds() -> bool:
        for part in PARTS:
            if airflow.parts[part].poll() is not None:
                # As any supervisor of processes does: the triggerer ends without its database.
                airflow.start([part])
        return condition()

    wait_until(holds, f"{what}; the logs are in {airflow.home}", seconds=DEADLINE)


class Load:
    """Publishes numbers, each once, and knows how many."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.published = 0

    def publish(self, count: int) -> None:
        with EventSQL(self.dsn, transfer=False) as platform:
            platform.publisher.publish_all(
                Publication("rides", b"%d" % number, key=str(number))
                for number in range(self.published, self.published + count)
            )
            while platform.buffered():
                platform.transfer.run_once()
        self.published += count

    def consumed(self) -> bool:
        return len(effects(self.dsn)) == self.published


def stopped_task(airflow: LocalAirflow, stops: Path) -> psutil.Process:
    """The process of a task that stands in the middle of a batch, which a file `stop-…` asked for."""
    await_(lambda: bool(list(stops.glob("stopped-*"))), airflow, "a task is in the middle of a batch")
    (stopped,) = stops.glob("stopped-*")
    stopped.unlink()
    return psutil.Process(int(stopped.name.removeprefix("stopped-")))


@pytest.mark.nightly
@pytest.mark.timeout(1_500)
def test_effects_are_exact_when_everything_is_killed(
    started: tuple[LocalAirflow, str], server: EmbeddedPostgres, stops: Path
) -> None:
    """SIGKILL for a task in mid-batch, the triggerer, the scheduler; and the database stops at once."""
    airflow, dsn = started
    load = Load(dsn)
    load.publish(1_000)
    await_(load.consumed, airflow, "the first events are consumed")

    # A task in mid-batch: Airflow tries it again, and it takes its claim over.
    (stops / "stop-1").touch()
    load.publish(1_000)
    stopped_task(airflow, stops).kill()
    await_(load.consumed, airflow, "the events of the killed task are consumed")

    # The triggerer, with claims that no task has; then the scheduler, with its tasks.
    load.publish(1_000)
    airflow.kill("triggerer")
    load.publish(1_000)
    airflow.start(["triggerer"])
    await_(lambda: len(effects(dsn)) > 2_000, airflow, "a new triggerer claims")
    airflow.kill("scheduler")
    load.publish(500)
    airflow.start(["scheduler"])
    await_(load.consumed, airflow, "a new scheduler runs the DAG")

    # The database of the events and of Airflow, at once.
    load.publish(1_000)
    server.stop(mode="immediate")
    server.start()
    load.publish(500)
    await_(load.consumed, airflow, "events are consumed after the database was away")

    assert effects(dsn) == Counter(range(load.published))
    with EventSQL(dsn, transfer=False) as platform:
        await_(lambda: not any(lag.events for lag in platform.lag()), airflow, "there is no lag")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_effects_are_exact_when_a_worker_and_the_api_server_are_killed(
    started: tuple[LocalAirflow, str], stops: Path
) -> None:
    airflow, dsn = started
    load = Load(dsn)
    (stops / "stop-1").touch()
    load.publish(1_000)
    task = stopped_task(airflow, stops)
    worker = task.parent()
    assert worker is not None
    worker.kill()
    task.kill()
    airflow.kill("api-server")
    load.publish(500)
    airflow.start(["api-server"])
    await_(load.consumed, airflow, "events are consumed after the worker and the API server were killed")
    assert effects(dsn) == Counter(range(load.published))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_backfill_replays_each_event_once_when_its_task_is_killed(
    started: tuple[LocalAirflow, str], stops: Path
) -> None:
    airflow, dsn = started
    load = Load(dsn)
    load.publish(900)
    await_(load.consumed, airflow, "the events are consumed")
    (stops / "stop-1").touch()
    command = [
        str(Path(sys.executable).with_name("eventsql")), "--dsn", dsn, "backfill", "rides", "billing",
        "--from", "earliest", "--window-events", "300", "--orchestrator", "airflow", "--airflow-url", airflow.url,
        "--execute",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as backfill:
        try:
            stopped_task(airflow, stops).kill()
            _, said = backfill.communicate(timeout=300)
        finally:
            backfill.kill()
    assert backfill.returncode == 0, said
    assert effects(dsn) == Counter(dict.fromkeys(range(load.published), 2))
