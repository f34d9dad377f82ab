"""Views: read models of events in tables that are partitioned by time: timelines, rollups, searchable logs."""

from eventsql_orchestration.views.catalog import Retained, Views
from eventsql_orchestration.views.comparison import ViewComparison
from eventsql_orchestration.views.definitions import Definition, Logs, Rollup, Timeline
from eventsql_orchestration.views.feeds import ViewFeed, ViewFill, ViewFilling
from eventsql_orchestration.views.following import LogFollower
from eventsql_orchestration.views.log_values import LogEntry, LogLine
from eventsql_orchestration.views.logs import LogsView
from eventsql_orchestration.views.rollups import Measure, RollupBucket, RollupEntry, RollupView
from eventsql_orchestration.views.sketches import Distinct, Quantiles
from eventsql_orchestration.views.sorting import Sorted
from eventsql_orchestration.views.timelines import TimelineEntry, TimelineView

__all__ = [
    "Definition", "Distinct", "LogEntry", "LogFollower", "LogLine", "Logs", "LogsView", "Measure", "Quantiles",
    "Retained", "Rollup", "RollupBucket", "RollupEntry", "RollupView", "Sorted", "Timeline", "TimelineEntry",
    "TimelineView", "ViewComparison", "ViewFeed", "ViewFill", "ViewFilling", "Views",
]  # fmt: skip
