"""The second ordering: reading a table that many write to at once, and that no transfer orders.

A sequence hands out its values before the transactions that draw them commit. Whoever reads a table by such a value
alone goes past rows that are not visible yet, and never sees them. Here rows are ordered by the transaction that wrote
them and by their position within it, and are read up to the horizon: the oldest transaction that may still write,
`pg_snapshot_xmin` of the reading statement's own snapshot. Whatever becomes visible later was written by a transaction
at or beyond that horizon, so it comes after all that was read. Writers wait for nobody. Readers wait, with all that was
committed meanwhile, for the oldest transaction that has written anything, in any database of the server; one that only
reads has no transaction id and holds nothing up. Within the order, a transaction's rows lie together, and two
transactions stand in the order in which they first wrote, which need not be that of their commits.

A table is read like this where it has a column of `xid8` with the default `pg_current_xact_id()`, which is the id of
the whole transaction in its savepoints too and does not wrap around, a `bigint` that grows within a transaction, and a
unique index on the two, after those that `only` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import sqlalchemy
from psycopg import sql
from psycopg.rows import tuple_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.database import describe
from eventsql_orchestration.database.queries import statement
from eventsql_orchestration.errors import DatabaseError, ValidationError
from eventsql_orchestration.rules import check_name, check_text, check_whole, shown

MAX_TRANSACTION: Final = 2**64 - 1
"""`xid8` has 64 bits without a sign."""


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A place in the order: everything up to here was read. Checkpoints compare as the rows are ordered.

    To be stored with what the rows were read for, as `str()` and `parse`, or as its two numbers; `transaction` may
    exceed a bigint, and `xid8` and `numeric` hold it. One is of use only in the server it was read from, and in its
    physical copies: another counts transactions of its own. Raises `ValidationError` for what cannot be one.
    """

    transaction: int
    position: int

    def __post_init__(self) -> None:
        transaction: object = self.transaction
        if isinstance(transaction, bool) or not isinstance(transaction, int) or not 0 <= transaction <= MAX_TRANSACTION:
            raise ValidationError(
                f"a transaction id is a whole number from 0 to {MAX_TRANSACTION}, not {shown(transaction)}"
            )
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
            raise ValidationError(f"a checkpoint is written as transaction:position, not {text!r}") from error


def _conditions(only: Mapping[str, object] | None) -> dict[str, object]:
    conditions = {check_name("a column of only", column): value for column, value in (only or {}).items()}
    for column, value in conditions.items():
        if isinstance(value, str):
            check_text(f"only[{column!r}]", value)
    return conditions


START: Final = Checkpoint(0, 0)
"""Before the first row of any table: no transaction has the id 0."""


@dataclass(frozen=True, slots=True)
class HorizonRow:
    """A row: its place in the order, and the columns that were asked for, in that order."""

    checkpoint: Checkpoint
    values: tuple[Any, ...]


