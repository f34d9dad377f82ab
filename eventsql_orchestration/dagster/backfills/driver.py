"""Driving a backfill: launching the runs that are left, a limited number at once, until all have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eventsql_orchestration.dagster.backfills.launcher import BackfillJob, Launcher
from eventsql_orchestration.dagster.backfills.registry import Backfills
from eventsql_orchestration.dagster.backfills.windows import DEFAULT_MAX_FAILURES, Backfill, PlannedRun

POLL = 0.5
"""Seconds between two looks; a run takes some to start."""


@dataclass(frozen=True, slots=True)
class DriverProgress:
    """How far a backfill is, in events and in runs. `failing` is the first error that is being retried."""

    events: int
    done_events: int
    runs: int
    done_runs: int
    running: int
    failed: int
    given_up: int = 0
    failing: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a backfill ended: whether all is replayed, and the reasons of runs that failed, by partition key.

    `given_up` counts the events that became dead letters. `stopped` says that there were too many failures to go on.
    """

    done: bool
    failures: dict[str, str]
    done_keys: frozenset[str]
    given_up: int = 0
    stopped: bool = False


class BackfillDriver:
    """Launches the runs that are left of a backfill, at most `parallel` at once, in the order of their windows.

    With `parallel=1`, no run is launched after one that failed, because its events would overtake. No run is launched
    after `max_failures` dead letters and failed runs together. The driver waits for a window that another process
    replays, and launches a run for it when the lease of that process has ended.
    """

    def __init__(
        self,
        backfills: Backfills,
        backfill: Backfill,
        runs: Sequence[PlannedRun],
        *,
        launcher: Launcher,
        job: BackfillJob,
        parallel: int,
        max_failures: int | None = None,
    ) -> None:
        self._backfills = backfills
        self._backfill = backfill
        self._planned = {run.key(backfill.id): run for run in runs}
        self._launcher = launcher
        self._job = job
        self._parallel = parallel
        self._asked_failures = max_failures
        self._max_failures = DEFAULT_MAX_FAILURES if max_failures is None else max_failures
        self._given_up: dict[str, int] = {}
        self._failing: str | None = None
        self._running: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._done: set[str] = set()

    @property
    def running(self) -> int:
        """The number of runs under way."""
        return len(self._running)

    def run(self, on_progress: Callable[[DriverProgress], None] = lambda _: None) -> Outcome:
        """Drive it to its end. Raises `LocalDagsterError`, and `RunFailedError` if Dagster refuses a run."""
        self._launcher.require_running()
        self._launcher.prepare(self._job, list(self._planned))
        under_way = self._launcher.under_way(self._job, self._backfill.id)
        self._running = {key: run for key, run in under_way.items() if key in self._planned}
        while True:
            # Ask for ended runs before looking at the windows: a run that has ended changes nothing any more.
            ended = self._launcher.ended(self._running.values())
            current = self._find()
            gone = self._gone(current)
            consumed, leased = self._look(current, gone)

            for key, run in list(self._running.items()):
                if run in ended:
                    del self._running[key]
                    if key in gone and ended[run].succeeded:
                        self._done.add(key)
                    if key not in self._done:
                        self._failures[key] = ended[run].why or "its run ended, and left a part of it"

            waiting = self._launch(leased)
            on_progress(self._progress(consumed))
            if not self._running and not waiting:
                break
            time.sleep(POLL)

        last = self._find()
        done = not self._failures and (last is None or self._backfills.finish(last))
        return Outcome(
            done, dict(self._failures), frozenset(self._done),
            given_up=sum(self._given_up.values()), stopped=not done and self._too_many(),
        )  # fmt: skip

    def _find(self) -> Backfill | None:
        return self._backfills.find(self._backfill.topic, self._backfill.id, self._backfill.consumer)

    def _too_many(self) -> bool:
        return sum(self._given_up.values()) + len(self._failures) >= self._max_failures

    def _gone(self, current: Backfill | None) -> set[str]:
        """The runs on shards where the backfill is not registered any more: it is done there, or was deleted."""
        left = set() if current is None else set(current.by_shard())
        return {key for key, run in self._planned.items() if run.window.shard not in left}

    def _look(self, current: Backfill | None, gone: set[str]) -> tuple[dict[str, int], set[str]]:
        """The events that each unfinished run has consumed, and the windows that are leased; notes finished runs."""
        open_ = gone - self._done - self._failures.keys()
        backfill = self._backfill
        finished = self._backfills.finished(backfill.topic, backfill.id, backfill.consumer) if open_ else set()
        for key in open_:
            if self._planned[key].window.shard in finished:
                # The last run on the shard ended the backfill there. Another command may have launched that run.
                self._done.add(key)
            elif key not in self._running:
                self._failures[key] = "its window is gone: the backfill was deleted"

        consumed: dict[str, int] = {}
        leased: set[str] = set()
        self._failing = None
        for key, run in self._planned.items():
            if current is None or key in gone:
                continue
            part = current.part(run.window, run.partition)
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
        return consumed, leased

    def _launch(self, leased: set[str]) -> bool:
        """Launch as many runs as are allowed; gives whether some are left to launch."""
        left = [key for key in self._planned if key not in self._done and key not in self._failures]
        if self._too_many() or (self._parallel == 1 and self._failures):
            return False
        for key in left:
            if len(self._running.keys() | (leased & set(left))) >= self._parallel:
                break
            if key not in self._running and key not in leased:
                self._running[key] = self._launcher.launch(
                    self._job, self._backfill.id, key, max_failures=self._asked_failures
                )
        return any(key not in self._running for key in left)

    def _progress(self, consumed: dict[str, int]) -> DriverProgress:
        return DriverProgress(
            events=sum(run.events for run in self._planned.values()),
            done_events=sum(self._planned[key].events for key in self._done) + sum(consumed.values()),
            runs=len(self._planned),
            done_runs=len(self._done),
            running=len(self._running),
            failed=len(self._failures),
            given_up=sum(self._given_up.values()),
            failing=self._failing,
        )
