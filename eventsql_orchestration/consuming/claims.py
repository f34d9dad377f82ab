"""Claims: leased, immutable ranges of offsets for consumers whose work does not fit into a transaction.

A claim is a row. Making one takes the consumer partition under a new epoch until the lease expires. Offsets are
committed only while that epoch is still the partition's and the offset is where the owner left it, so an owner that was
believed dead commits nothing, and neither does one that was overtaken by a consumer that knows nothing of leases.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.connections import check_encoding
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    DatabaseError,
    EventSQLError,
    ValidationError,
)
from eventsql_orchestration.log import consumption
from eventsql_orchestration.log.claim_pruning import ClaimPruning
from eventsql_orchestration.log.consumption import (
    BatchHandler,
    CommitRefusedError,
    ConsumerPartition,
    Failure,
    LockedPartition,
    Progress,
)
from eventsql_orchestration.log.dead_letters import DeadLetters
from eventsql_orchestration.log.handlers import check_handler
from eventsql_orchestration.log.layouts import HELD_BACK, Layouts
from eventsql_orchestration.log.load import too_much
from eventsql_orchestration.log.reader import fetch
from eventsql_orchestration.log.registry import check_readable
from eventsql_orchestration.model import NOT_PARTITIONED, Consumer, Event, OffsetRange, how_often
from eventsql_orchestration.rules import check_kind, check_name, check_seconds, check_text, check_whole

logger = logging.getLogger(__name__)

LOCK_TIMEOUT: Final = 10.0
"""Seconds that taking a claim over or giving it back waits for the transaction of an owner that was believed dead."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A range of a consumer partition that one owner may consume.

    `range` never changes. `position` is the offset that its owner has committed up to, `range.after` at first. `epoch`
    fences: it is the partition's only as long as nobody has taken it over. `shard` is for whoever handles claims of
    several shards: he names it.
    """

    id: int
    consumer: str
    range: OffsetRange
    events: int
    epoch: int
    owner: str
    position: int
    shard: str | None = None

    def __post_init__(self) -> None:
        check_kind("range", self.range, OffsetRange)
        check_name("consumer name", self.consumer)
        check_text("owner", self.owner)
        for name in ("id", "events", "epoch", "position"):
            check_whole(f"{name} of a claim", getattr(self, name), least=0)

    @property
    def key(self) -> ConsumerPartition:
        return ConsumerPartition(self.range.topic, self.consumer, self.range.partition)

    @property
    def remaining(self) -> OffsetRange:
        """The part of the range that is not committed yet."""
        return replace(self.range, after=self.position)

    def __str__(self) -> str:
        return f"claim {self.id} of {self.range} for consumer {self.consumer!r}"


@dataclass(frozen=True, slots=True)
class Last:
    """Who had the furthest claim of a partition, and for how many seconds it has been over; since when it is there,
    where it is not.
    """

    owner: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What a look at a partition finds: whether events wait, whether a lease goes on, its live claim, if any, and the
    furthest one.
    """

    partition: int
    waiting: bool
    leased: bool
    claim: Claim | None
    last: Last | None = None


@dataclass(frozen=True, slots=True)
class NoClaim:
    """Why nothing was claimed, as one sentence.

    `waiting` is how many events wait, where those are too few, and `due_in` the seconds until they are enough; it is
    None where the partition cannot be had. `leased_by` is who leases it, where somebody does.
    """

    reason: str
    waiting: int | None = None
    due_in: float | None = None
    leased_by: str | None = None


@dataclass(frozen=True, slots=True)
class Processed:
    """What processing a claim came to: events consumed, and the event that stopped it, if one did."""

    consumed: int
    failure: Failure | None = None


