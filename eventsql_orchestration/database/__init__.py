"""Floor 1: connections, schema and named SQL."""

from eventsql_orchestration.database.connections import CallersConnection, Connection, driver_connection
from eventsql_orchestration.database.database import Database
from eventsql_orchestration.database.queries import Queries
from eventsql_orchestration.database.sessions import is_pooled

__all__ = ["CallersConnection", "Connection", "Database", "Queries", "driver_connection", "is_pooled"]
