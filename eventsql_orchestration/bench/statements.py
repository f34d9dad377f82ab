"""Counts the statements of a process at the driver: a server without extensions does not count statements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import psycopg
from psycopg._connection_base import BaseConnection

from eventsql_orchestration.database.single_statement import SingleStatement

# `_exec_command` and `_run` are private. psycopg sends BEGIN, COMMIT and savepoints only through the first, and they
# are statements. Each method of a single statement calls the second.
_SENDERS: Final = (
    *((psycopg.Cursor, name) for name in ("execute", "executemany", "stream", "copy")),
    (BaseConnection, "_exec_command"),
    (SingleStatement, "_run"),
)


class Statements:
    """The number of statements that all connections of this process have sent."""

    def __init__(self) -> None:
        self.sent = 0
        self._lock = threading.Lock()

    def counting(self, sender: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the driver that counts its calls."""

        @wraps(sender)
        def count_and_send(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.sent += 1
            return sender(*arguments, **options)

        return count_and_send


@contextmanager
def counted() -> Iterator[Statements]:
    """Count the statements of all threads in the block, transaction control included."""
    statements = Statements()
    before = [(owner, name, getattr(owner, name)) for owner, name in _SENDERS]
    for owner, name, sender in before:
        setattr(owner, name, statements.counting(sender))
    try:
        yield statements
    finally:
        for owner, name, sender in before:
            setattr(owner, name, sender)
