"""The parts of a benchmark's figures: rates of quarters, percentiles, encoded events, counted statements."""

from __future__ import annotations

import inspect
import os
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from psycopg.sql import SQL

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.bench import machine, processes, roles, workload
from eventsql_orchestration.bench.benchmark import Benchmark, OnTopic
from eventsql_orchestration.bench.figure import (
    EVENTS_PER_SECOND,
    Figure,
    Sample,
    delays,
    percentile,
    quarter_rates,
    ratio,
)
from eventsql_orchestration.bench.session import PREFIX, Session, start_publishers
from eventsql_orchestration.bench.spark import Sides, Spark, jdbc_options
from eventsql_orchestration.bench.statements import counted
from eventsql_orchestration.bench.store import Store
from eventsql_orchestration.bench.stream import Stream
from eventsql_orchestration.bench.table import BENCHMARKS, All
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.database.urls import parse_dsn
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import stage
from eventsql_orchestration.storage import segments
from eventsql_orchestration.topics.partitioner import default_partition
from tests.bench.conftest import queues, tables
from tests.forms import stored
from tests.waiting import PATIENCE, ended, wait_until

PROGRAM = [
    sys.executable,
    "-c",
    "import os, pathlib, signal; pathlib.Path('pid').write_text(f'{os.getpid()}.'); signal.pause()",
]


def started(directory: Path) -> psutil.Process:
    """The process of `PROGRAM`, once it runs."""
    written = directory / "pid"
    wait_until(lambda: written.exists() and written.read_text().endswith("."), "the start of the program")
    return psutil.Process(int(written.read_text()[:-1]))


