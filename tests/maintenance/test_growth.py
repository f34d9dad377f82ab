"""Each way of use, round after round, until its tables stop growing: its own maintenance clears its leftovers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import claim_pruning, failures
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.leases import Lease, LeasedPolls
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.consuming.worker_pool import PollOptions
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ClaimLostError, DatabaseBusyError
from eventsql_orchestration.model import Retention
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.storage import segments
from tests.fixtures import Sessions
from tests.growth import Round, grown, let_a_month_pass

EVENTS = 60


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", EVENTS)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
    monkeypatch.setattr(claim_pruning, "EVERY", 3)
    monkeypatch.setattr(failures, "FIRST_BACKOFF", 0.0)


def prepare(platform: EventSQL, *, partitions: int = 2) -> None:
    kept = Retention(seconds=86_400)
    platform.registry.register_topic(Topic("orders", partitions, retention=kept))
    platform.registry.register_topic(Topic("orders_dlt", retention=kept))
    platform.registry.register_consumer(Consumer("orders", "sums", partitioned=True), max_attempts=1)


def publish(platform: EventSQL) -> None:
    platform.publisher.publish_all(Publication("orders", b"", key=str(number)) for number in range(EVENTS))
    platform.publisher.publish(Publication("orders", b"", key="buffered"))
    platform.transfer.run_once()


def consume(platform: EventSQL) -> None:
    while platform.consumers.consume_once("orders", "sums", lambda *_: None):
        pass


def in_process(platform: EventSQL, number: int) -> None:
    publish(platform)
    consume(platform)


def leased(platform: EventSQL, number: int) -> None:
    publish(platform)

    def handle(events: Sequence[Event], lease: Lease) -> None:
        pass

    options = PollOptions.of(max_events=4, max_polling_delay=0.0)
    polls = LeasedPolls(platform.database, platform.claims, handle, options, lease=60.0)
    for state in platform.registry.consumer("orders", "sums"):
        key = ConsumerPartition("orders", "sums", state.partition)
        while polls.poll(key, Cancellation()).result is not None:
            pass


def claims(platform: EventSQL, number: int) -> None:
    publish(platform)
    for state in platform.registry.consumer("orders", "sums"):
        released = False
        while isinstance(
            claim := platform.claims.claim("orders", "sums", state.partition, owner="script", max_events=4, max_wait=0),
            Claim,
        ):
            if released := not released:
                platform.claims.release(claim)
            else:
                platform.claims.process(claim, lambda *_: None)


def dead_letters(platform: EventSQL, number: int) -> None:
    publish(platform)

    def fail(*_: object) -> None:
        raise ValueError("not today")

    platform.consumers.consume_once("orders", "sums", fail)
    platform.transfer.run_once()
    platform.dead_letters.redrive("orders")
    platform.transfer.run_once()
    consume(platform)


def queue(platform: EventSQL, number: int) -> None:
    messages = Queue(platform.database, "mails")
    for _ in range(10):
        messages.send(b"")
    for message in messages.receive(max_messages=100):
        messages.acknowledge(message)


def repartitionings(platform: EventSQL, number: int) -> None:
    in_process(platform, number)
    platform.repartitioner.repartition("orders", 2 + number % 2)
    in_process(platform, number)
    consume(platform)


def deleted_topics(platform: EventSQL, number: int) -> None:
    prepare(platform)
    leased(platform, number)
    platform.repartitioner.repartition("orders", 4)
    dead_letters(platform, number)
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.unregister_topic("orders_dlt", force=True)


@pytest.mark.parametrize(
    "live",
    [
        # The last two do what these do, too.
        *(pytest.param(live, marks=pytest.mark.nightly) for live in (in_process, leased, dead_letters)),
        claims, queue, repartitionings, deleted_topics,
    ],
    ids=lambda live: live.__name__,
)  # fmt: skip
def test_a_way_of_use_stops_growing(platform: EventSQL, live: Round) -> None:
    prepare(platform)
    assert grown(platform, live) == {}


def test_the_claims_of_runs_and_the_furthest_stay_and_others_go(platform: EventSQL) -> None:
    prepare(platform, partitions=1)
    publish(platform)
    ids = {}
    for owner in ("run 1", "process 1 on here", "script", "process 2 on here"):
        claim = platform.claims.claim("orders", "sums", 0, owner=owner, max_events=4, max_wait=0)
        assert isinstance(claim, Claim)
        platform.claims.process(claim, lambda *_: None)
        ids[owner] = claim.id

    def left() -> list[str]:
        found = []
        for owner, claim_id in ids.items():
            with suppress(ClaimLostError):
                platform.claims.get(claim_id)
                found.append(owner)
        return found

    pruning, key = claim_pruning.ClaimPruning(platform.database), ConsumerPartition("orders", "sums", 0)
    assert pruning.prune(key) == 0
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer_claim SET eql_finished_at = eql_finished_at - interval '2 hours'")
    assert pruning.prune(key) == 1
    assert left() == ["run 1", "script", "process 2 on here"]
    let_a_month_pass(platform)
    assert pruning.prune(key) == 1
    assert left() == ["run 1", "process 2 on here"]


def test_pruning_goes_on_behind_claims_that_stay(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_pruning, "BATCH", 5)
    prepare(platform)
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
            "eql_events, eql_epoch, eql_owner, eql_state, eql_finished_at) SELECT 'orders', 'sums', 0, n - 1, n, 1, 1, "
            "CASE WHEN n <= 20 THEN 'run 1' ELSE 'process 1' END, 'committed', now() - interval '1 day' "
            "FROM generate_series(1, 40) n"
        )
        pruning, key = claim_pruning.ClaimPruning(platform.database), ConsumerPartition("orders", "sums", 0)
        assert sum(pruning.prune(key) for _ in range(40)) == 19
        assert connection.execute("SELECT count(*) FROM eventsql.consumer_claim").fetchone() == (21,)


def test_a_claim_that_another_transaction_has_locked_is_passed_over(platform: EventSQL) -> None:
    prepare(platform)
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
            "eql_events, eql_epoch, eql_owner, eql_state, eql_finished_at) SELECT 'orders', 'sums', 0, n - 1, n, 1, 1, "
            "'process 1', 'committed', now() - interval '1 day' FROM generate_series(1, 4) n"
        )
    pruning, key = claim_pruning.ClaimPruning(platform.database), ConsumerPartition("orders", "sums", 0)
    with platform.database.transaction() as connection:
        connection.execute("SELECT FROM eventsql.consumer_claim WHERE eql_upto = 2 FOR UPDATE")
        assert pruning.prune(key) == 2
    assert pruning.prune(key) == 1


def test_pruning_that_has_to_wait_keeps_its_claim_waiting_for_seconds_at_most(
    platform: EventSQL, sessions: Sessions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_pruning, "PRUNE_SECONDS", 0.05)
    caplog.set_level("INFO")
    sessions().execute("LOCK TABLE eventsql.consumer_claim IN EXCLUSIVE MODE")
    pruning, key = claim_pruning.ClaimPruning(platform.database), ConsumerPartition("orders", "sums", 0)
    pruning.made(key, claim_pruning.EVERY)
    assert "are kept for now" in caplog.text


def _commit_claims(connection: Connection, number: int) -> None:
    connection.execute(
        "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, "
        "eql_epoch, eql_owner, eql_state, eql_finished_at) SELECT 'orders', 'sums', 0, n - 1, n, 1, 1, 'process 1', "
        "'committed', now() FROM generate_series(1, %s) n",
        [number],
    )


def test_pruning_begins_anew_where_it_has_deleted_claims(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would walk over all recent claims before it looks at the oldest again."""
    monkeypatch.setattr(claim_pruning, "BATCH", 5)
    prepare(platform)
    pruning, key = claim_pruning.ClaimPruning(platform.database), ConsumerPartition("orders", "sums", 0)
    with platform.database.connection() as connection:
        _commit_claims(connection, 20)
        for oldest, deleted in [(3, 3), (5, 2)]:
            connection.execute(
                "UPDATE eventsql.consumer_claim SET eql_finished_at = now() - interval '1 day' WHERE eql_upto <= %s",
                [oldest],
            )
            assert pruning.prune(key) == deleted


def test_pruning_begins_anew_after_the_last_claim(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_pruning, "BATCH", 5)
    prepare(platform)
    pruning, key = claim_pruning.ClaimPruning(platform.database), ConsumerPartition("orders", "sums", 0)
    with platform.database.connection() as connection:
        _commit_claims(connection, 7)
        assert [pruning.prune(key) for _ in range(2)] == [0, 0]
        connection.execute("UPDATE eventsql.consumer_claim SET eql_finished_at = now() - interval '1 day'")
    assert [pruning.prune(key) for _ in range(2)] == [5, 1]


def test_a_claim_is_made_though_old_claims_cannot_be_pruned(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_pruning, "EVERY", 1)
    prepare(platform)
    publish(platform)

    def fail(*_: object) -> int:
        raise DatabaseBusyError("another transaction holds them")

    monkeypatch.setattr(claim_pruning.ClaimPruning, "prune", fail)
    assert isinstance(platform.claims.claim("orders", "sums", 0, owner="script"), Claim)
