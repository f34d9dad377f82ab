"""`eventsql metrics` serves and prints; a database that is down leaves the endpoint up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from typing import IO

import pytest
from click.testing import Result
from prometheus_client.parser import text_string_to_metric_families

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.errors import PermissionDeniedError
from eventsql_orchestration.metrics.figures import FiguresReader
from tests.cli.conftest import closed_port, directory, invoke, run, start
from tests.waiting import PATIENCE

__all__ = ["closed_port", "directory", "invoke", "run", "start"]


def url_of(stderr: IO[bytes] | None) -> str:
    assert stderr is not None
    said = stderr.readline().decode()
    found = re.search(r"http://\S+/metrics", said)
    assert found is not None, said
    return found[0]


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_endpoint_serves_on_loopback_and_ends_well_when_it_is_told_to(
    platform: EventSQL, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "mailer"))
    server = start("metrics", "serve", "--port", "0")
    url = url_of(server.stderr)
    assert url.startswith("http://127.0.0.1:")
    found = scraped(url)
    assert found["eventsql_up[('shard', '')]"] == 1
    assert "eventsql_events_consumed_total[('consumer', 'mailer'), ('shard', ''), ('topic', 'orders')]" in found
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


SERVES = """
import signal
from eventsql_orchestration.cli.application import main
from tests.interrupting import interrupt_where_it_waits

interrupt_where_it_waits(signal.SIGTERM)
main(["metrics", "serve", "--port", "0"])
"""


def test_the_endpoint_ends_although_nothing_wakes_its_wait(dsn: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVES], env={**os.environ, "EVENTSQL_DSN": dsn},
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with server:
        url_of(server.stderr)
        assert server.stdin is not None
        server.stdin.close()
        try:
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()


def test_the_endpoint_of_a_database_that_is_down_says_so(
    start: Callable[..., subprocess.Popen[bytes]], closed_port: int
) -> None:
    server = start(
        "metrics", "serve", "--port", "0", EVENTSQL_DSN=f"postgresql://somebody@127.0.0.1:{closed_port}/nowhere"
    )
    assert scraped(url_of(server.stderr)) == {"eventsql_up[('shard', '')]": 0}


def test_a_port_that_is_taken_is_one_line(
    start: Callable[..., subprocess.Popen[bytes]], run: Callable[..., Result]
) -> None:
    server = start("metrics", "serve", "--port", "0")
    port = url_of(server.stderr).rpartition(":")[2].removesuffix("/metrics")
    refused = run("metrics", "serve", "--port", port)
    assert refused.exit_code == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "--port" in refused.stderr


@pytest.mark.parametrize("address", ["no such host", "256.0.0.1", "x" * 300])
def test_an_invalid_address_is_one_line(run: Callable[..., Result], address: str) -> None:
    refused = run("metrics", "serve", "--address", address, "--port", "0")
    assert refused.exit_code == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "unexpected" not in refused.stderr


def test_a_print_has_the_figures_and_fails_without_a_database(
    platform: EventSQL, run: Callable[..., Result], invoke: Callable[..., Result], closed_port: int
) -> None:
    platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "mailer"))
    printed = run("metrics", "print", "--partitions")
    assert printed.exit_code == 0
    names = {family.name for family in text_string_to_metric_families(printed.stdout)}
    assert {"eventsql_up", "eventsql_events_published", "eventsql_partition_lag_events"} <= names
    failed = invoke("--dsn", f"postgresql://somebody@127.0.0.1:{closed_port}/nowhere", "metrics", "print")
    assert failed.exit_code == 1
    assert "Traceback" not in failed.stderr


def test_a_print_whose_reading_fails_shows_it_and_fails(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_reader: FiguresReader) -> None:
        raise PermissionDeniedError("permission denied")

    monkeypatch.setattr(FiguresReader, "read", refuse)
    printed = run("metrics", "print")
    assert printed.exit_code == 1
    assert 'eventsql_up{shard=""} 0.0' in printed.stdout
