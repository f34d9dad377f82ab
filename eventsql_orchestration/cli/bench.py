"""`eventsql bench`: a command for each benchmark, with its sizes as options."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict
from typing import Any, Final

import click
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from eventsql_orchestration.bench.benchmark import UNBOUNDED, Benchmark, Option
from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.processes import Report
from eventsql_orchestration.bench.table import BENCHMARKS
from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import progress_bar, say, write_json
from eventsql_orchestration.cli.parameters import Number, Whole
from eventsql_orchestration.cli.tables import Columns, show_fields, show_items
from eventsql_orchestration.signals import handling

_LARGE: Final = 10_000_000
_BYTES_PER_EVENT: Final = 350
"""Approximate size of an event in a topic's log, with its indexes."""

_SHOWN_SETTINGS: Final = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "wal_compression")


@click.group()
def bench() -> None:
    """Measure the platform on this database, beside the raw COPY rate of the database.

    The raw COPY rate is the rate of encoded rows into a table like the buffer. It is measured before and after each
    figure, in the same run. A benchmark makes topics whose names begin with `eventsql_bench_`, and deletes them at its
    end. Other topics and consumers are not touched. One benchmark runs on a database at a time. docs/benchmarks.md
    explains each figure.
    """


def _command(benchmark: type[Benchmark]) -> click.Command:
    @pass_context
    def measure(context: CliContext, /, *, quick: bool, as_json: bool, **given: Any) -> None:
        values = {name: value for name, value in given.items() if value not in (None, ())}
        _measure(context, benchmark.sized(quick=quick, **values), as_json=as_json)

    return click.Command(
        benchmark.name,
        callback=measure,
        help=benchmark.__doc__,
        short_help=benchmark.summary,
        params=[
            *(_option(field, option) for field, option in benchmark.options()),
            click.Option(["--quick"], is_flag=True, help="A small run: it shows that it works, not how fast."),
            click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
        ],
    )


def _option(field: Field[Any], option: Option) -> click.Option:
    names = [option.flag or f"--{field.name.replace('_', '-')}", field.name]
    if option.kind is bool:
        return click.Option(names, flag_value=not field.default, type=bool, default=None, help=f"{option.help}.")

    kind: click.ParamType[Any] = click.STRING
    if option.choices:
        kind = click.Choice(option.choices)
    elif option.kind is float:
        kind = Number(option.least, option.most)
    elif option.kind in (int, tuple):
        kind = Whole(int(option.least), None if option.most == UNBOUNDED else int(option.most))

    return click.Option(
        names, type=kind, multiple=option.kind is tuple, metavar=None if option.choices else option.metavar,
        help=f"{option.help}{_defaults(field.default, option)}.",
    )  # fmt: skip


def _defaults(default: Any, option: Option) -> str:
    if default is MISSING or default in (None, (), ""):
        return ""
    quick = "" if option.quick is None else f"; --quick: {_text(option.quick)}"
    return f"  [default: {_text(default)}{quick}]"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


for _benchmark in BENCHMARKS:
    bench.add_command(_command(_benchmark))


def _measure(context: CliContext, benchmark: Benchmark, *, as_json: bool) -> None:
    if benchmark.stored_events >= _LARGE:
        gigabytes = benchmark.stored_events * _BYTES_PER_EVENT / 1e9
        say(f"this stores {benchmark.stored_events:,} events for a while: some {gigabytes:.0f} GB")

    # The benchmark removes what it has made, as after Ctrl-C. The exit code is as in shells.
    ended = handling(lambda number, _frame: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)
    with ended, _progress() as report:
        figures, environment = benchmark.run(context.platform, home=context.settings.home, report=report)

    if as_json:
        write_json([*map(asdict, figures), environment])
    else:
        _show(figures, environment)
    for reason in environment["undurable_because"]:
        say(f"these figures are not of a durable server: {reason}")
    if benchmark.remark:
        say(benchmark.remark)


def _show(figures: Sequence[Figure], environment: Mapping[str, Any]) -> None:
    columns: Columns = {
        "figure": "name",
        "value": lambda figure: _number(figure.value),
        "of raw COPY": lambda each: None if each.ratio_to_raw_copy is None else _ratio(each.ratio_to_raw_copy),
        "unit": "unit",
        "in quarters": lambda figure: _rates(figure, "quarters"),
    }
    if any("of_shards" in figure.details for figure in figures):
        columns = {**columns, "on each server": lambda figure: _rates(figure, "of_shards")}
    show_items(figures, columns, right=["value", "of raw COPY"])
    memory = environment["memory_bytes"]
    settings = ", ".join(f"{name} {environment['server_settings'].get(name)}" for name in _SHOWN_SETTINGS)
    show_fields(
        {
            "machine": f"{environment['cpus']} CPUs ({environment['cpu_model']})"
            + (f", {memory / 2**30:.0f} GiB" if memory else ""),
            "server": f"PostgreSQL {environment['postgresql']}, {settings}",
            "package": f"eventsql-orchestration {environment['package']}, Python {environment['python']}",
        }
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _rates(figure: Figure, detail: str) -> str:
    rates = figure.details.get(detail)
    return " ".join(map(_number, rates)) if isinstance(rates, list) else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"


@contextmanager
def _progress() -> Iterator[Report]:
    """Show the progress of the measurement on standard error, if that is a terminal."""
    with progress_bar("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("starting", total=None)
        current = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal current
            if what != current:
                current = what
                progress.reset(task, description=what, total=total)
            progress.update(task, completed=done)

        yield report
