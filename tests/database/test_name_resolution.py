"""No object of another role runs in a session of the package, whatever the session's search_path finds first.

A database is made hostile: `public` has a function, operator, type, view and collation of the name and the types of
each of the system's own, all of which fail when they run, and every session finds `public` before the system's names.
So whatever is named without its schema is found there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import eventsql_orchestration
from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, queries
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.topics.partitioner import partition_of_key
from eventsql_orchestration.views import Logs, Timeline, Views
from tests.database import everything
from tests.database.hostility import make_hostile
from tests.database.test_queries import FILES, composed, preparable
from tests.plans import numbered

UTILITY = ("COPY", "CREATE", "DROP", "LOCK", "VACUUM")
"""Statements that have no expressions, or whose expressions other tests run."""


@pytest.fixture(scope="module")
def hostile_dsn(server: EmbeddedPostgres) -> Iterator[str]:
    dsn = server.create_database("hostile")
    make_hostile(dsn)
    yield dsn
    server.drop_database("hostile")


@pytest.fixture(scope="module")
def hostile(hostile_dsn: str) -> Iterator[EventSQL]:
    """The platform in the hostile database, migrated there from nothing, with a topic `orders`."""
    with EventSQL(hostile_dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", storage="rows")).register_topic(
            Topic("packed", storage="blocks")
        )
        Views(platform.database).declare(Timeline("entries"), Logs("runs"))
        with platform.database.connection() as connection:
            connection.execute(
                "CREATE TABLE eventsql.ordered "
                "(eql_transaction pg_catalog.xid8, eql_id bigint, eql_value pg_catalog.bytea)"
            )
        yield platform


def test_the_hostile_database_captures_what_is_not_qualified(hostile: EventSQL, hostile_dsn: str) -> None:
    for statement in (
        "SELECT 1 + 1", "SELECT 1 || 'a'::pg_catalog.text", "SELECT count(*)", "SELECT now()", "SELECT 'a'::text",
        "SELECT FROM pg_class", "SELECT 1 IN (1)", "SELECT 'a' COLLATE \"C\"", "SELECT convert_to('a', 'UTF8')",
    ):  # fmt: skip
        with hostile.database.connection() as connection:
            assert captured_by(connection, statement), statement
    with psycopg.connect(hostile_dsn) as connection, pytest.raises(psycopg.errors.RaiseException, match="captured"):
        connection.execute("SELECT 1 + 1")


def captured_by(connection: Connection, statement: str) -> list[Any]:
    """The objects of `public` that a statement is found to use. Parameters are numbered."""
    with connection.transaction(force_rollback=True):
        connection.execute(b"PREPARE understood AS " + statement.encode())
        row = connection.execute(
            qualified("SELECT parameter_types::pg_catalog.text[] FROM pg_prepared_statements WHERE name = 'understood'")
        ).fetchone()
        assert row is not None
        connection.execute("DEALLOCATE understood")
        connection.execute(
            f"CREATE FUNCTION eventsql.probe({', '.join(row[0])}) RETURNS pg_catalog.void LANGUAGE sql "
            f"BEGIN ATOMIC {statement}; END".encode()
        )
        return connection.execute(
            qualified("""
            SELECT d.refclassid::regclass::text, d.refobjid, coalesce(o.oprname, p.proname, t.typname, c.relname)
            FROM pg_depend d
            LEFT JOIN pg_operator o ON o.oid = d.refobjid AND d.refclassid = 'pg_catalog.pg_operator'::regclass
            LEFT JOIN pg_proc p ON p.oid = d.refobjid AND d.refclassid = 'pg_catalog.pg_proc'::regclass
            LEFT JOIN pg_type t ON t.oid = d.refobjid AND d.refclassid = 'pg_catalog.pg_type'::regclass
            LEFT JOIN pg_class c ON c.oid = d.refobjid AND d.refclassid = 'pg_catalog.pg_class'::regclass
            LEFT JOIN pg_collation k ON k.oid = d.refobjid AND d.refclassid = 'pg_catalog.pg_collation'::regclass
            WHERE d.objid = (SELECT oid FROM pg_proc WHERE proname = 'probe')
              AND coalesce(o.oprnamespace, p.pronamespace, t.typnamespace, c.relnamespace, k.collnamespace)
                  = 'public'::regnamespace
            """)
        ).fetchall()


def with_expressions(file: str) -> dict[str, str]:
    """The statements of a file that have expressions, by their names. Parameters are numbered."""
    statements = {name: numbered(composed(file, name))[0] for name in preparable(file)}
    return {name: text for name, text in statements.items() if not text.startswith(UTILITY)}


@pytest.mark.parametrize("file", FILES)
def test_a_named_statement_uses_nothing_but_the_systems_names_and_its_own_tables(hostile: EventSQL, file: str) -> None:
    captured = {}
    for name, statement in with_expressions(file).items():
        with hostile.database.connection() as connection:
            captured[name] = captured_by(connection, statement)
    assert {name: objects for name, objects in captured.items() if objects} == {}


@pytest.mark.parametrize("file", FILES)
def test_a_named_statement_means_what_is_written(hostile: EventSQL, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(text: str) -> object:
        with hostile.database.connection() as connection, connection.transaction(force_rollback=True):
            connection.execute("SET LOCAL search_path TO pg_catalog")
            connection.execute(b"PREPARE understood AS " + text.encode())
            row = connection.execute(
                "SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'understood'"
            ).fetchone()
            assert row is not None
            connection.execute("DEALLOCATE understood")
            connection.execute(
                f"CREATE FUNCTION eventsql.probe({', '.join(row[0])}) RETURNS void LANGUAGE sql "
                f"BEGIN ATOMIC {text}; END".encode()
            )
            return connection.execute(
                "SELECT pg_get_function_sqlbody(oid) FROM pg_proc WHERE proname = 'probe'"
            ).fetchone()

    sent = with_expressions(file)
    monkeypatch.setattr(queries, "qualified", lambda text: text)
    queries._read.cache_clear()
    written = with_expressions(file)
    queries._read.cache_clear()
    assert [name for name in written if body(sent[name]) != body(written[name])] == []


# Of Python

PACKAGE = Path(eventsql_orchestration.__file__).parent
SQL = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|COPY|CREATE|ALTER|DROP|LOCK|DO|TRUNCATE)\s[^…]*\Z")
DDL = re.compile(r"(CREATE|ALTER|DROP)\s")
EXPRESSION = re.compile(r"\b(CHECK|WHEN)\b")
NOT_OURS = PACKAGE / "dagster/housekeeping/prune.py"
"""Its statements are on the tables that Dagster makes for itself."""


def texts_of_sql() -> list[tuple[str, str]]:
    """Place and text of the statements in the modules of the package that are not qualified when they are sent."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        # The revisions run where the system's names come first (`migrations.run`).
        if file.parent.name == "versions" or file == NOT_OURS:
            continue
        tree = ast.parse(file.read_text())
        handled: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "qualified":
                handled.update(id(inner) for inner in ast.walk(node))
            if isinstance(node, ast.Expr):
                # A docstring.
                handled.update(id(inner) for inner in ast.walk(node) if isinstance(node.value, ast.Constant))
        for node in ast.walk(tree):
            if id(node) in handled:
                continue
            if isinstance(node, ast.JoinedStr):
                handled.update(id(inner) for inner in ast.walk(node))
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            # Changes of tables have no expressions but these; functions are run below.
            plain = "$$" in text or (DDL.match(text) and not EXPRESSION.search(text))
            if SQL.match(text) and " " in text.strip() and not plain:
                found.append((f"{file.relative_to(PACKAGE)}:{node.lineno}", text))
    return found


