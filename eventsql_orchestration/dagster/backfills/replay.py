"""Replaying the rest of one window of a backfill in a run, exactly once, whichever run comes first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import dagster as dg

from eventsql_orchestration import Shard
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster.backfills.registry import Backfills
from eventsql_orchestration.dagster.backfills.windows import (
    DEFAULT_MAX_FAILURES,
    Backfill,
    Replayed,
    Window,
    letters_command,
    partition_key,
    resume_command,
)
from eventsql_orchestration.dagster.consumers.batch import BatchConsumer
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition
from eventsql_orchestration.dagster.consumers.drain import Drained
from eventsql_orchestration.dagster.tags import run_of_owner
from eventsql_orchestration.errors import ClaimLostError, EventSQLError
from eventsql_orchestration.validation import check_whole

POLL: Final = 0.2
"""Seconds between two looks at a window that another run leases, or whose failed event is not due yet."""

PROGRESS_SECONDS: Final = 10.0
"""Seconds between two lines of progress in a run's log."""


class WindowGoneError(dg.Failure):
    """The window of a run is not registered: its backfill is finished, or was deleted."""

    def __init__(self, backfill_id: str, consumer: str, key: str) -> None:
        super().__init__(
            f"backfill {backfill_id} of consumer {consumer!r} has no window {key} any more: it was deleted, or it "
            "finished over 30 days ago; make a new backfill to replay the range",
            allow_retries=False,
        )


