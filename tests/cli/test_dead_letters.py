"""`eventsql dlt`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest

from eventsql_orchestration import Connection, Consumer, Event, EventSQL, Publication, Topic
from tests.cli.conftest import Run
from tests.cli.mailer import TOPIC, fail, prepare, prepare_dead_letter

pytestmark = pytest.mark.prepared.with_args(prepare_dead_letter)


def test_dead_letters_are_listed_and_shown(run: Run) -> None:
    (listed,) = json.loads(run("dlt", "list", TOPIC, "--json").stdout)
    assert (listed["offset"], listed["value"], listed["key"], listed["redriven"]) == (1, '{"id": 1}', "42", False)
    assert listed["metadata"]["dlt_consumer"] == "mailer"
    table = run("dlt", "list", TOPIC).stdout
    assert "ValueError" in table
    assert "no such account" in table
    shown = run("dlt", "show", TOPIC, 1)
    assert shown.stdout.endswith('\n\n{"id": 1}\n')
    assert "ValueError" in shown.stdout
    assert json.loads(run("dlt", "show", TOPIC, 1, "--json").stdout) == listed


@pytest.mark.parametrize("zone", ["Etc/GMT-14", "Etc/GMT+12"])
def test_a_dead_letter_with_a_time_that_python_lacks_is_shown_in_every_zone(
    run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    """As another program may write it: `0001-01-01` is the time zero of Go."""
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_created_at) "
            "SELECT %s, -1, '', '{}', time FROM unnest('{-infinity,0001-01-01Z,infinity}'::timestamptz[]) time",
            [f"{TOPIC}_dlt"],
        )
    platform.transfer.run_once()
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert run("dlt", "list", TOPIC).stdout.count("0001-01-0") == 2
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_dead_letter_is_redriven_once(run: Run, platform: EventSQL) -> None:
    result = run("dlt", "redrive", TOPIC, "--execute")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"eventsql: 1 dead letter of topic '{TOPIC}' published again\n"
    assert [event.value for event in platform.reader.read(TOPIC)] == [b'{"id": 1}'] * 2
    assert json.loads(run("dlt", "list", TOPIC, "--json").stdout)[0]["redriven"] is True
    assert "0 dead letters" in run("dlt", "redrive", TOPIC, "--execute").stderr


@pytest.mark.parametrize("command", ["redrive", "dismiss"])
def test_a_dead_letter_that_waits_in_the_buffer_is_settled_too(run: Run, platform: EventSQL, command: str) -> None:
    platform.publisher.publish(Publication(TOPIC, b"second"))
    platform.transfer.run_once()
    platform.consumers.consume_once(TOPIC, "mailer", fail)
    assert platform.buffered() == {f"{TOPIC}_dlt": 1}
    assert "2 dead letters" in run("dlt", command, TOPIC, "--execute").stderr


def test_a_redrive_and_its_plan_say_that_consumers_which_have_handled_the_events_get_them_too(
    run: Run, platform: EventSQL
) -> None:
    assert "note:" not in run("dlt", "redrive", TOPIC).stderr

    def given_up_by(events: Sequence[Event], connection: Connection) -> None:
        seen.extend(event.metadata.get("redriven_consumer") for event in events)

    seen: list[str | None] = []
    platform.registry.register_consumer(Consumer(TOPIC, "ledger", partitioned=True))
    platform.consumers.consume_once(TOPIC, "ledger", given_up_by)

    assert "note: all 2 consumers" in run("dlt", "redrive", TOPIC).stderr
    assert "note: all 2 consumers" in run("dlt", "redrive", TOPIC, "--execute").stderr
    platform.consumers.consume_once(TOPIC, "ledger", given_up_by)
    assert seen == [None, "mailer"]
    assert "note:" not in run("dlt", "redrive", TOPIC).stderr


def test_a_dead_letter_is_dismissed_once(run: Run, platform: EventSQL) -> None:
    none = json.loads(run("dlt", "dismiss", TOPIC, "--key", "other", "--json").stdout)
    assert none == {"dismissed": 0, "executed": False}
    result = run("dlt", "dismiss", TOPIC, "--execute")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"eventsql: 1 dead letter of topic '{TOPIC}' dismissed\n"
    assert [event.value for event in platform.reader.read(TOPIC)] == [b'{"id": 1}']
    (listed,) = json.loads(run("dlt", "list", TOPIC, "--redriven", "--json").stdout)
    assert (listed["redriven"], listed["redriven_at"]) == (False, None)
    assert datetime.fromisoformat(listed["dismissed_at"]).utcoffset() == timedelta(0)
    assert "dismissed" in run("dlt", "show", TOPIC, 1).stdout
    for command in ("redrive", "dismiss"):
        assert "0 dead letters" in run("dlt", command, TOPIC, "--execute").stderr


@pytest.mark.parametrize(
    "command", [["list"], ["redrive"], ["redrive", "--execute"], ["dismiss"], ["dismiss", "--execute"]]
)
def test_a_consumer_that_does_not_exist_is_named_unless_it_has_given_events_up(
    run: Run, platform: EventSQL, command: Sequence[str]
) -> None:
    name, *options = command
    refused = run("dlt", name, TOPIC, "--consumer", "mialer", *options)
    assert refused.exit_code == 1
    assert "'mialer'" in refused.stderr
    platform.registry.register_consumer(Consumer(TOPIC, "ledger", partitioned=True))
    assert run("dlt", name, TOPIC, "--consumer", "ledger", *options).exit_code == 0
    platform.registry.unregister_consumer(TOPIC, "mailer")
    assert run("dlt", name, TOPIC, "--consumer", "mailer", *options).exit_code == 0


def test_the_dead_letters_of_a_consumer_are_listed_after_its_topic_was_deleted(run: Run, platform: EventSQL) -> None:
    platform.registry.unregister_topic(TOPIC, force=True)
    (listed,) = json.loads(run("dlt", "list", TOPIC, "--consumer", "mailer", "--json").stdout)
    assert listed["offset"] == 1
    assert run("dlt", "list", TOPIC, "--consumer", "mialer").exit_code == 1


def test_a_dead_letter_is_shown_with_where_it_comes_from_and_what_became_of_it(run: Run) -> None:
    def fields() -> dict[str, str]:
        lines = [line.split("  ") for line in run("dlt", "show", TOPIC, 1).stdout.splitlines()]
        return {line[0]: line[-1].strip() for line in lines}

    assert fields()["event"] == f"{TOPIC}:0:1"
    assert fields()["dlt_consumer"] == "mailer"
    assert fields()["redriven"] == "-"
    assert json.loads(run("dlt", "show", TOPIC, 1, "--json").stdout)["origin"] == f"{TOPIC}:0:1"
    run("dlt", "redrive", TOPIC, "--execute")
    assert fields()["redriven"] != "-"
    (listed,) = json.loads(run("dlt", "list", TOPIC, "--json").stdout)
    assert datetime.fromisoformat(listed["redriven_at"]).utcoffset() == timedelta(0)


def test_the_value_of_a_dead_letter_that_is_no_text_is_shown_in_hexadecimal(run: Run, platform: EventSQL) -> None:
    platform.publisher.publish(Publication(f"{TOPIC}_dlt", b"\xff\x00\x10"))
    platform.transfer.run_once()
    assert run("dlt", "show", TOPIC, 2).stdout.endswith("\n3 bytes in hexadecimal:\n\nff0010\n")
    assert "mailer" in run("dlt", "list", TOPIC).stdout


def test_a_dead_letter_that_was_erased_says_so(run: Run) -> None:
    assert run("topic", "erase", f"{TOPIC}_dlt", "--key", "42", "--execute").exit_code == 0
    shown = run("dlt", "show", TOPIC, 1)
    assert (shown.exit_code, shown.stdout.endswith("\n\nthe event was erased\n")) == (0, True)


def prepare_dead_letters(platform: EventSQL) -> None:
    """Four of `mailer`, given up in one hour each from midnight on. The consumer `audit` has none."""
    prepare(platform)
    platform.registry.register_consumer(Consumer(TOPIC, "audit"))
    platform.registry.register_topic(Topic(f"{TOPIC}_dlt"))
    platform.publisher.publish_all(
        Publication(TOPIC, b"", key=f"k{number}", metadata={"source": "web" if number < 2 else "app"}, partition=0)
        for number in range(4)
    )
    platform.transfer.run_once()
    while platform.consumers.consume_once(TOPIC, "mailer", fail):
        pass
    platform.transfer.run_once()
    with platform.database.connection() as connection:
        connection.execute(
            "UPDATE eventsql.account_created_dlt_event "
            "SET eql_buffered_at = timestamptz '2026-01-01 00:00Z' + (eql_id - 1) * interval '1 hour'"
        )


with_dead_letters = pytest.mark.prepared.with_args(prepare_dead_letters)

FILTERED: list[tuple[list[object], list[int]]] = [
    ([], [1, 2, 3, 4]),
    (["--consumer", "mailer"], [1, 2, 3, 4]),
    (["--consumer", "audit"], []),
    (["--exception", "ValueError", "--key", "k1"], [2]),
    (["--metadata", "source=app", "--metadata", "dlt_attempts=1"], [3, 4]),
    (["--id", 4, "--id", 1], [1, 4]),
    (["--since", "2026-01-01T02:00:00Z"], [3, 4]),
    (["--until", "2026-01-01T02:00:00+01:00"], [1]),
    (["--limit", 3], [1, 2, 3]),
]
OF_A_RANGE = ["--from", 2, "--to", 3]


def listed(run: Run, *options: object) -> list[int]:
    """The offsets of the dead letters that a command lists."""
    result = run("dlt", "list", TOPIC, "--json", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    return [letter["offset"] for letter in json.loads(result.stdout)]


@with_dead_letters
def test_dead_letters_are_listed_and_planned_to_be_redriven_by_each_filter(run: Run) -> None:
    for options, expected in FILTERED:
        assert listed(run, *options) == expected
        plan = json.loads(run("dlt", "redrive", TOPIC, "--json", *options).stdout)
        assert (plan["redriven_before"], plan["redrives"]) == (0, len(expected))


@with_dead_letters
def test_the_dead_letters_that_are_listed_are_those_that_are_redriven(run: Run, platform: EventSQL) -> None:
    assert listed(run, *OF_A_RANGE) == listed(run, *OF_A_RANGE, "--not-redriven") == [2, 3]
    plan = json.loads(run("dlt", "redrive", TOPIC, "--json", *OF_A_RANGE).stdout)
    assert (plan["redriven_before"], plan["redrives"]) == (0, 2)
    assert run("dlt", "redrive", TOPIC, *OF_A_RANGE).stdout.splitlines()[-1].split()[-1] == "2"
    assert platform.reader.end(TOPIC) == 4
    assert listed(run, *OF_A_RANGE, "--redriven") == []
    done = json.loads(run("dlt", "redrive", TOPIC, "--execute", "--json", *OF_A_RANGE).stdout)
    assert done == {"redriven": 2, "executed": True}
    events = platform.reader.read(TOPIC, after=4)
    assert [event.metadata["redriven_from"] for event in events] == [f"{TOPIC}_dlt:{letter}" for letter in (2, 3)]
    assert listed(run, *OF_A_RANGE, "--redriven") == [2, 3]


@with_dead_letters
def test_dead_letters_are_redriven_again_when_that_is_asked_for(run: Run, platform: EventSQL) -> None:
    run("dlt", "redrive", TOPIC, "--id", 2, "--execute")
    plan = run("dlt", "redrive", TOPIC, "--again", "--json").stdout
    assert json.loads(plan) == {"letters": 4, "redriven_before": 1, "redrives": 4, "executed": False}
    assert "4 dead letters" in run("dlt", "redrive", TOPIC, "--again", "--execute").stderr
    assert platform.reader.count(TOPIC, after=4) == 5
