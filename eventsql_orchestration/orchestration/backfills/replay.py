"""A run replays the rest of one window of a backfill, exactly once, even if several runs have the same window."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from eventsql_orchestration import Shard
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import ClaimLostError, DatabaseBusyError, EventSQLError
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import (
    DEFAULT_MAX_FAILURES,
    Backfill,
    Replayed,
    Window,
    letters_command,
    partition_key,
    resume_command,
)
from eventsql_orchestration.orchestration.batch import BatchConsumer
from eventsql_orchestration.orchestration.drain import Consume, Drained
from eventsql_orchestration.orchestration.errors import WindowFailedError, WindowGoneError
from eventsql_orchestration.orchestration.limits import RunLimits
from eventsql_orchestration.validation import check_whole, counted

POLL: Final = 0.2
"""Seconds between two looks at a window that another run leases, or whose failed event is not due yet."""

PROGRESS_SECONDS: Final = 10.0
"""Seconds between two lines in a run's log about its progress or its waiting."""


@dataclass
class WindowReplay:
    """Replays one partition of one window: claims ranges of it as its side consumer until nothing is left."""

    shard: Shard
    topic: str
    consumer: str
    consume: Consume
    limits: RunLimits
    backfill_id: str
    window: Window
    partition: int
    owner: str
    log: logging.Logger
    max_events: int | None = None
    max_failures: int | None = None
    resume_options: str = ""
    drained: Drained = field(default_factory=Drained, init=False)
    _told_at: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self._max_events = check_whole("max_events", self.max_events or self.limits.max_events, least=1)
        most = DEFAULT_MAX_FAILURES if self.max_failures is None else self.max_failures
        self._max_failures = check_whole("max_failures", most, least=1)
        self._backfills = Backfills([self.shard])

    def run(self, has_ended: Callable[[str], bool]) -> Backfill:
        """Replay the rest of the window. Returns the backfill as it is then.

        `has_ended` says whether an owner of claims has ended: then the window need not wait for the end of its lease.

        A failing event is retried when it is due, as often as the consumer allows, and becomes a dead letter if the
        topic has a dead letter topic. Raises `WindowFailedError` if an event blocks the window, if the backfill has
        `max_failures` dead letters, and if another run has the window; `WindowGoneError` if the window is not there.
        """
        lease_ends_at = None
        while True:
            backfill, part = self._look()
            if part.done:
                return backfill
            if backfill.given_up >= self._max_failures:
                raise self._stopped(backfill)
            if part.owner is not None and part.owner != self.owner:
                if has_ended(part.owner):
                    self._give_back(part)
                elif lease_ends_at not in {None, part.lease_ends_at}:
                    raise self._failure(f"{part.owner} replays this window now")
                # A live run renews its lease. The lease of a killed run ends.
                lease_ends_at = part.lease_ends_at
                self._wait(f"{part.owner} leases the window")
            elif part.paused:
                raise self._failure(f"the window is paused: run {self._resume} to continue")
            elif part.spent and (reason := self._blocking(part)) is not None:
                raise self._blocked(part, reason)
            elif part.retry_in > 0:
                time.sleep(min(POLL, part.retry_in))
            else:
                self._claim_and_consume(part, may_fail=self._max_failures - backfill.given_up)

    def take_back(self) -> None:
        """Release the claim of an earlier try of this run, which can commit nothing more then.

        Raises `WindowGoneError` if the window is not there.
        """
        _, part = self._look()
        if part.owner == self.owner:
            self._give_back(part)

    def finish(self, backfill: Backfill) -> bool:
        """End the backfill on this shard if all of its windows are replayed. False if it is not at its end."""
        finished = self._backfills.finish(backfill)
        if finished:
            on = "" if self.shard.name is None else f" on {self.shard.name}"
            self.log.info("backfill %s is done%s", self.backfill_id, on)
        return finished

    def is_finished(self) -> bool:
        """Whether the backfill has ended with all of its windows replayed."""
        return self._backfills.is_finished(self.topic, self.backfill_id, self.consumer)

    def _look(self) -> tuple[Backfill, Replayed]:
        backfill = self._backfills.find(self.topic, self.backfill_id, self.consumer)
        part = None if backfill is None else backfill.part(self.window, self.partition)
        if backfill is None or part is None:
            raise WindowGoneError(
                f"backfill {self.backfill_id} of consumer {self.consumer!r} no longer has window "
                f"{partition_key(self.backfill_id, self.window, self.partition)}: the backfill was deleted, or it "
                "finished over 30 days ago. Make a new backfill to replay the range"
            )
        return backfill, part

    def _claim_and_consume(self, part: Replayed, *, may_fail: int) -> None:
        events = self._backfills.left(self.topic, part, self._max_events)
        if not events:
            return
        claim = self.shard.claims.claim(
            self.topic, part.name, self.partition,
            owner=self.owner, max_events=events, max_wait=0.0, lease=self.limits.lease,
        )  # fmt: skip
        if not isinstance(claim, Claim):
            # Another transaction has the partition locked now, or the next look finds the reason.
            self._wait(claim.reason)
            return
        claim = replace(claim, shard=self.shard.name)
        if isinstance(self.consume, BatchConsumer):
            self.consume.max_dead_letters = may_fail
        try:
            if claim.range.upto > self.window.upto:
                # Another run got further between the look and the claim.
                self.shard.claims.release(claim)
                return
            with self.shard.claims.heartbeat(claim, lease=self.limits.lease):
                consumed = self.consume(claim)
        except ClaimLostError:
            return
        except BaseException:
            self._release(claim)
            raise
        # The next look finds out whether a failed event is retried.
        self.drained.claims.append((claim, replace(consumed, failure=None)))
        self._tell(consumed)

    def _tell(self, consumed: BatchResult) -> None:
        """Log failures, and the progress every 10 seconds."""
        failure = consumed.failure
        if failure is not None:
            self.log.warning("event %d failed, attempt %d: %s", failure.event_id, failure.attempts, failure.error)
        for letter in consumed.dead_letters:
            self.log.warning("event %d is a dead letter now: %s", letter.event_id, letter.error)
        if self._may_tell():
            letters = len(self.drained.dead_letters)
            replayed = counted(self.drained.events, "event")
            self.log.info("%s replayed so far, %s among them", replayed, counted(letters, "dead letter"))

    def _wait(self, reason: str) -> None:
        """Wait for the next look. Log the reason every 10 seconds."""
        if self._may_tell():
            self.log.info("the replay waits: %s", reason)
        time.sleep(POLL)

    def _may_tell(self) -> bool:
        now = time.monotonic()
        if now - self._told_at < PROGRESS_SECONDS:
            return False
        self._told_at = now
        return True

    def _release(self, claim: Claim) -> None:
        """Release a claim, so that the next run need not wait for the end of its lease."""
        try:
            self.shard.claims.release(claim)
        except EventSQLError as error:
            self.drained.note = f"{claim} stays leased until its lease ends, because its release failed: {error}"

    def _give_back(self, part: Replayed) -> None:
        live = self.shard.claims.live(self.topic, part.name, self.partition)
        if live is not None and live.owner == part.owner:
            # A transaction of the owner may linger on the server, as after the loss of a machine. The run then waits.
            with suppress(DatabaseBusyError):
                self.shard.claims.release(live)

    @property
    def _resume(self) -> str:
        return f"`{resume_command(self.topic, self.consumer, self.backfill_id, self.resume_options)}`"

    def _failure(self, message: str, **facts: str | int) -> WindowFailedError:
        named = {"topic": self.topic, "consumer": self.consumer, "backfill": self.backfill_id}
        return WindowFailedError(message, **named, **facts)

    def _stopped(self, backfill: Backfill) -> WindowFailedError:
        """The error after too many dead letters."""
        first = next(iter(self.drained.dead_letters), None)
        facts: dict[str, str | int] = {"given up": backfill.given_up}
        if first is not None:
            facts |= {"event": first.event_id, "error": first.error}
        example = "" if first is None else f", for example event {first.event_id} ({first.error})"
        return self._failure(
            f"backfill {self.backfill_id} stops: it has {counted(backfill.given_up, 'dead letter')}{example}, and "
            f"max_failures is {self._max_failures}. `{letters_command(self.topic, self.backfill_id)}` lists them. "
            f"Correct the consumer's function, then run {self._resume}: the backfill continues after these events, and "
            "counts failures from 0",
            **facts,
        )

    def _blocking(self, part: Replayed) -> str | None:
        """The reason why an event without attempts left cannot become a dead letter; None if it can."""
        for state in self.shard.registry.consumer(self.topic, part.name):
            if state.partition == self.partition:
                return self.shard.dead_letters.blocking(state)
        return None

    def _blocked(self, part: Replayed, reason: str) -> WindowFailedError:
        return self._failure(
            f"event {part.failed_event} failed as often as consumer {self.consumer!r} may try it ({part.failure}) and "
            f"{reason}: correct the consumer, or create topic {self.topic}_dlt for dead letters, then run "
            f"{self._resume}",
            event=part.failed_event or 0,
            error=part.failure or "",
        )