@checked
class Claims:
    """Makes, renews, commits and releases claims."""

    def __init__(self, database: Database, dead_letters: DeadLetters) -> None:
        self._database = database
        self._dead_letters = dead_letters
        self._queries = Queries("log", database.schema)
        self._looks = Queries("claims", database.schema)
        self._layouts = Layouts(database)
        self._pruning = ClaimPruning(database)

    def claim(
        self,
        topic: str,
        consumer: str,
        partition: int = NOT_PARTITIONED,
        *,
        owner: str,
        min_events: int = 1,
        max_events: int = 10_000,
        max_wait: float = 10.0,
        lease: float = 60.0,
        timeout: float = 10.0,
        isolate: bool = False,
    ) -> Claim | NoClaim:
        """Claim the next `min_events` to `max_events` of a consumer partition for `owner`.

        Fewer than `min_events` are claimed once the oldest has waited `max_wait` seconds. The claim holds for `lease`
        seconds unless it is renewed. No statement of this takes longer than `timeout` seconds. With `isolate`, an event
        that failed is claimed alone.

        Gives a `NoClaim` when another transaction has the partition, another owner leases it, it is paused, waits for a
        retry, for other partitions or is blocked, or too few events wait. Raises `ConsumerNotFoundError`.
        """
        if min_events > max_events:
            raise ValidationError(f"1 <= min_events <= max_events is needed, not {min_events} and {max_events}")
        check_seconds("timeout", timeout, zero=False)
        attempt = partial(
            self._claim, ConsumerPartition(topic, consumer, partition), owner=owner, min_events=min_events,
            max_events=max_events, max_wait=max_wait, lease=lease, timeout=timeout, isolate=isolate,
        )  # fmt: skip
        if (claimed := attempt()) is not None:
            return self._made(claimed)
        settled = self._layouts.settle(topic, consumer)
        try:
            claimed = attempt() if settled.entered else None
        except ConsumerNotFoundError:
            return NoClaim(f"the topic has no partition {partition} any more")
        if claimed is None:
            changing = "" if settled is HELD_BACK else "the partitions of the topic change here: "
            claimed = NoClaim(changing + settled.reason)
        return self._made(claimed)

    def _made(self, claimed: Claim | NoClaim) -> Claim | NoClaim:
        if isinstance(claimed, Claim):
            self._pruning.made(claimed.key, claimed.id)
        return claimed

    def _claim(
        self,
        key: ConsumerPartition,
        *,
        owner: str,
        min_events: int,
        max_events: int,
        max_wait: float,
        lease: float,
        timeout: float,
        isolate: bool,
    ) -> Claim | NoClaim | None:
        """The same in one transaction; None when the partition has consumed all that its layout holds."""
        topic, partition = key.topic, key.partition
        with self._database.transaction() as connection:
            # A tick whose caller has given up must not go on holding the partition.
            _limit(connection, timeout, "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
            locked = consumption.lock(connection, self._queries, key, wait=False)
            if locked is None:
                return self._not_lockable(connection, key)
            if (refusal := self._refusal(connection, locked)) is not None:
                return refusal
            if isolate and locked.state.failing:
                min_events = max_events = 1
            row = connection.execute(
                self._queries("waiting" if partition == NOT_PARTITIONED else "waiting_partition", topic=topic),
                {"partition": partition, "after": locked.offset, "upto": locked.upto, "limit": max_events},
                prepare=False,
            ).fetchone()
            assert row is not None, "an aggregate gives one row"
            events, upto, waited = row
            if not events and locked.state.until is not None:
                return None
            if not events:
                return NoClaim(f"no events wait after offset {locked.offset}", waiting=0)
            # Up to the end of a layout there will be no more.
            if events < min_events and waited < max_wait and locked.state.until is None:
                reason = f"{events} of {min_events} events wait, for {waited:.1f} s of {max_wait:g} s"
                return NoClaim(reason, waiting=events, due_in=max_wait - waited)
            return self._insert(connection, locked, upto=upto, events=events, owner=owner, lease=lease)

    def _not_lockable(self, connection: Connection, key: ConsumerPartition) -> NoClaim:
        row = connection.execute(self._queries("consumer_exists"), key.parameters()).fetchone()
        if row is None or not row[0]:
            check_readable(connection, self._database.schema, key.topic)
            raise ConsumerNotFoundError(f"{key} does not exist: create it with `eventsql consumer create`")
        return NoClaim("another consumption has the partition locked")

    def _refusal(self, connection: Connection, locked: LockedPartition) -> NoClaim | None:
        state = locked.state
        if state.paused:
            return NoClaim("the consumer is paused")
        if locked.leased:
            assert state.lease_expires_at is not None
            left = (state.lease_expires_at - locked.now).total_seconds()
            return NoClaim(
                f"{state.lease_owner} leases the partition for {left:.0f} s more", leased_by=state.lease_owner
            )
        if (reason := self._dead_letters.blocking(state, connection)) is not None:
            return NoClaim(
                f"event {state.failed_event_id} blocks the partition: it failed {how_often(state.attempts)} "
                f"({state.failure}) and {reason}"
            )
        if locked.retry_in:
            return NoClaim(f"event {state.failed_event_id} is retried in {locked.retry_in:.0f} s ({state.failure})")
        return None

    def _insert(
        self, connection: Connection, locked: LockedPartition, *, upto: int, events: int, owner: str, lease: float
    ) -> Claim:
        key, epoch = locked.key, locked.state.epoch + 1
        connection.execute(self._queries("release_live_claim"), key.parameters())
        row = connection.execute(
            self._queries("insert_claim"),
            {
                **key.parameters(),
                "after": locked.offset,
                "upto": upto,
                "events": events,
                "epoch": epoch,
                "owner": owner,
            },
        ).fetchone()
        assert row is not None, "INSERT … RETURNING gives a row"
        connection.execute(self._queries("lease"), {**key.parameters(), "epoch": epoch, "owner": owner, "lease": lease})
        offsets = OffsetRange(key.topic, key.partition, locked.offset, upto)
        return Claim(row[0], key.consumer, offsets, events, epoch, owner, locked.offset)

    def get(self, claim_id: int) -> tuple[Claim, str]:
        """A claim and its state: `claimed`, `committed` or `released`. Raises `ClaimLostError` for an unknown id."""
        with self._database.connection() as connection:
            row = connection.execute(self._queries("claim"), {"claim": claim_id}).fetchone()
        if row is None:
            raise ClaimLostError(
                f"claim {claim_id} does not exist: its consumer or topic was deleted, or it ended long ago and "
                "was deleted then"
            )
        return _claim(row), str(row[9])

    def live(self, topic: str, consumer: str, partition: int = NOT_PARTITIONED) -> Claim | None:
        """The partition's claim that is neither committed nor released, its lease expired or not."""
        key = ConsumerPartition(topic, consumer, partition)
        with self._database.connection() as connection:
            row = connection.execute(self._queries("live_claim"), key.parameters()).fetchone()
        return None if row is None else _claim(row)

    def last(self, topic: str, consumer: str, partition: int = NOT_PARTITIONED) -> Last | None:
        """The furthest claim of a partition, in whatever state; None where there never was one, or none is left."""
        key = ConsumerPartition(topic, consumer, partition)
        with self._database.connection() as connection:
            row = connection.execute(self._looks("last"), key.parameters()).fetchone()
        return None if row is None else Last(*row)

    def first_of(self, owner: str, topic: str, consumer: str, partition: int = NOT_PARTITIONED) -> int | None:
        """The id of the first claim of a partition that an owner has committed; None where there is none any more."""
        parameters = {**ConsumerPartition(topic, consumer, partition).parameters(), "owner": owner}
        with self._database.connection() as connection:
            row = connection.execute(self._looks("first_of_owner"), parameters).fetchone()
        return None if row is None else row[0]

    def standings(self, consumer: Consumer) -> list[Standing]:
        """All partitions of a consumer in their order, looked at with one statement that locks nothing.

        Empty where there is no such consumer. Raises `TopicNotFoundError`.
        """
        name = "standings" if consumer.partitioned else "standings_topic"
        with self._database.connection() as connection:
            rows = connection.execute(
                self._looks(name, topic=consumer.topic),
                {"topic": consumer.topic, "consumer": consumer.name}, prepare=False,
            ).fetchall()  # fmt: skip
        return [
            Standing(
                partition,
                waiting,
                leased,
                None if claim[0] is None else _claim(claim),
                None if owner is None else Last(owner, seconds),
            )
            for partition, waiting, leased, owner, seconds, *claim in rows
        ]

    def adopt(self, claim_id: int, *, owner: str, lease: float = 60.0) -> Claim:
        """Take a claim over, for a run that starts or is retried; its position is where the offset is now.

        Works after its lease expired too, as long as nobody else has claimed the partition since. Raises
        `ClaimLostError`, and `DatabaseBusyError` while a transaction of the previous owner holds the partition.
        """
        claim, state = self.get(claim_id)
        if state != "claimed":
            raise ClaimLostError(f"{claim} was {state} before")
        with self._database.transaction() as connection:
            _limit(connection, LOCK_TIMEOUT, "lock_timeout")
            locked = consumption.lock(connection, self._queries, claim.key, wait=True)
            if locked is None or locked.state.epoch != claim.epoch:
                raise ClaimLostError(f"{claim} was superseded")
            if not claim.range.after <= locked.offset < claim.range.upto:
                raise ClaimLostError(f"{claim} was overtaken: the offset is {locked.offset}")
            # A new epoch for each owner: a run that was thought dead and is retried finds its claim lost.
            epoch = claim.epoch + 1
            parameters = {
                **claim.key.parameters(),
                "claim": claim.id,
                "owner": owner,
                "epoch": epoch,
                "lease": lease,
            }
            # Nobody may have released it between the look above and the lock.
            if connection.execute(self._queries("own_claim"), parameters).rowcount != 1:
                raise ClaimLostError(f"{claim} was released")
            connection.execute(self._queries("lease"), parameters)
            return replace(claim, owner=owner, epoch=epoch, position=locked.offset)

    def renew(self, claim: Claim, *, lease: float = 60.0) -> None:
        """Prolong a claim's lease to `lease` seconds from now.

        Raises `ClaimLostError`, and `DatabaseBusyError` while a transaction holds the partition: its owner's own, or
        one that takes it over.
        """
        with self._database.transaction() as connection:
            # A heartbeat must end when its owner, in whose transaction the partition may be locked, waits for it.
            _limit(connection, min(LOCK_TIMEOUT, lease / 3), "lock_timeout")
            renewed = connection.execute(
                self._queries("renew_lease"),
                {**_holder(claim), "lease": lease},
            ).rowcount
        if renewed != 1:
            raise ClaimLostError(f"{claim} is not {claim.owner}'s any more")

    @contextmanager
    def heartbeat(self, claim: Claim, *, lease: float = 60.0) -> Iterator[threading.Event]:
        """Renew the claim in a thread while the block runs; gives an event that is set when the claim is lost."""
        stop, lost = threading.Event(), threading.Event()

        def beat() -> None:
            while not stop.wait(lease / 3):
                try:
                    self.renew(claim, lease=lease)
                except ClaimLostError as error:
                    logger.warning("%s", error)
                    lost.set()
                    return
                except DatabaseBusyError:
                    # Nobody can take over what a transaction holds, and the owner's own is the likeliest to hold it.
                    continue
                except EventSQLError as error:
                    logger.warning("%s could not be renewed: %s", claim, error)

        thread = threading.Thread(target=beat, name=f"eventsql-claim-{claim.id}", daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            stop.set()
            thread.join()

    def check(self, connection: Connection, claim: Claim) -> None:
        """Lock the consumer partition in the caller's transaction and make sure that the claim still holds.

        Raises `ClaimLostError`, and `ValidationError` for a connection outside of a transaction.
        """
        with self._database.errors(connection):
            self._locked(connection, claim)

    def _locked(self, connection: Connection, claim: Claim) -> LockedPartition:
        check_encoding(connection)
        locked = consumption.lock(connection, self._queries, claim.key, wait=True)
        if connection.info.transaction_status is not TransactionStatus.INTRANS:
            raise ValidationError(
                "a claim is committed in a transaction: take the connection of a `transaction()` block"
            )
        if locked is None:
            raise ClaimLostError(f"{claim} is void: the consumer was deleted")
        # A consumer that was deleted and registered anew counts its epochs anew; the ids of claims never come again.
        cursor = connection.cursor(row_factory=tuple_row).execute(self._queries("claim"), {"claim": claim.id})
        state = None if (row := cursor.fetchone()) is None else row[9]
        if state != "claimed" or locked.state.epoch != claim.epoch:
            raise ClaimLostError(f"{claim} was taken over or released")
        if locked.offset != claim.position:
            raise ClaimLostError(
                f"{claim} is void: another consumption moved the offset from {claim.position} to {locked.offset}"
            )
        return locked

    def read(self, claim: Claim) -> list[Event]:
        """The events of the rest of a claim that match the consumer's filter. Raises `ClaimLostError`."""
        chosen: list[Event] = []
        # One more than there are, so that the first attempt is the last where the server can read all of them at once.
        after, size = claim.position, claim.events + 1
        while True:
            try:
                with self._database.transaction() as connection:
                    locked = self._locked(connection, claim)
                    events = fetch(
                        connection, self._queries, claim.range.topic,
                        partition=claim.range.partition, after=after, upto=claim.range.upto, limit=size,
                    )  # fmt: skip
            except (DatabaseError, MemoryError) as error:
                if size == 1 or not too_much(error):
                    raise
                size //= 2
                continue
            conditions = locked.state.filter
            chosen += [event for event in events if conditions is None or conditions.matches(event)]
            if len(events) < size:
                return chosen
            after = events[-1].id

    def commit(
        self, connection: Connection, claim: Claim, *, consumed: int | None = None, upto: int | None = None
    ) -> Claim:
        """Commit a claim in the caller's transaction: the offset goes to its end, the lease ends.

        Together with effects written in the same transaction this is exactly once. With `upto`, the offset goes no
        further than that, and the claim that this gives still holds for the rest. `consumed` is the number of events
        (all that were left up to there by default). Raises `ClaimLostError`; the caller's transaction must then be
        rolled back.
        """
        with self._database.errors(connection):
            return self._commit(connection, claim, consumed=consumed, upto=upto)

    def _commit(self, connection: Connection, claim: Claim, *, consumed: int | None, upto: int | None) -> Claim:
        locked = self._locked(connection, claim)
        rest = claim.remaining if upto is None else replace(claim.remaining, upto=upto)
        row = connection.cursor(row_factory=tuple_row).execute(
            self._queries("extent" if rest.partition == NOT_PARTITIONED else "extent_partition", topic=rest.topic),
            {"partition": rest.partition, "after": rest.after, "upto": rest.upto}, prepare=False,
        ).fetchone()  # fmt: skip
        assert row is not None, "an aggregate gives one row"
        events, first = row
        consumption.advance(
            connection, self._queries, claim.key,
            after=locked.offset, upto=rest.upto, first=first, consumed=events if consumed is None else consumed,
        )  # fmt: skip
        claim = replace(claim, position=rest.upto)
        if claim.position == claim.range.upto:
            self._finish(connection, claim, "committed")
        return claim

    def settle(
        self, claim: Claim, event: Event, error: Exception, *, done: Sequence[Event] = ()
    ) -> tuple[Claim, Failure]:
        """Note that `event` of a claim failed, after the events of `done` had been processed.

        The offset moves past those before it, and past the event itself when it is made a dead letter: the claim that
        this gives then holds for the rest, if there is any. Otherwise the rest is given back. Raises `ClaimLostError`.
        """

        def fail(_events: Sequence[Event], _connection: Connection) -> None:
            raise error

        with self._database.transaction() as connection:
            locked: LockedPartition | None = self._locked(connection, claim)
            if done:
                consumption.advance(
                    connection, self._queries, claim.key,
                    after=claim.position, upto=done[-1].id, first=done[0].id, consumed=len(done),
                )  # fmt: skip
                claim = replace(claim, position=done[-1].id)
                locked = consumption.lock(connection, self._queries, claim.key, wait=True)
            assert locked is not None, "locked above"
            # With the events before it that do not match the filter: a retry must begin at the event itself.
            events = fetch(
                connection, self._queries, claim.range.topic,
                partition=claim.range.partition, after=claim.position, upto=event.id,
            )  # fmt: skip
            progress = consumption.consume(
                connection, self._queries, self._dead_letters, locked, events=events, handler=fail, each=True
            )
            if progress.failure is None:
                raise ClaimLostError(f"{claim} is void: event {event.id} is not the consumer's any more")
            claim = replace(claim, position=progress.offset)
            if claim.position == claim.range.upto:
                self._finish(connection, claim, "committed")
            elif progress.failure.outcome != Failure.DEAD_LETTER:
                self._finish(connection, claim, "released")
            return claim, progress.failure

    def _finish(self, connection: Connection, claim: Claim, state: str) -> bool:
        if connection.execute(self._queries("finish_claim"), {"claim": claim.id, "state": state}).rowcount != 1:
            return False
        connection.execute(self._queries("end_lease"), {**claim.key.parameters(), "epoch": claim.epoch})
        return True

    def release(self, claim: Claim) -> bool:
        """Give the rest of a claim back, to be claimed anew; False when it had ended already.

        Raises `DatabaseBusyError` while a transaction of its owner holds the partition.
        """
        with self._database.transaction() as connection:
            _limit(connection, LOCK_TIMEOUT, "lock_timeout")
            locked = consumption.lock(connection, self._queries, claim.key, wait=True)
            if locked is None or locked.state.epoch != claim.epoch:
                return False
            return self._finish(connection, claim, "released")

    def fail(self, claim: Claim, error: BaseException) -> Failure | None:
        """Give a claim back because its range as a whole could not be processed.

        The failure is noted on the range's first event: the partition waits for a backoff, and is blocked there once
        the consumer's attempts are spent, since no single event is known to be at fault. None when the range has no
        event left. Raises `ClaimLostError`.
        """
        with self._database.transaction() as connection:
            locked = self._locked(connection, claim)
            first = fetch(
                connection, self._queries, claim.range.topic,
                partition=claim.range.partition, after=claim.position, upto=claim.range.upto, limit=1,
            )  # fmt: skip
            failure = None
            if first:
                failure = consumption.record_failure(connection, self._queries, locked, first[0], error)
            self._finish(connection, claim, "released")
            return failure

    def process(
        self,
        claim: Claim,
        handler: BatchHandler,
        *,
        batch: int = 1_000,
        lease: float = 60.0,
        max_dead_letters: int | None = None,
    ) -> Processed:
        """Hand the rest of a claim to `handler(events, connection)`, `batch` events at a time, and commit it.

        Each batch's effects through `connection` and its offset are one transaction, which holds the consumer's row:
        for handlers that take seconds at most. A failing event ends the claim, unless it is buried: what went before it
        is committed, the event is noted for a retry or blocks the partition, and the rest is given back. So is what is
        left after `max_dead_letters` events that were buried. Raises `ClaimLostError`.
        """
        check_handler(handler, "events", "connection")
        consumed, size, check, letters = 0, batch, False, 0
        while True:
            try:
                progress, claim, ended = self._process_batch(claim, handler, batch=size, lease=lease, check=check)
            except CommitRefusedError as refused:
                if refused.passing or not refused.events:
                    # Whoever processes the claim hears of it, and a run of Dagster's is seen to fail.
                    raise refused.error from None
                if size > 1:
                    # One by one, and where that finds none to blame, the first alone.
                    size, check = 1 if check else size, True
                    continue
                progress, claim, ended = self._refuse(claim, refused.events[0], refused.error)
            except (DatabaseError, MemoryError) as error:
                # A handler's own failures do not come here: its events could not be read.
                if size == 1 or not too_much(error):
                    raise
                batch = size = size // 2
                continue
            size, check = min(batch, size * 2), False
            consumed += progress.consumed
            if ended:
                return Processed(consumed, progress.failure)
            # An event that failed and did not end the claim was buried.
            letters += progress.failure is not None
            if max_dead_letters is not None and letters >= max_dead_letters:
                self.release(claim)
                return Processed(consumed, progress.failure)

    def _refuse(self, claim: Claim, event: Event, error: Exception) -> tuple[Progress, Claim, bool]:
        """Note that the next event of a claim failed, since it cannot be committed though it is alone."""
        claim, failure = self.settle(claim, event, error)
        ended = failure.outcome != Failure.DEAD_LETTER or claim.position == claim.range.upto
        return Progress(int(failure.outcome == Failure.DEAD_LETTER), claim.position, failure), claim, ended

    def _process_batch(
        self, claim: Claim, handler: BatchHandler, *, batch: int, lease: float, check: bool
    ) -> tuple[Progress, Claim, bool]:
        """A batch of a claim in one transaction; gives what is left of the claim, and whether it has ended.

        With `check`, events are handled one by one, each with what it leaves to the commit. Raises
        `CommitRefusedError`.
        """
        events: list[Event] = []
        with consumption.transaction(self._database, events) as connection:
            locked = self._locked(connection, claim)
            events += fetch(
                connection, self._queries, claim.range.topic,
                partition=claim.range.partition, after=claim.position, upto=claim.range.upto, limit=batch,
            )  # fmt: skip
            last = len(events) < batch
            progress = consumption.consume(
                connection, self._queries, self._dead_letters, locked,
                events=events, handler=handler, upto=claim.range.upto if last else None, each=check, check=check,
            )  # fmt: skip
            claim = replace(claim, position=progress.offset)
            if progress.failure is not None and progress.failure.outcome != Failure.DEAD_LETTER:
                self._finish(connection, claim, "released")
                return progress, claim, True
            if claim.position == claim.range.upto:
                self._finish(connection, claim, "committed")
                return progress, claim, True
            connection.execute(self._queries("renew_lease"), {**_holder(claim), "lease": lease})
            return progress, claim, False


def _limit(connection: Connection, seconds: float, *settings: str) -> None:
    """Limit the waits of the transaction that `settings` name."""
    # 0 would be no limit.
    milliseconds = str(max(1, round(seconds * 1000)))
    limits = [sql.SQL("pg_catalog.set_config({}, {}, true)").format(setting, milliseconds) for setting in settings]
    connection.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(limits)))


def _holder(claim: Claim) -> dict[str, object]:
    return {**claim.key.parameters(), "claim": claim.id, "epoch": claim.epoch, "owner": claim.owner}


def _claim(row: Sequence[Any]) -> Claim:
    claim_id, topic, consumer, partition, after, upto, events, epoch, owner, _state = row
    return Claim(claim_id, consumer, OffsetRange(topic, partition, after, upto), events, epoch, owner, after)
