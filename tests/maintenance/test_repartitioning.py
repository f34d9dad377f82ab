"""Topics that get another number of partitions while their events flow: every key stays in its order."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import failures
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    RedefinitionError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.maintenance import repartitioning
from eventsql_orchestration.model import BLOCKS, NOT_PARTITIONED, ROWS, Event, Retention
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.shards.shard_state import ShardStore
from eventsql_orchestration.storage import legacy_writer_trigger, segments
from eventsql_orchestration.topics.partitioner import partition_of_key
from eventsql_orchestration.topics.positions import AtOffset, Earliest, Latest, ShiftBy
from tests.dying import repartition_and_die, repartition_until
from tests.fixtures import Until, UntilBlocked
from tests.forms import in_blocks
from tests.plain import REPLACE_ORDERS
from tests.waiting import PATIENCE

KEYS = [f"rider {number}" for number in range(40)]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    platform.registry.register_consumer(Consumer("orders", "auditor"))


pytestmark = pytest.mark.prepared.with_args(prepare)


class Orders:
    """Publishes numbered events of some keys in turn, and looks at what consumers were handed."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform = platform
        self._keys = itertools.cycle(KEYS)
        self.published: dict[str, int] = dict.fromkeys(KEYS, 0)
        self.handled: dict[str, list[int]] = {key: [] for key in KEYS}

    def publish(self, events: int = 200, *, transfer: bool = True) -> None:
        for _ in range(events):
            key = next(self._keys)
            self.platform.publisher.publish(Publication("orders", str(self.published[key]).encode(), key=key))
            self.published[key] += 1
        if transfer:
            self.platform.transfer.run_once()

    def handle(self, events: Sequence[Event], _connection: Connection | None = None) -> None:
        for event in events:
            assert event.key is not None
            self.handled[event.key].append(int(event.value))

    def consume(self, **options: Any) -> int:
        total = 0
        while consumed := self.platform.consumers.consume_once("orders", "mailer", self.handle, **options):
            total += consumed
        return total

    def check(self) -> None:
        assert self.handled == {key: list(range(count)) for key, count in self.published.items()}


@pytest.fixture
def orders(platform: EventSQL) -> Orders:
    return Orders(platform)


def partitions(platform: EventSQL, consumer: str = "mailer") -> list[int]:
    return [state.partition for state in platform.registry.consumer("orders", consumer)]


def untils(platform: EventSQL, consumer: str = "mailer") -> set[int | None]:
    return {state.until for state in platform.registry.consumer("orders", consumer)}


@pytest.mark.parametrize("after", [5, 2, 1, 12])
def test_keys_stay_in_their_order_when_partitions_come_and_go(platform: EventSQL, orders: Orders, after: int) -> None:
    orders.publish()
    orders.consume(partition=0)
    changed = platform.repartitioner.repartition("orders", after)
    assert changed is not None
    assert (changed.before, changed.partitions, changed.consumers) == (3, after, ("mailer",))
    assert changed.after == platform.reader.end("orders")
    orders.publish()
    orders.consume()
    orders.check()
    assert partitions(platform) == list(range(after))
    assert untils(platform) == {None}
    assert partitions(platform, "auditor") == [-1]
    assert platform.registry.topic("orders").partitions == after


def test_each_event_has_its_partition_by_the_number_of_its_time(platform: EventSQL, orders: Orders) -> None:
    orders.publish(100)
    changed = platform.repartitioner.repartition("orders", 7)
    orders.publish(100)
    assert changed is not None
    events = platform.reader.read("orders")
    assert len(events) == 200
    for event in events:
        assert event.key is not None
        assert event.partition == partition_of_key(event.key, 3 if event.id <= changed.after else 7)


def test_buffered_events_enter_the_log_before_the_change(platform: EventSQL, orders: Orders) -> None:
    orders.publish(50, transfer=False)
    changed = platform.repartitioner.repartition("orders", 2)
    assert changed is not None
    assert len(platform.reader.read("orders", upto=changed.after)) == 50
    assert platform.buffered() == {}


