"""Making claims: which range of a consumer partition an owner gets, or why it gets none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg

from eventsql_orchestration.consuming.claim_processing import live_owner
from eventsql_orchestration.consuming.claim_values import Claim, NoClaim
from eventsql_orchestration.consuming.dead_letter_values import NEVER
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.partition import ConsumerPartition, LockedPartition, lock
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import ConsumerNotFoundError, DatabaseBusyError, DatabaseUnavailableError
from eventsql_orchestration.model import OffsetRange, how_often
from eventsql_orchestration.storage.log_table import check_readable
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.layouts import HELD_BACK, Layouts
from eventsql_orchestration.validation import advised

_ENDED_BY_LIMIT: Final = (
    psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable, psycopg.errors.IdleInTransactionSessionTimeout
)  # fmt: skip
"""Errors of a server that ends a statement, a wait for a lock, or a session that stands still in a transaction."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The claim that an owner asks for, with the parameters of `Claims.claim`."""

    key: ConsumerPartition
    owner: str
    min_events: int
    max_events: int
    max_wait: float
    lease: float
    timeout: float
    isolate: bool
    instead_of: Claim | None


class ClaimMaker:
    """Makes claims for `Claims`."""

    def __init__(self, database: Database, dead_letters: DeadLetters) -> None:
        self._database = database
        self._dead_letters = dead_letters
        self._layouts = Layouts(database)
        self._queries = Queries("log", database.schema)
        self._log = LogReader(database.schema)

    def claim(self, wanted: ClaimRequest) -> Claim | NoClaim:
        """Make a claim. If all partitions have reached the end of their layout, first enter the topic's next layout."""
        if (claimed := self._claim(wanted)) is not None:
            return claimed

        key = wanted.key
        settled = self._layouts.settle(key.topic, key.consumer)
        try:
            claimed = self._claim(wanted) if settled.entered else None
        except ConsumerNotFoundError:
            return NoClaim(f"the topic has no partition {key.partition} any more")
        if claimed is not None:
            return claimed
        changing = "" if settled is HELD_BACK else "the partitions of the topic change here: "
        return NoClaim(changing + settled.reason)

    def _claim(self, wanted: ClaimRequest) -> Claim | NoClaim | None:
        """Make a claim in one transaction; None when the partition has consumed all events of its layout.

        Raises `DatabaseBusyError` if the server ends it, as after the limits that `limit_waits` sets.
        """
        try:
            return self._claim_in_time(wanted)
        except (DatabaseBusyError, DatabaseUnavailableError) as error:
            cause = error.__cause__
            if not isinstance(cause, _ENDED_BY_LIMIT):
                raise
            raise DatabaseBusyError(
                f"{wanted.key} was not claimed ({describe(cause)}; each statement of a claim may last "
                f"{wanted.timeout:g} s): try again"
            ) from cause

    def _claim_in_time(self, wanted: ClaimRequest) -> Claim | NoClaim | None:
        topic, partition = wanted.key.topic, wanted.key.partition
        min_events, max_events = wanted.min_events, wanted.max_events
        with self._database.transaction() as connection:
            # A tick whose caller has given up must not keep the partition locked.
            connection.execute(self._queries("limit_waits"), {"most": f"{max(1, round(wanted.timeout * 1000))}ms"})
            locked = lock(connection, self._queries, wanted.key, wait=False)
            if locked is None:
                return self._not_lockable(connection, wanted.key)
            if (refusal := self._refusal(connection, locked, wanted.instead_of)) is not None:
                return refusal

            if wanted.isolate and locked.state.failing:
                min_events = max_events = 1
            events, upto, waited = self._log.waiting(
                connection, topic, partition=partition, after=locked.offset, upto=locked.upto, limit=max_events
            )
            if not events and locked.state.until is not None:
                return None
            if upto is None or waited is None:
                return NoClaim(f"no events wait after offset {locked.offset}", waiting=0)

            # Up to the end of a layout there will be no more events. An event from before the server's clock went back
            # may have a time that is far ahead.
            if events < min_events and abs(waited) < wanted.max_wait and locked.state.until is None:
                reason = f"{events} of {min_events} events wait, for {waited:.1f} s of {wanted.max_wait:g} s"
                return NoClaim(reason, waiting=events, due_in=wanted.max_wait - waited)
            return self._insert(connection, locked, upto=upto, events=events, owner=wanted.owner, lease=wanted.lease)

    def _not_lockable(self, connection: Connection, key: ConsumerPartition) -> NoClaim:
        (exists,) = fetch_one(connection, self._queries("consumer_exists"), key.parameters())
        if not exists:
            check_readable(connection, self._database.schema, key.topic)
            raise ConsumerNotFoundError(f"{key} does not exist: create it with `eventsql consumer create`")
        return NoClaim("another consumption has the partition locked")

    def _refusal(self, connection: Connection, locked: LockedPartition, instead_of: Claim | None) -> NoClaim | None:
        state = locked.state
        if state.paused:
            resume = advised("consumer resume", locked.key.topic, locked.key.consumer)
            return NoClaim(f"the consumer is paused: resume it with `{resume}`")
        if locked.leased:
            assert state.lease_expires_at is not None
            left = (state.lease_expires_at - locked.now).total_seconds()
            # `start_queue` leases a partition until its events are acknowledged.
            lasts = f" for {left:.0f} s more" if left < NEVER / 2 else ""
            return NoClaim(f"{state.lease_owner} leases the partition{lasts}", leased_by=state.lease_owner)
        if (reason := self._dead_letters.blocking(state, connection)) is not None:
            return NoClaim(
                f"event {state.failed_event_id} blocks the partition: it failed {how_often(state.attempts)} "
                f"({state.failure}) and {reason}"
            )
        if locked.retry_in:
            return NoClaim(f"event {state.failed_event_id} is retried in {locked.retry_in:.0f} s ({state.failure})")
        if instead_of is not None and live_owner(connection, self._queries, instead_of) is None:
            return NoClaim(f"{instead_of} has just ended")
        return None

    def _insert(
        self, connection: Connection, locked: LockedPartition, *, upto: int, events: int, owner: str, lease: float
    ) -> Claim:
        key, epoch = locked.key, locked.state.epoch + 1
        connection.execute(self._queries("release_live_claim"), key.parameters(), prepare=False)
        own = {**key.parameters(), "epoch": epoch, "owner": owner}
        claimed = {**own, "after": locked.offset, "upto": upto, "events": events}
        (claim_id,) = fetch_one(connection, self._queries("insert_claim"), claimed)
        connection.execute(self._queries("lease"), {**own, "lease": lease})
        offsets = OffsetRange(key.topic, key.partition, locked.offset, upto)
        return Claim(claim_id, key.consumer, offsets, events, epoch, owner, locked.offset)
