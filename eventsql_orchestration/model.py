"""The nouns of the platform: topics, consumers, publications, events and ranges of offsets.

All are frozen, know nothing of a database and check their own rules when they are made, so that a value that
exists is a value that can be stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from eventsql_orchestration.errors import (
    InvalidNameError,
    InvalidPublicationError,
    PartitionOutOfRangeError,
    ValidationError,
)
from eventsql_orchestration.rules import MAX_VALUE_BYTES, check_name, check_text

NOT_PARTITIONED: Final = -1
"""The number of partitions of a topic, and the partition of a consumer or an event, that is not partitioned."""

MAX_PARTITIONS: Final = 32_767
"""`eql_partition` is a smallint."""

MAX_TOPIC_NAME_LENGTH: Final = 57
"""PostgreSQL cuts identifiers at 63 bytes, and a topic's table is called `{topic}_event`."""

MAX_KEY_BYTES: Final = 64 * 1024

DEAD_LETTER_SUFFIX: Final = "_dlt"

_TOPIC_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)


def check_schema_name(name: object) -> str:
    """Return `name`, or raise `InvalidNameError`: a lower-case SQL identifier of at most 63 characters."""
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidNameError(
            f"schema name {name!r} is not usable: take a lower-case SQL identifier of at most 63 characters"
        )
    return name


def check_topic_name(name: object) -> str:
    """Return `name`, or raise `InvalidNameError`.

    The name becomes part of a table's name, which the EventSQL library for Java writes unquoted: lower-case ASCII
    letters, digits and underscores keep one name one table in both.
    """
    if not isinstance(name, str) or not _TOPIC_NAME.fullmatch(name):
        raise InvalidNameError(
            f"topic name {name!r} is not usable: start with a lower-case letter, go on with lower-case letters, "
            "digits and underscores"
        )
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        raise InvalidNameError(
            f"topic name {name!r} has {len(name)} characters; {MAX_TOPIC_NAME_LENGTH} are allowed, "
            "because its table is named after it"
        )
    return name


def check_partitions(partitions: object) -> int:
    """Return a topic's number of partitions, or raise `ValidationError`: -1, or 1 to 32,767."""
    if isinstance(partitions, bool) or not isinstance(partitions, int):
        raise ValidationError(f"partitions must be a whole number, not {partitions!r}")
    if partitions != NOT_PARTITIONED and not 1 <= partitions <= MAX_PARTITIONS:
        raise ValidationError(
            f"{partitions} partitions are not possible: take 1 to {MAX_PARTITIONS}, or -1 for a topic that is not "
            "partitioned"
        )
    return partitions


def check_partition(topic: str, partition: object, partitions: int) -> int:
    """Return `partition`, or raise `PartitionOutOfRangeError` when a topic of `partitions` has no such partition."""
    if isinstance(partition, bool) or not isinstance(partition, int):
        raise PartitionOutOfRangeError(f"a partition of topic {topic!r} is a whole number, not {partition!r}")
    if partitions == NOT_PARTITIONED:
        if partition != NOT_PARTITIONED:
            raise PartitionOutOfRangeError(
                f"partition {partition} is out of range: topic {topic!r} is not partitioned (its only partition is -1)"
            )
    elif not 0 <= partition < partitions:
        raise PartitionOutOfRangeError(
            f"partition {partition} is out of range: topic {topic!r} has partitions 0 to {partitions - 1}"
        )
    return partition


@dataclass(frozen=True, slots=True)
class Topic:
    """A named log of events.

    `partitions` is -1 for a topic that is not partitioned, else 1 to 32,767.
    """

    name: str
    partitions: int = NOT_PARTITIONED
    created_at: datetime | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_topic_name(self.name)
        check_partitions(self.partitions)

    @property
    def partitioned(self) -> bool:
        return self.partitions != NOT_PARTITIONED

    @property
    def all_partitions(self) -> tuple[int, ...]:
        """The partitions that events of this topic may carry; `(-1,)` when it is not partitioned."""
        return tuple(range(self.partitions)) if self.partitioned else (NOT_PARTITIONED,)

    @property
    def dead_letter_topic(self) -> str:
        """The topic that takes its dead letters, where one of that name is registered."""
        return self.name + DEAD_LETTER_SUFFIX


