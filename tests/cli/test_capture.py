"""`eventsql capture`: tables whose changes are events."""

from __future__ import annotations

import json

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.database import Connection
from tests.cli.conftest import Run


def test_a_capture_is_created_listed_and_dropped(run: Run, platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, code text NOT NULL UNIQUE, status text, secret text)")
    session.execute("INSERT INTO orders VALUES (1, 'a', 'new', 'x')")
    platform.registry.register_topic(Topic("changes"))
    made = run("capture", "create", "orders", "changes", "--key", "code", "--column", "status")
    assert made.exit_code == 0, made.output
    assert "public.orders" in made.output
    # The second call reads nothing.
    again = run("capture", "create", "orders", "changes", "--key", "code", "--column", "status")
    for said in (made, again):
        assert said.stderr.endswith("; its snapshot of 1 row is done\n")
    shown = run("capture", "list", "--json")
    (capture,) = json.loads(shown.stdout)
    assert capture.pop("created_at")
    assert capture == {
        "table": "public.orders", "topic": "changes", "key": ["code"], "columns": ["status"], "snapshot": "done",
        "snapshot_rows": 1, "problem": None,
    }  # fmt: skip
    assert "public.orders" in run("capture", "list").output
    assert run("capture", "drop", "orders", "changes", "--execute").exit_code == 0
    assert json.loads(run("capture", "list", "--json").stdout) == []


def test_the_deletion_of_a_topic_and_the_list_name_triggers_that_stay(
    run: Run, platform: EventSQL, session: Connection
) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    platform.registry.register_topic(Topic("changes"))
    assert run("capture", "create", "orders", "changes", "--no-snapshot").exit_code == 0
    planned = run("topic", "delete", "changes").stderr
    assert "the capture of table public.orders; run it again with --execute --force" in planned
    assert run("topic", "delete", "changes", "--execute").exit_code == 1
    deleted = run("topic", "delete", "changes", "--execute", "--force")
    for said in (deleted, run("capture", "list")):
        assert said.exit_code == 0
        assert "eventsql capture drop --execute public.orders changes" in said.stderr


def test_the_error_says_why_a_table_cannot_be_captured(run: Run, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("changes"))
    assert run("capture", "create", "absent", "changes").exit_code == 1
    assert run("capture", "create", "a b", "changes").exit_code == 2
    assert run("capture", "drop", "absent", "changes").exit_code == 1
