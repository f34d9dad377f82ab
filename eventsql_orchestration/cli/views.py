"""`eventsql view`, `timeline`, `rollup` and `logs`: the views of a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say, say_plan, timestamp, write, write_json
from eventsql_orchestration.cli.parameters import (
    FILE,
    MOMENT,
    POSITIVE,
    AsJson,
    Name,
    argument,
    command,
    executing,
    leave_out,
    option,
)
from eventsql_orchestration.cli.tables import Columns, cell, picked, same, show_list
from eventsql_orchestration.validation import advised, age, check_name, counted

if TYPE_CHECKING:
    from eventsql_orchestration.views import (
        Definition,
        LogLine,
        LogsView,
        Retained,
        Rollup,
        RollupBucket,
        Sorted,
        Views,
    )

_BAR: Final = 30
"""Characters of the longest bar of a rollup."""

_QUANTILES: Final = (0.5, 0.9, 0.99)

_FOLLOW_DELAY: Final = 0.5
"""Seconds between two looks for new lines."""

_NAME: Final = Name("view", partial(check_name, "view name"))

ViewName: TypeAlias = Annotated[str, argument(type=_NAME)]
Tenant: TypeAlias = Annotated[str, option("The tenant whose entries are shown.", default="", show_default=False)]
Since: TypeAlias = Annotated[
    datetime | None, option("From this time on, or from a duration before now (2h, 7d).", type=MOMENT)
]
Until: TypeAlias = Annotated[datetime | None, option("Before this time.", type=MOMENT)]
Limit: TypeAlias = Annotated[int, option("At most N.", type=POSITIVE, default=100)]


@click.group()
def view() -> None:
    """List and drop views, apply their retention, sort logs, and clean up killed rebuilds."""


@command(view, "list")
def list_views(context: CliContext, *, as_json: AsJson) -> None:
    """List the views of the database."""
    columns: Columns = {
        **same("name", "kind"),
        "period": lambda each: each.period.total_seconds(),
        "retention": lambda each: None if each.retention is None else each.retention.total_seconds(),
        "form": lambda each: each.described(),
    }
    texts: Columns = {
        "period": lambda each: age(each.period.total_seconds()),
        "retention": lambda each: "for ever" if each.retention is None else age(each.retention.total_seconds()),
        "form": _form,
    }
    with _views(context) as views:
        definitions = views.definitions()
    show_list(definitions, {**columns, **texts}, as_json=as_json, json=lambda each: picked(each, columns))


@command(view)
def retain(context: CliContext, *, execute: Annotated[bool, executing("Drop them")], as_json: AsJson) -> None:
    """Drop the partitions of views whose entries are all older than the view's retention.

    A plan and, with --execute, the drop. Dagster's housekeeping does it once an hour.
    """
    with _views(context) as views:
        retained = views.retain(execute=execute)
    if execute or as_json:
        _show_kept(
            retained, lambda each: f"view {each.view!r}: {counted(each.dropped, 'partition')} dropped",
            otherwise="no view has a retention", as_json=as_json,
        )  # fmt: skip
    if execute:
        return
    due = [f"{counted(each.dropped, 'partition')} of view {each.view!r}" for each in retained if each.dropped]
    if due:
        say_plan(f"{', '.join(due)} would be dropped")
    else:
        say("nothing to do: no partition is older than its view's retention")


@command(view, "sort")
def sort_logs(context: CliContext, *, as_json: AsJson) -> None:
    """Rewrite the closed partitions of logs in the order of resources, each once."""
    with _views(context) as views:
        done = views.sort()
    _show_kept(
        done, lambda each: f"logs {each.view!r}: {counted(each.partitions, 'partition')} sorted",
        otherwise="there are no logs", as_json=as_json,
    )  # fmt: skip


def _show_kept(
    results: Sequence[Retained | Sorted], text: Callable[[Any], str], *, otherwise: str, as_json: bool
) -> None:
    """Show what was done to the partitions of each view, and which are left to the next run; else why nothing was."""
    if as_json:
        write_json([asdict(each) for each in results])
        return
    if not results:
        say(f"nothing to do: {otherwise}")
    for each in results:
        busy = f"; {counted(each.busy, 'partition')} in use, for the next run" if each.busy else ""
        say(f"{text(each)}{busy}")


@command(view)
def drop(context: CliContext, *, name: ViewName, execute: Annotated[bool, executing("Drop it")]) -> None:
    """Drop the view NAME with all of its entries: a plan and, with --execute, the drop."""
    with _views(context) as views:
        definition = views.definition(name)
        if execute:
            views.drop(name)
            say(f"{definition.kind} {name!r} dropped")
        else:
            say_plan(f"{definition.kind} {name!r} would be dropped with all of its entries")


@command(view, "give-up")
def give_up(context: CliContext, *, name: ViewName, execute: Annotated[bool, executing("Clean up")]) -> None:
    """Clean up after a killed rebuild of the view NAME: a plan and, with --execute, the drop of what it has left.

    A rebuild under way fails.
    """
    with _views(context) as views:
        views.definition(name)
        if execute:
            views.give_up(name)
            say(f"view {name!r} has no rebuild any more")
        elif (begun := views.unfinished_rebuilds().get(name)) is not None:
            say_plan(f"the rebuild of view {name!r} that began at {cell(begun)} would be dropped")
        else:
            say(f"view {name!r} has no rebuild")


@command()
def timeline(
    context: CliContext,
    *,
    name: ViewName,
    resource: Annotated[str, argument()],
    tenant: Tenant,
    newest: Annotated[bool, option("The newest entries, newest first.")],
    limit: Limit,
    as_json: AsJson,
) -> None:
    """Show what happened to RESOURCE, from the timeline NAME, in the order in which it was appended."""
    with _views(context) as views:
        opened = views.timeline(_wanted(views, name, "timeline"))
        if newest:
            entries = opened.read_newest(resource, tenant=tenant, limit=limit)
        else:
            entries = opened.read(resource, tenant=tenant, limit=limit)
    columns: Columns = {"id": "id", "occurred at": lambda each: timestamp(each.occurred_at), "data": "data"}
    _show(entries, columns, as_json=as_json)


@command()
def rollup(
    context: CliContext,
    *,
    name: ViewName,
    every: Annotated[timedelta | None, option("The length of the buckets: 1h, 1d  [default: the rollup's grain].")],
    by: Annotated[tuple[str, ...], option("Group by this dimension; repeat it for several.", metavar="DIMENSION")],
    where: Annotated[tuple[tuple[str, str], ...], option("Only this value of a dimension.", metavar="DIMENSION=VALUE")],
    since: Since,
    until: Until,
    tenant: Tenant,
    quantile: Annotated[
        tuple[float, ...],
        option(
            "Show this quantile, from 0 to 1; repeat it  [default: 0.5 0.9 0.99].",
            type=click.FloatRange(0, 1),
            metavar="Q",
        ),
    ],
    plot: Annotated[Path | None, option("Draw counts and sums to this file: .png, .svg or .pdf.", type=FILE)],
    as_json: AsJson,
) -> None:
    """Show the buckets of the rollup NAME: counts, and sum, minimum and maximum of each value.

    Numbers of distinct texts are estimates above 2,048, and quantiles above some 200 numbers.

    --plot draws the buckets instead, with a line for each combination of dimensions; it needs the extra [plots].
    """
    if plot is not None:
        leave_out("is not for --plot", "as_json", "quantile")
    with _views(context) as views:
        opened = views.rollup(_wanted(views, name, "rollup"))
        buckets = opened.read(since=since, until=until, every=every, by=by, where=dict(where), tenant=tenant)
    if plot is not None:
        _plot(buckets, plot, name)
        return
    most = max((bucket.count for bucket in buckets), default=0)

    def bar(bucket: RollupBucket) -> str:
        return "█" * round(_BAR * bucket.count / most)

    columns: dict[str, Any] = {"bucket": lambda each: timestamp(each.bucket)}
    for dimension in by:
        # The time and the number of entries have these names.
        named = f"dimension {dimension}" if dimension in ("bucket", "count") else dimension
        columns[named] = lambda each, of=dimension: each.dimensions[of]
    columns |= {"count": "count"}
    for value in opened.definition.values:
        for measure in ("sum", "min", "max"):
            columns[f"{measure} {value}"] = lambda each, of=value, what=measure: _number(getattr(each.values[of], what))
    columns |= _sketches(opened.definition, quantile or _QUANTILES)
    _show(buckets, columns if as_json else {**columns, "": bar}, as_json=as_json)


def _sketches(rollup: Rollup, ranks: Iterable[float]) -> dict[str, Any]:
    """The columns of a rollup's sketches."""

    def distinct(bucket: RollupBucket, name: str) -> int | None:
        found = bucket.distinct[name]
        return None if found is None else round(found.estimate)

    def quantile(bucket: RollupBucket, name: str, rank: float) -> int | float | str | None:
        found = bucket.quantiles[name]
        return None if found is None else _number(Decimal(repr(found.at(rank))))

    columns: dict[str, Any] = {f"distinct {name}": partial(distinct, name=name) for name in rollup.distinct}
    for name in rollup.quantiles:
        columns |= {f"p{rank * 100:g} {name}": partial(quantile, name=name, rank=rank) for rank in ranks}
    return columns


