"""How consumers and topics become assets: a team changes keys, groups and whatever else an asset has in one place."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg

from eventsql_orchestration.errors import ValidationError


@dataclass(frozen=True, slots=True)
class EventSQLAssetProps:
    """What an asset stands for: `consumer` of a topic, or the topic itself if `consumer` is None.

    `spec` is the asset as it would be without a translator.
    """

    topic: str
    consumer: str | None
    spec: dg.AssetSpec


class EventSQLTranslator:
    """Gives consumers and topics their assets. Override `get_asset_spec`, and change what its superclass returns:

        class Shop(EventSQLTranslator):
            def get_asset_spec(self, props):
                spec = super().get_asset_spec(props)
                return spec.replace_attributes(group_name=props.topic)

    Give it to `AssetOptions` for a consumer and the topics that it publishes to, and to `topic_asset` or
    `build_definitions` for other topics. The key of a topic stays `topic/<name>`: several code locations find the same
    topic by it, and so do the links of their runs.
    """

    def get_asset_spec(self, props: EventSQLAssetProps) -> dg.AssetSpec:
        return props.spec


def translated(
    translator: EventSQLTranslator | None, topic: str, consumer: str | None, spec: dg.AssetSpec
) -> dg.AssetSpec:
    """The spec as a translator gives it. Raises `ValidationError`."""
    if translator is None:
        return spec
    found = translator.get_asset_spec(EventSQLAssetProps(topic, consumer, spec))
    name = type(translator).__name__
    if not isinstance(found, dg.AssetSpec):
        raise ValidationError(f"{name}.get_asset_spec returned no AssetSpec for {spec.key.to_user_string()}: {found!r}")
    if consumer is None and found.key != spec.key:
        raise ValidationError(
            f"{name}.get_asset_spec gave topic {topic!r} the key {found.key.to_user_string()}: a topic keeps the key "
            f"{spec.key.to_user_string()}, by which every code location finds it"
        )
    return found