def test_statements_in_python_are_qualified_as_they_stand() -> None:
    wrong = {}
    found = texts_of_sql()
    assert found
    for place, text in found:
        head, sign, condition = text.partition(" WHEN ") if text.startswith("CREATE") else ("", "", text)
        condition = condition.partition(" EXECUTE FUNCTION ")[0]
        if head + sign + qualified(condition) != text.partition(" EXECUTE FUNCTION ")[0]:
            wrong[place] = text
    assert wrong == {}


# Of everything together


def test_every_part_of_the_platform_works_in_a_hostile_database(hostile: EventSQL, hostile_dsn: str) -> None:
    everything.use(hostile, hostile_dsn)


def test_an_outbox_leaves_the_callers_search_path_as_it_is(hostile: EventSQL, hostile_dsn: str) -> None:
    with psycopg.connect(hostile_dsn) as mine:
        mine.execute("SET search_path TO public, pg_catalog")
        hostile.publisher.publish(Publication("orders", b"1"), connection=mine)
        assert mine.execute("SHOW search_path").fetchone() == ("public, pg_catalog",)


def test_a_handler_finds_its_tables_by_the_search_path_of_its_role(dsn: str) -> None:
    with EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders")).register_consumer(Consumer("orders", "mine"))
        platform.publisher.publish(Publication("orders", b"1"))
        platform.transfer.run_once()
        with psycopg.connect(dsn, autocommit=True) as administrator:
            administrator.execute("CREATE SCHEMA shop")
            administrator.execute("CREATE TABLE shop.seen (id bigint)")
            name = sql.Identifier(administrator.info.dbname)
            administrator.execute(sql.SQL("ALTER DATABASE {} SET search_path = shop").format(name))
        platform.database.engine.dispose()

        def handle(events: Sequence[Event], connection: Connection) -> None:
            connection.execute("INSERT INTO seen VALUES (%s)", (events[0].id,))

        assert platform.consumers.consume_once("orders", "mine", handle) == 1
        with platform.database.connection() as connection:
            assert connection.execute("SELECT id FROM seen").fetchall() == [(1,)]


