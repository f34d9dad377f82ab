"""The definition of a projection: its tables, its changes, and the task of filling new tables in bulk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from eventsql_orchestration.consuming.handlers import check_runs
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.store.change import RecordedChange, StoreCheckpoint
from eventsql_orchestration.store.order import Filters, filters
from eventsql_orchestration.validation import check_name, check_several, shown

_MAX_IDENTIFIER: Final = 63


class Projection(ABC):
    """Tables that follow from changes: how they are made, and what each change does to them.

    `name` is a lower-case identifier. `tables` names all tables that `create` makes and `apply` writes, in the order in
    which `apply` writes them; they live in `schema`. `types` and `kinds` choose the changes; None is all. Both methods
    name their tables without a schema: during a rebuild, the same SQL works on the new tables::

        class OrdersByStatus(Projection):
            name = "orders_by_status"
            tables = ("order_status",)
            types = ("order",)

            def create(self, connection: Connection) -> None:
                connection.execute("CREATE TABLE order_status (id text PRIMARY KEY, status text)")

            def apply(self, change: RecordedChange, connection: Connection) -> None:
                connection.execute(
                    "INSERT INTO order_status VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET status = excluded.status",
                    [change.aggregate_id, change.kind],
                )
    """

    name: ClassVar[str]
    tables: ClassVar[Sequence[str]] = ()
    schema: ClassVar[str] = "public"
    types: ClassVar[Sequence[str] | None] = None
    kinds: ClassVar[Sequence[str] | None] = None

    @abstractmethod
    def create(self, connection: Connection) -> None:
        """Make the tables, with their indexes, in the first schema of the search_path."""

    @abstractmethod
    def apply(self, change: RecordedChange, connection: Connection) -> None:
        """Write the rows that follow from one change."""


@dataclass(frozen=True, slots=True)
class Filling:
    """The task of a fill: write the rows of `projection`'s new tables that follow from all changes up to `upto`.

    The tables are in `schema` of `database`. The rows of each table are written in numbered parts, each part in one
    transaction. The transaction first adds the table's name and the part's number to table `ledger` of that schema. If
    they are there already, it writes nothing. So a part that is written twice takes effect once. A part that is written
    after its fill has ended fails, because the ledger is gone.
    """

    projection: Projection
    database: Database
    schema: str
    ledger: str
    upto: StoreCheckpoint


Fill: TypeAlias = Callable[[Filling], object]
"""Writes the rows of a projection's new tables in bulk. `spark.projections.SparkFill` is one."""


def subscription_of(projection: str) -> str:
    """The subscription by which a projection follows the store."""
    return f"projection {projection}"


class CheckedProjection:
    """A projection with valid names. `installation` is the schema of the platform's tables."""

    def __init__(self, projection: Projection, installation: str) -> None:
        kind = type(projection).__name__
        check_runs(projection.apply)
        self.projection = projection
        self.name = check_name(f"name of {kind}", getattr(projection, "name", None))
        self.schema = check_name(f"schema of {kind}", projection.schema)
        check_several(f"tables of {kind}", projection.tables)
        self.tables = [check_name(f"a table of {kind}", each) for each in projection.tables]
        if not self.tables:
            raise ValidationError(f"{kind} has no tables: name all that `create` makes, as in tables = ('orders',)")
        if len(set(self.tables)) < len(self.tables):
            raise ValidationError(f"{kind} names a table twice: name each table once in {shown(self.tables)}")
        self.shadow = f"{installation}_shadow_{self.name}"
        """The schema of its rebuilds. Other installations in the database have other schemas."""
        if (more := len(self.shadow.encode()) - _MAX_IDENTIFIER) > 0:
            most = len(self.name.encode()) - more
            raise ValidationError(f"the name of {kind} has more than {most} bytes: shorten it")
        self.only: Filters = filters(projection.types, projection.kinds)
        self.subscription = subscription_of(self.name)

    def wants(self, change: RecordedChange) -> bool:
        types, kinds = self.only["types"], self.only["kinds"]
        return (types is None or change.aggregate_type in types) and (kinds is None or change.kind in kinds)
