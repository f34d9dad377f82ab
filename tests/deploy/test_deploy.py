"""The files of deploy/ agree with each other, with the package and with Dagster; no container is started."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types

from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE, instance_config
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.embedded.programs import find_programs
from eventsql_orchestration.database.urls import parse_dsn
from tests.conftest import is_setting

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
PROGRAMS = Path(sys.executable).parent


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


COMPOSE = read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "eventsql-orchestration"}


def argument(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def instructions(keyword: str) -> list[list[str]]:
    """The words of each instruction of a kind in the Dockerfile, those of one `RUN` together."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith(f"{keyword} ")]


def copied() -> set[str]:
    return {source for words in instructions("COPY") for source in words[:-1]}


@pytest.fixture
def environment(dsn: str, tmp_path: Path) -> dict[str, str]:
    """The environment that compose.yaml gives to a process, on the test's server instead of the service `postgres`."""
    url = parse_dsn(dsn)
    shutil.copy(DEPLOY / "dagster.yaml", tmp_path)
    given = {
        name: value.replace("postgres:5432/eventsql", f"{url.host}:{url.port}/{url.database}")
        for name, value in OURS["code"]["environment"].items()
    }
    assert given["PGPASSWORD"] == "${POSTGRES_PASSWORD:?set a password}"
    inherited = {
        name: value for name, value in os.environ.items() if not is_setting(name) and not name.startswith("DAGSTER_")
    }
    return {**inherited, **given, "PGPASSWORD": str(url.password), "DAGSTER_HOME": str(tmp_path)}


def test_the_instance_is_the_one_that_the_package_writes() -> None:
    assert read("dagster.yaml") == instance_config()


def test_dagster_accepts_the_instance_and_its_storage_has_the_schema_of_its_own(
    environment: dict[str, str], dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute((DEPLOY / "dagster.sql").read_bytes())
        for service in ("migrate", "migrate-dagster"):
            program, *arguments = SERVICES[service]["command"]
            command = [str(PROGRAMS / program), *arguments]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        tables = set(
            connection.execute("SELECT schemaname, tablename FROM pg_tables WHERE schemaname !~ '^(pg_|information)'")
        )
    assert {("eventsql", "event_buffer"), ("dagster", "runs"), ("dagster", "event_logs")} <= tables
    assert {schema for schema, _ in tables} == {"eventsql", "dagster"}
    for name in (STORAGE_VARIABLE, "PGPASSWORD"):
        monkeypatch.setenv(name, environment[name])
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.get_runs_count() == 0
        # Each of these reads its part of the configuration when it is asked for.
        assert instance.run_coordinator is not None
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_program_of_the_image_with_options_that_it_has(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = OURS[name]["command"]
    if program == "sh":
        program, *arguments = shlex.split(arguments[-1].split("||")[-1])
    (entry,) = entry_points(group="console_scripts", name=program)
    given = [word for word in arguments if re.fullmatch("--?[a-z-]+", word)]
    commands = [word for word in arguments if re.fullmatch("[a-z-]+", word) and not word.startswith("-")]
    monkeypatch.setattr(sys, "argv", [program, *commands, "--help"])
    with pytest.raises(SystemExit) as ended:
        entry.load()()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"(^|[\s,]){re.escape(option)}[\s,]", said) for option in given), said


SPARK_SERVICES: dict[str, dict[str, Any]] = {
    name: service for name, service in read("compose.spark.yaml")["services"].items() if "image" in service
}


@pytest.mark.parametrize("name", [*SERVICES, *SPARK_SERVICES])
def test_a_process_has_no_rights_beside_those_of_its_user_and_writes_to_its_volumes_alone(name: str) -> None:
    service = {**SERVICES, **SPARK_SERVICES}[name]
    assert service["security_opt"] == ["no-new-privileges:true"]
    if name == "postgres":
        # Its entrypoint becomes another user, and it writes to its own volume.
        return
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    if name == "logins":
        return
    volumes = [each["target"] if isinstance(each, dict) else each.split(":")[1] for each in service.get("volumes", ())]
    assert ("/tmp" in service.get("tmpfs", ())) != ("/tmp" in volumes)
    # What does not fit into memory cannot lie in memory.
    assert ("/tmp" in volumes) == (name in {"code", "daemon", "spark-worker"})


def test_a_process_knows_only_the_databases_that_it_uses() -> None:
    variables = {name: set(service["environment"]) for name, service in OURS.items()}
    both = {"PGPASSWORD", "EVENTSQL_DSN", STORAGE_VARIABLE}
    assert variables == {
        "migrate": both - {STORAGE_VARIABLE}, "roles": both - {STORAGE_VARIABLE},
        "migrate-dagster": both - {"EVENTSQL_DSN"}, "webserver": both - {"EVENTSQL_DSN"},
        "metrics": both - {STORAGE_VARIABLE}, "code": both, "daemon": both,
    }  # fmt: skip


