"""The contracts of the log hold in every order in which statements of publishers, transfers and consumers may come.

The orders are forced (interleaving.py): all of them where there are few, at night also where there are some hundreds,
else some, the same each time. After each step an independent reader looks at the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.batch import BatchRunner
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.model import NOT_PARTITIONED, Event
from eventsql_orchestration.publishing import log_writer, low_water, publisher
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.storage import sequences
from eventsql_orchestration.topics import registry
from tests.interleaving import Choose, Schedule, every_order, some_orders, stepping

BATCH = 2
"""Events of a publication."""

SOME = 6
MORE = 60
"""Orders that are drawn of each set of parties that has too many for all of them."""


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE effect (id bigint)")
        connection.execute("CREATE INDEX ON effect (id)")


pytestmark = pytest.mark.prepared.with_args(prepare)


class Log:
    """The topic and the parties that may act on it; each has connections of its own, as if it were a process."""

    def __init__(self, dsn: str, stack: ExitStack) -> None:
        self.dsn = dsn
        self._stack = stack
        self.observer = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self._drain = stack.enter_context(EventSQL(dsn, transfer=False))
        self._parties: dict[str, Callable[[], object]] = {}
        self._transfers: list[Transfer] = []
        self.expected: dict[str, int] = {}
        self._acknowledged: dict[str, int] = {}
        self._steps: list[str] = []
        self._base = 0
        self._seen: list[tuple[int, str]] = []

    # The parties

    def _platform(self) -> EventSQL:
        with stepping():
            platform = self._stack.enter_context(EventSQL(self.dsn, transfer=False))
            # What is done once, when a process begins, is no part of a schedule.
            platform.publisher.publish_all([Publication("orders", b"warm.0", key="k")] * publisher.STRAIGHT_LEAST)
            platform.publisher.publish(Publication("orders", b"warm.0", key="k"))
            platform.transfer.run_once()
            platform.consumers.consume_once("orders", "mailer", lambda *_: None)
        return platform

    def _publications(self, name: str, count: int = BATCH, *, first: int = 0) -> list[Publication]:
        return [Publication("orders", f"{name}.{first + number}".encode(), key="k") for number in range(count)]

    def _published(self, name: str, count: int = BATCH) -> None:
        self.expected[name] = count
        self._acknowledged[name] = len(self._steps)

    def outbox(self, name: str, *, commits: bool = True) -> None:
        """A service that publishes in a transaction of its own, through the buffer."""
        platform = self._platform()
        with stepping():
            session = self._stack.enter_context(psycopg.connect(self.dsn))

        def play() -> None:
            for publication in self._publications(name):
                platform.publisher.publish(publication, connection=session)
            if commits:
                session.commit()
                self._published(name)
            else:
                session.rollback()

        self._parties[name] = play

    def rolled_back(self, name: str) -> None:
        self.outbox(name, commits=False)

    def straight(self, name: str) -> None:
        """A publisher of a batch that takes the straight path, where it may."""
        platform = self._platform()

        def play() -> None:
            platform.publisher.publish_all(self._publications(name))
            self._published(name)

        self._parties[name] = play

    def mixed(self, name: str) -> None:
        """A publisher of one event through the buffer and then of a batch on the straight path."""
        platform = self._platform()

        def play() -> None:
            platform.publisher.publish(self._publications(name, 1)[0])
            platform.publisher.publish_all(self._publications(name, first=1))
            self._published(name, 1 + BATCH)

        self._parties[name] = play

    def transfer(self, name: str = "transfer", *, batch: int | None = None, runs: int = 1) -> None:
        platform = self._platform()
        with stepping():
            transfer = Transfer(platform.database, batch=batch)
            self._stack.callback(transfer.close)
            transfer.run_once()
            platform.publisher.publish(Publication("orders", b"warm.0"))
            transfer.run_once()
        self._transfers.append(transfer)

        def play() -> None:
            for _ in range(runs):
                transfer.run_once()

        self._parties[name] = play

    def join(self, kind: str, name: str | None = None) -> None:
        """Add a party by its kind, and by its name if it has one."""
        party: Callable[[str], None] = getattr(self, kind)
        party(name or kind)

    def consumer(self, name: str, *, passes: int = 1) -> None:
        platform = self._platform()
        # Which partitions there are does not change.
        platform.shards[0].consumers._keys = lambda *_: [  # type: ignore[method-assign]
            ConsumerPartition("orders", "mailer", NOT_PARTITIONED)
        ]

        def play() -> None:
            for _ in range(passes):
                platform.consumers.consume_once("orders", "mailer", _effects)

        self._parties[name] = play

    # What must hold

    def run(self, choose: Choose, *, before: Callable[[Log], object] | None = None) -> Schedule:
        """Let the parties act in an order of steps; raises where something does not hold, after whichever step."""
        if self._seen:
            self._base = self._seen[-1][0]
            self._seen.clear()
        else:
            self._settle()
            self._base = self._row("SELECT coalesce(max(eql_id), 0) FROM eventsql.orders_event")[0]
        self.expected.clear()
        self._acknowledged.clear()
        self._steps = []
        if before is not None:
            before(self)
        schedule = Schedule(self._parties, choose, self._check, self.observer, steps=self._steps)
        self._settle()
        self._check()
        values = [value for _, value in self._seen]
        assert sorted(values) == sorted(
            f"{name}.{number}" for name, count in self.expected.items() for number in range(count)
        ), "something is lost, or was not published"
        self._check_acknowledged(values)
        assert self._row("SELECT count(*) FROM eventsql.event_buffer") == (0,), "something stays in the buffer"
        return schedule

    def before(self, name: str = "before", count: int = BATCH) -> None:
        """Publish through the buffer before the schedule begins."""
        for publication in self._publications(name, count):
            self._drain.publisher.publish(publication)
        self._published(name, count)

    def move(self) -> None:
        """Transfer before the schedule begins."""
        self._drain.transfer.run_once()

    def _settle(self) -> None:
        """Move and consume what is left; by the transfers of the schedule, each with what it knows of the buffer."""
        for transfer in self._transfers or [self._drain.shards[0].transfer]:
            transfer.run_once()
        self._drain.consumers.consume_once("orders", "mailer", _effects)

    def _row(self, query: str, *parameters: Any) -> tuple[Any, ...]:
        row = self.observer.execute(query, parameters).fetchone()
        assert row is not None
        return row

    def _check(self) -> None:
        log, effects, offset = self._row(
            """
            SELECT array(SELECT eql_id || ' ' || convert_from(eql_value, 'UTF8') FROM eventsql.events('orders', %s)
                         ORDER BY eql_id),
                   array(SELECT id FROM effect WHERE id > %s ORDER BY id),
                   (SELECT coalesce(eql_last_event_id, 0) FROM eventsql.consumer)
            """,
            self._base,
            self._base,
        )
        events = [(int(event_id), value) for event_id, value in (each.split(" ") for each in log)]
        assert events[: len(self._seen)] == self._seen, "an event came before one that was seen, or it changed"
        self._seen = events
        for name in {value.split(".")[0] for _, value in events}:
            numbers = [int(value.split(".")[1]) for _, value in events if value.startswith(f"{name}.")]
            assert numbers == sorted(set(numbers)), f"{name}'s events are out of order or doubled"
        assert effects == [event_id for event_id, _ in events if event_id <= offset], "effects and offset differ"

    def _check_acknowledged(self, values: Sequence[str]) -> None:
        """What was acknowledged before another publication began is before it in the log: all have one key."""
        positions = {
            name: [position for position, value in enumerate(values) if value.startswith(f"{name}.")]
            for name in self.expected
        }
        for name, acknowledged in self._acknowledged.items():
            for later in self.expected:
                begins = [number for number, step in enumerate(self._steps) if step.startswith(f"{later}:")]
                if begins and begins[0] >= acknowledged:
                    assert max(positions[name]) < min(positions[later]), f"{later} overtook {name}"


def _effects(events: Sequence[Event], connection: Connection) -> None:
    connection.execute("INSERT INTO effect SELECT unnest(%s::bigint[])", [[event.id for event in events]])


@pytest.fixture
def log(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    # A batch of two is large enough, nobody gives up waiting, and nothing depends on the time.
    monkeypatch.setattr(publisher, "STRAIGHT_LEAST", 1)
    monkeypatch.setattr(publisher, "LOCK_TIMEOUT", 600.0)
    monkeypatch.setattr(log_writer, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(low_water, "OBSERVE_SECONDS", -1.0)
    monkeypatch.setattr(sequences, "TRUST_SECONDS", -1.0)
    monkeypatch.setattr(registry, "CACHE_SECONDS", 1e6)
    with ExitStack() as stack:
        yield Log(dsn, stack)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Lets a statement of the log say something else."""

    def change(statement: str, text: str) -> None:
        compose = Queries.__call__

        def changed(self: Queries, name: str, **identifiers: Any) -> sql.SQL:
            if name == statement:
                return sql.SQL(sql.SQL(text).format().as_string())
            return compose(self, name, **identifiers)

        monkeypatch.setattr(Queries, "__call__", changed)

    return change


