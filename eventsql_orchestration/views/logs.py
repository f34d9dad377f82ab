"""Logs: lines of resources, searched by resource, time, level, attributes and text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from psycopg import sql
from psycopg.rows import class_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import (
    check_kind,
    check_name,
    check_range,
    check_text,
    check_time,
    check_whole,
    encode_json,
)
from eventsql_orchestration.views.definitions import Logs
from eventsql_orchestration.views.partitions import NO_TENANT, ViewTable, check_tenant, sent

DEFAULT_LEVEL: Final = "info"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line to be written. `attributes` is a JSON object. Raises `ValidationError` for what cannot be stored."""

    resource: str
    line: str
    written_at: datetime
    level: str = DEFAULT_LEVEL
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("resource", self.resource)
        check_text("line", self.line)
        check_time("written_at", self.written_at)
        check_name("level", self.level)
        self.encoded()

    def encoded(self) -> str:
        """The attributes as JSON."""
        return encode_json(f"attributes of a line of {self.resource!r}", self.attributes)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a resource. `id` grows in the order in which lines were stored."""

    id: int
    resource: str
    level: str
    line: str
    attributes: dict[str, Any]
    written_at: datetime


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

    def write(self, connection: CallersConnection, entries: Iterable[LogEntry], *, tenant: str = NO_TENANT) -> int:
        """Write lines in the caller's transaction, with one statement. Gives the number stored.

        Lines older than the logs' retention are left out. Raises `ValidationError`, with no line written, for values
        that cannot be stored, and `ViewNotFoundError` before the logs are declared.
        """
        check_tenant(tenant)
        rows = []
        for entry in entries:
            check_kind("a line of logs", entry, LogEntry)
            rows.append((entry.resource, entry.level, entry.line, entry.encoded(), entry.written_at))
        if not rows:
            return 0
        with self._table.writing(connection) as joined:
            oldest = self._table.kept_after(joined)
            rows = [row for row in rows if oldest is None or row[-1] > oldest]
            if not rows:
                return 0
            resources, levels, lines, attributes, times = (list(column) for column in zip(*rows, strict=True))
            self._table.make_partitions(joined, times)
            values = {
                "tenant": tenant, "resources": resources, "levels": levels, "lines": lines, "attributes": attributes,
                "written_at": times,
            }  # fmt: skip
            joined.execute(self._table.query("write_log"), values, prepare=False)
        return len(rows)

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
        if text is not None and not check_text("text", text):
            raise ValidationError("text to search for is empty: leave it out to find every line")
        if words is not None and (self.definition.language is None or not check_text("words", words).strip()):
            raise ValidationError(
                f"words cannot be searched for: logs {self.definition.name!r} have no language, declare them with one"
                if self.definition.language is None
                else "words to search for are empty: leave them out to find every line"
            )
        values = {
            "tenant": check_tenant(tenant),
            "resource": None if resource is None else check_name("resource", resource),
            "level": None if level is None else check_name("level", level),
            "attributes": None if attributes is None else encode_json("attributes", attributes),
            "since": since,
            "until": until,
            "pattern": None if text is None else "%" + re.sub(r"([\\%_])", r"\\\1", text) + "%",
            "words": words,
            "before_time": None if before is None else before.written_at,
            "before_id": None if before is None else before.id,
            "limit": check_whole("limit", limit, least=1),
        }
        query = _selection(
            self.definition, self._schema, frozenset(name for name, value in values.items() if value is not None)
        )
        with self._table.reading() as connection, connection.cursor(row_factory=class_row(LogLine)) as found:
            return found.execute(query, values, prepare=False).fetchall()


@lru_cache(maxsize=256)
def _selection(logs: Logs, schema: str, given: frozenset[str]) -> bytes:
    """The statement of a search: conditions that are not asked for are left out, so that an index fits the rest."""
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
        "before_id": sql.SQL(
            "eql_written_at <= %(before_time)s::timestamptz "
            "AND (eql_written_at, eql_id) < (%(before_time)s::timestamptz, %(before_id)s)"
        ),
    }
    statement = sql.SQL(
        "SELECT eql_id AS id, eql_resource AS resource, eql_level AS level, eql_line AS line, "
        "eql_attributes AS attributes, eql_written_at AS written_at FROM {table} WHERE {conditions} "
        "ORDER BY eql_written_at DESC, eql_id DESC LIMIT %(limit)s"
    ).format(
        table=sql.Identifier(schema, logs.table),
        conditions=sql.SQL(" AND ").join(condition for name, condition in conditions.items() if name in given),
    )
    return sent(statement)
