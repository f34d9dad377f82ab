"""The room `storage` alone names the tables of events: all SQL and all Python of the other rooms is read.

Migrations are released files and stay as they are. The functions that they install run in the server, where a name is
made from a topic. The database room has the pattern of the names, for roles and for messages of the server.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import eventsql_orchestration

PACKAGE = Path(eventsql_orchestration.__file__).parent

EXEMPT = {"storage", "migrations", "functions"}

OTHERS = sorted(
    path
    for path in PACKAGE.rglob("*")
    if path.suffix in {".py", ".sql"} and not EXEMPT & set(path.relative_to(PACKAGE).parts)
)

EVENT_TABLE = re.compile(r"\{event_table\}|(?<!spark_staged)(?<!dagster)(?<!wait)_event\b")
"""An event table by its placeholder, or by a name that ends as theirs; three other tables and columns end so, too."""

PATTERN = PACKAGE / "database" / "log_names.py"


def named_in_sql(text: str) -> list[str]:
    """The lines of statements that name an event table."""
    statements = (line for line in text.splitlines() if not line.startswith("--"))
    return [line for line in statements if EVENT_TABLE.search(line)]


def named_in_python(text: str) -> list[str]:
    """The strings, without docstrings, that name an event table, and the imports of its name."""
    tree = ast.parse(text)
    return list(_strings(tree)) + [
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name == "event_table"
    ]


def _strings(tree: ast.Module) -> Iterator[str]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings and EVENT_TABLE.search(str(node.value)):
            yield str(node.value)


def named_in(path: Path) -> list[str]:
    return (named_in_sql if path.suffix == ".sql" else named_in_python)(path.read_text(encoding="utf-8"))


def test_no_other_room_names_an_event_table() -> None:
    assert OTHERS
    named = {str(path.relative_to(PACKAGE)): named_in(path) for path in OTHERS if path != PATTERN}
    assert {file: names for file, names in named.items() if names} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT count(*) FROM {schema}.{event_table};",
        "SELECT FROM eventsql.orders_event WHERE eql_id = 1;",
        "SELECT lower(t.eql_name) || '_event' FROM {schema}.topic t;",
    ],
)
def test_a_statement_that_names_an_event_table_is_found(statement: str) -> None:
    assert named_in_sql(f"-- count -- Events of orders_event.\n{statement}\n") == [statement]


@pytest.mark.parametrize(
    "line",
    [
        "name = 'SELECT FROM eventsql.orders_event'",
        "name = f'{topic}_event'",
        "name = topic + '_event'",
        "from eventsql_orchestration.database.log_names import event_table",
    ],
)
def test_python_that_names_an_event_table_is_found(line: str) -> None:
    assert len(named_in_python(f'"""Reads orders_event."""\n{line}\n')) == 1


def test_tables_that_are_no_logs_may_be_named() -> None:
    assert named_in_sql("SELECT FROM {schema}.spark_staged_event;\nSELECT eql_failed_event_id FROM t;") == []
    assert named_in_python("columns = ['dagster_event', 'eql_last_event_id']") == []
