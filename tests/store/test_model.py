"""The store equals a plain recomputation, for any appends, loads and handlers, and any deaths of processes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import AggregateClosedError, ConcurrentAppendError, ValidationError
from eventsql_orchestration.store import (
    Change,
    RecordedChange,
    Repository,
    SnapshottingAggregate,
    Subscription,
    SubscriptionOptions,
)


class Total(SnapshottingAggregate):
    """Adds numbers up, in an order that counts."""

    aggregate_type = "total"
    snapshot_every = 3

    def __init__(self, aggregate_id: str) -> None:
        super().__init__(aggregate_id)
        self.number = 0

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        self.number = self.number * 3 % 1_000_003 + data["n"]

    def state(self) -> Mapping[str, Any]:
        return {"number": self.number}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


class DeathError(BaseException):
    """The end of the handler's process, which is no failure of its change."""


@dataclass(frozen=True)
class Append:
    """Append numbers to an aggregate, at its version, at one before, or at any; or roll the append back."""

    aggregate: int
    numbers: tuple[int, ...]
    expected: str
    rolled_back: bool


@dataclass(frozen=True)
class Handle:
    """A subscription, begun anew, handles a batch; its process may die at one of the changes."""

    batch: int
    dies_at: int | None


@dataclass(frozen=True)
class Archive:
    """Close an aggregate and archive it, or move it out of the archive again."""

    aggregate: int
    back: bool


STEPS = st.lists(
    st.one_of(
        st.builds(
            Append,
            st.integers(0, 2),
            st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
            st.sampled_from(["right", "right", "wrong", "any"]),
            st.sampled_from([False, False, True]),
        ),
        st.builds(Handle, st.integers(1, 5), st.none() | st.integers(0, 4)),
        st.builds(Archive, st.integers(0, 2), st.booleans()),
    ),
    max_size=14,
)


class Model:
    """The store beside plain lists."""

    def __init__(self, platform: EventSQL) -> None:
        self.store = platform.store
        self.run = uuid.uuid4().hex
        self.totals = Repository(self.store, Total, platform.publisher)
        self.held: dict[str, list[int]] = {}
        self.order: list[tuple[str, int]] = []
        self.closed: set[str] = set()
        self.start = self.store.newest()

    def name(self, aggregate: int) -> str:
        return f"{self.run} {aggregate}"

    def append(self, step: Append) -> None:
        name = self.name(step.aggregate)
        held = self.held.setdefault(name, [])
        total = self.totals.load(name)
        assert total.version == len(held)
        if name in self.closed:
            changes = [Change("numbered", {"n": number}) for number in step.numbers]
            with pytest.raises(AggregateClosedError):
                self.store.append("total", name, changes, expected_version=len(held))
            return
        if step.expected == "right" and not step.rolled_back:
            for number in step.numbers:
                total.record("numbered", {"n": number})
            self.totals.save(total)
            self.note(name, step.numbers)
            return

        changes = [Change("numbered", {"n": number}) for number in step.numbers]
        expected: Any = {"right": len(held), "wrong": len(held) + 1, "any": "any"}[step.expected]
        try:
            with (
                self.store.database.transaction() as connection,
                connection.transaction(force_rollback=step.rolled_back),
            ):
                self.store.append("total", name, changes, expected_version=expected, connection=connection)
        except ConcurrentAppendError:
            assert step.expected == "wrong"
            return
        assert step.expected != "wrong"
        if not step.rolled_back:
            self.note(name, step.numbers)

    def archive(self, step: Archive) -> None:
        name = self.name(step.aggregate)
        if not self.held.get(name):
            with pytest.raises(ValidationError):
                self.store.archive_stream("total", name)
        elif step.back:
            self.store.unarchive_stream("total", name)
        else:
            self.store.close_stream("total", name)
            self.closed.add(name)
            self.store.archive_stream("total", name)

    def note(self, name: str, numbers: tuple[int, ...]) -> None:
        self.held[name] += numbers
        self.order += [(name, number) for number in numbers]

    def subscription(self, batch: int, dies_at: int | None = None) -> Subscription:
        handled = 0

        def handle(change: RecordedChange, connection: Connection) -> None:
            nonlocal handled
            if handled == dies_at:
                # The server sees the end of a process as the end of its connection.
                connection.close()
                raise DeathError
            handled += 1
            connection.execute(
                "INSERT INTO public.effects (name, n) VALUES (%s, %s)", [change.aggregate_id, change.data["n"]]
            )

        return self.store.subscribe(
            self.run, handle, types=["total"], start=self.start, background=False,
            options=SubscriptionOptions(batch=batch),
        )  # fmt: skip

    def handle(self, step: Handle) -> None:
        subscription = self.subscription(step.batch, step.dies_at)
        try:
            subscription.run_once()
        except DeathError:
            assert step.dies_at is not None

    def check(self) -> None:
        while self.subscription(3).run_once().more:
            pass
        with self.store.database.connection() as connection:
            rows = connection.execute("SELECT name, n FROM public.effects ORDER BY id").fetchall()
        mine = [row for row in rows if row[0].startswith(self.run)]
        assert mine == self.order == [(each.aggregate_id, each.data["n"]) for each in self.store.read_all(self.start)]

        for name, numbers in self.held.items():
            for version in range(len(numbers) + 1):
                loaded, plain = self.totals.load(name, upto_version=version), Total(name)
                for number in numbers[:version]:
                    plain.apply("numbered", {"n": number})
                assert (loaded.version, loaded.number) == (version, plain.number)


def prepare(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.effects (id bigint GENERATED ALWAYS AS IDENTITY, name text, n int)")


pytestmark = pytest.mark.prepared.with_args(prepare)


def run(platform: EventSQL, steps: list[Append | Handle | Archive]) -> None:
    model = Model(platform)
    for step in steps:
        if isinstance(step, Append):
            model.append(step)
        elif isinstance(step, Archive):
            model.archive(step)
        else:
            model.handle(step)
    model.check()
    platform.store.unsubscribe(model.run)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_the_store_is_what_a_plain_recomputation_says(platform: EventSQL, steps: list[Any]) -> None:
    run(platform, steps)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_the_store_is_what_a_plain_recomputation_says_at_length(platform: EventSQL, steps: list[Any]) -> None:
    run(platform, steps)
