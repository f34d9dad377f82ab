"""Consuming under a lease: work that is longer than a transaction should be, with the offset still committed once."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

import psycopg

from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.claim_pruning import PROCESS_OWNER
from eventsql_orchestration.consuming.claim_values import Claim, NoClaim
from eventsql_orchestration.consuming.claims import Claims
from eventsql_orchestration.consuming.commit_retry import is_transient
from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.consuming.handlers import check_returned, errors_of_handler
from eventsql_orchestration.consuming.lost_connections import LostConnections, lost
from eventsql_orchestration.consuming.partition import ROLLED_BACK, ConsumerPartition
from eventsql_orchestration.consuming.worker_pool import PollOptions, PollOutcome
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.load import raise_if_disk_is_full
from eventsql_orchestration.database.translation import ended_for_time
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumptionError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
    EventSQLError,
    ValidationError,
)
from eventsql_orchestration.model import Event
from eventsql_orchestration.retry import pause_while_away

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

BUSY_ATTEMPTS: Final = 3
"""How often a claim is settled or released at most while other transactions are in the way. After that, its lease ends
by itself."""


class Lease:
    """A handler's right to the events that it was handed, until another consumption takes their partition over.

    `claim` is the claim behind it. `lost` is set when the partition was taken over, or given up because the consumption
    had to stop. Nothing can be committed then, so the handler may end.
    """

    def __init__(
        self, database: Database, claims: Claims, claim: Claim, lost: threading.Event, cancellation: Cancellation,
        *, events: int, upto: int,
    ) -> None:  # fmt: skip
        self.claim = claim
        self.lost = lost
        self._database = database
        self._claims = claims
        self._cancellation = cancellation
        self._events = events
        self._upto = upto
        self.committed = False
        """Whether the offset has moved past the events."""
        self.rolled_back = False
        """Whether a `transaction` of the handler ended without its effects."""
        self.begun: Connection | None = None
        """The connection of the last `transaction`."""

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction whose effects commit together with the offset, exactly once, when the block ends well.

        It locks the consumer's row, so it should be short, and the last step of the handler. Raises `ClaimLostError`,
        before the block if the loss is known by then.
        """
        if self.committed:
            raise ValidationError("the offset is committed already: use one transaction for all events")
        self.rolled_back = True
        self.begun = None
        with self._database.transaction() as connection, self._cancellation.connection(connection):
            self.begun = connection
            self._claims.check(connection, self.claim)
            try:
                with self.claim.key.held(connection, self._database.schema):
                    yield connection
            except psycopg.Rollback as error:
                # psycopg would take the error for success, and the events would pass without their effects.
                raise psycopg.ProgrammingError(ROLLED_BACK) from error
            claim = self._claims.commit(connection, self.claim, upto=self._upto, consumed=self._events)
        self.claim, self.committed, self.rolled_back = claim, True, False

    def commit(self) -> None:
        """Commit the offset, unless `transaction` did so together with effects. Raises `ClaimLostError`."""
        if not self.committed:
            with self.transaction():
                pass


LeasedHandler: TypeAlias = Callable[[Sequence[Event], Lease], object]
"""Takes events in order, and the lease under which it may work on them for as long as it takes."""


