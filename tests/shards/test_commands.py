"""The program on several databases: the same commands, each with the shards' names."""

from __future__ import annotations

import json
import re
import shlex
import uuid
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, EventSQL, Shard, Topic
from eventsql_orchestration.cli import main
from eventsql_orchestration.cli.context import resolve_dsn
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseBusyError,
    EventSQLError,
    PermissionDeniedError,
    ShardsDifferError,
)
from eventsql_orchestration.maintenance.retention import Retainer
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.settings import Settings
from eventsql_orchestration.shards.shard_state import ShardStore
from eventsql_orchestration.store import Change, Store
from tests.cli.conftest import json_lines
from tests.cli.test_completion import completed
from tests.conftest import Prepared
from tests.shards.adding import KEYS
from tests.shards.conftest import Databases

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("EVENTSQL_DSN", "EVENTSQL_NEW_DSN", "EVENTSQL_SCHEMA", "EVENTSQL_HOME"):
        monkeypatch.delenv(name, raising=False)


def running(*dsns: str) -> Run:
    def run(*arguments: object, stdin: str | None = None, code: int | None = 0) -> Result:
        named = [option for dsn in dsns for option in ("--dsn", dsn)]
        result = CliRunner().invoke(main, [*named, *map(str, arguments)], input=stdin)
        assert code in (None, result.exit_code), result.output
        return result

    return run


def publish_keys(run: Run) -> None:
    """Publish an event for each key."""
    run("publish", "orders", "--key", "key", stdin="".join(json.dumps({"key": key}) + "\n" for key in KEYS))
    run("transfer", "--once")


def prepare(platform: EventSQL) -> None:
    """Make a topic, a consumer and an event for each key."""
    run = running(*[shard.database.dsn for shard in platform.shards])
    run("migrate")
    run("topic", "create", "orders", "--partitions", 2, "--dead-letters")
    run("consumer", "create", "orders", "mailer", "--partitioned")
    publish_keys(run)


@pytest.fixture
def dsns(databases: Databases, prepared: Prepared, request: pytest.FixtureRequest) -> list[str]:
    """Three databases. The first two are prepared for tests that use `orders`."""
    return databases(3, prepared(prepare, databases=2) if "orders" in request.fixturenames else ())


@pytest.fixture
def run(dsns: list[str]) -> Run:
    """Runs the program on the first two databases."""
    return running(*dsns[:2])


def objects(result: Result) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


@pytest.fixture
def orders(run: Run) -> Run:
    """The same, with a topic, a consumer and an event for each key."""
    return run


@pytest.fixture
def whole(orders: Run, dsns: list[str]) -> Run:
    """Runs the program on all three databases."""
    return running(*dsns)


def test_migrate_makes_the_first_set(run: Run, dsns: list[str]) -> None:
    run("topic", "list", code=1)
    assert "shard 'shard-1': schema 'eventsql'" in run("migrate").stderr
    assert [(each["shard"], each["state"]) for each in objects(run("shard", "list", "--json"))] == [
        ("shard-1", "takes events"),
        ("shard-2", "takes events"),
    ]
    assert "was at revision" in run("migrate").stderr
    with EventSQL(*reversed(dsns[:2])) as platform:
        assert [shard.name for shard in platform.open().shards] == ["shard-2", "shard-1"]


def test_listings_carry_the_shards_names(orders: Run) -> None:
    for listing in (("lag",), ("consumer", "list"), ("consumer", "describe", "orders", "mailer")):
        assert [(each["shard"], each["partition"]) for each in objects(orders(*listing, "--json"))] == [
            (shard, partition) for shard in ("shard-1", "shard-2") for partition in (0, 1)
        ]
    assert sum(int(str(each["events"])) for each in objects(orders("lag", "--json"))) == len(KEYS)
    printed = json_lines(orders("tail", "orders"))
    assert {each["shard"] for each in printed} == {"shard-1", "shard-2"}
    assert {each["key"] for each in printed} == set(KEYS)
    header, *rows = orders("tail", "orders", "--format", "csv").stdout.splitlines()
    assert header.split(",")[:3] == ["shard", "topic", "offset"]
    assert [row.split(",")[0] for row in rows] == [f'"{each["shard"]}"' for each in printed]
    plan = json.loads(orders("seek", "orders", "mailer", "--to-latest", "--json").stdout)
    assert {move["shard"] for move in plan["moves"]} == {"shard-1", "shard-2"}
    described = json.loads(orders("topic", "describe", "orders", "--json").stdout)
    assert {each["shard"] for each in described["log"]} == {"shard-1", "shard-2"}
    assert described["events"] == len(KEYS)
    for command in (("lag",), ("consumer", "list"), ("consumer", "describe", "orders", "mailer"), ("shard", "list")):
        assert "shard-2" in orders(*command).stdout
    assert "shard-2" in orders("topic", "describe", "orders").stdout


