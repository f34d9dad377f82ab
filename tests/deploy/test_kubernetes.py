"""The files of deploy/kubernetes agree with each other, the image, the package, Dagster and Kubernetes' own models."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from dagster._config import validate_config
from dagster_postgres.utils import pg_url_from_config

from definitions import defs
from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.build_definitions import DSN_VARIABLE
from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE, instance_config
from eventsql_orchestration.database.embedded.programs import find_programs
from eventsql_orchestration.database.urls import parse_dsn
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE
from tests.conftest import is_setting, own_server
from tests.deploy.test_deploy import argument, instructions

REPOSITORY = Path(__file__).parents[2]
KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
PROGRAMS = Path(sys.executable).parent

VALUES: dict[str, Any] = yaml.safe_load((KUBERNETES / "values.yaml").read_text(encoding="utf-8"))
(PREPARE,) = yaml.safe_load_all((KUBERNETES / "prepare.yaml").read_text(encoding="utf-8"))
METRICS, SERVICE = yaml.safe_load_all((KUBERNETES / "metrics.yaml").read_text(encoding="utf-8"))
SPARK_TEXT = (KUBERNETES / "spark.yaml").read_text(encoding="utf-8")
SPARK_CONFIG, SPARK_SERVICE, SPARK_MASTER, SPARK_WORKER, SPARK_POLICY = yaml.safe_load_all(SPARK_TEXT)

(CODE,) = VALUES["dagster-user-deployments"]["deployments"]
WEBSERVER = VALUES["dagsterWebserver"]
DAEMON = VALUES["dagsterDaemon"]
LAUNCHER = VALUES["runLauncher"]["config"]["k8sRunLauncher"]

STEPS: list[dict[str, Any]] = [
    *PREPARE["spec"]["template"]["spec"]["initContainers"],
    *PREPARE["spec"]["template"]["spec"]["containers"],
    *METRICS["spec"]["template"]["spec"]["containers"],
]
SPARK: list[dict[str, Any]] = [
    container for each in (SPARK_MASTER, SPARK_WORKER) for container in each["spec"]["template"]["spec"]["containers"]
]


READ_ONLY = """
import os, sys

def refuse(event, arguments):
    if event == "os.mkdir" and os.path.dirname(os.path.abspath(arguments[0])) == os.getcwd():
        raise PermissionError(13, "Permission denied", arguments[0])

