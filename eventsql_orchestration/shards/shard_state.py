"""What one database keeps of the shards that it is one of: its name among them, their generations, fences, the gate.

A generation is a set of names; one more begins with every shard that is added. A shard that was there before notes the
end of each topic's log then, its *fence*: the keys that move to the new shard have no event after it. On the new shard,
a consumer is *held back* until it has consumed what lies before the fences of all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import tuple_row

from eventsql_orchestration.database import Connection, Database, Queries, driver_connection
from eventsql_orchestration.errors import DatabaseBusyError, ShardSetError
from eventsql_orchestration.log import segments
from eventsql_orchestration.log.layouts import layouts, place
from eventsql_orchestration.log.parts import OpenPartsError
from eventsql_orchestration.log.patience import Patience
from eventsql_orchestration.log.registry import lock_registry
from eventsql_orchestration.log.repartition import PATIENCE_SECONDS, TooManyBufferedError, drain
from eventsql_orchestration.log.transfer import Transfer
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.sharding import HELD, ShardSet

_GATE: Final = 0x6576_656E_7473_6867
"""The advisory lock of whoever holds consumers of a shard back, or finds out whether they may be let go."""

_SINCE: Final = "0004"
"""The revision of the schema that knows shards."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """What a database says of itself.

    `identity` tells it from every other database. `generations` are the names of the shards from each generation on,
    oldest first; `name` is None where it is no shard of any set. `active` says whether it takes events.
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
        """The shard that is first among those of the first generation, whatever is added; None where it is no shard.

        It keeps what a set of shards records once.
        """
        return min(self.generations[0]) if self.generations else None

    @property
    def shards(self) -> ShardSet | None:
        """The newest generation, None where it is no shard."""
        if self.set is None or self.name is None:
            return None
        return ShardSet(self.set, self.name, self.generation, tuple(sorted(self.generations[-1])), self.active)

    def before(self, name: str) -> tuple[int, frozenset[str]] | None:
        """The generation with which the shard `name` came, and the shards that were there already.

        None for one that was there from the beginning.
        """
        for number, names in enumerate(self.generations[1:], start=2):
            if name in names and name not in self.generations[number - 2]:
                return number, self.generations[number - 2]
        return None


