"""`eventsql dev` in its parts: its end, its warm Spark, its code location, and simulations that do not overlap."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, cast

import dagster as dg
import psutil
import pytest
from click.testing import Result
from rich.progress import Progress

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.cli import development, rounds, warm_spark
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.location import location_of
from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.dagster.local.dagster_process import LocalDagster
from eventsql_orchestration.errors import MissingExtraError
from eventsql_orchestration.orchestration.errors import RoundError
from eventsql_orchestration.orchestration.rounds import RunCounts, TopicRound
from eventsql_orchestration.signals import handling
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE, connect_server, spark_config
from eventsql_orchestration.spark.java import ensure_java
from tests.waiting import wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_service_manager_or_a_closed_terminal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), handling(rounds.interrupt, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_under_nohup_it_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(rounds.interrupt, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_a_terminal_a_line_says_when_a_step_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with rounds.steps_shown() as progress:
        progress.add_task("Job register", total=1)
        assert capsys.readouterr().err == "eventsql: Job register\n"


def test_steps_that_have_stopped_add_no_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    with rounds.steps_shown() as progress:
        progress.stop()
        stopped = capsys.readouterr().err
    assert capsys.readouterr().err == "", stopped


def test_spark_reads_the_settings_for_short_sessions_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = warm_spark.settings_for({"TMPDIR": "/tmp/of one run"})
    monkeypatch.setenv(SPARK_CONFIG_VARIABLE, str(warm_spark.spark_settings(tmp_path, settings)))
    assert settings.items() <= spark_config().items()


def test_a_deployments_own_spark_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPARK_CONFIG_VARIABLE, "cluster.conf")
    with warm_spark.spark_for_runs(tmp_path, {}, warm=True) as (environment, _):
        assert environment == {SPARK_CONFIG_VARIABLE: "cluster.conf"}
    assert list(tmp_path.iterdir()) == []


def test_without_the_packages_of_spark_connect_each_run_starts_its_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SPARK_CONFIG_VARIABLE, raising=False)
    assert connect_server.connect_is_installed()
    monkeypatch.setattr(connect_server, "_CLIENT", ("grpc", "no_such_package.rpc"))
    with warm_spark.spark_for_runs(tmp_path, {}, warm=True) as (environment, _):
        assert "spark.remote" not in Path(environment[SPARK_CONFIG_VARIABLE]).read_text()


def test_with_the_option_cold_spark_each_run_starts_its_spark(
    dsn: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SPARK_CONFIG_VARIABLE, raising=False)
    with rounds.prepared(CliContext(dsn=dsn), directory, cold_spark=True) as (_, environment, _):
        assert "spark.remote" not in Path(environment[SPARK_CONFIG_VARIABLE]).read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("dies", ["Java", "Python"])
def test_a_warm_spark_that_dies_is_started_again_and_ends_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dies: str
) -> None:
    monkeypatch.delenv(SPARK_CONFIG_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    ensure_java(tmp_path)

    def serving() -> list[psutil.Process]:
        """The Javas of servers whose clients can connect."""
        found = psutil.Process().children(recursive=True)
        alive = [each for each in found if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        children = [each for each in alive if str(tmp_path) in " ".join(each.cmdline())]
        return [each for each in children if any(port.laddr.port == wanted for port in each.net_connections())]

    with warm_spark.spark_for_runs(tmp_path, {}, warm=True) as (environment, keep):
        settings = Path(environment[SPARK_CONFIG_VARIABLE]).read_text()
        wanted = int(settings.rpartition(":")[2])
        wait_until(serving, "Spark answers")
        (first,) = serving()
        keep()
        assert serving() == [first]
        victim = first
        if dies == "Python":
            # Java would end by itself, but may take long.
            first.suspend()
            victim = psutil.Process(first.ppid())
        victim.kill()
        victim.wait(60)

        def serving_again() -> list[psutil.Process]:
            keep()
            return serving()

        wait_until(serving_again, "Spark answers again")
        (second,) = serving()
        addresses = {port.laddr.ip for port in second.net_connections() if port.status == psutil.CONN_LISTEN}
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
    second.wait(60)
    assert "Spark has died, see" in capsys.readouterr().err


def test_without_java_it_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_home: Path) -> None:
        raise MissingExtraError("local", "Java")

    monkeypatch.setattr(warm_spark, "ensure_java", missing)
    warm_spark.provide_java(tmp_path)
    said = capsys.readouterr().err
    assert said.startswith("eventsql: Spark will not run: ")
    assert "pip install 'eventsql-orchestration[local]'" in said


def test_a_simulation_starts_after_the_previous_one_has_ended() -> None:
    started, ended = list[int](), set[int]()

    def start() -> list[int]:
        started.append(len(started))
        return started[-1:]

    simulations = rounds.Simulations(start, ended.__contains__, pause=0.0)
    simulations.next()
    simulations.next()
    assert started == [0]
    ended.add(0)
    simulations.next()
    assert started == [0, 1]
    # The pause begins with the last start.
    slow = rounds.Simulations(start, lambda _run: True)
    slow.next()
    slow.next()
    assert started == [0, 1, 2]


def test_the_summary_shows_a_topic_of_dead_letters_only_when_it_has_some(capsys: pytest.CaptureFixture[str]) -> None:
    def entry(topic: str, *, published: int = 0, consumers: int = 0, faults: tuple[str, ...] = ()) -> TopicRound:
        return TopicRound(topic, published, published, published * consumers, consumers, 0, 0, faults)

    rounds.show_rounds(
        [entry("quiet", consumers=1), entry("quiet_dlt"), entry("rides_dlt", published=1, faults=("1 letter",))]
    )
    shown = capsys.readouterr().out
    assert "quiet_dlt" not in shown
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["quiet", "rides_dlt"]


# The code location


def project(directory: Path, tool: str) -> None:
    (directory / "pyproject.toml").write_text(f'[project]\nname = "shop"\n\n{tool}')


def test_a_file_and_a_module_are_named_by_options(directory: Path) -> None:
    (directory / "mine.py").touch()
    assert location_of(Path("mine.py"), None) == CodeLocation(Path("mine.py"))
    assert location_of(None, "shop.defs") == CodeLocation(module="shop.defs")
    (directory / "src" / "shop").mkdir(parents=True)
    assert location_of(None, "shop.defs") == CodeLocation(module="shop.defs", imports=Path("src"))


def test_the_dg_project_of_the_directory_goes_before_its_file(directory: Path) -> None:
    (directory / "definitions.py").touch()
    assert location_of(None, None) == CodeLocation(Path("definitions.py"))
    project(directory, '[tool.dg.project]\nroot_module = "shop"\n')
    assert location_of(None, None) == CodeLocation(module="shop.definitions")
    (directory / "src" / "shop").mkdir(parents=True)
    assert location_of(None, None) == CodeLocation(module="shop.definitions", imports=Path("src"))
    project(directory, '[tool.dg.project]\nroot_module = "shop"\ncode_location_target_module = "shop.defs"\n')
    assert location_of(None, None).module == "shop.defs"


def test_a_project_of_dagster_dev_is_found_too(directory: Path) -> None:
    project(directory, '[tool.dagster]\nmodule_name = "shop.all"\n')
    assert location_of(None, None) == CodeLocation(module="shop.all")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-f", "a.py", "-m", "b"], "-f and -m both name the code location"),
        (["-f", "nowhere.py"], "nowhere.py does not exist"),
        ([], "make a project with `eventsql init`"),
        (["--dags", ".", "-f", "a.py"], "--dags is for Airflow, -f and -m are for Dagster"),
        (["--dags", "nowhere"], "'nowhere' does not exist"),
    ],
)
def test_a_directory_without_a_code_location_is_wrong_usage(
    invoke: Callable[..., Result], arguments: list[str], said: str
) -> None:
    refused = invoke("dev", *arguments)
    assert refused.exit_code == 2
    assert said in refused.stderr


def test_airflow_where_it_is_not_installed_names_the_extra(invoke: Callable[..., Result], directory: Path) -> None:
    refused = invoke("dev", "--dags", str(directory))
    assert refused.exit_code == 1
    assert "Airflow needs the extra [airflow]" in refused.stderr


def test_a_project_file_that_cannot_be_read_is_named(invoke: Callable[..., Result], directory: Path) -> None:
    (directory / "pyproject.toml").write_text("[tool")
    refused = invoke("dev")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("eventsql: pyproject.toml cannot be read: ")


def test_a_broken_location_is_an_error_before_anything_is_started(
    invoke: Callable[..., Result], directory: Path
) -> None:
    (directory / "definitions.py").write_text("import no_such_module\n")
    refused = invoke("dev")
    assert refused.exit_code == 1
    assert "definitions.py, line 1: ModuleNotFoundError: No module named 'no_such_module'" in refused.stderr
    assert not (directory / ".eventsql").exists()


def test_spark_s_python_imports_from_the_directory_of_the_location(
    run: Callable[..., Result], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "definitions.py").write_text("import dagster as dg\n\ndefs = dg.Definitions()\n")
    given: dict[str, str] = {}

    def spark_for_runs(_directory: Path, environment: dict[str, str], **_: object) -> NoReturn:
        given.update(environment)
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "spark_for_runs", spark_for_runs)
    run("dev")
    assert given["PYTHONPATH"].split(os.pathsep)[0] == str(directory.resolve())


def test_dagster_has_as_long_to_start_as_the_option_gives(
    run: Callable[..., Result], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The command sets it for this process.
    monkeypatch.setenv("DAGSTER_PG_URL", "of another instance")
    (directory / "definitions.py").write_text("import dagster as dg\n\ndefs = dg.Definitions()\n")
    late = run("dev", "--once", "--cold-spark", "--timeout", "1")
    assert late.exit_code == 1
    assert "Dagster did not start within 1 s" in late.stderr


class Lacking:
    """A location without any job for `eventsql dev`."""

    location = "mine.py"

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance

    def require_running(self) -> None: ...

    def jobs_with(self, _tag: str, _value: str | None = None) -> list[str]:
        return []

    def values_of(self, _tag: str) -> set[str]:
        return set()


def running_with(lacking: Lacking, platform: EventSQL) -> development.Running:
    return development.Running(
        context=CliContext(dsn=platform.database.dsn), platform=platform, progress=Progress(disable=True), ui="",
        log=Path("dagster.log"), check=lacking.require_running, dagster=cast("LocalDagster", lacking),
        instance=lacking.instance, started=datetime.now(UTC),
    )  # fmt: skip


def test_the_command_does_what_a_location_lacks_or_says_how_to_do_it(
    platform: EventSQL, capsys: pytest.CaptureFixture[str]
) -> None:
    platform.registry.register_topic(Topic("rides"))
    with dg.DagsterInstance.ephemeral() as instance:
        running = running_with(Lacking(instance), platform)
        with running.transferring():
            running.set_up(60.0)
            with platform.database.transaction() as connection:
                platform.publisher.publish(Publication("rides", b"1"), connection=connection)
            while not platform.reader.count("rides"):
                time.sleep(0.01)
        assert running.round(60.0) == []
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(",")[0].partition(":")[0] for line in lines] == [
        " mine.py has no transfer",
        " mine.py has no job that registers its topics and consumers",
    ]


def test_a_round_with_a_simulation_fails_for_events_that_are_not_accounted_for_and_for_failed_checks(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate(running: development.Running, _deadline: float) -> None:
        running.platform.publisher.publish(Publication("rides", b"1"))
        running.platform.transfer.run_once()

    monkeypatch.setattr(development.Running, "simulations", ["simulate"])
    monkeypatch.setattr(development.Running, "simulate", simulate)
    monkeypatch.setattr(development.Running, "verify", lambda *_: ["a check did not pass"])
    platform.registry.register_topic(Topic("rides"))
    with dg.DagsterInstance.ephemeral() as instance:
        runs, topics, faults = running_with(Lacking(instance), platform).run(once=True, timeout=60.0)
    unaccounted = "topic rides: no run of this round published 1 of the events"
    with pytest.raises(RoundError, match=f"^a check did not pass; {unaccounted}$"):
        rounds.report(runs, topics, faults)
    with pytest.raises(RoundError, match=f"^{unaccounted}$"):
        rounds.report(runs, topics, [])
    # A run that failed may have published without a report.
    rounds.report(RunCounts(failed=("simulate",)), [], [])


def test_a_round_does_not_wait_for_a_paused_consumer_and_names_any_other(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = itertools.count()

    def pause_at_the_second_look() -> None:
        if next(looks) == 1:
            platform.registry.pause("rides", "ledger")

    monkeypatch.setattr(rounds, "STANDSTILL_SECONDS", 0.0)
    platform.registry.register_topic(Topic("rides"))
    platform.publisher.publish(Publication("rides", b"1"))
    with dg.DagsterInstance.ephemeral() as instance:
        running = running_with(Lacking(instance), platform)
        with pytest.raises(RoundError, match=r"buffered events are left; see .*, or give it .* by `--timeout`"):
            running.round(0.0)
        platform.registry.register_consumer(Consumer("rides", "ledger"))
        platform.transfer.run_once()
        with pytest.raises(RoundError, match=r"rides/ledger has 1 event left \(waiting\)"):
            running.round(0.0)
        monkeypatch.setattr(running, "check", pause_at_the_second_look)
        assert running.round(60.0) == []
    assert "`eventsql consumer pause rides ledger`" in capsys.readouterr().err


def test_a_round_advises_a_pause_once_no_run_is_under_way_any_more(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks, busy = itertools.count(), iter([True, True, False, False, False])

    def pause_at_the_fifth_look() -> None:
        if next(looks) == 4:
            platform.registry.pause("rides", "ledger")

    monkeypatch.setattr(rounds, "STANDSTILL_SECONDS", 0.0)
    platform.registry.register_topic(Topic("rides"))
    platform.registry.register_consumer(Consumer("rides", "ledger"))
    platform.publisher.publish(Publication("rides", b"1"))
    platform.transfer.run_once()
    with dg.DagsterInstance.ephemeral() as instance:
        running = running_with(Lacking(instance), platform)
        monkeypatch.setattr(running, "check", pause_at_the_fifth_look)
        monkeypatch.setattr(running, "is_busy", lambda: next(busy))
        assert running.round(60.0) == []
    under_way, advice = capsys.readouterr().err.splitlines()
    assert under_way.endswith("rides/ledger has 1 event left (waiting); work is under way")
    assert "`eventsql consumer pause rides ledger`" in advice


def test_a_round_ends_when_two_looks_find_all_events_moved_and_no_run_is_under_way(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, busy = list[str](), iter([True, False])

    def transfer_after_the_second_look() -> None:
        looks.append("check")
        if len(looks) == 3:
            platform.transfer.run_once()

    platform.registry.register_topic(Topic("rides"))
    platform.publisher.publish(Publication("rides", b"1"))
    with dg.DagsterInstance.ephemeral() as instance:
        running = running_with(Lacking(instance), platform)
        running.check, running.keep_spark = transfer_after_the_second_look, lambda: looks.append("keep Spark")
        monkeypatch.setattr(running, "is_busy", lambda: next(busy))
        assert running.round(60.0) == []
    assert looks == ["check", "keep Spark"] * 4


def test_a_round_names_ten_partitions_and_counts_the_others(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("rides", partitions=12))
    platform.registry.register_consumer(Consumer("rides", "ledger", partitioned=True))
    platform.publisher.publish_all([Publication("rides", b"", key=str(number)) for number in range(300)])
    platform.transfer.run_once()
    with dg.DagsterInstance.ephemeral() as instance, pytest.raises(RoundError) as raised:
        running_with(Lacking(instance), platform).round(0.0)
    *named, others = str(raised.value).partition("; see ")[0].split("; ")
    assert (len(named), others) == (10, "and 2 more partitions")
