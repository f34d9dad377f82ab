"""Logs: lines of resources, searched by resource, time, level, attributes and text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database
from eventsql_orchestration.database.binary import encode_bigint, encode_jsonb, encode_time
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import check_kind, check_name, check_range, check_text, check_whole, encode_json
from eventsql_orchestration.views.definitions import Logs
from eventsql_orchestration.views.following import LogFollower
from eventsql_orchestration.views.log_values import LogEntry, LogLine
from eventsql_orchestration.views.view_table import NO_TENANT, ViewTable, check_tenant, sent

_COLUMNS: Final = sql.SQL(
    "eql_id AS id, eql_resource AS resource, eql_level AS level, eql_line AS line, eql_attributes AS attributes, "
    "eql_written_at AS written_at"
)
"""The columns of a `LogLine`."""


@checked
class LogsView:
    """Declared logs.

    Writing takes the caller's connection: an event's handler writes its lines exactly once, in the transaction that
    moves its offset. Each `tenant` has lines of its own.
    """

    def __init__(self, database: Database, definition: Logs) -> None:
        self.definition = definition
        self._schema = database.schema
        self._table = ViewTable(database, definition)

    def write(
        self, connection: CallersConnection, entries: Iterable[LogEntry], *, tenant: str | Sequence[str] = NO_TENANT
    ) -> int:
        """Write lines in the caller's transaction, with one statement. Gives the number stored.

        `tenant` is the tenant of all lines, or a list with the tenant of each.

        Lines older than the logs' retention are left out. Raises `ValidationError`, with no line written, for values
        that cannot be stored, and `ViewNotFoundError` before the logs are declared.
        """
        rows = []
        for entry in entries:
            check_kind("a line of logs", entry, LogEntry)
            rows.append((entry.resource, entry.level, entry.line, entry.encoded(), entry.written_at))
        columns = ("resources", "levels", "lines", "attributes", "written_at")
        return self._table.store(connection, "write_log", columns, rows, tenant)

    def search(
        self, *, resource: str | None = None, level: str | None = None, attributes: Mapping[str, Any] | None = None,
        since: datetime | None = None, until: datetime | None = None, text: str | None = None,
        words: str | None = None, before: LogLine | None = None, limit: int = 100, tenant: str = NO_TENANT,
    ) -> list[LogLine]:  # fmt: skip
        """The newest lines, newest first, `limit` at most. `before` is the last line of the page before.

        `since <= written_at < until`. A line has all of `attributes`, with these values. `text` may be anywhere in a
        line, in upper or lower case. `words` is a query in PostgreSQL's web syntax (`timeout -retry "exact phrase"`),
        for logs with a language. A search for text, level or attributes reads the lines of the resource or of the time
        range: give one of them in large logs.
        """
        check_range(since, until)
        asked = {"tenant": check_tenant(tenant), **self._asked(resource, level, attributes, text, words)}
        values = {
            name: encode_jsonb(value) if name == "attributes" else value.encode() for name, value in asked.items()
        }
        times = {"since": since, "until": until, "before_time": None if before is None else before.written_at}
        values |= {name: encode_time(time) for name, time in times.items() if time is not None}
        if before is not None:
            values["before_id"] = encode_bigint(before.id)
        values["limit"] = encode_bigint(check_whole("limit", limit, least=1))
        query = _search(self.definition, self._schema, frozenset(values))
        return list(map(LogLine, self._table.fetch(query, values)))

    def follow(
        self, *, resource: str | None = None, level: str | None = None, attributes: Mapping[str, Any] | None = None,
        text: str | None = None, words: str | None = None, tenant: str = NO_TENANT,
    ) -> LogFollower:  # fmt: skip
        """Follow the lines that transactions commit from now on: `poll` of the follower gives them, each once.

        The arguments choose lines as in `search`. To show the last lines first, search after this call, and
        leave out the lines that both give.
        """
        asked = {"tenant": check_tenant(tenant), **self._asked(resource, level, attributes, text, words)}
        query = _following(self.definition, self._schema, frozenset({"after_id", *asked}))
        return LogFollower(self._table, query, asked)

    def _asked(
        self, resource: str | None, level: str | None, attributes: Mapping[str, Any] | None, text: str | None,
        words: str | None,
    ) -> dict[str, str]:  # fmt: skip
        """The values of the conditions on lines that are given, except those on tenant and time."""
        if text is not None and not check_text("text", text):
            raise ValidationError("text to search for is empty: leave it out to find every line")
        if words is not None and (self.definition.language is None or not check_text("words", words).strip()):
            raise ValidationError(
                f"logs {self.definition.name!r} have no language: declare them with a language to search for words"
                if self.definition.language is None
                else "words to search for are empty: leave them out to find every line"
            )
        conditions = {
            "resource": None if resource is None else check_name("resource", resource),
            "level": None if level is None else check_name("level", level),
            "attributes": None if attributes is None else encode_json("attributes", attributes),
            "pattern": None if text is None else "%" + re.sub(r"([\\%_])", r"\\\1", text) + "%",
            "words": words,
        }
        return {name: value for name, value in conditions.items() if value is not None}


@lru_cache(maxsize=256)
def _search(logs: Logs, schema: str, given: frozenset[str]) -> SingleStatement:
    """The statement of a search. Without a resource, it is planned each time: its range of time decides on the plan."""
    prepared = "resource" in given and "words" not in given
    text = sql.SQL(_selection(logs, schema, given).decode())
    return SingleStatement("search", text, prepare=prepared, briefly=True)


def _selection(logs: Logs, schema: str, given: frozenset[str]) -> bytes:
    """The statement of a search."""
    statement = sql.SQL("SELECT {columns} FROM {table} WHERE {conditions} {order} LIMIT %(limit)s").format(
        columns=_COLUMNS,
        table=sql.Identifier(schema, logs.table),
        conditions=_conditions(logs, given),
        order=sql.SQL("ORDER BY eql_written_at DESC, eql_id DESC"),
    )
    return sent(statement)


@lru_cache(maxsize=256)
def _following(logs: Logs, schema: str, given: frozenset[str]) -> bytes:
    """The statement that reads on by id.

    If a rebuild has put another table in the place of `relation`, it gives nothing.
    """
    table = sql.Identifier(schema, logs.table)
    same = sql.SQL("{}::regclass::oid = %(relation)s::oid").format(sql.Literal(table.as_string()))
    statement = sql.SQL("SELECT {columns} FROM {table} WHERE {conditions} AND {same} ORDER BY eql_id").format(
        columns=_COLUMNS, table=table, conditions=_conditions(logs, given), same=same
    )
    return sent(statement)


def _conditions(logs: Logs, given: frozenset[str]) -> sql.Composed:
    """The given conditions on lines. The others are left out, so that an index fits the statement."""
    language = sql.Literal(f"pg_catalog.{logs.language}")
    conditions = {
        "tenant": sql.SQL("eql_tenant = %(tenant)s"),
        "resource": sql.SQL("eql_resource = %(resource)s"),
        "level": sql.SQL("eql_level = %(level)s"),
        "attributes": sql.SQL("eql_attributes @> %(attributes)s::jsonb"),
        "since": sql.SQL("eql_written_at >= %(since)s::timestamptz"),
        "until": sql.SQL("eql_written_at < %(until)s::timestamptz"),
        "pattern": sql.SQL("eql_line ~~* %(pattern)s"),
        "words": sql.SQL(
            "to_tsvector({0}::regconfig, eql_line) @@ websearch_to_tsquery({0}::regconfig, %(words)s)"
        ).format(language),
        "after_id": sql.SQL("eql_id > %(after_id)s"),
        "before_id": sql.SQL(
            "eql_written_at <= %(before_time)s::timestamptz "
            "AND (eql_written_at, eql_id) < (%(before_time)s::timestamptz, %(before_id)s)"
        ),
    }
    return sql.SQL(" AND ").join(condition for name, condition in conditions.items() if name in given)
