"""A round: the events of every topic between two moments, and whether any are missing, repeated or left over."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.validation import counted


@dataclass(frozen=True, slots=True)
class Counts:
    """The events of each topic, and those that each consumer has consumed, at one moment.

    `logged` and `buffered` are per topic; `consumed` and `lag` per (topic, consumer), over its partitions. `filtered`
    are the consumers with a filter.
    """

    logged: Counter[str] = field(default_factory=Counter)
    buffered: Counter[str] = field(default_factory=Counter)
    consumed: Counter[tuple[str, str]] = field(default_factory=Counter)
    lag: Counter[tuple[str, str]] = field(default_factory=Counter)
    filtered: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def take(cls, platform: EventSQL) -> Counts:
        """Count now. Events of a topic that does not exist stay in the buffer, and are left out."""
        topics = {topic.name for topic in platform.registry.topics()}
        counts = cls(
            logged=Counter({topic: platform.reader.count(topic) for topic in topics}),
            buffered=Counter({topic: events for topic, events in platform.buffered().items() if topic in topics}),
        )
        for state in platform.registry.consumers():
            counts.consumed[state.topic, state.name] += state.consumed_events
            if state.filter is not None:
                counts.filtered.add((state.topic, state.name))
        for lag in platform.lag():
            counts.lag[lag.topic, lag.consumer] += lag.events
        return counts


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Counts of each topic, as the runs of a round report them.

    `published` counts the events that the runs report. `runs` counts runs: a run counts for the topic that
    it was requested for, and for each topic that it consumed, because a shared run consumes several. `failed` has the
    job or the DAG of each failed run.
    """

    published: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicRound:
    """The events of one topic in a round; `consumed` is the sum over its `consumers`."""

    topic: str
    published: int
    transferred: int
    consumed: int
    consumers: int
    runs: int
    lag: int
    faults: tuple[str, ...]


def account(before: Counts, after: Counts, runs: RunCounts, *, alone: bool = True) -> list[TopicRound]:
    """Compare two moments, topic by topic, with the publications that the runs between them report.

    Faults are a published event that is not in the log, an event in the log that no run published, and an event that a
    consumer has lost or has consumed twice. Events that wait for a paused consumer are not lost, nor are events that a
    consumer's filter left out. After a failed run, events that no run reports are not a fault: the run may have died
    between the commit of its publication and its report. Without `alone`, other programs may publish too.
    """
    rounds = []
    for topic in sorted(after.logged):
        published = runs.published[topic]
        arrived = after.logged[topic] + after.buffered[topic] - before.logged[topic] - before.buffered[topic]
        faults = []
        if arrived < published:
            faults.append(f"the log lacks {counted(published - arrived, 'published event')}")
        if arrived > published and alone and not runs.failed:
            faults.append(f"no run of this round published {arrived - published} of the events")
        if after.buffered[topic]:
            faults.append(f"the buffer still has {counted(after.buffered[topic], 'event')}")

        consumers = sorted(consumer for of, consumer in after.consumed if of == topic)
        consumed = lag = 0
        for consumer in consumers:
            key = (topic, consumer)
            # A new consumer has the whole topic before it.
            due = before.lag[key] if key in before.lag else before.logged[topic] + before.buffered[topic]
            expected, had = due + arrived, after.consumed[key] - before.consumed[key]
            if had > expected:
                faults.append(f"consumer {consumer} consumed {counted(had - expected, 'event')} twice")
            elif had + after.lag[key] < expected and key not in after.filtered:
                faults.append(f"consumer {consumer} has lost {counted(expected - had - after.lag[key], 'event')}")
            consumed += had
            lag += after.lag[key]

        transferred = after.logged[topic] - before.logged[topic]
        rounds.append(TopicRound(
            topic, max(arrived, published), transferred, consumed, len(consumers), runs.runs[topic], lag, tuple(faults)
        ))  # fmt: skip
    return rounds
