"""docs/tutorial.md is run as its reader would: every command, in order, in a checkout of its own."""

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
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A clone of the repository whose .venv is the environment that runs this test."""
    # Not pytest's own directory: only root may enter that, and PostgreSQL does not run as root.
    home = Path(tempfile.mkdtemp(prefix="eventsql-tutorial-", dir=memory_disk()))
    home.chmod(0o755)
    clone = home / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    (clone / ".venv").symlink_to(Path(sys.executable).parents[1])
    try:
        yield clone
    finally:
        EmbeddedPostgres(clone / ".eventsql" / "postgres").destroy()
        shutil.rmtree(home, ignore_errors=True)


def commands() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_works_and_the_table_equals_the_count_over_the_file(checkout: Path) -> None:
    setup, *blocks = commands()
    # What `make setup` installs is what this test runs in.
    assert setup.strip() == "make setup"
    environment = {
        name: value for name, value in os.environ.items() if not is_setting(name) and not name.startswith("DAGSTER_")
    }
    outputs = []
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        outputs.append(done.stdout)
    changes = len((checkout / "file_changes.jsonl").read_text().splitlines())
    assert changes > 0
    assert re.search(rf"^{changes} file changes in \d+ rows; 0 rows differ$", outputs[-1], re.MULTILINE)
    summary = next(output for output in outputs if output.startswith("topic "))
    results = {line.split()[0]: line.split()[-1] for line in summary.splitlines()[1:]}
    topics = ("directory_churn", "driver_utilisation", "file_changes", "ride_orders", "zone_fares")
    assert results == dict.fromkeys(topics, "exact")
