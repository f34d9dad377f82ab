"""A project that `eventsql init` makes: its test passes, and `eventsql dev` runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.conftest import is_setting
from tests.documents import DAGSTER
from tests.fixtures import memory_disk
from tests.waiting import PATIENCE, wait_until

PROGRAM = Path(sys.executable).with_name("eventsql")
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not is_setting(name) and not name.startswith("DAGSTER_")
}


@pytest.fixture(scope="module")
def project() -> Iterator[Path]:
    # Not pytest's own directory: only root may enter that, and PostgreSQL does not run as root.
    root = Path(tempfile.mkdtemp(prefix="eventsql-project-", dir=memory_disk()))
    root.chmod(0o755)
    try:
        subprocess.run([PROGRAM, "init", "shop"], cwd=root, env=ENVIRONMENT, check=True)
        yield root / "shop"
    finally:
        for server in root.glob("**/.eventsql/postgres"):
            EmbeddedPostgres(server).destroy()
        shutil.rmtree(root, ignore_errors=True)


def test_its_own_test_passes(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={project.parent / 'tmp'}"],
        cwd=project, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.nightly
def test_the_page_of_dagster_registers_and_loads_it_without_eventsql_dev(
    project: Path, dsn: str, platform: EventSQL
) -> None:
    register, dev = re.findall(r"^dagster (?:job|dev) .*$", DAGSTER.read_text(encoding="utf-8"), re.MULTILINE)
    environment = {**ENVIRONMENT, "EVENTSQL_DSN": dsn, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
    # What `dagster dev` loads, without its processes.
    for command in (register, dev.replace("dagster dev", "dagster definitions validate")):
        done = subprocess.run(
            command.split(), cwd=project, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert [topic.name for topic in platform.registry.topics()] == ["order_placed", "order_placed_dlt"]


def consumed(platform: EventSQL) -> dict[str, int]:
    with platform.database.connection() as connection:
        return dict(connection.execute("SELECT item, count(*) FROM public.ordered GROUP BY item").fetchall())


def publish(platform: EventSQL, order: int, item: str) -> None:
    placed = json.dumps({"order": order, "item": item}).encode()
    platform.publisher.publish(Publication("order_placed", placed, key=str(order)))


@pytest.mark.nightly
def test_dev_consumes_starts_a_server_that_died_again_and_ends_with_everything(project: Path) -> None:
    log = project.parent / "dev.log"
    server = EmbeddedPostgres(project / ".eventsql" / "postgres")
    with log.open("w") as output:
        dev = subprocess.Popen([PROGRAM, "dev"], cwd=project, env=ENVIRONMENT, stdout=output, stderr=output)
    try:

        def serving() -> bool:
            assert dev.poll() is None, log.read_text()
            return "The Dagster UI is at" in log.read_text()

        wait_until(serving, "the start", seconds=200)
        dsn = server.start().dsn
        with EventSQL(dsn, migrate=False, transfer=False) as platform:
            publish(platform, 1, "tea")
            wait_until(lambda: consumed(platform) == {"tea": 1}, "the first event")

        running = server.status()
        assert running is not None
        os.kill(running.pid, signal.SIGKILL)

        def again() -> bool:
            found = server.status()
            return found is not None and found.pid != running.pid

        wait_until(again, "the next server")
        with EventSQL(dsn, migrate=False, transfer=False) as platform:
            publish(platform, 2, "rice")
            wait_until(lambda: consumed(platform) == {"tea": 1, "rice": 1}, "the second event")

        children = psutil.Process(dev.pid).children(recursive=True)
        assert children
        dev.send_signal(signal.SIGINT)
        assert dev.wait(PATIENCE) == 130
        assert server.status() is None
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        assert left == []
    finally:
        dev.kill()
        dev.wait(60)

    said = log.read_text()
    assert len(re.findall(r"(?:started|using) the embedded server", said)) == 1
    assert said.count("has died, see") == 1
    assert re.search(r"eventsql: (ending Dagster's processes|waiting for \d+ run)", said)


@pytest.mark.nightly
def test_a_round_of_a_location_without_a_simulation_consumes_what_waits(project: Path) -> None:
    with EventSQL(EmbeddedPostgres(project / ".eventsql" / "postgres").start().dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("order_placed", partitions=2))
        publish(platform, 3, "salt")
    done = subprocess.run(
        [PROGRAM, "dev", "--once", "--timeout", "200"],
        cwd=project, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("order_placed ")]
    # Topic, published since the start, transferred, consumed, …, lag, result.
    assert (row[0], row[3], row[-2:]) == ("order_placed", "1", ["0", "exact"])


PLAIN = """
import dagster as dg

@dg.asset
def number() -> int:
    return 7

defs = dg.Definitions([number])
"""


@pytest.mark.nightly
def test_a_location_that_registers_and_transfers_nothing_is_told_so(project: Path) -> None:
    (project / "plain.py").write_text(PLAIN)
    done = subprocess.run(
        [PROGRAM, "dev", "--once", "-f", "plain.py"], cwd=project, env=ENVIRONMENT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plain.py has no transfer, so this command moves events" in done.stderr
    assert "plain.py has no job that registers its topics and consumers" in done.stderr
