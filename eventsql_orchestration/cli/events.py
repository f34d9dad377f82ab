"""`eventsql consume` and `eventsql tail`: events as JSON lines, with and without committing offsets."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Annotated, Final

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import EVENT_FORMATS, EventWriter, say, write_events
from eventsql_orchestration.cli.parameters import (
    PATTERN,
    PLACES,
    ConsumerName,
    Follow,
    MaxEvents,
    Partition,
    TopicName,
    command,
    option,
)
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, ValidationError
from eventsql_orchestration.model import Event, check_partition
from eventsql_orchestration.topics.positions import AtOffset, Earliest, Latest, Place
from eventsql_orchestration.validation import counted

if TYPE_CHECKING:
    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.database import Connection
    from eventsql_orchestration.shards.shard import Shard

_BATCH: Final = 1_000

_FOLLOW_DELAY: Final = 0.3
"""Seconds between two reads of a log without new events. A notification ends the wait."""

_LOCKED_SECONDS: Final = 2.0
"""Seconds that another consumption may keep the partition before `consume` gives up. Its batches take less."""

_BUFFERED_SECONDS: Final = 5.0
"""Seconds that events stay in the buffer before --follow says so. A transfer moves them in less."""

_NOT_MOVED: Final = "events are not transferred yet: `eventsql transfer` moves them"

_STOPPED: Final = frozenset(
    {LagCause.PAUSED, LagCause.BLOCKED, LagCause.LEASED, LagCause.HELD_BACK, LagCause.UNREACHABLE}
)


_START: Final = (
    f"Where to begin: {PLACES}. From a time, it begins with the first event that entered the log then or later  "
    "[default: earliest, with --follow latest]."
)


@command()
def tail(
    context: CliContext,
    *,
    topic: TopicName,
    start: Annotated[Place | None, option(_START, "--from")],
    max_events: MaxEvents,
    follow: Follow,
    partition: Partition,
    key: Annotated[str | None, option("Only events with this key.", metavar="KEY")],
    grep: Annotated[
        re.Pattern[bytes] | None, option("Only events whose value matches this regular expression.", type=PATTERN)
    ],
    form: Annotated[
        str, option("How an event is printed.", "--format", type=click.Choice([*EVENT_FORMATS]), default="json")
    ],
) -> None:
    """Print the events of TOPIC as JSON lines. Nothing is committed.

    A value that is not UTF-8 text is printed as base64, with "encoding": "base64". --format csv prints a header and
    the columns of the JSON; --format value prints each value as it is, and a line feed. --limit counts the events
    that are printed.
    """
    with context.platform() as platform:
        found = platform.registry.topic(topic)
        if partition is not None:
            check_partition(topic, partition, max(shard.layouts.most_partitions(found) for shard in platform.members()))
        if start is None:
            start = Latest() if follow else Earliest()
        if len(platform.shards) > 1 and isinstance(start, AtOffset):
            raise ValidationError("each shard has its own offsets: choose a shard with --shard NAME")
        after = {shard: _before(shard, topic, start) for shard in platform.members()}
        writer = EventWriter(form, sharded=any(context.shard or shard.name for shard in after))
        tail = _Tail(writer, topic, partition, key, grep, inf if max_events is None else max_events)
        wake = _woken_by(platform, topic, follow=follow)
        look_at, said = 0.0, False
        while tail.left > 0:
            found_any = False
            for shard, offset in after.items():
                if (last := tail.print_next(shard, offset, context.shard or shard.name)) is not None:
                    after[shard], found_any = last, True
            if found_any:
                said = False
                continue
            if not follow:
                _tell_of_buffered(sum(shard.buffered().get(topic, 0) for shard in after))
                return
            if not said and time.monotonic() >= look_at:
                look_at = time.monotonic() + _BUFFERED_SECONDS
                if said := any(shard.longest_buffered(topic) > _BUFFERED_SECONDS for shard in after):
                    say(_NOT_MOVED)
            wake.wait(_FOLLOW_DELAY)
            wake.clear()


@dataclass(slots=True)
class _Tail:
    """Prints the chosen events of a topic. `left` is how many more it prints."""

    _writer: EventWriter
    _topic: str
    _partition: int | None
    _key: str | None
    _grep: re.Pattern[bytes] | None
    left: float

    def print_next(self, shard: Shard, after: int, label: str | None) -> int | None:
        """Print the next events of a shard; gives the offset of the last event that was read, None without events."""
        limit = int(min(_BATCH, self.left))
        if not limit:
            return None
        chooses = self._key is not None or self._grep is not None
        batches = shard.reader.stream(
            self._topic, after=after, partition=self._partition, batch=_BATCH if chooses else limit
        )
        if not (events := next(batches, [])):
            return None
        matching = [event for event in events if self._matches(event)][:limit]
        self._writer.write(matching, shard=label)
        self.left -= len(matching)
        return events[-1].id

    def _matches(self, event: Event) -> bool:
        return self._key in (None, event.key) and (
            self._grep is None or self._grep.search(event.value or b"") is not None
        )


def _woken_by(platform: EventSQL, topic: str, *, follow: bool) -> threading.Event:
    """An event that is set when a followed topic may have new events."""
    wake = threading.Event()
    if follow:
        for shard in platform.members():
            shard.listener.subscribe(lazy.LOG, topic, wake.set)
    return wake


def _tell_of_buffered(events: int) -> None:
    if events:
        say(f"{counted(events, 'event')} not transferred yet: `eventsql transfer --once` moves them")


def _before(shard: Shard, topic: str, start: Place) -> int:
    """The offset after which to read. With an offset beyond the end of the log, --follow waits for that event."""
    if isinstance(start, AtOffset):
        return max(0, start.offset - 1)
    database = shard.database
    with database.connection() as connection:
        return lazy.offset_of(connection, database.schema, topic, start)


@command()
def consume(
    context: CliContext,
    *,
    topic: TopicName,
    consumer: ConsumerName,
    max_events: MaxEvents,
    follow: Follow,
    partition: Partition,
) -> None:
    """Print the events of TOPIC that CONSUMER has not consumed yet, as JSON lines, and commit its offsets.

    An offset is committed after its event was written: an event may be printed again if the command is killed. The
    command fails if events wait that the consumer cannot get, for example because it is paused. The output has the
    format of `eventsql tail`. `eventsql seek` moves the consumer to another place.
    """
    with context.platform() as platform:
        states = platform.registry.consumer(topic, consumer)
        partitions = lazy.choose_partitions([state for state in states if state.shard == states[0].shard], partition)
        printer = _Printer(platform, context.shard, topic, consumer, partitions, partition is None)
        printer.run(max_events, follow=follow)


@dataclass(slots=True)
class _Printer:
    """Consumes by printing. `shard` is the chosen shard, and `everything` means all partitions."""

    _platform: EventSQL
    _shard: str | None
    _topic: str
    _consumer: str
    _partitions: list[int]
    _everything: bool
    _said: list[str] = field(default_factory=list)

    def run(self, max_events: int | None, *, follow: bool) -> None:
        left = inf if max_events is None else max_events
        locked_since: float | None = None
        wake = _woken_by(self._platform, self._topic, follow=follow)
        while left > 0:
            consumed = self._pass(left)
            left -= consumed
            if consumed:
                locked_since = None
                continue
            waiting = self._waiting()
            if follow:
                self._say_once(waiting)
            elif any(each.cause in (LagCause.WAITING, LagCause.HELD_BACK) for each in waiting):
                # The events came a moment ago, or another consumption has the partition until its batch ends.
                locked_since = locked_since or time.monotonic()
                if time.monotonic() - locked_since > _LOCKED_SECONDS:
                    if all(each.cause is not LagCause.WAITING for each in waiting):
                        self._end(waiting)
                    raise EventSQLError(
                        f"another consumption of consumer {self._consumer!r} has its partition: end it, and try again"
                    )
            else:
                self._end(waiting)
                return
            wake.wait(_FOLLOW_DELAY)
            wake.clear()

    def _pass(self, left: float) -> int:
        if self._everything and left == inf:
            return self._consume_once(None, _BATCH)
        consumed = 0
        for partition in self._partitions:
            if limit := int(min(_BATCH, left - consumed)):
                consumed += self._consume_once(partition, limit)
        return consumed

    def _consume_once(self, partition: int | None, limit: int) -> int:
        consumed = 0
        for shard in self._platform.members():
            show = partial(_print, self._shard or shard.name)
            try:
                consumed += shard.consumers.consume_once(
                    self._topic, self._consumer, show, partition=partition, max_events=limit
                )
            except DatabaseUnavailableError:
                if shard.name is None:
                    raise
                # The lag names the shard.
            if consumed:
                break
        return consumed

    def _waiting(self) -> list[ConsumerLag]:
        return [
            lag
            for lag in self._platform.lag(self._topic)
            if lag.consumer == self._consumer
            and lag.partition in self._partitions
            and (lag.events or lag.cause is LagCause.UNREACHABLE)
        ]

    def _end(self, waiting: list[ConsumerLag]) -> None:
        refused = [_explain(lag) for lag in waiting if lag.cause is not LagCause.TRANSFER]
        if refused:
            raise EventSQLError("; ".join(refused))
        _tell_of_buffered(sum(lag.buffered for lag in waiting))

    def _say_once(self, waiting: list[ConsumerLag]) -> None:
        explained = [_explain(lag, count=False) for lag in waiting if lag.cause in _STOPPED]
        if any(lag.cause is LagCause.TRANSFER and lag.seconds > _BUFFERED_SECONDS for lag in waiting):
            explained.append(_NOT_MOVED)
        for line in explained:
            if line not in self._said:
                say(line)
        self._said = explained


def _print(shard: str | None, events: Sequence[Event], _connection: Connection) -> None:
    write_events(events, shard=shard)


def _explain(lag: ConsumerLag, *, count: bool = True) -> str:
    partition = "" if lag.partition < 0 else f" partition {lag.partition}"
    partition += "" if lag.shard is None else f" on shard {lag.shard!r}"
    what = f"{counted(lag.events, 'event')} not consumed: " if count else ""
    return f"{what}consumer {lag.consumer!r} of topic {lag.topic!r}{partition} is {lag.cause.value}, {lag.detail}"
