"""The lag of a consumer's asset: numbers, which Dagster plots over time, and the cause in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.consuming.lag import ConsumerLag, LagCause
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition
from eventsql_orchestration.errors import DatabaseBusyError, TopicNotFoundError
from eventsql_orchestration.orchestration.owners import run_of_owner
from eventsql_orchestration.orchestration.shards import place, where
from eventsql_orchestration.validation import counted

TRANSFER_STALLED: Final = 120.0
"""Seconds in the buffer after which an event shows that the transfer is stalled. The transfer's schedule ticks every
minute."""

SHOWN_PARTITIONS: Final = 30
"""Maximum number of partitions in an observation, which shows the largest lags. 300 partitions would take up to 173
kB."""

LAG_EVENTS: Final = "Lag events"
LAG_SECONDS: Final = "Lag seconds"
"""Dagster's UI sorts the plots of an asset by name, capital letters first, so these two come first."""

CAUSE: Final = "cause"
BEHIND: Final = "partitions behind"
CONSUMED_BY: Final = "consumed by"


@dataclass(frozen=True, slots=True)
class AssetLag:
    """The lag of a whole consumer.

    `moved` has the partitions (`place_of`) whose offset has grown since the previous tick. `stopped` has the partitions
    whose sensor is switched off, with the sensor's name. `transfer_off` is the location's schedule for the transfer if
    it is switched off. `unknown` says why the lag is not known; there are no partitions then.
    """

    partitions: tuple[ConsumerLag, ...]
    moved: frozenset[str] = frozenset()
    stopped: Mapping[int, str] = field(default_factory=dict)
    transfer_off: str | None = None
    unknown: str | None = None

    @property
    def registered(self) -> bool:
        """Whether the consumer is registered, as far as is known."""
        return bool(self.partitions) or self.unknown is not None

    @property
    def events(self) -> int:
        return sum(lag.events for lag in self.partitions)

    @property
    def seconds(self) -> float:
        return max((lag.seconds for lag in self.partitions), default=0.0)

    @property
    def causes(self) -> tuple[tuple[str, str], ...]:
        """Each partition that is behind, with its cause in a word or two."""
        return tuple((place_of(lag), self._why(lag)[0]) for lag in self.partitions if lag.cause != LagCause.NONE)

    @property
    def unreachable(self) -> frozenset[str]:
        """The shards that are down, on which the lag is unknown."""
        return frozenset(str(lag.shard) for lag in self.partitions if lag.cause == LagCause.UNREACHABLE)

    def metadata(self) -> dict[str, Any]:
        """Numbers for the consumer and for each partition, the cause in words, and links to runs that consume.

        If there are more than `SHOWN_PARTITIONS` partitions, only the partitions with the largest lag have their own
        numbers. An unknown lag has no numbers.
        """
        if self.unknown is not None:
            return {CAUSE: self.unknown}
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

    def numbers(self) -> dict[str, int | float]:
        """The numbers of `metadata`. Dagster's UI breaks a plot at each event of the asset without the number."""
        return {name: value for name, value in self.metadata().items() if isinstance(value, int | float)}

    def cause(self) -> str:
        """The causes of the lag, for each partition that is shown, or why the lag is unknown."""
        if self.unknown is not None:
            return self.unknown
        sentences = [
            f"{_where(lag)} {': '.join(self._why(lag))}".lstrip() for lag in self._worst() if lag.cause != LagCause.NONE
        ]
        if sentences and (more := len(self.causes) - len(sentences)):
            sentences.append(f"and {counted(more, 'more partition')}")
        return "; ".join(sentences) or str(LagCause.NONE)

    def _worst(self) -> tuple[ConsumerLag, ...]:
        """The partitions that are shown, in their order."""
        if len(self.partitions) <= SHOWN_PARTITIONS:
            return self.partitions
        worst = sorted(self.partitions, key=lambda lag: (lag.cause == LagCause.NONE, -lag.events, -lag.seconds))
        return tuple(sorted(worst[:SHOWN_PARTITIONS], key=lambda lag: (lag.shard or "", lag.partition)))

    def _why(self, lag: ConsumerLag) -> tuple[str, str]:
        """The cause in a word or two, and the rest of the sentence."""
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
                off = f"schedule {self.transfer_off} is switched off; " if self.transfer_off else ""
                waiting = f"{counted(lag.buffered, 'event')} in the buffer, {lag.detail}"
                return ("transfer stalled" if stalled else "transfer"), off + waiting
            case _:
                return self._why_waiting(lag, slow=slow)

    def _why_waiting(self, lag: ConsumerLag, *, slow: bool) -> tuple[str, str]:
        if (sensor := self.stopped.get(lag.partition)) is not None:
            return "stopped", f"sensor {sensor} is switched off"
        return ("slow", "it is consumed, more slowly than events come") if slow else (str(lag.cause), lag.detail)


def place_of(lag: ConsumerLag) -> str:
    """The key of a partition among all partitions of a consumer."""
    return place(lag.shard, lag.partition)


def _where(lag: ConsumerLag) -> str:
    return f"[{found}]" if (found := where(lag.shard, lag.partition)) else ""


def _run_of(lag: ConsumerLag) -> str | None:
    return run_of_owner(lag.detail.removeprefix("by ")) if lag.cause == LagCause.LEASED else None


def read_lags(platform: EventSQL, consumers: Iterable[ConsumerDefinition]) -> dict[dg.AssetKey, AssetLag]:
    """The present lag of each consumer, by its asset. Consumers of topics that do not exist are left out.

    The lag is `unknown` if the server did not count the waiting events of a topic in time.
    """
    by_topic: dict[str, list[ConsumerDefinition]] = {}
    for consumer in consumers:
        by_topic.setdefault(consumer.topic.name, []).append(consumer)
    found: dict[dg.AssetKey, AssetLag] = {}
    for topic, readers in by_topic.items():
        try:
            lags = platform.lag(topic)
        except TopicNotFoundError:
            continue
        except DatabaseBusyError as error:
            found |= {each.key: AssetLag((), unknown=error.message) for each in readers}
            continue
        for each in readers:
            found[each.key] = AssetLag(tuple(lag for lag in lags if lag.consumer == each.consumer.name))
    return found
