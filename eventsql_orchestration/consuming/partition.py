"""A consumer partition: its identity, its lock, its offset."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from eventsql_orchestration.consumer import ConsumerState, EventFilter
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.held_by_handlers import holding
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.storage.reading import MAX_OFFSET

TRANSACTION_ENDED = (
    "the handler ended or broke the transaction that it was given: use `with connection.transaction():` for a part "
    "that may fail, leave commit and rollback out, and read `cursor.stream()` to its end"
)

ROLLED_BACK = "the handler rolled its effects back by psycopg.Rollback: raise another error if it has failed"


@dataclass(frozen=True, slots=True)
class ConsumerPartition:
    """The identity of a consumer partition."""

    topic: str
    consumer: str
    partition: int

    def parameters(self) -> dict[str, object]:
        return {"topic": self.topic, "consumer": self.consumer, "partition": self.partition}

    def held(
        self, connection: Connection, schema: str, locked: Literal["consumer", "delivery"] = "consumer"
    ) -> AbstractContextManager[None]:
        """A block for handlers whose transaction has locked the partition, or only one of its deliveries."""
        return holding(connection, schema, self, locked, self.topic, self.consumer, str(self.partition))

    def __str__(self) -> str:
        partition = "" if self.partition < 0 else f" partition {self.partition}"
        return f"consumer {self.consumer!r} of topic {self.topic!r}{partition}"


@dataclass(frozen=True, slots=True)
class LockedPartition:
    """A consumer partition that this `transaction` has locked."""

    key: ConsumerPartition
    state: ConsumerState
    transaction: str

    @property
    def now(self) -> datetime:
        """The database's clock when the partition was locked."""
        return self.state.read_at

    @property
    def offset(self) -> int:
        return self.state.last_event_id

    @property
    def upto(self) -> int:
        """The last offset that may be consumed for now."""
        return MAX_OFFSET if self.state.until is None else self.state.until

    @property
    def leased(self) -> bool:
        return self.state.leased

    def at(self, offset: int) -> LockedPartition:
        """The same partition after this transaction has moved its offset."""
        return replace(self, state=replace(self.state, last_event_id=offset))

    @property
    def retry_in(self) -> float:
        """Seconds until the failed event is due again; 0 if none has failed, or if it is due."""
        if not self.state.failing or self.state.retry_at is None:
            return 0.0
        return max(0.0, (self.state.retry_at - self.now).total_seconds())


def transaction_lost(connection: Connection) -> bool:
    """Whether the transaction that locked the partition is over or broken."""
    return connection.info.transaction_status is not TransactionStatus.INTRANS


def lock(connection: Connection, queries: Queries, key: ConsumerPartition, *, wait: bool) -> LockedPartition | None:
    """Lock a consumer partition in the caller's transaction.

    None if the consumer does not exist or, with `wait=False`, if another transaction holds the lock.
    """
    query = queries("await_consumer" if wait else "lock_consumer")

    # A caller's connection may have its own row factory, and a handler's session another style of times.
    row = connection.cursor(row_factory=tuple_row, binary=True).execute(query, key.parameters()).fetchone()
    if row is None:
        return None

    *columns, conditions, until, transaction = row
    state = ConsumerState(*[*columns, EventFilter.from_json(conditions), until])
    return LockedPartition(key, state, transaction)


def advance(
    connection: Connection, queries: Queries, key: ConsumerPartition,
    *, after: int, upto: int, first: int | None, consumed: int, transaction: str | None = None,
) -> None:  # fmt: skip
    """Move an offset from `after` to `upto`; `consumed` events lie between them, `first` is the id of the first.

    Raises `ClaimLostError` if the offset is not at `after`. Raises `psycopg.ProgrammingError` if the current
    transaction is not `transaction`, the one that locked the partition.
    """
    values = {"after": after, "upto": upto, "first": first, "consumed": consumed, "transaction": transaction}
    cursor = connection.execute(queries("advance"), {**key.parameters(), **values})
    if cursor.rowcount == 1:
        return

    current = fetch_first(connection, sql.SQL("SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text"))
    if transaction is not None and current != (transaction,):
        raise psycopg.ProgrammingError(TRANSACTION_ENDED)
    raise ClaimLostError(f"{key} is not at offset {after} any more: another consumption moved it")
