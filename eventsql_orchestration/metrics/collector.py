"""`PlatformCollector`: the figures of a platform's databases as metrics of Prometheus."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.errors import EventSQLError, MissingExtraError
from eventsql_orchestration.metrics.counts import Highest, Totals
from eventsql_orchestration.metrics.figures import Figures, FiguresReader, PartitionFigures
from eventsql_orchestration.metrics.readings import Reading, Readings
from eventsql_orchestration.queue.lag import QueueLag
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.store.lag import SubscriptionLag
from eventsql_orchestration.validation import check_seconds

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError:
    raise MissingExtraError("metrics", "an endpoint for Prometheus") from None

INTERVAL: Final = 10.0
"""Seconds between two readings of a database. Prometheus scrapes every 15 to 60 s."""

PATIENCE: Final = 8.0
"""Seconds that a scrape waits for a reading. Prometheus gives a scrape 10 s."""

CAUSES: Final = tuple(cause for cause in LagCause if cause is not LagCause.UNREACHABLE)
"""A shard that is down has no consumers here, but `eventsql_up` 0."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """The figures of one reading, and the counters with it: by topic and identity, and by topic and consumer."""

    figures: Figures
    published: Mapping[Hashable, int]
    transferred: Mapping[Hashable, int]
    consumed: Mapping[Hashable, int]
    given_up: Mapping[Hashable, int]


class _Counters:
    """The counters of one database. A reading counts, and not a scrape: readings come one after the other."""

    def __init__(self) -> None:
        self._published, self._transferred = Highest(), Highest()
        self._consumed, self._given_up = Totals(), Totals()

    def counted(self, figures: Figures) -> _Counted:
        topics = {(each.topic, each.identity): each for each in figures.topics}
        parts = {((each.topic, each.consumer), each.partition): each for each in figures.partitions}
        return _Counted(
            figures,
            published=self._published.of({key: each.published for key, each in topics.items()}),
            transferred=self._transferred.of({key: each.transferred for key, each in topics.items()}),
            consumed=self._consumed.of({key: each.consumed for key, each in parts.items()}),
            given_up=self._given_up.of({key: each.given_up for key, each in parts.items()}),
        )


class _Families:
    """Metrics with their samples, in the order of their first sample. `shard` is the label of the next samples."""

    def __init__(self) -> None:
        self.shard = ""
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float,
        labels: dict[str, str],
    ) -> None:  # fmt: skip
        labels = {"shard": self.shard, **labels}
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(f"eventsql_{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)


class PlatformCollector(Collector):
    """Metrics of a platform's databases: rates, lag, buffer, claims, dead letters, retention,
    subscriptions of the event store, and queues.

    Register it once: `prometheus_client.REGISTRY.register(PlatformCollector(platform))`. A scrape reads each database
    at most every `interval` seconds, and rests for nine times as long as the last reading took, at most five minutes. A
    database that does not answer within eight seconds has `eventsql_up` 0 and no other metrics. With `partitions`, each
    consumer partition has its lag too. The platform may belong to a role that only reads.

    Raises `ValidationError` for an interval that is not a positive number of seconds.
    """

    def __init__(self, platform: EventSQL, *, partitions: bool = False, interval: float = INTERVAL) -> None:
        self._platform = platform
        self._by_partition = partitions
        self._interval = check_seconds("interval", interval, zero=False)
        self._readings: dict[Shard, Readings[_Counted]] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registration does not read the database."""
        return ()

    def collect(self) -> Iterable[Metric]:
        readings = {shard: self._readings_of(shard) for shard in self._platform.shards}
        for each in readings.values():
            each.begin()
        deadline = time.monotonic() + PATIENCE
        families = _Families()
        for shard, each in readings.items():
            reading = each.latest(deadline - time.monotonic())
            # The only database has no label.
            families.shard = shard.label if len(readings) > 1 else ""
            self._add(families, reading)
        return tuple(families)

    def _readings_of(self, shard: Shard) -> Readings[_Counted]:
        if shard in self._readings:
            return self._readings[shard]
        reader, counters = FiguresReader(shard.database), _Counters()

        def read() -> _Counted:
            if shard.name is None and len(self._platform.shards) > 1:
                # Gives the shard its name. If this fails, the database still has its figures, or is down.
                with suppress(EventSQLError):
                    self._platform.opened()
            return counters.counted(reader.read())

        return self._readings.setdefault(shard, Readings(str(shard.database), read, interval=self._interval))

    def _add(self, families: _Families, reading: Reading[_Counted] | None) -> None:
        counted = None if reading is None else reading.figures
        families.gauge("up", "Whether the database could be read (1) or not (0).", 0 if counted is None else 1)
        if reading is None or counted is None:
            return

        figures = counted.figures
        families.gauge("reading_seconds", "Seconds that the last reading of these metrics took.", reading.seconds)
        _add_topics(families, counted)
        _add_consumers(families, counted)
        for claim in figures.claims:
            own = {"topic": claim.topic, "consumer": claim.consumer}
            families.gauge("claims_live", "Claims that are neither committed nor released.", claim.live, **own)
            families.gauge("claims_expired", "Live claims whose lease is over.", claim.expired, **own)
            families.gauge("claim_oldest_seconds", "Age of the oldest live claim.", claim.oldest_seconds, **own)
        for lag in figures.subscriptions:
            _add_subscription(families, lag)
        for queue in figures.queues:
            _add_queue(families, queue)
        if self._by_partition:
            for each in figures.partitions:
                own = {"topic": each.topic, "consumer": each.consumer, "partition": str(each.partition)}
                families.gauge("partition_lag_events", "Events that the partition has left.", each.events, **own)
                families.gauge("partition_lag_seconds", "Age of the partition's oldest event.", each.seconds, **own)


