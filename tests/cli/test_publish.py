"""`eventsql publish`: files and streams are published, and bad ones are refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventsql_orchestration import Event, EventSQL, Topic
from tests.cli.conftest import Run, Start, one_line
from tests.cli.terminals import Terminal
from tests.forms import check_order
from tests.waiting import PATIENCE, wait_until

Stored = Callable[[str], int]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("account_created", partitions=3))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def topic() -> str:
    return "account_created"


def events(platform: EventSQL, topic: str) -> list[Event]:
    platform.transfer.run_once()
    return platform.reader.read(topic)


# What is published


def test_a_json_line_is_its_events_value_byte_for_byte(
    run: Run, platform: EventSQL, topic: str, directory: Path
) -> None:
    lines = [b'{"id":  1, "name":"\xc3\xa9"}', b'{"id": 2.50}', b"[1,2]", b'"text"', b"1e400", b'{"a":1,"a":2}']
    (directory / "many.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    result = run("publish", topic, "--file", "many.jsonl")
    assert result.exit_code == 0
    assert sorted(event.value for event in events(platform, topic)) == sorted(lines)
    assert result.stdout == ""
    assert "published 6 events to topic 'account_created' in" in result.stderr
    assert "events/s)" in result.stderr


def test_the_transfer_is_part_of_publishing_unless_told_otherwise(run: Run, platform: EventSQL, topic: str) -> None:
    assert run("publish", topic, stdin="1\n").exit_code == 0
    assert platform.reader.count(topic) == 1
    assert run("publish", topic, "--no-transfer", stdin="2\n").exit_code == 0
    assert platform.reader.count(topic) == 1


@pytest.mark.parametrize("name", ["e.jsonl", "e.json", "e.ndjson", "E.JSONL", "e.jsonl.gz", "e.json.gz", "e.ndjson.gz"])
def test_json_lines_go_by_these_endings(run: Run, topic: str, stored: Stored, directory: Path, name: str) -> None:
    content = b'{"id":1}\n{"id":2}'
    (directory / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert run("publish", topic, "--file", name).exit_code == 0
    assert stored(topic) == 2


def test_line_feeds_with_carriage_returns_a_byte_order_mark_and_empty_lines_are_no_part_of_a_value(
    run: Run, platform: EventSQL, topic: str, directory: Path
) -> None:
    (directory / "windows.jsonl").write_bytes(b'\xef\xbb\xbf{"id":1}\r\n\r\n{"id":2}\r\n')
    assert run("publish", topic, "--file", "windows.jsonl").exit_code == 0
    assert sorted(event.value for event in events(platform, topic)) == [b'{"id":1}', b'{"id":2}']


def test_a_key_is_the_fields_value_as_it_is_written(run: Run, platform: EventSQL, topic: str) -> None:
    keys = {
        '"a b"': "a b", "1": "1", "1.50": "1.50", "1e5": "1e5", "12345678901234567890": "12345678901234567890",
        "true": "true", "false": "false", '""': "",
    }  # fmt: skip
    lines = {f'{{"id": {value}}}': key for value, key in keys.items()}
    assert run("publish", topic, "--key", "id", stdin="\n".join(lines)).exit_code == 0
    assert {event.value.decode(): event.key for event in events(platform, topic)} == lines


def test_metadata_and_partition_go_to_every_event(run: Run, platform: EventSQL, topic: str) -> None:
    arguments = ["--metadata", "source=web", "--metadata", "note=a=b", "--metadata", "empty=", "--partition", 2]
    assert run("publish", topic, *arguments, stdin="1\n2\n").exit_code == 0
    expected = ({"source": "web", "note": "a=b", "empty": ""}, 2)
    assert [(event.metadata, event.partition) for event in events(platform, topic)] == [expected, expected]


def test_csv_rows_become_json_objects(run: Run, platform: EventSQL, topic: str, directory: Path) -> None:
    (directory / "e.csv").write_text(
        '\ufeffid,name\r\n1,é\r\n\r\n2,"two\nlines, ""quoted"""\r\n3,\r\n', encoding="utf-8", newline=""
    )
    assert run("publish", topic, "--file", "e.csv", "--key", "id").exit_code == 0
    found = events(platform, topic)
    assert [json.loads(event.value) for event in found] == [
        {"id": "1", "name": "é"},
        {"id": "2", "name": 'two\nlines, "quoted"'},
        {"id": "3", "name": ""},
    ]
    assert [event.key for event in found] == ["1", "2", "3"]


