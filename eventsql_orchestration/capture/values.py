"""The values of captures: a table, its columns, and how it is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias

from psycopg import sql

from eventsql_orchestration.validation import advised

TRIGGERS: Final = {
    "insert": "REFERENCING NEW TABLE AS new_rows",
    "update": "REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows",
    "delete": "REFERENCING OLD TABLE AS old_rows",
    "truncate": "",
}
"""The operations that are captured, and the rows that each trigger sees."""


SnapshotState: TypeAlias = Literal["none", "running", "done"]
"""Whether a capture publishes the rows that exist when it is made, and whether it has."""


def trigger_name(capture: int, operation: str) -> str:
    """The name of a trigger. The database's function `capture_page` finds the table by the trigger for `insert`."""
    return f"eventsql_capture_{capture}_{operation}"


def grants_to_read(table: str, role: str) -> str:
    """The statements after which `role` may read a table; `table` is a name as in SQL, with its schema."""
    return f"GRANT SELECT ON {table} TO {sql.Identifier(role).as_string()}, and USAGE ON its schema"


def grant_of(role: str, member: str) -> str:
    """The statement that makes a role a member of another role."""
    return sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(member)).as_string()


def bypass_of(role: str) -> str:
    """The statement after which no row security hides rows from a role. A superuser may execute it."""
    return sql.SQL("ALTER ROLE {} BYPASSRLS").format(sql.Identifier(role)).as_string()


def drop_command(table: str, topic: str) -> str:
    """The command that ends a capture."""
    return advised("capture drop --execute", table, topic)


@dataclass(frozen=True, slots=True)
class Capture:
    """The capture of `table` to `topic`.

    `columns` is None if all columns are captured. `snapshot` is `none`, `running` or `done`, and `snapshot_rows` the
    number of rows that it has published. `problem` says why changes are not captured; None if they are. `outdated`: the
    table was restored, or columns were renamed or dropped, and the next restore or renaming would take columns from the
    capture. To prevent that, call `create` again with the present columns. `added_again` are columns of the capture
    that were dropped and then added again: to capture them again, name them in a call of `create`. If rights are
    missing, `grants` has the statements that give them. `replaced_by` is the name that the table had before it was
    renamed, if another table has that name now and is not captured to the topic.
    """

    id: int
    table: str
    topic: str
    key: tuple[str, ...]
    columns: tuple[str, ...] | None
    snapshot: SnapshotState
    snapshot_rows: int
    created_at: datetime
    problem: str | None
    outdated: bool
    added_again: tuple[str, ...]
    grants: str | None
    replaced_by: str | None


class Table(NamedTuple):
    """A table, as the statement `table` describes it."""

    relation: int
    schema: str
    name: str
    kind: str
    persistence: str
    inherits: bool
    of_system: bool
    owner: str
    platform_owner: str
    trusted: bool
    primary_key: list[str]
    readable: bool
    hidden: bool
    quoted: str

    def __str__(self) -> str:
        return self.quoted


class Columns(NamedTuple):
    """Names of columns, with their numbers in the table."""

    names: list[str]
    numbers: list[int]


def known_as(table: Table, key: Columns, columns: Columns | None) -> dict[str, object]:
    """The values of a capture's row that say which table and columns it captures."""
    return {
        "relation": table.relation, "name": str(table), "key_names": key.names, "key_numbers": key.numbers,
        "column_names": None if columns is None else columns.names,
        "column_numbers": None if columns is None else columns.numbers,
    }  # fmt: skip


def as_capture(  # noqa: PLR0917 - the columns of a row
    number: int, table: str, topic: str, key: Sequence[str], columns: Sequence[str] | None, snapshot: SnapshotState,
    rows: int, created_at: datetime, exists: bool, missing: Sequence[str], outdated: bool, triggers: int,
    inherits: bool, unlogged: bool | None, subscribed: bool, keyless: bool, added_again: Sequence[str], runs_as: str,
    readable: bool, outsider: str | None, hidden: bool | None, replaced_by: str | None,
) -> Capture:  # fmt: skip
    problem = grants = None
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
    elif subscribed:
        problem = "a subscription writes to it: changes of logical replication are not captured"
    elif keyless:
        problem = "it has lost its unique key, and writes to it fail"
    elif not readable:
        grants = grants_to_read(table, runs_as)
        problem = f"role {runs_as} may not read it, and writes to it fail: {grants}"
    elif outsider is not None:
        grants = grant_of(runs_as, outsider)
        problem = (
            f"its triggers run as {runs_as}, its owner {outsider} is not a member of that role, and writes to it fail: "
            f"{grants}"
        )
    elif hidden:
        grants = bypass_of(runs_as)
        problem = f"its row security hides rows from role {runs_as}, and writes to it fail: {grants}"
    elif replaced_by is not None:
        problem = f"it was renamed, and {replaced_by} is another table now, whose changes are not captured"
    return Capture(
        number, table, topic, tuple(key), None if columns is None else tuple(columns), snapshot, rows, created_at,
        problem, outdated, tuple(added_again), grants, replaced_by,
    )  # fmt: skip
