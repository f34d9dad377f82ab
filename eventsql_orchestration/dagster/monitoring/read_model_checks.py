"""Checks that compute a part of a projection, or a whole view, again, and compare."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster.read_models import projection_key, view_key
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.store import Projection, Projections
from eventsql_orchestration.views import ViewFeed, ViewFill, Views

REPLAY_CHECK: Final = "replay"
RECOMPUTATION_CHECK: Final = "recomputation"

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
        different = {table: ids for table, ids in compared.different.items() if ids}
        metadata: dict[str, Any] = {
            "Aggregates": compared.aggregates, "Changes": compared.changes,
            **{table: _some(ids) for table, ids in different.items()},
        }  # fmt: skip
        told = ", ".join(f"{len(ids)} of table {table}" for table, ids in different.items())
        return dg.AssetCheckResult(
            passed=compared.equal, severity=severity, metadata=metadata,
            description=f"The rows of some aggregates differ from a replay: {told}." if told else None,
        )  # fmt: skip

    return check


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more


def build_view_check(
    feed: ViewFeed,
    *,
    fill: Callable[[], ViewFill] | None = None,
    partial: bool = False,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetChecksDefinition:
    """A check `recomputation` of a view's asset: red if the view differs from a recomputation of its consumed events.

    Each execution computes the whole view anew in a table of its own, and drops it. `fill` makes the object that
    computes the view in bulk, such as `lambda: SparkViewFill(spark_session())`. See `Views.compare`.
    """

    @dg.asset_check(
        asset=view_key(feed.view), name=RECOMPUTATION_CHECK,
        description=f"View {feed.view.name} is equal to a recomputation of the events of {feed.topic}.",
    )  # fmt: skip
    def check(eventsql: EventSQLResource) -> dg.AssetCheckResult:
        views = Views(eventsql.platform)
        compared = views.compare(feed, fill=None if fill is None else fill(), partial=partial)
        metadata: dict[str, Any] = {
            "Missing": compared.missing, "Surplus": compared.surplus, "Examples": "\n".join(compared.examples),
        }  # fmt: skip
        told = f"The view lacks {compared.missing} entries of the recomputation, and has {compared.surplus} too many."
        return dg.AssetCheckResult(
            passed=compared.equal, severity=severity, metadata=metadata, description=None if compared.equal else told
        )

    return check
