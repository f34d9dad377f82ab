"""Rebuilding views in bulk, with PySpark."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Final, TypeAlias

from eventsql_orchestration.consuming.dead_letter_values import REDRIVEN_CONSUMER
from eventsql_orchestration.errors import MissingExtraError, ViewConflictError
from eventsql_orchestration.spark import FORMAT
from eventsql_orchestration.spark.copying import copy_frame
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.validation import MAX_NAME_LENGTH
from eventsql_orchestration.views import Logs, Rollup, Timeline, ViewFeed, ViewFilling
from eventsql_orchestration.views.definitions import EPOCH, start_of
from eventsql_orchestration.views.log_values import DEFAULT_LEVEL
from eventsql_orchestration.views.rollups import MAX_DIMENSION_LENGTH
from eventsql_orchestration.views.sketches import DISTINCT_SIZE, QUANTILE_SIZE
from eventsql_orchestration.views.view_table import NO_TENANT

try:
    from pyspark.sql import functions as f
except ModuleNotFoundError:
    raise MissingExtraError("spark", "a rebuild with Spark") from None

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_Rule: TypeAlias = "tuple[str, Column, str]"
"""A column of a frame, the condition that each of its rows has to meet, and the error."""

_SECOND: Final = timedelta(seconds=1)

_WHOLE: Final = frozenset({"tinyint", "smallint", "int", "bigint"})
"""Spark's types of whole numbers."""

_NAME: Final = rf"^(?!\s)\P{{Cntrl}}{{1,{MAX_NAME_LENGTH}}}(?<!\s)\z"
"""A name as `check_name` accepts it."""

_NO_NAME: Final = f"{{}} of the frame is null or not a name of 1 to {MAX_NAME_LENGTH} printable characters"

_NO_OBJECT: Final = "{} of the frame is null or not a JSON object"

_DIMENSION: Final = f"dimension {{}} of the frame is null or has more than {MAX_DIMENSION_LENGTH} characters"


class SparkViewFeed(ViewFeed):
    """A feed that PySpark can compute from all events at once, for rebuilds in bulk.

    `frame` has to give the entries that `apply` writes for the same events::

        class Moves(SparkViewFeed):
            ...

            def frame(self, events: DataFrame) -> DataFrame:
                return events.selectExpr("timestamp AS at", "CAST(value AS STRING) AS place")
    """

    @abstractmethod
    def frame(self, events: DataFrame) -> DataFrame:
        """A row for each entry that follows from `events`, which has the columns of a read with `includeHeaders`.

        Its columns are, by the kind of the view:

        - of a timeline: `offset`, `resource`, `data` (JSON as text), `occurred_at`;
        - of a rollup: `at`, its dimensions, values and distinct texts; values are whole numbers or decimals, the others
          strings;
        - of logs: `offset`, `resource`, `line`, `written_at`, and `level` and `attributes` (JSON as text), which may
          be left out.

        `tenant` may be one more column of each; if a rollup has a dimension, value or text of that name, its entries
        have no tenant. Entries are in the order of `offset`, the events' offset; if an event makes several entries,
        they are in the order of the column `number`, if there is one.
        """


class SparkViewFill:
    """Fills the new table of a view with the frame of a `SparkViewFeed`: `rebuild(feed, fill=SparkViewFill(spark))`.

    The tasks connect to the database of the views by the URL that this process has for it.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, filling: ViewFilling) -> None:
        """Raises `ViewConflictError` for a feed without a fitting frame, and errors of Spark and the database."""
        feed, view = filling.feed, filling.definition
        if not isinstance(feed, SparkViewFeed):
            raise ViewConflictError(
                f"the feed of view {feed.view.name!r} has no frame for PySpark: derive it from SparkViewFeed, or leave "
                "out fill"
            )
        source = Source.of([filling.database.dsn], filling.database.schema)
        entries = _columns(view, feed.frame(_events(self._spark, source, filling)), filling.oldest)
        filling.make_periods(_periods(view, entries))
        rows = _buckets(view, entries) if isinstance(view, Rollup) else _numbered(entries, filling.after_id)
        copy_frame(rows, source, source.schema, view.table, filling.ledger)


def _events(spark: SparkSession, source: Source, filling: ViewFilling) -> DataFrame:
    """The events that the feed's consumer has consumed."""
    topic, offsets = filling.feed.topic, filling.offsets
    options = {
        "dsn": source.dsn, "schema": source.schema, "subscribe": topic, "includeHeaders": "true",
        "endingOffsets": json.dumps({topic: max(offsets.values(), default=0) + 1}),
    }  # fmt: skip
    if filling.filter is not None:
        options["filter"] = json.dumps(filling.filter.as_json())
    events = spark.read.format(FORMAT).options(**options).load()
    own = f.col("headers")[REDRIVEN_CONSUMER]
    conditions = [own.isNull() | (own != filling.feed.consumer)]
    conditions += [
        (f.col("partition") != partition) | (f.col("offset") <= offset)
        for partition, offset in offsets.items()
        if partition >= 0
    ]
    return events.where(reduce(lambda one, other: one & other, conditions))


def _columns(view: Timeline | Rollup | Logs, entries: DataFrame, oldest: datetime | None) -> DataFrame:
    """The entries after `oldest` with the columns of the view's table, beside `number`. Raises `ViewConflictError`."""
    types = {field.name: field.dataType.simpleString() for field in entries.schema.fields}
    wanted = _wanted(view)
    time_of = "at" if isinstance(view, Rollup) else wanted[-1]
    if missing := [name for name in wanted if name not in types]:
        raise ViewConflictError(
            f"the frame of {view.kind} lacks {', '.join(missing)}: its columns are {', '.join(types)}"
        )
    if types[time_of] != "timestamp":
        raise ViewConflictError(f"column {time_of!r} of the frame is of type {types[time_of]}: make it a timestamp")

    if isinstance(view, Rollup):
        _check_types(view, types)
        given = {"eql_bucket": _floored(f.col("at"), view.grain), **_checked(_rollup_rules(view))}
    else:
        given = _entry_columns(view, types)
    given["eql_tenant"] = f.col("tenant") if "tenant" in types.keys() - set(wanted) else f.lit(NO_TENANT)
    kept = entries if oldest is None else entries.where(f.col(time_of) > f.lit(oldest))
    return kept.select(*(column.alias(name) for name, column in given.items()))


