"""Named SQL on the tables of logs, from the files in `sql/`."""

from __future__ import annotations

from typing import Final

from psycopg import sql

from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.log_names import event_table

ROOM: Final = __package__
"""The package that has the files."""


class LogQueries:
    """The statements of one file, composed for one database schema and, where they ask for it, one topic."""

    def __init__(self, file: str, schema: str) -> None:
        self._queries = Queries(file, schema, room=ROOM)

    def __call__(self, name: str, *, topic: str | None = None, table: str | None = None) -> sql.SQL:
        """The statement called `name`; `topic` fills `{event_table}`, the name of a table fills `{table}`."""
        names = {} if table is None else {"table": table}
        if topic is not None:
            names["event_table"] = event_table(topic)
        return self._queries(name, **names)
