"""Driving a backfill: launching the runs of what is left, so many at once, until all have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eventsql_orchestration.dagster.launching import Launcher, Target
from eventsql_orchestration.dagster.sharded_backfills import ShardedBackfill, ShardedBackfills
from eventsql_orchestration.dagster.windows import DEFAULT_MAX_FAILURES, Backfill, PlannedRun

POLL = 0.5
"""Seconds between two looks; a run takes some to start."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a backfill is."""

    events: int
    done_events: int
    runs: int
    done_runs: int
    running: int
    failed: int
    given_up: int = 0
    failing: str | None = None
    """What the first event failed with that is being retried."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What driving came to: whether all is replayed, and else why runs failed, by their partition keys.

    `given_up` counts the events that became dead letters. `stopped` says that there were too many failures to go on.
    """

    done: bool
    failures: dict[str, str]
    done_keys: frozenset[str]
    given_up: int = 0
    stopped: bool = False


class BackfillDriver:
    """Launches what is left of a backfill, at most `parallel` runs at once, in the order of their windows.

    With one at a time, what comes after a run that failed is not launched: its events would overtake. Nor is any run
    launched after `max_failures` events that were given up and runs that failed. A window that somebody else replays is
    waited for, and taken up when that one's lease has ended.
    """

    def __init__(
        self,
        backfills: ShardedBackfills,
        backfill: ShardedBackfill,
        runs: Sequence[PlannedRun],
        *,
        launcher: Launcher,
        target: Target,
        parallel: int,
        max_failures: int | None = None,
    ) -> None:
        self._backfills = backfills
        self._backfill = backfill
        self._planned = {run.key(backfill.id): run for run in runs}
        self._launcher = launcher
        self._target = target
        self._parallel = parallel
        self._asked_failures = max_failures
        self._max_failures = DEFAULT_MAX_FAILURES if max_failures is None else max_failures
        self._given_up: dict[str, int] = {}
        self._failing: str | None = None
        self._running: dict[str, str] = {}
        self._leased: set[str] = set()
        self._failures: dict[str, str] = {}
        self._done: set[str] = set()

    @property
    def running(self) -> int:
        """How many runs are under way."""
        return len(self._running)

    def run(self, on_progress: Callable[[Standing], None] = lambda _: None) -> Outcome:
        """Drive it to its end. Raises `LocalDagsterError`, `RunFailedError` where Dagster refuses a run."""
        self._launcher.require_running()
        self._launcher.prepare(self._target, list(self._planned))
        under_way = self._launcher.under_way(self._target, self._backfill.id)
        self._running = {key: run for key, run in under_way.items() if key in self._planned}
        while True:
            # Before the look: a run that has ended has done all that it will.
            ended = self._launcher.ended(self._running.values())
            current = self._backfills.find(self._backfill.topic, self._backfill.id, self._backfill.consumer)
            left = {} if current is None else current.of
            consumed, leased = self._look(left)
            for key, run in list(self._running.items()):
                if run in ended:
                    del self._running[key]
                    gone = self._planned[key].window.shard not in left
                    if key not in self._done or (gone and not ended[run].succeeded):
                        self._done.discard(key)
                        self._failures[key] = ended[run].why or "its run ended, and left a part of it"
            waiting = self._launch(leased)
            on_progress(self._standing(consumed))
            if not self._running and not waiting:
                break
            time.sleep(POLL)
        last = self._backfills.find(self._backfill.topic, self._backfill.id, self._backfill.consumer)
        done = not self._failures and (last is None or self._backfills.finish(last))
        stopped = not done and self._too_many()
        return Outcome(
            done, dict(self._failures), frozenset(self._done), given_up=sum(self._given_up.values()), stopped=stopped
        )

    def _too_many(self) -> bool:
        return sum(self._given_up.values()) + len(self._failures) >= self._max_failures

    def _look(self, left: Mapping[str | None, Backfill]) -> tuple[dict[str, int], set[str]]:
        """What each run that is not done has consumed, and which windows somebody leases; notes what is done.

        `left` is what is registered of the backfill, by shard.
        """
        # The last of a shard's runs ended it there, or somebody deleted it: then those not launched are lost.
        gone = {key for key, run in self._planned.items() if run.window.shard not in left}
        under_way = gone & (self._running.keys() | self._leased)
        for key in gone - self._done - self._failures.keys() - under_way:
            self._failures[key] = "its window is gone: the backfill was deleted, or ended by somebody else"
        self._done |= under_way - self._failures.keys()
        consumed, leased = {}, set()
        self._failing = None
        for key, run in self._planned.items():
            if key in gone:
                continue
            part = left[run.window.shard].part(run.window, run.partition)
            if part is None:
                if key not in self._done:
                    self._failures[key] = "its window is gone: another backfill has the id by now"
                continue
            self._given_up[key] = part.given_up
            if part.done:
                self._done.add(key)
                continue
            if part.failed_event is not None:
                self._failing = self._failing or f"event {part.failed_event}: {part.failure}"
            consumed[key] = min(part.consumed, run.events)
            if part.owner is not None:
                leased.add(key)
        self._leased = leased
        return consumed, leased

    def _launch(self, leased: set[str]) -> bool:
        """Launch as many as may run; gives whether any are left to be launched."""
        left = [key for key in self._planned if key not in self._done and key not in self._failures]
        if self._too_many() or (self._parallel == 1 and self._failures):
            return False
        for key in left:
            if len(self._running.keys() | (leased & set(left))) >= self._parallel:
                break
            if key not in self._running and key not in leased:
                self._running[key] = self._launcher.launch(
                    self._target, self._backfill.id, key, max_failures=self._asked_failures
                )
        return any(key not in self._running for key in left)

    def _standing(self, consumed: dict[str, int]) -> Standing:
        done_events = sum(self._planned[key].events for key in self._done)
        return Standing(
            events=sum(run.events for run in self._planned.values()),
            done_events=done_events + sum(consumed.values()),
            runs=len(self._planned),
            done_runs=len(self._done),
            running=len(self._running),
            failed=len(self._failures),
            given_up=sum(self._given_up.values()),
            failing=self._failing,
        )
