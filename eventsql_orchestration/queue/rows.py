"""Messages as parameters and rows of the statements of queues."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, make_dataclass
from operator import itemgetter
from typing import Any, Final

from eventsql_orchestration.database.binary import decode_jsonb
from eventsql_orchestration.queue.arrays import bytes_array, float_array, integer_array, text_array, time_array
from eventsql_orchestration.queue.values import ArchivedMessage, Message, NewMessage, PeekedMessage
from eventsql_orchestration.validation import NO_METADATA, check_seconds, decode_metadata

_Unfrozen: Final[Any] = make_dataclass("_Unfrozen", [field.name for field in fields(Message)], slots=True)
"""A class with the slots of `Message`. Its objects become messages: a frozen dataclass takes four times as long to set
its fields, which was a tenth of the client's time of a message in a batch."""


def columns_of(messages: Sequence[NewMessage]) -> dict[str, bytes | None]:
    """The columns of messages as encoded arrays. A column with the default in every message is NULL."""
    priorities = [message.priority for message in messages]
    dues = [message.due for message in messages]
    delays = [message.delay for message in messages]
    return {
        "bodies": bytes_array([message.body for message in messages]),
        "keys": _texts([message.key for message in messages]),
        "metadata": _texts(
            [
                json.dumps(message.metadata, ensure_ascii=False, separators=(",", ":")) if message.metadata else None
                for message in messages
            ]
        ),
        "priorities": integer_array(priorities) if any(priorities) else None,
        "dues": time_array(dues) if any(dues) else None,
        "delays": float_array([check_seconds("delay", delay, zero=True) for delay in delays]) if any(delays) else None,
        "deduplication_ids": _texts([message.deduplication_id for message in messages]),
    }


def _texts(values: Sequence[str | None]) -> bytes | None:
    return text_array(values) if any(value is not None for value in values) else None


def held(messages: Collection[Message]) -> Mapping[str, list[int]]:
    """The ids of messages, each once, and their receipts."""
    receipts = {message.id: message.receipt for message in messages}
    return {"ids": list(receipts), "receipts": list(receipts.values())}


def read_metadata(text: str) -> Mapping[str, str]:
    """A message's metadata from their JSON."""
    if text == "{}":
        return NO_METADATA
    return decode_metadata(text)


_by_id: Final = itemgetter(0)
_by_priority: Final = itemgetter(6)


def received(rows: list[tuple[Any, ...]], shard: str | None) -> list[Message]:
    """The rows of the statements `take` and `take_in_order` as messages, the most urgent first."""
    rows.sort(key=_by_id)
    rows.sort(key=_by_priority, reverse=True)
    messages: list[Message] = []
    for id_, body, key, metadata, receives, receipt, priority, sent_at, history, _ in rows:
        message = _Unfrozen(
            id_, body, key, read_metadata(metadata), receives, receipt, priority, sent_at,
            () if history is None else decode_jsonb(history), shard,
        )  # fmt: skip
        message.__class__ = Message
        messages.append(message)
    return messages


def peeked(row: tuple[Any, ...], shard: str | None) -> PeekedMessage:
    """A row of the statement `peek`."""
    id_, body, key, metadata, receives, priority, sent_at, visible_at, state, origin, history = row
    return PeekedMessage(
        id_, body, key, read_metadata(metadata), receives, priority, sent_at, visible_at, state, origin, history or (),
        shard,
    )  # fmt: skip


def archived(row: tuple[Any, ...], shard: str | None) -> ArchivedMessage:
    """A row of the statement `archived`."""
    id_, body, key, metadata, receives, priority, sent_at, acknowledged_at = row
    return ArchivedMessage(id_, body, key, read_metadata(metadata), receives, priority, sent_at, acknowledged_at, shard)
