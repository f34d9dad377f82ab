"""The names of the side consumers that replay the windows of a backfill."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

MARK: Final = "__backfill_"

SIDE_CONSUMER: Final = re.compile(
    r"(?P<consumer>.+)__backfill_(?P<id>[a-z0-9][a-z0-9-]*)_(?P<after>\d+)_(?P<upto>\d+)(?:__into_(?P<into>.+))?",
    re.ASCII | re.DOTALL,
)


def backfill_of(consumer: str) -> str | None:
    """The id of the backfill that a side consumer belongs to; None for any other consumer."""
    match = SIDE_CONSUMER.fullmatch(consumer)
    return None if match is None else match["id"]


class _OfConsumer(Protocol):
    @property
    def consumer(self) -> str: ...


OfConsumer = TypeVar("OfConsumer", bound=_OfConsumer)


def without_backfills(items: Iterable[OfConsumer]) -> list[OfConsumer]:
    """The items, such as lags, that do not belong to a side consumer."""
    return [item for item in items if backfill_of(item.consumer) is None]
