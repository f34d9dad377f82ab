"""Changes are read in one global order: it skips nothing and keeps each aggregate's versions in order."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from psycopg.errors import CheckViolation

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import (
    AggregateClosedError,
    ConcurrentAppendError,
    DatabaseError,
    ValidationError,
)
from eventsql_orchestration.store import Change, RecordedChange, Store, StoreCheckpoint
from tests.fixtures import SaidBy, Sessions, UntilBlocked
from tests.plans import plans
from tests.waiting import PATIENCE


def change(number: int, **options: Any) -> Change:
    return Change("numbered", {"n": number}, **options)


def put(store: Store, aggregate_id: str, *numbers: int, connection: Connection | None = None, of: str = "order") -> int:
    return store.append(of, aggregate_id, [change(n) for n in numbers], expected_version="any", connection=connection)


def numbers(changes: list[RecordedChange]) -> list[int]:
    return [each.data["n"] for each in changes]


def read_on(store: Store, after: StoreCheckpoint | None, **options: Any) -> tuple[list[int], StoreCheckpoint | None]:
    found = store.read_all(after, **options)
    return numbers(found), found[-1].checkpoint if found else after


# Appending


def test_a_lone_append_is_one_round_trip(store: Store, said_by: SaidBy) -> None:
    for order in ("0", "1"):
        # The second prepares the statement.
        put(store, order, 1)
    said = said_by(store.database)
    assert store.append("order", "1", [change(2), change(3)], expected_version=1) == 3
    assert said.round_trips() == 1
    assert numbers(store.load("order", "1")) == [1, 2, 3]


def test_an_append_at_a_version_that_is_not_the_last_one_is_tried_once(store: Store, said_by: SaidBy) -> None:
    for number in range(2):
        put(store, "1", number)
    said = said_by(store.database)
    with pytest.raises(ConcurrentAppendError):
        store.append("order", "1", [change(2)], expected_version=3)
    assert said.round_trips() == 2


def test_an_append_that_the_server_refuses_for_another_reason_is_no_conflict(store: Store, session: Connection) -> None:
    session.execute("ALTER TABLE eventsql.aggregate_change ADD CHECK (eql_version < 2)")
    put(store, "1", 1)
    with pytest.raises(DatabaseError) as failure:
        put(store, "1", 2)
    assert isinstance(failure.value.__cause__, CheckViolation)


@pytest.mark.parametrize("joined", [False, True])
def test_an_expected_version_may_be_any_or_exists_or_none(store: Store, joined: bool) -> None:
    def append(number: int, expected: Any) -> int:
        if not joined:
            return store.append("order", "1", [change(number)], expected_version=expected)
        with store.database.transaction() as connection:
            return store.append("order", "1", [change(number)], expected_version=expected, connection=connection)

    with pytest.raises(ConcurrentAppendError):
        append(0, "exists")
    assert [append(1, "none"), append(2, "exists"), append(3, "any"), append(4, 3)] == [1, 2, 3, 4]
    for refused in ("none", 0, 3, 5):
        with pytest.raises(ConcurrentAppendError):
            append(9, refused)
    assert append(5, "any") == 5
    assert numbers(store.load("order", "1")) == [1, 2, 3, 4, 5]


def test_the_error_for_an_aggregate_that_was_not_there_is_true_if_another_writer_makes_it_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain = store._appender._already_stored

    def another_first(*given: Any) -> int:
        put(Store(store.database), "1", 1)
        return explain(*given)

    monkeypatch.setattr(store._appender, "_already_stored", another_first)
    with pytest.raises(ConcurrentAppendError, match="did not exist: use expected_version='any' if"):
        store.append("order", "1", [change(2)], expected_version="exists")
    assert numbers(store.load("order", "1")) == [1]
    assert store.append("order", "1", [change(2)], expected_version="any") == 2


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("expected", [0, "any", "exists"])
def test_a_repeated_append_stores_its_changes_once(store: Store, expected: Any, joined: bool) -> None:
    changes = [change(1, id=uuid.uuid4()), change(2, id=uuid.uuid4())]
    assert store.append("order", "1", changes, expected_version="none") == 2
    put(store, "1", 3)
    with store.database.transaction() as connection:
        given = connection if joined else None
        assert store.append("order", "1", changes, expected_version=expected, connection=given) == 2
        put(store, "2", 4, connection=connection)
    assert numbers(store.load("order", "1")) == [1, 2, 3]


def test_ids_of_other_changes_are_refused_with_nothing_appended(store: Store) -> None:
    first, second, third = (change(n, id=uuid.uuid4()) for n in range(3))
    store.append("order", "1", [first], expected_version=0)
    for aggregate_id, changes in (
        ("1", [first, second]),
        ("2", [first]),
        ("2", [second, first]),
        ("3", [third, third]),
    ):
        with pytest.raises(ValidationError):
            store.append("order", aggregate_id, changes, expected_version="any")
    assert len(store.read_all()) == 1


def test_two_writers_of_one_change_append_it_once(
    store: Store, other_writer: ThreadPoolExecutor, until_blocked: UntilBlocked
) -> None:
    the_same = [change(1, id=uuid.uuid4())]
    put(store, "1", 0)
    with store.database.transaction() as connection:
        store.append("order", "1", the_same, expected_version="any", connection=connection)
        second = other_writer.submit(store.append, "order", "1", the_same, expected_version="any")
        until_blocked()
    assert second.result(PATIENCE) == 2
    assert numbers(store.load("order", "1")) == [0, 1]


def test_the_second_of_two_transactions_with_one_change_is_to_begin_anew(
    store: Store, other_writer: ThreadPoolExecutor, until_blocked: UntilBlocked
) -> None:
    def append(begun: Callable[[], object]) -> None:
        with store.database.transaction() as connection:
            store.append("order", "1", the_same, expected_version="any", connection=connection)
            begun()

    def then_append() -> None:
        second.append(other_writer.submit(append, lambda: None))
        until_blocked()

    the_same = [change(1, id=uuid.uuid4())]
    second: list[Future[None]] = []
    put(store, "1", 0)
    append(then_append)
    with pytest.raises(ConcurrentAppendError):
        second[0].result(PATIENCE)
    assert numbers(store.load("order", "1")) == [0, 1]


def test_two_writers_at_any_version_create_an_aggregate_together(
    store: Store, other_writer: ThreadPoolExecutor, until_blocked: UntilBlocked
) -> None:
    with store.database.transaction() as connection:
        put(store, "1", 1, connection=connection)
        second = other_writer.submit(put, store, "1", 2)
        until_blocked()
    assert second.result(PATIENCE) == 2
    assert numbers(store.read_all()) == [1, 2]


def test_a_closed_aggregate_takes_no_more_changes_and_can_be_read(store: Store) -> None:
    put(store, "1", 1)
    store.close_stream("order", "1")
    for expected in (1, "any", "exists"):
        with pytest.raises(AggregateClosedError):
            store.append("order", "1", [change(2)], expected_version=expected)
    assert numbers(store.load("order", "1")) == numbers(store.read_all()) == [1]
    with pytest.raises(ValidationError):
        store.close_stream("order", "2")


def test_a_closed_aggregate_that_is_closed_again_keeps_its_time(store: Store) -> None:
    put(store, "1", 1)
    store.close_stream("order", "1")
    (closed,) = store.aggregates("order")
    store.close_stream("order", "1")
    assert store.aggregates("order") == [closed]
    assert closed.closed_at is not None


def test_a_change_keeps_its_metadata_id_schema_and_cause(store: Store) -> None:
    known = uuid.uuid4()
    store.append("order", "1", [change(1, id=known, metadata={"user": "é"}, schema_version=7)], expected_version=0)
    (cause,) = store.load("order", "1")
    assert (cause.id, cause.metadata, cause.schema_version, cause.causation_id) == (known, {"user": "é"}, 7, None)

    store.append("bill", "1", [change(2).caused_by(cause)], expected_version=0)
    (effect,) = store.load("bill", "1")
    store.append("bill", "1", [change(3, metadata={"a": "b"}).caused_by(effect)], expected_version=1)
    last = store.load("bill", "1")[-1]
    assert (effect.correlation_id, effect.causation_id) == (str(known), str(known))
    assert (last.correlation_id, last.causation_id) == (str(known), "bill/1@1")
    assert last.metadata["a"] == "b"


@pytest.mark.parametrize("number", [1e16, -1e16, 1e23, 1.5e300, 1e-300, 123456789.5, 5e-324, -1.7976931348623157e308])
def test_a_float_comes_back_as_the_same_float(store: Store, number: float) -> None:
    data = {"f": number, "text": '1e+23 \\" 1e+23', "list": [number], "1e+23": 1}
    store.append("order", "1", [Change("measured", data)], expected_version=0)
    (found,) = store.load("order", "1")
    assert found.data == data
    assert type(found.data["f"]) is type(found.data["list"][0]) is float


# Reading in order


def test_changes_are_read_in_the_order_of_their_commits(store: Store) -> None:
    put(store, "1", 1, 2)
    put(store, "2", 3)
    put(store, "1", 4)
    assert numbers(store.read_all()) == [1, 2, 3, 4]
    first, place = read_on(store, None, limit=3)
    assert (first, read_on(store, place, limit=3)[0]) == ([1, 2, 3], [4])
    assert store.newest() == store.read_all()[-1].checkpoint == store.checkpoint_of("order", "1", 3)
    assert numbers(list(store.stream(batch=1))) == [1, 2, 3, 4]


def test_types_and_kinds_choose_changes(store: Store) -> None:
    put(store, "1", 1)
    put(store, "1", 2, of="rider")
    store.append("rider", "1", [Change("moved", {"n": 3})], expected_version=1)
    assert numbers(store.read_all(types=["rider"])) == [2, 3]
    assert numbers(store.read_all(kinds=["numbered"])) == [1, 2]
    assert numbers(store.read_all(types=["order", "rider"], kinds=["moved"])) == [3]
    assert store.read_all(types=["nothing"]) == []
    wrong: list[dict[str, Any]] = [{"types": []}, {"kinds": [""]}, {"limit": 0}, {"types": "order"}]
    for options in wrong:
        with pytest.raises(ValidationError):
            store.read_all(**options)


def test_a_transaction_that_took_its_place_first_and_commits_last_is_not_skipped(
    store: Store, sessions: Sessions
) -> None:
    early = sessions()
    put(store, "1", 1)
    put(store, "2", 2, connection=early)
    put(store, "3", 3)
    before, place = read_on(store, None)
    assert before == [1]
    early.commit()
    after, place = read_on(store, place)
    assert after == [2, 3]
    assert read_on(store, place)[0] == []


def test_a_transaction_that_is_rolled_back_leaves_no_hole_that_readers_wait_for(
    store: Store, sessions: Sessions
) -> None:
    lost = sessions()
    put(store, "1", 1, connection=lost)
    put(store, "2", 2)
    assert store.read_all() == []
    lost.rollback()
    assert numbers(store.read_all()) == [2]


def test_a_later_version_never_comes_before_an_earlier_one(store: Store, sessions: Sessions) -> None:
    # The older transaction appends to an aggregate after a younger one has.
    older, younger = sessions(), sessions()
    put(store, "other", 0, connection=older)
    put(store, "1", 1, connection=younger)
    younger.commit()
    put(store, "1", 2, connection=older)
    assert store.append("order", "1", [change(3)], expected_version=2, connection=older) == 3
    assert store.read_all() == []
    older.commit()
    found = [each for each in store.read_all() if each.aggregate_id == "1"]
    assert [each.version for each in found] == [1, 2, 3]
    assert numbers(store.read_all()) == [0, 1, 2, 3]


def put_by_an_older_version(store: Store, aggregate_id: str, version: int, number: int, connection: Connection) -> None:
    """Append as the versions before the global order do: they name no transaction."""
    values = {"id": aggregate_id, "version": version, "data": f'{{"n": {number}}}'}
    connection.execute(
        "WITH created AS (INSERT INTO eventsql.aggregate (eql_type, eql_id, eql_version) "
        "SELECT 'order', %(id)s, 1 WHERE %(version)s = 1 ON CONFLICT DO NOTHING RETURNING eql_version), "
        "advanced AS (UPDATE eventsql.aggregate SET eql_version = %(version)s "
        "WHERE eql_type = 'order' AND eql_id = %(id)s AND eql_version = %(version)s - 1 RETURNING eql_version) "
        "INSERT INTO eventsql.aggregate_change (eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data) "
        "SELECT 'order', %(id)s, eql_version, 'numbered', %(data)s::jsonb "
        "FROM (TABLE created UNION ALL TABLE advanced) appendable",
        values,
    )


def test_an_older_version_that_appends_beside_a_newer_one_keeps_the_order_of_versions(
    store: Store, sessions: Sessions
) -> None:
    older, younger, youngest = sessions(), sessions(), sessions()
    for number, session in enumerate((older, younger, youngest)):
        # Each transaction has its number now, and the oldest one appends last.
        put(store, f"other {number}", 0, connection=session)
    put(store, "1", 1, connection=youngest)
    youngest.commit()
    put_by_an_older_version(store, "1", 2, 2, younger)
    younger.commit()
    put(store, "1", 3, connection=older)
    put_by_an_older_version(store, "2", 1, 4, older)
    put_by_an_older_version(store, "2", 2, 5, older)
    older.commit()
    found = store.read_all()
    assert [each.version for each in found if each.aggregate_id == "1"] == [1, 2, 3]
    assert [each.version for each in found if each.aggregate_id == "2"] == [1, 2]
    assert numbers(store.read_all(store.checkpoint_of("order", "1", 2))) == [3]


def test_every_change_is_read_once_while_many_write(store: Store) -> None:
    """Writers of their own and of shared aggregates, beside a reader that goes on all the time."""

    def write(writer: int) -> None:
        for number in range(40):
            with store.database.transaction() as connection:
                put(store, f"own {writer}", writer * 1_000 + number, connection=connection)
                put(store, f"shared {writer % 2}", writer * 1_000 + 500 + number, connection=connection)

    read: list[RecordedChange] = []
    with ThreadPoolExecutor(4) as writers:
        writing = [writers.submit(write, writer) for writer in range(4)]
        place: StoreCheckpoint | None = None
        while len(read) < 320:
            for future in writing:
                if future.done():
                    future.result()
            found = store.read_all(place, limit=7)
            read += found
            place = found[-1].checkpoint if found else place
    assert len({each.reference for each in read}) == len(read) == 320
    versions: dict[str, int] = {}
    for each in read:
        assert each.version == versions.get(each.aggregate_id, 0) + 1
        versions[each.aggregate_id] = each.version


# Changes from before the order, and from other servers


def adopted(database: Database, count: int) -> None:
    """Changes as an upgraded database has them."""
    with database.transaction() as connection:
        connection.execute(
            "INSERT INTO eventsql.aggregate (eql_type, eql_id, eql_version) "
            "SELECT 'order', 'old ' || n, 1 FROM generate_series(1, %s) n", [count]
        )  # fmt: skip
        connection.execute(
            "INSERT INTO eventsql.aggregate_change (eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data, "
            "eql_transaction, eql_position) SELECT 'order', 'old ' || n, 1, 'numbered', jsonb_build_object('n', n), "
            "NULL, NULL FROM generate_series(1, %s) n", [count]
        )  # fmt: skip
        connection.execute(
            "INSERT INTO eventsql.adopted_change SELECT n, 'order', 'old ' || n, 1 FROM generate_series(1, %s) n",
            [count],
        )


def test_changes_from_before_the_order_come_first_and_can_be_read_in_parts(store: Store) -> None:
    adopted(store.database, 5)
    put(store, "old 3", 6)
    put(store, "new", 7)
    read: list[list[int]] = []
    place: StoreCheckpoint | None = None
    while (found := read_on(store, place, limit=2))[0]:
        read.append(found[0])
        place = found[1]
    assert read == [[1, 2], [3, 4], [5, 6], [7]]
    assert place == store.newest()
    assert numbers(store.read_all(store.checkpoint_of("order", "old 4", 1))) == [5, 6, 7]


def restored(database: Database) -> None:
    """The store as in a dump of another server."""
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.store_home SET eql_server = '1'")


def test_a_restored_store_is_read_and_written_only_after_its_changes_were_adopted(store: Store) -> None:
    adopted(store.database, 2)
    put(store, "1", 3, 4)
    put(store, "2", 5)
    old = store.checkpoint_of("order", "1", 1)
    restored(store.database)

    # The programs were closed meanwhile.
    store.close()
    fresh = Store(store.database)
    for refused in (
        fresh.read_all, fresh.newest, lambda: fresh.read_all(old), lambda: put(fresh, "1", 9),
        lambda: put(store, "1", 9),
    ):  # fmt: skip
        with pytest.raises(DatabaseError, match="eventsql store adopt"):
            refused()

    done = fresh.adopt()
    assert done.changes == 3
    put(fresh, "1", 6)
    assert numbers(fresh.read_all()) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(DatabaseError, match="checkpoint_of"):
        fresh.read_all(old)
    assert numbers(fresh.read_all(fresh.checkpoint_of("order", "1", 1))) == [4, 5, 6]
    assert fresh.adopt().changes == 0


def test_changes_of_transactions_that_this_server_has_not_had_are_refused(store: Store) -> None:
    put(store, "1", 1)
    with store.database.connection() as connection:
        connection.execute("UPDATE eventsql.aggregate SET eql_transaction = '900000000'")
        connection.execute("UPDATE eventsql.aggregate_change SET eql_transaction = '900000000'")
        connection.execute("UPDATE eventsql.store_home SET eql_server = NULL")
    with pytest.raises(DatabaseError, match="eventsql store adopt"):
        store.read_all()
    assert store.adopt().changes == 1
    put(store, "1", 2)
    assert numbers(store.read_all()) == [1, 2]


def test_a_checkpoint_that_this_server_has_not_reached_is_refused(store: Store) -> None:
    put(store, "1", 1)
    # As after a failover to a server that lacks the newest changes.
    lost = replace(store.newest(), transaction=store.newest().transaction + 1_000_000)
    for refused in (
        lambda: store.read_all(lost),
        lambda: store.subscribe("later", lambda change, connection: None, start=lost, background=False),
    ):
        with pytest.raises(DatabaseError, match="has not reached checkpoint"):
            refused()
    with store.database.transaction() as connection:
        put(store, "1", 2, connection=connection)
        assert store.read_all(store.checkpoint_of("order", "1", 2, connection=connection), connection=connection) == []


def test_a_checkpoint_is_checked_again_after_it_was_let_pass(store: Store) -> None:
    put(store, "1", 1)
    lost = replace(store.newest(), transaction=store.newest().transaction + 1_000_000)
    with store.database.transaction() as connection:
        # As by a standby, which may be behind: it is promoted before it has had the transaction.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert store.read_all(lost, connection=connection) == []
    with pytest.raises(DatabaseError, match="has not reached checkpoint"):
        store.read_all(lost)


def test_a_checkpoint_is_text_and_back(store: Store) -> None:
    put(store, "1", 1)
    place = store.newest()
    assert StoreCheckpoint.parse(str(place)) == place
    for wrong in ("", "a:1", "a:b:c", "a:1:2:3", ":1:2", "a:-1:2", f"a:{2**64}:1"):
        with pytest.raises(ValidationError):
            StoreCheckpoint.parse(wrong)


# Plans


def prepare_many(platform: EventSQL) -> None:
    adopted(platform.database, 2_000)
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.aggregate_change (eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data, "
            "eql_change_id) SELECT 'order', n, 1, 'numbered', '{}', gen_random_uuid() FROM generate_series(1, 3000) n"
        )
        connection.execute(
            "INSERT INTO eventsql.archived_change (eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data, "
            "eql_transaction) SELECT 'order', 'archived ' || n, 1, 'numbered', '{}', pg_current_xact_id() "
            "FROM generate_series(1, 3000) n"
        )
        connection.execute("VACUUM ANALYZE")


@pytest.mark.prepared.with_args(prepare_many)
@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("read_after", "aggregate_change_place"),
        ("read_visible", "aggregate_change_place"),
        ("read_adopted", "adopted_change_pkey"),
        ("newest", "aggregate_change_place"),
        ("place", "aggregate_change_pkey"),
        ("home", "aggregate_change_place"),
        ("standing", "aggregate_change_"),
    ],
)
def test_the_order_is_read_through_its_index(store: Store, statement: str, index: str) -> None:
    values = {
        "transaction": "5", "position": 7, "types": None, "kinds": None, "limit": 100, "type": "order", "id": "old 7",
        "version": 1, "change_ids": [uuid.uuid4()],
    }  # fmt: skip
    with store.database.connection() as connection:
        for plan in plans(connection, Queries("store", "eventsql")(statement), values):
            assert index in plan, plan
            assert "Seq Scan on aggregate_change" not in plan
            assert "Seq Scan on archived_change" not in plan