def test_csv_fields_have_the_types_that_are_named(run: Run, platform: EventSQL, topic: str, directory: Path) -> None:
    (directory / "e.csv").write_text(
        'id;price;paid;lines;note\n1; 1.10 ;true;"[{""sku"": 7}]";007\n123456789012345678901;-2e3;f;;\n',
        encoding="utf-8",
    )
    types = ["id=integer", "price=number", "paid=boolean", "lines=json"]
    arguments = [word for each in types for word in ("--type", each)]
    done = run("publish", topic, "--file", "e.csv", "--delimiter", ";", *arguments, "--key", "id")
    assert done.exit_code == 0, done.stderr
    first, second = events(platform, topic)
    assert first.value == b'{"id": 1, "price": 1.10, "paid": true, "lines": [{"sku": 7}], "note": "007"}'
    assert json.loads(second.value) == {
        "id": 123456789012345678901, "price": -2000.0, "paid": False, "lines": None, "note": "",
    }  # fmt: skip
    assert [first.key, second.key] == ["1", "123456789012345678901"]


def test_fields_are_separated_by_tabs(run: Run, platform: EventSQL, topic: str, directory: Path) -> None:
    for name in ("e.tsv", "e.csv"):
        (directory / name).write_text("id\tname\n1\ta,b\n")
    assert run("publish", topic, "--file", "e.tsv").exit_code == 0
    assert run("publish", topic, "--file", "e.csv", "--delimiter", "tab").exit_code == 0
    assert [json.loads(event.value) for event in events(platform, topic)] == [{"id": "1", "name": "a,b"}] * 2


@pytest.mark.parametrize(
    "case",
    [
        ("integer", "1.0", "not an integer: '1.0'"),
        ("integer", "007", "not an integer: '007'"),
        ("integer", "\u0661", "not an integer: '\u0661'"),
        ("number", "NaN", "not a number: 'NaN'"),
        ("number", "1_000", "not a number: '1_000'"),
        ("boolean", "yes", "neither true nor false: 'yes'"),
        ("json", "1}, {", "not JSON: '1}, {'"),
    ],
)
def test_a_field_of_another_type_is_a_bad_line(
    run: Run, topic: str, stored: Stored, directory: Path, case: tuple[str, str, str]
) -> None:
    kind, text, reason = case
    (directory / "e.tsv").write_text(f"id\tname\n1\t\n2\t{text}\n", encoding="utf-8")
    result = run("publish", topic, "--file", "e.tsv", "--type", f"name={kind}")
    assert result.exit_code == 1
    assert one_line(result) == f"e.tsv, line 3: field 'name' is {reason}; nothing was published"
    assert stored(topic) == 0


@pytest.mark.parametrize(
    "case",
    [
        ("e.csv", "--delimiter", ";;"),
        ("e.csv", "--delimiter", '"'),
        ("e.csv", "--type", "id=date"),
        ("e.csv", "--type", "other=integer"),
        ("e.jsonl", "--delimiter", ";"),
        ("e.jsonl", "--type", "id=integer"),
    ],
)
def test_a_form_that_does_not_fit_the_file_is_one_line(
    run: Run, topic: str, stored: Stored, directory: Path, case: tuple[str, str, str]
) -> None:
    name, *arguments = case
    (directory / name).write_text("id\n1\n")
    result = run("publish", topic, "--file", name, *arguments)
    # Only the file shows that it lacks a field.
    assert result.exit_code == (1 if arguments[1] == "other=integer" else 2)
    assert one_line(result)
    assert stored(topic) == 0


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it has no types

    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_rows_become_json_objects(run: Run, platform: EventSQL, topic: str, directory: Path) -> None:
    path = parquet(
        directory / "e.parquet",
        {
            "id": [1, 2],
            "price": [Decimal("1.50"), None],
            "at": [datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), None],
            "raw": [b"\xff", b""],
            "tags": [["a"], []],
            "route": [{"from": "x"}, {"from": None}],
        },
    )
    assert run("publish", topic, "--file", path, "--key", "id").exit_code == 0
    found = events(platform, topic)
    assert [json.loads(event.value) for event in found] == [
        {"id": 1, "price": "1.50", "at": "2024-01-02T03:04:05+00:00", "raw": "/w==", "tags": ["a"],
         "route": {"from": "x"}},
        {"id": 2, "price": None, "at": None, "raw": "", "tags": [], "route": {"from": None}},
    ]  # fmt: skip
    assert [event.key for event in found] == ["1", "2"]