def test_a_consumer_waits_for_all_of_its_partitions_at_the_change(
    platform: EventSQL, orders: Orders, session: Connection
) -> None:
    orders.publish()
    changed = platform.repartitioner.repartition("orders", 4)
    assert changed is not None
    orders.publish()
    for partition in (0, 1, 3):
        while platform.consumers.consume_once("orders", "mailer", orders.handle, partition=partition):
            pass
    claim = platform.claims.claim("orders", "mailer", 1, owner="a run")
    assert isinstance(claim, NoClaim)
    assert f"partition 2 must come to offset {changed.after} first" in claim.reason
    assert untils(platform) == {changed.after}
    assert platform.layouts.unsettled("orders") == {"mailer": changed.after}
    lag = {entry.partition: entry for entry in platform.lag("orders") if entry.consumer == "mailer"}
    assert lag[0].cause is LagCause.HELD_BACK
    ends = f"offset {changed.after}, where layout 1 of the topic ends"
    assert lag[0].detail == f"until partition 2 has come to {ends}"
    assert (lag[2].cause, lag[2].detail) == (LagCause.WAITING, "not consumed yet")
    assert sum(entry.events for entry in lag.values()) == sum(orders.published.values()) - sum(
        map(len, orders.handled.values())
    )
    session.execute(
        "UPDATE eventsql.consumer SET eql_lease_owner = 'a run', eql_lease_expires_at = now() + interval '1 hour' "
        "WHERE eql_partition = 0"
    )
    while platform.consumers.consume_once("orders", "mailer", orders.handle, partition=2):
        pass
    layouts = platform.shards[0].layouts
    assert not layouts.settle("orders", "mailer").entered
    session.execute("UPDATE eventsql.consumer SET eql_lease_owner = NULL, eql_lease_expires_at = NULL")
    assert layouts.settle("orders", "mailer").entered
    assert {state.last_event_id for state in platform.registry.consumer("orders", "mailer")} == {changed.after}
    orders.consume()
    orders.check()
    assert platform.layouts.unsettled("orders") == {}


def test_a_claim_ends_where_the_partitions_change_and_the_next_begins_there(platform: EventSQL, orders: Orders) -> None:
    platform.registry.register_topic(Topic("trips", 1))
    platform.registry.register_consumer(Consumer("trips", "mailer", partitioned=True))
    for _ in range(3):
        platform.publisher.publish(Publication("trips", b""))
    changed = platform.repartitioner.repartition("trips", 2)
    assert changed is not None
    for partition in (0, 0, 1):
        platform.publisher.publish(Publication("trips", b"", partition=partition))
    platform.transfer.run_once()
    # Though more are asked for: there will be no more up to the change.
    first = platform.claims.claim("trips", "mailer", 0, owner="a run", min_events=5, max_wait=3600)
    assert isinstance(first, Claim)
    assert (first.range.upto, first.events) == (changed.after, 3)
    assert isinstance(platform.claims.claim("trips", "mailer", 1, owner="a run"), NoClaim)
    platform.claims.process(first, lambda _events, _connection: None)
    second = platform.claims.claim("trips", "mailer", 1, owner="a run")
    third = platform.claims.claim("trips", "mailer", 0, owner="a run")
    assert isinstance(second, Claim)
    assert isinstance(third, Claim)
    assert (second.events, third.events) == (1, 2)
    assert third.range.after == changed.after


def test_a_claim_from_before_the_change_is_consumed_by_its_owner(platform: EventSQL, orders: Orders) -> None:
    orders.publish()
    claim = platform.claims.claim("orders", "mailer", 2, owner="a run")
    assert isinstance(claim, Claim)
    platform.repartitioner.repartition("orders", 2)
    orders.publish()
    assert orders.consume() > 0
    assert untils(platform) != {None}
    platform.claims.process(claim, orders.handle)
    orders.consume()
    orders.check()
    assert partitions(platform) == [0, 1]


def test_the_first_layout_holds_since_the_topic_was_made(platform: EventSQL, orders: Orders) -> None:
    orders.publish()
    platform.repartitioner.repartition("orders", 5)
    first, second = platform.layouts.of("orders")
    made = platform.registry.topic("orders").created_at
    assert made is not None
    assert first.created_at == made < second.created_at


def test_changes_follow_each_other_before_consumers_have_come_to_the_first(platform: EventSQL, orders: Orders) -> None:
    for number in (5, 2, 4, 1, 6):
        orders.publish(60)
        platform.repartitioner.repartition("orders", number)
    orders.publish(60)
    assert [each.partitions for each in platform.layouts.of("orders")] == [3, 5, 2, 4, 1, 6]
    assert sum(entry.events for entry in platform.lag("orders") if entry.consumer == "mailer") == 360
    assert orders.consume() == 360
    orders.check()
    assert partitions(platform) == list(range(6))


@pytest.mark.parametrize("before", [0, 30])
def test_changes_between_which_no_event_came_are_one_for_consumers(
    platform: EventSQL, orders: Orders, before: int
) -> None:
    orders.publish(before)
    for number in (4, 8, 2, 6):
        platform.repartitioner.repartition("orders", number)
    orders.publish(60)
    assert orders.consume() == before + 60
    orders.check()
    assert (partitions(platform), untils(platform)) == (list(range(6)), {None})


