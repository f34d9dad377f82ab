"""Driving a backfill: launching the runs that are left, a limited number at once, until all have ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeVar

from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.orchestration.backfills.launcher import Ended, Launcher
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import DEFAULT_MAX_FAILURES, Backfill, PlannedRun
from eventsql_orchestration.orchestration.errors import AirflowAnswerError, LocalProcessError
from eventsql_orchestration.retry import pause_while_away

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL = 0.5
"""Seconds between two looks; a run takes some seconds to start."""

MAX_AWAY: Final = 600.0
"""Seconds without an answer of the orchestrator or the database until a backfill that has begun ends."""

LATE_RUN: Final = 20.0
"""Seconds to look for the run of a launch that got no answer, until it is launched again: a webserver that answers too
late may still create the run."""


@dataclass(frozen=True, slots=True)
class DriverProgress:
    """How far a backfill is, in events and in runs. `failing` is the first error that is being retried."""

    events: int
    done_events: int
    runs: int
    done_runs: int
    running: int
    failed: int
    given_up: int
    failing: str | None


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


@dataclass
class BackfillDriver:
    """Launches the runs that are left of a backfill, at most `parallel` at once, in the order of their windows.

    With `parallel=1`, no run is launched after a failed run: later events would overtake the events of its window. No
    run is launched after `max_failures` dead letters and failed runs together. The driver waits for a window that
    another process replays, and launches a run for it when the lease of that process has ended. It waits up to
    `max_away` seconds for an orchestrator or a database that is away.
    """

    backfills: Backfills
    backfill: Backfill
    runs: Sequence[PlannedRun]
    launcher: Launcher
    parallel: int
    max_failures: int | None = None
    max_away: float = MAX_AWAY
    _given_up: dict[str, int] = field(default_factory=dict, init=False)
    _failing: str | None = field(default=None, init=False)
    _launching: str | None = field(default=None, init=False)
    _running: dict[str, str] = field(default_factory=dict, init=False)
    _failures: dict[str, str] = field(default_factory=dict, init=False)
    _done: set[str] = field(default_factory=set, init=False)

    @cached_property
    def _planned(self) -> dict[str, PlannedRun]:
        return {run.key(self.backfill.id): run for run in self.runs}

    @property
    def running(self) -> int:
        return len(self._running)

    def run(self, on_progress: Callable[[DriverProgress], None] = lambda _: None) -> Outcome:
        """Drive it to its end. Raises `LocalProcessError`, and `RunFailedError` if a run is refused."""
        self.launcher.require_running()
        self.launcher.prepare(list(self._planned))
        self._find_running()
        while self._outlasting(lambda: self._advance(on_progress)):
            time.sleep(POLL)

        done = not self._failures and self._outlasting(self._finish)
        return Outcome(
            done, dict(self._failures), frozenset(self._done),
            given_up=sum(self._given_up.values()), stopped=not done and self._too_many(),
        )  # fmt: skip

    def _find_running(self) -> None:
        under_way = self.launcher.under_way(self.backfill.id)
        self._running = {key: run for key, run in under_way.items() if key in self._planned} | self._running

    def _find_late_run(self) -> None:
        """Look for the run of a launch that got no answer, if there is one."""
        deadline = time.monotonic() + LATE_RUN
        while self._launching is not None:
            self._find_running()
            if self._launching in self._running or time.monotonic() >= deadline:
                self._launching = None
            else:
                time.sleep(POLL)

    def _outlasting(self, step: Callable[[], T]) -> T:
        """Repeat a step while the orchestrator or the database is away."""
        failures, deadline = 0, time.monotonic() + self.max_away
        while True:
            try:
                self._find_late_run()
                return step()
            except AirflowAnswerError:
                # Airflow is there, and would refuse the request again.
                raise
            except (LocalProcessError, DatabaseUnavailableError) as error:
                failures += 1
                if time.monotonic() >= deadline:
                    raise
                if failures == 1:
                    logger.warning("backfill %s waits, trying again: %s", self.backfill.id, error)
                time.sleep(pause_while_away(failures))

    def _advance(self, on_progress: Callable[[DriverProgress], None]) -> bool:
        """Note ended runs, and launch further ones; returns whether something is left to wait for."""
        # Ask for ended runs before looking at the windows: a run that has ended changes nothing any more.
        ended = self.launcher.ended(self._running.values())
        current = self._find()
        gone = self._gone(current)
        consumed, leased = self._look(current, gone)
        self._note_ended(ended, gone)
        waiting = self._launch(leased)
        on_progress(self._progress(consumed))
        return bool(self._running) or waiting

    def _note_ended(self, ended: Mapping[str, Ended], gone: set[str]) -> None:
        for key, run in list(self._running.items()):
            if run in ended:
                del self._running[key]
                if key in gone and ended[run].succeeded:
                    self._done.add(key)
                if key not in self._done:
                    self._failures[key] = ended[run].why or "its run ended before the end of its window"

    def _finish(self) -> bool:
        """End the backfill. False if it was deleted: its `into` consumer does not exist then."""
        left = self._find()
        if left is not None and not self.backfills.finish(left):
            return False
        return {run.window.shard for run in self.runs} <= self._finished()

    def _finished(self) -> set[str | None]:
        backfill = self.backfill
        return self.backfills.finished(backfill.topic, backfill.id, backfill.consumer)

    def _find(self) -> Backfill | None:
        return self.backfills.find(self.backfill.topic, self.backfill.id, self.backfill.consumer)

    def _too_many(self) -> bool:
        most = DEFAULT_MAX_FAILURES if self.max_failures is None else self.max_failures
        return sum(self._given_up.values()) + len(self._failures) >= most

    def _gone(self, current: Backfill | None) -> set[str]:
        """The runs on shards where the backfill is not registered any more: it is done there, or was deleted."""
        left = set() if current is None else set(current.by_shard())
        return {key for key, run in self._planned.items() if run.window.shard not in left}

    def _look(self, current: Backfill | None, gone: set[str]) -> tuple[dict[str, int], set[str]]:
        """The events that each unfinished run has consumed, and the windows that are leased; notes finished runs."""
        open_ = gone - self._done - self._failures.keys()
        finished = self._finished() if open_ else set()
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
                    self._failures[key] = "its window is gone: another backfill has the id now"
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
        """Launch as many runs as are allowed; returns whether some are left to launch."""
        left = [key for key in self._planned if key not in self._done and key not in self._failures]
        if self._too_many() or (self.parallel == 1 and self._failures):
            return False
        for key in left:
            if len(self._running.keys() | (leased & set(left))) >= self.parallel:
                break
            if key not in self._running and key not in leased:
                self._launching = key
                self._running[key] = self.launcher.launch(self.backfill.id, key, max_failures=self.max_failures)
                self._launching = None
        return any(key not in self._running for key in left)

    def _progress(self, consumed: dict[str, int]) -> DriverProgress:
        return DriverProgress(
            events=sum(run.events for run in self._planned.values()),
            done_events=sum(self._planned[key].events for key in self._done) + sum(consumed.values()),
            runs=len(self._planned),
            # The events of a window may be consumed before its run ends.
            done_runs=len(self._done - self._running.keys()),
            running=len(self._running),
            failed=len(self._failures),
            given_up=sum(self._given_up.values()),
            failing=self._failing,
        )
