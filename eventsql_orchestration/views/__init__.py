"""Floor 3: what events amount to for those who look: timelines of a resource, counts per bucket, searchable logs."""

from eventsql_orchestration.views.logs import LogLine, Logs
from eventsql_orchestration.views.rollups import RollupBucket, Rollups
from eventsql_orchestration.views.timelines import TimelineEntry, Timelines

__all__ = ["LogLine", "Logs", "RollupBucket", "Rollups", "TimelineEntry", "Timelines"]
