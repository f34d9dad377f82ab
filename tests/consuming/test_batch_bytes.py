"""A batch ends early where its values are many bytes, whatever the form of the log and the way of consuming."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import deliveries, failures, queue_backlog
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.consuming.delivery import HandOut
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.model import STORAGES
from eventsql_orchestration.storage import reading
from tests.effects import effects, make_table, write

if TYPE_CHECKING:
    from tests.fixtures import Until

EVENTS = 7
PARTS = [3, 3, 1]
"""The batches of these events: the third value makes a batch full."""


def prepare(platform: EventSQL) -> None:
    """A topic in each form, whose events are blocks by themselves."""
    make_table(platform)
    for storage in STORAGES:
        platform.registry.register_topic(Topic(storage, 1, storage=storage))
        platform.registry.register_consumer(Consumer(storage, "mailer", partitioned=True))
        for _ in range(EVENTS):
            platform.publisher.publish(Publication(storage, b"v" * 1_000, key="a"))
            platform.transfer.run_once()


pytestmark = [pytest.mark.prepared.with_args(prepare), pytest.mark.parametrize("topic", STORAGES)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reading, queue_backlog, deliveries):
        monkeypatch.setattr(module, "BATCH_BYTES", 2_500)
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.01)


def ids(platform: EventSQL, topic: str) -> list[int]:
    return [event.id for event in platform.reader.read(topic)]


def consumed(platform: EventSQL, topic: str) -> bool:
    return platform.registry.consumer(topic, "mailer")[0].last_event_id == platform.reader.end(topic)


def claim(platform: EventSQL, topic: str) -> Claim:
    claimed = platform.claims.claim(topic, "mailer", 0, owner="me")
    assert isinstance(claimed, Claim)
    return claimed


def test_a_stream_reads_parts(platform: EventSQL, topic: str) -> None:
    assert [len(events) for events in platform.reader.stream(topic, partition=0)] == PARTS
    assert [len(events) for events in platform.reader.stream(topic)] == PARTS


def test_a_consumer_does_not_wait_between_its_batches(platform: EventSQL, topic: str, until: Until) -> None:
    """It does not wait for `min_events` either, except with the last event."""
    sizes: list[int] = []
    with platform.consumers.start_batch(
        topic, "mailer", lambda events, _: sizes.append(len(events)), min_events=4, polling_delay=3600.0
    ):
        until(lambda: sum(sizes) >= 6)
    assert sizes == PARTS[:2]


def test_a_claim_is_processed_to_its_end(platform: EventSQL, topic: str) -> None:
    sizes: list[int] = []
    claimed = claim(platform, topic)
    assert [event.id for event in platform.claims.read(claimed)] == ids(platform, topic)
    assert platform.claims.process(claimed, lambda events, _: sizes.append(len(events))).consumed == EVENTS
    assert sizes == PARTS
    assert platform.claims.get(claimed.id)[1] == "committed"
    assert consumed(platform, topic)


def test_a_batch_that_does_not_fit_into_memory_is_read_in_parts(
    platform: EventSQL, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_few(*given: Any, limit: int, **range_: Any) -> Any:
        if limit > 2:
            raise MemoryError
        return read(*given, limit=limit, **range_)

    read = reading.LogReader.read_batch
    monkeypatch.setattr(reading.LogReader, "read_batch", read_few)
    sizes: list[int] = []
    claimed = claim(platform, topic)
    assert platform.claims.process(claimed, lambda events, _: sizes.append(len(events))).consumed == EVENTS
    assert max(sizes) <= 2


def test_a_batch_that_cannot_be_read_during_a_stop_is_not_tried_again(
    platform: EventSQL, topic: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, reads = threading.Event(), list[int]()

    def find_it_too_large(*_given: Any, limit: int, **_range: Any) -> Any:
        begun.wait()
        started.stop_soon()
        reads.append(limit)
        raise MemoryError

    monkeypatch.setattr(reading.LogReader, "read_batch", find_it_too_large)
    started = platform.consumers.start_batch(topic, "mailer", write)
    begun.set()
    until(lambda: reads)
    assert started.stop(timeout=60)
    assert len(reads) == 1


def test_a_leased_consumer_commits_each_part_of_its_claim(platform: EventSQL, topic: str, until: Until) -> None:
    """An event of the second part fails once, and is handed over again with the rest."""
    seen: list[tuple[int, list[int]]] = []

    def handle(events: Sequence[Event], lease: Lease) -> None:
        seen.append((lease.claim.id, [event.id for event in events]))
        with lease.transaction() as connection:
            write(events, connection)
            if len(seen) == 2:
                raise ValueError("once")

    with platform.consumers.start_leased(topic, "mailer", handle):
        until(lambda: consumed(platform, topic))
    own = ids(platform, topic)
    # After the failure, the events of the claim go one by one.
    assert seen == [(seen[0][0], each) for each in (own[:3], own[3:6], *([event] for event in own[3:]))]
    assert effects(platform) == own


def test_a_queue_fetches_nothing_while_it_holds_a_batch(
    platform: EventSQL, topic: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first event is not done before the process has three events, which wait for each other."""
    seen: list[int] = []
    held: list[int] = []
    hand_out = Deliveries.hand_out

    def kept() -> int:
        with platform.database.connection() as connection:
            return connection.execute("SELECT FROM eventsql.consumer_delivery").rowcount

    def noting(self: Deliveries, worker: int, partition: int, limit: int, *known: Any) -> HandOut:
        held.append(kept())
        return hand_out(self, worker, partition, limit, *known)

    def handle(event: Event) -> None:
        if not seen:
            until(lambda: kept() >= 3)
        seen.append(event.id)

    monkeypatch.setattr(Deliveries, "hand_out", noting)
    with platform.consumers.start_queue(topic, "mailer", handle, workers=1, polling_delay=0.02):
        until(lambda: consumed(platform, topic))
    assert seen == ids(platform, topic)
    assert max(held) < 3


def test_a_queue_takes_over_parts_of_what_another_process_has_left(platform: EventSQL, topic: str) -> None:
    shard = platform.shards[0]
    queue = Deliveries(shard.database, shard.dead_letters, topic, "mailer", by_key=True, lease=60.0, most=100)
    left, worker = queue.register("ended"), queue.register("here")
    while queue.hand_out(left, 0, 100).deliveries:
        pass
    queue.leave(left)
    parts = [queue.hand_out(worker, 0, 100) for _ in PARTS]
    assert [len(part.deliveries) for part in parts] == PARTS
    assert [each.event.id for part in parts for each in part.deliveries] == ids(platform, topic)
    assert [part.more for part in parts] == [True, True, False]
