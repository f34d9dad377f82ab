"""Dagster's webserver on the instance of a directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import requests

from eventsql_orchestration.orchestration.local_processes import free_port
from tests.waiting import wait_until


def _answers(url: str) -> bool:
    with suppress(requests.ConnectionError):
        requests.get(f"{url}/server_info", timeout=60)
        return True
    return False


@contextmanager
def served(home: Path | str) -> Iterator[str]:
    """A webserver without code locations, which shows the runs of an instance; its URL."""
    port = free_port(0)
    process = subprocess.Popen(
        [sys.executable, "-m", "dagster_webserver", "-h", "127.0.0.1", "-p", str(port), "--empty-workspace"],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or _answers(url), "the webserver answers")
        assert process.poll() is None
        yield url
    finally:
        process.kill()
        process.wait(60)
