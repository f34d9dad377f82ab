"""A topic over several shards, consumed as a queue: each shard hands out its own events."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from tests.effects import effects, make_table, write
from tests.shards.conftest import Databases, Open, Until

KEYS = "abcdefghij"


@pytest.fixture
def platform(databases: Databases, opened: Open) -> EventSQL:
    platform = opened(*databases(3)).open()
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True), max_attempts=5)
    return platform


def publish(platform: EventSQL, first: int, last: int) -> None:
    platform.publisher.publish_all(
        Publication("orders", str(number).encode(), key=key) for number in range(first, last) for key in KEYS
    )
    platform.transfer.run_once()


def at_rest(platform: EventSQL) -> bool:
    return all(lag.events == 0 for lag in platform.lag("orders"))


def test_every_event_is_handled_once_and_in_the_order_of_its_key(platform: EventSQL, until: Until) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    refused: set[str] = set()
    lock = threading.Lock()

    def handle(event: Event) -> None:
        with lock:
            key = str(event.key)
            if key in "abc" and key not in refused:
                refused.add(key)
                raise ValueError("not yet")
            seen[key].append(int(event.value))

    publish(platform, 0, 10)
    with platform.consumers.start_queue("orders", "mailer", handle, workers=2, polling_delay=0.02):
        publish(platform, 10, 20)
        until(lambda: at_rest(platform))
    assert seen == {key: list(range(20)) for key in KEYS}
    assert refused == set("abc")


def test_effects_commit_on_the_shard_of_the_event(platform: EventSQL, until: Until) -> None:
    for shard in platform.shards:
        make_table(shard)

    def handle(event: Event, connection: Connection) -> None:
        write([event], connection)

    with platform.consumers.start_queue("orders", "mailer", handle, workers=2, polling_delay=0.02):
        publish(platform, 0, 10)
        until(lambda: at_rest(platform))
    handled = [effects(shard) for shard in platform.shards]
    assert sum(map(bool, handled)) > 1, "the keys are on several shards"
    assert [sorted(each) for each in handled] == [
        [event.id for event in shard.reader.read("orders")] for shard in platform.shards
    ]
