"""Copies the rows of a frame into a table, each part of the frame once.

Runs in Spark's tasks, so it does not import the database floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.redaction import hiding
from eventsql_orchestration.spark import eventsql_error
from eventsql_orchestration.spark.adbc import translate
from eventsql_orchestration.spark.options import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMLESS: Final = ("struct", "map", "variant", "array<timestamp")
"""Parts of the names of types that COPY cannot take, or whose text depends on a process's time zone."""


@dataclass(frozen=True, slots=True)
class TableCopy:
    """Copies parts of a frame into `columns` of a table of `schema`. Spark sends it to the tasks.

    A part's transaction first adds its number to the table `ledger` of the same schema. If the number is there, an
    earlier attempt of the task has copied the part. If the ledger is gone, the copy was given up. `times` are the
    places of the columns whose times Spark gives in the zone of the process.
    """

    source: Source
    schema: str
    table: str
    ledger: str
    columns: Sequence[str]
    times: frozenset[int] = frozenset()

    def __call__(self, rows: Iterable[Sequence[Any]]) -> None:
        """Copy the part of the current task. Raises `DatabaseError`."""
        from pyspark import TaskContext  # noqa: PLC0415 - nothing else here needs it

        context = TaskContext.get()
        assert context is not None, "a task has a context"
        try:
            self.copy_part(rows, context.partitionId())
        except psycopg.Error as error:
            raise translate(error, self.source, f"table {self.table!r} could not be filled") from error

    def copy_part(self, rows: Iterable[Sequence[Any]], part: int) -> bool:
        """Copy one part; gives False if an earlier attempt has copied it."""
        # A pooler may share the session, so nothing is prepared.
        with (
            hiding(self.source.dsn),
            psycopg.connect(self.source.dsn, prepare_threshold=None, client_encoding="UTF8") as connection,
        ):
            noted = connection.execute(
                sql.SQL("INSERT INTO {} VALUES (%s, %s) ON CONFLICT DO NOTHING").format(self._name(self.ledger)),
                [self.table, part],
            )
            if not noted.rowcount:
                return False
            columns = sql.SQL(", ").join(map(sql.Identifier, self.columns))
            statement = sql.SQL("COPY {} ({}) FROM STDIN").format(self._name(self.table), columns)
            with connection.cursor().copy(statement) as copy:
                for row in self._with_zones(rows) if self.times else rows:
                    copy.write_row(row)
        return True

    def _with_zones(self, rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        for row in rows:
            yield [
                value.astimezone(UTC) if place in self.times and value is not None else value
                for place, value in enumerate(row)
            ]

    def _name(self, table: str) -> sql.Identifier:
        return sql.Identifier(self.schema, table)


def copy_frame(frame: DataFrame, source: Source, schema: str, table: str, ledger: str) -> None:
    """Copy a frame into the columns of a table that have its names.

    Raises `ValidationError` for columns that a table cannot have, and `DatabaseError` if the table has no such column
    or refuses a row.
    """
    kinds = [column.dataType.simpleString() for column in frame.schema.fields]
    for name, kind in zip(frame.columns, kinds, strict=True):
        if any(part in kind for part in _FORMLESS):
            raise ValidationError(
                f"column {name!r} of table {table!r} is of type {kind}: make it text, as to_json does"
            )
    times = frozenset(place for place, kind in enumerate(kinds) if kind == "timestamp")
    try:
        frame.foreachPartition(TableCopy(source, schema, table, ledger, frame.columns, times).__call__)
    except Exception as error:
        # Spark's error has the task's as text.
        if (found := eventsql_error(error)) is not None:
            raise found from error
        raise
