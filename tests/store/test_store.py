"""The store appends an aggregate's changes under optimistic concurrency and gives them back as they were."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import numpy as np
import psycopg
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from psycopg.rows import dict_row

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.errors import ConcurrentAppendError, InvalidNameError, ValidationError
from eventsql_orchestration.store import Change, Store
from tests.fixtures import UntilBlocked
from tests.plans import custom_plan
from tests.waiting import PATIENCE


def prices(*amounts: int) -> list[Change]:
    return [Change("price_raised", {"price": amount}) for amount in amounts]


def append(store: Store, aggregate_id: str, *amounts: int, expected_version: int) -> int:
    with store.database.transaction() as connection:
        return store.append(
            "order", aggregate_id, prices(*amounts), expected_version=expected_version, connection=connection
        )


def amounts_of(store: Store, aggregate_id: str, **bounds: Any) -> list[int]:
    return [change.data["price"] for change in store.load("order", aggregate_id, **bounds)]


@pytest.mark.parametrize("joins", [False, True])
def test_changes_of_one_append_differ_in_all_that_a_change_may_leave_out(store: Store, joins: bool) -> None:
    def changes() -> list[Change]:
        return [
            Change("placed", {}),
            Change("placed", {}, id=uuid4()),
            Change("placed", {}, metadata={"by": "ann"}),
            Change("placed", {}, schema_version=3),
        ]

    # Each of them is the only one of an append, too.
    for number, appended in enumerate([changes(), *([change] for change in changes())]):
        with store.database.transaction() if joins else nullcontext() as connection:
            store.append("order", str(number), appended, expected_version=0, connection=connection)
            found = [
                (change.id, change.metadata, change.schema_version)
                for change in store.load("order", str(number), connection=connection)
            ]
        assert found == [(change.id, change.metadata, change.schema_version) for change in appended]


def test_a_schema_version_may_be_a_whole_number_of_another_library(store: Store) -> None:
    version: Any = np.int32(2)
    store.append("order", "1", [Change("placed", {}, schema_version=version)], expected_version=0)
    assert [change.schema_version for change in store.load("order", "1")] == [2]


def test_a_transaction_of_sqlalchemy_appends_and_reads(store: Store) -> None:
    engine = sqlalchemy.create_engine(store.database.url)
    with engine.connect() as connection:
        for ending in (connection.rollback, connection.commit):
            assert store.append("order", "1", prices(100, 120), expected_version=0, connection=connection) == 2
            store.save_snapshot("order", "1", 2, {"price": 120}, connection=connection)
            assert amounts_of(store, "1", connection=connection) == [100, 120]
            assert store.snapshot("order", "1", connection=connection) is not None
            assert amounts_of(store, "1") == []
            ending()
    engine.dispose()
    assert amounts_of(store, "1") == [100, 120]


def test_changes_come_back_in_their_order_with_versions_from_one(store: Store) -> None:
    assert append(store, "1", 10, 20, expected_version=0) == 2
    assert append(store, "1", 30, expected_version=2) == 3
    changes = store.load("order", "1")
    assert [(change.version, change.kind, change.data) for change in changes] == [
        (1, "price_raised", {"price": 10}),
        (2, "price_raised", {"price": 20}),
        (3, "price_raised", {"price": 30}),
    ]
    assert abs(datetime.now(UTC) - changes[0].created_at) < timedelta(minutes=5)


def test_an_unknown_aggregate_has_no_changes_and_no_snapshot(store: Store) -> None:
    assert store.load("order", "1") == []
    assert store.snapshot("order", "1") is None


def test_any_version_can_be_loaded(store: Store) -> None:
    append(store, "1", *range(1, 8), expected_version=0)
    assert amounts_of(store, "1", upto_version=0) == []
    assert amounts_of(store, "1", upto_version=3) == [1, 2, 3]
    assert amounts_of(store, "1", after_version=5) == [6, 7]
    assert amounts_of(store, "1", after_version=2, upto_version=4) == [3, 4]
    assert amounts_of(store, "1", upto_version=99) == [1, 2, 3, 4, 5, 6, 7]


def test_aggregates_of_another_id_or_type_are_others(store: Store) -> None:
    append(store, "1", 1, expected_version=0)
    append(store, "2", 2, expected_version=0)
    with store.database.transaction() as connection:
        store.append("rider", "1", prices(3), expected_version=0, connection=connection)
    assert amounts_of(store, "1") == [1]
    assert amounts_of(store, "2") == [2]


@pytest.mark.parametrize(
    ("expected_version", "said"), [(0, "is not new any more"), (1, "not at version 1"), (3, "not at")]
)
def test_a_decision_made_on_another_version_is_refused(store: Store, expected_version: int, said: str) -> None:
    append(store, "1", 1, 2, expected_version=0)
    with pytest.raises(ConcurrentAppendError, match=said):
        append(store, "1", 99, expected_version=expected_version)
    assert amounts_of(store, "1") == [1, 2]


def test_a_new_aggregate_cannot_begin_at_a_later_version(store: Store) -> None:
    with pytest.raises(ConcurrentAppendError):
        append(store, "1", 1, expected_version=5)
    assert append(store, "1", 1, expected_version=0) == 1


def test_a_conflict_leaves_the_callers_transaction_usable(store: Store) -> None:
    append(store, "1", 1, expected_version=0)
    with store.database.transaction() as connection:
        with pytest.raises(ConcurrentAppendError):
            store.append("order", "1", prices(2), expected_version=0, connection=connection)
        store.append("order", "2", prices(3), expected_version=0, connection=connection)
    assert amounts_of(store, "1") == [1]
    assert amounts_of(store, "2") == [3]


@pytest.mark.parametrize("stored", [0, 2])
def test_the_second_of_two_writers_waits_and_then_conflicts(
    store: Store, other_writer: ThreadPoolExecutor, until_blocked: UntilBlocked, stored: int
) -> None:
    if stored:
        append(store, "1", *range(stored), expected_version=0)
    with store.database.transaction() as connection:
        store.append("order", "1", prices(100), expected_version=stored, connection=connection)
        second = other_writer.submit(append, store, "1", 200, expected_version=stored)
        until_blocked()
    with pytest.raises(ConcurrentAppendError):
        second.result(PATIENCE)
    assert amounts_of(store, "1") == [*range(stored), 100]


@pytest.mark.parametrize("stored", [0, 2])
def test_the_second_of_two_writers_succeeds_when_the_first_rolls_back(
    store: Store, other_writer: ThreadPoolExecutor, until_blocked: UntilBlocked, stored: int
) -> None:
    if stored:
        append(store, "1", *range(stored), expected_version=0)
    with store.database.connection() as connection, connection.transaction(force_rollback=True):
        store.append("order", "1", prices(100), expected_version=stored, connection=connection)
        second = other_writer.submit(append, store, "1", 200, expected_version=stored)
        until_blocked()
    assert second.result(PATIENCE) == stored + 1
    assert amounts_of(store, "1") == [*range(stored), 200]


@pytest.mark.parametrize("at_version", [True, False])
@pytest.mark.parametrize("stored", [0, 1])
def test_a_conflict_under_a_stricter_isolation_is_the_same_error(
    store: Store, stored: int, *, at_version: bool
) -> None:
    if stored:
        append(store, "1", 0, expected_version=0)
    with store.database.transaction() as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert len(store.load("order", "1", connection=connection)) == stored
        append(store, "1", 100, expected_version=stored)
        with pytest.raises(ConcurrentAppendError), connection.transaction():
            store.append(
                "order", "1", prices(200), expected_version=stored if at_version else "any", connection=connection
            )
    assert amounts_of(store, "1") == [*([0] * stored), 100]


def test_a_callers_connection_may_have_a_row_factory_of_its_own(store: Store) -> None:
    store.database.ensure_schema()
    with psycopg.connect(store.database.dsn, row_factory=dict_row) as connection:
        store.append("order", "1", prices(1, 2), expected_version=0, connection=connection)
        assert [change.version for change in store.load("order", "1", connection=connection)] == [1, 2]


def test_the_newest_snapshot_up_to_a_version_is_found(store: Store) -> None:
    append(store, "1", *range(10), expected_version=0)
    with store.database.transaction() as connection:
        for version in (3, 6, 9):
            store.save_snapshot("order", "1", version, {"at": version}, connection=connection)
    found = {
        upto: None if (snapshot := store.snapshot("order", "1", upto_version=upto)) is None else snapshot.state["at"]
        for upto in (None, 0, 2, 3, 8, 9, 99)
    }
    assert found == {None: 9, 0: None, 2: None, 3: 3, 8: 6, 9: 9, 99: 9}


def test_a_snapshot_replaces_the_one_of_its_version(store: Store) -> None:
    append(store, "1", 1, expected_version=0)
    for state in ({"format": 1}, {"format": 2}):
        with store.database.transaction() as connection:
            store.save_snapshot("order", "1", 1, state, connection=connection)
    snapshot = store.snapshot("order", "1")
    assert snapshot is not None
    assert (snapshot.version, snapshot.state) == (1, {"format": 2})


def test_a_snapshot_drops_those_of_earlier_schemas_only(store: Store) -> None:
    """While a new version of a program is rolled out, an old process may still save snapshots of its own schema."""
    append(store, "1", *range(3), expected_version=0)

    def schemas() -> list[int]:
        return [each for each in (1, 2, 3) if store.snapshot("order", "1", schema_version=each) is not None]

    store.save_snapshot("order", "1", 1, {}, schema_version=2)
    store.save_snapshot("order", "1", 2, {}, schema_version=1)
    assert schemas() == [1, 2]
    store.save_snapshot("order", "1", 3, {}, schema_version=3)
    assert schemas() == [3]


@pytest.mark.parametrize("aggregate_id", ["1", "unknown"])
def test_there_is_no_snapshot_of_a_version_that_was_not_reached(store: Store, aggregate_id: str) -> None:
    append(store, "1", 1, expected_version=0)
    with pytest.raises(ValidationError, match="has not reached version 2"), store.database.transaction() as connection:
        store.save_snapshot("order", aggregate_id, 2, {}, connection=connection)
    assert store.snapshot("order", aggregate_id) is None


def test_text_of_every_kind_comes_back(store: Store) -> None:
    data: dict[str, Any] = {
        "": "",
        "quote": '"',
        "backslash": "\\",
        "looks like an escape of NUL": "\\u0000",
        "more so": "\\\\u0000",
        "percent": "%s %(name)s",
        "braces": "{schema}",
        "line\nbreak": "\r\n\t",
        "emoji": "🚕",
        "array": ["{", "}", ",", None, True, 1.5, -(2**63), {"a": []}],
    }
    with store.database.transaction() as connection:
        store.append("заказ {x} %s", "%(id)s", [Change("%s", data)], expected_version=0, connection=connection)
    (change,) = store.load("заказ {x} %s", "%(id)s")
    assert (change.kind, change.data) == ("%s", data)


any_text = st.text(st.characters(exclude_categories=()), max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=10,
)


def texts_of(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, inner in value.items():
                yield from (key, *texts_of(inner))
        case list():
            for inner in value:
                yield from texts_of(inner)


@given(st.dictionaries(any_text, json_values, max_size=5))
def test_json_is_refused_only_for_a_nul_or_a_lone_surrogate(data: dict[str, Any]) -> None:
    if any("\x00" in text or re.search("[\ud800-\udfff]", text) for text in texts_of(data)):
        with pytest.raises(ValidationError):
            Change("kind", data)
    else:
        assert json.loads(Change("kind", data).encoded) == data


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {"price": math.nan},
        {"price": math.inf},
        {"price": {1, 2}},
        {"price": b"1"},
        {"at": datetime(2024, 1, 1, tzinfo=UTC)},
        {"route": (1, 2)},
        {7: "seven"},
        {"deep": [{"deeper": {None: 1}}]},
        {"text": "a\x00b"},
        {"a\x00b": "text"},
        {"text": "\\\x00"},
        {"text": "\ud800"},
    ],
)
def test_data_that_would_not_come_back_is_refused(data: Any) -> None:
    with pytest.raises(ValidationError, match="data of change 'placed'"):
        Change("placed", data)


def test_a_change_keeps_the_data_that_it_was_made_with(store: Store) -> None:
    data = {"route": ["a", "b"]}
    change = Change("placed", data)
    data["route"].append("c")
    with store.database.transaction() as connection:
        store.append("order", "1", [change], expected_version=0, connection=connection)
    assert store.load("order", "1")[0].data == {"route": ["a", "b"]}


BAD_NAMES = ["", " ", " order", "order ", "a\nb", "a\x00b", "\ud800", "o" * 201, None, 7]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be_used_are_refused(nowhere: Database, name: Any) -> None:
    store = Store(nowhere)
    with pytest.raises(InvalidNameError, match="kind of change"):
        Change(name, {})
    with pytest.raises(InvalidNameError, match=r"aggregate.type"):
        store.load(name, "1")
    with pytest.raises(InvalidNameError, match=r"aggregate.id"):
        store.load("order", name)


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.append("order", "1", [], expected_version=0),
        lambda store: store.append("order", "1", prices(1), expected_version=-1),
        lambda store: store.append("order", "1", prices(1), expected_version=None),
        lambda store: store.append("order", "1", prices(1), expected_version=True),
        lambda store: store.append("order", "1", prices(1), expected_version=1.5),
        lambda store: store.append("order", "1", prices(1), expected_version="new"),
        lambda store: store.append("order", "1", prices(1), expected_version=""),
        lambda store: store.append("order", "", prices(1), expected_version=0),
        lambda store: store.close_stream("order", ""),
        lambda store: store.archive_stream("order", ""),
        lambda store: store.unarchive_stream("order", ""),
        lambda store: store.checkpoint_of("order", "", 1),
        lambda store: store.save_snapshot("order", "", 1, {}),
        lambda store: store.save_snapshot("order", "1", 0, {}),
        lambda store: store.save_snapshot("order", "1", 1, {"a": math.nan}),
        lambda store: store.load("order", "1", upto_version=-1),
        lambda store: store.load("order", "1", after_version=-1),
        lambda store: store.load("order", "1", upto_version=2**63),
        lambda store: store.snapshot("order", "1", upto_version=1.0),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    nowhere: Database, act: Callable[[Any], object]
) -> None:
    with pytest.raises(ValidationError):
        act(Store(nowhere))


def prepare_many(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.aggregate (eql_type, eql_id, eql_version) "
            "SELECT 'order', number, 10 FROM generate_series(1, 2000) AS number"
        )
        for table in ("aggregate_change", "archived_change", "aggregate_snapshot"):
            kind, placed = ("", "") if table == "aggregate_snapshot" else ("eql_kind,", "'placed',")
            connection.execute(
                f"INSERT INTO eventsql.{table} (eql_type, eql_aggregate_id, eql_version, {kind} eql_data) "
                f"SELECT 'order', number, version, {placed} '{{}}' "
                "FROM generate_series(1, 2000) AS number, generate_series(1, 10) AS version"
            )
        connection.execute("VACUUM ANALYZE")


@pytest.mark.prepared.with_args(prepare_many)
@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("load", "Index Scan using aggregate_change_pkey"),
        ("snapshot", "Index Scan Backward using aggregate_snapshot_pkey"),
        ("load_from_snapshot", "Index Scan using aggregate_change_pkey"),
        ("load_from_snapshot", "Index Scan Backward using aggregate_snapshot_pkey"),
        ("append", "Index Scan using aggregate_pkey"),
        ("save_snapshot", "Index Scan using aggregate_pkey"),
    ],
)
def test_the_statements_find_an_aggregate_through_its_key(database: Database, statement: str, index: str) -> None:
    values = {
        "type": "order",
        "id": "7",
        "after_version": 3,
        "upto_version": 10,
        "expected": 10,
        "count": 1,
        "kinds": ["placed"],
        "data": ["{}"],
        "schema_versions": [1],
        "change_ids": [None],
        "metadata": ["{}"],
        "version": 10,
        "state": "{}",
        "schema_version": 1,
    }
    composed = Queries("store", "eventsql")(statement)
    with database.connection() as connection:
        plan = custom_plan(connection, composed, values)
    assert index in plan
    assert "Seq Scan" not in plan
    # A Merge Append has a "Sort Key". A snapshot and the changes after it are sorted: they are few.
    assert statement == "load_from_snapshot" or not re.search(r"\bSort  \(", plan)
