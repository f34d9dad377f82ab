"""The link of a task, and the page that it opens in Airflow's API server."""

from __future__ import annotations

import asyncio
import html
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from airflow import plugins_manager
from airflow.api_fastapi.core_api import security

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.airflow import EventSQLConsumeOperator, EventSQLPublishOperator
from eventsql_orchestration.airflow.links import PREFIX, TraceLink
from eventsql_orchestration.airflow.local import connection_of
from eventsql_orchestration.airflow.pages import app
from tests.airflow.conftest import context_of


def get(path: str, **params: str | int) -> httpx.Response:
    """The answer of the API server to a browser that is not logged in."""

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://airflow") as browser:
            return await browser.get(path, params=params or None)

    return asyncio.run(answer())


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """A user is logged in, with rights on each DAG except for these."""
    dags = set[str]()
    manager = SimpleNamespace(is_authorized_dag=lambda *, details, **_: details.id not in dags)
    monkeypatch.setattr(security, "get_auth_manager", lambda: manager)
    monkeypatch.setattr("airflow.models.dag.DagModel.get_team_name", lambda _: None)
    app.dependency_overrides[security.get_user] = lambda: SimpleNamespace(name="me")
    yield dags
    app.dependency_overrides.clear()


@pytest.fixture
def rides(connected: EventSQL) -> EventSQL:
    """A topic with events of a service, and one for a task's own."""
    for name in ("rides", "bills"):
        connected.registry.register_topic(Topic(name))
    connected.registry.register_consumer(Consumer("rides", "billing"))
    connected.publisher.publish_all(Publication("rides", b"%d" % number) for number in range(3))
    connected.transfer.run_once()
    return connected


def link_of(operator: Any, context: Any) -> str:
    """The path of a task's link below the pages, after the task has run."""
    operator.execute(context)
    key = SimpleNamespace(dag_id=context["ti"].dag_id, run_id=context["ti"].run_id)
    link = TraceLink().get_link(operator, ti_key=key)  # type: ignore[arg-type]
    assert urlsplit(link).path.startswith(f"{PREFIX}/trace/")
    return link.removeprefix(PREFIX)


def billing() -> EventSQLConsumeOperator:
    return EventSQLConsumeOperator(
        task_id="bill", topic="rides", consumer="billing", python_callable=lambda events, connection: None
    )


def test_the_link_of_a_task_that_publishes_opens_the_trace_of_its_last_event(
    rides: EventSQL, forbidden: set[str]
) -> None:
    publish = EventSQLPublishOperator(task_id="publish", topic="bills", events=["a", "<script>"], outlet=False)
    page = get(link_of(publish, context_of("publish", run_id="manual__1+00:00")))
    assert page.status_code == 200
    assert "bills" in page.text
    assert "event 2" in page.text
    # Its run is a link to Airflow's page of it.
    assert 'href="/dags/dag/runs/manual__1%2B00%3A00"' in page.text


def test_the_link_of_a_task_that_consumes_opens_the_ranges_that_its_run_has_read(
    rides: EventSQL, forbidden: set[str]
) -> None:
    page = get(link_of(billing(), context_of("bill")))
    assert page.status_code == 200
    assert "offsets 1 to 3" in page.text
    assert "as consumer billing" in page.text
    assert "published by a service or a program" in page.text


def test_a_page_links_to_everything_that_it_leaves_out(rides: EventSQL, forbidden: set[str]) -> None:
    for number in range(3):
        publish = EventSQLPublishOperator(task_id="publish", topic="rides", events=["a"], outlet=False)
        publish.execute(context_of("publish", run_id=f"manual__{number}"))
    rides.transfer.run_once()
    page = link_of(billing(), context_of("bill"))
    narrow = get(f"{page}&width=2")
    assert "2 publishers more" in narrow.text
    assert "--" not in narrow.text.partition("<pre>")[2]

    (link,) = re.findall(r'href="(\?[^"]+)">Show more</a>', narrow.text)
    whole = get(f"{urlsplit(page).path}{html.unescape(link)}")
    assert "manual__0" in whole.text
    assert "Show more" not in whole.text


