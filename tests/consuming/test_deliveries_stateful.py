"""Random sequences of events that are handed out, acknowledged and given back, against a model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from eventsql_orchestration import Consumer, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.consuming import failures
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.deliveries import Deliveries, WorkerLostError
from eventsql_orchestration.consuming.delivery import Delivery
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ClaimLostError, RegistryError
from eventsql_orchestration.model import STORAGES, Storage
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.storage import compacting, segments
from eventsql_orchestration.topics.positions import AtOffset

KEYS = st.sampled_from(["a", "b", None])
PROCESSES = st.integers(0, 2)
LATER = 1_000.0
"""The lease and the delay of a retry, in seconds: longer than an example. Time passes by a statement."""

MOST = 6


class Machine(RuleBasedStateMachine):
    """One topic with a new name for each example, consumed by three processes."""

    platform: ClassVar[EventSQL]
    by_key: ClassVar[bool]
    names: ClassVar[Iterator[int]]

    def __init__(self) -> None:
        super().__init__()
        self.topic = f"topic_{next(self.names)}"
        registry = self.platform.registry.register_topic(Topic(self.topic))
        registry.register_consumer(Consumer(self.topic, "mailer"), max_attempts=1_000)
        shard = self.platform.shards[0]
        self.deliveries = Deliveries(
            shard.database, shard.dead_letters, self.topic, "mailer", by_key=self.by_key, lease=LATER, most=MOST
        )
        self.workers = [self.deliveries.register(f"process {number}") for number in range(3)]
        self.keys: dict[int, str | None] = {}
        self.open: set[int] = set()
        """What is published and not acknowledged."""
        self.held: list[dict[int, Delivery]] = [{}, {}, {}]
        self.lost: list[Delivery] = []
        self.retried: set[int] = set()
        """What waits for its retry."""
        self.under_way: list[tuple[Connection, Delivery, int]] = []
        self.acknowledged = 0
        self.published = 0
        self.newest = 0
        self.moved = False

    def teardown(self) -> None:
        for connection, _, _ in self.under_way:
            connection.close()

    def locked(self) -> set[int]:
        return {delivery.event.id for _, delivery, _ in self.under_way}

    def blocked(self, process: int, event: int) -> bool:
        """Whether an earlier event of the key is neither this process's nor free."""
        if not self.by_key or self.keys[event] is None:
            return False
        for other in self.open:
            if other < event and self.keys[other] == self.keys[event] and other not in self.held[process]:
                elsewhere = any(other in held for held in self.held)
                if elsewhere or other in self.retried or other in self.locked():
                    return True
        return False

    def first_of_keys(self, process: int) -> list[Delivery]:
        """What a process may handle now: of each key the first."""
        found: list[Delivery] = []
        seen: set[str] = set()
        for event in sorted(self.held[process]):
            key = self.keys[event]
            if not self.by_key or key is None or key not in seen:
                found.append(self.held[process][event])
            if key is not None:
                seen.add(key)
        return [each for each in found if each.event.id not in self.locked()]

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4))
    def publish(self, keys: list[str | None]) -> None:
        self.platform.publisher.publish_all([Publication(self.topic, b"x", key=key) for key in keys])
        self.platform.transfer.run_once([self.topic])
        for event in self.platform.reader.read(self.topic, after=self.newest):
            self.keys[event.id] = event.key
            self.open.add(event.id)
            self.newest = event.id
        self.published += len(keys)

    @rule(process=PROCESSES, limit=st.integers(1, 4))
    def hand_out(self, process: int, limit: int) -> None:
        out = self.deliveries.hand_out(self.workers[process], -1, limit)
        handed = out.deliveries
        ids = [each.event.id for each in handed]
        assert len(ids) == len(set(ids)) <= limit
        held = set().union(*self.held)
        assert not held & set(ids)
        assert set(ids) <= self.open - self.retried - self.locked()
        for each in handed:
            assert not self.blocked(process, each.event.id)
            self.held[process][each.event.id] = each
        if len(ids) < limit and not out.more and len(self.rows()) < MOST:
            free = self.open - held - set(ids) - self.retried - self.locked()
            assert not [event for event in free if not self.blocked(process, event)]

    @rule(process=PROCESSES)
    def move_offset(self, process: int) -> None:
        self.deliveries.move_offset(self.workers[process], -1)

    @precondition(lambda self: any(self.held))
    @rule(process=PROCESSES, data=st.data())
    def acknowledge(self, process: int, data: Any) -> None:
        if first := self.first_of_keys(process):
            done = data.draw(st.sampled_from(first))
            assert self.deliveries.acknowledge([done]) == {done}
            self.forget(process, done)

    def forget(self, process: int, done: Delivery) -> None:
        self.held[process].pop(done.event.id, None)
        self.open.remove(done.event.id)
        self.acknowledged += 1

    @precondition(lambda self: any(self.held))
    @rule(process=PROCESSES, data=st.data())
    def begin_to_acknowledge(self, process: int, data: Any) -> None:
        if first := self.first_of_keys(process):
            done = data.draw(st.sampled_from(first))
            connection = self.platform.database.dedicated()
            connection.autocommit = False
            self.deliveries._acknowledge_in(connection, done)
            self.under_way.append((connection, done, process))

    @precondition(lambda self: self.under_way)
    @rule(commits=st.booleans())
    def end_to_acknowledge(self, *, commits: bool) -> None:
        connection, done, process = self.under_way.pop()
        if commits:
            connection.commit()
            self.forget(process, done)
        else:
            connection.rollback()
        connection.close()

    @precondition(lambda self: any(self.held))
    @rule(process=PROCESSES, data=st.data())
    def fail(self, process: int, data: Any) -> None:
        if first := self.first_of_keys(process):
            failed = data.draw(st.sampled_from(first))
            behind = [
                each
                for each in self.held[process].values()
                if self.by_key and failed.key is not None and each.key == failed.key and each is not failed
            ]
            assert self.deliveries.fail(failed, ValueError("refused"), counts=True, behind=behind) == LATER
            self.retried.add(failed.event.id)
            for each in [failed, *behind]:
                del self.held[process][each.event.id]

    @rule()
    def retries_are_due(self) -> None:
        with self.platform.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.consumer_delivery SET eql_due_at = now() "
                "WHERE eql_due_at IS NOT NULL AND eql_topic = %s",
                [self.topic],
            )
        self.retried.clear()

    @rule(process=PROCESSES)
    def die(self, process: int) -> None:
        """Let a lease end; the process goes on under another one, and its handlers too."""
        with self.platform.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.consumer_worker SET eql_expires_at = now() - interval '1 s' WHERE eql_id = %s",
                [self.workers[process]],
            )
        # The first process that comes ends it.
        self.deliveries.move_offset(self.workers[(process + 1) % 3], -1)
        with pytest.raises(WorkerLostError):
            self.deliveries.hand_out(self.workers[process], -1, 1)
        self.workers[process] = self.deliveries.register(f"process {process}")
        self.lost += [each for event, each in self.held[process].items() if event not in self.locked()]
        self.held[process].clear()

    @precondition(lambda self: self.keys and not self.under_way)
    @rule(data=st.data())
    def seek(self, data: Any) -> None:
        """Move the consumer, under the handlers that have events."""
        offset = data.draw(st.sampled_from(list(self.keys)))
        self.platform.seeker.execute(self.topic, "mailer", AtOffset(offset), force=True)
        self.moved = True
        self.lost += [each for held in self.held for each in held.values()]
        for held in self.held:
            held.clear()
        self.retried.clear()
        self.open = {event for event in self.keys if event >= offset}

    @rule()
    def claim(self) -> None:
        """Consume in another way, which has to wait while an event is handed out."""
        claim = self.platform.claims.claim(self.topic, "mailer", owner="another", max_events=3)
        if isinstance(claim, Claim):
            assert not self.rows()
            with self.platform.database.transaction() as connection:
                events = self.platform.claims.read(claim)
                self.platform.claims.commit(connection, claim)
            assert {event.id for event in events} == set(sorted(self.open)[: len(events)])
            self.open -= {event.id for event in events}
            self.acknowledged += len(events)

    @rule()
    def retain(self) -> None:
        """Drop what retention may drop: nothing that is not acknowledged."""
        self.platform.registry.set_retention(self.topic, Retention(events=1))
        self.platform.retention.run_once([self.topic])
        left = {event.id for event in self.platform.reader.read(self.topic)}
        assert self.open <= left
        self.keys = {event: key for event, key in self.keys.items() if event in left}

    @rule(storage=st.sampled_from(STORAGES))
    def change_form(self, storage: Storage) -> None:
        self.platform.registry.set_storage(self.topic, storage)

    @rule()
    def compact(self) -> None:
        # Of a log in rows, nothing is compacted.
        with suppress(RegistryError):
            self.platform.compactor.execute(self.topic)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def acknowledge_late(self, data: Any) -> None:
        late = data.draw(st.sampled_from(self.lost))
        self.lost.remove(late)
        event = late.event.id
        if any(event in held for held in self.held) or event not in self.open:
            assert self.deliveries.acknowledge([late]) == set()
            with pytest.raises(ClaimLostError):
                self.deliveries.fail(late, ValueError("late"), counts=True, behind=[])

    def rows(self) -> list[int]:
        with self.platform.database.connection() as connection:
            return [
                event
                for (event,) in connection.execute(
                    "SELECT eql_id FROM eventsql.consumer_delivery WHERE eql_topic = %s", [self.topic]
                )
            ]

    @invariant()
    def rows_are_what_was_handed_out_and_is_open(self) -> None:
        rows = self.rows()
        assert set(rows) <= self.open
        assert set().union(*self.held) <= set(rows) | self.locked()
        assert len(rows) <= MOST

    @invariant()
    def the_offset_is_before_everything_open(self) -> None:
        (state,) = self.platform.registry.consumer(self.topic, "mailer")
        assert all(state.last_event_id < event for event in self.open)
        assert state.consumed_events <= self.acknowledged

    def finish(self) -> None:
        """In the end everything is acknowledged, and the offset says so."""
        while self.under_way:
            self.end_to_acknowledge(commits=True)
        for process in (0, 1):
            self.die(process)
        self.retries_are_due()
        while self.open:
            self.hand_out(2, 4)
            for each in self.first_of_keys(2):
                assert self.deliveries.acknowledge([each])
                self.forget(2, each)
        self.move_offset(2)
        (state,) = self.platform.registry.consumer(self.topic, "mailer")
        assert state.last_event_id == self.newest
        assert self.moved or state.consumed_events == self.published
        assert state.lease_owner is None


class Finished(Machine):
    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            super().teardown()


@pytest.mark.parametrize("by_key", [True, False])
@pytest.mark.parametrize("examples", [6, pytest.param(200, marks=pytest.mark.nightly)])
def test_deliveries_behave_as_the_model(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, examples: int, *, by_key: bool
) -> None:
    monkeypatch.setattr(failures, "FIRST_BACKOFF", LATER)
    monkeypatch.setattr(failures, "MAX_BACKOFF", LATER)
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
    monkeypatch.setattr(compacting, "WINDOW_IDS", 5)
    machine = type("Machine", (Finished,), {"platform": platform, "by_key": by_key, "names": count()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
            deadline=None,
        ),
    )