def owner_name() -> str:
    """The name of this process as the owner of claims, for people to find it."""
    return f"{PROCESS_OWNER}{os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class LeasedPolls:
    """Polls partitions under a lease of `lease` seconds: claims a range, hands it over, and commits it."""

    database: Database
    claims: Claims
    handler: LeasedHandler
    options: PollOptions
    lease: float
    losses: LostConnections = field(default_factory=LostConnections, init=False)

    def poll(self, key: ConsumerPartition, cancellation: Cancellation) -> PollOutcome:
        """Raises `ClaimLostError` when the partition was taken over, and database errors."""
        options = self.options
        claim = self.claims.claim(
            key.topic, key.consumer, key.partition, owner=owner_name(), isolate=True, lease=self.lease,
            min_events=options.min_events, max_events=options.max_events, max_wait=options.max_polling_delay,
        )  # fmt: skip
        if isinstance(claim, NoClaim):
            if claim.waiting is None:
                return PollOutcome(due_in=options.polling_delay, deaf=True)
            return PollOutcome(due_in=claim.due_in, least=options.min_events) if claim.waiting else PollOutcome()

        try:
            with (
                self.claims.heartbeat(claim, lease=self.lease) as lost,
                cancellation.lease(lost, lambda: self.claims.release(claim)),
            ):
                result = self._process(claim, lost, cancellation)
        except BaseException:
            # Otherwise the partition would stay leased until the lease ends.
            with suppress(EventSQLError, psycopg.Error):
                _repeated(partial(self.claims.release, claim), cancellation)
            raise
        return PollOutcome(result, more=True) if result.failure is None else PollOutcome(result, due_in=0.0)

    def _process(self, claim: Claim, lost: threading.Event, cancellation: Cancellation) -> BatchResult:
        """Hand the events of a claim over, a part of `BATCH_BYTES` at a time, and commit or release it.

        If the handler fails without naming an event, or in a transaction with effects of earlier events, the events are
        handed over again, one at a time. Raises a handler's error for which no event is to blame.
        """
        total = BatchResult(0, claim.position)
        left: Sequence[Event] = ()
        reached, each = claim.position, False
        while claim.position < claim.range.upto:
            if cancellation.stopping.is_set():
                self.claims.release(claim)
                break
            if claim.position == reached:
                left, reached = self.claims.read_part(claim)
            events = left[:1] if each else left
            upto = reached if len(events) == len(left) else events[-1].id
            lease = Lease(self.database, self.claims, claim, lost, cancellation, events=len(events), upto=upto)
            try:
                if events:
                    check_returned(self.handler(events, lease))
            except errors_of_handler() as error:
                if lost.is_set():
                    raise ClaimLostError(f"{claim} was lost while it was worked on") from error
                if lease.committed:
                    logger.warning("%s is committed, though its handler failed afterwards: %s", claim, describe(error))
                else:
                    self._raise_if_blameless(error, lease, events[0])
                    index = _failed(error, events)
                    # The effects of the events before it were rolled back, too.
                    if index is None or (index and lease.rolled_back):
                        logger.info("%s failed (%s); handing its events over one by one", claim, describe(error))
                        each = True
                        continue
                    # The event may have taken the database down.
                    claim, result = _repeated(
                        partial(self.claims.settle, claim, events[index], error, done=events[:index]), cancellation
                    )
                    total += result
                    if result.failure is not None:
                        break
                    left = left[index + 1 :]
                    continue

            lease.commit()
            claim = lease.claim
            total += BatchResult(len(events), claim.position)
            left = left[len(events) :]
        return total

    def _raise_if_blameless(self, error: BaseException, lease: Lease, first: Event) -> None:
        """Raise a handler's error if no event is to blame for it. `first` is the first event that it was handed."""
        claim = lease.claim
        if lease.begun is not None and lost(lease.begun, error):
            if not self.losses.counts((claim.key, first.id), f"{claim.key} at event {first.id}", lease.begun, error):
                raise error
        elif isinstance(error, DatabaseUnavailableError | DatabaseFullError) and not ended_for_time(error):
            raise error
        raise_if_disk_is_full(error)
        if isinstance(error, ClaimLostError):
            # This claim is lost, or another claim that the handler works with.
            with self.database.transaction() as connection:
                self.claims.check(connection, claim)


def _repeated(call: Callable[[], Result], cancellation: Cancellation) -> Result:
    """The result of `call`, which is repeated while the database is away, until the consumption stops.

    While other transactions are in the way, it is repeated a few times.
    """
    failures = conflicts = 0
    while True:
        try:
            return call()
        except (DatabaseError, psycopg.Error) as error:
            failures += 1
            # A server that shuts down has an SQLSTATE of the transient classes, too.
            if not isinstance(error, DatabaseUnavailableError):
                conflicts += 1
                if conflicts == BUSY_ATTEMPTS or not (isinstance(error, DatabaseBusyError) or is_transient(error)):
                    raise
            if cancellation.stopping.wait(pause_while_away(failures)):
                raise


def _failed(error: BaseException, events: Sequence[Event]) -> int | None:
    """The index of the event that failed; None if it is unknown."""
    if isinstance(error, ConsumptionError):
        named = getattr(error.event, "id", None)
        for index, event in enumerate(events):
            if event.id == named:
                return index
    return 0 if len(events) == 1 else None
