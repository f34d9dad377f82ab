"""`eventsql migrate`."""

from __future__ import annotations

import json

import psycopg

from eventsql_orchestration.cli.doctor_database import schema_finding
from eventsql_orchestration.cli.findings import Status
from eventsql_orchestration.database import Database, migrations
from tests.cli.conftest import Run


def test_the_time_zone_of_old_times_is_chosen_before_they_are_adopted(invoke: Run, fresh: str) -> None:
    unknown = invoke("--dsn", fresh, "migrate", "--times-in", "Middle/Earth")
    assert unknown.exit_code == 2
    assert "time zone 'Middle/Earth'" in unknown.stderr
    assert invoke("--dsn", fresh, "migrate", "--times-in", "Asia/Tokyo").exit_code == 0
    late = invoke("--dsn", fresh, "migrate", "--times-in", "Asia/Tokyo")
    assert late.exit_code == 1
    assert "comes too late" in late.stderr


def test_tables_of_the_java_library_ask_for_their_time_zone_before_they_are_migrated(invoke: Run, fresh: str) -> None:
    with psycopg.connect(fresh) as connection:
        connection.execute("CREATE SCHEMA eventsql")
        connection.execute("CREATE TABLE eventsql.topic (eql_name varchar)")
    assert "--times-in" in invoke("--dsn", fresh, "lag").stderr
    findings = json.loads(invoke("--dsn", fresh, "doctor", "--json").stdout)["findings"]
    (schema,) = [each for each in findings if each["check"] == "schema"]
    assert (schema["status"], "--times-in" in schema["remedy"]) == ("problem", True)
    # Also where the first command migrates.
    with Database(fresh) as database:
        assert schema_finding(database, embedded=True).status is Status.PROBLEM


def test_migrate_creates_the_tables_once(invoke: Run, fresh: str) -> None:
    first = invoke("--dsn", fresh, "migrate")
    assert (first.exit_code, first.stdout) == (0, "")
    assert f"is at revision {migrations.HEAD} now" in first.stderr
    again = invoke("--dsn", fresh, "migrate")
    assert again.exit_code == 0
    assert f"was at revision {migrations.HEAD} already" in again.stderr


def test_a_schema_of_another_name_is_migrated_beside_it(invoke: Run, dsn: str) -> None:
    assert invoke("--dsn", dsn, "--schema", "mine", "migrate").exit_code == 0
    assert invoke("--dsn", dsn, "--schema", "mine", "topic", "create", "orders").exit_code == 0
    assert json.loads(invoke("--dsn", dsn, "topic", "list", "--json").stdout) == []
