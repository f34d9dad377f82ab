"""`eventsql store` shows what is stored, appends, and moves subscriptions."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from eventsql_orchestration import Connection, Consumer, Event, EventSQL, Topic
from eventsql_orchestration.store import Change, Projection, Projections, RecordedChange, SubscriptionOptions
from eventsql_orchestration.views import Timeline, ViewFeed, Views
from tests.cli.conftest import Run, json_lines
from tests.store.test_order import restored


def prepare(platform: EventSQL) -> None:
    store = platform.store
    store.append("order", "1", [Change("placed", {"n": 1}), Change("paid", {"n": 2})], expected_version=0)
    store.append("rider", "é", [Change("joined", {"n": 3}, metadata={"a": "b"})], expected_version=0)


pytestmark = pytest.mark.prepared.with_args(prepare)


def test_it_lists_types_and_aggregates(run: Run, platform: EventSQL) -> None:
    types = json.loads(run("store", "list", "--json").stdout)
    assert types == [{"type": "order", "aggregates": 1}, {"type": "rider", "aggregates": 1}]
    (found,) = json.loads(run("store", "list", "order", "--json").stdout)
    assert (found["id"], found["version"], found["closed_at"]) == ("1", 2, None)
    assert json.loads(run("store", "list", "order", "--after", "1", "--json").stdout) == []
    assert run("store", "list").stdout.splitlines()[1].split() == ["order", "1"]
    assert "--after 1" in run("store", "list", "order", "--limit", 1).stderr
    platform.store.append("order", "2 a", [Change("placed", {})], expected_version=0)
    assert "--after '2 a'" in run("store", "list", "order", "--limit", 2).stderr


def test_it_shows_an_aggregate(run: Run) -> None:
    assert [(each["version"], each["kind"]) for each in json_lines(run("store", "show", "order", "1"))] == [
        (1, "placed"), (2, "paid")
    ]  # fmt: skip
    assert len(json_lines(run("store", "show", "order", "1", "--upto", 1))) == 1
    unknown = run("store", "show", "ordr", "1")
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "no aggregate '1' of type 'ordr'" in unknown.stderr
    assert json_lines(run("store", "show", "rider", "é"))[0]["metadata"] == {"a": "b"}


def test_it_prints_the_changes_of_all_aggregates_from_a_checkpoint_on(run: Run) -> None:
    found = json_lines(run("store", "tail"))
    assert [each["data"]["n"] for each in found] == [1, 2, 3]
    assert json_lines(run("store", "tail", "--after", found[0]["checkpoint"], "--limit", 1)) == found[1:2]
    assert json_lines(run("store", "tail", "--type", "rider")) == found[2:]
    assert json_lines(run("store", "tail", "--kind", "paid")) == found[1:2]
    assert run("store", "tail", "--after", "x").exit_code == 2


def test_it_appends_once(run: Run, platform: EventSQL) -> None:
    known = uuid.uuid4()
    for _ in range(2):
        result = run("store", "append", "order", "1", "moved", '{"n": 4}', "--id", known, "--metadata", "c=d")
        assert (result.exit_code, result.stderr) == (0, "eventsql: order '1' is at version 3\n")
    last = platform.store.load("order", "1")[-1]
    assert (last.data, last.metadata, last.id) == ({"n": 4}, {"c": "d"}, known)
    refused = run("store", "append", "order", "1", "moved", "{}", "--expected-version", 1)
    assert refused.exit_code == 1
    assert run("store", "append", "order", "1", "moved", "{").exit_code == 2
    assert run("store", "append", "order", "1", "moved", "[]").exit_code == 2
    assert len(platform.store.load("order", "1")) == 3


def test_it_moves_a_subscription_only_when_told(run: Run, platform: EventSQL) -> None:
    subscription = platform.store.subscribe("mailer", lambda change, connection: None, background=False)
    assert subscription.run_once().handled == 3
    (before,) = json.loads(run("store", "subscriptions", "--json").stdout)
    assert (before["waiting"], before["handled"], before["held_back_by"]) == (0, 3, None)
    assert run("store", "replay", "mailer").exit_code == 0
    assert subscription.run_once().handled == 0
    assert run("store", "replay", "mailer", "--execute").exit_code == 0
    assert subscription.run_once().handled == 3
    place = json_lines(run("store", "tail"))[1]["checkpoint"]
    assert run("store", "replay", "mailer", "--from", place, "--execute").exit_code == 0
    assert subscription.run_once().handled == 1


def test_it_adopts_a_restored_store(run: Run, platform: EventSQL) -> None:
    early = run("store", "adopt").stderr
    assert "nothing to adopt" in early
    assert "only changes that came with a dump" in early
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.store_home SET eql_server = '1'")
    assert "eventsql store adopt" in run("store", "tail").stderr
    assert "adopted 3 changes" in run("store", "adopt").stderr
    assert len(json_lines(run("store", "tail"))) == 3


def test_lag_and_doctor_tell_which_process_holds_a_subscription_back(run: Run, platform: EventSQL, dsn: str) -> None:
    platform.store.subscribe("mailer", lambda _change, _connection: None, background=False).run_once()
    assert "mailer" not in run("lag").stdout
    with psycopg.connect(dsn) as open_transaction:
        open_transaction.execute("SELECT pg_current_xact_id()")
        platform.store.append("order", "1", [Change("sent", {})], expected_version="any")
        said = run("lag", "--json")
        assert json.loads(said.stdout) == []
        (listed,) = json.loads(run("store", "subscriptions", "--json").stdout)
        assert (listed["held_back"], listed["seconds"] > 0, listed["held_back_seconds"] > 0) == (1, True, True)
        pid = open_transaction.info.backend_pid
        shows = ("lag",), ("store", "subscriptions"), ("doctor", "--stalled-after", "0")
        for shown in (run(*words).stdout for words in shows):
            assert "mailer" in shown
            assert f"process {pid}" in " ".join(shown.split())
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.store_subscription SET eql_handled_at = now() - interval '11 minutes'")
            connection.execute("UPDATE eventsql.aggregate_change SET eql_created_at = now() - interval '11 minutes'")
        assert "mailer" not in run("doctor", "--stalled-after", "3600").stdout, "each transaction holds it back a while"
    name, waiting, held_back, _, given_up, why = run("lag").stdout.split()[-6:]
    assert (name, waiting, held_back, given_up, why) == ("mailer", "1", "0", "0", "-")


def test_doctor_tells_of_failing_and_given_up_changes(run: Run, platform: EventSQL) -> None:
    def fail(_change: RecordedChange, _connection: Connection) -> None:
        raise ValueError("out of paper")

    for name, attempts in (("mailer", 1), ("billing", 5)):
        options = SubscriptionOptions(max_attempts=attempts)
        platform.store.subscribe(name, fail, kinds=["placed"], options=options, background=False).run_once()
    found = [each for each in json.loads(run("doctor", "--json").stdout)["findings"] if each["check"] == "store"]
    assert [each["status"] for each in found] == ["warning", "warning"]
    assert "billing has failed 1 time" in found[0]["message"]
    assert "mailer has given up 1 change" in found[1]["message"]
    (letter,) = json.loads(run("store", "dead-letters", "mailer", "--json").stdout)
    assert (letter["aggregate_id"], letter["failure"]) == ("1", "ValueError: out of paper")
    assert "out of paper" in run("store", "dead-letters", "mailer").stdout
    assert "eventsql store dismiss --execute mailer" in found[1]["remedy"]
    dismissed = run("store", "dismiss", "mailer", "--id", 1, "--execute")
    assert "1 dead letter of subscription 'mailer' dismissed" in dismissed.stderr
    for each in ("replay", "dead-letters", "dismiss"):
        unknown = run("store", each, "unknown")
        assert (unknown.exit_code, unknown.stdout) == (1, "")
        assert "subscription 'unknown' does not exist: see `eventsql store subscriptions`" in unknown.stderr
    assert "given up" not in run("doctor").stdout


def test_doctor_names_a_subscription_that_nobody_runs_after_ten_minutes(run: Run, platform: EventSQL) -> None:
    def found() -> list[dict[str, Any]]:
        return [each for each in json.loads(run("doctor", "--json").stdout)["findings"] if each["check"] == "store"]

    options = SubscriptionOptions(batch=1)
    mailer = platform.store.subscribe("mailer", lambda _change, _connection: None, options=options, background=False)
    assert found() == []
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.aggregate_change SET eql_created_at = now() - interval '11 minutes'")
    (idle,) = found()
    assert idle["status"] == "warning"
    assert "mailer has handled nothing for ten minutes, and 3 changes wait" in idle["message"]
    assert idle["remedy"].endswith("store.unsubscribe('mailer')")
    assert mailer.run_once().handled == 1
    assert found() == [], "a process runs it, however old its next change is"
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.store_subscription SET eql_handled_at = now() - interval '11 minutes'")
    (idle,) = found()
    assert "mailer has handled nothing for ten minutes, and 2 changes wait" in idle["message"]


def test_doctor_and_lag_tell_nothing_of_a_restored_store_that_nobody_uses(run: Run, platform: EventSQL) -> None:
    restored(platform.database)
    with platform.database.connection() as connection:
        connection.execute("TRUNCATE eventsql.aggregate CASCADE")
    assert "store" not in {each["check"] for each in json.loads(run("doctor", "--json").stdout)["findings"]}
    assert "adopt" not in run("lag").output


def test_doctor_tells_of_a_restored_store_and_of_an_overdue_retention(run: Run, platform: EventSQL) -> None:
    views = Views(platform.database)
    views.declare(Timeline("parcels"))
    with platform.database.transaction() as connection:
        views.timeline(Timeline("parcels")).append(connection, [("1", {}, datetime(2024, 1, 1, tzinfo=UTC))])
    views.declare(Timeline("parcels", retention=timedelta(days=1)))
    restored(platform.database)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    found = {each["check"]: each for each in json.loads(result.stdout)["findings"]}
    assert (found["store"]["status"], found["store"]["remedy"]) == ("problem", "eventsql store adopt")
    assert "1 partition of view parcels" in found["views"]["message"]

    assert run("store", "adopt").exit_code == 0
    assert run("view", "retain", "--execute").exit_code == 0
    assert {"store", "views"}.isdisjoint(
        each["check"] for each in json.loads(run("doctor", "--json").stdout)["findings"]
    )


def test_a_closed_aggregate_is_archived_and_moved_back(run: Run, platform: EventSQL) -> None:
    still_open = run("store", "archive", "order", "1")
    assert (still_open.exit_code, "`eventsql store close --execute order 1`" in still_open.stderr) == (2, True)
    assert run("store", "close", "order", "1", "--execute").exit_code == 0
    assert "2 changes" in run("store", "archive", "order", "1").stderr
    assert [each["version"] for each in json_lines(run("store", "show", "order", "1"))] == [1, 2]
    (found,) = json.loads(run("store", "list", "order", "--json").stdout)
    assert found["archived_at"] is not None
    assert run("store", "append", "order", "1", "paid", "{}").exit_code == 1
    assert "2 changes" in run("store", "unarchive", "order", "1").stderr

    platform.store.close_stream("rider", "é")
    assert "0 aggregates" in run("store", "archive", "rider", "--closed-before", "1d").stderr
    assert "1 aggregate " in run("store", "archive", "rider", "--closed-before", "0s").stderr
    for wrong in ((), ("1", "--closed-before", "1d")):
        assert run("store", "archive", "order", *wrong).exit_code == 2


def test_doctor_shows_an_interrupted_rebuild_of_a_projection_until_it_is_given_up(run: Run, platform: EventSQL) -> None:
    class Broken(Projection):
        name, tables = "broken", ("broken",)

        def create(self, connection: Connection) -> None:
            connection.execute("CREATE TABLE broken ()")

        def apply(self, change: RecordedChange, connection: Connection) -> None:
            if change.version == 2:
                raise ValueError("out of paper")

    def found() -> list[dict[str, Any]]:
        return [each for each in json.loads(run("doctor", "--json").stdout)["findings"] if each["check"] == "store"]

    projections = Projections(platform.store, [Broken()])
    assert found() == []
    with pytest.raises(ValueError, match="out of paper"):
        projections.rebuild("broken", batch=1)
    (finding,) = found()
    assert finding["status"] == "warning"
    assert "a rebuild of projection broken began at " in finding["message"]
    assert "applied 1 change and has not ended" in finding["message"]
    projections.give_up("broken")
    assert found() == []


def test_doctor_shows_a_killed_rebuild_of_a_view_until_it_is_given_up(run: Run, platform: EventSQL) -> None:
    views = Views(platform.database)
    views.declare(Timeline("steps"))
    platform.registry.register_topic(Topic("moves", partitions=1))
    platform.registry.register_consumer(Consumer("moves", "views"))

    class Steps(ViewFeed):
        view, topic, consumer = Timeline("steps"), "moves", "views"

        def apply(self, events: Sequence[Event], view: Any, connection: Connection) -> None:
            """Writes nothing."""

    def found() -> list[dict[str, Any]]:
        report = json.loads(run("doctor", "--json").stdout)
        return [each for each in report["findings"] if each["check"] == "views"]

    assert found() == []
    views._rebuilding(Steps(), 10)._begin(partial=False)  # a killed rebuild ends here
    (finding,) = found()
    assert (finding["status"], finding["remedy"]) == ("warning", "eventsql view give-up --execute steps")
    assert run("view", "give-up", "steps", "--execute").exit_code == 0
    assert found() == []
    assert run("view", "give-up", "unknown").exit_code == 1
