"""The global order of the changes in a store: by transaction, then by position, up to the snapshot horizon.

docs/decisions.md says why (consuming/snapshot_reader.py does the same for tables of your own). Within an aggregate, it
is the order of the versions: an append takes the greater of its own transaction and its predecessor's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.database.single_statement import RawRow, fetch_raw
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.store.change import RecordedChange, StoreCheckpoint
from eventsql_orchestration.store.home import StoreHome
from eventsql_orchestration.validation import MAX_BIGINT, check_name, check_several

Filters: TypeAlias = Mapping[str, list[str] | None]
"""Which changes to read: `types` of aggregates and `kinds` of changes; None is all."""


def filters(types: Sequence[str] | None, kinds: Sequence[str] | None) -> Filters:
    """The filters for names of types and kinds. Raises `ValidationError` for an empty list and for a single text."""
    return {"types": _names("type", types), "kinds": _names("kind", kinds)}


def _names(what: str, names: Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    check_several(f"{what}s", names)
    found = [check_name(f"{what} to read", name) for name in names]
    if not found:
        raise ValidationError(f"argument {what}s is empty: name some, or leave it out to read all")
    return found


class GlobalOrder:
    """Reads the changes of all aggregates in their order, on connections of the store's database."""

    def __init__(self, database: Database) -> None:
        self.home = StoreHome(database)
        self._queries = Queries("store", database.schema)

    def read(
        self, connection: Connection, after: StoreCheckpoint, only: Filters, limit: int,
        *, beyond_horizon: bool = False,
    ) -> list[RecordedChange]:  # fmt: skip
        """The next changes after a checkpoint of this era.

        With `beyond_horizon`, all committed changes are read. Changes that commit later may come before the last of
        them.
        """
        values: dict[str, object] = {**only, "limit": limit, "position": after.position}
        rows: list[RawRow] = []
        if after.transaction == 0:
            rows = fetch_raw(connection, self._queries("read_adopted"), values)
            values["position"] = MAX_BIGINT
        if len(rows) < limit:
            values |= {"transaction": str(after.transaction), "limit": limit - len(rows)}
            rows += fetch_raw(connection, self._queries("read_visible" if beyond_horizon else "read_after"), values)
        return [_placed(row, after.era) for row in rows]

    def newest(self, connection: Connection) -> StoreCheckpoint:
        """The place of the newest change that can be read; the place before the first if there is none."""
        start = self.home.place(connection, None)
        row = fetch_first(connection, self._queries("newest"), prepare=False)
        return start if row is None else StoreCheckpoint(start.era, int(row[0]), row[1])


def _placed(row: RawRow, era: str) -> RecordedChange:
    of_type, of_id, transaction, position = row[7:]
    place = StoreCheckpoint(era, int.from_bytes(transaction or b""), int.from_bytes(position or b""))
    return RecordedChange((of_type or b"").decode(), (of_id or b"").decode(), row[:7], place)
