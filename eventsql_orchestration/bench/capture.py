"""Change capture: how much longer a table's writers take when its changes are events of a topic."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from eventsql_orchestration.bench.benchmark import OnTopic, option
from eventsql_orchestration.bench.figure import Figure, percentiles, ratio
from eventsql_orchestration.bench.session import Session


@dataclass(frozen=True, kw_only=True)
class Capture(OnTopic):
    """Update a table in bulk and row by row, with and without a capture of its changes: how much longer it takes.

    The table has a primary key, an index and seven columns, as an orders table might. The two updates take turns. A row
    of 150 bytes is in an event twice, before and after.
    """

    name = "capture"
    summary = "Update a table with and without a capture of its changes."

    rows: int = option(100_000, "Rows of the table, which each bulk update changes", quick=2_000)
    rounds: int = option(5, "Bulk updates of each table", quick=2)
    commits: int = option(1_000, "Updates of a single row, each with its commit, for each table", quick=50)

    def measure(self, session: Session) -> list[Figure]:
        made = ("create_orders", "index_orders")
        with self.topic(session) as topic, session.table(*made) as plain, session.table(*made) as captured:
            tables = {"": plain, "_captured": captured}
            for table in tables.values():
                session.connection.execute(session.queries("fill_orders", table=table), {"rows": self.rows})
            session.platform.captures.create(f"{session.schema}.{captured}", topic, snapshot=False)
            bulk = session.in_turns(
                "bulk updates",
                self.rounds,
                {side: partial(self._update_all, session, topic, table) for side, table in tables.items()},
            )
            single = session.in_turns(
                "updates of one row",
                self.commits,
                {side: self._update_one(session, table) for side, table in tables.items()},
            )
        return [*_figures("bulk_update", bulk, "s", 1), *_figures("update_of_one_row", single, "ms", 1_000)]

    def _update_all(self, session: Session, topic: str, table: str) -> float:
        session.settle()
        session.connection.execute(session.queries("vacuum_orders", table=table))
        elapsed = _seconds(session, "update_orders", table)
        session.platform.transfer.run_once([topic])
        return elapsed

    def _update_one(self, session: Session, table: str) -> Callable[[], float]:
        numbers = count()
        return lambda: _seconds(session, "update_order", table, {"id": next(numbers) % self.rows})


def _seconds(session: Session, update: str, table: str, parameters: dict[str, Any] | None = None) -> float:
    statement = session.queries(update, table=table)
    started = time.monotonic()
    session.connection.execute(statement, parameters)
    return time.monotonic() - started


def _figures(name: str, seconds: dict[str, list[float]], unit: str, scale: float) -> list[Figure]:
    scaled = {side: [each * scale for each in found] for side, found in seconds.items()}
    return [
        *(Figure(f"{name}{side}", median(found), unit, details=percentiles(found)) for side, found in scaled.items()),
        ratio(f"{name}_ratio", scaled["_captured"], scaled[""], "times"),
    ]
