"""`eventsql trace`: where an event comes from, run by run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final
from urllib.parse import quote

import click
import dagster as dg
from rich.text import Text
from rich.tree import Tree

from eventsql_orchestration.cli.context import CliContext, open_platform, pass_context
from eventsql_orchestration.cli.output import counted, on_shard, partition_name, say, show, timestamp, write_json
from eventsql_orchestration.cli.parameters import json_option, topic_argument
from eventsql_orchestration.dagster.local.instance import CONFIG_FILE, STORAGE_VARIABLE, instance_directory, storage_url
from eventsql_orchestration.dagster.local.webserver import without_credentials
from eventsql_orchestration.dagster.trace.runs import Runs, ServedRuns, StoredRuns
from eventsql_orchestration.dagster.trace.tracer import DEPTH, WIDTH, TracedEvents, TracedInput, Tracer
from eventsql_orchestration.errors import EventSQLError

MAX_DEPTH: Final = 100
"""Each run takes some frames of Python's stack."""

NOT_SHOWN: Final = "status and times of runs are not shown"
HOW_TO_REACH: Final = "give --dagster-url, or set DAGSTER_HOME"


@click.command(short_help="Show where an event comes from.")
@topic_argument
@click.argument("offset", type=click.IntRange(min=1))
@click.option("--dagster-url", metavar="URL", help="The URL of Dagster's UI, such as http://127.0.0.1:3000.")
@click.option(
    "--depth",
    type=click.IntRange(0, MAX_DEPTH),
    metavar="N",
    default=DEPTH,
    show_default=True,
    help="Maximum length of a chain of runs.",
)
@click.option(
    "--width",
    type=click.IntRange(min=1),
    metavar="N",
    default=WIDTH,
    show_default=True,
    help="Maximum number of publishers of one range.",
)
@json_option
@pass_context
def trace(
    context: CliContext, *, topic: str, offset: int, dagster_url: str | None, depth: int, width: int, as_json: bool
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
        show(_tree(origin, dagster_url))


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


def _object(origin: TracedEvents, url: str | None) -> dict[str, Any]:
    run = origin.run
    return {
        **on_shard(origin.shard),
        "topic": origin.topic,
        "events": origin.events,
        "first_offset": origin.first,
        "last_offset": origin.last,
        "run_id": origin.run_id,
        "asset": origin.asset,
        "partition": origin.partition,
        "run": None if run is None else {name: value for name, value in asdict(run).items() if name != "inputs"},
        "url": _link(origin.run_id, url),
        "inputs": [_input_object(each, url) for each in origin.inputs],
        "copy_of": None if origin.original is None else _object(origin.original, url),
        "notes": list(origin.notes),
    }


def _input_object(read: TracedInput, url: str | None) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(read.range).items() if name != "shard"},
        **on_shard(read.range.shard),
        "origins": [_object(each, url) for each in read.origins],
        "origins_left_out": read.left_out,
        "notes": list(read.notes),
    }


def _tree(origin: TracedEvents, url: str | None) -> Tree:
    tree = Tree(_events(origin))
    _grow(tree, origin, url)
    return tree


def _events(origin: TracedEvents) -> Text:
    on = "" if origin.shard is None else f" on {origin.shard}"
    if origin.events == 1:
        return Text.assemble((origin.topic, "bold"), f" event {origin.first}{on}")
    offsets = f" {counted(origin.events, 'event')}, offsets {origin.first} to {origin.last}{on}"
    return Text.assemble((origin.topic, "bold"), offsets)


def _grow(tree: Tree, origin: TracedEvents, url: str | None) -> None:
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
        _grow_input(branch.add(_range(read)), read, url)


def _run(origin: TracedEvents, url: str | None) -> Text:
    run = origin.run
    link = _link(origin.run_id, url)
    line = Text("run ")
    line.append(_plain(origin.run_id or ""), style="bold" if link is None else f"bold link {link}")
    if origin.asset is not None:
        line.append(f", asset {_plain(origin.asset)}")
    if origin.partition is not None:
        line.append(f" [{_plain(origin.partition)}]")
    if run is not None:
        line.append(f", {run.status}", style="green" if run.status == "SUCCESS" else "yellow")
        if run.ended is not None:
            line.append(f", ended {timestamp(run.ended)}")
    if link is not None:
        line.append(f", {link}")
    return line


def _range(read: TracedInput) -> Text:
    given = read.range
    offsets = "no event" if given.upto <= given.after else f"offsets {given.after + 1} to {given.upto}"
    line = Text.assemble("read ", (_plain(given.topic), "bold"), f" {offsets}")
    if given.partition >= 0:
        line.append(f" of partition {partition_name(given.partition)}")
    if given.shard is not None:
        line.append(f" on {_plain(given.shard)}")
    if given.consumer is not None:
        line.append(f" as consumer {_plain(given.consumer)}")
    if given.claim is not None:
        line.append(f", claim {given.claim}")
    return line


def _grow_input(branch: Tree, read: TracedInput, url: str | None) -> None:
    for note in read.notes:
        branch.add(Text(_plain(note), style="italic"))
    for origin in read.origins:
        _grow(branch.add(_events(origin)), origin, url)
    if read.left_out:
        branch.add(Text(f"{counted(read.left_out, 'publisher')} more: give a larger --width", style="italic"))
