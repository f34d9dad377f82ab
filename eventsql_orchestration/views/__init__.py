"""Read models of events: timelines of resources, counts per bucket of time, searchable logs."""

from eventsql_orchestration.views.logs import LogLine, Logs
from eventsql_orchestration.views.rollups import RollupBucket, Rollups
from eventsql_orchestration.views.timelines import TimelineEntry, Timelines

__all__ = ["LogLine", "Logs", "RollupBucket", "Rollups", "TimelineEntry", "Timelines"]
