"""What the transactions of this thread's handlers have locked: a call of a handler that waits for it would never end.

The server does not notice: the handler's transaction waits for its client, and not for a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.errors import ValidationError

_Place: TypeAlias = tuple[str, str, int, str, str]


class _Held(threading.local):
    """The locked things of this thread: the database and the schema, the key, and the name for an error."""

    def __init__(self) -> None:
        self.locked: list[tuple[_Place, tuple[str, ...], str]] = []


_HELD = _Held()


def _place(connection: Connection, schema: str) -> _Place:
    info = connection.info
    return info.host, info.hostaddr, info.port, info.dbname, schema


@contextmanager
def holding(connection: Connection, schema: str, what: str, *key: str) -> Iterator[None]:
    """Run a handler in the block, in a transaction on `connection` that has locked `what`."""
    _HELD.locked.append((_place(connection, schema), key, what))
    try:
        yield
    finally:
        _HELD.locked.pop()


def check_not_held(connection: Connection, schema: str, *key: str) -> None:
    """Raise `ValidationError` if a handler of this thread has locked a thing whose key begins with `key`.

    Call it on a connection that is about to wait for such locks.
    """
    for place, held, what in _HELD.locked:
        if held[: len(key)] == key and place == _place(connection, schema):
            raise ValidationError(
                f"the handler of {what} has locked it, and this call would wait for the end of the handler: make the "
                "call in another thread, and let the handler return without waiting for that thread"
            )
