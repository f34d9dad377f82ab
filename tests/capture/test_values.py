"""Values of every kind come back from their JSON as they were, whatever the session is set to."""

from __future__ import annotations

import json

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.database import Connection
from tests.capture.replay import events

ODD_SETTINGS = {
    "TimeZone": "Asia/Kathmandu", "DateStyle": "SQL, DMY", "IntervalStyle": "sql_standard", "bytea_output": "escape",
    "extra_float_digits": "-5", "search_path": "pg_temp, public", "standard_conforming_strings": "on",
    "quote_all_identifiers": "on", "constraint_exclusion": "on", "row_security": "off",
}  # fmt: skip

VALUES = [
    ("boolean", "true"), ("bigint", "9223372036854775807"), ("smallint", "-1"),
    ("real", "'1.1'"), ("double precision", "'0.1'::float8 + 0.2"), ("double precision", "'NaN'"),
    ("double precision", "'-Infinity'"),
    ("numeric", "1e-40"), ("numeric", "'NaN'"), ("numeric(40,3)", "123456789012345678901234567890.120"),
    ("text", r"E'quote \" backslash \\ newline \n tab \t \x01 ☃ 𝄞'"), ("text", "''"), ("text", "'null'"),
    ("character(5)", "'ab'"), ("name", "'it'"), ("uuid", "gen_random_uuid()"), ("bytea", r"'\x00ff5c27'"),
    ("date", "'infinity'"), ("date", "'0044-03-15 BC'"), ("timestamp", "'2026-01-02 03:04:05.678901'"),
    ("timestamp", "'-infinity'"), ("timestamptz", "'2026-07-01 12:00:00.000001+02'"), ("timestamptz", "'infinity'"),
    ("time", "'24:00'"), ("timetz", "'12:00:00.5+05:45'"), ("interval", "'1 year -2 days 03:04:05.6'"),
    ("json", """'{"a": 1,  "a": 2}'"""), ("json", "'null'"), ("jsonb", "'null'"), ("jsonb", """'[1.10, "x"]'"""),
    ("integer[]", "'[5:6]={1,NULL}'"),
    ("text[]", """'{"a,b", "c\\"d", NULL, ""}'"""), ("bytea[]", r"ARRAY['\x00'::bytea]"),
    ("int4range", "'[1,5)'"), ("inet", "'10.0.0.1/8'"), ("money", "'12.34'"), ("bit varying(9)", "B'101'"),
    ("tsvector", "'a fat cat'"), ("point", "'(0.1,2)'"), ("oid", "42"),
    ("mood", "'so \"so\"'"), ("mood[]", "ARRAY['fine'::mood]"), ("pair", "ROW(1, 'a,\"b')::pair"),
    ("pair", "ROW(NULL, NULL)::pair"), ("positive", "7"), ("positive", "NULL"), ("pair", "NULL"), ("jsonb", "NULL"),
    ("price", "1.50"),
]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, ODD_SETTINGS], ids=["plain", "odd"])
def test_every_value_is_read_back_as_it_was(platform: EventSQL, session: Connection, settings: dict[str, str]) -> None:
    session.execute("""CREATE TYPE mood AS ENUM ('fine', 'so "so"')""")
    session.execute("CREATE TYPE pair AS (a integer, b text)")
    session.execute("CREATE DOMAIN positive AS integer CHECK (VALUE > 0)")
    session.execute("CREATE DOMAIN exact AS numeric; CREATE DOMAIN price AS exact")
    columns = ", ".join(f"c{number} {kind}" for number, (kind, _) in enumerate(VALUES))
    session.execute(f"CREATE TABLE public.kinds (id integer PRIMARY KEY, {columns})".encode())
    platform.registry.register_topic(Topic("changes"))
    session.execute(f"INSERT INTO public.kinds SELECT 1, {', '.join(value for _, value in VALUES)}".encode())
    platform.capture("kinds", "changes")
    for name, setting in settings.items():
        session.execute("SELECT set_config(%s, %s, false)", [name, setting])
    session.execute("UPDATE public.kinds SET id = 2")
    for name in settings:
        session.execute(f"RESET {name}".encode())
    read, _, created = events(session)
    assert read["after"].pop("id") == 1
    assert created["after"].pop("id") == 2
    assert read["after"] == created["after"]
    assert list(read["after"]) == [f"c{number}" for number in range(len(VALUES))]
    for (kind, _), (column, value) in zip(VALUES, read["after"].items(), strict=True):
        text = json.dumps(value) if isinstance(value, bool | int | float) else value
        back = session.execute(f"SELECT %s::{kind}::text, {column}::text FROM public.kinds".encode(), [text]).fetchone()
        assert back is not None
        assert back[0] == back[1], (kind, value)


