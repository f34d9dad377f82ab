"""Lineage: what every event that an asset publishes says of its origin."""

from __future__ import annotations

from typing import Final, TypeAlias

import dagster as dg

from eventsql_orchestration.dagster.topics import TOPIC_PREFIX

ExecutionContext: TypeAlias = dg.AssetExecutionContext | dg.OpExecutionContext

RUN_ID: Final = "dagster_run_id"
ASSET_KEY: Final = "dagster_asset_key"
PARTITION: Final = "dagster_partition"


def asset_name(context: ExecutionContext) -> str | None:
    """The key of the asset that is computed, as `a/b`; None in an op that computes none.

    Of an asset that comes with the topics it publishes to, the asset's own key.
    """
    if not context.has_assets_def:
        return None
    keys = sorted(context.selected_asset_keys)
    own = [key for key in keys if key.path[0] != TOPIC_PREFIX] or keys
    return ",".join(key.to_user_string() for key in own)


def lineage(context: ExecutionContext | None) -> dict[str, str]:
    """Metadata for the events that a run publishes: its run, asset and partition, as far as there are any."""
    if context is None:
        return {}
    origin = {RUN_ID: context.run.run_id}
    if (asset := asset_name(context)) is not None:
        origin[ASSET_KEY] = asset
    if context.has_partition_key:
        origin[PARTITION] = context.partition_key
    return origin
