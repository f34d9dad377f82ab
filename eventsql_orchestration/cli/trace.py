"""`eventsql trace`: where an event comes from, run by run."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import click
from rich.text import Text
from rich.tree import Tree

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.airflow_url import AirflowUrl, local_airflow
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
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.orchestration.owners import read_airflow_run
from eventsql_orchestration.orchestration.trace.tracer import (
    AIRFLOW,
    DAGSTER,
    DEPTH,
    WIDTH,
    TracedEvents,
    TracedInput,
    Tracer,
    orchestrator_of,
)
from eventsql_orchestration.orchestration.webservers import without_credentials

if TYPE_CHECKING:
    from eventsql_orchestration.orchestration.trace.runs import Runs

MAX_DEPTH: Final = 100
"""Each run takes some frames of Python's stack."""

NOT_SHOWN: Final = "status and times of runs are not shown"
HOW_TO_REACH: Final = {DAGSTER: "give --dagster-url, or set DAGSTER_HOME", AIRFLOW: "give --airflow-url"}


@command(short_help="Show where an event comes from.")
def trace(
    context: CliContext,
    *,
    topic: TopicName,
    offset: Annotated[int, argument(type=POSITIVE)],
    dagster_url: Annotated[
        str | None, option("The URL of Dagster's UI, such as http://127.0.0.1:3000.", metavar="URL")
    ],
    airflow_url: AirflowUrl,
    depth: Annotated[
        int, option("Maximum length of a chain of runs.", type=click.IntRange(0, MAX_DEPTH), default=DEPTH)
    ],
    width: Annotated[int, option("Maximum number of publishers of one range.", type=POSITIVE, default=WIDTH)],
    as_json: AsJson,
) -> None:
    """Follow the event of TOPIC at OFFSET back to where it comes from.

    With several shards, --shard names the shard of the event: eventsql --shard NAME trace TOPIC OFFSET.

    An event that an asset or a task published names its run. The run's claims, and its metadata in Dagster, name the
    ranges that it had read. The events of these ranges name earlier runs, down to the events that services published.
    Status and times of runs of Dagster come from --dagster-url, from the instance of DAGSTER_HOME, or from the instance
    of `eventsql dev`; those of Airflow from --airflow-url, or from `eventsql dev --dags`. Without any of these, the
    facts of the database are shown.
    """
    given = {DAGSTER: dagster_url, AIRFLOW: airflow_url or local_airflow(context.settings.home)}
    urls = {name: url for name, url in given.items() if url is not None}
    with (
        # A run can read on one shard and publish to another.
        open_platform(context.settings) as platform,
        _runs(context, platform.shards[0].database.dsn, urls) as (runs, lacking),
    ):
        tracer = Tracer(platform, runs, depth, width)
        origin = tracer.trace(topic, offset, shard=context.shard)
    lacking |= {name: _not_reached(name, error) for name, error in tracer.unreachable.items()}
    run_id = _run_of(origin)
    if run_id is not None and (why := lacking.get(orchestrator_of(run_id))) is not None:
        say(why)
    if as_json:
        write_json(_object(origin, urls))
    else:
        tree = Tree(_events(origin))
        _grow(tree, origin, urls)
        show(tree)


@contextlib.contextmanager
def _runs(context: CliContext, dsn: str, urls: Mapping[str, str]) -> Iterator[tuple[dict[str, Runs], dict[str, str]]]:
    """The orchestrators that can be asked for runs, and for each other one the reason why it cannot."""
    runs: dict[str, Runs] = {}
    lacking = {name: f"{NOT_SHOWN}: {how}" for name, how in HOW_TO_REACH.items()}
    if AIRFLOW in urls:
        runs[AIRFLOW] = lazy.ServedDagRuns(urls[AIRFLOW])
    with contextlib.ExitStack() as opened:
        # Without Dagster, the runs of Airflow can be traced all the same.
        if DAGSTER in urls or importlib.util.find_spec("dagster") is not None:
            home, url = context.settings.home, urls.get(DAGSTER)
            found = opened.enter_context(lazy.dagster_runs(home, dsn, url))
            if isinstance(found, Exception):
                lacking[DAGSTER] = _not_reached(DAGSTER, found)
            elif found is not None:
                runs[DAGSTER] = found
        yield runs, {name: why for name, why in lacking.items() if name not in runs}


