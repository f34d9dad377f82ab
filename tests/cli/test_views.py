"""`eventsql view`, `timeline`, `rollup` and `logs`."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.views import LogEntry, Logs, Rollup, RollupEntry, Timeline, Views
from tests.cli.conftest import Run, Start
from tests.views.conftest import SKETCHES

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
PARCELS = Timeline("parcels")
MOVES = Rollup("moves", timedelta(minutes=1), ("place",), ("grams",))
TRACKING = Logs("tracking", language="simple")


def prepare(platform: EventSQL) -> None:
    views = Views(platform.database)
    views.declare(PARCELS, MOVES, TRACKING)
    with platform.database.transaction() as connection:
        views.timeline(PARCELS).append(connection, [("7", {"place": "Lodz"}, NOON)])
        for minute, place in enumerate(("Lodz", "Lodz", "Gdansk")):
            at = NOON + timedelta(minutes=minute)
            views.rollup(MOVES).add(connection, [RollupEntry(at, {"place": place}, {"grams": 0.5 + minute})])
            views.logs(TRACKING).write(
                connection, [LogEntry("7", f"arrived at {place}", at, attributes={"place": place})]
            )


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def views(platform: EventSQL) -> Views:
    return Views(platform.database)


def test_a_length_of_time_is_refused_in_the_words_that_commands_use(run: Run) -> None:
    refused = run("rollup", "moves", "--every", "90s")
    assert refused.exit_code != 0
    assert "1 min 30 s is not a multiple of 1 min" in refused.stderr


def test_views_are_listed(run: Run) -> None:
    assert [row["name"] for row in json.loads(run("view", "list", "--json").stdout)] == ["moves", "parcels", "tracking"]
    assert "grain 1 min, dimensions place, values grams" in run("view", "list").stdout
    assert "for ever" in run("view", "list").stdout
    assert {row["period"] for row in json.loads(run("view", "list", "--json").stdout)} == {86_400.0, 30 * 86_400.0}


def test_a_timeline_shows_what_happened_to_a_resource(run: Run) -> None:
    (entry,) = json.loads(run("timeline", "parcels", "7", "--json").stdout)
    assert (entry["occurred_at"], entry["data"]) == ("2026-01-02T12:00:00+00:00", {"place": "Lodz"})
    assert '{"place": "Lodz"}' in run("timeline", "parcels", "7").stdout


def test_a_timeline_shows_the_newest_entries_first(run: Run, platform: EventSQL, views: Views) -> None:
    with platform.database.transaction() as connection:
        views.timeline(PARCELS).append(connection, [("7", {"place": place}, NOON) for place in ("Gdansk", "Krakow")])

    def places(*options: object) -> list[str]:
        return [
            entry["data"]["place"] for entry in json.loads(run("timeline", "parcels", "7", *options, "--json").stdout)
        ]

    assert places("--newest", "--limit", 2) == ["Krakow", "Gdansk"]
    assert places("--limit", 2) == ["Lodz", "Gdansk"]


def test_a_rollup_shows_its_buckets_with_bars(run: Run) -> None:
    arguments = ("rollup", "moves", "--every", "1h", "--by", "place")
    assert json.loads(run(*arguments, "--json").stdout) == [
        {"bucket": "2026-01-02T12:00:00+00:00", "place": "Gdansk", "count": 1,
         "sum_grams": 2.5, "min_grams": 2.5, "max_grams": 2.5},
        {"bucket": "2026-01-02T12:00:00+00:00", "place": "Lodz", "count": 2,
         "sum_grams": 2, "min_grams": 0.5, "max_grams": 1.5},
    ]  # fmt: skip
    shown = run(*arguments).stdout
    assert "█" * 30 in shown
    assert json.loads(run("rollup", "moves", "--where", "place=Lodz", "--since", "1m", "--json").stdout) == []


@pytest.mark.skipif(not SKETCHES, reason="no datasketches")
def test_a_rollup_shows_its_distinct_texts_and_quantiles(run: Run, platform: EventSQL) -> None:
    visits = Rollup("visits", timedelta(minutes=1), values=("ms",), distinct=("visitor",), quantiles=("ms",))
    views = Views(platform.database)
    views.declare(visits)
    at = datetime(2026, 1, 2, 12, tzinfo=UTC)
    with platform.database.transaction() as connection:
        entries = [RollupEntry(at, {}, {"ms": ms}, {"visitor": f"v{ms % 3}"}) for ms in range(1, 102)]
        views.rollup(visits).add(connection, entries)
    (bucket,) = json.loads(run("rollup", "visits", "--json").stdout)
    assert [bucket[name] for name in ("distinct_visitor", "p50_ms", "p90_ms", "p99_ms")] == [3, 51, 91, 100]
    (bucket,) = json.loads(run("rollup", "visits", "--quantile", "0.25", "--json").stdout)
    assert "p50_ms" not in bucket
    assert bucket["p25_ms"] == 26
    assert "distinct visitor" in run("rollup", "visits").stdout
    assert run("rollup", "visits", "--quantile", "2").exit_code == 2


@pytest.mark.skipif(not SKETCHES, reason="no datasketches")
def test_numbers_beyond_floats_are_valid_json(run: Run, platform: EventSQL) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    views = Views(platform.database)
    views.declare(wide := Rollup("wide", timedelta(minutes=1), values=("ms",), quantiles=("ms",)))
    at = datetime(2026, 1, 2, 12, tzinfo=UTC)
    with platform.database.transaction() as connection:
        numbers = (Decimal("-1e400"), 0.5, Decimal("1e401"))
        views.rollup(wide).add(connection, [RollupEntry(at, {}, {"ms": number}) for number in numbers])
    shown = run("rollup", "wide", "--quantile", "0", "--quantile", "0.5", "--quantile", "1", "--json").stdout
    (bucket,) = json.loads(shown, parse_constant=refuse)
    assert [bucket[name] for name in ("p0_ms", "p50_ms", "p100_ms")] == ["-Infinity", 0.5, "Infinity"]
    assert bucket["sum_ms"] == 10**401 - 10**400
    assert "Infinity" in run("rollup", "wide").stdout


def test_a_dimension_with_the_name_of_another_column_hides_nothing(run: Run, platform: EventSQL) -> None:
    views, files = Views(platform.database), Rollup("files", timedelta(minutes=1), ("bucket", "count"))
    views.declare(files)
    with platform.database.transaction() as connection:
        views.rollup(files).add(connection, [RollupEntry(NOON, {"bucket": "photos", "count": "many"})] * 2)
    (shown,) = json.loads(run("rollup", "files", "--by", "bucket", "--by", "count", "--json").stdout)
    assert shown == {
        "bucket": "2026-01-02T12:00:00+00:00", "dimension_bucket": "photos", "dimension_count": "many", "count": 2
    }  # fmt: skip


def test_a_rollup_is_drawn(run: Run, tmp_path: Path) -> None:
    arguments = ("rollup", "moves", "--by", "place", "--plot")
    assert run(*arguments, tmp_path / "moves.png").exit_code == 0
    assert (tmp_path / "moves.png").read_bytes().startswith(b"\x89PNG")
    assert "drawn to" in run(*arguments, tmp_path / "moves.svg").stderr
    drawn = (tmp_path / "moves.svg").read_text(encoding="utf-8")
    for text in ("moves", "Lodz", "Gdansk", "count", "sum of grams"):
        assert f">{text}</text>" in drawn


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (("--plot", "moves.txt"), ".png"), (("--plot", "missing/moves.png"), "missing/moves.png"),
        (("--plot", "moves.png", "--json"), "--json"), (("--plot", "moves.png", "--quantile", "0.5"), "--quantile"),
        (("--plot", "moves.png", "--since", "1m"), "no buckets"),
    ],
)  # fmt: skip
def test_a_rollup_that_cannot_be_drawn_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, ...], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("rollup", "moves", *wrong)
    assert result.exit_code != 0
    assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_logs_are_searched(run: Run) -> None:
    found = json.loads(run("logs", "tracking", "--words", "arrived", "--attribute", "place=Lodz", "--json").stdout)
    assert [line["written_at"] for line in found] == ["2026-01-02T12:01:00+00:00", "2026-01-02T12:00:00+00:00"]
    assert "arrived at Gdansk" in run("logs", "tracking", "--limit", 1).stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_logs_are_followed(start: Start, platform: EventSQL, views: Views, *, as_json: bool) -> None:
    process = start("logs", "tracking", "--follow", "--limit", 2, *["--json"] * as_json)
    assert process.stdout is not None
    try:
        # The last lines show that the program follows.
        last = [process.stdout.readline().decode() for _ in range(2)]
        with platform.database.transaction() as connection:
            entry = LogEntry("7", "two\nlines", NOON, attributes={"a": 1})
            views.logs(TRACKING).write(connection, [entry])
        new = process.stdout.readline().decode()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    if as_json:
        assert [json.loads(line)["line"] for line in last] == ["arrived at Lodz", "arrived at Gdansk"]
        assert json.loads(new)["attributes"] == {"a": 1}
    else:
        assert last[1] == '2026-01-02T12:02:00+00:00 7 info arrived at Gdansk {"place": "Gdansk"}\n'
        assert new == '2026-01-02T12:00:00+00:00 7 info two lines {"a": 1}\n'


def test_following_has_no_end(run: Run) -> None:
    result = run("logs", "tracking", "--follow", "--until", "1h")
    assert result.exit_code == 2
    assert "--until" in result.stderr


def test_another_kind_of_view_is_named(run: Run) -> None:
    result = run("logs", "parcels")
    assert result.exit_code == 2
    assert "eventsql timeline parcels" in result.stderr
    assert run("logs", "unknown").exit_code == 1


def test_a_view_is_dropped_when_it_is_asked_for(run: Run, views: Views) -> None:
    assert "--execute" in run("view", "drop", "parcels").stderr
    assert len(views.definitions()) == 3
    assert run("view", "drop", "parcels", "--execute").exit_code == 0
    assert [view.name for view in views.definitions()] == ["moves", "tracking"]


def test_sorting_tells_what_it_sorted(run: Run) -> None:
    assert "logs 'tracking': 1 partition sorted" in run("view", "sort").stderr
    assert json.loads(run("view", "sort", "--json").stdout) == [{"view": "tracking", "partitions": 0, "busy": 0}]


def test_retention_tells_what_it_dropped(run: Run, views: Views) -> None:
    views.declare(Timeline("parcels", retention=timedelta(days=1)))
    # Other views keep their entries for ever.
    assert json.loads(run("view", "retain", "--json").stdout) == [{"view": "parcels", "dropped": 1, "busy": 0}]
    assert "view 'parcels': 1 partition dropped" in run("view", "retain", "--execute").stderr
    assert json.loads(run("view", "retain", "--execute", "--json").stdout) == [
        {"view": "parcels", "dropped": 0, "busy": 0}
    ]


def test_a_database_without_views_has_nothing_to_sort_or_to_drop(run: Run, views: Views) -> None:
    for view in views.definitions():
        views.drop(view.name)
    assert "nothing to do: there are no logs" in run("view", "sort").stderr
    assert "nothing to do: no view has a retention" in run("view", "retain", "--execute").stderr


def test_doctor_names_a_view_whose_sequence_stayed_behind_its_logical_replica(run: Run, platform: EventSQL) -> None:
    def found() -> list[dict[str, str]]:
        report = json.loads(run("doctor", "--json").stdout)
        return [each for each in report["findings"] if each["check"] == "views" and each["status"] == "problem"]

    assert found() == []
    with platform.database.connection() as connection:
        for view in (PARCELS, TRACKING):
            connection.execute(f"ALTER SEQUENCE eventsql.{view.table}_eql_id_seq RESTART".encode())
        parcels, tracking = found()
        assert (PARCELS.table in parcels["message"], TRACKING.table in tracking["message"]) == (True, True)
        for finding in (parcels, tracking):
            connection.execute(finding["remedy"].encode())
        assert found() == []
        Views(platform.database).timeline(PARCELS).append(connection, [("7", {"place": "Gdansk"}, NOON)])
    entries = json.loads(run("timeline", "parcels", "7", "--json").stdout)
    assert [entry["data"]["place"] for entry in entries] == ["Lodz", "Gdansk"]
