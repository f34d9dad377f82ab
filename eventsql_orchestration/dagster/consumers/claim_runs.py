"""The run of a claim: which one has it or is to have it, and what its age and status say."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC

import dagster as dg

from eventsql_orchestration import Consumer, EventSQL
from eventsql_orchestration.dagster.claim_times import claim_tags, made_at
from eventsql_orchestration.dagster.draining import run_of_owner
from eventsql_orchestration.dagster.tags import CLAIM_TAG, CLAIMED_AT_TAG, CONSUMER_TAG, FINISHED, TOPIC_TAG
from eventsql_orchestration.log.claims import Claim


def lease_decides(claim: Claim, run: dg.RunRecord | None) -> bool:
    """Whether nothing but the lease tells if a live claim's owner still lives."""
    if run is None:
        # Its tick may not be stored yet, or never will be; or somebody deleted the run.
        return True
    # A run that has taken its claim over renews the lease itself, as long as it lives.
    return run.dagster_run.status not in FINISHED and run_of_owner(claim.owner) is not None


def runs_of(
    claims: Sequence[Claim], consumer: Consumer, platform: EventSQL, instance: dg.DagsterInstance
) -> Mapping[int, dg.RunRecord]:
    """For each claim of a consumer on one shard, the run that has it or is to have it; of several, one that lives."""
    if not claims:
        return {}
    owners = {claim.id: owner for claim in claims if (owner := run_of_owner(claim.owner)) is not None}
    # Ids of claims are unique within a schema as it is now, and an instance outlives it, and may serve several.
    made = made_at(platform, [claim.id for claim in claims])
    tags = {
        TOPIC_TAG: consumer.topic,
        CONSUMER_TAG: consumer.name,
        CLAIM_TAG: [str(claim) for claim in made],
        CLAIMED_AT_TAG: [str(moment) for moment in made.values()],
    }
    requested = instance.get_run_records(dg.RunsFilter(tags=tags)) if made else []
    # A run that drains has claims that it was not requested for.
    owning = instance.get_run_records(dg.RunsFilter(run_ids=list(owners.values()))) if owners else []
    found: dict[int, dg.RunRecord] = {}
    for claim in claims:
        runs = [run for run in owning if run.dagster_run.run_id == owners.get(claim.id)]
        if claim.id in made:
            its_own = claim_tags(claim.id, made[claim.id], platform.shard)
            runs += [run for run in requested if its_own.items() <= run.dagster_run.tags.items()]
        if runs:
            found[claim.id] = next((run for run in runs if run.dagster_run.status not in FINISHED), runs[0])
    return found


def age(run: dg.RunRecord) -> float:
    """Seconds since a run started; zero for one that has not."""
    return 0.0 if run.start_time is None else time.time() - run.start_time


def since_change(run: dg.RunRecord) -> float:
    """Seconds since a run's status changed last."""
    updated = run.update_timestamp
    return time.time() - (updated if updated.tzinfo is not None else updated.replace(tzinfo=UTC)).timestamp()
