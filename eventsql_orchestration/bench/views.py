"""Views: lookups in filled timelines and logs, totals out of a rollup's minutes, and applying events to a rollup."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median
from typing import Final

from eventsql_orchestration.bench.benchmark import BesideRawCopy, connected, option
from eventsql_orchestration.bench.figure import Figure, delays, rate, ratio
from eventsql_orchestration.bench.roles import at_once
from eventsql_orchestration.bench.session import PREFIX, Session
from eventsql_orchestration.errors import ViewNotFoundError
from eventsql_orchestration.views import LogEntry, Logs, Rollup, RollupEntry, RollupView, Timeline, Views

_TIMELINE: Final = Timeline(f"{PREFIX}timeline")
_LOGS: Final = Logs(f"{PREFIX}logs")
_ROLLUP: Final = Rollup(f"{PREFIX}rollup", timedelta(minutes=1), ("kind",), ("cents",))
_VIEWS: Final = (_TIMELINE, _LOGS, _ROLLUP)

_DAY: Final = timedelta(days=1)
_HOUR: Final = timedelta(hours=1)
_MONTH: Final = 30 * _DAY

_KINDS: Final = ("placed", "accepted", "completed")
_LOG_RESOURCES: Final = 100
"""Resources of each tenant that have lines."""

_LINES: Final = 1_000
"""The most lines that a search gives: as many as a resource has in the month, by default."""

_PAGE: Final = 100
"""Lines of a page: the default of a search."""

_CHUNK: Final = 200_000
"""Rows of one statement that fills."""


@dataclass(frozen=True, kw_only=True)
class ViewsBenchmark(BesideRawCopy):
    """Fill a timeline, logs and a rollup; read them at random places; apply events to a rollup.

    The timeline has the given number of events of each resource of each tenant, written in turns over a month. The logs
    have lines of 100 resources of each tenant over the same month, in sorted partitions of a day. A lookup reads the
    events of one resource. A search reads up to 1,000 lines of one resource, or the newest 100 of them. Totals are
    computed for each hour of a day, from a rollup's minutes. Each is a call of the library, with its own round trip.

    Events are applied in transactions of a batch, from threads of this process: first with a bucket for each thread,
    then all to one bucket, with a slot for each thread.
    """

    name = "views"
    summary = "Read timelines, logs and rollups, and apply events to a rollup."

    tenants: int = option(10, "Tenants", most=1_000, quick=2)
    resources: int = option(100_000, "Resources of each tenant", quick=50)
    events: int = option(10, "Events of each resource", most=10_000, quick=3)
    lines: int = option(1_000_000, "Lines of the logs", quick=2_000)
    lookups: int = option(2_000, "Lookups, searches and totals that are timed", quick=20)
    applied: int = option(200_000, "Events of each measurement of the rollup", quick=800)
    batch: int = option(1_000, "Events of a transaction", most=100_000, quick=50)
    slots: int = connected(8, "Threads that apply events, each with a slot")
    rounds: int = option(3, "Measurements of the rollup; the median counts", quick=1)

    @property
    def stored_events(self) -> int:
        return self.tenants * self.resources * self.events + self.lines

    def measure(self, session: Session) -> list[Figure]:
        views = Views(session.platform)
        end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        chosen = random.Random(1)  # noqa: S311 - no secret
        with session.removing(partial(_drop, views), leftovers=True):
            views.declare(*_VIEWS)
            self._fill_timeline(session, views, end - _MONTH)
            self._fill_logs(session, views, end - _MONTH)
            self._fill_rollup(session, views, end - _DAY)
            # The housekeeping sorts within an hour.
            views.sort()
            for view in _VIEWS:
                # Autovacuum soon does the same: index-only scans and estimates need it.
                session.connection.execute(session.queries("vacuum_view", table=view.table))
            timeline, logs, rollup = views.timeline(_TIMELINE), views.logs(_LOGS), views.rollup(_ROLLUP)

            def tenant() -> str:
                return f"tenant-{chosen.randrange(self.tenants)}"

            def look_up() -> int:
                return len(timeline.read(f"resource-{chosen.randrange(self.resources)}", tenant=tenant()))

            def search(limit: int) -> int:
                resource = f"resource-{chosen.randrange(_LOG_RESOURCES)}"
                return len(logs.search(resource=resource, since=end - _MONTH, until=end, limit=limit, tenant=tenant()))

            def total() -> int:
                return len(rollup.read(since=end - _DAY, until=end, every=_HOUR, by=(), tenant=tenant()))

            figures = [
                self._timed("timeline_lookup", look_up),
                self._timed("logs_of_a_month", lambda: search(_LINES)),
                self._timed("logs_page_of_a_month", lambda: search(_PAGE)),
                self._timed("rollup_hours_of_a_day", total),
            ]
            figures += self.beside_raw_copy(session, lambda: self._apply(session, rollup, end))
        return figures

    # Filling

    def _fill_timeline(self, session: Session, views: Views, start: datetime) -> None:
        times = [start + _MONTH * number / self.events for number in range(self.events)]
        with session.platform.database.transaction() as connection:
            # Make the partitions.
            views.timeline(_TIMELINE).append(connection, [("resource", {}, at) for at in times])
        resources = self.tenants * self.resources
        for at in times:
            self._fill(session, _TIMELINE, resources, resources=resources, at=at)

    def _fill_logs(self, session: Session, views: Views, start: datetime) -> None:
        days = [start + number * _DAY for number in range(_MONTH // _DAY + 1)]
        with session.platform.database.transaction() as connection:
            # Make the partitions.
            views.logs(_LOGS).write(connection, [LogEntry("resource", "", at) for at in days])
        self._fill(session, _LOGS, self.lines, resources=_LOG_RESOURCES, start=start, step=_MONTH / self.lines)

    def _fill(self, session: Session, view: Timeline | Logs, rows: int, **values: object) -> None:
        statement = session.queries("fill_timeline" if isinstance(view, Timeline) else "fill_logs", table=view.table)
        for first in range(0, rows, _CHUNK):
            chunk = {"first": first, "upto": min(first + _CHUNK, rows) - 1}
            session.connection.execute(statement, {"tenants": self.tenants, **values, **chunk})
            session.report(f"filling {view.name}", first, rows)

    def _fill_rollup(self, session: Session, views: Views, start: datetime) -> None:
        minutes = [start + number * timedelta(minutes=1) for number in range(_DAY // timedelta(minutes=1))]
        entries = [RollupEntry(at, {"kind": kind}, {"cents": 100}) for at in minutes for kind in _KINDS]
        for number in range(self.tenants):
            with session.platform.database.transaction() as connection:
                views.rollup(_ROLLUP).add(connection, entries, tenant=f"tenant-{number}")

    # Measuring

    def _timed(self, name: str, read: Callable[[], int]) -> Figure:
        """The milliseconds of a call."""
        for _ in range(10):
            read()
        seconds, rows = [], 0
        for _ in range(self.lookups):
            started = time.perf_counter()
            rows += read()
            seconds.append(time.perf_counter() - started)
        return delays(name, seconds, rows=rows / self.lookups)

    def _apply(self, session: Session, rollup: RollupView, at: datetime) -> list[Figure]:
        rates = session.in_turns(
            "applying",
            self.rounds,
            {kind: partial(self._applied_rate, session, rollup, at, kind) for kind in ("own_buckets", "one_bucket")},
        )
        return [
            *(
                rate(f"rollup_{kind}", median(found), rounds=found, threads=self.slots, batch=self.batch)
                for kind, found in rates.items()
            ),
            ratio("rollup_one_bucket_ratio", rates["one_bucket"], rates["own_buckets"], "of own buckets"),
        ]

    def _applied_rate(self, session: Session, rollup: RollupView, at: datetime, kind: str) -> float:
        transactions = max(1, self.applied // self.batch // self.slots)

        def apply(slot: int, transactions: int) -> None:
            dimensions = {"kind": f"kind-{slot}" if kind == "own_buckets" else "kind"}
            for _ in range(transactions):
                entries = [RollupEntry(at, dimensions, {"cents": number}) for number in range(self.batch)]
                with session.platform.database.transaction() as connection:
                    rollup.add(connection, entries, slot=slot, tenant="applied")

        # Connect first.
        at_once(self.slots, partial(apply, transactions=1))
        return transactions * self.slots * self.batch / at_once(self.slots, partial(apply, transactions=transactions))


def _drop(views: Views) -> None:
    for view in _VIEWS:
        with suppress(ViewNotFoundError):
            views.drop(view.name)
