"""PySpark rebuilds views, and what their consumer does meanwhile is in them once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from psycopg.errors import UndefinedTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from eventsql_orchestration import Connection, Consumer, Event, EventFilter, EventSQL, Publication
from eventsql_orchestration.errors import ViewConflictError
from eventsql_orchestration.spark.copying import TableCopy
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.views import SparkViewFeed, SparkViewFill, _columns
from eventsql_orchestration.views import Definition, LogEntry, Rollup, RollupEntry, ViewComparison, ViewFilling
from eventsql_orchestration.views.view_table import NO_TENANT
from tests.views.conftest import DAY, MINUTE, NOON, SKETCHES
from tests.views.test_rebuilding import CONSUMER, FEEDS, TOPIC, Counts, Feed, Lines, Steps, World, prepare, read

pytestmark = pytest.mark.prepared.with_args(prepare, fixture="world")

AT = "timestamp_seconds(1732104000 + 60 * CAST(CAST(value AS STRING) AS INT))"
"""NOON and so many minutes."""


class BulkSteps(Steps, SparkViewFeed):
    def frame(self, events: DataFrame) -> DataFrame:
        data = "concat('{\"minutes\": ', CAST(value AS STRING), '}') AS data"
        return events.selectExpr("offset", "key AS resource", data, f"{AT} AS occurred_at")


class BulkCounts(Counts, SparkViewFeed):
    def frame(self, events: DataFrame) -> DataFrame:
        return events.selectExpr(
            f"{AT} AS at", "key AS resource", "CAST(CAST(value AS STRING) AS INT) AS minutes",
            "CAST(value AS STRING) AS digits",
        )  # fmt: skip


class BulkLines(Lines, SparkViewFeed):
    """Two lines for each event."""

    def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
        view.write(
            connection,
            [
                LogEntry(event.key or "", f"line {at} {number}", NOON + at * MINUTE, attributes={"n": number})
                for event, at in read(events)
                for number in (1, 2)
            ],
        )

    def frame(self, events: DataFrame) -> DataFrame:
        return events.selectExpr(
            "offset", "explode(array(1, 2)) AS number", "key AS resource", "CAST(value AS STRING) AS at",
            f"{AT} AS written_at",
        ).selectExpr(
            "*", "concat('line ', at, ' ', number) AS line", "concat('{\"n\": ', number, '}') AS attributes"
        )  # fmt: skip


BULK: tuple[Feed, ...] = (BulkSteps(), BulkCounts(), BulkLines())


@pytest.fixture
def world(platform: EventSQL) -> World:
    made = World(platform)
    made.feeds = BULK
    return made


def test_views_are_rebuilt_in_bulk_without_a_gap_or_a_double(world: World, spark: SparkSession) -> None:
    far = 100 * 24 * 60
    world.publish(*range(30), far, -far)
    world.consume(most=11)
    wanted = {feed: world.rows(feed.view.name) for feed in BULK}
    world.spoil()
    for feed in BULK:
        later: list[int] = []

        def fill(filling: ViewFilling, later: list[int] = later) -> None:
            SparkViewFill(spark)(filling)
            world.publish(5, 6)
            later.append(world.consume(most=1))

        assert world.views.rebuild(feed, fill=fill) == sum(later) > 0
        assert len(world.rows(feed.view.name)) >= len(wanted[feed])
        assert world.views.compare(feed) == ViewComparison(feed.view.name, 0, 0)
        assert world.views.compare(feed, fill=SparkViewFill(spark)).equal
    for feed in FEEDS[:2]:
        assert world.views.compare(feed).equal
    lines = world.views.logs(Lines.view).search(resource="a", limit=4)
    assert [line.attributes["n"] for line in lines] == [2, 1, 2, 1]
    world.consume()
    world.publish(7)
    world.consume()
    for feed in BULK:
        assert world.views.compare(feed).equal


@pytest.mark.skipif(not SKETCHES, reason="no datasketches")
def test_sketches_of_spark_are_those_of_python(world: World, spark: SparkSession) -> None:
    wide = replace(Counts.view, name="wide", grain=DAY, dimensions=(), indexed=())
    world.views.declare(wide)

    class Wide(BulkCounts):
        view = wide

        def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
            entries = [RollupEntry(NOON, {}, {"minutes": at}, {"digits": str(at)}) for _, at in read(events)]
            view.add(connection, entries, slot=events[0].partition)

        def frame(self, events: DataFrame) -> DataFrame:
            return events.selectExpr(
                "timestamp_seconds(1732104000) AS at", "CAST(CAST(value AS STRING) AS INT) AS minutes",
                "CAST(value AS STRING) AS digits",
            )  # fmt: skip

    world.publish(*range(5_000))
    world.feeds = [Wide()]
    while world.consume(most=1_000):
        pass
    assert world.views.compare(Wide(), fill=SparkViewFill(spark)).equal
    ((_, _, _, _, distinct, _),) = world.rows("wide")
    world.views.rebuild(Wide(), fill=SparkViewFill(spark))
    ((_, _, count, _, rebuilt, quantiles),) = world.rows("wide")
    assert (count, rebuilt) == (5_000, distinct)
    assert abs(quantiles["minutes"].at(0.5) - 2_500) < 0.07 * 5_000


def test_a_filter_and_a_retention_hold_in_bulk_too(world: World, spark: SparkSession) -> None:
    kept = replace(Counts.view, retention=20 * 365 * DAY)
    world.views.declare(kept)
    way = {"way": "7"}
    published = [
        *(
            Publication(TOPIC, b"%d" % at, key="abcd"[at % 4], metadata=way)
            for at in (*range(8), -40 * 365 * 24 * 60)
        ),
        Publication(TOPIC, b"4", key="a", metadata=way | {"redriven_consumer": CONSUMER}),
        Publication(TOPIC, b"4", key="a", metadata=way | {"redriven_consumer": "another"}),
    ]  # fmt: skip
    world.platform.publisher.publish_all(published)
    with world.platform.database.connection() as connection:
        # Another program's metadata: the filter asks for a text.
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
            "VALUES (%s, 0, 'a', '4', '{\"way\": 7}')",
            (TOPIC,),
        )
    world.platform.transfer.run_once()
    filtered = EventFilter(keys=frozenset({"a", "b"}), key_prefix="a", metadata=way)
    world.platform.registry.register_consumer(Consumer(TOPIC, CONSUMER, partitioned=True), filter=filtered)
    world.consume()

    class Kept(BulkCounts):
        view = kept

    assert world.views.rebuild(Kept(), fill=SparkViewFill(spark)) == 0
    assert [(row[0], row[2]) for row in world.rows("counts")] == [(NOON, 1), (NOON + 4 * MINUTE, 2)]


def test_a_part_that_outlives_its_rebuild_writes_nothing(world: World, spark: SparkSession, dsn: str) -> None:
    world.publish(*range(4))
    world.consume()
    fillings: list[ViewFilling] = []

    def stop(filling: ViewFilling) -> None:
        fillings.append(filling)
        SparkViewFill(spark)(filling)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.views.rebuild(BulkCounts(), fill=stop)
    (filling,) = fillings
    columns = ["eql_tenant", "eql_bucket", "resource", "eql_slot", "eql_count"]
    copying = TableCopy(Source.of([dsn], "eventsql"), "eventsql", filling.definition.table, filling.ledger, columns)
    with pytest.raises(UndefinedTable):
        copying.copy_part([("", NOON, "z", 0, 1)], 100)
    world.views.rebuild(BulkCounts(), fill=SparkViewFill(spark))
    assert world.views.compare(BulkCounts()).equal


ENTRY = """
SELECT *, timestamp_seconds(1732104000) AS at, timestamp_seconds(1732104000) AS occurred_at,
       timestamp_seconds(1732104000) AS written_at
