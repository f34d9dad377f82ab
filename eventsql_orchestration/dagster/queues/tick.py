"""The tick of a worker's sensor: it requests a run if messages wait and no run handles them.

A tick receives nothing: the run receives the messages itself, batch after batch. So no state has to survive between
tick and run, and a superfluous run does no harm: it finds no messages, and ends. docs/dagster_failures.md lists each
possible end of the tick or the run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import dagster as dg

from eventsql_orchestration.dagster.consumers.decision import RunState, backoff
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS, TickOptions
from eventsql_orchestration.dagster.consumers.tick import Answer, NothingYet, Tick
from eventsql_orchestration.dagster.register import queue_missing
from eventsql_orchestration.dagster.tags import FINISHED, HANDLED_TAG, QUEUE_TAG, UNFINISHED, shard_tags
from eventsql_orchestration.errors import DatabaseBusyError, SchemaOutdatedError
from eventsql_orchestration.orchestration.limits import WorkLimits
from eventsql_orchestration.orchestration.shards import rows_of
from eventsql_orchestration.queue.queue_table import QUEUE

LOOKED_BACK: Final = 10
"""The number of finished runs that a tick looks at: enough for the longest pause."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The visible messages of a queue, counted up to a limit, and the longest wait of a message in seconds."""

    messages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RecentRuns:
    """The unfinished runs of a worker, and how many runs in a row failed for reasons outside of messages."""

    unfinished: Sequence[RunState] = ()
    failures: int = 0
    since_failure: float = 0.0


def is_alive(run: RunState, limits: WorkLimits, options: TickOptions) -> bool:
    """Whether an unfinished run may still work. A started run gives a sign of life three times within `lease`."""
    if run.queued:
        return True
    if run.status in (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING):
        return run.unchanged < options.start_timeout
    return run.unchanged < limits.lease


def why_not(waiting: Waiting, runs: RecentRuns, limits: WorkLimits, options: TickOptions) -> dg.SkipReason | None:
    """Why a tick requests no run; None if it requests one."""
    if not waiting.messages:
        return NothingYet("no messages wait")
    late = waiting.seconds > limits.max_wait
    if waiting.messages < limits.min_messages and not late:
        return NothingYet(
            f"{waiting.messages} of {limits.min_messages} messages wait, none of them for more than "
            f"{limits.max_wait:g} s"
        )

    alive = [run for run in runs.unfinished if is_alive(run, limits, options)]
    if alive and (len(alive) >= limits.max_runs or not late or not all(run.started for run in alive)):
        return dg.SkipReason(f"run {alive[0].run_id} is {alive[0].label}, and handles the messages")

    left = backoff(runs.failures, options) - runs.since_failure
    if left > 0:
        return dg.SkipReason(f"{runs.failures} runs in a row failed; the next is requested in {left:.0f} s")
    return None


@dataclass(frozen=True)
class QueueWatch:
    """Decides what a tick does about a queue on one database. `op_name` is the step of the runs that it requests."""

    queue: str
    op_name: str
    limits: WorkLimits
    sensor: str
    options: TickOptions = DEFAULT_TICKS

    @property
    def description(self) -> str:
        return f"Requests a run if messages of queue {self.queue} wait."

    @property
    def notified_by(self) -> Collection[tuple[str, str]]:
        return ((QUEUE, self.queue),)

    def evaluate(self, tick: Tick) -> Answer:
        """One tick. Raises `DatabaseUnavailableError`."""
        shard, limits = tick.shard, self.limits
        try:
            rows = rows_of(shard, "queue", "waiting", {"name": self.queue, "limit": limits.min_messages})
        except (SchemaOutdatedError, DatabaseBusyError) as error:
            return dg.SkipReason(error.message)
        if not rows:
            return dg.SkipReason(queue_missing(self.queue))

        waiting = Waiting(*rows[0])
        # Most ticks find nothing, and need no query of Dagster's storage.
        runs = self._runs(tick) if waiting.messages else RecentRuns()
        reason = why_not(waiting, runs, limits, self.options)
        if reason is not None:
            return reason
        config = {} if shard.name is None else {"shard": shard.name}
        tags = {QUEUE_TAG: self.queue, **shard_tags(shard.name)}
        return [dg.RunRequest(run_config={"ops": {self.op_name: {"config": config}}}, tags=tags)]

    def _runs(self, tick: Tick) -> RecentRuns:
        tags = {QUEUE_TAG: self.queue, **shard_tags(tick.shard.name), **tick.own_runs}
        unfinished = tick.instance.get_run_records(dg.RunsFilter(tags=tags, statuses=list(UNFINISHED)))
        finished = tick.instance.get_run_records(dg.RunsFilter(tags=tags, statuses=list(FINISHED)), limit=LOOKED_BACK)
        failures = 0
        for record in finished:
            run = record.dagster_run
            # A run that failed only because messages failed did its work. The tag has to name this run: Dagster copies
            # tags to the retries of a run.
            if run.status != dg.DagsterRunStatus.FAILURE or run.tags.get(HANDLED_TAG) == run.run_id:
                break
            failures += 1
        since = tick.state(finished[0]).unchanged if failures else 0.0
        states = [tick.state(record, patience=self.limits.lease) for record in unfinished]
        return RecentRuns(states, failures, since)
