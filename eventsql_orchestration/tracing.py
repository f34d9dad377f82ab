"""Traces of OpenTelemetry whose context travels in the metadata of events, from publication to consumption."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from eventsql_orchestration.consuming.claim_values import Claim
from eventsql_orchestration.consuming.handlers import check_runs
from eventsql_orchestration.errors import MissingExtraError, ValidationError
from eventsql_orchestration.model import Event, Placement, Publication, check_topic_name
from eventsql_orchestration.publishing.batches import check_publication
from eventsql_orchestration.publishing.publisher import EventPublisher, check_many
from eventsql_orchestration.signatures import signature_of
from eventsql_orchestration.validation import check_name

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    raise MissingExtraError("otel", "tracing") from None

if TYPE_CHECKING:
    from eventsql_orchestration.database import CallersConnection

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

TRACEPARENT: Final = "traceparent"
"""The name of the context in an event's metadata, by W3C's Trace Context."""

TRACESTATE: Final = "tracestate"
"""The name of the context's vendor state, which not every context has."""

MOST_LINKS: Final = 128
"""The most publications that a span of a batch is linked to. OpenTelemetry's SDK keeps as many by default."""

_W3C: Final = TraceContextTextMapPropagator()
"""Only the context of traces: baggage may hold data that does not belong in a database."""


def current_context() -> dict[str, str]:
    """The context of the current span as metadata of an event; empty without a span."""
    carried: dict[str, str] = {}
    _W3C.inject(carried)
    return carried


def carrying(publication: Publication) -> Publication:
    """The publication with the context of the current span in its metadata. A context that it has already stays.

    For publishers that `Tracing.publisher` does not take, such as `AsyncPublisher`, and for `publisher.statement`.
    """
    check_publication(publication)
    return _with(publication, current_context())


def _with(publication: Publication, context: Mapping[str, str]) -> Publication:
    if not context or TRACEPARENT in publication.metadata:
        return publication
    # Leave out the state of another context: it comes from an event whose metadata were forwarded.
    kept = {name: value for name, value in publication.metadata.items() if name != TRACESTATE}
    return replace(publication, metadata={**kept, **context})


