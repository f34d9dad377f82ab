"""A location in ten lines, and a consumer as a component of `dg`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from dagster.components.testing import create_defs_folder_sandbox

from eventsql_orchestration import EVERY_EVENT, Consumer, Event, EventFilter, Shard, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    CheckAlert,
    ConsumerDefinition,
    EventSQLConsumerComponent,
    EventSQLResource,
    LocationOptions,
    build_definitions,
    component,
    consumer_asset,
    queue_asset,
    range_asset,
    table_asset,
    topic_asset,
    topic_key,
    worker_asset,
)
from eventsql_orchestration.dagster.component import usable_name
from eventsql_orchestration.dagster.location_options import LocationFields
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import RedefinitionError, ValidationError
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import ReplayRange
from eventsql_orchestration.queue import Message
from eventsql_orchestration.topics.positions import Earliest
from tests.dagster.conftest import Workbench, sql
from tests.dagster.location import ledger, slow

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ledger.py"


def test_the_example_is_a_whole_location_that_consumes(
    bench: Workbench, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    spec = importlib.util.spec_from_file_location("ledger_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    location: dg.Definitions = module.defs
    for _ in range(2):
        assert location.resolve_job_def("register").execute_in_process(instance=bench.instance).success
    assert {topic.name for topic in bench.platform.registry.topics()} == {"orders", "orders_dlt"}
    # No consumer creates it: four partitions that do so at once would be in each other's way.
    assert sql(bench.platform, "SELECT FROM ledger") == []

    ids = bench.publish("orders", 8)
    assert location.resolve_job_def("consume_ledger").execute_in_process(instance=bench.instance).success
    rows = sql(bench.platform, "SELECT id, value FROM ledger ORDER BY id")
    assert [row[0] for row in rows] == ids
    assert {row[1] for row in rows} == {b"%d" % number for number in range(8)}

    # The events that a backfill replays change nothing, and no event fails.
    backfills = Backfills(bench.platform.shards)
    plan = backfills.plan("orders", "ledger", ReplayRange(Earliest()))
    backfill = backfills.register(plan, "again")
    assert any("must tolerate" in remark for remark in plan.remarks)
    keys = [run.key(backfill.id) for run in plan.runs]
    bench.instance.add_dynamic_partitions("ledger_backfill", keys)
    for key in keys:
        job = location.resolve_job_def("backfill_ledger")
        assert job.execute_in_process(instance=bench.instance, partition_key=key).success
    bench.platform.transfer.run_once()
    assert bench.platform.dead_letters.of_backfills("orders") == {}
    assert sql(bench.platform, "SELECT id, value FROM ledger ORDER BY id") == rows

    repository = location.get_repository_def()
    assert {sensor.name for sensor in repository.sensor_defs} == {*(f"consume_ledger_{n}" for n in range(4)), "lag"}
    assert {schedule.name for schedule in repository.schedule_defs} == {"transfer", "housekeeping"}
    assert {key.name for key in repository.asset_graph.asset_check_keys} == {"lag", "delivered"}


def test_a_topic_that_a_consumer_publishes_to_is_the_consumers_asset_and_no_external_asset() -> None:
    @range_asset(topic=Topic("orders", 2), consumer="sums", publishes=Topic("sums"), name="sum_orders")
    def sums(claim: Claim) -> None: ...

    graph = build_definitions([sums], topics=[Topic("sums"), Topic("more")]).resolve_asset_graph()
    executable = {name: graph.get(topic_key(name)).is_executable for name in ("orders", "sums", "more")}
    assert executable == {"orders": False, "sums": True, "more": False}


def test_the_topics_of_dead_letters_are_assets_since_a_red_check_links_to_them() -> None:
    def keys(definitions: dg.Definitions) -> set[str]:
        return {
            key.path[-1] for key in definitions.resolve_asset_graph().get_all_asset_keys() if key.path[0] == "topic"
        }

    resource = EventSQLResource(dsn="postgresql://nowhere")
    one = build_definitions([ledger], eventsql=resource)
    assert keys(one) == {"orders", "orders_dlt"}
    assert "orders_dlt" not in keys(build_definitions([ledger], dead_letters=False))
    # If a location has several parts, the part with a topic has the topic's dead letters.
    part = build_definitions([slow], name="slow", platform=False, resources={"eventsql": resource})
    assert keys(dg.Definitions.merge(one, part)) == {"orders", "orders_dlt"}
    alone = build_definitions([slow], platform=False, topics=[slow.topic], resources={"eventsql": resource})
    assert "orders_dlt" in keys(alone)


def test_a_location_takes_external_assets_and_topics_and_queues_as_its_team_describes_them() -> None:
    @worker_asset(queue="mails")
    def send_mails(messages: Sequence[Message], connection: Connection) -> None: ...

    table = table_asset("public.orders")
    topic = topic_asset(ledger.topic, deps=[table], owners=["team:shop"])
    queue = queue_asset("mails", deps=[ledger.key])
    location = build_definitions([ledger], workers=[send_mails], assets=[table, topic, queue])

    graph = location.resolve_asset_graph()
    assert {each.key: graph.get(each.key).parent_keys for each in (topic, queue)} == {
        topic.key: {table.key},
        queue.key: {ledger.key},
    }
    assert graph.get(topic.key).owners == ["team:shop"]
    assert not graph.get(topic.key).is_executable


def test_a_location_takes_an_asset_that_publishes_to_a_topic_as_the_asset_of_that_topic() -> None:
    @dg.asset(key=topic_key("orders"))
    def orders() -> None: ...

    graph = build_definitions([ledger], assets=[orders]).resolve_asset_graph()
    assert graph.get(topic_key("orders")).is_executable
    assert graph.get(ledger.key).parent_keys == {topic_key("orders")}


def test_a_location_has_the_backfills_of_its_consumers_when_it_asks_for_them() -> None:
    plain, with_them = build_definitions([ledger]), build_definitions([ledger], backfills=True)
    added = set(with_them.get_repository_def().job_names) - set(plain.get_repository_def().job_names)
    assert added == {"backfill_ledger", "plan_ledger_backfill"}
    assert with_them.resolve_asset_graph().get(dg.AssetKey("ledger_backfill")).is_partitioned


def test_registering_prepares_tables_before_a_consumer_exists_and_may_be_repeated(bench: Workbench) -> None:
    seen: list[tuple[int, int]] = []

    def prepare(platform: Shard) -> None:
        seen.append((len(platform.registry.topics()), len(platform.registry.consumers("orders"))))

    register = build_definitions([ledger], eventsql=bench.eventsql, prepare=prepare).resolve_job_def("register")
    for _ in range(2):
        assert register.execute_in_process(instance=bench.instance).success
    assert (seen[0], len(seen)) == ((2, 0), 2)


def registers(bench: Workbench, definition: ConsumerDefinition) -> dict[str, object]:
    """Run the job `register` of a location with one consumer. Returns the metadata of its step."""
    location = build_definitions([definition], eventsql=bench.eventsql)
    done = location.resolve_job_def("register").execute_in_process(instance=bench.instance)
    (output,) = done.filter_events(lambda event: event.is_successful_output)
    return {name: value.value for name, value in output.step_output_data.metadata.items()}


def handle(events: Sequence[Event], connection: Connection) -> None: ...


def test_registering_names_the_consumers_that_the_location_does_not_declare(
    bench: Workbench, capfd: pytest.CaptureFixture[str]
) -> None:
    mailer = consumer_asset(topic=Topic("orders"), consumer="mailer", name="mailer")(handle)
    assert registers(bench, mailer)["not declared here"] == []
    for name in ("removed", "mailer__backfill_b1_0_5"):
        bench.platform.registry.register_consumer(Consumer("orders", name))
    assert registers(bench, mailer)["not declared here"] == ["orders removed"]
    assert "eventsql consumer delete --execute orders removed" in capfd.readouterr().err
    assert {state.name for state in bench.platform.registry.consumers("orders")} >= {"mailer", "removed"}


def test_registering_leaves_settings_that_are_not_declared_and_offsets_as_they_are(bench: Workbench) -> None:
    by_hand = EventFilter(key_prefix="eu-")
    bench.platform.registry.register_topic(Topic("orders", 2))
    bench.publish("orders", 4)
    bench.platform.registry.register_consumer(
        Consumer("orders", "mailer", True), max_attempts=9, filter=by_hand, start=3
    )
    before = bench.platform.registry.consumer("orders", "mailer")
    mailer = consumer_asset(topic=Topic("orders", 2), consumer="mailer", partitioned=True, start="latest")(handle)
    assert registers(bench, mailer) == {"created": ["topic 'orders_dlt'"], "changed": {}, "not declared here": []}
    assert bench.platform.registry.consumer("orders", "mailer") == before


@pytest.mark.parametrize("decorate", [consumer_asset, range_asset])
def test_registering_applies_declared_settings_and_shows_each_as_a_change(
    bench: Workbench, decorate: Callable[..., Any]
) -> None:
    def declared(**settings: object) -> ConsumerDefinition:
        function = handle if decorate is consumer_asset else claim_nothing
        definition: ConsumerDefinition = decorate(topic=Topic("orders"), consumer="mailer", **settings)(function)
        return definition

    def state() -> tuple[int, EventFilter | None, int]:
        (found,) = bench.platform.registry.consumer("orders", "mailer")
        return found.max_attempts, found.filter, found.last_event_id

    bench.platform.registry.register_topic(Topic("orders"))
    bench.publish("orders", 4)
    name, conditions = "consumer 'mailer' of topic 'orders'", EventFilter(key_prefix="eu-")
    assert name in str(registers(bench, declared(filter=conditions, start=3))["created"])
    assert state() == (5, conditions, 2)
    changed = registers(bench, declared(filter=EVERY_EVENT, max_attempts=2))["changed"]
    assert changed == {name: ["max attempts: 2 (was 5)", "filter: every event (was key eu-*)"]}
    assert state() == (2, None, 2)


def claim_nothing(claim: Claim) -> None: ...


@pytest.mark.parametrize("wrong", [{"filter": {"keys": ["a"]}}, {"start": "now"}, {"max_attempts": 0}])
@pytest.mark.parametrize("decorate", [consumer_asset, range_asset])
def test_an_impossible_declaration_is_refused_at_definition(
    decorate: Callable[..., Any], wrong: dict[str, object]
) -> None:
    with pytest.raises(ValidationError):
        decorate(topic=Topic("orders"), consumer="mailer", **wrong)(
            handle if decorate is consumer_asset else claim_nothing
        )


def test_a_consumer_that_was_registered_in_another_form_fails_the_job_and_is_left_as_it_is(bench: Workbench) -> None:
    bench.platform.registry.register_topic(Topic("orders", 2)).register_consumer(Consumer("orders", "mailer"))
    mailer = consumer_asset(topic=Topic("orders", 2), consumer="mailer", partitioned=True)(handle)
    with pytest.raises(RedefinitionError):
        registers(bench, mailer)
    assert [each.partition for each in bench.platform.registry.consumer("orders", "mailer")] == [-1]


def test_a_dead_letter_topic_that_a_location_declares_keeps_its_partitions(bench: Workbench) -> None:
    letters = Topic(ledger.topic.dead_letter_topic, 4)
    reader = consumer_asset(topic=letters, consumer="reader", partitioned=True, name="reader")(handle)
    register = build_definitions([ledger, reader], eventsql=bench.eventsql).resolve_job_def("register")
    for _ in range(2):
        assert register.execute_in_process(instance=bench.instance).success
    assert bench.platform.registry.topic(letters.name).partitions == 4


def test_a_location_has_an_alert_sensor_only_with_notify_and_a_lag_check_only_with_a_limit() -> None:
    def notify(alert: CheckAlert) -> None: ...

    told = build_definitions([ledger], notify=notify).get_repository_def()
    assert "alerts" in {sensor.name for sensor in told.sensor_defs}
    silent = build_definitions([ledger], lag=None).get_repository_def()
    assert "alerts" not in {sensor.name for sensor in silent.sensor_defs}
    assert {key.name for key in silent.asset_graph.asset_check_keys} == {"delivered"}


def test_keywords_of_a_location_override_its_options() -> None:
    shared = LocationOptions(lag=None, resources={"eventsql": EventSQLResource(dsn="postgresql://nowhere")})
    part = build_definitions([ledger], shared, name="shop", platform=False)
    assert {key.name for key in part.resolve_asset_graph().asset_check_keys} == {"delivered"}
    assert "lag_shop" in {sensor.name for sensor in part.get_repository_def().sensor_defs}
    assert not part.get_repository_def().schedule_defs


def test_each_option_of_a_location_is_a_keyword_of_the_same_type() -> None:
    assert get_type_hints(LocationFields) == get_type_hints(LocationOptions)


def test_definitions_of_several_parts_can_be_merged() -> None:
    resource = EventSQLResource(dsn="postgresql://nowhere")
    merged = dg.Definitions.merge(
        build_definitions([ledger], eventsql=resource), build_definitions([slow], name="slow", platform=False)
    )
    # Both consume one topic.
    names = {sensor.name for sensor in merged.get_repository_def().sensor_defs}
    assert {"lag", "lag_slow", "consume_slow"} <= names
    assert {"register", "register_slow"} <= set(merged.get_repository_def().job_names)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of `dg` without any definitions."""
    package = tmp_path / "src" / "rides"
    (package / "defs").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "defs" / "__init__.py").touch()
    (package / "definitions.py").write_text(
        "from pathlib import Path\n\nimport dagster as dg\n\n\n@dg.definitions\ndef defs() -> dg.Definitions:\n"
        "    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "rides"\nversion = "0"\nrequires-python = ">=3.11"\n\n'
        '[tool.dg]\ndirectory_type = "project"\n\n[tool.dg.project]\nroot_module = "rides"\n'
    )
    return tmp_path


