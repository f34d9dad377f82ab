"""Queues: sending, receiving and acknowledging, beside PGMQ in the same run where its SQL is given."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.bench import roles, workload
from eventsql_orchestration.bench.benchmark import Benchmark, option, workers
from eventsql_orchestration.bench.figure import Figure, rate
from eventsql_orchestration.bench.processor import Meter, parent
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.queue import NewMessage, Queue

_NAME: Final = "eventsql_bench_queue"
_UNIT: Final = "messages/s"
_MICROSECONDS: Final = 1e6
_HELD: Final = 600
"""The visibility timeout of a benchmark in seconds: longer than any step."""

_WAITED: Final = 3.0
"""A receiver beside senders ends after so many seconds without a message, which do not count."""


@dataclass(frozen=True, kw_only=True)
class QueueBenchmark(Benchmark):
    """Send messages to a queue, then receive and acknowledge them, in batches, from several connections.

    Each connection is a process of its own. Steps alternate with the same steps of PGMQ if its SQL is given. The
    benchmark runs this file in a schema that it makes and drops, so the schema must not exist before. With a backlog,
    or with another open transaction, a figure is the ratio to the same steps without it. Messages are the same as in
    the other benchmarks: 150 bytes of JSON. The details of a rate have the processor time of a message in microseconds,
    of the clients and of the server where it runs on this machine.
    """

    name = "queue"
    summary = "Send, receive and acknowledge messages of a queue, beside PGMQ."
    hidden: ClassVar[frozenset[str]] = frozenset({"partitions", "raw_events"})

    messages: int = option(40_000, "Messages of each step", quick=400)
    batch: int = option(100, "Messages of a batch", most=10_000, quick=20)
    connections: int = workers(4, "Connections that send and receive")
    backlog: int = option(
        0, "Messages that wait in the queue meanwhile; the steps run with an empty queue, too", least=0, most=10_000_000
    )
    hold_xmin: bool = option(False, "Run the steps again while another transaction stays open")
    keys: int = option(1_000, "Different keys of the messages of a connection, of an ordered queue")
    ordered: bool = option(False, "Keep the order of keys, beside PGMQ's read_grouped_head")
    pgmq_sql: str = option("", "PGMQ's SQL, to be measured in the same run", kind=str, metavar="FILE")
    topic: bool = option(False, "Consume a topic as a queue instead, one by one, beside raw COPY")
    end_to_end: bool = option(False, "Send and receive at once instead, from as many connections each, beside raw COPY")
    threads: int = workers(16, "Threads that consume a topic as a queue")
    rounds: int = option(3, "Repetitions of each step; the median counts", quick=1)

    def measure(self, session: Session) -> list[Figure]:
        if self.topic:
            return session.beside_raw_copy(lambda: self._consume_topic(session))
        if self.end_to_end:
            if self.pgmq_sql:
                raise BenchmarkError("PGMQ sends and receives one after the other: omit --pgmq-sql or --end-to-end")
            return session.beside_raw_copy(lambda: self._deliver(session))
        text = _read(self.pgmq_sql) if self.pgmq_sql else None
        figures: dict[str, list[_Step]] = {}
        with ExitStack() as opened:
            queue = opened.enter_context(_own_queue(session, ordered=self.ordered))
            opened.enter_context(_pgmq(session, text))
            if self.backlog:
                self._rounds(session, queue, figures, [""], phase="empty_")
            self._fill(session, queue)
            self._rounds(session, queue, figures, ["", "pgmq_"] if text is not None else [""])
            if self.hold_xmin:
                with session.holding_xmin():
                    self._rounds(session, queue, figures, [""], phase="held_")
        return self._figures(figures)

    def _rounds(
        self, session: Session, queue: Queue, figures: dict[str, list[_Step]], kinds: list[str], *, phase: str = ""
    ) -> None:
        for _ in range(self.rounds):
            for step in ("send", "receive"):
                for kind in kinds:
                    done = self._step(session, queue.name, kind, step)
                    figures.setdefault(f"{phase}{kind}{step}", []).append(done)

    def _deliver(self, session: Session) -> list[Figure]:
        """Send and receive at once: from the first send to the last acknowledgement."""
        with _own_queue(session, ordered=self.ordered) as queue:
            steps = [self._step(session, queue.name, "", "send", "deliver") for _ in range(self.rounds)]
        middle, rates = _middle(steps), [step.rate for step in steps]
        details = {"connections": self.connections, "batch": self.batch, "processor_microseconds": middle.costs}
        return [rate("queue_end_to_end", middle.rate, rounds=rates, **details)]

    def _consume_topic(self, session: Session) -> list[Figure]:
        """Consume a filled topic as a queue, with a handler of each kind that does nothing."""
        found: list[Figure] = []
        with session.topic("queue", partitions=self.partitions) as topic:
            session.fill_log(topic, events=self.messages)
            for kind in ("plain", "transactions"):
                consumer = session.consumer(topic, kind)
                with session.crew() as crew:
                    crew.start(
                        roles.consume_as_queue, "the consumer", topic=topic, consumer=consumer, threads=self.threads,
                        transactions=kind == "transactions",
                    )  # fmt: skip
                    crew.ready()
                    crew.go()
                    samples = session.watch_offsets(
                        crew, topic, consumer, events=self.messages, step=f"a topic as a queue, {kind}",
                        limit=60.0 + self.messages / 100,
                    )  # fmt: skip
                elapsed = samples[-1].at - samples[0].at
                found.append(
                    rate(f"queue_topic_{kind}", self.messages / elapsed, seconds=elapsed, threads=self.threads)
                )
        return found

    def _fill(self, session: Session, queue: Queue) -> None:
        pool = [each.value for each in workload.publications(_NAME, min(self.backlog, 5_000))]
        for done in range(0, self.backlog, 5_000):
            batch = pool[: min(5_000, self.backlog - done)]
            queue.send_all([NewMessage(body, key=f"{done + place}") for place, body in enumerate(batch)])
            session.report("filling the queue", done, self.backlog)

    def _step(self, session: Session, queue: str, kind: str, *steps: str) -> _Step:
        share = self.messages // self.connections
        with session.crew() as crew:
            started = [
                crew.start(
                    work, f"connection {number}, {step}", queue=queue, kind=kind, step=step, messages=share,
                    batch=self.batch, ordered=self.ordered, keys=self.keys, number=number, warm=len(steps) == 1,
                )
                for step in steps
                for number in range(self.connections)
            ]  # fmt: skip
            server = parent(session.connection.info.backend_pid)
            crew.ready()
            meter = Meter(
                {"clients": [each.process.pid for each in started], "server": [] if server is None else [server]}
            )
            crew.go()
            outcomes = [crew.outcome(each, limit=600.0) for each in started]
            processor = meter.taken()
        done = sum(outcome["messages"] for outcome in outcomes[-self.connections :])
        if not done:
            raise BenchmarkError(f"the queue was empty at the step {' and '.join(steps)!r}: somebody else works on it")
        elapsed = max(outcome["ended"] for outcome in outcomes) - min(outcome["started"] for outcome in outcomes)
        costs = {kind: seconds / done * _MICROSECONDS for kind, seconds in processor.items() if seconds}
        return _Step(done / elapsed, costs)

    def _figures(self, figures: dict[str, list[_Step]]) -> list[Figure]:
        found: list[Figure] = []
        details = {"connections": self.connections, "batch": self.batch, "backlog": self.backlog}
        for name, steps in figures.items():
            middle = _middle(steps)
            rates = [step.rate for step in steps]
            found.append(
                Figure(
                    f"queue_{name}", middle.rate, _UNIT,
                    details={**details, "rounds": rates, "processor_microseconds": middle.costs},
                )
            )  # fmt: skip
            if (theirs := figures.get(f"pgmq_{name}")) is not None:
                # Of neighbouring steps: the machine's speed drifts.
                ratios = sorted(own / other.rate for own, other in zip(rates, theirs, strict=True))
                ratio = ratios[len(ratios) // 2]
                found.append(Figure(f"queue_{name}_of_pgmq", ratio, "ratio", details={"rounds": ratios}))
        for step in ("send", "receive"):
            for phase, other, name in (("", "empty_", "of_empty"), ("held_", "", "held_of_free")):
                if (ran := figures.get(f"{phase}{step}")) and (beside := figures.get(f"{other}{step}")):
                    ratio = _middle(ran).rate / _middle(beside).rate
                    found.append(Figure(f"queue_{step}_{name}", ratio, "ratio", details=details))
        return found


@dataclass(frozen=True)
class _Step:
    """Messages per second, and microseconds of processor time per message of each kind of process."""

    rate: float
    costs: dict[str, float]


def _middle(steps: list[_Step]) -> _Step:
    """The step of the median rate."""
    return sorted(steps, key=lambda step: step.rate)[len(steps) // 2]


def _read(path: str) -> str:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path} cannot be read: {error}") from None
    # Remove psql's own lines, and the calls that only an extension may make.
    text = re.sub(r"^\\.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"^SELECT pg_catalog\.pg_extension_config_dump\([^;]*;", "", text, flags=re.MULTILINE)


@contextmanager
def _own_queue(session: Session, *, ordered: bool) -> Iterator[Queue]:
    queue = Queue(session.platform, f"{_NAME}{'_ordered' if ordered else ''}", ordered=ordered)
    try:
        queue.purge()
        yield queue
    finally:
        queue.purge()


@contextmanager
def _pgmq(session: Session, text: str | None) -> Iterator[None]:
    if text is None:
        yield
        return
    with closing(session.databases[0].dedicated()) as connection:
        if connection.execute("SELECT pg_catalog.to_regnamespace('pgmq') IS NULL").fetchone() != (True,):
            raise BenchmarkError(
                "the database has a schema pgmq, which the benchmark would drop: take another database"
            )
        try:
            connection.execute("CREATE SCHEMA pgmq")
            connection.execute(text.encode())
            connection.execute(sql.SQL("SELECT pgmq.create({})").format(sql.Literal(_NAME)))
            yield
        except psycopg.Error as error:
            raise BenchmarkError(f"PGMQ's SQL fails: {' '.join(str(error).split())}") from error
        finally:
            connection.execute("DROP SCHEMA IF EXISTS pgmq CASCADE")


def work(
    worker: Worker,
    *,
    queue: str,
    kind: str,
    step: str,
    messages: int,
    batch: int,
    ordered: bool,
    keys: int,
    number: int,
    warm: bool,
) -> roles.Outcome:
    """Send `messages`, or receive and acknowledge until there are no more; `deliver` waits for them.

    With `warm`, a first batch is sent or received before the clock starts: a connection's first call makes the plans.
    Gives the number, the start and the end.
    """
    side: _Own | _Pgmq = _Pgmq(ordered) if kind else _Own(queue, ordered)
    with worker.platform() as platform, ExitStack() as opened:
        side.open(platform, opened, batch=batch, keys=keys, number=number)
        if warm:
            (side.send if step == "send" else side.receive)()
        worker.ready()
        started, done = time.monotonic(), 0
        if step == "send":
            while done < messages:
                done += side.send()
        elif step == "deliver":
            ended = started
            while received := side.receive(wait=_WAITED):
                done, ended = done + received, time.monotonic()
            return {"messages": done, "started": started, "ended": ended}
        else:
            while done < messages and (received := side.receive()):
                done += received
        return {"messages": done, "started": started, "ended": time.monotonic()}


def _keys(number: int, batch: int, keys: int) -> list[list[str]]:
    """The keys of successive batches of a connection, until each of its keys was used."""
    names = [f"{number} {place}" for place in range(keys)]
    return [[names[(first + place) % keys] for place in range(batch)] for first in range(0, keys, batch)]


@dataclass
class _Own:
    name: str
    ordered: bool
    _queue: Queue = field(init=False)
    _batches: Iterator[list[NewMessage]] = field(init=False)
    _most: int = field(init=False)

    def open(self, platform: Any, _opened: ExitStack, *, batch: int, keys: int, number: int) -> None:
        self._queue, self._most = Queue(platform, self.name), batch
        self._queue.definition()
        bodies = [each.value for each in workload.publications(_NAME, batch, seed=number)]
        self._batches = cycle(
            [NewMessage(body, key=key) for body, key in zip(bodies, names, strict=True)]
            for names in (_keys(number, batch, keys) if self.ordered else [[None] * batch])
        )

    def send(self) -> int:
        return len(self._queue.send_all(next(self._batches)))

    def receive(self, wait: float = 0.0) -> int:
        received = self._queue.receive(max_messages=self._most, visibility_timeout=_HELD, wait=wait)
        if received:
            self._queue.acknowledge_all(received)
        return len(received)


@dataclass
class _Pgmq:
    ordered: bool
    _connection: psycopg.Connection[Any] = field(init=False)
    _batch: list[str] = field(init=False)
    _headers: Iterator[list[str]] = field(init=False)

    def open(self, platform: Any, opened: ExitStack, *, batch: int, keys: int, number: int) -> None:
        self._connection = opened.enter_context(closing(platform.database.dedicated()))
        self._batch = [each.value.decode() for each in workload.publications(_NAME, batch, seed=number)]
        self._headers = cycle(
            [json.dumps({"x-pgmq-group": key}) for key in names] for names in _keys(number, batch, keys)
        )

    def send(self) -> int:
        if self.ordered:
            statement = "SELECT * FROM pgmq.send_batch(%s, %s::pg_catalog.jsonb[], %s::pg_catalog.jsonb[])"
            self._connection.execute(statement, [_NAME, self._batch, next(self._headers)]).fetchall()
        elif len(self._batch) == 1:
            self._connection.execute(
                "SELECT * FROM pgmq.send(%s, %s::pg_catalog.jsonb)", [_NAME, self._batch[0]]
            ).fetchall()
        else:
            self._connection.execute(
                "SELECT * FROM pgmq.send_batch(%s, %s::pg_catalog.jsonb[])", [_NAME, self._batch]
            ).fetchall()
        return len(self._batch)

    def receive(self, wait: float = 0.0) -> int:
        """PGMQ's benchmark waits for no message."""
        del wait
        plain, grouped = "SELECT * FROM pgmq.read(%s, %s, %s)", "SELECT * FROM pgmq.read_grouped_head(%s, %s, %s)"
        statement = grouped if self.ordered else plain
        rows = self._connection.execute(statement, [_NAME, _HELD, len(self._batch)]).fetchall()
        if rows:
            ids = [row[0] for row in rows]
            self._connection.execute("SELECT * FROM pgmq.delete(%s, %s::bigint[])", [_NAME, ids]).fetchall()
        return len(rows)
