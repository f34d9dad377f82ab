"""What a person or a pipe sees of lag and of events: chosen rows, totals, formats, trends, and quiet."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from click.testing import Result
from rich.console import Console

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.cli import output, topic_output
from eventsql_orchestration.cli.lag import _refreshes, lag_table, live_lag, sparkline
from eventsql_orchestration.cli.output import progress_bar
from eventsql_orchestration.cli.tables import cell, same, table_of
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.metrics.figures import TopicFigures
from eventsql_orchestration.model import Retention
from eventsql_orchestration.shards.shard import Shard
from tests.cli.conftest import Run, Start
from tests.cli.terminals import Terminal
from tests.fixtures import Until
from tests.forms import in_blocks, stored
from tests.waiting import PATIENCE


def prepare(platform: EventSQL) -> None:
    """Make topics `prices` with 1 event and `rides` with 5 in two partitions, each with a consumer `ledger`."""
    for topic, partitions in (("prices", 1), ("rides", 2)):
        platform.registry.register_topic(Topic(topic, partitions=partitions))
        platform.registry.register_consumer(Consumer(topic, "ledger", partitioned=True))
    platform.registry.register_consumer(Consumer("rides", "payout"))
    events = [Publication("rides", b'{"fare": %d}' % number, key=f"k{number % 2}", partition=0) for number in range(4)]
    platform.publisher.publish_all([*events, Publication("rides", b"\xff", partition=1), Publication("prices", b"1")])
    platform.transfer.run_once()


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="rides")


@pytest.fixture
def rides(platform: EventSQL) -> EventSQL:
    return platform


def rows(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()[1:]]


def test_lag_is_a_table_and_json(run: Run, rides: EventSQL) -> None:
    rides.consumers.consume_once("rides", "ledger", lambda *_: None, partition=1)
    rides.publisher.publish(Publication("rides", b"later", partition=0))
    first, second = json.loads(run("lag", "rides", "--consumer", "ledger", "--json").stdout)
    assert first.pop("seconds") > 0
    assert first == {
        "topic": "rides", "consumer": "ledger", "partition": 0, "events": 5, "offset": 0, "end": 4, "buffered": 1,
        "cause": "waiting", "detail": "not consumed yet",
    }  # fmt: skip
    assert (second["partition"], second["events"], second["cause"]) == (1, 0, "none")
    table = run("lag").stdout.splitlines()
    assert table[0].split()[:5] == ["topic", "consumer", "partition", "events", "seconds"]
    assert len(table) == 5


def test_lag_is_watched_until_ctrl_c(start: Start, rides: EventSQL) -> None:
    process = start("lag", "prices", "--watch", "--json", "--interval", 0.1)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())[0]["events"] == 1
    rides.publisher.publish(Publication("prices", b"2"))
    while json.loads(process.stdout.readline())[0]["events"] == 1:
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, b"")


def test_lag_of_one_consumer(run: Run, rides: EventSQL) -> None:
    found = json.loads(run("lag", "--consumer", "payout", "--json").stdout)
    assert [(each["topic"], each["consumer"], each["events"]) for each in found] == [("rides", "payout", 5)]
    missing = run("lag", "prices", "--consumer", "payout")
    assert missing.exit_code == 1
    assert missing.stderr == (
        "eventsql: there is no consumer 'payout' of topic 'prices': look its name up with `eventsql consumer list`\n"
    )


@pytest.mark.parametrize("command", [("lag", "rides"), ("consumer", "list", "rides")])
def test_the_windows_of_backfills_are_left_out(run: Run, rides: EventSQL, command: tuple[str, ...]) -> None:
    window = "payout__backfill_20260501-abc123_0_4"
    rides.registry.register_consumer(Consumer("rides", window))
    assert {row[1] for row in rows(run(*command))} == {"ledger", "payout"}
    assert {row[1] for row in rows(run(*command, "--backfills"))} == {"ledger", "payout", window}
    assert [row[1] for row in rows(run("lag", "--consumer", window))] == [window]


def test_times_are_in_the_zone_of_the_machine(run: Run, rides: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    created = rides.registry.topic("rides").created_at
    assert created is not None
    for zone, hours in (("UTC", 0), ("Asia/Tokyo", 9)):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        try:
            described = run("topic", "describe", "rides").stdout
        finally:
            monkeypatch.undo()
            time.tzset()
        [shown] = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d", described)
        read = datetime.fromisoformat(shown)
        assert read == created.replace(microsecond=0)
        assert read.utcoffset() == timedelta(hours=hours)


def test_the_statistics_of_topics_are_told(run: Run, rides: EventSQL) -> None:
    rides.publisher.publish(Publication("rides", b"later", partition=0))
    with rides.database.connection() as connection:
        connection.execute(
            """
            UPDATE eventsql.rides_block
            SET eql_created_at = CASE WHEN eql_id - eql_events < 2 THEN now() - interval '30 minutes' ELSE now() END,
                eql_entered = ARRAY(
                    SELECT CASE WHEN id <= 2 THEN now() - interval '30 minutes' ELSE now() END
                    FROM generate_series(eql_id - eql_events + 1, eql_id) id
                )
            """
            if in_blocks()
            else "UPDATE eventsql.rides_event SET eql_created_at = now() - interval '30 minutes' WHERE eql_id <= 2"
        )
    [found] = json.loads(run("topic", "stats", "rides", "--json").stdout)
    assert (found["topic"], found["first"], found["end"], found["buffered"]) == ("rides", 1, 5, 1)
    assert {
        window: round(rate * seconds)
        for (window, rate), seconds in zip(found["rates"].items(), (60, 3_600, 86_400), strict=True)
    } == {"1m": 3, "1h": 5, "1d": 5}
    assert found["bytes"] > 0
    assert found["oldest_seconds"] > 1_700
    shown = run("topic", "stats")
    assert [row[0] for row in rows(shown)] == ["prices", "rides"]
    assert "events/s, 1m" in shown.stdout
    missing = run("topic", "stats", "nowhere")
    assert (missing.exit_code, missing.stdout) == (1, "")


def test_a_topic_that_is_deleted_meanwhile_has_no_statistics(
    run: Run, rides: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = topic_output._statistics

    def delete_first(shard: Shard, figures: TopicFigures) -> topic_output.Statistics:
        if figures.topic == "prices":
            rides.registry.unregister_topic("prices", force=True)
        return taken(shard, figures)

    monkeypatch.setattr(topic_output, "_statistics", delete_first)
    named = run("topic", "stats", "prices")
    assert (named.exit_code, named.stdout) == (1, "")
    assert "'prices'" in named.stderr
    rides.registry.register_topic(Topic("prices"))
    others = run("topic", "stats")
    assert (others.exit_code, [row[0] for row in rows(others)]) == (0, ["rides"])


def test_a_topic_that_has_lost_all_its_events_counts_none_of_its_offsets(run: Run, rides: EventSQL) -> None:
    rides.registry.set_retention("rides", Retention(seconds=60))
    with rides.database.connection() as connection:
        connection.execute(
            f"UPDATE eventsql.{stored('rides')} SET eql_created_at = eql_created_at - interval '2 minutes'".encode()
        )
    rides.retention.run_once(["rides"], force=True)
    rides.transfer.run_once()
    [found] = json.loads(run("topic", "stats", "rides", "--json").stdout)
    assert (found["first"], found["oldest_seconds"], set(found["rates"].values())) == (None, None, {0})


def test_an_empty_topic_has_statistics_too(run: Run, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("empty"))
    [found] = json.loads(run("topic", "stats", "--json").stdout)
    assert (found["first"], found["end"], found["oldest_seconds"]) == (None, 0, None)
    assert set(found["rates"].values()) == {0}
    assert run("topic", "stats").exit_code == 0


def test_lag_in_order_of_events(run: Run, rides: EventSQL) -> None:
    assert [(row[0], row[2], row[3]) for row in rows(run("lag", "--sort", "events"))] == [
        ("rides", "all", "5"),
        ("rides", "0", "4"),
        ("prices", "0", "1"),
        ("rides", "1", "1"),
    ]


def test_totals_are_over_the_partitions_of_a_consumer(run: Run, rides: EventSQL) -> None:
    rides.consumers.consume_once("rides", "ledger", lambda *_: None, partition=1)
    shown = rows(run("lag", "--totals"))
    # Topic, consumer, the partitions behind, events.
    assert [row[:6] for row in shown] == [
        ["prices", "ledger", "1", "of", "1", "1"],
        ["rides", "ledger", "1", "of", "2", "4"],
        ["rides", "payout", "1", "of", "1", "5"],
    ]
    found = json.loads(run("lag", "rides", "--totals", "--json").stdout)
    assert (found[0]["partitions"], found[0]["behind"], found[0]["why"]) == (2, 1, "waiting")


def test_watch_on_a_terminal_draws_a_trend(rides: EventSQL, start: Start, terminal: Terminal, until: Until) -> None:
    screen = terminal.descriptor
    process = start(
        "lag", "--consumer", "payout", "--watch", "--interval", 0.1,
        stdin=screen, stdout=screen, stderr=screen, TERM="xterm",
    )  # fmt: skip
    # The bar of five events, seen three times.
    until(lambda: "███" in terminal.shown.decode(errors="replace"))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 130
    shown = terminal.close().decode(errors="replace")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"topic +consumer +partition +events .*trend", plain)
    assert "eventsql:" not in plain


def test_a_narrow_terminal_folds_texts_and_keeps_numbers_whole(
    run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.cli.tables.stdout_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "a consumer with a rather long name"))
    platform.publisher.publish_all(Publication("orders", b"x") for _ in range(1_234))
    shown = run("lag").stdout
    assert "1,234" in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_terminal_cuts_no_number_short(width: int) -> None:
    items = [SimpleNamespace(name="order_placed", events=1_234_567, offset=9_876_543, size=12_345.6, end=1_111_111)]
    console = Console(file=io.StringIO(), width=width)
    console.print(table_of(items, same("name", "events", "offset", "size", "end")), crop=False)
    for whole in ("name", "order_pl", "1,234,567", "9,876,543", "12,345.6", "1,111,111"):
        assert whole in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "left"), [(54, {"offset", "events"}), (53, {"events"}), (46, {"events"}), (45, set())]
)
def test_a_narrow_terminal_leaves_columns_out_before_it_folds_a_name(width: int, left: set[str]) -> None:
    items = [SimpleNamespace(name="order_placed", why="the disk of the server is full", events=1, offset=2)]
    console = Console(file=io.StringIO(), width=width)
    console.print(table_of(items, same("name", "events", "offset", "why"), spare=["offset", "events"]), crop=False)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "order_placed" in shown
    assert {name for name in ("offset", "events") if name in shown} == left


def test_a_table_that_refreshes_keeps_names_whole_on_a_narrow_terminal(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("order_placed", partitions=2))
    platform.registry.register_consumer(Consumer("order_placed", "stock", partitioned=True))
    console = Console(file=io.StringIO(), width=70, force_terminal=True)
    with live_lag(console) as live:
        live.update(lag_table(platform.lag()))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert re.search(r"order_placed  stock     1 ", shown)
    assert "offset" not in shown


def test_a_watch_waits_for_a_database_that_has_answered(capsys: pytest.CaptureFixture[str]) -> None:
    down = DatabaseUnavailableError("the server restarts")
    looks: list[list[object] | Exception] = [[1], down, down, [2], down, [3]]

    def rows() -> list[object]:
        look = looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    refreshes = _refreshes(rows, 0.0)
    assert [next(refreshes) for _ in range(3)] == [[1], [2], [3]]
    assert capsys.readouterr().err.count("the server restarts; waiting for it") == 2
    looks[:] = [down]
    with pytest.raises(DatabaseUnavailableError):
        next(_refreshes(rows, 0.0))


def test_a_table_that_refreshes_is_not_written_to_a_file() -> None:
    console = Console(file=io.StringIO())
    with live_lag(console) as live:
        live.update(lag_table([]))
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_trend_is_drawn_between_nothing_and_the_most() -> None:
    assert sparkline([0, 0]) == "          ▁▁"
    assert sparkline([0, 7, 14]) == "         ▁▅█"


def values(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line)["value"] for line in result.stdout.splitlines()]


def test_events_are_chosen_by_key_and_value(run: Run, rides: EventSQL) -> None:
    assert values(run("tail", "rides", "--key", "k1")) == ['{"fare": 1}', '{"fare": 3}']
    assert values(run("tail", "rides", "--grep", r"fare.*[23]")) == ['{"fare": 2}', '{"fare": 3}']
    assert values(run("tail", "rides", "--grep", "fare", "--key", "k0", "--limit", "1")) == ['{"fare": 0}']
    assert run("tail", "rides", "--key", "nobody").stdout == ""


def test_events_beyond_one_batch_are_chosen_too(run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventsql_orchestration.cli.events._BATCH", 3)
    platform.registry.register_topic(Topic("many"))
    platform.publisher.publish_all([Publication("many", b"%d" % number) for number in range(20)])
    platform.transfer.run_once()
    assert values(run("tail", "many", "--grep", "^1[0-9]$")) == [str(number) for number in range(10, 20)]
    assert values(run("tail", "many", "--grep", "9$", "--limit", "2")) == ["9", "19"]


def test_events_as_csv_and_as_values(run: Run, rides: EventSQL) -> None:
    read = list(csv.DictReader(io.StringIO(run("tail", "rides", "--format", "csv").stdout)))
    assert [(each["offset"], each["key"], each["value"], each["encoding"]) for each in read[-2:]] == [
        (str(json.loads(line)["offset"]), json.loads(line)["key"] or "", json.loads(line)["value"], encoding)
        for line, encoding in zip(run("tail", "rides").stdout.splitlines()[-2:], ["", "base64"], strict=True)
    ]
    written = run("tail", "rides", "--format", "value").stdout_bytes
    assert written == b'{"fare": 0}\n{"fare": 1}\n{"fare": 2}\n{"fare": 3}\n\xff\n'
    none = ("tail", "rides", "--key", "of no ride", "--format")
    (header,) = run(*none, "csv").stdout.splitlines()
    assert header.split(",") == [*read[0]]
    assert run(*none, "value").stdout == run(*none, "json").stdout == ""


def test_lag_as_csv_has_the_columns_of_the_json(run: Run, rides: EventSQL) -> None:
    for further in ((), ("--totals",)):
        objects = json.loads(run("lag", "rides", "--format", "json", *further).stdout)
        read = list(csv.DictReader(io.StringIO(run("lag", "rides", "--format", "csv", *further).stdout)))
        assert [[*each] for each in read] == [[*each] for each in objects]
        assert [(each["consumer"], each["events"]) for each in read] == [
            (each["consumer"], str(each["events"])) for each in objects
        ]
    run("topic", "create", "empty")
    (header,) = run("lag", "empty", "--format", "csv").stdout.splitlines()
    assert header.split(",") == [*json.loads(run("lag", "rides", "--json").stdout)[0]]
    assert run("lag", "--format", "csv", "--json").exit_code == 2


def test_csv_gives_back_any_text(run: Run, platform: EventSQL) -> None:
    texts = ["a\rb", "a\r\nb", 'a"b,c', "=1+1", " "]
    platform.registry.register_topic(Topic("texts"))
    platform.publisher.publish_all([Publication("texts", text.encode(), key=text) for text in texts])
    platform.transfer.run_once()
    written = run("tail", "texts", "--format", "csv").stdout_bytes
    read = list(csv.DictReader(io.StringIO(written.decode(), newline="")))
    assert [each["value"] for each in read] == [each["key"] for each in read] == texts


def test_a_row_is_one_line_and_obeys_no_text() -> None:
    assert cell("first\nsecond\r\nthird\tend") == "first second third\\u0009end"
    assert cell("\x1b[31mred\x9b") == "\\u001b[31mred\\u009b"
    assert cell("paid\u202e001") == "paid\\u202e001"


@pytest.mark.parametrize("options", [(), ("--debug",)])
def test_a_message_obeys_no_text(run: Run, rides: EventSQL, options: tuple[str, ...]) -> None:
    def fail(*_: object) -> None:
        raise ValueError("\x1b]0;title\x07 \x9b31m \u202e")

    rides.registry.register_consumer(Consumer("prices", "ledger", partitioned=True), max_attempts=1)
    rides.consumers.consume_once("prices", "ledger", fail)
    told = run(*options, "consume", "prices", "ledger").stderr
    assert not set("\x1b\x07\x9b\u202e") & set(told)
    assert r"\u001b]0;title\u0007 \u009b31m \u202e" in told


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_obeys_no_csv_and_a_file_has_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], terminal: bool
) -> None:
    monkeypatch.setattr(output, "stdout_is_terminal", lambda: terminal)
    output.write_csv([{"value": "\x1b[2J\nend"}], ["value"], header=False)
    assert capsysbinary.readouterr().out == (b'"\\u001b[2J\nend"\n' if terminal else b'"\x1b[2J\nend"\n')


def test_a_dead_letter_is_shown_and_not_obeyed(run: Run, rides: EventSQL) -> None:
    rides.registry.register_topic(Topic("prices_dlt"))
    rides.publisher.publish(Publication("prices_dlt", b"\x1b[2J\tvalue\n", metadata={"\x1b]0;name\x07": "\x9b31m"}))
    rides.transfer.run_once()
    shown = run("dlt", "show", "prices", 1).stdout
    assert not set("\x1b\x07\x9b") & set(shown)
    assert "\\u001b[2J\tvalue\n" in shown
    assert r"\u001b]0;name\u0007  \u009b31m" in shown


def test_the_failure_of_several_lines_stays_in_its_row(run: Run, rides: EventSQL) -> None:
    def fail(*_: object) -> None:
        raise ValueError("first\nsecond")

    rides.consumers.consume_once("prices", "ledger", fail)
    (row,) = [line for line in run("lag", "prices").stdout.splitlines() if line.startswith("prices")]
    assert "first second" in row


def test_quiet_says_only_what_is_wrong(run: Run, rides: EventSQL) -> None:
    assert run("--quiet", "topic", "create", "orders").stderr == ""
    assert run("-q", "topic", "list", "--json").stdout.count('"topic"') == 3
    assert run("--quiet", "topic", "describe", "nowhere").stderr.startswith("eventsql: topic 'nowhere' does not exist")
    assert run("topic", "create", "orders").stderr != ""


def test_quiet_draws_no_progress_on_a_terminal(run: Run, rides: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert not progress_bar().disable
    run("-q", "lag")
    assert progress_bar().disable
    run("lag")
    assert not progress_bar().disable
