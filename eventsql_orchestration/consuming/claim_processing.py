"""Locking, processing and finishing a claim, each in a transaction that commits the claim's offset."""

from __future__ import annotations

from psycopg.pq import TransactionStatus

from eventsql_orchestration.consuming.batch import Batch, BatchResult
from eventsql_orchestration.consuming.claim_values import Claim
from eventsql_orchestration.consuming.partition import LockedPartition, lock
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.errors import ClaimLostError, ValidationError
from eventsql_orchestration.model import Event, OffsetRange
from eventsql_orchestration.storage.reading import LogReader


def lock_claim(connection: Connection, queries: Queries, claim: Claim) -> LockedPartition:
    """Lock a claim's partition in the caller's transaction.

    Raises `ClaimLostError` unless the claim still holds, and `ValidationError` outside of a transaction.
    """
    locked = lock(connection, queries, claim.key, wait=True)
    if connection.info.transaction_status is not TransactionStatus.INTRANS:
        raise ValidationError("a claim is committed in a transaction: use the connection of a `transaction()` block")
    if locked is None:
        raise ClaimLostError(f"{claim} is void: the consumer was deleted")

    # A consumer that was deleted and registered again counts its epochs from the start. A server that lacks the last
    # commits, as after a failover, gives the ids of claims again, too: then the owner is another one.
    if live_owner(connection, queries, claim) != claim.owner or locked.state.epoch != claim.epoch:
        raise ClaimLostError(f"{claim} was taken over or released")
    if locked.offset != claim.position:
        raise ClaimLostError(
            f"{claim} is void: another consumption moved the offset from {claim.position} to {locked.offset}"
        )
    return locked


def live_owner(connection: Connection, queries: Queries, claim: Claim) -> str | None:
    """The owner of a claim; None if it was committed or released. If the partition is not locked, that may change."""
    *_, owner, state = fetch_first(connection, queries("claim"), {"claim": claim.id}, prepare=False) or (None, None)
    return str(owner) if state == "claimed" else None


def read_range(connection: Connection, log: LogReader, wanted: OffsetRange, *, limit: int | None = None) -> list[Event]:
    """The events of a range, at most `limit`."""
    return log.read(
        connection, wanted.topic, partition=wanted.partition, after=wanted.after, upto=wanted.upto, limit=limit
    )


def read_part(connection: Connection, log: LogReader, wanted: OffsetRange, *, limit: int) -> tuple[list[Event], int]:
    """The next events of a range, a batch of at most `limit`, and the offset up to which the range was read."""
    events, more = log.read_batch(
        connection, wanted.topic, partition=wanted.partition, after=wanted.after, upto=wanted.upto, limit=limit
    )
    return events, events[-1].id if more else wanted.upto


def finish_claim(connection: Connection, queries: Queries, claim: Claim, state: str) -> bool:
    """End a claim and its lease in the caller's transaction; False if it had ended before."""
    if connection.execute(queries("finish_claim"), {"claim": claim.id, "state": state}, prepare=False).rowcount != 1:
        return False
    connection.execute(queries("end_lease"), {**claim.key.parameters(), "epoch": claim.epoch})
    return True


def ending(claim: Claim, result: BatchResult) -> str | None:
    """The state in which a batch leaves its claim; None if the claim continues."""
    if result.failure is not None:
        return "released"
    return "committed" if result.offset == claim.range.upto else None


def holder(claim: Claim) -> dict[str, object]:
    """The owner of a claim, as the statements take it."""
    return {**claim.key.parameters(), "claim": claim.id, "epoch": claim.epoch, "owner": claim.owner}


class ClaimSource:
    """The next batch of a claim. Closing the batch also renews the lease, or ends the claim."""

    def __init__(self, queries: Queries, log: LogReader, claim: Claim, lease: float) -> None:
        self.key = claim.key
        self._queries = queries
        self._log = log
        self._claim = claim
        self._lease = lease

    def open(self, connection: Connection, limit: int) -> Batch:
        rest = self._claim.remaining
        locked = lock_claim(connection, self._queries, self._claim)
        events, upto = read_part(connection, self._log, rest, limit=limit)
        return Batch(locked, events, upto)

    def close(self, connection: Connection, result: BatchResult) -> None:
        if (state := ending(self._claim, result)) is not None:
            finish_claim(connection, self._queries, self._claim, state)
        else:
            connection.execute(
                self._queries("renew_lease"), {**holder(self._claim), "lease": self._lease}, prepare=False
            )
