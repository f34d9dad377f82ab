"""One run of benchmarks on a database, or on shards. However the run ends, it removes the things that it has made.

Topics, queues, tables, schemas and databases of a benchmark have names that begin with `eventsql_bench_`. A database
takes one run at a time. The next run removes what a killed run has left.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Any, Final, Literal, LiteralString, TypeVar

import psycopg
from psycopg import sql

from eventsql_orchestration.bench import machine, roles, workload
from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure, Sample
from eventsql_orchestration.bench.processes import Crew, Report, WorkerProcess
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.consumer import Consumer
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.database.urls import render
from eventsql_orchestration.errors import BenchmarkError, DatabaseBusyError, TopicNotFoundError
from eventsql_orchestration.model import Topic
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.signals import handling
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.storage.segment_drops import drop_orphans

Side = TypeVar("Side")
Result = TypeVar("Result")

PREFIX: Final = "eventsql_bench_"

_TABLE: Final = f"{PREFIX}raw_"

RAW_BATCH: Final = 5_000

SAMPLE_SECONDS: Final = 0.05
"""Seconds between two reads of the committed offsets during a measurement. A read is one statement of some 0.2 ms."""

_MARK: Final = "made by eventsql bench"
"""The comment of schemas and databases of a benchmark."""

_LOCK: Final = 0x6576_656E_7462_6E63

_DELETE_ATTEMPTS: Final = 6

uninterrupted: Final = partial(handling, signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Protects the cleaning up after a first Ctrl-C or signal from a second."""


