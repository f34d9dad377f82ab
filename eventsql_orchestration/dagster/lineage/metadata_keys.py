"""The names by which materializations and inputs of this package speak of topics and offsets in their metadata."""

from __future__ import annotations

from typing import Final

from eventsql_orchestration.dagster.shards import command

PUBLISHED_TOPIC: Final = "published topic"
PUBLISHED_EVENTS: Final = "published events"
PUBLISHED_FIRST: Final = "published first offset"
PUBLISHED_LAST: Final = "published last offset"
PUBLISHED_RANGES: Final = "published ranges"
"""Where there are several shards, instead of the two: JSON of a list with `shard`, `first` and `last` of each."""
PUBLISHED_RUN: Final = "published by run"
"""The run that the events name: another one than the materialization's where that found them published."""
PUBLISHED_AS: Final = "published by asset"
"""The asset that the events name."""
PUBLISHED_TO: Final = "published to"
PUBLISHED_TRACE: Final = "trace published"

CONSUMED_TOPIC: Final = "consumed topic"
"""Of a consumer's asset. Not `topic`, which names where an asset publishes what it returns."""

INPUT_TOPIC: Final = "topic"
INPUT_CONSUMER: Final = "consumer"
INPUT_RANGES: Final = "ranges"
"""What a run has read: a topic, and ranges of its offsets as JSON, `after` exclusive and `upto` inclusive."""
INPUT_SHARD: Final = "shard"
"""Of what a run has read, and of what was published, where all of it is of one shard; each range names its own."""
INPUT_ASSET: Final = "input"
INPUT_TRACE: Final = "trace"


def trace_command(topic: str, offset: int, shard: str | None = None) -> str:
    """What shows where an event comes from."""
    return command(shard, f"trace {topic} {offset}")
