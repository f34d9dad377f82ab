"""Each extra is enough for its part of the package: the other extras are missing here."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic

REPOSITORY = Path(__file__).parents[2]

SPARK = ("pyspark", "py4j", "pyarrow", "adbc_driver_manager", "adbc_driver_postgresql", "dagster_pyspark")
DAGSTER = ("dagster", "dagster_webserver", "dagster_postgres", "dagster_shared", "psycopg2")

CONSUMING = """
import dagster as dg
from eventsql_orchestration import Topic
from eventsql_orchestration.dagster import build_definitions, consumer_asset, publish_events

@consumer_asset(topic=Topic("rides"), consumer="ledger")
def ledger(events, connection):
    print([event.value for event in events])

defs = build_definitions([ledger])
with dg.DagsterInstance.ephemeral() as instance:
    for job in ("register", "consume_ledger"):
        assert defs.resolve_job_def(job).execute_in_process(instance=instance).success
"""


def run(code: str, missing: tuple[str, ...], **environment: str) -> str:
    code = f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_consumer_runs_in_dagster_without_spark(platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("rides"))
    platform.publisher.publish(Publication("rides", b"1"))
    platform.transfer.run_once()
    assert run(CONSUMING, SPARK, EVENTSQL_DSN=dsn) == "[b'1']\n"


@pytest.mark.parametrize("module", ["eventsql_orchestration.spark", "pyspark_eventsql"])
def test_the_data_source_loads_without_dagster(module: str) -> None:
    assert run(f"import {module}", DAGSTER) == ""


@pytest.mark.parametrize("module", ["projections", "views"])
def test_a_part_that_needs_spark_names_the_missing_extra(module: str) -> None:
    code = f"""
from eventsql_orchestration.errors import MissingExtraError
try:
    import eventsql_orchestration.spark.{module}
except MissingExtraError as error:
    print(error.extra)
"""
    assert run(code, SPARK) == "spark\n"


def test_every_extra_asks_for_no_more_than_its_own() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [each for each in extras["dagster"] if "spark" in each]
    assert not [each for each in extras["spark"] if "dagster" in each]
    assert "eventsql-orchestration[dagster,spark]" in extras["dagster-spark"]
