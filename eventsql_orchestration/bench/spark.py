"""Reading and writing with Spark: the data source `eventsql` beside Spark's own JDBC source, in the same session."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL

from eventsql_orchestration.bench.benchmark import BesideRawCopy, OnTopic, option, workers
from eventsql_orchestration.bench.figure import Figure, rate, ratio
from eventsql_orchestration.bench.session import Session, limit_of
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.database.urls import each_server
from eventsql_orchestration.errors import BenchmarkError, ConfigurationError, MissingExtraError
from eventsql_orchestration.model import ROWS
from eventsql_orchestration.spark import FORMAT, spark_config
from eventsql_orchestration.spark.java import ensure_java
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.log_table import table_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JDBC_JAR: Final = Path("/usr/share/java/postgresql.jar")
"""The path of PostgreSQL's JDBC driver in the package libpostgresql-jdbc-java of Debian and Ubuntu."""

_ALL_COLUMNS: Final = "key string, value binary, topic string, partition int, offset bigint, timestamp timestamp"
_TWO_COLUMNS: Final = "key string, offset bigint"

_FETCH: Final = 10_000
"""Rows that the JDBC source holds at once. By default its driver holds a task's whole range in memory."""

_MASTER_CORES: Final = 2

_TRANSFER: Final = "transfer"
"""The way from the published blocks of a write into the log."""

_WARM_UP: Final = 0.1
"""The part of the events that each way handles before the clock starts. Java compiles and Python workers start."""

_VALUE: Final = (
    'concat(\'{"id":"\', key, \'","name":"name-\', id, \'","email":"name-\', id, \'@email.com",'
    '"createdAt":"2025-06-13T17:20:20.296000+00:00"}\')'
)
"""150 bytes of JSON with a key of 36 bytes, made while they are written."""


@dataclass(frozen=True, kw_only=True)
class Spark(OnTopic, BesideRawCopy):
    """Read all columns, read two, and write, with the data source `eventsql` and with Spark's own JDBC source.

    Both run in one session on two cores, warm, with the same columns and the same number of tasks. `eventsql` publishes
    its events exactly once; JDBC appends rows to a plain table. JDBC always reads rows, as it cannot use blocks.
    """

    name = "spark"
    summary = "Read and write with Spark, beside its JDBC source."

    events: int = option(5_000_000, "Events", quick=20_000)
    tasks: int = workers(8, "Tasks of Spark, for each way", quick=2)
    rounds: int = option(1, "How often each way is measured; the median counts", most=100)
    jdbc_jar: str = option(str(JDBC_JAR), "PostgreSQL's JDBC driver", metavar="FILE")

    def measure(self, session: Session) -> list[Figure]:
        """Raises `ConfigurationError` without Spark, Java or a JDBC driver, and `BenchmarkError`."""
        if importlib.util.find_spec("pyspark") is None:
            raise MissingExtraError("spark", "Spark")
        if not Path(self.jdbc_jar).is_file():
            raise ConfigurationError(
                f"PostgreSQL's JDBC driver is needed, and {self.jdbc_jar} does not exist: install the package "
                "libpostgresql-jdbc-java (Debian, Ubuntu), or name the driver's jar with --jdbc-jar"
            )
        jdbc_options(session.databases[0].url)
        ensure_java(session.home)
        return self.beside_raw_copy(session, lambda: self._compare(session))

    def _compare(self, session: Session) -> list[Figure]:
        with (
            self.sources(session) as (source, rows),
            session.topic("spark_target", partitions=self.partitions, storage=self.storage) as target,
            session.table("create_plain") as table,
        ):
            with session.crew() as crew:
                sides = Sides(self, source, rows, target, table)
                spark = crew.start(sides.measure, "Spark")
                crew.go()
                rates = crew.outcome(spark, limit=600.0 + 6 * (1 + self.rounds) * limit_of(self.events))
            written = session.platform.reader.count(target)
            if written != (expected := self.events * self.rounds + int(self.events * _WARM_UP)):
                raise BenchmarkError(f"Spark was to write {expected} events, and {written} arrived")
            return self._figures(rates)

    @contextmanager
    def sources(self, session: Session) -> Iterator[tuple[str, str]]:
        """The topic that `eventsql` reads, and the topic with the same events in rows that JDBC reads."""
        with ExitStack() as made:
            source = rows = made.enter_context(self.topic(session))
            session.fill_log(source, events=self.events)
            if self.storage != ROWS:
                rows = made.enter_context(session.topic("spark_rows", partitions=self.partitions, storage=ROWS))
                session.fill_log(rows, events=self.events)
            yield source, rows

    def _figures(self, rates: dict[str, list[float]]) -> list[Figure]:
        # An event is in the log after both.
        moved = rates.pop(_TRANSFER)
        both = [1 / (1 / write + 1 / move) for write, move in zip(rates["write"], moved, strict=True)]
        rates |= {"write_and_transfer": both}
        beside = dict.fromkeys(("read", "read_two_columns", "write"), "") | {"write_and_transfer": "write"}
        return [
            *(rate(f"spark_{name}", median(found), rounds=found, tasks=self.tasks) for name, found in rates.items()),
            *(
                ratio(f"spark_{name}_ratio", rates[name], rates[f"{other or name}_jdbc"], "of the JDBC source's")
                for name, other in beside.items()
            ),
        ]