def _add_topics(families: _Families, counted: _Counted) -> None:
    for each in counted.figures.topics:
        own, key = {"topic": each.topic}, (each.topic, each.identity)
        published, transferred = counted.published[key], counted.transferred[key]
        text = "The newest offset of the log and the buffered events; an offset that was skipped counts as an event."
        families.counter("events_published", text, published, **own)
        text = "The newest offset of the log; an offset that was skipped counts as an event."
        families.counter("events_transferred", text, transferred, **own)
        families.gauge("buffer_events", "Events that wait for the transfer.", each.buffered, **own)
        families.gauge("buffer_seconds", "Age of the oldest event in the buffer.", each.buffered_seconds, **own)
        families.gauge("topic_partitions", "Partitions of the topic; -1 without partitions.", each.partitions, **own)
        families.gauge("topic_bytes", "Bytes of the log with its indexes.", each.bytes, **own)
        families.gauge("topic_oldest_seconds", "Age of the oldest event in the log.", each.oldest_seconds or 0.0, **own)
        if each.retention is not None and each.retention.seconds is not None:
            families.gauge("retention_seconds", "Age that retention allows.", each.retention.seconds, **own)
        if each.retention is not None and each.retention.bytes is not None:
            families.gauge("retention_bytes", "Bytes that retention allows.", each.retention.bytes, **own)
        if each.open_letters is not None:
            text = "Open dead letters of the topic: not redriven, dismissed or erased; of the newest 10,000."
            families.gauge("dead_letters_open", text, each.open_letters, **own)


def _add_consumers(families: _Families, counted: _Counted) -> None:
    parts: dict[tuple[str, str], list[PartitionFigures]] = defaultdict(list)
    for each in counted.figures.partitions:
        parts[each.topic, each.consumer].append(each)

    for key, own_parts in parts.items():
        own = {"topic": key[0], "consumer": key[1]}
        consumed, given_up = counted.consumed[key], counted.given_up[key]
        families.counter("events_consumed", "Events handled, and counted again after a seek.", consumed, **own)
        families.counter("dead_letters", "Events given up as dead letters.", given_up, **own)
        slowest = max(each.seconds for each in own_parts)
        families.gauge("consumer_lag_seconds", "Age of the oldest event that is not consumed.", slowest, **own)
        for cause in CAUSES:
            _add_cause(families, cause, [each for each in own_parts if each.cause is cause], own)


def _add_subscription(families: _Families, lag: SubscriptionLag) -> None:
    own = {"subscription": lag.name}
    held = 0.0 if lag.held_back_by is None else lag.held_back_by.seconds
    families.counter("subscription_changes_handled", "Changes that the subscription has handled.", lag.handled, **own)
    families.gauge("subscription_lag_changes", "Changes that it can handle now, at most 10,000.", lag.waiting, **own)
    families.gauge("subscription_lag_seconds", "Age of the oldest change that is not handled.", lag.seconds, **own)
    families.gauge("subscription_held_back", "Changes that wait for an open transaction.", lag.held_back, **own)
    if held is not None:
        families.gauge("subscription_held_back_seconds", "Age of that transaction.", held, **own)
    families.gauge("subscription_attempts", "Failed attempts at the next change.", lag.attempts, **own)
    families.gauge("subscription_dead_letters", "Changes that were given up and not redriven.", lag.dead_letters, **own)


def _add_queue(families: _Families, lag: QueueLag) -> None:
    own = {"queue": lag.queue}
    states = {"visible": lag.visible, "in_flight": lag.in_flight, "delayed": lag.delayed, "blocked": lag.blocked}
    for state, messages in states.items():
        families.gauge("queue_messages", "Messages in this state, at most 10,000.", messages, **own, state=state)
    # Messages in a queue of dead letters wait for a person.
    seconds = 0.0 if lag.for_dead_letters else lag.seconds
    families.gauge("queue_waiting_seconds", "Time for which a visible message has waited longest.", seconds, **own)
    families.gauge("queue_dead_letters", "Messages given up and not redriven, at most 10,000.", lag.dead, **own)


def _add_cause(families: _Families, cause: LagCause, parts: Sequence[PartitionFigures], own: dict[str, str]) -> None:
    labels = {**own, "cause": cause.value.replace(" ", "_")}
    families.gauge("consumer_partitions", "Partitions of the consumer in this state.", len(parts), **labels)
    # Without lag there is no cause to wait.
    if cause is not LagCause.NONE:
        events = sum(each.events for each in parts)
        families.gauge("consumer_lag_events", "Events that are not consumed, by the cause.", events, **labels)
