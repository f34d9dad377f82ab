"""Dagster's history outlives the database: a claim's id that occurs again belongs to another claim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource, consumer_asset, share_runs
from eventsql_orchestration.dagster.tags import CLAIM_TAG
from eventsql_orchestration.database import Database
from tests.dagster.conftest import Workbench, request_of, sql
from tests.dagster.location import AT_ONCE, eager, record

whole = consumer_asset(topic=eager.topic, consumer="eager", name="whole", sensor="consumer", limits=AT_ONCE)(record)
shared = share_runs(
    "consume_together",
    [
        consumer_asset(topic=Topic("rides"), consumer="first", name="first", limits=AT_ONCE)(record),
        consumer_asset(topic=Topic("trips"), consumer="second", name="second", limits=AT_ONCE)(record),
    ],
)


@pytest.fixture
def before(bench: Workbench) -> dg.RunRequest:
    """The request of the first claim that the database ever had, whose run has ended."""
    eager.register(bench.platform)
    bench.publish("rides", 3)
    request = bench.request(eager)
    assert bench.run(eager, request).success
    return request


@contextmanager
def created_again(bench: Workbench, dsn: str, *definitions: ConsumerDefinition) -> Iterator[Workbench]:
    """The same Dagster over a schema that was dropped and created again, with these consumers."""
    bench.eventsql.platform.close()
    sql(bench.platform, "DROP SCHEMA eventsql CASCADE")
    with Database(dsn) as database:
        database.migrate()
        with database.connection() as connection:
            connection.execute("DROP TABLE IF EXISTS effect")
            connection.execute("CREATE TABLE effect (position bigserial, id bigint, partition int)")
    resource = EventSQLResource(dsn=dsn)
    with EventSQL(dsn, transfer=False) as platform:
        for definition in definitions:
            definition.register(platform)
        yield Workbench(platform, resource, bench.instance)
    resource.platform.close()


@pytest.fixture
def anew(before: dg.RunRequest, bench: Workbench, dsn: str) -> Iterator[Workbench]:
    """The same Dagster over a new schema in which the consumer waits for its first events."""
    with created_again(bench, dsn, eager) as workbench:
        yield workbench


@pytest.mark.parametrize("definition", [eager, whole], ids=["sensor per partition", "sensor per consumer"])
def test_the_first_claim_of_a_new_schema_gets_a_run_of_its_own(
    before: dg.RunRequest, anew: Workbench, definition: ConsumerDefinition
) -> None:
    ids = anew.publish("rides", 5)
    first = anew.request(definition)
    assert first.tags[".dagster/eventsql_claim"] == before.tags[".dagster/eventsql_claim"]
    assert first.run_key != before.run_key, "Dagster takes no key twice"

    # The run of the old claim has ended, and says nothing about the new claim.
    assert not isinstance(anew.tick(definition.sensors[0]), list)
    assert anew.claims() == [(0, ids[-1], "claimed")]
    assert anew.run(definition, first).success
    assert anew.effects() == ids


@pytest.mark.parametrize("prefix", [".dagster/eventsql_", "eventsql/"], ids=["hidden tags", "tags of before"])
def test_a_run_that_was_requested_before_takes_no_claim_of_the_new_schema(
    before: dg.RunRequest, anew: Workbench, prefix: str
) -> None:
    """It waited in the queue meanwhile."""
    ids = anew.publish("rides", 5)
    request = anew.request(eager)
    tags = {name.replace(".dagster/eventsql_", prefix): value for name, value in before.tags.items()}
    assert anew.run(eager, dg.RunRequest(run_config=before.run_config, tags=tags)).success
    assert anew.claims() == [(0, ids[-1], "claimed")]
    assert anew.run(eager, request).success
    assert anew.effects() == ids


def test_a_run_from_before_the_new_schema_replays_no_range_of_it(before: dg.RunRequest, anew: Workbench) -> None:
    ids = anew.publish("rides", 5)
    assert anew.run(eager, anew.request(eager)).success
    config = {"ops": {"eager": {"config": {"claim": int(before.tags[".dagster/eventsql_claim"]), "replay": True}}}}
    result = anew.run(eager, dg.RunRequest(run_config=config, tags=before.tags))
    assert not result.success
    assert "restored" in str(result.failure_data_for_node("eager"))
    assert anew.effects() == ids


def test_a_reexecution_of_selected_steps_replays_no_range_of_the_new_schema(
    before: dg.RunRequest, anew: Workbench
) -> None:
    """Dagster's UI leaves the hidden tags of the run out."""
    (first,) = anew.instance.get_runs()
    ids = anew.publish("rides", 5)
    assert anew.run(eager, anew.request(eager)).success
    job = anew.job(eager)
    again = anew.instance.create_run_for_job(
        job,
        run_config=before.run_config,
        tags={name: value for name, value in before.tags.items() if not name.startswith(".dagster/")},
        parent_run_id=first.run_id,
        root_run_id=first.run_id,
    )
    assert not execute_run(InMemoryJob(job), again, anew.instance).success
    assert any("restored" in str(entry.dagster_event) for entry in anew.instance.all_logs(again.run_id))
    assert anew.effects() == ids


def test_a_shared_run_from_before_the_new_schema_keeps_no_claim_of_it(bench: Workbench, dsn: str) -> None:
    """While its first step consumes, a shared run keeps the claim of a later step."""
    for definition in shared:
        definition.register(bench.platform)
    bench.publish("trips", 3)
    before = request_of(bench.tick(shared[0].sensors[0]))
    assert before.tags["eventsql/consumer"] == "second"

    with created_again(bench, dsn, *shared) as anew:
        ids = anew.publish("trips", 5)
        requested = request_of(anew.tick(shared[0].sensors[0]))
        assert requested.tags[CLAIM_TAG] == before.tags[CLAIM_TAG]
        made = anew.platform.claims.live("trips", "second")
        assert anew.execute(anew.job(*shared), before).success
        assert anew.platform.claims.live("trips", "second") == made, "it is left to its own run"
        assert anew.execute(anew.job(*shared), requested).success
        assert anew.effects() == ids