class ShardStore:
    """Reads and writes what one database keeps of its shards."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("shards", database.schema)
        self._log = Queries("log", database.schema)
        self._table = {"table": f'"{database.schema}".topic'}

    # Who this is

    def state(self) -> ShardState:
        """What the database says of itself; nothing is written, not even tables that are missing."""
        revision = self._database.revision()
        with self._database.errors(), self._database.engine.connect() as connection:
            return self._state(driver_connection(connection), revision)

    def _state(self, connection: Connection, revision: str | None) -> ShardState:
        (identity,) = _one(connection.execute(self._queries("identity")))
        if revision is None and _one(connection.execute(self._queries("has_topics"), self._table))[0] is None:
            return ShardState(identity, 0)
        if revision is None or revision < _SINCE:
            return ShardState(identity, *_one(connection.execute(self._queries("count_topics"))))
        own, generations, topics = _one(connection.execute(self._queries("state")))
        if own is None:
            return ShardState(identity, topics)
        named, name, active = own
        return ShardState(identity, topics, named, name, active == "true", tuple(map(frozenset, generations)))

    def name(self, connection: Connection) -> str | None:
        """The name of the shard that a caller's connection leads to; None where that is no shard."""
        row = connection.cursor(row_factory=tuple_row).execute(self._queries("name")).fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def founding(self) -> Iterator[tuple[ShardState, Founding]]:
        """A transaction in which nobody else makes this database a shard; gives its state and what makes it one."""
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            yield self._state(driver, self._database.revision()), Founding(driver, self._queries)

    def activate(self) -> None:
        """Let this shard take events: what is decided with a new shard's own."""
        with self._database.connection() as connection:
            connection.execute(self._queries("activate"))

    # The fence

    def fence(
        self,
        generation: int,
        names: Sequence[str],
        transfer: Transfer,
        *,
        finish: Callable[[], object] = lambda: None,
        patience: float = PATIENCE_SECONDS,
    ) -> bool:
        """Begin a generation here: from now on, no publisher writes by the one before. False where it had begun.

        `finish` is to bring here what is published over several shards already: its events come before the fence, or
        there is none. Publishers and transfers go on, and are kept waiting for half a second at most. Waits up to
        `patience` seconds for transactions of publishers, and for such events; `DatabaseBusyError`, and nothing
        changed, when they do not end, or come. Raises `ShardSetError` where another generation has begun.
        """
        trying = Patience(patience)
        while True:
            # As much as can be before publishers have to wait.
            finish()
            transfer.run_once()
            try:
                return self._fence(generation, names)
            except (DatabaseBusyError, TooManyBufferedError) as error:
                if not trying.lasts():
                    why = "transactions that published and do not end, or a flood of events, are in the way"
                    if isinstance(error, OpenPartsError):
                        why = str(error)
                    raise DatabaseBusyError(f"{self._database} was not changed: {why}; run it again") from error

    def _fence(self, generation: int, names: Sequence[str]) -> bool:
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            state = self._state(driver, self._database.revision())
            if state.generation >= generation:
                if state.generations[generation - 1] != frozenset(names):
                    raise ShardSetError(
                        f"{self._database} is about to get other shards, {', '.join(sorted(state.generations[-1]))}: "
                        "finish that first"
                    )
                return False
            topics = driver.execute(self._queries("topics")).fetchall()
            for topic, _, _ in topics:
                driver.execute(self._log("await_topic"), {"topic": topic})
            drain(driver, self._database.schema, topics)
            for topic, _, _ in topics:
                fence = segments.newest_id(driver, self._database.schema, topic)
                driver.execute(self._queries("add_fence"), {"generation": generation, "topic": topic, "fence": fence})
            driver.execute(self._queries("add_generation"), {"generation": generation, "shards": sorted(names)})
            driver.execute(self._queries("redefine_all"))
        return True

    def consumed_before(self, generation: int, topic: str, consumer: str) -> bool:
        """Whether a consumer has nothing left here from before a generation; one that is not there has not."""
        own = {"generation": generation, "topic": topic, "consumer": consumer}
        with self._database.connection() as connection:
            query = self._queries("before_fence", topic=topic)
            return not _one(connection.execute(query, own, prepare=False))[0]

    # The gate

    @contextmanager
    def gate(self, *, wait: bool = True) -> Iterator[bool]:
        """The block alone holds consumers back, or lets them go; False where another does, without `wait`."""
        with self._database.transaction() as connection:
            row = connection.execute(self._queries("gate" if wait else "try_gate"), {"lock": _GATE}).fetchone()
            yield wait or row == (True,)

    def held(self) -> list[tuple[str, str]]:
        """The topics and names of consumers that are held back here."""
        with self._database.connection() as connection:
            return connection.execute(self._queries("held"), {"held": HELD}).fetchall()

    def hold(self, topic: str, consumer: str) -> None:
        """Hand no events to a consumer here until it is let go; waits for batches under way."""
        with self._database.transaction() as connection:
            own = {"topic": topic, "consumer": consumer, "held": HELD}
            connection.execute(self._queries("hold_back"), own)

    def let_go(self, topic: str, consumer: str) -> None:
        """Hand events to a consumer that was held back, as far as its topic's layout goes."""
        own = {"topic": topic, "consumer": consumer, "held": HELD}
        with self._database.transaction() as connection:
            rows = connection.execute(self._queries("lock_held"), own).fetchall()
            until = None
            if rows and rows[0][0] != NOT_PARTITIONED:
                known = layouts(connection, self._database.schema, topic)
                until = place(known, min(offset for _, offset in rows)).until if known else None
            connection.execute(self._queries("let_go"), {**own, "until": until})


class Founding:
    """Makes a database a shard, in a transaction that only one process has."""

    def __init__(self, connection: Connection, queries: Queries) -> None:
        self._connection = connection
        self._queries = queries

    def become(self, name: str, set_id: str, generations: Sequence[frozenset[str]], *, active: bool) -> None:
        """Give the database this name among the shards of these generations."""
        self._connection.execute(self._queries("become"), {"name": name, "set": set_id, "active": active})
        for number, names in enumerate(generations, start=1):
            self._connection.execute(self._queries("add_generation"), {"generation": number, "shards": sorted(names)})


def _one(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    row = cursor.fetchone()
    assert row is not None, "the statement gives a row"
    return row
