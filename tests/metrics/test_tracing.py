"""Traces: the context of a publication travels in the event, and the consumption belongs to its trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import dagster as dg
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLResource,
    build_definitions,
    consumer_asset,
    range_asset,
)
from eventsql_orchestration.dagster.lineage.origin import lineage
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.tracing import MOST_LINKS, Tracing, carrying


class Traces:
    """Traces of a program, and the spans that it ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        # The SDK itself keeps 128 links by default.
        self.provider = TracerProvider(span_limits=SpanLimits(max_links=2 * MOST_LINKS))
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(self.provider)
        self.tracer = self.provider.get_tracer("a service")

    def ended(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.provider.shutdown()


@pytest.fixture
def orders(platform: EventSQL) -> EventSQL:
    platform.registry.register_topic(Topic("orders"))
    platform.registry.register_consumer(Consumer("orders", "mailer"))
    return platform


def stored(platform: EventSQL) -> list[Event]:
    platform.transfer.run_once()
    return platform.reader.read("orders")


PARENT: Final = f"00-{7:032x}-{8:016x}-01"


def event(metadata: dict[str, Any]) -> Event:
    return Event("orders", 1, -1, None, b"", 0, 0, metadata)


def context(span: ReadableSpan) -> Any:
    assert span.context is not None
    return span.context


def test_a_consumption_belongs_to_the_trace_of_its_publication(orders: EventSQL, traces: Traces) -> None:
    seen: list[Event] = []

    @traces.tracing.handler("orders", "mailer")
    def handle(events: Sequence[Event], connection: Connection) -> None:
        seen.extend(events)

    with traces.tracer.start_as_current_span("request"):
        traces.tracing.publisher(orders.publisher).publish(Publication("orders", b"tea", metadata={"by": "me"}))
    orders.transfer.run_once()
    assert orders.consumers.consume_once("orders", "mailer", handle) == 1

    [request], [publish], [process] = map(traces.ended, ("request", "publish orders", "process orders"))
    assert publish.parent == context(request)
    assert process.parent is not None
    assert process.parent.span_id == context(publish).span_id
    assert {context(span).trace_id for span in (request, publish, process)} == {context(request).trace_id}
    assert (publish.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert seen[0].metadata["by"] == "me"
    _, trace_id, span_id, _ = seen[0].metadata["traceparent"].split("-")
    assert (trace_id, span_id) == (format_trace_id(context(publish).trace_id), format_span_id(context(publish).span_id))
    assert dict(process.attributes or {}) == {
        "messaging.system": "eventsql",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "mailer",
        "messaging.batch.message_count": 1,
        "eventsql.offset.first": seen[0].id,
        "eventsql.offset.last": seen[0].id,
    }


def test_a_batch_of_several_publications_is_linked_to_each(orders: EventSQL, traces: Traces) -> None:
    publisher = traces.tracing.publisher(orders.publisher)
    assert publisher.publish_all(Publication("orders", b"%d" % number) for number in range(3)) == 3
    publisher.publish(Publication("orders", b"alone"))
    orders.publisher.publish(Publication("orders", b"untraced"))
    orders.publisher.publish(Publication("orders", b"broken", metadata={"traceparent": "00-nonsense"}))
    orders.transfer.run_once()
    handle = traces.tracing.handler("orders", "mailer")(lambda events, connection: None)
    assert orders.consumers.consume_once("orders", "mailer", handle) == 6
    [process] = traces.ended("process orders")
    assert process.parent is None
    assert [link.context.span_id for link in process.links] == [
        context(span).span_id for span in traces.ended("publish orders")
    ]
    batch, _ = traces.ended("publish orders")
    assert (batch.attributes or {})["messaging.batch.message_count"] == 3


def test_a_span_has_a_bounded_number_of_links(orders: EventSQL, traces: Traces) -> None:
    publisher = traces.tracing.publisher(orders.publisher)
    for _ in range(MOST_LINKS + 2):
        publisher.publish(Publication("orders", b""))
    orders.transfer.run_once()
    handle = traces.tracing.handler("orders", "mailer")(lambda events, connection: None)
    assert orders.consumers.consume_once("orders", "mailer", handle) == MOST_LINKS + 2
    [process] = traces.ended("process orders")
    assert len(process.links) == MOST_LINKS


@pytest.mark.parametrize(
    "metadata", [{}, {"traceparent": "00-nonsense"}, {"traceparent": 7}, {"traceparent": PARENT, "tracestate": 7}]
)
def test_an_event_with_no_context_or_a_wrong_one_leaves_a_batch_in_the_trace_of_the_others(
    traces: Traces, metadata: dict[str, object]
) -> None:
    """Metadata that another program has written may be any JSON."""
    handle = traces.tracing.handler("orders", "mailer")(lambda events, connection: None)
    handle([event(metadata), event({"traceparent": PARENT}), event({"traceparent": PARENT})], None)
    [process] = traces.ended("process orders")
    assert process.parent is not None
    assert format_span_id(process.parent.span_id) == PARENT.split("-")[2]
    assert list(process.links) == []


def test_a_handler_may_get_no_events(traces: Traces) -> None:
    traces.tracing.handler("orders", "mailer")(lambda events, connection: None)([], None)
    [process] = traces.ended("process orders")
    assert (process.attributes or {})["messaging.batch.message_count"] == 0


def test_a_failure_is_an_error_of_its_span_and_of_the_consumer(orders: EventSQL, traces: Traces) -> None:
    publisher = traces.tracing.publisher(orders.publisher)
    publisher.publish(Publication("orders", b"tea"))
    orders.transfer.run_once()

    @traces.tracing.handler("orders", "mailer")
    def handle(event: Event, connection: Connection) -> None:
        raise RuntimeError("no stamps")

    assert orders.consumers.consume_once("orders", "mailer", lambda events, on: handle(events[0], on)) == 0
    assert {span.status.status_code for span in traces.ended("process orders")} == {StatusCode.ERROR}
    assert "no stamps" in str(orders.registry.consumer("orders", "mailer")[0].failure)
    with pytest.raises(Exception, match="nowhere"):
        publisher.publish(Publication("nowhere", b""))
    assert [span.status.status_code for span in traces.ended("publish nowhere")] == [StatusCode.ERROR]


def test_other_publishers_take_an_event_that_carries_the_context(orders: EventSQL, traces: Traces) -> None:
    with traces.tracer.start_as_current_span("request") as request, orders.buffered_publisher() as buffered:
        buffered.publish(carrying(Publication("orders", b"tea"))).result()
        own = Publication("orders", b"", metadata={"traceparent": "mine"})
        assert carrying(own) is own
    [event] = stored(orders)
    assert event.metadata["traceparent"].split("-")[1] == format_trace_id(request.get_span_context().trace_id)
    plain = Publication("orders", b"")
    assert carrying(plain) is plain


def test_the_state_of_a_forwarded_context_does_not_go_on_in_another(orders: EventSQL, traces: Traces) -> None:
    forwarded = Publication("orders", b"1", metadata={"of": "ann", "tracestate": "vendor=stale"})
    traces.tracing.publisher(orders.publisher).publish(forwarded)
    [event] = stored(orders)
    assert event.metadata.keys() == {"of", "traceparent"}


def test_without_an_sdk_nothing_is_written_into_events(orders: EventSQL) -> None:
    tracing = Tracing()
    publisher = tracing.publisher(orders.publisher)
    publisher.publish(Publication("orders", b"1"))
    assert publisher.publish_all([Publication("orders", b"2")]) == 1
    assert publisher.publish_all([]) == 0
    assert [event.metadata for event in stored(orders)] == [{}, {}]
    handle = tracing.handler("orders", "mailer")(lambda events, connection: None)
    assert orders.consumers.consume_once("orders", "mailer", handle) == 2


def test_a_function_that_would_never_run_is_refused(orders: EventSQL, traces: Traces) -> None:
    async def later(events: Sequence[Event], connection: Connection) -> None: ...

    def generate(events: Sequence[Event], connection: Connection) -> Iterator[None]:
        yield

    wrong: list[Callable[..., Any]] = [later, generate]
    for function in wrong:
        with pytest.raises(ValidationError, match="would never run"):
            traces.tracing.handler("orders", "mailer")(function)


def test_what_is_no_publication_no_handler_and_no_name_is_refused(orders: EventSQL, traces: Traces) -> None:
    publisher: Any = traces.tracing.publisher(orders.publisher)
    publication: Any = Publication("orders", b"")
    for several in (publication, [b"tea"], [None, publication], [publication, b"tea"]):
        with pytest.raises(ValidationError):
            publisher.publish_all(several)
    not_a_publication: Any = b"tea"
    for one in (publisher.publish, carrying):
        with pytest.raises(ValidationError):
            one(not_a_publication)
    assert stored(orders) == []

    handle = traces.tracing.handler("orders", "mailer")(lambda work, connection: None)
    for work in ("tea", b"tea", 7):
        with pytest.raises(ValidationError, match="takes events or a claim"):
            handle(work, None)
    for topic, consumer in (("Orders!", "mailer"), ("orders", "")):
        with pytest.raises(InvalidNameError):
            traces.tracing.handler(topic, consumer)


def test_a_traced_handler_with_wrong_parameters_is_refused_before_an_event_fails(
    orders: EventSQL, traces: Traces
) -> None:
    orders.publisher.publish(Publication("orders", b"tea"))
    orders.transfer.run_once()

    @traces.tracing.handler("orders", "mailer")
    def wrong(events: Sequence[Event]) -> None: ...

    handle: Any = wrong
    with pytest.raises(ValidationError):
        orders.consumers.consume_once("orders", "mailer", handle)
    assert not orders.registry.consumer("orders", "mailer")[0].failing


def test_a_run_of_dagster_belongs_to_the_trace_of_its_publication(orders: EventSQL, dsn: str, traces: Traces) -> None:
    published: list[dict[str, str]] = []

    @consumer_asset(topic=Topic("orders"), consumer="letters")
    @traces.tracing.handler("orders", "letters")
    def letters(context: dg.AssetExecutionContext, events: list[Event], connection: Connection) -> None:
        """Writes letters."""
        published.append(lineage(context))

    defs = build_definitions([letters], eventsql=EventSQLResource(dsn=dsn))
    assert defs.resolve_job_def("register").execute_in_process().success
    traces.tracing.publisher(orders.publisher).publish(Publication("orders", b"tea"))
    orders.transfer.run_once()
    run = defs.resolve_job_def("consume_letters").execute_in_process()
    assert run.success
    [publish], [process] = map(traces.ended, ("publish orders", "process orders"))
    assert process.parent is not None
    assert process.parent.span_id == context(publish).span_id
    assert (process.attributes or {})["dagster.run.id"] == run.run_id
    # What the asset publishes goes on with its trace.
    [metadata] = published
    assert metadata["traceparent"].split("-")[2] == format_span_id(context(process).span_id)


def test_the_span_of_a_range_asset_has_the_range_of_its_claim(orders: EventSQL, dsn: str, traces: Traces) -> None:
    @range_asset(topic=Topic("orders"), consumer="sums", options=AssetOptions(kinds=()))
    @traces.tracing.handler("orders", "sums")
    def sums(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> None:
        """Commits its ranges."""
        with eventsql.platform.database.transaction() as connection:
            eventsql.platform.claims.commit(connection, claim)

    defs = build_definitions([sums], eventsql=EventSQLResource(dsn=dsn))
    assert defs.resolve_job_def("register").execute_in_process().success
    traces.tracing.publisher(orders.publisher).publish_all(Publication("orders", b"") for _ in range(3))
    ids = [event.id for event in stored(orders)]
    run = defs.resolve_job_def("consume_sums").execute_in_process()
    assert run.success
    [process] = traces.ended("process orders")
    attributes = dict(process.attributes or {})
    assert (attributes["eventsql.offset.after"], attributes["eventsql.offset.last"]) == (0, ids[-1])
    assert attributes["messaging.batch.message_count"] == 3
    assert attributes["dagster.run.id"] == run.run_id
    assert (process.parent, list(process.links)) == (None, [])


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone")
@pytest.mark.parametrize(("processor", "forkable"), [("SimpleSpanProcessor", True), ("BatchSpanProcessor", False)])
def test_a_location_with_a_provider_is_forked_unless_its_processor_has_a_thread(
    processor: str, *, forkable: bool
) -> None:
    code = f"""
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, {processor}
from eventsql_orchestration.dagster.launcher.fork_safety import obstacle, open_sockets
from eventsql_orchestration.tracing import Tracing

given = open_sockets()
provider = TracerProvider()
provider.add_span_processor({processor}(ConsoleSpanExporter()))
Tracing(provider)
print(obstacle(given) is None)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(forkable)]


def test_the_package_does_not_load_opentelemetry() -> None:
    code = "import sys; from eventsql_orchestration import EventSQL; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
