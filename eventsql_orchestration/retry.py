"""Retries: random pauses for a limited time, and pauses that grow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from eventsql_orchestration.errors import DatabaseBusyError

T = TypeVar("T")

PAUSE: Final = (0.05, 0.25)
"""The shortest and the longest pause between two attempts, in seconds. It is random: if two processes hinder each
other, one of them then goes first."""

LONGEST_AWAY: Final = 5.0
"""The longest pause of a thread while its database is away, in seconds."""


def doubled(first: float, times: int, most: float) -> float:
    """A pause that begins with `first` seconds and has doubled `times` times, up to `most` seconds."""
    # A larger exponent could overflow.
    return min(first * 2.0 ** min(times, 30), most)


def pause_while_away(failures: int) -> float:
    """The pause of a thread that has failed `failures` times in a row because its database is away, in seconds."""
    return doubled(0.1, failures - 1, LONGEST_AWAY)


class Backoff:
    """Pauses between attempts, for `seconds` from now on. With 0 seconds there is only the first attempt."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def lasts(self) -> bool:
        """Wait for the next attempt, and return True; return False at once if the time is up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, random.uniform(*PAUSE)))  # noqa: S311 - no secret
        return True


def while_busy(attempt: Callable[[], T], *, seconds: float, message: Callable[[DatabaseBusyError], str]) -> T:
    """Repeat `attempt` for `seconds` while other transactions are in its way; gives its result.

    Raises `DatabaseBusyError` after that time, with a message that is made from the last attempt's error.
    """
    retry = Backoff(seconds)
    while True:
        try:
            return attempt()
        except DatabaseBusyError as error:
            if not retry.lasts():
                raise DatabaseBusyError(message(error)) from error
