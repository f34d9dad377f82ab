"""Events of declared types come back in their newest form, from whatever form they were stored in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from threading import Lock
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from eventsql_orchestration import EventSQL
from eventsql_orchestration.errors import ChangeSchemaError, ValidationError
from eventsql_orchestration.store import (
    Change,
    EventAggregate,
    Events,
    EventType,
    Repository,
    SnapshottingAggregate,
    Store,
)
from tests.effects import MuteError


@dataclass(frozen=True)
class Opened:
    owner: str


@dataclass(frozen=True)
class Deposited:
    """Version 1 had whole euros as `amount`, version 2 cents as `amount`, version 3 has `cents` and a currency."""

    cents: int
    currency: str


class Closed(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    at: datetime
    balance: Decimal = Field(alias="lastBalance")
    reasons: tuple[str, ...] = ()


TYPES = (
    EventType("opened", Opened),
    EventType(
        "deposited", Deposited, 3,
        {
            1: lambda data: {"amount": data["amount"] * 100},
            2: lambda data: {"cents": data["amount"], "currency": "EUR"},
        },
    ),
    EventType("closed", Closed),
)  # fmt: skip
EVENTS = Events(TYPES)


class Account(EventAggregate, SnapshottingAggregate):
    aggregate_type = "account"
    snapshot_every = 3
    events = EVENTS

    def __init__(self, aggregate_id: str) -> None:
        super().__init__(aggregate_id)
        self.cents = 0
        self.closed_at: datetime | None = None

    def when(self, event: Any) -> None:
        match event:
            case Deposited(cents=cents):
                self.cents += cents
            case Closed(at=at):
                self.closed_at = at

    def state(self) -> Mapping[str, Any]:
        return {"cents": self.cents}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cents = state["cents"]


@pytest.fixture
def store(platform: EventSQL) -> Store:
    return platform.store


@pytest.fixture
def accounts(platform: EventSQL, store: Store) -> Repository[Account]:
    return Repository(store, Account, platform.publisher)


def test_an_aggregate_of_events_loads_as_it_was_saved(accounts: Repository[Account], store: Store) -> None:
    at = datetime(2026, 1, 5, tzinfo=UTC)
    account = accounts.load("1")
    account.record_event(Opened("ann"), metadata={"who": "clerk"})
    account.record("deposited", {"cents": 700, "currency": "EUR"})
    account.record_event(Closed(at=at, lastBalance=Decimal("7.00"), reasons=("moved",)))
    assert accounts.save(account) == 3
    stored = store.load("account", "1")
    assert [change.schema_version for change in stored] == [1, 3, 1]
    assert stored[0].metadata == {"who": "clerk"}
    assert [EVENTS.read(change) for change in stored] == [
        Opened("ann"), Deposited(700, "EUR"), Closed(at=at, lastBalance=Decimal("7.00"), reasons=("moved",))
    ]  # fmt: skip
    assert accounts.load("1").cents == 700
    assert accounts.load("1", upto_version=2).cents == 700


def test_changes_of_earlier_versions_are_read_in_their_newest_form(accounts: Repository[Account], store: Store) -> None:
    store.append(
        "account", "1",
        [
            Change("deposited", {"amount": 3}),
            Change("deposited", {"amount": 50}, schema_version=2),
            Change("deposited", {"cents": 5, "currency": "EUR"}, schema_version=3),
        ],
        expected_version=0,
    )  # fmt: skip
    account = accounts.load("1")
    assert account.cents == 355
    account.record_event(Deposited(45, "EUR"))
    accounts.save(account)
    assert accounts.load("1").cents == 400
    assert store.load("account", "1")[0].data == {"amount": 3}


def test_an_upcaster_that_alters_its_argument_alters_no_stored_change(store: Store) -> None:
    def add(data: dict[str, Any]) -> dict[str, Any]:
        data["names"].append("new")
        return data

    @dataclass
    class Named:
        names: list[str]

    store.append("account", "1", [Change("named", {"names": ["old"]})], expected_version=0)
    (change,) = store.load("account", "1")
    events = Events([EventType("named", Named, 2, {1: add})])
    assert events.read(change) == events.read(change) == Named(["old", "new"])
    assert change.data == {"names": ["old"]}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 10**6)), max_size=20))
def test_any_mix_of_versions_is_the_sum_of_what_was_meant(deposits: list[tuple[int, int]]) -> None:
    forms: dict[int, Callable[[int], dict[str, Any]]] = {
        1: lambda euros: {"amount": euros}, 2: lambda euros: {"amount": euros * 100},
        3: lambda euros: {"cents": euros * 100, "currency": "EUR"},
    }  # fmt: skip
    total = sum(EVENTS._decode("deposited", forms[version](euros), version, "").cents for version, euros in deposits)
    assert total == 100 * sum(euros for _, euros in deposits)


@pytest.mark.parametrize(
    "change",
    [
        Change("unheard", {}),
        Change("opened", {"owner": "ann"}, schema_version=2),
        Change("opened", {"name": "ann"}),
        Change("deposited", {}),
        Change("closed", {"at": "yesterday", "lastBalance": "1"}),
    ],
    ids=["kind", "newer", "fields", "upcaster", "model"],
)
def test_a_change_that_fits_no_type_is_named(accounts: Repository[Account], store: Store, change: Change) -> None:
    store.append("account", "1", [change], expected_version=0)
    with pytest.raises(ChangeSchemaError, match="account/1@1"):
        accounts.load("1")


def test_a_change_is_named_whatever_error_its_upcaster_raises() -> None:
    def upcast(_: dict[str, Any]) -> dict[str, Any]:
        raise MuteError

    events = Events([EventType("opened", Opened, 2, {1: upcast})])
    with pytest.raises(ChangeSchemaError, match="MuteError"):
        events._decode("opened", {}, 1, "")


@dataclass
class Dated:
    at: Any


@dataclass
class Nested:
    inner: Opened


@dataclass
class Computed:
    price: int
    double: int = field(init=False, default=0)


class Loose(BaseModel):
    at: Any


@pytest.mark.parametrize(
    "event",
    [
        Dated(datetime(2026, 1, 5, tzinfo=UTC)), Dated((1, 2)), Dated(Lock()), Nested(Opened("ann")), Computed(2),
        Loose(at=object()), "text", None,
    ],
    ids=["time", "tuple", "lock", "nested", "computed", "object in a model", "text", "nothing"],
)  # fmt: skip
def test_an_event_that_would_not_come_back_is_refused_and_not_applied(event: object) -> None:
    class Careless(Account):
        events = Events([EventType(each.__name__.lower(), each) for each in (Dated, Nested, Computed, Loose)])

        def when(self, event: Any) -> None:
            self.cents = 1

    account = Careless("1")
    with pytest.raises(ValidationError):
        account.record_event(event)
    assert (account.cents, account.new_changes) == (0, ())


@pytest.mark.parametrize(
    "make",
    [
        lambda: EventType("opened", dict),
        lambda: EventType("opened", "Opened"),  # type: ignore[arg-type]
        lambda: EventType("", Opened),
        lambda: EventType("opened", Opened, 0),
        lambda: EventType("opened", Opened, 2),
        lambda: EventType("opened", Opened, 3, {2: dict}),
        lambda: EventType("opened", Opened, 2, {1: "upcast"}),  # type: ignore[dict-item]
        lambda: Events([EventType("opened", Opened), EventType("opened", Deposited)]),
        lambda: Events([EventType("opened", Opened), EventType("again", Opened)]),
        lambda: Events(["opened"]),  # type: ignore[list-item]
    ],
)
def test_impossible_types_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValidationError):
        make()


def test_an_aggregate_without_types_of_events_is_refused_at_once(store: Store, platform: EventSQL) -> None:
    class Forgetful(EventAggregate):
        aggregate_type = "forgetful"

        def when(self, event: Any) -> None: ...

    with pytest.raises(ValidationError):
        Forgetful("1")
    with pytest.raises(ValidationError):
        Repository(store, Forgetful, platform.publisher)


def test_the_data_of_a_change_is_plain_json() -> None:
    change = EVENTS.change(Closed(at=datetime(2026, 1, 5, tzinfo=UTC), lastBalance=Decimal("1.50")))
    assert json.loads(change.encoded) == {"at": "2026-01-05T00:00:00Z", "lastBalance": "1.50", "reasons": []}


def test_a_snapshot_drops_those_of_earlier_schemas(store: Store) -> None:
    store.append("account", "1", [Change("opened", {"owner": "ann"})] * 3, expected_version=0)
    for version, schema in ((1, 1), (2, 2), (3, 1), (3, 2)):
        store.save_snapshot("account", "1", version, {}, schema_version=schema)
    with store.database.connection() as connection:
        rows = connection.execute("SELECT eql_version, eql_schema_version FROM eventsql.aggregate_snapshot ORDER BY 1")
        assert rows.fetchall() == [(2, 2), (3, 2)]


def test_a_snapshot_that_is_refused_drops_none(store: Store) -> None:
    store.append("account", "1", [Change("opened", {"owner": "ann"})], expected_version=0)
    store.save_snapshot("account", "1", 1, {"cents": 7})
    with pytest.raises(ValidationError):
        store.save_snapshot("account", "1", 2, {"cents": 8}, schema_version=2)
    kept = store.snapshot("account", "1")
    assert kept is not None
    assert (kept.version, kept.state) == (1, {"cents": 7})
