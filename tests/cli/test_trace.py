"""`eventsql trace`: from an event back to what services published, with Dagster and without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLIOManager,
    EventSQLResource,
    RangeLimits,
    publish_events,
    range_asset,
    topic_asset,
    topic_key,
)
from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE
from eventsql_orchestration.orchestration.local_processes import free_port
from eventsql_orchestration.orchestration.owners import airflow_run
from tests.cli.conftest import Run
from tests.conftest import Prepared
from tests.dagster.conftest import migrated
from tests.dagster.webservers import served
from tests.forms import stored

__all__ = ["migrated"]


def doubled(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
    """Publishes each ride twice."""
    taken = claim.remaining
    events = eventsql.platform.reader.read(taken.topic, after=taken.after, upto=taken.upto)
    values = [{"value": event.value * 2} for event in events]
    return publish_events(context, values, eventsql=eventsql, topic="doubles", claim=claim)


def summed(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
    """Publishes how many doubles there are."""
    return publish_events(context, [{"value": str(claim.events)}], eventsql=eventsql, topic="sums", claim=claim)


def definition(function: Callable[..., Any], topic: str, publishes: str) -> ConsumerDefinition:
    return range_asset(
        topic=Topic(topic),
        consumer=f"to_{publishes}",
        publishes=publishes,
        name=function.__name__,
        limits=RangeLimits(max_wait=0.0, drain_seconds=0.0),
        options=AssetOptions(kinds=()),
    )(function)


@dataclass
class Pipeline:
    """Rides are published by a service; two range assets make doubles and then sums of them."""

    platform: EventSQL
    eventsql: EventSQLResource
    home: Path
    instance: dg.DagsterInstance

    def publish(self, count: int) -> int:
        """Rides, transferred; gives the last offset."""
        self.platform.publisher.publish_all(Publication("rides", b"%d" % i) for i in range(count))
        self.platform.transfer.run_once()
        return self.platform.reader.end("rides")

    def run(self, function: Callable[..., Any], topic: str, publishes: str) -> str:
        """Consume what waits; gives the run."""
        defined = definition(function, topic, publishes)
        defined.register(self.platform)
        job = dg.Definitions(
            assets=[defined.asset], jobs=[defined.job], resources={"eventsql": self.eventsql}
        ).resolve_job_def(defined.job.name)
        return job.execute_in_process(instance=self.instance).run_id


@dataclass(frozen=True)
class TwoRounds:
    """What two rounds through the whole pipeline left, of three rides and of four: each test has a copy."""

    database: str
    home: Path
    doubles_run: str
    """The first round's run that made doubles."""

    last_doubles_run: str
    last_sums_run: str
    """Those of the second round."""


@contextmanager
def opened(home: Path, platform: EventSQL) -> Iterator[Pipeline]:
    eventsql = EventSQLResource(dsn=platform.database.dsn)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield Pipeline(platform, eventsql, home, instance)
    eventsql.platform.close()


@pytest.fixture(scope="module")
def two_rounds(migrated: Path, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> TwoRounds:
    home = shutil.copytree(migrated, tmp_path_factory.mktemp("two_rounds"), dirs_exist_ok=True)
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    runs = []

    def fill(platform: EventSQL) -> None:
        for name in ("rides", "doubles", "sums"):
            platform.registry.register_topic(Topic(name))
        with opened(home, platform) as pipeline:
            for rides in (3, 4):
                pipeline.publish(rides)
                runs.append(pipeline.run(doubled, "rides", "doubles"))
                runs.append(pipeline.run(summed, "doubles", "sums"))

    (database,) = prepared(fill)
    first_doubles, _, doubles, sums = runs
    return TwoRounds(database, home, first_doubles, doubles, sums)


@pytest.fixture
def template(two_rounds: TwoRounds) -> str:
    return two_rounds.database


@pytest.fixture
def pipeline(platform: EventSQL, two_rounds: TwoRounds, tmp_path: Path) -> Iterator[Pipeline]:
    with opened(shutil.copytree(two_rounds.home, tmp_path / "instance"), platform) as pipeline:
        yield pipeline


@pytest.fixture(autouse=True)
def no_dagster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)