class Tracing:
    """Traces the publishers and handlers that are given to it. Other publishers and handlers cost nothing.

    `provider` makes the tracer, by default OpenTelemetry's global provider. Without an SDK there are no spans, and the
    metadata of events stay as they are.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("eventsql_orchestration", tracer_provider=provider)

    def publisher(self, publisher: EventPublisher) -> TracedPublisher:
        """A publisher with a span for each call of another publisher, such as `platform.publisher`."""
        return TracedPublisher(publisher, self._tracer)

    def handler(self, topic: str, consumer: str) -> Callable[[Callable[Given, Returned]], Callable[Given, Returned]]:
        """A decorator that gives each call of a handler a span.

        The handler takes an event or a batch as its first argument or as `events`, in a process or as the function of a
        `consumer_asset`. The function of a `range_asset` has its claim as `claim`. A span names Dagster's run if the
        function takes `context`. If all events come from one publication, the span belongs to its trace. Otherwise it
        is linked to the publications, 128 at most; a claim has no links, for its events are not read here.

        Raises `ValidationError` for a function that would not run, and `InvalidNameError`.
        """
        check_topic_name(topic)
        check_name("consumer name", consumer)

        def decorate(handler: Callable[Given, Returned]) -> Callable[Given, Returned]:
            check_runs(handler)

            @functools.wraps(handler)
            def traced(*given: Given.args, **named: Given.kwargs) -> Returned:
                with self._processing(topic, consumer, _work(given, named), named.get("context")):
                    return handler(*given, **named)

            with suppress(TypeError, ValueError):
                # A consumer refuses a handler by its parameters, before any event fails.
                traced.__signature__ = signature_of(handler)  # type: ignore[attr-defined]  # functions take any
            return traced

        return decorate

    @contextmanager
    def _processing(self, topic: str, consumer: str, work: Sequence[Event] | Claim, context: object) -> Iterator[None]:
        attributes: dict[str, str | int] = {
            **_messaging(topic, "process", "process"), "messaging.consumer.group.name": consumer
        }  # fmt: skip
        if run_id := getattr(getattr(context, "run", None), "run_id", None):
            # `context` comes from Dagster. With the run's id, a reader of the trace finds the page of the run.
            attributes["dagster.run.id"] = str(run_id)
        contexts: list[trace.SpanContext] = []
        if isinstance(work, Sequence):
            contexts = _contexts(work)
            attributes["messaging.batch.message_count"] = len(work)
            if work:
                attributes |= {"eventsql.offset.first": work[0].id, "eventsql.offset.last": work[-1].id}
        else:
            attributes["messaging.batch.message_count"] = work.events
            attributes |= {"eventsql.offset.after": work.range.after, "eventsql.offset.last": work.range.upto}

        parent = None
        if len(contexts) == 1:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(contexts.pop()))
        with self._tracer.start_as_current_span(
            f"process {topic}", parent, trace.SpanKind.CONSUMER, attributes, [trace.Link(each) for each in contexts]
        ):
            yield


class TracedPublisher:
    """Publishes through another publisher, with a span for each call. The events carry the context of the span."""

    def __init__(self, publisher: EventPublisher, tracer: trace.Tracer) -> None:
        self._publisher = publisher
        self._tracer = tracer

    def publish(self, publication: Publication, *, connection: CallersConnection | None = None) -> Placement:
        """See `ClusterPublisher.publish`."""
        check_publication(publication)
        with self._span(publication.topic):
            return self._publisher.publish(_with(publication, current_context()), connection=connection)

    def publish_all(self, publications: Iterable[Publication], *, connection: CallersConnection | None = None) -> int:
        """See `ClusterPublisher.publish_all`. One span is for all events, with the name of the first event's topic."""
        check_many(publications)
        events = map(check_publication, publications)
        first = next(events, None)
        if first is None:
            return 0
        with self._span(first.topic) as span:
            context = current_context()
            carrying_all = (_with(each, context) for each in chain([first], events))
            published = self._publisher.publish_all(carrying_all, connection=connection)
            span.set_attribute("messaging.batch.message_count", published)
            return published

    @contextmanager
    def _span(self, topic: str) -> Iterator[trace.Span]:
        name, attributes = f"publish {topic}", _messaging(topic, "publish", "send")
        with self._tracer.start_as_current_span(name, None, trace.SpanKind.PRODUCER, attributes) as span:
            yield span


def _messaging(topic: str, name: str, kind: str) -> dict[str, str | int]:
    """Attributes by OpenTelemetry's conventions for messaging."""
    return {
        "messaging.system": "eventsql",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _work(given: Sequence[object], named: Mapping[str, object]) -> Sequence[Event] | Claim:
    """The events or the claim among the arguments of a handler, which may be a method or take a context first."""
    for each in (named.get("events"), named.get("claim"), *given):
        if isinstance(each, Event):
            return [each]
        if isinstance(each, Claim) or (isinstance(each, Sequence) and not isinstance(each, str | bytes)):
            return each
    raise ValidationError("a traced handler takes events or a claim: trace the function that a consumer calls")


def _contexts(events: Iterable[Event]) -> list[trace.SpanContext]:
    """The contexts that events carry, each once, at most `MOST_LINKS`. Leaves invalid contexts out."""
    found: dict[tuple[str, str], trace.SpanContext] = {}
    for event in events:
        metadata = event.metadata
        parent, state = metadata.get(TRACEPARENT), metadata.get(TRACESTATE, "")
        if not isinstance(parent, str) or not isinstance(state, str) or (parent, state) in found:
            continue
        context = _W3C.extract({TRACEPARENT: parent, TRACESTATE: state}, Context())
        span = trace.get_current_span(context).get_span_context()
        if span.is_valid:
            found[parent, state] = span
            if len(found) == MOST_LINKS:
                break
    return list(found.values())
