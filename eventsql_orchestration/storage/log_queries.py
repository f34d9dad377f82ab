"""Named SQL on the tables of logs, from the files in `sql/`.

A file `blocks_<name>.sql` has variants of the statements of `<name>.sql` for logs in blocks. A statement without a
variant reads such a log through the view `{event_table}`. In both files, `{log_table}` is the relation to read the log
from. `{row_store}` and `{block_store}` are the tables that hold rows and blocks, and new events enter one of them,
`{written_table}`. `log_form.names` has the names that do not depend on the form.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.storage import log_form
from eventsql_orchestration.storage.log_form import FORMS, ROOM, Form

_MOST_BRIEF: Final = 10_000
"""How many brief statements are kept, one for each consumer. Beyond that, all are composed anew."""


class LogQueries:
    """The statements of one file, composed for one database schema and, where they ask for it, one topic."""

    def __init__(self, file: str, schema: str) -> None:
        self._schema = schema
        self._queries = Queries(file, schema, room=ROOM)
        variants = f"blocks_{file}"
        self._variants = Queries(variants, schema, room=ROOM) if _exists(variants) else None
        self._brief: dict[tuple[object, ...], SingleStatement] = {}

    def __call__(
        self, name: str, *, topic: str | None = None, table: str | None = None, form: Form = FORMS["rows"]
    ) -> sql.SQL:
        """The statement called `name`; the name of a table fills `{table}`.

        `topic` fills the names of the tables of its log, which is read in this form.
        """
        return self._statement(name, topic, table, form, blocks=form.blocks)

    def in_window(self, name: str, topic: str, *, begin: int, behind: int) -> sql.SQL:
        """The statement called `name` for a log in blocks, and the constants `{begin}` and `{behind}` in it."""
        assert self._variants is not None, "blocks have statements of their own"
        return self._variants(name, begin=begin, behind=behind, block_table=log_form.names(topic)["block_table"])

    def on(self, connection: psycopg.Connection[Any], name: str, topic: str) -> sql.SQL:
        """The statement called `name` for the form of a topic's log."""
        return self(name, topic=topic, form=log_form.form(connection, self._schema, topic))

    def brief(
        self, connection: psycopg.Connection[Any], name: str, topic: str, constants: Mapping[str, str | None]
    ) -> SingleStatement:
        """As `on`, for executions that are transactions by themselves. A connection keeps the plan for a second."""
        key = name, topic, log_form.form(connection, self._schema, topic), *constants.items()
        statement = self._brief.get(key)
        if statement is None:
            if len(self._brief) >= _MOST_BRIEF:
                self._brief.clear()
            query = self.on(connection, name, topic)
            statement = self._brief[key] = SingleStatement(name, query, briefly=True, constants=constants)
        return statement

    def writing(self, connection: psycopg.Connection[Any], name: str, topic: str) -> sql.SQL:
        """The statement called `name` for the form of the new events of a topic's log."""
        form = log_form.form(connection, self._schema, topic)
        return self._statement(name, topic, None, form, blocks=form.writes_blocks)

    def on_store(
        self, connection: psycopg.Connection[Any], name: str, topic: str, *, blocks: bool, table: str | None = None
    ) -> sql.SQL:
        """The statement called `name` for the rows or the blocks of a topic's log."""
        return self._statement(name, topic, table, log_form.form(connection, self._schema, topic), blocks=blocks)

    def _statement(self, name: str, topic: str | None, table: str | None, form: Form, *, blocks: bool) -> sql.SQL:
        names = {} if table is None else {"table": table}
        if topic is not None:
            names |= log_form.names(topic)
            names["log_table"] = names["block_table" if form.blocks else "event_table"]
            names["row_store"] = log_form.store(topic, form, blocks=False)
            names["block_store"] = log_form.store(topic, form, blocks=True)
            names["written_table"] = names["block_store" if form.writes_blocks else "row_store"]
        if blocks and self._variants is not None and name in self._variants:
            return self._variants(name, **names)
        return self._queries(name, **names)


@cache
def _exists(file: str) -> bool:
    """Whether the room has this file. A platform asks for many files when it opens."""
    return resources.files(ROOM).joinpath("sql", f"{file}.sql").is_file()
