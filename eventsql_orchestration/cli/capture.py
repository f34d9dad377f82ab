"""`eventsql capture`: the tables whose changes are events of a topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, TypeAlias

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import progress_bar, say, say_plan
from eventsql_orchestration.cli.parameters import AsJson, TopicName, argument, command, executing, option
from eventsql_orchestration.cli.tables import Columns, same
from eventsql_orchestration.validation import counted

_Table: TypeAlias = Annotated[str, argument()]

_COLUMNS: Final[Columns] = {
    **same("table", "topic"),
    "key": lambda each: ", ".join(each.key),
    "columns": lambda each: "all" if each.columns is None else ", ".join(each.columns),
    "snapshot": lambda each: f"{each.snapshot}, {counted(each.snapshot_rows, 'row')}",
    "created": "created_at",
    "problem": "problem",
}
_JSON: Final[Columns] = {
    **same("table", "topic"),
    "key": lambda each: list(each.key),
    "columns": lambda each: None if each.columns is None else list(each.columns),
    **same("snapshot", "snapshot_rows", "created_at", "problem"),
}


@click.group()
def capture() -> None:
    """Publish the changes of a table's rows to a topic."""


@command(capture)
def create(
    context: CliContext,
    *,
    table: _Table,
    topic: TopicName,
    key: Annotated[
        tuple[str, ...], option("Column of a unique key, instead of the primary key; repeat it.", metavar="COLUMN")
    ],
    columns: Annotated[
        tuple[str, ...],
        option("Capture this column, and no others but the key; repeat it.", "--column", metavar="COLUMN"),
    ],
    no_snapshot: Annotated[bool, option("Leave out the rows that the table has now.")],
) -> None:
    """Capture the changes of TABLE to TOPIC from now on, after the rows that TABLE has.

    A transaction that changes TABLE also publishes its changes. The rows that TABLE has now are published too, while
    writers go on. If that ends early, run the command again: it goes on. TABLE is a name as in SQL; without a
    schema, it is in the schema public.
    """
    with context.whole() as platform, _progress() as update:
        made = platform.captures.create(
            table, topic, key=key or None, columns=columns or None, snapshot=not no_snapshot, on_rows=update
        )
    snapshot = "" if no_snapshot else f"; its snapshot of {counted(made.snapshot_rows, 'row')} is done"
    say(f"table {made.table} is captured to topic {topic!r}{snapshot}")


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    with progress_bar("{task.description}", lazy.TimeElapsedColumn()) as progress:
        task = progress.add_task("waiting for the table's writers", total=None)
        yield lambda rows: progress.update(task, description=f"{counted(rows, 'row')} read")


@command(capture, "list")
def list_captures(context: CliContext, as_json: AsJson) -> None:
    """List the captures, and tables with triggers that a deleted topic has left."""
    with context.platform() as platform:
        captures, idle = platform.captures.list(), platform.captures.idle_triggers()
    context.show_items(captures, as_json=as_json, json=_JSON, table=_COLUMNS)
    say_idle(idle)


def say_idle(triggers: Iterable[tuple[str, str]]) -> None:
    """Tell of triggers that a deleted topic has left: each with its table and the topic."""
    for table, topic in triggers:
        say(
            f"table {table} has triggers of a deleted capture, which do nothing: remove them with "
            f"`{lazy.drop_command(table, topic)}`"
        )


@command(capture)
def drop(context: CliContext, table: _Table, topic: TopicName, execute: Annotated[bool, executing("Stop it")]) -> None:
    """Stop capturing the changes of TABLE to TOPIC: a plan and, with --execute, the end. The events stay."""
    with context.whole() as platform:
        if execute:
            platform.captures.drop(table, topic)
            say(f"table {table} is not captured to topic {topic!r} any more")
        else:
            platform.captures.check_captured(table, topic)
            say_plan(f"later changes of table {table} would not be events of topic {topic!r} any more")