def test_lag_shows_the_subscriptions_and_queues_of_all_shards(orders: Run, dsns: list[str]) -> None:
    with EventSQL(*dsns[:2]) as platform:
        Queue(platform, "letters").send(b"1")
        for shard in platform.opened():
            store = Store(shard.database)
            store.append("order", "1", [Change("placed", {})], expected_version="any")
            store.subscribe("billing", lambda _change, _connection: None, background=False)
    rows = [line.split() for line in orders("lag").stdout.splitlines()]
    assert [row[1:3] for row in rows if row[0] == "billing"] == [["shard-1", "1"], ["shard-2", "1"]]
    assert [row[1] in {"shard-1", "shard-2"} for row in rows if row[0] == "letters"] == [True]


def test_consume_prints_what_all_shards_have_left(orders: Run) -> None:
    first = json_lines(orders("consume", "orders", "mailer", "--limit", 5))
    assert len(first) == 5
    rest = json_lines(orders("consume", "orders", "mailer"))
    assert sorted(str(each["key"]) for each in (*first, *rest)) == sorted(KEYS)
    assert json_lines(orders("consume", "orders", "mailer")) == []


def test_one_shard_is_chosen_by_name_where_offsets_are_meant(orders: Run) -> None:
    assert "each shard has its own offsets" in orders("tail", "orders", "--from", 1, code=2).stderr
    assert "each shard counts its offsets by itself" in orders(
        "seek", "orders", "mailer", "--to-offset", 1, code=2
    ).stderr  # fmt: skip
    alone = json_lines(orders("--shard", "shard-2", "tail", "orders", "--from", 2))
    assert {each["offset"] for each in alone} == set(range(2, len(alone) + 2))
    assert "there is no shard 'nowhere', but shard-1, shard-2" in orders("--shard", "nowhere", "lag", code=2).stderr


def test_commands_for_all_shards_refuse_to_do_a_part_on_one(orders: Run, dsns: list[str]) -> None:
    for command in (
        ("migrate",),
        ("shard", "list"),
        ("shard", "add", "--dsn", dsns[2]),
        ("topic", "create", "lone"),
        ("topic", "alter", "orders", "--partitions", 9),
        ("topic", "delete", "orders", "--force"),
        ("consumer", "create", "orders", "lone"),
        ("consumer", "delete", "orders", "mailer"),
    ):
        assert "leave out --shard" in orders("--shard", "shard-1", *command, code=2).stderr
    assert "on every shard; it had" in orders("topic", "alter", "orders", "--partitions", 9).stderr


def test_the_url_of_a_new_shard_need_not_stand_among_the_arguments(
    orders: Run, dsns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text(f"{dsns[2]}\n")
    planned = orders("shard", "add", "--dsn", dsns[2], "--json")
    assert "a plan, nothing has changed" in planned.stderr
    plan = planned.stdout
    assert orders("shard", "add", "--dsn-file", file, "--json").stdout == plan
    asked = orders("shard", "add", "--dsn", "-", "--json", stdin=f"{dsns[2]}\n")
    assert asked.stdout == plan
    assert dsns[2] not in asked.output
    monkeypatch.setenv("EVENTSQL_NEW_DSN", dsns[2])
    assert orders("shard", "add", "--json").stdout == plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "EVENTSQL_NEW_DSN"),
        (["--dsn", "postgresql://u:s3cret@h/x", "--dsn-file", "url"], "give one of them"),
        (["--dsn", "postgresql://u:s3cret@h/x", "--prepare", "--execute"], "give one of them"),
        (["--dsn-file", "nowhere"], "nowhere cannot be read"),
        (["--dsn", "postgresql://u:p@127.0.0.1:1/x?connect_timeout=s3cret"], "connect_timeout"),
    ],
)
def test_a_new_shard_without_a_url_that_can_be_used_is_refused(orders: Run, arguments: list[str], said: str) -> None:
    refused = orders("shard", "add", *arguments, code=2)
    assert said in " ".join(refused.stderr.split())
    assert "s3cret" not in refused.output


