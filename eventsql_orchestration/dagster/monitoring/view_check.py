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
    """A check `recomputation` of the asset of a view: red if the view differs from what its consumed events say.

    Each execution computes the whole view anew in a table of its own, and drops it. `fill` makes the object
    that computes it in bulk, such as `lambda: SparkViewFill(spark_session())`. See `Views.compare`.
    """

    @dg.asset_check(
        asset=view_key(feed.view), name=RECOMPUTATION_CHECK,
        description=f"View {feed.view.name} is as a recomputation of the events of {feed.topic} has it.",
    )  # fmt: skip
    def check(eventsql: EventSQLResource) -> dg.AssetCheckResult:
        views = Views(eventsql.platform.database)
        compared = views.compare(feed, fill=None if fill is None else fill(), partial=partial)
        metadata: dict[str, Any] = {
            "Missing": compared.missing, "Surplus": compared.surplus, "Examples": "\n".join(compared.examples),
        }  # fmt: skip
        told = f"The view lacks {compared.missing} entries of a recomputation, and has {compared.surplus} others."
        return dg.AssetCheckResult(
            passed=compared.equal, severity=severity, metadata=metadata, description=None if compared.equal else told
        )

    return check
