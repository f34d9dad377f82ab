"""Messages, and the rules for what a queue takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES
from eventsql_orchestration.validation import MAX_VALUE_BYTES, check_text, check_whole

MAX_MESSAGES: Final = 10_000
"""The most messages of one receive. More would wait in memory for longer than their visibility timeout."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message that one receiver holds until it acknowledges or releases it, or its visibility timeout ends.

    `receives` counts how often the message was received, including this time. `receipt` identifies this receive; the
    next receiver gets another.
    """

    id: int
    body: bytes
    key: str | None
    metadata: Mapping[str, str]
    receives: int
    receipt: UUID


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The number of messages that can be received now, and of messages that are delayed or held by a receiver."""

    visible: int
    invisible: int


def check_body(body: bytes) -> bytes:
    """Return a message's body: bytes, up to 64 MiB. Raises `ValidationError`."""
    if not isinstance(body, bytes | bytearray | memoryview):
        raise ValidationError(f"body must be bytes, not {type(body).__name__}: encode it first, as UTF-8 for example")
    body = bytes(body)
    if len(body) > MAX_VALUE_BYTES:
        raise ValidationError(
            f"body has {len(body)} bytes; {MAX_VALUE_BYTES} are allowed: send a reference to it instead"
        )
    return body


def check_key(key: str | None) -> str | None:
    """Return a message's key: text of at most 64 KiB without NUL. Raises `ValidationError`."""
    return None if key is None else check_text("key", key, most=MAX_KEY_BYTES)


def check_max_messages(max_messages: object) -> int:
    """Return `max_messages`: 1 to 10,000. Raises `ValidationError`."""
    return check_whole("max_messages", max_messages, least=1, most=MAX_MESSAGES)
