"""From a run that drains to the next one: requested before the first ends, so that its partition never waits for a run.

A run that drains ends with its window, and the next one takes seconds to be there. So a tick that finds a run draining
near the end of its window requests a successor, which has no claim: it tries to claim, as the draining run does, from
the moment when it is ready. Whichever is faster has the next range. The draining run ends when it sees its successor
hold the partition. Claims keep their order, and neither can lose anything to the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Final

import dagster as dg

from eventsql_orchestration import Consumer
from eventsql_orchestration.dagster.draining import PATIENCE, run_of_owner
from eventsql_orchestration.dagster.tags import (
    CLAIM_TAG,
    CONSUMER_TAG,
    FINISHED,
    PARTITION_TAG,
    REPLAY_TAG,
    SHARED_TAG,
    SUCCEEDS_TAG,
    TOPIC_TAG,
    shard_tags,
)
from eventsql_orchestration.log.claims import Claim

LEAD: Final = 9.0
"""Seconds before the end of a run's window from which a successor is requested: Dagster's next look at the sensor is
at most 5 away, its queue's 1, and a run takes some 2 to start."""

START_TIMEOUT: Final = 300.0
"""Seconds after which a run that was created or is starting, and never started, is given up; Dagster's own monitoring
does so after 180 where it is on. A queued run waits as long as its queue lets it."""

SLACK: Final = 5.0
"""Seconds after the end of its window in which a run that drains may still be at its last range, or about to end."""


@dataclass(frozen=True, slots=True)
class Relay:
    """A partition's run that has started, and the one that is to succeed it; one of them may be missing."""

    run: dg.RunRecord | None
    successor: dg.RunRecord | None

    def drains(self, live: Claim | None) -> bool:
        """Whether the run is beyond the range that it was requested for."""
        if self.run is None or live is None:
            return self.run is not None
        mine = run_of_owner(live.owner) == self.run.dagster_run.run_id
        return mine and self.run.dagster_run.tags.get(CLAIM_TAG) != str(live.id)

    def awaits_successor(self) -> bool:
        """Whether a successor is on its way, and can still be waited for: one that has died is no reason to."""
        if self.successor is None:
            return False
        if self.successor.dagster_run.status == dg.DagsterRunStatus.STARTED:
            return _age(self.successor) < PATIENCE + SLACK
        # As with any run, the queue decides when; what was created and never starts is given up.
        return (
            self.successor.dagster_run.status == dg.DagsterRunStatus.QUEUED
            or since_change(self.successor) < START_TIMEOUT
        )


def decide(relay: Relay, live: Claim | None, drain_seconds: float) -> dg.SkipReason | str | None:
    """What a tick does about a partition that a run drains: it leaves it alone, or requests a successor of the run
    whose id is given. None where nobody drains it, as far as is known.

    A run of which a window of `LEAD` seconds is over is under steady traffic: it would have ended otherwise.
    """
    if relay.successor is not None and relay.awaits_successor():
        return dg.SkipReason(
            f"run {relay.successor.dagster_run.run_id} takes over from run "
            f"{relay.successor.dagster_run.tags[SUCCEEDS_TAG]}"
        )
    if relay.run is None or not relay.drains(live):
        return None
    left = drain_seconds - _age(relay.run)
    run_id = relay.run.dagster_run.run_id
    if relay.successor is None and left <= LEAD <= _age(relay.run):
        return run_id
    return dg.SkipReason(f"run {run_id} drains the partition, for {max(0.0, left):.0f} s more")


def relays(
    instance: dg.DagsterInstance,
    consumer: Consumer,
    shard: str | None,
    drain_seconds: float,
    partition: int | None = None,
) -> Mapping[int, Relay]:
    """What is under way of a consumer on a shard, by partition, or of one of them; one question to the storage."""
    tags = {TOPIC_TAG: consumer.topic, CONSUMER_TAG: consumer.name, **shard_tags(shard)}
    if partition is not None:
        tags[PARTITION_TAG] = str(partition)
    by_partition: dict[int, list[dg.RunRecord]] = {}
    for record in instance.get_run_records(dg.RunsFilter(tags=tags, statuses=_UNFINISHED)):
        number = record.dagster_run.tags.get(PARTITION_TAG)
        # A run of several consumers' has turns of its own, and one that replays has no part of what waits.
        if number is not None and not {SHARED_TAG, REPLAY_TAG} & record.dagster_run.tags.keys():
            by_partition.setdefault(int(number), []).append(record)
    return {number: _relay(runs, drain_seconds) for number, runs in by_partition.items()}


_UNFINISHED: Final = [status for status in dg.DagsterRunStatus if status not in FINISHED]


def _relay(runs: Sequence[dg.RunRecord], drain_seconds: float) -> Relay:
    """The first of a chain of runs that is within its window, and the next of them."""
    started = {
        run.dagster_run.run_id: run
        for run in runs
        # One that is long past its window, and seems to run, has died, or is at a range of which the lease tells.
        if run.dagster_run.status == dg.DagsterRunStatus.STARTED and _age(run) <= drain_seconds + SLACK
    }
    first = next((run for run in started.values() if run.dagster_run.tags.get(SUCCEEDS_TAG) not in started), None)
    # Where the one before has ended, its successor may still be in the queue.
    succeeding = [run for run in runs if run is not first and SUCCEEDS_TAG in run.dagster_run.tags]
    return Relay(first, succeeding[0] if succeeding else None)


def _age(run: dg.RunRecord) -> float:
    """Seconds since a run started; zero for one that has not."""
    return 0.0 if run.start_time is None else time.time() - run.start_time


def since_change(run: dg.RunRecord) -> float:
    """Seconds since a run's status changed last."""
    updated = run.update_timestamp
    return time.time() - (updated if updated.tzinfo is not None else updated.replace(tzinfo=UTC)).timestamp()
