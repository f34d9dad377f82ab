"""The state that one shard's database stores: the shard's name, the generations of shards, fences and the barrier.

A generation is a set of names; each added shard begins a new generation. Each older shard then notes the end of each
topic's log, its *fence*: the keys that move to the new shard have no event after the fence. The new shard *holds back*
each consumer until the consumer has consumed all events before the fences of the other shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.database import Connection, Database, Queries, driver_connection
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one, query_all
from eventsql_orchestration.database.sessions import let_last
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseUnavailableError, ShardSetError
from eventsql_orchestration.maintenance.repartitioning import (
    RETRY_SECONDS,
    IdsChangedError,
    Step,
    TooManyBufferedError,
    drain,
)
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.publishing.two_phase_participant import OpenPartsError
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.sharding import HELD, ShardSet
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.topics.catalog import lock_registry
from eventsql_orchestration.topics.layouts import bounds_at, layouts
from eventsql_orchestration.validation import advised

_BARRIER: Final = 0x6576_656E_7473_6867
"""The advisory lock of a process that holds consumers of a shard back, or checks whether they may go on."""

_SINCE: Final = "0004"
"""The first revision of the schema that has shards."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """The stored state of a database.

    `identity` is unique to the database. `generations` are the names of the shards in each generation, the oldest
    first. `name` is None if the database is not a shard. `active` says whether it takes events.
    """

    identity: str
    topics: int
    set: str | None = None
    name: str | None = None
    active: bool = False
    generations: tuple[frozenset[str], ...] = ()

    @property
    def generation(self) -> int:
        return len(self.generations)

    @property
    def first(self) -> str | None:
        """The first shard by name in the first generation, whatever is added later; None if this is not a shard.

        It stores the records that a set of shards keeps once.
        """
        return min(self.generations[0]) if self.generations else None

    @property
    def shards(self) -> ShardSet | None:
        """The newest generation; None if this is not a shard."""
        if self.set is None or self.name is None:
            return None
        return ShardSet(self.set, self.name, self.generation, tuple(sorted(self.generations[-1])), self.active)

    def before(self, name: str) -> tuple[int, frozenset[str]] | None:
        """The generation with which the shard `name` joined, and the older shards.

        None for a shard of the first generation.
        """
        for number, names in enumerate(self.generations[1:], start=2):
            if name in names and name not in self.generations[number - 2]:
                return number, self.generations[number - 2]
        return None


class ShardStore:
    """Reads and writes the state that one database stores about shards."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("shards", database.schema)
        self._log = Queries("log", database.schema)
        self._on_log = LogQueries("consumers", database.schema)

    # Identity

    def state(self) -> ShardState:
        """The stored state of the database; nothing is written, not even missing tables."""
        with self._database.pooled() as connection:
            return self._state(connection)

    def _state(self, connection: Connection) -> ShardState:
        revision = self._database.revision_on(connection)
        (identity,) = fetch_one(connection, self._queries("identity"))
        if revision is None and fetch_one(connection, self._queries("has_topics"))[0] is None:
            return ShardState(identity, 0)
        if revision is None or revision < _SINCE:
            return ShardState(identity, *fetch_one(connection, self._queries("count_topics")))
        own, generations, topics = fetch_one(connection, self._queries("state"))
        if own is None:
            return ShardState(identity, topics)
        named, name, active = own
        return ShardState(identity, topics, named, name, active == "true", tuple(map(frozenset, generations)))

    def name(self, connection: Connection) -> str | None:
        """The name of the shard that a caller's connection leads to; None if it leads to no shard."""
        row = fetch_first(connection, self._queries("name"))
        return None if row is None else str(row[0])

    @contextmanager
    def bootstrap(self) -> Iterator[tuple[ShardState, Connection]]:
        """A transaction, for `become`, in which no other process makes this database a shard; gives its state too."""
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            state = self._state(driver)
            if state.name is None:
                self.refuse_captures(driver)
            yield state, driver

    def refuse_captures(self, connection: Connection) -> None:
        """Raise `ShardSetError` if a table is captured here: its trigger cannot send a key to another shard."""
        captured = fetch_first(connection, Queries("capture", self._database.schema)("any_capture"))
        if captured is not None:
            table, topic = captured
            drop = advised("capture drop --execute", table, topic)
            raise ShardSetError(
                f"{self._database} cannot become a shard: its table {table} is captured to topic {topic!r}, "
                f"and keys may belong to another shard. `{drop}` ends that"
            )

    def become(
        self, connection: Connection, name: str, set_id: str, generations: Sequence[frozenset[str]], *, active: bool
    ) -> None:
        """Give the database this name among the shards of these generations."""
        connection.execute(self._queries("become"), {"name": name, "set": set_id, "active": active})
        for number, names in enumerate(generations, start=1):
            connection.execute(self._queries("add_generation"), {"generation": number, "shards": sorted(names)})

    def activate(self) -> None:
        """Let this shard take events. For a new shard, this row decides the addition."""
        with self._database.connection() as connection:
            connection.execute(self._queries("activate"))

    # The fence

    def fence(
        self, generation: int, names: Sequence[str], transfer: Transfer,
        *, finish: Step = lambda: None, timeout: float = RETRY_SECONDS,
    ) -> bool:  # fmt: skip
        """Begin a generation here: no publisher writes by the previous generation any more. False if it had begun.

        `finish` publishes here the open parts of publications over several shards. Their events come before the fence;
        otherwise there is no fence. Publishers and transfers go on, and wait for at most half a second. This waits up
        to `timeout` seconds for transactions of publishers and for open parts. If they do not end in time, it changes
        nothing and raises `DatabaseBusyError`. Raises `ShardSetError` if another generation has begun.
        """
        retry = Backoff(timeout)
        while True:
            # Do as much as possible before publishers have to wait.
            finish()
            transfer.run_once()
            try:
                return self._fence(generation, names)
            except (DatabaseBusyError, TooManyBufferedError) as error:
                if not retry.lasts():
                    why = "publishers' transactions do not end, or too many events come"
                    if isinstance(error, (OpenPartsError, IdsChangedError)):
                        why = str(error)
                    raise DatabaseBusyError(f"{self._database} was not changed: {why}; run it again") from error

    def _fence(self, generation: int, names: Sequence[str]) -> bool:
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            state = self._state(driver)
            if state.generation >= generation:
                if state.generations[generation - 1] != frozenset(names):
                    raise ShardSetError(
                        f"an addition of other shards to {self._database} has begun "
                        f"({', '.join(sorted(state.generations[-1]))}): finish that addition first"
                    )
                return False
            topics = fetch_all(driver, self._queries("topics"))
            for topic, _ in topics:
                driver.execute(self._log("await_topic"), {"topic": topic})
            drain(driver, self._database.schema, topics)
            for topic, _ in topics:
                fence = segments.newest_id(driver, self._database.schema, topic)
                driver.execute(self._queries("add_fence"), {"generation": generation, "topic": topic, "fence": fence})
            driver.execute(self._queries("add_generation"), {"generation": generation, "shards": sorted(names)})
            driver.execute(self._queries("redefine_all"))
        return True

    def consumed_before(self, generation: int, topic: str, consumer: str) -> bool:
        """Whether a consumer has consumed all events before a generation here; True if the consumer does not exist."""
        own = {"generation": generation, "topic": topic, "consumer": consumer}
        with self._database.connection() as connection:
            return not fetch_one(connection, self._on_log.on(connection, "before_fence", topic), own, prepare=False)[0]

    # The barrier

    @contextmanager
    def barrier(self, *, wait: bool = True) -> Iterator[bool]:
        """Only the block holds back or releases consumers. Without `wait`, False if another process does."""
        with self._database.transaction() as connection:
            # The transaction is idle during the block. The role's limit must not end it, because another process could
            # then release the consumers.
            let_last(connection)
            row = fetch_first(connection, self._queries("gate" if wait else "try_gate"), {"lock": _BARRIER})
            yield wait or row == (True,)

    def may_release(self) -> bool:
        """Whether this role may release consumers here, as a role that consumes may."""
        with self._database.connection() as connection:
            return bool(fetch_one(connection, self._queries("may_release"))[0])

    def held(self) -> list[tuple[str, str]]:
        """The topics and names of consumers that are held back here."""
        return query_all(self._database, self._queries("held"), {"held": HELD})

    def hold(self, topic: str, consumer: str) -> None:
        """Hand no events to a consumer here until it is released; waits for its current batches."""
        with self._database.transaction() as connection:
            connection.execute(self._queries("hold_back"), {"topic": topic, "consumer": consumer, "held": HELD})

    def let_go(self, topic: str, consumer: str) -> None:
        """Release a consumer that was held back: hand it events, as far as its topic's layout goes."""
        own = {"topic": topic, "consumer": consumer, "held": HELD}
        with self._database.transaction() as connection:
            rows = fetch_all(connection, self._queries("lock_held"), own)
            until = None
            if rows and rows[0][0] != NOT_PARTITIONED:
                known = layouts(connection, self._database.schema, topic)
                until = bounds_at(known, min(offset for _, offset in rows)).until if known else None
            connection.execute(self._queries("let_go"), {**own, "until": until})


def first_shard(databases: Iterable[Database]) -> str | None:
    """`ShardState.first`, from a database that can be reached. Raises `DatabaseUnavailableError` if there is none."""
    *others, last = databases
    for database in others:
        with suppress(DatabaseUnavailableError):
            return ShardStore(database).state().first
    return ShardStore(last).state().first
