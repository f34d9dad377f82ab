"""Archived changes leave the store's own table, and everything reads them as before."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import AggregateClosedError, DatabaseError, ValidationError
from eventsql_orchestration.store import (
    Archived,
    ExpectedVersion,
    Projections,
    RecordedChange,
    Store,
    SubscriptionOptions,
)
from tests.fixtures import Sessions, UntilBlocked
from tests.store.test_order import change, numbers, put, restored
from tests.store.test_projection import Sums, sums
from tests.waiting import PATIENCE

LATER = datetime(9000, 1, 1, tzinfo=UTC)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def closed(store: Store, aggregate_id: str, *numbers: int) -> None:
    put(store, aggregate_id, *numbers)
    store.close_stream("order", aggregate_id)


def counts(store: Store) -> tuple[int, int]:
    """The changes in the store's own table, and in the archive."""
    with store.database.connection() as connection:
        found = [
            connection.execute(sql.SQL("SELECT FROM ONLY eventsql.{}").format(sql.Identifier(table))).rowcount
            for table in ("aggregate_change", "archived_change")
        ]
    return found[0], found[1]


def test_archived_changes_are_read_in_their_places(store: Store) -> None:
    put(store, "1", 1)
    closed(store, "2", 2, 3)
    put(store, "1", 4)
    before = store.read_all()
    places = [store.checkpoint_of("order", "2", version) for version in (1, 2)]

    assert store.archive_stream("order", "2") == 2
    assert counts(store) == (2, 2)
    assert store.read_all() == before
    assert [each.checkpoint for each in store.read_all()] == [each.checkpoint for each in before]
    assert numbers(store.load("order", "2", after_version=1)) == [3]
    assert [store.checkpoint_of("order", "2", version) for version in (1, 2)] == places
    (first, second) = store.aggregates("order")
    assert (first.archived_at, second.archived_at is None) == (None, False)


def test_archiving_again_moves_nothing_and_a_stream_can_be_moved_back(store: Store) -> None:
    closed(store, "1", 1, 2)
    assert [store.archive_stream("order", "1") for _ in range(2)] == [2, 0]
    assert [store.unarchive_stream("order", "1") for _ in range(2)] == [2, 0]
    assert counts(store) == (2, 0)
    assert store.aggregates("order")[0].archived_at is None
    with pytest.raises(AggregateClosedError):
        put(store, "1", 3)


def test_an_open_or_unknown_aggregate_is_not_archived(store: Store) -> None:
    put(store, "1", 1)
    for aggregate_id in ("1", "2"):
        with pytest.raises(ValidationError):
            store.archive_stream("order", aggregate_id)
    with pytest.raises(ValidationError):
        store.unarchive_stream("order", "2")
    assert counts(store) == (1, 0)


def test_an_archived_aggregate_takes_no_more_changes_and_knows_those_that_it_has(store: Store) -> None:
    stored = change(1, id=uuid.uuid4())
    store.append("order", "1", [stored], expected_version=0)
    store.close_stream("order", "1")
    store.archive_stream("order", "1")
    refused: tuple[ExpectedVersion, ...] = (1, "any", "exists", "none")
    for expected in refused:
        with pytest.raises(AggregateClosedError):
            store.append("order", "1", [change(2)], expected_version=expected)
    assert store.append("order", "1", [stored], expected_version=0) == 1
    for expected in refused[1::2]:
        with pytest.raises(ValidationError):
            store.append("order", "2", [stored], expected_version=expected)
    assert counts(store) == (0, 1)


def test_closed_aggregates_are_archived_by_their_time(store: Store, sessions: Sessions) -> None:
    for name in ("1", "2", "3", "4"):
        closed(store, name, 1, 2)
    put(store, "5", 1)
    with store.database.connection() as connection:
        connection.execute(
            "UPDATE eventsql.aggregate SET eql_closed_at = now() - make_interval(days => eql_id::int) "
            "WHERE eql_closed_at IS NOT NULL"
        )
    locking = sessions()
    locking.execute("SELECT FROM eventsql.aggregate WHERE eql_id = '4' FOR UPDATE")
    first, *_ = store.aggregates("order")
    assert first.closed_at is not None
    assert store.archive_closed("order", before=first.closed_at) == Archived(2, 4)
    locking.rollback()
    assert store.archive_closed("order", before=LATER, limit=1) == Archived(1, 2)
    archived = {each.id for each in store.aggregates("order") if each.archived_at is not None}
    assert archived == {"2", "3", "4"}
    assert store.archive_closed("ride", before=LATER) == Archived(0, 0)


