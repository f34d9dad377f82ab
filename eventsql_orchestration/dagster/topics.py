"""Topics as assets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.model import Topic, check_topic_name

TOPIC_PREFIX: Final = "topic"
TOPIC_GROUP: Final = "topics"
KINDS: Final = frozenset({"eventsql", "postgresql"})


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
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetSpec:
    """A topic as an external asset: services publish into it, Dagster does not compute it.

    A topic that an asset publishes to belongs to that asset instead: `range_asset(publishes=…)`, or `@asset(key=
    topic_key(…))`. `deps` are the assets that it is made from; `owners` as of any asset, e-mail addresses or `team:…`.
    """
    return dg.AssetSpec(
        key=topic_key(topic.name),
        deps=list(deps),
        description=description or f"Events of topic {topic.name}.",
        metadata={"topic": topic.name, "partitions": topic.partitions, **(metadata or {})},
        group_name=group_name,
        owners=list(owners),
        kinds=set(KINDS),
        tags=dict(tags or {}),
    )