def test_a_claim_that_ends_its_own_partition_says_so(platform: EventSQL, orders: Orders) -> None:
    platform.repartitioner.repartition("orders", 1)
    claim = platform.claims.claim("orders", "mailer", 2, owner="a run")
    assert claim == NoClaim("the topic has no partition 2 any more")
    assert partitions(platform) == [0]


def test_partitions_that_another_process_added_are_known_at_once(dsn: str, platform: EventSQL, orders: Orders) -> None:
    orders.publish(30)
    platform.registry.cached_topic("orders")
    with EventSQL(dsn, transfer=False) as other:
        other.repartitioner.repartition("orders", 9)
    assert len([entry for entry in platform.lag("orders") if entry.consumer == "mailer"]) == 9
    assert len(platform.seeker.execute("orders", "mailer", Latest())) == 9


@pytest.mark.parametrize("events", [0, 30])
def test_a_program_with_the_former_number_of_partitions_registers_the_topic_with_a_warning(
    platform: EventSQL, orders: Orders, caplog: pytest.LogCaptureFixture, events: int
) -> None:
    orders.publish(events)
    platform.repartitioner.repartition("orders", 5)
    platform.repartitioner.repartition("orders", 8)
    for former in (3, 5):
        registration = platform.registry.declare_topic(Topic("orders", former))
        assert (registration.created, registration.changes) == (False, ())
        assert f"it has 8 partitions, because it was repartitioned, and is declared with its former {former}" in str(
            registration
        )
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["declare 8" in record.getMessage() for record in warnings] == [True, True]
    assert platform.registry.topic("orders").partitions == 8
    assert platform.registry.declare_topic(Topic("orders", 8)).outdated is None
    for wrong in (4, NOT_PARTITIONED):
        with pytest.raises(RedefinitionError):
            platform.registry.register_topic(Topic("orders", wrong))
    orders.publish()
    orders.consume()
    orders.check()


def test_a_former_number_is_a_wrong_one_once_retention_has_dropped_its_events(
    platform: EventSQL, orders: Orders
) -> None:
    platform.registry.set_retention("orders", Retention(events=1))
    orders.publish(30)
    platform.repartitioner.repartition("orders", 8)
    platform.registry.register_topic(Topic("orders", 3))
    for _ in range(2):
        # The first run closes the segment, and the second one drops it.
        orders.publish(30)
        orders.consume()
        while platform.consumers.consume_once("orders", "auditor", lambda *_: None):
            pass
        platform.retention.run_once()
    assert [each.partitions for each in platform.layouts.of("orders")] == [8]
    with pytest.raises(RedefinitionError):
        platform.registry.register_topic(Topic("orders", 3))


def test_a_consumer_that_comes_later_goes_through_all_layouts(platform: EventSQL, orders: Orders) -> None:
    orders.publish(100)
    first = platform.repartitioner.repartition("orders", 1)
    orders.publish(100)
    platform.repartitioner.repartition("orders", 4)
    orders.publish(100)
    assert first is not None
    for name, start in (("all", "earliest"), ("some", first.after + 1), ("none", "latest")):
        platform.registry.register_consumer(Consumer("orders", name, partitioned=True), start=start)  # type: ignore[arg-type]
    assert untils(platform, "none") == {None}
    seen: dict[str, list[int]] = {}
    for name in ("all", "some", "none"):
        ids = seen.setdefault(name, [])
        order: dict[str, list[int]] = {key: [] for key in KEYS}

        def handle(
            events: Sequence[Event], _connection: object, ids: list[int] = ids, order: dict[str, list[int]] = order
        ) -> None:
            for event in events:
                ids.append(event.id)
                order[event.key or ""].append(event.id)

        while platform.consumers.consume_once("orders", name, handle):
            pass
        assert all(each == sorted(each) for each in order.values())
        assert partitions(platform, name) == [0, 1, 2, 3]
    ids = [event.id for event in platform.reader.read("orders")]
    assert sorted(seen["all"]) == ids
    assert sorted(seen["some"]) == [event for event in ids if event > first.after]
    assert seen["none"] == []


