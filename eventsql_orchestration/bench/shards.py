"""Publishing and consuming at once over 1, 2, … embedded servers on one machine: what several cost, against one.

The servers share the machine's processors, its disk and its memory with each other and with the processes that publish
and consume. So this does not show what shards gain, which is what further machines bring; it shows what they cost: how
much of the rate of one server is left when the same events go over several.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eventsql_orchestration.bench import workload
from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure, Sample, quarter_rates
from eventsql_orchestration.bench.processes import Crew
from eventsql_orchestration.bench.session import RAW_BATCH, SAMPLE_SECONDS, Report, Session, limit_of
from eventsql_orchestration.bench.stream import StreamSize
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import Consumer, Topic
from eventsql_orchestration.platform import EventSQL

TOPIC: Final = "eventsql_bench_stream"
CONSUMER: Final = "bench"


@dataclass(frozen=True, slots=True)
class ShardsSize:
    """A run of `stream` on 1 to `shards` servers; `raw_events` is how many the raw COPY writes on all together."""

    stream: StreamSize
    shards: int
    raw_events: int


def measure(home: Path, size: ShardsSize, report: Report) -> tuple[list[Figure], dict[str, object]]:
    """The figures, and what describes the machine. The servers live in `home` and are gone afterwards.

    Raises `BenchmarkError`.
    """
    figures: list[Figure] = []
    environment: dict[str, object] = {}
    with _servers(home, size.shards) as dsns:
        for number in range(1, size.shards + 1):
            figure, environment = _measure(dsns[number - 1], size, report)
            figures.append(figure)
    figures += [
        Figure(f"{figure.name}_to_1", figure.value / figures[0].value, "of the rate of one server")
        for figure in figures[1:]
    ]
    return figures, environment


@contextmanager
def _servers(home: Path, shards: int) -> Iterator[list[list[str]]]:
    """Servers; gives, for each number of shards, the URLs of databases of its own on so many of them."""
    embedded = [EmbeddedPostgres(home / f"server-{number}") for number in range(1, shards + 1)]
    try:
        for each in embedded:
            each.start()
        yield [
            [server.create_database(f"of_{number}") for server in embedded[:number]] for number in range(1, shards + 1)
        ]
    finally:
        for each in embedded:
            each.destroy()
        shutil.rmtree(home, ignore_errors=True)


def _measure(dsns: Sequence[str], size: ShardsSize, report: Report) -> tuple[Figure, dict[str, object]]:
    with EventSQL(*dsns, transfer=False) as platform, ExitStack() as stack:
        platform.open()
        sessions = [
            stack.enter_context(Session(shard, raw_events=size.raw_events, report=report)) for shard in platform.shards
        ]
        raw = [_raw_copy(sessions, size.raw_events)]
        for session in sessions:
            session.settle()
        platform.registry.register_topic(Topic(TOPIC, size.stream.partitions))
        platform.registry.register_consumer(Consumer(TOPIC, CONSUMER, partitioned=True))
        started, ended, samples = _stream(dsns, sessions, size.stream, report)
        raw.append(_raw_copy(sessions, size.raw_events))
        environment = sessions[0].describe()
    mean, events = sum(raw) / 2, size.stream.total
    seconds = samples[-1][0] - started
    of_shards = [consumed / seconds for consumed in samples[-1][1]]
    quarters = quarter_rates(started, [Sample(at, sum(consumed)) for at, consumed in samples], events)
    name = f"publish_and_consume_{len(dsns)}_shard{'s' if len(dsns) > 1 else ''}"
    details = {
        "seconds": seconds,
        "published_per_second": events / (ended - started),
        "of_shards": of_shards,
        "quarters": quarters,
        "raw_copy_before": raw[0],
        "raw_copy_after": raw[1],
    }
    return Figure(name, events / seconds, EVENTS_PER_SECOND, events / seconds / mean, details), environment


def _raw_copy(sessions: Sequence[Session], events: int) -> float:
    """Events per second that COPY writes on all servers at once, encoded beforehand, as `Session` does on one."""
    share = events // len(sessions)
    with ExitStack() as stack:
        tables = [stack.enter_context(session.raw_table()) for session in sessions]
        blocks = [list(workload.encoded_batches(table, 10, events=share, batch=RAW_BATCH)) for table in tables]
        begin = threading.Barrier(len(sessions) + 1)
        ended: list[float] = []

        def copy(session: Session, table: str, encoded: Sequence[tuple[int, bytes]]) -> None:
            statement = session.queries("copy_raw", topic=table)
            begin.wait()
            for _, block in encoded:
                with session.connection.cursor().copy(statement) as stream:
                    stream.write(block)
            ended.append(time.monotonic())

        threads = [threading.Thread(target=copy, args=each) for each in zip(sessions, tables, blocks, strict=True)]
        for thread in threads:
            thread.start()
        begin.wait()
        started = time.monotonic()
        for thread in threads:
            thread.join()
    if len(ended) < len(sessions):
        raise BenchmarkError(f"the raw COPY failed on one of {len(sessions)} servers: {event_table(tables[0])}")
    return share * len(sessions) / (max(ended) - started)


def _stream(
    dsns: Sequence[str], sessions: Sequence[Session], size: StreamSize, report: Report
) -> tuple[float, float, list[tuple[float, list[int]]]]:
    """When publishing began and ended, and how many events each shard had consumed at which time."""
    events = size.total
    with Crew(*dsns, schema=sessions[0].platform.database.schema) as crew:
        shares = [events // size.publishers + (n < events % size.publishers) for n in range(size.publishers)]
        publishers = [
            crew.start(
                "publish", f"publisher {number}", topic=TOPIC, events=share, batch=size.publication, seed=number,
                straight=size.straight, transfer=size.straight,
            )
            for number, share in enumerate(shares, start=1)
        ]  # fmt: skip
        for number in range(1, size.consumers + 1):
            crew.start(
                "consume", f"consumer {number}", topic=TOPIC, consumer=CONSUMER, max_events=size.max_events,
                polling_delay=size.polling_delay, handler_delay=size.handler_delay,
            )  # fmt: skip
        if not size.straight:
            crew.start("transfer", "the transfer")
        crew.go()
        samples: list[tuple[float, list[int]]] = []
        crew.wait(
            _consumed(sessions, samples, events, report), limit=limit_of(events), what="publishing and consuming",
            every=SAMPLE_SECONDS,
        )  # fmt: skip
        outcomes = [crew.outcome(publisher, limit=60.0) for publisher in publishers]
    return min(each["started"] for each in outcomes), max(each["ended"] for each in outcomes), samples


def _consumed(
    sessions: Sequence[Session], samples: list[tuple[float, list[int]]], events: int, report: Report
) -> Callable[[], bool]:
    def consumed() -> bool:
        counts = []
        for session in sessions:
            own = {"topic": TOPIC, "consumer": CONSUMER}
            row = session.connection.execute(session.queries("consumed"), own).fetchone()
            assert row is not None, "an aggregate gives one row"
            counts.append(int(row[0]))
        samples.append((time.monotonic(), counts))
        report(f"{len(sessions)} servers", min(sum(counts), events), events)
        if sum(counts) > events:
            raise BenchmarkError(f"{sum(counts)} events were consumed of {events}, which is a defect")
        return sum(counts) >= events

    return consumed