def test_a_stream_of_another_type_with_the_same_id_stays_where_it_is(store: Store) -> None:
    for of in ("order", "rider"):
        put(store, "1", 1, of=of)
        store.close_stream(of, "1")
    assert store.archive_stream("order", "1") == 1
    assert counts(store) == (1, 1)
    assert [store.aggregates(of)[0].archived_at is None for of in ("order", "rider")] == [False, True]
    assert store.archive_stream("rider", "1") == 1
    assert store.unarchive_stream("order", "1") == 1
    assert counts(store) == (1, 1)
    assert [store.aggregates(of)[0].archived_at is None for of in ("order", "rider")] == [True, False]


def test_more_aggregates_than_one_transaction_takes_are_archived(store: Store) -> None:
    for number in range(103):
        closed(store, f"{number}", number)
    assert store.archive_closed("order", before=LATER) == Archived(103, 103)
    assert len(store.read_all()) == 103


@pytest.fixture
def twins(store: Store, sessions: Sessions) -> Store:
    """An archived stream `1`, and a closed one `2` whose change has the same id."""
    shared = change(1, id=uuid.uuid4())
    older = sessions()
    older.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    older.execute("SELECT FROM eventsql.aggregate")  # its snapshot is older than the first stream
    store.append("order", "1", [shared], expected_version=0)
    store.close_stream("order", "1")
    store.archive_stream("order", "1")
    store.append("order", "2", [shared], expected_version=0, connection=older)
    older.commit()
    store.close_stream("order", "2")
    return store


def test_a_stream_whose_id_was_used_again_stays_in_the_archive(twins: Store) -> None:
    with pytest.raises(ValidationError, match="the id of a change of order '2'"):
        twins.unarchive_stream("order", "1")
    assert counts(twins) == (1, 1)
    assert numbers(twins.read_all()) == [1, 1]
    assert twins.aggregates("order")[0].archived_at is not None


def test_both_streams_of_one_id_are_archived_and_either_comes_back(twins: Store) -> None:
    assert twins.archive_stream("order", "2") == 1
    assert counts(twins) == (0, 2)
    assert twins.unarchive_stream("order", "1") == 1
    with pytest.raises(ValidationError, match="the id of a change of order '1'"):
        twins.unarchive_stream("order", "2")
    assert counts(twins) == (1, 1)


# Side by side


def test_an_archive_waits_for_an_append_and_moves_its_changes(
    store: Store, other: ThreadPoolExecutor, until_blocked: UntilBlocked
) -> None:
    put(store, "1", 1)
    with store.database.transaction() as connection:
        put(store, "1", 2, connection=connection)
        store.close_stream("order", "1", connection=connection)
        archiving = other.submit(store.archive_stream, "order", "1")
        until_blocked()
    assert archiving.result(PATIENCE) == 2
    assert numbers(store.load("order", "1")) == [1, 2]


