"""How consumers and topics become assets. A team can change keys, groups and other properties in one place."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import check_kind


@dataclass(frozen=True, slots=True)
class EventSQLAssetProps:
    """The subject of an asset: the consumer `consumer` of a topic, or the topic itself if `consumer` is None.

    For a queue, `topic` is None and `queue` is its name; `consumer` is the name of a worker's asset, or None for the
    queue itself. `spec` is the asset as it would be without a translator.
    """

    topic: str | None
    consumer: str | None
    spec: dg.AssetSpec
    queue: str | None = None


class EventSQLTranslator:
    """Gives consumers and topics their assets. Override `get_asset_spec`, and change the result of the superclass:

        class Shop(EventSQLTranslator):
            def get_asset_spec(self, props):
                spec = super().get_asset_spec(props)
                return spec.replace_attributes(group_name=props.topic)

    Give it to `AssetOptions` for a consumer and the topics that it publishes to, or for a worker; and to `topic_asset`,
    `queue_asset` or `build_definitions` for other topics and queues. The key of a topic stays `topic/<name>`, and the
    key of a queue stays `queue/<name>`: other code locations find the topic or the queue by its key, and so do links in
    the UI.
    """

    def get_asset_spec(self, props: EventSQLAssetProps) -> dg.AssetSpec:
        return props.spec


def translated(
    translator: EventSQLTranslator | None, topic: str | None, consumer: str | None, spec: dg.AssetSpec,
    *, queue: str | None = None,
) -> dg.AssetSpec:  # fmt: skip
    """The spec as a translator gives it. Raises `ValidationError`."""
    if translator is None:
        return spec
    check_kind("translator", translator, EventSQLTranslator)
    found = translator.get_asset_spec(EventSQLAssetProps(topic, consumer, spec, queue))
    name = type(translator).__name__
    if not isinstance(found, dg.AssetSpec):
        raise ValidationError(f"{name}.get_asset_spec returned no AssetSpec for {spec.key.to_user_string()}: {found!r}")
    if consumer is None and found.key != spec.key:
        what = f"topic {topic!r}" if queue is None else f"queue {queue!r}"
        raise ValidationError(
            f"{name}.get_asset_spec gave {what} the key {found.key.to_user_string()}: it keeps the key "
            f"{spec.key.to_user_string()}, by which every code location finds it"
        )
    return found
