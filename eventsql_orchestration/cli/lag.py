"""`eventsql lag`: how far each consumer partition is behind, and why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import complain, say, stdout_is_terminal, write_csv, write_json
from eventsql_orchestration.cli.parameters import (
    CONSUMER,
    AsJson,
    OptionalTopicName,
    Seconds,
    command,
    leave_out,
    option,
)
from eventsql_orchestration.cli.tables import Columns, Listing, partition_of, picked, same, show_items, table_of
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    DatabaseUnavailableError,
    PermissionDeniedError,
    RestoredStoreError,
)
from eventsql_orchestration.topics.side_consumers import without_backfills

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from eventsql_orchestration.shards.shard import Shard


_ORDERS: Final[dict[str, Callable[[Any], Any]]] = {
    "topic": lambda lag: (lag.topic, lag.consumer),
    "events": lambda lag: -lag.events,
    "seconds": lambda lag: -lag.seconds,
}

_FORMATS: Final = ("table", "json", "csv")

SAMPLES: Final = 12
"""Refreshes that a trend shows."""

_BARS: Final = "▁▂▃▄▅▆▇█"

_SPARE: Final = ("offset", "end", "buffered")
"""Columns that a narrow terminal leaves out, so that names stay whole."""


@command()
def lag(
    context: CliContext,
    *,
    topic: OptionalTopicName,
    consumer: Annotated[str | None, option("Only consumers of this name.", type=CONSUMER, metavar="NAME")],
    backfills: Annotated[bool, option("Also the side consumers, one for each window that a backfill replays.")],
    totals: Annotated[bool, option("One row for each consumer, over its partitions and shards.")],
    sort: Annotated[
        str, option("Sort by topic, or by most events or seconds.", type=click.Choice([*_ORDERS]), default="topic")
    ],
    watch: Annotated[bool, option("Refresh it until Ctrl-C.")],
    interval: Annotated[
        float, option("How often --watch refreshes.", type=Seconds(0.1, 86_400), default=2.0, metavar="SECONDS")
    ],
    form: Annotated[
        str | None, option("How it is printed  [default: table].", "--format", type=click.Choice(_FORMATS))
    ],
    as_json: AsJson,
) -> None:
    """Show how far the consumers of TOPIC, or of all topics, are behind.

    Columns: events counts the events that are not consumed yet; buffered counts the part of them that is not
    transferred yet; seconds is the age of the oldest event; offset is the last consumed event, end is the newest event,
    and why is the cause. With --totals, partitions counts the partitions that are behind. With --watch on a terminal,
    trend shows the events of the last refreshes. A narrow terminal leaves out offset, end and buffered.

    Subscriptions of the event store that are behind stand in a table below, and queues with messages in another table,
    with at most 10,000 counted in each state: `eventsql store subscriptions` and `eventsql queue list` have all, also
    as JSON.

    --json is short for --format json, and --watch then prints a line for each refresh. --format csv prints a header and
    the columns of the JSON.
    """

    def rows() -> list[Any]:
        found = _found(platform.lag(topic), topic, consumer, backfills=backfills)
        unsorted: list[Any] = [*_totals(found)] if totals else [*found]
        shown = sorted(unsorted, key=_ORDERS[sort])
        trend.add(shown)
        return shown

    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json contradicts --format {form}")
    if not watch:
        leave_out("is for --watch", "interval")
    printed = "json" if as_json else form or "table"
    trend = _Trend(totals=totals)
    with context.platform() as platform:
        if not watch:
            _show(context, rows(), printed, totals=totals)
            if topic is None and consumer is None and printed == "table":
                shards = [shard for shard in platform.members() if shard.down is None]
                _show_subscriptions(shards)
                _show_queues(shards)
        elif printed != "table" or not stdout_is_terminal():
            for refresh, shown in enumerate(_refreshes(rows, interval)):
                _show(context, shown, printed, totals=totals, refresh=refresh)
        else:
            with lazy.Live(console=lazy.Console(), auto_refresh=False) as live:
                for shown in _refreshes(rows, interval):
                    live.update(trend.table(shown), refresh=True)


def _found(every: list[ConsumerLag], topic: str | None, consumer: str | None, *, backfills: bool) -> list[ConsumerLag]:
    """The lag of one consumer, or of all. Raises `ConsumerNotFoundError`."""
    if consumer is None:
        return every if backfills else without_backfills(every)
    found = [lag for lag in every if consumer == lag.consumer]
    if not found:
        raise ConsumerNotFoundError(
            f"there is no consumer {consumer!r}{f' of topic {topic!r}' if topic else ''}: "
            "look its name up with `eventsql consumer list`"
        )
    return found


def _refreshes(rows: Callable[[], list[Any]], interval: float) -> Iterator[list[Any]]:
    """The rows again and again. If a database that has answered before is away, waits for it; one line says so."""
    answered, waiting = False, False
    while True:
        try:
            shown = rows()
        except DatabaseUnavailableError as error:
            if not answered:
                raise
            if not waiting:
                complain(f"{error.message}; waiting for it")
            waiting = True
        else:
            answered, waiting = True, False
            yield shown
        time.sleep(interval)


@dataclass(frozen=True, slots=True)
class ConsumerTotal:
    """The lag of a consumer over its partitions and shards. `behind` are the partitions with events to consume."""

    topic: str
    consumer: str
    partitions: int
    behind: int
    events: int
    seconds: float
    buffered: int
    causes: str


def _totals(lags: list[ConsumerLag]) -> list[ConsumerTotal]:
    groups: dict[tuple[str, str], list[ConsumerLag]] = {}
    for each in lags:
        groups.setdefault((each.topic, each.consumer), []).append(each)
    return [
        ConsumerTotal(
            topic, consumer, len(group),
            behind=sum(1 for each in group if each.events),
            events=sum(each.events for each in group),
            seconds=max(each.seconds for each in group),
            buffered=sum(each.buffered for each in group),
            causes=", ".join(sorted({str(each.cause) for each in group if each.cause is not LagCause.NONE})),
        )
        for (topic, consumer), group in groups.items()
    ]  # fmt: skip


_TOTAL: Final[Columns] = {
    **same("topic", "consumer"), "partitions": lambda each: f"{each.behind} of {each.partitions}",
    **same("events", "seconds", "buffered"), "why": lambda each: each.causes or None,
}  # fmt: skip


class _Trend:
    """The events of each row at the last refreshes."""

    def __init__(self, *, totals: bool) -> None:
        self._columns = _TOTAL if totals else _LAG
        self._events: dict[object, deque[int]] = {}

    def add(self, rows: list[Any]) -> None:
        for row in rows:
            self._events.setdefault(_row(row), deque(maxlen=SAMPLES)).append(row.events)

    def table(self, rows: list[Any]) -> Listing:
        columns: Columns = {**self._columns, "trend": lambda row: sparkline(self._events[_row(row)])}
        return table_of(rows, columns, spare=_SPARE)


def _row(each: Any) -> object:
    return each.topic, each.consumer, getattr(each, "partition", None), getattr(each, "shard", None)


def sparkline(numbers: Collection[float]) -> str:
    """Numbers as bars between 0 and the largest, as wide as `SAMPLES` of them: a column keeps its width."""
    most = max(numbers, default=0) or 1
    return "".join(_BARS[round(number / most * (len(_BARS) - 1))] for number in numbers).rjust(SAMPLES)


def _show(context: CliContext, rows: list[Any], form: str, *, totals: bool, refresh: int | None = None) -> None:
    """Print the rows; `refresh` counts the refreshes of --watch from 0."""
    if form == "table":
        show_items(rows, _TOTAL if totals else _LAG, spare=_SPARE)
        return
    columns: Columns = {**_TOTAL, **same("partitions", "behind")} if totals else _OBJECT
    objects = [{**({} if totals else context.on_shard(each.shard)), **picked(each, columns)} for each in rows]
    if form == "json":
        write_json(objects, indent=2 if refresh is None else None)
    else:
        sharded = any("shard" in each for each in objects)
        write_csv(objects, [*(["shard"] if sharded else []), *columns], header=not refresh)


def _show_subscriptions(shards: Sequence[Shard]) -> None:
    """The subscriptions of the event stores that are behind, and why."""
    behind: list[tuple[Shard, object]] = []
    for shard in shards:
        try:
            with shard.database.connection() as connection:
                found = lazy.SubscriptionLagReader(shard.database).read(connection)
        except PermissionDeniedError:
            # Roles have no rights on the event store unless they were given some.
            continue
        except RestoredStoreError as error:
            say(error.message)
            continue
        behind += [(shard, each) for each in found if each.waiting or each.held_back or each.dead_letters]
    _show_by_shard(behind, SUBSCRIPTION_COLUMNS)


def _show_queues(shards: Sequence[Shard]) -> None:
    """The queues that have messages or dead letters."""
    lags = [(shard, each) for shard in shards for each in lazy.queue_lags(shard.database)]
    waiting = [(shard, each) for shard, each in lags if each.depth or each.dead]
    _show_by_shard(waiting, {**same("queue"), **QUEUE_COLUMNS})


def _show_by_shard(found: Sequence[tuple[Shard, object]], columns: Columns) -> None:
    """A table with a row for each object. The second column is its shard, if there are several."""
    if found:
        first, *rest = columns
        rows = [{**picked(each, columns), "shard": shard.name} for shard, each in found]
        show_items(rows, same(first, "shard", *rest))


QUEUE_COLUMNS: Final[Columns] = {
    **same("visible"), "in flight": "in_flight", **same("delayed", "blocked", "dead"), "waiting (s)": "seconds",
}  # fmt: skip
"""The columns of a queue's messages."""