def test_an_append_waits_for_an_archive_and_is_refused(
    store: Store, other: ThreadPoolExecutor, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    closed(store, "1", 1)
    holding = sessions()
    holding.execute("LOCK TABLE eventsql.archived_change IN SHARE MODE")
    archiving = other.submit(store.archive_stream, "order", "1")
    until_blocked()
    appending = other.submit(put, store, "1", 2)
    until_blocked(2)
    holding.rollback()
    with pytest.raises(AggregateClosedError):
        appending.result(PATIENCE)
    assert archiving.result(PATIENCE) == 1
    assert numbers(store.read_all()) == [1]


def test_a_killed_archive_has_moved_nothing(
    store: Store, other: ThreadPoolExecutor, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    closed(store, "1", 1, 2)
    holding = sessions()
    holding.execute("LOCK TABLE eventsql.archived_change IN SHARE MODE")
    archiving = other.submit(store.archive_stream, "order", "1")
    until_blocked()
    killed = holding.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND datname = current_database()"
    )
    assert killed.rowcount == 1
    with pytest.raises((DatabaseError, psycopg.Error)):
        archiving.result(PATIENCE)
    holding.rollback()
    assert (counts(store), numbers(store.read_all())) == ((2, 0), [1, 2])
    assert store.archive_stream("order", "1") == 2


def test_a_reader_in_one_snapshot_has_each_change_once(store: Store, sessions: Sessions) -> None:
    closed(store, "1", 1, 2)
    put(store, "2", 3)
    reading = sessions()
    reading.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    first = store.read_all(limit=1, connection=reading)
    store.archive_stream("order", "1")
    rest = store.read_all(first[-1].checkpoint, connection=reading)
    assert numbers(first + rest) == [1, 2, 3]


@pytest.mark.parametrize("step", ["archive_stream", "unarchive_stream"])
def test_reading_on_has_each_change_once_wherever_the_stream_is_moved(store: Store, step: str) -> None:
    closed(store, "1", 1, 2, 3)
    put(store, "2", 4)
    if step == "unarchive_stream":
        store.archive_stream("order", "1")
    found, place = [], None
    for number in range(4):
        if number == 2:
            getattr(store, step)("order", "1")
        (each,) = store.read_all(place, limit=1)
        found.append(each.data["n"])
        place = each.checkpoint
    assert found == [1, 2, 3, 4]


def test_changes_that_commit_late_are_read_behind_an_archive(store: Store, sessions: Sessions) -> None:
    late = sessions()
    put(store, "late", 1, connection=late)  # its transaction is the first one, and commits last
    closed(store, "1", 2)
    store.archive_stream("order", "1")
    assert store.read_all() == []
    late.commit()
    assert numbers(store.read_all()) == [1, 2]


def test_a_subscription_gets_archived_changes_and_its_letters_are_redriven(store: Store) -> None:
    closed(store, "1", 1, 2)
    put(store, "2", 3)
    seen: list[int] = []
    failing = [True]

    def handle(each: RecordedChange, _connection: Connection) -> None:
        if each.data["n"] == 2 and failing[0]:
            raise ValueError("not today")
        seen.append(each.data["n"])

    options = SubscriptionOptions(batch=1, max_attempts=1)
    subscription = store.subscribe("mailer", handle, background=False, options=options)
    subscription.run_once()
    store.archive_stream("order", "1")
    while subscription.run_once().more:
        pass
    assert seen == [1, 3]
    failing[0] = False
    assert subscription.redrive() == 1
    assert seen == [1, 3, 2]


def test_a_rebuild_and_a_comparison_have_archived_changes(store: Store) -> None:
    projections = Projections(store, [Sums()])
    projections.install()
    for name in ("1", "2"):
        closed(store, name, 1, 2)
    store.archive_stream("order", "1")
    assert projections.rebuild("sums") == 4
    assert projections.compare("sums", {"sums": "id"}).equal
    assert sums(store) == {"1": (3, 2), "2": (3, 2)}


def test_archived_changes_of_a_restored_dump_are_adopted(store: Store) -> None:
    put(store, "0", 0)
    closed(store, "1", 1, 2)
    store.archive_stream("order", "1")
    put(store, "0", 3)
    restored(store.database)
    assert Store(store.database).adopt().changes == 4
    assert numbers(store.read_all()) == [0, 1, 2, 3]
    store.unarchive_stream("order", "1")
    assert numbers(store.read_all()) == [0, 1, 2, 3]


def test_a_restored_dump_is_adopted_behind_a_transaction_that_goes_on_writing(
    store: Store, other: ThreadPoolExecutor, until_blocked: UntilBlocked
) -> None:
    for name in ("1", "2"):
        put(store, name, 1)
    restored(store.database)
    with store.database.transaction() as connection:
        store.close_stream("order", "1", connection=connection)
        adopting = other.submit(Store(store.database).adopt)
        until_blocked()
        put(store, "2", 2, connection=connection)
    assert adopting.result(PATIENCE).changes == 3
    assert numbers(store.read_all()) == [1, 1, 2]