def test_a_shard_is_added_after_a_plan(orders: Run, whole: Run, dsns: list[str]) -> None:
    refused = orders("shard", "add", "--dsn", dsns[2], "--name", "0", code=2)
    assert "'0' is a number, as partitions are" in refused.stderr
    planned = orders("shard", "add", "--dsn", dsns[2], "--name", "west")
    assert "1 in 3" in planned.stdout
    assert re.search(r"state +not a shard yet\n", planned.stdout)
    database = dsns[2].rpartition("/")[2]
    assert re.search(rf"database +postgresql://eventsql:\*\*\*@127.0.0.1:\d+/{database}\n", planned.stdout)
    assert "a plan, nothing has changed" in planned.stderr
    assert "WrongShardError" not in planned.stderr, "there are two shards: services have several URLs"
    assert len(objects(orders("shard", "list", "--json"))) == 2
    orders("shard", "add", "--dsn", dsns[2], "--name", "west", "--prepare")
    assert "shard 'west' takes events" in orders("shard", "add", "--dsn", dsns[2], "--execute").stderr
    assert "no URL leads to west" in orders("lag", code=2).stderr
    assert "'west' takes events already" in orders("shard", "add", "--dsn", dsns[2]).stderr
    assert [each["shard"] for each in objects(whole("shard", "list", "--json"))] == ["shard-1", "shard-2", "west"]
    status = json.loads(whole("shard", "status", "--json").stdout)
    assert status["unfinished"] == []
    assert [(each["consumer"], each["shard"], each["waits_for"]) for each in status["held_back"]] == [
        ("mailer", "west", ["shard-1", "shard-2"])
    ]
    assert "held back from shard west" in whole("doctor").stdout.replace("\n", " ")
    whole("consume", "orders", "mailer")
    assert "no consumer is held back" in whole("shard", "status").stderr


def test_the_plan_of_a_second_database_names_the_error_of_services_with_one_url(dsns: list[str]) -> None:
    alone = running(dsns[0])
    alone("migrate")
    assert "gets WrongShardError for the keys that move" in alone("shard", "add", "--dsn", dsns[1]).stderr
    added = alone("shard", "add", "--dsn", dsns[1], "--execute")
    assert "WrongShardError" not in added.stderr + alone("shard", "add", "--dsn", dsns[1]).stderr


def test_commands_for_shards_say_that_they_need_the_urls_of_all(dsns: list[str]) -> None:
    one = running(dsns[2])
    one("migrate")
    assert "name all shards before it" in one("shard", "list", code=2).stderr
    assert "name the existing shards before the command" in running()("shard", "add", "--dsn", dsns[2], code=2).stderr


@pytest.mark.parametrize(("older", "step"), [(0, []), (0, ["--prepare"]), (1, ["--execute"])])
def test_only_migrate_upgrades_the_existing_shards(orders: Run, dsns: list[str], older: int, step: list[str]) -> None:
    with psycopg.connect(dsns[older], autocommit=True) as connection:
        connection.execute("UPDATE eventsql.schema_version SET version_num = '0048'")
        assert "run `eventsql migrate`" in orders("shard", "add", "--dsn", dsns[2], *step, code=1).stderr
        assert connection.execute("SELECT version_num FROM eventsql.schema_version").fetchall() == [("0048",)]
    with EventSQL(dsns[2], migrate=False) as new:
        assert ShardStore(new.database).state().name is None


def test_a_database_that_a_server_keeps_for_maintenance_is_called_so(run: Run, dsns: list[str]) -> None:
    run("migrate")
    planned = run("shard", "add", "--dsn", f"{dsns[2].rpartition('/')[0]}/postgres")
    assert "/postgres\n" in planned.stdout
    assert "'postgres' is the server's database for maintenance" in planned.stderr


