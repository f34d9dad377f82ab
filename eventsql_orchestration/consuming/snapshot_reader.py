"""The snapshot reader reads a table in order, without a transfer, although many transactions write to it at once.

A sequence draws its values before the transactions commit. If a reader used this value alone, it would pass rows that
are not visible yet, and would never see them. This reader orders rows by the id of the transaction that wrote them,
then by their position within it, and reads up to the horizon: the oldest transaction that may still write,
`pg_snapshot_xmin` of the reading statement's own snapshot. Rows that become visible later have a transaction at or
beyond that horizon, so they come after all rows that were read.

Writers never wait. Readers wait for the oldest transaction that has written, in any database of the server. A
transaction that only reads has no id and delays nobody. The rows of a transaction lie together. Transactions are in the
order of their first writes, which may differ from the order of their commits.

The table needs a column of type `xid8` with the default `pg_current_xact_id()`, a `bigint` column that grows within a
transaction, and a unique index on both columns, after the columns that `only` names. The id of a transaction is the
same in savepoints and does not wrap around.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Connection, Database, Platform, database_of
from eventsql_orchestration.database.queries import identifier, statement
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import DatabaseError, ValidationError
from eventsql_orchestration.validation import check_name, check_text, check_whole, shown

MAX_TRANSACTION: Final = 2**64 - 1
"""`xid8` has 64 bits without a sign."""


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A place in the order: all rows up to here were read. Checkpoints compare as the rows are ordered.

    Store it together with the effects of the rows, as `str()` and `parse`, or as its two numbers. `transaction` may
    exceed a bigint; use `xid8` or `numeric`. A checkpoint is valid only in the server that it was read from, and in its
    physical copies, because each server counts its own transactions. Raises `ValidationError`.
    """

    transaction: int
    position: int

    def __post_init__(self) -> None:
        check_whole("a transaction id", self.transaction, least=0, most=MAX_TRANSACTION)
        check_whole("a position", self.position)

    def __str__(self) -> str:
        return f"{self.transaction}:{self.position}"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """The checkpoint that `str()` wrote. Raises `ValidationError` for anything else."""
        transaction, _, position = check_text("text", text).partition(":")
        try:
            return cls(int(transaction), int(position))
        except ValueError as error:
            raise ValidationError(f"a checkpoint is written as transaction:position, not {shown(text)}") from error


def _conditions(only: Mapping[str, object] | None) -> dict[str, object]:
    conditions = {check_name("a column of only", column): value for column, value in (only or {}).items()}
    for column, value in conditions.items():
        if isinstance(value, str):
            check_text(f"only[{column!r}]", value)
    return conditions


def _values(conditions: Mapping[str, object], **values: object) -> dict[str, object]:
    return values | {f"only_{number}": value for number, value in enumerate(conditions.values())}


