"""Named SQL on the tables of logs, from the files in `sql/`.

A file `blocks_<name>.sql` has variants of the statements of `<name>.sql` for logs in blocks. A statement without a
variant reads such a log through the view `{event_table}`. In both, `{log_table}` is the table that holds the log.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.log_names import block_table, event_table
from eventsql_orchestration.storage.log_form import ROOM, in_blocks


class LogQueries:
    """The statements of one file, composed for one database schema and, where they ask for it, one topic."""

    def __init__(self, file: str, schema: str) -> None:
        self._schema = schema
        self._queries = Queries(file, schema, room=ROOM)
        variants = f"blocks_{file}"
        exist = resources.files(ROOM).joinpath("sql", f"{variants}.sql").is_file()
        self._variants = Queries(variants, schema, room=ROOM) if exist else None

    def __call__(
        self, name: str, *, topic: str | None = None, table: str | None = None, blocks: bool = False
    ) -> sql.SQL:
        """The statement called `name`; the name of a table fills `{table}`.

        `topic` fills `{event_table}`, `{block_table}` and `{log_table}`. With `blocks`, its log is in blocks.
        """
        names = {} if table is None else {"table": table}
        if topic is not None:
            names["event_table"], names["block_table"] = event_table(topic), block_table(topic)
            names["log_table"] = names["block_table" if blocks else "event_table"]
        if blocks and self._variants is not None and name in self._variants:
            return self._variants(name, **names)
        return self._queries(name, **names)

    def on(self, connection: psycopg.Connection[Any], name: str, topic: str, *, table: str | None = None) -> sql.SQL:
        """The statement called `name` for the form of a topic's log."""
        return self(name, topic=topic, table=table, blocks=in_blocks(connection, self._schema, topic))
