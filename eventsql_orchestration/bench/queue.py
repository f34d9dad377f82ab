"""Queues: sending, receiving and acknowledging, beside PGMQ in the same run where its SQL is given."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import sql

from eventsql_orchestration.bench import roles, workload
from eventsql_orchestration.bench.benchmark import BesideRawCopy, OnTopic, check_share, connected, option, workers
from eventsql_orchestration.bench.figure import Figure, rate, ratio, span
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.consuming.queue_handler import QueueHandler
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import BenchmarkError, ValidationError
from eventsql_orchestration.model import Event
from eventsql_orchestration.queue import NewMessage, Queue

_PGMQ: Final = "eventsql_bench_queue"
"""The name of PGMQ's queue."""

_SEND: Final = "SELECT * FROM pgmq.send(%s, %s::pg_catalog.jsonb)"
_SEND_BATCH: Final = "SELECT * FROM pgmq.send_batch(%s, %s::pg_catalog.jsonb[])"
_SEND_GROUPED: Final = "SELECT * FROM pgmq.send_batch(%s, %s::pg_catalog.jsonb[], %s::pg_catalog.jsonb[])"
_READ: Final = "SELECT * FROM pgmq.read(%s, %s, %s)"
_READ_GROUPED: Final = "SELECT * FROM pgmq.read_grouped_head(%s, %s, %s)"
_DELETE: Final = "SELECT * FROM pgmq.delete(%s, %s::bigint[])"

_HELD: Final = 600
"""The visibility timeout of a benchmark in seconds: longer than any step."""

_WAITED: Final = 3.0
"""Seconds without a message after which a receiver beside senders ends. These seconds do not count."""

_FILLED: Final = 5_000
"""Messages of the backlog in one statement."""


