"""How far a consumer's asset is behind and why: numbers, which Dagster plots over time, and words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.definition import ConsumerDefinition
from eventsql_orchestration.dagster.draining import run_of_owner
from eventsql_orchestration.dagster.shards import place, where
from eventsql_orchestration.errors import TopicNotFoundError
from eventsql_orchestration.log.lag import ConsumerLag, LagCause

TRANSFER_STALLED: Final = 120.0
"""Seconds that an event may lie in the buffer before the transfer counts as stalled: its schedule starts a run each
minute, and one takes over from the other."""

SHOWN_PARTITIONS: Final = 30
"""How many partitions an observation tells apart at most, the furthest behind: one of 300 would have up to 173 kB."""

LAG_EVENTS: Final = "lag events"
LAG_SECONDS: Final = "lag seconds"
CAUSE: Final = "cause"
BEHIND: Final = "partitions behind"
CONSUMED_BY: Final = "consumed by"


@dataclass(frozen=True, slots=True)
class AssetLag:
    """The lag of a whole consumer.

    `moved` are the places (`place_of`) whose offset has grown since they were looked at before; `stopped` has, by
    partition, the name of a sensor that somebody switched off.
    """

    partitions: tuple[ConsumerLag, ...]
    moved: frozenset[str] = frozenset()
    stopped: Mapping[int, str] = field(default_factory=dict)

    @property
    def events(self) -> int:
        return sum(lag.events for lag in self.partitions)

    @property
    def seconds(self) -> float:
        return max((lag.seconds for lag in self.partitions), default=0.0)

    @property
    def causes(self) -> tuple[tuple[str, str], ...]:
        """Each partition that is behind, with one word for why."""
        return tuple((place_of(lag), self._why(lag)[0]) for lag in self.partitions if lag.cause != LagCause.NONE)

    @property
    def unreachable(self) -> frozenset[str]:
        """The shards that are down: how far the consumer is behind there, nobody knows."""
        return frozenset(str(lag.shard) for lag in self.partitions if lag.cause == LagCause.UNREACHABLE)

    def metadata(self) -> dict[str, Any]:
        """Numbers for the whole and for each partition, the cause in words, and a link to a run that consumes.

        Of more than `SHOWN_PARTITIONS` only those that are the furthest behind are told apart.
        """
        metadata: dict[str, Any] = {
            LAG_EVENTS: self.events,
            LAG_SECONDS: round(self.seconds, 3),
            BEHIND: len(self.causes),
            CAUSE: self.cause(),
        }
        shown = self._worst()
        for lag in shown:
            if (one := _where(lag)) and lag.cause != LagCause.UNREACHABLE:
                metadata[f"{LAG_EVENTS} {one}"] = lag.events
                metadata[f"{LAG_SECONDS} {one}"] = round(lag.seconds, 3)
        for lag in shown:
            if (run_id := _run_of(lag)) is not None:
                metadata[f"{CONSUMED_BY} {_where(lag)}".rstrip()] = dg.MetadataValue.dagster_run(run_id)
        return metadata

    def cause(self) -> str:
        """Why the consumer is behind, for each partition that is told apart."""
        sentences = [
            f"{_where(lag)} {': '.join(self._why(lag))}".lstrip() for lag in self._worst() if lag.cause != LagCause.NONE
        ]
        if sentences and (more := len(self.causes) - len(sentences)):
            sentences.append(f"{more} more partitions are behind")
        return "; ".join(sentences) or str(LagCause.NONE)

    def _worst(self) -> tuple[ConsumerLag, ...]:
        """The partitions that are told apart, in their order."""
        if len(self.partitions) <= SHOWN_PARTITIONS:
            return self.partitions
        worst = sorted(self.partitions, key=lambda lag: (lag.cause == LagCause.NONE, -lag.events, -lag.seconds))
        return tuple(sorted(worst[:SHOWN_PARTITIONS], key=lambda lag: (lag.shard or "", lag.partition)))

    def _why(self, lag: ConsumerLag) -> tuple[str, str]:
        """A word for the cause, and the rest of the sentence."""
        slow = place_of(lag) in self.moved
        match lag.cause:
            case LagCause.PAUSED:
                return "stopped", f"it is paused; {lag.detail}"
            case LagCause.BLOCKED | LagCause.RETRYING | LagCause.HELD_BACK | LagCause.UNREACHABLE:
                return str(lag.cause), lag.detail
            case LagCause.LEASED:
                return ("slow" if slow else "leased"), lag.detail + (", and moving" if slow else "")
            case LagCause.TRANSFER:
                stalled = lag.seconds > TRANSFER_STALLED
                return ("transfer stalled" if stalled else "transfer"), f"{lag.buffered} events are {lag.detail}"
            case _:
                return self._why_waiting(lag, slow=slow)

    def _why_waiting(self, lag: ConsumerLag, *, slow: bool) -> tuple[str, str]:
        if (sensor := self.stopped.get(lag.partition)) is not None:
            return "stopped", f"sensor {sensor} is switched off"
        return ("slow", "it is consumed, later than events come") if slow else (str(lag.cause), lag.detail)


def place_of(lag: ConsumerLag) -> str:
    """A partition among all of a consumer's, as a key."""
    return place(lag.shard, lag.partition)


def _where(lag: ConsumerLag) -> str:
    return f"[{found}]" if (found := where(lag.shard, lag.partition)) else ""


def _run_of(lag: ConsumerLag) -> str | None:
    return run_of_owner(lag.detail.removeprefix("by ")) if lag.cause == LagCause.LEASED else None


def read_lag(platform: EventSQL, consumer: ConsumerDefinition) -> AssetLag:
    """The lag of a consumer now. Raises `TopicNotFoundError`; a consumer that is not registered has no partitions."""
    lags = platform.lag(consumer.topic.name)
    return AssetLag(tuple(lag for lag in lags if lag.consumer == consumer.consumer.name))


def read_lags(platform: EventSQL, consumers: Iterable[ConsumerDefinition]) -> dict[dg.AssetKey, AssetLag]:
    """The lags of several consumers now, by their assets; one whose topic does not exist is left out."""
    found: dict[dg.AssetKey, AssetLag] = {}
    by_topic: dict[str, list[ConsumerLag] | None] = {}
    for consumer in consumers:
        topic = consumer.topic.name
        if topic not in by_topic:
            try:
                by_topic[topic] = platform.lag(topic)
            except TopicNotFoundError:
                by_topic[topic] = None
        lags = by_topic[topic]
        if lags is not None:
            found[consumer.key] = AssetLag(tuple(lag for lag in lags if lag.consumer == consumer.consumer.name))
    return found
