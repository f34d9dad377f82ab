"""Completion in a shell, and what `eventsql` loads before a command runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import psycopg
import pytest
from click.testing import Result

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.cli import lazy, main
from eventsql_orchestration.cli.offered_names import offered
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.queue import Queue
from tests.cli.conftest import PROGRAM

HEAVY = [
    "rich", "pydantic", "psycopg", "psycopg2", "sqlalchemy", "alembic", "pyspark", "pyarrow", "pandas", "dagster",
]  # fmt: skip


def completing(*words: str) -> dict[str, str]:
    """What bash tells the program of the words whose last word is to be completed."""
    return {
        "_EVENTSQL_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["eventsql", *words]),
        "COMP_CWORD": str(len(words)),
    }


def completed(*words: str, **environment: str) -> list[str]:
    """What Tab offers for the last of the words."""
    shown = subprocess.run(
        [PROGRAM],
        env={**os.environ, **completing(*words), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stderr == ""
    return [line.removeprefix("plain,") for line in shown.stdout.split()]


def prepare(platform: EventSQL) -> None:
    for topic in ("rides", "rides_dlt", "prices"):
        platform.registry.register_topic(Topic(topic))
    for consumer in ("ledger", "payout"):
        platform.registry.declare_consumer(Consumer("rides", consumer))


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="defined")


@pytest.fixture
def defined(platform: EventSQL) -> EventSQL:
    return platform


def test_commands_and_options_are_completed() -> None:
    assert completed("tra") == ["transfer", "trace"]
    assert completed("topic", "de") == ["delete", "describe"]
    assert completed("tail", "rides", "--fr") == ["--from"]


def test_topics_are_completed(defined: EventSQL, dsn: str) -> None:
    assert completed("topic", "describe", "ri", EVENTSQL_DSN=dsn) == ["rides", "rides_dlt"]
    assert completed("--dsn", dsn, "tail", "") == ["prices", "rides", "rides_dlt"]


def test_consumers_of_the_topic_before_are_completed(defined: EventSQL, dsn: str) -> None:
    assert completed("seek", "rides", "p", EVENTSQL_DSN=dsn) == ["payout"]
    assert completed("consume", "prices", "", EVENTSQL_DSN=dsn) == []


def test_queues_are_completed(platform: EventSQL, dsn: str) -> None:
    Queue(platform, "mails", max_receives=1).definition()
    assert completed("queue", "delete", "mai", EVENTSQL_DSN=dsn) == ["mails", "mails_dead"]


def test_names_that_a_shell_would_obey_are_not_offered(defined: EventSQL, dsn: str) -> None:
    for name in ("$(reboot)", "`reboot`", "a;reboot", "a b", "größe-1"):
        defined.registry.declare_consumer(Consumer("prices", name))
    assert completed("consume", "prices", "", EVENTSQL_DSN=dsn) == ["größe-1"]


def test_completion_leaves_no_limit_on_the_session_of_a_pooler(
    defined: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn, autocommit=True) as session:
        # A pooler hands the session on as it is.
        shared = SimpleNamespace(execute=session.execute, transaction=session.transaction, close=session.rollback)
        monkeypatch.setattr(lazy, "connect", lambda *_, **__: shared)
        context = click.Context(main, info_name="eventsql")
        context.params["dsn"] = (dsn,)
        assert [item.value for item in offered(context, "topic", "pri")] == ["prices"]
        assert session.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_the_settings_file_names_the_database_of_completion(defined: EventSQL, dsn: str, directory: Path) -> None:
    (directory / "eventsql.toml").write_text(f'dsn = ["{dsn}"]\n')
    assert completed("tail", "pri") == ["prices"]


def test_a_url_for_the_platform_alone_names_the_database_of_completion(defined: EventSQL, dsn: str) -> None:
    ours = dsn.replace("postgresql://", "postgresql+psycopg://") + "?direct=127.0.0.1:1&connect_timeout=5"
    assert completed("tail", "pri", EVENTSQL_DSN=ours) == ["prices"]


def test_completion_starts_no_server_and_says_nothing_about_a_database_that_is_down(
    directory: Path, closed_port: int
) -> None:
    assert completed("tail", "") == []
    assert EmbeddedPostgres(directory / ".eventsql" / "postgres").status() is None
    assert completed("tail", "", EVENTSQL_DSN=f"postgresql://me@127.0.0.1:{closed_port}/x") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(invoke: Callable[..., Result], shell: str) -> None:
    shown = invoke("completion", shell)
    assert shown.exit_code == 0
    assert f"_EVENTSQL_COMPLETE={shell}_complete" in shown.stdout


def test_the_script_works_in_bash(defined: EventSQL, dsn: str) -> None:
    script = f"""
        PATH={PROGRAM.parent}:$PATH
        eval "$(eventsql completion bash)"
        COMP_WORDS=(eventsql tail pri) COMP_CWORD=2
        _eventsql_completion eventsql
        echo "${{COMPREPLY[@]}}"
    """
    shown = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "EVENTSQL_DSN": dsn}, capture_output=True, text=True, check=True
    )
    assert (shown.stdout, shown.stderr) == ("prices\n", "")


def test_an_unknown_shell_is_asked_for(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    asked = invoke("completion")
    assert asked.exit_code == 2
    assert asked.stderr.startswith("eventsql: name the shell: bash, zsh or fish")


# What is loaded


def loaded(*words: str, **environment: str) -> set[str]:
    """Those of HEAVY that `eventsql` has loaded when it ends."""
    code = (
        "import atexit, json, os, sys\n"
        f"loaded = lambda: [each for each in {HEAVY!r} if each in sys.modules]\n"
        "atexit.register(lambda: os.write(3, json.dumps(loaded()).encode()))\n"
        "from eventsql_orchestration.cli import main\n"
        "main()"
    )
    reads, writes = os.pipe()
    try:
        subprocess.run(
            ["bash", "-c", f'exec "$0" -c "$1" "${{@:2}}" 3>&{writes}', sys.executable, code, *words],
            env={**os.environ, **environment},
            pass_fds=(writes,),
            stdout=subprocess.DEVNULL,
            check=True,
        )
    finally:
        os.close(writes)
    with os.fdopen(reads) as shown:
        return set(json.load(shown))


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["topic", "create", "--help"], ["tail", "--help"]])
def test_the_version_and_the_help_load_nothing_heavy(words: list[str]) -> None:
    assert loaded(*words) == set()


@pytest.mark.parametrize(
    "words",
    [["t"], ["topic", "d"], ["publish", "x", "--"], ["tail", "x", "--"], ["lag", "--"], ["seek", "x", "y", "--"],
     ["consumer", "create", "--"], ["dlt", "redrive", "x", "--"], ["consume", "--"]],
    ids=" ".join,
)  # fmt: skip
def test_completing_commands_and_options_loads_nothing_heavy(words: list[str]) -> None:
    assert loaded(**completing(*words)) == set()


def test_completing_names_loads_nothing_heavy_but_the_driver(defined: EventSQL, dsn: str) -> None:
    assert loaded(EVENTSQL_DSN=dsn, **completing("consume", "rides", "")) == {"psycopg"}