def test_a_seek_back_over_a_change_consumes_by_the_partitions_of_then(platform: EventSQL, orders: Orders) -> None:
    orders.publish(100)
    changed = platform.repartitioner.repartition("orders", 2)
    orders.publish(100)
    orders.consume()
    orders.check()
    platform.seeker.execute("orders", "mailer", Earliest())
    assert changed is not None
    assert (partitions(platform), untils(platform)) == ([0, 1, 2], {changed.after})
    orders.handled = {key: [] for key in KEYS}
    assert orders.consume() == 200
    orders.check()
    assert (partitions(platform), untils(platform)) == ([0, 1], {None})
    platform.seeker.execute("orders", "mailer", AtOffset(changed.after + 1))
    assert (partitions(platform), untils(platform)) == ([0, 1], {None})


def test_a_seek_back_to_several_offsets_skips_no_event_of_a_partition_that_was_gone(
    platform: EventSQL, orders: Orders
) -> None:
    for partition in (0, 2, 1):
        platform.publisher.publish(Publication("orders", b"0", key=f"rider {partition}", partition=partition))
        platform.transfer.run_once()
    platform.repartitioner.repartition("orders", 2)
    assert orders.consume() == 3
    assert partitions(platform) == [0, 1]
    platform.seeker.execute("orders", "mailer", ShiftBy(-1))
    assert partitions(platform) == [0, 1, 2]
    assert orders.consume() == 3


def test_a_seek_forward_over_a_change_leaves_its_layout(platform: EventSQL, orders: Orders) -> None:
    orders.publish(100)
    platform.repartitioner.repartition("orders", 5)
    orders.publish(100)
    platform.seeker.execute("orders", "mailer", Latest())
    assert (partitions(platform), untils(platform)) == ([0, 1, 2, 3, 4], {None})
    orders.publish(10)
    assert orders.consume() == 10


def test_a_seek_that_would_tear_a_consumer_apart_moves_nothing(platform: EventSQL, orders: Orders) -> None:
    orders.publish(100)
    platform.repartitioner.repartition("orders", 2)
    orders.publish(100)
    orders.consume()
    before = platform.registry.consumer("orders", "mailer")
    with pytest.raises(ValidationError, match="seek all partitions to one offset or time"):
        platform.seeker.execute("orders", "mailer", Earliest(), partition=1)
    moves = platform.seeker.execute("orders", "mailer", ShiftBy(-1), partition=1)
    assert [move.again for move in moves] == [1]
    platform.seeker.execute("orders", "mailer", Latest(), partition=1)
    assert [state.last_event_id for state in before][1] <= platform.registry.consumer("orders", "mailer")[
        1
    ].last_event_id


def test_a_failing_event_holds_the_change_up_until_it_is_a_dead_letter(
    platform: EventSQL, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("FIRST_BACKOFF", "MAX_BACKOFF"):
        monkeypatch.setattr(failures, pause, 3_600.0)
    orders.publish(30)
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True), max_attempts=2)
    poison = platform.reader.read("orders", partition=1, limit=1)[0]
    changed = platform.repartitioner.repartition("orders", 1)
    assert changed is not None

    def handle(events: Sequence[Event], connection: Connection) -> None:
        if poison.id in [event.id for event in events]:
            raise ValueError("poison")
        orders.handle(events, connection)

    while platform.consumers.consume_once("orders", "mailer", handle):
        pass
    assert (partitions(platform), untils(platform)) == ([0, 1, 2], {changed.after})
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now() WHERE eql_retry_at IS NOT NULL")
    while platform.consumers.consume_once("orders", "mailer", handle):
        pass
    assert partitions(platform) == [0]
    platform.transfer.run_once()
    assert [event.key for event in platform.reader.read("orders_dlt")] == [poison.key]


def test_retention_keeps_what_later_layouts_have_for_a_consumer(platform: EventSQL, orders: Orders) -> None:
    platform.registry.unregister_consumer("orders", "auditor")
    platform.registry.set_retention("orders", Retention(events=1))
    platform.repartitioner.repartition("orders", 1)
    platform.repartitioner.repartition("orders", 6)
    orders.publish(95)
    platform.retention.run_once()  # closes the segment
    orders.publish(5)
    (kept,) = platform.retention.run_once()
    assert (kept.segments, kept.held_by) == (0, "consumer 'mailer' partition 0")
    platform.seeker.execute("orders", "mailer", Earliest())
    lag = [entry for entry in platform.lag("orders") if entry.consumer == "mailer"]
    assert sum(entry.events for entry in lag) == 100
    assert orders.consume() == 100
    assert platform.retention.run_once()[0].segments == 1


