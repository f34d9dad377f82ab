"""With any arguments, a public method succeeds, or raises an error of the package before anything is written.

Each method and argument is found by looking at the package, so a new one is tested as it is. `EVENTSQL_FUZZ_EXAMPLES`
says how many values each argument is given; the values are the same in each run.
"""

from __future__ import annotations

import asyncio
import collections.abc
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar

import psycopg
import pytest
import sqlalchemy

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Retention, Shard, Topic
from eventsql_orchestration.client.consumers import ClusterConsumption
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.consumers import Consumers
from eventsql_orchestration.consuming.dead_letters import DeadLetterCause, DeadLetters
from eventsql_orchestration.consuming.lag import LagReader
from eventsql_orchestration.consuming.running import Running
from eventsql_orchestration.consuming.snapshot_reader import SnapshotReader
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import EventSQLError, ValidationError
from eventsql_orchestration.model import OffsetRange
from eventsql_orchestration.publishing.publisher import Publisher, TransactionPublisher
from eventsql_orchestration.queue import AsyncQueue, Message, NewMessage, Queue
from eventsql_orchestration.store import (
    Aggregate,
    Change,
    Events,
    EventType,
    Projection,
    Projections,
    RecordedChange,
    Repository,
    SnapshottingAggregate,
    Store,
    StoreCheckpoint,
    Subscription,
    SubscriptionOptions,
)
from eventsql_orchestration.topics.positions import Earliest
from eventsql_orchestration.topics.reader import Reader
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.views import LogEntry, LogLine, Logs, Rollup, RollupEntry, Timeline, ViewFeed, Views
from tests.boundary import face
from tests.boundary.face import Argument, Method
from tests.conftest import Administrator

EXAMPLES = int(os.environ.get("EVENTSQL_FUZZ_EXAMPLES", "3"))

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)

RESULTS = {
    "Acknowledgement", "AsyncPublisher", "BufferedPublisher", "Claim", "ConsumerLag", "ConsumerState", "DeadLetter",
    "DeadLetterCause", "Event", "LagCause", "Lease",
    "ArchivedMessage", "Capture", "ErasedMessages", "LogFollower", "LogLine", "Measure", "Message", "PeekedMessage",
    "Placement", "QueueDefinition", "QueueDepth", "QueueStatistics", "QueueWorkers",
    "RecordedChange", "Retained", "RollupBucket", "Snapshot", "Sorted", "TimelineEntry",
    "AggregateInfo", "Archived", "Comparison", "Distinct", "Quantiles",
    "Filling", "Rebuild", "StoreDeadLetter", "Subscription", "SubscriptionLag",
    "ViewComparison", "ViewFilling",
}  # fmt: skip
"""Classes whose objects only the platform makes; making one checks nothing."""

EXEMPT = {
    "Database.execute": "only the platform calls it, for each event",
    "Projection.apply": "the user's",
    "Projection.create": "the user's",
    "GlobalOrder.read": "only the store calls it",
    "ViewFeed.apply": "the user's",
    "Projections.follow": "the repository calls it, and the subscription",
    "Database.fetch": "only the platform calls it",
    "Database.fetch_values": "only the platform calls it",
    "Database.meaning": "takes the errors of the driver alone",
    "Acknowledgement.finish": "only the publisher calls it, for each event",
    "Aggregate.apply": "the code of users",
    "EventSQL.reconsider": "only queues over several shards call it",
    "Claim.of_row": "only the platform calls it, with a row of its own",
    "DeadLetterCause.of": "only the platform calls it, with the error of a handler",
}

WORDS: Mapping[str, str] = {
    "by": "dimension|by",
    "where": "dimension|where",
    "dsn": "database URL",
    "more": "database URL",
    "table": "name of a table or column",
    "columns": "name of a table or column",
    "transaction": "name of a table or column",
    "position": "name of a table or column",
    "conditions": "filter",
    "seconds": "retention",
    "times_in": "time zone",
    "aggregate_type": "aggregate",
    "aggregate_id": "aggregate",
    "text": "checkpoint",
}
"""What an error calls an argument, where that is not its name."""


TABLE = """
CREATE TABLE eventsql.change (
    eql_id bigint GENERATED ALWAYS AS IDENTITY, eql_transaction xid8 NOT NULL DEFAULT pg_current_xact_id()
)
"""


@dataclass(init=False, eq=False)
class Order(SnapshottingAggregate):
    aggregate_type: ClassVar[str] = "order"

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        pass

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


