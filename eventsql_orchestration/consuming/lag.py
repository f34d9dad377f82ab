"""How far each consumer partition is behind, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.dead_letter_values import tried
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.database.rows import fetch_all, query_all
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.metrics import LogMetrics, Place
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.layouts import layouts, named
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import advised

__all__ = ["ConsumerLag", "LagCause", "LagReader"]

Ahead: TypeAlias = Callable[[str, str, int], tuple[Sequence[int], str]]
"""Takes topic, consumer, offset. Returns the partitions that have not reached the offset, and a sentence about them."""

Buffered: TypeAlias = dict[tuple[str, int], tuple[int, float]]
"""The number of buffered events, and seconds since the oldest came: by topic and partition, and by topic and -1 for all
partitions."""


class Remaining(NamedTuple):
    """The events of the log that a consumer partition has left, seconds since the first was published, and the newest
    offset of the partition.
    """

    events: int
    seconds: float
    end: int


@checked
class LagReader:
    """Reads lag, by a few statements per topic, and one for each long backlog; indexes serve all of them."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        self._logs = LogMetrics(database.schema)
        self._log = LogReader(database.schema)
        self._queries = Queries("log", database.schema)
        self._on_log = LogQueries("consumers", database.schema)

    def read(self, topic: str | None = None, consumer: str | None = None) -> list[ConsumerLag]:
        """The lag of every consumer partition of one topic or of all, by topic, consumer and partition.

        With `consumer`, only the partitions of consumers with this name.
        """
        states = [state for state in self._registry.consumers(topic) if consumer in (None, state.name)]
        buffered = self._buffered({state.topic for state in states})
        # Read once for all partitions of a consumer, and only if the layout of its topic changes.
        ahead = cache(self._ahead)
        lags: list[ConsumerLag] = []
        for name, of_topic in groupby(states, attrgetter("topic")):
            own = list(of_topic)
            left = self._remaining(name, {(state.partition, state.last_event_id) for state in own})
            lags += [self._lag(state, left[state.partition, state.last_event_id], buffered, ahead) for state in own]
        return lags

    def buffered(self) -> dict[str, int]:
        """The number of buffered events of each topic that has some."""
        found = self._buffered(topic.name for topic in self._registry.topics())
        return {topic: count for (topic, partition), (count, _) in found.items() if partition == NOT_PARTITIONED}

    def longest_buffered(self, topic: str) -> float:
        """Seconds since the oldest buffered event of a topic came; 0 without buffered events."""
        return self._buffered([topic]).get((topic, NOT_PARTITIONED), (0, 0.0))[1]

    def _buffered(self, topics: Iterable[str]) -> Buffered:
        rows = query_all(self._database, self._queries("buffered"), {"topics": sorted(topics)}, prepare=False)
        found: Buffered = {}
        for topic, partition, count, seconds in rows:
            for counted in {partition, NOT_PARTITIONED}:
                before, longest = found.get((topic, counted), (0, 0.0))
                found[topic, counted] = before + count, max(longest, seconds)
        return found

    def _remaining(self, topic: str, places: set[Place]) -> dict[Place, Remaining]:
        with self._database.connection() as connection:
            ends = self._logs.ends(connection, topic, {partition for partition, _ in places})
            waiting = self._logs.waiting(connection, topic, places, ends)
            found: dict[Place, Remaining] = {}
            for (partition, after), own in waiting.items():
                events = own.total
                if events is None:
                    # Planned for one partition, so that the server counts many events on several processors.
                    events = self._log.count(connection, topic, partition=partition, after=after)
                found[partition, after] = Remaining(events, own.seconds, ends[partition])
        return found

    def _ahead(self, topic: str, consumer: str, until: int) -> tuple[Sequence[int], str]:
        own = {"topic": topic, "consumer": consumer}
        with self._database.connection() as connection:
            rows = fetch_all(connection, self._on_log.on(connection, "behind", topic), own, prepare=False)
            known = layouts(connection, self._database.schema, topic)
        partitions = [partition for partition, _ in rows]
        ending = max((each.number for each in known if each.after < until), default=None)
        where = "" if ending is None else f", where layout {ending} of the topic ends"
        have = "has" if len(partitions) == 1 else "have"
        return partitions, f"until {named(partitions)} {have} come to offset {until}{where}"

    def _held_back(self, state: ConsumerState, ahead: Ahead) -> str | None:
        """Why a partition gets no events although events wait; None if it may get them."""
        if state.until is None:
            return None
        if state.until == HELD:
            return "until it has consumed the earlier events on the other shards, see `eventsql shard status`"
        partitions, detail = ahead(state.topic, state.name, state.until)
        # A consumer whose partitions all reached the end of the layout continues at the next look.
        return None if not partitions or state.partition in partitions else detail

    def _lag(self, state: ConsumerState, in_log: Remaining, buffered: Buffered, ahead: Ahead) -> ConsumerLag:
        not_moved, waited = buffered.get((state.topic, state.partition), (0, 0.0))
        cause, detail = cause_of(state, in_log.events, not_moved)
        if cause is LagCause.WAITING and (until := self._held_back(state, ahead)) is not None:
            cause, detail = LagCause.HELD_BACK, until
        return ConsumerLag(
            state.topic, state.name, state.partition,
            events=in_log.events + not_moved,
            seconds=max(in_log.seconds, waited),
            last_event_id=state.last_event_id,
            end=in_log.end,
            buffered=not_moved, cause=cause, detail=detail,
        )  # fmt: skip


def cause_of(state: ConsumerState, in_log: int, not_moved: int) -> tuple[LagCause, str]:
    """Why a consumer partition is behind, from its events in the log and in the buffer, and a sentence about it.

    The answer leaves out whether the partition is held back.
    """
    if not in_log and not not_moved:
        return LagCause.NONE, ""
    if state.paused:
        return LagCause.PAUSED, f"resume it with `{advised('consumer resume', state.topic, state.name)}`"
    if state.failing:
        return (LagCause.BLOCKED if state.spent else LagCause.RETRYING), tried(state)
    if state.leased:
        return LagCause.LEASED, f"by {state.lease_owner}"
    if not in_log:
        return LagCause.TRANSFER, "not transferred yet; `eventsql transfer` moves events"
    return LagCause.WAITING, "not consumed yet"