def _wanted(view: Timeline | Rollup | Logs) -> list[str]:
    """The columns that a frame must have."""
    if isinstance(view, Rollup):
        return ["at", *view.dimensions, *view.values, *view.distinct]
    if isinstance(view, Timeline):
        return ["offset", "resource", "data", "occurred_at"]
    return ["offset", "resource", "line", "written_at"]


def _entry_columns(view: Timeline | Logs, types: Collection[str]) -> dict[str, Column]:
    """The columns of a timeline or of logs, and the columns of the entries' order."""
    names, documents = (
        (["resource"], ["data"]) if isinstance(view, Timeline) else (["resource", "level"], ["attributes"])
    )
    rules = [
        *((name, f.col(name).cast("string").rlike(_NAME), _NO_NAME) for name in names if name in types),
        *((name, f.ltrim(name).startswith("{"), _NO_OBJECT) for name in documents if name in types),
    ]
    columns = {name: f.col(name) for name in _wanted(view)} | _checked(rules)
    if isinstance(view, Logs):
        columns = {"level": f.lit(DEFAULT_LEVEL), "attributes": f.lit("{}")} | columns
    order = {name: f.col(name) for name in ("offset", "number") if name in types}
    return order | {f"eql_{name}": column for name, column in columns.items() if name != "offset"}


def _check_types(rollup: Rollup, types: Mapping[str, str]) -> None:
    """Raise `ViewConflictError` for a column of another type than entries of the rollup have."""
    for name in (*rollup.dimensions, *rollup.distinct):
        if types[name] != "string":
            raise ViewConflictError(
                f"column {name!r} of the frame is of type {types[name]}: make it a string, as in the entries of `apply`"
            )
    for name in rollup.values:
        if types[name] not in _WHOLE and not types[name].startswith("decimal"):
            raise ViewConflictError(
                f"value {name!r} of the frame is of type {types[name]}, whose sums are rounded: make it a whole number "
                "or a decimal"
            )


def _rollup_rules(rollup: Rollup) -> list[_Rule]:
    """What `RollupEntry` accepts."""
    return [
        *((name, f.length(name) <= MAX_DIMENSION_LENGTH, _DIMENSION) for name in rollup.dimensions),
        *((name, f.col(name).isNotNull(), "value {} of the frame is null") for name in rollup.values),
        *((name, f.length(name) > 0, "distinct text {} of the frame is null or empty") for name in rollup.distinct),
    ]


def _checked(rules: Sequence[_Rule]) -> dict[str, Column]:
    """The columns of the rules. A row that breaks a rule fails the query."""
    # A condition on a null is null, and not true.
    return {
        name: f.when(right, f.col(name)).otherwise(f.raise_error(f.lit(message.format(name))))
        for name, right, message in rules
    }


def _floored(time: Column, step: timedelta) -> Column:
    """The last multiple of `step` since 1970 that is not after a time, without rounding."""
    micros = f.unix_micros(time)
    return f.timestamp_micros(micros - f.pmod(micros, f.lit(step // timedelta(microseconds=1)).cast("bigint")))


def _periods(view: Timeline | Rollup | Logs, entries: DataFrame) -> Sequence[datetime]:
    """The starts of the partitions that entries need."""
    starts = entries.select(f.unix_seconds(_floored(f.col(view.time_of), view.period))).distinct().collect()
    # A time that is missing is refused by the table.
    return [start_of(view, EPOCH + seconds * _SECOND) for (seconds,) in starts if seconds is not None]


def _buckets(view: Rollup, entries: DataFrame) -> DataFrame:
    """The rows of a rollup's table."""
    measures = [f.count("*").alias("eql_count")]
    for name in view.values:
        # Spark's sum of decimals has 10 more digits than they have. A sum of bigints is a bigint, and would overflow.
        whole = entries.schema[name].dataType.simpleString() in _WHOLE
        exact = f.col(name).cast("decimal(38,0)") if whole else f.col(name)
        total = f.coalesce(f.sum(exact), f.raise_error(f.lit(f"the sum of value {name} is too large")))
        measures += [total.alias(f"sum_{name}"), f.min(exact).alias(f"min_{name}"), f.max(exact).alias(f"max_{name}")]
    # Sketches of Spark are of the same library, and of the same form in Python.
    measures += [f.theta_sketch_agg(f.col(name), DISTINCT_SIZE).alias(f"eql_distinct_{name}") for name in view.distinct]
    measures += [
        f.kll_sketch_agg_double(f.col(name).cast("double"), QUANTILE_SIZE).alias(f"eql_quantiles_{name}")
        for name in view.quantiles
    ]
    rows = entries.groupBy("eql_tenant", "eql_bucket", *view.dimensions).agg(*measures)
    return rows.withColumn("eql_slot", f.lit(0))


def _numbered(entries: DataFrame, after_id: int) -> DataFrame:
    """Entries with ids in the order of their offsets."""
    order = [name for name in ("offset", "number") if name in entries.columns]
    return (
        entries.orderBy(*order).withColumn("eql_id", f.monotonically_increasing_id() + f.lit(after_id + 1)).drop(*order)
    )
