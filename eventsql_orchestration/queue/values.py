"""The values of queues: messages to send, received messages, definitions and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES
from eventsql_orchestration.validation import (
    MAX_VALUE_BYTES,
    NO_METADATA,
    Duration,
    check_metadata,
    check_seconds,
    check_text,
    check_time,
    check_whole,
)

MAX_PRIORITY: Final = 9
"""The highest priority; 0 is the lowest and the default."""

MAX_DEDUPLICATION_BYTES: Final = 1_024


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to send.

    `body` is up to 64 MiB. The receiver gets `key` and `metadata` with it. In an ordered queue, messages with the same
    `key` are received in order. A message is received at the earliest after `delay` seconds, or at the time `due`.
    Messages of a higher `priority` (0 to 9) are received first. A message whose `deduplication_id` (1,024 bytes) was
    sent within the queue's deduplication window is not sent again.

    Raises `ValidationError` for values that cannot be stored.
    """

    body: bytes
    key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    delay: Duration = 0.0
    due: datetime | None = None
    priority: int = 0
    deduplication_id: str | None = None

    def __post_init__(self) -> None:
        body: object = self.body
        if not isinstance(body, bytes | bytearray | memoryview):
            raise ValidationError(
                f"body must be bytes, not {type(body).__name__}: encode it first, as UTF-8 for example"
            )
        if not isinstance(body, bytes):
            object.__setattr__(self, "body", bytes(body))
        if len(self.body) > MAX_VALUE_BYTES:
            raise ValidationError(
                f"body has {len(self.body)} bytes; {MAX_VALUE_BYTES} are allowed: send a reference to it instead"
            )
        if self.key is not None:
            check_text("key", self.key, most=MAX_KEY_BYTES)
        if self.metadata is not NO_METADATA:
            object.__setattr__(self, "metadata", check_metadata(self.metadata))
        object.__setattr__(self, "delay", check_seconds("delay", self.delay, zero=True))
        if self.due is not None:
            object.__setattr__(self, "due", check_time("due", self.due))
            if self.delay:
                raise ValidationError("a message has either a delay or a due time, not both")
        object.__setattr__(self, "priority", check_whole("priority", self.priority, least=0, most=MAX_PRIORITY))
        if self.deduplication_id is not None:
            check_text("deduplication_id", self.deduplication_id, most=MAX_DEDUPLICATION_BYTES)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that one receiver holds until it acknowledges or releases it, or its visibility timeout ends.

    `receives` counts how often the message was received, including this time. `receipt` identifies this receive: the
    next receiver gets another. `history` has an entry for each receive that ended without an acknowledgement, the last
    20: `receive`, `at` and `reason`. `shard` is the name of its database, if the platform has several.
    """

    id: int
    body: bytes
    key: str | None
    metadata: Mapping[str, str]
    receives: int
    receipt: int
    priority: int
    sent_at: datetime
    history: Sequence[Mapping[str, Any]] = ()
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A message that was looked at, not received.

    `state` is `visible`, `in flight`, `delayed` or `blocked`: waiting for an earlier message of its key. `visible_at`
    is None for a blocked message. `origin` is the queue that a dead letter comes from.
    """

    id: int
    body: bytes
    key: str | None
    metadata: Mapping[str, str]
    receives: int
    priority: int
    sent_at: datetime
    visible_at: datetime | None
    state: Literal["visible", "in flight", "delayed", "blocked"]
    origin: str | None
    history: Sequence[Mapping[str, Any]] = ()
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """A message that was acknowledged."""

    id: int
    body: bytes
    key: str | None
    metadata: Mapping[str, str]
    receives: int
    priority: int
    sent_at: datetime
    acknowledged_at: datetime
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class QueueDefinition:
    """A queue as the database knows it. Durations are in seconds; None: without a limit, or without an archive."""

    name: str
    ordered: bool
    visibility_timeout: float
    max_receives: int | None
    dead_letters: str | None
    retention: float | None
    deduplication_window: float
    created_at: datetime


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """The numbers of a queue's messages by state, their ages in seconds, and its rates in messages per second.

    `dead` are the messages that this queue has moved to its dead letters and that are still there. `oldest` is the age
    of the message that was sent first, `waiting` is the longest wait of a visible message. The rates are those of the
    last minute. They are None for a queue without a `retention`, which keeps nothing of acknowledged messages. When the
    retention changes, messages that were acknowledged before do not count any more.
    """

    queue: str
    visible: int
    in_flight: int
    delayed: int
    blocked: int
    dead: int
    oldest: float | None
    waiting: float | None
    sent_per_second: float | None
    acknowledged_per_second: float | None

    @property
    def depth(self) -> int:
        """The number of all messages, without the dead letters."""
        return self.visible + self.in_flight + self.delayed + self.blocked


@dataclass(frozen=True, slots=True)
class ErasedMessages:
    """The messages of some keys that are erased, or would be: in the queue, among its dead letters, in its archive."""

    messages: int
    dead_letters: int
    archived: int

    def __add__(self, other: ErasedMessages) -> ErasedMessages:
        return ErasedMessages(
            self.messages + other.messages, self.dead_letters + other.dead_letters, self.archived + other.archived
        )

    @property
    def total(self) -> int:
        """The number of all these messages."""
        return self.messages + self.dead_letters + self.archived


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The number of messages that can be received now, and of all other messages of the queue."""

    visible: int
    invisible: int
