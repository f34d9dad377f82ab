"""`eventsql server`: the embedded server of a directory is shown, started, named and stopped."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.cli.conftest import Run


def test_a_running_server_is_shown_without_its_password(invoke: Run, server: EmbeddedPostgres) -> None:
    running = server.start()
    with psycopg.connect(running.dsn) as connection:
        major = connection.info.server_version // 10_000
    result = invoke("--home", server.directory.parent, "server", "status", "--json")
    shown = json.loads(result.stdout)
    assert shown.pop("version").startswith(f"{major}.")
    assert shown == {
        "directory": str(server.directory), "running": True, "pid": running.pid, "port": running.port,
    }  # fmt: skip
    table = invoke("--home", server.directory.parent, "server", "status")
    assert ["port", str(running.port)] in [line.split() for line in table.stdout.splitlines()]
    assert running.password not in result.output + table.output


def test_the_url_alone_is_printed_whatever_database_is_named(
    invoke: Run, server: EmbeddedPostgres, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    result = invoke("--home", server.directory.parent, "server", "url")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{server.start().dsn}\n", "")


def test_a_server_is_started_once(invoke: Run, home: Path) -> None:
    assert "`eventsql server start` starts it" in invoke("--home", home, "server", "status").stderr
    for said in ("started the embedded server of ", "runs already"):
        started = invoke("--home", home, "server", "start")
        assert (started.exit_code, started.stdout) == (0, "")
        assert said in started.stderr
    assert json.loads(invoke("--home", home, "server", "status", "--json").stdout)["running"]


def test_asking_for_the_url_starts_the_server_and_stopping_keeps_its_data(invoke: Run, home: Path) -> None:
    def running() -> bool:
        return bool(json.loads(invoke("--home", home, "server", "status", "--json").stdout)["running"])

    # A start that was interrupted leaves its directory.
    (home / "postgres").mkdir(parents=True)
    assert not running()
    started = invoke("--home", home, "server", "url")
    assert started.exit_code == 0
    assert started.stderr.startswith("eventsql: made and started the embedded server of ")
    url = started.stdout.strip()
    assert running()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
    assert invoke("--dsn", url, "migrate").exit_code == 0
    stopped = invoke("--home", home, "server", "stop")
    assert (stopped.exit_code, stopped.stdout) == (0, "")
    assert "has stopped; its data stays" in stopped.stderr
    assert not running()
    again = invoke("--home", home, "server", "stop")
    assert (again.exit_code, "does not run" in again.stderr) == (0, True)
    again = invoke("--home", home, "server", "url")
    assert again.stderr.startswith("eventsql: started the embedded server of ")
    with psycopg.connect(again.stdout.strip()) as connection:
        assert connection.execute("SELECT value FROM kept").fetchone() == (1,)


def test_nothing_is_made_where_no_server_ever_ran(invoke: Run, directory: Path) -> None:
    for command in ("status", "stop"):
        assert invoke("server", command).exit_code == 0
    assert list(directory.iterdir()) == []
