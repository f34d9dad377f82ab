"""Spark reads the event store as `read_all` does, and fills projections in bulk without a gap or a double."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from psycopg import sql
from psycopg.errors import UndefinedTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseError,
    ProjectionError,
    SchemaOutdatedError,
    ValidationError,
)
from eventsql_orchestration.spark import FORMAT
from eventsql_orchestration.spark.change_options import ChangeOptions
from eventsql_orchestration.spark.change_reader import CHANGE_SCHEMA, ChangeReader
from eventsql_orchestration.spark.copying import TableCopy
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.projections import SparkFill, SparkProjection
from eventsql_orchestration.spark.source import EventSQLDataSource
from eventsql_orchestration.store import (
    Change,
    Filling,
    Projection,
    Projections,
    RecordedChange,
    Store,
    StoreCheckpoint,
)
from eventsql_orchestration.store.order import GlobalOrder
from tests.fixtures import Sessions
from tests.store.test_order import adopted, put
from tests.store.test_projection import Sums, spoil, sums


class BulkSums(Sums, SparkProjection):
    def frames(self, changes: DataFrame) -> Mapping[str, DataFrame]:
        number = f.get_json_object("data", "$.n").cast("bigint")
        return {
            "sums": changes.groupBy(f.col("aggregate_id").alias("id")).agg(
                f.sum(number).alias("total"), f.count("*").alias("changes")
            )
        }


@pytest.fixture
def store(platform: EventSQL) -> Store:
    return platform.store


@pytest.fixture
def projections(store: Store) -> Projections:
    made = Projections(store, [BulkSums()])
    made.install()
    return made


@pytest.fixture
def read_changes(dsn: str) -> Callable[..., list[dict[str, Any]]]:
    """The changes of a read with these options, in its order, without a Spark session."""

    def read(**options: object) -> list[dict[str, Any]]:
        reader = reader_of(dsn, **options)
        return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    return read


def reader_of(dsn: str, **options: object) -> ChangeReader:
    given = {"aggregates": "*", **{name: str(value) for name, value in options.items()}}
    return ChangeReader(ChangeOptions.parse({"dsn": dsn, **given}), CHANGE_SCHEMA)


def numbers(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["aggregate_id"], row["version"]) for row in rows]


@pytest.mark.parametrize("tasks", [1, 3, 50])
def test_a_read_has_the_changes_below_the_horizon_in_their_order(
    store: Store, read_changes: Callable[..., list[dict[str, Any]]], sessions: Sessions, tasks: int
) -> None:
    adopted(store.database, 4)
    for number in range(5):
        put(store, str(number % 2), number, number + 10)
    put(store, "7", 1, of="rider, tall")
    early = sessions()
    early.execute("SELECT pg_current_xact_id()")
    put(store, "1", 99)

    expected = [(each.aggregate_id, each.version) for each in store.read_all()]
    assert len(expected) == 15
    assert numbers(read_changes(numPartitions=tasks)) == expected
    place = store.read_all(limit=6)[-1].checkpoint
    assert numbers(read_changes(numPartitions=tasks, afterCheckpoint=place)) == expected[6:]
    assert numbers(read_changes(numPartitions=tasks, uptoCheckpoint=place)) == expected[:6]
    among_adopted = store.read_all(limit=2)[-1].checkpoint
    assert numbers(read_changes(numPartitions=tasks, afterCheckpoint=among_adopted)) == expected[2:]
    assert numbers(read_changes(numPartitions=tasks, uptoCheckpoint=among_adopted)) == expected[:2]
    assert numbers(read_changes(numPartitions=tasks, aggregates='["rider, tall"]')) == [("7", 1)]
    assert read_changes(numPartitions=tasks, kinds="other") == []
    with pytest.raises(ValidationError):
        read_changes(uptoCheckpoint=store.checkpoint_of("order", "1", 5))
    assert read_changes(afterCheckpoint=place, uptoCheckpoint=place) == []
    with pytest.raises(ValidationError, match=r"option uptoCheckpoint: .* lies before afterCheckpoint"):
        read_changes(afterCheckpoint=place, uptoCheckpoint=store.read_all(limit=5)[-1].checkpoint)


@pytest.mark.parametrize("option", ["afterCheckpoint", "uptoCheckpoint"])
def test_a_checkpoint_of_another_store_is_refused(
    store: Store, read_changes: Callable[..., list[dict[str, Any]]], option: str
) -> None:
    put(store, "1", 1)
    with pytest.raises(DatabaseError, match="another server"):
        read_changes(**{option: replace(store.checkpoint_of("order", "1", 1), era="another")})


def test_tasks_are_even(store: Store, dsn: str) -> None:
    for number in range(30):
        put(store, str(number), *range(10))
    reader = reader_of(dsn, maxRecordsPerPartition=100)
    assert [sum(batch.num_rows for batch in reader.read(part)) for part in reader.partitions()] == [100] * 3


def test_a_frame_has_the_columns_of_changes(store: Store, spark: SparkSession, dsn: str) -> None:
    store.append("order", "1", [Change("placed", {"n": 1}, metadata={"who": "ä"})], expected_version=0)
    frame = spark.read.format(FORMAT).options(dsn=dsn, aggregates="order").load()
    (row,) = frame.collect()
    (change,) = store.read_all()
    assert row.asDict() | {"created_at": None} == {
        "aggregate_type": "order", "aggregate_id": "1", "version": 1, "kind": "placed", "data": '{"n": 1}',
        "created_at": None, "schema_version": 1, "id": None, "metadata": '{"who": "ä"}',
        "transaction": getattr(change.checkpoint, "transaction", None),
        "position": getattr(change.checkpoint, "position", None),
    }  # fmt: skip
    narrow = spark.read.format(FORMAT).options(dsn=dsn, aggregates="*").schema("version bigint, kind string").load()
    assert [tuple(row) for row in narrow.collect()] == [(1, "placed")]


@pytest.mark.parametrize(
    "options",
    [
        {"subscribe": "orders"},
        {"startingOffsets": "1"},
        {"aggregate": "order"},
        {"dsn": "postgresql://a postgresql://b"},
    ],
)
def test_options_of_topics_do_not_go_with_those_of_the_store(dsn: str, options: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        ChangeOptions.parse({"dsn": dsn, "aggregates": "*", **options})


def test_a_read_makes_no_tables(session: Connection, dsn: str) -> None:
    with pytest.raises(SchemaOutdatedError):
        reader_of(dsn, schema="misspelt").partitions()
    assert session.execute("SELECT to_regnamespace('misspelt')").fetchone() == (None,)


@pytest.mark.parametrize("names", ["", "a,,b", "[1]", "[]", "*,a", '["a"'])
def test_invalid_names_of_aggregates_are_refused(dsn: str, names: str) -> None:
    with pytest.raises(ValidationError):
        ChangeOptions.parse({"dsn": dsn, "aggregates": names})


def test_a_stream_of_the_store_is_refused(dsn: str) -> None:
    with pytest.raises(ConfigurationError):
        EventSQLDataSource({"dsn": dsn, "aggregates": "*"}).streamReader(CHANGE_SCHEMA)


def test_a_store_that_was_adopted_meanwhile_is_not_read_in_part(store: Store, dsn: str) -> None:
    put(store, "1", 1)
    reader = reader_of(dsn)
    (split,) = reader.partitions()
    with store.database.connection() as connection:
        connection.execute("UPDATE eventsql.store_home SET eql_era = 'another'")
    with pytest.raises(DatabaseError, match="adopted"):
        list(reader.read(split))


def test_a_task_on_a_standby_that_is_behind_fails(store: Store, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "1", 1, 2)
    newest = GlobalOrder.newest

    def ahead(order: GlobalOrder, connection: Connection) -> StoreCheckpoint:
        return replace(newest(order, connection), transaction=2**60)

    monkeypatch.setattr(GlobalOrder, "newest", ahead)
    reader = reader_of(dsn, numPartitions=2)
    complete, behind = reader.partitions()
    assert sum(batch.num_rows for batch in reader.read(complete)) == 1
    with pytest.raises(DatabaseError, match="lacks changes"):
        list(reader.read(behind))


# Projections


def test_a_rebuild_in_bulk_applies_what_commits_late_once(
    store: Store, projections: Projections, sessions: Sessions, spark: SparkSession
) -> None:
    adopted(store.database, 3)
    put(store, "1", 1, 2)
    put(store, "1", 7, of="rider")
    subscription = projections.subscribe("sums", background=False)
    subscription.run_once()
    early = sessions()
    put(store, "2", 3, connection=early)
    put(store, "3", 4)
    spoil(store)
    told: list[int] = []

    def fill(filling: Filling) -> None:
        SparkFill(spark)(filling)
        early.commit()
        put(store, "1", 5)

    assert projections.rebuild("sums", fill=fill, on_progress=told.append) == 8
    old = {f"old {number}": (number, 1) for number in (1, 2, 3)}
    assert sums(store) == {**old, "1": (8, 3), "2": (3, 1), "3": (4, 1)}
    assert told[0] == 5
    put(store, "3", 6)
    assert subscription.run_once().handled == 1
    assert sums(store)["3"] == (10, 2)


def test_an_interrupted_fill_begins_anew_and_nothing_of_it_stays(
    store: Store, projections: Projections, spark: SparkSession, dsn: str
) -> None:
    put(store, "1", 1, 2)
    fillings: list[Filling] = []

    def stop(filling: Filling) -> None:
        fillings.append(filling)
        SparkFill(spark)(filling)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        projections.rebuild("sums", fill=stop)
    (filling,) = fillings
    copying = TableCopy(
        Source.of([dsn], "eventsql"), filling.schema, "sums", filling.ledger, ["id", "total", "changes"]
    )
    assert copying.copy_part([("9", 1, 1)], 100)
    assert not copying.copy_part([("9", 1, 1)], 100)

    assert projections.rebuild("sums") == 2
    assert sums(store) == {"1": (3, 2)}
    with pytest.raises(UndefinedTable):
        copying.copy_part([("9", 1, 1)], 101)


def test_no_change_is_applied_to_tables_that_are_being_filled(store: Store, projections: Projections) -> None:
    put(store, "1", 1)

    def nested(_filling: Filling) -> None:
        with pytest.raises(KeyboardInterrupt):
            projections.rebuild("sums", fill=_stop)

    def _stop(_filling: Filling) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ProjectionError):
        projections.rebuild("sums", fill=nested)
    assert sums(store) == {}
    assert projections.rebuild("sums") == 1
    assert sums(store) == {"1": (1, 1)}


class Plain(Projection):
    name = "plain"
    tables = ("plain",)

    def create(self, connection: Connection) -> None:
        connection.execute("CREATE TABLE plain (id text, total smallint, at timestamptz, items jsonb)")

    def apply(self, change: RecordedChange, connection: Connection) -> None:
        """Nothing to write."""


class Chosen(Plain, SparkProjection):
    columns: Mapping[str, str]

    def frames(self, changes: DataFrame) -> Mapping[str, DataFrame]:
        return {"plain": changes.selectExpr(*(f"{value} AS {name}" for name, value in self.columns.items()))}


def test_values_of_other_types_arrive_as_they_are(store: Store, spark: SparkSession) -> None:
    put(store, "1", 1)
    projection = Chosen()
    projection.columns = {"id": "NULL", "total": "CAST(version AS DECIMAL(4, 0))", "at": "created_at", "items": "data"}
    assert Projections(store, [projection]).rebuild("plain", fill=SparkFill(spark)) == 1
    (change,) = store.read_all()
    with store.database.connection() as connection:
        found = connection.execute("SELECT id, total, at, items FROM public.plain").fetchall()
    assert found == [(None, 1, change.created_at, {"n": 1})]


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (None, ProjectionError),
        ({"id": "struct(kind)"}, ValidationError),
        ({"no_column": "kind"}, DatabaseError),
        ({"total": "1000000"}, DatabaseError),
    ],
)
def test_frames_that_do_not_fit_are_an_error_and_swap_nothing(
    store: Store, spark: SparkSession, columns: Mapping[str, str] | None, error: type[Exception]
) -> None:
    put(store, "1", 1)
    projection = Plain() if columns is None else Chosen()
    if isinstance(projection, Chosen) and columns is not None:
        projection.columns = columns
    projections = Projections(store, [projection])
    with pytest.raises(error):
        projections.rebuild("plain", fill=SparkFill(spark))
    with store.database.connection() as connection:
        found = connection.execute(sql.SQL("SELECT to_regclass('public.plain')")).fetchone()
    assert found == (None,)
