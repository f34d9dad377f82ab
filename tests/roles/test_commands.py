"""The program as each role, and the commands that make roles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from eventsql_orchestration import EventSQL, Publication, Retention
from eventsql_orchestration.cli import main
from eventsql_orchestration.database.roles import Roles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.roles.conftest import Login


def _run(dsn: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--dsn", dsn, *arguments])


READING = (
    ("lag",), ("lag", "orders"), ("tail", "orders", "--from", "earliest", "--limit", "2"), ("topic", "list"),
    ("topic", "describe", "orders"), ("consumer", "list"), ("consumer", "describe", "orders", "mailer"),
    ("topic", "stats"), ("topic", "stats", "orders"), ("top", "--count", "1"),
    ("top", "orders", "--count", "1", "--json"),
)  # fmt: skip

OF_ALL_TOPICS = (("dlt", "list", "orders"), ("doctor",), ("roles", "list"))


@pytest.mark.parametrize(("role", "commands"), [("reader", READING + OF_ALL_TOPICS), ("reader_orders", READING)])
def test_a_reader_sees_events_lag_and_definitions(
    owner: EventSQL, login: Login, role: str, commands: Sequence[tuple[str, ...]]
) -> None:
    owner.registry.set_retention("orders", Retention(events=1))
    for _ in range(2):
        owner.publisher.publish_all([Publication("orders", b"v")] * 4)
        owner.transfer.run_once()
        owner.retention.run_once()
    assert owner.retention.run_once()[0].held_by is not None
    dsn = login(role)
    for command in commands:
        result = _run(dsn, *command)
        assert result.exit_code == 0, (command, result.output)


@pytest.mark.usefixtures("owner")
def test_doctor_as_another_role_asks_for_the_role_reader_alone(login: Login) -> None:
    findings = json.loads(_run(login("publisher_orders"), "doctor", "--json").stdout)["findings"]
    (refused,) = [each for each in findings if each["status"] == "problem"]
    assert "(permission denied for " in refused["message"]
    assert "GRANT" not in refused["message"]
    assert refused["remedy"].startswith("grant the login the role reader, ")


def _schema_findings(dsn: str) -> list[dict[str, str]]:
    """What the doctor finds wrong with the platform's tables."""
    findings = json.loads(_run(dsn, "doctor", "--json").stdout)["findings"]
    return [each for each in findings if each["check"] == "schema" and each["status"] != "ok"]


WITHOUT_PRIVILEGES = "UPDATE pg_proc SET proacl = NULL WHERE prosecdef AND pronamespace = 'eventsql'::regnamespace"
"""As after a restore with --no-privileges: by default, PUBLIC may execute a function."""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("GRANT CREATE ON SCHEMA eventsql TO PUBLIC", "every role may create objects in eventsql: "),
        ("GRANT CREATE ON SCHEMA eventsql TO pg_monitor", "pg_monitor may create objects in eventsql: "),
        (WITHOUT_PRIVILEGES, "every role may execute functions that run with their owner's rights"),
    ],
)
def test_doctor_names_rights_that_roles_should_not_have_and_how_to_revoke_them(
    owner: EventSQL, direct_dsn: str, fault: str, message: str
) -> None:
    assert _schema_findings(direct_dsn) == []
    with owner.database.connection() as connection:
        connection.execute(fault)
    (warning,) = _schema_findings(direct_dsn)
    assert warning["status"] == "warning"
    assert warning["message"].startswith(message)
    assert "owner's rights" in warning["message"]
    with owner.database.connection() as connection:
        connection.execute(warning["remedy"])
    assert _schema_findings(direct_dsn) == []


