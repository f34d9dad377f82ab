"""Looking after the messages of a queue in one database, and after the archive of acknowledged messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Database, Platform, Queries, database_of
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one, query_all
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import DatabaseBusyError, QueueInUseError
from eventsql_orchestration.queue.queue_table import QueueTable
from eventsql_orchestration.queue.rows import archived, peeked
from eventsql_orchestration.queue.values import (
    ArchivedMessage,
    ErasedMessages,
    PeekedMessage,
    QueueDefinition,
    QueueStatistics,
)
from eventsql_orchestration.retry import while_busy
from eventsql_orchestration.validation import advised, counted

T = TypeVar("T")

PURGED_AT_ONCE: Final = 10_000
"""Messages that one transaction deletes or moves."""

WAIT_SECONDS: Final = 0.5
"""The most seconds for which one attempt to delete a queue, or to delete or move messages, waits for each lock and
keeps others waiting. This is shorter than the server's `deadlock_timeout`, so that the attempt gives way, and not a
sender or receiver that waits for it."""

RETRY_SECONDS: Final = 10.0
"""Seconds for which such an attempt is repeated."""


class QueueUpkeep:
    """Looking at the messages of a queue, deleting them, and moving its dead letters back."""

    def __init__(self, table: QueueTable) -> None:
        self._table = table
        self._database = table.database
        self._queries = Queries("queue", table.database.schema)

    def peek(self, limit: int) -> list[PeekedMessage]:
        values = {"queue": self._table.id(), "limit": limit}
        rows = query_all(self._database, self._queries("peek"), values, prepare=False)
        return [peeked(row, self._table.shard) for row in rows]

    def statistics(self) -> QueueStatistics:
        queue = self._table.id()
        with self._database.connection() as connection:
            found = fetch_first(connection, self._queries("expiry"), {"queue": queue}, prepare=False)
            expiry = found[0] if found else None
            *states, sent, acknowledged = fetch_one(
                connection, self._queries("statistics"), {"queue": queue, "expiry": expiry}, prepare=False
            )
        # Without an archive, nothing is known of acknowledged messages.
        rates = (None, None) if expiry is None else (sent / 60, acknowledged / 60)
        return QueueStatistics(self._table.name, *states, *rates)

    def purge(self, purged: int) -> int:
        """Delete the messages that are there, in transactions of 10,000.

        Gives their number, with the number `purged` on other shards.
        """
        return self._purge(purged, promote=self._table.known().ordered)

    def _purge(self, purged: int, *, promote: bool) -> int:
        queue = self._table.id()
        with self._database.connection() as connection:
            (upto,) = fetch_one(connection, self._queries("newest"), {"queue": queue}, prepare=False)
        values = {"queue": queue, "upto": upto, "limit": PURGED_AT_ONCE}

        def purge(connection: Connection) -> int:
            deleted: int = fetch_one(connection, self._queries("purge"), values, prepare=False)[0]
            if promote:
                # If the first message of a key was deleted alone, the next message of the key becomes the first.
                connection.execute(self._queries("stranded"), {"queue": queue}, prepare=False)
            return deleted

        while deleted := self._giving_way(purge, f"may keep messages, with {counted(purged, 'message')} deleted"):
            purged += deleted
        return purged

    def count_of_keys(self, keys: Collection[str]) -> ErasedMessages:
        values = {"queue": self._table.id(), "keys": list(keys)}
        with self._database.by_admin(), self._database.connection() as connection:
            return ErasedMessages(*fetch_one(connection, self._queries("count_of_keys"), values, prepare=False))

    def erase(self, keys: Collection[str], erased: ErasedMessages) -> ErasedMessages:
        """Delete messages of keys, in transactions of 10,000, and then the archived messages.

        Gives their numbers, with the numbers `erased` on other shards.
        """
        self.count_of_keys(keys)  # raises, before a message is deleted, for a role that may not read the archive
        values = {"queue": self._table.id(), "keys": list(keys), "limit": PURGED_AT_ONCE}

        def erase(connection: Connection) -> ErasedMessages | None:
            messages, dead_letters, queues = fetch_one(connection, self._queries("erase"), values, prepare=False)
            for queue in queues or ():
                # A message that a transaction holds stays. It may have waited behind a deleted message.
                connection.execute(self._queries("promote"), {**values, "queue": queue}, prepare=False)
            return None if queues is None else ErasedMessages(messages, dead_letters, 0)

        while True:
            outcome = f"may keep messages of these keys, with {counted(erased.total, 'message')} deleted"
            if (deleted := self._giving_way(erase, outcome)) is None:
                break
            erased += deleted
        with self._database.connection() as connection:
            archived = connection.execute(self._queries("erase_archived"), values, prepare=False).rowcount
        return erased + ErasedMessages(0, 0, archived)

    def check_deletable(self, *, force: bool) -> None:
        """Raises `QueueInUseError` if another queue needs it, and, without `force`, if it has messages."""
        with self._database.by_admin(), self._database.connection() as connection:
            connection.execute(self._queries("may_delete"))
            self._check_deletable(connection, force=force)

    def _check_deletable(self, connection: Connection, *, force: bool) -> None:
        name, given = self._table.name, {"queue": self._table.id()}
        messages, archive, letters, origins = fetch_one(connection, self._queries("holdings"), given, prepare=False)
        if origins:
            raise QueueInUseError(
                f"queue {name!r} is kept, because it takes the dead letters of {', '.join(map(repr, origins))}: delete "
                f"that queue first, or give it another queue for dead letters: `"
                f"{advised('queue create --dead-letters NAME', origins[0])}`"
            )
        held = {"messages": messages, "archived messages": archive, "dead letters that could be redriven": letters}
        if not force and any(held.values()):
            what = " and ".join(kind for kind, found in held.items() if found)
            raise QueueInUseError(
                f"queue {name!r} is kept, because it has {what}: to delete it with them, use "
                f"`{advised('queue delete --execute --force', name)}` (in Python force=True)"
            )

    def delete(self, *, force: bool) -> None:
        """Delete the queue. Raises as `check_deletable`, and `DatabaseBusyError` while other transactions use it."""
        given = {"queue": self._table.id()}
        # All queues wait for the deletion itself, so it must leave little to delete.
        if force:
            self._purge(0, promote=False)
        with self._database.connection() as connection:
            for statement in ("clear_archive", "clear_deduplication"):
                connection.execute(self._queries(statement), {**given, "all": force}, prepare=False)

        def delete(connection: Connection) -> None:
            # After this lock, each message that a sender has committed can be seen, and no further message is sent.
            connection.execute(self._queries("lock"), prepare=False)
            self._check_deletable(connection, force=force)
            for statement in ("delete_messages", "clear_archive", "delete_deduplication", "delete_queue"):
                connection.execute(self._queries(statement), {**given, "all": True}, prepare=False)

        self._giving_way(delete, "is emptied, but kept" if force else "is kept")

    def dead_letters(self, ids: Sequence[int]) -> set[int]:
        """The given ids that are dead letters of the queue, held or not."""
        values = {"queue": self._table.id(), "ids": list(ids)}
        return {found for (found,) in query_all(self._database, self._queries("dead_letters"), values, prepare=False)}

    def redrive(self, limit: int | None, ids: Sequence[int] | None, redriven: int) -> int:
        """Move dead letters back, in transactions of 10,000, up to `limit` on all shards.

        Gives their number, with the number `redriven` on other shards.
        """
        values = {
            "queue": self._table.id(),
            "ordered": self._table.known().ordered,
            "ids": None if ids is None else list(ids),
        }
        while limit is None or redriven < limit:
            most = PURGED_AT_ONCE if limit is None else min(limit - redriven, PURGED_AT_ONCE)
            outcome = f"may keep dead letters, with {counted(redriven, 'dead letter')} moved back"
            moved = self._giving_way(partial(self._redrive, {**values, "limit": most}), outcome)
            if moved:
                self._table.notify()
            redriven += moved
            if moved < most:
                break
        return redriven

    def _redrive(self, values: Mapping[str, Any], connection: Connection) -> int:
        # The rows get their new ids in the order of this index.
        connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        left = fetch_all(connection, self._queries("redrive"), values, prepare=False)
        keys: dict[int, set[str]] = {}
        for queue, key in left:
            if queue is not None:
                keys.setdefault(queue, set()).add(key)
        for queue, of_queue in keys.items():
            # If the first dead letter of a key has left, the next dead letter of the key becomes the first.
            promoted = {"queue": queue, "keys": sorted(of_queue)}
            connection.execute(self._queries("promote"), promoted, prepare=False)
        return len(left)

    def _giving_way(self, work: Callable[[Connection], T], outcome: str) -> T:
        """Do `work` in a transaction that lets its locks go and begins again while other transactions are in its way.

        `outcome` says for the error what becomes of the queue if they do not end.
        """

        def attempt() -> T:
            with self._database.transaction() as connection:
                wait_at_most(connection, WAIT_SECONDS)
                return work(connection)

        def message(error: DatabaseBusyError) -> str:
            return (
                f"queue {self._table.name!r} {outcome}: transactions that use queues do not end ({error.message}): "
                "try again later"
            )

        return while_busy(attempt, seconds=RETRY_SECONDS, message=message)

    def archived(self, limit: int) -> list[ArchivedMessage]:
        values = {"queue": self._table.id(), "limit": limit}
        with self._database.by_admin():
            rows = query_all(self._database, self._queries("archived"), values, prepare=False)
        return [archived(row, self._table.shard) for row in rows]


def list_queues(database: Database | Platform) -> list[QueueDefinition]:
    """Every queue of a database, by name. `database` is a platform, one of its shards, or a `Database`."""
    database = database_of(database)
    rows = query_all(database, Queries("queue", database.schema)("definition"), {"name": None}, prepare=False)
    return [QueueDefinition(*row[2:]) for row in rows]


def drop_expired_archives(database: Database | Platform) -> list[str]:
    """Drop the parts of the archive whose messages have all expired. Gives the names of the dropped tables.

    `database` is a platform, one of its shards, or a `Database`. Raises `DatabaseBusyError` if a reader keeps a part
    for longer than 5 s; the next call continues.
    """
    database = database_of(database)
    queries = Queries("queue", database.schema)
    dropped: list[str] = []
    with database.connection() as connection:
        archive = {"archive": f'"{database.schema}".queue_archive'}
        names = [name for (name,) in connection.execute(queries("expired_archives"), archive, prepare=False)]
        for name in names:
            try:
                with connection.transaction():
                    wait_at_most(connection, 5.0)
                    connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(database.schema, name)))
            except psycopg.errors.LockNotAvailable as error:
                raise DatabaseBusyError(f"table {name} of the archive is being read: try again") from error
            dropped.append(name)
    return dropped