def test_the_metrics_read_with_a_login_of_their_own(
    environment: dict[str, str], direct_dsn: str, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    owner = parse_dsn(direct_dsn)
    passwords = ["it's", "new"]
    environment["PATH"] = f"{PROGRAMS}:{environment['PATH']}"
    try:
        for service in ("migrate", "roles"):
            subprocess.run(SERVICES[service]["command"], cwd=tmp_path, env=environment, check=True)
        with psycopg.connect(direct_dsn) as publisher:
            # At a later start, a transaction of a publisher may last.
            publisher.execute("LOCK TABLE eventsql.event_buffer IN ROW EXCLUSIVE MODE")
            subprocess.run(SERVICES["roles"]["command"], cwd=tmp_path, env=environment, check=True)
        logins = SERVICES["logins"]["command"]
        program, *arguments = [word.replace("/logins.sql", str(DEPLOY / "logins.sql")) for word in logins]
        for name, value in (("-h", owner.host), ("-U", owner.username), ("-d", owner.database)):
            arguments[arguments.index(name) + 1] = str(value)
        for password in passwords:
            given = {**environment, "METRICS_PASSWORD": password, "PGPORT": str(owner.port)}
            subprocess.run([str(find_programs() / program), *arguments], env=given, check=True)

        metrics = OURS["metrics"]["environment"]["EVENTSQL_DSN"]
        dsn = metrics.replace("postgres:5432/eventsql", f"{owner.host}:{owner.port}/{owner.database}")
        given = {**environment, "EVENTSQL_DSN": dsn, "PGPASSWORD": passwords[-1]}
        command = [str(PROGRAMS / "eventsql"), "metrics", "print"]
        printed = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=True)
        assert 'eventsql_up{shard=""} 1.0' in printed.stdout
        with (
            pytest.raises(psycopg.errors.InsufficientPrivilege),
            psycopg.connect(dsn, password=passwords[-1]) as reader,
        ):
            reader.execute("DELETE FROM eventsql.event_buffer")
    finally:
        with psycopg.connect(direct_dsn, autocommit=True) as connection:
            connection.execute("DROP OWNED BY metrics")
            connection.execute("DROP ROLE metrics")
        subprocess.run(
            [str(PROGRAMS / "eventsql"), "roles", "drop", "--all", "--execute"],
            cwd=tmp_path,
            env=environment,
            check=True,
        )


def test_webserver_and_daemon_find_the_code_server() -> None:
    (entry,) = read("workspace.yaml")["load_from"]
    server = SERVICES[entry["grpc_server"]["host"]]
    assert argument(server["command"], "-p") == str(entry["grpc_server"]["port"])
    assert argument(server["command"], "-h") == "0.0.0.0"
    assert (REPOSITORY / argument(server["command"], "-f")).exists()
    image_copy = {words[-1]: words[:-1] for words in instructions("COPY")}
    for name in ("daemon", "webserver"):
        workspace = Path(argument(SERVICES[name]["command"], "-w"))
        assert f"deploy/{workspace.name}" in image_copy[f"{workspace.parent}/"]


def test_the_host_publishes_the_ui_alone_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    port = argument(SERVICES["webserver"]["command"], "-p")
    assert published == {"webserver": [f"127.0.0.1:3000:{port}"]}


def test_everything_that_a_service_waits_for_or_mounts_exists() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= SERVICES.keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]


def test_one_service_builds_the_image_of_all_and_nobody_pulls_it() -> None:
    (building,) = [service for service in OURS.values() if "build" in service]
    assert (REPOSITORY / building["build"]["dockerfile"]).is_file()
    assert (DEPLOY / building["build"]["context"]).resolve() == REPOSITORY
    assert {(each["image"], each["pull_policy"]) for each in (*OURS.values(), *SPARK_SERVICES.values())} == {
        (building["image"], "never")
    }


def test_the_image_is_made_of_what_the_repository_has_and_the_build_needs() -> None:
    assert all((REPOSITORY / source).exists() for source in copied())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    needed = {"pyproject.toml", "uv.lock", project["project"]["readme"], *project["project"]["license-files"], *wheel}
    assert needed <= copied()
    (sync,) = [words for words in instructions("RUN") if words[:2] == ["uv", "sync"]]
    assert argument(sync, "--extra") in project["project"]["optional-dependencies"]
    # The tools of developers and of the documentation are groups that `uv sync` installs unless it is told not to.
    assert "--no-default-groups" in sync


def test_the_image_has_the_bytecode_of_its_packages_and_of_the_location() -> None:
    (sync,) = [words for words in instructions("RUN") if words[:2] == ["uv", "sync"]]
    assert "--compile-bytecode" in sync
    assert " ".join(sync[sync.index("&&") :]) == (
        "&& .venv/bin/python -m compileall -q eventsql_orchestration assets sensors "
        "&& .venv/bin/python -c import definitions"
    )


def test_the_user_of_the_image_may_write_to_its_home() -> None:
    (users,) = [words for words in instructions("RUN") if "useradd" in words]
    home = argument(users, "--home-dir")
    assert users[users.index("chown") :] == ["chown", "-R", "eventsql:eventsql", home]
