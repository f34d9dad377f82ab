"""Dagster for tests: an instance of the test's own, the resource, and runs and ticks of definitions in this process."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication, Shard, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource, WorkerDefinition, write_instance
from eventsql_orchestration.dagster.consumers.tick import Budget, Tick
from eventsql_orchestration.dagster.kept_platforms import KEPT
from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE
from eventsql_orchestration.dagster.tags import CLAIM_TAG
from eventsql_orchestration.orchestration.owners import owner_of_run
from tests.conftest import TEMPLATE, Administrator

Metadata: TypeAlias = Callable[[dg.ExecuteInProcessResult, dg.AssetKey], dict[str, Any]]

NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"
ONE, OTHER = "shard-1", "shard-2"

EFFECTS = """
CREATE TABLE effect (
    position bigserial, id bigint NOT NULL, partition int NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An instance with its storage in memory."""
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an instance with a migrated storage. Migrating takes 0.3 s of processor time, a copy 0.1 s."""
    home = tmp_path_factory.mktemp("migrated")
    with dg.instance_for_test(temp_dir=str(home)) as instance:
        instance.get_runs()
    return home


@pytest.fixture
def instance_home(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of an instance of the test's own, with a migrated storage."""
    return str(shutil.copytree(migrated, tmp_path_factory.mktemp("instance"), dirs_exist_ok=True))


@pytest.fixture
def shared_instance(instance_home: str) -> Iterator[dg.DagsterInstance]:
    """An instance with its storage on disk, which threads and processes share."""
    with dg.instance_for_test(temp_dir=instance_home) as opened:
        yield opened


@pytest.fixture
def home(tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an instance with its storage in PostgreSQL, as `eventsql dev` and a deployment have it."""
    monkeypatch.setenv(STORAGE_VARIABLE, "of another instance")
    return write_instance(tmp_path, dsn)


@pytest.fixture
def stored(home: Path) -> Iterator[dg.DagsterInstance]:
    """The instance of `home`."""
    with dg.DagsterInstance.from_config(str(home)) as opened:
        yield opened


@pytest.fixture
def eventsql(dsn: str) -> Iterator[EventSQLResource]:
    resource = EventSQLResource(dsn=dsn)
    yield resource
    # The test itself closes what it uses outside of a run.
    resource.platform.close()


@pytest.fixture(autouse=True)
def _without_kept_platforms() -> Iterator[None]:
    yield
    KEPT.close()


def registering(*given: Topic | ConsumerDefinition) -> Callable[[EventSQL], None]:
    """A function for the mark `prepared`: it registers topics and consumers, in this order."""

    def register(platform: EventSQL) -> None:
        for each in given:
            if isinstance(each, Topic):
                platform.registry.register_topic(each)
            else:
                each.register(platform)

    return register


def sql(platform: EventSQL | Shard, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Execute a statement by itself. Returns its rows."""
    with platform.database.connection() as connection:
        found = connection.execute(statement, values or None)
        return [] if found.description is None else found.fetchall()


def use(resource: EventSQLResource, function: Callable[[EventSQLResource], object] = lambda _: None) -> None:
    """Execute a run whose only op calls a function with a resource."""

    @dg.op
    def call(eventsql: EventSQLResource) -> None:
        function(eventsql)

    @dg.job(resource_defs={"eventsql": resource})
    def job() -> None:
        call()

    assert job.execute_in_process().success


def request_of(answer: Any) -> dg.RunRequest:
    """The only run request of a tick."""
    assert isinstance(answer, list), answer
    (request,) = answer
    assert isinstance(request, dg.RunRequest)
    return request


def executed_check(
    check: dg.AssetChecksDefinition, asset: dg.AssetsDefinition | dg.AssetSpec, eventsql: EventSQLResource,
    instance: dg.DagsterInstance | None = None,
) -> dg.AssetCheckEvaluation:  # fmt: skip
    """The check of an asset executed by hand, in a run."""
    location = dg.Definitions(assets=[asset], asset_checks=[check], resources={"eventsql": eventsql})
    whole = location.resolve_implicit_global_asset_job_def()
    job = whole.get_subset(asset_check_selection=set(check.check_keys))
    (evaluation,) = job.execute_in_process(instance=instance).get_asset_check_evaluations()
    return evaluation


class Workbench:
    """Publishes events, evaluates ticks, executes runs, and reads the results."""

    def __init__(self, platform: EventSQL, eventsql: EventSQLResource, instance: dg.DagsterInstance) -> None:
        self.platform = platform
        self.eventsql = eventsql
        self.instance = instance

    def publish(self, topic: str, count: int, *, partition: int | None = None) -> list[int]:
        """Publish and transfer; gives the new offsets."""
        before = self.platform.reader.end(topic)
        self.platform.publisher.publish_all(Publication(topic, b"%d" % i, partition=partition) for i in range(count))
        self.platform.transfer.run_once()
        return [event.id for event in self.platform.reader.read(topic, after=before)]

    def tick(self, sensor: dg.SensorDefinition, *, eventsql: EventSQLResource | None = None) -> Any:
        """The run requests of an evaluation, or its skip reason."""
        with dg.build_sensor_context(
            instance=self.instance, resources={"eventsql": eventsql or self.eventsql}
        ) as context:
            tick = sensor.evaluate_tick(context)
        return list(tick.run_requests or []) or tick.skip_message

    def request(self, definition: ConsumerDefinition) -> dg.RunRequest:
        """The only run request of a tick of the consumer's first sensor."""
        return request_of(self.tick(definition.sensors[0]))

    def job(self, *definitions: ConsumerDefinition | WorkerDefinition, **resources: Any) -> dg.JobDefinition:
        """The job of a definition, or of several that share it."""
        return dg.Definitions(
            assets=[definition.asset for definition in definitions],
            jobs=[definitions[0].job],
            resources={"eventsql": self.eventsql, **resources},
        ).resolve_job_def(definitions[0].job.name)

    def run(
        self,
        definition: ConsumerDefinition | WorkerDefinition,
        request: dg.RunRequest | None = None,
        **resources: Any,
    ) -> dg.ExecuteInProcessResult:
        """Execute the run of a request, or one that was launched by hand."""
        return self.execute(self.job(definition, **resources), request)

    def execute(self, job: dg.JobDefinition, request: dg.RunRequest | None = None) -> dg.ExecuteInProcessResult:
        return job.execute_in_process(
            instance=self.instance,
            run_config=request.run_config if request else None,
            tags=dict(request.tags) if request else None,
            raise_on_error=False,
        )

    def requested(self, definition: ConsumerDefinition, request: dg.RunRequest, status: dg.DagsterRunStatus) -> str:
        """Create the run of a request as Dagster stores it before it executes the run. Returns the run's id."""
        run = self.instance.create_run_for_job(
            self.job(definition), run_config=request.run_config, tags=dict(request.tags), status=status
        )
        return run.run_id

    def adopted(
        self,
        definition: ConsumerDefinition,
        request: dg.RunRequest,
        status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED,
    ) -> tuple[str, Claim]:
        """Create the run of a request as `requested` does, and adopt its claim. Returns the run's id and the claim."""
        run_id = self.requested(definition, request, status)
        return run_id, self.platform.claims.adopt(int(request.tags[CLAIM_TAG]), owner=owner_of_run(run_id))

    def stored(self, run_id: str) -> dg.DagsterRun:
        """A run as Dagster has stored it."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def at(self, ahead: float) -> Tick:
        """A tick on the only database, whose clock is so many seconds ahead."""
        shard = self.platform.shards[0]
        return Tick(shard, self.instance, logging.getLogger, Budget(math.inf, 1), lambda: time.time() + ahead)

    def effects(self) -> list[int]:
        """The ids of events in the order in which they took effect."""
        return [event for (event,) in sql(self.platform, "SELECT id FROM effect ORDER BY position")]

    def offset(self, definition: ConsumerDefinition, partition: int = -1) -> int:
        states = self.platform.registry.consumer(definition.topic.name, definition.consumer.name)
        return next(state.last_event_id for state in states if state.partition == partition)

    def end_lease(self, definition: ConsumerDefinition) -> None:
        """Let the lease of every partition be over, as if its time had passed."""
        sql(
            self.platform,
            "UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 second' "
            "WHERE eql_topic = %s AND eql_name = %s",
            definition.topic.name, definition.consumer.name,
        )  # fmt: skip

    def end_pause(self, definition: ConsumerDefinition) -> None:
        """Let the event that failed be due."""
        self._retry_in(definition, hours=0)

    def prolong_pause(self, definition: ConsumerDefinition) -> None:
        """Let the event that failed not be due for an hour, however long the test takes."""
        self._retry_in(definition, hours=1)

    def _retry_in(self, definition: ConsumerDefinition, *, hours: int) -> None:
        sql(
            self.platform,
            "UPDATE eventsql.consumer SET eql_retry_at = now() + make_interval(hours => %s) "
            "WHERE eql_topic = %s AND eql_name = %s",
            hours, definition.topic.name, definition.consumer.name,
        )  # fmt: skip

    def lease_is_over(self, definition: ConsumerDefinition) -> bool:
        """Whether no partition has a lease."""
        ((is_over,),) = sql(
            self.platform,
            "SELECT bool_and(eql_lease_expires_at IS NULL OR eql_lease_expires_at < clock_timestamp()) "
            "FROM eventsql.consumer WHERE eql_topic = %s AND eql_name = %s",
            definition.topic.name, definition.consumer.name,
        )  # fmt: skip
        return bool(is_over)

    def claims(self) -> list[tuple[int, int, str]]:
        """Every claim ever made: after, upto, state."""
        return sql(self.platform, "SELECT eql_after, eql_upto, eql_state FROM eventsql.consumer_claim ORDER BY eql_id")


@pytest.fixture
def bench(platform: EventSQL, eventsql: EventSQLResource, instance: dg.DagsterInstance) -> Workbench:
    sql(platform, EFFECTS)
    return Workbench(platform, eventsql, instance)


@pytest.fixture
def metadata() -> Metadata:
    """The metadata of the only materialization of an asset in a run."""

    def read(result: dg.ExecuteInProcessResult, key: dg.AssetKey) -> dict[str, Any]:
        found: Sequence[Any] = [
            event.step_materialization_data.materialization
            for event in result.all_events
            if event.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION and event.asset_key == key
        ]
        assert len(found) == 1
        return {name: value.value for name, value in found[0].metadata.items()}

    return read


@pytest.fixture
def shard_templates() -> tuple[str, ...]:
    """The databases of which the shards are copies."""
    return TEMPLATE, TEMPLATE


@pytest.fixture
def shards(
    administrator: Administrator, instance: dg.DagsterInstance, shard_templates: tuple[str, ...]
) -> Iterator[dict[str, Workbench]]:
    """Two databases as shards of one platform, with a workbench on each. Ticks and runs cover both shards."""
    with ExitStack() as stack:
        dsns = [stack.enter_context(administrator.copied(template=template)) for template in shard_templates]
        platform = stack.enter_context(EventSQL(*dsns, transfer=False)).open()
        for shard in platform.shards:
            sql(shard, EFFECTS)
        eventsql = EventSQLResource(dsn=" ".join(dsns))
        stack.callback(eventsql.platform.close)
        alone = {
            str(shard.name): stack.enter_context(EventSQL(shard.database.dsn, transfer=False))
            for shard in platform.shards
        }
        yield {name: Workbench(each, eventsql, instance) for name, each in alone.items()}


@pytest.fixture
def with_one_down(shards: dict[str, Workbench]) -> Iterator[EventSQLResource]:
    """Both shards while the server of the second one is down."""
    resource = EventSQLResource(dsn=f"{shards[ONE].platform.database.dsn} {NOWHERE}")
    yield resource
    resource.platform.close()
