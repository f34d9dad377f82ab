"""A tick that found nothing waits for an event for a while, if there are enough threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource, RunLimits, TickOptions, consumer_asset
from eventsql_orchestration.dagster.consumers import long_poll
from tests.dagster.conftest import Workbench, registering
from tests.dagster.location import record
from tests.waiting import wait_until

RIDES = Topic("rides", 2)
THREADS = {"use_threads": True, "num_workers": 8}
LONG = 100.0
"""Longer than a test may take: a tick that lingers so long fails the test by its timeout."""


def defined(name: str, *, linger: float = LONG, sensor: Any = "partition") -> ConsumerDefinition:
    return consumer_asset(
        topic=RIDES, consumer=name, partitioned=True, name=name, sensor=sensor, limits=RunLimits(max_wait=0.0),
        ticks=TickOptions(linger=linger),
    )(record)  # fmt: skip


parted = defined("parted")
whole = defined("whole", sensor="consumer")

pytestmark = pytest.mark.prepared.with_args(registering(parted, whole))


@pytest.fixture
def threaded(
    bench: Workbench, platform: EventSQL, eventsql: EventSQLResource, instance_home: str
) -> Iterator[Workbench]:
    """A workbench whose daemon would evaluate its sensors in threads."""
    with dg.instance_for_test(temp_dir=instance_home, overrides={"sensors": THREADS}) as instance:
        yield Workbench(platform, eventsql, instance)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def lingers(pool: ThreadPoolExecutor, bench: Workbench, sensor: dg.SensorDefinition) -> Future[Any]:
    """A tick that has begun to linger."""
    before = long_poll.LINGERING.ticks
    tick = pool.submit(bench.tick, sensor)
    wait_until(lambda: long_poll.LINGERING.ticks > before or tick.done(), "a tick that lingers")
    assert not tick.done(), tick.result()
    return tick


@pytest.mark.parametrize("sensor", [parted.sensors[1], whole.sensors[0]], ids=["of a partition", "of a consumer"])
def test_an_event_that_comes_while_a_tick_lingers_is_claimed_by_it(
    threaded: Workbench, pool: ThreadPoolExecutor, sensor: dg.SensorDefinition
) -> None:
    tick = lingers(pool, threaded, sensor)
    if sensor in parted.sensors:
        # The tick is notified of these too, but they belong to another partition.
        threaded.publish("rides", 3, partition=0)
    ids = threaded.publish("rides", 2, partition=1)
    (request,) = tick.result()
    assert request.tags["eventsql/partition"] == "1"
    assert threaded.claims()[0][1] == ids[-1]
    assert long_poll.LINGERING.ticks == 0


def test_a_tick_that_waits_in_vain_ends_as_any_other(threaded: Workbench) -> None:
    assert threaded.tick(defined("parted", linger=0.3).sensors[0]) == "no events wait after offset 0"
    assert long_poll.LINGERING.ticks == 0


def test_a_tick_does_not_linger_if_no_event_can_change_its_result(threaded: Workbench) -> None:
    threaded.platform.registry.pause("rides", "parted")
    assert threaded.tick(parted.sensors[0]) == (
        "the consumer is paused: resume it with `eventsql consumer resume rides parted`"
    )


def test_only_a_limited_number_of_ticks_linger_at_once(
    threaded: Workbench, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "at_once", lambda *_: 1)
    first = lingers(pool, threaded, parted.sensors[0])
    assert threaded.tick(parted.sensors[1]) == "no events wait after offset 0"
    threaded.publish("rides", 1, partition=0)
    assert len(first.result()) == 1


def test_no_tick_lingers_if_sensors_are_evaluated_one_after_the_other(bench: Workbench) -> None:
    assert bench.tick(parted.sensors[0]) == "no events wait after offset 0"


@pytest.mark.parametrize(
    ("settings", "sensors", "cores", "expected"),
    [
        ({}, 1, 2, 0),
        ({"use_threads": False, "num_workers": 8}, 1, 2, 0),
        ({"use_threads": True, "num_workers": 3}, 1, 2, 0),
        ({"use_threads": True, "num_workers": 8}, 30, 2, 3),
        ({"use_threads": True, "num_workers": 8}, 31, 2, 0),
        ({"use_threads": True, "num_workers": 8}, 1, 16, 5),
        ({"use_threads": True}, 1, 2, 3),
    ],
)
def test_threads_are_left_to_others(
    settings: dict[str, Any], sensors: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A container may use a few of the machine's processors. Python counts those since 3.13.
    monkeypatch.setattr(os, "process_cpu_count", lambda: cores, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert long_poll.at_once(settings, sensors) == expected


@pytest.mark.parametrize(("variable", "expected"), [("GRPC", 1), ("CODE_SERVER", 1), ("OTHER", 3)])
def test_threads_are_left_in_a_limited_code_server(
    variable: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "process_cpu_count", lambda: 2, raising=False)
    monkeypatch.setenv(f"DAGSTER_{variable}_MAX_WORKERS", "4")
    assert long_poll.at_once({"use_threads": True}) == expected


def test_a_tick_listens_on_every_shard(
    shards: dict[str, Workbench], pool: ThreadPoolExecutor, instance_home: str
) -> None:
    first, second = shards.values()
    whole.register(first.eventsql.platform)
    with dg.instance_for_test(temp_dir=instance_home, overrides={"sensors": THREADS}) as instance:
        tick = lingers(pool, Workbench(first.platform, first.eventsql, instance), whole.sensors[0])
        second.publish("rides", 1, partition=0)
        (request,) = tick.result()
    assert request.tags["eventsql/shard"] == list(shards)[1]