@pytest.mark.parametrize(("only", "after"), [(0, 5), (1, 5), (1, 2)])
def test_a_side_consumer_of_one_partition_gets_no_others_wherever_it_is_sought(
    platform: EventSQL, orders: Orders, only: int, after: int
) -> None:
    """It stands for a window of a backfill, which is replayed in its partition and moves the offset of this one."""
    orders.publish(50)
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.consumer WHERE eql_partition NOT IN (-1, %s)", [only])
    changed = platform.repartitioner.repartition("orders", after)
    assert partitions(platform) == [only]
    orders.publish(50)
    assert changed is not None
    for position in (Earliest(), AtOffset(changed.after + 1), Latest(), Earliest()):
        platform.seeker.execute("orders", "mailer", position)
        assert partitions(platform) == [only]
    # Nor is it kept from the events of its own.
    assert orders.consume() == len(platform.reader.read("orders", partition=only))
    assert (partitions(platform), untils(platform)) == ([only], {None})


def test_a_consumer_that_is_held_back_is_of_the_layout_in_which_it_stands(platform: EventSQL, orders: Orders) -> None:
    """As on a shard that joined, where a seek holds all consumers back first."""
    orders.publish(30)
    changed = platform.repartitioner.repartition("orders", 2)
    orders.publish(30)
    orders.consume()
    assert changed is not None
    store = ShardStore(platform.database)
    store.hold("orders", "mailer")
    with pytest.raises(ValidationError, match="seek all partitions to one offset or time"):
        platform.seeker.execute("orders", "mailer", Earliest(), partition=1)
    platform.seeker.execute("orders", "mailer", Earliest())
    assert (partitions(platform), untils(platform)) == ([0, 1, 2], {HELD})
    store.let_go("orders", "mailer")
    assert untils(platform) == {changed.after}
    orders.handled = {key: [] for key in KEYS}
    assert orders.consume() == 60
    orders.check()


def test_a_held_consumer_without_partitions_is_let_go_over_a_change(platform: EventSQL, orders: Orders) -> None:
    orders.publish(10)
    platform.repartitioner.repartition("orders", 2)
    store = ShardStore(platform.database)
    store.hold("orders", "auditor")
    assert untils(platform, "auditor") == {HELD}
    store.let_go("orders", "auditor")
    assert untils(platform, "auditor") == {None}


def test_a_held_consumer_is_let_go_and_sought_in_the_layout_of_the_partition_behind(
    platform: EventSQL, orders: Orders
) -> None:
    orders.publish(30)
    # The last event of the layout is one of partition 1.
    key = next(key for key in KEYS if partition_of_key(key, 3) == 1)
    platform.publisher.publish(Publication("orders", b"0", key=key))
    platform.transfer.run_once()
    changed = platform.repartitioner.repartition("orders", 2)
    assert changed is not None
    orders.consume(partition=1)
    store = ShardStore(platform.database)
    store.hold("orders", "mailer")
    behind, ahead, _ = (state.last_event_id for state in platform.registry.consumer("orders", "mailer"))
    assert (behind, ahead) == (0, changed.after)
    store.let_go("orders", "mailer")
    assert untils(platform) == {changed.after}
    store.hold("orders", "mailer")
    (moved,) = platform.seeker.execute("orders", "mailer", Earliest(), partition=1)
    assert moved.target == 0
    store.let_go("orders", "mailer")
    assert untils(platform) == {changed.after}


# Publishers that know the old number


def test_publishers_of_the_old_number_are_told_and_choose_anew(dsn: str, platform: EventSQL, orders: Orders) -> None:
    with EventSQL(dsn, transfer=False) as other:
        known = other.registry.cached_topic("orders")
        changed = platform.repartitioner.repartition("orders", 8)
        assert changed is not None
        other.publisher.publish(Publication("orders", b"one", key="rider 1"))
        assert other.shards[0].registry.known("orders") != known
        other.shards[0].registry._cache["orders"] = (10**12, known)
        many = [Publication("orders", b"many", key=key) for key in KEYS * 3]
        other.publisher.publish_all(many)
        other.shards[0].registry._cache["orders"] = (10**12, known)
        with other.database.transaction() as connection:
            other.publisher.publish(Publication("orders", b"joined", key="rider 2"), connection=connection)
    platform.transfer.run_once()
    events = platform.reader.read("orders", after=changed.after)
    assert len(events) == 2 + len(many)
    assert all(event.partition == partition_of_key(event.key or "", 8) for event in events)


def test_a_library_that_knows_nothing_of_layouts_loses_no_event(platform: EventSQL, orders: Orders) -> None:
    platform.repartitioner.repartition("orders", 2)
    with platform.database.connection() as connection:
        for key in ("rider 1", None):
            connection.execute(
                "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
                "VALUES ('orders', 2, %s, '', '{}')",
                [key],
            )
    platform.transfer.run_once()
    keyed, other = platform.reader.read("orders")
    assert keyed.partition == partition_of_key("rider 1", 2)
    assert other.partition in (0, 1)