@dataclass(frozen=True, slots=True)
class Consumer:
    """A named reader of a topic with offsets of its own.

    A partitioned consumer has one offset for each partition of its topic, and as many active consumptions at most;
    one that is not partitioned reads the whole topic in its order.
    """

    topic: str
    name: str
    partitioned: bool = False

    def __post_init__(self) -> None:
        check_topic_name(self.topic)
        check_name("consumer name", self.name)


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """What the database knows of one consumer partition.

    `last_event_id` is the offset: the id of the last event that was consumed, 0 before the first. `epoch` counts the
    leases that the partition has had. `failed_event_id`, `attempts` and `failure` describe the event that the
    partition is retrying, if any; `retry_at` is when it is due again.
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

    @property
    def failing(self) -> bool:
        """Whether an event is being retried: one that another consumption has passed meanwhile does not count."""
        return self.failed_event_id is not None and self.failed_event_id > self.last_event_id

    @property
    def spent(self) -> bool:
        """Whether an event is being retried that has used up its attempts."""
        return self.failing and self.attempts >= self.max_attempts


@dataclass(frozen=True, slots=True)
class Publication:
    """An event to be published.

    `value` is any bytes, up to 64 MiB. Events with the same `key` keep their order and their partition; without a key
    the partition is drawn at random. `partition` overrides the partitioner. `metadata` maps strings to strings.

    Raises `InvalidPublicationError` for what cannot be stored, when the publication is made.
    """

    topic: str
    value: bytes
    key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    partition: int | None = None

    def __post_init__(self) -> None:
        check_topic_name(self.topic)
        value: object = self.value
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidPublicationError(
                f"value must be bytes, not {type(value).__name__}: encode it first, as UTF-8 or JSON for example"
            )
        if not isinstance(value, bytes):
            object.__setattr__(self, "value", bytes(value))
        if len(self.value) > MAX_VALUE_BYTES:
            raise InvalidPublicationError(
                f"value has {len(self.value)} bytes; {MAX_VALUE_BYTES} are allowed: publish a reference to it instead"
            )
        if self.key is not None:
            check_text("key", self.key, most=MAX_KEY_BYTES, error=InvalidPublicationError)
        metadata: object = self.metadata
        if not isinstance(metadata, Mapping):
            raise InvalidPublicationError(f"metadata must be a mapping, not {type(metadata).__name__}")
        for name, text in metadata.items():
            check_text("a metadata name", name, error=InvalidPublicationError)
            check_text(f"metadata {name!r}", text, error=InvalidPublicationError)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a topic's ordered log.

    `id` is its offset: unique and growing within the topic, over all its partitions, with gaps. `buffered_at` is when
    it was published, `created_at` when it was moved into the log.
    """

    topic: str
    id: int
    partition: int
    key: str | None
    value: bytes
    buffered_at: datetime
    created_at: datetime
    metadata: Mapping[str, Any]

    def as_publication(self, topic: str | None = None, **metadata: str) -> Publication:
        """The same key, value and metadata for another topic, with further metadata.

        Values of metadata that other publishers wrote as other JSON than strings become their JSON text.
        """
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.metadata.items()}
        return Publication(topic or self.topic, self.value, key=self.key, metadata={**texts, **metadata})


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The events of a topic with `after < id <= upto`, of one partition or, with -1, of all of them."""

    topic: str
    partition: int
    after: int
    upto: int

    def __post_init__(self) -> None:
        if not 0 <= self.after <= self.upto:
            raise ValidationError(f"no range of offsets: after {self.after} up to {self.upto}")

    @property
    def empty(self) -> bool:
        return self.after == self.upto

    def __str__(self) -> str:
        partition = "" if self.partition == NOT_PARTITIONED else f"[{self.partition}]"
        return f"{self.topic}{partition}({self.after}, {self.upto}]"
