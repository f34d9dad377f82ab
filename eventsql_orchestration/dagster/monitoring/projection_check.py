"""The check of a projection's asset that compares a sample of its rows with a replay."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster.read_models import projection_key
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.store import Projection, Projections

REPLAY_CHECK: Final = "replay"

_SHOWN: Final = 20
"""Maximum number of ids of a table that a result names."""


def build_projection_check(
    projection: Projection,
    id_columns: Mapping[str, str],
    *,
    sample: int = 20,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetChecksDefinition:
    """A check `replay` of the asset of a projection: red if rows differ from a replay of their aggregates' changes.

    Each execution takes `sample` random aggregates. `id_columns` names, for each table to compare, the column that has
    the aggregate's id; see `Projections.compare`.
    """

    @dg.asset_check(
        asset=projection_key(projection), name=REPLAY_CHECK,
        description=f"The rows of {sample} random aggregates are equal to a replay of their changes.",
    )  # fmt: skip
    def check(eventsql: EventSQLResource) -> dg.AssetCheckResult:
        compared = Projections(eventsql.platform.store, [projection]).compare(
            projection.name, id_columns, sample=sample
        )
        different = {table: _some(ids) for table, ids in compared.different.items() if ids}
        metadata: dict[str, Any] = {"Aggregates": compared.aggregates, "Changes": compared.changes, **different}
        told = ", ".join(f"{len(ids)} of table {table}" for table, ids in compared.different.items() if ids)
        return dg.AssetCheckResult(
            passed=compared.equal, severity=severity, metadata=metadata,
            description=f"The rows of some aggregates differ from a replay: {told}." if told else None,
        )  # fmt: skip

    return check


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more
