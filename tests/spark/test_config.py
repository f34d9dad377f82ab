"""The settings of a session: of this machine, or of a cluster by a deployment's file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE, spark_config


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "spark.conf"
    monkeypatch.setenv(SPARK_CONFIG_VARIABLE, str(path))
    return path


def test_a_session_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SPARK_CONFIG_VARIABLE, raising=False)
    config = spark_config(**{"spark.master": "local[4]", "spark.ui.enabled": "true"})
    assert config["spark.master"] == "local[4]"
    assert config["spark.ui.enabled"] == "true"
    assert config["spark.driver.host"] == config["spark.driver.bindAddress"] == "127.0.0.1"


def test_a_deployment_s_file_has_the_last_word(file: Path) -> None:
    file.write_text(
        "# the cluster\n\nspark.master = spark://master:7077\n"
        "spark.executor.extraJavaOptions\t-Da=b  -Dc=d\n spark.executor.memory   4g  \n"
    )
    config = spark_config(**{"spark.master": "local[4]", "spark.executor.memory": "1g"})
    assert config["spark.master"] == "spark://master:7077"
    assert config["spark.executor.extraJavaOptions"] == "-Da=b  -Dc=d"
    assert config["spark.executor.memory"] == "4g"
    assert not config.keys() & {"spark.driver.host", "spark.driver.bindAddress"}, "executors could not reach the driver"


@pytest.mark.parametrize(("remote", "starts"), [("sc://localhost:15002", False), ("local[2]", True)])
def test_a_session_of_spark_connect_leaves_its_start_to_the_server(file: Path, remote: str, starts: bool) -> None:
    file.write_text(f"spark.remote {remote}\n")
    config = spark_config(**{"spark.master": "local[4]", "spark.sql.shuffle.partitions": "7"})
    assert config["spark.remote"] == remote
    assert config["spark.sql.shuffle.partitions"] == "7"
    assert "spark.master" not in config
    assert all((name in config) is starts for name in ("spark.driver.memory", "spark.driver.host", "spark.ui.enabled"))


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EVENTSQL_SPARK_CONFIG: .*spark\.conf cannot be read"):
        spark_config()


@pytest.mark.parametrize("line", ["spark.master", "master spark://master:7077", "spark.master =", "[spark]"])
def test_a_line_that_is_no_setting_is_named(file: Path, line: str) -> None:
    file.write_text(f"spark.cores.max 4\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"line 2 of .*spark\.conf is not a Spark setting"):
        spark_config()
