"""One run of benchmarks on one database: topics of their own that are gone at the end, whatever ends it.

What belongs to a benchmark has a name that begins with `eventsql_bench_`. One run at a time has a database; what runs
that were killed have left there is deleted by the next.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

import psycopg
from psycopg import sql

from eventsql_orchestration.bench import machine, workload
from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure, Sample
from eventsql_orchestration.bench.processes import Crew
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import BenchmarkError, DatabaseBusyError, TopicNotFoundError
from eventsql_orchestration.model import Consumer, Topic
from eventsql_orchestration.platform import EventSQL

PREFIX: Final = "eventsql_bench_"

RAW_BATCH: Final = 5_000

SAMPLE_SECONDS: Final = 0.05
"""How often committed offsets are looked at while a figure is measured: one statement of some 0.2 ms."""

Report: TypeAlias = Callable[[str, int, int], None]
"""Told what is being done, how many events of it are done, and how many there are."""

_LOCK: Final = 0x6576_656E_7462_6E63

_DELETE_ATTEMPTS: Final = 6


class Session:
    """Benchmarks on the database of `platform`.

    `raw_events` is how many events each measurement of the raw COPY rate writes.
    """

    def __init__(
        self, platform: EventSQL, *, raw_events: int, report: Report = lambda _what, _done, _all: None
    ) -> None:
        self.platform = platform
        self.report = report
        self.queries = Queries("bench", platform.database.schema)
        self._raw_events = raw_events
        self._raw_rates: list[float] = []
        self._token = secrets.token_hex(3)
        self._application = f"{PREFIX}{self._token}"
        self._connection: Connection | None = None

    def __enter__(self) -> Session:
        """Raises `BenchmarkError` when another benchmark runs on this database."""
        connection = self.platform.database.dedicated()
        try:
            self._take_database(connection)
            self._connection = connection
            self._sweep()
        except BaseException:
            connection.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            try:
                self._vacuum_buffer()
            finally:
                self.connection.close()

    def _take_database(self, connection: Connection) -> None:
        row = connection.execute(self.queries("take_database"), {"lock": _LOCK}).fetchone()
        if row is None or not row[0]:
            raise BenchmarkError(
                f"another benchmark runs on {self.platform.database}, and each would slow the other: wait for it"
            )

    @property
    def connection(self) -> Connection:
        """The benchmark's own connection, in autocommit mode."""
        assert self._connection is not None, "the session is entered"
        return self._connection

    def describe(self) -> dict[str, object]:
        """The machine and the server."""
        return machine.describe(self.connection, self.queries)

    # What is measured on

    @contextmanager
    def topic(self, label: str, *, partitions: int) -> Iterator[str]:
        """A topic of the benchmark's own for the block; gives its name."""
        name = f"{PREFIX}{label}_{self._token}"
        try:
            self.platform.registry.register_topic(Topic(name, partitions))
            yield name
        finally:
            with _uninterrupted():
                self._end_sessions()
                with suppress(TopicNotFoundError):
                    self._delete(name)

    @contextmanager
    def raw_table(self) -> Iterator[str]:
        """A table like the buffer for the block; gives the name of the topic to which it would belong."""
        name = f"{PREFIX}raw_{secrets.token_hex(3)}"
        try:
            self.connection.execute(self.queries("create_raw", topic=name))
            self.connection.execute(self.queries("index_raw", topic=name))
            yield name
        finally:
            with _uninterrupted():
                self._end_sessions()
                self._drop(event_table(name))

    def consumer(self, topic: str, name: str = "bench", *, partitioned: bool = True) -> str:
        """A consumer of a topic of the benchmark's, at its beginning; gives its name."""
        self.platform.registry.register_consumer(Consumer(topic, name, partitioned=partitioned))
        return name

    def crew(self) -> Crew:
        """Processes on this database."""
        database = self.platform.database
        url = database.url.update_query_dict({"application_name": self._application})
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False).replace(" ", "%20")
        return Crew(dsn, schema=database.schema)

    @contextmanager
    def holding_xmin(self) -> Iterator[None]:
        """Another transaction keeps a snapshot open for the block, so that no row deleted meanwhile can be removed."""
        connection = self.platform.database.dedicated()
        try:
            connection.execute("SET idle_in_transaction_session_timeout TO 0")
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            connection.execute(self.queries("hold_snapshot"))
            yield
            # Had the server ended it, the figure would be one without it.
            connection.execute("SELECT 1")
        except psycopg.OperationalError as error:
            raise BenchmarkError(f"the transaction that was to stay open did not: {error}") from error
        finally:
            connection.close()

    def settle(self) -> None:
        """Give every figure the same start: earlier ones' dead rows removed from the buffer, their writes on disk."""
        self._vacuum_buffer()
        # Only some may; without it the figures still hold.
        with suppress(psycopg.Error):
            self.connection.execute("CHECKPOINT")

    # Measuring

    def beside_raw_copy(self, measure: Callable[[], list[Figure]]) -> list[Figure]:
        """The figures of `measure`, those in events per second with their ratio to the raw COPY rate.

        That rate is measured before and after them, because a machine's speed drifts.
        """
        before = self._raw_rate()
        self.settle()
        figures = measure()
        after = self._raw_rate()
        mean = (before + after) / 2
        self._raw_rates += [before, after]
        return [
            Figure(
                each.name, each.value, each.unit, each.value / mean,
                {**each.details, "raw_copy_before": before, "raw_copy_after": after},
            )
            if each.unit == EVENTS_PER_SECOND
            else each
            for each in figures
        ]  # fmt: skip

    def raw_copy(self) -> list[Figure]:
        """The mean of all raw COPY rates that this session has measured, where it has."""
        rates = self._raw_rates
        if not rates:
            return []
        details = {"least": min(rates), "most": max(rates), "measured": len(rates)}
        return [Figure("raw_copy", sum(rates) / len(rates), EVENTS_PER_SECOND, 1.0, details)]

    def _raw_rate(self) -> float:
        """Events per second that COPY writes into a table like the buffer: encoded beforehand, a commit per batch."""
        events, done = self._raw_events, 0
        with self.raw_table() as table:
            batches = workload.encoded_batches(table, 10, events=events, batch=RAW_BATCH)
            statement = self.queries("copy_raw", topic=table)
            started = time.monotonic()
            for number, block in batches:
                with self.connection.cursor().copy(statement) as copy:
                    copy.write(block)
                done += number
                self.report("raw COPY", done, events)
            return events / (time.monotonic() - started)

    def fill_buffer(self, topic: str, *, partitions: int, events: int) -> None:
        """Put so many events of a topic of the benchmark's into the buffer, which is no part of any figure."""
        done = 0
        statement = self.queries("copy_buffer")
        for number, block in workload.encoded_batches(topic, partitions, events=events, batch=RAW_BATCH):
            with self.connection.cursor().copy(statement) as copy:
                copy.write(block)
            done += number
            self.report("filling the buffer", done, events)

    def fill_log(self, topic: str, *, events: int) -> None:
        """Publish and transfer so many events of a topic of the benchmark's, which is no part of any figure."""
        with self.crew() as crew:
            publisher = crew.start(
                "publish",
                "the publisher",
                topic=topic,
                events=events,
                batch=10_000,
                seed=0,
                straight=True,
                transfer=True,
            )
            crew.go()

            def published() -> bool:
                self.report("filling the topic", publisher.events, events)
                return publisher.outcome is not None

            crew.wait(published, limit=limit_of(events), what="publishing")
        self.platform.transfer.run_once([topic])
        # Whoever reads a row first would otherwise find out for the others that it is committed.
        self.connection.execute(self.queries("vacuum_log", topic=topic))
        stored = self.platform.reader.count(topic)
        if stored != events:
            raise BenchmarkError(f"topic {topic!r} was to hold {events} events, and holds {stored}")

    def watch_offsets(
        self,
        crew: Crew,
        topic: str,
        consumer: str,
        *,
        events: int,
        limit: float,
        what: str,
        every: float = SAMPLE_SECONDS,
    ) -> list[Sample]:
        """How many events a consumer has committed over time, until it has committed `events`."""
        return watch(
            crew, lambda: self.consumed(topic, consumer), events=events, limit=limit, what=what, report=self.report,
            every=every,
        )  # fmt: skip

    def consumed(self, topic: str, consumer: str) -> int:
        """How many events a consumer has committed."""
        row = self.connection.execute(self.queries("consumed"), {"topic": topic, "consumer": consumer}).fetchone()
        assert row is not None, "an aggregate gives one row"
        return int(row[0])

    # Cleaning up

    def _vacuum_buffer(self) -> None:
        # Only its owner may. A server that is gone has been reported by what came before.
        with suppress(psycopg.Error):
            self.connection.execute(self.queries("vacuum_buffer"))

    def _sweep(self) -> None:
        """Delete what runs that were killed have left."""
        for topic in self.platform.registry.topics():
            if topic.name.startswith(PREFIX):
                self._delete(topic.name)
        parameters = {"schema": self.platform.database.schema, "prefix": PREFIX}
        for (table,) in self.connection.execute(self.queries("leftover_tables"), parameters).fetchall():
            self._drop(table)

    def _delete(self, topic: str) -> None:
        """Delete a topic, also where transactions that are just ending still keep it."""
        for attempt in range(_DELETE_ATTEMPTS):
            try:
                self.platform.registry.unregister_topic(topic, force=True)
                return
            except DatabaseBusyError:
                if attempt == _DELETE_ATTEMPTS - 1:
                    raise

    def _drop(self, table: str) -> None:
        identifier = sql.Identifier(self.platform.database.schema, table)
        self.connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(identifier))

    def _end_sessions(self) -> None:
        """End what processes of this run that are gone have left under way: it may hold what is to be deleted."""
        # On a server that is gone nothing is under way; what else is wrong with it the next statement says.
        with suppress(psycopg.Error):
            self.connection.execute(self.queries("end_sessions"), {"application": self._application})


def watch(
    crew: Crew,
    consumed: Callable[[], int],
    *,
    events: int,
    limit: float,
    what: str,
    report: Report,
    every: float = SAMPLE_SECONDS,
) -> list[Sample]:
    """How many events `consumed` gives over time, until it gives `events`. Raises `BenchmarkError`."""
    samples = [Sample(time.monotonic(), 0)]

    def done() -> bool:
        samples.append(Sample(time.monotonic(), consumed()))
        report(what, min(samples[-1].events, events), events)
        return samples[-1].events >= events

    crew.wait(done, limit=limit, what=what, every=every)
    if samples[-1].events > events:
        raise BenchmarkError(f"{what}: {samples[-1].events} events were consumed of {events}, which is a defect")
    return samples


def limit_of(events: int) -> float:
    """Seconds after which a run over so many events is given up: at 2,000 events/s nothing is worth measuring."""
    return 60.0 + events / 2_000


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C not end the cleaning up after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
