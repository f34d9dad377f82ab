"""When claims were made: what tells a claim from another that had its id in a database before.

Dagster keeps its history and never takes a run key twice, while the ids of claims begin anew in a new schema and go
back with a restored one. The time goes with the id wherever Dagster keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.tags import CLAIM_TAG, CLAIMED_AT_TAG, shard_tags
from eventsql_orchestration.database import Queries


def made_at(platform: EventSQL, claims: Iterable[int]) -> dict[int, int]:
    """The times of claims, in microseconds since 1970; one that is gone is left out."""
    wanted = list(claims)
    if not wanted:
        return {}
    statement = Queries("claim_times", platform.database.schema)("made")
    with platform.database.connection() as connection:
        rows = connection.execute(statement, {"claims": wanted}).fetchall()
    return {int(claim): int(made) for claim, made in rows}


def claim_tags(claim_id: int, made: int, shard: str | None) -> dict[str, str]:
    """The tags of the run that is requested for a claim; each shard has ids of its own."""
    return {CLAIM_TAG: str(claim_id), CLAIMED_AT_TAG: str(made), **shard_tags(shard)}


def run_key(claim_id: int, made: int, shard: str | None) -> str:
    """The key of that run: Dagster swallows a request whose key it has seen, however long ago."""
    return f"eventsql-claim-{claim_id}-{made}" + ("" if shard is None else f"-{shard}")


def is_another_claim(platform: EventSQL, claim_id: int, tags: Mapping[str, str]) -> bool:
    """Whether the run of these tags was requested for a claim of that id which was not the one that is there now.

    A run that no sensor requested says nothing of a time, and may have any claim.
    """
    if tags.get(CLAIM_TAG) != str(claim_id) or CLAIMED_AT_TAG not in tags:
        return False
    made = made_at(platform, [claim_id]).get(claim_id)
    return made is not None and tags[CLAIMED_AT_TAG] != str(made)
