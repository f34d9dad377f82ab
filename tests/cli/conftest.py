"""`eventsql` in the test's own process, and as a program where exit codes, pipes and signals are what counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import pytest
from click.testing import CliRunner, Result

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import main
from eventsql_orchestration.orchestration.local_processes import free_port
from tests.cli.terminals import Terminal
from tests.conftest import is_setting, own_server

PROGRAM = Path(sys.executable).parent / "eventsql"

Run: TypeAlias = Callable[..., Result]
Start: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]


def json_lines(result: Result, *, exit_code: int = 0) -> list[dict[str, Any]]:
    """The lines of JSON that a command has printed."""
    assert result.exit_code == exit_code, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def one_line(result: Result) -> str:
    """The one line that a failed command leaves behind, without the program's name; standard output is empty."""
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("eventsql: ")
    return lines[0].removeprefix("eventsql: ")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without settings, and an environment without any."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if is_setting(name)]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def home() -> Iterator[Path]:
    """A home whose server may be started."""
    with own_server() as embedded:
        yield embedded.directory.parent


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Runs the program in this process, on whatever database the arguments and the environment name."""

    def invoke_program(*arguments: object, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)

    return invoke_program


@pytest.fixture
def run(dsn: str, invoke: Callable[..., Result]) -> Callable[..., Result]:
    """Runs the program in this process, on the test's database."""

    def run_on_database(*arguments: object, stdin: str | bytes | None = None) -> Result:
        return invoke("--dsn", dsn, *arguments, stdin=stdin)

    return run_on_database


@pytest.fixture
def start(dsn: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the program on the test's database; it is killed when the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start_on_database(
        *arguments: object,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        process_group: int | None = None,
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            env={**os.environ, "EVENTSQL_DSN": dsn, **environment},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            process_group=process_group,
        )
        started.append(process)
        return process

    yield start_on_database
    for process in started:
        process.kill()
        process.wait(60)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def terminal(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal of 30 lines of 120 characters for programs that `start` starts."""
    # A width in the environment of the tests would go first.
    monkeypatch.setenv("COLUMNS", "120")
    opened = Terminal()
    yield opened
    opened.close()


@pytest.fixture
def closed_port() -> int:
    """A port of this machine that nobody listens on."""
    return free_port(0)


@pytest.fixture
def stored(platform: EventSQL) -> Callable[[str], int]:
    """How many events a topic holds, in the buffer and in its log."""

    def count(topic: str) -> int:
        with platform.database.connection() as connection:
            row = connection.execute(
                "SELECT count(*) FROM eventsql.event_buffer WHERE eql_topic = %s", [topic]
            ).fetchone()
        assert row is not None
        return int(row[0]) + platform.reader.count(topic)

    return count
