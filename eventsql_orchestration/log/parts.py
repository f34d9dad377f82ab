"""Publications over several shards, as one database keeps them: what it has decided, and its parts of what others have.

A publication is *announced* on the shard that is to decide it, then its part is *prepared* on each other one: a row
there, whose commit puts the part's blocks on disk and keeps them from every sweep. It is *decided* by the row of the
announcement, in the transaction that publishes the deciding shard's own events; from then on each part is published,
once, by whoever comes, and until then by nobody. `sharded/decisions.py` has the rules for that.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import DatabaseBusyError
from eventsql_orchestration.log.staged import StagedBlocks


class OpenPartsError(DatabaseBusyError):
    """Events that Spark has published over several shards are not in the buffer of this one yet.

    `eventsql transfer` with the URLs of all shards brings them there.
    """


@dataclass(frozen=True, slots=True)
class Announcement:
    """A publication that this shard decides, and that is not finished; `shards` are the others that have parts of it.

    `age` is in seconds.
    """

    id: uuid.UUID
    writer: str
    batch: int
    shards: tuple[str, ...]
    decided: bool
    age: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a publication that is not published; `decider` is the shard that knows whether it will be."""

    id: uuid.UUID
    decider: str
    writer: str
    batch: int


class Parts:
    """Reads and writes what one database keeps of publications over several shards."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("parts", database.schema)
        self._blocks = StagedBlocks(database.schema)

    # On the shard that decides

    def announce(self, publication: uuid.UUID, writer: str, batch: int, shards: Sequence[str]) -> None:
        """Begin a publication, which nobody can decide before this is committed."""
        values = {"id": publication, "writer": writer, "batch": batch, "shards": list(shards)}
        with self._database.connection() as connection:
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
        with self._database.transaction() as connection:
            _limit(connection, patience)
            return connection.execute(self._queries("give_up"), {"id": publication}).rowcount == 1

    def finish(self, publication: uuid.UUID) -> None:
        """Forget a publication whose parts are all published."""
        with self._database.connection() as connection:
            connection.execute(self._queries("finish"), {"id": publication})

    def announced(self) -> list[Announcement]:
        """The publications that are to be decided here, or are and are not finished; oldest first."""
        with self._database.connection() as connection:
            rows = connection.execute(self._queries("decisions")).fetchall()
        return [Announcement(row[0], row[1], row[2], tuple(row[3]), row[4], row[5]) for row in rows]

    # On the others

    def prepare(self, connection: Connection, part: Part, attempts: Sequence[uuid.UUID], events: int) -> None:
        """Have the blocks of a part kept for its publication, from the commit of the caller's transaction on."""
        connection.execute(
            self._queries("prepare"),
            {
                "id": part.id, "decider": part.decider, "writer": part.writer, "batch": part.batch,
                "attempts": list(attempts), "events": events,
            },
        )  # fmt: skip

    def publish(self, connection: Connection, publication: uuid.UUID) -> bool:
        """Publish a part with the caller's transaction; False where that is done, or it was given up."""
        row = connection.execute(self._queries("publish_part"), {"id": publication}).fetchone()
        if row is None:
            return False
        self._blocks.publish(connection, row[0])
        self._blocks.delete(connection, row[0])
        return True

    def publish_decided(self, publication: uuid.UUID, *, patience: float) -> None:
        """Publish the part of a publication that is decided, unless that is done.

        Waits up to `patience` seconds for whoever is about to: `DatabaseBusyError`.
        """
        with self._database.transaction() as connection:
            _limit(connection, patience)
            self.publish(connection, publication)

    def give_part_up(self, publication: uuid.UUID, *, patience: float) -> None:
        """Forget a part of a publication that never takes place; its blocks go with those of dead attempts."""
        with self._database.transaction() as connection:
            _limit(connection, patience)
            connection.execute(self._queries("give_part_up"), {"id": publication})

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
    row = connection.execute(Queries("parts", schema)("has_open_parts")).fetchone()
    if row == (True,):
        raise OpenPartsError


def _limit(connection: Connection, seconds: float) -> None:
    connection.execute("SELECT set_config('lock_timeout', %s, true)", [f"{max(1, round(seconds * 1000))}ms"])