FROM VALUES (0L, 'a', '{}', 1, '1', 'line', 'info', '{}')
    AS entry (offset, resource, data, minutes, digits, line, level, attributes)
"""
"""An entry of any view."""

COUNTS = Rollup("counts", MINUTE, ("resource",), ("minutes",), distinct=("digits",))


@pytest.mark.parametrize(
    ("view", "wrong", "message"),
    [
        (COUNTS, {"minutes": "nullif(minutes, 1)"}, "value minutes of the frame is null"),
        (COUNTS, {"resource": "repeat('a', 201)"}, "dimension resource of the frame .* more than 200 characters"),
        (COUNTS, {"digits": "''"}, "distinct text digits of the frame is null or empty"),
        (Steps.view, {"resource": "repeat('a', 201)"}, "resource of the frame is null or not a name"),
        (Steps.view, {"resource": r"concat('a', '\n')"}, "resource of the frame is null or not a name"),
        (Steps.view, {"data": "'[1]'"}, "data of the frame is null or not a JSON object"),
        (Lines.view, {"level": "' info'"}, "level of the frame is null or not a name"),
        (Lines.view, {"attributes": "'1'"}, "attributes of the frame is null or not a JSON object"),
    ],
)
def test_an_entry_that_the_view_would_refuse_is_named(
    spark: SparkSession, view: Definition, wrong: dict[str, str], message: str
) -> None:
    entries = spark.sql(ENTRY)
    assert len(_columns(view, entries, None).collect()) == 1
    wrong_entries = entries.withColumns({name: f.expr(text) for name, text in wrong.items()})
    with pytest.raises(PySparkException, match=message):
        _columns(view, wrong_entries, None).collect()


def test_an_entry_that_the_view_would_refuse_fails_the_rebuild(world: World, spark: SparkSession) -> None:
    class Wrong(BulkCounts):
        def frame(self, events: DataFrame) -> DataFrame:
            return spark.sql(ENTRY).withColumn("minutes", f.lit(None).cast("int"))

    with pytest.raises(PySparkException, match="value minutes of the frame is null"):
        world.views.rebuild(Wrong(), fill=SparkViewFill(spark))
    assert world.leftovers() == []


def test_the_column_tenant_is_the_tenant_unless_it_is_a_dimension(spark: SparkSession) -> None:
    entries = spark.sql(ENTRY).withColumn("tenant", f.lit("acme"))
    by_tenant = Rollup("by_tenant", MINUTE, ("tenant",))
    assert [row.eql_tenant for row in _columns(COUNTS, entries, None).collect()] == ["acme"]
    (row,) = _columns(by_tenant, entries, None).collect()
    assert (row.eql_tenant, row.tenant) == (NO_TENANT, "acme")


@pytest.mark.parametrize(
    "columns",
    [
        ["current_timestamp() AS at"],
        ["'' AS at", "key AS resource", "1 AS minutes"],
        ["timestamp AS at", "key AS resource", "1e0 AS minutes", "key AS digits"],
        ["timestamp AS at", "partition AS resource", "1 AS minutes", "key AS digits"],
        ["timestamp AS at", "key AS resource", "1 AS minutes", "offset AS digits"],
    ],
)
def test_frames_that_do_not_fit_are_refused(world: World, spark: SparkSession, columns: list[str]) -> None:
    class Wrong(BulkCounts):
        def frame(self, events: DataFrame) -> DataFrame:
            return events.selectExpr(*columns)

    for feed in (Wrong(), Counts()):
        with pytest.raises(ViewConflictError):
            world.views.rebuild(feed, fill=SparkViewFill(spark))
    assert world.leftovers() == []
