"""A repository saves an aggregate's changes and publishes its integration events, both or neither."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import ConcurrentAppendError, InvalidNameError, TopicNotFoundError, ValidationError
from eventsql_orchestration.store import Aggregate, Repository, SnapshottingAggregate, Store
from tests.effects import MuteError
from tests.fixtures import SaidBy, Sessions, Terminate

TOPIC = "order_events"


class RuleBrokenError(Exception):
    """The state of an order does not allow the operation."""


class Order(Aggregate):
    """A ride that a rider asks for and may pay more for."""

    aggregate_type = "order"

    def __init__(self, aggregate_id: str) -> None:
        super().__init__(aggregate_id)
        self.route: list[str] = []
        self.price: int | None = None
        self.raises = 0
        self.applied = 0

    def place(self, route: list[str], price: int) -> None:
        if self.price is not None:
            raise RuleBrokenError
        self.record("placed", {"route": route, "price": price})

    def raise_price(self, price: int) -> None:
        if self.price is None or price <= self.price:
            raise RuleBrokenError
        self.record("price_raised", {"price": price})

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        self.applied += 1
        match kind:
            case "placed":
                self.route = list(data["route"])
                self.price = data["price"]
            case "price_raised":
                self.price = data["price"]
                self.raises += 1

    def facts(self) -> tuple[object, ...]:
        return self.id, self.route, self.price, self.raises, self.version


class KeptOrder(Order, SnapshottingAggregate):
    """The same order, whose state is kept with every fourth change."""

    aggregate_type = "kept_order"
    snapshot_every: ClassVar[int] = 4

    def state(self) -> Mapping[str, Any]:
        return {"route": self.route, "price": self.price, "raises": self.raises}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.route, self.price, self.raises = list(state["route"]), state["price"], state["raises"]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic(TOPIC))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def store(platform: EventSQL) -> Store:
    return Store(platform.database)


@pytest.fixture
def orders(platform: EventSQL, store: Store) -> Repository[Order]:
    return Repository(store, Order, platform.publisher)


@pytest.fixture
def kept_orders(platform: EventSQL, store: Store) -> Repository[KeptOrder]:
    return Repository(store, KeptOrder, platform.publisher)


def raised(times: int) -> KeptOrder:
    """An order whose price was raised so many times."""
    order = KeptOrder("1")
    order.place(["a"], 0)
    for price in range(1, times + 1):
        order.raise_price(price)
    return order


def placed(aggregate_id: str = "1", price: int = 100) -> Order:
    order = Order(aggregate_id)
    order.place(["Polyarna 17A", "Novokostyantynivska 18V"], price)
    return order


def event_of(order: Order, topic: str = TOPIC) -> Publication:
    return Publication(topic, json.dumps({"order": order.id, "price": order.price}).encode(), key=order.id)


def published_prices(platform: EventSQL) -> list[int]:
    platform.transfer.run_once()
    return [json.loads(event.value)["price"] for event in platform.reader.read(TOPIC)]


def test_an_aggregate_loads_as_it_was_saved(orders: Repository[Order]) -> None:
    order = placed()
    order.raise_price(120)
    assert orders.save(order) == 2
    assert orders.load("1").facts() == order.facts()


def test_an_aggregate_can_be_saved_again_and_again(orders: Repository[Order]) -> None:
    order = placed()
    for price in range(101, 105):
        assert orders.save(order) == order.version
        order.raise_price(price)
    orders.save(order)
    assert orders.load("1").facts() == ("1", order.route, 104, 4, 5)


def test_an_unknown_id_loads_as_before_its_first_change(orders: Repository[Order]) -> None:
    order = orders.load("1")
    assert order.facts() == Order("1").facts()
    assert order.stored_version == 0


def test_a_broken_rule_records_nothing(orders: Repository[Order]) -> None:
    order = placed()
    with pytest.raises(RuleBrokenError):
        order.raise_price(1)
    assert order.version == 1


def test_a_change_that_cannot_be_stored_is_not_applied() -> None:
    order = Order("1")
    with pytest.raises(ValidationError):
        order.place(["a\x00b"], 100)
    assert order.facts() == Order("1").facts()


@pytest.mark.parametrize("kept", [False, True])
def test_every_version_of_an_aggregate_can_be_loaded(platform: EventSQL, store: Store, kept: bool) -> None:
    repository: Repository[Any] = Repository(store, KeptOrder if kept else Order, platform.publisher)
    order = repository.load("1")
    order.place(["a", "b"], 0)
    for price in range(1, 10):
        order.raise_price(price)
        repository.save(order)
    for version in range(1, 11):
        then = repository.load("1", upto_version=version)
        assert (then.price, then.raises, then.version) == (version - 1, version - 1, version)


def test_saving_publishes_the_integration_events(platform: EventSQL, orders: Repository[Order]) -> None:
    order = placed()
    orders.save(order, publications=[event_of(order)])
    order.raise_price(120)
    orders.save(order, publications=(event_of(order) for _ in range(1)))
    assert published_prices(platform) == [100, 120]


def test_when_publishing_fails_neither_changes_nor_events_are_left(
    platform: EventSQL, orders: Repository[Order]
) -> None:
    order = placed()
    with pytest.raises(TopicNotFoundError):
        orders.save(order, publications=[event_of(order), event_of(order, topic="unknown")])
    assert orders.load("1").version == 0
    assert published_prices(platform) == []

    orders.save(order, publications=[event_of(order)])
    assert orders.load("1").facts() == order.facts()
    assert published_prices(platform) == [100]


def test_when_the_callers_transaction_rolls_back_neither_changes_nor_events_are_left(
    platform: EventSQL, orders: Repository[Order]
) -> None:
    order = placed()
    with platform.database.connection() as connection, connection.transaction(force_rollback=True):
        orders.save(order, publications=[event_of(order)], connection=connection)
        assert orders.load("1", connection=connection).version == 1
    assert orders.load("1").version == 0
    assert published_prices(platform) == []


def test_several_aggregates_are_saved_in_the_callers_transaction(platform: EventSQL, orders: Repository[Order]) -> None:
    with platform.database.transaction() as connection:
        for price in (100, 200):
            order = placed(str(price), price)
            orders.save(order, publications=[event_of(order)], connection=connection)
        assert orders.load("100").version == 0
    assert [orders.load(aggregate_id).price for aggregate_id in ("100", "200")] == [100, 200]
    assert published_prices(platform) == [100, 200]


def test_a_failed_save_takes_back_its_own_part_of_the_callers_transaction_alone(
    platform: EventSQL, orders: Repository[Order]
) -> None:
    with platform.database.transaction() as connection:
        first, second = placed("1"), placed("2")
        orders.save(first, connection=connection)
        with pytest.raises(TopicNotFoundError):
            orders.save(second, publications=[event_of(second, topic="unknown")], connection=connection)
    assert orders.load("1").version == 1
    assert orders.load("2").version == 0


def test_a_transaction_of_sqlalchemy_saves_and_publishes_or_neither(
    platform: EventSQL, orders: Repository[Order]
) -> None:
    engine = sqlalchemy.create_engine(platform.database.url)
    with engine.connect() as mine:
        for price, ending in ((100, mine.rollback), (120, mine.commit)):
            order, failing = placed(price=price), placed("2")
            orders.save(order, publications=[event_of(order)], connection=mine)
            assert orders.load("1", connection=mine).version == 1
            with pytest.raises(TopicNotFoundError):
                orders.save(failing, publications=[event_of(failing, topic="unknown")], connection=mine)
            ending()
    engine.dispose()
    assert [orders.load(aggregate_id).version for aggregate_id in ("1", "2")] == [1, 0]
    assert published_prices(platform) == [120]


def test_the_error_of_a_save_is_raised_though_the_callers_connection_is_lost_with_it(
    platform: EventSQL, store: Store, sessions: Sessions, terminate: Terminate
) -> None:
    mine = sessions()

    class Failing(KeptOrder):
        snapshot_every: ClassVar[int] = 1

        def state(self) -> Mapping[str, Any]:
            terminate(mine)
            raise RuleBrokenError

    order = Failing("1")
    order.place(["A", "B"], 100)
    with pytest.raises(RuleBrokenError):
        Repository(store, Failing, platform.publisher).save(order, connection=mine)
    assert len(order.new_changes) == 1


def test_a_connection_without_a_transaction_still_saves_all_or_nothing(
    platform: EventSQL, orders: Repository[Order]
) -> None:
    order = placed()
    with platform.database.connection() as connection, pytest.raises(TopicNotFoundError):
        orders.save(order, publications=[event_of(order, topic="unknown")], connection=connection)
    assert orders.load("1").version == 0


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_save_that_fails_between_its_statements_leaves_the_caller_nothing_to_commit(
    platform: EventSQL, store: Store, sessions: Sessions, *, autocommit: bool
) -> None:
    class Failing(KeptOrder):
        snapshot_every: ClassVar[int] = 1

        def state(self) -> Mapping[str, Any]:
            raise RuleBrokenError

    mine, order = sessions(), Failing("1")
    mine.autocommit = autocommit
    order.place(["A", "B"], 100)
    with pytest.raises(RuleBrokenError):
        Repository(store, Failing, platform.publisher).save(order, connection=mine)
    mine.commit()
    assert store.load("kept_order", "1") == []


def test_the_second_of_two_writers_that_loaded_the_same_version_conflicts(
    platform: EventSQL, orders: Repository[Order]
) -> None:
    orders.save(placed())
    first, second = orders.load("1"), orders.load("1")
    first.raise_price(110)
    second.raise_price(120)
    orders.save(first, publications=[event_of(first)])
    with pytest.raises(ConcurrentAppendError, match="order '1' is not at version 1 any more"):
        orders.save(second, publications=[event_of(second)])
    assert orders.load("1").price == 110
    assert published_prices(platform) == [110]
    assert [change.data for change in second.new_changes] == [{"price": 120}]


def test_an_older_version_that_was_loaded_cannot_be_continued(orders: Repository[Order]) -> None:
    order = placed()
    order.raise_price(110)
    orders.save(order)
    then = orders.load("1", upto_version=1)
    then.raise_price(105)
    with pytest.raises(ConcurrentAppendError):
        orders.save(then)


def test_saving_without_changes_leaves_all_as_it_is(platform: EventSQL, orders: Repository[Order]) -> None:
    order = placed()
    orders.save(order)
    assert orders.save(order) == 1
    with pytest.raises(ValidationError, match="no new changes"):
        orders.save(order, publications=[event_of(order)])
    assert published_prices(platform) == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_snapshot_and_tail_equal_the_full_replay(
    store: Store, kept_orders: Repository[KeptOrder], batches: list[int]
) -> None:
    aggregate_id = uuid.uuid4().hex
    price = 0
    for number in batches:
        order = kept_orders.load(aggregate_id)
        for _ in range(number):
            price += 1
            if order.version:
                order.raise_price(price)
            else:
                order.place(["a", "b"], price)
        kept_orders.save(order)

    replayed = KeptOrder(aggregate_id)
    replayed.replay(store.load("kept_order", aggregate_id))
    loaded = kept_orders.load(aggregate_id)
    assert loaded.facts() == replayed.facts() == (aggregate_id, ["a", "b"], price, price - 1, price)


def test_a_snapshot_is_kept_whenever_a_multiple_is_reached_or_passed(
    store: Store, kept_orders: Repository[KeptOrder]
) -> None:
    order = KeptOrder("1")
    order.place(["a"], 0)
    kept_orders.save(order)
    kept_at = []
    for raises in (2, 1, 3, 2, 8):  # versions 3, 4, 7, 9, 17
        for _ in range(raises):
            order.raise_price((order.price or 0) + 1)
        kept_orders.save(order)
        snapshot = store.snapshot("kept_order", "1")
        kept_at.append(snapshot and snapshot.version)
    assert kept_at == [None, 4, 4, 9, 17]


def test_loading_from_a_snapshot_replays_the_tail_alone(kept_orders: Repository[KeptOrder]) -> None:
    order = raised(3)
    kept_orders.save(order)
    order.raise_price(4)
    kept_orders.save(order)
    assert kept_orders.load("1").applied == 1
    assert kept_orders.load("1", upto_version=3).applied == 3


def test_a_snapshot_and_its_tail_are_one_round_trip(
    store: Store, kept_orders: Repository[KeptOrder], said_by: SaidBy
) -> None:
    kept_orders.save(raised(5))
    for _ in range(2):
        # The second prepares the statement.
        kept_orders.load("1")
    said = said_by(store.database)
    assert kept_orders.load("1").price == 5
    assert said.round_trips() == 1
    with store.database.connection() as connection:
        assert kept_orders.load("1", connection=connection).price == 5


def test_snapshots_of_another_schema_are_left_out(
    platform: EventSQL, store: Store, kept_orders: Repository[KeptOrder]
) -> None:
    kept_orders.save(raised(3))

    class Renewed(KeptOrder):
        snapshot_schema = 2

    renewed = Repository(store, Renewed, platform.publisher).load("1")
    assert (renewed.applied, renewed.price) == (4, 3)
    for price in range(4, 9):
        renewed.raise_price(price)
    Repository(store, Renewed, platform.publisher).save(renewed)
    assert Repository(store, Renewed, platform.publisher).load("1").applied < 9


@pytest.mark.parametrize("error", [KeyError("colour"), MuteError()])
def test_a_snapshot_that_cannot_be_restored_is_left_out_with_a_warning(
    kept_orders: Repository[KeptOrder],
    error: Exception,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept_orders.save(raised(3))

    def restore(order: KeptOrder, state: Mapping[str, Any]) -> None:
        order.applied = 100
        raise error

    monkeypatch.setattr(KeptOrder, "restore", restore)
    loaded = kept_orders.load("1")
    assert (loaded.applied, loaded.price, loaded.version) == (4, 3, 4)
    assert "snapshot_schema of KeptOrder" in caplog.text


def test_any_number_of_changes_is_saved_with_one_statement(
    platform: EventSQL, orders: Repository[Order], said_by: SaidBy
) -> None:
    orders.save(placed())  # a store asks once whether it is the store of this server
    order = orders.load("1")
    for price in range(101, 150):
        order.raise_price(price)
    with platform.database.transaction() as connection:
        said = said_by(connection)
        orders.save(order, connection=connection)
        assert [verb for verb in said.verbs() if verb not in ("SAVEPOINT", "RELEASE")] == ["WITH"]


def test_a_class_without_a_usable_type_is_refused(platform: EventSQL, store: Store) -> None:
    class Nameless(Order):
        aggregate_type = " "

    class NeverKept(KeptOrder):
        snapshot_every = 0

    with pytest.raises(InvalidNameError, match="aggregate type"):
        Repository(store, Nameless, platform.publisher)
    with pytest.raises(ValidationError, match="snapshot_every of NeverKept"):
        Repository(store, NeverKept, platform.publisher)
