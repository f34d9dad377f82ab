"""How `make test` gives tests to its processes."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

SPARK = ("tests/spark/", "tests/assets/", "tests/dagster/test_publishing.py", "tests/dagster/test_io_manager.py")
"""The tests with a Spark session."""


class OneSparkSession(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Give a process one file at a time, and one process all tests with a Spark session: a session is slow to start."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith(SPARK) else str(super()._split_scope(nodeid))
