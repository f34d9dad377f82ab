"""Counts what a process says to the database, at the driver: a server without extensions does not count statements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import psycopg
from psycopg._connection_base import BaseConnection

# `_exec_command` is private, but psycopg sends BEGIN, COMMIT and savepoints by nothing else, and they are statements.
_SENDERS: Final = (
    (psycopg.Cursor, "execute"),
    (psycopg.Cursor, "executemany"),
    (psycopg.Cursor, "stream"),
    (psycopg.Cursor, "copy"),
    (BaseConnection, "_exec_command"),
)


class Statements:
    """How many statements every connection of this process has sent."""

    def __init__(self) -> None:
        self._sent = 0
        self._lock = threading.Lock()

    @property
    def sent(self) -> int:
        return self._sent

    def add(self) -> None:
        with self._lock:
            self._sent += 1


@contextmanager
def counted() -> Iterator[Statements]:
    """Count what is sent inside of the block, by all threads, transaction control included."""
    statements = Statements()
    before = [(owner, name, getattr(owner, name)) for owner, name in _SENDERS]
    for owner, name, sender in before:
        setattr(owner, name, _counting(sender, statements))
    try:
        yield statements
    finally:
        for owner, name, sender in before:
            setattr(owner, name, sender)


def _counting(sender: Callable[..., Any], statements: Statements) -> Callable[..., Any]:
    @wraps(sender)
    def count_and_send(*arguments: Any, **options: Any) -> Any:
        statements.add()
        return sender(*arguments, **options)

    return count_and_send
