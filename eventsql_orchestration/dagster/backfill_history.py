"""Deletes the partitions of backfills that are over, whose runs are gone: Dagster itself keeps them for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import dagster as dg

from eventsql_orchestration.dagster.backfill_asset import ASSETS_METADATA, backfill_of
from eventsql_orchestration.dagster.metadata import CONSUMED_TOPIC
from eventsql_orchestration.dagster.shards import OnShards
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, BACKFILL_TAG
from eventsql_orchestration.dagster.windows import Backfill, read_key
from eventsql_orchestration.errors import ValidationError


def delete_windows(
    registered: OnShards[Sequence[Backfill]], instance: dg.DagsterInstance, specs: Iterable[dg.AssetSpec]
) -> dict[str, int]:
    """Delete the partitions of such backfills, of those assets among `specs` that have some; gives how many, by asset.

    A backfill's partitions stay as long as it is `registered`, or may be so on a shard that is left out there, and as
    long as Dagster has a run of it.
    """
    deleted = {}
    for name, topic, consumer in _assets(specs):
        kept = {
            each.id
            for backfills in registered.of.values()
            for each in backfills
            if (each.topic, each.consumer) == (topic, consumer)
        }
        by_id: dict[str, list[str]] = {}
        for key in instance.get_dynamic_partitions(name):
            try:
                backfill_id, window, _ = read_key(key)
            except ValidationError:
                # Somebody has added a partition of his own.
                continue
            by_id.setdefault(backfill_id, []).append(key)
            if registered.left_out and window.shard not in registered.of:
                kept.add(backfill_id)
        gone = [
            key
            for each, keys in by_id.items()
            if each not in kept and not _has_runs(instance, each, topic, consumer)
            for key in keys
        ]
        for key in gone:
            instance.delete_dynamic_partition(name, key)
        if gone:
            deleted[name] = len(gone)
    return deleted


def _assets(specs: Iterable[dg.AssetSpec]) -> Iterator[tuple[str, str, str]]:
    """For each asset of backfills: the name of its partitions, the topic and the consumer."""
    for spec in specs:
        partitions = spec.partitions_def
        if (
            ASSETS_METADATA in spec.metadata
            and isinstance(partitions, dg.DynamicPartitionsDefinition)
            and partitions.name is not None
        ):
            yield partitions.name, str(spec.metadata[CONSUMED_TOPIC]), str(spec.metadata["consumer"])


def _has_runs(instance: dg.DagsterInstance, backfill_id: str, topic: str, consumer: str) -> bool:
    tags = {BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: backfill_of(topic, consumer)}
    return bool(instance.get_runs(dg.RunsFilter(tags=tags), limit=1))
