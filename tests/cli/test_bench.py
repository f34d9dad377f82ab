"""`eventsql bench`: its commands end with figures of the stated shape, and leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventsql_orchestration import EventSQL
from tests.bench.conftest import tables
from tests.cli.conftest import Run, Start
from tests.cli.terminals import Terminal
from tests.waiting import PATIENCE, wait_until

FIGURES: dict[str, list[str]] = {
    "stream": ["publish_and_consume", "publish_and_consume_processor", "publish_and_consume_disk", "raw_copy"],
    "stream --through-buffer --hold-xmin": [
        "publish_and_consume_through_buffer", "publish_and_consume_through_buffer_processor",
        "publish_and_consume_through_buffer_disk",
        "publish_and_consume_through_buffer_xmin_held", "publish_and_consume_through_buffer_xmin_held_processor",
        "publish_and_consume_through_buffer_xmin_held_disk",
        "publish_and_consume_through_buffer_xmin_held_ratio",
        "raw_copy",
    ],
    "stream --rate 2000 --handler-delay 5": [
        "publish_and_consume_at_2000_published", "publish_and_consume_at_2000_consumed",
    ],
    "publish --batch 500": ["publish_batches_of_500", "raw_copy"],
    "latency": [
        "publish_to_handler_p50", "publish_to_handler_p90", "publish_to_handler_p99", "publish_to_handler_max",
        "publish_to_handler_rate",
    ],
    "transfer": ["transfer_short_buffer", "transfer_long_buffer", "transfer_long_buffer_ratio", "raw_copy"],
    "consume": ["consume_whole_topic", "consume_10_partitions", "consume_partitions_ratio", "raw_copy"],
    "idle --seconds 0.5": ["idle_statements_per_partition"],
    "buffered --in-flight 100": [
        "one_row_commits_4_connections", "buffered_publish", "buffered_publish_p99", "buffered_publish_ratio",
        "raw_copy",
    ],
    "retention": ["retention_of_oldest_half"],
    "queue": ["queue_send", "queue_receive"],
    "capture": [
        "bulk_update", "bulk_update_captured", "bulk_update_ratio", "update_of_one_row", "update_of_one_row_captured",
        "update_of_one_row_ratio",
    ],
    "store": [
        *(f"append_{size}_{connections}_connections" for size in (1, 100) for connections in (1, 4, 16)),
        "load_100", "load_100_decoded", "load_2000_with_snapshots", "load_2000_without_snapshots",
        "load_2000_snapshots_ratio",
    ],
    "views": [
        "timeline_lookup", "logs_of_a_month", "logs_page_of_a_month", "rollup_hours_of_a_day", "rollup_own_buckets",
        "rollup_one_bucket",
        "rollup_one_bucket_ratio", "raw_copy",
    ],
}  # fmt: skip

LONG = {
    "stream --through-buffer --hold-xmin", "stream --rate 2000 --handler-delay 5", "transfer", "consume",
    "buffered --in-flight 100", "publish --batch 500", "idle --seconds 0.5", "views", "queue", "retention",
}  # fmt: skip
"""Commands that take long even where they are quick, and `retention`, which another test runs."""


def under_way(process: subprocess.Popen[bytes], platform: EventSQL) -> list[psutil.Process]:
    """The processes of a benchmark, once it has begun."""

    def begun() -> bool:
        assert process.poll() is None
        workers[:] = psutil.Process(process.pid).children()
        return len(workers) == 2 and any("stream" in name for name in tables(platform))

    workers: list[psutil.Process] = []
    wait_until(begun, "the benchmark begins")
    return workers


def check(document: Any) -> list[str]:
    """The names of the figures in a document of the stated shape."""
    *figures, environment = document
    for figure in figures:
        assert figure.keys() == {"name", "value", "unit", "ratio_to_raw_copy", "details"}
        assert figure["value"] >= 0
        assert figure["unit"]
        assert figure["ratio_to_raw_copy"] is None or figure["ratio_to_raw_copy"] > 0
    assert environment.keys() == {
        "package", "python", "measured_at", "cpus", "cpu_model", "memory_bytes", "system", "postgresql", "durable",
        "undurable_because", "server_settings", "benchmark",
    }  # fmt: skip
    return [figure["name"] for figure in figures]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        pytest.param(command, names, id=command, marks=[pytest.mark.nightly] if command in LONG else [])
        for command, names in FIGURES.items()
    ],
)
def test_a_quick_run_ends_with_its_figures_and_leaves_nothing(
    run: Run, platform: EventSQL, command: str, names: list[str]
) -> None:
    result = run("bench", *command.split(), "--quick", "--json")
    assert result.exit_code == 0, result.stderr
    assert check(json.loads(result.stdout)) == names
    assert "these figures are not of a durable server: fsync is off" in result.stderr
    assert tables(platform) == set()
    assert platform.registry.topics() == []
    assert platform.captures.list() == []
    assert platform.buffered() == {}


def test_a_topic_of_any_size_loses_its_oldest_half(run: Run, platform: EventSQL) -> None:
    document = json.loads(run("bench", "retention", "--events", 2_000, "--json").stdout)
    assert check(document) == FIGURES["retention"]
    assert document[0]["details"] == {"events": 2_000, "left": 1_000}
    assert tables(platform) == set()


@pytest.mark.nightly
def test_the_whole_table_is_one_command(run: Run, platform: EventSQL) -> None:
    result = run("bench", "all", "--quick", "--json")
    assert result.exit_code == 0, result.stderr
    names = check(json.loads(result.stdout))
    assert {name for command, figures in FIGURES.items() if "--rate" not in command for name in figures} - {
        "publish_batches_of_500"
    } <= set(names)
    assert "publish_and_consume_4_publishers" in names
    assert len(names) == len(set(names))
    assert tables(platform) == set()


@pytest.mark.nightly
def test_the_rate_of_consumption_is_at_most_the_offered_rate(run: Run) -> None:
    published, consumed, _ = json.loads(run("bench", "stream", "--rate", 500, "--seconds", 0.4, "--json").stdout)
    assert consumed["value"] <= published["value"] <= 500.0


@pytest.mark.nightly
def test_sustained_rates_are_told_by_quarters(run: Run) -> None:
    arguments = ("--events", 400, "--batch", 100, "--publishers", 2, "--raw-events", 100)
    figure = json.loads(run("bench", "stream", *arguments, "--json").stdout)[0]
    assert figure["name"] == "publish_and_consume_2_publishers"
    assert len(figure["details"]["quarters"]) == 4
    assert figure["details"]["raw_copy_before"] > 0
    assert figure["details"]["raw_copy_after"] > 0


def test_figures_are_a_table_for_people(run: Run) -> None:
    lines = run("bench", "publish", "--events", 100, "--raw-events", 100).stdout.splitlines()
    assert lines[0].split("  ")[0] == "figure"
    assert [line.split()[0] for line in lines[1:]] == [
        "publish_batches_of_1000", "raw_copy", "machine", "server", "package",
    ]  # fmt: skip
    assert "fsync off" in lines[4]


@pytest.mark.nightly
def test_progress_is_shown_on_a_terminal_and_stays_out_of_the_data(
    start: Start, terminal: Terminal, tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    with output.open("wb") as file:
        process = start("bench", "publish", "--quick", "--json", stdout=file, stderr=terminal.descriptor, TERM="xterm")
    assert process.wait(PATIENCE) == 0
    shown = terminal.close()
    assert b"raw COPY" in shown
    assert check(json.loads(output.read_text())) == ["publish_batches_of_1000", "raw_copy"]


def test_a_process_that_dies_fails_the_run_with_its_error(start: Start, platform: EventSQL) -> None:
    process = start("bench", "stream", "--events", 50_000_000, "--raw-events", 100, "--json")
    workers = under_way(process, platform)
    workers[0].kill()
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (1, b"")
    assert b"publisher 1 was killed by SIGKILL, so there is no figure" in errors
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []
    assert tables(platform) == set()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.nightly),
    ],
)
def test_a_benchmark_that_is_ended_takes_its_topics_and_processes_along(
    start: Start, platform: EventSQL, ending: signal.Signals, code: int
) -> None:
    process = start("bench", "stream", "--events", 50_000_000, "--raw-events", 100)
    workers = under_way(process, platform)
    process.send_signal(ending)
    output, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (code, b"")
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []
    assert tables(platform) == set()
    assert platform.registry.topics() == []


@pytest.mark.nightly
def test_the_processes_of_a_benchmark_that_is_killed_end_themselves(start: Start, platform: EventSQL) -> None:
    process = start("bench", "stream", "--events", 50_000_000, "--raw-events", 100)
    workers = under_way(process, platform)
    process.kill()
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []
