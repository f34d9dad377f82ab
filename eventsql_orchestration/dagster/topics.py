"""Topics as assets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import EventSQL, Shard
from eventsql_orchestration.dagster import metadata_keys as keys
from eventsql_orchestration.dagster.register import topic_missing
from eventsql_orchestration.dagster.translator import EventSQLTranslator, translated
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    InvalidNameError,
    TopicNotFoundError,
)
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, Topic, check_topic_name
from eventsql_orchestration.orchestration.shards import shards_of
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.validation import check_kind, check_several

TOPIC_PREFIX: Final = "topic"
TABLE_PREFIX: Final = "table"
TOPIC_GROUP: Final = "topics"
KINDS: Final = frozenset({"eventsql"})
"""The kinds of consumers."""

TOPIC_KINDS: Final = frozenset({"topic", "postgresql"})
"""The kinds of topics. Dagster has icons only for a fixed list of kinds; `postgresql` is in the list."""

COLUMN_SCHEMA: Final = "dagster/column_schema"
"""The metadata key in which Dagster's UI looks for the columns of an asset."""

Dependencies: TypeAlias = Iterable[dg.AssetKey | dg.AssetSpec | dg.AssetsDefinition | str]
"""The assets that an asset reads."""

Columns: TypeAlias = Mapping[str, str] | Sequence[dg.TableColumn] | dg.TableSchema
"""The columns of a topic's values: names with their types, or Dagster's table schema."""


def dependencies(deps: Dependencies) -> list[Any]:
    """The given assets. Raises `ValidationError` for a text: each of its letters would be an asset."""
    check_several("deps", deps)
    return list(deps)


def published_topics(publishes: Topic | str | Iterable[Topic | str]) -> tuple[Topic | str, ...]:
    """The topics that an asset publishes to, given as one or as several. Raises `ValidationError`."""
    if isinstance(publishes, Topic | str):
        return (publishes,)
    check_several("publishes", publishes)
    topics = tuple(publishes)
    for topic in topics:
        check_kind("each of publishes", topic, Topic | str)
    return topics


def topic_key(name: str) -> dg.AssetKey:
    """The asset key of a topic: `topic/<name>`. Raises `InvalidNameError`."""
    return dg.AssetKey([TOPIC_PREFIX, check_topic_name(name)])


