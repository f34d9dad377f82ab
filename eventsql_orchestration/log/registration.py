"""Registering topics and consumers, and telling which of their settings that changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eventsql_orchestration.errors import ConsumerNotFoundError, TopicNotFoundError
from eventsql_orchestration.log.positions import Start
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import EVERY_EVENT, Consumer, ConsumerState, DeclaredFilter, Retention, Topic


@dataclass(frozen=True, slots=True)
class Registration:
    """What a registration did: `name` was created, or settings of it changed, each in words, or nothing did."""

    name: str
    created: bool
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.created:
            return f"{self.name} created"
        return f"{self.name} exists already{''.join(f'; {change}' for change in self.changes)}"


def register_topic(registry: Registry, topic: Topic) -> Registration:
    """Register a topic. Raises as `Registry.register_topic`."""
    name = f"topic {topic.name!r}"
    try:
        before = registry.topic(topic.name)
    except TopicNotFoundError:
        registry.register_topic(topic)
        return Registration(name, created=True)

    registry.register_topic(topic)
    after = registry.topic(topic.name)
    changes = [
        *_change("partitions", [before.partitions], [after.partitions]),
        *_change("retention", [_kept(before.retention)], [_kept(after.retention)]),
    ]
    return Registration(name, created=False, changes=tuple(changes))


def register_consumer(
    registry: Registry,
    consumer: Consumer,
    *,
    max_attempts: int | None = None,
    start: Start = "earliest",
    filter: DeclaredFilter = None,  # noqa: A002 - the field's word
) -> Registration:
    """Register a consumer. Raises as `Registry.register_consumer`."""
    name = f"consumer {consumer.name!r} of topic {consumer.topic!r}"
    try:
        before = registry.consumer(consumer.topic, consumer.name)
    except ConsumerNotFoundError:
        before = []
    registry.register_consumer(consumer, max_attempts=max_attempts, start=start, filter=filter)
    if not before:
        return Registration(name, created=True)

    after = registry.consumer(consumer.topic, consumer.name)
    changes = [
        *_change("max attempts", [each.max_attempts for each in before], [each.max_attempts for each in after]),
        *_change("filter", map(_filtered, before), map(_filtered, after)),
    ]
    return Registration(name, created=False, changes=tuple(changes))


def _change(setting: str, before: Iterable[object], after: Iterable[object]) -> list[str]:
    """The change of a setting, of which each partition has a value: none or one."""
    was, now = (" and ".join(sorted({str(value) for value in values})) for values in (before, after))
    return [] if was == now else [f"{setting}: {now} (was {was})"]


def _filtered(state: ConsumerState) -> object:
    return state.filter or EVERY_EVENT


def _kept(retention: Retention | None) -> str:
    if retention is None or retention.for_ever:
        return "for ever"
    bounds = {"s": retention.seconds, "bytes": retention.bytes, "events": retention.events}
    return ", ".join(f"{bound:g} {unit}" for unit, bound in bounds.items() if bound is not None)