sys.addaudithook(refuse)
"""
"""Refuses new directories in the working directory."""


def image(values: dict[str, Any]) -> str:
    return f"{values['repository']}:{values['tag']}"


def pods() -> Iterator[dict[str, Any]]:
    """What each pod and the containers in it are allowed, in the names of Kubernetes."""
    for process in (CODE, WEBSERVER, DAEMON):
        yield {"pod": process["podSecurityContext"], "container": process["securityContext"]}
    yield {
        "pod": LAUNCHER["runK8sConfig"]["podSpecConfig"]["securityContext"],
        "container": LAUNCHER["securityContext"],
    }
    for manifest in (PREPARE, METRICS, SPARK_MASTER, SPARK_WORKER):
        spec = manifest["spec"]["template"]["spec"]
        for container in itertools.chain(spec.get("initContainers", ()), spec["containers"]):
            yield {"pod": spec["securityContext"], "container": container["securityContext"]}


def test_kubernetes_knows_each_field_of_the_manifests() -> None:
    # Not at the top: each process of tests imports this file, and Kubernetes' models take 2 s.
    from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict
    from kubernetes import client  # type: ignore[import-untyped]  # it has no types

    kinds = {
        client.V1Job: [PREPARE],
        client.V1Deployment: [METRICS, SPARK_MASTER, SPARK_WORKER],
        client.V1Service: [SERVICE, SPARK_SERVICE],
        client.V1ConfigMap: [SPARK_CONFIG],
        client.V1NetworkPolicy: [SPARK_POLICY],
    }
    for model, manifests in kinds.items():
        for manifest in manifests:
            k8s_model_from_dict(model, k8s_snake_case_dict(model, manifest))


def test_kubernetes_knows_each_field_of_the_values_that_the_chart_passes_on() -> None:
    from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict
    from kubernetes import client

    for process in (CODE, WEBSERVER, DAEMON):
        for key in ("livenessProbe", "readinessProbe", "startupProbe"):
            probe = {name: value for name, value in process.get(key, {}).items() if name != "enabled"}
            k8s_model_from_dict(client.V1Probe, k8s_snake_case_dict(client.V1Probe, probe))
        k8s_snake_case_dict(client.V1ResourceRequirements, process["resources"])
        k8s_snake_case_dict(client.V1PodSecurityContext, process["podSecurityContext"])
        k8s_snake_case_dict(client.V1SecurityContext, process["securityContext"])
    for variable in CODE["env"]:
        k8s_snake_case_dict(client.V1EnvVar, variable)


def test_every_process_is_the_user_of_the_image_and_has_no_rights() -> None:
    (user,) = instructions("USER")
    assert user == ["10001:10001"]
    for allowed in pods():
        assert f"{allowed['pod']['runAsUser']}:{allowed['pod']['runAsGroup']}" == user[0]
        assert allowed["pod"]["runAsNonRoot"]
        assert not allowed["container"]["allowPrivilegeEscalation"]
        assert allowed["container"]["capabilities"] == {"drop": ["ALL"]}


def test_metrics_and_spark_write_to_tmp_alone() -> None:
    for manifest in (METRICS, SPARK_MASTER, SPARK_WORKER):
        spec = manifest["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
        assert spec["volumes"] == [{"name": "tmp", "emptyDir": {}}]


def test_the_metrics_have_a_login_and_a_secret_of_their_own() -> None:
    (container,) = METRICS["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    assert parse_dsn(variables["EVENTSQL_DSN"]["value"]).username == "metrics"
    secret = variables["PGPASSWORD"]["valueFrom"]["secretKeyRef"]
    readme = (REPOSITORY / "deploy" / "README.md").read_text(encoding="utf-8")
    assert f"secret generic {secret['name']} --from-file={secret['key']}=" in readme


def test_the_owner_of_the_database_makes_the_login_of_the_metrics(tmp_path: Path) -> None:
    readme = (REPOSITORY / "deploy" / "README.md").read_text(encoding="utf-8")
    recipe = readme.partition("Before the first `metrics.yaml`")[2].split("```")[1]
    eventsql = str(PROGRAMS / "eventsql")
    with own_server() as server:
        started = server.start()
        with started.connect("postgres") as connection:
            connection.execute("CREATE ROLE boss LOGIN CREATEROLE PASSWORD 'x'")
            connection.execute("CREATE DATABASE app OWNER boss")

        def url(role: str) -> str:
            return f"postgresql://{role}:x@127.0.0.1:{started.port}/app"

        # A server of the tests has a superuser named eventsql.
        with psycopg.connect(url("boss"), autocommit=True) as owner:
            owner.execute("CREATE ROLE app LOGIN PASSWORD 'x'")
            owner.execute("GRANT CREATE ON DATABASE app TO app")
        inherited = {name: value for name, value in os.environ.items() if not is_setting(name)}
        path = f"{PROGRAMS}:{find_programs()}:{inherited['PATH']}"
        given = {**inherited, "PATH": path, "OWNERS_URL": url("boss")}
        subprocess.run([eventsql, "--dsn", url("app"), "migrate"], cwd=tmp_path, env=given, check=True)
        script = recipe.replace("GRANT eventsql TO", "GRANT app TO").replace(r"\password metrics", "SELECT")
        subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=given, check=True)
        with psycopg.connect(url("boss"), autocommit=True) as owner:
            owner.execute("ALTER ROLE metrics PASSWORD 'x'")
        subprocess.run([eventsql, "--dsn", url("metrics"), "metrics", "print"], cwd=tmp_path, env=given, check=True)


def test_every_process_has_the_same_image_limits_of_memory_and_probes() -> None:
    images = {image(each["image"]) for each in (CODE, WEBSERVER, DAEMON)}
    images |= {container["image"] for container in (*STEPS, *SPARK)}
    assert len(images) == 1
    for each in (CODE, WEBSERVER, DAEMON, *STEPS, *SPARK):
        assert "memory" in each["resources"]["limits"]
        assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
    staying = (*METRICS["spec"]["template"]["spec"]["containers"], CODE, WEBSERVER, DAEMON)
    assert all(each["livenessProbe"] and each["startupProbe"] for each in staying)
    assert all(each["startupProbe"]["enabled"] for each in (CODE, WEBSERVER, DAEMON))


def test_probes_ask_the_port_that_a_process_listens_on_and_have_a_path_that_it_serves() -> None:
    for key in ("livenessProbe", "readinessProbe", "startupProbe"):
        assert WEBSERVER[key]["httpGet"] == {"path": "/server_info", "port": WEBSERVER["service"]["port"]}
    assert WEBSERVER["service"]["port"] >= 1024
    (container,) = METRICS["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert argument(container["command"], "--port") == str(port["containerPort"])
    assert SERVICE["spec"]["selector"] == METRICS["spec"]["template"]["metadata"]["labels"]
    assert {each["targetPort"] for each in SERVICE["spec"]["ports"]} == {port["name"]}


def test_commands_are_programs_of_the_image() -> None:
    commands = [step["command"] for step in STEPS] + [DAEMON["livenessProbe"]["exec"]["command"]]
    for program, *arguments in commands:
        if program == "env":
            program = arguments[1]  # noqa: PLW2901  # `env NAME=VALUE PROGRAM`
        assert entry_points(group="console_scripts", name=program), program
    (extras,) = [words for words in instructions("RUN") if words[:2] == ["uv", "sync"]]
    assert {"dagster-spark", "metrics", "kubernetes"} <= set(extras)


def test_files_and_directories_that_the_values_name_are_in_the_image() -> None:
    (directory,) = instructions("WORKDIR")[0]
    arguments = CODE["dagsterApiGrpcArgs"]
    file = Path(argument(arguments, "--python-file"))
    assert str(file.parent) == argument(arguments, "--working-directory") == directory
    assert [file.name, "./"] in instructions("COPY")
    made = {word for words in instructions("RUN") if "mkdir" in words for word in words}
    assert VALUES["global"]["dagsterHome"] in made


def test_every_process_has_the_database_and_its_password_from_the_secret() -> None:
    password = {"name": "PGPASSWORD", "valueFrom": {"secretKeyRef": {"name": "eventsql-postgresql", "key": "postgresql-password"}}}  # fmt: skip  # noqa: E501
    assert VALUES["global"]["postgresqlSecretName"] == "eventsql-postgresql"
    assert not VALUES["generatePostgresqlPasswordSecret"]
    database = VALUES["postgresql"]
    expected = (database["postgresqlHost"], str(database["service"]["port"]), database["postgresqlDatabase"])
    for process in (CODE, *STEPS):
        # The metrics have a login of their own.
        assert (password in process["env"]) != (process["name"] == "metrics")
        given = {each["name"]: each["value"] for each in process["env"] if "value" in each}
        assert given.keys() <= {DSN_VARIABLE, STORAGE_VARIABLE}
        for url in given.values():
            parsed = parse_dsn(url.replace("+psycopg2", ""))
            assert (parsed.host, str(parsed.port), parsed.database, parsed.password) == (*expected, None)


def snake(values: Any) -> Any:
    """The names of the chart's values as those of dagster.yaml."""
    if isinstance(values, list):
        return [snake(each) for each in values]
    if not isinstance(values, dict):
        return values
    return {re.sub(r"(?=[A-Z])", "_", key).lower(): snake(value) for key, value in values.items()}