# Orders of steps


def joined(log: Log, parties: str) -> Log:
    for party in parties.split(", "):
        kind, *name = party.split(" ")
        log.join(kind, *name)
    return log


def moved(log: Log) -> None:
    log.before()
    log.move()


PAIRS = ["outbox a, transfer", "rolled_back a, transfer", "outbox a, straight b", "straight a, transfer"]
"""Two parties with some hundreds of orders; the last pair has about 2,300."""

BEGINNINGS = [(0, 0), (0, 1), (1,)]
"""The first choices of all orders of two parties, by which a pair with many orders is several tests."""

OF_MORE_STEPS = [
    "transfer one, transfer other", "mixed a, transfer", "mixed a, straight b", "transfer, consumer",
    "straight a, consumer", "outbox a, outbox b, transfer", "outbox a, straight b, transfer",
    "outbox a, mixed b, consumer", "mixed a, mixed b, transfer", "straight a, transfer, consumer",
    "mixed a, transfer, transfer other", "transfer, consumer one, consumer other",
]  # fmt: skip
"""Parties with too many orders for a test of each."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("parties", "begin"), [*((pair, ()) for pair in PAIRS[:-1]), *((PAIRS[-1], begin) for begin in BEGINNINGS)]
)
def test_every_order_of_two_parties(log: Log, parties: str, begin: tuple[int, ...]) -> None:
    joined(log, parties)
    assert every_order(lambda choose: log.run(choose, before=Log.before), begin=begin) > 100


@pytest.mark.parametrize(
    ("parties", "before"), [("straight a, straight b", None), ("consumer one, consumer other", moved)]
)
def test_every_order_of_two_parties_with_few(log: Log, parties: str, before: Callable[[Log], object] | None) -> None:
    joined(log, parties)
    assert every_order(lambda choose: log.run(choose, before=before)) > 10


@pytest.mark.parametrize(
    ("parties", "orders"),
    [
        *((pair, 2 * SOME) for pair in PAIRS),
        *((parties, SOME) for parties in OF_MORE_STEPS),
        *(pytest.param(parties, MORE, marks=pytest.mark.nightly) for parties in OF_MORE_STEPS),
    ],
)
def test_some_orders_of_more_steps(log: Log, parties: str, orders: int) -> None:
    joined(log, parties)
    assert some_orders(lambda choose: log.run(choose, before=Log.before), orders, seed=len(parties)) > orders // 3


# That this would be seen


def test_these_tests_fail_for_a_writer_that_does_not_hold_the_topic(log: Log, says: Callable[[str, str], None]) -> None:
    says("await_topic", "SELECT 'orders' FROM (SELECT %(topic)s::text) asked")
    log.straight("a")
    log.straight("b")
    with pytest.raises(AssertionError, match="came before one that was seen"):
        every_order(log.run)


def test_these_tests_fail_for_a_mark_that_passes_an_open_transaction(
    log: Log, says: Callable[[str, str], None]
) -> None:
    says("writers", "SELECT '' FROM (SELECT %(relation)s::text) asked WHERE false")
    log.outbox("a")
    log.transfer()
    with pytest.raises(AssertionError, match="something is lost"):
        every_order(lambda choose: log.run(choose, before=Log.before))


def test_these_tests_fail_for_an_offset_that_does_not_move_with_its_effects(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchRunner, "_advance", lambda *_, **__: None)
    log.consumer("one")
    log.transfer()
    with pytest.raises(AssertionError, match="effects and offset differ"):
        every_order(lambda choose: log.run(choose, before=Log.before))
