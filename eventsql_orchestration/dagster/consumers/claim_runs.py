"""Claims and their runs: the tags and the key that identify a run, and the state of a run.

Dagster keeps its history and never takes a run key twice. But a new schema begins with the first id of a claim again,
and a restored schema gives some ids a second time. So everything that Dagster keeps about a claim has the claim's id
and the time when the claim was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import dagster as dg

from eventsql_orchestration import Consumer, Shard
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster.tags import CLAIM_TAG, CLAIMED_AT_TAG, CONSUMER_TAG, TOPIC_TAG, shard_tags
from eventsql_orchestration.orchestration.owners import run_of_owner
from eventsql_orchestration.orchestration.shards import rows_of


def made_at(shard: Shard, claims: Iterable[int]) -> dict[int, int]:
    """The time when each claim was made, in microseconds since 1970. Deleted claims are left out."""
    wanted = list(claims)
    if not wanted:
        return {}
    return {int(claim): int(made) for claim, made in rows_of(shard, "claim_times", "made", {"claims": wanted})}


def claim_tags(claim_id: int, made: int, shard: str | None) -> dict[str, str]:
    """The tags of the run that is requested for a claim. Each shard has its own ids of claims."""
    return {CLAIM_TAG: str(claim_id), CLAIMED_AT_TAG: str(made), **shard_tags(shard)}


def run_key(claim_id: int, made: int, shard: str | None) -> str:
    """The run key of a claim's run. Dagster ignores a request whose key it has seen before."""
    return f"eventsql-claim-{claim_id}-{made}" + ("" if shard is None else f"-{shard}")


def is_another_claim(shard: Shard, claim_id: int, tags: Mapping[str, str]) -> bool:
    """Whether the run with these tags was requested for an earlier claim with the same id.

    A run that no sensor requested has no claim tags, and may have any claim.
    """
    if tags.get(CLAIM_TAG) != str(claim_id) or CLAIMED_AT_TAG not in tags:
        return False
    made = made_at(shard, [claim_id]).get(claim_id)
    return made is not None and tags[CLAIMED_AT_TAG] != str(made)


def runs_of(
    claims: Sequence[Claim], consumer: Consumer, shard: Shard, instance: dg.DagsterInstance
) -> Mapping[int, dg.RunRecord]:
    """The run that owns or will own each claim of a consumer on one shard; if several qualify, an unfinished run."""
    if not claims:
        return {}
    owners = {claim.id: owner for claim in claims if (owner := run_of_owner(claim.owner)) is not None}
    # Ids of claims are unique only within one schema. A Dagster instance outlives the schema and may serve several.
    made = made_at(shard, [claim.id for claim in claims])
    tags = {
        TOPIC_TAG: consumer.topic,
        CONSUMER_TAG: consumer.name,
        CLAIM_TAG: [str(claim) for claim in made],
        CLAIMED_AT_TAG: [str(moment) for moment in made.values()],
    }
    requested = instance.get_run_records(dg.RunsFilter(tags=tags)) if made else []
    # A draining run also owns claims for which it was not requested.
    owning = instance.get_run_records(dg.RunsFilter(run_ids=list(owners.values()))) if owners else []

    found: dict[int, dg.RunRecord] = {}
    for claim in claims:
        runs = [run for run in owning if run.dagster_run.run_id == owners.get(claim.id)]
        if claim.id in made:
            its_own = claim_tags(claim.id, made[claim.id], shard.name)
            runs += [run for run in requested if its_own.items() <= run.dagster_run.tags.items()]
        if runs:
            found[claim.id] = next((run for run in runs if not run.dagster_run.is_finished), runs[0])
    return found
