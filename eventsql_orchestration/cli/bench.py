"""`eventsql bench`: what the platform does per second on this database, beside the database's raw COPY rate."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eventsql_orchestration.bench import (
    buffered,
    consume,
    idle,
    latency,
    publish,
    retention,
    spark,
    stream,
    table,
    transfer,
)
from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.session import Report, Session
from eventsql_orchestration.bench.shards import ShardsSize
from eventsql_orchestration.bench.shards import measure as measure_shards
from eventsql_orchestration.cli import bench_dagster
from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import say, show, show_fields, stderr_is_terminal, write_json
from eventsql_orchestration.cli.parameters import Number, json_option
from eventsql_orchestration.model import MAX_PARTITIONS

RAW_EVENTS: Final = 1_000_000
_QUICK_RAW_EVENTS: Final = 20_000

_TERMINATED: Final = 143
"""128 + SIGTERM, as shells have it."""

_LARGE: Final = 10_000_000
_BYTES_PER_EVENT: Final = 350
"""Of a topic's log with its indexes, about."""

_SHOWN_SETTINGS: Final = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "wal_compression")

_Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
_Size = TypeVar("_Size")

_COUNT: Final = click.IntRange(min=1)
_PROCESSES: Final = click.IntRange(1, 64)
_SECONDS: Final = Number(0.1, 86_400)


@click.group(short_help="Measure events per second, latency and retention here.")
def bench() -> None:
    """Measure what the platform does on this database, beside what the database does at best.

    That best is the raw COPY rate: encoded rows into a table like the buffer, measured before and after each figure in
    the same run. Topics of a benchmark begin with eventsql_bench_ and are deleted at its end; nothing else is touched.
    One benchmark runs on a database at a time. docs/benchmarks.md says what each figure means.
    """


def _events_option(default: int, quick: int) -> _Option:
    text = f"How many  [default: {default:,}; --quick: {quick:,}]."
    return click.option("--events", type=_COUNT, metavar="N", help=text)


