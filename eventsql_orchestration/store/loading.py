"""Loading aggregates: statements that are one round trip each, or join a caller's transaction."""

from __future__ import annotations

from collections.abc import Mapping

from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.database.binary import encode_bigint
from eventsql_orchestration.database.single_statement import RawRow, SingleStatement, fetch_raw
from eventsql_orchestration.store.change import check_schema_version
from eventsql_orchestration.validation import MAX_BIGINT, check_name, check_whole


class Loader:
    """Reads the changes and snapshots of one aggregate at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("store", database.schema)
        self._statements = {
            name: SingleStatement(name, self._queries(name), briefly=True)
            for name in ("load", "snapshot", "load_from_snapshot")
        }

    def rows(
        self, statement: str, values: Mapping[str, str | int | None], connection: CallersConnection | None
    ) -> list[RawRow]:
        """The rows of one of the statements, in PostgreSQL's binary format."""
        if connection is None:
            raw = {name: _raw(value) for name, value in values.items()}
            return self._database.fetch(self._statements[statement], raw)
        with self._database.callers(connection) as joined:
            return fetch_raw(joined, self._queries(statement), values)


def checked_values(
    aggregate_type: str, aggregate_id: str, upto_version: int | None, schema_version: int | None = None
) -> dict[str, str | int | None]:
    """The values that every statement takes. Raises `ValidationError`."""
    check_aggregate(aggregate_type, aggregate_id)
    return {
        "type": aggregate_type, "id": aggregate_id,
        "upto_version": MAX_BIGINT if upto_version is None else check_whole("upto_version", upto_version, least=0),
        "schema_version": None if schema_version is None else check_schema_version("schema_version", schema_version),
    }  # fmt: skip


def check_aggregate(aggregate_type: str, aggregate_id: str) -> None:
    """Raise `ValidationError` unless these can be the type and the id of an aggregate."""
    check_name("aggregate type", aggregate_type)
    check_name("aggregate id", aggregate_id)


def _raw(value: str | int | None) -> bytes | None:
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else encode_bigint(value)
