"""Consuming in a task: the claims that triggered its run, or the events that wait."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Shard
from eventsql_orchestration.airflow.assets import DEFAULT_CONNECTION, TEMPLATE, listed, topic_asset, topic_of
from eventsql_orchestration.airflow.backfills import RESUME_OPTIONS, ReplayRequest
from eventsql_orchestration.airflow.claim_producer import ClaimEvent
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.airflow.links import TraceLink
from eventsql_orchestration.airflow.provenance import TaskOrigin
from eventsql_orchestration.consuming.batch import check_runs
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.errors import ClaimLostError, DatabaseUnavailableError, ValidationError
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.replay import WindowReplay
from eventsql_orchestration.orchestration.backfills.windows import read_key
from eventsql_orchestration.orchestration.batch import BatchConsumer, RangeConsumer
from eventsql_orchestration.orchestration.drain import Consume, Drained, Draining
from eventsql_orchestration.orchestration.errors import FinalRunError, WindowGoneError
from eventsql_orchestration.orchestration.limits import RunLimits
from eventsql_orchestration.orchestration.owners import AIRFLOW_TRIGGER
from eventsql_orchestration.validation import check_name, check_whole

if TYPE_CHECKING:
    from airflow.sdk import Context

logger = logging.getLogger("airflow.task")

Gets = Literal["events", "claim"]

DEFAULT_LIMITS: Final = RunLimits()


class EventSQLConsumeOperator(BaseOperator):
    """Consumes events of a topic with a function.

    With `gets="events"`, `python_callable(events, connection)` gets at most `batch` events a time. Its writes through
    `connection` commit together with the offset: exactly once, also when Airflow tries the task again. An event that
    fails is tried again with backoff, and then becomes a dead letter if topic `<topic>_dlt` exists.

    With `gets="claim"`, `python_callable(claim)` gets a whole range and commits the claim itself with its effects, for
    example by `publish_output(context, …, claim=claim)` on a result of Spark. Either function may also have parameters
    `eventsql`, for the hook, and `context`.

    If a claim of `EventSQLTrigger` triggered a run, the run takes that claim over. Then it takes over the claims that
    no task had taken over when the run began: Airflow may make no run for them. Any other run claims the waiting events
    itself, of `partition` or of all partitions. It goes on with further ranges within its `limits`. A run that
    `eventsql backfill` launched replays its window instead, and consumes nothing new. Without anything to consume, the
    task is skipped. The result is a summary of the ranges, of the number of events and of dead letters. Asset events of
    the task's outlets have the summary as `consumed`. The asset event of a topic also has the summary of the events
    that were published to it.
    """

    template_fields: Sequence[str] = ("topic", "consumer", "claims")
    ui_color = "#e8f7e4"
    operator_extra_links = (TraceLink(),)

    def __init__(
        self,
        *,
        topic: str,
        consumer: str,
        python_callable: Callable[..., Any],
        gets: Gets = "events",
        batch: int = 1_000,
        limits: RunLimits = DEFAULT_LIMITS,
        partition: int | None = None,
        claims: Sequence[Mapping[str, Any]] | str | None = None,
        eventsql_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        if TEMPLATE not in topic:
            # Airflow's graph shows the topic before the task.
            kwargs["inlets"] = [*listed(kwargs.get("inlets")), topic_asset(topic, eventsql_conn_id)]
        super().__init__(**kwargs)
        check_runs(python_callable)
        if gets not in get_args(Gets):
            raise ValidationError(f"gets is one of {', '.join(map(repr, get_args(Gets)))}, not {gets!r}")
        self.topic = topic
        self.consumer = consumer
        self.python_callable = python_callable
        self.gets = gets
        self.batch = check_whole("batch", batch, least=1)
        self.limits = limits
        self.partition = partition
        self.claims = claims
        self.eventsql_conn_id = eventsql_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        check_name("consumer name", self.consumer)
        drained = Drained()
        request = ReplayRequest.read(context["dag_run"].conf)
        with EventSQLHook(self.eventsql_conn_id) as hook:
            try:
                if request is None:
                    self._consume(context, hook, drained)
                else:
                    drained = self._replay(context, hook, request)
            except FinalRunError as error:
                raise AirflowFailException(error.message) from error
            if request is None:
                self._report(hook, drained)
        if not drained.claims:
            reason = drained.note or "no events wait"
            if request is None and context["ti"].try_number > 1 and drained.note is not None:
                # The try before has failed: a skip would hide that.
                raise AirflowException(f"nothing was consumed: {reason}")
            raise AirflowSkipException(f"nothing to consume: {reason}")
        summary: dict[str, Any] = {
            "topic": self.topic,
            "consumer": self.consumer,
            "events": drained.events,
            "ranges": drained.ranges(),
            "dead_letters": [letter.event_id for letter in drained.dead_letters],
            **({} if request is None else {"backfill": read_key(request.window)[0]}),
        }
        # `TraceLink` reads it.
        self.published = next((each for each in reversed(drained.said) if each.get("ranges")), None)
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra.update(published_to(outlet, drained.said), consumed=summary)
        return summary

    def _replay(self, context: Context, hook: EventSQLHook, request: ReplayRequest) -> Drained:
        """Replay the rest of a window of a backfill. Raises `FinalRunError`."""
        if (request.topic, request.consumer) != (self.topic, self.consumer):
            return Drained(note=f"the run replays {request.topic}/{request.consumer}")
        backfill_id, window, partition = read_key(request.window)
        shard = hook.shard(window.shard)
        replay = WindowReplay(
            shard, self.topic, self.consumer, self._calls(context, hook, shard), self.limits, backfill_id, window,
            partition, TaskOrigin.of(context).run_id, logger, max_failures=request.max_failures,
            resume_options=RESUME_OPTIONS,
        )  # fmt: skip
        try:
            if context["ti"].try_number > 1:
                replay.take_back()
            # A task of Airflow cannot ask whether another run lives. A killed run loses its window when its lease ends.
            backfill = replay.run(lambda _: False)
        except WindowGoneError:
            if not replay.is_finished():
                raise
            replay.drained.note = f"another run has replayed window {request.window}"
        else:
            if Backfills([shard]).finish(backfill):
                self.log.info("backfill %s is done%s", backfill_id, "" if shard.name is None else f" on {shard.name}")
        return replay.drained

    def _consume(self, context: Context, hook: EventSQLHook, drained: Drained) -> None:
        requested = self._requested(context)
        if not requested:
            self._consume_waiting(context, hook, drained)
            return
        # Explicit claims belong to this task alone: other claims have their own tasks.
        left = [] if self.claims else self._left(context, hook, requested)
        for event in requested:
            draining = self._draining(context, hook, hook.shard(event.shard), drained)
            self._consume_partition(draining, event.partition, event, retried=context["ti"].try_number > 1)
            if drained.over:
                return
        for shard, partition, claim in left:
            draining = self._draining(context, hook, shard, drained)
            self._consume_left(draining, partition, claim)
            if drained.over:
                return

    def _left(
        self, context: Context, hook: EventSQLHook, requested: Sequence[ClaimEvent]
    ) -> list[tuple[Shard, int, Claim | None]]:
        """Claims that may have no run of their own: by partition, the trigger's claim that no task has taken over yet.

        If Airflow stores an asset event, and then a second one before it has made the run for the first, it makes no
        run for the second. The claim of the second is then older than the run of the first, so one look at the
        beginning finds it. In a retry, the result also has the partitions that this run had last and that have no claim
        now: an event of them may have failed.
        """
        own = TaskOrigin.of(context).run_id if context["ti"].try_number > 1 else None
        named = {(event.shard, event.partition) for event in requested}
        left: list[tuple[Shard, int, Claim | None]] = []
        for shard in hook.shards:
            try:
                states = shard.registry.consumer(self.topic, self.consumer)
                consumer = Consumer(self.topic, self.consumer, states[0].partition != NOT_PARTITIONED)
                standings = shard.claims.standings(consumer)
            except DatabaseUnavailableError as error:
                self.log.warning("shard %s is down: %s", shard.name or shard.database, error)
                continue
            for standing in standings:
                if (shard.name, standing.partition) in named or self.partition not in (None, standing.partition):
                    continue
                claim, last = standing.claim, standing.last
                if claim is not None and claim.owner == AIRFLOW_TRIGGER:
                    left.append((shard, standing.partition, claim))
                elif claim is None and last is not None and last.owner == own:
                    left.append((shard, standing.partition, None))
        return left

    def _consume_left(self, draining: Draining, partition: int, claim: Claim | None) -> None:
        if claim is None:
            self._consume_partition(draining, partition)
            return
        note = draining.drained.note
        found = draining.take_over(claim.id, previous=AIRFLOW_TRIGGER)
        # The claim's run came, or the trigger has claimed the events again for a new run.
        draining.drained.note = note
        if found is not None:
            self.log.info("this task also consumes %s, which no task has taken over", found)
            draining.run(found)

    def _consume_waiting(self, context: Context, hook: EventSQLHook, drained: Drained) -> None:
        """Consume the waiting events of each partition, on each shard that can be reached."""
        down: list[str] = []
        shards = hook.shards
        for shard in shards:
            draining = self._draining(context, hook, shard, drained)
            try:
                self._consume_on(draining)
            except DatabaseUnavailableError as error:
                down.append(shard.label)
                if len(down) == len(shards):
                    raise
                self.log.warning("shard %s is down: %s", down[-1], error)
                drained.note = f"events are left on {', '.join(down)}, which cannot be reached"
            if drained.over:
                return

    def _consume_on(self, draining: Draining) -> None:
        for partition in draining.partitions() if self.partition is None else [self.partition]:
            self._consume_partition(draining, partition)
            if draining.drained.over:
                return

    def _consume_partition(
        self, draining: Draining, partition: int, event: ClaimEvent | None = None, *, retried: bool = False
    ) -> None:
        """Take over the claim that triggered the run, or one that still waits for its run, or claim waiting events."""
        note = draining.drained.note
        found: Claim | NoClaim | None = None if event is None else self._take_over(draining, event, retried=retried)
        found = found or self._take_from_trigger(draining, partition) or draining.claim(partition)
        # A claim may be impossible to take over: another owner has the partition, or nobody can claim it now.
        draining.drained.note = note
        if isinstance(found, Claim):
            self.log.info("this task consumes %s", found)
            draining.run(found)
            return
        self.log.info("nothing to consume of partition %d: %s", partition, found.reason)
        if found.waiting is None:
            # Somebody else has the partition, or it has to wait.
            draining.drained.note = found.reason

    def _take_over(self, draining: Draining, event: ClaimEvent, *, retried: bool) -> Claim | None:
        with suppress(ClaimLostError):
            claim, _ = draining.shard.claims.get(event.claim)
            # Another run or another task of this run may consume it by now, and would lose it. A retry takes over the
            # claim of the previous try.
            free = claim.owner == AIRFLOW_TRIGGER or (retried and claim.owner == draining.owner)
            # Ids of claims come again in a database that is restored or made anew.
            if free and event.names(claim):
                return draining.take_over(claim.id, previous=claim.owner)
        return None

    def _take_from_trigger(self, draining: Draining, partition: int) -> Claim | None:
        """The live claim of a partition if no task has taken it over yet: the run that it is for may never come."""
        shard, consumer = draining.shard, draining.consumer
        live = shard.claims.live(consumer.topic, consumer.name, partition)
        if live is None or live.owner != AIRFLOW_TRIGGER:
            return None
        return draining.take_over(live.id, previous=AIRFLOW_TRIGGER)

    def _requested(self, context: Context) -> list[ClaimEvent]:
        """The claims that the run is for: `claims`, or the claims of the asset events that triggered the run."""
        payloads = self.claims or list(_payloads(context))
        if isinstance(payloads, str):
            raise ValidationError("claims is a list of claims' payloads: render it with render_template_as_native_obj")
        events = [event for each in payloads if (event := ClaimEvent.read(each)) is not None]
        mine = [event for event in events if (event.topic, event.consumer) == (self.topic, self.consumer)]
        return mine if self.partition is None else [event for event in mine if event.partition == self.partition]

    def _draining(self, context: Context, hook: EventSQLHook, shard: Shard, drained: Drained) -> Draining:
        states = shard.registry.consumer(self.topic, self.consumer)
        consumer = Consumer(self.topic, self.consumer, states[0].partition != NOT_PARTITIONED)
        owner = TaskOrigin.of(context).run_id
        return Draining(shard, consumer, self._calls(context, hook, shard), self.limits, owner, drained)

    def _calls(self, context: Context, hook: EventSQLHook, shard: Shard) -> Consume:
        function, more = self.python_callable, _wanted(self.python_callable, context=context, eventsql=hook)
        if self.gets == "claim":
            # A range that failed is claimed again after a pause: a retry would do nothing.
            return RangeConsumer(shard, lambda claim: function(claim, **more), logger)
        return BatchConsumer(shard, lambda events, on: function(events, on, **more), self.batch, self.limits.lease)

    def _report(self, hook: EventSQLHook, drained: Drained) -> None:
        """Log dead letters. Raises `AirflowException` for a failing event, `AirflowFailException` for a lost claim."""
        for letter in drained.dead_letters:
            self.log.warning("event %d of %s is a dead letter now: %s", letter.event_id, self.topic, letter.error)
        if drained.failure is not None:
            _, failure = drained.failure
            blocked = not hook.platform.dead_letters.accepts(self.topic)
            then = (
                f"after its last attempt it blocks the partition: correct the function, or create {self.topic}_dlt"
                if blocked
                else f"after its last attempt it goes to {self.topic}_dlt"
            )
            raise AirflowException(
                f"event {failure.event_id} of topic {self.topic} failed, attempt {failure.attempts} "
                f"({failure.error}): it is retried after a pause; {then}. The events before it are consumed"
            )
        if drained.lost is not None:
            raise AirflowFailException(
                f"the task lost its claim: {drained.lost}. No event is lost, and none takes effect twice: the "
                "partition's new owner consumes the rest"
            )


def eventsql_consume(
    *, topic: str, consumer: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a task from a function over events, as `@task.eventsql_consume` or by itself.

    Calling the decorated function in a DAG adds an `EventSQLConsumeOperator` with these `options`, named after the
    function, and returns its result for other tasks.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def add(**more: Any) -> Any:
            named = {"task_id": getattr(function, "__name__", "consume"), "doc_md": function.__doc__}
            given = {**named, **options, **more}
            return EventSQLConsumeOperator(topic=topic, consumer=consumer, python_callable=function, **given).output

        return add

    return decorate


def published_to(outlet: Asset, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One summary of all calls of `publish_output` for the topic of an asset; empty if nothing was published to it."""
    mine = [each for each in summaries if each.get("topic") == topic_of(outlet)]
    if not mine:
        return {}
    merged = {**mine[-1], "events": sum(each["events"] for each in mine)}
    if ranges := [offsets for each in mine for offsets in each.get("ranges", ())]:
        merged["ranges"] = ranges
    return {**merged, "repeated": all(each["repeated"] for each in mine)}


def _wanted(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """The offered arguments for which a function has parameters."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def _payloads(context: Mapping[str, Any]) -> Iterator[Any]:
    for events in context.get("triggering_asset_events", {}).values():
        for event in events:
            yield (event.extra or {}).get("payload")
