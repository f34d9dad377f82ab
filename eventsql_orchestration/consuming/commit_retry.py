"""Retry state for rejected commits: how long the same events are tried again, and how large the next batch is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import psycopg

from eventsql_orchestration.errors import DatabaseBusyError

_UNRELATED: Final = ("08", "25", "53", "54000", "57P", "58")
"""SQLSTATEs and their classes that say nothing about the written rows: connections, a read-only server, resources, the
queue of notifications, the operator, files. No event is to blame, so the commit is tried again without limit."""

_TRANSIENT: Final = ("40", "55", "57")
"""Conflicts, locks, statement timeouts."""

_PERMANENT: Final = frozenset({"40002", "55000"})
"""SQLSTATEs of the transient classes for which no retry helps: a violated constraint, an object in the wrong state."""


def is_rejection(error: BaseException) -> bool:
    """Whether the server rejected a commit because of the written rows."""
    state = _sqlstate(error) if isinstance(error, psycopg.Error | DatabaseBusyError) else None
    return state is not None and not state.startswith(_UNRELATED)


def is_unrelated(error: BaseException) -> bool:
    """Whether the server refuses a write for a reason that all other writes meet, too."""
    state = _sqlstate(error)
    return state is not None and state.startswith(_UNRELATED)


def is_transient(error: BaseException) -> bool:
    """Whether the same commit may succeed later."""
    state = _sqlstate(error)
    return state is not None and state.startswith(_TRANSIENT) and state not in _PERMANENT


def _sqlstate(error: BaseException) -> str | None:
    cause = error if isinstance(error, psycopg.Error) else error.__cause__
    return cause.sqlstate if isinstance(cause, psycopg.Error) else None


@dataclass(frozen=True, slots=True)
class CommitRetryLimits:
    """After `attempts` transient rejections in a row, over `seconds` at least, the event that causes them is isolated.

    Later rejections of that event count as its failures. `batches` of a reduced size are handled before a batch of
    twice the size is tried, because a batch that cannot be read may cost a whole statement timeout.
    """

    attempts: int = 20
    seconds: float = 60.0
    batches: int = 20


class CommitRetry:
    """The retry state of one consumer partition, since its last commit of a full batch.

    Without `limits`, transient rejections are never blamed on an event.
    """

    def __init__(self, limits: CommitRetryLimits | None = None) -> None:
        self._limits = limits
        self._size: int | None = None
        self._rejected: int | None = None
        """The single event that was rejected so far; None for several events."""
        self._count = 0
        self._since = 0.0
        self._reduced_batches = 0

    def try_again(self, event: int | None) -> bool:
        """Count a transient rejection. Returns whether to try the same events again later.

        `event` is the id of the event if the batch had only one event. Each single event gets the full time when it is
        rejected first, because it did not cause the earlier rejections.
        """
        if self._limits is None:
            return True
        if event is None and self._size is not None:
            # Smaller batches come first.
            return False

        now = time.monotonic()
        if event != self._rejected or not self._count:
            self._rejected, self._count, self._since = event, 0, now
        self._count += 1
        return self._count < self._limits.attempts or now - self._since < self._limits.seconds

    def size(self, most: int) -> int:
        """The number of events for the next batch, at most `most`."""
        return most if self._size is None else min(self._size, most)

    def isolate(self) -> None:
        """Commit events one at a time. Batches double as long as commits succeed."""
        self._size = 1

    def halve(self, size: int) -> None:
        """Read smaller batches, because `size` events were too many to read."""
        self._size = max(1, size // 2)
        self._reduced_batches = (self._limits or CommitRetryLimits()).batches

    def committed(self, most: int) -> None:
        """Count a successful commit. Forgets all rejections once batches have their full size, `most`, again."""
        if self._reduced_batches:
            self._reduced_batches -= 1
        elif self._size is not None:
            self._size *= 2

        if self._size is None or self._size >= most:
            self._size, self._count = None, 0