def test_a_parquet_row_that_json_cannot_hold_is_named(run: Run, topic: str, stored: Stored, directory: Path) -> None:
    path = parquet(directory / "e.parquet", {"x": [1.0, float("nan"), 2.0]})
    result = run("publish", topic, "--file", path)
    assert result.exit_code == 1
    assert ", row 2: not a JSON object" in one_line(result)
    assert stored(topic) == 0
    result = run("publish", topic, "--file", path, "--on-bad-line", "skip")
    assert result.exit_code == 0
    assert stored(topic) == 2


def test_parquet_without_pyarrow_names_the_extra(
    run: Run, topic: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "e.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("publish", topic, "--file", "e.parquet")
    assert result.exit_code == 1
    assert "pip install 'eventsql-orchestration[spark]'" in one_line(result)


def test_an_empty_file_publishes_nothing(run: Run, topic: str, stored: Stored, directory: Path) -> None:
    (directory / "empty.jsonl").touch()
    result = run("publish", topic, "--file", "empty.jsonl")
    assert result.exit_code == 0
    assert "published 0 events" in result.stderr
    assert stored(topic) == 0


def test_the_summary_is_also_there_as_json(run: Run, topic: str) -> None:
    result = run("publish", topic, "--json", stdin="1\n2\n")
    summary = json.loads(result.stdout)
    assert summary["topic"] == topic
    assert (summary["published"], summary["skipped"]) == (2, 0)
    assert summary["seconds"] >= 0
    assert result.stderr == ""


# Bad lines


BAD_LINES = {
    "a value over several lines": (b"[1,", "not JSON: Expecting value at column 4, where the line ends"),
    "an unquoted word": (b"nonsense", "not JSON: Expecting value at column 1"),
    "two values": (b'{"id":3} {"id":4}', "not JSON: Extra data at column 10"),
    "NaN": (b'{"id": NaN}', "NaN is not a JSON value"),
    "not UTF-8": (b'{"id": "\xff"}', "byte 9 is not UTF-8"),
    "nesting": (b"[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_a_malformed_line_of_a_file_is_named_and_nothing_is_published(
    run: Run, topic: str, stored: Stored, directory: Path, bad: tuple[bytes, str]
) -> None:
    run("publish", topic, stdin="0\n")
    line, reason = bad
    content = [b'{"id": %d}' % number for number in range(1, 7_000)]
    content[6_500] = line
    (directory / "e.jsonl").write_bytes(b"\n".join(content))
    result = run("publish", topic, "--file", "e.jsonl")
    assert result.exit_code == 1
    message = one_line(result)
    assert message.startswith(f"e.jsonl, line 6501: {reason}")
    assert message.endswith("; nothing was published")
    assert stored(topic) == 1


@pytest.mark.parametrize(
    "case",
    [
        ('{"name": "x", "ID": 1}', "field 'id' for the key is missing; the fields are ['name', 'ID']; nothing"),
        ("{}", "field 'id' for the key is missing; the fields are []; nothing"),
        ('{"id": null}', "field 'id' for the key is null"),
        ('{"id": {}}', "field 'id' for the key is neither text nor a number"),
        ("[1]", "not a JSON object, so it has no field 'id' for the key"),
        (r'{"id": "\u0000"}', "key holds a NUL character"),
        (r'{"id": "\ud800"}', "is not valid Unicode text"),
    ],
)
def test_a_line_without_a_usable_key_is_a_bad_line(
    run: Run, topic: str, stored: Stored, directory: Path, case: tuple[str, str]
) -> None:
    line, reason = case
    (directory / "e.jsonl").write_text(f'{{"id": 1}}\n{line}\n')
    result = run("publish", topic, "--file", "e.jsonl", "--key", "id")
    assert result.exit_code == 1
    message = one_line(result)
    assert "e.jsonl, line 2: " in message
    assert reason in message
    assert stored(topic) == 0


def test_a_value_that_is_too_long_is_a_bad_line(
    run: Run, topic: str, stored: Stored, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.cli.input.MAX_VALUE_BYTES", 1_000_000)
    (directory / "e.jsonl").write_text('1\n"' + "x" * 1_000_000 + '"\n3\n')
    result = run("publish", topic, "--file", "e.jsonl", "--on-bad-line", "skip")
    assert result.exit_code == 0
    assert "skipped e.jsonl, line 2: longer than the 1,000,000 bytes" in result.stderr
    assert stored(topic) == 2


def test_skipping_names_each_bad_line_and_publishes_the_others(
    run: Run, platform: EventSQL, topic: str, directory: Path
) -> None:
    (directory / "e.jsonl").write_text("1\nbad\n2\n\nworse\n3\n")
    result = run("publish", topic, "--file", "e.jsonl", "--on-bad-line", "skip")
    assert result.exit_code == 0
    assert sorted(event.value for event in events(platform, topic)) == [b"1", b"2", b"3"]
    skipped = [line for line in result.stderr.splitlines() if "skipped e.jsonl" in line]
    assert [line.partition(": ")[2].partition(": ")[0] for line in skipped] == [
        "skipped e.jsonl, line 2",
        "skipped e.jsonl, line 5",
    ]
    assert result.stderr.splitlines()[-1].endswith(", skipped 2 lines")


def test_many_skipped_lines_do_not_flood_the_terminal(run: Run, topic: str) -> None:
    result = run("publish", topic, "--on-bad-line", "skip", stdin="bad\n" * 500)
    assert result.exit_code == 0
    assert len(result.stderr.splitlines()) < 30
    assert "skipped 500 lines" in result.stderr


@pytest.mark.parametrize(
    "case",
    [
        (b"id,name\n1,a\n2\n", "e.csv, line 3: 1 field, the header has 2"),
        (b'id,name\n1,"a\nb"\n2,b,c\n', "e.csv, line 4: 3 fields, the header has 2"),
        (b'id,name\n1,a\n2,"open\n3,c\n', "e.csv, line 3: unexpected end of data"),
        (b"id,name\n1,\xff\n", "e.csv, line 2: field 'name' is not UTF-8"),
        (b"id,id\n1,2\n", "e.csv, line 1: the header names 'id' twice"),
        (b"id,\n1,2\n", "e.csv, line 1: the header has a column without a name"),
    ],
)
def test_a_malformed_csv_row_is_named_by_its_first_line(
    run: Run, topic: str, stored: Stored, directory: Path, case: tuple[bytes, str]
) -> None:
    content, reason = case
    (directory / "e.csv").write_bytes(content)
    result = run("publish", topic, "--file", "e.csv")
    assert result.exit_code == 1
    assert one_line(result) == f"{reason}; nothing was published"
    assert stored(topic) == 0


def test_a_cut_off_gzip_file_publishes_nothing(run: Run, topic: str, stored: Stored, directory: Path) -> None:
    whole = gzip.compress(b"".join(b'{"id": %d}\n' % number for number in range(50_000)))
    (directory / "e.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    result = run("publish", topic, "--file", "e.jsonl.gz", "--on-bad-line", "skip")
    assert result.exit_code == 1
    assert one_line(result).startswith("e.jsonl.gz cannot be read to its end: ")
    assert stored(topic) == 0


@pytest.mark.parametrize("name", ["e.jsonl.gz", "e.parquet"])
def test_a_file_that_is_not_what_its_ending_says_is_an_error(
    run: Run, topic: str, stored: Stored, directory: Path, name: str
) -> None:
    (directory / name).write_bytes(b'{"id": 1}\n')
    result = run("publish", topic, "--file", name)
    assert result.exit_code == 1
    assert one_line(result).startswith(name)
    assert stored(topic) == 0


# Streams


def test_a_stream_is_published_up_to_its_bad_line(run: Run, platform: EventSQL, topic: str) -> None:
    content = [str(number) for number in range(1, 12)] + ["bad", "13"]
    result = run("publish", topic, "--batch", 4, stdin="\n".join(content))
    assert result.exit_code == 1
    message = one_line(result)
    assert message.startswith("standard input, line 12: not JSON: ")
    assert message.endswith("; 11 events were published before it")
    check_order(events(platform, topic), [str(number) for number in range(1, 12)])


def test_a_stream_that_begins_with_a_bad_line_publishes_nothing(run: Run, topic: str, stored: Stored) -> None:
    result = run("publish", topic, "--file", "-", stdin="bad\n1\n")
    assert result.exit_code == 1
    assert one_line(result).endswith("; nothing was published")
    assert stored(topic) == 0


@pytest.mark.parametrize("option", [["--rate", 1_000_000], ["--batch", 2]])
def test_a_file_that_is_published_in_batches_says_how_far_it_came(
    run: Run, topic: str, stored: Stored, directory: Path, option: list[object]
) -> None:
    (directory / "e.jsonl").write_text("1\n2\n3\nbad\n5\n")
    result = run("publish", topic, "--file", "e.jsonl", *option)
    assert result.exit_code == 1
    assert one_line(result).endswith("; 3 events were published before it")
    assert stored(topic) == 3


def test_the_rate_is_kept(run: Run, topic: str) -> None:
    result = run("publish", topic, "--rate", 200, "--json", stdin="1\n" * 100)
    summary = json.loads(result.stdout)
    assert summary["published"] == 100
    # The last batch of 20 goes out 80 events after the first.
    assert summary["seconds"] >= 0.4


def test_an_event_of_a_stream_that_pauses_is_published_at_once(start: Start, topic: str, stored: Stored) -> None:
    process = start("publish", topic, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b'{"id": 1}\n{"id"')
    process.stdin.flush()
    wait_until(lambda: stored(topic) == 1)
    process.stdin.write(b": 2}\n")
    process.stdin.flush()
    wait_until(lambda: stored(topic) == 2)
    _, errors = process.communicate(b'{"id": 3}\nbad\n')
    assert process.returncode == 1
    assert b"standard input, line 4: " in errors
    assert b"; 3 events were published before it" in errors
    assert stored(topic) == 3


def test_a_file_whose_publishing_is_interrupted_is_not_published(
    start: Start, platform: EventSQL, topic: str, stored: Stored, directory: Path
) -> None:
    os.mkfifo(directory / "endless.jsonl")
    process = start("publish", topic, "--file", "endless.jsonl", PYTHONFAULTHANDLER="1")
    with (directory / "endless.jsonl").open("wb", buffering=0) as pipe:
        pipe.write(b"1\n" * 200_000)
        with platform.database.connection() as connection:
            # Other databases of the server may have a COPY of their own under way.
            copying = "SELECT count(*) FROM pg_stat_progress_copy WHERE datname = current_database()"
            wait_until(lambda: connection.execute(copying).fetchall() == [(1,)])
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            # Python tells where the program is.
            process.send_signal(signal.SIGABRT)
            _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors.decode()
    assert stored(topic) == 0


def test_an_interrupted_stream_says_how_much_was_published(start: Start, topic: str, stored: Stored) -> None:
    process = start("publish", topic, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"1\n2\n")
    process.stdin.flush()
    wait_until(lambda: stored(topic) == 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stored(topic)) == (130, 2)
    # The events are visible a moment before the process is told of their commit.
    assert errors in {
        b"eventsql: interrupted; 2 events were published until then\n",
        b"eventsql: interrupted; nothing was published; 2 further events may have been\n",
    }


def test_a_terminal_gets_a_progress_bar_on_standard_error(
    start: Start, topic: str, directory: Path, terminal: Terminal
) -> None:
    (directory / "e.jsonl").write_text("1\n" * 2_000)
    process = start("publish", topic, "--file", "e.jsonl", "--rate", 2_000, stderr=terminal.descriptor)
    output, _ = process.communicate(timeout=60)
    shown = terminal.close()
    assert process.returncode == 0
    assert output == b""
    assert b"e.jsonl" in shown
    assert re.search(rb"[1-9][0-9,]* events.*published 2,000 events", shown, re.DOTALL)
