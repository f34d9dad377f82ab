"""Publishing from a task, once for all its tries, with the task's origin in every event."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import Asset, BaseOperator

from eventsql_orchestration.airflow.assets import DEFAULT_CONNECTION, TEMPLATE, listed, topic_asset, topic_of
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.airflow.links import TraceLink
from eventsql_orchestration.airflow.provenance import TaskOrigin
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import Publication
from eventsql_orchestration.orchestration import publication
from eventsql_orchestration.orchestration.shards import command

if TYPE_CHECKING:
    from airflow.sdk import Context


_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def publish_output(
    context: Mapping[str, Any],
    events: object,
    *,
    topic: str,
    eventsql: EventSQLHook,
    claim: Claim | None = None,
    batch: int = 0,
) -> dict[str, Any]:
    """Publish the output of a task in one transaction, once for all its tries; gives a summary for an XCom.

    `events` is a DataFrame of Spark or pandas, an Arrow table, or an iterable of publications or of mappings, as for
    Dagster's `publish_events`. The metadata of each event names the DAG, its run, the task and its map index. `claim`
    is committed in the same transaction, so its events are consumed and the output is published exactly once. Without a
    claim, a task publishes once per DAG run, map index, topic and `batch`, however often it is tried or cleared.

    Raises `ClaimLostError`, `TopicNotFoundError`, `ValidationError` or `DatabaseError`; then nothing was published.
    """
    published = publication.publish(
        TaskOrigin.of(context), events, access=eventsql, topic=topic, claim=claim, batch=batch
    )
    summary: dict[str, Any] = {"topic": topic, "events": published.events, "repeated": published.repeated}
    if published.spans:
        last = published.spans[-1]
        summary["ranges"] = [
            {**({} if span.shard is None else {"shard": span.shard}), "first": span.first, "last": span.last}
            for span in published.spans
        ]
        summary["trace"] = command(last.shard, f"trace {topic} {last.last}")
    return summary


class EventSQLPublishOperator(BaseOperator):
    """Publishes one event or many to a topic, once for all tries of the task.

    `events` is an event or a list of them, for example from an XCom, or a function of the context that returns them.
    An event is text or bytes, a `Publication`, or a mapping with `value` and optionally `key`, `partition` and
    `headers`. Any other mapping, list or number as a `value` becomes JSON. `key` and `headers` are for events without
    their own. `batch` tells apart several publications of one task to one topic.

    The task's asset is `eventsql://<connection>/<topic>`, with the range of the events in its asset event, unless the
    topic is a template or `outlet` is False. The result is the summary of `publish_output`.
    """

    template_fields: Sequence[str] = ("topic", "events", "key", "headers", "batch")
    ui_color = "#e6f2ff"
    operator_extra_links = (TraceLink(),)

    def __init__(
        self,
        *,
        topic: str,
        events: object,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        batch: int | str = 0,
        eventsql_conn_id: str = DEFAULT_CONNECTION,
        outlet: bool = True,
        **kwargs: Any,
    ) -> None:
        if outlet and TEMPLATE not in topic:
            kwargs["outlets"] = [*listed(kwargs.get("outlets")), topic_asset(topic, eventsql_conn_id)]
        super().__init__(**kwargs)
        self.topic = topic
        # Airflow calls a function in a templated field with arguments of its own.
        self.function = events if callable(events) else None
        self.events = None if callable(events) else events
        self.key = key
        self.headers = headers
        self.batch = batch
        self.eventsql_conn_id = eventsql_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        from eventsql_orchestration.orchestration.frames import is_pandas_frame  # noqa: PLC0415 - as publication.py

        events = self.events if self.function is None else self.function(context)
        if events is None:
            # The task would count as done: if it is cleared after a correction, it publishes nothing.
            raise ValidationError(
                "events is None, as from an XCom that does not exist: give an empty list for no events"
            )
        if is_pandas_frame(type(events)):
            # Its items are the names of its columns.
            raise ValidationError("events is a frame of pandas: publish it with publish_output in a task of its own")
        publications = [self._publication(each) for each in listed(events)]
        try:
            batch = int(self.batch)
        except ValueError:
            raise ValidationError(f"batch is a whole number, not {self.batch!r}") from None
        with EventSQLHook(self.eventsql_conn_id) as hook:
            summary = publish_output(context, publications, topic=self.topic, eventsql=hook, batch=batch)
        self.log.info("%s", summary)
        # `TraceLink` reads it.
        self.published = summary
        for outlet in self.outlets:
            if isinstance(outlet, Asset) and topic_of(outlet) == self.topic:
                context["outlet_events"][outlet].extra.update(summary)
        return summary

    def _publication(self, event: object) -> Publication:
        if isinstance(event, Publication):
            key = self.key if event.key is None else event.key
            return replace(event, key=key, metadata=event.metadata or self.headers or {})
        given: Mapping[str, Any] = event if isinstance(event, Mapping) and "value" in event else {"value": event}
        unknown = given.keys() - {"value", "key", "partition", "headers"}
        if unknown:
            raise ValidationError(
                f"an event has value, key, partition and headers, not {', '.join(sorted(map(str, unknown)))}"
            )
        optional = {"partition": given["partition"]} if given.get("partition") is not None else {}
        key, headers = given.get("key"), given.get("headers")
        return Publication(
            self.topic, _value(given["value"]), key=self.key if key is None else key,
            metadata=dict((self.headers if headers is None else headers) or {}), **optional,
        )  # fmt: skip


def _value(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        text = value if isinstance(value, str) else _JSON.encode(value)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise ValidationError(f"a value of type {type(value).__name__} cannot be written as JSON: {error}") from None