@pytest.mark.parametrize(
    ("function", "definition"),
    [
        ("FUNCTION eventsql.partition_of_key(text, smallint)", "RETURNS integer LANGUAGE sql RETURN 0"),
        ("AGGREGATE eventsql.partition_of_key(integer)", "(sfunc = int4pl, stype = integer)"),
    ],
)
def test_doctor_names_a_function_that_another_role_has_made_after_the_right_to_make_it_is_gone(
    owner: EventSQL, direct_dsn: str, function: str, definition: str
) -> None:
    with owner.database.connection() as connection:
        for statement in (
            "GRANT CREATE ON SCHEMA eventsql TO pg_monitor",
            "SET ROLE pg_monitor",
            f"CREATE {function} {definition}",
            "RESET ROLE",
            "REVOKE CREATE ON SCHEMA eventsql FROM pg_monitor",
        ):
            connection.execute(statement.encode())
    (warning,) = _schema_findings(direct_dsn)
    assert warning["message"].startswith(f"role pg_monitor owns function {function.partition(' ')[2]}, ")
    with owner.database.connection() as connection:
        connection.execute(warning["remedy"].removeprefix("look at it, and ").partition(";")[0])
    assert _schema_findings(direct_dsn) == []


def test_doctor_says_how_a_function_of_the_platform_gets_its_owner_back(owner: EventSQL, direct_dsn: str) -> None:
    """As after somebody has given the tables alone to another role."""
    with owner.database.connection() as connection:
        connection.execute("ALTER FUNCTION eventsql.publish_anywhere() OWNER TO pg_monitor")
    (warning,) = _schema_findings(direct_dsn)
    with owner.database.connection() as connection:
        connection.execute(warning["remedy"].partition("if it is the platform's own: ")[2])
    assert _schema_findings(direct_dsn) == []


@pytest.mark.usefixtures("own_roles")
def test_doctor_names_the_command_that_gives_the_tables_to_the_admin_role_after_a_restore_without_owners(
    owner: EventSQL, direct_dsn: str, prefix: str
) -> None:
    with owner.database.connection() as connection:
        connection.execute(f"REASSIGN OWNED BY {prefix}_admin TO CURRENT_USER")
    (finding,) = _schema_findings(direct_dsn)
    assert (finding["status"], f"and not to {prefix}_admin" in finding["message"]) == ("problem", True)
    _, _, command = finding["remedy"].partition(": eventsql ")
    assert _run(direct_dsn, *command.split()).exit_code == 0
    assert _schema_findings(direct_dsn) == []


@pytest.mark.usefixtures("own_roles")
def test_doctor_names_what_every_role_may_execute_also_after_a_restore_without_owners(
    owner: EventSQL, direct_dsn: str, prefix: str
) -> None:
    with owner.database.connection() as connection:
        connection.execute(f"REASSIGN OWNED BY {prefix}_admin TO CURRENT_USER")
        connection.execute(WITHOUT_PRIVILEGES)
    found = _schema_findings(direct_dsn)
    assert [each["message"].split()[:3] for each in found] == [["every", "role", "may"], ["the", "tables", "belong"]]


COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "publisher": [("publish", "orders")],
    "publisher_orders": [("publish", "orders")],
    "transfer": [("transfer", "--once")],
    "consumer": [
        ("consume", "orders", "mailer", "--limit", "1"),
        ("seek", "orders", "mailer", "--to-latest", "--execute"),
    ],
    "consumer_orders": [("consume", "orders", "mailer", "--limit", "1")],
    "admin": [
        ("migrate",),
        ("topic", "create", "other"),
        ("topic", "retain", "--execute"),
        ("roles", "list"),
    ],
}


@pytest.mark.parametrize("role", COMMANDS)
def test_each_role_has_its_commands(owner: EventSQL, login: Login, role: str) -> None:
    owner.publisher.publish_all([Publication("orders", b"v")] * 4)
    owner.transfer.run_once()
    dsn = login(role)
    for command in COMMANDS[role]:
        result = CliRunner().invoke(main, ["--dsn", dsn, *command], input='{"a": 1}\n')
        assert result.exit_code == 0, (command, result.output)