def table_asset(
    table: str,
    *,
    description: str | None = None,
    owners: Sequence[str] = (),
    group_name: str | None = TOPIC_GROUP,
    columns: Columns | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetSpec:
    """A table whose changes are captured to a topic, as an external asset: `table/<schema>/<name>`.

    `table` is a name with its schema, such as `public.orders`. Name the asset among the `deps` of its topic's asset.
    Raises `InvalidNameError` for a name without a schema.
    """
    schema, _, name = table.partition(".")
    if not schema or not name:
        raise InvalidNameError(f"table {table!r} is not usable: use its name with its schema, such as public.orders")
    return dg.AssetSpec(
        key=dg.AssetKey([TABLE_PREFIX, schema, name]),
        description=description or f"Table {table}, whose changes are events.",
        metadata={"table": table, **declared_columns(columns), **(metadata or {})},
        group_name=group_name,
        owners=owners,
        kinds={"table", "postgresql"},
        tags=tags,
    )


def topic_asset(
    topic: Topic,
    *,
    description: str | None = None,
    owners: Sequence[str] = (),
    deps: Dependencies = (),
    group_name: str | None = TOPIC_GROUP,
    kinds: Collection[str] = (),
    columns: Columns | None = None,
    freshness: dg.FreshnessPolicy | timedelta | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    translator: EventSQLTranslator | None = None,
) -> dg.AssetSpec:
    """A topic as an external asset: services publish into it, and Dagster does not compute it.

    If an asset publishes to a topic, the topic belongs to that asset instead: `range_asset(publishes=…)`, or
    `@asset(key=topic_key(…))`. `deps` are the assets that its events come from. `owners` are e-mail addresses or
    `team:…`, as for any asset. `columns` describe its values. `kinds` are added to the kinds of every topic.
    `freshness` is the time without an event after which the topic is stale; a sensor reports the events to Dagster
    (`topic_observations`). `tags` are tags of the asset. A `translator` may change everything except the key.
    """
    check_kind("topic", topic, Topic)
    check_several("kinds", kinds)
    spec = dg.AssetSpec(
        key=topic_key(topic.name),
        deps=dependencies(deps),
        description=description or _described(topic.name),
        metadata={**described_topic(topic), **declared_columns(columns), **(metadata or {})},
        group_name=group_name,
        owners=owners,
        kinds={*TOPIC_KINDS, *kinds},
        freshness_policy=freshness_policy(freshness),
        tags=tags,
    )
    return translated(translator, topic.name, None, spec)


def described_topic(topic: Topic) -> dict[str, Any]:
    """The metadata of a declared topic."""
    return {"topic": topic.name, "partitions": topic.partitions if topic.partitioned else "not partitioned"}


def _described(topic: str) -> str:
    if topic.endswith(DEAD_LETTER_SUFFIX):
        return f"Dead letters: events of topic {topic.removesuffix(DEAD_LETTER_SUFFIX)} that a consumer gave up."
    return f"Events of topic {topic}."


def freshness_policy(freshness: dg.FreshnessPolicy | timedelta | None) -> dg.FreshnessPolicy | None:
    """A policy, or the policy of an asset that is stale after some time without an event."""
    if isinstance(freshness, timedelta):
        return dg.FreshnessPolicy.time_window(fail_window=freshness)
    return freshness


def declared_columns(columns: Columns | None) -> Mapping[str, dg.TableSchema]:
    """The metadata that shows columns in Dagster's UI."""
    if columns is None:
        return {}
    if isinstance(columns, Mapping):
        columns = [dg.TableColumn(name, type_) for name, type_ in columns.items()]
    return {COLUMN_SCHEMA: columns if isinstance(columns, dg.TableSchema) else dg.TableSchema(columns=list(columns))}


@dataclass(frozen=True, slots=True)
class TopicNews:
    """New events of topics: a materialization of each topic with new events, and the last offset of every topic."""

    materializations: tuple[dg.AssetMaterialization, ...]
    seen: Mapping[str, int]
    missing: tuple[str, ...]


def topic_observations(platform: EventSQL, topics: Iterable[Topic | str], *, seen: Mapping[str, int]) -> TopicNews:
    """The events that entered the logs of external topics since `seen`, the offsets of an earlier look.

    Pass them to a sensor's `SensorResult(asset_events=…)`, and keep `TopicNews.seen` in its cursor. They are
    materializations because a freshness policy counts only materializations. The first look at a topic only records its
    end: its events may be as old as the topic. A topic that is not registered is `missing`, with the reason. If there
    are several shards, each has its own materialization, which names the shard. The events of a shard that is down
    follow when it is back.
    """
    # What is known of a shard stays while the shard is down; if several are down, they have no names.
    reported = dict(seen)
    materializations: list[dg.AssetMaterialization] = []
    missing: list[str] = []
    names = [topic if isinstance(topic, str) else topic.name for topic in topics]
    for shard in shards_of(platform):
        for name in names:
            key = name if shard.name is None else f"{shard.name}/{name}"
            before = seen.get(key)
            try:
                end = shard.reader.end(name)
            except TopicNotFoundError:
                # All events of a topic that is created later are new.
                reported[key] = 0
                missing.append(topic_missing(name))
                continue
            except DatabaseUnavailableError:
                if len(platform.shards) == 1:
                    raise
                break
            reported[key] = end
            if before is not None and end not in (0, before):
                # Start over if the topic was deleted and created again.
                materializations.append(_arrival(shard, name, before if before < end else None, end))
    return TopicNews(tuple(materializations), reported, tuple(dict.fromkeys(missing)))


def _arrival(shard: Shard, topic: str, after: int | None, end: int) -> dg.AssetMaterialization:
    metadata: dict[str, Any] = {
        keys.PUBLISHED_TOPIC: topic,
        keys.PUBLISHED_LAST: end,
        keys.PUBLISHED_TRACE: keys.trace_command(topic, end, shard.name),
        **({} if shard.name is None else {keys.INPUT_SHARD: shard.name}),
    }
    if after is not None:
        # So many events may have arrived that counting them takes too long. The report must not wait for more.
        with suppress(DatabaseBusyError), shard.database.connection() as connection:
            found = LogReader(shard.database.schema).extent(connection, topic, after=after, upto=end)
            # There are none if retention has already dropped them.
            if found.events:
                metadata |= {keys.PUBLISHED_EVENTS: found.events, keys.PUBLISHED_FIRST: found.first}
    return dg.AssetMaterialization(asset_key=topic_key(topic), description="events have arrived", metadata=metadata)
