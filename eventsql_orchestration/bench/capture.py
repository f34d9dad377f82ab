"""Change capture: how much longer a table's writers take when its changes are events of a topic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from psycopg import sql

from eventsql_orchestration.bench.benchmark import Benchmark, option
from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.session import PREFIX, Session
from eventsql_orchestration.qualification import qualified

_TIMES = "times"
_MILLISECONDS = 1_000.0

_ALL = qualified("UPDATE {} SET status = status || 'x'")
_ONE = qualified("UPDATE {} SET note = 'changed' || note WHERE id = %s")
_ROWS = qualified("""
INSERT INTO {} (id, customer, status, amount, currency, placed_at, note)
SELECT number, number %% 1000, 'new', number / 7.0, 'EUR', now(), repeat('note', 15)
FROM generate_series(0, %s - 1) number
""")


@dataclass(frozen=True, kw_only=True)
class Capture(Benchmark):
    """Update a table in bulk and row by row, with and without a capture of its changes: how much longer it takes.

    The table has a primary key, an index and seven columns, as an orders table might. The two updates take turns. A row
    of 150 bytes is in an event twice, before and after.
    """

    name = "capture"
    summary = "Update a table with and without a capture of its changes."
    hidden = frozenset({"raw_events"})

    rows: int = option(100_000, "Rows of the table, which each bulk update changes", quick=2_000)
    rounds: int = option(5, "Bulk updates of each table", quick=2)
    commits: int = option(1_000, "Updates of one row and a commit each, of each table", quick=50)

    def measure(self, session: Session) -> list[Figure]:
        bulk: dict[bool, list[float]] = {False: [], True: []}
        single: dict[bool, list[float]] = {False: [], True: []}
        with (
            session.topic("capture", partitions=self.partitions) as topic,
            self._table(session, "plain") as plain,
            self._table(session, "captured") as captured,
        ):
            session.platform.captures.create(captured, topic, snapshot=False)
            tables = {False: plain, True: captured}
            for number in range(self.rounds):
                for is_captured, table in tables.items():
                    session.settle()
                    session.connection.execute(_of("VACUUM {}", table))
                    session.report("bulk updates", 2 * number + is_captured, 2 * self.rounds)
                    started = time.monotonic()
                    session.connection.execute(_of(_ALL, table))
                    bulk[is_captured].append(time.monotonic() - started)
                    session.platform.transfer.run_once([topic])
            for number in range(self.commits):
                for is_captured, table in tables.items():
                    started = time.monotonic()
                    session.connection.execute(
                        _of(_ONE, table),
                        [number % self.rows],
                    )
                    single[is_captured].append((time.monotonic() - started) * _MILLISECONDS)
                session.report("updates of one row", number, self.commits)
            session.platform.captures.drop(captured, topic)
        return [
            Figure("bulk_update", median(bulk[False]), "s", details={"rows": self.rows, "each": bulk[False]}),
            Figure("bulk_update_captured", median(bulk[True]), "s", details={"rows": self.rows, "each": bulk[True]}),
            Figure("bulk_update_ratio", median(bulk[True]) / median(bulk[False]), _TIMES),
            Figure("update_of_one_row", median(single[False]), "ms"),
            Figure("update_of_one_row_captured", median(single[True]), "ms"),
            Figure("update_of_one_row_ratio", median(single[True]) / median(single[False]), _TIMES),
        ]

    @contextmanager
    def _table(self, session: Session, label: str) -> Iterator[str]:
        """A table with rows for the block; gives its name. A killed benchmark's table is replaced."""
        table = f"public.{PREFIX}{label}"
        connection = session.connection
        connection.execute(_of("DROP TABLE IF EXISTS {}", table))
        try:
            connection.execute(
                _of(
                    "CREATE TABLE {} (id bigint PRIMARY KEY, customer bigint NOT NULL, "
                    "status pg_catalog.text NOT NULL, "
                    "amount numeric(12, 2) NOT NULL, currency pg_catalog.text NOT NULL, "
                    "placed_at pg_catalog.timestamptz NOT NULL, note pg_catalog.text NOT NULL)",
                    table,
                )
            )
            connection.execute(_of("CREATE INDEX ON {} (customer)", table))
            connection.execute(_of(_ROWS, table), [self.rows])
            yield table
        finally:
            connection.execute(_of("DROP TABLE IF EXISTS {}", table))


def _of(statement: str, table: str) -> sql.Composed:
    return sql.SQL(statement).format(sql.Identifier(*table.split(".")))
