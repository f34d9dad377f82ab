"""Topics as Airflow's assets: `eventsql://<connection>/<topic>`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import Asset

from eventsql_orchestration.model import check_topic_name

if TYPE_CHECKING:
    from urllib.parse import SplitResult

DEFAULT_CONNECTION: Final = "eventsql_default"

SCHEME: Final = "eventsql"


def topic_asset(topic: str, conn_id: str = DEFAULT_CONNECTION, **options: Any) -> Asset:
    """The asset of a topic that is reached by a connection. `options` are Airflow's, for example `watchers`.

    Its name is the topic's unless `options` name it. Raises `ValidationError` for a name that no topic can have.
    """
    check_topic_name(topic)
    return Asset(**{"name": topic, "uri": f"{SCHEME}://{conn_id}/{topic}", **options})


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Check the form of an asset's URI. Raises `ValueError`, as Airflow expects."""
    if not uri.netloc or not uri.path.strip("/") or "/" in uri.path.strip("/"):
        raise ValueError(f"the URI of a topic is {SCHEME}://<connection>/<topic>")
    return uri._replace(path=f"/{uri.path.strip('/')}")
