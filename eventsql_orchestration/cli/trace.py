"""`eventsql trace`: where an event comes from, run by run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final
from urllib.parse import quote

import click
import dagster as dg
from rich.text import Text
from rich.tree import Tree

from eventsql_orchestration.cli.context import CliContext, open_platform
from eventsql_orchestration.cli.output import (
    counted,
    on_shard,
    partition_name,
    picked,
    same,
    say,
    show,
    timestamp,
    write_json,
)
from eventsql_orchestration.cli.parameters import POSITIVE, AsJson, TopicName, argument, command, option
from eventsql_orchestration.dagster.local.instance import CONFIG_FILE, STORAGE_VARIABLE, instance_directory, storage_url
from eventsql_orchestration.dagster.trace.runs import Runs, ServedRuns, StoredRuns
from eventsql_orchestration.dagster.trace.tracer import DEPTH, WIDTH, TracedEvents, TracedInput, Tracer
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.orchestration.webservers import without_credentials

MAX_DEPTH: Final = 100
"""Each run takes some frames of Python's stack."""

NOT_SHOWN: Final = "status and times of runs are not shown"
HOW_TO_REACH: Final = "give --dagster-url, or set DAGSTER_HOME"


@command(short_help="Show where an event comes from.")
def trace(
    context: CliContext,
    *,
    topic: TopicName,
    offset: Annotated[int, argument(type=POSITIVE)],
    dagster_url: Annotated[
        str | None, option("The URL of Dagster's UI, such as http://127.0.0.1:3000.", metavar="URL")
    ],
    depth: Annotated[
        int, option("Maximum length of a chain of runs.", type=click.IntRange(0, MAX_DEPTH), default=DEPTH)
    ],
    width: Annotated[int, option("Maximum number of publishers of one range.", type=POSITIVE, default=WIDTH)],
    as_json: AsJson,
) -> None:
    """Follow the event of TOPIC at OFFSET back to where it comes from.

    With several shards, --shard names the shard of the event: eventsql --shard NAME trace TOPIC OFFSET.

    An event that an asset published names its run. The run's claims, and its metadata in Dagster, name the ranges that
    it had read. The events of these ranges name earlier runs, down to the events that services published. Status and
    times of runs come from --dagster-url, from the instance of DAGSTER_HOME, or from the instance of `eventsql dev`.
    Without any of these, the facts of the database are shown.
    """
    with (
        # A run can read on one shard and publish to another.
        open_platform(context.settings) as platform,
        _runs(context, platform.shards[0].database.dsn, dagster_url) as (runs, lacking),
    ):
        tracer = Tracer(platform, runs, depth, width)
        origin = tracer.trace(topic, offset, shard=context.shard)
    if tracer.unreachable is not None:
        lacking = _not_reached(tracer.unreachable)
    if lacking is not None and _has_run(origin):
        say(lacking)
    if as_json:
        write_json(_object(origin, dagster_url))
    else:
        tree = Tree(_events(origin))
        _grow(tree, origin, dagster_url)
        show(tree)


@contextlib.contextmanager
def _runs(context: CliContext, dsn: str, url: str | None) -> Iterator[tuple[Runs | None, str | None]]:
    """The place to look up runs, or the reason why there is none."""
    if url is not None:
        yield ServedRuns(url), None
        return
    directory = os.environ.get("DAGSTER_HOME")
    if not directory and (instance_directory(context.settings.home) / CONFIG_FILE).exists():
        directory = str(instance_directory(context.settings.home))
        os.environ.setdefault(STORAGE_VARIABLE, storage_url(dsn))
    if not directory:
        yield None, f"{NOT_SHOWN}: {HOW_TO_REACH}"
        return
    with contextlib.ExitStack() as opened:
        runs, lacking = None, None
        try:
            runs = StoredRuns(opened.enter_context(dg.DagsterInstance.from_config(directory)))
        except Exception as error:  # noqa: BLE001 - an instance may have any storage, with its own errors
            lacking = _not_reached(error)
        yield runs, lacking


