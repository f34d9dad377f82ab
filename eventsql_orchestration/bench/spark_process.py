"""What `eventsql bench spark` runs in a process of its own: the data source `eventsql` beside Spark's JDBC source.

Takes one order on standard input, and says on standard output how far it is and what it came to: a JSON object a line.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Database
from eventsql_orchestration.spark import FORMAT, spark_config
from eventsql_orchestration.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ALL_COLUMNS: Final = "key string, value binary, topic string, partition int, offset bigint, timestamp timestamp"
_TWO_COLUMNS: Final = "key string, offset bigint"

_FETCH: Final = 10_000
"""Rows that the JDBC source holds at once. By default its driver holds the whole of a task's range in memory."""

_MASTER_CORES: Final = 2

_WARM_UP: Final = 0.1
"""The part of the events that each way handles before the clock starts: Java compiles, Python workers start."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure, and on what.

    `source` is a topic with `events` events at the offsets 1 to `events`, `target` a topic to write to, `table`
    an empty table with the columns key, value, topic and partition.
    """

    dsn: str
    schema: str
    source: str
    target: str
    table: str
    events: int
    tasks: int
    rounds: int
    jar: str
    home: str


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to do something, over a part (0 to 1) of the events."""

    name: str
    run: Callable[[float], None]


class Measurement:
    """A session of Spark and what is measured in it."""

    def __init__(self, order: Order, spark: SparkSession, report: Callable[[str, int, int], None]) -> None:
        self._order = order
        self._spark = spark
        self._report = report
        self._database = Database(order.dsn, schema=order.schema)
        url = self._database.url
        self._jdbc = {
            "url": f"jdbc:postgresql://{url.host}:{url.port or 5432}/{url.database}",
            "driver": "org.postgresql.Driver",
            **({"user": url.username} if url.username else {}),
            **({"password": str(url.password)} if url.password else {}),
        }

    def measure(self) -> dict[str, list[float]]:
        """The events per second of each way, in each of the rounds.

        The ways take turns, so that a machine whose speed drifts is the same to both.
        """
        rates: dict[str, list[float]] = {}
        for first, second in (
            (_Way("read", self._read(_ALL_COLUMNS)), _Way("read_jdbc", self._read_jdbc(_ALL_COLUMNS))),
            (
                _Way("read_two_columns", self._read(_TWO_COLUMNS)),
                _Way("read_two_columns_jdbc", self._read_jdbc(_TWO_COLUMNS)),
            ),
            (_Way("write", self._write), _Way("write_jdbc", self._write_jdbc)),
        ):
            for way in (first, second):
                self._timed(way, _WARM_UP)
            for _ in range(self._order.rounds):
                for way in (first, second):
                    rates.setdefault(way.name, []).append(self._timed(way, 1.0))
        return rates

    def _timed(self, way: _Way, part: float) -> float:
        events = max(1, int(self._order.events * part))
        self._report(way.name.replace("_", " "), 0, events)
        self._settle()
        started = time.monotonic()
        way.run(part)
        seconds = time.monotonic() - started
        self._report(way.name.replace("_", " "), events, events)
        return events / seconds

    def _settle(self) -> None:
        # Only some roles may. Without it, what one way has written is flushed at the other's expense.
        with suppress(psycopg.Error), psycopg.connect(self._database.dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("TRUNCATE {}").format(sql.Identifier(self._order.schema, self._order.table)),
            )
            connection.execute("CHECKPOINT")

    def _read(self, columns: str) -> Callable[[float], None]:
        order = self._order

        def read(part: float) -> None:
            rows = (
                self._spark.read.format(FORMAT)
                .schema(columns)
                .options(
                    dsn=order.dsn,
                    schema=order.schema,
                    subscribe=order.source,
                    numPartitions=str(order.tasks),
                    endingOffsets=str(int(order.events * part) + 1),
                )
                .load()
            )
            _discard(rows)

        return read

    def _read_jdbc(self, columns: str) -> Callable[[float], None]:
        order = self._order
        expressions = {
            "key": "eql_key AS key",
            "value": "eql_value AS value",
            "topic": f"'{order.source}' AS topic",
            "partition": "eql_partition::int AS partition",
            "offset": 'eql_id AS "offset"',
            "timestamp": 'eql_buffered_at AS "timestamp"',
        }
        names = [column.split()[0] for column in columns.split(", ")]
        selected = ", ".join(expressions[name] for name in names)

        def read(part: float) -> None:
            end = int(order.events * part)
            rows = (
                self._spark.read.format("jdbc")
                .options(
                    **self._jdbc,
                    dbtable=f'(SELECT {selected} FROM "{order.schema}"."{order.source}_event" '  # noqa: S608 - own names
                    f"WHERE eql_id <= {end}) events",
                    partitionColumn="offset",
                    lowerBound="1",
                    upperBound=str(end + 1),
                    numPartitions=str(order.tasks),
                    fetchsize=str(_FETCH),
                )
                .load()
            )
            _discard(rows)

        return read

    def _rows(self, part: float) -> DataFrame:
        """What both ways write: 150 bytes of JSON under a key of 36, made as they are written."""
        value = (
            'concat(\'{"id":"\', key, \'","name":"name-\', id, \'","email":"name-\', id, \'@email.com",'
            '"createdAt":"2025-06-13T17:20:20.296000+00:00"}\')'
        )
        return (
            self._spark.range(0, int(self._order.events * part), 1, self._order.tasks)
            .selectExpr("id", "concat('00000000-0000-4000-8000-', lpad(cast(id AS string), 12, '0')) AS key")
            .selectExpr(
                "key",
                f"cast({value} AS binary) AS value",
                f"'{self._order.target}' AS topic",
                "cast(id % 10 AS int) AS partition",
            )
        )

    def _write(self, part: float) -> None:
        options = {"dsn": self._order.dsn, "schema": self._order.schema}
        self._rows(part).write.format(FORMAT).options(**options).mode("append").save()

    def _write_jdbc(self, part: float) -> None:
        table = f'"{self._order.schema}"."{self._order.table}"'
        self._rows(part).write.format("jdbc").options(**self._jdbc, dbtable=table).mode("append").save()


def _discard(rows: DataFrame) -> None:
    """Let Spark have every row, and do nothing with it."""
    rows.write.format("noop").mode("overwrite").save()


def run(order: Order, report: Callable[[str, int, int], None]) -> dict[str, list[float]]:
    """Start a session, measure, and end it."""
    report("starting Spark", 0, 1)
    ensure_java(Path(order.home))
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it finds Java and Python by the environment at import

    settings = {
        "spark.master": f"local[{_MASTER_CORES}]",
        "spark.jars": order.jar,
        "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.Builder()
    for name, value in spark_config(**settings).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        return Measurement(order, spark, report).measure()
    finally:
        spark.stop()


def _listen(orders: io.FileIO) -> None:
    # Whoever ordered this is gone when nothing more can come; Spark's Java ends with this process.
    while orders.read(1024):
        pass
    os._exit(1)


def main() -> int:
    """The whole life of the process; gives its exit code."""
    reports = io.FileIO(os.dup(sys.stdout.fileno()), "w")
    # A stray line of Java's would not be a report.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    orders = io.FileIO(os.dup(sys.stdin.fileno()))

    def say(**message: object) -> None:
        reports.write(json.dumps(message).encode() + b"\n")

    line = b""
    while not line.endswith(b"\n"):
        line += orders.read(1) or b"\n"
    given: Mapping[str, Any] = json.loads(line)
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        rates = run(Order(**given), lambda what, done, events: say(what=what, done=done, all=events))
    except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark says it and fails
        say(error=" ".join(f"{type(error).__name__}: {error}".split())[:500])
        return 1
    say(rates=rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