def written_instance() -> dict[str, Any]:
    """What the chart writes of the values into dagster.yaml, as far as limits of runs are concerned."""
    concurrency = snake(VALUES.get("concurrency", {"enabled": False}))
    config = snake(DAEMON["runCoordinator"]["config"]["queuedRunCoordinator"])
    if concurrency.pop("enabled"):
        limits = {"concurrency": concurrency}
    else:
        limits, config = {}, {"max_concurrent_runs": -1, **config}
    coordinator = {
        "module": "dagster.core.run_coordinator",
        "class": DAEMON["runCoordinator"]["type"],
        "config": config,
    }
    return {"run_coordinator": coordinator, **limits, **VALUES["additionalInstanceConfig"]}


def test_dagster_accepts_the_limits_that_the_chart_writes(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(written_instance()), encoding="utf-8")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        settings = instance.get_concurrency_config()
    other = instance_config()["concurrency"]
    assert settings.run_queue_config is not None
    assert settings.run_queue_config.max_concurrent_runs == other["runs"]["max_concurrent_runs"]
    assert settings.run_queue_config.tag_concurrency_limits == other["runs"]["tag_concurrency_limits"]
    assert settings.pool_config.default_pool_limit == other["pools"]["default_limit"]


def test_the_image_of_postgresql_has_its_registry_once() -> None:
    # The chart writes registry/repository:tag. Its default registry is docker.io.
    names = VALUES["postgresql"]["image"]
    assert f"{names['registry']}/{names['repository']}:{names['tag']}" == "docker.io/library/postgres:18"


