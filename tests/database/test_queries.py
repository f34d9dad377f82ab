"""Named SQL: every statement has a name, a line that describes it and identifiers that are composed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.consuming.snapshot_reader import SnapshotReader
from eventsql_orchestration.database import Database, Queries, queries
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.log_names import event_table
from eventsql_orchestration.storage.log_form import ROOM
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.views import Logs, Timeline, Views
from tests.plans import numbered

ROOMS = ("database", "storage")
FILES = sorted(
    f"{room}/{entry.name.removesuffix('.sql')}"
    for room in ROOMS
    for entry in resources.files(f"eventsql_orchestration.{room}").joinpath("sql").iterdir()
    if entry.name.endswith(".sql")
)
NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"
HEADER = re.compile(r"^-- (\S+) -- (.+)$", re.MULTILINE)


def text_of(file: str) -> str:
    room, name = file.split("/")
    return resources.files(f"eventsql_orchestration.{room}").joinpath("sql", f"{name}.sql").read_text()


def names_in(file: str) -> list[str]:
    room, name = file.split("/")
    return list(queries._statements(name, f"eventsql_orchestration.{room}"))


OF_BLOCKS = {("forms", "broken_blocks")}
"""Statements on the table of a log in blocks, in a file for both forms."""


FILLING = {"fill_timeline", "fill_logs"}
"""Statements of benchmarks on tables of views."""


def composed(file: str, name: str) -> sql.SQL | sql.Composed:
    if file == "database/snapshot_reader":
        # Of any table: its names come with it.
        return SnapshotReader(Database(NOWHERE), "ordered", ["eql_value"])._compose(name, {})
    room, in_room = file.split("/")
    if room == "storage":
        blocks = in_room.startswith(("blocks_", "compacting")) or (in_room, name) in OF_BLOCKS
        topic = "packed" if blocks else "orders"
        if (in_room, name) == ("blocks_read", "read_window"):
            return Queries(in_room, "eventsql", room=ROOM)(name, block_table="packed_block", begin=0, behind=5_000_000)
        if (in_room, name) == ("forms", "compress"):
            return Queries(in_room, "eventsql", room=ROOM)(name, table="packed_block", method="pglz")
        return LogQueries(in_room, "eventsql")(name, topic=topic, table=f"{topic}_{'block' if blocks else 'event'}")
    if file == "database/views" or name in FILLING:
        of_logs = name in {"write_log", "fill_logs"}
        return Queries(in_room, "eventsql")(name, table="view_runs" if of_logs else "view_entries")
    # Leftovers are looked for in the tables that name topics.
    return Queries(in_room, "eventsql")(name, table="consumer")


@pytest.mark.parametrize("file", FILES)
def test_every_statement_has_a_name_of_its_own_and_a_description(file: str) -> None:
    names = [name for name, description in HEADER.findall(text_of(file)) if description.strip()]
    assert names or "-- part " in text_of(file)
    assert len(set(names)) == len(names)
    # One statement under each header: what is not described would run with the one before it.
    assert text_of(file).count(";\n") == len(names)


@pytest.fixture(scope="module")
def with_a_topic(server: EmbeddedPostgres) -> Iterator[Database]:
    """A database with a topic `orders`, for statements that are understood and not run."""
    with EventSQL(server.create_database("understood"), transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", storage="rows")).register_topic(
            Topic("packed", storage="blocks")
        )
        Views(platform.database).declare(Timeline("entries"), Logs("runs"))
        with platform.database.connection() as connection:
            connection.execute("CREATE TABLE eventsql.ordered (eql_transaction xid8, eql_id bigint, eql_value bytea)")
        yield platform.database
    server.drop_database("understood")


NOT_PREPARED = {
    ("database/bench", "create_plain"),
    ("database/layouts", "lock_buffer"),
    ("database/queue", "lock"),
    ("database/store", "hold_changes"),
    ("database/views", "lock_views"),
    ("storage/segments", "vacuum"),
    ("storage/exchanging", "lock_to_vacuum"),
    ("storage/exchanging", "vacuum"),
    ("storage/exchanging", "vacuum_and_analyze"),
    ("storage/exchanging", "counted_by_index"),
}
"""Statements that PREPARE does not take: other tests run them."""


def preparable(file: str) -> list[str]:
    """The statements of a file that PREPARE takes, without those on a table of benchmarks that has no topic."""
    return [
        name
        for name in names_in(file)
        if not (
            file == "database/bench" and (name.endswith(("_raw", "_orders", "_order")) or name.startswith("vacuum_"))
        )
        and not (file == "storage/forms" and name not in {"form_of", "exists", "broken_blocks"})
        and (file, name) not in NOT_PREPARED
    ]


def understand(database: Database, statement: str) -> None:
    with database.connection() as connection:
        if statement.startswith("COPY"):
            with connection.cursor().copy(statement.encode()):
                pass
        else:
            connection.execute(b"PREPARE understood AS " + statement.encode())
            connection.execute("DEALLOCATE understood")


@pytest.mark.parametrize("file", FILES)
def test_every_statement_is_one_that_the_server_understands(with_a_topic: Database, file: str) -> None:
    refused = {}
    for name in preparable(file):
        try:
            understand(with_a_topic, numbered(composed(file, name))[0])
        except psycopg.Error as error:
            refused[name] = str(error)
    assert refused == {}


def test_names_of_schemas_and_topics_are_composed_as_identifiers() -> None:
    statement = LogQueries("read", 'odd"schema')("end", topic='odd"topic').as_string()
    assert statement == 'SELECT coalesce(pg_catalog.max(eql_id), 0) FROM "odd""schema"."odd""topic_event"'


@pytest.mark.parametrize("file", FILES)
def test_a_description_stays_in_the_file(file: str) -> None:
    assert [name for name in names_in(file) if "--" in composed(file, name).as_string()] == []


def test_a_statement_without_a_name_is_a_mistake_of_the_program() -> None:
    with pytest.raises(KeyError, match="no_such_statement"):
        Queries("log", "eventsql")("no_such_statement")


def test_a_name_that_is_given_twice_is_a_mistake_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice:
        def joinpath(self, *_: str) -> Twice:
            return self

        def read_text(self, **_: str) -> str:
            return "-- one -- First.\nSELECT 1;\n-- one -- Second.\nSELECT 2;\n"

    monkeypatch.setattr(resources, "files", lambda _package: Twice())
    with pytest.raises(ValueError, match="twice"):
        Queries("twice", "eventsql")("one")


def test_a_part_is_contained_in_later_statements_and_a_statement_may_look_at_one_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Parts:
        def joinpath(self, *_: str) -> Parts:
            return self

        def read_text(self, **_: str) -> str:
            return "-- part ids -- Ids.\neql_id\n-- all -- All.\nSELECT {ids} FROM a WHERE {in_partition} {ids} > 1;\n"

    monkeypatch.setattr(resources, "files", lambda _package: Parts())
    made = Queries("parts", "eventsql")
    assert made("all").as_string() == "SELECT eql_id FROM a WHERE eql_id OPERATOR(pg_catalog.>) 1"
    assert made("all_partition").as_string() == (
        "SELECT eql_id FROM a WHERE eql_partition OPERATOR(pg_catalog.=) %(partition)s AND "
        "eql_id OPERATOR(pg_catalog.>) 1"
    )
    with pytest.raises(KeyError):
        made("ids")


def test_the_table_of_a_topic_is_named_after_it() -> None:
    assert event_table("account_created") == "account_created_event"


def test_the_table_of_a_topic_with_capitals_is_named_as_postgresql_folds_it() -> None:
    assert event_table("AccountCreated") == "accountcreated_event"
