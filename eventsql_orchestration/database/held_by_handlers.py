"""The locks of the transactions of this thread's handlers: a handler's call that waits for one of them would never end.

The server does not notice: the handler's transaction waits for its client, and not for a lock. A call in another thread
or through another address of the database, such as a pooler's, is not recognised, and waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from eventsql_orchestration.database.connections import Connection, address
from eventsql_orchestration.errors import ValidationError


class _Lock(NamedTuple):
    """A lock of a handler's transaction; `what` names the locked thing in an error."""

    connection: Connection
    schema: str
    key: tuple[str, ...]
    what: object


class _Locks(threading.local):
    """The locks of this thread's handlers. A handler may call another one, so there may be several."""

    def __init__(self) -> None:
        self.held: list[_Lock] = []


_LOCKS: Final = _Locks()


@contextmanager
def holding(connection: Connection, schema: str, what: object, *key: str) -> Iterator[None]:
    """Run handlers in the block, in a transaction on `connection` that has locked `what`."""
    # The block of a lease may end in another thread, and before a block that began later.
    held, lock = _LOCKS.held, _Lock(connection, schema, key, what)
    held.append(lock)
    try:
        yield
    finally:
        held.remove(lock)


def check_not_held(connection: Connection, schema: str, *key: str) -> None:
    """Raise `ValidationError` if a handler of this thread has locked a thing whose key begins with `key`.

    Call it on a connection that is about to wait for such locks.
    """
    for lock in _LOCKS.held:
        if lock.schema != schema or lock.key[: len(key)] != key or lock.connection.closed:
            continue
        if address(lock.connection) == address(connection):
            raise ValidationError(
                f"the handler of {lock.what} has locked it, and this call would wait for the end of the handler: make "
                "the call in another thread, and let the handler return without waiting for that thread"
            )
