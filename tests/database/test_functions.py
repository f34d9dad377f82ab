"""Each function in SQL has one definition, and a revision brings it to the databases that exist."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from pathlib import Path

import psycopg

import eventsql_orchestration.database
from eventsql_orchestration.database import Connection, migrations
from tests.database.test_upgrades import upgrade

FILES = {
    entry.name.removesuffix(".sql"): entry.read_text(encoding="utf-8")
    for entry in resources.files(eventsql_orchestration.database).joinpath("functions").iterdir()
}

REVISIONS = {path.name: path.read_text() for path in Path(migrations.__file__).parent.glob("versions/*.py")}

NEWEST = {
    "capture": ("0076", "5554a69765f62f97"),
    "capture_changes": ("0073", "c0aa5c135cf0c609"),
    "consuming": ("0076", "b24040b98781ea6a"),
    "guards": ("0008", "ac9067bf381c0192"),
    "layouts": ("0063", "d80ef76fba92bdcf"),
    "leftovers": ("0025", "cfa11eda1ea84138"),
    "log": ("0069", "5f1e3be3cf8fecd1"),
    "publishing": ("0063", "de8e35eb28fe48e9"),
    "queue": ("0063", "7b098d53469a7a1b"),
    "queue_receiving": ("0076", "fd6d8a4d2c395eae"),
    "queue_sending": ("0076", "a8396c583f9572cc"),
    "queue_settling": ("0071", "f1c94bc5f308a7d9"),
    "reading": ("0063", "7bfb14c734beb928"),
    "store": ("0023", "b23aa28548abfbba"),
    "views": ("0063", "f903c4f4a3468a78"),
}
"""For each file of functions, the newest revision that installs it, and the digest of its statements."""


def names(file: str) -> list[str]:
    return re.findall(r"^CREATE OR REPLACE FUNCTION \{schema\}\.(\w+)", FILES[file], re.MULTILINE)


def digest(text: str) -> str:
    statements = [line for line in text.splitlines() if not line.startswith("--")]
    return hashlib.sha256("\n".join(statements).encode()).hexdigest()[:16]


def newest_revision(file: str) -> str:
    installing = [name for name, text in REVISIONS.items() if re.search(rf'\binstall\([^)]*"{file}"', text)]
    return max(installing)[:4]


def test_a_changed_function_comes_with_a_revision_that_installs_it() -> None:
    found = {file: (newest_revision(file), digest(text)) for file, text in FILES.items()}
    assert found == NEWEST, (
        "A database at the newest revision never gets a change of these files: add a revision that installs them, and "
        "note it here with the new digest."
    )


def test_a_function_has_one_definition() -> None:
    defined = [name for file in FILES for name in names(file)]
    assert len(defined) == len(set(defined))
    assert [name for name, text in REVISIONS.items() if re.search(r"CREATE (OR REPLACE )?FUNCTION", text)] == []


def test_each_function_finds_the_systems_names_in_any_session(session: Connection) -> None:
    found = session.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'eventsql'::regnamespace "
        # The server resolved the names of such a body when the function was made.
        "AND prosqlbody IS NULL AND 'search_path=pg_catalog, pg_temp' = ANY (proconfig) IS NOT TRUE"
    ).fetchall()
    # These name their schemas, or name nothing.
    assert {name for (name,) in found} == {
        "check_publication", "keep_published_block", "partition_of_key", "publish_anywhere",
    }  # fmt: skip


def test_an_upgrade_replaces_the_functions_of_each_file_that_changed_since(fresh: str) -> None:
    before = "0040"
    upgrade(fresh, before)
    with psycopg.connect(fresh, autocommit=True) as connection:
        connection.execute(
            """
            DO $$
            DECLARE
                function regprocedure;
            BEGIN
                FOR function IN SELECT oid FROM pg_proc WHERE pronamespace = 'eventsql'::regnamespace LOOP
                    EXECUTE format('ALTER FUNCTION %s COST 7', function);
                END LOOP;
            END
            $$
            """
        )
        upgrade(fresh, migrations.HEAD)
        kept = connection.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'eventsql'::regnamespace AND procost = 7"
        ).fetchall()
    unchanged = [file for file, (revision, _) in NEWEST.items() if revision <= before and file != "guards"]
    assert unchanged
    assert {name for (name,) in kept} == {name for file in unchanged for name in names(file)}


def is_everybodys(connection: Connection, function: str) -> bool:
    found = connection.execute("SELECT has_function_privilege('pg_monitor', %s, 'EXECUTE')", (f"eventsql.{function}",))
    return found.fetchone() == (True,)


def test_an_upgrade_takes_a_function_from_everybody_when_it_makes_it_and_not_later(fresh: str) -> None:
    upgrade(fresh, "0040")
    with psycopg.connect(fresh, autocommit=True) as connection:
        connection.execute("DROP FUNCTION eventsql.lock_last_of_keys")
        assert not is_everybodys(connection, "hold_topics(text[])")
        connection.execute("GRANT EXECUTE ON FUNCTION eventsql.hold_topics TO PUBLIC")
        upgrade(fresh, migrations.HEAD)
        assert is_everybodys(connection, "hold_topics(text[])")
        assert not is_everybodys(connection, "lock_last_of_keys(integer, text[])")
