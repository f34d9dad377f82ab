"""The event store: appends and loads, beside the recorder of PyPI's `eventsourcing` where that is installed."""

from __future__ import annotations

import importlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Final

from eventsql_orchestration.bench.benchmark import Benchmark, option
from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.session import PREFIX, Session
from eventsql_orchestration.database.urls import connect_arguments
from eventsql_orchestration.store.aggregate import SnapshottingAggregate
from eventsql_orchestration.store.change import Change
from eventsql_orchestration.store.repository import Repository
from eventsql_orchestration.store.store import Store as EventStore

_TYPE: Final = f"{PREFIX}aggregate"
_TABLE: Final = f"{PREFIX}stored_events"
_CONNECTIONS: Final = (1, 4, 16)
_SIZES: Final = (1, 100)
_DATA: Final = {"price": 12_345, "driver": "driver-17", "at": "2026-01-05T06:00:00+00:00"}

_Append = Callable[[str, int, int], object]
"""Appends a number of changes to an aggregate, after a version."""


class _Counter(SnapshottingAggregate):
    """An aggregate with a small state."""

    aggregate_type = _TYPE
    snapshot_every = 1_000

    def __init__(self, aggregate_id: str) -> None:
        super().__init__(aggregate_id)
        self.total = 0

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:  # noqa: ARG002 - there is one kind
        self.total += data["price"]

    def state(self) -> Mapping[str, Any]:
        return {"total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]


class _Unsnapshotted(_Counter):
    """The same aggregate, whose snapshots are of another schema and so left out."""

    snapshot_schema = 2


@dataclass(frozen=True, kw_only=True)
class Store(Benchmark):
    """Append to the event store and load from it, from threads of this process.

    If the package `eventsourcing` with its PostgreSQL driver is installed beside this one, its ApplicationRecorder does
    the same in turn, in a table of its own, and each figure has a ratio to it. An aggregate of many changes is loaded
    with and without snapshots.
    """

    name = "store"
    summary = "Append to the event store, and load aggregates."
    hidden: ClassVar[frozenset[str]] = frozenset({"partitions", "raw_events", "storage"})

    appends: int = option(1_500, "Appends of one measurement; appends of 100 changes are a tenth", quick=40)
    loads: int = option(1_000, "Loads of 100 changes", quick=20)
    rounds: int = option(3, "Measurements of each figure; the median counts", quick=1)
    changes: int = option(10_000, "Changes of the aggregate with snapshots", quick=2_000, least=1_000)

    def measure(self, session: Session) -> list[Figure]:
        store = EventStore(session.platform.database)
        with _cleaned(session), _recorder(session) as theirs:
            figures = [
                figure
                for size in _SIZES
                for connections in _CONNECTIONS
                for figure in self._appending(session, store, theirs, size=size, connections=connections)
            ]
            figures += self._loading(session, store, theirs)
            figures += self._snapshots(session, store)
        return figures

    def _appending(
        self, session: Session, store: EventStore, theirs: Any, *, size: int, connections: int
    ) -> list[Figure]:
        count = max(connections, self.appends if size == 1 else self.appends // 10)
        name = f"append_{size}_{connections}_connections"

        def ours(aggregate_id: str, version: int, changes: int) -> object:
            new = [Change("priced", _DATA) for _ in range(changes)]
            return store.append(_TYPE, aggregate_id, new, expected_version=version)

        sides: dict[str, _Append] = {"eventsql": ours}
        if theirs is not None:
            sides["eventsourcing"] = _inserting(theirs)
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(self.rounds):
            session.report(name, number, self.rounds)
            for side, append in sides.items():
                seconds = _run(append, count, size=size, connections=connections)
                rates[side].append(count // connections * connections / seconds)
        return _figures(name, rates, "appends/s")

    def _loading(self, session: Session, store: EventStore, theirs: Any) -> list[Figure]:
        loaded = str(uuid.uuid4())
        store.append(_TYPE, loaded, [Change("priced", _DATA) for _ in range(100)], expected_version=0)
        sides: dict[str, Callable[[], object]] = {"eventsql": lambda: store.load(_TYPE, loaded)}
        decoded: Callable[[], object] = lambda: [change.data for change in store.load(_TYPE, loaded)]  # noqa: E731
        sides["eventsql_decoded"] = decoded
        if theirs is not None:
            _inserting(theirs)(loaded, 0, 100)
            sides["eventsourcing"] = lambda: theirs.select_events(uuid.UUID(loaded))
            sides["eventsourcing_decoded"] = lambda: [
                json.loads(event.state) for event in theirs.select_events(uuid.UUID(loaded))
            ]
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(self.rounds):
            session.report("loading 100 changes", number, self.rounds)
            for side, load in sides.items():
                started = time.perf_counter()
                for _ in range(self.loads):
                    load()
                rates[side].append(self.loads / (time.perf_counter() - started))
        plain = {side: found for side, found in rates.items() if not side.endswith("_decoded")}
        with_data = {side.removesuffix("_decoded"): found for side, found in rates.items() if side not in plain}
        return [*_figures("load_100", plain, "loads/s"), *_figures("load_100_decoded", with_data, "loads/s")]

    def _snapshots(self, session: Session, store: EventStore) -> list[Figure]:
        kept = Repository(store, _Counter, session.platform.publisher)
        replayed = Repository(store, _Unsnapshotted, session.platform.publisher)
        aggregate = _Counter(str(uuid.uuid4()))
        while aggregate.version < self.changes:
            for _ in range(min(500, self.changes - aggregate.version)):
                aggregate.record("priced", _DATA)
            kept.save(aggregate)

        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(self.rounds):
            for side, repository, loads in (("with", kept, 20), ("without", replayed, 2)):
                started = time.perf_counter()
                for _ in range(loads):
                    repository.load(aggregate.id)
                seconds[side].append((time.perf_counter() - started) / loads)
        ratio = median(without / with_ for with_, without in zip(seconds["with"], seconds["without"], strict=True))
        name = f"load_{self.changes}"
        return [
            Figure(f"{name}_with_snapshots", median(seconds["with"]) * 1_000, "ms"),
            Figure(f"{name}_without_snapshots", median(seconds["without"]) * 1_000, "ms"),
            Figure(f"{name}_snapshots_ratio", ratio, "times"),
        ]


def _run(append: _Append, count: int, *, size: int, connections: int) -> float:
    """Seconds of appends from so many threads, each to aggregates of its own."""
    each = count // connections
    ready = threading.Barrier(connections + 1)

    def work() -> None:
        append(str(uuid.uuid4()), 0, size)  # connects
        ready.wait()
        aggregate_id = ""
        for number in range(each):
            # Ten appends to each aggregate.
            if number % 10 == 0:
                aggregate_id = str(uuid.uuid4())
            append(aggregate_id, number % 10 * size, size)

    with ThreadPoolExecutor(connections) as threads:
        working = [threads.submit(work) for _ in range(connections)]
        ready.wait()
        started = time.perf_counter()
        for future in working:
            future.result()
        return time.perf_counter() - started


def _figures(name: str, rates: Mapping[str, list[float]], unit: str) -> list[Figure]:
    ours = rates["eventsql"]
    figures = [Figure(name, median(ours), unit)]
    if (theirs := rates.get("eventsourcing")) is not None:
        ratio = median(mine / other for mine, other in zip(ours, theirs, strict=True))
        figures += [
            Figure(f"{name}_eventsourcing", median(theirs), unit),
            Figure(f"{name}_ratio", ratio, "of eventsourcing"),
        ]
    return figures


@contextmanager
def _cleaned(session: Session) -> Iterator[None]:
    """Delete what the benchmark has stored."""

    def delete() -> None:
        for statement in ("delete_changes", "delete_snapshots", "delete_aggregates"):
            session.connection.execute(session.queries(statement), {"type": _TYPE})

    delete()
    try:
        yield
    finally:
        delete()


@contextmanager
def _recorder(session: Session) -> Iterator[Any]:
    """The recorder of `eventsourcing`, with a table of its own; None if the package is not installed."""
    try:
        postgres: Any = importlib.import_module("eventsourcing.postgres")
    except ImportError:
        yield None
        return
    database = session.platform.database
    arguments = connect_arguments(database.url)
    connection = session.connection.info
    with postgres.PostgresDatastore(
        connection.dbname, connection.host, connection.port, connection.user, arguments.get("password") or "",
        pool_size=max(_CONNECTIONS), schema=database.schema,
    ) as datastore:  # fmt: skip
        recorder = postgres.PostgresApplicationRecorder(datastore, events_table_name=_TABLE)
        recorder.create_table()
        try:
            yield recorder
        finally:
            session.connection.execute(session.queries("drop_raw", table=_TABLE))


def _inserting(recorder: Any) -> _Append:
    stored_event: Any = importlib.import_module("eventsourcing.persistence").StoredEvent

    def insert(aggregate_id: str, version: int, changes: int) -> object:
        originator = uuid.UUID(aggregate_id)
        return recorder.insert_events(
            [
                stored_event(originator, version + number, "bench:Priced", json.dumps(_DATA).encode())
                for number in range(1, changes + 1)
            ]
        )

    return insert
