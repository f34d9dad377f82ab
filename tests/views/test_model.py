"""Each view equals a plain recomputation of its topic, whatever the batches and wherever its consumer dies."""

from __future__ import annotations

import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventsql_orchestration import Connection, Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.views import LogEntry, Logs, Rollup, RollupEntry, Timeline, Views
from tests.views.conftest import MINUTE, NOON, SKETCHES

STEPS, COUNTS, LINES = (
    Timeline("steps"),
    Rollup("counts", MINUTE, ("kind",), ("cents",), distinct=("key",), quantiles=("cents",)),
    Logs("lines"),
)

# Key, kind, cents, minutes after noon. Late events are those with fewer minutes than earlier ones.
EVENTS = st.tuples(
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from(["paid", "sent"]),
    st.decimals(-100, 100, places=2).map(str),
    st.integers(0, 130),
)
HANDLINGS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.booleans()), max_size=10)
"""Partition, events of a batch, and whether the process dies before the batch is committed."""


class _DiesError(BaseException):
    """The process ends; no handler of errors sees it."""


class Model:
    """A topic of two partitions, a consumer that writes three views, and the expected contents of these."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform, self.views = platform, Views(platform.database)
        self.run = uuid.uuid4().hex
        self.topic = f"moves_{self.run}"
        self.views.declare(STEPS, COUNTS, LINES)
        platform.registry.register_topic(Topic(self.topic, partitions=2))
        platform.registry.register_consumer(Consumer(self.topic, "views", partitioned=True))

    def publish(self, events: Sequence[tuple[str, str, str, int]]) -> None:
        self.platform.publisher.publish_all(
            [Publication(self.topic, json.dumps(each).encode(), key=each[0]) for each in events]
        )
        self.platform.transfer.run_once()

    def show(self, events: Sequence[Event], connection: Connection) -> None:
        seen = [(event, *_read(event)) for event in events]
        self.views.timeline(STEPS).append(
            connection, [(key, {"kind": kind}, at) for _, key, kind, _, at in seen], tenant=self.run
        )
        self.views.rollup(COUNTS).add(
            connection,
            [
                RollupEntry(at, {"kind": kind}, {"cents": cents}, {"key": key} if SKETCHES else {})
                for _, key, kind, cents, at in seen
            ],
            slot=events[0].partition, tenant=self.run,
        )  # fmt: skip
        self.views.logs(LINES).write(
            connection, [LogEntry(key, f"{kind} {event.id}", at) for event, key, kind, _, at in seen], tenant=self.run
        )

    def handle(self, partition: int, batch: int, dies: bool) -> int:
        def handler(events: Sequence[Event], connection: Connection) -> None:
            self.show(events, connection)
            if dies:
                raise _DiesError

        try:
            return self.platform.consumers.consume_once(
                self.topic, "views", handler, partition=partition, max_events=batch
            )
        except _DiesError:
            return 0

    def check(self) -> None:
        for partition in (0, 1):
            while self.handle(partition, 3, False):
                pass
        events = [event for batch in self.platform.reader.stream(self.topic) for event in batch]
        seen = [(event, *_read(event)) for event in events]

        steps = defaultdict(list)
        for _, key, kind, _, at in seen:
            steps[key].append(({"kind": kind}, at))
        for key in "abcd":
            found = self.views.timeline(STEPS).read(key, tenant=self.run)
            assert [(each.data, each.occurred_at) for each in found] == steps[key]

        counts: Counter[tuple[datetime, str]] = Counter()
        sums: dict[tuple[datetime, str], list[Decimal]] = defaultdict(list)
        keys: dict[tuple[datetime, str], set[str]] = defaultdict(set)
        for _, key, kind, cents, at in seen:
            bucket = at.replace(minute=0), kind
            counts[bucket] += 1
            sums[bucket].append(cents)
            keys[bucket].add(key)
        hours = self.views.rollup(COUNTS).read(every=timedelta(hours=1), tenant=self.run)
        assert {(each.bucket, each.dimensions["kind"]): each.count for each in hours} == counts
        for each in hours:
            of, measure = sums[each.bucket, each.dimensions["kind"]], each.values["cents"]
            assert (measure.sum, measure.min, measure.max) == (sum(of), min(of), max(of))
            if SKETCHES:
                distinct, quantiles = each.distinct["key"], each.quantiles["cents"]
                assert distinct is not None
                assert quantiles is not None
                # So few of them are exact.
                assert distinct.estimate == len(keys[each.bucket, each.dimensions["kind"]])
                assert quantiles.at(0.5) == float(sorted(of)[(len(of) - 1) // 2])

        lines = self.views.logs(LINES).search(tenant=self.run, limit=1_000)
        assert Counter((each.resource, each.line, each.written_at) for each in lines) == Counter(
            (key, f"{kind} {event.id}", at) for event, key, kind, _, at in seen
        )
        assert [each.written_at for each in lines] == sorted((each.written_at for each in lines), reverse=True)


def _read(event: Event) -> tuple[str, str, Decimal, datetime]:
    key, kind, cents, minutes = json.loads(event.value)
    return key, kind, Decimal(cents), NOON + minutes * MINUTE


def run(platform: EventSQL, rounds: list[tuple[list[Any], list[tuple[int, int, bool]]]]) -> None:
    model = Model(platform)
    for events, handlings in rounds:
        if events:
            model.publish(events)
        for handling in handlings:
            model.handle(*handling)
    model.check()


ROUNDS = st.lists(st.tuples(st.lists(EVENTS, max_size=8), HANDLINGS), max_size=3)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=ROUNDS)
def test_the_views_are_what_their_topic_says(platform: EventSQL, rounds: list[Any]) -> None:
    run(platform, rounds)


@pytest.mark.nightly
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=ROUNDS)
def test_the_views_are_what_their_topic_says_at_length(platform: EventSQL, rounds: list[Any]) -> None:
    run(platform, rounds)
