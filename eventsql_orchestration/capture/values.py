"""The values of captures: a table, its columns, and how it is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

TRIGGERS: Final = {
    "insert": "REFERENCING NEW TABLE AS new_rows",
    "update": "REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows",
    "delete": "REFERENCING OLD TABLE AS old_rows",
    "truncate": "",
}
"""The operations that are captured, and the rows that each trigger sees."""


@dataclass(frozen=True, slots=True)
class Capture:
    """The capture of `table` to `topic`.

    `columns` is None if all columns are captured. `snapshot` is `none`, `running` or `done`, and `snapshot_rows` the
    number of rows that it has published. `problem` says why changes are not captured; None if they are. `outdated`: the
    table was restored, or columns were renamed or dropped, and the capture would lose columns by the next restore or
    renaming. The same `create` again, with the columns of now, prevents that.
    """

    id: int
    table: str
    topic: str
    key: tuple[str, ...]
    columns: tuple[str, ...] | None
    snapshot: str
    snapshot_rows: int
    created_at: datetime
    problem: str | None = None
    outdated: bool = False


class Table(NamedTuple):
    """A table, as the statement `table` describes it."""

    relation: int
    schema: str
    name: str
    kind: str
    persistence: str
    inherits: bool
    reserved: bool
    owner: str
    platform_owner: str
    trusted: bool
    primary_key: list[str]
    readable: bool
    hidden: bool

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


class Columns(NamedTuple):
    """Names of columns, with their numbers in the table."""

    names: list[str]
    numbers: list[int]


def known_as(table: Table, key: Columns, columns: Columns | None) -> dict[str, object]:
    """How a capture knows its table and columns."""
    return {
        "relation": table.relation, "name": str(table), "key_names": key.names, "key_numbers": key.numbers,
        "column_names": None if columns is None else columns.names,
        "column_numbers": None if columns is None else columns.numbers,
    }  # fmt: skip


def as_capture(  # noqa: PLR0917 - the columns of a row
    number: int, table: str, topic: str, key: Sequence[str], columns: Sequence[str] | None, snapshot: str, rows: int,
    created_at: datetime, exists: bool, missing: Sequence[str], outdated: bool, triggers: int, inherits: bool,
    unlogged: bool | None,
) -> Capture:  # fmt: skip
    problem = None
    if not exists:
        problem = "the table is gone"
    elif triggers < len(TRIGGERS):
        problem = f"{len(TRIGGERS) - triggers} of its triggers are gone or disabled"
    elif missing:
        problem = f"the restored table has no column {', '.join(missing)}, which was renamed or dropped"
    elif inherits:
        problem = "it is a partition or has inheritance now: writes through another table are not captured"
    elif unlogged:
        problem = "it is unlogged now, and a crash empties it without a change"
    return Capture(
        number, table, topic, tuple(key), None if columns is None else tuple(columns), snapshot, rows, created_at,
        problem, outdated,
    )  # fmt: skip
