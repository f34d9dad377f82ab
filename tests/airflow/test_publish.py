"""Publishing: once for all tries, with the task in every event, and the asset of the topic."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pandas  # type: ignore[import-untyped]  # it has no types here
import pytest

from eventsql_orchestration import Event, EventSQL, Publication, Topic
from eventsql_orchestration.airflow import EventSQLPublishOperator, topic_asset
from eventsql_orchestration.errors import TopicNotFoundError, ValidationError
from eventsql_orchestration.orchestration.shards import shards_of
from tests.airflow.conftest import context_of


@pytest.fixture
def rides(connected: EventSQL) -> EventSQL:
    connected.registry.register_topic(Topic("rides"))
    return connected


def logged(platform: EventSQL) -> list[Event]:
    platform.transfer.run_once()
    return [event for batch in platform.reader.stream("rides") for event in batch]


def execute(events: Any, context: Any = None, **options: Any) -> dict[str, Any]:
    made = EventSQLPublishOperator(task_id="publish", topic="rides", events=events, outlet=False, **options)
    return made.execute(context or context_of("publish"))


@pytest.mark.parametrize(
    ("events", "values"),
    [
        ("text", [b"text"]),
        (b"bytes", [b"bytes"]),
        ({"a": 1}, [b'{"a":1}']),
        ({"value": {"a": 1}, "key": "k"}, [b'{"a":1}']),
        ([1, "two", {"value": b"3"}], [b"1", b"two", b"3"]),
        (lambda context: [context["ti"].task_id], [b"publish"]),
        (Publication("rides", b"p"), [b"p"]),
        ([], []),
    ],
)
def test_every_form_of_events_is_published(rides: EventSQL, events: Any, values: list[bytes]) -> None:
    assert execute(events)["events"] == len(values)
    assert sorted(event.value for event in logged(rides)) == sorted(values)


def test_airflows_rendering_leaves_a_function_of_the_context_alone(rides: EventSQL) -> None:
    made = EventSQLPublishOperator(task_id="publish", topic="rides", events=lambda context: [context["ti"].task_id])
    context = context_of("publish")
    context["outlet_events"] = {outlet: SimpleNamespace(extra={}) for outlet in made.outlets}
    made.render_template_fields(context)
    assert made.execute(context)["events"] == 1


def test_each_event_names_the_dag_its_run_the_task_and_the_map_index(rides: EventSQL) -> None:
    execute("x", context_of("publish", map_index=3), key="k", headers={"own": "1"})
    (event,) = logged(rides)
    assert event.key == "k"
    assert dict(event.metadata) == {
        "airflow_dag_id": "dag", "airflow_run_id": "manual__1", "airflow_task_id": "publish",
        "airflow_map_index": "3", "own": "1",
    }  # fmt: skip


@pytest.mark.parametrize("event", ["x", {"value": "x", "key": None, "headers": None}, Publication("rides", b"x")])
def test_the_operators_key_and_headers_are_for_events_without_their_own(rides: EventSQL, event: object) -> None:
    own = Publication("rides", b"y", key="own", metadata={"of": "its own"})
    execute([event, own], key="k", headers={"of": "the operator"})
    assert {(each.key, each.metadata["of"]) for each in logged(rides)} == {("k", "the operator"), ("own", "its own")}


def test_a_missing_result_of_another_task_does_not_count_as_published(rides: EventSQL) -> None:
    for missing in (None, lambda context: context.get("xcom")):
        with pytest.raises(ValidationError, match="events is None"):
            execute(missing)
    assert not execute(["x"], context_of("publish", try_number=2))["repeated"]
    assert len(logged(rides)) == 1


def test_a_second_try_publishes_nothing_and_says_what_the_first_one_did(rides: EventSQL) -> None:
    first = execute(["a", "b"])
    again = execute(["a", "b"], context_of("publish", try_number=2))
    assert (first["repeated"], again["repeated"]) == (False, True)
    assert again["ranges"] == first["ranges"]
    assert len(logged(rides)) == 2


def test_another_run_map_index_and_batch_publish_again(rides: EventSQL) -> None:
    execute("a")
    execute("a", context_of("publish", run_id="manual__2"))
    execute("a", context_of("publish", map_index=0))
    execute("a", batch=1)
    assert len(logged(rides)) == 4


def test_nothing_is_published_to_a_topic_that_does_not_exist(connected: EventSQL) -> None:
    with pytest.raises(TopicNotFoundError):
        execute("x")


def test_an_unknown_field_of_an_event_is_refused(rides: EventSQL) -> None:
    with pytest.raises(ValidationError, match="not kye"):
        execute({"value": "x", "kye": "k"})
    assert logged(rides) == []


@pytest.mark.parametrize(
    ("events", "options"),
    [
        (pandas.DataFrame({"key": ["k"], "value": ["v"]}), {}),
        ([float("nan")], {}),
        ({"value": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, {}),
        ("\ud800", {}),
        ("x", {"batch": "first"}),
    ],
    ids=["a frame", "not a number", "a time", "half a character", "a batch that is no number"],
)
def test_events_that_cannot_be_published_as_they_are_are_refused(
    rides: EventSQL, events: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        execute(events, **options)
    assert logged(rides) == []


def test_the_topics_asset_is_an_outlet_and_gets_the_range(rides: EventSQL) -> None:
    made = EventSQLPublishOperator(task_id="publish", topic="rides", events="x")
    (outlet,) = made.outlets
    assert (outlet.name, outlet.uri) == ("rides", "eventsql://eventsql_default/rides")
    assert outlet == topic_asset("rides")

    accessor = SimpleNamespace(extra={})
    context: Any = {**context_of("publish"), "outlet_events": {outlet: accessor}}
    made.execute(context)
    assert accessor.extra["events"] == 1
    assert accessor.extra["ranges"] == [{"first": 1, "last": 1}]
    assert len(shards_of(rides)) == 1


def test_a_templated_topic_has_no_outlet() -> None:
    assert not EventSQLPublishOperator(task_id="publish", topic="{{ params.topic }}", events="x").outlets
