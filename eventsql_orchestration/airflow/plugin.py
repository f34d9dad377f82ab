"""The plugin that Airflow's API server loads: the pages of this package."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from eventsql_orchestration.airflow.links import PREFIX


class EventSQLPlugin(AirflowPlugin):
    """Adds the page of `links.TraceLink` to the API server."""

    name = "eventsql"

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]  # Airflow only reads it
        # Every process of Airflow loads plugins, and only the API server needs this.
        from eventsql_orchestration.airflow.pages import app  # noqa: PLC0415

        return [{"app": app, "url_prefix": PREFIX, "name": "EventSQL"}]
