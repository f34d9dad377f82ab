"""Consuming in a task: the claims that triggered its run, or the events that wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from eventsql_orchestration import Shard
from eventsql_orchestration.airflow.assets import DEFAULT_CONNECTION, TEMPLATE, listed, topic_asset, topic_of
from eventsql_orchestration.airflow.backfills import RESUME_OPTIONS, ReplayRequest
from eventsql_orchestration.airflow.claim_producer import ClaimEvent
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.airflow.links import TraceLink
from eventsql_orchestration.airflow.provenance import TaskOrigin
from eventsql_orchestration.airflow.task_claims import TaskClaims
from eventsql_orchestration.consuming.handlers import check_handler
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.backfills.replay import WindowReplay
from eventsql_orchestration.orchestration.backfills.windows import read_key
from eventsql_orchestration.orchestration.batch import BatchConsumer, RangeConsumer
from eventsql_orchestration.orchestration.drain import Consume, Drained, advice_after
from eventsql_orchestration.orchestration.errors import FinalRunError, WindowGoneError
from eventsql_orchestration.orchestration.limits import RunLimits
from eventsql_orchestration.orchestration.tracebacks import Tracebacks
from eventsql_orchestration.signatures import signature_of
from eventsql_orchestration.validation import check_name, check_whole

if TYPE_CHECKING:
    from airflow.sdk import Context

logger = logging.getLogger("airflow.task")

Gets = Literal["events", "claim"]

DEFAULT_LIMITS: Final = RunLimits()


class EventSQLConsumeOperator(BaseOperator):
    """Consumes events of a topic with a function.

    With `gets="events"`, `python_callable(events, connection)` gets at most `batch` events a time. Its writes through
    `connection` commit together with the offset: exactly once, even when Airflow tries the task again. An event that
    fails is tried again with backoff, and then becomes a dead letter if topic `<topic>_dlt` exists.

    With `gets="claim"`, `python_callable(claim)` gets a whole range and commits the claim itself with its effects, for
    example by `publish_output(context, …, claim=claim)` on a result of Spark. Either function may also have parameters
    `eventsql`, for the hook, and `context`.

    If a claim of `EventSQLTrigger` triggered a run, the run takes that claim over. Then it takes over the claims that
    no task had taken over when the run began: Airflow may make no run for them. With `claims`, it takes over only
    these. Any other run claims the waiting events itself, of `partition` or of all partitions. The task consumes a
    range of each partition, then further ranges in turn within its `limits`. A run that `eventsql backfill` launched
    replays its window instead, and consumes nothing new. Without anything to consume, the task is skipped.

    The result is a summary of the ranges, of the number of events and of dead letters. In a retry, it also has the
    ranges that the tries before have consumed. Asset events of the task's outlets have the summary as `consumed`. The
    asset event of a topic also has the summary of the events that were published to it.
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
        if gets not in get_args(Gets):
            raise ValidationError(f"gets is one of {', '.join(map(repr, get_args(Gets)))}, not {gets!r}")
        _check_function(python_callable, gets)
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
        request = ReplayRequest.read(context["dag_run"].conf)
        earlier: list[dict[str, int | str]] = []
        with EventSQLHook(self.eventsql_conn_id) as hook:
            try:
                if request is None:
                    drained, earlier = self._consume(context, hook)
                else:
                    drained = self._replay(context, hook, request)
            except FinalRunError as error:
                raise AirflowFailException(error.message) from error
        if not drained.claims and not earlier:
            raise AirflowSkipException(f"nothing to consume: {drained.note or 'no events wait'}")
        summary: dict[str, Any] = {
            "topic": self.topic,
            "consumer": self.consumer,
            "events": drained.events + sum(int(each["events"]) for each in earlier),
            "ranges": [*earlier, *drained.ranges()],
            "dead_letters": [letter.event_id for letter in drained.dead_letters],
            **({} if request is None else {"backfill": read_key(request.window)[0]}),
        }
        # A function may also return a mapping of its own.
        summaries = [each for each in drained.said if {"topic", "events", "repeated"} <= each.keys()]
        # `TraceLink` reads it.
        self.published = next((each for each in reversed(summaries) if each.get("ranges")), None)
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra.update(published_to(outlet, summaries), consumed=summary)
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
            replay.finish(backfill)
        return replay.drained

    def _consume(self, context: Context, hook: EventSQLHook) -> tuple[Drained, list[dict[str, int | str]]]:
        """Consume claims, or the events that wait. Gives also the ranges that earlier tries have consumed."""
        requested, retried = self._requested(context), context["ti"].try_number > 1
        claims = TaskClaims(
            hook, self.topic, self.consumer, self.partition, self.limits, TaskOrigin.of(context).run_id, retried,
            partial(self._calls, context, hook),
        )  # fmt: skip
        # Explicit claims belong to this task alone: other claims have their own tasks.
        alone = self.claims is not None
        if requested or alone:
            claims.of_events(requested, alone=alone)
        else:
            claims.of_waiting()
        drained = claims.drained
        self._report(hook, drained)
        if not retried:
            return drained, []
        if not drained.claims and drained.note is not None:
            # The try before has failed: a skip would hide that.
            raise AirflowException(f"nothing was consumed: {drained.note}")
        # The try before may have been killed after its last commit: the tasks after this one have to run.
        return drained, claims.earlier(requested if alone else None)

    def _requested(self, context: Context) -> list[ClaimEvent]:
        """The claims that the run is for: `claims`, or the claims of the asset events that triggered the run."""
        payloads = list(_payloads(context)) if self.claims is None else self.claims
        if isinstance(payloads, str):
            raise ValidationError("claims is a list of claims' payloads: render it with render_template_as_native_obj")
        events = [event for each in payloads if (event := ClaimEvent.read(each)) is not None]
        mine = [event for event in events if (event.topic, event.consumer) == (self.topic, self.consumer)]
        return mine if self.partition is None else [event for event in mine if event.partition == self.partition]

    def _calls(self, context: Context, hook: EventSQLHook, shard: Shard) -> Consume:
        function, more = self.python_callable, _wanted(self.python_callable, context=context, eventsql=hook)
        if self.gets == "claim":
            # A range that failed is claimed again after a pause: a retry would do nothing.
            return RangeConsumer(shard, lambda claim: function(claim, **more), logger)
        return BatchConsumer(
            shard, lambda events, on: function(events, on, **more), self.batch, self.limits.lease, Tracebacks(logger)
        )

    def _report(self, hook: EventSQLHook, drained: Drained) -> None:
        """Log dead letters. Raises `AirflowException` for a failing event, `AirflowFailException` for a lost claim."""
        for letter in drained.dead_letters:
            self.log.warning("event %d of %s is a dead letter now: %s", letter.event_id, self.topic, letter.error)
        for _, failure in drained.failures:
            self.log.error("event %d of %s failed: %s", failure.event_id, self.topic, failure.error)
        if drained.failures:
            _, failure = drained.failures[0]
            accepts = hook.platform.dead_letters.accepts(self.topic)
            raise AirflowException(
                f"event {failure.event_id} of topic {self.topic} failed, attempt {failure.attempts} ({failure.error}): "
                f"{advice_after(failure, self.topic, self.consumer, accepts=accepts)}. The events before it are "
                "consumed"
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
    """One summary of all calls of `publish_output` for the topic of an asset; empty if nothing was published to it.

    It has no ranges if those of some events are not known.
    """
    mine = [each for each in summaries if each.get("topic") == topic_of(outlet)]
    if not mine:
        return {}
    merged = {
        **mine[-1], "events": sum(each["events"] for each in mine),
        "repeated": all(each["repeated"] for each in mine),
        "ranges": [offsets for each in mine for offsets in each.get("ranges", ())],
    }  # fmt: skip
    if not merged["ranges"] or any(each["events"] and not each.get("ranges") for each in mine):
        del merged["ranges"]
    return merged


def _check_function(function: object, gets: Gets) -> None:
    """Raise `ValidationError` unless a task can call the function: otherwise every event would fail by itself."""
    arguments = ("claim",) if gets == "claim" else ("events", "connection")
    named = _wanted(function, context=None, eventsql=None) if callable(function) else ()
    check_handler(function, *arguments, named=named)


def _wanted(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """The offered arguments for which a function has parameters."""
    parameters = signature_of(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def _payloads(context: Mapping[str, Any]) -> Iterator[Any]:
    for events in context.get("triggering_asset_events", {}).values():
        for event in events:
            yield (event.extra or {}).get("payload")
