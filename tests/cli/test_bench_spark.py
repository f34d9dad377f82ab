"""`eventsql bench spark`: figures beside Spark's JDBC source, nothing left behind, and clear about what it needs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.bench.spark import JDBC_JAR
from tests.bench.conftest import tables
from tests.cli.conftest import Run

needs_the_driver = pytest.mark.skipif(
    not JDBC_JAR.is_file(), reason=f"no {JDBC_JAR} here: install libpostgresql-jdbc-java"
)


def test_a_driver_that_is_missing_is_named_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    result = run("bench", "spark", "--quick", "--jdbc-jar", tmp_path / "postgresql.jar")
    assert result.exit_code == 2
    assert "postgresql.jar does not exist" in result.stderr
    assert "libpostgresql-jdbc-java" in result.stderr
    assert "--jdbc-jar" in result.stderr


@pytest.mark.nightly
def test_a_jar_that_is_no_driver_ends_it_and_leaves_nothing(run: Run, platform: EventSQL, tmp_path: Path) -> None:
    jar = tmp_path / "other.jar"
    # An archive without anything in it.
    jar.write_bytes(b"PK\x05\x06" + bytes(18))
    result = run("bench", "spark", "--events", 100, "--raw-events", 100, "--tasks", 1, "--jdbc-jar", jar)
    assert result.exit_code == 1
    assert "Spark failed" in result.stderr
    assert "org.postgresql.Driver" in result.stderr
    assert tables(platform) == set()
    assert platform.registry.topics() == []
    assert platform.buffered() == {}


@pytest.mark.nightly
@needs_the_driver
@pytest.mark.usefixtures("password_for_java")
def test_reading_and_writing_are_measured_beside_spark_s_jdbc_source(run: Run, platform: EventSQL) -> None:
    sizes = ("--events", 2_000, "--raw-events", 100, "--tasks", 2, "--rounds", 2, "--partitions", 3)
    result = run("bench", "spark", *sizes, "--json")
    assert result.exit_code == 0, result.stderr
    *figures, environment = json.loads(result.stdout)
    values = {figure["name"]: figure["value"] for figure in figures}
    assert list(values) == [
        "spark_read", "spark_read_jdbc", "spark_read_two_columns", "spark_read_two_columns_jdbc",
        "spark_write", "spark_write_jdbc", "spark_write_and_transfer",
        "spark_read_ratio", "spark_read_two_columns_ratio", "spark_write_ratio", "spark_write_and_transfer_ratio",
        "raw_copy",
    ]  # fmt: skip
    rounds = {figure["name"]: figure["details"].get("rounds") for figure in figures}
    for name, beside in (
        ("read", "read"), ("read_two_columns", "read_two_columns"), ("write", "write"), ("write_and_transfer", "write"),
    ):  # fmt: skip
        ours, theirs = (rounds[f"spark_{way}"] for way in (name, f"{beside}_jdbc"))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        assert values[f"spark_{name}_ratio"] == pytest.approx(median(ratios))
    assert all(len(figure["details"]["rounds"]) == 2 for figure in figures[:6])
    assert values["spark_write_and_transfer"] < values["spark_write"]
    assert environment["benchmark"]["tasks"] == 2
    assert tables(platform) == set()
    assert platform.registry.topics() == []
    assert platform.buffered() == {}
