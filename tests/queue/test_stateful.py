"""Random sequences of all that may be done to a queue and to its dead letters, against a model in memory.

After each step, every message is in the queue, the state and the history that the model says.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, NamedTuple

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import MessageNotFoundError
from eventsql_orchestration.queue import (
    ErasedMessages,
    Message,
    NewMessage,
    PeekedMessage,
    Queue,
    drop_expired_archives,
    queue_table,
)
from tests.queue.model import TIMED_OUT, Entry, Model

MAX_RECEIVES = 3
LATER = 1_000.0
"""Seconds that no test waits for."""

ALL = 10_000


class Wanted(NamedTuple):
    """A message to send. `when` is now, later by a delay or a due time, or a due time that has passed."""

    key: str | None
    when: str
    priority: int
    deduplication_id: str | None

    @property
    def plain(self) -> bool:
        return self == (None, "now", 0, None)

    def message(self, body: bytes) -> NewMessage:
        due = {"due": datetime.now(UTC) + timedelta(seconds=LATER), "past": datetime.now(UTC) - timedelta(hours=1)}
        return NewMessage(
            body, key=self.key, delay=LATER if self.when == "delay" else 0.0, due=due.get(self.when),
            priority=self.priority, deduplication_id=self.deduplication_id,
        )  # fmt: skip


def rare(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * 3 * len(others) + [*others])


wanted = st.builds(
    Wanted,
    st.sampled_from(["a", "b", None]),
    rare("now", "delay", "due", "past"),
    rare(0, 5, 9),
    rare(None, "x", "y"),
)
some = st.lists(wanted, min_size=1, max_size=4)
in_dead = rare(False, True)
in_sql = rare(False, True)


class Place:
    """A queue in the database and in memory, and the messages that its receivers were given."""

    def __init__(self, database: Database, name: str, model: Model, **options: Any) -> None:
        self.database = database
        self.name = name
        self.options = {"ordered": model.ordered, **options}
        self.queue = self.opened()
        self.queue.definition()
        self.model = model
        self.given: list[Message] = []
        self.deduplicated: dict[str, int] = {}

    def opened(self) -> Queue:
        return Queue(self.database, self.name, **self.options)

    def peek(self) -> list[PeekedMessage]:
        return self.queue.peek(ALL)


class Clock:
    """The clock by which a receiver that goes on from its last place now and then looks from the start.

    It moves in steps alone: otherwise, the time that a statement takes would decide which messages a receive finds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Transaction:
    """An open transaction of a sender, and its messages of each queue."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sent: list[tuple[Place, list[Entry], dict[str, int]]] = []

    def deduplicated(self, place: Place) -> dict[str, int]:
        found: dict[str, int] = {}
        for each, _, ids in self.sent:
            if each is place:
                found |= ids
        return found


class Machine(RuleBasedStateMachine):
    """Two queues of fresh names for each example: one, and the one of its dead letters."""

    database: ClassVar[Database]
    ordered: ClassVar[bool]
    names: ClassVar[Iterator[int]]
    clock: ClassVar[Clock]

    @initialize(dead_in_order=st.booleans(), archive=st.booleans())
    def begin(self, *, dead_in_order: bool, archive: bool) -> None:
        name = f"queue {next(self.names)}"
        self.bodies = itertools.count()
        self.dead = Place(self.database, f"{name} dead", Model(dead_in_order))
        self.main = Place(
            self.database, name, Model(self.ordered, MAX_RECEIVES),
            max_receives=MAX_RECEIVES, dead_letters=self.dead.name, retention=86_400 if archive else None,
        )  # fmt: skip
        self.archive = archive
        self.transaction: Transaction | None = None

    def teardown(self) -> None:
        if hasattr(self, "transaction") and self.transaction is not None:
            self.transaction.connection.close()

    def places(self) -> tuple[Place, Place]:
        return self.main, self.dead

    def place(self, dead: bool) -> Place:
        return self.dead if dead else self.main

    # Sending

    @rule(dead=in_dead, messages=some, sql=in_sql)
    def send(self, dead: bool, messages: list[Wanted], sql: bool) -> None:
        place = self.place(dead)
        if self.transaction is not None:
            # Another sender of an id that is not committed waits for the transaction.
            pending = self.transaction.deduplicated(place)
            messages = [each._replace(deduplication_id=None) if each.deduplication_id in pending else each
                        for each in messages]  # fmt: skip
        entries, ids = self._send(place, messages, place.deduplicated, sql=sql)
        for entry in entries:
            place.model.add(entry)
        place.deduplicated |= ids

    @rule(dead=in_dead, messages=some, sql=in_sql, undone=rare(False, True))
    def send_in_transaction(self, dead: bool, messages: list[Wanted], sql: bool, undone: bool) -> None:
        if self.transaction is None:
            connection = self.database.dedicated()
            connection.execute("BEGIN")
            self.transaction = Transaction(connection)
        opened, place = self.transaction, self.place(dead)
        known = {**place.deduplicated, **opened.deduplicated(place)}
        # With `undone`, it rolls back to a savepoint.
        with opened.connection.transaction(force_rollback=undone):
            sent = self._send(place, messages, known, sql=sql, connection=opened.connection)
        if not undone:
            opened.sent.append((place, *sent))

    @precondition(lambda self: self.transaction is not None)
    @rule(commit=st.booleans())
    def end_transaction(self, commit: bool) -> None:
        opened, self.transaction = self.transaction, None
        assert opened is not None
        if commit:
            opened.connection.commit()
            for place, entries, ids in opened.sent:
                for entry in entries:
                    place.model.add(entry)
                place.deduplicated |= ids
        opened.connection.close()

    def _send(
        self, place: Place, messages: list[Wanted], known: dict[str, int],
        *, sql: bool, connection: Connection | None = None,
    ) -> tuple[list[Entry], dict[str, int]]:  # fmt: skip
        """Send messages. Gives the new ones, and the deduplication ids with the messages that were sent first."""
        bodies = [next(self.bodies) for _ in messages]
        if sql:
            # It takes no due times.
            messages = [each._replace(when="now" if each.when == "past" else each.when) for each in messages]
            with self._within(connection) as joined:
                (ids,) = joined.execute(
                    "SELECT eventsql.queue_send_all(%s, %s, keys => %s, delays => %s, priorities => %s, "
                    "deduplication_ids => %s::text[])",
                    [place.name, [b"%d" % body for body in bodies], [each.key for each in messages],
                     [LATER if each.when != "now" else 0.0 for each in messages],
                     [each.priority for each in messages], [each.deduplication_id for each in messages]],
                ).fetchone() or ()  # fmt: skip
        elif len(messages) == 1:
            given = messages[0].message(b"%d" % bodies[0])
            ids = [
                place.queue.send(
                    given.body, key=given.key, delay=given.delay, due=given.due, priority=given.priority,
                    deduplication_id=given.deduplication_id, connection=connection,
                )
            ]  # fmt: skip
        else:
            ids = place.queue.send_all(
                [b"%d" % body if each.plain else each.message(b"%d" % body)
                 for each, body in zip(messages, bodies, strict=True)],
                connection=connection,
            )  # fmt: skip

        entries: list[Entry] = []
        new: dict[str, int] = {}
        for each, body, id_ in zip(messages, bodies, ids, strict=True):
            first = {**known, **new}.get(each.deduplication_id or "")
            if each.deduplication_id is not None:
                # Also of a repeated one: its sender holds the id until its transaction ends.
                new[each.deduplication_id] = id_
            if first is not None:
                assert id_ == first
                continue
            entries.append(Entry(id_, body, each.key, each.priority, hidden=each.when in ("delay", "due")))
        return entries, new

    @contextmanager
    def _within(self, connection: Connection | None) -> Iterator[Connection]:
        if connection is not None:
            yield connection
            return
        with self.database.connection() as own:
            yield own

    @precondition(lambda self: self.transaction is None)
    @rule()
    def let_deduplication_windows_end(self) -> None:
        self._execute("UPDATE eventsql.queue_deduplication SET eql_expires_at = now() - interval '1 s'")
        for place in self.places():
            place.deduplicated.clear()

    # Receiving

    @rule(dead=in_dead, most=st.integers(1, 4), way=st.sampled_from(["goes on", "from the start", "new", "sql"]))
    def receive(self, dead: bool, most: int, way: str) -> None:
        if way == "from the start":
            self.clock.now += max(queue_table.FROM_START_SECONDS)
        place = self.place(dead)
        before = place.model.receivable()
        if way == "sql":
            ids = self._receive_in_sql(place, most)
        else:
            queue = place.opened() if way == "new" else place.queue
            messages = queue.receive(max_messages=most, visibility_timeout=LATER)
            place.given += messages
            ids = [message.id for message in messages]
        if place is self.main:
            self._bury()

        possible = place.model.receivable()
        assert len(set(ids)) == len(ids) <= most
        assert set(ids) <= possible
        taken, left = ([place.model.entries[each] for each in chosen] for chosen in (ids, possible - set(ids)))
        if place.model.ordered:
            keys = [entry.key for entry in taken if entry.key is not None]
            assert len(keys) == len(set(keys))
        # A message that comes into sight when a dead letter leaves may come after the call has looked at its priority.
        least = min((entry.priority for entry in taken), default=0)
        assert all(entry.priority <= least for entry in left if entry.id in before)
        if len(ids) < most:
            # A receiver that goes on from its last place may pass over the plain messages before it.
            assert all(taken and way == "goes on" and entry.priority == 0 for entry in left)
        for message in place.given[len(place.given) - len(ids) :]:
            place.model.received(message.id, message.receipt)
            entry = place.model.entries[message.id]
            assert (int(message.body), message.key, message.receives, message.priority) == (
                entry.body, entry.key, entry.receives, entry.priority,
            )  # fmt: skip
            assert _reasons(message.history) == entry.history
        self._look_behind(place)

    def _receive_in_sql(self, place: Place, most: int) -> list[int]:
        with self.database.connection() as connection:
            rows = connection.execute(
                "SELECT id, body, key, receives, receipt, priority, sent_at, history "
                "FROM eventsql.queue_receive(%s, %s, %s)",
                [place.name, most, LATER],
            ).fetchall()
        place.given += [
            Message(id_, body, key, {}, receives, receipt, priority, sent_at, history or ())
            for id_, body, key, receives, receipt, priority, sent_at, history in rows
        ]
        return [row[0] for row in rows]

    def _bury(self) -> None:
        """Learn which messages a receiver has moved to the dead letters: it goes as far as it looks."""
        left = {message.id for message in self.main.peek()}
        if gone := sorted(set(self.main.model.entries) - left):
            for each in gone:
                assert each in self.main.model.receivable()
                assert self.main.model.spent(self.main.model.entries[each])
                self._move(each)

    def _move(self, id_: int) -> None:
        """Note that a message has moved to the dead letters, and its id there."""
        letters = {int(message.body): message.id for message in self.dead.peek()}
        body = self.main.model.entries[id_].body
        self.main.model.move(id_, self.dead.model, letters[body], "moved to the dead letters", dead=True)

    def _look_behind(self, place: Place) -> None:
        """Learn what a receiver has done to messages that wait for others: it parks them, or looks a second later."""
        for message in place.peek():
            entry = place.model.entries[message.id]
            if entry.hidden or message.state == "visible":
                continue
            assert place.model.waits(entry)
            if entry.receipt is not None:
                entry.note(TIMED_OUT)
            entry.receipt = None
            if message.state == "delayed":
                # The second is not over yet.
                entry.hidden = True
                self._execute(
                    "UPDATE eventsql.queue_message SET eql_visible_at = eql_visible_at + interval '1 hour' "
                    "WHERE eql_id = %s",
                    message.id,
                )

    # Settling

    @precondition(lambda self: any(place.given for place in self.places()))
    @rule(data=st.data(), way=st.sampled_from(["alone", "alone", "committed", "rolled back", "sql"]))
    def acknowledge(self, data: st.DataObject, way: str) -> None:
        place = data.draw(st.sampled_from([place for place in self.places() if place.given]))
        chosen = data.draw(st.lists(st.sampled_from(place.given), min_size=1, max_size=3, unique_by=lambda m: m.id))
        missing = {message.id for message in chosen if not place.model.holds(message.id, message.receipt)}

        if way == "sql":
            with self._refused(missing):
                self._execute(
                    "SELECT eventsql.queue_acknowledge_all(%s, %s, %s)",
                    place.name, [each.id for each in chosen], [each.receipt for each in chosen],
                )  # fmt: skip
        else:
            rolled_back = way == "rolled back"
            with (
                self._refused(missing),
                self.database.connection() as connection,
                connection.transaction(force_rollback=rolled_back),
            ):
                place.queue.acknowledge_all(chosen, connection=None if way == "alone" else connection)
        if missing or way == "rolled back":
            return
        for message in chosen:
            place.model.acknowledge(message.id, archived=self.archive and place is self.main)

    @precondition(lambda self: any(place.given for place in self.places()))
    @rule(
        data=st.data(),
        how=st.sampled_from(["release", "release", "release in sql", "give back", "fail"]),
        delayed=st.booleans(),
        reason=st.sampled_from([None, "no"]),
    )
    def give_back(self, data: st.DataObject, how: str, delayed: bool, reason: str | None) -> None:
        place, message = self._given(data)
        holds = place.model.holds(message.id, message.receipt)
        delay, missing, spent = LATER if delayed else 0.0, set() if holds else {message.id}, False
        match how:
            case "release":
                with self._refused(missing):
                    place.queue.release(message, delay=delay, reason=reason)
            case "release in sql":
                with self._refused(missing):
                    self._execute(
                        "SELECT eventsql.queue_release(%s, %s, %s, delay => %s, reason => %s)",
                        place.name, message.id, message.receipt, delay, reason,
                    )  # fmt: skip
            case "give back":
                # It leaves a message that is not held.
                place.queue.give_back([message])
                delayed, reason = False, None
                if holds:
                    place.model.entries[message.id].unhandled += 1
            case "fail":
                reason = "failed"
                spent = holds and place.model.spent(place.model.entries[message.id])
                with self._refused(missing):
                    letters = place.queue.release_failed(message, delay=delay, reason=reason)
                    assert letters == (self.dead.name if spent else None)
        if holds:
            place.model.release(message.id, delayed=delayed, reason=reason)
        if spent:
            self._move(message.id)

    @precondition(lambda self: any(place.given for place in self.places()))
    @rule(data=st.data(), sql=in_sql)
    def extend(self, data: st.DataObject, sql: bool) -> None:
        place, message = self._given(data)
        holds = place.model.holds(message.id, message.receipt)
        with self._refused(set() if holds else {message.id}):
            if sql:
                self._execute(
                    "SELECT eventsql.queue_extend(%s, %s, %s, %s)", place.name, message.id, message.receipt, LATER
                )
            else:
                place.queue.extend(message, LATER)
        if holds:
            place.model.entries[message.id].hidden = True

    def _given(self, data: st.DataObject) -> tuple[Place, Message]:
        return data.draw(st.sampled_from([(place, message) for place in self.places() for message in place.given]))

    @contextmanager
    def _refused(self, missing: set[int]) -> Iterator[None]:
        """Expect the error of a call on these messages, which are not held; no error without one."""
        if not missing:
            yield
            return
        with pytest.raises((MessageNotFoundError, psycopg.errors.NoDataFound)) as raised:
            yield
        if isinstance(raised.value, MessageNotFoundError):
            assert set(raised.value.ids) == missing

    # Looking after

    @precondition(lambda self: any(place.model.entries for place in self.places()))
    @rule(data=st.data(), everything=st.booleans())
    def pass_time(self, data: st.DataObject, everything: bool) -> None:
        """Let delays and visibility timeouts end: all of them, or those of one message."""
        entries = [entry for place in self.places() for entry in place.model.entries.values()]
        chosen = entries if everything else [data.draw(st.sampled_from(entries))]
        for entry in chosen:
            entry.hidden = False
        self._execute(
            "UPDATE eventsql.queue_message SET eql_due_at = least(eql_due_at, now()), "
            "eql_visible_at = CASE WHEN eql_visible_at = 'infinity' THEN eql_visible_at ELSE now() END "
            "WHERE eql_id = ANY (%s)",
            [entry.id for entry in chosen],
        )

    @rule(dead=st.booleans())
    def purge(self, dead: bool) -> None:
        place = self.place(dead)
        assert place.queue.purge() == len(place.model.entries)
        place.model.entries.clear()

    @rule(dead=st.booleans(), key=st.sampled_from("ab"))
    def erase(self, dead: bool, key: str) -> None:
        place = self.place(dead)
        messages = place.model.erase(key)
        letters = self.dead.model.erase(key, letters=True) if place is self.main else 0
        expected = ErasedMessages(messages, letters, place.model.erase_archived(key))
        assert place.queue.count_of_keys([key]) == expected
        assert place.queue.erase([key]) == expected

    @rule(data=st.data(), how=st.sampled_from(["all", "all", "some", "by id"]))
    def redrive(self, data: st.DataObject, how: str) -> None:
        letters = sorted(
            (entry for entry in self.dead.model.entries.values() if entry.dead), key=lambda entry: entry.id
        )
        free = [entry for entry in letters if not entry.hidden or entry.receipt is None]
        if how == "by id" and letters:
            chosen = data.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=3, unique=True))
            free = [entry for entry in free if entry in chosen]
            assert self.main.queue.redrive(ids=[entry.id for entry in chosen]) == len(free)
        else:
            limit = data.draw(st.integers(1, 3)) if how == "some" else None
            free = free[:limit]
            assert self.main.queue.redrive(limit) == len(free)
        found = {int(message.body): message.id for message in self.main.peek()}
        for entry in free:
            self.dead.model.move(entry.id, self.main.model, found[entry.body], "redriven", dead=False)
        # The oldest is first again.
        assert [entry.id for entry in free] == sorted(entry.id for entry in free)

    @precondition(lambda self: self.main.model.archive)
    @rule()
    def let_archives_expire(self) -> None:
        self._execute("SELECT eventsql.make_queue_archive(now() - interval '5 days')")
        self._execute(
            "UPDATE eventsql.queue_archive SET eql_expires_at = now() - interval '5 days' WHERE eql_queue = "
            "(SELECT eql_id FROM eventsql.queue WHERE eql_name = %s)",
            self.main.name,
        )
        assert drop_expired_archives(self.database)
        self.main.model.archive.clear()

    def _execute(self, statement: str, *values: object) -> None:
        with self.database.connection() as connection:
            connection.execute(statement.encode(), values)

    # What holds after each step

    @invariant()
    def each_message_is_where_the_model_says(self) -> None:
        for place in self.places():
            found = {message.id: message for message in place.peek()}
            assert found.keys() == place.model.entries.keys()
            for entry in place.model.entries.values():
                message = found[entry.id]
                assert (int(message.body), message.key, message.priority, message.receives) == (
                    entry.body, entry.key, entry.priority, entry.receives,
                )  # fmt: skip
                assert message.origin == (self.main.name if entry.dead else None)
                assert _reasons(message.history) == entry.history
                assert message.state in _states(place.model, entry)

            counted, states = place.queue.statistics(), Counter(message.state for message in found.values())
            assert (counted.visible, counted.in_flight, counted.delayed, counted.blocked) == tuple(
                states[state] for state in ("visible", "in flight", "delayed", "blocked")
            )
            letters = sum(entry.dead for entry in self.dead.model.entries.values())
            assert counted.dead == (letters if place is self.main else 0)

    @invariant()
    def the_archive_has_what_was_acknowledged(self) -> None:
        archived = {each.id: (int(each.body), each.receives) for each in self.main.queue.archived(ALL)}
        assert archived == {id_: (entry.body, entry.receives) for id_, entry in self.main.model.archive.items()}


def _states(model: Model, entry: Entry) -> set[str]:
    """The states that a message may have: one that waits for another may be parked or not.

    A message that waited for a later one, which a receiver held, stays parked until a receiver finds the later one.
    """
    if entry.hidden and entry.receipt is not None:
        return {"in flight"}
    state = "delayed" if entry.hidden else "visible"
    waited = (
        model.ordered
        and entry.key is not None
        and any(each.receives and each.id > entry.id for each in model.entries.values() if each.key == entry.key)
    )
    return {state, "blocked"} if waited or model.waits(entry) else {state}


def _reasons(history: Sequence[Any]) -> list[tuple[int, str]]:
    return [(each["receive"], each["reason"]) for each in history]


def _run(database: Database, monkeypatch: pytest.MonkeyPatch, *, ordered: bool, examples: int, steps: int) -> None:
    Machine.database, Machine.ordered, Machine.names, Machine.clock = database, ordered, iter(range(10**9)), Clock()
    monkeypatch.setattr(queue_table, "time", Machine.clock)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_does_what_its_model_does(
    database: Database, monkeypatch: pytest.MonkeyPatch, *, ordered: bool
) -> None:
    _run(database, monkeypatch, ordered=ordered, examples=12, steps=25)


@pytest.mark.nightly
# Parts, each of which a busy machine finishes within a test's timeout.
@pytest.mark.parametrize("_part", range(4))
@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_does_what_its_model_does_for_long(
    database: Database, monkeypatch: pytest.MonkeyPatch, _part: int, *, ordered: bool
) -> None:
    _run(database, monkeypatch, ordered=ordered, examples=75, steps=60)
