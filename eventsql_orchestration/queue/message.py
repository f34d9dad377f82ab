"""What a queue hands out, and the rules for what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES
from eventsql_orchestration.rules import MAX_VALUE_BYTES, check_text, check_whole

MAX_MESSAGES: Final = 10_000
"""In one receive. More would sit in memory longer than their visibility timeout lasts."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message as one receiver holds it, until it acknowledges or releases it or its visibility timeout ends.

    `receives` counts how often the message has been received, this time included. `receipt` belongs to this receive
    alone: the next receiver gets another one.
    """

    id: int
    body: bytes
    key: str | None
    metadata: Mapping[str, str]
    receives: int
    receipt: UUID


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The number of messages that could be received now, and of those that are delayed or held by a receiver."""

    visible: int
    invisible: int


def check_body(body: bytes) -> bytes:
    """Return a message's body, or raise `ValidationError`: any bytes, up to 64 MiB."""
    if not isinstance(body, bytes | bytearray | memoryview):
        raise ValidationError(f"body must be bytes, not {type(body).__name__}: encode it first, as UTF-8 for example")
    body = bytes(body)
    if len(body) > MAX_VALUE_BYTES:
        raise ValidationError(
            f"body has {len(body)} bytes; {MAX_VALUE_BYTES} are allowed: send a reference to it instead"
        )
    return body


def check_key(key: str | None) -> str | None:
    """Return a message's key, or raise `ValidationError`: text of at most 64 KiB without NUL."""
    return None if key is None else check_text("key", key, most=MAX_KEY_BYTES)


def check_max_messages(max_messages: object) -> int:
    """Return `max_messages`, or raise `ValidationError`: 1 to 10,000."""
    return check_whole("max_messages", max_messages, least=1, most=MAX_MESSAGES)
