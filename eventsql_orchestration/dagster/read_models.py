"""The event store, its subscriptions and projections, and views, as external assets: Dagster computes none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster.topics import Dependencies, dependencies
from eventsql_orchestration.store import Projection
from eventsql_orchestration.store.projection_definition import subscription_of
from eventsql_orchestration.validation import age, check_name
from eventsql_orchestration.views import Definition

STORE_KEY: Final = dg.AssetKey(["event_store"])
STORE_GROUP: Final = "event_store"
VIEW_GROUP: Final = "views"

SUBSCRIPTION: Final = "subscription"
"""The metadata key with the name of an asset's subscription."""


def store_asset(
    *, description: str | None = None, deps: Dependencies = (), owners: Sequence[str] = (),
    group_name: str | None = STORE_GROUP, tags: Mapping[str, str] | None = None,
) -> dg.AssetSpec:  # fmt: skip
    """The event store as an external asset, `event_store`: services append to it."""
    return dg.AssetSpec(
        STORE_KEY, deps=dependencies(deps), description=description or "Changes of aggregates, in their order.",
        owners=owners, group_name=group_name, kinds={"postgresql"}, tags=tags,
    )  # fmt: skip


def _upstream(deps: Dependencies | None) -> list[Any]:
    """The given assets; the event store if none are given."""
    return [STORE_KEY] if deps is None else dependencies(deps)


def subscription_asset(
    name: str, *, description: str | None = None, deps: Dependencies | None = None, owners: Sequence[str] = (),
    group_name: str | None = STORE_GROUP, metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetSpec:  # fmt: skip
    """A subscription of the event store as an external asset, `event_store/subscription/<name>`.

    `build_subscription_sensor` shows its lag. Raises `InvalidNameError`.
    """
    check_name("name of a subscription", name)
    return dg.AssetSpec(
        dg.AssetKey([*STORE_KEY.path, "subscription", name]), deps=_upstream(deps),
        description=description or f"Effects of subscription {name}.",
        metadata={SUBSCRIPTION: name, **(metadata or {})}, owners=owners, group_name=group_name,
        kinds={"eventsql"}, tags=tags,
    )  # fmt: skip


def projection_key(projection: Projection | type[Projection]) -> dg.AssetKey:
    """The key of a projection's asset."""
    return dg.AssetKey([*STORE_KEY.path, "projection", projection.name])


def projection_asset(
    projection: Projection | type[Projection], *, description: str | None = None, deps: Dependencies | None = None,
    owners: Sequence[str] = (), group_name: str | None = STORE_GROUP, metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetSpec:  # fmt: skip
    """A projection of the event store as an external asset, `event_store/projection/<name>`.

    `build_subscription_sensor` shows the lag of a projection that a subscription feeds.
    """
    tables = ", ".join(f"{projection.schema}.{table}" for table in projection.tables)
    return dg.AssetSpec(
        projection_key(projection), deps=_upstream(deps),
        description=description or f"Projection {projection.name}: {tables}.",
        metadata={SUBSCRIPTION: subscription_of(projection.name), "tables": tables, **(metadata or {})},
        owners=owners, group_name=group_name, kinds={"table", "postgresql"}, tags=tags,
    )  # fmt: skip


def view_key(definition: Definition) -> dg.AssetKey:
    """The key of a view's asset."""
    return dg.AssetKey(["view", definition.name])


def view_asset(
    definition: Definition, *, deps: Dependencies, description: str | None = None, owners: Sequence[str] = (),
    group_name: str | None = VIEW_GROUP, metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetSpec:  # fmt: skip
    """A declared view as an external asset, `view/<name>`.

    `deps` are the view's sources: the asset of the consumer that writes to the view, or, if a service writes to it, the
    asset of the topic.
    """
    retention = "for ever" if definition.retention is None else age(definition.retention.total_seconds())
    # Durations are floats.
    described = {
        name: age(value) if isinstance(value, float) else value for name, value in definition.described().items()
    }
    return dg.AssetSpec(
        view_key(definition), deps=dependencies(deps),
        description=description or f"{definition.kind.capitalize()} {definition.name}.",
        metadata={
            "table": definition.table, "retention": retention, "period": age(definition.period.total_seconds()),
            "form": dg.MetadataValue.json(described), **(metadata or {}),
        },
        owners=owners, group_name=group_name, kinds={"table", "postgresql"}, tags=tags,
    )  # fmt: skip
