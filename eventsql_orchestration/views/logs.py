"""Logs: lines of resources, searched by resource, time and text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import check_name, check_range, check_text, check_time, check_whole


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a resource. `id` grows in the order in which lines were stored."""

    id: int
    resource: str
    line: str
    written_at: datetime


@checked
class Logs:
    """The logs of one database. A log exists as soon as a line is written to it.

    Writing takes the caller's connection: an event's handler writes its lines exactly once, in the transaction that
    moves its offset.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("views", database.schema)

    def write(self, connection: CallersConnection, log: str, rows: Iterable[tuple[str, str, datetime]]) -> int:
        """Write `(resource, line, written_at)` rows in the caller's transaction, with one statement. Gives their
        number.

        Raises `ValidationError`, with no row written, for values that cannot be stored.
        """
        check_name("log", log)
        checked = [
            (check_name("resource", resource), check_text("line", line), check_time("written_at", written_at))
            for resource, line, written_at in rows
        ]
        if not checked:
            return 0
        resources, lines, times = (list(column) for column in zip(*checked, strict=True))
        values = {"log": log, "resources": resources, "lines": lines, "written_at": times}
        with self._database.callers(connection) as joined:
            joined.execute(self._queries("write_log"), values)
        return len(checked)

    def search(
        self, log: str, *, resource: str | None = None, since: datetime | None = None,
        until: datetime | None = None, text: str | None = None, limit: int = 100,
    ) -> list[LogLine]:  # fmt: skip
        """The newest lines, newest first, `limit` at most.

        `since <= written_at < until`. `text` may be anywhere in a line, in upper or lower case. The search for text
        reads all lines of the time range, so give a range or a resource in a large log.
        """
        check_range(since, until)
        if text is not None and not check_text("text", text):
            raise ValidationError("text to search for is empty: leave it out to find every line")
        values = {
            "log": check_name("log", log),
            "resource": None if resource is None else check_name("resource", resource),
            "since": since,
            "until": until,
            "pattern": None if text is None else "%" + re.sub(r"([\\%_])", r"\\\1", text) + "%",
            "limit": check_whole("limit", limit, least=1),
        }
        # Two statements, each with its own index.
        statement = "search_log" if resource is None else "search_log_of_resource"
        with self._database.connection() as connection, connection.cursor(row_factory=class_row(LogLine)) as found:
            return found.execute(self._queries(statement), values, prepare=False).fetchall()
