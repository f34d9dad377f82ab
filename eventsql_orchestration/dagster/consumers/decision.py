"""Decides what a tick does about a consumer partition, from its claim, its runs and the time alone.

`decide` is a pure function. `PartitionTick` carries its decisions out. docs/dagster_failures.md lists the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import dagster as dg

from eventsql_orchestration.consuming.claims import Claim, PartitionClaims
from eventsql_orchestration.dagster.consumers.handover import PATIENCE
from eventsql_orchestration.dagster.consumers.options import RunLimits, TickOptions
from eventsql_orchestration.dagster.tags import CLAIM_TAG, FINISHED, PARTITION_TAG, REPLAY_TAG, SHARED_TAG
from eventsql_orchestration.orchestration.owners import run_of_owner
from eventsql_orchestration.retry import doubled


@dataclass(frozen=True, slots=True)
class RunState:
    """A run at the time of a tick.

    `age` is the time since its start, 0 if it has not started. `unchanged` is the time since its status changed. Both
    are in seconds. With `waits`, the run has started, and its step waits for a place in a pool.
    """

    run_id: str
    status: dg.DagsterRunStatus
    tags: Mapping[str, str] = field(default_factory=dict)
    age: float = 0.0
    unchanged: float = 0.0
    waits: bool = False

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    @property
    def started(self) -> bool:
        return self.status == dg.DagsterRunStatus.STARTED and not self.waits

    @property
    def queued(self) -> bool:
        """Whether the run waits for its turn, in Dagster's queue or for a place in a pool."""
        return self.status == dg.DagsterRunStatus.QUEUED or self.waits

    @property
    def launched(self) -> bool:
        """Whether the run's step may have begun."""
        return self.status != dg.DagsterRunStatus.NOT_STARTED and not self.queued

    @property
    def label(self) -> str:
        return "waiting for a place in a pool" if self.waits else self.status.value.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What a tick knows of a consumer partition."""

    claim: Claim | None = None
    """The live claim."""

    run: RunState | None = None
    """The run of `drains`, if one is named there; otherwise the run that owns the claim or was requested for it."""

    drains: str | None = None
    """The id of the run that may be draining the partition; see `draining_run`."""

    successor: RunState | None = None
    """The run that was requested to succeed the run of `drains`."""

    failures: int = 0
    """The number of runs in a row that failed from the claim's first offset."""

    since_failure: float = 0.0
    """Seconds since the last of them failed."""

    late: int = 0
    """The number of runs from the claim's first offset that found their claims lost."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Request no run. With `prolong`, renew the lease of the live claim."""

    reason: str
    prolong: bool = False


@dataclass(frozen=True, slots=True)
class RequestSuccessor:
    """Request a run that takes the partition over from the run that drains it."""

    run_id: str


@dataclass(frozen=True, slots=True)
class TryClaim:
    """Claim the next range, and request a run for it.

    With `release`, release the live claim first. Once the range is claimed, report the run `presumed_dead` as failed.
    If the partition turns out to be leased, do `when_leased`.
    """

    release: bool = False
    presumed_dead: str | None = None
    when_leased: Wait | RequestSuccessor | None = None


Decision: TypeAlias = Wait | RequestSuccessor | TryClaim


def decide(state: PartitionState, limits: RunLimits, options: TickOptions) -> Decision:
    claim, run = state.claim, state.run
    hand_over = _hand_over(state, limits, options)

    if claim is None:
        return hand_over or TryClaim()
    if run is None or lease_decides(claim, run):
        # A retry of the claim's owner that waits to be launched is not dead: it will find the claim lost, and end.
        dead = run.run_id if run is not None and run.launched else None
        return TryClaim(presumed_dead=dead, when_leased=hand_over)

    if run.finished:
        left = backoff(state.failures, options) - state.since_failure
        if left > 0:
            return Wait(
                f"{state.failures} runs failed from offset {claim.range.after}, the last run is {run.run_id}; "
                f"the next is requested in {left:.0f} s"
            )
        return TryClaim(release=True)

    if not run.queued and run.unchanged > _time_to_adopt(run, state.late, options):
        return TryClaim(release=True, presumed_dead=run.run_id)
    return Wait(f"run {run.run_id} of claim {claim.id} is {run.label}", prolong=True)