class Totals(Projection):
    name: ClassVar[str] = "totals"
    tables: ClassVar[Sequence[str]] = ("totals",)

    def create(self, connection: Connection) -> None:
        connection.execute("CREATE TABLE totals (id text)")

    def apply(self, change: RecordedChange, connection: Connection) -> None:
        pass


class Parcels(ViewFeed):
    view: ClassVar[Timeline] = Timeline("parcels")
    topic: ClassVar[str] = "orders"
    consumer: ClassVar[str] = "audit"

    def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
        pass


class Face:
    """A platform with a topic, a consumer and a few events, and valid values for arguments of every type."""

    def __init__(self, *dsns: str) -> None:
        self.dsns = dsns
        self.platform = EventSQL(*dsns, transfer=False)
        self.one = self.platform.shards[0]
        self.stack = ExitStack()
        self.spy = [psycopg.connect(dsn, autocommit=True) for dsn in dsns]
        self.seen: tuple[list[object], list[object]] = ([], [])
        self.spy[0].execute(TABLE)
        self.prepare()
        event = self.one.reader.read("orders", limit=1)[0]
        state = self.one.registry.consumer("orders", "audit")[0]
        claim = Claim(1, "audit", OffsetRange("orders", -1, 0, 1), 1, 1, "test", 0)
        self.pool: dict[Any, Callable[[], object]] = {
            "name": lambda: "orders",
            "topic": lambda: "orders",
            "storage": lambda: "rows",
            "consumer": lambda: "audit",
            "dsn": lambda: dsns[0],
            "more": lambda: dsns[0],
            "partitions": lambda: 1,
            "deadline": lambda: 0.0,
            "times_in": lambda: "UTC",
            "columns": lambda: ["eql_id"],
            "text": lambda: "1:1",
            "keys": lambda: ["ann"],
            "changes": lambda: [Change("placed", {})],
            str: lambda: "orders",
            int: lambda: 1,
            bool: lambda: True,
            float: lambda: 0.1,
            bytes: lambda: b"{}",
            object: lambda: None,
            Any: lambda: None,
            datetime: lambda: NOON,
            timedelta: lambda: timedelta(1),
            Exception: lambda: ValueError("broken"),
            BaseException: lambda: ValueError("broken"),
            threading.Event: _set,
            Topic: lambda: Topic("orders", 1),
            Consumer: lambda: Consumer("orders", "audit"),
            Publication: lambda: Publication("orders", b"{}"),
            Retention: Retention,
            Event: lambda: event,
            ConsumerState: lambda: state,
            Claim: lambda: claim,
            Earliest: Earliest,
            DeadLetterCause: lambda: DeadLetterCause.of("audit", ValueError("broken"), 1),
            OffsetRange: lambda: OffsetRange("orders", -1, 0, 1),
            Message: lambda: self.queue.receive()[0] if self.queue.send(b"{}") else None,
            Queue: lambda: self.queue,
            Change: lambda: Change("placed", {}),
            EventType: lambda: EventType("placed", Order),
            RecordedChange: self.recorded,
            StoreCheckpoint: self.store.newest,
            SubscriptionOptions: SubscriptionOptions,
            Projection: Totals,
            Projections: lambda: Projections(self.store, [Totals()]),
            Aggregate: lambda: Order("7"),
            Timeline: lambda: Timeline("parcels"),
            Rollup: lambda: Rollup("moves", timedelta(minutes=1)),
            Logs: lambda: Logs("tracking"),
            type: lambda: Order,
            Database: lambda: self.one.database,
            Shard: lambda: self.one,
            Registry: lambda: self.one.registry,
            Publisher: lambda: self.one.publisher,
            TransactionPublisher: lambda: self.one.publisher,
            Reader: lambda: self.one.reader,
            DeadLetters: lambda: self.one.dead_letters,
            Store: lambda: Store(self.one.database),
            Consumers: lambda: self.one.consumers,
            Running: self.consumption,
            psycopg.Connection: self.connection,
            NewMessage: lambda: NewMessage(b"{}"),
            Views: lambda: self.views,
            LogLine: lambda: LogLine((bytes(8), b"7", b"info", b"moved", b"\x01{}", bytes(8))),
            ViewFeed: Parcels,
            collections.abc.Iterable[tuple[str, Mapping[str, Any], datetime]]: lambda: [("7", {}, NOON)],
            collections.abc.Iterable[RollupEntry]: lambda: [RollupEntry(NOON)],
            collections.abc.Iterable[LogEntry]: lambda: [LogEntry("7", "moved", NOON)],
            "table": lambda: "public.parcel",
            "compression": lambda: "lz4",
            collections.abc.Callable: lambda: lambda *_: None,
            collections.abc.Sequence: lambda: ["orders"],
            collections.abc.Iterable: list,
            collections.abc.Mapping: dict,
        }

    @property
    def queue(self) -> Queue:
        return Queue(self.one.database, "commands")

    @property
    def views(self) -> Views:
        return Views(self.one.database)

    @property
    def store(self) -> Store:
        return Store(self.one.database)

    def recorded(self) -> RecordedChange:
        self.store.append("order", "7", [Change("placed", {})], expected_version="any")
        return self.store.load("order", "7")[0]

    def connection(self) -> psycopg.Connection[Any]:
        return self.stack.enter_context(psycopg.connect(self.dsns[0]))

    def prepare(self) -> None:
        """Undo the changes of a call that succeeded."""
        self.stack.close()
        self.platform.open()
        self.platform.publisher.configure_partitioner(_first)
        self.platform.dead_letters.configure(None)
        for known in self.platform.registry.topics():
            if known.name == "orders" and known.partitions != 1:
                self.platform.registry.unregister_topic("orders", force=True)
        for topic in (Topic("orders", 1), Topic("orders_dlt")):
            self.platform.registry.register_topic(topic)
        self.platform.registry.register_consumer(Consumer("orders", "audit"))
        for shard in self.platform.shards:
            if not shard.reader.read("orders", limit=1):
                shard.publisher.publish_all([Publication("orders", b"{}")], placed=_anywhere())
        self.platform.transfer.run_once()
        self.views.declare(Timeline("parcels"), Rollup("moves", timedelta(minutes=1)), Logs("tracking"))

    def services(self) -> dict[type, Callable[[], object]]:
        """How to get an object of each class that has methods; new objects, because a call may close one."""
        known = {type(value): (lambda value=value: value) for value in face.reachable(self.platform).values()}
        platform, database = self.platform, self.one.database
        made: list[Callable[[], object]] = [
            lambda: platform,
            lambda: self.stack.enter_context(platform.buffered_publisher()),
            platform.async_publisher,
            self.consumption,
            self.acknowledged,
        ]
        if len(self.dsns) == 1:
            made += [
                lambda: self.queue,
                lambda: SnapshotReader(database, "change", ["eql_id"]),
                lambda: LagReader(database, platform.shards[0].registry),
                lambda: Store(database),
                lambda: Repository(Store(database), Order, platform.publisher),
                lambda: Order("7"),
                lambda: Projections(self.store, [Totals()]),
                lambda: Events([EventType("placed", Order)]),
                self.subscription,
                lambda: AsyncQueue(self.queue),
                lambda: self.views,
                lambda: self.views.timeline(Timeline("parcels")),
                lambda: self.views.rollup(Rollup("moves", timedelta(minutes=1))),
                lambda: self.views.logs(Logs("tracking")),
            ]
        return {**known, **{type(make()): make for make in made}}

    def subscription(self) -> Subscription:
        return self.store.subscribe("mailer", lambda _change, _connection: None, background=False)

    def consumption(self) -> ClusterConsumption:
        started = self.platform.consumers.start("orders", "audit", lambda _event, _connection: None)
        started.stop()
        return started

    def acknowledged(self) -> object:
        acknowledgement = self.stack.enter_context(self.platform.buffered_publisher()).publish(
            Publication("orders", b"{}")
        )
        acknowledgement.result()
        return acknowledgement

    def digest(self) -> list[object]:
        """What all tables hold; looked at anew where any transaction has written."""
        if (newest := self.newest()) != self.seen[0]:
            self.seen = newest, [face.digest(connection) for connection in self.spy]
        return self.seen[1]

    def newest(self) -> list[object]:
        """What changes when any transaction writes."""
        return [
            connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
            for connection in self.spy
        ]

    def close(self) -> None:
        self.stack.close()
        self.platform.close()
        for connection in self.spy:
            connection.close()


