"""The form of a log: a row for each event, blocks of events, or both.

The relation `{topic}_event` has EventSQL's columns in every form. In the form of rows it is the table that holds the
events. In the form of blocks it is a view, and the table `{topic}_block` holds the events. So a statement for rows also
gives the right result for blocks, but slowly.

A log whose form was changed has both forms, and each segment has one of them. The tables `{topic}_rows` and
`{topic}_array` hold its rows and its blocks. `{topic}_event` is a view of all events, and `{topic}_block` is a view of
all blocks, with a row as a block of one event. So a statement that reads a log in blocks also reads a log in both
forms. Nothing can be written to the views.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import psycopg

from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.log_names import block_store, block_table, event_table, row_store
from eventsql_orchestration.database.rows import fetch_one

ROOM: Final = __package__
"""The package that has the SQL files of this room."""

MOST_IDS: Final = 20_000
"""The most ids that a block has between its first event and its last one: `sql/forms.sql` has the constraint."""

BLOCKS_SECONDS: Final = 5.0
"""Seconds until the form of a log in blocks is looked up again. Until then, reads of a topic that was deleted and
created again in rows fail."""

ROWS_SECONDS: Final = 60.0
"""Seconds until the form of a log in rows is looked up again. Until then, reads of a topic that was created again in
blocks are slow."""


class Form(NamedTuple):
    """The form of a log. `blocks`: it is read as blocks. `writes_blocks`: new events become blocks. `both`: it has rows
    and blocks.
    """

    blocks: bool
    writes_blocks: bool
    both: bool = False


FORMS: Final = {
    "rows": Form(blocks=False, writes_blocks=False),
    "blocks": Form(blocks=True, writes_blocks=True),
    "both, new rows": Form(blocks=True, writes_blocks=False, both=True),
    "both, new blocks": Form(blocks=True, writes_blocks=True, both=True),
}
"""The forms by the names that the statement `form_of` gives them."""

_known: Final[dict[tuple[object, ...], tuple[float, Form]]] = {}
"""The known forms by server, database, schema and topic, each with the time until which it is known."""

_MOST_KNOWN: Final = 10_000


def names(topic: str) -> dict[str, str]:
    """The names of the relations of a topic's log in any form, by their placeholders in SQL."""
    return {
        "event_table": event_table(topic), "block_table": block_table(topic),
        "rows_of_both": row_store(topic), "blocks_of_both": block_store(topic),
    }  # fmt: skip


def form(connection: psycopg.Connection[Any], schema: str, topic: str) -> Form:
    """The form of a topic's log, looked up now or some seconds ago. Rows for a missing log."""
    known = _known.get(_key(connection, schema, topic))
    if known is not None and time.monotonic() < known[0]:
        return known[1]
    return form_now(connection, schema, topic)


def form_now(connection: psycopg.Connection[Any], schema: str, topic: str) -> Form:
    """The form of a topic's log now, as a committed transaction left it. It is remembered."""
    return learn(connection, schema, topic, _found(connection, schema, topic))


def form_in_transaction(connection: psycopg.Connection[Any], schema: str, topic: str) -> Form:
    """The form of a topic's log as the caller's transaction may have changed it. It is not remembered."""
    return FORMS[_found(connection, schema, topic)]


def _found(connection: psycopg.Connection[Any], schema: str, topic: str) -> str:
    query = Queries("forms", schema, room=ROOM)("form_of", **names(topic))
    return str(fetch_one(connection, query, prepare=False)[0])


def in_blocks(connection: psycopg.Connection[Any], schema: str, topic: str) -> bool:
    """Whether a topic's log is read as blocks, by `form`. False for a missing log."""
    return form(connection, schema, topic).blocks


def learn(connection: psycopg.Connection[Any], schema: str, topic: str, found: str) -> Form:
    """Remember the form of a log. `found` is its name in `FORMS`, as a statement gives it."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    until = time.monotonic() + (BLOCKS_SECONDS if FORMS[found].blocks else ROWS_SECONDS)
    _known[_key(connection, schema, topic)] = (until, FORMS[found])
    return FORMS[found]


def forget(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Forget the form of a log whose table has changed."""
    _known.pop(_key(connection, schema, topic), None)


def _key(connection: psycopg.Connection[Any], schema: str, topic: str) -> tuple[object, ...]:
    server = connection.pgconn
    return (server.host, server.port, server.db, schema, topic)


def stored_table(connection: psycopg.Connection[Any], schema: str, topic: str) -> str:
    """The name of the relation to read a log from: the table that holds it, or the view of a log in both forms.

    Its column `eql_id` has the ids of events, or of blocks' last events.
    """
    return block_table(topic) if in_blocks(connection, schema, topic) else event_table(topic)


def store(topic: str, form: Form, *, blocks: bool) -> str:
    """The name of the table that holds the rows or the blocks of a log in this form."""
    if form.both:
        return block_store(topic) if blocks else row_store(topic)
    return block_table(topic) if blocks else event_table(topic)


def written_table(connection: psycopg.Connection[Any], schema: str, topic: str) -> str:
    """The name of the table that new events of a log enter. It has the log's sequence."""
    known = form(connection, schema, topic)
    return store(topic, known, blocks=known.writes_blocks)


def tables(connection: psycopg.Connection[Any], schema: str, topic: str) -> list[str]:
    """The names of the tables that hold a log: one table, or the table of its rows and the table of its blocks."""
    known = form(connection, schema, topic)
    if known.both:
        return [store(topic, known, blocks=blocks) for blocks in (False, True)]
    return [store(topic, known, blocks=known.blocks)]
