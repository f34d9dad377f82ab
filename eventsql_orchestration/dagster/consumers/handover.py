"""The handover from a draining run to its successor: the partition never waits for a run.

A draining run ends with its window, and the next run takes seconds to start. So a tick requests a successor near the
end of the window. The successor has no claim. As soon as it is ready, it tries to claim, as the draining run does, and
the faster run gets the next range. The draining run ends when it sees that its successor holds the partition. If the
successor has left the queue and has not claimed yet, the draining run goes on after its window. Claims keep their
order, and neither run can take a claimed range from the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import dagster as dg

from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.dagster.tags import SUCCEEDS_TAG, UNFINISHED
from eventsql_orchestration.orchestration.drain import POLL, Draining
from eventsql_orchestration.orchestration.owners import owner_of_run

PATIENCE: Final = 30.0
"""Seconds that a successor waits for its predecessor, which may be busy with a long range."""

ASK_SECONDS: Final = 1.0
"""Seconds between two checks whether another run has ended or is about to start."""

OVERTIME: Final = 30.0
"""Maximum seconds for which a run goes on after its window, while a successor that is about to start has not claimed.
On a busy machine, the successor may take longer to start than the rest of the window lasts."""


def successor_of(run_id: str, instance: dg.DagsterInstance) -> dg.RunRecord | None:
    """The unfinished successor of a run."""
    runs = instance.get_run_records(dg.RunsFilter(tags={SUCCEEDS_TAG: run_id}, statuses=list(UNFINISHED)), limit=1)
    return runs[0] if runs and runs[0].dagster_run.parent_run_id is None else None


def comes_soon(run_id: str, instance: dg.DagsterInstance) -> bool:
    """Whether the successor of a run has left the queue. A queued successor may wait for the slot of that run."""
    launched = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]
    return bool(instance.get_runs_count(dg.RunsFilter(tags={SUCCEEDS_TAG: run_id}, statuses=launched)))


@dataclass
class RunDraining(Draining):
    """`Draining` in a run. `successor_comes` returns whether a successor of it was requested and will start soon."""

    successor_comes: Callable[[], bool] = lambda: False
    _predecessor: str | None = field(default=None, init=False)
    _comes: bool = field(default=False, init=False)
    _asks_at: float = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._asks_at = self._deadline

    def _goes_on(self, partition: int) -> bool:
        """Whether the window lasts, or is extended until a successor that is about to start has claimed."""
        now = time.monotonic()
        if now < self._deadline:
            return True
        # A run without a window has no successor.
        if not self.limits.drain_seconds or now >= self._deadline + OVERTIME:
            return False
        if now >= self._asks_at:
            self._comes, self._asks_at = self.successor_comes(), now + ASK_SECONDS
        if not self._comes:
            return False
        last = self.shard.claims.last(self.consumer.topic, self.consumer.name, partition)
        return last is not None and last.owner == self.owner

    def succeed(self, run_id: str, partition: int, *, is_over: Callable[[], bool]) -> Claim | NoClaim:
        """Take over from a run that still drains the partition: claim as soon as events wait.

        `is_over` returns whether that run has ended. Gives up if nothing could be claimed for `PATIENCE` seconds, or if
        no more events came.
        """
        self._predecessor = owner_of_run(run_id)
        over, now = False, time.monotonic()
        ends, asks = now + PATIENCE, now + ASK_SECONDS
        while True:
            found = self._claim_if_due(partition, most=self.limits.max_events)
            now = time.monotonic()
            if isinstance(found, Claim) or now >= ends:
                return found
            if not over and now >= asks:
                over, asks = is_over(), now + ASK_SECONDS
                if over:
                    ends = min(ends, now + self.limits.drain_idle)
            time.sleep(POLL)

    def _is_succeeded(self, found: NoClaim) -> bool:
        # Another owner is this run's successor, and gets the next events. The predecessor of this run soon ends by
        # itself.
        return found.leased_by not in (None, self._predecessor)