def _first(_publication: Publication, _partitions: int) -> int:
    return 0


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _anywhere() -> Any:
    from eventsql_orchestration.sharding import ANYWHERE

    return ANYWHERE


@contextmanager
def opened(administrator: Administrator, shards: int) -> Iterator[Face]:
    with ExitStack() as stack:
        dsns = [stack.enter_context(administrator.copied()) for _ in range(shards)]
        made = Face(*dsns)
        stack.callback(made.close)
        yield made


@pytest.fixture(scope="module")
def single(administrator: Administrator) -> Iterator[Face]:
    with opened(administrator, 1) as made:
        yield made


@pytest.fixture(scope="module")
def sharded(administrator: Administrator) -> Iterator[Face]:
    with opened(administrator, 2) as made:
        yield made


def call(function: Callable[..., Any], method: Method, given: Mapping[str, object]) -> None:
    """Call a method and use its result, which may raise errors."""
    positional, named = [], {}
    for argument in method.arguments:
        if argument.name in given and argument.kind is inspect.Parameter.VAR_POSITIONAL:
            positional.append(given[argument.name])
        elif argument.name in given:
            named[argument.name] = given[argument.name]
    if positional:
        # What follows by position comes after what precedes it.
        positional = [
            named.pop(each.name)
            for each in method.arguments
            if each.kind.name == "POSITIONAL_OR_KEYWORD" and each.name in named
        ] + positional
    if inspect.iscoroutinefunction(function):
        asyncio.run(asyncio.wait_for(function(*positional, **named), 30))
        return
    result = function(*positional, **named)
    if isinstance(result, ClusterConsumption):
        result.stop()
    elif isinstance(result, AbstractContextManager) and not isinstance(result, sqlalchemy.Connection):
        with result:
            pass
    elif inspect.isgenerator(result):
        next(result, None)