@dataclass(frozen=True)
class _Step:
    """Messages per second, and microseconds of processor time per message of each kind of process."""

    rate: float
    costs: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class QueueBenchmark(OnTopic, BesideRawCopy):
    """Send messages to a queue, then receive and acknowledge them, in batches, from several connections.

    Each connection is a process of its own. Steps alternate with the same steps of PGMQ if its SQL is given. The
    benchmark runs this file in a schema that it makes and drops, so the schema must not exist before. With a backlog,
    or with another open transaction, a figure is the ratio to the same steps without it. Messages are the same as in
    the other benchmarks: 150 bytes of JSON. The details of a rate have the processor time of a message in microseconds,
    of the clients, and of the server if it runs on this machine.

    The form and the partitions are those of the topic of --topic. Raw COPY is measured with --topic and --end-to-end.
    """

    name = "queue"
    summary = "Send, receive and acknowledge messages of a queue, beside PGMQ."

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
    of_topic: bool = option(False, "Consume a topic as a queue instead, one by one, beside raw COPY", flag="--topic")
    end_to_end: bool = option(False, "Send and receive at once instead, from as many connections each, beside raw COPY")
    threads: int = connected(16, "Threads that consume a topic as a queue")
    rounds: int = option(3, "Repetitions of each step; the median counts", quick=1)

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer messages than connections, and for ways that exclude each other."""
        check_share(self.messages, "messages", self.connections, "connections")
        if self.of_topic and (self.end_to_end or self.ordered):
            raise ValidationError("--topic measures a topic instead of a queue: omit --ordered and --end-to-end")
        if (self.of_topic or self.end_to_end) and (self.pgmq_sql or self.backlog or self.hold_xmin):
            raise ValidationError(
                "PGMQ, a backlog and an open transaction are for single steps: omit --topic or --end-to-end"
            )

    def measure(self, session: Session) -> list[Figure]:
        if self.of_topic:
            return self.beside_raw_copy(session, lambda: self._consume_topic(session))
        if self.end_to_end:
            return self.beside_raw_copy(session, lambda: self._deliver(session))
        return self._figures(self._steps(session, _read(self.pgmq_sql) if self.pgmq_sql else None))

    def _steps(self, session: Session, pgmq: str | None) -> dict[str, list[_Step]]:
        with self._queue(session) as queue, _pgmq(session, pgmq):
            found = self._rounds(session, queue.name, phase="empty_") if self.backlog else {}
            self._fill(session, queue)
            found |= self._rounds(session, queue.name, sides=("", "pgmq_") if pgmq is not None else ("",))
            if self.hold_xmin:
                with session.holding_xmin():
                    found |= self._rounds(session, queue.name, phase="held_")
        return found

    @contextmanager
    def _queue(self, session: Session) -> Iterator[Queue]:
        queue = Queue(session.platform, session.name("queue"), ordered=self.ordered)
        queue.definition()
        with session.removing(lambda: queue.delete(force=True)):
            yield queue

    def _rounds(
        self, session: Session, queue: str, *, phase: str = "", sides: Sequence[str] = ("",)
    ) -> dict[str, list[_Step]]:
        found: dict[str, list[_Step]] = {}
        for number in range(self.rounds):
            # Each second round has the opposite order: no side always comes first.
            for step, side in product(("send", "receive"), sides[:: -1 if number % 2 else 1]):
                found.setdefault(f"{phase}{side}{step}", []).append(self._step(session, queue, side, step))
        return found

    def _deliver(self, session: Session) -> list[Figure]:
        """Send and receive at once: from the first send to the last acknowledgement."""
        with self._queue(session) as queue:
            steps = [self._step(session, queue.name, "", "send", "deliver") for _ in range(self.rounds)]
        details = {"connections": self.connections, "batch": self.batch, **_details(steps)}
        return [rate("queue_end_to_end", _middle(steps).rate, **details)]

    def _consume_topic(self, session: Session) -> list[Figure]:
        """Consume a filled topic as a queue, with a handler of each kind that does nothing."""
        found: list[Figure] = []
        with self.topic(session) as topic:
            session.fill_log(topic, events=self.messages)
            for kind in ("plain", "transactions"):
                consumer = session.consumer(topic, kind)
                with session.crew() as crew:
                    crew.start(self._consume, "the consumer", topic, consumer)
                    started = crew.go()
                    samples = session.watch_offsets(
                        crew, topic, consumer, events=self.messages, step=f"a topic as a queue, {kind}",
                        limit=60.0 + self.messages / 100,
                    )  # fmt: skip
                elapsed = samples[-1].at - started
                found.append(
                    rate(f"queue_topic_{kind}", self.messages / elapsed, seconds=elapsed, threads=self.threads)
                )
        return found

    def _fill(self, session: Session, queue: Queue) -> None:
        bodies = [each.value for each in workload.publications(_PGMQ, min(self.backlog, _FILLED))]
        for done in range(0, self.backlog, _FILLED):
            batch = bodies[: min(_FILLED, self.backlog - done)]
            queue.send_all([NewMessage(body, key=f"{done + place}") for place, body in enumerate(batch)])
            session.report("filling the queue", done, self.backlog)

    def _step(self, session: Session, queue: str, side: str, *steps: str) -> _Step:
        """Do one step alone, or `send` and `deliver` at once."""
        with session.crew() as crew:
            clients = [
                crew.start(self._work, f"connection {number}, {step}", queue, side, step, number, warm=len(steps) == 1)
                for step in steps
                for number in range(self.connections)
            ]
            crew.ready()
            meter = session.meter(clients=clients)
            crew.go()
            outcomes = crew.outcomes(
                clients, events=self.messages * len(steps), step=f"{side}{steps[-1]}", limit=60.0 + self.messages / 100
            )
            sent, done = (
                sum(each["messages"] for each in some)
                for some in (outcomes[: self.connections], outcomes[-self.connections :])
            )
            costs = meter.per_event(max(1, done))
        if not done or (len(steps) > 1 and sent != done):
            raise BenchmarkError(
                f"{done} messages came at the step {' and '.join(steps)!r}: another program uses the queue"
            )
        started, ended = span(outcomes)
        return _Step(done / (ended - started), costs)

    def _figures(self, found: dict[str, list[_Step]]) -> list[Figure]:
        figures: list[Figure] = []
        details = {"connections": self.connections, "batch": self.batch, "backlog": self.backlog}
        for name, steps in found.items():
            value = _middle(steps).rate
            figures.append(Figure(f"queue_{name}", value, "messages/s", details={**details, **_details(steps)}))
            if theirs := found.get(f"pgmq_{name}"):
                figures.append(ratio(f"queue_{name}_of_pgmq", _rates(steps), _rates(theirs), "ratio"))
        for step, (phase, other, name) in product(
            ("send", "receive"), (("", "empty_", "of_empty"), ("held_", "", "held_of_free"))
        ):
            if (ran := found.get(f"{phase}{step}")) and (beside := found.get(f"{other}{step}")):
                value = _middle(ran).rate / _middle(beside).rate
                figures.append(Figure(f"queue_{step}_{name}", value, "ratio", details=details))
        return figures

    # The roles of processes

    def _work(self, worker: Worker, queue: str, side: str, step: str, number: int, *, warm: bool) -> roles.Outcome:
        """Send a connection's messages, or receive and acknowledge until there are no more; `deliver` waits for them.

        With `warm`, a first batch is sent or received before the clock starts: a connection's first call makes the
        plans. Gives the number, the start and the end.
        """
        bodies = [each.value for each in workload.publications(_PGMQ, self.batch, seed=number)]
        groups = self._keys(number) if self.ordered else []
        with worker.platform() as platform, ExitStack() as opened:
            if side:
                send, receive = _pgmq_side(opened.enter_context(closing(platform.database.dedicated())), bodies, groups)
            else:
                send, receive = _own_side(platform, queue, bodies, groups)
            act = send if step == "send" else partial(receive, _WAITED if step == "deliver" else 0.0)
            most = math.inf if step == "deliver" else self.messages // self.connections
            if warm:
                act()
            worker.ready()
            started = ended = time.monotonic()
            done = 0
            while done < most and (number_done := act()):
                done, ended = done + number_done, time.monotonic()
                worker.progress(done)
        return {"messages": done, "started": started, "ended": ended}

    def _keys(self, number: int) -> list[list[str]]:
        """The keys of successive batches of a connection, until each of its keys was used."""
        names = [f"{number} {place}" for place in range(self.keys)]
        firsts = range(0, self.keys, self.batch)
        return [[names[(first + place) % self.keys] for place in range(self.batch)] for first in firsts]

    def _consume(self, worker: Worker, topic: str, consumer: str) -> roles.Outcome:
        """Consume a topic as a queue with a handler that does nothing, until the benchmark says to end."""

        def plain(_event: Event) -> None:
            """Acknowledged after it returns."""

        def transactions(_event: Event, _connection: Connection) -> None:
            """Acknowledged in its transaction."""

        with worker.platform() as platform:
            platform.registry.consumer(topic, consumer)
            worker.ready()
            handlers: dict[str, QueueHandler] = {"plain": plain, "transactions": transactions}
            with platform.consumers.start_queue(topic, consumer, handlers[consumer], workers=self.threads):
                worker.stopped.wait()
        return {}


def _middle(steps: Sequence[_Step]) -> _Step:
    """The step of the median rate."""
    return sorted(steps, key=lambda step: step.rate)[len(steps) // 2]


def _rates(steps: Sequence[_Step]) -> list[float]:
    return [step.rate for step in steps]


def _details(steps: Sequence[_Step]) -> dict[str, Any]:
    return {"rounds": _rates(steps), "processor_microseconds": _middle(steps).costs}


def _read(path: str) -> str:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path} cannot be read: {error}") from None
    # Remove psql's own lines, and the calls that only an extension may make.
    text = re.sub(r"^\\.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"^SELECT pg_catalog\.pg_extension_config_dump\([^;]*;", "", text, flags=re.MULTILINE)


@contextmanager
def _pgmq(session: Session, text: str | None) -> Iterator[None]:
    """PGMQ and a queue of it for the block, if its SQL is given."""
    with ExitStack() as made:
        if text is not None:
            connection = made.enter_context(closing(session.databases[0].dedicated()))
            try:
                made.enter_context(session.made("SCHEMA", "pgmq"))
                connection.execute(text.encode())
                connection.execute(sql.SQL("SELECT pgmq.create({})").format(sql.Literal(_PGMQ)))
            except psycopg.errors.DuplicateSchema:
                raise BenchmarkError(
                    "the database has a schema pgmq, which the benchmark would drop: use another database"
                ) from None
            except psycopg.Error as error:
                raise BenchmarkError(f"PGMQ's SQL fails: {' '.join(str(error).split())}") from error
        yield


# The two queues

_Side: TypeAlias = tuple[Callable[[], int], Callable[[float], int]]
"""Sends a batch, and receives and acknowledges a batch within some seconds. Both give the number of messages."""


def _own_side(platform: EventSQL, name: str, bodies: list[bytes], groups: list[list[str]]) -> _Side:
    queue = Queue(platform, name)
    queue.definition()
    batches = cycle(
        [[NewMessage(body, key=key) for body, key in zip(bodies, keys, strict=True)] for keys in groups]
        or [[NewMessage(body) for body in bodies]]
    )

    def receive(wait: float) -> int:
        received = queue.receive(max_messages=len(bodies), visibility_timeout=_HELD, wait=wait)
        if received:
            queue.acknowledge_all(received)
        return len(received)

    return lambda: len(queue.send_all(next(batches))), receive


def _pgmq_side(connection: psycopg.Connection[Any], bodies: list[bytes], groups: list[list[str]]) -> _Side:
    texts = [body.decode() for body in bodies]
    statement = _SEND_GROUPED if groups else _SEND_BATCH if len(texts) > 1 else _SEND
    values: cycle[list[Any]] = cycle(
        [[_PGMQ, texts, [json.dumps({"x-pgmq-group": key}) for key in keys]] for keys in groups]
        or [[_PGMQ, texts if len(texts) > 1 else texts[0]]]
    )

    def send() -> int:
        connection.execute(statement, next(values)).fetchall()
        return len(texts)

    def receive(_wait: float) -> int:
        read = connection.execute(_READ_GROUPED if groups else _READ, [_PGMQ, _HELD, len(texts)]).fetchall()
        if read:
            connection.execute(_DELETE, [_PGMQ, [row[0] for row in read]]).fetchall()
        return len(read)

    return send, receive
