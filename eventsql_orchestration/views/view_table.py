"""The table of a declared view: writing with the partitions that the written times need, and reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from eventsql_orchestration.database import CallersConnection, Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.database.single_statement import RawRow, SingleStatement
from eventsql_orchestration.errors import EventSQLError, ValidationError, ViewConflictError, ViewNotFoundError
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.validation import check_name
from eventsql_orchestration.views.definitions import Definition, start_of

NO_TENANT: Final = ""
"""The tenant of views without tenants."""

MAX_PERIODS: Final = 100
"""The most partitions that one call writes to: times that are wrong by years would make thousands of tables."""


class ViewTable:
    """The table of one view."""

    def __init__(self, database: Database, definition: Definition) -> None:
        self._database = database
        self._definition = definition
        self._queries = Queries("views", database.schema)
        self._log_queries = Queries("log", database.schema)

    @property
    def name(self) -> sql.Identifier:
        """The table's qualified name."""
        return sql.Identifier(self._database.schema, self._definition.table)

    def query(self, name: str) -> sql.SQL:
        """A named statement on the view's table."""
        return self._queries(name, table=self._definition.table)

    @contextmanager
    def writing(self, connection: CallersConnection) -> Iterator[Connection]:
        """The caller's transaction, to write with. A connection in autocommit mode without one gets a transaction."""
        with self._database.callers(connection) as joined, self._errors():
            alone = joined.autocommit and joined.info.transaction_status is TransactionStatus.IDLE
            with joined.transaction() if alone else nullcontext():
                yield joined

    def store(
        self, connection: CallersConnection, statement: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]],
        tenant: str | Sequence[str],
    ) -> int:  # fmt: skip
        """Write the rows of entries in the caller's transaction, except those older than the retention; gives their
        number.

        `columns` names the statement's values, which are columns of the rows. The last is the time.
        """
        tenants = tenants_of(tenant, len(rows))
        with self.writing(connection) as joined:
            oldest = self.kept_after(joined)
            kept = [(of, *row) for of, row in zip(tenants, rows, strict=True) if oldest is None or row[-1] > oldest]
            if kept:
                values = dict(zip(("tenants", *columns), map(list, zip(*kept, strict=True)), strict=True))
                self.make_partitions(joined, values[columns[-1]])
                joined.execute(self.query(statement), values, prepare=False)
        return len(kept)

    def kept_after(self, joined: Connection) -> datetime | None:
        """The retention keeps entries after this time; None if it keeps all.

        The server's clock decides, as it does when partitions are dropped: the clocks of clients may differ.
        """
        retention = self._definition.retention
        return None if retention is None else fetch_one(joined, self._queries("clock"))[0] - retention

    def make_partitions(self, joined: Connection, times: Iterable[datetime]) -> None:
        """Make the partitions of `times` that are missing. Raises `ValidationError` for too many."""
        starts = {start_of(self._definition, time) for time in times}
        if len(starts) > MAX_PERIODS:
            raise ValidationError(
                f"the times are in {len(starts)} periods of {self._definition.period}; {MAX_PERIODS} are allowed at "
                "once: write them in several calls"
            )
        make_periods(joined, self._database.schema, self._definition, starts)

    def fetch(self, statement: SingleStatement, values: Mapping[str, bytes | None]) -> list[RawRow]:
        """The rows of a statement that reads, in PostgreSQL's binary format."""
        with self._errors():
            return self._database.fetch(statement, values)

    def fetch_values(self, statement: SingleStatement, values: Mapping[str, bytes | None]) -> list[tuple[Any, ...]]:
        """The rows of a statement that reads. See `SingleStatement.fetch_values`."""
        with self._errors():
            return self._database.fetch_values(statement, values)

    def writers(self, connection: Connection) -> set[str]:
        """The open transactions that may have written to the table."""
        relation = {"relation": self.name.as_string(connection)}
        return {writer for (writer,) in fetch_all(connection, self._log_queries("writers"), relation, prepare=False)}

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._database.connection() as connection, self._errors():
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what an error of the server means for the view, if that is known."""
        try:
            yield
        except (psycopg.Error, EventSQLError) as error:
            cause = error.__cause__ if isinstance(error, EventSQLError) else error
            if (known := self._known(cause)) is not None:
                raise known from cause
            raise

    def _known(self, error: BaseException | None) -> EventSQLError | None:
        view = self._definition
        match error:
            case psycopg.errors.UndefinedTable() | psycopg.errors.NoDataFound():
                return ViewNotFoundError(
                    f"{view.kind} {view.name!r} does not exist in this database: `Views.declare` makes it"
                )
            case psycopg.errors.UndefinedColumn() | psycopg.errors.InvalidParameterValue():
                return ViewConflictError(
                    f"view {view.name!r} of this database has another form than this {view.kind} "
                    f"({error.diag.message_primary}): `eventsql view list` shows its form, `Views.declare` changes it"
                )
            case psycopg.errors.ProgramLimitExceeded():
                return ValidationError(
                    f"an entry is too large for an index of {view.kind} {view.name!r}: {error.diag.message_primary}"
                )
        return None


def make_periods(connection: Connection, schema: str, view: Definition, starts: Iterable[datetime]) -> None:
    """Make the partitions of a view that begin at these times, where they are missing."""
    wanted = sorted(set(starts))
    for first in range(0, len(wanted), MAX_PERIODS):
        values = {"view": view.name, "starts": wanted[first : first + MAX_PERIODS]}
        connection.execute(Queries("views", schema)("make_view_periods"), values)


def sent(statement: sql.Composable) -> bytes:
    """A composed statement as it is sent."""
    return qualified(statement.as_string()).encode()


def check_tenant(tenant: str) -> str:
    """Return `tenant`, or raise `InvalidNameError`: a name, or `NO_TENANT`."""
    return tenant if tenant == NO_TENANT else check_name("tenant", tenant)


def tenants_of(tenant: str | Sequence[str], count: int) -> list[str]:
    """The tenant of each of `count` entries: one for all, or one for each. Raises `ValidationError`."""
    if isinstance(tenant, str):
        return [check_tenant(tenant)] * count
    if len(tenant) != count:
        raise ValidationError(
            f"{len(tenant)} tenants do not fit {count} entries: give one text for all entries, or a tenant for each"
        )
    return list(map(check_tenant, tenant))