def _plot(buckets: list[RollupBucket], path: Path, name: str) -> None:
    from eventsql_orchestration.views.plots import plot_rollup  # noqa: PLC0415 - an optional package

    try:
        plot_rollup(buckets, path, title=name)
    except OSError as error:
        raise click.FileError(str(path), error.strerror or str(error)) from None
    say(f"{counted(len(buckets), 'bucket')} drawn to {path}")


@command()
def logs(
    context: CliContext,
    *,
    name: ViewName,
    resource: Annotated[str | None, option("Only lines of this resource.")],
    level: Annotated[str | None, option("Only lines of this level.")],
    attribute: Annotated[tuple[tuple[str, str], ...], option("Only lines with this attribute, a text; repeat it.")],
    text: Annotated[str | None, option("Only lines with this text, in upper or lower case.")],
    words: Annotated[str | None, option('Only lines with these words: timeout -retry "exact phrase".')],
    since: Since,
    until: Until,
    tenant: Tenant,
    limit: Limit,
    follow: Annotated[bool, option("Oldest first, and go on with new lines, until Ctrl-C.")],
    as_json: AsJson,
) -> None:
    """Show the newest lines of the logs NAME, newest first.

    With --follow, the last lines come oldest first, then each new line as it is committed; with --json, each is a line
    of JSON.
    """
    if follow and until is not None:
        raise click.UsageError("--follow has no end: leave out --until")
    asked: dict[str, Any] = {
        "resource": resource, "level": level, "attributes": dict(attribute) if attribute else None, "text": text,
        "words": words, "tenant": tenant,
    }  # fmt: skip
    with _views(context) as views:
        opened = views.logs(_wanted(views, name, "logs"))
        if follow:
            _follow(opened, asked, since, limit, as_json=as_json)
        lines = opened.search(**asked, since=since, until=until, limit=limit)
    _show(lines, _LINE, as_json=as_json)


