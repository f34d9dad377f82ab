"""The output of `eventsql topic`: topics in words, and as JSON objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import complain, say
from eventsql_orchestration.cli.tables import Column, Columns, partition_of, same, show_fields, show_items
from eventsql_orchestration.consuming.lag_values import ConsumerLag
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.model import BLOCKS, NOT_PARTITIONED, Topic
from eventsql_orchestration.orchestration.words import kept, size
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.topics.positions import Back, Earliest
from eventsql_orchestration.validation import age, counted

if TYPE_CHECKING:
    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.metrics.figures import TopicFigures
    from eventsql_orchestration.shards.barriers import HeldBack
    from eventsql_orchestration.shards.shard import Shard
    from eventsql_orchestration.topics.layouts import Layout


def form(topic: Topic) -> str:
    """The partitions of a topic, its retention, and its form where that is not the default, in a few words."""
    words = [counted(topic.partitions, "partition") if topic.partitioned else "not partitioned"]
    if topic.storage not in {None, lazy.default_storage(topic.name)}:
        words.append(f"in {topic.storage}")
    if topic.retention is not None:
        words.append(f"kept: {kept(topic.retention)}")
    return ", ".join(words)


TOPIC: Final[Columns] = {
    "topic": "name",
    **same("partitions", "storage", "compression", "created_at"),
    "retention": lambda topic: None if topic.retention is None else asdict(topic.retention),
}
"""A topic for JSON."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A consumer that gets events of a topic only up to offset `until`, or no events if `until` is None.

    An added shard holds back a consumer until it has consumed the earlier events on the shards of `waits_for`.
    """

    shard: str | None
    consumer: str
    until: int | None
    waits_for: tuple[str, ...]

    def __str__(self) -> str:
        if self.until is not None:
            on = "" if self.shard is None else f" on {self.shard}"
            return (
                f"consumer {self.consumer!r} finishes its partitions{on} up to offset {self.until:,} before it begins "
                "with the new partitions"
            )
        others = ", ".join(self.waits_for) or "the other shards, see `eventsql shard status`"
        return (
            f"consumer {self.consumer!r} is held back from {self.shard or 'this shard'}, until it has consumed the "
            f"earlier events on {others}"
        )


@dataclass(frozen=True, slots=True)
class Log:
    """One partition of a topic's log: the number of its events, and the offset of the newest."""

    shard: str | None
    partition: int
    events: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    shard: str | None
    layout: Layout


_LAYOUT: Final[Columns] = {"layout": lambda each: each.layout.number, "partitions": lambda each: each.layout.partitions}


@dataclass(frozen=True, slots=True)
class Description:
    """A topic, with its layouts, logs and consumers on each shard."""

    topic: Topic
    dead_letters: str | None
    layouts: Sequence[ShardLayout]
    unsettled: Sequence[Unsettled]
    logs: Sequence[Log]
    consumers: Sequence[ConsumerLag]
    compresses: bool
    """Whether its servers have its compression. A restored topic may have been compressed by another server."""

    def as_json(self, context: CliContext) -> dict[str, Any]:
        def objects(items: Sequence[Any], **columns: Column) -> list[dict[str, Any]]:
            return [context.on_its_shard(each, columns) for each in items]

        return {
            **context.on_its_shard(self.topic, TOPIC),
            "dead_letter_topic": self.dead_letters,
            "layouts": objects(
                self.layouts, **_LAYOUT, after=lambda each: each.layout.after,
                created_at=lambda each: each.layout.created_at,
            ),
            "unsettled_consumers": objects(self.unsettled, **same("consumer", "until", "waits_for")),
            "events": sum(log.events for log in self.logs),
            "log": objects(self.logs, **same("partition", "events", "end")),
            "consumers": objects(
                self.consumers, **same("consumer", "partition"), offset="last_event_id", lag_events="events"
            ),
        }  # fmt: skip

    def show(self) -> None:
        found = self.topic
        partitions = found.partitions if found.partitioned else "not partitioned"
        fields = {"topic": found.name, "partitions": partitions, "stored in": found.storage}
        if found.storage == BLOCKS:
            lacking = "" if self.compresses else ", which this server does not have"
            fields["compression"] = f"{found.compression}{lacking}"
        kept_since = {"created": found.created_at, "kept": kept(found.retention)}
        show_fields({**fields, **kept_since, "dead letters": self.dead_letters})
        show_items(self.logs, {**same("shard"), "partition": partition_of, **same("events"), "newest offset": "end"})
        if self.layouts:
            after: Columns = {
                "after offset": lambda each: each.layout.after, "since": lambda each: each.layout.created_at
            }  # fmt: skip
            show_items(self.layouts, {**same("shard"), **_LAYOUT, **after})
        for waiting in self.unsettled:
            say(str(waiting))
        if self.consumers:
            offsets: Columns = {"partition": partition_of, "offset": "last_event_id", "lag": "events"}
            show_items(self.consumers, {**same("shard", "consumer"), **offsets})


