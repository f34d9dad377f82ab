"""The page of a topic's asset: the topic's offsets, rate, retention, consumers and last events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Event, Shard
from eventsql_orchestration.orchestration.words import kept
from eventsql_orchestration.storage.ranges import LogRanges
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.side_consumers import backfill_of
from eventsql_orchestration.validation import check_whole

RATE: Final = "events per second"
IN_LOG: Final = "events in log, at most"
OFFSETS: Final = "offsets in log"
RETENTION: Final = "retention"
CONSUMERS: Final = "consumers"
LAST_EVENTS: Final = "last events"

SHOWN_CHARACTERS: Final = 200
"""Maximum number of characters of a key or a value in a sample."""


@dataclass(frozen=True, kw_only=True)
class TopicSample:
    """The sample of last events on a topic's page: their number, and whether keys and values are left out.

    Dagster's storage keeps the sample as long as the report, and everybody who can open Dagster's UI sees it. So a
    sample has sizes instead of contents, unless `redact` is False. Raises `ValidationError` for a number below 0 or
    above 100.
    """

    events: int = 3
    redact: bool = True

    def __post_init__(self) -> None:
        check_whole("the events of a sample", self.events, least=0, most=100)


DEFAULT_SAMPLE: Final = TopicSample()


def topic_page(
    shard: Shard, topic: str, *, arrived: int | None, seconds: float, end: int, sample: TopicSample
) -> Mapping[str, Any]:
    """Metadata of a topic on one shard whose log ends at offset `end`. `arrived` events came in `seconds` seconds.

    The log is not scanned, so the page shows the number of its offsets: the log has at most this number of events.
    Raises `TopicNotFoundError`.
    """
    registered = shard.registry.topic(topic)
    schema = shard.database.schema
    with shard.database.connection() as connection:
        first = LogRanges(schema).first(connection, topic, after=0, upto=end)
        begin = LogReader(schema).nth_before(connection, topic, sample.events, offset=end) if sample.events else None
    names = sorted({state.name for state in shard.registry.consumers(topic) if backfill_of(state.name) is None})
    page: dict[str, Any] = {
        RETENTION: kept(registered.retention),
        CONSUMERS: ", ".join(names) or "none",
    }
    if first is not None:
        page |= {IN_LOG: end - first + 1, OFFSETS: f"{first} to {end}"}
    if arrived is not None and seconds > 0:
        page[RATE] = round(arrived / seconds, 3)
    if sample.events:
        # A log with fewer events is shown from its beginning.
        after = 0 if begin is None else begin - 1
        events = shard.reader.read(topic, after=after, upto=end, limit=sample.events)
        page[LAST_EVENTS] = dg.MetadataValue.json([_shown(event, sample) for event in events])
    return page


def _shown(event: Event, sample: TopicSample) -> Mapping[str, Any]:
    about = {
        "offset": event.id,
        **({} if event.partition == NOT_PARTITIONED else {"partition": event.partition}),
        "published": event.buffered_at.isoformat(),
    }
    if event.erased:
        return {**about, "erased": True}
    if sample.redact:
        return {**about, "key bytes": len((event.key or "").encode()), "value bytes": len(event.value)}
    key = None if event.key is None else _cut(event.key)
    return {**about, "key": key, "value": _cut(event.value.decode(errors="replace"))}


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
