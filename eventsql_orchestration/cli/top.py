"""`eventsql top`: rates of topics, lag of consumers and stopped partitions, refreshed on a screen."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.lag import QUEUE_COLUMNS, SAMPLES, sparkline
from eventsql_orchestration.cli.output import stdout_is_terminal, write_json
from eventsql_orchestration.cli.parameters import POSITIVE, AsJson, Number, OptionalTopicName, command, option
from eventsql_orchestration.cli.tables import Columns, partition_of, same, show, table_of, without
from eventsql_orchestration.cli.topic_output import size
from eventsql_orchestration.consuming.lag_values import LagCause
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.validation import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.metrics.figures import Figures, PartitionFigures

_LEAST_ROWS: Final = 3
"""Rows of each table on the lowest screen."""

_STOPPED: Final = (LagCause.BLOCKED, LagCause.RETRYING, LagCause.PAUSED, LagCause.HELD_BACK)
"""The causes of partitions that do not go on by themselves, or not at once; the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRow:
    """A topic on a shard. Rates are events per second since the previous refresh, None at the first refresh."""

    topic: str
    shard: str | None
    published_rate: float | None
    transferred_rate: float | None
    buffered: int
    buffered_seconds: float
    offset: int
    bytes: int
    open_letters: int | None
    trend: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRow:
    """A consumer on a shard. `causes` counts the partitions that are behind, by the cause."""

    topic: str
    consumer: str
    shard: str | None
    consumed_rate: float | None
    events: int
    seconds: float
    partitions: int
    behind: int
    causes: dict[str, int]
    claims: int
    expired_claims: int
    trend: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRow:
    """A consumer partition that does not go on, and why."""

    topic: str
    consumer: str
    shard: str | None
    partition: int
    cause: LagCause
    events: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A queue on a shard, at most 10,000 messages counted of each state. `seconds` as `QueueLag` has it."""

    queue: str
    shard: str | None
    visible: int
    in_flight: int
    delayed: int
    blocked: int
    dead: int
    seconds: float
    trend: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Screen:
    """The contents of one refresh. `down` are shards that do not answer."""

    time: datetime
    topics: Sequence[TopicRow]
    consumers: Sequence[ConsumerRow]
    stopped: Sequence[StoppedRow]
    queues: Sequence[QueueRow]
    down: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        def plain(row: TopicRow | ConsumerRow | StoppedRow | QueueRow) -> dict[str, Any]:
            return without(row, "trend") if row.shard is not None else without(row, "trend", "shard")

        return {
            "time": self.time,
            "topics": [plain(row) for row in self.topics],
            "consumers": [plain(row) for row in self.consumers],
            "stopped": [plain(row) for row in self.stopped],
            "queues": [plain(row) for row in self.queues],
            **({"down": list(self.down)} if self.down else {}),
        }


@command(short_help="Show rates, lag and what stands still, on a screen that refreshes.")
def top(
    context: CliContext,
    *,
    topic: OptionalTopicName,
    interval: Annotated[
        float, option("Seconds between two refreshes.", type=Number(0.1, 3_600), default=2.0, metavar="SECONDS")
    ],
    refreshes: Annotated[int | None, option("End after N refreshes.", "--count", type=POSITIVE)],
    as_json: AsJson,
) -> None:
    """Show the rates of TOPIC, or of all topics, the lag of their consumers, and the partitions that stand still.

    Without TOPIC, it shows queues that have messages, too.

    It refreshes until Ctrl-C. Rates are events per second since the previous refresh. Column behind counts the
    partitions with events to consume, and column why counts them by cause. Column claims counts the claims of runs, and
    the expired claims. The busiest topics and the consumers furthest behind come first. A low screen says how many rows
    it leaves out, and a narrow screen leaves trends out.

    It reads what `eventsql metrics` reads: counts of long backlogs are estimates, and a role that only reads is enough.
    Without a terminal, it writes one screen below the other, with --json a line for each.
    """
    with context.platform() as platform, ExitStack() as stack:
        platform.open()
        if topic is not None:
            platform.registry.topic(topic)
        look = _Look(platform, topic)
        live = None
        if not as_json and stdout_is_terminal():
            live = stack.enter_context(lazy.Live(screen=True, console=lazy.Console(), auto_refresh=False))
        for number, screen in enumerate(look.screens(interval), start=1):
            if as_json:
                write_json(screen.as_json(), indent=None)
            elif live is not None:
                live.update(_drawn(screen, live.console.height), refresh=True)
            else:
                show(_drawn(screen, None))
            if number == refreshes:
                return


class _Look:
    """Reads the figures of every shard again and again, and remembers what the rates and trends need."""

    def __init__(self, platform: EventSQL, topic: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._topic = topic
        self._several = len(platform.shards) > 1
        self._readers = {shard.label: lazy.FiguresReader(shard.database) for shard in platform.shards}
        self._answered = False
        self._rates: dict[object, tuple[float, int]] = {}
        self._trends: dict[object, deque[float]] = {}

    def screens(self, interval: float) -> Iterator[Screen]:
        """A screen at once, and one more every `interval` seconds.

        Raises `DatabaseUnavailableError` if a lone database does not answer at first.
        """
        while True:
            yield self._screen()
            time.sleep(interval)

    def _screen(self) -> Screen:
        topics: list[TopicRow] = []
        consumers: list[ConsumerRow] = []
        stopped: list[StoppedRow] = []
        queues: list[QueueRow] = []
        down: list[str] = []
        for label, reader in self._readers.items():
            try:
                figures = reader.read()
            except DatabaseUnavailableError:
                # A database that never answered may have a mistyped URL. Wait only for one that has answered before.
                if not self._several and not self._answered:
                    raise
                down.append(label)
                continue
            self._answered = True
            shard = label if self._several else None
            topics += self._topics(figures, shard)
            consumers += self._consumers(figures, shard)
            stopped += self._stopped(figures, shard)
            queues += self._queues(figures, shard)
        return Screen(
            datetime.now().astimezone(),
            sorted(topics, key=lambda row: (-(row.published_rate or 0), -row.buffered, row.topic)),
            sorted(consumers, key=lambda row: (-row.seconds, -row.events, row.topic, row.consumer)),
            sorted(stopped, key=lambda row: (_STOPPED.index(row.cause), row.topic, row.consumer, row.partition)),
            sorted(queues, key=lambda row: (-row.seconds, row.queue)),
            down,
        )

    def _topics(self, figures: Figures, shard: str | None) -> Iterator[TopicRow]:
        for each in figures.topics:
            if self._topic not in (None, each.topic):
                continue
            # A topic that was deleted and created again is another topic.
            key = (shard, each.topic, each.identity)
            published = self._rate((*key, "published"), each.published)
            yield TopicRow(
                topic=each.topic, shard=shard,
                published_rate=published,
                transferred_rate=self._rate((*key, "transferred"), each.transferred),
                buffered=each.buffered, buffered_seconds=each.buffered_seconds,
                offset=each.transferred, bytes=each.bytes, open_letters=each.open_letters,
                trend=self._trend(key, published or 0.0),
            )  # fmt: skip

    def _consumers(self, figures: Figures, shard: str | None) -> Iterator[ConsumerRow]:
        parts: dict[tuple[str, str], list[PartitionFigures]] = {}
        for each in figures.partitions:
            if self._topic in (None, each.topic):
                parts.setdefault((each.topic, each.consumer), []).append(each)
        claims = {(each.topic, each.consumer): each for each in figures.claims}
        for (topic, consumer), own in parts.items():
            key, claim = (shard, topic, consumer), claims.get((topic, consumer))
            events = sum(each.events for each in own)
            yield ConsumerRow(
                topic=topic, consumer=consumer, shard=shard,
                consumed_rate=self._rate(key, sum(each.consumed for each in own)),
                events=events, seconds=max(each.seconds for each in own),
                partitions=len(own), behind=sum(1 for each in own if each.events),
                causes=dict(Counter(str(each.cause) for each in own if each.cause is not LagCause.NONE)),
                claims=0 if claim is None else claim.live, expired_claims=0 if claim is None else claim.expired,
                trend=self._trend(key, events),
            )  # fmt: skip

    def _stopped(self, figures: Figures, shard: str | None) -> Iterator[StoppedRow]:
        for each in figures.partitions:
            if each.cause in _STOPPED and self._topic in (None, each.topic):
                yield StoppedRow(
                    topic=each.topic, consumer=each.consumer, shard=shard, partition=each.partition, cause=each.cause,
                    events=each.events, detail=each.detail,
                )  # fmt: skip

    def _queues(self, figures: Figures, shard: str | None) -> Iterator[QueueRow]:
        for each in figures.queues:
            if self._topic is None and (each.depth or each.dead):
                yield QueueRow(
                    queue=each.queue, shard=shard, visible=each.visible, in_flight=each.in_flight,
                    delayed=each.delayed, blocked=each.blocked, dead=each.dead, seconds=each.seconds,
                    trend=self._trend((shard, "queue", each.queue), each.depth),
                )  # fmt: skip

    def _rate(self, key: object, count: int) -> float | None:
        """Events per second since the count before, None for the first count. A count that went back counts as none."""
        now = self._clock()
        before, self._rates[key] = self._rates.get(key), (now, count)
        return None if before is None else max(0, count - before[1]) / max(1e-3, now - before[0])

    def _trend(self, key: object, number: float) -> tuple[float, ...]:
        trend = self._trends.setdefault(key, deque(maxlen=SAMPLES))
        trend.append(number)
        return tuple(trend)


_TOPICS: Final[Columns] = {
    **same("topic", "shard"), "published/s": "published_rate", "moved/s": "transferred_rate", **same("buffered"),
    "oldest s": "buffered_seconds", **same("offset"), "size": lambda row: size(row.bytes), "dead": "open_letters",
    "trend": lambda row: sparkline(row.trend),
}  # fmt: skip

_CONSUMERS: Final[Columns] = {
    **same("topic", "consumer", "shard"), "consumed/s": "consumed_rate", "lag": "events", "lag s": "seconds",
    "behind": lambda row: f"{row.behind} of {row.partitions}",
    "why": lambda row: ", ".join(
        cause if number == row.partitions else f"{number} {cause}" for cause, number in sorted(row.causes.items())
    ) or None,
    "claims": lambda row: f"{row.claims}, {row.expired_claims} expired" if row.expired_claims else row.claims,
    "trend": lambda row: sparkline(row.trend),
}  # fmt: skip

_STANDING: Final[Columns] = {
    **same("topic", "consumer", "shard"), "partition": partition_of, "stands still": "cause", **same("events"),
    "why": "detail",
}  # fmt: skip


_QUEUES: Final[Columns] = {
    **same("queue", "shard"), **QUEUE_COLUMNS, "trend": lambda row: sparkline(row.trend),
}  # fmt: skip


def _drawn(screen: Screen, height: int | None) -> RenderableType:
    """The tables of a screen, which has a title, and a heading and a line for each table: `height` lines in all.

    A narrow screen has no trends, so that names stay on one line.
    """
    parts: list[RenderableType] = [lazy.Text(_title(screen), style="bold")]
    tables = [
        (screen.topics, _TOPICS),
        (screen.consumers, _CONSUMERS),
        (screen.stopped, _STANDING),
        (screen.queues, _QUEUES),
    ]
    shown = [(rows, columns) for rows, columns in tables if rows]
    most = None if height is None else max(_LEAST_ROWS, (height - 1 - 3 * len(shown)) // max(1, len(shown)))
    for rows, columns in shown:
        parts += [lazy.Text(""), table_of(rows[:most], columns, spare=["trend"])]
        if most is not None and len(rows) > most:
            parts.append(lazy.Text(f"… and {len(rows) - most} more"))
    return lazy.Group(*parts)


def _title(screen: Screen) -> str:
    rate = sum(row.published_rate or 0 for row in screen.topics)
    known = any(row.published_rate is not None for row in screen.topics)
    words = [
        f"{screen.time:%H:%M:%S}",
        counted(len({row.topic for row in screen.topics}), "topic"),
        *([f"{rate:,.1f} events/s"] if known else []),
        f"{counted(sum(row.buffered for row in screen.topics), 'event')} in the buffer",
        f"lag {counted(sum(row.events for row in screen.consumers), 'event')}",
        *([f"{counted(len(screen.stopped), 'partition')} standing still"] if screen.stopped else []),
        *([f"down: {', '.join(screen.down)}"] if screen.down else []),
    ]
    return "  ".join(words)