def _not_reached(error: Exception) -> str:
    message = error.message if isinstance(error, EventSQLError) else f"{type(error).__name__}: {error}"
    return f"{NOT_SHOWN}, Dagster cannot be reached ({message}): {HOW_TO_REACH}"


def _has_run(origin: TracedEvents) -> bool:
    return origin.run_id is not None or (origin.original is not None and _has_run(origin.original))


def _link(run_id: str | None, url: str | None) -> str | None:
    return None if run_id is None or url is None else f"{without_credentials(url)}/runs/{quote(run_id, safe='')}"


def _plain(text: str) -> str:
    """Text of a publisher or a run, without characters that control a terminal or break a line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _without(item: Any, field: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(item).items() if name != field}


def _object(origin: TracedEvents, url: str | None) -> dict[str, Any]:
    run = origin.run
    return {
        **on_shard(origin.shard),
        **picked(origin, {**same("topic", "events"), "first_offset": "first", "last_offset": "last"}),
        **picked(origin, same("run_id", "asset", "partition")),
        "run": None if run is None else _without(run, "inputs"),
        "url": _link(origin.run_id, url),
        "inputs": [_input_object(each, url) for each in origin.inputs],
        "copy_of": None if origin.original is None else _object(origin.original, url),
        "notes": list(origin.notes),
    }


def _input_object(read: TracedInput, url: str | None) -> dict[str, Any]:
    return {
        **_without(read.range, "shard"),
        **on_shard(read.range.shard),
        "origins": [_object(each, url) for each in read.origins],
        "origins_left_out": read.left_out,
        "notes": list(read.notes),
    }


def _events(origin: TracedEvents) -> Text:
    on = "" if origin.shard is None else f" on {origin.shard}"
    if origin.events == 1:
        return Text.assemble((origin.topic, "bold"), f" event {origin.first}{on}")
    offsets = f" {counted(origin.events, 'event')}, offsets {origin.first} to {origin.last}{on}"
    return Text.assemble((origin.topic, "bold"), offsets)


def _grow(tree: Tree, origin: TracedEvents, url: str | None) -> None:
    """Add to `tree`, which shows these events, where they come from."""
    branch = tree
    if origin.run_id is not None:
        branch = tree.add(_run(origin, url))
    elif origin.original is None and not origin.notes:
        tree.add("published by a service or a program, not by a run")
    for note in origin.notes:
        branch.add(Text(_plain(note), style="italic"))
    if origin.original is not None:
        copied = branch.add(Text.assemble("a copy of ", _events(origin.original)))
        _grow(copied, origin.original, url)
    for read in origin.inputs:
        below = branch.add(_range(read))
        for note in read.notes:
            below.add(Text(_plain(note), style="italic"))
        for each in read.origins:
            _grow(below.add(_events(each)), each, url)
        if read.left_out:
            below.add(Text(f"{counted(read.left_out, 'publisher')} more: give a larger --width", style="italic"))


def _run(origin: TracedEvents, url: str | None) -> Text:
    run, link = origin.run, _link(origin.run_id, url)
    style = "bold" if link is None else f"bold link {link}"
    line = Text.assemble("run ", (_plain(origin.run_id or ""), style))
    line.append("" if origin.asset is None else f", asset {_plain(origin.asset)}")
    line.append("" if origin.partition is None else f" [{_plain(origin.partition)}]")
    if run is not None:
        line.append(f", {run.status}", style="green" if run.status == "SUCCESS" else "yellow")
        line.append("" if run.ended is None else f", ended {timestamp(run.ended)}")
    return line.append("" if link is None else f", {link}")


def _range(read: TracedInput) -> Text:
    given = read.range
    offsets = "no event" if given.upto <= given.after else f"offsets {given.after + 1} to {given.upto}"
    line = Text.assemble("read ", (_plain(given.topic), "bold"), f" {offsets}")
    line.append("" if given.partition < 0 else f" of partition {partition_name(given.partition)}")
    line.append("" if given.shard is None else f" on {_plain(given.shard)}")
    line.append("" if given.consumer is None else f" as consumer {_plain(given.consumer)}")
    return line.append("" if given.claim is None else f", claim {given.claim}")
