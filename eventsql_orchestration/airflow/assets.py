"""Topics as Airflow's assets, `eventsql://<connection>/<topic>`; claims of a consumer have its name after that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import Asset

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import Publication, check_topic_name

if TYPE_CHECKING:
    from urllib.parse import SplitResult

DEFAULT_CONNECTION: Final = "eventsql_default"

SCHEME: Final = "eventsql"

TEMPLATE: Final = "{{"
"""Marks a template in a topic's name. Such a name is known only when the task runs, so no asset has it."""


def topic_asset(topic: str, conn_id: str = DEFAULT_CONNECTION, **options: Any) -> Asset:
    """The asset of a topic that is reached by a connection, for inlets, outlets and schedules. `options` are Airflow's.

    Raises `ValidationError` for a name that no topic can have, and for `watchers`: Airflow keeps only the watchers of
    the asset's last mention, and each task that publishes or consumes mentions its topic.
    """
    check_topic_name(topic)
    if "watchers" in options:
        raise ValidationError(f"an asset of a topic has no watchers: use claims_asset({topic!r}, <consumer>)")
    return Asset(name=topic, uri=f"{SCHEME}://{conn_id}/{topic}", **options)


def topic_of(asset: Asset) -> str | None:
    """The topic of an asset that `topic_asset` made; None for any other asset."""
    parts = asset.uri.removeprefix(f"{SCHEME}://").split("/")
    return parts[1] if asset.uri.startswith(f"{SCHEME}://") and len(parts) == 2 else None


def listed(given: object) -> list[Any]:
    """A single value or several values as a list; None as an empty list."""
    if given is None:
        return []
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping | Publication | Asset):
        return list(given)
    return [given]


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Check the form of an asset's URI. Raises `ValueError`, as Airflow expects."""
    path = uri.path.strip("/")
    if not uri.netloc or not path or path.count("/") > 1:
        raise ValueError(
            f"the URI of a topic is {SCHEME}://<connection>/<topic>, the URI of a consumer's claims is "
            f"{SCHEME}://<connection>/<topic>/<consumer>"
        )
    return uri._replace(path=f"/{path}")
