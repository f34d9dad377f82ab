"""The message queue `eventsql` for Airflow's `MessageQueueTrigger`."""

from __future__ import annotations

from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider
from airflow.triggers.base import BaseEventTrigger

from eventsql_orchestration.airflow.triggers import EventSQLTrigger


class EventSQLMessageQueueProvider(BaseMessageQueueProvider):
    """Makes `MessageQueueTrigger(scheme="eventsql", topic=…, consumer=…)` an `EventSQLTrigger`."""

    scheme = "eventsql"

    def trigger_class(self) -> type[BaseEventTrigger]:
        return EventSQLTrigger
