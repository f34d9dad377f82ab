"""Consuming under a lease: work that is longer than a transaction should be, with the offset still committed once."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import ClaimLostError, ConsumptionError, EventSQLError, ValidationError
from eventsql_orchestration.log.claim_pruning import PROCESS_OWNER
from eventsql_orchestration.log.claims import Claim, Claims, NoClaim
from eventsql_orchestration.log.consumption import ConsumerPartition, Failure, Progress
from eventsql_orchestration.log.dead_letters import describe
from eventsql_orchestration.log.handlers import check_returned
from eventsql_orchestration.log.passes import Hold, Pass
from eventsql_orchestration.model import Event

logger = logging.getLogger(__name__)


class Lease:
    """A handler's right to the events that it was handed, for as long as nobody else has their partition.

    `claim` is what it rests on. `lost` is set once the partition was taken over, or given up because the consumption
    had to stop: nothing is committed from then on, so the handler may as well end.
    """

    def __init__(
        self, database: Database, claims: Claims, claim: Claim, lost: threading.Event, hold: Hold,
        *, events: int, upto: int,
    ) -> None:  # fmt: skip
        self.claim = claim
        self.lost = lost
        self._database = database
        self._claims = claims
        self._hold = hold
        self._events = events
        self._upto = upto
        self._committed = False

    @property
    def committed(self) -> bool:
        """Whether the offset has moved past the events."""
        return self._committed

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction whose effects commit together with the offset, exactly once, when the block ends well.

        It holds the consumer's row, so it should be short, and the last thing that the handler does. Raises
        `ClaimLostError`, before the block where that is known by then.
        """
        if self._committed:
            raise ValidationError(
                "the offset of these events is committed already: use one transaction for all of them"
            )
        with self._database.transaction() as connection, self._hold.connection(connection):
            self._claims.check(connection, self.claim)
            yield connection
            claim = self._claims.commit(connection, self.claim, upto=self._upto, consumed=self._events)
        self.claim, self._committed = claim, True

    def commit(self) -> None:
        """Commit the offset without effects, unless `transaction` did with some. Raises `ClaimLostError`."""
        if not self._committed:
            with self.transaction():
                pass


LeasedHandler: TypeAlias = Callable[[Sequence[Event], Lease], object]
"""Takes events in order, and the lease under which they may be worked on for as long as it takes."""


def owner_name() -> str:
    """How this process signs its leases, for people to find it."""
    return f"{PROCESS_OWNER}{os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class LeasedPasses:
    """Passes that claim a range, hand it over outside of any transaction, and commit it."""

    database: Database
    claims: Claims
    handler: LeasedHandler
    lease: float
    min_events: int
    max_events: int
    polling_delay: float
    max_polling_delay: float

    def consume(self, key: ConsumerPartition, hold: Hold) -> Pass:
        """One pass over a partition. Raises `ClaimLostError` when the partition was taken over, and database errors."""
        claim = self.claims.claim(
            key.topic, key.consumer, key.partition, owner=owner_name(), isolate=True,
            min_events=self.min_events, max_events=self.max_events, max_wait=self.max_polling_delay, lease=self.lease,
        )  # fmt: skip
        if isinstance(claim, NoClaim):
            if claim.waiting is None:
                return Pass(due_in=self.polling_delay, deaf=True)
            return Pass(due_in=claim.due_in, least=self.min_events) if claim.waiting else Pass()
        try:
            with (
                self.claims.heartbeat(claim, lease=self.lease) as lost,
                hold.lease(lost, lambda: self.claims.release(claim)),
            ):
                progress = self._process(claim, lost, hold)
        except BaseException:
            # Unless it is released, it would keep the partition until the lease ends.
            with suppress(EventSQLError):
                self.claims.release(claim)
            raise
        if progress.failure is not None and progress.failure.outcome != Failure.DEAD_LETTER:
            return Pass(progress, due_in=0.0)
        return Pass(progress, more=True)

    def _process(self, claim: Claim, lost: threading.Event, hold: Hold) -> Progress:
        """Hand the events of a claim over, and commit or release it.

        A range that fails without a word on which event it was is handed over again, one event at a time.
        """
        left = self.claims.read(claim)
        consumed = 0
        failure: Failure | None = None
        one_by_one = False
        while claim.position < claim.range.upto:
            events = left[:1] if one_by_one else left
            upto = claim.range.upto if len(events) == len(left) else events[-1].id
            lease = Lease(self.database, self.claims, claim, lost, hold, events=len(events), upto=upto)
            try:
                if events:
                    check_returned(self.handler(events, lease))
            except Exception as error:
                if isinstance(error, ClaimLostError) or lost.is_set():
                    raise ClaimLostError(f"{claim} was lost while it was worked on") from error
                if lease.committed:
                    logger.warning("%s is committed, though its handler failed afterwards: %s", claim, describe(error))
                elif (index := _guilty(error, events)) is None:
                    logger.info("%s failed (%s); handing its events over one by one", claim, describe(error))
                    one_by_one = True
                    continue
                else:
                    done, event = events[:index], events[index]
                    claim, failure = self.claims.settle(claim, event, error, done=done)
                    consumed += index + (failure.outcome == Failure.DEAD_LETTER)
                    if failure.outcome != Failure.DEAD_LETTER:
                        break
                    left = left[index + 1 :]
                    continue
            lease.commit()
            claim = lease.claim
            consumed += len(events)
            left = left[len(events) :]
            if claim.position < claim.range.upto and hold.stopping.is_set():
                self.claims.release(claim)
                break
        return Progress(consumed, claim.position, failure)


def _guilty(error: Exception, events: Sequence[Event]) -> int | None:
    """The index of the event that failed, None where nobody knows."""
    if isinstance(error, ConsumptionError):
        named = getattr(error.event, "id", None)
        for index, event in enumerate(events):
            if event.id == named:
                return index
    return 0 if len(events) == 1 else None
