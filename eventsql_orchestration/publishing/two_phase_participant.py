"""One database's records of publications over several shards: publications that it decides, and parts of others.

1. The shard that decides announces the publication.
2. Each other shard prepares its part: a row whose commit puts the part's blocks on disk and protects them from sweeps.
3. The transaction that publishes the deciding shard's own events marks the announcement as decided.

Before step 3 nobody publishes a part. After it, anybody may publish a part, and it is published once.
`shards/two_phase_coordinator.py` has the rules.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all, query_all, query_first
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import DatabaseBusyError
from eventsql_orchestration.publishing.staged_blocks import StagedBlocks

logger = logging.getLogger(__name__)

FORGET_SECONDS: Final = 86_400.0
"""Seconds for which the record of a published part is kept."""

IDLE_SECONDS: Final = 60.0
"""The server ends a transaction of a publication whose client is idle for this long: its machine may be gone."""


class OpenPartsError(DatabaseBusyError):
    """Parts of publications over several shards are not in this shard's buffer yet: see `eventsql shard status`."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """An unfinished publication that this shard decides.

    `shards` are the other shards that have parts of it. `age` is in seconds. `owner` is the process that is to decide
    it, None if an older version of this package announced it. `deserted` says that the owner has ended, so that nobody
    can decide the publication any more.
    """

    id: uuid.UUID
    writer: str
    batch: int
    shards: tuple[str, ...]
    decided: bool
    age: float
    owner: str | None
    deserted: bool


@dataclass(frozen=True, slots=True)
class PublicationPart:
    """One shard's part of a publication. `decider` is the shard that decides; `since` is when the part was prepared."""

    id: uuid.UUID
    decider: str
    writer: str
    batch: int
    since: datetime | None = None

    def parameters(self) -> dict[str, object]:
        return {"id": self.id, "decider": self.decider, "writer": self.writer, "batch": self.batch}

    def __str__(self) -> str:
        since = "" if self.since is None else f", prepared at {self.since:%Y-%m-%d %H:%M:%S %Z}"
        return f"batch {self.batch} of writer {self.writer!r}{since}"


