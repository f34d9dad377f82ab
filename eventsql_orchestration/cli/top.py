"""`eventsql top`: rates of topics, lag of consumers and stopped partitions, refreshed on a screen."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.lag import QUEUE_COLUMNS, SAMPLES, sparkline
from eventsql_orchestration.cli.output import on_shard, stdout_is_terminal, write_json
from eventsql_orchestration.cli.parameters import POSITIVE, AsJson, OptionalTopicName, Seconds, command, option
from eventsql_orchestration.cli.tables import Columns, partition_name, picked, same, show, table_of
from eventsql_orchestration.consuming.lag_values import LagCause
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.orchestration.words import size
from eventsql_orchestration.validation import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.metrics.figures import Figures, PartitionFigures

_LEAST_ROWS: Final = 3
"""Rows of each table on the lowest screen."""

_STOPPED: Final = (LagCause.BLOCKED, LagCause.RETRYING, LagCause.PAUSED, LagCause.HELD_BACK)
"""The causes of partitions that do not go on by themselves, or not at once; the worst first."""


Row: TypeAlias = Mapping[str, Any]
"""A row as --json prints it, with the column `trend` of the screen. Rates are events per second since the previous
refresh, None at the first. `causes` counts the partitions of a consumer that are behind, by the cause."""


@dataclass(frozen=True, slots=True)
class Screen:
    """The contents of one refresh: the rows of each of `_TABLES`. `down` are shards that do not answer."""

    time: datetime
    tables: Mapping[str, Sequence[Row]]
    down: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        tables = {
            name: [{key: value for key, value in row.items() if key != "trend"} for row in rows]
            for name, rows in self.tables.items()
        }
        return {"time": self.time, **tables, **({"down": list(self.down)} if self.down else {})}


@command()
def top(
    context: CliContext,
    *,
    topic: OptionalTopicName,
    interval: Annotated[
        float, option("Seconds between two refreshes.", type=Seconds(0.1, 3_600), default=2.0, metavar="SECONDS")
    ],
    refreshes: Annotated[int | None, option("End after N refreshes.", "--count", type=POSITIVE)],
    as_json: AsJson,
) -> None:
    """Show the rates of TOPIC, or of all topics, the lag of their consumers, and the partitions that stand still.

    Without TOPIC, it shows queues that have messages, too: at most 10,000 in each state are counted.

    It refreshes until Ctrl-C. Rates are events per second since the previous refresh. Rates of topics come from
    offsets, and a skipped offset counts as an event. Column behind counts the partitions with events to consume, and
    column why counts them by cause. Column claims counts the claims of runs, and the expired claims. The busiest topics
    and the consumers furthest behind come first. A low screen says how many rows it leaves out. A screen in which names
    would be folded leaves out trends first, and then further columns.

    It reads what `eventsql metrics` reads: counts of long backlogs are estimates, and a role that only reads is enough.
    Without a terminal, it writes one screen below the other, with --json a line for each.
    """
    with context.platform() as platform, ExitStack() as stack:
        platform.open()
        if topic is not None:
            platform.registry.topic(topic)
        screens = Screens(platform, topic)
        live = None
        if not as_json and stdout_is_terminal():
            live = stack.enter_context(lazy.Live(screen=True, console=lazy.Console(), auto_refresh=False))
        for number in itertools.count(1):
            screen = screens.next()
            if as_json:
                write_json(screen.as_json(), indent=None)
            elif live is not None:
                live.update(drawn(screen, live.console.height), refresh=True)
            else:
                show(drawn(screen, None))
            if number == refreshes:
                return
            time.sleep(interval)


class Screens:
    """Reads the figures of every shard again and again, and remembers what the rates and trends need."""

    def __init__(self, platform: EventSQL, topic: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._topic = topic
        self._several = len(platform.shards) > 1
        self._readers = {shard.label: lazy.FiguresReader(shard.database) for shard in platform.shards}
        self._answered = False
        self._rates: dict[object, tuple[float, int]] = {}
        self._trends: dict[object, deque[float]] = {}

    def next(self) -> Screen:
        """Raises `DatabaseUnavailableError` if a lone database does not answer at first."""
        tables: dict[str, list[Row]] = {name: [] for name in _TABLES}
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
            tables["topics"] += self._topics(figures, shard)
            tables["consumers"] += self._consumers(figures, shard)
            tables["stopped"] += self._stopped(figures, shard)
            tables["queues"] += self._queues(figures, shard)
        for name, rows in tables.items():
            rows.sort(key=_TABLES[name].order)
        return Screen(datetime.now().astimezone(), tables, down)

    def _topics(self, figures: Figures, shard: str | None) -> Iterator[Row]:
        for each in figures.topics:
            if self._topic not in (None, each.topic):
                continue
            # A topic that was deleted and created again is another topic.
            key = (shard, each.topic, each.identity)
            published = self._rate((*key, "published"), each.published)
            yield {
                "topic": each.topic, **on_shard(shard), "published_rate": published,
                "transferred_rate": self._rate((*key, "transferred"), each.transferred),
                "buffered": each.buffered, "buffered_seconds": each.buffered_seconds, "offset": each.transferred,
                "bytes": each.bytes, "open_letters": each.open_letters, "trend": self._trend(key, published or 0.0),
            }  # fmt: skip

    def _consumers(self, figures: Figures, shard: str | None) -> Iterator[Row]:
        parts: dict[tuple[str, str], list[PartitionFigures]] = {}
        for each in figures.partitions:
            if self._topic in (None, each.topic):
                parts.setdefault((each.topic, each.consumer), []).append(each)
        claims = {(each.topic, each.consumer): each for each in figures.claims}
        for (topic, consumer), own in parts.items():
            key, claim = (shard, topic, consumer), claims.get((topic, consumer))
            events = sum(each.events for each in own)
            yield {
                "topic": topic, "consumer": consumer, **on_shard(shard),
                "consumed_rate": self._rate(key, sum(each.consumed for each in own)),
                "events": events, "seconds": max(each.seconds for each in own),
                "partitions": len(own), "behind": sum(1 for each in own if each.events),
                "causes": dict(Counter(str(each.cause) for each in own if each.cause is not LagCause.NONE)),
                "claims": 0 if claim is None else claim.live, "expired_claims": 0 if claim is None else claim.expired,
                "trend": self._trend(key, events),
            }  # fmt: skip

    def _stopped(self, figures: Figures, shard: str | None) -> Iterator[Row]:
        for each in figures.partitions:
            if each.cause in _STOPPED and self._topic in (None, each.topic):
                own = picked(each, same("topic", "consumer", "partition", "cause", "events", "detail"))
                yield {**own, **on_shard(shard)}

    def _queues(self, figures: Figures, shard: str | None) -> Iterator[Row]:
        for each in figures.queues:
            if self._topic is None and (each.depth or each.dead):
                own = picked(each, same("queue", "visible", "in_flight", "delayed", "blocked", "dead", "seconds"))
                yield {**own, **on_shard(shard), "trend": self._trend((shard, "queue", each.queue), each.depth)}

    def _rate(self, key: object, count: int) -> float | None:
        """Events per second since the count before, None for the first count. A count that went back counts as none."""
        now = self._clock()
        before, self._rates[key] = self._rates.get(key), (now, count)
        return None if before is None else max(0, count - before[1]) / max(1e-3, now - before[0])

    def _trend(self, key: object, number: float) -> tuple[float, ...]:
        trend = self._trends.setdefault(key, deque(maxlen=SAMPLES))
        trend.append(number)
        return tuple(trend)


def _why(row: Row) -> str | None:
    causes = sorted(row["causes"].items())
    return ", ".join(cause if number == row["partitions"] else f"{number} {cause}" for cause, number in causes) or None


def _claims(row: Row) -> object:
    return f"{row['claims']}, {row['expired_claims']} expired" if row["expired_claims"] else row["claims"]


class _Table(NamedTuple):
    """A table of the screen: its columns, the order of its rows, and the columns that a narrow screen leaves out."""

    columns: Columns
    order: Callable[[Row], Any]
    spare: Sequence[str] = ()


_TREND: Final[Columns] = {"trend": lambda row: sparkline(row["trend"])}

_TABLES: Final[Mapping[str, _Table]] = {
    "topics": _Table(
        {
            **same("topic", "shard"), "published/s": "published_rate", "moved/s": "transferred_rate",
            **same("buffered"), "oldest s": "buffered_seconds", **same("offset"),
            "size": lambda row: size(row["bytes"]), "dead": "open_letters", **_TREND,
        },
        lambda row: (-(row["published_rate"] or 0), -row["buffered"], row["topic"]),
        ("trend", "moved/s", "oldest s", "offset"),
    ),
    "consumers": _Table(
        {
            **same("topic", "consumer", "shard"), "consumed/s": "consumed_rate", "lag": "events", "lag s": "seconds",
            "behind": lambda row: f"{row['behind']} of {row['partitions']}", "why": _why, "claims": _claims, **_TREND,
        },
        lambda row: (-row["seconds"], -row["events"], row["topic"], row["consumer"]),
        ("trend", "claims", "behind", "consumed/s"),
    ),
    "stopped": _Table(
        {
            **same("topic", "consumer", "shard"), "partition": lambda row: partition_name(row["partition"]),
            "stands still": "cause", **same("events"), "why": "detail",
        },
        lambda row: (_STOPPED.index(row["cause"]), row["topic"], row["consumer"], row["partition"]),
    ),
    "queues": _Table(
        {**same("queue", "shard"), **QUEUE_COLUMNS, **_TREND}, lambda row: (-row["seconds"], row["queue"]), ("trend",)
    ),
}  # fmt: skip
"""The tables of the screen, by the names of their rows in JSON."""


def drawn(screen: Screen, height: int | None) -> RenderableType:
    """The tables of a screen, which has a title, and a heading and a line for each table: `height` lines in all.

    A narrow screen has fewer columns, so that names stay on one line.
    """
    parts: list[RenderableType] = [lazy.Text(_title(screen), style="bold")]
    shown = {name: rows for name, rows in screen.tables.items() if rows}
    most = None if height is None else max(_LEAST_ROWS, (height - 1 - 3 * len(shown)) // max(1, len(shown)))
    for name, rows in shown.items():
        table = _TABLES[name]
        parts += [lazy.Text(""), table_of(rows[:most], table.columns, spare=table.spare)]
        if most is not None and len(rows) > most:
            parts.append(lazy.Text(f"… and {len(rows) - most} more"))
    return lazy.Group(*parts)


def _title(screen: Screen) -> str:
    topics, consumers, stopped = (screen.tables[name] for name in ("topics", "consumers", "stopped"))
    rates = [row["published_rate"] for row in topics if row["published_rate"] is not None]
    words = [
        f"{screen.time:%H:%M:%S}",
        counted(len({row["topic"] for row in topics}), "topic"),
        *([f"{sum(rates):,.1f} events/s"] if rates else []),
        f"{counted(sum(row['buffered'] for row in topics), 'event')} in the buffer",
        f"lag {counted(sum(row['events'] for row in consumers), 'event')}",
        *([f"{counted(len(stopped), 'partition')} standing still"] if stopped else []),
        *([f"down: {', '.join(screen.down)}"] if screen.down else []),
    ]
    return "  ".join(words)
