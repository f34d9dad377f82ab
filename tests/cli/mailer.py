"""Topic `account_created` and its consumer `mailer`, which gives an event up after one attempt."""

from __future__ import annotations

from collections.abc import Sequence

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection

TOPIC = "account_created"


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic(TOPIC, partitions=2))
    platform.registry.register_consumer(Consumer(TOPIC, "mailer", partitioned=True), max_attempts=1)


def fail(events: Sequence[Event], connection: Connection) -> None:
    raise ValueError("no such account")


def publish(platform: EventSQL, *values: bytes) -> None:
    platform.publisher.publish_all(Publication(TOPIC, value, key="42", partition=0) for value in values)
    platform.transfer.run_once()


def prepare_dead_letter(platform: EventSQL) -> None:
    """Also topic `account_created_dlt`, with the only event."""
    prepare(platform)
    platform.registry.register_topic(Topic(f"{TOPIC}_dlt"))
    publish(platform, b'{"id": 1}')
    platform.consumers.consume_once(TOPIC, "mailer", fail)
    platform.transfer.run_once()
