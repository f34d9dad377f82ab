"""The event store: appends and loads, beside the recorder of PyPI's `eventsourcing` where that is installed."""

from __future__ import annotations

import importlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Final, Protocol

from eventsql_orchestration.bench.benchmark import Benchmark, option
from eventsql_orchestration.bench.figure import Figure, ratio
from eventsql_orchestration.bench.roles import at_once
from eventsql_orchestration.bench.session import PREFIX, Session
from eventsql_orchestration.database import Database
from eventsql_orchestration.store.aggregate import SnapshottingAggregate
from eventsql_orchestration.store.change import Change
from eventsql_orchestration.store.repository import Repository
from eventsql_orchestration.store.store import Store as EventStore

_TYPE: Final = f"{PREFIX}aggregate"
_CONNECTIONS: Final = (1, 4, 16)
_SIZES: Final = (1, 100)
_DATA: Final = {"price": 12_345, "driver": "driver-17", "at": "2026-01-05T06:00:00+00:00"}


class _Side(Protocol):
    """An event store. It appends a number of changes to an aggregate, after a version, and loads them."""

    def append(self, aggregate_id: str, version: int, changes: int) -> object: ...

    def load(self, aggregate_id: str, *, decode: bool) -> object: ...


class _Own:
    def __init__(self, store: EventStore) -> None:
        self._store = store

    def append(self, aggregate_id: str, version: int, changes: int) -> object:
        new = [Change("priced", _DATA) for _ in range(changes)]
        return self._store.append(_TYPE, aggregate_id, new, expected_version=version)

    def load(self, aggregate_id: str, *, decode: bool) -> object:
        found = self._store.load(_TYPE, aggregate_id)
        return [change.data for change in found] if decode else found


class _Eventsourcing:
    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._event: Any = importlib.import_module("eventsourcing.persistence").StoredEvent

    def append(self, aggregate_id: str, version: int, changes: int) -> object:
        originator = uuid.UUID(aggregate_id)
        numbers = range(version + 1, version + changes + 1)
        new = [self._event(originator, number, "bench:Priced", json.dumps(_DATA).encode()) for number in numbers]
        return self._recorder.insert_events(new)

    def load(self, aggregate_id: str, *, decode: bool) -> object:
        found = self._recorder.select_events(uuid.UUID(aggregate_id))
        return [json.loads(event.state) for event in found] if decode else found


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

    appends: int = option(1_500, "Appends of one measurement; appends of 100 changes are a tenth", quick=40)
    loads: int = option(1_000, "Loads of 100 changes", quick=20)
    rounds: int = option(3, "Measurements of each figure; the median counts", quick=1)
    changes: int = option(10_000, "Changes of the aggregate with snapshots", quick=2_000, least=1_000)

    def measure(self, session: Session) -> list[Figure]:
        theirs = session.platform.database
        with (
            # Each side keeps as many connections as there are threads.
            Database(theirs.dsn, schema=theirs.schema, pool_size=max(_CONNECTIONS)) as database,
            session.removing(partial(_delete, session), leftovers=True),
            _recorder(session) as recorder,
        ):
            sides: list[_Side] = [_Own(EventStore(database))]
            if recorder is not None:
                sides.append(_Eventsourcing(recorder))
            return [
                *(
                    figure
                    for size, connections in product(_SIZES, _CONNECTIONS)
                    for figure in self._appending(session, sides, size=size, connections=connections)
                ),
                *self._loading(session, sides),
                *self._snapshots(session, EventStore(database)),
            ]

    def _appending(self, session: Session, sides: Sequence[_Side], *, size: int, connections: int) -> list[Figure]:
        each = max(connections, self.appends if size == 1 else self.appends // 10) // connections

        def appending(side: _Side) -> float:
            # Connect first.
            at_once(connections, lambda _: side.append(str(uuid.uuid4()), 0, size))
            return connections * each / at_once(connections, lambda _: _append(side, each, size))

        return self._compared(session, f"append_{size}_{connections}_connections", sides, appending, "appends/s")

    def _loading(self, session: Session, sides: Sequence[_Side]) -> list[Figure]:
        loaded = str(uuid.uuid4())
        for side in sides:
            side.append(loaded, 0, 100)

        def loading(side: _Side, *, decode: bool) -> float:
            side.load(loaded, decode=decode)
            started = time.perf_counter()
            for _ in range(self.loads):
                side.load(loaded, decode=decode)
            return self.loads / (time.perf_counter() - started)

        plain, decoded = partial(loading, decode=False), partial(loading, decode=True)
        return [
            *self._compared(session, "load_100", sides, plain, "loads/s"),
            *self._compared(session, "load_100_decoded", sides, decoded, "loads/s"),
        ]

    def _compared(
        self, session: Session, name: str, sides: Sequence[_Side], measured: Callable[[_Side], float], unit: str
    ) -> list[Figure]:
        found = session.in_turns(name, self.rounds, {side: partial(measured, side) for side in sides})
        own, *others = found.values()
        return [
            Figure(name, median(own), unit),
            *(Figure(f"{name}_eventsourcing", median(theirs), unit) for theirs in others),
            *(ratio(f"{name}_ratio", own, theirs, "of eventsourcing") for theirs in others),
        ]

    def _snapshots(self, session: Session, store: EventStore) -> list[Figure]:
        kept = Repository(store, _Counter, session.platform.publisher)
        replayed = Repository(store, _Unsnapshotted, session.platform.publisher)
        aggregate = _Counter(str(uuid.uuid4()))
        while aggregate.version < self.changes:
            for _ in range(min(500, self.changes - aggregate.version)):
                aggregate.record("priced", _DATA)
            kept.save(aggregate)

        def loading(repository: Repository[Any], loads: int) -> float:
            started = time.perf_counter()
            for _ in range(loads):
                repository.load(aggregate.id)
            return (time.perf_counter() - started) / loads

        name = f"load_{self.changes}"
        sides = {"with": partial(loading, kept, 20), "without": partial(loading, replayed, 2)}
        seconds = session.in_turns(name, self.rounds, sides)
        return [
            *(Figure(f"{name}_{side}_snapshots", median(found) * 1_000, "ms") for side, found in seconds.items()),
            ratio(f"{name}_snapshots_ratio", seconds["without"], seconds["with"], "times"),
        ]


def _append(side: _Side, appends: int, size: int) -> None:
    """Append to aggregates of one thread, ten times to each."""
    aggregate_id = ""
    for number in range(appends):
        if number % 10 == 0:
            aggregate_id = str(uuid.uuid4())
        side.append(aggregate_id, number % 10 * size, size)


def _delete(session: Session) -> None:
    for statement in ("delete_changes", "delete_snapshots", "delete_aggregates"):
        session.connection.execute(session.queries(statement), {"type": _TYPE})


@contextmanager
def _recorder(session: Session) -> Iterator[Any]:
    """The recorder of `eventsourcing`, with a table of its own; None if the package is not installed."""
    try:
        postgres: Any = importlib.import_module("eventsourcing.postgres")
    except ImportError:
        yield None
        return
    connection = session.connection.info
    with (
        session.table() as table,
        postgres.PostgresDatastore(
            connection.dbname, connection.host, connection.port, connection.user, connection.password,
            pool_size=max(_CONNECTIONS), schema=session.schema,
        ) as datastore,
    ):  # fmt: skip
        recorder = postgres.PostgresApplicationRecorder(datastore, events_table_name=table)
        recorder.create_table()
        yield recorder
