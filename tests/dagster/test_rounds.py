"""The accounting of a round names events that are missing, repeated or left over, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, EventFilter, EventSQL, Publication, Topic
from eventsql_orchestration.dagster.lineage.origin import input_metadata
from eventsql_orchestration.dagster.local.run_counts import run_counts
from eventsql_orchestration.dagster.tags import TOPIC_TAG
from eventsql_orchestration.orchestration.rounds import Counts, RunCounts, account

KEY = ("orders", "ledger")


def counts(*, logged: int, buffered: int = 0, consumed: int | None = None, lag: int = 0) -> Counts:
    taken = Counts(logged=Counter(orders=logged), buffered=Counter(orders=buffered))
    if consumed is not None:
        taken.consumed[KEY] = consumed
        taken.lag[KEY] = lag
    return taken


def test_an_exact_round_has_no_faults() -> None:
    before, after = counts(logged=10, buffered=5, consumed=8, lag=7), counts(logged=35, consumed=35)
    (entry,) = account(before, after, RunCounts(Counter(orders=20), Counter(orders=2)))
    assert (entry.published, entry.transferred, entry.consumed, entry.consumers) == (20, 25, 27, 1)
    assert (entry.runs, entry.lag, entry.faults) == (2, 0, ())


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        (counts(logged=19, consumed=19), "the log lacks 1 published event"),
        (counts(logged=21, consumed=21), "no run of this round published 1 of the events"),
        (counts(logged=18, buffered=2, consumed=18, lag=2), "the buffer still has 2 events"),
        (counts(logged=20, consumed=21), "consumer ledger consumed 1 event twice"),
        (counts(logged=20, consumed=15, lag=2), "consumer ledger has lost 3 events"),
    ],
)
def test_each_fault_is_named(after: Counts, fault: str) -> None:
    (entry,) = account(counts(logged=0, consumed=0), after, RunCounts(Counter(orders=20)))
    assert fault in entry.faults


def test_events_before_a_paused_consumer_are_no_fault() -> None:
    before, after = counts(logged=0, consumed=0), counts(logged=20, consumed=17, lag=3)
    (entry,) = account(before, after, RunCounts(Counter(orders=20)))
    assert (entry.faults, entry.lag) == ((), 3)


def test_events_that_a_filter_leaves_out_are_no_fault(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "ledger"), filter=EventFilter(frozenset("a")))
    before = Counts.take(platform)
    platform.publisher.publish_all(Publication("orders", b"", key=key) for key in "ab")
    platform.transfer.run_once()
    platform.consumers.consume_once("orders", "ledger", lambda *_: None)
    (entry,) = account(before, Counts.take(platform), RunCounts(Counter(orders=2)))
    assert (entry.faults, entry.consumed, entry.lag) == ((), 1, 0)


def test_a_new_consumer_has_the_whole_topic_before_it() -> None:
    before, after = counts(logged=30, buffered=2), counts(logged=36, consumed=36)
    (entry,) = account(before, after, RunCounts(Counter(orders=4)))
    assert (entry.faults, entry.consumed) == ((), 36)


def test_events_that_a_failed_run_did_not_report_are_no_fault() -> None:
    before, after = counts(logged=0, consumed=0), counts(logged=20, consumed=20)
    (entry,) = account(before, after, RunCounts(Counter(orders=15), failed=("fares",)))
    assert (entry.faults, entry.published) == ((), 20)


def test_a_run_counts_for_the_topic_it_was_requested_for_and_for_each_that_it_consumed() -> None:
    def consumer(name: str, topic: str) -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(asset_key=name, metadata=input_metadata(topic, [], consumer=name))

    @dg.multi_asset(specs=[dg.AssetSpec("fares"), dg.AssetSpec("bills"), dg.AssetSpec("report")])
    def shared() -> Iterator[dg.MaterializeResult[None]]:
        yield consumer("fares", "orders")
        yield consumer("bills", "payments")
        # It reads a topic that it does not consume.
        yield dg.MaterializeResult(asset_key="report", metadata=input_metadata("refunds", []))

    with dg.DagsterInstance.ephemeral() as instance:
        took = dg.materialize([shared], instance=instance, tags={TOPIC_TAG: "orders"}).dagster_run
        found_nothing = dg.DagsterRun(job_name="shared", tags={TOPIC_TAG: "refunds"})
        counted = run_counts(instance, [took, found_nothing])
    assert counted == RunCounts(runs=Counter(orders=1, payments=1, refunds=1))
