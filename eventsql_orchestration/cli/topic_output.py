"""How `eventsql topic` shows topics: in words, and as objects of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import counted, partition_name, say, show_fields, show_table
from eventsql_orchestration.log.lag import ConsumerLag, LagCause
from eventsql_orchestration.log.layouts import Layout
from eventsql_orchestration.model import Retention, Topic
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.sharded import ShardedEventSQL
from eventsql_orchestration.sharded.gates import HeldBack
from eventsql_orchestration.sharding import HELD


def form(topic: Topic) -> str:
    """The partitions and the retention of a topic, in a few words."""
    partitions = counted(topic.partitions, "partition") if topic.partitioned else "not partitioned"
    return partitions if topic.retention is None else f"{partitions}, kept: {kept(topic)}"


def kept(topic: Topic) -> str:
    """What retention keeps of a topic, for people."""
    bounds = topic.retention or Retention()
    texts = [] if bounds.seconds is None else [_age(bounds.seconds)]
    if bounds.bytes is not None:
        texts.append(size(bounds.bytes))
    if bounds.events is not None:
        texts.append(counted(bounds.events, "event"))
    return ", ".join(texts) or "for ever"


def _age(seconds: float) -> str:
    parts, left = [], seconds
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        whole, left = divmod(left, length)
        if whole:
            parts.append(f"{whole:,.0f} {unit}")
    return " ".join([*parts, f"{left:g} s"] if left or not parts else parts)


def size(number: int) -> str:
    """A number of bytes, for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            # Rounded where it is not a round number in this unit.
            return f"{number / 2**power:,.4g} {unit}"
    return counted(number, "byte")


def topic_object(topic: Topic) -> dict[str, Any]:
    """A topic as JSON has it."""
    return {
        "topic": topic.name,
        "partitions": topic.partitions,
        "created_at": topic.created_at,
        "retention": None if topic.retention is None else asdict(topic.retention),
    }


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A consumer that does not get all of a topic's events yet: those up to offset `until`, or none where it is None.

    That is so on a shard that was added, until it has consumed what was before on those of `waits_for`.
    """

    shard: str | None
    consumer: str
    until: int | None
    waits_for: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.until is not None:
            on = "" if self.shard is None else f" on {self.shard}"
            return (
                f"consumer {self.consumer!r} finishes its partitions{on} up to offset {self.until:,} before it begins "
                "with the next"
            )
        others = ", ".join(self.waits_for) or "the other shards, as `eventsql shard status` shows"
        shard = "this shard" if self.shard is None else self.shard
        return (
            f"consumer {self.consumer!r} is held back from {shard}, until it has consumed what was before on {others}"
        )


@dataclass(frozen=True, slots=True)
class Log:
    """One partition of a topic's log: how many events it holds, and the offset of the newest."""

    shard: str | None
    partition: int
    events: int
    end: int


@dataclass(frozen=True, slots=True)
class Description:
    """What there is to say of a topic, of each shard where there are several."""

    topic: Topic
    dead_letters: str | None
    layouts: Sequence[tuple[str | None, Layout]]
    unsettled: Sequence[Unsettled]
    logs: Sequence[Log]
    consumers: Sequence[ConsumerLag]

    def as_json(self, context: CliContext) -> dict[str, Any]:
        return {
            **context.on_shard(None),
            **topic_object(self.topic),
            "dead_letter_topic": self.dead_letters,
            "layouts": [
                {
                    **context.on_shard(shard),
                    "layout": each.number,
                    "partitions": each.partitions,
                    "after": each.after,
                    "created_at": each.created_at,
                }
                for shard, each in self.layouts
            ],
            "unsettled_consumers": [
                {
                    **context.on_shard(each.shard),
                    "consumer": each.consumer,
                    "until": each.until,
                    "waits_for": each.waits_for,
                }
                for each in self.unsettled
            ],
            "events": sum(log.events for log in self.logs),
            "log": [
                {**context.on_shard(log.shard), "partition": log.partition, "events": log.events, "end": log.end}
                for log in self.logs
            ],
            "consumers": [
                {
                    **context.on_shard(each.shard),
                    "consumer": each.consumer,
                    "partition": each.partition,
                    "offset": each.last_event_id,
                    "lag_events": each.events,
                }
                for each in self.consumers
            ],
        }

    def show(self) -> None:
        """For people."""
        found = self.topic
        show_fields(
            {
                "topic": found.name,
                "partitions": found.partitions if found.partitioned else "not partitioned",
                "created (UTC)": found.created_at,
                "kept": kept(found),
                "dead letters": self.dead_letters,
            }
        )
        several = any(log.shard is not None for log in self.logs)
        on = ["shard"] if several else []

        def where(shard: str | None) -> list[str | None]:
            return [shard] if several else []

        show_table(
            [*on, "partition", "events", "newest offset"],
            [(*where(log.shard), partition_name(log.partition), log.events, log.end) for log in self.logs],
        )
        if self.layouts:
            show_table(
                [*on, "layout", "partitions", "after offset", "since (UTC)"],
                [
                    (*where(shard), each.number, each.partitions, each.after, each.created_at)
                    for shard, each in self.layouts
                ],
            )
        for waiting in self.unsettled:
            say(str(waiting))
        if self.consumers:
            show_table(
                [*on, "consumer", "partition", "offset", "lag"],
                [
                    (*where(each.shard), each.consumer, partition_name(each.partition), each.last_event_id, each.events)
                    for each in self.consumers
                ],
            )


def description(platform: EventSQL, topic: str) -> Description:
    """Raises `TopicNotFoundError`. Of shards that are down nothing is said but their lag."""
    found = platform.registry.topic(topic)
    consumers = platform.lag(topic)
    reached = sorted(
        (shard for shard in platform.shards if not _down(shard, consumers)), key=lambda shard: shard.shard or ""
    )
    layouts = [(shard.shard, layout) for shard in reached for layout in shard.layouts.of(topic)]
    # Of one that was repartitioned, those too that it had.
    had = range(max((each.partitions for _, each in layouts), default=0)) or found.all_partitions
    return Description(
        found,
        platform.dead_letters.topic_of(topic),
        layouts,
        _unsettled(topic, reached, platform.held_back() if isinstance(platform, ShardedEventSQL) else []),
        [
            Log(
                shard.shard, partition, shard.reader.count(topic, partition=partition),
                shard.reader.end(topic, partition),
            )
            for shard in reached
            for partition in had
        ],
        consumers,
    )  # fmt: skip


def _unsettled(topic: str, shards: Iterable[EventSQL], held: Iterable[HeldBack]) -> list[Unsettled]:
    waits_for = {(each.consumer, each.shard): each.waits_for for each in held if each.topic == topic}
    return [
        Unsettled(shard.shard, name, None if until == HELD else until, waits_for.get((name, shard.shard or ""), ()))
        for shard in shards
        for name, until in shard.layouts.unsettled(topic).items()
    ]


def _down(shard: EventSQL, lags: Sequence[ConsumerLag]) -> bool:
    return any(lag.shard == shard.shard and lag.cause is LagCause.UNREACHABLE for lag in lags)
