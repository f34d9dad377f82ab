"""The connection that tasks read over: what a query gives, and which of its errors say that the server is gone."""

from __future__ import annotations

from unittest.mock import Mock

import adbc_driver_postgresql  # type: ignore[import-untyped]  # it has no types
import psycopg
import pytest
from pyspark import TaskContext
from pyspark.sql.types import (
    ArrayType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import DatabaseError, DatabaseFullError, DatabaseUnavailableError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.spark.adbc import CopyConnection, CutOffError, RefusedError
from eventsql_orchestration.spark.copying import TableCopy, copy_frame
from eventsql_orchestration.spark.log_tasks import Piece, Projection, read_batches
from eventsql_orchestration.spark.options import Source
from tests.waiting import wait_until

WIDE = "SELECT repeat('x', 1000000) AS text, 100 / ({zero} - number) AS part FROM generate_series(1, 30) AS number"
"""More than one record batch."""


def test_a_query_that_fails_among_its_rows_is_refused_and_leaves_the_connection_to_the_next(dsn: str) -> None:
    with CopyConnection(dsn) as connection:
        batches = connection.batches(WIDE.format(zero=20))
        assert next(batches).num_rows < 20
        with pytest.raises(RefusedError, match="division by zero"):
            list(batches)
        (batch,) = connection.batches("SELECT 7 AS number")
        assert batch.to_pydict() == {"number": [7]}


def test_a_connection_that_is_ended_among_the_rows_is_no_refusal(dsn: str) -> None:
    with CopyConnection(dsn) as connection, psycopg.connect(dsn, autocommit=True) as administrator:
        batches = connection.batches(WIDE.format(zero=40))
        next(batches)
        ended = administrator.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE 'COPY%' AND pid <> pg_backend_pid()"
        ).fetchall()
        assert ended == [(True,)]
        with pytest.raises(CutOffError):
            list(batches)


def test_a_statement_that_cannot_be_closed_keeps_no_connection_open(dsn: str) -> None:
    with pytest.raises(RuntimeError), CopyConnection(dsn) as connection:
        connection._statement.close()
    with psycopg.connect(dsn, autocommit=True) as administrator:
        others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        # The server notices a moment later that a connection is closed.
        wait_until(lambda: not administrator.execute(others).fetchall(), "the connection is closed")


@pytest.mark.parametrize(
    "element",
    [StructType([StructField("n", IntegerType())]), MapType(StringType(), StringType()), ArrayType(TimestampType())],
)
def test_a_column_with_elements_that_copy_cannot_take_is_refused(element: DataType) -> None:
    frame = Mock(schema=StructType([StructField("items", ArrayType(element))]), columns=["items"])
    with pytest.raises(ValidationError, match=r"column 'items' of table 'orders' is of type array<.*: make it text"):
        copy_frame(frame, Source("postgresql://nowhere", "eventsql", "the database"), "public", "orders", "ledger")
    frame.foreachPartition.assert_not_called()


RANGE = OffsetRange("orders", NOT_PARTITIONED, 0, 20)


@pytest.fixture
def source(platform: EventSQL, dsn: str) -> Source:
    """A database whose topic has the events of `RANGE`."""
    platform.registry.register_topic(Topic("orders"))
    platform.publisher.publish_all(Publication("orders", b"value") for _ in range(20))
    platform.transfer.run_once()
    return Source(dsn, "eventsql", "the database")


def test_a_read_that_the_server_refuses_among_the_rows_is_not_said_to_have_lost_it(source: Source) -> None:
    piece = Piece(RANGE, "orders_event", 1, rows=["100 / (eql_id - 10) IS NOT NULL"])
    with pytest.raises(
        DatabaseError, match=r"orders\(0, 20\] could not be read: the .* refused: .*division"
    ) as failure:
        list(read_batches(source, [piece], Projection(["offset"])))
    assert not isinstance(failure.value, DatabaseUnavailableError)


def test_a_log_whose_table_is_gone_has_another_form(source: Source) -> None:
    with pytest.raises(DatabaseError, match="'orders' was deleted, or its log got another form"):
        list(read_batches(source, [Piece(RANGE, "orders_of_another_form", 1)], Projection(["offset"])))


def test_a_driver_whose_library_is_missing_is_not_said_to_have_lost_the_server(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adbc_driver_postgresql, "_driver_path", lambda: "/no/such/library.so")
    with pytest.raises(DatabaseError) as failure:
        list(read_batches(source, [Piece(RANGE, "orders_event", 1)], Projection(["offset"])))
    assert not isinstance(failure.value, DatabaseUnavailableError)


@pytest.fixture
def copy(source: Source, dsn: str, monkeypatch: pytest.MonkeyPatch) -> TableCopy:
    monkeypatch.setattr(TaskContext, "get", lambda: Mock(partitionId=lambda: 0))
    with psycopg.connect(dsn, autocommit=True) as administrator:
        administrator.execute("CREATE TABLE public.line (line text)")
        administrator.execute("CREATE TABLE public.ledger (of_table text, part integer, PRIMARY KEY (of_table, part))")
    return TableCopy(source, "public", "line", "ledger", ["line"])


def test_a_row_that_the_driver_refuses_is_not_said_to_have_lost_the_server(copy: TableCopy) -> None:
    with pytest.raises(DatabaseError) as failure:
        copy([("a NUL character: \x00",)])
    assert not isinstance(failure.value, DatabaseUnavailableError)


@pytest.mark.parametrize("state", ["53100", "53200", "53400"])
def test_a_server_without_room_is_not_said_to_be_away(copy: TableCopy, dsn: str, state: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as administrator:
        administrator.execute(
            "CREATE FUNCTION public.extend() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE 'could not extend file' USING ERRCODE = '{state}'; END $$".encode()
        )
        administrator.execute("CREATE TRIGGER extend BEFORE INSERT ON public.line EXECUTE FUNCTION public.extend()")
    with pytest.raises(DatabaseFullError, match="no room left"):
        copy([("a line",)])


def test_an_error_of_this_machine_in_a_read_stays_as_it_is(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("eventsql_orchestration.spark.log_tasks._events", decode)
    with pytest.raises(OSError, match="Too many open files"):
        list(read_batches(source, [Piece(RANGE, "orders_event", 1)], Projection(["offset"])))
