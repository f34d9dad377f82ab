"""Driving a backfill: launching the runs of what is left, so many at once, until all have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eventsql_orchestration.dagster.launching import Launcher, Target
from eventsql_orchestration.dagster.sharded_backfills import ShardedBackfill, ShardedBackfills
from eventsql_orchestration.dagster.windows import Backfill, PlannedRun

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What driving came to: whether all is replayed, and else why runs failed, by their partition keys."""

    done: bool
    failures: dict[str, str]
    done_keys: frozenset[str]


class BackfillDriver:
    """Launches what is left of a backfill, at most `parallel` runs at once, in the order of their windows.

    With one at a time, what comes after a run that failed is not launched: its events would overtake. A window that
    somebody else replays is waited for, and taken up when that one's lease has ended.
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
    ) -> None:
        self._backfills = backfills
        self._backfill = backfill
        self._planned = {run.key(backfill.id): run for run in runs}
        self._launcher = launcher
        self._target = target
        self._parallel = parallel
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
        return Outcome(done, dict(self._failures), frozenset(self._done))

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
        for key, run in self._planned.items():
            if key in gone:
                continue
            part = left[run.window.shard].part(run.window, run.partition)
            if part is None:
                if key not in self._done:
                    self._failures[key] = "its window is gone: another backfill has the id by now"
                continue
            if part.done:
                self._done.add(key)
                continue
            consumed[key] = min(part.consumed, run.events)
            if part.owner is not None:
                leased.add(key)
        self._leased = leased
        return consumed, leased

    def _launch(self, leased: set[str]) -> bool:
        """Launch as many as may run; gives whether any are left to be launched."""
        left = [key for key in self._planned if key not in self._done and key not in self._failures]
        if self._parallel == 1 and self._failures:
            return False
        for key in left:
            if len(self._running.keys() | (leased & set(left))) >= self._parallel:
                break
            if key not in self._running and key not in leased:
                self._running[key] = self._launcher.launch(self._target, self._backfill.id, key)
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
        )
