"""A Prometheus of a test's own, and the programs of its package."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types

from eventsql_orchestration.orchestration.local_processes import free_port
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]


def program(name: str) -> str | None:
    """A program of this machine, or the one that `make promtool` has fetched."""
    return shutil.which(name) or shutil.which(name, path=str(REPOSITORY / ".promtool" / "usr" / "bin"))


PROMETHEUS = program("prometheus")


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[tuple[str, str]]:
        """The alerts that fire now: the name of each, and the topic's consumer, subscription, queue or topic."""
        return {
            (labels["alertname"], next((labels[each] for each in _NAMED if each in labels), ""))
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
            for labels in [alert["labels"]]
        }

    def series(self, query: str, *, seconds: float = 60.0) -> list[Mapping[str, Any]]:
        """What a panel of a dashboard draws of the last so many seconds."""
        now = time.time()
        found: list[Mapping[str, Any]] = self.ask(
            "query_range", query=query, start=now - seconds, end=now, step=1
        )["result"]  # fmt: skip
        return found


_NAMED = ("consumer", "subscription", "queue", "topic")


@contextmanager
def running(directory: Path, targets: list[str], rules: str) -> Iterator[Prometheus]:
    """Run Prometheus on loopback: it scrapes the targets every two seconds, and evaluates the rules every second."""
    assert PROMETHEUS is not None
    (directory / "rules.yaml").write_text(rules)
    every = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"}
    configuration = {
        "global": every,
        "scrape_configs": [{"job_name": "eventsql", "static_configs": [{"targets": targets}]}],
        "rule_files": ["rules.yaml"],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port(0)}"
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, f"--config.file={directory / 'prometheus.yaml'}", f"--web.listen-address={address}",
             f"--storage.tsdb.path={directory / 'data'}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: process.poll() is not None or _is_ready(address), "Prometheus answers")
        assert process.poll() is None, (directory / "prometheus.log").read_text()
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=10):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