def description(platform: EventSQL, topic: str) -> Description:
    """Describe a topic. A shard that is down shows only its lag. Raises `TopicNotFoundError`."""
    found = platform.registry.topic(topic)
    consumers = platform.lag(topic)
    reached = sorted((shard for shard in platform.members() if shard.down is None), key=lambda shard: shard.name or "")
    layouts = [ShardLayout(shard.name, layout) for shard in reached for layout in shard.layouts.of(topic)]
    # A topic that was repartitioned shows its earlier partitions too.
    had = range(max((each.layout.partitions for each in layouts), default=0)) or found.all_partitions
    return Description(
        found,
        platform.dead_letters.topic_of(topic),
        layouts,
        _unsettled(topic, reached, platform.held_back()),
        [
            Log(shard.name, number, shard.reader.count(topic, partition=number), shard.reader.end(topic, number))
            for shard in reached
            for number in had
        ],
        consumers,
        all(found.compression in shard.registry.compressions() for shard in reached),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A topic's log on a shard. `rates` are events per second, by the name of the window.

    `first` is the oldest offset, None for an empty log, and `end` the newest one, also of an event that retention has
    dropped; 0 before the first event.
    """

    topic: str
    shard: str | None
    partitions: int
    first: int | None
    end: int
    bytes: int
    oldest_seconds: float | None
    buffered: int
    rates: dict[str, float]

    @property
    def events(self) -> int:
        """The number of offsets in the log, which has at most this number of events."""
        return 0 if self.first is None else self.end - self.first + 1


_WINDOWS: Final = {"1m": timedelta(minutes=1), "1h": timedelta(hours=1), "1d": timedelta(days=1)}


def _rate(window: str, each: Statistics) -> float:
    return each.rates[window]


STATISTICS: Final[Columns] = {
    **same("topic", "shard"),
    "partitions": lambda each: each.partitions if each.partitions != NOT_PARTITIONED else None,
    "events (about)": "events", "size": lambda each: size(each.bytes),
    "bytes/event": lambda each: each.bytes // each.events if each.events else None,
    "oldest": lambda each: None if each.oldest_seconds is None else age(round(each.oldest_seconds)),
    **same("buffered"),
    **{f"events/s, {window}": partial(_rate, window) for window in _WINDOWS},
}  # fmt: skip


def statistics(platform: EventSQL, topics: Sequence[str]) -> list[Statistics]:
    """The statistics of these topics, or of all, on every shard that answers. Raises `TopicNotFoundError`."""
    platform.open()
    wanted = {platform.registry.topic(name).name for name in topics}
    found: list[Statistics] = []
    for shard in platform.shards:
        try:
            figures = lazy.FiguresReader(shard.database).read()
        except DatabaseUnavailableError as error:
            if len(platform.shards) == 1:
                raise
            complain(str(error))
            continue
        for each in figures.topics:
            if not wanted or each.topic in wanted:
                try:
                    found.append(_statistics(shard, each))
                except EventSQLError:
                    if each.topic in {topic.name for topic in shard.registry.topics()}:
                        raise
    # A topic that was deleted meanwhile has no statistics. If the caller named it, this raises.
    for name in wanted - {each.topic for each in found}:
        platform.registry.topic(name)
    return sorted(found, key=lambda each: (each.topic, each.shard or ""))


def _statistics(shard: Shard, figures: TopicFigures) -> Statistics:
    topic, end = figures.topic, figures.transferred
    with shard.database.connection() as connection:
        offset_of = partial(lazy.offset_of, connection, shard.database.schema, topic)
        # Retention may have dropped all events, and the offsets go on behind the empty segments.
        before = end if figures.oldest_seconds is None else offset_of(Earliest())
        # Retention may have dropped events of the window, which are not counted.
        rates = {
            window: max(0, end - max(before, offset_of(Back(length)))) / length.total_seconds()
            for window, length in _WINDOWS.items()
        }
    return Statistics(
        topic=topic, shard=shard.name, partitions=figures.partitions,
        first=before + 1 if end > before else None, end=end,
        bytes=figures.bytes, oldest_seconds=figures.oldest_seconds, buffered=figures.buffered, rates=rates,
    )  # fmt: skip


def _unsettled(topic: str, shards: Iterable[Shard], held: Iterable[HeldBack]) -> list[Unsettled]:
    waits_for = {(each.consumer, each.shard): each.waits_for for each in held if each.topic == topic}
    return [
        Unsettled(shard.name, name, None if until == HELD else until, waits_for.get((name, shard.name or ""), ()))
        for shard in shards
        for name, until in shard.layouts.unsettled(topic).items()
    ]
