"""The connection type `eventsql`, and the hook that opens the platform of such a connection."""

from __future__ import annotations

from typing import Self
from urllib.parse import quote, urlencode

from airflow.sdk import BaseHook, Connection
from sqlalchemy import URL

from eventsql_orchestration import EventSQL
from eventsql_orchestration.airflow.assets import DEFAULT_CONNECTION
from eventsql_orchestration.errors import ConfigurationError, EventSQLError
from eventsql_orchestration.model import check_schema_name
from eventsql_orchestration.orchestration.access import PlatformAccess
from eventsql_orchestration.validation import DEFAULT_SCHEMA, counted, split_urls


class EventSQLHook(BaseHook, PlatformAccess):
    """The events platform of a connection.

    The connection has the host, port, user, password and database of a PostgreSQL server. Its extra fields are
    `db_schema`, the schema of the platform's tables; `parameters`, options of the URL; and `shards`, the URLs of the
    other databases if there are several. The first use of `platform` connects. Close the hook, or use it as a context
    manager. Tasks move no events into logs: run `eventsql transfer` beside Airflow.
    """

    conn_name_attr = "eventsql_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "eventsql"
    hook_name = "EventSQL"

    def __init__(self, eventsql_conn_id: str = DEFAULT_CONNECTION, *, connection: Connection | None = None) -> None:
        """`connection` is the connection itself, if the caller has looked it up."""
        super().__init__()
        self.eventsql_conn_id = eventsql_conn_id
        self._connection = connection
        self._platform: EventSQL | None = None

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            self._connection = self.get_connection(self.eventsql_conn_id)
        return self._connection

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all databases, with passwords. Raises `ConfigurationError`."""
        return urls_of(self.connection)

    @property
    def db_schema(self) -> str:
        """The schema of the platform's tables. Raises `ValidationError`."""
        return check_schema_name(self.connection.extra_dejson.get("db_schema") or DEFAULT_SCHEMA)

    @property
    def platform(self) -> EventSQL:
        """The platform over all shards. Each use returns the same object. It never migrates the schema."""
        if self._platform is None:
            self._platform = EventSQL(*self.urls, schema=self.db_schema, migrate=False, transfer=False)
        return self._platform

    def get_conn(self) -> EventSQL:
        """The platform, connected. Raises database errors."""
        return self.platform.open()

    def test_connection(self) -> tuple[bool, str]:
        """Whether the platform can be reached and has its tables, and a sentence about it, for Airflow's UI."""
        try:
            topics = len(self.get_conn().registry.topics())
        except EventSQLError as error:
            return False, error.message
        finally:
            self.close()
        return True, f"The platform in schema {self.db_schema} has {counted(topics, 'topic')}."

    def close(self) -> None:
        """Close the connections to the databases. The hook can be used again."""
        platform, self._platform = self._platform, None
        if platform is not None:
            platform.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def urls_of(connection: Connection) -> tuple[str, ...]:
    """The URLs of all databases of a connection, with passwords.

    Raises `ConfigurationError` for a connection of another type, without a host, or with fields that are not text.
    """
    if connection.conn_type != EventSQLHook.conn_type:
        raise ConfigurationError(
            f"connection {connection.conn_id!r} has the type {connection.conn_type!r}: make one of the type "
            f"{EventSQLHook.conn_type!r}"
        )
    if not connection.host:
        raise ConfigurationError(f"connection {connection.conn_id!r} names no host: edit it")
    host, port = connection.host, int(connection.port) if connection.port else None
    # Several hosts become options: in their usual place in a URL, libpq would use the port for the last host alone.
    several = {"host": host, **({} if port is None else {"port": str(port)})} if "," in host else {}
    first = URL.create(
        "postgresql", connection.login or None, connection.password or None, None if several else host,
        None if several else port, connection.schema or None,
    ).render_as_string(hide_password=False)  # fmt: skip
    parameters, shards = _text(connection, "parameters"), _text(connection, "shards")
    # Keep the parameters as they stand: SQLAlchemy would drop parameters without a value, which the platform refuses.
    query = "&".join(filter(None, (urlencode(several, quote_via=quote), parameters)))
    return (f"{first}?{query}" if query else first, *(split_urls(shards) if shards else ()))


def _text(connection: Connection, field: str) -> str:
    """An extra field of a connection; empty if it has none."""
    given = connection.extra_dejson.get(field) or ""
    if not isinstance(given, str):
        raise ConfigurationError(
            f"{field} of connection {connection.conn_id!r} is one text, as in its form, and not of type "
            f"{type(given).__name__}: edit it"
        )
    return given