def _not_reached(orchestrator: str, error: Exception) -> str:
    message = error.message if isinstance(error, EventSQLError) else f"{type(error).__name__}: {error}"
    return f"{NOT_SHOWN}, {orchestrator} cannot be reached ({message}): {HOW_TO_REACH[orchestrator]}"


def _run_of(origin: TracedEvents) -> str | None:
    """The run that published events, or the events that they are copies of."""
    return origin.run_id if origin.run_id is not None or origin.original is None else _run_of(origin.original)


def _link(run_id: str | None, urls: Mapping[str, str]) -> str | None:
    if run_id is None or (url := urls.get(orchestrator_of(run_id))) is None:
        return None
    if orchestrator_of(run_id) == AIRFLOW:
        dag, run = (quote(part, safe="") for part in read_airflow_run(run_id))
        return f"{without_credentials(url)}/dags/{dag}/runs/{run}"
    return f"{without_credentials(url)}/runs/{quote(run_id, safe='')}"


def _plain(text: str) -> str:
    """Text of a publisher or a run, without characters that control a terminal or break a line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _without(item: Any, field: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(item).items() if name != field}


def _object(origin: TracedEvents, urls: Mapping[str, str]) -> dict[str, Any]:
    run = origin.run
    return {
        **on_shard(origin.shard),
        **picked(origin, {**same("topic", "events"), "first_offset": "first", "last_offset": "last"}),
        **picked(origin, same("run_id", "asset", "partition")),
        "run": None if run is None else _without(run, "inputs"),
        "url": _link(origin.run_id, urls),
        "inputs": [_input_object(each, urls) for each in origin.inputs],
        "copy_of": None if origin.original is None else _object(origin.original, urls),
        "notes": list(origin.notes),
    }


def _input_object(read: TracedInput, urls: Mapping[str, str]) -> dict[str, Any]:
    return {
        **_without(read.range, "shard"),
        **on_shard(read.range.shard),
        "origins": [_object(each, urls) for each in read.origins],
        "origins_left_out": read.left_out,
        "notes": list(read.notes),
    }


def _events(origin: TracedEvents) -> Text:
    on = "" if origin.shard is None else f" on {origin.shard}"
    if origin.events == 1:
        return Text.assemble((origin.topic, "bold"), f" event {origin.first}{on}")
    offsets = f" {counted(origin.events, 'event')}, offsets {origin.first} to {origin.last}{on}"
    return Text.assemble((origin.topic, "bold"), offsets)


def _grow(tree: Tree, origin: TracedEvents, urls: Mapping[str, str]) -> None:
    """Add to `tree`, which shows these events, where they come from."""
    branch = tree
    if origin.run_id is not None:
        branch = tree.add(_run(origin, urls))
    elif origin.original is None and not origin.notes:
        tree.add("published by a service or a program, not by a run")
    for note in origin.notes:
        branch.add(Text(_plain(note), style="italic"))
    if origin.original is not None:
        copied = branch.add(Text.assemble("a copy of ", _events(origin.original)))
        _grow(copied, origin.original, urls)
    for read in origin.inputs:
        below = branch.add(_range(read))
        for note in read.notes:
            below.add(Text(_plain(note), style="italic"))
        for each in read.origins:
            _grow(below.add(_events(each)), each, urls)
        if read.left_out:
            below.add(Text(f"{counted(read.left_out, 'publisher')} more: give a larger --width", style="italic"))


def _run(origin: TracedEvents, urls: Mapping[str, str]) -> Text:
    run, link = origin.run, _link(origin.run_id, urls)
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