def test_a_shard_that_is_prepared_is_shown_with_what_is_to_be_done(orders: Run, whole: Run, dsns: list[str]) -> None:
    prepared = orders("shard", "add", "--dsn", dsns[2], "--name", "west", "--prepare", "--json")
    assert json.loads(prepared.stdout)["executed"] is False
    assert "shard 'west' takes no events yet: give its URL to every process" in prepared.stderr
    planned = orders("shard", "add", "--dsn", dsns[2])
    assert re.search(r"state +prepared\n", planned.stdout)
    assert "when every process has this URL" in planned.stderr
    listed = objects(whole("shard", "list", "--json"))
    assert [(each["shard"], each["generation"], each["state"]) for each in listed] == [
        ("shard-1", 1, "takes events"), ("shard-2", 1, "takes events"), ("west", None, "prepared"),
    ]  # fmt: skip
    (left,) = json.loads(whole("shard", "status", "--json").stdout)["not_added"]
    assert (left["shard"], left["state"]) == ("west", "prepared")
    for command in ("list", "status"):
        assert (
            "'west' is prepared and takes no events: give its URL to every process, then add it with"
            in whole("shard", command).stderr
        )
    findings = json.loads(whole("doctor", "--json").stdout)["findings"]
    assert ("shard west is prepared and takes no events yet", "eventsql shard add --dsn URL --execute") in [
        (each["message"], each["remedy"]) for each in findings
    ]
    # The remedy works where it is shown: with the URL of the prepared shard among the others.
    assert "shard 'west' takes events" in whole("shard", "add", "--dsn", dsns[2], "--execute").stderr
    assert "'west' takes events already" in whole("shard", "add", "--dsn", dsns[2]).stderr
    running(dsns[2])("shard", "add", "--dsn", dsns[2], code=2)


def test_a_consumer_that_is_held_back_is_told_in_the_same_words_everywhere(
    orders: Run, whole: Run, dsns: list[str]
) -> None:
    orders("shard", "add", "--dsn", dsns[2], "--execute")
    publish_keys(whole)
    until = "until it has consumed the earlier events on shard-1, shard-2"
    of_new = [each for each in objects(whole("lag", "--json")) if each["shard"] == "shard-3"]
    assert {(each["cause"], each["detail"]) for each in of_new} == {("held back", until)}
    assert f"held back, {until}" in whole("lag").stdout
    described = whole("topic", "describe", "orders")
    assert f"consumer 'mailer' is held back from shard-3, {until}" in described.stderr
    assert "offset" not in described.stderr
    assert json.loads(whole("topic", "describe", "orders", "--json").stdout)["unsettled_consumers"] == [
        {"shard": "shard-3", "consumer": "mailer", "until": None, "waits_for": ["shard-1", "shard-2"]}
    ]
    for command in (("list",), ("describe", "orders", "mailer")):
        states = {(each["shard"], each["state"]) for each in objects(whole("consumer", *command, "--json"))}
        assert states == {("shard-1", "active"), ("shard-2", "active"), ("shard-3", "held back")}

    alone = whole("--shard", "shard-3", "topic", "describe", "orders")
    assert "until it has consumed the earlier events on the other shards, see `eventsql shard status`" in alone.stderr
    (refused,) = whole(
        "--shard", "shard-3", "consume", "orders", "mailer", "--partition", 0, code=1
    ).stderr.splitlines()
    assert "partition 0 is held back, until it has consumed the earlier events on the other shards" in refused


def test_the_output_for_one_shard_has_its_name_too(orders: Run) -> None:
    def of_one(*arguments: object, code: int = 0) -> Result:
        return orders("--shard", "shard-2", *arguments, code=code)

    for listing in (("lag",), ("topic", "list"), ("consumer", "list"), ("consumer", "describe", "orders", "mailer")):
        assert {each["shard"] for each in objects(of_one(*listing, "--json"))} == {"shard-2"}
    described = json.loads(of_one("topic", "describe", "orders", "--json").stdout)
    assert {described["shard"], *(each["shard"] for each in described["log"])} == {"shard-2"}
    moves = json.loads(of_one("seek", "orders", "mailer", "--to-offset", 1, "--json").stdout)["moves"]
    assert {each["shard"] for each in moves} == {"shard-2"}
    for command in (("tail", "orders"), ("consume", "orders", "mailer")):
        assert {each["shard"] for each in json_lines(of_one(*command))} == {"shard-2"}


