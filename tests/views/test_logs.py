"""Log lines are found by resource, range of time and text, the newest first."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy

from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.views import LogLine, Logs
from tests.plans import custom_plan

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.fixture
def logs(database: Database) -> Logs:
    return Logs(database)


def write(database: Database, log: str, *rows: tuple[str, str, datetime]) -> None:
    with database.transaction() as connection:
        assert Logs(database).write(connection, log, iter(rows)) == len(rows)


def lines(logs: Logs, log: str = "runs", **search: Any) -> list[str]:
    return [found.line for found in logs.search(log, **search)]


def test_the_newest_lines_come_first(database: Database, logs: Logs) -> None:
    write(
        database,
        "runs",
        ("a", "first", NOON),
        ("b", "third", NOON + 2 * SECOND),
        ("a", "second", NOON + SECOND),
        ("a", "second too", NOON + SECOND),
    )
    write(database, "other", ("a", "elsewhere", NOON))
    assert lines(logs) == ["third", "second too", "second", "first"]
    assert lines(logs, limit=2) == ["third", "second too"]
    assert logs.search("runs", limit=1) == [
        LogLine(logs.search("runs")[0].id, "b", "third", NOON + 2 * SECOND),
    ]
    assert lines(logs, "unknown") == []


def test_lines_are_found_by_resource_and_range_of_time(database: Database, logs: Logs) -> None:
    write(
        database, "runs", *((kind, f"{kind}{number}", NOON + number * SECOND) for number in range(5) for kind in "ab")
    )
    assert lines(logs, resource="a") == ["a4", "a3", "a2", "a1", "a0"]
    assert lines(logs, resource="a", since=NOON + 3 * SECOND) == ["a4", "a3"]
    assert lines(logs, resource="a", until=NOON + 2 * SECOND) == ["a1", "a0"]
    assert lines(logs, since=NOON + SECOND, until=NOON + 2 * SECOND) == ["b1", "a1"]
    assert lines(logs, resource="c") == []


def test_text_is_found_anywhere_in_a_line_in_either_case(database: Database, logs: Logs) -> None:
    write(
        database, "runs", ("a", "Connection refused", NOON), ("b", "retry: CONNECTION reset", NOON), ("a", "ok", NOON)
    )
    assert sorted(lines(logs, text="connection")) == ["Connection refused", "retry: CONNECTION reset"]
    assert lines(logs, text="connection", resource="a") == ["Connection refused"]
    assert lines(logs, text="refused ") == []


@pytest.mark.parametrize("text", ["100%", "a_b", "c\\d", "%(log)s", "{schema}", "'; DROP TABLE log_line; --"])
def test_text_means_itself_and_no_pattern(database: Database, logs: Logs, text: str) -> None:
    write(database, "runs", ("a", f"<{text}>", NOON), ("a", "1000 aXb cXd", NOON))
    assert lines(logs, text=text) == [f"<{text}>"]


def test_lines_are_kept_as_they_were_written(database: Database, logs: Logs) -> None:
    written = ["", " ", "two\nlines", "tab\t", '{"json": null}', "NULL", "🚕", "\\N", "a,b"]
    write(database, "runs", *(("a", line, NOON + number * SECOND) for number, line in enumerate(written)))
    assert lines(logs) == written[::-1]


def test_a_rollback_writes_nothing(database: Database, logs: Logs) -> None:
    with database.connection() as connection, connection.transaction(force_rollback=True):
        logs.write(connection, "runs", [("a", "line", NOON)])
    assert lines(logs) == []


def test_writing_nothing_is_nothing(database: Database, logs: Logs) -> None:
    write(database, "runs")
    assert lines(logs) == []


@pytest.mark.parametrize(
    "row",
    [
        ("", "line", NOON),
        ("r" * 201, "line", NOON),
        ("a", "a\x00b", NOON),
        ("a", "\ud800", NOON),
        ("a", b"line", NOON),
        ("a", "line", NOON.replace(tzinfo=None)),
        ("a", "line", None),
    ],
)
def test_a_line_that_cannot_be_stored_is_refused_before_any_of_its_batch_is_written(
    nowhere: Database, row: Any
) -> None:
    connection: Any = None
    with pytest.raises(ValidationError):
        Logs(nowhere).write(connection, "runs", [("a", "line", NOON), row])


@pytest.mark.parametrize(
    "search",
    [
        {"resource": ""},
        {"since": NOON.replace(tzinfo=None)},
        {"until": "now"},
        {"text": ""},
        {"text": "a\x00b"},
        {"text": 7},
        {"limit": 0},
        {"limit": None},
    ],
)
def test_a_search_that_makes_no_sense_is_refused(nowhere: Database, search: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Logs(nowhere).search("runs", **search)


def test_a_log_needs_a_usable_name(nowhere: Database) -> None:
    connection: Any = None
    with pytest.raises(InvalidNameError, match="log"):
        Logs(nowhere).write(connection, "a\nb", [])
    with pytest.raises(InvalidNameError, match="log"):
        Logs(nowhere).search("")


@pytest.mark.parametrize(
    ("statement", "index"),
    [("search_log", "log_line_time"), ("search_log_of_resource", "log_line_resource")],
)
@pytest.mark.parametrize("pattern", [None, "%line%", "%nowhere%"])
def test_a_search_reads_its_index_alone(database: Database, statement: str, index: str, pattern: str | None) -> None:
    values = {"log": "log 7", "resource": "7", "since": NOON, "until": None, "pattern": pattern, "limit": 10}
    composed = Queries("views", "eventsql")(statement)
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.log_line (eql_log, eql_resource, eql_line, eql_written_at) "
            "SELECT 'log ' || number % 10, number / 10 % 20, 'line', "
            "timestamptz '2024-11-20 00:00+00' + make_interval(secs => number * 10) "
            "FROM generate_series(1, 40000) AS number"
        )
        connection.execute("VACUUM ANALYZE eventsql.log_line")
        plan = custom_plan(connection, composed, values)
    assert index in plan
    assert "Seq Scan" not in plan
    if pattern != "%nowhere%":
        # From the newest line on and no further than the limit: lines of one moment alone are sorted.
        assert "Presorted Key: eql_written_at" in plan
        assert f"Index Scan Backward using {index}" in plan


def test_a_transaction_of_sqlalchemy_writes(database: Database, logs: Logs) -> None:
    engine = sqlalchemy.create_engine(database.url)
    with engine.connect() as connection:
        for number, ending in enumerate((connection.rollback, connection.commit)):
            logs.write(connection, "runs", [("1", str(number), NOON)])
            ending()
    engine.dispose()
    assert lines(logs) == ["1"]
