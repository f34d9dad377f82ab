"""Reading and writing with Spark: the data source `eventsql` beside Spark's own JDBC source, in the same session.

Spark runs in a process of its own, `eventsql_orchestration.spark.benchmark`: this floor does not know it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import BenchmarkError, ConfigurationError

JDBC_JAR: Final = Path("/usr/share/java/postgresql.jar")
"""Where the package libpostgresql-jdbc-java of Debian and Ubuntu has PostgreSQL's JDBC driver."""

_END_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class SparkSize:
    """How many events are read and written, by how many tasks, how often, and the jar of PostgreSQL's JDBC driver."""

    events: int = 5_000_000
    tasks: int = 8
    rounds: int = 1
    partitions: int = 10
    jdbc_jar: str = str(JDBC_JAR)


FULL: Final = SparkSize()

QUICK: Final = SparkSize(events=20_000, tasks=2)


def measure(session: Session, size: SparkSize, *, home: Path) -> list[Figure]:
    """Raises `ConfigurationError` where there is no JDBC driver, and `BenchmarkError`.

    `home` is the project's directory for what has to be written to run Java.
    """
    jar = Path(size.jdbc_jar)
    if not jar.is_file():
        raise ConfigurationError(
            f"there is no JDBC driver for PostgreSQL at {jar}, which Spark is compared with: install the package "
            "libpostgresql-jdbc-java (Debian, Ubuntu), or name the driver's jar with --jdbc-jar"
        )
    return session.beside_raw_copy(partial(_measure, session, size, jar, home))


def _measure(session: Session, size: SparkSize, jar: Path, home: Path) -> list[Figure]:
    database = session.platform.database
    with (
        session.topic("spark", partitions=size.partitions) as source,
        session.topic("spark_target", partitions=size.partitions) as target,
        session.raw_table() as raw,
    ):
        session.fill_log(source, events=size.events)
        queries = Queries("bench_spark", database.schema)
        for statement in ("drop_raw", "create_plain"):
            session.connection.execute(queries(statement, topic=raw))
        order = {
            "dsn": database.dsn,
            "schema": database.schema,
            "source": source,
            "target": target,
            "table": event_table(raw),
            "events": size.events,
            "tasks": size.tasks,
            "rounds": size.rounds,
            "jar": str(jar),
            "home": str(home),
        }
        rates = _rates(session, order)
        return _figures(rates, _transfer(session, target, size), size)


def _transfer(session: Session, target: str, size: SparkSize) -> float:
    """Events per second that the transfer moves of what was written, once all of it is found to be there."""
    expected = size.events * size.rounds + max(1, size.events // 10)
    written = session.platform.buffered().get(target, 0)
    if written != expected:
        raise BenchmarkError(f"Spark was to write {expected} events, and wrote {written}: does a transfer run?")
    session.report("transfer", 0, expected)
    started = time.monotonic()
    moved = session.platform.transfer.run_once([target])[target]
    seconds = time.monotonic() - started
    found = session.platform.reader.count(target)
    if not moved == found == expected:
        raise BenchmarkError(f"of {expected} events that Spark wrote, the transfer moved {moved}, and {found} arrived")
    return expected / seconds


def _figures(rates: dict[str, list[float]], transfer: float, size: SparkSize) -> list[Figure]:
    # The mean time of the rounds, as a rate.
    means = {name: len(each) / sum(1 / rate for rate in each) for name, each in rates.items()}
    common = {"events": size.events, "tasks": size.tasks}
    figures = [
        Figure(f"spark_{name}", mean, EVENTS_PER_SECOND, details={**common, "rounds": rates[name]})
        for name, mean in means.items()
    ]
    ratios = [
        Figure(f"spark_{name}_ratio", means[name] / means[f"{name}_jdbc"], "of the JDBC source's")
        for name in ("read", "read_two_columns", "write")
    ]
    both = Figure(
        "spark_write_and_transfer",
        1 / (1 / means["write"] + 1 / transfer),
        EVENTS_PER_SECOND,
        details={**common, "transfer": transfer},
    )
    return [*figures, both, *ratios]


def _rates(session: Session, order: dict[str, Any]) -> dict[str, list[float]]:
    with _process() as (process, errors):
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            # Not as arguments, which everybody on the machine may read: the URL holds a password.
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            match json.loads(line):
                case {"what": str(what), "done": int(done), "all": int(events)}:
                    session.report(what, done, events)
                case {"error": error}:
                    raise BenchmarkError(f"Spark failed: {error}")
                case {"rates": dict(rates)}:
                    return rates
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        raise BenchmarkError(f"the process with Spark died{f': {said[-1]}' if said else ''}")


@contextmanager
def _process() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The process with Spark, which is gone when the block ends."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "eventsql_orchestration.spark.benchmark"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Ctrl-C reaches the benchmark alone, which ends it.
            start_new_session=True,
        )
        with process:
            try:
                yield process, errors
            finally:
                # It ends itself when its input does, and its Java with it.
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()
                try:
                    process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
