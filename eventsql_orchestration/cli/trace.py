"""`eventsql trace`: where an event comes from, run by run."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.airflow_url import AirflowUrl, local_airflow
from eventsql_orchestration.cli.context import CliContext, open_platform
from eventsql_orchestration.cli.output import on_shard, say, write_json
from eventsql_orchestration.cli.parameters import POSITIVE, AsJson, TopicName, Whole, argument, command, option
from eventsql_orchestration.cli.tables import picked, same, show, without
from eventsql_orchestration.errors import EventSQLError
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
from eventsql_orchestration.orchestration.trace.tree import TraceTree, link_to

if TYPE_CHECKING:
    from eventsql_orchestration.orchestration.trace.runs import Runs

MAX_DEPTH: Final = 100
"""Each run takes some frames of Python's stack."""

NOT_SHOWN: Final = "status and times of runs are not shown"
HOW_TO_REACH: Final = {DAGSTER: "give --dagster-url, or set DAGSTER_HOME", AIRFLOW: "give --airflow-url"}


@command()
def trace(
    context: CliContext,
    *,
    topic: TopicName,
    offset: Annotated[int, argument(type=POSITIVE)],
    dagster_url: Annotated[
        str | None, option("The URL of Dagster's UI, such as http://127.0.0.1:3000.", metavar="URL")
    ],
    airflow_url: AirflowUrl,
    depth: Annotated[int, option("Maximum length of a chain of runs.", type=Whole(0, MAX_DEPTH), default=DEPTH)],
    width: Annotated[int, option("Maximum number of publishers of one range.", type=POSITIVE, default=WIDTH)],
    as_json: AsJson,
) -> None:
    """Follow the event of TOPIC at OFFSET back to where it comes from.

    With several shards, --shard names the shard of the event: eventsql --shard NAME trace TOPIC OFFSET.

    An event that an asset or a task published names its run. The run's claims, and its metadata in Dagster, name the
    ranges that it had read. The events of these ranges name earlier runs, down to the events that services published.
    Status and times of runs of Dagster come from --dagster-url, from the instance of DAGSTER_HOME, or from the instance
    of `eventsql dev`; status and times of runs of Airflow come from --airflow-url, or from `eventsql dev --dags`.
    Without any of these, the facts of the database are shown.
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
        show(TraceTree(urls).of(origin))


@contextlib.contextmanager
def _runs(context: CliContext, dsn: str, urls: dict[str, str]) -> Iterator[tuple[dict[str, Runs], dict[str, str]]]:
    """The orchestrators that can be asked for runs, and for each other orchestrator why it cannot be asked.

    `urls` gets the URL of a Dagster that runs here.
    """
    runs: dict[str, Runs] = {}
    lacking = {name: f"{NOT_SHOWN}: {how}" for name, how in HOW_TO_REACH.items()}
    if AIRFLOW in urls:
        runs[AIRFLOW] = lazy.ServedDagRuns(urls[AIRFLOW])
    with contextlib.ExitStack() as opened:
        # Without Dagster, the runs of Airflow can still be traced.
        if DAGSTER in urls or importlib.util.find_spec("dagster") is not None:
            home, url = context.settings.home, urls.get(DAGSTER)
            found = opened.enter_context(lazy.dagster_runs(home, dsn, url))
            if isinstance(found, Exception):
                lacking[DAGSTER] = _not_reached(DAGSTER, found)
            elif found is not None:
                runs[DAGSTER] = found
                if url is None and (local := lazy.local_dagster(home)) is not None:
                    # The storage answers faster than the webserver, and has no pages to link to.
                    urls[DAGSTER] = local
        yield runs, {name: why for name, why in lacking.items() if name not in runs}


def _not_reached(orchestrator: str, error: Exception) -> str:
    message = error.message if isinstance(error, EventSQLError) else f"{type(error).__name__}: {error}"
    return f"{NOT_SHOWN}, {orchestrator} cannot be reached ({message}): {HOW_TO_REACH[orchestrator]}"


def _run_of(origin: TracedEvents) -> str | None:
    """The run that published events, or the events that they are copies of."""
    return origin.run_id if origin.run_id is not None or origin.original is None else _run_of(origin.original)


def _object(origin: TracedEvents, urls: Mapping[str, str]) -> dict[str, Any]:
    run = origin.run
    return {
        **on_shard(origin.shard),
        **picked(origin, {**same("topic", "events"), "first_offset": "first", "last_offset": "last"}),
        **picked(origin, same("run_id", "asset", "partition")),
        "run": None if run is None else without(run, "inputs"),
        "url": link_to(origin.run_id, urls),
        "inputs": [_input_object(each, urls) for each in origin.inputs],
        "copy_of": None if origin.original is None else _object(origin.original, urls),
        "notes": list(origin.notes),
    }


def _input_object(read: TracedInput, urls: Mapping[str, str]) -> dict[str, Any]:
    return {
        **without(read.range, "shard"),
        **on_shard(read.range.shard),
        "origins": [_object(each, urls) for each in read.origins],
        "origins_left_out": read.left_out,
        "notes": list(read.notes),
    }