def test_the_instance_has_the_settings_of_the_other_deployments() -> None:
    other = instance_config()
    written = written_instance()
    interval = "dequeue_interval_seconds"
    assert written["run_coordinator"]["config"][interval] == other["run_coordinator"]["config"][interval]
    assert written["concurrency"] == other["concurrency"]
    assert written["nux"] == other["nux"]
    monitoring = {"".join(word.capitalize() for word in key.split("_")): value for key, value in other["run_monitoring"].items()}  # fmt: skip  # noqa: E501
    assert {key[0].upper() + key[1:]: value for key, value in DAEMON["runMonitoring"].items()} == monitoring
    for key in ("sensor", "schedule"):
        assert VALUES["retention"][key]["purgeAfterDays"] == other["retention"][key]["purge_after_days"]


def run_job(tmp_path: Path, **more: Any) -> Any:
    """The Job that Dagster makes for a run. `more` is what the code server has beside its values."""
    from dagster_k8s import K8sRunLauncher
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import construct_dagster_k8s_job
    from kubernetes import client

    # What the chart writes of the values into dagster.yaml, and into the environment of the code server.
    run_config = LAUNCHER["runK8sConfig"]
    config = {
        "load_incluster_config": True,
        "job_namespace": "default",
        "image_pull_policy": LAUNCHER["imagePullPolicy"],
        "service_account_name": "dagster",
        "dagster_home": VALUES["global"]["dagsterHome"],
        "instance_config_map": "dagster-instance",
        "postgres_password_secret": VALUES["global"]["postgresqlSecretName"],
        "security_context": LAUNCHER["securityContext"],
        "run_k8s_config": {
            "pod_spec_config": run_config["podSpecConfig"],
            "job_spec_config": run_config["jobSpecConfig"],
        },
    }
    schema = K8sRunLauncher.config_type()  # type: ignore[no-untyped-call]  # it has no types
    assert validate_config(schema, config).success
    nowhere = {
        "current-context": "nowhere",
        "contexts": [{"name": "nowhere", "context": {"cluster": "nowhere", "user": "nobody"}}],
        "clusters": [{"name": "nowhere", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "nobody", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(nowhere), encoding="utf-8")
    launcher = K8sRunLauncher(
        **{**config, "load_incluster_config": False},
        kubeconfig_file=str(tmp_path / "kubeconfig"),
        k8s_client_batch_api=client.BatchV1Api(),
        k8s_client_core_api=client.CoreV1Api(),
    )
    chart = {key: config[key] for key in ("security_context", "run_k8s_config")}
    server = {"env": CODE["env"] + more.pop("env", []), "resources": CODE["resources"], **more}
    context = K8sContainerContext.create_from_config({"k8s": chart}).merge(
        K8sContainerContext.create_from_config({"k8s": server})
    )
    return construct_dagster_k8s_job(
        context.get_k8s_job_config(job_image=image(CODE["image"]), run_launcher=launcher),
        args=["dagster", "api", "execute_run"],
        job_name="run",
        user_defined_k8s_config=context.run_k8s_config,
    )


def test_dagster_makes_a_run_a_job_of_the_code_server_s_image_and_environment(tmp_path: Path) -> None:
    job = run_job(tmp_path)
    spec = job.spec.template.spec
    (container,) = spec.containers
    assert container.image == image(CODE["image"])
    assert spec.security_context.run_as_user == 10001
    assert container.security_context.capabilities.drop == ["ALL"]
    assert container.resources.limits == CODE["resources"]["limits"]
    assert {variable.name for variable in container.env} >= {DSN_VARIABLE, "PGPASSWORD", "DAGSTER_HOME"}
    assert job.spec.ttl_seconds_after_finished == 86400


def test_a_run_of_a_code_server_as_the_spark_file_says_finds_the_cluster_and_may_reach_it(tmp_path: Path) -> None:
    said = yaml.safe_load("\n".join(line[4:] for line in SPARK_TEXT.splitlines() if line.startswith("#   ")))
    job = run_job(tmp_path, **{re.sub("M", "_m", key): value for key, value in said.items()})
    spec = job.spec.template.spec
    (container,) = spec.containers
    (volume,) = [each for each in spec.volumes if each.config_map.name == SPARK_CONFIG["metadata"]["name"]]
    (mount,) = [each for each in container.volume_mounts if each.name == volume.name]
    (file,) = SPARK_CONFIG["data"]
    environment = {variable.name: variable.value for variable in container.env}
    assert environment[SPARK_CONFIG_VARIABLE] == f"{mount.mount_path}/{file}"
    (allowed,) = SPARK_POLICY["spec"]["ingress"][0]["from"]
    assert job.spec.template.metadata.labels["app"] in allowed["podSelector"]["matchExpressions"][0]["values"]


def test_the_job_that_registers_is_the_location_s_and_has_an_empty_home_in_the_image() -> None:
    register = STEPS[2]["command"]
    assert register[:2] == ["env", f"DAGSTER_HOME={VALUES['global']['dagsterHome']}"]
    assert register[-4:] == ["-f", "definitions.py", "-j", "register"]
    assert isinstance(defs.resolve_job_def("register"), dg.JobDefinition)


@pytest.mark.nightly
def test_the_job_before_an_upgrade_makes_an_empty_database_ready_and_may_be_repeated(dsn: str, tmp_path: Path) -> None:
    url = parse_dsn(dsn)
    home, empty = tmp_path / "home", tmp_path / "dagster_home"
    home.mkdir()
    empty.mkdir()
    (home / "dagster.yaml").write_bytes((REPOSITORY / "deploy" / "dagster.yaml").read_bytes())
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute((REPOSITORY / "deploy" / "dagster.sql").read_bytes())
    inherited = {name: value for name, value in os.environ.items() if not is_setting(name)}

    # The image's directory belongs to root, and its processes do not.
    (tmp_path / "sitecustomize.py").write_text(READ_ONLY, encoding="utf-8")
    for step in STEPS[:3] * 2:
        # The test's server has neither the host nor the TLS of the file.
        given = {
            each["name"]: each["value"]
            .replace("eventsql@db.example.com:5432/app", f"{url.username}@{url.host}:{url.port}/{url.database}")
            .replace("sslmode=require", "sslmode=disable")
            for each in step["env"]
            if "value" in each
        }
        environment = {
            **inherited, **given, "PGPASSWORD": url.password or "", "DAGSTER_HOME": str(home),
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path),
        }  # fmt: skip
        command = [word.replace("/opt/dagster/dagster_home", str(empty)) for word in step["command"]]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    with EventSQL(dsn, migrate=False) as events:
        assert {"ride_orders", "ride_orders_dlt"} <= {topic.name for topic in events.registry.topics()}
    with psycopg.connect(dsn) as connection:
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'dagster'").fetchone()
    assert tables is not None
    assert tables[0] > 10


def test_dagster_reads_its_tables_in_the_schema_of_its_own() -> None:
    database = VALUES["postgresql"]
    url = pg_url_from_config(
        {
            "postgres_db": {
                "username": database["postgresqlUsername"],
                "password": "secret",
                "hostname": database["postgresqlHost"],
                "db_name": database["postgresqlDatabase"],
                "port": database["service"]["port"],
                "params": database["postgresqlParams"],
            }
        }
    )
    assert "options=-csearch_path%3Ddagster" in url
    assert "sslmode=require" in url
