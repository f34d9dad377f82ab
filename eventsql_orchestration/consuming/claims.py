"""Claims: leased, immutable ranges of offsets for consumers whose work does not fit into a transaction.

A claim is a row. Making one takes the consumer partition under a new epoch until the lease expires. Offsets are
committed only while that epoch is still the partition's and the offset is where the owner left it. So an owner that was
believed dead commits nothing, and neither does an owner that was overtaken by a consumer without leases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consumer import Consumer
from eventsql_orchestration.consuming.batch import Batch, BatchResult, BatchRunner, matching
from eventsql_orchestration.consuming.claim_making import ClaimMaker, ClaimRequest
from eventsql_orchestration.consuming.claim_processing import (
    ClaimSource,
    ending,
    finish_claim,
    holder,
    lock_claim,
    read_part,
    read_range,
)
from eventsql_orchestration.consuming.claim_pruning import ClaimPruning
from eventsql_orchestration.consuming.claim_values import Claim, LastClaim, NoClaim, PartitionClaims
from eventsql_orchestration.consuming.commit_retry import CommitRetry
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.failures import Failure, record_failure
from eventsql_orchestration.consuming.handlers import BatchHandler, check_handler
from eventsql_orchestration.consuming.partition import ConsumerPartition, advance, lock
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.database.load import too_much
from eventsql_orchestration.database.rows import fetch_all, query_first
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import (
    ClaimLostError,
    ClaimNotFoundError,
    DatabaseBusyError,
    DatabaseError,
    EventSQLError,
    ValidationError,
)
from eventsql_orchestration.model import NOT_PARTITIONED, Event
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.threads import Wake, join_all, start_thread
from eventsql_orchestration.validation import Duration, check_batch, check_seconds, in_seconds

__all__ = ["Claim", "Claims", "LastClaim", "NoClaim", "PartitionClaims"]

logger = logging.getLogger(__name__)

LOCK_TIMEOUT: Final = 10.0
"""Seconds to wait for the transaction of an owner that was believed dead, when its claim is taken over or released."""


@checked
class Claims:
    """Makes, renews, commits and releases claims."""

    def __init__(self, database: Database, dead_letters: DeadLetters) -> None:
        self._database = database
        self._runner = BatchRunner(database, dead_letters)
        self._queries = Queries("log", database.schema)
        self._on_log = LogQueries("consumers", database.schema)
        self._log = LogReader(database.schema)
        self._looks = Queries("claims", database.schema)
        self._maker = ClaimMaker(database, dead_letters)
        self._pruning = ClaimPruning(database)

    def claim(
        self, topic: str, consumer: str, partition: int = NOT_PARTITIONED,
        *, owner: str, min_events: int = 1, max_events: int = 10_000, max_wait: Duration = 10.0,
        lease: Duration = 60.0, timeout: Duration = 10.0, isolate: bool = False, instead_of: Claim | None = None,
    ) -> Claim | NoClaim:  # fmt: skip
        """Claim the next `min_events` to `max_events` of a consumer partition for `owner`.

        Fewer than `min_events` are claimed once the oldest has waited `max_wait` seconds. The claim holds for `lease`
        seconds unless it is renewed. No statement takes longer than `timeout` seconds. With `isolate`, an event that
        failed is claimed alone. With `instead_of`, nothing is claimed if that claim has ended.

        Returns a `NoClaim` when another transaction has locked the partition, another owner leases it, it is paused or
        blocked, it waits for a retry or for other partitions, or too few events wait. Raises `ConsumerNotFoundError`.
        """
        timeout = check_seconds("timeout", timeout, zero=False)
        check_batch(min_events, max_events)
        wanted = ClaimRequest(
            ConsumerPartition(topic, consumer, partition), owner=owner, min_events=min_events, max_events=max_events,
            max_wait=in_seconds(max_wait), lease=in_seconds(lease), timeout=timeout, isolate=isolate,
            instead_of=instead_of,
        )  # fmt: skip
        claimed = self._maker.claim(wanted)
        if isinstance(claimed, Claim):
            self._pruning.made(claimed.key, claimed.id)
        return claimed

    def get(self, claim_id: int) -> tuple[Claim, str]:
        """A claim and its state: `claimed`, `committed` or `released`. Raises `ClaimNotFoundError`."""
        row = query_first(self._database, self._queries("claim"), {"claim": claim_id}, prepare=False)
        if row is None:
            raise ClaimNotFoundError(
                f"claim {claim_id} does not exist: it was never made, it ended long ago, or its consumer or topic was "
                "deleted"
            )
        return Claim.of_row(row), str(row[9])

    def live(self, topic: str, consumer: str, partition: int = NOT_PARTITIONED) -> Claim | None:
        """The partition's claim that is neither committed nor released, even if its lease has expired."""
        key = ConsumerPartition(topic, consumer, partition)
        row = query_first(self._database, self._queries("live_claim"), key.parameters(), prepare=False)
        return None if row is None else Claim.of_row(row)

    def last(self, topic: str, consumer: str, partition: int = NOT_PARTITIONED) -> LastClaim | None:
        """The claim of a partition that reaches furthest, in any state; None if none is left.

        After a seek back, this is a claim from before the seek, until the consumer has passed that claim's end.
        """
        key = ConsumerPartition(topic, consumer, partition)
        row = query_first(self._database, self._looks("last"), key.parameters(), prepare=False)
        return None if row is None else LastClaim(*row)

    def first_of(self, owner: str, topic: str, consumer: str, partition: int = NOT_PARTITIONED) -> int | None:
        """The id of the first claim of a partition that an owner has committed; None if none is left."""
        parameters = {**ConsumerPartition(topic, consumer, partition).parameters(), "owner": owner}
        row = query_first(self._database, self._looks("first_of_owner"), parameters, prepare=False)
        return None if row is None else row[0]

    def standings(self, consumer: Consumer) -> list[PartitionClaims]:
        """All partitions of a consumer in their order, read with one statement that locks nothing.

        Empty if the consumer does not exist. Raises `TopicNotFoundError`.
        """
        name = "standings" if consumer.partitioned else "standings_topic"
        with self._database.connection() as connection:
            query = self._on_log.on(connection, name, consumer.topic)
            own = {"topic": consumer.topic, "consumer": consumer.name}
            rows = fetch_all(connection, query, own, prepare=False)
        return [PartitionClaims.of_row(row) for row in rows]

    def adopt(self, claim_id: int, *, owner: str, lease: Duration = 60.0, previous: str | None = None) -> Claim:
        """Take a claim over, for a run that starts or is retried. Its position is the current offset.

        The lease may have expired, but no other owner may have claimed the partition since. With `previous`, the claim
        is taken from that owner only. Raises `ClaimLostError`, and `DatabaseBusyError` while a transaction of the
        previous owner locks the partition.
        """
        lease = in_seconds(lease)
        claim, state = self.get(claim_id)
        if state != "claimed":
            raise ClaimLostError(f"{claim} was {state} before")
        if previous is not None and claim.owner != previous:
            raise ClaimLostError(f"{claim} was taken over by {claim.owner}")
        with self._database.transaction() as connection:
            wait_at_most(connection, LOCK_TIMEOUT)
            locked = lock(connection, self._queries, claim.key, wait=True)
            if locked is None or locked.state.epoch != claim.epoch:
                raise ClaimLostError(f"{claim} was superseded")
            if not claim.range.after <= locked.offset < claim.range.upto:
                raise ClaimLostError(f"{claim} was overtaken: the offset is {locked.offset}")

            # A new epoch for each owner: if a run was thought dead and a retry adopts its claim, the run loses it.
            adopted = replace(claim, owner=owner, epoch=claim.epoch + 1, position=locked.offset)
            parameters = {**holder(adopted), "lease": lease}
            # It may have been released since `get`.
            if connection.execute(self._queries("own_claim"), parameters, prepare=False).rowcount != 1:
                raise ClaimLostError(f"{claim} was released")
            connection.execute(self._queries("lease"), parameters)
            return adopted

    def renew(self, claim: Claim, *, lease: Duration = 60.0) -> None:
        """Extend a claim's lease to `lease` seconds from now.

        Raises `ClaimLostError`, and `DatabaseBusyError` while a transaction locks the partition: the owner's, or one
        that takes the claim over.
        """
        lease = in_seconds(lease)
        with self._database.urgent() as connection, connection.transaction():
            # The owner may wait for the end of its heartbeat, and lock the partition in its own transaction.
            wait_at_most(connection, min(LOCK_TIMEOUT, lease / 3))
            renewed = connection.execute(
                self._queries("renew_lease"), {**holder(claim), "lease": lease}, prepare=False
            ).rowcount
        if renewed != 1:
            raise ClaimLostError(f"{claim} is not {claim.owner}'s any more")

    @contextmanager
    def heartbeat(self, claim: Claim, *, lease: Duration = 60.0) -> Iterator[threading.Event]:
        """Renew the claim in a thread while the block runs. Yields an event that is set when the claim is lost.

        A claim that its owner has committed is not lost.
        """
        lease = in_seconds(lease)
        stop, lost, threads = Wake(), Wake(), list[threading.Thread]()

        def beat() -> None:
            while not stop.wait(lease / 3):
                try:
                    self.renew(claim, lease=lease)
                except ClaimLostError as error:
                    if not self._is_committed_by_owner(claim):
                        logger.warning("%s", error)
                        lost.set()
                    return
                except DatabaseBusyError:
                    # A locked partition cannot be taken over. Most likely the owner's own transaction locks it.
                    continue
                except EventSQLError as error:
                    logger.warning("%s could not be renewed: %s", claim, error)

        try:
            # In the block: after Ctrl-C, nobody else would end it.
            threads.append(start_thread(f"claim-{claim.id}", beat))
            yield lost
        finally:
            stop.set()
            # If the server stands still, a renewal may take longer. Then it finds that the lease has ended.
            join_all(threads, time.monotonic() + lease)

    def _is_committed_by_owner(self, claim: Claim) -> bool:
        with suppress(EventSQLError):
            found, state = self.get(claim.id)
            return state == "committed" and found.epoch == claim.epoch
        return False

    def check(self, connection: CallersConnection, claim: Claim) -> None:
        """Lock the consumer partition in the caller's transaction, and check that the claim still holds.

        Raises `ClaimLostError`, and `ValidationError` for a connection outside of a transaction or to another database.
        """
        with self._database.callers(connection) as driver:
            lock_claim(driver, self._queries, claim)

    def read(self, claim: Claim) -> list[Event]:
        """The events of the rest of a claim that match the consumer's filter. Raises `ClaimLostError`."""
        chosen, reached = self.read_part(claim)
        while reached < claim.range.upto:
            events, reached = self.read_part(claim, after=reached)
            chosen += events
        return chosen

    def read_part(self, claim: Claim, *, after: int | None = None) -> tuple[list[Event], int]:
        """The next events of a claim, at most `BATCH_BYTES`, and the offset up to which the claim was read.

        They are the events after `after`, or else after the claim's position, that match the consumer's filter. Raises
        `ClaimLostError`.
        """
        # Ask for one event more than there are: if the server can read all at once, the first read is the last.
        rest, size = replace(claim.remaining, after=claim.position if after is None else after), claim.events + 1
        while True:
            try:
                with self._database.transaction() as connection:
                    locked = lock_claim(connection, self._queries, claim)
                    events, reached = read_part(connection, self._log, rest, limit=size)
            except (DatabaseError, MemoryError) as error:
                if size == 1 or not too_much(error):
                    raise
                size //= 2
            else:
                return list(matching(locked.state.filter, events)), reached

    def commit(
        self, connection: CallersConnection, claim: Claim, *, consumed: int | None = None, upto: int | None = None
    ) -> Claim:
        """Commit a claim in the caller's transaction: the offset moves to the claim's end, and the lease ends.

        `connection` is of psycopg or SQLAlchemy. Effects in the same transaction happen exactly once. With `upto`, the
        offset moves to `upto`, and the returned claim still holds for the rest. `consumed` is the number of events; by
        default, all events up to there. Raises `ClaimLostError`; the caller must then roll back. Raises
        `ValidationError` if `upto` is outside of the rest of the claim. Otherwise as `check`.
        """
        reached = claim.range.upto if upto is None else upto
        if not claim.position <= reached <= claim.range.upto:
            raise ValidationError(f"{claim} cannot be committed up to {reached}: it holds {claim.remaining}")
        rest = replace(claim.remaining, upto=reached)
        with self._database.callers(connection) as driver:
            locked = lock_claim(driver, self._queries, claim)
            events, first = self._log.extent(
                driver, rest.topic, partition=rest.partition, after=rest.after, upto=rest.upto
            )
            advance(
                driver, self._queries, claim.key,
                after=locked.offset, upto=rest.upto, first=first, consumed=events if consumed is None else consumed,
            )  # fmt: skip
            claim = replace(claim, position=rest.upto)
            if claim.position == claim.range.upto:
                finish_claim(driver, self._queries, claim, "committed")
            return claim

    def settle(
        self, claim: Claim, event: Event, error: BaseException, *, done: Sequence[Event] = ()
    ) -> tuple[Claim, BatchResult]:
        """Record that `event` of a claim failed. The events of `done`, which precede it, were processed.

        The offset moves past the events before it, and past the event itself if it becomes a dead letter. The returned
        claim then holds for the rest, if there is any. Otherwise the rest is released. Raises `ClaimLostError`.
        """
        with self._database.transaction() as connection:
            locked = lock_claim(connection, self._queries, claim)
            if done:
                advance(
                    connection, self._queries, claim.key,
                    after=claim.position, upto=done[-1].id, first=done[0].id, consumed=len(done),
                )  # fmt: skip
                claim = replace(claim, position=done[-1].id)
                locked = locked.at(claim.position)

            # Read the skipped events before it, too: a retry must begin at the event itself.
            events = read_range(connection, self._log, replace(claim.remaining, upto=max(event.id, claim.position)))
            result = self._runner.fail(connection, Batch(locked, events, event.id), error)
            if result is None:
                raise ClaimLostError(f"{claim} is void: event {event.id} is not the consumer's any more")

            claim = replace(claim, position=result.offset)
            if (state := ending(claim, result)) is not None:
                finish_claim(connection, self._queries, claim, state)
            return claim, replace(result, consumed=result.consumed + len(done))

    def release(self, claim: Claim) -> bool:
        """Release the rest of a claim, to be claimed anew; False if the claim had ended.

        Raises `DatabaseBusyError` while a transaction of its owner locks the partition.
        """
        with self._database.transaction() as connection:
            wait_at_most(connection, LOCK_TIMEOUT)
            locked = lock(connection, self._queries, claim.key, wait=True)
            if locked is None or locked.state.epoch != claim.epoch:
                return False
            return finish_claim(connection, self._queries, claim, "released")

    def fail(self, claim: Claim, error: BaseException) -> Failure | None:
        """Release a claim because its range as a whole could not be processed.

        The failure is recorded for the first event of the range, because no single event is known to be at fault. The
        partition waits for a backoff, and is blocked once the consumer's attempts are spent. None if the range has no
        event left. Raises `ClaimLostError`.
        """
        with self._database.transaction() as connection:
            locked = lock_claim(connection, self._queries, claim)
            first = read_range(connection, self._log, claim.remaining, limit=1)
            failure = record_failure(connection, self._queries, locked, first[0], error) if first else None
            finish_claim(connection, self._queries, claim, "released")
            return failure

    def process(
        self, claim: Claim, handler: BatchHandler, *, batch: int = 1_000, lease: Duration = 60.0,
        max_dead_letters: int | None = None,
    ) -> BatchResult:  # fmt: skip
        """Hand the rest of a claim to `handler(events, connection)`, `batch` events at a time, and commit it.

        Each batch's effects through `connection` and its offset are one transaction, which holds the consumer's row:
        for handlers that take seconds at most. A failing event ends the claim, unless it becomes a dead letter: the
        events before it are committed, it is tried again later or blocks the partition, and the rest is released. The
        rest is also released after `max_dead_letters` dead letters. Raises `ClaimLostError`.
        """
        lease = in_seconds(lease)
        check_handler(handler, "events", "connection")
        total, retry = BatchResult(0, claim.position), CommitRetry()
        while True:
            source = ClaimSource(self._queries, self._log, claim, lease)
            result = self._runner.run(source, handler, limit=batch, retry=retry)
            assert result is not None, "a claim that cannot be opened is lost"
            total += result
            claim = replace(claim, position=result.offset)
            if ending(claim, result) is not None:
                return total
            if max_dead_letters is not None and len(total.dead_letters) >= max_dead_letters:
                self.release(claim)
                return total
