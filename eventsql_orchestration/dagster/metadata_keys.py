"""The metadata keys of this package's materializations and inputs, for topics and offsets."""

from __future__ import annotations

from typing import Final

from eventsql_orchestration.orchestration.shards import command

PUBLISHED_TOPIC: Final = "published topic"
PUBLISHED_EVENTS: Final = "published events"
PUBLISHED_FIRST: Final = "published first offset"
PUBLISHED_LAST: Final = "published last offset"
PUBLISHED_RANGES: Final = "published ranges"
"""Over several shards, instead of the first and last offset: a JSON list with `shard`, `first` and `last` of each."""
PUBLISHED_RUN: Final = "published by run"
"""The run that the events name. If an earlier run published the events, it is not the materialization's run."""
PUBLISHED_AS: Final = "published by asset"
"""The asset that the events name."""
PUBLISHED_FOR: Final = "published for partition"
"""The partition of the asset, or the range of partitions, that the events name."""
PUBLISHED_TO: Final = "published to"
PUBLISHED_TRACE: Final = "trace published"

CONSUMED_TOPIC: Final = "consumed topic"
"""The topic that a consumer's asset reads. The key `topic` names the topic to which an asset publishes."""

INPUT_TOPIC: Final = "topic"
INPUT_CONSUMER: Final = "consumer"
INPUT_RANGES: Final = "ranges"
"""The input of a run: a topic, and ranges of its offsets as JSON, `after` exclusive and `upto` inclusive."""
INPUT_SHARD: Final = "shard"
"""The shard, if all ranges are on one shard; each range names its shard too."""
INPUT_ASSET: Final = "input"
INPUT_TRACE: Final = "trace"


def trace_command(topic: str, offset: int, shard: str | None) -> str:
    """The command that shows where an event comes from."""
    return command(shard, f"trace {topic} {offset}")


ROW_COUNT: Final = "dagster/row_count"
"""The number that Dagster's UI shows as the rows of an asset: the events of a run."""