@dataclass(frozen=True)
class Sides:
    """The ways to read and to write. Each takes the part (0 to 1) of the events that it is to handle.

    `source` is a topic with all events at the offsets from 1, and `rows` is a topic in rows, for JDBC. `target` is a
    topic to write to, and `table` an empty table with the columns key, value, topic and partition.
    """

    sizes: Spark
    source: str
    rows: str
    target: str
    table: str

    def measure(self, worker: Worker) -> dict[str, list[float]]:
        """Start a session of Spark and measure. Gives the events per second of each way in each round.

        The ways take turns, so that a drift of the machine's speed is the same for both.
        """
        worker.ready()
        worker.say(step="starting Spark", done=0, all=1)
        rates: dict[str, list[float]] = {}
        with _spark(self.sizes.jdbc_jar) as spark, worker.platform() as platform:
            for ways in self._ways(spark, platform):
                for part in (_WARM_UP, *[1.0] * self.sizes.rounds):
                    for way, run in ways.items():
                        events, step = max(1, int(self.sizes.events * part)), way.replace("_", " ")
                        worker.say(step=step, done=0, all=events)
                        # The transfer follows its write at once, without a checkpoint between them.
                        if way != _TRANSFER:
                            self.settle(platform.database)
                        started = time.monotonic()
                        run(part)
                        elapsed = time.monotonic() - started
                        worker.say(step=step, done=events, all=events)
                        if part == 1.0:
                            rates.setdefault(way, []).append(events / elapsed)
        return rates

    def _ways(self, spark: SparkSession, platform: EventSQL) -> list[dict[str, Callable[[float], None]]]:
        database = platform.database
        read, read_jdbc = partial(self._read, spark, database), partial(self._read_jdbc, spark, database)
        return [
            {"read": partial(read, _ALL_COLUMNS), "read_jdbc": partial(read_jdbc, _ALL_COLUMNS)},
            {
                "read_two_columns": partial(read, _TWO_COLUMNS),
                "read_two_columns_jdbc": partial(read_jdbc, _TWO_COLUMNS),
            },
            {
                "write": partial(self._write, spark, database),
                _TRANSFER: partial(self._transfer, platform),
                "write_jdbc": partial(self._write_jdbc, spark, database),
            },
        ]

    def settle(self, database: Database) -> None:
        """Let no way pay for an earlier write, whose pages autovacuum and a checkpoint would process during it."""
        # Only the owner may vacuum, and only some roles may request a checkpoint.
        with suppress(psycopg.Error), psycopg.connect(database.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(database.schema, self.table)))
            connection.execute(Queries("bench", database.schema)("vacuum_buffer"))
            segments.vacuum(connection, database.schema, self.target)
            connection.execute("CHECKPOINT")

    def _read(self, spark: SparkSession, database: Database, columns: str, part: float) -> None:
        options = {
            **_options(database),
            "subscribe": self.source,
            "numPartitions": str(self.sizes.tasks),
            "endingOffsets": str(int(self.sizes.events * part) + 1),
        }
        _discard(spark.read.format(FORMAT).schema(columns).options(**options).load())

    def _read_jdbc(self, spark: SparkSession, database: Database, columns: str, part: float) -> None:
        expressions = {
            "key": "eql_key AS key",
            "value": "eql_value AS value",
            "topic": f"'{self.rows}' AS topic",
            "partition": "eql_partition::int AS partition",
            "offset": 'eql_id AS "offset"',
            "timestamp": 'eql_buffered_at AS "timestamp"',
        }
        end = int(self.sizes.events * part)
        selected = ", ".join(expressions[column.split()[0]] for column in columns.split(", "))
        log = f'"{database.schema}"."{table_name(self.rows)}"'
        options = {
            **jdbc_options(database.url),
            "dbtable": f"(SELECT {selected} FROM {log} WHERE eql_id <= {end}) events",  # noqa: S608 - own names
            "partitionColumn": "offset",
            "lowerBound": "1",
            "upperBound": str(end + 1),
            "numPartitions": str(self.sizes.tasks),
            "fetchsize": str(_FETCH),
        }
        _discard(spark.read.format("jdbc").options(**options).load())

    def _rows(self, spark: SparkSession, part: float) -> DataFrame:
        """The rows that both ways write."""
        return (
            spark.range(0, int(self.sizes.events * part), 1, self.sizes.tasks)
            .selectExpr("id", "concat('00000000-0000-4000-8000-', lpad(cast(id AS string), 12, '0')) AS key")
            .selectExpr(
                "key",
                f"cast({_VALUE} AS binary) AS value",
                f"'{self.target}' AS topic",
                f"cast(id % {self.sizes.partitions} AS int) AS partition",
            )
        )

    def _write(self, spark: SparkSession, database: Database, part: float) -> None:
        self._rows(spark, part).write.format(FORMAT).options(**_options(database)).mode("append").save()

    def _transfer(self, platform: EventSQL, part: float) -> None:
        written = int(self.sizes.events * part)
        moved = platform.transfer.run_once([self.target]).get(self.target, 0)
        if moved != written:
            raise BenchmarkError(f"Spark wrote {written} events, and {moved} were transferred: does a transfer run?")

    def _write_jdbc(self, spark: SparkSession, database: Database, part: float) -> None:
        options = {**jdbc_options(database.url), "dbtable": f'"{database.schema}"."{self.table}"'}
        self._rows(spark, part).write.format("jdbc").options(**options).mode("append").save()


@contextmanager
def _spark(jar: str) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it finds Java and Python by the environment at import

    settings = {
        "spark.master": f"local[{_MASTER_CORES}]",
        "spark.jars": jar,
        "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
    }
    spark = SparkSession.Builder().config(map={**spark_config(**settings)}).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def _options(database: Database) -> dict[str, Any]:
    return {"dsn": database.dsn, "schema": database.schema}


def jdbc_options(url: URL) -> dict[str, str]:
    """The options of Spark's JDBC source for a database. Raises `BenchmarkError` for a URL without a host."""
    places = []
    for given in each_server(url):
        host = given.get("host", "")
        if not host or host.startswith("/"):
            raise BenchmarkError("the JDBC source needs a host: name it in the database URL, such as 127.0.0.1")
        places.append(f"{f'[{host}]' if ':' in host else host}:{given.get('port') or 5432}")
    return {
        "url": f"jdbc:postgresql://{','.join(places)}/{given.get('dbname', '')}",
        "driver": "org.postgresql.Driver",
        **{name: given[name] for name in ("user", "password") if name in given},
    }


def _discard(rows: DataFrame) -> None:
    """Hand every row to Spark, and do nothing with it."""
    rows.write.format("noop").mode("overwrite").save()