class WindowReplay:
    """Replays one partition of one window: claims ranges of it as its side consumer until nothing is left."""

    def __init__(
        self,
        platform: Shard,
        consumer: ConsumerDefinition,
        consume: Callable[[Claim], BatchResult],
        *,
        backfill_id: str,
        window: Window,
        partition: int,
        owner: str,
        log: logging.Logger,
        max_events: int | None = None,
        max_failures: int | None = None,
    ) -> None:
        self._platform = platform
        self._backfills = Backfills([platform])
        self._topic = consumer.topic.name
        self._consumer = consumer.consumer.name
        self._lease = consumer.limits.lease
        self._max_events = check_whole("max_events", max_events or consumer.limits.max_events, least=1)
        most = DEFAULT_MAX_FAILURES if max_failures is None else max_failures
        self._max_failures = check_whole("max_failures", most, least=1)
        self._log = log
        self._told_at = time.monotonic()
        self._consume = consume
        self._backfill_id = backfill_id
        self._window = window
        self._partition = partition
        self._owner = owner
        self.drained = Drained()

    def run(self, has_ended: Callable[[str], bool]) -> Backfill:
        """Replay the rest of the window; gives the backfill as it is then. `has_ended` tells whether a run has ended.

        A failing event is retried when it is due, as often as the consumer allows, and becomes a dead letter if the
        topic has a dead letter topic. Raises `dagster.Failure` if an event blocks the window, if the backfill has
        `max_failures` dead letters, and if another run has the window; `WindowGoneError` if the window is not there.
        """
        lease_ends_at = None
        while True:
            backfill, part = self._look()
            if part.done:
                return backfill
            if backfill.given_up >= self._max_failures:
                raise self._stopped(backfill)
            if part.owner is not None and part.owner != self._owner:
                run_id = run_of_owner(part.owner)
                if run_id is not None and has_ended(run_id):
                    self._give_back(part)
                elif lease_ends_at not in {None, part.lease_ends_at}:
                    raise dg.Failure(f"{part.owner} replays this window now", allow_retries=False)
                # A live run renews its lease. The lease of a killed run ends.
                lease_ends_at = part.lease_ends_at
                time.sleep(POLL)
            elif part.paused:
                raise dg.Failure(f"the window is paused: {self._advice()} ends that", allow_retries=False)
            elif part.spent and (reason := self._blocking(part)) is not None:
                raise self._blocked(part, reason)
            elif part.retry_in > 0:
                time.sleep(min(POLL, part.retry_in))
            else:
                self._claim_and_consume(part, may_fail=self._max_failures - backfill.given_up)

    def _look(self) -> tuple[Backfill, Replayed]:
        backfill = self._backfills.find(self._topic, self._backfill_id, self._consumer)
        part = None if backfill is None else backfill.part(self._window, self._partition)
        if backfill is None or part is None:
            key = partition_key(self._backfill_id, self._window, self._partition)
            raise WindowGoneError(self._backfill_id, self._consumer, key)
        return backfill, part

    def _claim_and_consume(self, part: Replayed, *, may_fail: int) -> None:
        events = self._backfills.left(self._topic, part, self._max_events)
        if not events:
            return
        claim = self._platform.claims.claim(
            self._topic, part.name, self._partition,
            owner=self._owner, max_events=events, max_wait=0.0, lease=self._lease,
        )  # fmt: skip
        if not isinstance(claim, Claim):
            # Somebody has it locked just now; or the next look says why.
            time.sleep(POLL)
            return
        claim = replace(claim, shard=self._platform.name)
        if isinstance(self._consume, BatchConsumer):
            self._consume.max_dead_letters = may_fail
        try:
            if claim.range.upto > self._window.upto:
                # Another run got further between the look and the claim.
                self._platform.claims.release(claim)
                return
            with self._platform.claims.heartbeat(claim, lease=self._lease):
                consumed = self._consume(claim)
        except ClaimLostError:
            return
        except BaseException:
            self._release(claim)
            raise
        # The next look says what becomes of an event that failed.
        self.drained.claims.append((claim, replace(consumed, failure=None)))
        self._tell(consumed)

    def _tell(self, consumed: BatchResult) -> None:
        """Log failures, and the progress every 10 seconds."""
        failure = consumed.failure
        if failure is not None:
            self._log.warning("event %d failed, attempt %d: %s", failure.event_id, failure.attempts, failure.error)
        for letter in consumed.dead_letters:
            self._log.warning("event %d is a dead letter now: %s", letter.event_id, letter.error)
        if time.monotonic() - self._told_at >= PROGRESS_SECONDS:
            self._told_at = time.monotonic()
            letters = len(self.drained.dead_letters)
            self._log.info("%d events are replayed so far, %d of them were given up", self.drained.events, letters)

    def _release(self, claim: Claim) -> None:
        """Give a claim back, so that the next run need not wait for the end of its lease."""
        try:
            self._platform.claims.release(claim)
        except EventSQLError as error:
            self.drained.note = f"{claim} is not given back before its lease ends: {error}"

    def _give_back(self, part: Replayed) -> None:
        live = self._platform.claims.live(self._topic, part.name, self._partition)
        if live is not None and live.owner == part.owner:
            self._platform.claims.release(live)

    def _advice(self) -> str:
        return f"`{resume_command(self._topic, self._consumer, self._backfill_id)}`"

    def _stopped(self, backfill: Backfill) -> dg.Failure:
        """The error after too many dead letters."""
        own = self.drained.dead_letters
        first = f", such as event {own[0].event_id}: {own[0].error}" if own else ""
        return dg.Failure(
            f"backfill {self._backfill_id} stops: it gave {backfill.given_up} events up, and {self._max_failures} are "
            f"allowed (max_failures){first}. `{letters_command(self._topic, self._backfill_id)}` lists them. Mend the "
            f"consumer's function, and run {self._advice()}: it goes on after them and counts anew",
            metadata={
                "topic": self._topic,
                "consumer": self._consumer,
                "given up": backfill.given_up,
                "backfill": self._backfill_id,
                **({"event": own[0].event_id, "error": own[0].error} if own else {}),
            },
            allow_retries=False,
        )

    def _blocking(self, part: Replayed) -> str | None:
        """The reason why an event without attempts left cannot become a dead letter; None if it can."""
        for state in self._platform.registry.consumer(self._topic, part.name):
            if state.partition == self._partition:
                return self._platform.dead_letters.blocking(state)
        return None

    def _blocked(self, part: Replayed, reason: str) -> dg.Failure:
        return dg.Failure(
            f"event {part.failed_event} failed as often as consumer {self._consumer!r} may try it ({part.failure}) and "
            f"{reason}: mend the consumer, or create topic {self._topic}_dlt, where such events go, and run "
            f"{self._advice()}",
            metadata={
                "topic": self._topic,
                "consumer": self._consumer,
                "event": part.failed_event,
                "error": part.failure,
                "backfill": self._backfill_id,
            },
            allow_retries=False,
        )
