"""The definitions of the reference location: its job `register`, and the executor of its assets."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest

from assets.rides.answers import QUEUES
from eventsql_orchestration import EventSQL
from eventsql_orchestration.queue import list_queues


def test_registration_creates_queues_and_dead_letter_topics_of_every_consumed_topic_and_may_be_repeated(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    import definitions

    register = definitions.defs.resolve_job_def("register")
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(2):
            assert register.execute_in_process(instance=instance).success
        with dg.build_sensor_context(instance=instance, resources={"eventsql": definitions.eventsql}) as context:
            tick = definitions.defs.get_repository_def().get_sensor_def("lag").evaluate_tick(context)
    registered = {topic.name for topic in platform.registry.topics()}
    consumed = {consumer.topic for consumer in definitions.CONSUMERS}
    assert registered == {
        *(topic.name for topic in definitions.TOPICS),
        *(topic.dead_letter_topic for topic in consumed),
    }
    # The check `delivered` links to their pages.
    assert tick.cursor is not None
    assert json.loads(tick.cursor)["arrivals"]["seen"].keys() == {topic.dead_letter_topic for topic in consumed}
    for consumer in definitions.CONSUMERS:
        assert platform.registry.consumer(consumer.topic.name, consumer.consumer.name)
        # What the check `delivered` links to is an asset.
        assert platform.dead_letters.topic_of(consumer.topic.name) == consumer.topic.dead_letter_topic
        key = dg.AssetKey(["topic", consumer.topic.dead_letter_topic])
        assert not definitions.defs.resolve_asset_graph().get(key).is_executable
    queues = {each.name for each in list_queues(platform.database)}
    assert queues >= {spec.key.path[-1] for spec in QUEUES}
    with platform.database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM rides.order_status").fetchone() == (0,)


def test_assets_that_are_materialized_together_share_one_process_and_its_spark_session() -> None:
    import definitions

    assert definitions.defs.resolve_implicit_global_asset_job_def().executor_def is dg.in_process_executor


def test_the_ui_describes_every_definition() -> None:
    import definitions

    location = definitions.defs.get_repository_def()
    jobs = [job for job in location.get_all_jobs() if not job.name.startswith("__")]
    shown: list[Any] = [
        *jobs,
        *location.sensor_defs,
        *location.schedule_defs,
        *definitions.defs.resolve_all_asset_specs(),
    ]
    checks = [location.asset_graph.get(key) for key in location.asset_graph.asset_check_keys]
    assert [each for each in (*shown, *checks) if not each.description] == []
