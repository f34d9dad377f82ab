"""Health checks and units name programs that exist; a backup under traffic has each event with its effect."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.cli import main
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.embedded.programs import find_programs

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def test_every_process_that_stays_has_a_health_check_and_waits_for_what_it_needs() -> None:
    ending = {name for name, service in SERVICES.items() if service.get("restart") == "no"}
    assert ending == {"migrate", "migrate-dagster", "roles", "logins"}
    for name, service in SERVICES.items():
        assert (name in ending) != ("healthcheck" in service), name
        for needed, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if needed in ending else "service_healthy"
            assert how == {"condition": expected}


@pytest.mark.parametrize("name", ["code", "daemon"])
@pytest.mark.parametrize("what", ["command", "health check"])
def test_a_process_of_dagster_and_its_health_check_are_commands_with_options_that_they_have(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = SERVICES[name]["command"] if what == "command" else SERVICES[name]["healthcheck"]["test"][1:]
    program, *arguments = words
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    (entry,) = entry_points(group="console_scripts", name=program)
    commands = [each for each in arguments if re.fullmatch(r"[a-z][a-z-]*", each)]
    monkeypatch.setattr(sys, "argv", [program, *commands, "--help"])
    with pytest.raises(SystemExit) as ended:
        entry.load()()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"{option}, " in said for option in arguments if option.startswith("-"))


def test_health_checks_ask_for_the_port_that_the_service_listens_on() -> None:
    for name in ("code", "webserver", "metrics"):
        command = SERVICES[name]["command"]
        port = command[command.index("--port" if "--port" in command else "-p") + 1]
        assert re.search(rf"\b{port}\b", " ".join(SERVICES[name]["healthcheck"]["test"]))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_a_command_with_options_that_it_has_and_keeps_the_password_out(unit: Path) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case
    parser.read(unit, encoding="utf-8")
    program, *words = parser["Service"]["ExecStart"].split()
    assert Path(program).name == "eventsql"
    # The program's own option comes first. It reads the password from a credential: systemd lets the group read it, for
    # which PostgreSQL refuses it as its password file.
    assert (words.pop(0), words.pop(0)) == ("--dsn-file", "%d/url")
    command: click.Command = main
    while words and isinstance(command, click.Group):
        command = command.commands[words[0]].make_context(words.pop(0), [], resilient_parsing=True).command
    assert {word for word in words if word.startswith("--")} <= {flag for each in command.params for flag in each.opts}
    settings = " ".join(parser["Service"].values())
    assert "PGPASSWORD" not in settings
    assert "PGPASSFILE" not in settings
    assert parser["Service"]["LoadCredential"] == f"url:/etc/eventsql/{unit.stem.removeprefix('eventsql-')}.url"


@pytest.fixture
def restored_dsn(server: EmbeddedPostgres) -> Iterator[str]:
    """An empty database."""
    yield server.create_database("restored")
    server.drop_database("restored")


def test_a_backup_under_traffic_restores_each_event_with_its_effect_once(
    direct_dsn: str, restored_dsn: str, tmp_path: Path, until: Callable[..., object]
) -> None:
    def handle(events: Sequence[Event], connection: Connection) -> None:
        for event in events:
            connection.execute("INSERT INTO public.effect VALUES (%s)", (event.value,))

    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.effect (value bytea)")
    stop = threading.Event()
    published: list[int] = []

    def publish(platform: EventSQL) -> None:
        while not stop.is_set():
            platform.publisher.publish(Publication("orders", b"%d" % len(published), key=str(len(published) % 7)))
            published.append(1)

    dump = tmp_path / "eventsql.dump"
    with EventSQL(direct_dsn) as platform:
        platform.registry.register_topic(Topic("orders", 3))
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
        traffic = threading.Thread(target=publish, args=(platform,))
        traffic.start()
        try:
            platform.consumers.consume_once("orders", "mailer", handle)
            until(lambda: len(published) > 100)
            platform.consumers.consume_once("orders", "mailer", handle)
            program("pg_dump", "--format=custom", f"--file={dump}", direct_dsn)
            least = len(published)
            until(lambda: len(published) > least + 10)
        finally:
            stop.set()
            traffic.join()

    program("pg_restore", "--exit-on-error", f"--dbname={restored_dsn}", str(dump))
    with EventSQL(restored_dsn, transfer=False) as restored:
        restored.transfer.run_once()
        before = restored.reader.end("orders")
        assert before >= 100
        restored.publisher.publish(Publication("orders", b"after"))
        restored.transfer.run_once()
        while restored.consumers.consume_once("orders", "mailer", handle):
            pass
        events = [event.value for event in restored.reader.read("orders")]
        assert restored.reader.end("orders") > before
        assert sum(lag.events for lag in restored.lag()) == 0
    with psycopg.connect(restored_dsn) as connection:
        effects = [bytes(value) for (value,) in connection.execute("SELECT value FROM public.effect")]
    assert sorted(effects) == sorted(events)
    numbers = sorted(int(value) for value in events if value != b"after")
    assert numbers == list(range(len(numbers)))


def program(name: str, *arguments: str) -> None:
    done = subprocess.run([find_programs() / name, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
