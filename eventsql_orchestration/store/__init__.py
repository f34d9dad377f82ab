"""Event-sourced aggregates: the store keeps their changes."""

from eventsql_orchestration.store.aggregate import Aggregate, SnapshottingAggregate
from eventsql_orchestration.store.appending import ExpectedVersion
from eventsql_orchestration.store.archive import Archived
from eventsql_orchestration.store.change import Change, RecordedChange, Snapshot, StoreCheckpoint
from eventsql_orchestration.store.comparison import Comparison
from eventsql_orchestration.store.dead_letters import StoreDeadLetter
from eventsql_orchestration.store.events import EventAggregate, Events, EventType
from eventsql_orchestration.store.lag import SubscriptionLag
from eventsql_orchestration.store.projection import Projections, Rebuild
from eventsql_orchestration.store.projection_definition import Fill, Filling, Projection
from eventsql_orchestration.store.repository import Repository
from eventsql_orchestration.store.store import AggregateInfo, Store
from eventsql_orchestration.store.subscription import Subscription, SubscriptionOptions

__all__ = [
    "Aggregate", "AggregateInfo", "Archived", "Change", "Comparison", "EventAggregate", "EventType", "Events",
    "ExpectedVersion", "Fill", "Filling", "Projection", "Projections", "Rebuild", "RecordedChange", "Repository",
    "Snapshot", "SnapshottingAggregate", "Store", "StoreCheckpoint", "StoreDeadLetter", "Subscription",
    "SubscriptionLag", "SubscriptionOptions",
]  # fmt: skip
