"""A round: what happened to every topic between two moments, and whether anything is missing, repeated or left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import dagster as dg

from eventsql_orchestration.dagster.metadata import INPUT_CONSUMER, INPUT_TOPIC, PUBLISHED_EVENTS, PUBLISHED_TOPIC
from eventsql_orchestration.dagster.tags import TOPIC_TAG
from eventsql_orchestration.platform import EventSQL


@dataclass(frozen=True, slots=True)
class Counts:
    """How many events each topic has, and how many each consumer has had, at one moment.

    `logged` and `buffered` are per topic; `consumed` and `lag` per (topic, consumer), over its partitions.
    """

    logged: Counter[str] = field(default_factory=Counter)
    buffered: Counter[str] = field(default_factory=Counter)
    consumed: Counter[tuple[str, str]] = field(default_factory=Counter)
    lag: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def take(cls, platform: EventSQL, topics: Iterable[str] | None = None) -> Counts:
        """Count now. `topics` limits it to those; all by default."""
        wanted = set(topics) if topics is not None else {topic.name for topic in platform.registry.topics()}
        counts = cls(buffered=Counter({t: n for t, n in platform.buffered().items() if t in wanted}))
        for topic in wanted:
            counts.logged[topic] = platform.reader.count(topic)
        for state in platform.registry.consumers():
            if state.topic in wanted:
                counts.consumed[state.topic, state.name] += state.consumed_events
        for lag in platform.lag():
            if lag.topic in wanted:
                counts.lag[lag.topic, lag.consumer] += lag.events
        return counts


@dataclass(frozen=True, slots=True)
class TopicRound:
    """What a round did to one topic; `consumed` is the sum over its `consumers`, `runs` are as of `runs_of_topics`."""

    topic: str
    published: int
    transferred: int
    consumed: int
    consumers: int
    runs: int
    lag: int
    faults: tuple[str, ...]


def published_by(instance: dg.DagsterInstance, runs: Iterable[dg.DagsterRun]) -> Counter[str]:
    """How many events the materializations of these runs say they published, per topic."""
    published: Counter[str] = Counter()
    for run in runs:
        for materialization in _materializations(instance, run):
            topic = materialization.metadata.get(PUBLISHED_TOPIC)
            events = materialization.metadata.get(PUBLISHED_EVENTS)
            if topic is not None and events is not None:
                published[str(topic.value)] += int(str(events.value))
    return published


def runs_of_topics(instance: dg.DagsterInstance, runs: Iterable[dg.DagsterRun]) -> Counter[str]:
    """How many of these runs each topic had: a run counts for the topic it was requested for, and for each it consumed.

    A shared run is requested for one topic, and takes what waits of the others.
    """
    counted: Counter[str] = Counter()
    for run in runs:
        topics = {run.tags[TOPIC_TAG]} if TOPIC_TAG in run.tags else set()
        for materialization in _materializations(instance, run):
            if INPUT_CONSUMER in materialization.metadata:
                topics.add(str(materialization.metadata[INPUT_TOPIC].value))
        counted.update(topics)
    return counted


def _materializations(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Iterator[dg.AssetMaterialization]:
    for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        yield entry.dagster_event.step_materialization_data.materialization  # type: ignore[union-attr]


def account(
    before: Counts,
    after: Counts,
    *,
    published: Counter[str],
    runs: Iterable[dg.DagsterRun],
    runs_of: Counter[str],
) -> list[TopicRound]:
    """Compare two moments, topic by topic, with what the runs between them say they published.

    `runs` are all of them, `runs_of` how many each topic had.

    A fault is an event that was published and is not in the log, one that is in the log and nobody published, one that
    a consumer has not had, and one that it has had twice. Where a run failed, events that nobody reports are none: a
    run may die between the commit of what it publishes and its report.
    """
    reported = all(run.status is not dg.DagsterRunStatus.FAILURE for run in runs)
    rounds = []
    for topic in sorted(after.logged):
        arrived = after.logged[topic] + after.buffered[topic] - before.logged[topic] - before.buffered[topic]
        transferred = after.logged[topic] - before.logged[topic]
        faults = []
        if arrived < published[topic]:
            faults.append(f"{published[topic] - arrived} published events are missing")
        if arrived > published[topic] and reported:
            faults.append(f"{arrived - published[topic]} events are there that no run of this round published")
        if after.buffered[topic]:
            faults.append(f"{after.buffered[topic]} events are left in the buffer")
        consumers = sorted(consumer for of, consumer in after.consumed if of == topic)
        consumed = lag = 0
        for consumer in consumers:
            key = (topic, consumer)
            # A consumer that is new has the whole topic before it.
            due = before.lag[key] if key in before.lag else before.logged[topic] + before.buffered[topic]
            expected = due + arrived
            had = after.consumed[key] - before.consumed[key]
            if had > expected:
                faults.append(f"consumer {consumer} had {had - expected} events twice")
            elif had < expected:
                faults.append(f"consumer {consumer} has not had {expected - had} events")
            consumed += had
            lag += after.lag[key]
        rounds.append(
            TopicRound(
                topic,
                max(arrived, published[topic]),
                transferred,
                consumed,
                len(consumers),
                runs_of[topic],
                lag,
                tuple(faults),
            )
        )
    return rounds
