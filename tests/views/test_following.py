"""A follower of logs gets each committed line once, however late its transaction commits."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import combinations_with_replacement, count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.errors import ValidationError, ViewNotFoundError
from eventsql_orchestration.views import LogEntry, LogFollower, Logs, LogsView, Views
from eventsql_orchestration.views import following as following_module
from eventsql_orchestration.views.logs import _following
from eventsql_orchestration.views.view_table import ViewTable
from tests.fixtures import Sessions
from tests.plans import custom_plan
from tests.views.conftest import DAY, NOON, SECOND

RUNS = Logs("runs", language="english")


@pytest.fixture
def runs(views: Views) -> LogsView:
    views.declare(RUNS)
    # Writers of a missing partition would wait for the one that makes it.
    views.retain(now=NOON)
    return views.logs(RUNS)


def write(connection: Connection, logs: LogsView, *lines: str, **where: Any) -> None:
    logs.write(connection, [LogEntry("a", line, NOON + number * SECOND) for number, line in enumerate(lines)], **where)


def polled(follower: LogFollower) -> list[str]:
    return [line.line for line in follower.poll()]


def test_a_line_is_given_once_in_the_order_of_storing(database: Database, runs: LogsView) -> None:
    with database.transaction() as connection:
        write(connection, runs, "before")
    follower = runs.follow()
    assert polled(follower) == []
    with database.transaction() as connection:
        runs.write(connection, [LogEntry("a", "late", NOON + 2 * DAY), LogEntry("a", "early", NOON - 2 * DAY)])
    assert polled(follower) == ["late", "early"]
    assert polled(follower) == []


def test_a_line_that_commits_late_comes_late_and_once(database: Database, runs: LogsView, sessions: Sessions) -> None:
    early, late = sessions(), sessions()
    follower = runs.follow()
    write(early, runs, "first id")
    write(late, runs, "second id")
    late.commit()
    assert polled(follower) == ["second id"]
    assert polled(follower) == []
    with database.transaction() as connection:
        write(connection, runs, "third id")
    assert polled(follower) == ["third id"]
    early.commit()
    assert polled(follower) == ["first id"]
    assert polled(follower) == []
    assert not follower._given


def test_no_line_is_given_again_after_a_time_without_writers(
    database: Database, runs: LogsView, sessions: Sessions
) -> None:
    first, second = sessions(), sessions()
    follower = runs.follow()
    write(first, runs, "first")
    assert polled(follower) == []
    first.commit()
    assert polled(follower) == ["first"]
    write(second, runs, "second")
    assert polled(follower) == polled(follower) == []
    second.commit()
    assert polled(follower) == ["second"]


def test_lines_of_transactions_that_were_open_at_the_start_are_given(
    database: Database, runs: LogsView, sessions: Sessions
) -> None:
    held = sessions()
    write(held, runs, "open at the start")
    with database.transaction() as connection:
        write(connection, runs, "before")
    follower = runs.follow()
    assert polled(follower) == []
    held.commit()
    assert polled(follower) == ["open at the start"]


def test_a_prepared_transaction_is_waited_for(runs: LogsView) -> None:
    """It is the same transaction under another name: the server of the tests prepares none."""
    follower = runs.follow()
    follower._settled = 10
    for newest, writers, settled in (
        (20, {"3/15"}, 10), (30, {"-1/800", "4/1"}, 10), (40, {"-1/800", "4/2"}, 10), (50, {"4/3"}, 20), (60, {}, 60),
    ):  # fmt: skip
        follower._settle(newest, set(writers))
        assert follower._settled == settled


def test_a_line_that_is_rolled_back_is_never_given(runs: LogsView, sessions: Sessions) -> None:
    held = sessions()
    follower = runs.follow()
    write(held, runs, "never")
    assert polled(follower) == []
    held.rollback()
    assert polled(follower) == []


def test_only_matching_lines_are_given(database: Database, runs: LogsView) -> None:
    followers = [
        runs.follow(level="error"), runs.follow(attributes={"code": 7}), runs.follow(text="TIME"),
        runs.follow(words="retry"), runs.follow(tenant="acme"), runs.follow(resource="b"),
    ]  # fmt: skip
    with database.transaction() as connection:
        runs.write(connection, [
            LogEntry("a", "retries", NOON), LogEntry("b", "timeout", NOON, "error"),
            LogEntry("a", "code", NOON, attributes={"code": 7}),
        ])  # fmt: skip
        write(connection, runs, "of a tenant", tenant="acme")
    found = [polled(follower) for follower in followers]
    assert found == [["timeout"], ["code"], ["timeout"], ["retries"], ["of a tenant"], ["timeout"]]


def test_wrong_arguments_are_refused(runs: LogsView, views: Views) -> None:
    with pytest.raises(ValidationError):
        runs.follow(text="")
    with pytest.raises(ViewNotFoundError):
        views.logs(Logs("unknown")).follow()


def test_lines_that_commit_between_the_statements_of_a_look_are_given_once(
    runs: LogsView, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = sessions(), sessions()
    statements = ((LogFollower, "_newest"), (ViewTable, "writers"), (following_module, "fetch_raw"))

    def write_and_commit() -> None:
        write(late, runs, "late")
        late.commit()

    def given_by_looks(places: tuple[int, ...]) -> list[str]:
        writes: tuple[Callable[[], object], ...] = (lambda: write(early, runs, "early"), write_and_commit, early.commit)
        steps = list(zip(places, writes, strict=True))
        passed = count()

        def go_on() -> None:
            place = next(passed)
            while steps and steps[0][0] <= place:
                steps.pop(0)[1]()

        def followed_by_steps(statement: Callable[..., Any]) -> Callable[..., Any]:
            def called(*arguments: Any, **named: Any) -> Any:
                result = statement(*arguments, **named)
                go_on()
                return result

            return called

        follower = runs.follow()
        go_on()
        with monkeypatch.context() as patch:
            for where, name in statements:
                patch.setattr(where, name, followed_by_steps(getattr(where, name)))
            given = polled(follower)
        return [*given, *polled(follower), *polled(follower)]

    for places in combinations_with_replacement(range(len(statements) + 1), 3):
        assert sorted(given_by_looks(places)) == ["early", "late"], places


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["write", "commit", "rollback", "poll"]), st.integers(0, 2))))
def test_any_interleaving_gives_each_committed_line_once(
    runs: LogsView, sessions: Sessions, steps: list[tuple[str, int]]
) -> None:
    writers = [sessions() for _ in range(3)]
    follower = runs.follow()
    written: list[list[str]] = [[], [], []]
    committed: list[str] = []
    given: list[str] = []
    ends = [("commit", number) for number in range(3)]
    for step, (action, number) in enumerate([*steps, *ends]):
        if action == "write":
            write(writers[number], runs, str(step))
            written[number].append(str(step))
        elif action == "poll":
            given += polled(follower)
            assert sorted(given) == sorted(committed)
        else:
            getattr(writers[number], action)()
            committed += written[number] if action == "commit" else []
            written[number] = []
    given += polled(follower)
    assert sorted(given) == sorted(committed)
    for writer in writers:
        writer.close()


def test_a_poll_reads_an_index_of_ids(database: Database, runs: LogsView) -> None:
    with database.transaction() as connection:
        for day in range(3):
            lines = [LogEntry("a", "line", NOON + day * DAY + number * SECOND) for number in range(2_000)]
            runs.write(connection, lines)
    with database.connection() as connection:
        connection.execute("ANALYZE eventsql.view_runs")
        statement = _following(RUNS, database.schema, frozenset({"tenant", "resource", "after_id"}))
        (relation,) = fetch_one(connection, sql.SQL("SELECT 'eventsql.view_runs'::regclass::oid"))
        values = {"tenant": "", "resource": "a", "after_id": 5_990, "relation": relation}
        plan = "\n".join(line for (line,) in connection.execute(b"EXPLAIN " + statement, values, prepare=False))
        newest = custom_plan(connection, runs._table.query("newest_line"), {"relation": "eventsql.view_runs"})
    # The other partitions are empty.
    assert "Seq Scan on view_runs_p202411" not in plan + newest
    assert "eql_id_idx" in plan
    assert "eql_id_idx" in newest


def test_the_lookback_bounds_what_is_read_at_the_start(
    database: Database, runs: LogsView, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_module, "LOOKBACK", 2)
    held = sessions()
    write(held, runs, "beyond", "beyond too", "within")
    with database.transaction() as connection:
        write(connection, runs, "before")
    follower = runs.follow()
    held.commit()
    assert polled(follower) == ["within"]


def test_older_logs_get_their_index_from_the_migration(database: Database, runs: LogsView) -> None:
    with database.transaction() as connection:
        write(connection, runs, "before")
    with database.connection() as connection:
        connection.execute("DROP INDEX eventsql.view_runs_eql_id_idx")
        # Its statement alone: later revisions cannot run twice.
        statement = import_module("eventsql_orchestration.database.migrations.versions.0029_following_logs")._INDEXES
        connection.execute(statement.replace("{schema}", '"eventsql"').replace("{literal}", "'eventsql'").encode())
        found = connection.execute(
            "SELECT indexdef FROM pg_indexes WHERE indexname LIKE 'view_runs_p202411%eql_id_idx'"
        )
        assert [index for (index,) in found if "(eql_id)" in index]