COMPONENT = f"{EventSQLConsumerComponent.__module__.rpartition('.')[0]}.{EventSQLConsumerComponent.__name__}"


def dg_command(project: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dg")), *arguments],
        cwd=project,
        env={
            **os.environ,
            "PYTHONPATH": f"{project / 'src'}{os.pathsep}{os.environ['PYTHONPATH']}",
            "EVENTSQL_DSN": "postgresql://nowhere",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def scaffold(project: Path, name: str) -> Path:
    """Scaffold a consumer of a topic with 3 partitions; gives its folder."""
    dg_command(project, "scaffold", "defs", COMPONENT, name, "--topic", "rides", "--partitions", "3")
    return project / "src" / "rides" / "defs" / name


@pytest.mark.nightly
def test_dg_scaffolds_consumers_and_lists_their_definitions(project: Path) -> None:
    # Dagster does not accept the name of the second folder.
    first, second = (
        yaml.safe_load((scaffold(project, name) / "defs.yaml").read_text()) for name in ("billing", "my-mailer")
    )
    assert (first["type"], first["attributes"]["topic"]) == (COMPONENT, "rides")
    assert (second["attributes"]["name"], second["attributes"]["platform"]) == ("my_mailer", False)
    listed = json.loads(dg_command(project, "list", "defs", "--json"))
    consuming = sorted(f"consume_{name}_{number}" for name in ("billing", "my_mailer") for number in range(3))
    assert sorted(each["name"] for each in listed["sensors"]) == [*consuming, "lag"]
    assert [each["name"] for each in listed["jobs"] if "register" in each["name"]] == ["register"]


def build_all(*components: dict[str, Any]) -> dg.Definitions:
    """The definitions of a project with components whose defs.yaml have these attributes."""
    with create_defs_folder_sandbox() as sandbox:
        for attributes in components:
            sandbox.scaffold_component(
                component_cls=EventSQLConsumerComponent,
                defs_path=attributes["name"],
                scaffold_params={"topic": "rides"},
                defs_yaml_contents={
                    "type": COMPONENT,
                    "attributes": {"topic": "rides", "consumer": attributes["name"], **attributes},
                },
            )
        with sandbox.build_all_defs() as definitions:
            return definitions


def build(**attributes: Any) -> dg.Definitions:
    """The definitions of a component."""
    return build_all({"name": "billing", "consumer": "billing", **attributes})


def deprecated(test: Callable[..., None]) -> Callable[..., None]:
    """Let Dagster read a file in its own way."""
    for warning in ("`parse_obj_as` is deprecated", ".* is currently in beta", ".* is currently in preview"):
        test = pytest.mark.filterwarnings(f"ignore:{warning}")(test)
    return test


@deprecated
def test_a_defs_yaml_has_the_options_of_an_asset() -> None:
    definitions = build(
        options={
            "key_prefix": ["finance", "daily"],
            "group_name": "money",
            "code_version": "7",
            "metadata": {"table": "bills"},
            "freshness": 3600,
            "columns": {"id": "bigint"},
            "deps": ["raw/customers"],
            "kinds": ["table"],
            "retry_policy": {"max_retries": 3, "delay": 5},
            "automation_condition": "{{ dg.AutomationCondition.eager() }}",
        },
        sensor="consumer",
    )
    key = dg.AssetKey(["finance", "daily", "billing"])
    asset = definitions.get_assets_def(key)
    spec = asset.get_asset_spec(key)
    assert (spec.group_name, spec.code_version, spec.metadata["table"]) == ("money", "7", "bills")
    assert spec.freshness_policy == dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=1))
    assert spec.metadata["dagster/column_schema"] == dg.TableSchema([dg.TableColumn("id", "bigint")])
    assert {dep.asset_key for dep in spec.deps} == {topic_key("rides"), dg.AssetKey(["raw", "customers"])}
    assert "table" in spec.kinds
    assert spec.automation_condition == dg.AutomationCondition.eager()
    assert asset.op.retry_policy == dg.RetryPolicy(max_retries=3, delay=5)


