"""The dashboard and the alerts name metrics that a scrape has, with labels that they have."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from prometheus_client import CollectorRegistry

from eventsql_orchestration import Consumer, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.metrics import Latencies, PlatformCollector
from eventsql_orchestration.queue import Queue
from tests.metrics.prometheus import REPOSITORY, program

DEPLOY = REPOSITORY / "deploy"
DOCUMENT = REPOSITORY / "docs" / "metrics.md"

METRIC = re.compile(r"\b(eventsql_\w+)(?:\{([^}]*)\})?")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "eventsql.rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana" / "eventsql.json").read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["panels"]
    return found


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel.get("targets", ()))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert found is not None
            yield f'{found[1]}{{{found[2]}=""}}'


@pytest.fixture
def samples(platform: EventSQL) -> dict[str, set[str]]:
    """The labels of every sample of a platform that has something of everything, by the sample's name."""
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(seconds=60, bytes=10**9)))
    platform.registry.register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    registry = CollectorRegistry()
    latencies = Latencies(registry)
    latencies.publisher(platform.publisher).publish(Publication("orders", b"", partition=0))
    platform.transfer.run_once()
    assert platform.claims.claim("orders", "mailer", 0, owner="me", lease=60.0, max_events=1) is not None
    latencies.handler("orders", "mailer", lambda _events, _connection: None)(None, None)  # type: ignore[arg-type]
    platform.store.subscribe("mailer", lambda _change, _connection: None, background=False)
    Queue(platform, "thumbnails").definition()
    registry.register(PlatformCollector(platform, partitions=True))
    return {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}


def test_dashboard_and_alerts_name_metrics_and_labels_of_a_scrape(samples: dict[str, set[str]]) -> None:
    named = [(name, labels) for expression in expressions() for name, labels in METRIC.findall(expression)]
    assert len(named) > 20
    assert {name for name, _ in named} <= samples.keys()
    for name, labels in named:
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)) <= samples[name], name


def test_the_document_lists_every_metric_and_no_other(samples: dict[str, set[str]]) -> None:
    listed = set(re.findall(r"^\| `(eventsql_\w+)", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    made = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in samples}
    assert listed == made


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in own) < 24
        assert not own & taken, panel["title"]
        taken |= own


PROMTOOL = program("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool comes with Prometheus; it is not here")
@pytest.mark.parametrize(
    "command",
    [("check", "rules", "eventsql.rules.yaml"), ("check", "config", "prometheus.yaml"),
     ("test", "rules", "eventsql.rules.test.yaml")],
    ids=" ".join,
)  # fmt: skip
def test_prometheus_accepts_the_files_and_the_alerts_come_when_they_should(command: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