def test_a_platform_names_its_shards_and_shows_no_password(orders: Run, dsns: list[str]) -> None:
    with EventSQL(*dsns[:2], transfer=False) as platform:
        alone = EventSQL(dsns[2])
        names = [dsn.rpartition("/")[2] for dsn in dsns]
        assert re.fullmatch(rf"<EventSQL on postgresql://eventsql:\*\*\*@127\.0\.0\.1:\d+/{names[2]}>", repr(alone))
        assert "shard-" not in repr(platform), "nothing connects to be shown"
        platform.open()
        for number, name in enumerate(names[:2], start=1):
            assert f"/{name}, name='shard-{number}'>" in repr(platform.shards)
            assert f"/{name} (shard-{number})" in repr(platform)
        assert not any(str(make_url(dsn).password) in repr(platform) for dsn in dsns)


def test_publications_that_are_not_finished_are_shown(orders: Run, dsns: list[str]) -> None:
    with psycopg.connect(dsns[0]) as connection:
        connection.execute(
            "INSERT INTO eventsql.spark_decision (eql_id, eql_writer, eql_batch, eql_shards) "
            "VALUES (gen_random_uuid(), 'nightly', 7, '{shard-1,shard-2}')"
        )
    (left,) = json.loads(orders("shard", "status", "--json").stdout)["unfinished"]
    assert (left["writer"], left["batch"], left["decided"]) == ("nightly", 7, False)
    shown = orders("shard", "status")
    assert "nightly" in shown.stdout
    assert "it is being published" in shown.stdout
    assert "no consumer is held back" in shown.stderr


def test_roles_are_listed_for_each_shard_and_dropped_although_the_shards_share_a_server(
    run: Run, dsns: list[str]
) -> None:
    prefix = f"r{uuid.uuid4().hex[:8]}"
    run("migrate")
    printed = run("roles", "sql", "--prefix", prefix).stdout
    assert re.findall("^-- Shard ([a-z0-9-]+),", printed, re.MULTILINE) == ["shard-1", "shard-2"]
    run("roles", "create", "--prefix", prefix)
    listed = objects(run("roles", "list", "--json"))
    assert [each["shard"] for each in listed if each["kind"] == "reader"] == ["shard-1", "shard-2"]
    run("roles", "drop", "--all", "--execute")
    assert "there are no roles" in run("roles", "list").stderr
    with psycopg.connect(dsns[0]) as connection:
        left = connection.execute("SELECT rolname FROM pg_roles WHERE starts_with(rolname, %s)", [prefix])
        assert left.fetchall() == []


def test_doctor_looks_at_each_shard(orders: Run) -> None:
    findings = json.loads(orders("doctor", "--json").stdout)["findings"]
    assert {"2 shards, all take events"} <= {each["message"] for each in findings if each["check"] == "shards"}
    assert sum(each["check"] == "schema" for each in findings) == 2


def test_the_remedy_of_a_topic_that_shards_lack_can_be_pasted(orders: Run, dsns: list[str]) -> None:
    with Shard(dsns[0]) as shard:
        shard.registry.register_topic(Topic("halves", 3)).register_consumer(Consumer("halves", "a reader", True))
        shard.registry.register_topic(Topic("whole"))

    def remedies() -> list[str]:
        findings = json.loads(orders("doctor", "--json", code=None).stdout)["findings"]
        return [each["remedy"] for each in findings if each["check"] == "shards" and each["status"] == "problem"]

    assert remedies() == ["eventsql topic create halves --partitions 3", "eventsql topic create whole"]
    for remedy in remedies():
        orders(*shlex.split(remedy)[1:])
    assert remedies() == []
    with EventSQL(*dsns[:2]) as platform:
        with pytest.raises(ShardsDifferError) as lacking:
            platform.consumers.start("halves", "a reader", lambda *_: None)
        orders(*shlex.split(lacking.value.remedy)[1:])
        platform.registry.check_same_consumer("halves", "a reader")


