"""The result of a publication: its events, their offsets, and its metadata in materializations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster.lineage.metadata_keys import (
    PUBLISHED_AS,
    PUBLISHED_EVENTS,
    PUBLISHED_FIRST,
    PUBLISHED_LAST,
    PUBLISHED_RANGES,
    PUBLISHED_RUN,
    PUBLISHED_TO,
    PUBLISHED_TOPIC,
    PUBLISHED_TRACE,
    trace_command,
)
from eventsql_orchestration.dagster.topics import topic_key

_LINKS: Final = (PUBLISHED_RUN, PUBLISHED_AS, PUBLISHED_TO, PUBLISHED_TRACE)

PUBLISHED: Final = frozenset(
    {PUBLISHED_TOPIC, PUBLISHED_EVENTS, PUBLISHED_FIRST, PUBLISHED_LAST, PUBLISHED_RANGES, *_LINKS}
)


@dataclass(frozen=True, slots=True)
class Span:
    """The offsets of the first and the last event that were published to a shard; None if there is one database."""

    shard: str | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Published:
    """A publication to a topic. `spans` is empty if nothing was published, and if the offsets are not known yet.

    The events name `run_id` and `asset`. `repeated` says that they had been published before.
    """

    topic: str
    events: int
    run_id: str
    asset: str | None = None
    repeated: bool = False
    spans: tuple[Span, ...] = ()

    def metadata(self) -> dict[str, Any]:
        """The metadata for a materialization. Other events can lie between the first and the last."""
        metadata: dict[str, Any] = {
            PUBLISHED_TOPIC: self.topic,
            PUBLISHED_EVENTS: self.events,
            PUBLISHED_RUN: dg.MetadataValue.dagster_run(self.run_id),
            PUBLISHED_TO: dg.MetadataValue.asset(topic_key(self.topic)),
        }
        if self.asset is not None:
            metadata[PUBLISHED_AS] = self.asset
        if self.spans:
            metadata |= _offsets_of(self.spans)
            metadata[PUBLISHED_TRACE] = trace_command(self.topic, self.spans[-1].last, self.spans[-1].shard)
        return metadata

    def __str__(self) -> str:
        if self.repeated:
            return (
                f"{self.events} events for topic {self.topic} were published before, by run {self.run_id}: none is "
                "published again"
            )
        return f"published {self.events} events to topic {self.topic}"


def _offsets_of(spans: Collection[Span]) -> dict[str, Any]:
    """Metadata for offsets: two numbers for one database, a list for shards."""
    if {span.shard for span in spans} == {None}:
        return {
            PUBLISHED_FIRST: min(span.first for span in spans),
            PUBLISHED_LAST: max(span.last for span in spans),
        }
    ranges: dict[str, dict[str, Any]] = {}
    for span in sorted(spans, key=lambda each: str(each.shard)):
        known = ranges.setdefault(str(span.shard), {"shard": span.shard, "first": span.first, "last": span.last})
        known["first"], known["last"] = min(known["first"], span.first), max(known["last"], span.last)
    return {PUBLISHED_RANGES: dg.MetadataValue.json(list(ranges.values()))}


def _spans(metadata: Mapping[str, Any]) -> list[Span]:
    if PUBLISHED_RANGES in metadata:
        return [Span(**each) for each in metadata[PUBLISHED_RANGES].value]
    if PUBLISHED_FIRST in metadata and PUBLISHED_LAST in metadata:
        return [Span(None, metadata[PUBLISHED_FIRST], metadata[PUBLISHED_LAST])]
    return []


def add_up(published: Iterable[Mapping[str, Any]], topic: str) -> dict[str, Any]:
    """The metadata of several publications to a topic, added up."""
    mine = [metadata for metadata in published if metadata.get(PUBLISHED_TOPIC) == topic]
    if not mine:
        return {}
    spans = [span for metadata in mine for span in _spans(metadata)]
    return {
        PUBLISHED_TOPIC: topic,
        PUBLISHED_EVENTS: sum(int(metadata.get(PUBLISHED_EVENTS, 0)) for metadata in mine),
        **(_offsets_of(spans) if spans else {}),
        # The links of the last one: all are of one run and one topic.
        **{name: metadata[name] for metadata in mine for name in _LINKS if name in metadata},
    }


def leave_out(metadata: Mapping[str, Any], topics: Collection[str]) -> dict[str, Any]:
    """Metadata without the entries of a publication to one of `topics`."""
    if metadata.get(PUBLISHED_TOPIC) not in topics:
        return dict(metadata)
    return {name: value for name, value in metadata.items() if name not in PUBLISHED}
