"""Random sequences of sends, receives, acknowledgements, releases and timeouts, against a model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import MessageNotFoundError
from eventsql_orchestration.queue import Message, NewMessage, Queue
from tests.queue.model import Model

KEYS = st.sampled_from(["a", "b", None])
MAX_RECEIVES = 3


class Machine(RuleBasedStateMachine):
    """One queue of a fresh name for each example; the test gives the database and whether the queue keeps an order."""

    database: ClassVar[Database]
    ordered: ClassVar[bool]
    names: ClassVar[Iterator[int]]

    def __init__(self) -> None:
        super().__init__()
        name = f"queue {next(self.names)}"
        self.queue = Queue(self.database, name, ordered=self.ordered, max_receives=MAX_RECEIVES)
        self.model = Model(self.ordered, MAX_RECEIVES)
        self.dead = 0
        self.given: list[Message] = []

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4))
    def send(self, keys: list[str | None]) -> None:
        for sent, key in zip(self.queue.send_all([NewMessage(b"x", key=key) for key in keys]), keys, strict=True):
            self.model.send(sent, key)

    @rule(most=st.integers(1, 4))
    def receive(self, most: int) -> None:
        messages = self.queue.receive(max_messages=most, visibility_timeout=1_000)
        # Dead letters go as far as the receiver looks.
        self.model_bury(messages)
        possible = self.model.receivable()
        assert {message.id for message in messages} <= possible
        if self.ordered:
            keys = [message.key for message in messages if message.key is not None]
            assert len(keys) == len(set(keys))
        if len(messages) < most:
            assert {message.id for message in messages} == possible
        for message in messages:
            self.model.received(message.id, message.receipt)
            assert message.receives == self.model.entries[message.id].receives
        self.given += messages

    def model_bury(self, messages: list[Message]) -> None:
        with self.database.connection() as connection:
            left = {
                row[0]
                for row in connection.execute(
                    "SELECT m.eql_id FROM eventsql.queue_message m JOIN eventsql.queue q ON q.eql_id = m.eql_queue "
                    "WHERE q.eql_name = %s",
                    [self.queue.name],
                )
            }
        gone = set(self.model.entries) - left
        for each in gone:
            assert self.model.entries[each].receives >= MAX_RECEIVES
            assert not self.model.entries[each].hidden
            del self.model.entries[each]
        self.dead += len(gone)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.given), min_size=1, max_size=3, unique_by=lambda m: m.id))
        missing = {message.id for message in chosen if not self.model.holds(message.id, message.receipt)}
        if missing:
            with pytest.raises(MessageNotFoundError) as raised:
                self.queue.acknowledge_all(chosen)
            assert set(raised.value.ids) == missing
            return
        self.queue.acknowledge_all(chosen)
        for message in chosen:
            self.model.acknowledge(message.id)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), delayed=st.booleans())
    def release(self, data: st.DataObject, *, delayed: bool) -> None:
        message = data.draw(st.sampled_from(self.given))
        if not self.model.holds(message.id, message.receipt):
            with pytest.raises(MessageNotFoundError):
                self.queue.release(message)
            return
        self.queue.release(message, delay=1_000 if delayed else 0, reason="no")
        self.model.release(message.id, delayed=delayed)

    @rule()
    def expire(self) -> None:
        with self.database.connection() as connection:
            connection.execute(
                "UPDATE eventsql.queue_message m SET eql_visible_at = now() FROM eventsql.queue q "
                "WHERE q.eql_id = m.eql_queue AND q.eql_name = %s AND m.eql_visible_at BETWEEN now() AND '9999-1-1'",
                [self.queue.name],
            )
        self.model.expire()

    @invariant()
    def nothing_is_lost(self) -> None:
        counted = self.queue.statistics()
        assert counted.depth == len(self.model.entries)
        assert counted.dead == self.dead


def _run(database: Database, *, ordered: bool, examples: int, steps: int) -> None:
    Machine.database, Machine.ordered, Machine.names = database, ordered, iter(range(10**9))
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_does_what_its_model_does(database: Database, *, ordered: bool) -> None:
    _run(database, ordered=ordered, examples=12, steps=25)


@pytest.mark.nightly
@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_does_what_its_model_does_for_long(database: Database, *, ordered: bool) -> None:
    _run(database, ordered=ordered, examples=300, steps=60)