def test_functions_of_the_platform_run_as_written_in_a_session_with_a_hostile_path(
    hostile: EventSQL, hostile_dsn: str
) -> None:
    with psycopg.connect(hostile_dsn, autocommit=True) as connection:
        assert connection.execute("SELECT eventsql.partition_of_key('é', 7)").fetchone() == (partition_of_key("é", 7),)
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_id, eql_topic, eql_partition, eql_value, eql_metadata) "
            "VALUES (1000000, 'orders', -2, '', '{}')"
        )
        connection.execute(
            "INSERT INTO eventsql.spark_staged_event "
            "(eql_attempt, eql_position, eql_topic, eql_partition, eql_value, eql_metadata, eql_values, eql_buffer_id) "
            "VALUES ('00000000-0000-0000-0000-000000000000', 0, 'orders', -1, '', '{}', '{}', 1000000)"
        )
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute("DELETE FROM eventsql.event_buffer WHERE eql_partition OPERATOR(pg_catalog.=) -2")
        connection.execute("DELETE FROM eventsql.spark_staged_event")
        connection.execute("DELETE FROM eventsql.event_buffer")


# What the rewriting refuses, and leaves


@pytest.mark.parametrize(
    "text",
    ["SELECT a IN (1)", "SELECT a LIKE 'b'", "SELECT a BETWEEN 1 AND 2", "SELECT a IS DISTINCT FROM b",
     "SELECT NULLIF (a, b)", "SELECT CASE a WHEN 1 THEN 2 END", "SELECT FROM a JOIN b USING (c)", "SELECT $$a$$"],
)  # fmt: skip
def test_syntax_that_cannot_be_qualified_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="qualified"):
        qualified(text)


def test_a_qualified_statement_stays_unchanged() -> None:
    text = qualified("UPDATE a SET b = -1, c = (d = now()) WHERE e::text || 'f' = 'g' COLLATE \"C\" AND h.count(*) > 1")
    assert text == (
        "UPDATE a SET b = -1, c = (d OPERATOR(pg_catalog.=) pg_catalog.now()) "
        "WHERE e::pg_catalog.text OPERATOR(pg_catalog.||) 'f' OPERATOR(pg_catalog.=) 'g' COLLATE pg_catalog.\"C\" "
        "AND h.count(*) OPERATOR(pg_catalog.>) 1"
    )
    assert qualified(text) == text