def test_a_page_shows_nothing_of_what_another_run_did(rides: EventSQL, forbidden: set[str]) -> None:
    link_of(billing(), context_of("bill", run_id="manual__1"))
    page = get("/trace/dag", run_id="manual__2", conn_id="eventsql_default")
    assert "no claim of this run is kept" in page.text
    foreign: dict[str, Any] = {"run_id": "manual__2", "conn_id": "eventsql_default", "topic": "rides", "offset": 1}
    answers = {topic: get("/trace/dag", **{**foreign, "topic": topic}) for topic in ("rides", "bills", "missing")}
    assert {page.status_code for page in answers.values()} == {404}
    texts = {page.text.replace(topic, "") for topic, page in answers.items()}
    assert len(texts) == 1, "no answer tells which topics there are"
    page = get("/trace/dag", **{**foreign, "topic": "<b>none</b>"})
    assert page.status_code == 404
    assert "<b>none" not in page.text


def test_a_page_names_no_run_of_a_dag_that_the_user_has_no_rights_on(rides: EventSQL, forbidden: set[str]) -> None:
    foreign = context_of("publish", run_id="manual__foreign")
    foreign["ti"].dag_id = "secret"
    EventSQLPublishOperator(task_id="publish", topic="rides", events=["a"], outlet=False).execute(foreign)
    rides.transfer.run_once()
    page = link_of(billing(), context_of("bill"))
    assert "secret/manual__foreign" in get(page).text

    forbidden.add("secret")
    answer = get(page)
    assert answer.status_code == 200
    assert "a run of a DAG that you have no rights on" in answer.text
    assert "secret" not in answer.text
    assert "foreign" not in answer.text
    assert "offsets 1 to 4" in answer.text
    forbidden.add("dag")
    assert get(page).status_code == 403


@pytest.mark.parametrize(
    "changed",
    [{"conn_id": "none"}, {"offset": 2**63}, {"offset": -1}, {"topic": "\0"}, {"topic": "none"}, {"run_id": "\0"}],
    ids=str,
)
def test_a_page_of_nothing_says_so(rides: EventSQL, forbidden: set[str], changed: dict[str, str | int]) -> None:
    asked = {"run_id": "manual__1", "conn_id": "eventsql_default", "topic": "rides", "offset": 1, **changed}
    assert get("/trace/dag", **asked).status_code in (404, 422)


def test_a_page_of_claims_of_an_impossible_run_says_so(rides: EventSQL, forbidden: set[str]) -> None:
    assert get("/trace/dag", run_id="\0", conn_id="eventsql_default").status_code == 404


def test_a_page_says_that_the_database_cannot_be_reached_without_its_password(
    forbidden: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql://me:hush@127.0.0.1:1/none?connect_timeout=2"
    monkeypatch.setenv("AIRFLOW_CONN_EVENTSQL_DEFAULT", connection_of([url], "eventsql"))
    page = get("/trace/dag", run_id="manual__1", conn_id="eventsql_default")
    assert page.status_code == 503
    assert "hush" not in page.text


def test_a_page_is_for_those_who_are_logged_in(rides: EventSQL) -> None:
    page = get("/trace/dag", run_id="manual__1", conn_id="eventsql_default")
    assert page.status_code == 401


def test_airflow_loads_the_plugin_and_only_its_server_loads_the_pages() -> None:
    apps, _ = plugins_manager.get_fastapi_plugins()
    assert [each["app"] for each in apps if each["url_prefix"] == PREFIX] == [app]
    (plugin,) = (each for each in plugins_manager._get_plugins()[0] if each.name == "eventsql")
    assert "fastapi_apps" not in vars(plugin)
    assert "eventsql_orchestration.airflow.pages" in sys.modules
