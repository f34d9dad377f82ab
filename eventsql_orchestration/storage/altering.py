"""Changes the form of a log in use: new events get another form from the next segment on.

The caller's transaction holds the registry and the topic, so nobody writes to the log. Statements that read the log
wait, and then find the views, which `log_form` describes. Nothing is rewritten.
"""

from __future__ import annotations

from psycopg import sql

from eventsql_orchestration.database import Connection, replaced_tables
from eventsql_orchestration.database.log_names import block_store, block_table, event_table, row_store
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.model import BLOCKS, Storage, Topic
from eventsql_orchestration.storage import legacy_writer_trigger, log_form, log_table, segments
from eventsql_orchestration.storage.log_form import FORMS, Form
from eventsql_orchestration.storage.log_queries import LogQueries

_BOTH = FORMS["both, new blocks"]
"""A log with both forms. The names of its tables do not depend on the form that new events get."""


def change(connection: Connection, schema: str, topic: Topic, storage: Storage) -> bool:
    """Let new events of a log have the form `storage`; False if they have it already.

    Call it for a log with segments, while no program retains or erases its events. Raises `RegistryError` if an object,
    such as a view, depends on a table that gets another name, or if another table has a name that the log needs.
    """
    form, blocks = log_form.form_in_transaction(connection, schema, topic.name), storage == BLOCKS
    if form.writes_blocks == blocks:
        return False

    (namespace, name) = fetch_one(connection, LogQueries("segments", schema)("sequence", topic=topic.name))
    if not form.both:
        _make_both(connection, schema, topic, form)
    _write_to(connection, schema, topic.name, sql.Identifier(namespace, name), blocks=blocks)
    simplify(connection, schema, topic.name, topic.partitions)
    segments.ensure_ahead(connection, schema, topic.name)
    return True


def simplify(connection: Connection, schema: str, topic: str, partitions: int) -> bool:
    """Reduce a log in both forms to the form of its new events. False if it holds events of the other form.

    The caller's transaction holds the registry and the topic.
    """
    form = log_form.form_in_transaction(connection, schema, topic)
    if not form.both:
        return False
    queries, blocks = LogQueries("altering", schema), form.writes_blocks
    other = log_form.store(topic, form, blocks=not blocks)
    name = block_table(topic) if blocks else event_table(topic)
    view = sql.Identifier(schema, name)
    store = sql.Identifier(schema, log_form.store(topic, form, blocks=blocks))
    if fetch_one(connection, queries("holds_events", table=other)) == (True,):
        return False
    if segments.dependents(connection, schema, topic, view):
        return False

    replaced_tables.grant_as_on(connection, view, store)
    forms = LogQueries("forms", schema)
    steps = ["create_view", "drop_view_of_blocks", "drop_rows"]
    if not blocks:
        # Other programs read the view of the blocks until they look up the form again.
        steps = ["drop_view", "leave_view_of_blocks", "drop_blocks"]
    for step in steps:
        connection.execute(forms(step, topic=topic, form=form))
    connection.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(store, sql.Identifier(name)))
    if not blocks and fetch_one(connection, queries("lost_partitions"), {"topic": topic}) == (True,):
        legacy_writer_trigger.guard(connection, schema, topic, partitions)
    return True


def _make_both(connection: Connection, schema: str, topic: Topic, form: Form) -> None:
    """Give a log in rows or in blocks both forms. Its new events keep the form that they had."""
    name = topic.name
    stored = sql.Identifier(schema, block_table(name) if form.blocks else event_table(name))
    kept, added = (block_store(name), row_store(name)) if form.blocks else (row_store(name), block_store(name))
    if not form.blocks:
        log_table.drop_left_view(connection, schema, name)
    for table in (kept, added) if form.blocks else (kept, added, block_table(name)):
        log_table.check_free(connection, schema, table)
    segments.check_dependents(connection, schema, name, stored, "another form")

    # From now on, only this version of the package writes to the log, so a log in rows needs no guard.
    legacy_writer_trigger.release(connection, schema, name)
    connection.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(stored, sql.Identifier(kept)))
    if form.blocks:
        log_table.create_row_table(connection, schema, topic, added)
    else:
        log_table.create_block_table(connection, schema, topic, added)
    new = sql.Identifier(schema, added)
    own = fetch_one(connection, LogQueries("altering", schema)("own_sequence"), {"table": new.as_string(connection)})
    connection.execute(sql.SQL("ALTER TABLE {} ALTER COLUMN eql_id DROP DEFAULT").format(new))
    connection.execute(sql.SQL("DROP SEQUENCE {}").format(sql.Identifier(*own)))

    forms = LogQueries("forms", schema)
    for step in ("create_view_of_both", "create_view_of_blocks", *(() if form.blocks else ("refuse_rows",))):
        connection.execute(forms(step, topic=name, form=_BOTH))
    source = sql.Identifier(schema, kept)
    for target in (new, sql.Identifier(schema, event_table(name)), sql.Identifier(schema, block_table(name))):
        segments.pass_on_owner(connection, schema, source, target)
    # From now on, reads of the log go to the view of its blocks.
    for target in (stored,) if form.blocks else (stored, sql.Identifier(schema, block_table(name))):
        replaced_tables.grant_as_on(connection, source, target)


def _write_to(connection: Connection, schema: str, topic: str, sequence: sql.Identifier, *, blocks: bool) -> None:
    """Direct the new events of a log in both forms to its rows or its blocks, from the next segment on."""
    newest = segments.newest_id(connection, schema, topic)
    queries = LogQueries("altering", schema)
    ends = []
    for segment in segments.segments(connection, schema, topic) or ():
        unused = segment.start > newest or newest == 0
        if unused and fetch_one(connection, queries("holds_events", table=segment.table)) == (False,):
            connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(schema, segment.table)))
            continue
        ends.append(segment.end)
    if ends:
        connection.execute(queries("go_on_at"), {"sequence": sequence.as_string(connection), "newest": max(ends) - 1})

    old, new = (sql.Identifier(schema, log_form.store(topic, _BOTH, blocks=each)) for each in (not blocks, blocks))
    for statement in (
        "ALTER TABLE {old} ALTER COLUMN eql_id DROP DEFAULT",
        "ALTER SEQUENCE {sequence} OWNED BY {new}.eql_id",
        "ALTER TABLE {new} ALTER COLUMN eql_id SET DEFAULT pg_catalog.nextval({name}::pg_catalog.regclass)",
    ):
        name = sql.Literal(sequence.as_string(connection))
        connection.execute(sql.SQL(statement).format(old=old, new=new, sequence=sequence, name=name))
    connection.execute(queries("note_form"), {"topic": topic, "storage": "blocks" if blocks else "rows"})