def trace(run: Run, *arguments: object) -> tuple[dict[str, Any], str]:
    result = run("trace", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def test_an_event_is_traced_over_two_runs_to_the_events_of_a_service(
    run: Run, pipeline: Pipeline, two_rounds: TwoRounds
) -> None:
    end = pipeline.platform.reader.end("rides")
    found, message = trace(run, "sums", pipeline.platform.reader.end("sums"))

    assert (found["run_id"], found["asset"], found["run"]) == (two_rounds.last_sums_run, "summed", None)
    (doubles,) = found["inputs"]
    assert (doubles["topic"], doubles["consumer"], doubles["upto"]) == (
        "doubles",
        "to_sums",
        pipeline.platform.reader.end("doubles"),
    )
    (of_doubles,) = doubles["origins"]
    assert (of_doubles["run_id"], of_doubles["events"]) == (two_rounds.last_doubles_run, 4)
    (rides,) = of_doubles["inputs"]
    assert (rides["after"], rides["upto"]) == (end - 4, end), "the range of the second round alone"
    (of_rides,) = rides["origins"]
    assert (of_rides["run_id"], of_rides["events"], of_rides["inputs"]) == (None, 4, [])
    assert message == "eventsql: status and times of runs are not shown: give --dagster-url, or set DAGSTER_HOME\n"


def test_the_tree_reads_from_the_event_to_its_origin(run: Run, pipeline: Pipeline, two_rounds: TwoRounds) -> None:
    offset, middle, end = (pipeline.platform.reader.end(topic) for topic in ("sums", "doubles", "rides"))
    lines = [line.lstrip("│├└─ ") for line in run("trace", "sums", offset).stdout.splitlines()]
    assert [line.partition(", claim")[0] for line in lines] == [
        f"sums event {offset}",
        f"run {two_rounds.last_sums_run}, asset summed",
        f"read doubles offsets {middle - 3} to {middle} as consumer to_sums",
        f"doubles 4 events, offsets {middle - 3} to {middle}",
        f"run {two_rounds.last_doubles_run}, asset doubled",
        f"read rides offsets {end - 3} to {end} as consumer to_doubles",
        f"rides 4 events, offsets {end - 3} to {end}",
        "published by a service or a program, not by a run",
    ]


def test_status_and_times_come_from_the_instance_of_dagster_home(
    run: Run, pipeline: Pipeline, two_rounds: TwoRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums_run = two_rounds.last_sums_run
    monkeypatch.setenv("DAGSTER_HOME", str(pipeline.home))
    found, message = trace(run, "sums", pipeline.platform.reader.end("sums"))
    assert message == ""
    assert found["run"]["status"] == "SUCCESS"
    assert (found["run"]["id"], found["run"]["job"]) == (sums_run, "consume_summed")
    assert found["run"]["started"] <= found["run"]["ended"]
    assert found["inputs"][0]["origins"][0]["run"]["status"] == "SUCCESS"
    assert "SUCCESS, ended 20" in run("trace", "sums", 1).stdout

    pipeline.instance.delete_run(sums_run)
    found, _ = trace(run, "sums", pipeline.platform.reader.end("sums"))
    assert (found["run"], found["notes"]) == (None, ["Dagster has no such run any more"])
    assert found["inputs"], "its claims are in the database"


@pytest.fixture
def webserver(pipeline: Pipeline) -> Iterator[str]:
    """Dagster's webserver on the instance of the pipeline; its URL."""
    with served(pipeline.home) as url:
        yield url


def test_a_webserver_is_asked_the_same_and_linked_to(
    run: Run, pipeline: Pipeline, two_rounds: TwoRounds, webserver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy of the environment does not reach this machine's loopback.
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    sums_run = two_rounds.last_sums_run
    offset = pipeline.platform.reader.end("sums")
    served, message = trace(run, "sums", offset, "--dagster-url", webserver)
    assert message == ""
    assert served["url"] == f"{webserver}/runs/{sums_run}"
    assert (
        f"SUCCESS, ended {served['run']['ended'][:10]}"
        in run("trace", "sums", offset, "--dagster-url", webserver).stdout
    )

    # `eventsql dev` leaves its URL in its instance.
    monkeypatch.setenv(STORAGE_VARIABLE, "of another instance")
    home = Path(".eventsql")
    home.mkdir()
    (home / "dagster").symlink_to(pipeline.home)
    (pipeline.home / "dagster.url").write_text(webserver)
    here, _ = trace(run, "sums", offset)
    assert (here["url"], here["run"]) == (served["url"], served["run"])

    monkeypatch.setenv("DAGSTER_HOME", str(pipeline.home))
    stored, _ = trace(run, "sums", offset)
    assert (stored["url"], stored["run"]) == (None, served["run"])

    with_io, offset = through_io_manager(pipeline)
    for arguments in ((), ("--dagster-url", webserver)):
        found, _ = trace(run, "sums", offset, *arguments)
        assert found["run_id"] == with_io
        assert [(each["topic"], each["after"], each["origins"][0]["events"]) for each in found["inputs"]] == [
            ("rides", 0, 7)
        ]
    pipeline_gone, _ = trace(run, "sums", offset, "--dagster-url", webserver, "--depth", 0)
    assert pipeline_gone["notes"] == ["it read 1 range, not followed any further: give a larger --depth"]

    pipeline.instance.delete_run(sums_run)
    found, _ = trace(run, "sums", 1, "--dagster-url", webserver)
    assert found["run"]["status"] == "SUCCESS", "that is the first run"
    found, _ = trace(run, "sums", 2, "--dagster-url", webserver)
    assert (found["run"], found["notes"]) == (None, ["Dagster has no such run any more"])


def through_io_manager(pipeline: Pipeline) -> tuple[str, int]:
    """A run that reads and publishes through the IO manager, without a claim; and its event."""

    def count(rides: list[Any]):  # type: ignore[no-untyped-def]  # Dagster would check it
        return [{"value": str(len(rides))}]

    count.__annotations__ = {"rides": list}
    given = {"rides": dg.AssetIn(key=topic_key("rides"), input_manager_key="topics")}
    asset = dg.asset(ins=given, io_manager_key="topics", metadata={"topic": "sums"})(count)
    resources = {"eventsql": pipeline.eventsql, "topics": EventSQLIOManager(eventsql=pipeline.eventsql)}
    result = dg.materialize(
        [topic_asset(Topic("rides")), asset], instance=pipeline.instance, resources=resources, selection=["count"]
    )
    return result.run_id, pipeline.platform.reader.end("sums")


def test_without_dagster_input_without_a_claim_is_unknown(run: Run, pipeline: Pipeline) -> None:
    run_id, offset = through_io_manager(pipeline)
    found, _ = trace(run, "sums", offset)
    assert (found["run_id"], found["inputs"]) == (run_id, [])
    assert found["notes"] == ["it had no claim; only Dagster knows what a run reads without one"]


def test_a_bad_url_is_wrong_usage(run: Run, pipeline: Pipeline) -> None:
    refused = run("trace", "rides", 1, "--dagster-url", "nowhere")
    assert run("trace", "rides", 1).stderr == "", "no run, so nothing is lacking"
    assert refused.exit_code == 2
    assert "'nowhere' is not the URL of a Dagster webserver" in refused.stderr
    assert "%40" in run("trace", "rides", 1, "--dagster-url", "http://h/user/me@home").stderr


@pytest.mark.parametrize("url", ["u:secret@h:8080", "http:///u:secret@h", "http://u:1/secret@h", "http://u:1#secret@h"])
def test_a_bad_url_shows_no_password(run: Run, url: str) -> None:
    refused = run("trace", "rides", 1, "--dagster-url", url)
    assert (refused.exit_code, "cannot be read" in refused.stderr, "secret" in refused.output) == (2, True, False)


@pytest.mark.parametrize("how", ["--dagster-url", "DAGSTER_HOME"])
def test_the_trace_is_shown_if_dagster_does_not_answer(
    run: Run, pipeline: Pipeline, closed_port: int, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "DAGSTER_HOME":
        monkeypatch.setenv("DAGSTER_HOME", "/nowhere")
        found, message = trace(run, "doubles", 1)
    else:
        found, message = trace(run, "doubles", 1, how, f"http://127.0.0.1:{closed_port}")
    assert found["inputs"][0]["origins"][0]["events"] == 3
    assert message.startswith("eventsql: status and times of runs are not shown, Dagster cannot be reached (")
    assert message.count("\n") == 1
    assert "LocalDagsterError" not in message


def test_the_instance_of_the_home_is_used(run: Run, pipeline: Pipeline, directory: Path) -> None:
    (directory / ".eventsql").mkdir()
    pipeline.home.rename(directory / ".eventsql" / "dagster")
    found, message = trace(run, "doubles", 1)
    assert (found["run"]["status"], message) == ("SUCCESS", "")


def test_a_dead_letter_and_a_redriven_event_are_traced_to_their_original(
    run: Run, pipeline: Pipeline, two_rounds: TwoRounds
) -> None:
    platform = pipeline.platform
    platform.registry.register_topic(Topic("doubles_dlt"))
    metadata = {**platform.reader.read("doubles", limit=1)[0].metadata, "dlt_topic": "doubles", "dlt_offset": "1"}
    platform.publisher.publish(Publication("doubles_dlt", b"", metadata=metadata))
    redriven = {**platform.reader.read("doubles", limit=1)[0].metadata, "redriven_from": "doubles_dlt:1"}
    platform.publisher.publish(Publication("doubles", b"", metadata=redriven))
    platform.transfer.run_once()

    found, message = trace(run, "doubles", platform.reader.end("doubles"))
    assert "status and times of runs are not shown" in message, "the original is of a run"
    letter = found["copy_of"]
    assert (found["run_id"], letter["topic"], letter["run_id"]) == (None, "doubles_dlt", None)
    assert (letter["copy_of"]["first_offset"], letter["copy_of"]["run_id"]) == (1, two_rounds.doubles_run)
    assert letter["copy_of"]["inputs"][0]["topic"] == "rides"
    assert "a copy of doubles_dlt event 1" in run("trace", "doubles", platform.reader.end("doubles")).stdout


def test_metadata_of_events_cannot_control_the_terminal_and_a_link_has_no_password(
    run: Run, pipeline: Pipeline
) -> None:
    run_id, asset, partition = "r\x1b]0;title\x07\nrun 2", "\x1b[2J", "\x9b31m"
    said = {"dagster_run_id": run_id, "dagster_asset_key": asset, "dagster_partition": partition}
    pipeline.platform.publisher.publish(Publication("rides", b"", metadata=said))
    pipeline.platform.transfer.run_once()
    offset = pipeline.platform.reader.end("rides")
    url = f"http://somebody:secret@127.0.0.1:{free_port(3456)}/"
    told = run("trace", "rides", offset, "--dagster-url", url)
    assert told.exit_code == 0
    assert not set("\x1b\x07\x9b") & set(told.output)
    assert r"run r\x1b]0;title\x07\nrun 2, asset \x1b[2J [\x9b31m], http://127.0.0.1:" in told.stdout
    found = run("trace", "rides", offset, "--dagster-url", url, "--json")
    assert "secret" not in told.output + found.output
    assert not set("\x1b\x07\x9b") & set(found.output)
    assert json.loads(found.stdout)["run_id"] == run_id


def test_many_publishers_of_a_range_are_cut_short_and_counted(run: Run, pipeline: Pipeline) -> None:
    platform = pipeline.platform
    runs = [{"dagster_run_id": f"run {number}", "dagster_asset_key": "doubled"} for number in range(3)]
    platform.publisher.publish_all(Publication("doubles", b"2", metadata=metadata) for metadata in runs)
    platform.transfer.run_once()
    pipeline.run(summed, "doubles", "sums")
    offset = platform.reader.end("sums")
    found, _ = trace(run, "sums", offset, "--width", 2)
    (doubles,) = found["inputs"]
    assert (len(doubles["origins"]), doubles["origins_left_out"]) == (2, 1)
    assert "1 publisher more: give a larger --width" in run("trace", "sums", offset, "--width", 2).stdout


@pytest.mark.parametrize("time", ["-infinity", "infinity"])
def test_an_event_with_a_time_that_python_lacks_is_no_end_of_the_trace(run: Run, pipeline: Pipeline, time: str) -> None:
    with pipeline.platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_created_at) "
            "VALUES ('rides', -1, '1', '{}', %s)",
            [time],
        )
    pipeline.publish(1)
    pipeline.run(doubled, "rides", "doubles")
    found, _ = trace(run, "doubles", pipeline.platform.reader.end("doubles"))
    assert [origin["events"] for origin in found["inputs"][0]["origins"]] == [2]


def test_events_that_retention_dropped_end_the_trace(
    run: Run, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline.platform.database.connection() as connection:
        connection.execute(f"DELETE FROM eventsql.{stored('rides')}")
    found, _ = trace(run, "doubles", 1)
    assert found["inputs"][0]["notes"] == ["none of its events is kept any more"]

    # Its claims go with a topic; Dagster still knows what was read.
    pipeline.platform.registry.unregister_topic("rides", force=True)
    assert trace(run, "doubles", 1)[0]["inputs"] == []
    monkeypatch.setenv("DAGSTER_HOME", str(pipeline.home))
    (read,) = trace(run, "doubles", 1)[0]["inputs"]
    assert (read["topic"], read["upto"], read["origins"]) == ("rides", 3, [])
    assert "'rides'" in read["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("sums", 7), 2, "topic 'sums' holds no event with the offset 7: `eventsql tail sums` shows its events"),
        (("nowhere", 1), 1, "nowhere"),
        (("sums", 0), 2, "OFFSET"),
    ],
)
def test_a_missing_event_is_one_line(
    run: Run, pipeline: Pipeline, arguments: tuple[object, ...], code: int, message: str
) -> None:
    result = run("trace", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_an_event_that_a_run_of_airflow_published_is_traced_to_what_it_read(run: Run, pipeline: Pipeline) -> None:
    platform = pipeline.platform
    platform.registry.register_consumer(Consumer("rides", "sums"))
    claim = platform.claims.claim("rides", "sums", owner=airflow_run("dag", "manual__1"), max_wait=0.0)
    assert isinstance(claim, Claim)
    metadata = {"airflow_dag_id": "dag", "airflow_run_id": "manual__1", "airflow_task_id": "sum_up"}
    platform.publisher.publish(Publication("sums", b"3", metadata={**metadata, "airflow_map_index": "4"}))
    platform.transfer.run_once()
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, claim)

    found, message = trace(run, "sums", platform.reader.end("sums"), "--dagster-url", "http://127.0.0.1:9")
    assert (found["run_id"], found["asset"], found["partition"]) == ("airflow dag/manual__1", "sum_up", "4")
    assert (found["url"], message.count("--airflow-url")) == (None, 1)
    (read,) = found["inputs"]
    assert (read["topic"], read["consumer"], read["claim"], read["upto"]) == ("rides", "sums", claim.id, 7)
    (origin,) = read["origins"]
    assert (origin["events"], origin["run_id"]) == (7, None)
    assert "run airflow dag/manual__1, task sum_up [4]" in run("trace", "sums", platform.reader.end("sums")).stdout
