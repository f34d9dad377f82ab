"""Connections, schema and named SQL."""

from typing import TYPE_CHECKING

from eventsql_orchestration.first_use import on_first_use

if TYPE_CHECKING:
    from eventsql_orchestration.database.connections import CallersConnection, Connection, driver_connection
    from eventsql_orchestration.database.database import Database, Platform, database_of
    from eventsql_orchestration.database.queries import Queries
    from eventsql_orchestration.database.sessions import is_pooled, is_quiet

__all__ = [
    "CallersConnection", "Connection", "Database", "Platform", "Queries", "database_of", "driver_connection",
    "is_pooled", "is_quiet",
]  # fmt: skip

# The embedded server and named SQL are used without SQLAlchemy too.
__getattr__ = on_first_use(
    __name__,
    {
        ".connections": ("CallersConnection", "Connection", "driver_connection"),
        ".database": ("Database", "Platform", "database_of"),
        ".queries": ("Queries",),
        ".sessions": ("is_pooled", "is_quiet"),
    },
)
