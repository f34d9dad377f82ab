"""Publications over several shards, as one database keeps them: what it has decided, and its parts of what others have.

A publication is *announced* on the shard that is to decide it, then its part is *prepared* on each other one: a row
there, whose commit puts the part's blocks on disk and keeps them from every sweep. It is *decided* by the row of the
announcement, in the transaction that publishes the deciding shard's own events; from then on each part is published,
once, by whoever comes, and until then by nobody. `sharded/decisions.py` has the rules for that.
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
from psycopg.rows import tuple_row

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import DatabaseBusyError
from eventsql_orchestration.log.staged import StagedBlocks

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 60.0
"""After so long, a transaction of these is ended whose client does nothing in it, as one whose machine is gone."""


class OpenPartsError(DatabaseBusyError):
    """Events that are published over several shards are not in the buffer of this one yet: `eventsql shard status`."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A publication that this shard decides, and that is not finished; `shards` are the others that have parts of it.

    `age` is in seconds. `owner` is who is to decide it, None where an older version of this package announced it;
    `deserted` says that this one has ended, so nobody decides it any more.
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
class Part:
    """A part of a publication that is not published; `decider` is the shard that knows whether it will be.

    `since` is when it was prepared, None before it is.
    """

    id: uuid.UUID
    decider: str
    writer: str
    batch: int
    since: datetime | None = None

    def __str__(self) -> str:
        since = "" if self.since is None else f", prepared at {self.since:%Y-%m-%d %H:%M:%S %Z}"
        return f"batch {self.batch} of writer {self.writer!r}{since}"