def _ends_with(*options: _Option) -> _Option:
    """The options that every figure has, after `options` of some."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = pass_context(command)
        every: list[_Option] = [*options, _partitions_option, _quick_option, json_option]
        for option in reversed(every):
            command = option(command)
        return command

    return add


_partitions_option: Final = click.option(
    "--partitions", type=click.IntRange(1, MAX_PARTITIONS), metavar="N", help="Of the topic  [default: 10]."
)
_quick_option: Final = click.option("--quick", is_flag=True, help="A small run: it shows that it works, not how fast.")
_raw_option: Final = click.option(
    "--raw-events",
    type=_COUNT,
    metavar="N",
    help=f"Events of each measurement of the raw COPY rate  [default: {RAW_EVENTS:,}; --quick: {_QUICK_RAW_EVENTS:,}].",
)
_buffer_option: Final = click.option(
    "--through-buffer",
    "straight",
    flag_value=False,
    type=bool,
    default=None,
    help="Every event goes through the buffer, none straight into the log.",
)
_publishers_option: Final = click.option(
    "--publishers", type=_PROCESSES, metavar="N", help="Processes that publish  [default: 1]."
)
_max_events_option: Final = click.option(
    "--max-events", type=_COUNT, metavar="N", help="Events that a handler gets at most  [default: 5,000]."
)


@bench.command("stream", short_help="Publish and consume at once.")
@_events_option(stream.FULL.events, stream.QUICK.events)
@click.option("--batch", type=_COUNT, metavar="N", help="Events per publication  [default: 5,000; with --rate 100].")
@click.option("--consumers", type=_PROCESSES, metavar="N", help="Processes that consume  [default: 1].")
@click.option("--polling-delay", type=Number(0.001), metavar="SECONDS", help="Of the consumer  [default: its own].")
@click.option("--hold-xmin", is_flag=True, help="Measure it again while another transaction stays open.")
@click.option("--rate", type=Number(1), metavar="N", help="Offer N events per second instead.")
@click.option("--seconds", type=_SECONDS, metavar="SECONDS", help="How long, with --rate  [default: 60; --quick: 2].")
@click.option(
    "--handler-delay",
    type=Number(0, 60_000),
    metavar="MS",
    help="The handler sleeps for up to so many milliseconds on each batch  [default: 0].",
)
@click.option(
    "--shards",
    type=click.IntRange(1, 16),
    metavar="N",
    help="On 1, 2, … N embedded servers of its own, here, instead of the database.",
)
@_ends_with(_publishers_option, _max_events_option, _buffer_option, _raw_option)
def stream_command(
    context: CliContext,
    *,
    handler_delay: float | None,
    shards: int | None,
    quick: bool,
    as_json: bool,
    raw_events: int | None,
    **given: Any,
) -> None:
    """Publish and consume at once: events per second until the last offset is committed, and in each quarter.

    With --rate it reproduces the table of EventSQL's own benchmark: events published and consumed per second when so
    many are offered for a minute. Its consumer slept 1 to 100 ms on each batch: --handler-delay 100.

    With --shards it starts servers on this machine and measures with one of them, with two and so on, each beside the
    raw COPY rate of as many, or at the same --rate. They share its processors: it shows what shards cost, in rate and
    in processor time, and nothing of what further machines gain.
    """
    if given["rate"] is None and given["seconds"] is not None:
        raise click.UsageError("--seconds is for --rate; without it, --events says when it ends")
    if given["rate"] is not None and given["events"] is not None:
        raise click.UsageError("with --rate, --seconds says when it ends: leave out --events")
    delay = None if handler_delay is None else handler_delay / 1_000
    size = _sized(stream.QUICK if quick else stream.FULL, {**given, "handler_delay": delay})
    if shards is not None:
        if given["hold_xmin"]:
            raise click.UsageError("--shards is measured with nothing else open: leave out --hold-xmin")
        _run_shards(context, size, shards, raw_events or (_QUICK_RAW_EVENTS if quick else RAW_EVENTS), as_json=as_json)
        return
    _run(context, stream.measure, size, raw_events, quick=quick, as_json=as_json)


@bench.command("publish", short_help="Publish in batches, with nobody consuming.")
@_events_option(publish.FULL.events, publish.QUICK.events)
@click.option("--batch", type=_COUNT, metavar="N", help="Events per publication  [default: 1,000].")
@_ends_with(_publishers_option, _buffer_option, _raw_option)
def publish_command(context: CliContext, *, quick: bool, as_json: bool, raw_events: int | None, **given: Any) -> None:
    """Publish in batches, with nobody consuming: committed events per second."""
    size = _sized(publish.QUICK if quick else publish.FULL, given)
    _run(context, publish.measure, size, raw_events, quick=quick, as_json=as_json)


@bench.command("latency", short_help="Time events from publish to handler.")
@click.option("--rate", type=Number(1, 100_000), metavar="N", help="Events per second  [default: 1,000].")
@click.option("--seconds", type=_SECONDS, metavar="SECONDS", help="How long  [default: 20; --quick: 1].")
@click.option("--warm-up", type=_SECONDS, metavar="SECONDS", help="What does not count, before  [default: 3].")
@click.option("--threads", type=click.IntRange(1, 64), metavar="N", help="That publish in turns  [default: 4].")
@_ends_with()
def latency_command(context: CliContext, *, quick: bool, as_json: bool, **given: Any) -> None:
    """Publish single events at a steady rate: milliseconds from the call of publish to a handler in another process."""
    size = _sized(latency.QUICK if quick else latency.FULL, given)
    _run(context, latency.measure, size, None, quick=quick, as_json=as_json)


@bench.command("transfer", short_help="Transfer out of a long and a short buffer.")
@_events_option(transfer.FULL.events, transfer.QUICK.events)
@click.option(
    "--short", type=_COUNT, metavar="N", help="Events in the short buffer  [default: 500,000; --quick: 5,000]."
)
@_ends_with(_raw_option)
def transfer_command(context: CliContext, *, quick: bool, as_json: bool, raw_events: int | None, **given: Any) -> None:
    """Transfer out of a buffer that holds many events, and out of one that holds few."""
    size = _sized(transfer.QUICK if quick else transfer.FULL, given)
    _run(context, transfer.measure, size, raw_events, quick=quick, as_json=as_json)


@bench.command("consume", short_help="Consume by partitions, and as one.")
@_events_option(consume.FULL.events, consume.QUICK.events)
@click.option("--processes", type=_PROCESSES, metavar="N", help="That share the partitions  [default: 1].")
@click.option("--rounds", type=click.IntRange(1, 100), metavar="N", help="How often each  [default: 2; --quick: 1].")
@_ends_with(_max_events_option, _raw_option)
def consume_command(context: CliContext, *, quick: bool, as_json: bool, raw_events: int | None, **given: Any) -> None:
    """Consume a topic that is full: all partitions of a consumer together, and one consumer of the whole topic."""
    size = _sized(consume.QUICK if quick else consume.FULL, given)
    _run(context, consume.measure, size, raw_events, quick=quick, as_json=as_json)


@bench.command("idle", short_help="Count the statements of an idle consumer.")
@click.option("--seconds", type=_SECONDS, metavar="SECONDS", help="How long  [default: 30; --quick: 2].")
@click.option("--warm-up", type=_SECONDS, metavar="SECONDS", help="What does not count, before  [default: 12].")
@_ends_with()
def idle_command(context: CliContext, *, quick: bool, as_json: bool, **given: Any) -> None:
    """Count the statements of a consumer to whose topic nobody publishes, per partition and second."""
    size = _sized(idle.QUICK if quick else idle.FULL, given)
    _run(context, idle.measure, size, None, quick=quick, as_json=as_json)


@bench.command("buffered", short_help="Publish single events, many at once.")
@click.option(
    "--in-flight",
    type=_COUNT,
    multiple=True,
    metavar="N",
    help="Events that wait for their acknowledgement at once; repeat it to try several  "
    f"[default: {', '.join(f'{number:,}' for number in buffered.FULL.in_flight)}].",
)
@click.option("--seconds", type=_SECONDS, metavar="SECONDS", help="How long each  [default: 4; --quick: 0.5].")
@click.option("--most-p99", type=_SECONDS, metavar="MS", help="That acknowledgements may take  [default: 50].")
@click.option("--connections", type=click.IntRange(1, 64), metavar="N", help="Of one-row commits  [default: 16].")
@_ends_with(_raw_option)
def buffered_command(
    context: CliContext, *, in_flight: tuple[int, ...], quick: bool, as_json: bool, raw_events: int | None, **given: Any
) -> None:
    """Publish single events through the buffered publisher, each acknowledged after its commit.

    Beside it, how many rows per second are committed one by one over several connections.
    """
    size = _sized(buffered.QUICK if quick else buffered.FULL, {**given, "in_flight": in_flight or None})
    _run(context, buffered.measure, size, raw_events, quick=quick, as_json=as_json)


@bench.command("retention", short_help="Let a large topic lose its oldest half.")
@_events_option(retention.FULL.events, retention.QUICK.events)
@_ends_with()
def retention_command(context: CliContext, *, quick: bool, as_json: bool, **given: Any) -> None:
    """Fill a topic, and time how long it takes to lose its oldest half."""
    size = _sized(retention.QUICK if quick else retention.FULL, given)
    _run(context, retention.measure, size, None, quick=quick, as_json=as_json, stored=size.events)


@bench.command("spark", short_help="Read and write with Spark, beside its JDBC source.")
@_events_option(spark.FULL.events, spark.QUICK.events)
@click.option("--tasks", type=_PROCESSES, metavar="N", help="Of Spark, for each way  [default: 8; --quick: 2].")
@click.option("--rounds", type=click.IntRange(1, 100), metavar="N", help="How often each  [default: 1].")
@click.option("--jdbc-jar", metavar="FILE", help=f"PostgreSQL's JDBC driver  [default: {spark.JDBC_JAR}].")
@_ends_with(_raw_option)
def spark_command(context: CliContext, *, quick: bool, as_json: bool, raw_events: int | None, **given: Any) -> None:
    """Read all columns, read two, and write, with the data source `eventsql` and with Spark's own JDBC source.

    Both in one session on two cores, warm, with the same columns and as many tasks. What is written with `eventsql` is
    published exactly once; JDBC appends rows to a plain table.
    """
    size = _sized(spark.QUICK if quick else spark.FULL, given)
    measure = partial(spark.measure, home=context.settings.home)
    _run(context, measure, size, raw_events, quick=quick, as_json=as_json)


@bench.command("dagster", short_help="Time Dagster from publish to run.")
@click.option("--cold", type=_COUNT, metavar="N", help="Runs from rest  [default: 12; --quick: 1].")
@click.option("--drained", type=_COUNT, metavar="N", help="Events for a run that drains  [default: 150; --quick: 5].")
@click.option("--steady", type=_SECONDS, metavar="SECONDS", help="Of steady traffic  [default: 180; --quick: 15].")
@click.option("--window", type=_SECONDS, metavar="SECONDS", help="Of each run of those  [default: 30; --quick: 12].")
@click.option("--seconds", type=_SECONDS, metavar="SECONDS", help="Each number of sensors  [default: 30; --quick: 6].")
@click.option("--runs", type=_COUNT, metavar="N", help="At once  [default: 20; --quick: 2].")
@click.option(
    "--only",
    type=click.Choice(list(bench_dagster.PARTS)),
    multiple=True,
    help="Measure this; repeat it  [default: all].",
)
@_quick_option
@json_option
@pass_context
def dagster_command(context: CliContext, /, *, only: tuple[str, ...], quick: bool, as_json: bool, **given: Any) -> None:
    """Start a daemon of its own and time it: publish to first step, to a run that drains, ticks and runs.

    Steady traffic goes on over several runs, which take over from one another. Its storage is a schema of its own in
    this database, which is dropped at the end. Some 10 minutes.
    """
    size = _sized(bench_dagster.QUICK if quick else bench_dagster.FULL, {**given, "only": only or None})
    _run(context, bench_dagster.measure, size, None, quick=quick, as_json=as_json)


@bench.command("all", short_help="Measure the whole table.")
@click.option(
    "--retention-events",
    type=_COUNT,
    metavar="N",
    help=f"Of the topic that loses its oldest half  [default: {retention.FULL.events:,}; "
    f"--quick: {retention.QUICK.events:,}].",
)
@_ends_with(_raw_option)
def all_command(context: CliContext, *, quick: bool, as_json: bool, raw_events: int | None, **given: Any) -> None:
    """Measure every figure at the sizes of docs/benchmarks.md, one after the other."""
    size = _sized(table.QUICK if quick else table.FULL, given)
    _run(context, table.measure, size, raw_events, quick=quick, as_json=as_json, stored=size.retention_events)


def _sized(size: _Size, given: Mapping[str, Any]) -> _Size:
    """`size` with the options that were given."""
    return replace(size, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]


def _run(
    context: CliContext,
    measure: Callable[[Session, _Size], list[Figure]],
    size: _Size,
    raw_events: int | None,
    *,
    quick: bool,
    as_json: bool,
    stored: int = 0,
) -> None:
    """Measure, and write what it came to. `stored` is the number of events that stay for a while, where it is large."""
    if stored >= _LARGE:
        say(f"this stores {stored:,} events for a while: some {stored * _BYTES_PER_EVENT / 1e9:.0f} GB")
    raw = raw_events or (_QUICK_RAW_EVENTS if quick else RAW_EVENTS)
    with (
        _ended_by_sigterm(),
        context.platform() as platform,
        _progress() as report,
        Session(platform, raw_events=raw, report=report) as session,
    ):
        environment = session.describe()
        figures = measure(session, size)
        figures += session.raw_copy()
    environment["benchmark"] = {**asdict(size), "raw_events": raw}  # type: ignore[call-overload]
    if as_json:
        write_json([*(figure.as_object() for figure in figures), environment])
    else:
        _show(figures, environment)
    for reason in environment["undurable_because"]:  # type: ignore[attr-defined]
        say(f"these figures are not of a durable server: {reason}")


def _run_shards(context: CliContext, size: stream.StreamSize, shards: int, raw_events: int, *, as_json: bool) -> None:
    whole = ShardsSize(size, shards, raw_events)
    with _ended_by_sigterm(), _progress() as report:
        figures, environment = measure_shards(context.settings.home / "bench-shards", whole, report)
    environment["benchmark"] = asdict(whole)
    if as_json:
        write_json([*(figure.as_object() for figure in figures), environment])
    else:
        _show(figures, environment)
        for figure in figures:
            if isinstance(rates := figure.details.get("of_shards"), list):
                say(f"{figure.name}: {', '.join(f'{rate:,.0f}' for rate in rates)} events/s on each server")
    say(
        f"all servers, publishers and consumers share {environment['cpus']} CPUs: what more machines gain is not to be "
        "seen here, only what more shards cost"
    )


def _show(figures: Sequence[Figure], environment: Mapping[str, Any]) -> None:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column("figure", overflow="fold")
    for column in ("value", "of raw COPY"):
        drawn.add_column(column, justify="right", no_wrap=True)
    drawn.add_column("unit", overflow="fold")
    drawn.add_column("in quarters", overflow="fold")
    for figure in figures:
        ratio = "-" if figure.ratio_to_raw_copy is None else f"{figure.ratio_to_raw_copy:.2f}"
        quarters = figure.details.get("quarters")
        rates = " ".join(map(_number, quarters)) if isinstance(quarters, list) else ""
        drawn.add_row(figure.name, _number(figure.value), ratio, figure.unit, rates)
    show(drawn)
    memory = environment["memory_bytes"]
    show_fields(
        {
            "machine": f"{environment['cpus']} CPUs ({environment['cpu_model']})"
            + (f", {memory / 2**30:.0f} GiB" if memory else ""),
            "server": f"PostgreSQL {environment['postgresql']}, "
            + ", ".join(f"{name} {environment['server_settings'].get(name)}" for name in _SHOWN_SETTINGS),
            "package": f"eventsql-orchestration {environment['package']}, Python {environment['python']}",
        }
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"


@contextmanager
def _progress() -> Iterator[Report]:
    """Shows on a terminal what is being measured, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not stderr_is_terminal())
    with progress:
        task = progress.add_task("starting", total=None)
        current = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal current
            if what != current:
                current = what
                progress.reset(task, description=what, total=total)
            progress.update(task, completed=done)

        yield report


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a benchmark as Ctrl-C does: with its topics deleted."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        sys.exit(_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