class Session:
    """Benchmarks on the database of `platform`, or on its shards. `home` is the directory for files."""

    def __init__(self, platform: EventSQL, *, report: Report = lambda *_: None, home: Path = Path()) -> None:
        self.platform = platform
        self.report = report
        self.home = home
        self.databases = [shard.database for shard in platform.shards]
        self.schema = self.databases[0].schema
        self.connections: list[Connection] = []
        self.queries = Queries("bench", self.schema)
        self._log = LogReader(self.schema)
        self._raw_rates: list[float] = []
        self._token = secrets.token_hex(3)
        self._application = f"{PREFIX}{self._token}"
        self._closing = ExitStack()

    def __enter__(self) -> Session:
        """Raises `BenchmarkError` when another benchmark runs on this database."""
        with ExitStack() as opening:
            for database in self.databases:
                connection = opening.enter_context(closing(database.dedicated()))
                self.connections.append(connection)
                if connection.execute(self.queries("take_database"), {"lock": _LOCK}).fetchone() != (True,):
                    raise BenchmarkError(f"another benchmark runs on {database}: wait for its end")

            self._remove_leftovers()
            self._closing = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted(), self._closing:
            self._try(self.queries("vacuum_buffer"))

    @property
    def connection(self) -> Connection:
        """The benchmark's own connection to its only database, or to the first shard, in autocommit mode."""
        return self.connections[0]

    @cached_property
    def dsns(self) -> list[str]:
        """The URLs for processes of this run, whose sessions can be told by their application's name."""
        named = {"application_name": self._application}
        return [render(each.given_url.update_query_dict(named)) for each in self.databases]

    def describe(self) -> dict[str, object]:
        return machine.describe(self.connection, self.queries)

    def consumed(self, topic: str, consumer: str) -> list[int]:
        """The number of events that a consumer has consumed on each shard."""
        query, values = self.queries("consumed"), {"topic": topic, "consumer": consumer}
        return [int(fetch_one(each, query, values)[0]) for each in self.connections]

    def ends(self, topic: str) -> list[int]:
        """The newest offset of a topic on each shard."""
        return [self._log.end(each, topic) for each in self.connections]

    def disk(self, topic: str) -> int:
        """The bytes of a topic's log on all shards, with its indexes."""
        found = [each for conn in self.connections for each in segments.segments(conn, self.schema, topic) or ()]
        return sum(each.bytes for each in found)

    # Topics, tables and processes

    @contextmanager
    def removing(self, remove: Callable[[], object], *, leftovers: bool = False) -> Iterator[None]:
        """Call `remove` after the block, however the block ends. With `leftovers`, call it before the block, too.

        Use `leftovers` for a thing whose name is the same in each run: a killed benchmark may have left it.
        """
        if leftovers:
            remove()
        try:
            yield
        finally:
            with uninterrupted():
                # Sessions of dead processes may hold locks on the things to be removed.
                self._try(self.queries("end_sessions"), {"application": self._application})
                remove()

    def name(self, label: str) -> str:
        """A name of this run, for something that `removing` removes."""
        return f"{PREFIX}{label}_{self._token}"

    @contextmanager
    def topic(self, label: str, **options: Any) -> Iterator[str]:
        """A topic of the benchmark for the block. Gives its name. `options` are fields of `Topic`."""
        name = self.name(label)
        with self.removing(lambda: self._delete(name)):
            self.platform.registry.register_topic(Topic(name, **options))
            yield name

    @contextmanager
    def table(self, *statements: str) -> Iterator[str]:
        """A table that the named statements make on every shard, for the block. Gives its name."""
        name = f"{_TABLE}{secrets.token_hex(3)}"
        with self.removing(lambda: self._everywhere(_drop("TABLE", self.schema, name))):
            for statement in statements:
                self._everywhere(self.queries(statement, table=name))
            yield name

    def raw_table(self) -> AbstractContextManager[str]:
        """A table like the buffer."""
        return self.table("create_raw", "index_raw")

    @contextmanager
    def made(self, kind: Literal["SCHEMA", "DATABASE"], name: str) -> Iterator[str]:
        """A new schema or database for the block. Its comment tells the next run to drop it, if this run is killed."""
        self.connection.execute(sql.SQL("CREATE {} {}").format(sql.SQL(kind), sql.Identifier(name)))
        with self.removing(lambda: self.connection.execute(_drop(kind, name, force=kind == "DATABASE"))):
            mark = sql.SQL("COMMENT ON {} {} IS {}")
            self.connection.execute(mark.format(sql.SQL(kind), sql.Identifier(name), sql.Literal(_MARK)))
            yield name

    def consumer(self, topic: str, name: str = "bench", *, partitioned: bool = True) -> str:
        """A consumer of a topic of the benchmark, at the topic's beginning. Gives its name."""
        self.platform.registry.register_consumer(Consumer(topic, name, partitioned=partitioned))
        return name

    def crew(self) -> Crew:
        """Processes on this database, or on these shards."""
        return Crew(self.dsns, self.schema, self.report)

    def meter(self, **processes: Sequence[WorkerProcess]) -> machine.Meter:
        """Measures the processor time of processes, and of the servers that run on this machine."""
        pids = {kind: [each.process.pid for each in members] for kind, members in processes.items()}
        servers = {server for each in self.connections if (server := machine.server_of(each.info.backend_pid))}
        return machine.Meter({kind: each for kind, each in {**pids, "servers": sorted(servers)}.items() if each})

    @contextmanager
    def holding_xmin(self) -> Iterator[None]:
        """Another transaction keeps a snapshot open for the block: no row that is deleted meanwhile can be removed."""
        with closing(self.databases[0].dedicated()) as connection:
            connection.execute("SET idle_in_transaction_session_timeout TO 0")
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            connection.execute(self.queries("hold_snapshot"))
            yield
            try:
                # If the server had ended the transaction, the figure would be wrong.
                connection.execute("SELECT 1")
            except psycopg.OperationalError as error:
                raise BenchmarkError(f"the transaction did not stay open: {error}") from error

    def settle(self) -> None:
        """Give every measurement the same start: remove dead rows of events under way, and flush earlier writes."""
        # Only the owner may vacuum, and only some roles may request a checkpoint. The figures hold without either.
        self._try(self.queries("vacuum_buffer"))
        self._try(sql.SQL("CHECKPOINT"))

    # Measuring

    def in_turns(self, step: str, rounds: int, sides: Mapping[Side, Callable[[], Result]]) -> dict[Side, list[Result]]:
        """Measure every side once a round. Each second round has the opposite order: no side always comes first."""
        found: dict[Side, list[Result]] = {side: [] for side in sides}
        for number in range(rounds):
            self.report(step, number, rounds)
            for side in list(sides)[:: -1 if number % 2 else 1]:
                found[side].append(sides[side]())
        return found

    def beside_raw_copy(self, measure: Callable[[], list[Figure]], *, events: int) -> list[Figure]:
        """The figures of `measure`. Figures in events per second get their ratio to the raw COPY rate.

        The raw COPY rate of `events` events is measured before and after the figures, as a machine's speed drifts.
        """
        before = self._raw_rate(events)
        self.settle()
        figures = measure()
        after = self._raw_rate(events)

        self._raw_rates += [before, after]
        raw, details = mean((before, after)), {"raw_copy_before": before, "raw_copy_after": after}
        return [
            replace(each, ratio_to_raw_copy=each.value / raw, details={**each.details, **details})
            if each.unit == EVENTS_PER_SECOND
            else each
            for each in figures
        ]

    def raw_copy(self) -> list[Figure]:
        """The mean of all raw COPY rates that this session has measured, if any."""
        rates = self._raw_rates
        if not rates:
            return []
        details = {"least": min(rates), "most": max(rates), "measured": len(rates)}
        return [Figure("raw_copy", mean(rates), EVENTS_PER_SECOND, 1.0, details)]

    def _raw_rate(self, events: int) -> float:
        """Events per second that COPY writes into tables like the buffer, on all shards at once.

        The events are encoded beforehand. Every batch is a commit.
        """
        share = max(1, events // len(self.connections))
        with self.raw_table() as table, ThreadPoolExecutor(len(self.connections)) as threads:
            statement = self.queries("copy_raw", table=table)
            batches = [workload.encoded_batches(table, 10, events=share, batch=RAW_BATCH) for _ in self.connections]
            self.settle()
            started = time.monotonic()
            copies = [
                threads.submit(self._copy, connection, statement, each, "raw COPY", share)
                for connection, each in zip(self.connections, batches, strict=True)
            ]
            for copy in copies:
                copy.result()
            return share * len(copies) / (time.monotonic() - started)

    def _copy(
        self, connection: Connection, statement: sql.SQL, batches: Iterable[tuple[int, bytes]], step: str, events: int
    ) -> None:
        done = 0
        for number, block in batches:
            with connection.cursor().copy(statement) as copy:
                copy.write(block)
            done += number
            self.report(step, done, events)

    def fill_buffer(self, topic: str, *, partitions: int, events: int) -> None:
        """Put `events` events of a topic of the benchmark into the buffer. No figure includes this."""
        batches = workload.encoded_batches(topic, partitions, events=events, batch=RAW_BATCH)
        self._copy(self.connection, self.queries("copy_buffer"), batches, "filling the buffer", events)

    def fill_log(self, topic: str, *, events: int) -> None:
        """Publish and transfer `events` events of a topic of the benchmark. No figure includes this."""
        before = self.platform.reader.count(topic)
        with self.crew() as crew:
            publishers = start_publishers(crew, topic, events=events, batch=10_000)
            crew.go()
            crew.outcomes(publishers, events=events, step="filling the topic", limit=limit_of(events))

        self.platform.transfer.run_once([topic])
        # Otherwise the first reader of a row would do work for later readers: it marks the row as committed.
        segments.vacuum(self.connection, self.schema, topic)
        stored = self.platform.reader.count(topic) - before
        if stored != events:
            raise BenchmarkError(
                f"topic {topic!r} got {stored} events instead of {events}: does another program write?"
            )

    def watch_offsets(
        self,
        crew: Crew,
        topic: str,
        consumer: str,
        *,
        events: int,
        step: str,
        limit: float | None = None,
        every: float = SAMPLE_SECONDS,
    ) -> list[Sample]:
        """The number of events that a consumer has committed over time, until it has committed `events`."""
        samples = [Sample(time.monotonic(), 0)]

        def done() -> bool:
            consumed = sum(self.consumed(topic, consumer))
            samples.append(Sample(time.monotonic(), consumed))
            self.report(step, min(consumed, events), events)
            return consumed >= events

        crew.wait(done, limit=limit or limit_of(events), what=step, every=every)
        if samples[-1].events > events:
            raise BenchmarkError(f"{step}: {samples[-1].events} events were consumed of {events}, which is a defect")
        return samples

    # Cleaning up

    def _everywhere(self, statement: sql.SQL | sql.Composed) -> None:
        for connection in self.connections:
            connection.execute(statement)

    def _try(self, statement: sql.SQL | sql.Composed, parameters: dict[str, object] | None = None) -> None:
        """Execute a statement on every shard, and go on if it fails. If a server is gone, a later statement fails."""
        for connection in self.connections:
            with suppress(psycopg.Error):
                connection.execute(statement, parameters)

    def _remove_leftovers(self) -> None:
        for topic in self.platform.registry.topics():
            if topic.name.startswith(PREFIX):
                self._delete(topic.name)

        named = {"schema": self.schema, "tables": _TABLE, "mark": _MARK}
        for connection in self.connections:
            drop_orphans(connection, self.schema, PREFIX)
            for kind, names in connection.execute(self.queries("leftovers"), named).fetchall():
                # A database with sessions belongs to a run on another database of the server, and stays.
                with suppress(psycopg.Error):
                    connection.execute(_drop(kind, *names))
        for (queue,) in self.connection.execute(self.queries("leftover_queues"), {"prefix": PREFIX}).fetchall():
            Queue(self.platform, queue).delete(force=True)

    def _delete(self, topic: str) -> None:
        """Delete a topic, even if transactions that are about to end still keep it."""
        for attempt in range(_DELETE_ATTEMPTS):
            try:
                with suppress(TopicNotFoundError):
                    self.platform.registry.unregister_topic(topic, force=True)
                return
            except DatabaseBusyError:
                if attempt == _DELETE_ATTEMPTS - 1:
                    raise


def _drop(kind: LiteralString, *name: str, force: bool = False) -> sql.Composed:
    ending = "CASCADE" if kind == "SCHEMA" else "WITH (FORCE)" if force else ""
    return sql.SQL("DROP {} IF EXISTS {} {}").format(sql.SQL(kind), sql.Identifier(*name), sql.SQL(ending))


def start_publishers(
    crew: Crew,
    topic: str,
    *,
    events: int,
    batch: int,
    publishers: int = 1,
    straight: bool = True,
    transfer: bool = True,
    rate: float | None = None,
) -> list[WorkerProcess]:
    """Start processes that publish `events` together, at `rate` events per second or as fast as they can."""
    return [
        crew.start(
            roles.publish, f"publisher {number}", topic, batch=batch, seed=number,
            events=events // publishers + (number <= events % publishers),
            straight=straight, transfer=transfer, rate=None if rate is None else rate / publishers,
        )
        for number in range(1, publishers + 1)
    ]  # fmt: skip


def limit_of(events: int) -> float:
    """Seconds after which a run over `events` is given up: a rate below 2,000 events/s is not worth measuring."""
    return 60.0 + events / 2_000
