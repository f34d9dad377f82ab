"""Consumers: their names, the events that their filters choose, and the state of their partitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Final, TypeAlias

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES, Event, check_topic_name
from eventsql_orchestration.validation import check_kind, check_metadata, check_name, check_text

MAX_FILTER_KEYS: Final = 1_000
"""A consumer's filter is read with every batch."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A named reader of a topic with offsets of its own.

    A partitioned consumer has an offset for each partition of its topic, and at most one active consumption for each
    partition. A consumer that is not partitioned reads the whole topic in its order.
    """

    topic: str
    name: str
    partitioned: bool = False

    def __post_init__(self) -> None:
        check_topic_name(self.topic)
        check_name("consumer name", self.name)
        check_kind("partitioned", self.partitioned, bool)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Chooses the events that a consumer is handed: they meet every condition that is given.

    The key is one of `keys`; it begins with `key_prefix`; the metadata has all of `metadata`, with equal values. An
    event without a key meets no condition on keys. Raises `ValidationError` for a filter without a condition, or a
    filter that no event can meet.
    """

    keys: AbstractSet[str] | None = None
    key_prefix: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys: object = self.keys
        if keys is not None:
            if isinstance(keys, str | bytes) or not isinstance(keys, Collection):
                raise ValidationError(f"the keys of a filter must be a set of texts, not {type(keys).__name__}")
            if not 1 <= len(keys) <= MAX_FILTER_KEYS:
                raise ValidationError(f"a filter has 1 to {MAX_FILTER_KEYS} keys, not {len(keys)}")
            texts = frozenset(check_text("a key of a filter", key, most=MAX_KEY_BYTES) for key in keys)
            object.__setattr__(self, "keys", texts)
        prefix = self.key_prefix
        if prefix is not None and not check_text("the key prefix of a filter", prefix, most=MAX_KEY_BYTES):
            raise ValidationError("the key prefix of a filter is empty: leave it out")
        object.__setattr__(self, "metadata", check_metadata(self.metadata, of=" of a filter", most=MAX_KEY_BYTES))
        if self.keys is None and prefix is None and not self.metadata:
            raise ValidationError("a filter needs a condition: keys, a key prefix or metadata")
        if self.keys is not None and prefix is not None and not any(key.startswith(prefix) for key in self.keys):
            raise ValidationError(f"no event can match: none of the filter's keys begins with {prefix!r}")

    def __hash__(self) -> int:
        return hash((self.keys, self.key_prefix, frozenset(self.metadata.items())))

    def matches(self, event: Event) -> bool:
        """Whether an event meets every condition."""
        check_kind("event", event, Event)
        key = event.key
        if self.keys is not None and key not in self.keys:
            return False
        if self.key_prefix is not None and (key is None or not key.startswith(self.key_prefix)):
            return False
        # Metadata is decoded only where the filter asks for it.
        return not self.metadata or self.metadata.items() <= _texts(event.metadata)

    def as_json(self) -> dict[str, Any]:
        """The conditions in their stored form. Equal filters have the same form."""
        conditions = {
            "keys": None if self.keys is None else sorted(self.keys),
            "key_prefix": self.key_prefix,
            "metadata": dict(sorted(self.metadata.items())),
        }
        return {name: condition for name, condition in conditions.items() if condition}

    @classmethod
    def from_json(cls, conditions: object) -> EventFilter | None:
        """The filter that `as_json` wrote, or None for None.

        Raises `ValidationError` for anything else, such as a condition of a later version: an unknown condition must
        not let events pass.
        """
        if conditions is None:
            return None
        if not isinstance(conditions, dict) or not conditions.keys() <= {"keys", "key_prefix", "metadata"}:
            raise ValidationError(
                f"this version does not understand a consumer's filter: upgrade the package ({conditions!r})"
            )
        return cls(**conditions)

    def __str__(self) -> str:
        parts = [] if self.keys is None else ["key " + " or ".join(sorted(self.keys))]
        if self.key_prefix is not None:
            parts.append(f"key {self.key_prefix}*")
        return ", ".join([*parts, *(f"{name}={text}" for name, text in sorted(self.metadata.items()))])


class EveryEvent(Enum):
    """The type of `EVERY_EVENT`."""

    EVERY_EVENT = "every event"

    def __str__(self) -> str:
        return self.value


EVERY_EVENT: Final = EveryEvent.EVERY_EVENT
"""Declares that a consumer has no filter. Without a declaration (None), a consumer keeps its filter."""

DeclaredFilter: TypeAlias = EventFilter | EveryEvent | None
"""A declared filter, `EVERY_EVENT` for no filter, or None for no declaration."""


def _texts(metadata: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(name, text) for name, text in metadata.items() if isinstance(text, str)}


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """The state of one consumer partition in the database.

    `last_event_id` is the offset: the id of the last consumed event, 0 before the first. `epoch` counts the leases of
    the partition. `failed_event_id`, `attempts` and `failure` describe the event that the partition retries, if any;
    `retry_at` is its next due time. A consumer passes over events that do not match its `filter`. Events after `until`
    wait until all partitions of the consumer have consumed the events before. `shard` names the partition's shard, in a
    list of several shards. `read_at` is the database's time when the state was read.
    """

    topic: str
    name: str
    partition: int
    last_event_id: int
    consumed_events: int
    last_consumption_at: datetime | None
    paused: bool
    epoch: int
    lease_owner: str | None
    lease_expires_at: datetime | None
    failed_event_id: int | None
    attempts: int
    failure: str | None
    retry_at: datetime | None
    max_attempts: int
    read_at: datetime = field(compare=False)
    filter: EventFilter | None = None
    until: int | None = None
    shard: str | None = None

    @property
    def failing(self) -> bool:
        """Whether an event is being retried; an event that another consumption has passed meanwhile does not count."""
        return self.failed_event_id is not None and self.failed_event_id > self.last_event_id

    @property
    def spent(self) -> bool:
        """Whether the event that is being retried has used up its attempts."""
        return self.failing and self.attempts >= self.max_attempts

    @property
    def leased(self) -> bool:
        """Whether a lease was in force when the state was read."""
        expires = self.lease_expires_at
        return self.lease_owner is not None and expires is not None and expires > self.read_at