def group_of(leader: int) -> list[int]:
    """The living processes of a process group, by the id of its leader."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader and not ended(process):
                members.append(process.pid)
    return members


def test_quarters_end_between_the_samples_around_them() -> None:
    samples = [Sample(11.0, 100), Sample(12.0, 100), Sample(14.0, 300), Sample(14.5, 400)]
    assert quarter_rates(10.0, samples, 400) == pytest.approx([100.0, 50.0, 100.0, 200.0])


def test_quarters_may_all_lie_between_two_samples() -> None:
    assert quarter_rates(0.0, [Sample(4.0, 8)], 8) == pytest.approx([2.0] * 4)


@pytest.mark.parametrize(("part", "value"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (1.0, 100.0)])
def test_a_percentile_is_a_value_that_was_measured(part: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], part) == value


def test_publications_repeat_for_a_seed_and_differ_within_it() -> None:
    first, again, other = (workload.publications("t", 100, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert len({each.key for each in first + other}) == 200
    assert all(140 <= len(each.value) <= 165 for each in first)


@pytest.mark.parametrize("events", [1, 999, 1_000, 2_500, 120_001])
def test_batches_hold_every_event_that_was_asked_for(events: int) -> None:
    pool = workload.publications("t", 100)
    assert [len(batch) for batch in workload.batches(pool, events, 1_000)] == [
        number for number, _ in workload.encoded_batches("t", 10, events=events, batch=1_000)
    ]
    assert sum(number for number, _ in workload.encoded_batches("t", 10, events=events, batch=1_000)) == events


@pytest.mark.parametrize("benchmark", [each for each in BENCHMARKS if each is not All], ids=lambda each: each.name)
def test_a_benchmark_uses_each_of_its_options(benchmark: type[Benchmark]) -> None:
    code = inspect.getsource(benchmark)
    used = {"partitions", "storage"} if "self.topic(" in code else set()
    used |= {"raw_events"} if "self.beside_raw_copy(" in code else set()
    options = {field.name for field, _ in benchmark.options()}
    assert {name for name in options - used if f"self.{name}" not in code} == set()


def test_the_whole_table_is_measured_with_its_options() -> None:
    whole = All.sized(quick=True, storage="rows", partitions=3, raw_events=7)
    assert whole._sized(Stream, publishers=2) == Stream.sized(
        quick=True, storage="rows", partitions=3, raw_events=7, publishers=2
    )
    assert whole._sized(Store) == Store.sized(quick=True)
    assert {(each.partitions, each.storage) for each in whole.parts if isinstance(each, OnTopic)} == {(3, "rows")}


def test_encoded_events_arrive_as_published_ones_do(session: Session) -> None:
    platform = session.platform
    with session.topic("encoded", partitions=4) as topic:
        session.fill_buffer(topic, partitions=4, events=150)
        platform.transfer.run_once([topic])
        events = platform.reader.read(topic)
    wanted = workload.publications(topic, 150)
    # Of several partitions, only the order in each is kept.
    for partition in range(4):
        assert [(event.key, event.value) for event in events if event.partition == partition] == [
            (each.key, each.value) for each in wanted if default_partition(each, 4) == partition
        ]


def test_statements_are_counted_with_the_begin_and_commit_around_them(database: Database) -> None:
    with database.connection() as connection, counted() as statements:
        connection.execute("SELECT 1")
        assert statements.sent == 1
        with connection.transaction():
            connection.execute("SELECT 1")
        assert statements.sent == 4
    with database.connection() as connection:
        connection.execute("SELECT 1")
    assert statements.sent == 4


def test_statements_below_the_cursors_of_the_driver_are_counted_however_their_rows_are_read(database: Database) -> None:
    change, look = SingleStatement("change", SQL("SET lock_timeout TO 0")), SingleStatement("look", SQL("SELECT 1"))
    with database.connection() as connection:
        connection.execute("SELECT 1")
    with counted() as statements:
        database.execute(change, {})
        database.fetch(look, {})
        database.fetch_values(look, {})
    assert statements.sent == 3


def test_rates_of_events_have_their_part_of_the_raw_copy_rate(session: Session) -> None:
    figures = [Figure("rate", 10.0, EVENTS_PER_SECOND), Figure("time", 1.0, "ms")]
    rate, time = session.beside_raw_copy(lambda: figures, events=1_000)
    (raw,) = session.raw_copy()
    assert rate.ratio_to_raw_copy == pytest.approx(10.0 / raw.value)
    assert time.ratio_to_raw_copy is None
    assert raw.details["measured"] == 2


def test_the_raw_copy_rate_and_the_figure_each_begin_on_a_settled_server(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    monkeypatch.setattr(session, "settle", lambda: steps.append("settle"))
    monkeypatch.setattr(session, "_copy", lambda *_: steps.append("copy"))

    def measure() -> list[Figure]:
        steps.append("figure")
        return []

    session.beside_raw_copy(measure, events=10)
    assert steps == ["settle", "copy", "settle", "figure", "settle", "copy"]


def test_no_side_of_a_comparison_always_comes_first(session: Session) -> None:
    measured: list[str] = []

    def measure(side: str) -> float:
        measured.append(side)
        return float(len(measured))

    sides = {side: partial(measure, side) for side in ("ours", "theirs")}
    assert session.in_turns("comparing", 3, sides) == {"ours": [1.0, 4.0, 5.0], "theirs": [2.0, 3.0, 6.0]}
    assert measured == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_a_ratio_is_the_median_of_the_ratios_of_neighbours() -> None:
    found = ratio("of_theirs", [10.0, 6.0, 40.0], [5.0, 2.0, 10.0], "ratio")
    assert found.value == 3.0
    assert (found.details["least"], found.details["most"], found.details["measured"]) == (2.0, 4.0, 3)


def test_delays_are_told_in_milliseconds_with_their_percentiles() -> None:
    found = delays("cold_start", [0.003, 0.001, 0.002], runs=3)
    assert (found.value, found.unit) == (2.0, "ms")
    assert found.details == {"least": 1.0, "p90": 3.0, "p99": 3.0, "most": 3.0, "measured": 3, "runs": 3}


def test_spark_s_jdbc_source_reads_the_same_events_in_rows(session: Session) -> None:
    with Spark.sized(events=200).sources(session) as topics:
        platform = session.platform
        assert [platform.registry.topic(name).storage for name in topics] == ["blocks", "rows"]
        assert [platform.reader.count(name) for name in topics] == [200, 200]
    with Spark.sized(events=200, storage="rows").sources(session) as (source, rows):
        assert source == rows


def test_spark_s_jdbc_source_finds_the_server_that_libpq_finds() -> None:
    assert jdbc_options(parse_dsn("postgresql://me:secret@/events?host=db&port=5433")) == {
        "url": "jdbc:postgresql://db:5433/events", "driver": "org.postgresql.Driver",
        "user": "me", "password": "secret",
    }  # fmt: skip
    for servers, places in (
        ("host=a,b", "a:5432,b:5432"),
        ("host=a,b&port=5433,5434", "a:5433,b:5434"),
        ("host=::1&port=5433", "[::1]:5433"),
    ):
        assert jdbc_options(parse_dsn(f"postgresql:///events?{servers}"))["url"] == f"jdbc:postgresql://{places}/events"
    for without_host in ("postgresql:///events", "postgresql:///events?host=/run/postgresql"):
        with pytest.raises(BenchmarkError):
            jdbc_options(parse_dsn(without_host))


def test_a_way_of_spark_leaves_nothing_to_vacuum_during_the_next_way(session: Session, dsn: str) -> None:
    platform, sizes = session.platform, Spark.sized()
    rows = pa.record_batch({"key": ["key"] * 12_000, "value": [b"value" * 100] * 12_000})
    with session.topic("spark_target", partitions=2) as target, session.table("create_plain") as table:
        with Publications(Source(dsn, "eventsql", "the database")) as publications:
            publications.publish(None, 0, [stage(publications.write_targets(target, {}), [rows])])
        assert platform.transfer.run_once([target]) == {target: 12_000}
        Sides(sizes, target, target, target, table).settle(platform.database)

        with platform.database.connection() as connection:
            found = segments.segments(connection, "eventsql", target) or ()
            tables = ["spark_staged_event", "event_buffer", *(segment.table for segment in found)]
            written, unseen = connection.execute(_PAGES, {"tables": tables}).fetchone() or ()
    assert (written > 500, unseen) == (True, 0)


_PAGES = """
SELECT sum(own.relpages), sum(own.relpages - own.relallvisible)
FROM pg_class written
JOIN pg_class own ON own.oid IN (written.oid, written.reltoastrelid)
WHERE written.relname = ANY (%(tables)s)
"""
"""The pages of tables, and how many of them autovacuum has not seen yet."""


def test_the_topics_and_tables_of_a_figure_are_dropped_when_it_ends(session: Session) -> None:
    with pytest.raises(ZeroDivisionError), session.topic("gone", partitions=2) as topic, session.raw_table() as raw:
        session.consumer(topic)
        session.fill_buffer(topic, partitions=2, events=10)
        assert tables(session.platform) >= {stored(topic), raw}
        _ = 1 / 0
    assert tables(session.platform) == set()
    assert session.platform.buffered() == {}
    assert session.platform.registry.topics() == []


def test_a_benchmark_deletes_what_a_killed_one_has_left_and_nothing_else(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_topic(Topic(f"{PREFIX}stream_0", 2))
    with platform.database.connection() as connection:
        connection.execute(f"CREATE TABLE eventsql.{PREFIX}raw_0 (eql_id bigint)")
        connection.execute(f"CREATE TABLE eventsql.{PREFIX}deleted_event (eql_id bigint)")
        connection.execute(f"CREATE TABLE eventsql.{PREFIX}notes (eql_id bigint)")
    for name in ("waiting", f"{PREFIX}queue_0"):
        Queue(platform, name).send(b"message")
    with Session(platform):
        assert [topic.name for topic in platform.registry.topics()] == ["orders"]
        assert tables(platform) == {f"{PREFIX}notes"}
        assert queues(platform) == ["waiting"]


@pytest.mark.parametrize("kind", ["SCHEMA", "DATABASE"])
def test_a_benchmark_drops_the_schemas_and_databases_of_a_killed_one_and_no_others(
    platform: EventSQL, kind: Literal["SCHEMA", "DATABASE"]
) -> None:
    left, other = (f"{PREFIX}{name}_{secrets.token_hex(3)}" for name in ("left", "other"))
    with platform.database.dedicated() as connection:

        def found() -> list[str]:
            names = "SELECT nspname FROM pg_namespace UNION ALL SELECT datname FROM pg_database"
            return [str(name) for (name,) in connection.execute(names) if name in {left, other}]

        connection.execute(f"CREATE {kind} {other}")
        try:
            with Session(platform) as session, session.made(kind, left):
                assert sorted(found()) == [left, other]
                session._remove_leftovers()
                assert found() == [other]
        finally:
            connection.execute(f"DROP {kind} {other}")


def test_one_benchmark_runs_on_a_database_at_a_time(session: Session) -> None:
    with pytest.raises(BenchmarkError, match="another benchmark"), Session(session.platform):
        pass


def test_an_open_transaction_keeps_rows_from_being_removed(session: Session) -> None:
    with session.holding_xmin():
        row = session.connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND backend_xmin IS NOT NULL AND state = 'idle in transaction'"
        ).fetchone()
    assert row == (1,)


def test_an_open_transaction_that_the_server_ended_is_no_figure(session: Session) -> None:
    with pytest.raises(BenchmarkError, match="stay open"), session.holding_xmin():
        session.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND state = 'idle in transaction'"
        )


@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        ({"fsync": "on", "synchronous_commit": "on"}, []),
        ({"fsync": "on", "synchronous_commit": "local"}, []),
        ({"fsync": "off", "synchronous_commit": "on"}, ["fsync is off"]),
        ({"fsync": "on", "synchronous_commit": "off"}, ["synchronous_commit is off"]),
    ],
)
def test_a_server_that_may_lose_what_it_committed_is_not_durable(settings: dict[str, str], faults: list[str]) -> None:
    assert machine.undurable(settings) == faults


def test_the_server_says_what_it_is_set_to(session: Session) -> None:
    described = session.describe()
    assert described["durable"] is False
    assert described["undurable_because"] == ["fsync is off"]
    assert isinstance(described["server_settings"], dict)
    assert described["server_settings"]["synchronous_commit"] == "on"


def test_a_role_that_fails_fails_the_figure_with_its_error(session: Session) -> None:
    with session.crew() as crew, pytest.raises(BenchmarkError, match=r"publisher 1 failed: TopicNotFoundError"):
        start_publishers(crew, f"{PREFIX}nowhere", events=1, batch=1)
        crew.go()


def test_a_process_that_does_not_end_is_given_up(session: Session) -> None:
    with session.crew() as crew, pytest.raises(BenchmarkError, match="the transfer did not end"):
        transfer = crew.start(roles.transfer, "the transfer")
        crew.go()
        crew.outcome(transfer, limit=0.2)


def test_a_program_of_a_benchmark_ends_with_its_crew(session: Session, tmp_path: Path) -> None:
    with session.crew() as crew:
        crew.start(roles.run_program, "a program", command=PROGRAM, directory=str(tmp_path), environment={})
        program = started(tmp_path)
    assert ended(program)


def test_a_program_of_a_benchmark_that_is_killed_ends_too(tmp_path: Path) -> None:
    arguments = {"command": PROGRAM, "directory": str(tmp_path), "environment": {}}
    code = (
        "from eventsql_orchestration.bench import processes, roles\n"
        "with processes.Crew() as crew:\n"
        f"    crew.start(roles.run_program, 'a program', **{arguments!r})\n"
        "    crew.wait(lambda: False, limit=600.0, what='the end')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as benchmark:
        program = started(tmp_path)
        benchmark.kill()
    wait_until(lambda: ended(program), "the end of the program")


def test_a_program_ends_if_the_benchmark_is_gone_before_its_process_is_ready(tmp_path: Path) -> None:
    worker = processes.WorkerProcess("a program", processes.WORKER)
    try:
        worker.output.close()
        options = {"command": PROGRAM, "directory": str(tmp_path), "environment": {}}
        worker.tell((roles.run_program, (), options, (), ""))
        worker.process.wait(PATIENCE)
        # The program may end before it writes its process id, but it stays in the group of the process.
        wait_until(lambda: group_of(worker.process.pid) == [], "the end of the program")
    finally:
        worker.close_input()
        worker.end(time.monotonic())


def test_a_program_that_ends_by_itself_fails_the_figure_with_its_last_words(session: Session, tmp_path: Path) -> None:
    with session.crew() as crew, pytest.raises(BenchmarkError) as raised:
        command = [sys.executable, "-c", "import sys; sys.exit('the disk is full')"]
        crew.start(roles.run_program, "the server", command=command, directory=str(tmp_path), environment={})
        crew.go()
        crew.wait(lambda: False, limit=PATIENCE, what="the server")
    assert "the server ended with exit code 1" in str(raised.value)
    assert "the disk is full" in str(raised.value)


def test_processes_end_with_their_crew(session: Session) -> None:
    with session.crew() as crew:
        member = crew.start(roles.transfer, "the transfer")
        crew.go()
        assert member.process.poll() is None
    assert member.process.poll() is not None


def test_a_meter_counts_the_processor_time_of_processes_and_of_what_they_started() -> None:
    busy = "import time; begin = time.process_time()\nwhile time.process_time() < begin + 0.3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as process:
        try:
            meter = machine.Meter({"child": [process.pid], "nobody": []})
            before = time.monotonic()
            while meter.taken()["child"] < 0.3:
                assert time.monotonic() < before + 60
            assert meter.taken()["nobody"] == 0.0
        finally:
            process.kill()
