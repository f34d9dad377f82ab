"""Metadata of publications in materializations: their events and offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster import metadata_keys as keys
from eventsql_orchestration.dagster.topics import topic_key
from eventsql_orchestration.orchestration.publication import Published, Span

_LINKS: Final = (keys.PUBLISHED_RUN, keys.PUBLISHED_AS, keys.PUBLISHED_FOR, keys.PUBLISHED_TO, keys.PUBLISHED_TRACE)

_OFFSETS: Final = (keys.PUBLISHED_FIRST, keys.PUBLISHED_LAST, keys.PUBLISHED_RANGES)


def metadata_of(published: Published) -> dict[str, Any]:
    """The metadata of a publication for a materialization. Other events can lie between the first and the last."""
    metadata: dict[str, Any] = {
        keys.PUBLISHED_TOPIC: published.topic,
        keys.PUBLISHED_EVENTS: published.events,
        keys.ROW_COUNT: published.events,
        keys.PUBLISHED_RUN: dg.MetadataValue.dagster_run(published.run_id),
        keys.PUBLISHED_TO: dg.MetadataValue.asset(topic_key(published.topic)),
    }
    if published.asset is not None:
        metadata[keys.PUBLISHED_AS] = published.asset
    if published.partition is not None:
        metadata[keys.PUBLISHED_FOR] = published.partition
    if published.spans:
        last = published.spans[-1]
        metadata |= _offsets_of(published.spans)
        metadata[keys.PUBLISHED_TRACE] = keys.trace_command(published.topic, last.last, last.shard)
    return metadata


def _offsets_of(spans: Collection[Span]) -> dict[str, Any]:
    """Metadata for offsets: two numbers for one database, a list for shards."""
    if {span.shard for span in spans} == {None}:
        first, last = min(span.first for span in spans), max(span.last for span in spans)
        return {keys.PUBLISHED_FIRST: first, keys.PUBLISHED_LAST: last}
    ranges: dict[str, Span] = {}
    for span in sorted(spans, key=lambda each: str(each.shard)):
        known = ranges.get(str(span.shard), span)
        ranges[str(span.shard)] = Span(span.shard, min(known.first, span.first), max(known.last, span.last))
    return {keys.PUBLISHED_RANGES: dg.MetadataValue.json([asdict(span) for span in ranges.values()])}


def _spans(metadata: Mapping[str, Any]) -> list[Span]:
    if keys.PUBLISHED_RANGES in metadata:
        return [Span(**each) for each in metadata[keys.PUBLISHED_RANGES].value]
    if keys.PUBLISHED_FIRST in metadata and keys.PUBLISHED_LAST in metadata:
        return [Span(None, metadata[keys.PUBLISHED_FIRST], metadata[keys.PUBLISHED_LAST])]
    return []


def add_up(published: Iterable[Mapping[str, Any]], topic: str) -> dict[str, Any]:
    """The metadata of several publications to a topic, added up: without offsets if those of one are not known."""
    mine = [metadata for metadata in published if metadata.get(keys.PUBLISHED_TOPIC) == topic]
    if not mine:
        return {}
    numbers = [int(metadata.get(keys.PUBLISHED_EVENTS, 0)) for metadata in mine]
    of_each = [_spans(metadata) for metadata in mine]
    known = all(spans for spans, events in zip(of_each, numbers, strict=True) if events)
    return {
        keys.PUBLISHED_TOPIC: topic,
        keys.PUBLISHED_EVENTS: sum(numbers),
        keys.ROW_COUNT: sum(numbers),
        **(_offsets_of([*chain(*of_each)]) if known and any(of_each) else {}),
        # The links of the last publication: all publications are of one run and one topic.
        **{name: metadata[name] for metadata in mine for name in _LINKS if name in metadata},
    }


def leave_out(metadata: Mapping[str, Any], topics: Collection[str]) -> dict[str, Any]:
    """Metadata without the entries of a publication to one of `topics`."""
    if metadata.get(keys.PUBLISHED_TOPIC) not in topics:
        return dict(metadata)
    of_publication = {keys.PUBLISHED_TOPIC, keys.PUBLISHED_EVENTS, keys.ROW_COUNT, *_OFFSETS, *_LINKS}
    return {name: value for name, value in metadata.items() if name not in of_publication}
