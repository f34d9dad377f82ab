"""Pages in Airflow's API server: where the events of a run come from."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Annotated, Final, TypeAlias

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowNotFoundException
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from rich.tree import Tree

from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.errors import (
    DatabaseError,
    EventSQLError,
    ShardSetError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.orchestration.owners import airflow_run, read_airflow_run
from eventsql_orchestration.orchestration.trace.tracer import (
    AIRFLOW,
    DEPTH,
    WIDTH,
    TracedEvents,
    TracedInput,
    Tracer,
    orchestrator_of,
)
from eventsql_orchestration.orchestration.trace.tree import TraceTree

app: Final = FastAPI(title="EventSQL", docs_url=None, redoc_url=None, openapi_url=None)

LINE: Final = 200
"""Characters of a line."""

DEPTHS: Final = 100
WIDTHS: Final = 1_000
"""The longest chain of runs that a page follows, and the most publishers of a range that it shows."""

SHOW_MORE: Final = "Show more"
"""The text of the link to a page that follows twice as many runs and shows twice as many publishers."""

MORE: Final = f"the link “{SHOW_MORE}” below goes on"

HEADERS: Final = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""Names of topics and runs are text, whatever they hold."""

BLACK: Final = (30, 41, 59)
THEME: Final = TerminalTheme(
    (255, 255, 255), BLACK,
    [BLACK, (185, 28, 28), (21, 128, 61), (161, 98, 7), (29, 78, 216), (126, 34, 206), (14, 116, 144), (71, 85, 105)],
)  # fmt: skip

PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>EventSQL trace</title>
<style>body {{ margin: 2em; color: {foreground}; background: {background} }} pre {{ font-size: 14px }}
{stylesheet}</style></head><body><pre>{code}</pre></body></html>"""
LINK: Final = '<p><a href="?{query}">{text}</a></p></body>'

BACK: Final = "the link “EventSQL trace” of the task leads to its last event"

HIDDEN: Final = "a run of a DAG that you have no rights on"

Rights: TypeAlias = Callable[[str], bool]
"""Tells whether the user of a page may look at the runs of a DAG."""


def rights_of(request: Request, user: GetUserDep) -> Rights:
    """The rights of the user who asks for a page."""

    @cache
    def may_see(dag_id: str) -> bool:
        try:
            requires_access_dag("GET", DagAccessEntity.RUN, dag_id)(request, user)
        except HTTPException:
            return False
        return True

    return may_see


# Airflow checks the rights on the DAG, and shows nothing without them.
@app.get("/trace/{dag_id}", dependencies=[Depends(requires_access_dag("GET", DagAccessEntity.RUN))])
def trace(
    request: Request,
    dag_id: str,
    may_see: Annotated[Rights, Depends(rights_of)],
    *,
    run_id: str,
    conn_id: str,
    topic: str | None = None,
    offset: int = 0,
    shard: str | None = None,
    depth: Annotated[int, Query(ge=1, le=DEPTHS)] = DEPTH,
    width: Annotated[int, Query(ge=1, le=WIDTHS)] = WIDTH,
) -> HTMLResponse:
    """The origin of an event of a run; without `topic`, the origin of the ranges that the run has read.

    An event that the run has not published is not shown, nor is any run of a DAG that the user has no rights on.
    """
    more = request.url.include_query_params(depth=min(2 * depth, DEPTHS), width=min(2 * width, WIDTHS)).query
    tree = TraceTree({AIRFLOW: conf.get("api", "base_url", fallback="/").rstrip("/")}, wider=MORE)
    run = airflow_run(dag_id, run_id)
    try:
        with EventSQLHook(conn_id) as hook:
            tracer = Tracer(hook.platform, depth=depth, width=width, deeper=MORE)
            if topic is None:
                inputs = _seen_inputs(tracer.inputs_of(run), may_see)
                none = Text("no claim of this run is kept") if not inputs else None
                return _page(none or tree.of_inputs(f"DAG {dag_id}, run {run_id}", inputs), more=more)
            origin: TracedEvents | None = tracer.trace(topic, offset, shard=shard)
    except AirflowNotFoundException as error:
        return _page(Text(str(error)), status=404)
    except (TopicNotFoundError, ShardSetError, ValidationError):
        origin = None
    except EventSQLError as error:
        return _page(Text(error.message), status=503 if isinstance(error, DatabaseError) else 404)
    if origin is None or origin.run_id != run:
        # The answer is the same whether another run has published the event, or it does not exist: the user has no
        # rights on the connection.
        said = f"run {run_id} of DAG {dag_id} has published no event {offset} of topic {topic!r}: {BACK}"
        return _page(Text(said), status=404)
    return _page(tree.of(_seen(origin, may_see)), more=more)


def _seen(origin: TracedEvents, may_see: Rights) -> TracedEvents:
    """The events, without the runs of DAGs that the user may not see, and without the inputs of these runs."""
    run = origin.run_id
    if run is not None and orchestrator_of(run) == AIRFLOW and not may_see(read_airflow_run(run)[0]):
        origin = replace(origin, run_id=None, asset=None, partition=None, run=None, inputs=(), notes=(HIDDEN,))
    original = None if origin.original is None else _seen(origin.original, may_see)
    return replace(origin, inputs=_seen_inputs(origin.inputs, may_see), original=original)


def _seen_inputs(inputs: Iterable[TracedInput], may_see: Rights) -> tuple[TracedInput, ...]:
    return tuple(replace(read, origins=tuple(_seen(each, may_see) for each in read.origins)) for read in inputs)


def _page(shown: Tree | Text, *, status: int = 200, more: str = "") -> HTMLResponse:
    """A page. If something is left out, it links to the page with the query `more`."""
    console = Console(file=io.StringIO(), record=True, width=LINE, highlight=False, force_terminal=True)
    console.print(shown)
    text = console.export_html(theme=THEME, code_format=PAGE)
    if more and MORE in text:
        text = text.replace("</body>", LINK.format(query=html.escape(more), text=SHOW_MORE))
    return HTMLResponse(text, status_code=status, headers=HEADERS)
