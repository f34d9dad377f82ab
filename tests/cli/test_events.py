"""`eventsql tail` and `eventsql consume`."""

from __future__ import annotations

import base64
import json
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.cli.output import EventWriter
from eventsql_orchestration.storage import reading
from tests.cli.conftest import Run, Start, json_lines
from tests.waiting import PATIENCE

TOPIC = "account_created"


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic(TOPIC, partitions=2))
    platform.registry.register_consumer(Consumer(TOPIC, "mailer", partitioned=True))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def publish(platform: EventSQL) -> Callable[..., None]:
    def publish_and_transfer(*values: bytes | int, partition: int = 0, **fields: Any) -> None:
        platform.publisher.publish_all(
            Publication(TOPIC, value if isinstance(value, bytes) else b"%d" % value, partition=partition, **fields)
            for value in values
        )
        platform.transfer.run_once()

    return publish_and_transfer


@pytest.fixture
def consumer() -> str:
    return "mailer"


def values(result: Result) -> list[str]:
    return [event["value"] for event in json_lines(result)]


def last_values(process: subprocess.Popen[bytes]) -> list[str]:
    """What a process prints until it ends by itself."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, b"")
    return [json.loads(line)["value"] for line in output.splitlines()]


def read_a_line(process: subprocess.Popen[bytes]) -> None:
    """Read a line, and no more. The process ends quietly."""
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""


# tail


def test_an_event_is_printed_with_all_that_it_has(run: Run, publish: Callable[..., None]) -> None:
    publish('{"é": 1}'.encode(), key="42", metadata={"source": "web"}, partition=1)
    (event,) = json_lines(run("tail", TOPIC))
    published = datetime.fromisoformat(event.pop("timestamp"))
    assert published.utcoffset() is not None
    assert event == {
        "topic": TOPIC, "offset": 1, "partition": 1, "key": "42", "value": '{"é": 1}', "metadata": {"source": "web"},
    }  # fmt: skip


def test_large_events_are_read_and_printed_in_parts(
    run: Run, publish: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_BYTES", 200)
    parts: list[int] = []
    write = EventWriter.write

    def noting(self: EventWriter, events: Sequence[Event], *, shard: str | None) -> None:
        parts.append(len(events))
        write(self, events, shard=shard)

    monkeypatch.setattr(EventWriter, "write", noting)
    for _ in range(3):
        publish(b"v" * 110)
    assert len(values(run("tail", TOPIC))) == 3
    assert parts == [2, 1]


def test_a_value_that_is_no_text_is_printed_as_base64(run: Run, publish: Callable[..., None]) -> None:
    publish(b"\xff\x00")
    (event,) = json_lines(run("tail", TOPIC))
    assert event["encoding"] == "base64"
    assert base64.b64decode(event["value"]) == b"\xff\x00"


def test_an_event_is_one_line_whatever_its_value(run: Run, publish: Callable[..., None]) -> None:
    publish(b"a\nb\r\n\x1b[31m\x00")
    result = run("tail", TOPIC)
    assert values(result) == ["a\nb\r\n\x1b[31m\x00"]
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["1", "2", "3", "4"]),
        (["--from", "earliest"], ["1", "2", "3", "4"]),
        (["--from", "latest"], []),
        (["--from", 3], ["3", "4"]),
        (["--from", 0], ["1", "2", "3", "4"]),
        (["--from", 99], []),
        (["--limit", 3], ["1", "2", "3"]),
        (["--partition", 1], ["3", "4"]),
        (["--partition", 1, "--limit", 1], ["3"]),
    ],
)
def test_tail_prints_what_is_asked_for(
    run: Run, publish: Callable[..., None], arguments: list[object], expected: list[str]
) -> None:
    publish(1, 2)
    publish(3, 4, partition=1)
    result = run("tail", TOPIC, *arguments)
    assert result.exit_code == 0
    assert values(result) == expected
    assert result.stderr == ""


def test_tail_prints_a_former_partition_and_refuses_a_partition_that_never_was(
    run: Run, publish: Callable[..., None], platform: EventSQL
) -> None:
    publish(1, partition=1)
    platform.repartitioner.repartition(TOPIC, 1)
    assert values(run("tail", TOPIC, "--partition", 1)) == ["1"]
    assert "topic 'account_created' has partitions 0 to 1" in run("tail", TOPIC, "--partition", 2).stderr


def test_tail_begins_at_a_time_or_so_long_ago(run: Run, publish: Callable[..., None], platform: EventSQL) -> None:
    publish(1, 2)
    publish(3, 4, partition=1)
    third = platform.reader.read(TOPIC)[2].created_at
    assert values(run("tail", TOPIC, "--from", third.isoformat())) == ["3", "4"]
    assert values(run("tail", TOPIC, "--from", third.isoformat(), "--partition", 0)) == []
    assert values(run("tail", TOPIC, "--from", "1h")) == ["1", "2", "3", "4"]
    assert values(run("tail", TOPIC, "--from", "9000-01-01T00:00:00Z")) == []


def test_tail_waits_for_an_offset_that_is_yet_to_come(start: Start, publish: Callable[..., None]) -> None:
    publish(1)
    process = start("tail", TOPIC, "--from", 3, "--follow", "--limit", 1)
    publish(2, 3, 4)
    output, _ = process.communicate(timeout=60)
    assert json.loads(output)["value"] == "3"


def test_tail_commits_nothing(run: Run, publish: Callable[..., None], consumer: str, platform: EventSQL) -> None:
    publish(1)
    run("tail", TOPIC)
    assert [state.last_event_id for state in platform.registry.consumer(TOPIC, consumer)] == [0, 0]


def test_following_begins_with_what_comes_and_ends_at_its_maximum(
    start: Start, publish: Callable[..., None], run: Run
) -> None:
    publish(1)
    process = start("tail", TOPIC, "--from", "latest", "--follow", "--limit", 2)
    assert process.stdout is not None
    # What is published before the program has found the end of the log is not what comes from then on.
    while process.poll() is None:
        publish(2)
        select.select([process.stdout], [], [], 0.2)
    assert last_values(process) == ["2", "2"]


def test_ctrl_c_ends_following_cleanly(start: Start, publish: Callable[..., None]) -> None:
    publish(1)
    process = start("tail", TOPIC, "--from", "earliest", "--follow")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["value"] == "1"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output, errors) == (130, b"", b"")


def test_a_reader_that_has_had_enough_ends_tail_quietly(start: Start, publish: Callable[..., None]) -> None:
    publish(*[b"x" * 1_000] * 3_000)
    read_a_line(start("tail", TOPIC))


# consume


def test_consume_prints_what_is_new_and_commits_it(
    run: Run, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    publish(1, 2)
    publish(3, partition=1)
    first = run("consume", TOPIC, consumer)
    assert (first.exit_code, first.stderr) == (0, "")
    assert values(first) == ["1", "2", "3"]
    assert sum(lag.events for lag in platform.lag(TOPIC)) == 0
    assert run("consume", TOPIC, consumer).stdout == ""
    publish(4)
    assert values(run("consume", TOPIC, consumer)) == ["4"]


def test_consume_goes_on_over_many_batches(run: Run, publish: Callable[..., None], consumer: str) -> None:
    publish(*range(2_500))
    publish(*range(2_500, 3_000), partition=1)
    assert sorted(map(int, values(run("consume", TOPIC, consumer)))) == list(range(3_000))


def test_consume_ends_at_its_maximum(run: Run, publish: Callable[..., None], consumer: str, platform: EventSQL) -> None:
    publish(1, 2, 3)
    publish(4, 5, partition=1)
    assert values(run("consume", TOPIC, consumer, "--limit", 4)) == ["1", "2", "3", "4"]
    assert sum(lag.events for lag in platform.lag(TOPIC)) == 1
    assert values(run("consume", TOPIC, consumer, "--limit", 4)) == ["5"]


def test_consume_takes_one_partition_alone(
    run: Run, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    platform.registry.register_consumer(Consumer(TOPIC, "whole"))
    publish(1)
    publish(2, partition=1)
    assert values(run("consume", TOPIC, consumer, "--partition", 1)) == ["2"]
    assert values(run("consume", TOPIC, consumer)) == ["1"]
    assert values(run("consume", TOPIC, "whole")) == ["1", "2"]


def test_events_that_a_paused_consumer_cannot_get_are_a_failure(
    run: Run, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    platform.registry.pause(TOPIC, consumer)
    assert run("consume", TOPIC, consumer).exit_code == 0
    publish(1)
    result = run("consume", TOPIC, consumer)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "eventsql: 1 event not consumed: consumer 'mailer' of topic 'account_created' partition 0 is paused, "
        "resume it with `eventsql consumer resume account_created mailer`\n"
    )


def test_events_that_another_has_claimed_are_left_to_it(
    run: Run, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    publish(1)
    publish(2, partition=1)
    platform.claims.claim(TOPIC, consumer, 0, owner="run 7")
    result = run("consume", TOPIC, consumer)
    assert [event["value"] for event in json_lines(result, exit_code=1)] == ["2"]
    assert "partition 0 is leased, by run 7" in result.stderr


def test_a_partition_that_another_consumption_has_locked_is_a_failure(
    run: Run, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    publish(1)
    with platform.database.transaction() as connection:
        connection.execute("SELECT FROM eventsql.consumer FOR UPDATE")
        result = run("consume", TOPIC, consumer)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "another consumption of consumer 'mailer' has its partition" in result.stderr


@pytest.mark.parametrize("command", [("consume", TOPIC, "mailer"), ("tail", TOPIC)], ids=lambda command: command[0])
def test_events_that_are_not_transferred_yet_are_mentioned(
    run: Run, platform: EventSQL, command: tuple[str, ...]
) -> None:
    platform.publisher.publish(Publication(TOPIC, b"1"))
    result = run(*command)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "eventsql: 1 event not transferred yet: `eventsql transfer --once` moves them\n"


@pytest.mark.parametrize("command", [("consume", TOPIC, "mailer"), ("tail", TOPIC)], ids=lambda command: command[0])
def test_following_says_that_nothing_transfers_the_events(
    start: Start, platform: EventSQL, consumer: str, command: tuple[str, ...]
) -> None:
    platform.publisher.publish(Publication(TOPIC, b"1"))
    process = start(*command, "--follow", "--limit", 1)
    assert process.stderr is not None
    assert b"not transferred yet: `eventsql transfer` moves them" in process.stderr.readline()
    platform.transfer.run_once()
    assert last_values(process) == ["1"]


def test_following_a_paused_consumer_says_so_once(
    start: Start, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    publish(1)
    platform.registry.pause(TOPIC, consumer)
    process = start("consume", TOPIC, consumer, "--follow", "--limit", 1)
    assert process.stderr is not None
    assert b"is paused, resume it" in process.stderr.readline()
    platform.registry.resume(TOPIC, consumer)
    assert last_values(process) == ["1"]


def test_ctrl_c_keeps_what_was_consumed(
    start: Start, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    publish(1)
    process = start("consume", TOPIC, consumer, "--follow")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, b"")
    # The signal may have come between the printing and the commit.
    assert platform.registry.consumer(TOPIC, consumer)[0].consumed_events in (0, 1)
    assert platform.registry.consumer(TOPIC, consumer)[0].failed_event_id is None


def test_a_batch_that_nobody_read_is_not_committed_and_has_not_failed(
    start: Start, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    publish(*[b"x" * 1_000] * 2_000)
    read_a_line(start("consume", TOPIC, consumer))
    state = platform.registry.consumer(TOPIC, consumer)[0]
    assert (state.last_event_id, state.attempts, state.failed_event_id) == (0, 0, None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_under_standard_output_fails_and_commits_nothing(
    start: Start, publish: Callable[..., None], consumer: str, platform: EventSQL
) -> None:
    publish(1)
    with Path("/dev/full").open("wb") as full:
        process = start("consume", TOPIC, consumer, stdout=full)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors == b"eventsql: standard output cannot be written: No space left on device\n"
    assert platform.registry.consumer(TOPIC, consumer)[0].last_event_id == 0
    assert platform.registry.consumer(TOPIC, consumer)[0].attempts == 0
