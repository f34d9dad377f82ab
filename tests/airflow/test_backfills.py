"""Backfills in Airflow: a window in a run of the DAG that consumes, and the command that launches the runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from click.testing import CliRunner

from eventsql_orchestration import Connection, Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.airflow.api import URL_FILE, AirflowApi, running_airflow
from eventsql_orchestration.airflow.backfills import CONF, AirflowRuns, ReplayRequest
from eventsql_orchestration.cli import main
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.backfills.launcher import BackfillJob
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.replay import WindowReplay
from eventsql_orchestration.orchestration.backfills.windows import Backfill, ReplayRange
from eventsql_orchestration.orchestration.errors import AirflowAnswerError, LocalAirflowError, RunFailedError
from eventsql_orchestration.topics.positions import Earliest
from tests.airflow.conftest import context_of
from tests.airflow.consuming import effects, operator
from tests.airflow.served import FakeAirflow, serving
from tests.effects import make_table

EVENTS = 6


@pytest.fixture
def rides(connected: EventSQL) -> EventSQL:
    """A topic whose events a consumer has consumed."""
    connected.registry.register_topic(Topic("rides"))
    connected.registry.register_consumer(Consumer("rides", "billing"))
    make_table(connected)
    connected.publisher.publish_all(Publication("rides", b"%d" % number) for number in range(EVENTS))
    connected.transfer.run_once()
    with connected.database.transaction() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s", (EVENTS,))
    return connected


def begun(platform: EventSQL, window: int = 3) -> tuple[Backfill, list[str]]:
    """A backfill of the whole topic, and the keys of its windows."""
    backfills = Backfills(platform.shards)
    plan = backfills.plan("rides", "billing", ReplayRange(Earliest(), window_events=window))
    return backfills.register(plan, "one"), [run.key("one") for run in plan.runs]


def request(key: str, **options: Any) -> Any:
    """The context of the run of a window."""
    conf = ReplayRequest("rides", "billing", key, options.pop("max_failures", None)).conf()
    return context_of(conf=json.loads(json.dumps(conf)), **options)


def offset(platform: EventSQL) -> int:
    (state,) = platform.registry.consumer("rides", "billing")
    return state.last_event_id


# A window in a task


def test_a_run_replays_its_window_only_and_the_consumers_offset_stays(rides: EventSQL) -> None:
    _, keys = begun(rides)
    rides.publisher.publish(Publication("rides", b"new"))
    rides.transfer.run_once()
    result = operator().execute(request(keys[1]))
    assert effects(rides) == [4, 5, 6]
    assert (result["events"], result["backfill"]) == (3, "one")
    assert offset(rides) == EVENTS


def test_the_last_run_ends_the_backfill_and_a_second_run_of_a_window_is_skipped(rides: EventSQL) -> None:
    _, keys = begun(rides)
    for key in keys:
        operator().execute(request(key))
    assert effects(rides) == [1, 2, 3, 4, 5, 6]
    assert Backfills(rides.shards).is_finished("rides", "one", "billing")
    with pytest.raises(AirflowSkipException, match="another run has replayed"):
        operator().execute(request(keys[0], run_id="second"))
    assert effects(rides) == [1, 2, 3, 4, 5, 6]


def test_a_retry_replays_the_rest_of_its_window_without_waiting_for_the_lease(rides: EventSQL) -> None:
    found, keys = begun(rides)
    part = found.parts[0]
    killed = rides.claims.claim("rides", part.name, part.partition, owner="airflow dag/first", max_wait=0.0, lease=3600)
    assert isinstance(killed, Claim)
    operator().execute(request(keys[0], run_id="first", try_number=2))
    assert effects(rides) == [1, 2, 3]
    assert rides.claims.get(killed.id)[1] != "committed"


def test_a_retry_leaves_the_window_to_another_run_that_replays_it(
    rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, keys = begun(rides)
    part = found.parts[0]
    other = rides.claims.claim("rides", part.name, part.partition, owner="airflow dag/other", max_wait=0.0, lease=3600)
    assert isinstance(other, Claim)
    # Between two looks of the retry, the other run renews its lease.
    monkeypatch.setattr(WindowReplay, "_wait", lambda *_: rides.claims.renew(other, lease=3600))
    with pytest.raises(AirflowFailException, match="airflow dag/other replays this window now"):
        operator().execute(request(keys[0], run_id="first", try_number=2))
    assert effects(rides) == []
    assert rides.claims.get(other.id)[0].owner == other.owner


def test_a_task_of_another_consumer_is_skipped_in_the_run_of_a_window(rides: EventSQL) -> None:
    rides.registry.register_consumer(Consumer("rides", "other"))
    _, keys = begun(rides)
    with pytest.raises(AirflowSkipException, match="replays rides/billing"):
        operator(consumer="other").execute(request(keys[0]))
    assert effects(rides) == []


def test_the_run_of_a_deleted_backfill_fails_without_a_retry(rides: EventSQL) -> None:
    found, keys = begun(rides)
    Backfills(rides.shards).delete(found)
    with pytest.raises(AirflowFailException, match="no longer has window"):
        operator().execute(request(keys[0]))
    assert effects(rides) == []


def test_too_many_dead_letters_stop_it_and_the_error_names_the_command_that_goes_on(rides: EventSQL) -> None:
    rides.registry.register_topic(Topic("rides_dlt"))
    rides.registry.declare_consumer(Consumer("rides", "billing"), max_attempts=1)
    _, keys = begun(rides)

    def fail(events: Sequence[Event], connection: Connection) -> None:
        raise ValueError("it is wrong")

    with pytest.raises(AirflowFailException, match="--resume one --execute --orchestrator airflow"):
        operator(fail).execute(request(keys[0], max_failures=1))


@pytest.mark.parametrize(
    "wrong", [{}, {"topic": "rides", "consumer": "billing", "window": 5}, {"unknown": 1}, ["rides"], None]
)
def test_a_configuration_that_names_no_window_is_an_error(wrong: object) -> None:
    with pytest.raises(ValidationError, match="eventsql_backfill"):
        ReplayRequest.read({CONF: wrong})


def test_any_other_configuration_replays_nothing() -> None:
    assert ReplayRequest.read(None) is None
    assert ReplayRequest.read({"orders": 5}) is None


# The REST API


@pytest.fixture
def fake() -> FakeAirflow:
    airflow = FakeAirflow(lambda context: operator().execute(context))
    claims = {"name": "rides/billing", "uri": "eventsql://eventsql_default/rides/billing"}
    airflow.assets = [
        # The pattern of the question also fits it.
        {
            "name": "x",
            "uri": "eventsql://x/old_rides/billing",
            "scheduled_dags": [{"dag_id": "x"}],
            "producing_tasks": [],
        },
        {**claims, "scheduled_dags": [{"dag_id": "billing"}], "producing_tasks": []},
        {"name": "bills", "uri": "x://bills", "scheduled_dags": [], "producing_tasks": [{"dag_id": "billing"}]},
    ]
    return airflow


@pytest.fixture
def url(fake: FakeAirflow) -> Iterator[str]:
    with serving(fake) as found:
        yield found


def runs_in(url: str, consumer: str = "billing", dag: str | None = None) -> AirflowRuns:
    return AirflowRuns(url, "rides", consumer, dag=dag)


def test_the_dag_that_claims_schedule_is_found_with_the_assets_that_it_updates(url: str) -> None:
    assert runs_in(url).job == BackfillJob("billing", ("bills",))


def test_a_dag_that_cannot_be_found_is_named_with_the_option_that_names_one(url: str, fake: FakeAirflow) -> None:
    with pytest.raises(ValidationError, match=r"no DAG with the schedule claims_asset.*--dag"):
        _ = runs_in(url, "other").job
    fake.assets[1]["scheduled_dags"].append({"dag_id": "second"})
    with pytest.raises(ValidationError, match="several DAGs \\(billing, second\\)"):
        _ = runs_in(url).job
    assert runs_in(url, dag="billing").job.name == "billing"
    with pytest.raises(ValidationError, match="has no DAG 'nowhere'"):
        _ = runs_in(url, dag="nowhere").job


def test_runs_that_would_wait_for_ever_are_not_launched(url: str, fake: FakeAirflow) -> None:
    runs = runs_in(url)
    runs.require_running()
    fake.dags["billing"]["is_paused"] = True
    with pytest.raises(LocalAirflowError, match="paused"):
        runs.require_running()
    fake.scheduler = "unhealthy"
    with pytest.raises(LocalAirflowError, match="scheduler"):
        runs.require_running()


def test_runs_of_another_command_are_found_by_their_configuration(url: str, fake: FakeAirflow) -> None:
    def run(number: int, window: str, state: str, consumer: str = "billing") -> dict[str, Any]:
        conf = ReplayRequest("rides", consumer, window).conf()
        return {"dag_run_id": f"run-{number}", "state": state, "conf": conf}

    fake.runs = [
        run(1, "one:0-3", "success"), run(2, "one:3-6", "queued"), run(3, "two:0-3", "running"),
        run(4, "one:0-3", "running", "other"), {"dag_run_id": "run-5", "state": "running", "conf": None},
    ]  # fmt: skip
    runs = runs_in(url)
    assert runs.under_way("one") == {"one:3-6": "run-2"}
    assert runs.was_run("two")
    assert not runs.was_run("three")
    assert runs.ended(["run-2"]) == {}
    fake.runs[1]["state"] = "failed"
    assert f"failed: see {url}/dags/billing/runs/run-2" in runs.ended(["run-2"])["run-2"].why
    del fake.runs[1]
    assert "deleted" in runs.ended(["run-2"])["run-2"].why


def test_a_dag_that_is_paused_while_its_runs_wait_is_told_once(
    url: str, fake: FakeAirflow, caplog: pytest.LogCaptureFixture
) -> None:
    conf = ReplayRequest("rides", "billing", "one:0-3").conf()
    fake.runs = [{"dag_run_id": "run-1", "state": "queued", "conf": conf}]
    runs = runs_in(url)
    runs.under_way("one")
    for paused, told in ((False, 0), (True, 1), (True, 1), (False, 1), (True, 2)):
        fake.dags["billing"]["is_paused"] = paused
        assert runs.ended(["run-1"]) == {}
        assert len(caplog.records) == told
    fake.runs[0]["state"] = "success"
    assert runs.ended(["run-1"])["run-1"].succeeded


def test_a_refused_run_raises_an_error_of_the_package(url: str, fake: FakeAirflow) -> None:
    runs = runs_in(url)
    assert runs.job.name == "billing"
    del fake.dags["billing"]
    with pytest.raises(RunFailedError, match="could not be run"):
        runs.launch("one", "one:0-3")


def test_a_launch_whose_answer_a_proxy_loses_is_repeated_without_a_second_run(url: str, fake: FakeAirflow) -> None:
    fake.execute = lambda _: None
    runs = runs_in(url)
    assert runs.job.name == "billing"
    fake.lost = 1
    with pytest.raises(LocalAirflowError, match="502") as raised:
        runs.launch("one", "one:0-3")
    assert not isinstance(raised.value, AirflowAnswerError)
    again = runs.launch("one", "one:0-3")
    assert [run["dag_run_id"] for run in fake.runs] == [again]
    assert runs.launch("one", "one:0-3@other") != again


def test_a_shard_whose_name_no_run_id_can_have_has_runs(url: str, fake: FakeAirflow) -> None:
    fake.execute = lambda _: None
    run = runs_in(url).launch("one", "one:0-3:1@shard/2")
    assert run.startswith("eventsql_backfill__one__0-3:1__")
    assert fake.runs[0]["conf"][CONF]["window"] == "one:0-3:1@shard/2"


def test_a_user_gets_tokens_and_a_new_one_after_the_end_of_the_first(fake: FakeAirflow) -> None:
    fake.login = {"username": "me", "password": "a/b"}
    with serving(fake) as plain:
        api = AirflowApi(plain.replace("//", "//me:a%2Fb@"))
        assert api.url == plain
        api.ask("GET", "/version")
        fake.tokens += 1
        api.ask("GET", "/version")
        for wrong in (plain, plain.replace("//", "//me:no@")):
            with pytest.raises(AirflowAnswerError, match="gives no token") as raised:
                AirflowApi(wrong).ask("GET", "/version")
            assert "no@" not in str(raised.value)


def test_the_api_is_read_page_by_page(url: str, fake: FakeAirflow) -> None:
    assert list(AirflowApi(url).pages("/assets", "assets")) == fake.assets
    assert fake.asked == ["GET /api/v2/assets"] * 2


def test_a_server_that_is_no_airflow_or_is_away_raises_an_error_of_the_package(tmp_path: Any) -> None:
    for wrong in ("ftp://airflow", "http://me:secret@[::1", "http://me:secret/@airflow"):
        with pytest.raises(ValidationError) as raised:
            AirflowApi(wrong)
        assert "secret" not in str(raised.value)
    with pytest.raises(LocalAirflowError, match="no Airflow answers"):
        AirflowApi("http://127.0.0.1:9").ask("GET", "/dags")
    assert running_airflow(tmp_path) is None
    for left in ("http://127.0.0.1:9", ""):
        (tmp_path / URL_FILE).write_text(left)
        assert running_airflow(tmp_path) is None


# The command


def test_the_command_replays_every_window_once(url: str, rides: EventSQL, dsn: str, fake: FakeAirflow) -> None:
    command = ["--dsn", dsn, "backfill", "rides", "billing", "--from", "earliest", "--window-events", "2"]
    in_airflow = ["--orchestrator", "airflow", "--airflow-url", url]
    plan = CliRunner().invoke(main, [*command, *in_airflow, "--json"])
    assert plan.exit_code == 0, plan.output
    planned = json.loads(plan.stdout)
    assert (planned["job"], planned["assets"], len(planned["runs"])) == ("billing", ["bills"], 3)
    assert fake.runs == []

    done = CliRunner().invoke(main, [*command, *in_airflow, "--execute"])
    assert done.exit_code == 0, done.output
    assert effects(rides) == [1, 2, 3, 4, 5, 6]
    assert offset(rides) == EVENTS
    assert len(fake.runs) == 3


def test_the_options_of_one_orchestrator_are_not_for_the_other(dsn: str, url: str, rides: EventSQL) -> None:
    command = ["--dsn", dsn, "backfill", "rides", "billing", "--from", "earliest"]
    for wrong in (["--airflow-url", url], ["--dag", "x"], ["--orchestrator", "airflow", "-m", "x"]):
        refused = CliRunner().invoke(main, [*command, *wrong])
        assert refused.exit_code == 2
        assert "is not for --orchestrator" in refused.output
