"""Log lines are found by resource, time, level, attributes and text, the newest first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy
from psycopg import sql

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import ValidationError, ViewNotFoundError
from eventsql_orchestration.views import LogEntry, LogLine, Logs, LogsView, Views
from eventsql_orchestration.views.logs import _selection
from tests.plans import custom_plan
from tests.views.conftest import DAY, NOON, SECOND

RUNS = Logs("runs", language="english")


@pytest.fixture
def runs(views: Views) -> LogsView:
    views.declare(RUNS)
    return views.logs(RUNS)


def write(database: Database, logs: LogsView, *entries: LogEntry, **where: Any) -> None:
    with database.transaction() as connection:
        assert logs.write(connection, iter(entries), **where) == len(entries)


def lines(logs: LogsView, **search: Any) -> list[str]:
    return [found.line for found in logs.search(**search)]


def test_the_newest_lines_come_first(database: Database, runs: LogsView) -> None:
    write(
        database, runs,
        LogEntry("a", "first", NOON),
        LogEntry("b", "third", NOON + 2 * DAY, "error", {"code": 7}),
        LogEntry("a", "second", NOON + SECOND),
        LogEntry("a", "second too", NOON + SECOND),
    )  # fmt: skip
    write(database, runs, LogEntry("a", "elsewhere", NOON), tenant="acme")
    assert lines(runs) == ["third", "second too", "second", "first"]
    assert lines(runs, tenant="acme") == ["elsewhere"]
    (newest,) = runs.search(limit=1)
    assert (newest.resource, newest.level, newest.line, newest.attributes, newest.written_at) == (
        "b", "error", "third", {"code": 7}, NOON + 2 * DAY,
    )  # fmt: skip
    assert newest == runs.search()[0] != runs.search()[1]
    assert newest != "third"
    assert (str(newest.id) in repr(newest), hash(newest)) == (True, hash(runs.search()[0]))


def test_lines_of_many_tenants_are_written_in_one_call(database: Database, runs: LogsView) -> None:
    entries = [LogEntry("a", str(number), NOON + number * SECOND) for number in range(4)]
    write(database, runs, *entries, tenant=["acme", "", "globex", "acme"])
    assert [lines(runs, tenant=tenant) for tenant in ("acme", "", "globex")] == [["3", "0"], ["1"], ["2"]]


def test_pages_go_on_where_the_one_before_ended(database: Database, runs: LogsView) -> None:
    # Some lines of one time, over several partitions.
    write(database, runs, *(LogEntry("a", str(number), NOON + number // 3 * DAY) for number in range(10)))
    seen: list[str] = []
    last: LogLine | None = None
    while page := runs.search(before=last, limit=4):
        seen += [line.line for line in page]
        last = page[-1]
    assert seen == [str(number) for number in range(9, -1, -1)]


def test_lines_are_found_by_resource_and_range_of_time(database: Database, runs: LogsView) -> None:
    write(database, runs, *(LogEntry(kind, f"{kind}{n}", NOON + n * SECOND) for n in range(5) for kind in "ab"))
    assert lines(runs, resource="a") == ["a4", "a3", "a2", "a1", "a0"]
    assert lines(runs, resource="a", since=NOON + 3 * SECOND) == ["a4", "a3"]
    assert lines(runs, resource="a", until=NOON + 2 * SECOND) == ["a1", "a0"]
    assert lines(runs, since=NOON + SECOND, until=NOON + 2 * SECOND) == ["b1", "a1"]
    assert lines(runs, resource="c") == []


def test_lines_are_found_by_level_and_attributes(database: Database, runs: LogsView) -> None:
    write(
        database, runs,
        LogEntry("a", "slow", NOON, "warning", {"code": 7, "host": "x", "tags": ["a", "b"]}),
        LogEntry("a", "fast", NOON, attributes={"code": 8, "host": "x"}),
    )  # fmt: skip
    assert lines(runs, level="warning") == ["slow"]
    assert lines(runs, attributes={"host": "x"}) == ["fast", "slow"]
    assert lines(runs, attributes={"host": "x", "code": 8}) == ["fast"]
    assert lines(runs, attributes={"tags": ["b"]}) == ["slow"]
    assert lines(runs, attributes={"code": "7"}) == []


def test_text_is_found_anywhere_in_a_line_in_either_case(database: Database, runs: LogsView) -> None:
    texts = ("Connection refused", "retry: CONNECTION reset", "ok")
    write(database, runs, *(LogEntry("a", text, NOON) for text in texts))
    assert sorted(lines(runs, text="connection")) == ["Connection refused", "retry: CONNECTION reset"]
    assert lines(runs, text="refused ") == []


def test_words_are_found_in_the_forms_of_their_language(database: Database, runs: LogsView) -> None:
    texts = ("the driver was retrying", "two retries of the rider", "no drivers")
    write(database, runs, *(LogEntry("a", text, NOON) for text in texts))
    assert sorted(lines(runs, words="retry")) == ["the driver was retrying", "two retries of the rider"]
    assert lines(runs, words="driver -retry") == ["no drivers"]
    assert lines(runs, words='"of the rider"') == ["two retries of the rider"]


def test_words_need_a_language(views: Views) -> None:
    plain = Logs("plain")
    views.declare(plain)
    with pytest.raises(ValidationError, match="language"):
        views.logs(plain).search(words="retry")


@pytest.mark.parametrize("text", ["100%", "a_b", "c\\d", "%(log)s", "{schema}", "'; DROP TABLE log_line; --"])
def test_text_means_itself_and_no_pattern(database: Database, runs: LogsView, text: str) -> None:
    write(database, runs, LogEntry("a", f"<{text}>", NOON), LogEntry("a", "1000 aXb cXd", NOON))
    assert lines(runs, text=text) == [f"<{text}>"]


def test_lines_are_kept_as_they_were_written(database: Database, runs: LogsView) -> None:
    written = ["", " ", "two\nlines", "tab\t", '{"json": null}', "NULL", "🚕", "\\N", "a,b"]
    write(database, runs, *(LogEntry("a", line, NOON + number * SECOND) for number, line in enumerate(written)))
    assert lines(runs) == written[::-1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LogEntry("", "line", NOON),
        lambda: LogEntry("r" * 201, "line", NOON),
        lambda: LogEntry("a", "a\x00b", NOON),
        lambda: LogEntry("a", "\ud800", NOON),
        lambda: LogEntry("a", b"line", NOON),  # type: ignore[arg-type]
        lambda: LogEntry("a", "line", NOON.replace(tzinfo=None)),
        lambda: LogEntry("a", "line", None),  # type: ignore[arg-type]
        lambda: LogEntry("a", "line", NOON, ""),
        lambda: LogEntry("a", "line", NOON, "info", {"at": NOON}),
        lambda: ("a", "line", NOON),
    ],
)
def test_a_line_that_cannot_be_stored_is_refused_before_any_of_its_batch_is_written(
    database: Database, runs: LogsView, wrong: Callable[[], Any]
) -> None:
    with database.transaction() as connection, pytest.raises(ValidationError):
        runs.write(connection, [LogEntry("a", "line", NOON), wrong()])
    assert runs.search() == []


@pytest.mark.parametrize(
    "search",
    [
        {"resource": ""}, {"level": ""}, {"attributes": {"at": NOON}}, {"since": NOON.replace(tzinfo=None)},
        {"until": "now"}, {"text": ""}, {"text": "a\x00b"}, {"text": 7}, {"words": " "}, {"limit": 0}, {"limit": None},
        {"before": 7},
    ],
)  # fmt: skip
def test_a_search_that_makes_no_sense_is_refused(nowhere: Database, search: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LogsView(nowhere, RUNS).search(**search)


def test_logs_that_nobody_declared_are_named(database: Database) -> None:
    with pytest.raises(ViewNotFoundError, match="runs"):
        LogsView(database, RUNS).search()


@pytest.mark.parametrize(
    ("given", "index"),
    [
        ({"resource": "7"}, "eql_resource = '7'"),
        ({"resource": "7", "since": NOON, "until": NOON + DAY}, "eql_resource = '7'"),
        ({"since": NOON, "until": NOON + SECOND}, "eql_written_at <"),
        ({"words": "needle"}, "Bitmap Index Scan"),
    ],
)
def test_a_search_goes_through_the_index_that_fits_it(
    database: Database, runs: LogsView, given: dict[str, Any], index: str
) -> None:
    write(database, runs, LogEntry("a", "a needle", NOON), LogEntry("a", "line", NOON + 2 * DAY))
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.view_runs (eql_tenant, eql_resource, eql_level, eql_line, eql_attributes, "
            "eql_written_at) SELECT '', (number %% 2000)::text, 'info', 'line ' || number, '{}', "
            "%s + number * interval '2 s' FROM generate_series(1, 20000) AS number",
            [NOON],
        )
        connection.execute("VACUUM ANALYZE eventsql.view_runs")
        query = _selection(runs.definition, database.schema, frozenset({"tenant", "limit", *given})).decode()
        plan = custom_plan(connection, sql.SQL(query), {"tenant": "", "limit": 100, **given})
    assert index in plan
    assert "Seq Scan on view_runs_p20241120" not in plan


def test_a_transaction_of_sqlalchemy_writes(database: Database, runs: LogsView) -> None:
    engine = sqlalchemy.create_engine(database.url)
    with engine.connect() as connection:
        for ending in (connection.rollback, connection.commit):
            runs.write(connection, [LogEntry("a", ending.__name__, NOON)])
            ending()
    engine.dispose()
    assert lines(runs) == ["commit"]
