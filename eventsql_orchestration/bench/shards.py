"""Publishing and consuming at once over 1, 2, … embedded servers on one machine: what several cost, against one.

The servers share the machine's processors, its disk and its memory with each other and with the processes that publish
and consume. So this does not show what shards gain, which is what further machines bring; it shows what they cost: how
much of the rate of one server is left when the same events go over several, and how much processor time they take, at
full speed or at the same rate offered to each.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from eventsql_orchestration.bench import workload
from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure
from eventsql_orchestration.bench.processes import Crew
from eventsql_orchestration.bench.session import RAW_BATCH, Report, Session
from eventsql_orchestration.bench.stream import Run, StreamSize, play
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import Consumer, Topic
from eventsql_orchestration.platform import EventSQL

TOPIC: Final = "eventsql_bench_stream"
CONSUMER: Final = "bench"

_PROCESSOR: Final = "processor"
_PROCESSOR_UNIT: Final = "CPU s per million events"


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
    figures: list[list[Figure]] = []
    environment: dict[str, object] = {}
    with _servers(home, size.shards) as servers:
        for number in range(1, size.shards + 1):
            measured, environment = _measure(servers.dsns[number - 1], servers.pids[:number], size, report)
            figures.append(measured)
    ratios = [
        Figure(f"{figure.name}_to_1", figure.value / one.value, f"of that of one server ({one.unit})")
        for measured in figures[1:]
        for figure, one in zip(measured, figures[0], strict=True)
    ]
    return [*chain.from_iterable(figures), *ratios], environment


@dataclass(frozen=True, slots=True)
class _Servers:
    """Servers by their process ids; for each number of them, the URLs of databases of its own on so many."""

    pids: list[int]
    dsns: list[list[str]]


@contextmanager
def _servers(home: Path, shards: int) -> Iterator[_Servers]:
    embedded = [EmbeddedPostgres(home / f"server-{number}") for number in range(1, shards + 1)]
    try:
        pids = [each.start().pid for each in embedded]
        dsns = [
            [server.create_database(f"of_{number}") for server in embedded[:number]] for number in range(1, shards + 1)
        ]
        yield _Servers(pids, dsns)
    finally:
        for each in embedded:
            each.destroy()
        shutil.rmtree(home, ignore_errors=True)


def _measure(
    dsns: Sequence[str], pids: Sequence[int], size: ShardsSize, report: Report
) -> tuple[list[Figure], dict[str, object]]:
    with EventSQL(*dsns, transfer=False) as platform, ExitStack() as stack:
        platform.open()
        sessions = [
            stack.enter_context(Session(shard, raw_events=size.raw_events, report=report)) for shard in platform.shards
        ]
        # What is offered at a rate is not compared with what a server takes at most.
        paced = size.stream.rate is not None
        raw = [] if paced else [_raw_copy(sessions, size.raw_events)]
        for session in sessions:
            session.settle()
        platform.registry.register_topic(Topic(TOPIC, size.stream.partitions))
        platform.registry.register_consumer(Consumer(TOPIC, CONSUMER, partitioned=True))
        of_shards = [0] * len(sessions)

        def consumed() -> int:
            of_shards[:] = [session.consumed(TOPIC, CONSUMER) for session in sessions]
            return sum(of_shards)

        with Crew(*dsns, schema=sessions[0].platform.database.schema) as crew:
            run = play(crew, size.stream, TOPIC, CONSUMER, consumed=consumed, report=report, servers=pids)
        if not paced:
            raw.append(_raw_copy(sessions, size.raw_events))
        environment = sessions[0].describe()
    return _figures(_name(size, len(dsns)), run, [count / run.seconds for count in of_shards], raw), environment


def _name(size: ShardsSize, shards: int) -> str:
    return f"{size.stream.name}_{shards}_shard{'s' if shards > 1 else ''}"


def _figures(name: str, run: Run, of_shards: Sequence[float], raw: Sequence[float]) -> list[Figure]:
    details = {**run.details(), "of_shards": of_shards}
    if raw:
        details |= {"raw_copy_before": raw[0], "raw_copy_after": raw[-1]}
    ratio = run.per_second / (sum(raw) / len(raw)) if raw else None
    figures = [Figure(name, run.per_second, EVENTS_PER_SECOND, ratio, details)]
    if run.processor:
        of_million = {kind: seconds / run.events * 1e6 for kind, seconds in run.processor.items()}
        figures.append(Figure(f"{name}_{_PROCESSOR}", sum(of_million.values()), _PROCESSOR_UNIT, details=of_million))
    return figures


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
