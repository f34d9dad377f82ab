"""A real Prometheus scrapes the endpoint: every panel of the dashboard has series, and every alert comes and goes.

The alerts are those of deploy/prometheus, sixty times as fast: their minutes are seconds.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from eventsql_orchestration import Consumer, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.metrics import Latencies
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.store import Change
from eventsql_orchestration.store.subscription import SubscriptionOptions
from tests.cli.conftest import directory, start
from tests.fixtures import Until
from tests.metrics.prometheus import PROMETHEUS, REPOSITORY, Prometheus, running
from tests.metrics.test_command import url_of
from tests.metrics.test_deploy import panels
from tests.waiting import PATIENCE

__all__ = ["directory", "start"]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not here"),
]

RULES: Final = REPOSITORY / "deploy" / "prometheus" / "eventsql.rules.yaml"
FASTER: Final = 60


def faster(rules: str) -> str:
    """The rules with a sixtieth of each time."""
    units = {"m": 60, "h": 3600}
    shorter = re.sub(r"\b(\d+)([mh])\b", lambda found: f"{int(found[1]) * units[found[2]] // FASTER}s", rules)
    return re.sub(r"(_seconds (?:>|\+) )(\d+)", lambda found: f"{found[1]}{int(found[2]) / FASTER:g}", shorter)


def fail(*_: object) -> None:
    raise ValueError("it fails")


def succeed(*_: object) -> None:
    pass


class Shop:
    """A platform with one of everything that an alert is for, and a consumer with which nothing is wrong."""

    def __init__(self, platform: EventSQL, latencies: Latencies) -> None:
        self.platform = platform
        self._publisher = latencies.publisher(platform.publisher)
        registry = platform.registry
        for topic in ("followed", "slow", "blocked", "failing", "failing_dlt", "claimed", "stuck"):
            registry.register_topic(Topic(topic))
        registry.register_topic(Topic("kept", retention=Retention(seconds=FASTER)))
        for topic, consumer, attempts in [
            ("followed", "follower", 5), ("slow", "sleeper", 5), ("slow", "paused", 5), ("blocked", "blocker", 1),
            ("failing", "letters", 1), ("claimed", "claimer", 5), ("kept", "keeper", 5),
        ]:  # fmt: skip
            registry.register_consumer(Consumer(topic, consumer), max_attempts=attempts)
        registry.pause("slow", "paused")
        self._follower = platform.consumers.start(
            "followed", "follower", latencies.handler("followed", "follower", succeed)
        )
        self.mailer = platform.store.subscribe("mailer", succeed, background=False)
        self.poster = platform.store.subscribe(
            "poster", fail, kinds=["posted"], options=SubscriptionOptions(max_attempts=1), background=False
        )
        self.thumbnails = Queue(platform, "thumbnails")
        self.commands = Queue(platform, "commands", max_receives=1)
        self.commands.definition()
        self._failing: list[Any] = []
        self._stop = threading.Event()
        self._traffic = threading.Thread(target=self._publish)
        self._traffic.start()

    def _publish(self) -> None:
        while not self._stop.wait(0.2):
            # The database is away for a while.
            with suppress(EventSQLError):
                self._publisher.publish(Publication("followed", b""))
                self.platform.transfer.run_once(["followed", "failing_dlt"])

    def close(self) -> None:
        self._stop.set()
        self._traffic.join()
        self._follower.stop()

    def _log(self, topic: str) -> None:
        self.platform.publisher.publish(Publication(topic, b""))
        self.platform.transfer.run_once([topic])

    def _consume(self, topic: str, consumer: str, handler: Callable[..., None]) -> None:
        while self.platform.consumers.consume_once(topic, consumer, handler):
            pass

    def break_everything(self) -> None:
        for topic in ("slow", "blocked", "failing", "claimed", "kept"):
            self._log(topic)
        self.platform.publisher.publish(Publication("stuck", b""))
        for topic, consumer in (("blocked", "blocker"), ("failing", "letters")):
            self._failing.append(self.platform.consumers.start(topic, consumer, fail))
        self.platform.claims.claim("claimed", "claimer", owner="nobody", lease=0.1, max_wait=0.0)
        self._execute("UPDATE eventsql.kept_block SET eql_created_at = now() - interval '2 days'")
        self.platform.store.append("order", "1", [Change("placed", {}), Change("posted", {})], expected_version=0)
        self.thumbnails.send(b"")
        self.commands.send(b"")
        self.commands.receive(visibility_timeout=0.1)

    def give_up(self) -> bool:
        """Try again what fails, until it becomes a dead letter: an open transaction may hold a change back."""
        self.poster.run_once()
        self.commands.receive()
        return True

    def mend_everything(self) -> None:
        for failing in self._failing:
            failing.stop()
        self.platform.transfer.run_once()
        self.platform.registry.resume("blocked", "blocker")
        for topic, consumer in (("slow", "sleeper"), ("blocked", "blocker"), ("claimed", "claimer")):
            self._consume(topic, consumer, succeed)
        self.platform.registry.set_retention("kept", None)
        while self.mailer.run_once().more:
            pass
        for message in self.thumbnails.receive():
            self.thumbnails.acknowledge(message)

    def _execute(self, statement: str) -> None:
        with self.platform.database.connection() as connection:
            connection.execute(statement.encode())


@pytest.fixture
def latencies() -> Iterator[tuple[Latencies, int]]:
    """What this process measures of itself, and the port where it serves that."""
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield Latencies(registry), server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def shop(platform: EventSQL, latencies: tuple[Latencies, int]) -> Iterator[Shop]:
    shop = Shop(platform, latencies[0])
    try:
        yield shop
    finally:
        shop.close()


@pytest.fixture
def endpoint(shop: Shop, start: Callable[..., subprocess.Popen[bytes]]) -> tuple[subprocess.Popen[bytes], str]:
    """`eventsql metrics serve` and its address."""
    process = start("metrics", "serve", "--port", "0", "--interval", "1")
    return process, url_of(process.stderr).removeprefix("http://").removesuffix("/metrics")


@pytest.fixture
def prometheus(
    tmp_path: Path, endpoint: tuple[subprocess.Popen[bytes], str], latencies: tuple[Latencies, int]
) -> Iterator[Prometheus]:
    with running(tmp_path, [endpoint[1], f"127.0.0.1:{latencies[1]}"], faster(RULES.read_text())) as started:
        yield started


BROKEN: Final = {
    ("EventSQLTransferStalled", "stuck"),
    ("EventSQLPartitionBlocked", "blocker"),
    ("EventSQLConsumerBehind", "sleeper"),
    ("EventSQLConsumerBehind", "blocker"),
    ("EventSQLConsumerBehind", "claimer"),
    ("EventSQLConsumerBehind", "keeper"),
    ("EventSQLConsumerStopped", "sleeper"),
    ("EventSQLConsumerStopped", "claimer"),
    ("EventSQLConsumerStopped", "keeper"),
    ("EventSQLDeadLetters", "letters"),
    ("EventSQLClaimAbandoned", "claimer"),
    ("EventSQLRetentionLate", "kept"),
    ("EventSQLSubscriptionBehind", "mailer"),
    ("EventSQLSubscriptionDeadLetters", "poster"),
    ("EventSQLQueueBehind", "thumbnails"),
    ("EventSQLQueueDeadLetters", "commands"),
}


def queries() -> Iterator[tuple[str, str]]:
    """The title and the query of each panel of the dashboard, as Grafana asks for all shards and topics."""
    for panel in panels():
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "20s")
            for variable in ("shard", "topic"):
                query = query.replace(f"${variable}", ".*")
            assert "$" not in query
            yield panel["title"], query


def firing_until(prometheus: Prometheus, seen: set[tuple[str, str]], done: Callable[[], bool]) -> None:
    """Look at the alerts until something is so, or it takes too long; `seen` gets the alerts that fired meanwhile.

    It leaves out the healthy consumer, which stands still for a moment whenever the machine does.
    """
    deadline = time.monotonic() + PATIENCE
    while not done() and time.monotonic() < deadline:
        seen.update(alert for alert in prometheus.firing() if alert[1] != "follower")
        # Prometheus looks once a second.
        time.sleep(0.3)


def test_each_alert_comes_and_goes_and_the_dashboard_has_series(
    shop: Shop, prometheus: Prometheus, until: Until
) -> None:
    # Counters have to be seen before they grow.
    until(lambda: prometheus.ask("query", query='eventsql_queue_dead_letters{queue="commands"}')["result"])
    until(lambda: not prometheus.firing())

    seen: set[tuple[str, str]] = set()
    shop.break_everything()
    firing_until(prometheus, seen, lambda: shop.give_up() and seen >= BROKEN)
    assert seen == BROKEN
    shown = {title: prometheus.series(query) for title, query in queries()}
    assert [title for title, series in shown.items() if not series] == []

    shop.mend_everything()
    left = {(name, whose) for name, whose in BROKEN if whose == "keeper"}
    firing_until(prometheus, seen, lambda: prometheus.firing() <= left)
    assert prometheus.firing() <= left
    assert seen == BROKEN


def test_alerts_tell_of_a_database_and_an_endpoint_that_are_gone(
    shop: Shop, prometheus: Prometheus, endpoint: tuple[subprocess.Popen[bytes], str], server: EmbeddedPostgres,
    until: Until,
) -> None:  # fmt: skip
    until(lambda: prometheus.ask("query", query="eventsql_up == 1")["result"])
    until(lambda: not prometheus.firing())
    with away(server, shop.platform.database.dsn):
        until(lambda: ("EventSQLDown", "") in prometheus.firing())
    until(lambda: not prometheus.firing())
    endpoint[0].terminate()
    until(lambda: prometheus.firing() == {("EventSQLMetricsMissing", "")})


@contextmanager
def away(server: EmbeddedPostgres, dsn: str) -> Iterator[None]:
    """Let a database refuse all connections in the block."""
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(server.start().dsn, autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())