def test_a_topic_that_was_repartitioned_on_some_shards_is_altered_on_all(orders: Run, dsns: list[str]) -> None:
    with Shard(dsns[0]) as shard:
        shard.repartitioner.repartition("orders", 4)
    with EventSQL(*dsns[:2]) as platform, pytest.raises(ShardsDifferError) as differing:
        platform.registry.check_same("orders")
    orders(*shlex.split(differing.value.remedy)[1:])
    with EventSQL(*dsns[:2]) as platform:
        platform.registry.check_same("orders")
        assert platform.registry.topic("orders").partitions == 4


def test_commands_leave_out_a_shard_that_is_down_and_say_so(orders: Run, dsns: list[str]) -> None:
    orders("topic", "create", "lonely")
    orders("queue", "send", "jobs", "a message")
    run = running("postgresql://nobody@127.0.0.1:1/none", dsns[0])
    for command in (
        ("topic", "describe", "orders"),
        ("topic", "describe", "lonely"),
        ("queue", "list"),
        ("queue", "archive", "--drop-expired"),
    ):
        assert "is down" in run(*command).stderr
    described = json.loads(run("topic", "describe", "orders", "--json").stdout)
    assert {each["shard"] for each in described["log"]} == {"shard-1"}


def test_doctor_names_a_shard_that_was_restored_from_before_an_addition(
    orders: Run, dsns: list[str], databases: Databases
) -> None:
    (backup,) = databases(1, [dsns[0].rpartition("/")[2]])
    orders("shard", "add", "--dsn", dsns[2], "--execute")

    def problems(*whole: str) -> list[str]:
        findings = json.loads(running(*whole)("doctor", "--json", code=None).stdout)["findings"]
        return [each["message"] for each in findings if (each["check"], each["status"]) == ("shards", "problem")]

    assert problems(*dsns) == []
    (named,) = problems(backup, *dsns[1:])
    assert named.startswith("shard shard-1 does not know that shard shard-3 was added")
    running(backup, dsns[1])("shard", "add", "--dsn", dsns[2], "--execute")
    assert problems(backup, *dsns[1:]) == []


@pytest.mark.parametrize("kind", [DatabaseBusyError, PermissionDeniedError])
def test_retention_goes_on_with_the_other_shards_and_names_them(
    orders: Run, monkeypatch: pytest.MonkeyPatch, kind: type[EventSQLError]
) -> None:
    orders("topic", "alter", "orders", "--retention-events", 1)
    planned = objects(orders("topic", "retain", "--json"))
    assert [(each["shard"], each["topic"]) for each in planned] == [("shard-1", "orders"), ("shard-2", "orders")]
    assert "shard-2" in orders("topic", "retain").stdout
    run_once, reached = Retainer.run_once, list[str]()

    def fail_first(retainer: Retainer, *arguments: object, **named: object) -> object:
        reached.append(str(retainer._database))
        if len(reached) == 1:
            raise kind("a transaction reads a segment")
        return run_once(retainer, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Retainer, "run_once", fail_first)
    assert "a transaction reads a segment" in orders("topic", "retain", "--execute", code=1).stderr
    assert len(set(reached)) == 2


def test_dead_letters_are_listed_with_their_shards_and_redriven_there(orders: Run, dsns: list[str]) -> None:
    with EventSQL(*dsns[:2], transfer=False) as platform:
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True), max_attempts=1)

        def fail(_events: object, _connection: object) -> None:
            raise ValueError("no mail today")

        for _ in KEYS:
            platform.consumers.consume_once("orders", "mailer", fail)
        platform.transfer.run_once()
    letters = objects(orders("dlt", "list", "orders", "--json"))
    assert {each["shard"] for each in letters} == {"shard-1", "shard-2"}
    assert len(letters) == len(KEYS)
    assert "each shard counts its dead letters" in orders("dlt", "show", "orders", 1, code=1).stderr
    dismissed = len([each for each in letters if each["shard"] == "shard-1"]) + 1
    limit = "--limit", dismissed
    assert (
        json.loads(orders("dlt", "dismiss", "orders", *limit, "--execute", "--json").stdout)["dismissed"] == dismissed
    )
    assert (
        json.loads(orders("dlt", "redrive", "orders", "--execute", "--json").stdout)["redriven"]
        == len(KEYS) - dismissed
    )
    assert (
        json.loads(orders("dlt", "redrive", "orders", *limit, "--again", "--execute", "--json").stdout)["redriven"]
        == dismissed
    )
    assert sorted(str(each["key"]) for each in json_lines(orders("consume", "orders", "mailer"))) == sorted(KEYS)


