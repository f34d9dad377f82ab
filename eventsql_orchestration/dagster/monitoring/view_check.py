"""The check of a view's asset that compares the view with a rebuild."""

from collections.abc import Callable
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster.read_models import view_key
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.views import ViewFeed, ViewFill, Views

RECOMPUTATION_CHECK: Final = "recomputation"


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
        views = Views(eventsql.platform.database)
        compared = views.compare(feed, fill=None if fill is None else fill(), partial=partial)
        metadata: dict[str, Any] = {
            "Missing": compared.missing, "Surplus": compared.surplus, "Examples": "\n".join(compared.examples),
        }  # fmt: skip
        told = f"The view lacks {compared.missing} entries of the recomputation, and has {compared.surplus} too many."
        return dg.AssetCheckResult(
            passed=compared.equal, severity=severity, metadata=metadata, description=None if compared.equal else told
        )

    return check