class Parts:
    """Reads and writes what one database keeps of publications over several shards."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("parts", database.schema)
        self._blocks = StagedBlocks(database.schema)

    def bound(self, connection: Connection) -> None:
        """Have the caller's transaction end where its client is idle for too long, and its commit wait for the disk.

        First of all in each that announces, prepares, decides, publishes or finishes.
        """
        connection.execute(self._queries("bound"), {"idle": _milliseconds(IDLE_SECONDS)})

    @contextmanager
    def _transaction(self, patience: float | None = None) -> Iterator[Connection]:
        with self._database.transaction() as connection:
            self.bound(connection)
            if patience is not None:
                connection.execute("SELECT pg_catalog.set_config('lock_timeout', %s, true)", [_milliseconds(patience)])
            yield connection

    # On the shard that decides

    def attend(self, connection: Connection, publication: uuid.UUID) -> None:
        """Show others that somebody is at a publication, until the caller's transaction ends, which is to decide it.

        Before it is announced: whoever finds it announced and nobody at it gives it up.
        """
        connection.execute(self._queries("attend"), {"id": publication})

    def announce(self, part: Part, shards: Sequence[str], owner: str) -> None:
        """Begin the publication of a part, which nobody can decide before this is committed; `shards` have parts."""
        values = {"id": part.id, "writer": part.writer, "batch": part.batch, "shards": list(shards), "owner": owner}
        with self._transaction() as connection:
            connection.execute(self._queries("intend"), values)

    def decide(self, connection: Connection, publication: uuid.UUID) -> bool:
        """Make it take place with the caller's transaction; False where somebody has given it up."""
        return connection.execute(self._queries("decide"), {"id": publication}).rowcount == 1

    def is_decided(self, publication: uuid.UUID) -> bool | None:
        """None where it is finished, or was given up."""
        with self._database.connection() as connection:
            row = connection.execute(self._queries("is_decided"), {"id": publication}).fetchone()
        return None if row is None else bool(row[0])

    def give_up(self, publication: uuid.UUID, *, patience: float) -> bool:
        """See to it that it never takes place; False where it does, or is over.

        Waits up to `patience` seconds for a transaction that is about to decide it: `DatabaseBusyError`.
        """
        with self._transaction(patience) as connection:
            return connection.execute(self._queries("give_up"), {"id": publication}).rowcount == 1

    def finish(self, publication: uuid.UUID) -> None:
        """Forget a publication whose parts are all published."""
        with self._transaction() as connection:
            connection.execute(self._queries("finish"), {"id": publication})

    def took_place(self, part: Part) -> bool | None:
        """Whether a publication that is over took place, or was given up; another one of its batch may have, then.

        None where that is not known, because an older version of this package recorded the batch.
        """
        values = {"id": part.id, "writer": part.writer, "batch": part.batch}
        with self._database.connection() as connection:
            row = connection.execute(self._queries("took_place"), values).fetchone()
        return False if row is None else row[0]

    def announced(self) -> list[Announcement]:
        """The publications that are to be decided here, or are and are not finished; oldest first."""
        with self._database.connection() as connection:
            rows = connection.execute(self._queries("decisions")).fetchall()
        return [
            Announcement(publication, writer, batch, tuple(shards), decided, age, owner, deserted)
            for publication, writer, batch, shards, decided, age, owner, deserted in rows
        ]

    # On the others

    def hold(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> None:
        """Keep the blocks of attempts from a sweep until the end of the caller's transaction, which prepares them."""
        connection.execute(self._queries("hold_blocks"), {"attempts": list(attempts)})

    def prepare(self, connection: Connection, part: Part, attempts: Sequence[uuid.UUID], events: int) -> None:
        """Have the blocks of a part kept for its publication, from the commit of the caller's transaction on."""
        connection.execute(
            self._queries("prepare"),
            {
                "id": part.id, "decider": part.decider, "writer": part.writer, "batch": part.batch,
                "attempts": list(attempts), "events": events,
            },
        )  # fmt: skip

    def publish(self, connection: Connection, publication: uuid.UUID) -> int | None:
        """Publish a part with the caller's transaction; None where that is done, or it was given up.

        Gives how many of its events are not there any more: their topic was deleted, or they were lost.
        """
        row = connection.execute(self._queries("publish_part"), {"id": publication}).fetchone()
        if row is None:
            return None
        attempts, events = row
        staged = self._blocks.find(connection, attempts)
        self._blocks.publish(connection, attempts, staged)
        self._blocks.delete(connection, attempts)
        return int(events) - sum(block.events for block in staged)

    def publish_decided(self, publication: uuid.UUID, *, patience: float) -> None:
        """Publish the part of a publication that is decided, unless that is done.

        Waits up to `patience` seconds for whoever is about to: `DatabaseBusyError`.
        """
        with self._transaction(patience) as connection:
            missing = self.publish(connection, publication)
        if missing:
            logger.warning(
                "publication %s was published on %s without %d of its events, which are not there any more: their "
                "topic was deleted since",
                publication, self._database, missing,
            )  # fmt: skip

    def give_part_up(self, publication: uuid.UUID, *, patience: float) -> bool:
        """Forget a part of a publication that never takes place; its blocks go with those of dead attempts.

        False where there is none that is open.
        """
        with self._transaction(patience) as connection:
            return connection.execute(self._queries("give_part_up"), {"id": publication}).rowcount == 1

    def is_open(self, publication: uuid.UUID) -> bool:
        """Whether a part is here and not published."""
        with self._database.connection() as connection:
            return connection.execute(self._queries("is_open"), {"id": publication}).fetchone() == (True,)

    def was_replaced(self, part: Part) -> bool:
        """Whether another part of the same batch is published here: a batch takes place once, with one on each shard.

        False also where that was forgotten.
        """
        values = {"id": part.id, "decider": part.decider, "writer": part.writer, "batch": part.batch}
        with self._database.connection() as connection:
            return connection.execute(self._queries("was_replaced"), values).fetchone() == (True,)

    def open(self) -> list[Part]:
        """The parts that are not published, oldest first."""
        with self._database.connection() as connection:
            return [Part(*row) for row in connection.execute(self._queries("open_parts"))]

    def forget(self, seconds: float) -> None:
        """Delete what is known of parts that were published longer ago than that."""
        with self._database.connection() as connection:
            connection.execute(self._queries("forget_parts"), {"seconds": seconds})


def refuse_open_parts(connection: psycopg.Connection[Any], schema: str) -> None:
    """Raises `OpenPartsError` where events that are decided may lie outside of the buffer.

    For who has locked the buffer to change what publishers go by: whoever checked that before has prepared his part.
    """
    rows = connection.cursor(row_factory=tuple_row).execute(Queries("parts", schema)("open_parts")).fetchall()
    if not rows:
        return
    parts = [Part(*row) for row in rows]
    others = "" if len(parts) == 1 else f", and {len(parts) - 1} more"
    raise OpenPartsError(
        f"events that are published over several shards are not in the buffer yet: {parts[0]}{others}, and shard "
        f"{parts[0].decider!r} knows whether they take place. With the URLs of all shards, `eventsql shard status` "
        "brings them here or gives them up, and says what is in the way where it cannot"
    )


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