START: Final = Checkpoint(0, 0)
"""Before the first row of any table, because no transaction has the id 0."""


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A row: its place in the order, and the values of the requested columns."""

    checkpoint: Checkpoint
    values: tuple[Any, ...]


@checked
class SnapshotReader:
    """Reads one table in the order of snapshots. Keeps no connection and no state, so any thread may use it."""

    def __init__(
        self, database: Database | Platform, table: str, columns: Sequence[str],
        *, transaction: str = "eql_transaction", position: str = "eql_id", schema: str | None = None,
    ) -> None:  # fmt: skip
        """`database` is a platform (`EventSQL`), one of its shards, or a `Database`.

        `transaction` and `position` name the columns that order `table`. `schema` defaults to the platform's.
        """
        database = database_of(database)
        for name in (table, transaction, position, *columns):
            check_name("name of a table or column", name)
        if schema is not None:
            check_name("schema", schema)
        self._database = database
        self._table = f"{schema or database.schema}.{table}"
        self._names = {
            "table": identifier(schema or database.schema, table),
            "columns": sql.SQL(", ").join(sql.SQL("source.{}").format(identifier(column)) for column in columns),
            "comma": sql.SQL(", " if columns else ""),
            "transaction": identifier(transaction),
            "position": identifier(position),
        }
        self._checked = False

    def read(
        self, after: Checkpoint = START, *, limit: int = 1_000, only: Mapping[str, object] | None = None,
        connection: CallersConnection | None = None,
    ) -> list[SnapshotRow]:  # fmt: skip
        """The next rows after a checkpoint, at most `limit`, none beyond the horizon.

        `only` maps columns to the values that they must have, None for NULL. With `connection`, of psycopg or
        SQLAlchemy, rows are read in the caller's transaction. Each row then has its effects exactly once if the
        transaction first locks the stored checkpoint, and stores the last row's `checkpoint` before its commit. A
        transaction that has written is itself the horizon from then on.

        Raises `ValidationError` for a limit below 1. Raises `DatabaseError` if the table or a column does not exist,
        and if the checkpoint or rows of the table are of a transaction that this server has not had yet, as after the
        restore of a dump.
        """
        check_whole("limit", limit, least=1)
        conditions = _conditions(only)
        values = _values(conditions, transaction=str(after.transaction), position=after.position, limit=limit)
        with self._on(connection) as joined:
            rows = fetch_all(joined, self._compose("after", conditions), values, prepare=False)
            if not rows or not self._checked:
                # Ask whenever nothing is found: others may have restored rows since, `only` may choose other rows, and
                # the next connection may lead to a promoted standby, which lacks the newest transactions.
                self._check(joined, after, conditions, values)
                self._checked = True
            return [SnapshotRow(Checkpoint(int(row[0]), row[1]), row[2:]) for row in rows]

    def stream(
        self, after: Checkpoint = START, *, batch: int = 1_000, only: Mapping[str, object] | None = None
    ) -> Iterator[list[SnapshotRow]]:
        """The rows as `read`, in lists of at most `batch` rows. Each list is read when it is requested."""
        while rows := self.read(after, limit=batch, only=only):
            yield rows
            after = rows[-1].checkpoint

    def horizon(self, connection: CallersConnection | None = None) -> int:
        """The oldest transaction that may still write. Its rows and later rows are not read yet."""
        with self._on(connection) as joined:
            return int(fetch_one(joined, self._compose("horizon", {}))[0])

    def held_back(
        self, *, only: Mapping[str, object] | None = None, connection: CallersConnection | None = None
    ) -> int:
        """The number of committed rows beyond the horizon, which wait for a running transaction."""
        conditions = _conditions(only)
        with self._on(connection) as joined:
            row = fetch_first(joined, self._compose("held_back", conditions), _values(conditions), prepare=False)
            return 0 if row is None else int(row[0])

    @contextmanager
    def _on(self, connection: CallersConnection | None) -> Iterator[Connection]:
        with self._database.joined(connection) as joined:
            try:
                yield joined
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
                raise DatabaseError(
                    f"table {self._table} of {self._database} cannot be read ({describe(error)}): check its name, its "
                    "schema and its columns"
                ) from error

    def _compose(self, name: str, conditions: Mapping[str, object]) -> sql.Composed:
        equal, null = sql.SQL(" AND source.{} OPERATOR(pg_catalog.=) {}"), sql.SQL(" AND source.{} IS NULL")
        only = [
            (null if value is None else equal).format(identifier(column), sql.Placeholder(f"only_{number}"))
            for number, (column, value) in enumerate(conditions.items())
        ]
        return sql.SQL(statement("snapshot_reader", name)).format(**self._names, only=sql.SQL("").join(only))

    def _check(
        self, connection: Connection, after: Checkpoint, conditions: Mapping[str, object], values: Mapping[str, object]
    ) -> None:
        """Refuse rows and a checkpoint of transactions that this server has not had."""
        foreign, reached = fetch_one(connection, self._compose("foreign", conditions), values, prepare=False)
        if foreign is not None:
            raise DatabaseError(
                f"table {self._table} has rows of transaction {foreign} of another server, copied by a dump or by "
                "replication: give these rows transaction ids of this server in their order, or begin a new table"
            )
        if not reached:
            raise DatabaseError(
                f"checkpoint {after} is of another server, which counts other transactions: rows of table "
                f"{self._table} would be left out; find the last row that took effect, and continue from its place"
            )
