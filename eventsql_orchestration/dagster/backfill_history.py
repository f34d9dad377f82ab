"""Deletes the partitions of backfills that are over, whose runs are gone: Dagster itself keeps them for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import dagster as dg

from eventsql_orchestration.dagster.backfill_asset import ASSETS_METADATA, backfill_of
from eventsql_orchestration.dagster.metadata import CONSUMED_TOPIC
from eventsql_orchestration.dagster.sharded_backfills import ShardedBackfills
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, BACKFILL_TAG
from eventsql_orchestration.dagster.windows import read_key
from eventsql_orchestration.errors import TopicNotFoundError, ValidationError


def delete_windows(
    backfills: ShardedBackfills, instance: dg.DagsterInstance, specs: Iterable[dg.AssetSpec]
) -> dict[str, int]:
    """Delete the partitions of such backfills, of those assets among `specs` that have some; gives how many, by asset.

    A backfill's partitions stay as long as it is registered, and as long as Dagster has a run of it.
    """
    deleted = {}
    for name, topic, consumer in _assets(specs):
        try:
            registered = {each.id for each in backfills.registered(topic) if each.consumer == consumer}
        except TopicNotFoundError:
            registered = set()
        by_id: dict[str, list[str]] = {}
        for key in instance.get_dynamic_partitions(name):
            # Somebody may add partitions of his own.
            if (backfill_id := _id_of(key)) is not None and backfill_id not in registered:
                by_id.setdefault(backfill_id, []).append(key)
        gone = [key for each, keys in by_id.items() if not _has_runs(instance, each, topic, consumer) for key in keys]
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


def _id_of(key: str) -> str | None:
    try:
        return read_key(key)[0]
    except ValidationError:
        return None


def _has_runs(instance: dg.DagsterInstance, backfill_id: str, topic: str, consumer: str) -> bool:
    tags = {BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: backfill_of(topic, consumer)}
    return bool(instance.get_runs(dg.RunsFilter(tags=tags), limit=1))