def test_the_urls_of_shards_come_from_the_environment_and_the_file_too(
    dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = ["postgresql://one/x?options=-c geqo=off", "postgresql://other/x"]
    Path("eventsql.toml").write_text(f"dsn = {json.dumps(urls)}\n", encoding="utf-8")
    assert Settings.load().dsns == tuple(urls)
    monkeypatch.setenv("EVENTSQL_DSN", "\n".join(dsns))
    assert Settings.load().dsns == tuple(dsns)
    assert Settings.load(dsn=dsns[0]).dsns == (dsns[0],)


def test_commands_for_one_database_say_to_choose_a_shard(orders: Run, dsns: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="choose a shard with --shard NAME"):
        resolve_dsn(Settings.load(dsn=" ".join(dsns)))
    assert "--shard NAME on the command line" in orders("bench", "publish", "--quick", code=1).stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("given", "name", "paced"),
    [
        (["--events", "2000", "--raw-events", "2000"], "publish_and_consume", False),
        (["--rate", "2000", "--seconds", "0.5", "--batch", "250"], "publish_and_consume_at_2000", True),
    ],
)
def test_bench_stream_measures_servers_of_its_own(tmp_path: Path, given: list[str], name: str, paced: bool) -> None:
    arguments = ["bench", "stream", "--shards", "2", "--json", *given]
    result = CliRunner().invoke(main, ["--home", str(tmp_path / "home"), *arguments])
    assert result.exit_code == 0, result.output
    *figures, _machine = json.loads(result.stdout)
    of = {figure["name"]: figure for figure in figures}
    rates, costs = ([of[f"{name}_{shards}{what}"] for shards in ("1_shard", "2_shards")] for what in ("", "_processor"))
    assert [len(each["details"]["of_shards"]) for each in rates] == [1, 2]
    assert all(rate > 0 for rate in rates[1]["details"]["of_shards"]), "each takes its share of the keys"
    assert sum(rates[1]["details"]["of_shards"]) == pytest.approx(rates[1]["value"])
    assert all((each["ratio_to_raw_copy"] is None) is paced for each in rates)
    assert all(each["details"].keys() == {"publishers", "consumers", "servers"} for each in costs)
    assert all(sum(each["details"].values()) == pytest.approx(each["value"]) for each in costs)
    for what, (one, two) in {"": rates, "_processor": costs}.items():
        assert of[f"{name}_2_shards{what}_to_1"]["value"] == pytest.approx(two["value"] / one["value"])
    assert not (tmp_path / "home" / "bench-shards").exists(), "the servers are gone"
    assert "share" in result.stderr


def test_an_erasure_erases_on_each_shard(orders: Run) -> None:
    options = [option for key in KEYS for option in ("--key", key)]
    done = json.loads(orders("topic", "erase", "orders", *options, "--execute", "--json").stdout)
    assert (done["keys"], done["events"]) == (len(KEYS), len(KEYS))
    records = objects(orders("topic", "erasures", "orders", "--json"))
    assert {each["shard"] for each in records} == {"shard-1", "shard-2"}
    assert sum(int(str(each["events"])) for each in records) == len(KEYS)
    events = json_lines(orders("consume", "orders", "mailer"))
    assert [each["value"] for each in events] == [None] * len(KEYS)


def test_a_topic_changes_its_form_on_each_shard(orders: Run) -> None:
    first = json.loads(orders("topic", "describe", "orders", "--json").stdout)["storage"]
    other = "rows" if first == "blocks" else "blocks"
    assert "stored in" in orders("topic", "alter", "orders", "--storage", other).output
    assert "already" in orders("topic", "alter", "orders", "--storage", other).output
    publish_keys(orders)
    consumed = json_lines(orders("consume", "orders", "mailer"))
    assert sorted(str(each["key"]) for each in consumed) == sorted([*KEYS, *KEYS])


def test_the_names_of_shards_are_completed(dsns: list[str], orders: Run) -> None:
    named = [word for dsn in dsns[:2] for word in ("--dsn", dsn)]
    assert completed(*named, "--shard", "sh") == ["shard-1", "shard-2"]
    assert completed(*named, "--shard", "other") == []
