"""A topic loses partitions while everybody else is at it, in many orders of their steps (see `interleaving`).

Whatever the order, every event is consumed once, and those of a key that this package publishes in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ClaimLostError, ConsumerNotFoundError
from eventsql_orchestration.model import Storage
from eventsql_orchestration.storage import legacy_writer_trigger
from tests.interleaving import Choose, Schedule, some_orders, stepping

KEYS = [f"rider {number}" for number in range(6)]

SAMPLE, ORDERS = 2, 12
"""Orders that are drawn of each set of parties, in CI and at night."""


class Parties:
    """The parties of one schedule on a topic of its own; each has connections of its own, as if it were a process."""

    def __init__(self, dsn: str, topic: Topic, stack: ExitStack, ours: EventSQL) -> None:
        self.dsn, self.topic, self._stack, self._ours = dsn, topic.name, stack, ours
        self.plays: dict[str, Callable[[], object]] = {}
        self.numbers = dict.fromkeys(KEYS, 0)
        ours.registry.register_topic(topic)
        ours.registry.register_consumer(Consumer(topic.name, "mailer", partitioned=True))
        self._publish(ours, 2)
        ours.transfer.run_once()

    def _publish(self, platform: EventSQL, each: int) -> None:
        for key in KEYS * each:
            platform.publisher.publish(Publication(self.topic, str(self.numbers[key]).encode(), key=key))
            self.numbers[key] += 1

    def _platform(self) -> EventSQL:
        with stepping():
            platform = self._stack.enter_context(EventSQL(self.dsn, transfer=False))
            # What is done once, when a process begins, is no part of a schedule.
            platform.registry.cached_topic(self.topic)
            platform.registry.consumer(self.topic, "mailer")
        return platform

    def handle(self, events: Sequence[Event], connection: Connection) -> None:
        for event in events:
            connection.execute(
                "INSERT INTO seen (topic, id, key, value) VALUES (%s, %s, %s, %s)",
                [self.topic, event.id, event.key, event.value],
            )

    def join(self, name: str) -> None:
        platform = self._platform()
        self.plays[name] = getattr(self, f"_{name}")(platform)

    def _change(self, platform: EventSQL) -> Callable[[], object]:
        return lambda: platform.repartitioner.repartition(self.topic, 2)

    def _publisher(self, platform: EventSQL) -> Callable[[], object]:
        return lambda: self._publish(platform, 1)

    def _transfer(self, platform: EventSQL) -> Callable[[], object]:
        return lambda: platform.transfer.run_once([self.topic])

    def _consumer(self, platform: EventSQL) -> Callable[[], object]:
        def play() -> None:
            for _ in range(2):
                platform.consumers.consume_once(self.topic, "mailer", self.handle)

        return play

    def _run(self, platform: EventSQL) -> Callable[[], object]:
        """As a sensor's tick and its run: a claim that is adopted and consumed, and may be overtaken."""

        def play() -> None:
            for partition in range(3):
                try:
                    claim = platform.claims.claim(self.topic, "mailer", partition, owner="a tick")
                except ConsumerNotFoundError:
                    # It is gone.
                    continue
                if not isinstance(claim, Claim):
                    continue
                try:
                    platform.claims.process(platform.claims.adopt(claim.id, owner="a run"), self.handle, batch=2)
                except ClaimLostError:
                    platform.claims.release(claim)

        return play

    def _java(self, _platform: EventSQL) -> Callable[[], object]:
        """The statements of EventSQL's library: it publishes by the old number, and moves events as they are."""
        with stepping():
            session = self._stack.enter_context(psycopg.connect(self.dsn, options="-c search_path=eventsql"))
        log = f"{self.topic}_event"

        def play() -> None:
            for partition in range(3):
                session.execute(
                    "INSERT INTO event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
                    "VALUES (%s, %s, NULL, 'java', '{}')",
                    [self.topic, partition],
                )
            session.commit()
            locked = session.execute(
                "SELECT FROM event_buffer_lock WHERE eql_topic = %s FOR UPDATE SKIP LOCKED", [self.topic]
            ).fetchone()
            if locked is not None:
                rows = session.execute(
                    "SELECT eql_id FROM event_buffer WHERE eql_topic = %s ORDER BY eql_id", [self.topic]
                ).fetchall()
                ids = [event_id for (event_id,) in rows]
                session.execute(
                    f"INSERT INTO {log} (eql_partition, eql_key, eql_value, eql_metadata, eql_buffered_at) "
                    "SELECT eql_partition, eql_key, eql_value, eql_metadata, eql_created_at FROM event_buffer "
                    "WHERE eql_id = ANY (%s)",
                    [ids],
                )
                session.execute("DELETE FROM event_buffer WHERE eql_id = ANY (%s)", [ids])
            session.commit()

        return play

    def check_everything_was_consumed_once(self) -> None:
        self._ours.transfer.run_once()
        while self._ours.consumers.consume_once(self.topic, "mailer", self.handle):
            pass
        log = self._ours.reader.read(self.topic)
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute("SELECT id, key, value FROM seen WHERE topic = %s ORDER BY at", [self.topic])
            seen = rows.fetchall()
        assert sorted(event_id for event_id, _, _ in seen) == [event.id for event in log]
        for key, count in self.numbers.items():
            assert [int(value) for _, of, value in seen if of == key] == list(range(count))
        assert legacy_writer_trigger.stranded(self._ours.database, self.topic) == []
        assert [state.partition for state in self._ours.registry.consumer(self.topic, "mailer")] == [0, 1]
        assert len(log) == sum(self.numbers.values()) + (3 if "java" in self.plays else 0)


@pytest.fixture
def observer(dsn: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE seen (at bigserial, topic text, id bigint, key text, value bytea)")
        yield connection


@pytest.mark.parametrize("orders", [SAMPLE, pytest.param(ORDERS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "parties",
    ["change publisher consumer", "change java consumer", "change run consumer", "change transfer publisher run"],
)
def test_a_change_in_many_orders_loses_doubles_and_reorders_nothing(
    dsn: str, platform: EventSQL, observer: psycopg.Connection[tuple[object, ...]], parties: str, orders: int
) -> None:
    numbers = itertools.count(1)

    def run(choose: Choose) -> Schedule:
        with ExitStack() as stack:
            # EventSQL's library writes rows alone.
            storage: Storage | None = "rows" if "java" in parties else None
            present = Parties(dsn, Topic(f"orders{next(numbers)}", 3, storage=storage), stack, platform)
            for name in parties.split():
                present.join(name)
            steps: list[str] = []
            schedule = Schedule(present.plays, choose, lambda: None, observer, steps=steps)
            try:
                present.check_everything_was_consumed_once()
            except AssertionError as error:
                error.add_note("after the steps\n  " + "\n  ".join(steps))
                raise
            return schedule

    assert some_orders(run, orders, seed=1) == orders
