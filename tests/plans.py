"""The plans of named statements: the one for their values, and the one for any values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import sql

from eventsql_orchestration.database import Connection


def numbered(statement: sql.Composable) -> tuple[str, list[str]]:
    """A statement with parameters $1 to $n, and their names."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"(?<!%)%\((\w+)\)[sb]", number, statement.as_string()).replace("%%", "%")
    return text, names


def custom_plan(connection: Connection, statement: sql.Composable, values: Mapping[str, Any]) -> str:
    """The plan for these values."""
    rows = connection.execute(b"EXPLAIN " + statement.as_bytes(connection), values, prepare=False)
    return "\n".join(line for (line,) in rows)


def plans(connection: Connection, statement: sql.Composable, values: Mapping[str, Any]) -> list[str]:
    """The plan for these values, and the one for any values that a prepared statement may change to."""
    text, names = numbered(statement)
    generic = _generic_plan(connection, text, [values[name] for name in names])
    return [custom_plan(connection, statement, values), generic]


def _generic_plan(connection: Connection, statement: str, values: Sequence[Any]) -> str:
    if connection.info.server_version >= 160000:
        lines = connection.execute(f"EXPLAIN (GENERIC_PLAN) {statement}".encode()).fetchall()
    else:
        with connection.transaction(force_rollback=True):
            connection.execute("SET LOCAL plan_cache_mode TO force_generic_plan")
            connection.execute(f"PREPARE planned AS {statement}".encode())
            given = sql.SQL(", ").join(map(sql.Literal, values))
            lines = connection.execute(
                sql.SQL("EXPLAIN EXECUTE planned{}").format(sql.SQL("({})").format(given) if values else sql.SQL(""))
            ).fetchall()
        connection.execute("DEALLOCATE ALL")
    return "\n".join(line for (line,) in lines)
