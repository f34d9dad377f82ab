"""Reading and writing with Spark: the data source `eventsql` beside Spark's own JDBC source, in the same session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eventsql_orchestration.bench.benchmark import Benchmark, option, workers
from eventsql_orchestration.bench.figure import Figure, rate
from eventsql_orchestration.bench.session import Session, limit_of
from eventsql_orchestration.bench.spark_process import WARM_UP, read_and_write
from eventsql_orchestration.errors import BenchmarkError, ConfigurationError
from eventsql_orchestration.model import ROWS

JDBC_JAR: Final = Path("/usr/share/java/postgresql.jar")
"""The path of PostgreSQL's JDBC driver in the package libpostgresql-jdbc-java of Debian and Ubuntu."""


@dataclass(frozen=True, kw_only=True)
class Spark(Benchmark):
    """Read all columns, read two, and write, with the data source `eventsql` and with Spark's own JDBC source.

    Both run in one session on two cores, warm, with the same columns and the same number of tasks. `eventsql` publishes
    its events exactly once; JDBC appends rows to a plain table. JDBC always reads rows, as it cannot use blocks.
    """

    name = "spark"
    summary = "Read and write with Spark, beside its JDBC source."

    events: int = option(5_000_000, "Events", quick=20_000)
    tasks: int = workers(8, "Tasks of Spark, for each way", quick=2)
    rounds: int = option(1, "How often each way is measured", most=100)
    jdbc_jar: str = option(str(JDBC_JAR), "PostgreSQL's JDBC driver", metavar="FILE")

    def measure(self, session: Session) -> list[Figure]:
        """Raises `ConfigurationError` without a JDBC driver, and `BenchmarkError`."""
        if not Path(self.jdbc_jar).is_file():
            raise ConfigurationError(
                f"PostgreSQL's JDBC driver is needed, and {self.jdbc_jar} does not exist: install the package "
                "libpostgresql-jdbc-java (Debian, Ubuntu), or name the driver's jar with --jdbc-jar"
            )
        return session.beside_raw_copy(lambda: self._compare(session))

    def _compare(self, session: Session) -> list[Figure]:
        with (
            session.topic("spark", partitions=self.partitions, storage=self.storage) as source,
            session.topic("spark_jdbc", partitions=self.partitions, storage=ROWS) as rows,
            session.topic("spark_target", partitions=self.partitions, storage=self.storage) as target,
            session.raw_table() as raw,
        ):
            session.fill_log(source, events=self.events)
            if self.storage != ROWS:
                session.fill_log(rows, events=self.events)
            for statement in ("drop_raw", "create_plain"):
                session.connection.execute(session.queries(statement, table=raw))

            with session.crew() as crew:
                spark = crew.start(
                    read_and_write, "Spark", source=source, rows=source if self.storage == ROWS else rows,
                    target=target, table=raw,
                    events=self.events, tasks=self.tasks, rounds=self.rounds, jar=self.jdbc_jar,
                    home=str(session.home),
                )  # fmt: skip
                crew.go()
                rates = crew.outcome(spark, limit=600.0 + 6 * (1 + self.rounds) * limit_of(self.events))
            self._check(session, target)
            return self._figures(rates)

    def _check(self, session: Session, target: str) -> None:
        expected = self.events * self.rounds + int(self.events * WARM_UP)
        found = session.platform.reader.count(target)
        if found != expected:
            raise BenchmarkError(f"Spark was to write {expected} events, and {found} arrived")

    def _figures(self, rates: dict[str, list[float]]) -> list[Figure]:
        # The rate of the mean time of the rounds.
        means = {name: len(each) / sum(1 / each_rate for each_rate in each) for name, each in rates.items()}
        common = {"events": self.events, "tasks": self.tasks}
        transfer = means.pop("transfer")
        ways = [rate(f"spark_{name}", mean, **common, rounds=rates[name]) for name, mean in means.items()]
        both = 1 / (1 / means["write"] + 1 / transfer)
        ratios = [
            Figure(f"spark_{name}_ratio", mean / means[f"{beside}_jdbc"], "of the JDBC source's")
            for name, beside, mean in (
                ("read", "read", means["read"]),
                ("read_two_columns", "read_two_columns", means["read_two_columns"]),
                ("write", "write", means["write"]),
                ("write_and_transfer", "write", both),
            )
        ]
        return [*ways, rate("spark_write_and_transfer", both, **common, transfer=transfer), *ratios]
