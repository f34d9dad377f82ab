"""`eventsql top`: rates, lag and what stands still, on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import re
import shlex
import signal
from datetime import datetime

import pytest
from rich.console import Console

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.cli.top import Screens, drawn
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.metrics.figures import FiguresReader
from eventsql_orchestration.queue import Queue
from tests.cli.conftest import Run, Start
from tests.cli.terminals import Terminal
from tests.fixtures import Until
from tests.waiting import PATIENCE


def prepare(platform: EventSQL) -> None:
    """Make topic `rides` with 4 events in two partitions, and 1 in the buffer, for `ledger` and the paused `payout`."""
    platform.registry.register_topic(Topic("rides", partitions=2)).register_topic(Topic("empty"))
    platform.registry.register_consumer(Consumer("rides", "ledger", partitioned=True))
    platform.registry.register_consumer(Consumer("rides", "payout"))
    platform.publisher.publish_all([Publication("rides", b"%d" % each, partition=each % 2) for each in range(4)])
    platform.transfer.run_once()
    platform.publisher.publish(Publication("rides", b"4", partition=0))
    platform.registry.pause("rides", "payout")


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="rides")


@pytest.fixture
def rides(platform: EventSQL) -> EventSQL:
    return platform


def test_json_has_a_line_for_each_refresh(run: Run, rides: EventSQL) -> None:
    done = run("top", "--json", "--interval", "0.1", "--count", "2")
    assert done.exit_code == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    topics = {each["topic"]: each for each in first["topics"]}
    assert (topics["rides"]["offset"], topics["rides"]["buffered"], topics["rides"]["published_rate"]) == (4, 1, None)
    assert {each["published_rate"] for each in second["topics"]} == {0}
    consumers = {each["consumer"]: each for each in first["consumers"]}
    assert (consumers["ledger"]["events"], consumers["ledger"]["behind"], consumers["ledger"]["partitions"]) == (
        5,
        2,
        2,
    )
    assert consumers["payout"]["causes"] == {"paused": 1}
    assert [(each["consumer"], each["partition"], each["cause"]) for each in first["stopped"]] == [
        ("payout", -1, "paused")
    ]
    assert datetime.fromisoformat(first["time"]).tzinfo is not None


def test_queues_with_messages_are_shown(run: Run, rides: EventSQL) -> None:
    Queue(rides, "idle").definition()
    commands = Queue(rides, "commands")
    commands.send_all([b"1", b"2", b"3"])
    commands.receive()
    done = run("top", "--json", "--count", "1")
    (queue,) = json.loads(done.stdout)["queues"]
    assert queue.pop("seconds") >= 0
    assert queue == {"queue": "commands", "visible": 2, "in_flight": 1, "delayed": 0, "blocked": 0, "dead": 0}
    assert "commands" in run("top", "--count", "1").stdout
    assert json.loads(run("top", "rides", "--json", "--count", "1").stdout)["queues"] == []
    assert "commands" in run("lag").stdout


def test_doctor_names_queues_that_nobody_receives_from_and_dead_letters(run: Run, platform: EventSQL) -> None:
    commands = Queue(platform, "my commands", max_receives=1, dead_letters="given_up")
    commands.send_all([b"1", b"2"])
    commands.release(commands.receive()[0], reason="out of paper")
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.queue_message SET eql_visible_at = now() - interval '1 day'")
    found = [each for each in json.loads(run("doctor", "--json").stdout)["findings"] if each["check"] == "queues"]
    assert [(each["status"], "my commands" in each["message"]) for each in found] == [("warning", True)]
    (last,) = commands.receive(max_messages=2)
    commands.acknowledge(last)
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.queue_message SET eql_visible_at = now() - interval '1 day'")
    (found,) = [each for each in json.loads(run("doctor", "--json").stdout)["findings"] if each["check"] == "queues"]
    assert "dead letter" in found["message"]
    assert "eventsql queue peek given_up" in found["remedy"]
    assert found["remedy"].endswith("eventsql queue redrive --execute 'my commands'")
    assert "out of paper" in run(*shlex.split(found["remedy"].partition(" says")[0])[1:]).stdout


def test_a_pipe_gets_whole_tables(run: Run, rides: EventSQL) -> None:
    rides.registry.register_consumer(Consumer("rides", "stuck", partitioned=True), max_attempts=1)

    def fail(*_: object) -> None:
        raise RuntimeError("the first line\nand the second " + "x" * 300)

    rides.consumers.consume_once("rides", "stuck", fail, partition=0)
    done = run("top", "rides", "--count", "1")
    assert done.exit_code == 0, done.stderr
    title, *_ = done.stdout.splitlines()
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  1 topic  1 event in the buffer  lag 15 events  2 partitions standing still", title
    )
    [stuck] = [line for line in done.stdout.splitlines() if "blocked" in line and "event 1 failed" in line]
    assert "the first line and the second " + "x" * 100 in stuck
    assert "empty" not in done.stdout
    assert "\x1b" not in done.stdout


def test_rates_are_events_per_second_between_two_screens(rides: EventSQL) -> None:
    now = [0.0]
    screens = Screens(rides, "rides", clock=lambda: now[0])
    screens.next()
    now[0] = 2.0
    rides.publisher.publish_all([Publication("rides", b"x", partition=0) for _ in range(10)])
    assert rides.consumers.consume_once("rides", "ledger", lambda *_: None, partition=1) == 2
    screen = screens.next()
    [topic] = screen.tables["topics"]
    assert topic["published_rate"] == 5.0
    consumers = screen.tables["consumers"]
    assert {row["consumer"]: row["consumed_rate"] for row in consumers} == {"ledger": 1.0, "payout": 0.0}
    assert len(topic["trend"]) == 2


def test_a_topic_made_anew_has_no_rate_yet(rides: EventSQL) -> None:
    screens = Screens(rides, None)
    screens.next()
    rides.registry.unregister_topic("rides", force=True)
    rides.registry.register_topic(Topic("rides"))
    [row] = [row for row in screens.next().tables["topics"] if row["topic"] == "rides"]
    assert (row["published_rate"], row["offset"]) == (None, 0)


def test_a_low_screen_says_how_many_rows_it_leaves_out(platform: EventSQL) -> None:
    for number in range(12):
        platform.registry.register_topic(Topic(f"topic_{number:02}"))
        platform.registry.register_consumer(Consumer(f"topic_{number:02}", "all"))
    screen = Screens(platform, None).next()
    for height in (13, 24, 40):
        console = Console(width=120, height=height, force_terminal=False)
        with console.capture() as capture:
            console.print(drawn(screen, height))
        lines = capture.get().splitlines()
        assert len(lines) <= height
        left_out = [int(found) for found in re.findall(r"… and (\d+) more", capture.get())]
        rows = len(re.findall(r"^topic_", capture.get(), re.MULTILINE))
        assert rows + sum(left_out) == 24


def test_a_screen_of_80_columns_leaves_names_whole(platform: EventSQL) -> None:
    name = "ride_request_accepted_by_driver"
    platform.registry.register_topic(Topic(name)).register_consumer(Consumer(name, "mailer"))
    platform.publisher.publish_all([Publication(name, b"1")] * 2_000)
    platform.transfer.run_once()
    screens = Screens(platform, None)
    screens.next()
    for width, trends in ((80, 0), (140, 2)):
        console = Console(width=width, force_terminal=False)
        with console.capture() as capture:
            console.print(drawn(screens.next(), 24))
        assert len(re.findall(rf"^{name} ", capture.get(), re.MULTILINE)) == 2
        assert capture.get().count("trend") == trends


def test_a_database_that_restarts_is_waited_for(rides: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    screens, read = Screens(rides, None), FiguresReader.read

    def refuse(_: FiguresReader) -> None:
        raise DatabaseUnavailableError("it restarts")

    monkeypatch.setattr(FiguresReader, "read", refuse)
    with pytest.raises(DatabaseUnavailableError):
        screens.next()
    monkeypatch.setattr(FiguresReader, "read", read)
    screens.next()
    monkeypatch.setattr(FiguresReader, "read", refuse)
    assert screens.next().down


def test_a_topic_that_is_not_there_is_named(run: Run, rides: EventSQL) -> None:
    refused = run("top", "nowhere", "--count", "1")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "'nowhere'" in refused.stderr


def test_a_terminal_is_refreshed_until_an_interrupt(
    rides: EventSQL, start: Start, terminal: Terminal, until: Until
) -> None:
    process = start("top", "--interval", 0.1, stdout=terminal.descriptor)
    until(lambda: terminal.shown.count(b"stands still") >= 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 130
    seen = terminal.close()
    assert b"\x1b[?1049h" in seen
    assert b"\x1b[?1049l" in seen, "the terminal did not get its own screen back"
    assert "▁".encode() in seen