# Writers that know nothing of layouts


def write_past(platform: EventSQL, partition: int, key: str | None = None) -> Event:
    """As EventSQL's Java library moves an event into a log: by the number that its publisher knew."""
    with platform.database.connection() as connection:
        row = connection.execute(
            "INSERT INTO eventsql.orders_event (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata) "
            "VALUES (%s, %s, '', now(), '{}') RETURNING eql_id",
            [partition, key],
        ).fetchone()
    assert row is not None
    (event,) = platform.reader.read("orders", after=row[0] - 1, limit=1)
    return event


@pytest.mark.in_rows
def test_an_event_for_a_partition_that_is_gone_gets_the_partition_of_its_key(platform: EventSQL) -> None:
    assert write_past(platform, 2, "rider 1").partition == 2
    for number, gone in ((2, range(2, 9)), (5, range(5, 9)), (1, range(1, 9)), (7, range(7, 9))):
        platform.repartitioner.repartition("orders", number)
        for partition in gone:
            assert write_past(platform, partition, "rider 1").partition == partition_of_key("rider 1", number)
            assert write_past(platform, partition).partition in range(number)
        for partition in range(number):
            assert write_past(platform, partition, "rider 1").partition == partition
    assert legacy_writer_trigger.stranded(platform.database, "orders") == []


def test_a_log_whose_topic_never_lost_a_partition_has_no_guard(platform: EventSQL) -> None:
    platform.repartitioner.repartition("orders", 4)
    platform.repartitioner.repartition("orders", 9)
    with platform.database.connection() as connection:
        assert not legacy_writer_trigger.is_guarded(connection, "eventsql", "orders")


@pytest.mark.in_rows
def test_segments_that_come_later_are_guarded_too(platform: EventSQL) -> None:
    platform.repartitioner.repartition("orders", 2)
    for number in range(1, 5):
        with platform.database.connection() as connection:
            newest = number * segments.SEGMENT_EVENTS - 3
            connection.execute("SELECT setval('eventsql.orders_event_eql_id_seq', %s)", [newest])
        platform.publisher.publish_all([Publication("orders", b"")] * 6)
        platform.transfer.run_once()
        assert write_past(platform, 2, "rider 1").partition == partition_of_key("rider 1", 2)
    with platform.database.connection() as connection:
        assert len(segments.segments(connection, "eventsql", "orders") or []) > 5


