"""Describes this package to Airflow's list of providers, by the entry point `apache_airflow_provider`."""

from __future__ import annotations

from typing import Any, Final

PACKAGE: Final = "eventsql_orchestration.airflow"
INTEGRATION: Final = "EventSQL"


def _text(label: str, description: str, **schema: object) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["string", "null"], **schema}}


def get_provider_info() -> dict[str, Any]:
    """The provider's connection type, operators, sensor, triggers, decorator, message queue and scheme of assets."""

    def modules(*names: str) -> list[dict[str, Any]]:
        return [{"integration-name": INTEGRATION, "python-modules": [f"{PACKAGE}.{name}" for name in names]}]

    return {
        "package-name": "eventsql-orchestration",
        "name": INTEGRATION,
        "description": "Events over PostgreSQL: publish, consume exactly once, schedule DAGs by claims.",
        "integrations": [{"integration-name": INTEGRATION, "tags": ["software"]}],
        "hooks": modules("hook"),
        "operators": modules("publish", "consume", "lag"),
        "sensors": modules("sensor"),
        "triggers": modules("triggers"),
        "connection-types": [
            {
                "connection-type": "eventsql",
                "hook-class-name": f"{PACKAGE}.hook.EventSQLHook",
                "hook-name": INTEGRATION,
                "conn-fields": {
                    "db_schema": _text("Tables in schema", "The schema of the platform's tables.", default="eventsql"),
                    "parameters": _text("Parameters", "Options of the URL, for example sslmode=require."),
                    "shards": _text(
                        "Further shards",
                        "The URLs of the other databases, with spaces between them, if there are several.",
                        format="password",
                    ),
                },
                "ui-field-behaviour": {
                    "hidden-fields": ["extra"],
                    "relabeling": {"schema": "Database"},
                    "placeholders": {"host": "localhost", "port": "5432", "schema": "postgres"},
                },
            }
        ],
        "task-decorators": [{"name": "eventsql_consume", "class-name": f"{PACKAGE}.consume.eventsql_consume"}],
        "extra-links": [f"{PACKAGE}.links.TraceLink"],
        "queues": [f"{PACKAGE}.message_queue.EventSQLMessageQueueProvider"],
        "asset-uris": [{"schemes": ["eventsql"], "handler": f"{PACKAGE}.assets.sanitize_uri"}],
    }
