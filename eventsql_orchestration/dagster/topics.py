"""Topics as assets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

import dagster as dg
from psycopg.rows import tuple_row

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.metadata import (
    INPUT_SHARD,
    PUBLISHED_EVENTS,
    PUBLISHED_FIRST,
    PUBLISHED_LAST,
    PUBLISHED_TOPIC,
    PUBLISHED_TRACE,
    trace_command,
)
from eventsql_orchestration.dagster.registering import topic_missing
from eventsql_orchestration.dagster.shards import shards_of
from eventsql_orchestration.database import Queries
from eventsql_orchestration.errors import DatabaseUnavailableError, TopicNotFoundError
from eventsql_orchestration.model import Topic, check_topic_name

TOPIC_PREFIX: Final = "topic"
TOPIC_GROUP: Final = "topics"
KINDS: Final = frozenset({"eventsql", "postgresql"})

COLUMN_SCHEMA: Final = "dagster/column_schema"
"""Where Dagster's UI looks for the columns of an asset."""

Columns: TypeAlias = Mapping[str, str] | Sequence[dg.TableColumn] | dg.TableSchema
"""The columns of a topic's values: names with their types, or as Dagster has them."""


def topic_key(name: str) -> dg.AssetKey:
    """The asset key of a topic: `topic/<name>`. Raises `InvalidNameError`."""
    return dg.AssetKey([TOPIC_PREFIX, check_topic_name(name)])


def topic_asset(
    topic: Topic,
    *,
    description: str | None = None,
    owners: Sequence[str] = (),
    deps: Iterable[dg.AssetKey | dg.AssetSpec | dg.AssetsDefinition | str] = (),
    group_name: str | None = TOPIC_GROUP,
    kinds: Collection[str] = (),
    columns: Columns | None = None,
    freshness: dg.FreshnessPolicy | timedelta | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetSpec:
    """A topic as an external asset: services publish into it, Dagster does not compute it.

    A topic that an asset publishes to belongs to that asset instead: `range_asset(publishes=…)`, or `@asset(key=
    topic_key(…))`. `deps` are the assets that it is made from; `owners` as of any asset, e-mail addresses or `team:…`.
    `columns` say what its values hold, and `kinds` are added to those of every topic. With `freshness`, the topic is
    stale when no event has come for so long; a sensor tells Dagster of the events (`topic_observations`).
    """
    declared = {} if columns is None else {COLUMN_SCHEMA: column_schema(columns)}
    if isinstance(freshness, timedelta):
        freshness = dg.FreshnessPolicy.time_window(fail_window=freshness)
    return dg.AssetSpec(
        key=topic_key(topic.name),
        deps=list(deps),
        description=description or f"Events of topic {topic.name}.",
        metadata={"topic": topic.name, "partitions": topic.partitions, **declared, **(metadata or {})},
        group_name=group_name,
        owners=list(owners),
        kinds={*KINDS, *kinds},
        freshness_policy=freshness,
        tags=dict(tags or {}),
    )


def column_schema(columns: Columns) -> dg.TableSchema:
    """Columns as Dagster has them."""
    if isinstance(columns, dg.TableSchema):
        return columns
    if isinstance(columns, Mapping):
        columns = [dg.TableColumn(name, type_) for name, type_ in columns.items()]
    return dg.TableSchema(columns=list(columns))


@dataclass(frozen=True, slots=True)
class TopicNews:
    """What has come to topics: a materialization of each one that has new events, and how far all were looked at."""

    materializations: tuple[dg.AssetMaterialization, ...]
    seen: Mapping[str, int]
    missing: tuple[str, ...] = ()


def topic_observations(platform: EventSQL, topics: Iterable[Topic | str], *, seen: Mapping[str, int]) -> TopicNews:
    """The events that have entered the logs of external topics since `seen`, the offsets of an earlier look.

    For a sensor's `SensorResult(asset_events=…)`, with `TopicNews.seen` in its cursor. They are materializations
    because nothing else counts for a freshness policy. The first look at a topic only remembers how far it goes: its
    events may be as old as the topic. A topic that is not registered is `missing`, with the reason. Of several shards,
    each has a materialization of its own, which names it; those that are down are looked at when they are back.
    """
    reported: dict[str, int] = {}
    materializations: list[dg.AssetMaterialization] = []
    missing: list[str] = []
    names = [topic if isinstance(topic, str) else topic.name for topic in topics]
    for shard in shards_of(platform):
        for name in names:
            key = name if shard.shard is None else f"{shard.shard}/{name}"
            before = seen.get(key)
            try:
                end = shard.reader.end(name)
            except TopicNotFoundError:
                missing.append(topic_missing(name))
                continue
            except DatabaseUnavailableError:
                if len(platform.shards) == 1:
                    raise
                reported |= {} if before is None else {key: before}
                continue
            reported[key] = end
            if before is not None and end not in (0, before):
                # A topic that was deleted and created anew begins anew.
                materializations.append(_arrival(shard, name, before if before < end else None, end))
    return TopicNews(tuple(materializations), reported, tuple(dict.fromkeys(missing)))


def _arrival(platform: EventSQL, topic: str, after: int | None, end: int) -> dg.AssetMaterialization:
    metadata: dict[str, Any] = {
        PUBLISHED_TOPIC: topic,
        PUBLISHED_LAST: end,
        PUBLISHED_TRACE: trace_command(topic, end, platform.shard),
        **({} if platform.shard is None else {INPUT_SHARD: platform.shard}),
    }
    if after is not None:
        with platform.database.connection() as connection:
            row = (
                connection.cursor(row_factory=tuple_row)
                .execute(
                    Queries("lineage", platform.database.schema)("extent", topic=topic), {"after": after, "upto": end}
                )
                .fetchone()
            )
        # None where retention has dropped them already.
        if row is not None and row[0]:
            metadata |= {PUBLISHED_EVENTS: row[0], PUBLISHED_FIRST: row[1]}
    return dg.AssetMaterialization(asset_key=topic_key(topic), description="events have come", metadata=metadata)