@pytest.mark.in_rows
def test_a_plain_log_keeps_its_guard_when_it_becomes_a_segment(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute(REPLACE_ORDERS)
        platform.repartitioner.repartition("orders", 2)
        assert write_past(platform, 2, "rider 1").partition == partition_of_key("rider 1", 2)
        segments.adopt(connection, "eventsql", "orders")
        assert segments.segments(connection, "eventsql", "orders")
    assert write_past(platform, 2, "rider 1").partition == partition_of_key("rider 1", 2)
    platform.repartitioner.repartition("orders", 1)
    assert write_past(platform, 1, "rider 1").partition == 0


@pytest.mark.in_rows
def test_a_log_in_rows_again_keeps_its_guard_though_retention_has_dropped_the_layout_with_more_partitions(
    platform: EventSQL,
) -> None:
    platform.publisher.publish(Publication("orders", b""))
    platform.repartitioner.repartition("orders", 2)
    for storage in (BLOCKS, ROWS):
        platform.registry.set_storage("orders", storage)
        platform.publisher.publish(Publication("orders", b""))
        platform.transfer.run_once()
    for consumer in ("mailer", "auditor"):
        platform.registry.unregister_consumer("orders", consumer)
    platform.registry.set_retention("orders", Retention(events=1))
    platform.retention.run_once()
    assert [each.partitions for each in platform.layouts.of("orders")] == [2]
    assert write_past(platform, 2, "rider 1").partition == partition_of_key("rider 1", 2)


def test_a_reader_of_the_log_does_not_delay_its_guard(dsn: str, platform: EventSQL, orders: Orders) -> None:
    orders.publish(10)
    with open_transaction(dsn, "SELECT count(*) FROM eventsql.orders_event"):
        assert platform.repartitioner.repartition("orders", 2, timeout=0) is not None


@pytest.mark.in_rows
def test_events_in_partitions_that_were_gone_are_found(platform: EventSQL, orders: Orders) -> None:
    orders.publish(20)
    platform.repartitioner.repartition("orders", 1)
    platform.repartitioner.repartition("orders", 2)
    with platform.database.transaction() as connection:
        connection.execute("SET LOCAL session_replication_role TO replica")
        connection.execute(
            "INSERT INTO eventsql.orders_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
            "SELECT 2, '', now(), '{}' FROM generate_series(1, 3)"
        )
    end = platform.reader.end("orders")
    assert legacy_writer_trigger.stranded(platform.database, "orders") == [
        legacy_writer_trigger.Stranded(2, 3, end - 2, end)
    ]


@pytest.mark.parametrize("number", [1, 2, 3, 7, 64, 1000, 32_767])
def test_the_server_has_the_hash_of_the_publishers(platform: EventSQL, number: int) -> None:
    keys = ["", "a", "ключ", "🚕", *KEYS]
    with platform.database.connection() as connection:
        for key in keys:
            row = connection.execute("SELECT eventsql.partition_of_key(%s, %s)", [key, number]).fetchone()
            assert row == (partition_of_key(key, number),)


# What is in the way


@contextmanager
def open_transaction(dsn: str, statement: str) -> Iterator[None]:
    with psycopg.connect(dsn) as connection:
        connection.execute(statement)
        yield
        connection.rollback()


def test_a_publisher_that_does_not_end_leaves_everything_as_it_was(
    dsn: str, platform: EventSQL, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repartitioning, "BUFFER_SECONDS", 0.05)
    publishing = (
        "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
        "VALUES ('orders', 0, '', '{}')"
    )
    with open_transaction(dsn, publishing), pytest.raises(DatabaseBusyError, match="keeps its 3 partitions"):
        platform.repartitioner.repartition("orders", 4, timeout=0.2)
    assert platform.registry.topic("orders").partitions == 3
    assert platform.layouts.of("orders") == []
    assert partitions(platform) == [0, 1, 2]


def test_a_handler_that_publishes_and_a_change_do_not_wait_for_each_other(
    platform: EventSQL, orders: Orders, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CONSUMER_SECONDS", "BUFFER_SECONDS"):
        monkeypatch.setattr(repartitioning, limit, PATIENCE)
    platform.registry.register_topic(Topic("mails"))
    orders.publish(20)
    inside, go_on = threading.Event(), threading.Event()

    def handle(events: Sequence[Event], connection: Connection) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)
        platform.publisher.publish(Publication("mails", b""), connection=connection)
        orders.handle(events)

    with ThreadPoolExecutor(2) as executor:
        consuming = executor.submit(platform.consumers.consume_once, "orders", "mailer", handle, max_events=1)
        assert inside.wait(PATIENCE)
        # In one attempt: a deadlock would end it.
        changing = executor.submit(platform.repartitioner.repartition, "orders", 2, timeout=0.0)
        until_blocked()
        go_on.set()
        assert consuming.result()
        assert changing.result()
    assert platform.registry.topic("orders").partitions == 2
    orders.consume()
    orders.check()


@pytest.mark.parametrize(
    ("topic", "number", "error"),
    [
        ("nobody", 3, TopicNotFoundError),
        ("orders", 0, ValidationError),
        ("orders", -1, ValidationError),
        ("orders", 40_000, ValidationError),
        ("orders_dlt", 3, RedefinitionError),
    ],
)
def test_an_impossible_change_is_refused(platform: EventSQL, topic: str, number: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        platform.repartitioner.repartition(topic, number)
    assert platform.layouts.of("orders") == []


def test_the_number_that_a_topic_has_changes_nothing(platform: EventSQL, orders: Orders) -> None:
    assert platform.repartitioner.repartition("orders", 3) is None
    assert platform.layouts.of("orders") == []


# Processes that die


def check_all_or_nothing(platform: EventSQL, orders: Orders, before: int, after: int) -> None:
    """Neither the change nor anything of it, or all of it; what was published is consumed in order either way."""
    topic = platform.registry.topic("orders")
    with platform.database.connection() as connection:
        guarded = legacy_writer_trigger.is_guarded(connection, "eventsql", "orders")
    known = [each.partitions for each in platform.layouts.of("orders")]
    if topic.partitions == before:
        assert (topic.layout, known, partitions(platform), untils(platform)) == (1, [], list(range(before)), {None})
        assert not guarded
    else:
        assert (topic.partitions, topic.layout, known) == (after, 2, [before, after])
        assert guarded != in_blocks()
        assert len(untils(platform) - {None}) == 1
    assert platform.reader.count("orders") + sum(platform.buffered().values()) == sum(orders.published.values())


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_process_that_is_killed_at_any_step_leaves_the_change_to_be_made(
    dsn: str, platform: EventSQL, orders: Orders, every: int
) -> None:
    orders.publish(40)
    orders.consume(partition=0)
    number = 0
    while True:
        number += every
        orders.publish(2, transfer=False)
        died = repartition_and_die(dsn, "orders", 2, number)
        check_all_or_nothing(platform, orders, 3, 2)
        if not died:
            break
    assert number > 15, "each statement of the change was a step"
    assert platform.registry.topic("orders").partitions == 2
    orders.publish(40)
    orders.consume()
    orders.check()
    assert (partitions(platform), untils(platform)) == ([0, 1], {None})


@pytest.mark.parametrize(
    "last",
    [
        "LOCK TABLE .*event_buffer", "INTO .*topic_layout", "^COMMIT",
        # Only a log in rows gets a guard.
        pytest.param("CREATE OR REPLACE TRIGGER", marks=pytest.mark.in_rows),
    ],
)  # fmt: skip
def test_a_server_that_is_killed_during_a_change_has_made_none_and_it_is_made_by_running_it_again(
    dsn: str, server: EmbeddedPostgres, platform: EventSQL, orders: Orders, last: str
) -> None:
    """It is killed at the step that matches `last`."""
    orders.publish(30)
    orders.publish(5, transfer=False)

    def restart() -> None:
        server.stop(mode="immediate")
        server.start()

    def reached(steps: list[str]) -> bool:
        """What comes before the change moves events too, and commits."""
        changing = any("LOCK TABLE" in step for step in steps)
        return changing and re.search(last, steps[-1]) is not None

    with pytest.raises(DatabaseUnavailableError):
        repartition_until(dsn, "orders", 2, reached, restart)
    check_all_or_nothing(platform, orders, 3, 2)
    assert platform.registry.topic("orders").partitions == 3
    assert platform.repartitioner.repartition("orders", 2) is not None
    orders.publish(30)
    orders.consume()
    orders.check()


# While everything runs


def test_running_consumers_and_publishers_go_through_changes(dsn: str, orders: Orders, until: Until) -> None:
    """Two processes' worth of consumers, three publishers with keys of their own, and changes in between."""
    stop = threading.Event()
    handled: dict[str, list[int]] = {key: [] for key in KEYS}
    published = dict.fromkeys(KEYS, 0)

    def publish(other: EventSQL, keys: list[str]) -> None:
        while not stop.is_set():
            batch = random.choices(keys, k=random.choice([1, 3, 80]))
            numbers = dict(published)
            publications = []
            for key in batch:
                publications.append(Publication("orders", str(numbers[key]).encode(), key=key))
                numbers[key] += 1
            try:
                other.publisher.publish_all(publications)
            except RedefinitionError:
                continue
            for key in keys:
                published[key] = numbers[key]

    def handle(events: Sequence[Event], connection: Connection) -> None:
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO seen (key, number) VALUES (%s, %s)", [(event.key, int(event.value)) for event in events]
            )

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE seen (at bigserial, key text, number int)")
    with EventSQL(dsn) as one, EventSQL(dsn) as two:
        for other in (one, two):
            other.consumers.start_batch("orders", "mailer", handle, polling_delay=0.05, max_events=50)
        threads = [
            threading.Thread(target=publish, args=(other, KEYS[start::3]))
            for start, other in enumerate((one, two, orders.platform))
        ]
        for thread in threads:
            thread.start()
        for number in (5, 2, 8, 1, 4):
            assert two.repartitioner.repartition("orders", number) is not None
            until(lambda: not one.layouts.unsettled("orders"))
        stop.set()
        for thread in threads:
            thread.join(60)
        one.transfer.run_once()
        until(lambda: not any(entry.events for entry in one.lag("orders") if entry.consumer == "mailer"))
        with psycopg.connect(dsn) as connection:
            for key, number in connection.execute("SELECT key, number FROM seen ORDER BY at"):
                handled[key].append(number)
    assert handled == {key: list(range(count)) for key, count in published.items()}
    assert sum(published.values()) > 100


@pytest.mark.parametrize("limit", ["MOST_BUFFERED", "MOST_BYTES"])
def test_events_that_come_meanwhile_and_are_too_many_are_moved_before_publishers_wait(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(repartitioning, limit, 10)
    orders, repartitioner, moved = Orders(platform), platform.shards[0].repartitioner, []

    class Transfer:
        def run_once(self, topics: Sequence[str]) -> None:
            moved.append(platform.transfer.run_once(topics))
            if len(moved) == 1:
                orders.publish(20, transfer=False)

    monkeypatch.setattr(repartitioner, "_transfer", Transfer())
    assert repartitioner.repartition("orders", 5) is not None
    assert moved == [{}, {"orders": 20}]
