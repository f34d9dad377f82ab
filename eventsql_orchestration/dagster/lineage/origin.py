"""Lineage: the origin in the metadata of published events, and the offsets in the metadata of materializations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration.dagster import metadata_keys as keys
from eventsql_orchestration.dagster.tags import SHARD_TAG
from eventsql_orchestration.dagster.topics import TOPIC_PREFIX, topic_key
from eventsql_orchestration.orchestration.provenance import DAGSTER_ASSET, DAGSTER_PARTITION, DAGSTER_RUN, Provenance

ExecutionContext: TypeAlias = dg.AssetExecutionContext | dg.OpExecutionContext


@dataclass(frozen=True, slots=True)
class Origin(Provenance):
    """The origin of events in Dagster: a run, and the asset and partition that it computes, if any."""

    @classmethod
    def of(cls, context: ExecutionContext) -> Origin:
        """The origin of events that an asset or an op publishes while it is computed."""
        run = context.run
        partition = None
        if context.has_partition_key:
            partition = context.partition_key
        elif context.has_partition_key_range:
            partition = _range(context.partition_key_range)
        shard = run.tags.get(SHARD_TAG)
        return cls(run.run_id, run.root_run_id or run.run_id, asset_name(context), partition, shard)

    @classmethod
    def of_output(cls, context: dg.OutputContext) -> Origin:
        """The origin of the value that an asset or an op has returned."""
        run = context.step_context.dagster_run
        asset = context.asset_key.to_user_string() if context.has_asset_key else None
        partition = None
        if context.has_asset_key and context.has_asset_partitions:
            computed = context.asset_partition_keys
            partition = computed[0] if len(computed) == 1 else _range(context.step_context.partition_key_range)
        elif context.has_partition_key:
            partition = context.partition_key
        return cls(run.run_id, run.root_run_id or run.run_id, asset, partition, run.tags.get(SHARD_TAG))

    def _names(self) -> dict[str, str | None]:
        return {DAGSTER_RUN: self.run_id, DAGSTER_ASSET: self.asset, DAGSTER_PARTITION: self.partition}


RANGE: Final = "..."
"""Stands between the first and the last of several partitions, as in Dagster's own UI."""


def _range(computed: dg.PartitionKeyRange) -> str:
    return f"{computed.start}{RANGE}{computed.end}"


def asset_name(context: ExecutionContext) -> str | None:
    """The key of the asset that is computed, as `a/b`, without the topics that it publishes to; None in a plain op."""
    if not context.has_assets_def:
        return None
    computed = sorted(context.selected_asset_keys)
    own = [key for key in computed if key.path[0] != TOPIC_PREFIX] or computed
    return ",".join(key.to_user_string() for key in own)


def step_of(context: ExecutionContext) -> str:
    """The key of the step that is executed, with the graphs around it and its mapping key."""
    op = context.op_execution_context if isinstance(context, dg.AssetExecutionContext) else context
    return str(op.get_step_execution_context().step.key)


def lineage(context: ExecutionContext | None) -> dict[str, str]:
    """Metadata for the events that a run publishes: the run, asset and partition, if any."""
    return {} if context is None else Origin.of(context).metadata()


def input_metadata(
    topic: str, ranges: Iterable[Mapping[str, Any]], *, consumer: str | None = None
) -> dict[str, dg.MetadataValue[Any]]:
    """Metadata of the ranges that a run has read from a topic, for a materialization or a loaded input.

    Each range has `partition`, `after` (exclusive), `upto` (inclusive), `events`, and `shard` if there are several.
    """
    listed = [dict(each) for each in ranges]
    metadata: dict[str, dg.MetadataValue[Any]] = {
        keys.INPUT_TOPIC: dg.MetadataValue.text(topic),
        keys.INPUT_ASSET: dg.MetadataValue.asset(topic_key(topic)),
        keys.INPUT_RANGES: dg.MetadataValue.json(listed),
    }
    if consumer is not None:
        metadata[keys.INPUT_CONSUMER] = dg.MetadataValue.text(consumer)
    shards = {each.get("shard") for each in listed}
    if len(shards) == 1 and (shard := next(iter(shards))) is not None:
        metadata[keys.INPUT_SHARD] = dg.MetadataValue.text(shard)
    if last := max((each for each in listed if each["upto"] > each["after"]), key=lambda r: r["upto"], default=None):
        metadata[keys.INPUT_TRACE] = dg.MetadataValue.text(keys.trace_command(topic, last["upto"], last.get("shard")))
    return metadata