@deprecated
def test_a_project_has_one_lag_sensor_and_one_registration(
    bench: Workbench, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    definitions = build_all(
        {"name": "billing", "platform": False, "lag": None},
        {"name": "mailing", "topics": [{"name": "more"}]},
        {"name": "printing", "platform": False, "topic": "fares"},
    )
    repository = definitions.get_repository_def()
    consuming = {f"consume_{name}" for name in ("billing", "mailing", "printing")}
    assert {sensor.name for sensor in repository.sensor_defs} == {*consuming, "lag"}
    assert {name for name in repository.job_names if "register" in name} == {"register"}
    topics = {key.path[-1] for key in repository.asset_graph.get_all_asset_keys() if key.path[0] == "topic"}
    assert topics == {"rides", "rides_dlt", "fares", "fares_dlt", "more"}
    checks = {(key.asset_key.path[-1], key.name) for key in repository.asset_graph.asset_check_keys}
    assert {name for name, check in checks if check == "lag"} == {"mailing", "printing"}

    assert definitions.resolve_job_def("register").execute_in_process(instance=bench.instance).success
    registered = {(each.topic, each.name) for each in bench.platform.registry.consumers()}
    assert registered == {("rides", "billing"), ("rides", "mailing"), ("fares", "printing")}
    # The sensor knows the checks of all.
    assert bench.tick(repository.get_sensor_def("lag"), eventsql=bench.eventsql) == "no consumer is behind"


@deprecated
def test_a_component_in_a_project_whose_platform_is_elsewhere_has_its_own_lag_and_registration() -> None:
    platform = dg.Definitions(resources={"eventsql": EventSQLResource(dsn="postgresql://nowhere")})
    component = build_all({"name": "billing", "platform": False})
    repository = dg.Definitions.merge(platform, component).get_repository_def()
    assert "lag_billing" in {sensor.name for sensor in repository.sensor_defs}
    assert "register_billing" in repository.job_names


@deprecated
def test_a_defs_yaml_may_have_further_topics_and_backfills() -> None:
    definitions = build(topics=[{"name": "more", "partitions": 2}], backfills=True)
    graph = definitions.resolve_asset_graph()
    assert graph.get(topic_key("more")).metadata["partitions"] == 2
    assert definitions.resolve_job_def("backfill_billing").name == "backfill_billing"


@deprecated
def test_a_defs_yaml_may_declare_filter_start_and_attempts(
    bench: Workbench, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    bench.platform.registry.register_topic(Topic("rides"))
    bench.publish("rides", 3)

    def registered(**attributes: object) -> tuple[int, EventFilter | None, int]:
        job = build(**attributes).resolve_job_def("register")
        assert job.execute_in_process(instance=bench.instance).success
        (state,) = bench.platform.registry.consumer("rides", "billing")
        return state.max_attempts, state.filter, state.last_event_id

    conditions = {"keys": ["a", "ab"], "key_prefix": "a", "metadata": {"source": "web"}}
    expected = EventFilter(frozenset(["a", "ab"]), "a", {"source": "web"})
    assert registered(filter=conditions, start="latest", max_attempts=3) == (3, expected, 3)
    assert registered() == (3, expected, 3)
    assert registered(filter="every event") == (3, None, 3)


@deprecated
def test_a_defs_yaml_may_limit_the_events_of_a_call_and_leave_the_sensor_off(
    bench: Workbench, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    insert = "connection.execute('INSERT INTO call VALUES (%s)', [len(events)])"
    monkeypatch.setattr(component, "_FUNCTION", f"def consume(events, connection):\n    {insert}\n")
    definitions = build(batch=2, default_status="STOPPED")
    assert definitions.resolve_job_def("register").execute_in_process(instance=bench.instance).success
    sql(bench.platform, "CREATE TABLE call (events integer)")
    bench.publish("rides", 5)
    assert definitions.resolve_job_def("consume_billing").execute_in_process(instance=bench.instance).success
    assert sql(bench.platform, "SELECT events FROM call") == [(2,), (2,), (1,)]
    sensor = definitions.get_repository_def().get_sensor_def("consume_billing")
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED


def test_the_name_of_a_folder_becomes_a_name_that_dagster_accepts() -> None:
    names = {text: usable_name(text) for text in ("billing", "my-mailer", "type", "rides and fares", "—")}
    assert names == {
        "billing": "billing",
        "my-mailer": "my_mailer",
        "type": "type_consumer",
        "rides and fares": "rides_and_fares",
        "—": "consumer",
    }


@deprecated
def test_two_components_with_the_platform_are_refused_and_the_error_names_the_field_and_both_files() -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011 - Dagster's own error
        build_all({"name": "billing"}, {"name": "mailer"})
    said = "\n".join(all_said(refused.value))
    assert "platform: " in said
    assert "billing/defs.yaml and mailer/defs.yaml" in said


@deprecated
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "my-consumer"),
        ("name", "type"),
        ("topics", [{"name": "No Topic"}]),
        ("backfills", "sometimes"),
        ("topic", "No Topic"),
        ("consumer", " mailer "),
        ("partitions", 0),
        ("limits", {"max_events": 0}),
        ("batch", 0),
        ("max_attempts", 0),
        ("default_status", "off"),
        ("filter", {}),
        ("filter", "none"),
        ("filter", {"keys": []}),
        ("start", "now"),
        ("lag", {"max_events": -1}),
        ("lag", {"grace": -0.5}),
        ("lag", {"max_seconds": None}),
        ("limits", {"max_events": "many"}),
        ("colour", "red"),
        ("file", "elsewhere.py"),
        ("function", "devour"),
    ],
)
def test_a_mistake_in_a_defs_yaml_names_the_field(field: str, value: object) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011 - Dagster's own errors and pydantic's
        build(**{field: value})
    said = all_said(refused.value)
    assert re.search(rf"\b{field}\b", "\n".join(said)), said


def all_said(error: BaseException | None) -> list[str]:
    """Dagster's own error names the file, and its cause says why."""
    said: list[str] = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__ or error.__context__
    return said