def _method_of(make: Callable[[], object], name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(make(), name)
    return found


def _itself(owner: type) -> Callable[..., Any]:
    return owner


def names(error: ValidationError, argument: Argument) -> bool:
    said = error.message.lower().replace("_", " ")
    words = {argument.name, *WORDS.get(argument.name, argument.name).split("|")}
    return any(word.lower().replace("_", " ").removesuffix("s") in said for word in words)


def faults(made: Face, method: Method, get: Callable[[], Callable[..., Any]], examples: int) -> Iterator[str]:
    """The faults of a method: foreign errors, errors after something was written, wrong values that it accepts."""
    for argument in method.arguments:
        for make in face.drawn(method, argument, examples):
            given = {each.name: face.valid(each, made.pool) for each in method.arguments if each.required}
            given[argument.name] = value = make()
            function = get()
            before = made.digest()
            shown = f"{method}({argument.name}={type(value).__name__} {ascii_of(value)})"
            try:
                call(function, method, given)
            except EventSQLError as error:
                if made.digest() != before:
                    yield f"{shown} has written and raised {error!r}"
                allowed = method.arguments if face.conforms(value, argument.hint) else (argument,)
                if isinstance(error, ValidationError) and not any(names(error, each) for each in allowed):
                    yield f"{shown} does not name the argument: {error}"
            except Exception as error:  # noqa: BLE001 - that is the fault
                if callable(value) and face.conforms(value, argument.hint):
                    # A function of the caller's may raise what it likes.
                    continue
                yield f"{shown} raises {type(error).__module__}.{type(error).__name__}: {error}"[:400]
            else:
                if not face.conforms(value, argument.hint):
                    yield f"{shown} is taken"
                made.prepare()
            made.stack.close()


def ascii_of(value: object) -> str:
    try:
        return ascii(value)[:60]
    except Exception:  # noqa: BLE001 - some have no text
        return "…"


def of_services(made: Face, examples: int) -> list[str]:
    found: list[str] = []
    seen: set[object] = set()
    for owner, make in made.services().items():
        for method in face.methods(owner):
            function = inspect.getattr_static(owner, method.name)
            if function not in seen and str(method) not in EXEMPT:
                seen.add(function)
                found += faults(made, method, partial(_method_of, make, method.name), examples)
    return found


def test_no_method_of_a_platform_on_one_database_takes_what_it_cannot_use(single: Face) -> None:
    found = of_services(single, EXAMPLES)
    assert not found, "\n".join(found)


def test_no_method_of_a_platform_on_shards_takes_what_it_cannot_use(sharded: Face) -> None:
    found = of_services(sharded, max(1, EXAMPLES // 2))
    assert not found, "\n".join(found)


def test_no_class_that_users_import_takes_what_it_cannot_use(single: Face) -> None:
    found: list[str] = []
    for name, owner in face.exported().items():
        if name in RESULTS or inspect.isabstract(owner):
            continue
        found += faults(single, face.constructor(owner), partial(_itself, owner), EXAMPLES)
    assert not found, "\n".join(found)


def test_no_method_of_a_value_takes_what_it_cannot_use(single: Face) -> None:
    found: list[str] = []
    for owner in face.exported().values():
        for method in face.methods(owner):
            if owner in single.pool and str(method) not in EXEMPT:
                found += faults(single, method, partial(_method_of, single.pool[owner], method.name), EXAMPLES)
    assert not found, "\n".join(found)