def test_numbers_and_times_have_the_documented_form(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE kinds (id bigint PRIMARY KEY, n numeric, f float8, b bytea, t timestamptz, j jsonb)")
    platform.registry.register_topic(Topic("changes"))
    platform.capture("kinds", "changes")
    session.execute("SET timezone TO 'America/New_York'")
    session.execute(r"""INSERT INTO kinds VALUES (1, 1.10, 0.5, '\x00ff', '2026-07-01 12:00+00', '{"a":null}')""")
    assert events(session)[0]["after"] == {
        "id": 1, "n": "1.10", "f": 0.5, "b": r"\x00ff", "t": "2026-07-01T12:00:00+00:00", "j": '{"a": null}',
    }  # fmt: skip


NAMES = [
    "i",
    "o",
    "n",
    "c",
    "r",
    "key",
    "after",
    'quo"te',
    "back\\slash",
    "per%scent",
    "a, b",
    "$1[1]",
    "SELECT",
    "ünïcode ☃",
]


def test_columns_and_tables_of_any_name_are_captured(platform: EventSQL, session: Connection) -> None:
    quoted = [psycopg.sql.Identifier(name) for name in NAMES]
    table = psycopg.sql.Identifier("public", 'ta"ble; DROP')
    columns = psycopg.sql.SQL(", ").join(psycopg.sql.SQL("{} text NOT NULL").format(each) for each in quoted)
    key = psycopg.sql.SQL(", ").join(quoted[:12])
    session.execute(psycopg.sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({}))").format(table, columns, key))
    platform.registry.register_topic(Topic("changes"))
    values = psycopg.sql.SQL(", ").join(psycopg.sql.Literal(f"{name}'s") for name in NAMES)
    session.execute(psycopg.sql.SQL("INSERT INTO {} VALUES ({})").format(table, values))
    platform.capture(table.as_string(), "changes")
    session.execute(psycopg.sql.SQL("UPDATE {} SET {} = 'changed'").format(table, quoted[-1]))
    read, updated = events(session)
    assert read["after"] == updated["before"] == {name: f"{name}'s" for name in NAMES}
    assert updated["after"] == {**updated["before"], NAMES[-1]: "changed"}
    session.execute(psycopg.sql.SQL("UPDATE {} SET i = 'moved'").format(table))
    assert [each["op"] for each in events(session)] == ["r", "u", "d", "c"]


@pytest.mark.parametrize("rows", [2, 100, 1_000])
def test_a_value_that_no_event_can_carry_is_refused_before_it_is_written(
    platform: EventSQL, session: Connection, rows: int
) -> None:
    session.execute("CREATE TABLE kinds (id integer PRIMARY KEY, long text)")
    platform.registry.register_topic(Topic("changes"))
    platform.capture("kinds", "changes")
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        session.execute(
            "INSERT INTO kinds SELECT n, repeat('long', CASE n WHEN 1 THEN 16800000 ELSE 1 END) "
            "FROM generate_series(1, %s) n",
            [rows],
        )
    assert session.execute("SELECT FROM kinds").rowcount == 0
    assert events(session) == []
