"""The job that makes a database ready for the reference location."""

from __future__ import annotations

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL


def test_setup_registers_dead_letters_of_every_consumed_topic_and_may_be_repeated(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    import definitions

    setup = definitions.defs.resolve_job_def("setup")
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(2):
            assert setup.execute_in_process(instance=instance).success
    registered = {topic.name for topic in platform.registry.topics()}
    consumed = {consumer.topic for consumer in definitions.CONSUMERS}
    assert registered == {
        *(topic.name for topic in definitions.TOPICS),
        *(topic.dead_letter_topic for topic in consumed),
    }
    for consumer in definitions.CONSUMERS:
        assert platform.registry.consumer(consumer.topic.name, consumer.consumer.name)
        # What the check `delivered` links to is an asset.
        assert platform.dead_letters.topic_of(consumer.topic.name) == consumer.topic.dead_letter_topic
        key = dg.AssetKey(["topic", consumer.topic.dead_letter_topic])
        assert not definitions.defs.resolve_asset_graph().get(key).is_executable
    with platform.database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM rides.order_status").fetchone() == (0,)


def test_assets_that_are_materialized_together_share_one_process_and_its_spark_session() -> None:
    import definitions

    assert definitions.defs.resolve_implicit_global_asset_job_def().executor_def is dg.in_process_executor