SUBSCRIPTION_COLUMNS: Final[Columns] = {
    "subscription": "name", **same("waiting"), "held back": "held_back", **same("seconds"),
    "given up": "dead_letters", "why": "why",
}  # fmt: skip
"""The columns of a subscription's changes."""


def _why(lag: ConsumerLag) -> str | None:
    match lag.cause:
        case LagCause.NONE:
            return None
        case LagCause.WAITING | LagCause.TRANSFER:
            return lag.cause.value
        case _:
            return f"{lag.cause.value}, {lag.detail}"


def _known(attribute: str) -> Callable[[ConsumerLag], object]:
    """A number of a partition; None if its shard is unreachable."""
    return lambda lag: None if lag.cause is LagCause.UNREACHABLE else getattr(lag, attribute)


_NUMBERS: Final[Columns] = {
    "events": _known("events"), "seconds": "seconds", "offset": _known("last_event_id"), "end": _known("end"),
    "buffered": _known("buffered"),
}  # fmt: skip

_OBJECT: Final[Columns] = {**same("topic", "consumer", "partition"), **_NUMBERS, **same("cause", "detail")}

_LAG: Final[Columns] = {
    **same("topic", "consumer", "shard"), "partition": partition_of, **_NUMBERS, "why": _why
}  # fmt: skip


def lag_table(lags: list[ConsumerLag]) -> Listing:
    """A table of the lag for people, with a row for each consumer partition."""
    return table_of(lags, _LAG, spare=_SPARE)


def live_lag(console: Console) -> Live:
    """A screen for tables of the lag. It writes nothing to a file: rich would write the last table, unterminated."""
    return lazy.Live(console=console, refresh_per_second=2, transient=not console.is_terminal)
