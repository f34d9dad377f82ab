"""The comparison with Kafka: it says where Kafka cannot be had, and measures the same events where it can."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import ended, wait_until

COMPARISON = Path(__file__).parents[2] / "benchmarks" / "kafka" / "run.py"


def compare(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, COMPARISON, *arguments],
        cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_it_says_where_kafka_cannot_be_had(tmp_path: Path) -> None:
    result = compare(cwd=tmp_path, PATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert "Kafka cannot be had here: mvn and java and javac missing" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_the_broker_and_the_clients_end_if_it_is_killed(tmp_path: Path) -> None:
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("Maven or a JDK is not here, so the comparison with Kafka was not run")
    with subprocess.Popen([sys.executable, COMPARISON, "--events", "500000000"], cwd=tmp_path) as run:
        try:
            deadline = time.monotonic() + 300
            roles = dict[str, psutil.Process]()
            while not {"serve", "publish", "consume"} <= roles.keys():
                assert run.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
                roles = {role: each for each in psutil.Process(run.pid).children() if (role := role_of(each))}
        finally:
            run.kill()
            run.wait(10)
    try:
        wait_until(lambda: all(map(ended, roles.values())), "the end of the broker and the clients")
    finally:
        for each in roles.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def role_of(process: psutil.Process) -> str | None:
    """The role of a process of the comparison, as its command names it."""
    with contextlib.suppress(psutil.Error, ValueError):
        command = process.cmdline()
        return command[command.index("Stream") + 1]
    return None


@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_it_measures_both_with_the_same_events_and_leaves_nothing(tmp_path: Path, dsn: str) -> None:
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("Maven or a JDK is not here, so the comparison with Kafka was not run")
    result = compare("--events", "5000", "--batch", "500", cwd=tmp_path, EVENTSQL_DSN=dsn)
    assert result.returncode == 0, result.stderr

    *figures, environment = json.loads(result.stdout)
    of = {figure["name"]: figure for figure in figures}
    assert environment["benchmark"]["storage"] == "blocks"
    for name in ("kafka", "kafka_flushed"):
        assert of[name]["details"]["processor"].keys() == {"publishers", "consumers", "servers"}
        assert all(cost > 0 for cost in of[name]["details"]["processor"].values())
        ratio = of["publish_and_consume"]["value"] / of[name]["value"]
        assert of[f"publish_and_consume_of_{name}"]["value"] == pytest.approx(ratio)
    assert list(tmp_path.iterdir()) == []
