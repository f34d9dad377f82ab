"""A standalone cluster with real processes: the same by configuration alone, and each event once when executors die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.publishing.staged_blocks import ORPHANED_AFTER_HOURS
from tests.spark.processes import Cluster, Driver, driver, kill, register_topics, values_in
from tests.waiting import wait_until

EVENTS = 100_000

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield running
    finally:
        running.close()


def on_cluster(cluster: Cluster, **settings: str) -> dict[str, str]:
    address = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    executors = {"spark.executor.memory": "512m", "spark.executor.cores": "1"}
    return {"spark.master": cluster.url, **executors, **address, **settings}


pytestmark = pytest.mark.prepared.with_args(register_topics)


def staged(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM eventsql.spark_staged_event").fetchone()
    assert row is not None
    return int(row[0])


def staging(dsn: str) -> int:
    """How many attempts have staged something."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(DISTINCT eql_attempt) FROM eventsql.spark_staged_event").fetchone()
    assert row is not None
    return int(row[0])


def executor_of(cluster: Cluster, worker: int) -> psutil.Process:
    """The executor that started a Python worker."""
    ancestors = {process.pid for process in psutil.Process(worker).parents()}
    (executor,) = [process for process in cluster.executors() if process.pid in ancestors]
    return executor


@pytest.fixture(scope="class")
def application(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Which knows of the cluster by a deployment's configuration alone."""
    home = tmp_path_factory.mktemp("application")
    config = home / "spark.conf"
    config.write_text("".join(f"{name} {value}\n" for name, value in on_cluster(cluster).items()))
    with driver(home, config=config) as running:
        yield running


@pytest.mark.nightly
class TestAnApplicationOfADeployment:
    """One application for all of these, because each takes its time to start; it has both cores until it ends."""

    def test_a_deployment_s_configuration_is_all_that_a_cluster_takes(
        self, cluster: Cluster, application: Driver, platform: EventSQL, dsn: str
    ) -> None:
        platform.publisher.publish_all(
            Publication("orders", b"%d" % number, key=str(number)) for number in range(5_000)
        )
        platform.transfer.run_once()
        assert application.do("copy", dsn=dsn, source="orders", topic="fares") == "copied"
        assert len(cluster.executors()) == 2
        assert values_in(platform, "fares") == list(range(5_000))
        assert staged(dsn) == 0

    def test_an_executor_that_is_killed_leaves_nothing_double_and_its_blocks_are_swept(
        self, cluster: Cluster, application: Driver, platform: EventSQL, dsn: str, tmp_path: Path
    ) -> None:
        paused, resume = tmp_path / "paused", tmp_path / "resume"
        application.start("paused", dsn=dsn, topic="orders", events=EVENTS, paused=str(paused), resume=str(resume))
        application.await_step(lambda: paused.exists() and paused.read_text(), "the task has paused")
        application.await_step(lambda: staging(dsn) == 2, "it and the other task have staged some of their events")
        kill(executor_of(cluster, int(paused.read_text())))
        assert application.answer() == "written"
        assert values_in(platform, "orders") == list(range(EVENTS))
        assert staged(dsn) > 0, "the killed attempt left nothing to sweep"
        with psycopg.connect(dsn) as connection:
            connection.execute(
                "UPDATE eventsql.spark_staged_event SET eql_created_at = eql_created_at - make_interval(hours => %s)",
                (ORPHANED_AFTER_HOURS + 1,),
            )
        assert application.do("batch", dsn=dsn, topic="fares", events=10, options={}) == "written"
        assert staged(dsn) == 0
        assert values_in(platform, "orders") == list(range(EVENTS))

    def test_rows_that_differ_when_they_are_computed_again_are_not_published(
        self, cluster: Cluster, application: Driver, platform: EventSQL, dsn: str, tmp_path: Path
    ) -> None:
        # The executor that was killed in another test has started again.
        wait_until(lambda: len(cluster.executors()) == 2, "both executors run")
        application.start("differing", dsn=dsn, topic="orders", events=2_000, folder=str(tmp_path))

        def paused() -> list[str]:
            return [text for file in tmp_path.glob("paused-*") if (text := file.read_text())]

        application.await_step(lambda: len(paused()) == 2, "the first task has ended, and two others have paused")
        kill(executor_of(cluster, int(paused()[0])))
        (tmp_path / "resume").touch()
        # Spark shuffles the lost rows again with other keys, and cannot take back the rows of the first task.
        assert "indeterminate" in application.answer()
        assert values_in(platform, "orders") == []


@pytest.mark.nightly
def test_of_two_attempts_at_once_one_is_published(
    cluster: Cluster, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    paused, resume = tmp_path / "paused", tmp_path / "resume"
    settings = on_cluster(cluster, **SPECULATION)
    with driver(tmp_path, settings) as application:
        application.start("paused", dsn=dsn, topic="orders", events=EVENTS, paused=str(paused), resume=str(resume))
        # The first attempt never goes on: its task ends because another attempt was started beside it.
        assert application.answer() == "written"
        assert paused.exists()
        assert values_in(platform, "orders") == list(range(EVENTS))