def test_a_reader_is_told_which_role_it_lacks(owner: EventSQL, login: Login, prefix: str) -> None:
    letter = {"dlt_topic": "orders", "dlt_event_id": "1", "dlt_consumer": "mailer"}
    owner.publisher.publish(Publication("orders_dlt", b"v", metadata=letter))
    owner.transfer.run_once()
    owner.publisher.publish(Publication("orders", b"v"))
    dsn = login("reader")
    for command in (
        ("topic", "create", "other"),
        ("topic", "delete", "orders", "--execute", "--force"),
        ("consumer", "delete", "orders", "mailer", "--execute"),
        ("seek", "orders", "mailer", "--to-latest", "--execute"),
        ("dlt", "redrive", "orders", "--execute"),
        ("roles", "create", "--prefix", prefix),
        ("roles", "drop", "--all", "--execute"),
        ("publish", "orders"),
        ("transfer", "--once"),
    ):
        result = CliRunner().invoke(main, ["--dsn", dsn, *command], input='{"a": 1}\n')
        assert result.exit_code == 1, (command, result.output)
        assert f"{prefix}_login_0" in result.output
        assert f"{prefix}_" in result.output.replace(f"{prefix}_login_0", "")
        assert "Traceback" not in result.output


def test_the_list_shows_members(owner: EventSQL, login: Login, direct_dsn: str, prefix: str) -> None:
    login("publisher", "reader_orders")
    result = _run(direct_dsn, "roles", "list", "--json")
    rows = {row["role"]: row for row in json.loads(result.stdout)}
    assert rows[f"{prefix}_publisher"]["members"] == [f"{prefix}_login_0"]
    assert rows[f"{prefix}_reader_orders"] == {
        "role": f"{prefix}_reader_orders", "kind": "reader", "topic": "orders", "members": [f"{prefix}_login_0"],
    }  # fmt: skip
    assert len(rows) == len(Roles(owner.database).states()) == 12


def test_a_member_by_two_grants_is_listed_once(owner: EventSQL, login: Login, direct_dsn: str, prefix: str) -> None:
    login("publisher")
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        group, member, grantor = (sql.Identifier(f"{prefix}_{name}") for name in ("publisher", "login_0", "admin"))
        connection.execute(sql.SQL("GRANT {} TO {} WITH ADMIN OPTION").format(group, grantor))
        connection.execute(sql.SQL("GRANT {} TO {} GRANTED BY {}").format(group, member, grantor))
        result = _run(direct_dsn, "roles", "list", "--json")
        connection.execute(sql.SQL("REVOKE {} FROM {} CASCADE").format(group, grantor))
    rows = {row["role"]: row for row in json.loads(result.stdout)}
    assert rows[f"{prefix}_publisher"]["members"] == [f"{prefix}_admin", f"{prefix}_login_0"]


def test_creating_printing_and_dropping(dsn: str, direct_dsn: str, prefix: str) -> None:
    with EventSQL(dsn) as platform:
        platform.open()
    printed = _run(direct_dsn, "roles", "sql", "--prefix", prefix)
    assert "no roles" in _run(direct_dsn, "roles", "list").output
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL(printed.stdout))
    assert f"{prefix}_stager" in _run(direct_dsn, "roles", "list").output
    assert _run(direct_dsn, "roles", "create", "--prefix", prefix).exit_code == 0
    assert _run(direct_dsn, "roles", "create", "--prefix", "another").exit_code == 2
    assert _run(direct_dsn, "roles", "drop").exit_code == 2
    planned = _run(direct_dsn, "roles", "drop", "--all")
    assert f"{prefix}_stager" in planned.stderr
    assert f"{prefix}_stager" in _run(direct_dsn, "roles", "list").output
    assert _run(direct_dsn, "roles", "drop", "--all", "--execute").exit_code == 0
    assert "no roles" in _run(direct_dsn, "roles", "list").output


@pytest.mark.parametrize("prefix", ["Bad Name", "p" * 60, ""])
def test_an_impossible_prefix_is_refused(direct_dsn: str, prefix: str) -> None:
    assert _run(direct_dsn, "roles", "create", "--prefix", prefix).exit_code == 2


def test_a_topic_that_does_not_exist_gets_no_roles(direct_dsn: str, prefix: str) -> None:
    assert _run(direct_dsn, "roles", "create", "--prefix", prefix, "--topic", "nothing").exit_code == 1
    assert "no roles" in _run(direct_dsn, "roles", "list").output


def test_a_login_is_not_taken_for_a_group(direct_dsn: str, prefix: str) -> None:
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        name = sql.Identifier(f"{prefix}_admin")
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN SUPERUSER").format(name))
        try:
            assert _run(direct_dsn, "roles", "create", "--prefix", prefix).exit_code == 2
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(name))
