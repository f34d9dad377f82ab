"""`eventsql view`, `timeline`, `rollup` and `logs`: the views of a database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import Columns, counted, picked, same, say, show_items, timestamp, write_json
from eventsql_orchestration.cli.parameters import POSITIVE, AsJson, Moment, Name, argument, command, option
from eventsql_orchestration.cli.topic_output import age
from eventsql_orchestration.validation import check_name

if TYPE_CHECKING:
    from eventsql_orchestration.views import Definition, RollupBucket, Views

_BAR: Final = 30
"""Characters of the longest bar of a rollup."""

_NAME: Final = Name("view", lambda name: check_name("view name", name))

ViewName: TypeAlias = Annotated[str, argument(type=_NAME)]
Tenant: TypeAlias = Annotated[str, option("The tenant whose entries are shown.", default="", show_default=False)]
Since: TypeAlias = Annotated[
    datetime | None, option("From this time on, or from a duration before now (2h, 7d).", type=Moment())
]
Until: TypeAlias = Annotated[datetime | None, option("Before this time.", type=Moment())]
Limit: TypeAlias = Annotated[int, option("At most N.", type=POSITIVE, default=100)]


@click.group()
def view() -> None:
    """List and drop views, and drop what is beyond their retention."""


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
    if as_json:
        write_json([picked(each, columns) for each in definitions])
    else:
        show_items(definitions, {**columns, **texts})


@command(view)
def retain(context: CliContext, *, as_json: AsJson) -> None:
    """Drop the partitions of views whose entries are all older than the view's retention."""
    with _views(context) as views:
        retained = views.retain()
    if as_json:
        write_json([asdict(each) for each in retained])
    for each in () if as_json else retained:
        busy = f"; {counted(each.busy, 'partition')} in use, for the next run" if each.busy else ""
        say(f"view {each.view!r}: {counted(each.dropped, 'partition')} dropped{busy}")


@command(view)
def drop(
    context: CliContext,
    *,
    name: ViewName,
    execute: Annotated[bool, option("Drop it. Without this option, nothing is dropped.")],
) -> None:
    """Drop the view NAME with all of its entries."""
    with _views(context) as views:
        definition = views.definition(name)
        if execute:
            views.drop(name)
            say(f"{definition.kind} {name!r} dropped")
        else:
            say(f"{definition.kind} {name!r} would be dropped with all of its entries: --execute drops it")


@command(short_help="Show what happened to a resource.")
def timeline(
    context: CliContext,
    *,
    name: ViewName,
    resource: Annotated[str, argument()],
    tenant: Tenant,
    limit: Limit,
    as_json: AsJson,
) -> None:
    """Show what happened to RESOURCE, from the timeline NAME, in the order in which it was appended."""
    with _views(context) as views:
        entries = views.timeline(_wanted(views, name, "timeline")).read(resource, tenant=tenant, limit=limit)
    columns: Columns = {"id": "id", "occurred at": lambda each: timestamp(each.occurred_at), "data": "data"}
    _show(entries, columns, as_json=as_json)


@command(short_help="Show counts per bucket of time.")
def rollup(
    context: CliContext,
    *,
    name: ViewName,
    every: Annotated[timedelta | None, option("The length of the buckets: 1h, 1d  [default: the rollup's grain].")],
    by: Annotated[tuple[str, ...], option("Tell this dimension apart; repeat it for several.", metavar="DIMENSION")],
    where: Annotated[tuple[tuple[str, str], ...], option("Only this value of a dimension.", metavar="DIMENSION=VALUE")],
    since: Since,
    until: Until,
    tenant: Tenant,
    as_json: AsJson,
) -> None:
    """Show the buckets of the rollup NAME: counts, and sum, minimum and maximum of each value."""
    with _views(context) as views:
        opened = views.rollup(_wanted(views, name, "rollup"))
        buckets = opened.read(since=since, until=until, every=every, by=by, where=dict(where), tenant=tenant)
    most = max((bucket.count for bucket in buckets), default=0)

    def bar(bucket: RollupBucket) -> str:
        return "█" * round(_BAR * bucket.count / most)

    columns: dict[str, Any] = {"bucket": lambda each: timestamp(each.bucket)}
    columns |= {dimension: lambda each, of=dimension: each.dimensions[of] for dimension in by}
    columns |= {"count": "count"}
    for value in opened.definition.values:
        for measure in ("sum", "min", "max"):
            columns[f"{measure} {value}"] = lambda each, of=value, what=measure: _number(getattr(each.values[of], what))
    _show(buckets, columns if as_json else {**columns, "": bar}, as_json=as_json)


@command(short_help="Search the lines of logs.")
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
    as_json: AsJson,
) -> None:
    """Show the newest lines of the logs NAME, newest first."""
    with _views(context) as views:
        lines = views.logs(_wanted(views, name, "logs")).search(
            resource=resource, level=level, attributes=dict(attribute) if attribute else None, since=since, until=until,
            text=text, words=words, tenant=tenant, limit=limit,
        )  # fmt: skip
    columns: Columns = {"written at": lambda each: timestamp(each.written_at), **same("resource", "level", "line")}
    _show(lines, {**columns, "attributes": lambda each: each.attributes or None}, as_json=as_json)


@contextmanager
def _views(context: CliContext) -> Iterator[Views]:
    with context.platform() as platform:
        yield lazy.Views(platform.database)


def _wanted(views: Views, name: str, kind: str) -> Any:
    definition = views.definition(name)
    if definition.kind != kind:
        raise click.UsageError(f"view {name!r} is a {definition.kind}: `eventsql {definition.kind} {name}` shows it")
    return definition


def _number(value: Decimal | None) -> int | float | None:
    if value is None:
        return None
    return int(value) if value == value.to_integral_value() else float(value)


def _form(definition: Definition) -> str | None:
    described = definition.described()
    if "grain" in described:
        described["grain"] = age(described["grain"])
    texts = {name: " ".join(value) if isinstance(value, list) else value for name, value in described.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items() if text) or None


def _show(items: list[Any], columns: Columns, *, as_json: bool) -> None:
    if as_json:
        fields = {name.replace(" ", "_"): column for name, column in columns.items()}
        write_json([picked(each, fields) for each in items])
    else:
        show_items(items, columns)