class TwoPhaseParticipant:
    """Reads and writes one database's records of publications over several shards.

    Methods with a `timeout` wait that many seconds for another transaction and then raise `DatabaseBusyError`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("two_phase", database.schema)
        self._blocks = StagedBlocks(database.schema)

    def limit_transaction(self, connection: Connection) -> None:
        """Bound how long the caller's transaction may be idle, and make its commit wait for the disk.

        Call it first in each transaction that announces, prepares, decides, publishes or finishes.
        """
        connection.execute(self._queries("limit_transaction"), {"idle": f"{round(IDLE_SECONDS * 1000)}ms"})

    @contextmanager
    def _transaction(self, timeout: float | None = None) -> Iterator[Connection]:
        with self._database.transaction() as connection:
            self.limit_transaction(connection)
            if timeout is not None:
                wait_at_most(connection, timeout)
            yield connection

    def _change(self, statement: str, publication: uuid.UUID, *, timeout: float | None = None) -> bool:
        """Run a statement on one publication in a transaction of its own. Gives whether it changed a row."""
        with self._transaction(timeout) as connection:
            return connection.execute(self._queries(statement), {"id": publication}).rowcount == 1

    def _ask(self, statement: str, values: dict[str, object]) -> tuple[Any, ...] | None:
        return query_first(self._database, self._queries(statement), values)

    # On the shard that decides

    def lock_publication(self, connection: Connection, publication: uuid.UUID) -> None:
        """Hold the publication's lock until the end of the caller's transaction, which decides the publication.

        Take it before the announcement: any process gives up an announced publication whose lock is free.
        """
        connection.execute(self._queries("lock_publication"), {"id": publication})

    def announce(self, part: PublicationPart, shards: Sequence[str], owner: str) -> None:
        """Announce a publication whose other parts are on `shards`, in a transaction of its own."""
        values = {**part.parameters(), "shards": list(shards), "owner": owner}
        with self._transaction() as connection:
            connection.execute(self._queries("announce"), values)

    def decide(self, connection: Connection, publication: uuid.UUID) -> bool:
        """Decide a publication with the caller's transaction. False if somebody has given it up."""
        return connection.execute(self._queries("decide"), {"id": publication}).rowcount == 1

    def is_decided(self, publication: uuid.UUID) -> bool | None:
        """Whether an announced publication is decided. None if it is finished or was given up."""
        row = self._ask("is_decided", {"id": publication})
        return None if row is None else bool(row[0])

    def give_up(self, publication: uuid.UUID, *, timeout: float) -> bool:
        """Make sure that nobody decides a publication any more. False if it is decided or over."""
        return self._change("give_up", publication, timeout=timeout)

    def finish(self, publication: uuid.UUID) -> None:
        """Delete the announcement of a publication whose parts are all published."""
        self._change("finish", publication)

    def took_place(self, part: PublicationPart) -> bool | None:
        """Whether the record of the part's batch names this publication, and not another attempt at the same batch.

        None if an older version of this package recorded the batch, without naming the publication.
        """
        row = self._ask("took_place", part.parameters())
        return False if row is None else row[0]

    def announced(self) -> list[Announcement]:
        """The unfinished publications that this shard decides, oldest first."""
        rows = query_all(self._database, self._queries("announcements"))
        return [Announcement(each, writer, batch, tuple(on), *state) for each, writer, batch, on, *state in rows]

    # On the other shards

    def lock_blocks(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> None:
        """Keep the attempts' blocks from a sweep until the caller's transaction ends, which prepares them."""
        connection.execute(self._queries("lock_blocks"), {"attempts": list(attempts)})

    def prepare(
        self, connection: Connection, part: PublicationPart, attempts: Sequence[uuid.UUID], events: int
    ) -> None:
        """Keep the blocks of a part for its publication, from the commit of the caller's transaction on."""
        values = {**part.parameters(), "attempts": list(attempts), "events": events}
        connection.execute(self._queries("prepare"), values)

    def publish(self, connection: Connection, publication: uuid.UUID) -> int | None:
        """Publish a part with the caller's transaction. None if the part was published or given up before.

        Gives how many of its events are missing: their topic was deleted, or they were lost.
        """
        row = connection.execute(self._queries("publish_part"), {"id": publication}).fetchone()
        if row is None:
            return None

        attempts, events = row
        staged = self._blocks.find(connection, attempts)
        self._blocks.publish(connection, attempts, staged)
        self._blocks.delete(connection, attempts)
        return int(events) - sum(block.events for block in staged)

    def publish_decided(self, publication: uuid.UUID, *, timeout: float) -> bool:
        """Publish the part of a decided publication, unless it was published before. False if there is no part."""
        with self._transaction(timeout) as connection:
            missing = self.publish(connection, publication)
        if missing is None:
            return self._ask("is_part", {"id": publication}) == (True,)
        if missing:
            logger.warning(
                "publication %s was published on %s without %d of its events, whose topic was deleted",
                publication, self._database, missing,
            )  # fmt: skip
        return True

    def give_part_up(self, publication: uuid.UUID, *, timeout: float) -> bool:
        """Delete the part of a publication that was given up. A sweep deletes its blocks. False if no part is open."""
        return self._change("give_part_up", publication, timeout=timeout)

    def is_open(self, publication: uuid.UUID) -> bool:
        """Whether an unpublished part is here."""
        return self._ask("is_open", {"id": publication}) == (True,)

    def was_replaced(self, part: PublicationPart) -> bool:
        """Whether another publication of the same batch has published its part here.

        A batch takes place once, with one part on each shard. False also if the other part's record was deleted.
        """
        return self._ask("was_replaced", part.parameters()) == (True,)

    def open(self) -> list[PublicationPart]:
        """The unpublished parts, oldest first."""
        return [PublicationPart(*row) for row in query_all(self._database, self._queries("open_parts"))]

    def forget(self) -> None:
        """Delete the records of parts that were published more than `FORGET_SECONDS` ago."""
        with self._database.connection() as connection:
            connection.execute(self._queries("forget_parts"), {"seconds": FORGET_SECONDS})


def refuse_open_parts(connection: psycopg.Connection[Any], schema: str) -> None:
    """Raise `OpenPartsError` if decided events may lie outside of the buffer.

    Call it with the buffer locked, before a change of partitions or shards: every publication that checked the old
    definition has prepared its part by then.
    """
    parts = [PublicationPart(*row) for row in fetch_all(connection, Queries("two_phase", schema)("open_parts"))]
    if parts:
        others = "" if len(parts) == 1 else f", and {len(parts) - 1} more"
        raise OpenPartsError(
            f"events of a publication over several shards are not in the buffer yet ({parts[0]}{others}): run "
            "`eventsql shard status` with the URLs of all shards, which brings the events here or gives them up"
        )