@checked
class HorizonReader:
    """Reads one table in the second ordering; keeps no connection and no state, so that any thread may use it."""

    def __init__(
        self,
        database: Database,
        table: str,
        columns: Sequence[str],
        *,
        transaction: str = "eql_transaction",
        position: str = "eql_id",
        schema: str | None = None,
    ) -> None:
        """`transaction` and `position` name the columns that order `table`, which lies in the platform's schema unless
        `schema` says otherwise.
        """
        for name in (table, transaction, position, *columns):
            check_name("name of a table or column", name)
        if schema is not None:
            check_name("schema", schema)
        self._database = database
        self._table = f"{schema or database.schema}.{table}"
        self._names = {
            "table": sql.Identifier(schema or database.schema, table),
            "columns": sql.SQL(", ").join(sql.SQL("source.{}").format(sql.Identifier(column)) for column in columns),
            "comma": sql.SQL(", " if columns else ""),
            "transaction": sql.Identifier(transaction),
            "position": sql.Identifier(position),
        }
        self._checked = False

    def read(
        self,
        after: Checkpoint = START,
        *,
        limit: int = 1_000,
        only: Mapping[str, object] | None = None,
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> list[HorizonRow]:
        """The next rows after a checkpoint, `limit` at most, none beyond the horizon; empty where all were read.

        `only` gives columns and the values that they must have. On `connection`, rows are read in the caller's
        transaction: there, lock where the checkpoint is stored first, and store the last row's `checkpoint` before the
        commit, and each row has its effects once. A transaction that has written is itself the horizon from then on.
        The connection is one of psycopg or SQLAlchemy to the same database.

        Raises `ValidationError` for a limit below 1; `DatabaseError` for a table with rows of transactions that this
        server has not had yet, as a dump that was restored has, and for a table or column that is not there.
        """
        check_whole("limit", limit, least=1)
        conditions = _conditions(only)
        values = {
            "transaction": str(after.transaction),
            "position": after.position,
            "limit": limit,
            **{f"only_{number}": value for number, value in enumerate(conditions.values())},
        }
        with self._on(connection) as joined:
            # A caller's connection may have a row factory of its own.
            cursor = joined.cursor(row_factory=tuple_row)
            if not self._checked:
                self._check(cursor.execute(self._compose("newest", *conditions), values, prepare=False).fetchone())
            cursor.execute(self._compose("after", *conditions), values)
            return [HorizonRow(Checkpoint(int(row[0]), row[1]), row[2:]) for row in cursor.fetchall()]

    def stream(
        self, after: Checkpoint = START, *, batch: int = 1_000, only: Mapping[str, object] | None = None
    ) -> Iterator[list[HorizonRow]]:
        """The same in lists of at most `batch` rows, each read when it is asked for; ends where none is left."""
        while rows := self.read(after, limit=batch, only=only):
            yield rows
            after = rows[-1].checkpoint

    def horizon(self, connection: Connection | sqlalchemy.Connection | None = None) -> int:
        """The oldest transaction that may still write: rows of it and of later ones are not read yet."""
        with self._on(connection) as joined:
            row = joined.cursor(row_factory=tuple_row).execute(self._compose("horizon")).fetchone()
            assert row is not None, "a SELECT without FROM gives a row"
            return int(row[0])

    def held_back(
        self, *, only: Mapping[str, object] | None = None, connection: Connection | sqlalchemy.Connection | None = None
    ) -> int:
        """How many rows are committed and lie beyond the horizon: they wait for a transaction that goes on."""
        conditions = _conditions(only)
        values = {f"only_{number}": value for number, value in enumerate(conditions.values())}
        with self._on(connection) as joined:
            cursor = joined.cursor(row_factory=tuple_row)
            row = cursor.execute(self._compose("held_back", *conditions), values).fetchone()
            return 0 if row is None else int(row[0])

    @contextmanager
    def _on(self, connection: Connection | sqlalchemy.Connection | None) -> Iterator[Connection]:
        with self._database.joined(connection) as joined:
            try:
                yield joined
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
                raise DatabaseError(
                    f"table {self._table} of {self._database} cannot be read ({describe(error)}): make the table with "
                    "these columns, or name the one that is there, and its schema"
                ) from error

    def _compose(self, name: str, *conditions: str) -> sql.Composed:
        only = [
            sql.SQL(" AND source.{} OPERATOR(pg_catalog.=) {}").format(
                sql.Identifier(column), sql.Placeholder(f"only_{number}")
            )
            for number, column in enumerate(conditions)
        ]
        return sql.SQL(statement("horizon", name)).format(**self._names, only=sql.SQL("").join(only))

    def _check(self, row: tuple[Any, ...] | None) -> None:
        if row is not None and row[1]:
            raise DatabaseError(
                f"table {self._table} has rows of transaction {row[0]}, which this server has not had yet: they come "
                "from another server, by a dump or by replication; give their rows transaction ids of this one before "
                "it is read, in their order, or begin a new table"
            )
        self._checked = True
