"""Queues as assets: the queue itself, to which services send, and the worker, whose runs handle the messages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import Connection, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.handlers import check_ran
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS, AssetOptions, TickOptions
from eventsql_orchestration.dagster.consumers.sensors import build_sensor
from eventsql_orchestration.dagster.consumers.user_function import UserFunction
from eventsql_orchestration.dagster.lineage.origin import lineage
from eventsql_orchestration.dagster.metadata_keys import INPUT_SHARD, PUBLISHED_EVENTS, PUBLISHED_TOPIC, ROW_COUNT
from eventsql_orchestration.dagster.queues.tick import QueueWatch
from eventsql_orchestration.dagster.register import require_queue
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.steps import job_of_assets, log_materialization, step_of_assets
from eventsql_orchestration.dagster.tags import ALIVE_TAG, CONSUMER_RUN, HANDLED_TAG, QUEUE_TAG, SHARD_TAG
from eventsql_orchestration.dagster.topics import Dependencies, dependencies, published_topics, topic_key
from eventsql_orchestration.dagster.translator import EventSQLTranslator, translated
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.limits import WorkLimits
from eventsql_orchestration.orchestration.queue_work import QueueRun, WorkedOff
from eventsql_orchestration.orchestration.tracebacks import Tracebacks
from eventsql_orchestration.queue import Message, Queue, QueueDefinition, QueueOptions
from eventsql_orchestration.queue.options import checked_options
from eventsql_orchestration.queue.worker import Backoff, exponential
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.validation import check_kind, check_name, check_several, counted

QUEUE_PREFIX: Final = "queue"
QUEUE_GROUP: Final = "queues"
QUEUE_KINDS: Final = frozenset({"queue", "postgresql"})

QUEUE: Final = "queue"
"""The metadata key with the name of an asset's queue."""

SIGNS_OF_LIFE: Final = 3
"""Signs of life of a run within its `lease`: two may fail."""

END_SECONDS: Final = 30.0
"""Seconds that a run waits at its end for its last sign of life. A later sign would overwrite newer tags."""

DEFAULT_LIMITS: Final = WorkLimits()
DEFAULT_OPTIONS: Final = AssetOptions()
DEFAULT_QUEUE: Final = QueueOptions()

Decorator: TypeAlias = Callable[[Callable[..., Any]], "WorkerDefinition"]


def queue_key(name: str) -> dg.AssetKey:
    """The asset key of a queue: `queue/<name>`. Raises `InvalidNameError`."""
    return dg.AssetKey([QUEUE_PREFIX, check_name("queue name", name)])


def queue_asset(
    name: str,
    *,
    description: str | None = None,
    owners: Sequence[str] = (),
    deps: Dependencies = (),
    group_name: str | None = QUEUE_GROUP,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    translator: EventSQLTranslator | None = None,
) -> dg.AssetSpec:
    """A queue as an external asset, `queue/<name>`: services and consumers send to it.

    `build_queue_sensor` shows its depth and age. `deps` are the assets whose runs send to it. `tags` are tags of the
    asset. A `translator` may change everything except the key. Raises `InvalidNameError`.
    """
    spec = dg.AssetSpec(
        queue_key(name), deps=dependencies(deps), description=description or f"Messages of queue {name}.",
        metadata={QUEUE: name, **(metadata or {})}, owners=owners, group_name=group_name, tags=tags,
        kinds={*QUEUE_KINDS},
    )  # fmt: skip
    return translated(translator, None, None, spec, queue=name)


class WorkConfig(dg.Config):
    """The shard on which a run works. By default, the run works on each shard."""

    shard: str | None = None


@dataclass(frozen=True)
class WorkerDefinition:
    """A worker of a queue and everything that Dagster needs to run it.

    `publishes` are the topics that it publishes to, if they are declared as a `Topic`.
    """

    queue: str
    queue_options: QueueOptions
    asset: dg.AssetsDefinition
    job: dg.UnresolvedAssetJobDefinition
    sensor: dg.SensorDefinition
    key: dg.AssetKey
    publishes: tuple[Topic, ...]

    def register(self, platform: EventSQL) -> QueueDefinition:
        """Create the worker's topics and its queue, or give an existing queue the declared options.

        Raises `RedefinitionError`.
        """
        for topic in self.publishes:
            platform.registry.register_topic(topic)
        return Queue(platform, self.queue, **asdict(self.queue_options)).definition()


