"""The whole table: every figure one after the other, at the sizes that the documentation states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from eventsql_orchestration.bench import (
    buffered,
    consume,
    idle,
    latency,
    publish,
    retention,
    stream,
    transfer,
)
from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.session import Session


@dataclass(frozen=True, slots=True)
class TableSize:
    """The sizes of all figures, and how many events the topic holds that loses its oldest half."""

    quick: bool = False
    retention_events: int = retention.FULL.events


FULL: Final = TableSize()

QUICK: Final = TableSize(quick=True, retention_events=retention.QUICK.events)


def measure(session: Session, size: TableSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    quick = size.quick
    streamed = stream.QUICK if quick else stream.FULL
    retained = replace(retention.QUICK if quick else retention.FULL, events=size.retention_events)
    return [
        *stream.measure(session, streamed),
        *stream.measure(session, replace(streamed, publishers=4)),
        *stream.measure(session, replace(streamed, straight=False, hold_xmin=True)),
        *transfer.measure(session, transfer.QUICK if quick else transfer.FULL),
        *publish.measure(session, publish.QUICK if quick else publish.FULL),
        *buffered.measure(session, buffered.QUICK if quick else buffered.FULL),
        *latency.measure(session, latency.QUICK if quick else latency.FULL),
        *idle.measure(session, idle.QUICK if quick else idle.FULL),
        *consume.measure(session, consume.QUICK if quick else consume.FULL),
        *retention.measure(session, retained),
    ]
