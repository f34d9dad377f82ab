"""Event-sourced aggregates: the store keeps their changes."""

from eventsql_orchestration.store.aggregate import Aggregate, SnapshottingAggregate
from eventsql_orchestration.store.change import Change, RecordedChange, Snapshot
from eventsql_orchestration.store.repository import Repository
from eventsql_orchestration.store.store import Store

__all__ = ["Aggregate", "Change", "RecordedChange", "Repository", "Snapshot", "SnapshottingAggregate", "Store"]