def needs_attention(standing: PartitionClaims, run: RunState | None, limits: RunLimits, options: TickOptions) -> bool:
    """Whether a tick has to decide about a partition."""
    drains = draining_run(standing, run, limits, options) is not None
    if standing.claim is None:
        # Even if no event waits now, the window of the run that drains the partition may end soon.
        return not standing.leased and (standing.waiting or drains)
    return drains or not (standing.leased and lease_decides(standing.claim, run))


def lease_decides(claim: Claim, run: RunState | None) -> bool:
    """Whether only the lease shows if a live claim's owner still lives."""
    if run is None:
        # The claim's tick may not be stored yet, or may never be stored, or the run was deleted.
        return True
    owner = run_of_owner(claim.owner)
    # A run that has adopted its claim renews the lease itself, as long as it lives. If its owner has ended, a retry of
    # the owner has yet to adopt the claim: once the retry is launched, it has the same time as any run.
    return not run.finished and owner is not None and (owner == run.run_id or not run.launched)


def needs_late_runs(claim: Claim, run: RunState, options: TickOptions) -> bool:
    """Whether a decision depends on the number of runs that came too late."""
    return run.started and not lease_decides(claim, run) and run.unchanged > options.adopt_timeout


def draining_run(
    standing: PartitionClaims, run: RunState | None, limits: RunLimits, options: TickOptions
) -> str | None:
    """The id of the run that may be draining a partition: the next run of the partition succeeds it.

    Without a live claim, it is the owner of the latest claim, if that claim ended no longer than `drain_idle` ago. A
    run that finds no events for `drain_idle` ends, so the owner of an older claim no longer drains.

    With a live claim, it is the owner of that claim, if three things hold: the run drains this partition alone, it was
    requested for an earlier claim, and its window ends soon.
    """
    claim, last = standing.claim, standing.last
    if claim is None:
        recent = last is not None and last.seconds <= limits.drain_idle + options.slack
        return run_of_owner(last.owner) if last is not None and recent else None
    if run is None or not run.started or run_of_owner(claim.owner) != run.run_id:
        return None
    if run.tags.get(CLAIM_TAG) == str(claim.id) or not _drains_alone(run):
        return None
    return run.run_id if _window_ends_soon(run, limits, options) else None


def _hand_over(state: PartitionState, limits: RunLimits, options: TickOptions) -> Wait | RequestSuccessor | None:
    """The decision about the run that drains the partition; None if no run is known to drain it."""
    run, run_id = state.run, state.drains
    if run_id is None:
        return None
    if state.successor is not None and _will_come(state.successor, options):
        return Wait(f"run {state.successor.run_id} takes over from run {run_id}")

    if run is None or not run.started or not _drains_alone(run):
        return None
    left = limits.drain_seconds - run.age
    if left < -options.slack:
        return None
    if _window_ends_soon(run, limits, options):
        return RequestSuccessor(run_id)
    return Wait(f"run {run_id} drains the partition, for {max(0.0, left):.0f} s more")


def _drains_alone(run: RunState) -> bool:
    """Whether a run drains one partition only.

    A shared run goes from consumer to consumer. A replaying run consumes no waiting events. A run that a person
    launched goes from partition to partition.
    """
    return PARTITION_TAG in run.tags and not {SHARED_TAG, REPLAY_TAG} & run.tags.keys()


def _window_ends_soon(run: RunState, limits: RunLimits, options: TickOptions) -> bool:
    """Whether the window ends soon. A run older than `lead` has steady traffic: otherwise, it would have ended."""
    return limits.drain_seconds - run.age <= options.lead <= run.age


def _will_come(successor: RunState, options: TickOptions) -> bool:
    """Whether a successor can still be expected. The queue decides when a queued run starts."""
    if successor.started:
        return successor.age < PATIENCE + options.slack
    return successor.queued or successor.unchanged < options.start_timeout


def backoff(failures: int, options: TickOptions) -> float:
    """Seconds between the end of a failed run and the next run from the same offset."""
    if failures < 2:
        return 0.0
    return doubled(options.first_backoff, failures - 2, options.max_backoff)


def _time_to_adopt(run: RunState, late: int, options: TickOptions) -> float:
    """Seconds within which a run has to start, or to adopt its claim."""
    if not run.started:
        return options.start_timeout
    return options.adopt_timeout * 2.0 ** min(late, options.max_doublings)