_LINE: Final[Columns] = {
    "written at": lambda each: timestamp(each.written_at), **same("resource", "level", "line"),
    "attributes": lambda each: each.attributes or None,
}  # fmt: skip


def _follow(
    opened: LogsView, asked: Mapping[str, Any], since: datetime | None, limit: int, *, as_json: bool
) -> NoReturn:
    """Print the last lines and then new lines, until the program is interrupted."""
    # The follower begins before the search, so that no line falls between the two.
    follower = opened.follow(**asked)
    last = opened.search(**asked, since=since, limit=limit)[::-1]
    seen = {line.id for line in last}
    _print(last, as_json=as_json)
    while True:
        lines = follower.poll()
        _print([line for line in lines if line.id not in seen], as_json=as_json)
        # The first poll repeats lines of the search above. Later polls repeat none.
        seen = set()
        time.sleep(_FOLLOW_DELAY)


def _print(lines: Iterable[LogLine], *, as_json: bool) -> None:
    for line in lines:
        if as_json:
            write_json(picked(line, _fields(_LINE)), indent=None)
        else:
            values = [value for value in picked(line, _LINE).values() if value is not None]
            write(" ".join(map(cell, values)) + "\n")


@contextmanager
def _views(context: CliContext) -> Iterator[Views]:
    with context.platform() as platform:
        yield lazy.Views(platform)


def _wanted(views: Views, name: str, kind: str) -> Any:
    definition = views.definition(name)
    if definition.kind != kind:
        shows = advised(definition.kind, name)
        raise click.UsageError(f"view {name!r} is of kind {definition.kind}: `{shows}` shows it")
    return definition


def _number(value: Decimal | None) -> int | float | str | None:
    """A number as JSON has it. JSON has no infinity: that is a text, as in PostgreSQL's JSON."""
    if value is None:
        return None
    if value.is_infinite():
        return str(value)
    nearest = float(value)
    return nearest if value != value.to_integral_value() and isfinite(nearest) else int(value)


def _form(definition: Definition) -> str | None:
    described = definition.described()
    if "grain" in described:
        described["grain"] = age(described["grain"])
    if "sort_after" in described:
        described["sort_after"] = "never" if described["sort_after"] is None else age(described["sort_after"])
    texts = {name: " ".join(value) if isinstance(value, list) else value for name, value in described.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items() if text) or None


def _show(items: list[Any], columns: Columns, *, as_json: bool) -> None:
    show_list(items, columns, as_json=as_json, json=lambda each: picked(each, _fields(columns)))


def _fields(columns: Columns) -> Columns:
    """The columns with names for JSON, which have underscores instead of spaces."""
    return {name.replace(" ", "_"): column for name, column in columns.items()}
