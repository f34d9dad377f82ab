"""The role of a process with Spark: the data source `eventsql` beside Spark's JDBC source, in one session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.spark import FORMAT, spark_config
from eventsql_orchestration.spark.java import ensure_java
from eventsql_orchestration.storage.log_table import table_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ALL_COLUMNS: Final = "key string, value binary, topic string, partition int, offset bigint, timestamp timestamp"
_TWO_COLUMNS: Final = "key string, offset bigint"

_FETCH: Final = 10_000
"""Rows that the JDBC source holds at once. By default its driver holds a task's whole range in memory."""

_MASTER_CORES: Final = 2

_TRANSFER: Final = "transfer"
"""The way from the published blocks of a write into the log."""

WARM_UP: Final = 0.1
"""The part of the events that each way handles before the clock starts. Java compiles and Python workers start."""

_VALUE: Final = (
    'concat(\'{"id":"\', key, \'","name":"name-\', id, \'","email":"name-\', id, \'@email.com",'
    '"createdAt":"2025-06-13T17:20:20.296000+00:00"}\')'
)
"""150 bytes of JSON with a key of 36 bytes, made while they are written."""


def read_and_write(worker: Worker, *, jar: str, home: str, **order: Any) -> dict[str, list[float]]:
    """Start a session of Spark and measure. Gives the events per second of each way in each round.

    `jar` is PostgreSQL's JDBC driver, `home` the directory for the files of Java, and `order` the fields of `_Ways`.
    """
    worker.ready()
    worker.say(step="starting Spark", done=0, all=1)
    ensure_java(Path(home))
    with _spark(jar) as spark, worker.platform() as platform:
        return _Ways(spark, platform, Database(worker.dsns[0], schema=worker.schema), worker, **order).measure()


@contextmanager
def _spark(jar: str) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it finds Java and Python by the environment at import

    settings = {
        "spark.master": f"local[{_MASTER_CORES}]",
        "spark.jars": jar,
        "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.Builder()
    for name, value in spark_config(**settings).items():
        builder = builder.config(name, value)

    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


@dataclass(frozen=True)
class _Ways:
    """The ways to read and to write. Each takes the part (0 to 1) of the events that it is to handle.

    `source` is a topic with `events` events at the offsets 1 to `events`, and `rows` is one in rows, for JDBC. `target`
    is a topic to write to, and `table` an empty table with the columns key, value, topic and partition.
    """

    _spark: SparkSession
    _platform: EventSQL
    _database: Database
    _worker: Worker
    source: str
    rows: str
    target: str
    table: str
    events: int
    tasks: int
    rounds: int

    @property
    def _options(self) -> dict[str, str]:
        return {"dsn": self._database.dsn, "schema": self._database.schema}

    @property
    def _jdbc(self) -> dict[str, str]:
        url = self._database.url
        return {
            "url": f"jdbc:postgresql://{url.host}:{url.port or 5432}/{url.database}",
            "driver": "org.postgresql.Driver",
            **({"user": url.username} if url.username else {}),
            **({"password": str(url.password)} if url.password else {}),
        }

    def measure(self) -> dict[str, list[float]]:
        """The events per second of each way in each round.

        The ways take turns, so that a drift of the machine's speed is the same for both.
        """
        read, read_jdbc = partial(self._read, _ALL_COLUMNS), partial(self._read_jdbc, _ALL_COLUMNS)
        read_two, read_two_jdbc = partial(self._read, _TWO_COLUMNS), partial(self._read_jdbc, _TWO_COLUMNS)
        compared: Sequence[Mapping[str, Callable[[float], None]]] = (
            {"read": read, "read_jdbc": read_jdbc},
            {"read_two_columns": read_two, "read_two_columns_jdbc": read_two_jdbc},
            {"write": self._write, _TRANSFER: self._transfer, "write_jdbc": self._write_jdbc},
        )
        rates: dict[str, list[float]] = {}
        for ways in compared:
            for part in (WARM_UP, *[1.0] * self.rounds):
                for way, run in ways.items():
                    rate = self._timed(way, run, part)
                    if part == 1.0:
                        rates.setdefault(way, []).append(rate)
        return rates

    def _timed(self, way: str, run: Callable[[float], None], part: float) -> float:
        events, step = max(1, int(self.events * part)), way.replace("_", " ")
        self._worker.say(step=step, done=0, all=events)
        # The transfer follows its write at once, without a checkpoint between them.
        if way != _TRANSFER:
            self._settle()

        started = time.monotonic()
        run(part)
        elapsed = time.monotonic() - started
        self._worker.say(step=step, done=events, all=events)
        return events / elapsed

    def _settle(self) -> None:
        # Only some roles may request a checkpoint. Without it, one way's writes are flushed during the next way.
        with suppress(psycopg.Error), psycopg.connect(self._database.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(self._database.schema, self.table)))
            connection.execute("CHECKPOINT")

    def _read(self, columns: str, part: float) -> None:
        options = {
            **self._options,
            "subscribe": self.source,
            "numPartitions": str(self.tasks),
            "endingOffsets": str(int(self.events * part) + 1),
        }
        _discard(self._spark.read.format(FORMAT).schema(columns).options(**options).load())

    def _read_jdbc(self, columns: str, part: float) -> None:
        expressions = {
            "key": "eql_key AS key",
            "value": "eql_value AS value",
            "topic": f"'{self.rows}' AS topic",
            "partition": "eql_partition::int AS partition",
            "offset": 'eql_id AS "offset"',
            "timestamp": 'eql_buffered_at AS "timestamp"',
        }
        end = int(self.events * part)
        selected = ", ".join(expressions[column.split()[0]] for column in columns.split(", "))
        log = f'"{self._database.schema}"."{table_name(self.rows)}"'
        options = {
            **self._jdbc,
            "dbtable": f"(SELECT {selected} FROM {log} WHERE eql_id <= {end}) events",  # noqa: S608 - own names
            "partitionColumn": "offset",
            "lowerBound": "1",
            "upperBound": str(end + 1),
            "numPartitions": str(self.tasks),
            "fetchsize": str(_FETCH),
        }
        _discard(self._spark.read.format("jdbc").options(**options).load())

    def _rows(self, part: float) -> DataFrame:
        """The rows that both ways write."""
        return (
            self._spark.range(0, int(self.events * part), 1, self.tasks)
            .selectExpr("id", "concat('00000000-0000-4000-8000-', lpad(cast(id AS string), 12, '0')) AS key")
            .selectExpr(
                "key",
                f"cast({_VALUE} AS binary) AS value",
                f"'{self.target}' AS topic",
                "cast(id % 10 AS int) AS partition",
            )
        )

    def _write(self, part: float) -> None:
        self._rows(part).write.format(FORMAT).options(**self._options).mode("append").save()

    def _transfer(self, part: float) -> None:
        written = int(self.events * part)
        moved = self._platform.transfer.run_once([self.target]).get(self.target, 0)
        if moved != written:
            raise BenchmarkError(f"Spark wrote {written} events, and {moved} were transferred: does a transfer run?")

    def _write_jdbc(self, part: float) -> None:
        table = f'"{self._database.schema}"."{self.table}"'
        self._rows(part).write.format("jdbc").options(**self._jdbc, dbtable=table).mode("append").save()


def _discard(rows: DataFrame) -> None:
    """Hand every row to Spark, and do nothing with it."""
    rows.write.format("noop").mode("overwrite").save()
