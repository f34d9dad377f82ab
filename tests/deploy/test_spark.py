"""The Spark files of deploy/ agree with each other, with the image and with the package; no container is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types

from eventsql_orchestration.dagster.local.instance import instance_config
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE, spark_config
from tests.deploy.test_deploy import argument

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = Path(sys.executable).parent

BASE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.spark.yaml").read_text(encoding="utf-8"))
KUBERNETES: list[dict[str, Any]] = list(
    yaml.safe_load_all((DEPLOY / "kubernetes" / "spark.yaml").read_text(encoding="utf-8"))
)


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in KUBERNETES if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = manifest("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def commands() -> dict[str, list[str]]:
    services = ("spark-master", "spark-worker")
    return {
        **{f"compose {name}": COMPOSE["services"][name]["command"] for name in services},
        **{f"kubernetes {name}": container(name)["command"] for name in services},
    }


def config_of(file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv(SPARK_CONFIG_VARIABLE, str(file))
    return spark_config()


@pytest.mark.parametrize("name", commands())
def test_the_cluster_s_programs_are_in_the_image(name: str) -> None:
    program, daemon, *arguments = commands()[name]
    assert (PROGRAMS / program).exists()
    # What tests/spark/test_cluster.py starts for real.
    role = name.rpartition("-")[2]
    assert daemon == f"org.apache.spark.deploy.{role}.{role.capitalize()}"
    known = {"--host", "--port", "--webui-port", "--cores", "--memory", "--work-dir"}
    assert {word for word in arguments if word.startswith("-")} <= known


def test_the_session_s_master_is_the_one_that_runs_and_that_workers_join(monkeypatch: pytest.MonkeyPatch) -> None:
    master = config_of(DEPLOY / "spark.conf", monkeypatch)["spark.master"]
    for place in ("compose", "kubernetes"):
        command = commands()[f"{place} spark-master"]
        assert master == f"spark://{argument(command, '--host')}:{argument(command, '--port')}"
        assert commands()[f"{place} spark-worker"][-1] == master
    assert argument(commands()["compose spark-master"], "--host") in COMPOSE["services"]
    service = manifest("Service", "spark-master")["spec"]
    (port,) = service["ports"]
    assert master.endswith(f":{port['port']}")
    assert container("spark-master")["ports"] == [{"containerPort": port["port"]}]
    labels = manifest("Deployment", "spark-master")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()


def test_compose_and_kubernetes_have_the_same_settings_of_spark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copied = tmp_path / "spark.conf"
    copied.write_text(manifest("ConfigMap", "eventsql-spark")["data"]["spark.conf"])
    assert config_of(copied, monkeypatch) == config_of(DEPLOY / "spark.conf", monkeypatch)


def test_drivers_are_told_of_the_cluster_and_nobody_else_reaches_it() -> None:
    for place in ("daemon", "code"):
        driver = COMPOSE["services"][place]
        (volume,) = driver["volumes"]
        source, target, mode = volume.split(":")
        assert (DEPLOY / source).is_file()
        assert mode == "ro"
        assert driver["environment"] == {SPARK_CONFIG_VARIABLE: target}
    for name in ("spark-master", "spark-worker"):
        service = COMPOSE["services"][name]
        assert "ports" not in service
        assert service["image"] == BASE["services"]["code"]["image"]
    policy = manifest("NetworkPolicy", "spark")["spec"]
    assert set(policy["podSelector"]["matchExpressions"][0]["values"]) == {"spark-master", "spark-worker"}


def test_one_run_at_a_time_has_the_cores_of_the_cluster() -> None:
    assert instance_config()["concurrency"]["pools"] == {"granularity": "run", "default_limit": 1}