def worker_asset(
    *,
    queue: str,
    queue_options: QueueOptions = DEFAULT_QUEUE,
    publishes: Topic | str | Sequence[Topic | str] = (),
    name: str | None = None,
    backoff: Backoff = exponential,
    limits: WorkLimits = DEFAULT_LIMITS,
    options: AssetOptions = DEFAULT_OPTIONS,
    ticks: TickOptions = DEFAULT_TICKS,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> Decorator:
    """Make a worker of a queue from a function `f(messages, connection)`. Each call gets at most `limits.batch`.

    Writes through `connection` commit together with the acknowledgement of the messages: exactly once. Other effects
    happen at least once. The function may also take `context` (of the run), and resources as parameters annotated with
    their types. If it raises, its writes are rolled back and it gets the messages one by one. A message that fails
    alone is released for `backoff(receives)` seconds, with the error in its history, and becomes a dead letter after
    the queue's `max_receives`. The run goes on with the other messages, and fails at its end. Heartbeats keep the
    messages from other receivers while the function works.

    The function returns None: anything else is dropped with a warning. With `publishes`, it returns publications for
    these topics, or None. They are published in the transaction that acknowledges the messages, with the run in their
    metadata, and the topics become assets of the same run.

    The job `register` creates the queue and each topic that is given as a `Topic`, and gives an existing queue the
    `queue_options` that are set. A topic that is given by its name has to exist. A sensor requests a run if messages
    wait. The asset's name is `name` (by default the function's name). The job and the sensor are called `work_<name>`.
    Raises `ValidationError` or `DagsterInvalidDefinitionError` at definition.
    """
    check_kind("queue_options", queue_options, QueueOptions)
    check_kind("limits", limits, WorkLimits)
    check_kind("options", options, AssetOptions)
    check_kind("ticks", ticks, TickOptions)
    options.check_retries(limits.lease)
    if not callable(backoff):
        raise ValidationError(f"backoff must be a function, not {type(backoff).__name__}")
    declared = checked_options(check_name("queue name", queue), queue_options)
    topics = published_topics(publishes)
    names = frozenset(topic if isinstance(topic, str) else topic.name for topic in topics)

    def decorate(function: Callable[..., Any]) -> WorkerDefinition:
        user = UserFunction.of(function, "messages", "connection")
        asset_name = name or user.call.__name__
        specs = _specs(queue, asset_name, user.call.__doc__, topics, options)
        step = _Step(queue, declared, user, limits, backoff, specs[0].key, names)
        asset = step_of_assets(
            asset_name, specs, user.as_compute(WorkConfig, step), pool=options.pool, retry_policy=options.retry_policy
        )
        job = job_of_assets(
            f"work_{asset_name}",
            asset.keys,
            description=f"Handles the messages of queue {queue}, a batch at a time.",
            tags={QUEUE_TAG: queue, **CONSUMER_RUN, **(options.tags or {})},
        )
        sensor = build_sensor(QueueWatch(queue, asset_name, limits, job.name, ticks), job, default_status)
        created = tuple(topic for topic in topics if isinstance(topic, Topic))
        return WorkerDefinition(queue, declared, asset, job, sensor, step.key, created)

    return decorate


def _specs(
    queue: str, name: str, docstring: str | None, topics: Iterable[Topic | str], options: AssetOptions
) -> list[dg.AssetSpec]:
    """The worker's asset, and the assets of the topics that it publishes to. Raises `ValidationError`."""
    if name == queue:
        raise ValidationError(
            f"worker {queue!r} and queue {queue!r} would have the same label in Dagster's graph: give the worker's "
            f"asset another name, for example name={'work_' + queue!r}"
        )
    spec = options.spec(name, docstring, deps=[queue_key(queue)], metadata={QUEUE: queue})
    own = translated(options.translator, None, name, spec, queue=queue).replace_attributes(skippable=True)
    return [own, *(options.published(topic, name, own.key) for topic in topics)]


def queues_of(workers: Collection[WorkerDefinition]) -> list[str]:
    """The workers' queues.

    Raises `ValidationError` for values that are not definitions of workers, and if two workers have the same queue:
    each would treat the other's runs as its own.
    """
    check_several("workers", workers, Collection)
    places: dict[str, str] = {}
    for worker in workers:
        if not isinstance(worker, WorkerDefinition):
            raise ValidationError(f"{type(worker).__name__} is not a worker: make a worker with worker_asset")
        name = worker.key.to_user_string()
        if (other := places.setdefault(worker.queue, name)) != name:
            raise ValidationError(
                f"{other!r} and {name!r} are both workers of queue {worker.queue!r}: make them one worker, with "
                "a higher max_runs if you want several runs at once"
            )
    return list(places)


@dataclass(frozen=True)
class _Step:
    """The step of a worker's asset: it handles the queue's messages, reports, and materializes the asset."""

    queue: str
    options: QueueOptions
    user: UserFunction
    limits: WorkLimits
    backoff: Backoff
    key: dg.AssetKey
    publishes: frozenset[str]

    def __call__(
        self, context: dg.AssetExecutionContext, config: WorkConfig, resources: Mapping[str, Any]
    ) -> Iterator[dg.MaterializeResult[Any]]:
        shard = config.shard or context.run.tags.get(SHARD_TAG)
        done = WorkedOff()
        try:
            self._work(context, shard, resources, done)
            self._report(context, done)
        except BaseException:
            # A failing run has acknowledged the messages that it handled, so they belong to the asset's history.
            for key, metadata in self._results(done, shard):
                log_materialization(context, key, metadata)
            raise
        if not done.handled:
            context.log.info("no messages of queue %s wait", self.queue)
        for key, metadata in self._results(done, shard):
            yield dg.MaterializeResult(asset_key=key, metadata=metadata)

    def _work(
        self, context: dg.AssetExecutionContext, shard: str | None, resources: Mapping[str, Any], done: WorkedOff
    ) -> None:
        eventsql: EventSQLResource = resources[RESOURCE_KEY]
        require_queue(eventsql.platform, self.queue)
        source = eventsql.platform if shard is None else eventsql.shard(shard)
        call, tracebacks = partial(self.user, resources, context=context), Tracebacks(context.log)

        def handle(messages: Sequence[Message], connection: Connection) -> Mapping[str, int]:
            returned = call(messages=messages, connection=connection)
            if self.publishes:
                return self._publish(context, eventsql, returned, connection)
            tracebacks.show_unused(
                returned, "a worker returns None, or publications for the topics that it `publishes`"
            )
            return {}

        run = QueueRun(
            Queue(source, self.queue, ordered=self.options.ordered), handle, self.limits, self.backoff, context.log,
            done,
        )  # fmt: skip
        with _signs_of_life(context, self.limits.lease):
            run.drain()

    def _report(self, context: dg.AssetExecutionContext, done: WorkedOff) -> None:
        """Raise `dagster.Failure` if messages failed."""
        if not done.failed:
            return
        run_id = context.run.run_id
        if not done.gave_up:
            context.instance.add_run_tags(run_id, {HANDLED_TAG: run_id})
        raise _failure(self.queue, done)

    def _publish(
        self, context: dg.AssetExecutionContext, eventsql: EventSQLResource, returned: object, connection: Connection
    ) -> Mapping[str, int]:
        """Publish what the function returned. Gives the number of events of each topic."""
        check_ran(returned)
        publications = [] if returned is None else returned
        if not isinstance(publications, Sequence) or isinstance(publications, str | bytes):
            raise ValidationError(
                f"the worker of queue {self.queue!r} has to return a list of publications or None, not "
                f"{type(returned).__name__}"
            )
        for each in publications:
            if not isinstance(each, Publication) or each.topic not in self.publishes:
                raise ValidationError(
                    f"the worker of queue {self.queue!r} publishes to {sorted(self.publishes)}, not {each!r}"
                )
        origin = lineage(context)
        mine = [replace(each, metadata={**each.metadata, **origin}) for each in publications]
        eventsql.platform.publisher.publish_all(mine, connection=connection)
        return Counter(each.topic for each in mine)

    def _results(self, done: WorkedOff, shard: str | None) -> Iterator[tuple[dg.AssetKey, dict[str, Any]]]:
        """The metadata of the assets that the run materialized: none if it handled nothing."""
        if not done.handled:
            return
        yield self.key, self._metadata(done, shard)
        for topic, events in done.published.items():
            yield topic_key(topic), {PUBLISHED_TOPIC: topic, PUBLISHED_EVENTS: events, ROW_COUNT: events}

    def _metadata(self, done: WorkedOff, shard: str | None) -> dict[str, Any]:
        return {
            QUEUE: self.queue,
            **({} if shard is None else {INPUT_SHARD: shard}),
            "messages": done.handled,
            ROW_COUNT: done.handled,
            "batches": done.batches,
            **({"failed receives": done.failed} if done.failed else {}),
            **({"lost messages": done.lost} if done.lost else {}),
        }


@contextmanager
def _signs_of_life(context: dg.AssetExecutionContext, lease: float) -> Iterator[None]:
    """Give signs of life to ticks during the block. A run that ends before its first sign is due gives none."""
    stop = threading.Event()

    def beat() -> None:
        signs = 0
        while not stop.wait(lease / SIGNS_OF_LIFE):
            signs += 1
            try:
                context.instance.add_run_tags(context.run.run_id, {ALIVE_TAG: str(signs)})
            except Exception as error:  # noqa: BLE001 - whatever Dagster's storage raises, the next sign may succeed
                context.log.info("Dagster's storage took no sign of life: %s", error)

    heart = start_thread("signs-of-life", beat)
    try:
        yield
    finally:
        stop.set()
        heart.join(END_SECONDS)


def _failure(queue: str, done: WorkedOff) -> dg.Failure:
    first = done.failures[0]
    again = "they are received again after a pause, up to the queue's max_receives, and become dead letters then"
    if done.gave_up:
        again = "each message of a batch failed, so the run ended; the messages are received again after a pause"
    return dg.Failure(
        f"{counted(done.failed, 'receive')} of queue {queue} failed, the first of message {first.id} ({first.reason}): "
        f"{again}. The run handled {counted(done.handled, 'message')}",
        metadata={
            QUEUE: queue,
            "failed receives": done.failed,
            "failures": dg.MetadataValue.json([asdict(each) for each in done.failures]),
        },
        # The messages have their own retries.
        allow_retries=False,
    )
