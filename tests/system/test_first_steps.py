"""docs/get_started.md and docs/tutorial.md are followed as their readers would: every program and command, in order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.conftest import is_setting
from tests.fixtures import memory_disk

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = REPOSITORY / "docs"
STEP = re.compile(
    r"(?:^Save this program as `([a-z_]+\.py)`:\n\n)?^```(bash|python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE
)


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory for a reader; its embedded server is gone afterwards."""
    # Not pytest's own directory: only root may enter that, and PostgreSQL does not run as root.
    place = Path(tempfile.mkdtemp(prefix="eventsql-first-steps-", dir=memory_disk()))
    place.chmod(0o755)
    try:
        yield place
    finally:
        for server in place.glob("**/.eventsql/postgres"):
            EmbeddedPostgres(server).destroy()
        shutil.rmtree(place, ignore_errors=True)


def follow(document: str, home: Path, *, setup: str) -> list[str]:
    """Do what a document says in `home`, but its first command, `setup`; gives the outputs of its commands.

    The environment of this test takes the place of the one that `setup` makes. A block of text is the output of the
    command before it.
    """
    environment = {
        name: value for name, value in os.environ.items() if not is_setting(name) and not name.startswith("DAGSTER_")
    }
    (first, *steps) = STEP.findall((DOCUMENTS / document).read_text(encoding="utf-8"))
    assert setup in first[-1]
    (home / ".venv").symlink_to(Path(sys.executable).parents[1])

    outputs: list[str] = []
    settings = ""
    for program, kind, text in steps:
        if kind == "python":
            (home / program).write_text(text, encoding="utf-8")
        elif kind == "text":
            assert outputs[-1].endswith(text)
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", settings + text],
                cwd=home,
                env=environment,
                capture_output=True,
                text=True,
                timeout=800,
                check=False,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            outputs.append(done.stdout)
            # A reader's shell keeps what was exported.
            settings += "".join(re.findall(r"^export .*\n", text, re.MULTILINE))
    return outputs


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_reader_who_gets_started_counts_each_event_once(home: Path) -> None:
    lag = follow("get_started.md", home, setup="pip install")[-1].splitlines()[-1]
    # Topic, consumer, all partitions, events that wait.
    assert lag.split()[:4] == ["order_placed", "stock", "all", "0"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_works_and_the_table_equals_the_count_over_the_file(home: Path) -> None:
    checkout = home / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(checkout)], check=True)
    outputs = follow("tutorial.md", checkout, setup="make setup")

    changes = len((checkout / "file_changes.jsonl").read_text().splitlines())
    assert changes > 0
    assert re.search(rf"^{changes} file changes in \d+ rows; 0 rows differ$", outputs[-1], re.MULTILINE)

    summary = next(output for output in outputs if output.startswith("topic "))
    results = {line.split()[0]: line.split()[-1] for line in summary.splitlines()[1:]}
    topics = ("directory_churn", "driver_utilisation", "file_changes", "ride_answers", "ride_orders", "zone_fares")
    assert results == dict.fromkeys(topics, "exact")
