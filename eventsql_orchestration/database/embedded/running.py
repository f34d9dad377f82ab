"""A running embedded server: its address, and connections to it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg

from eventsql_orchestration.database.embedded.configuration import HOST

ROLE: Final = "eventsql"
DATABASE: Final = "eventsql"

_THIS_SERVER: Final = (
    f"host={HOST} hostaddr={HOST} user={ROLE} sslmode=disable gssencmode=disable channel_binding=disable "
    # Another program that listens on this port is not told the password.
    "require_auth=scram-sha-256 options='' client_encoding=UTF8 connect_timeout=5"
)


@dataclass(frozen=True)
class EmbeddedServer:
    """A running embedded server. Its text form leaves the password out; `dsn` carries it."""

    data_directory: Path
    port: int
    pid: int
    password: str = field(repr=False)

    @property
    def dsn(self) -> str:
        """The URL of the database `eventsql`, password included."""
        return self.dsn_for(DATABASE)

    def dsn_for(self, database: str) -> str:
        """The URL of another database of this server, password included; the database need not exist."""
        return f"postgresql://{ROLE}:{self.password}@{HOST}:{self.port}/{quote(database, safe='')}"

    def connect(self, database: str = DATABASE) -> psycopg.Connection[Any]:
        """Connect in autocommit mode to this server and no other, whatever this process's PG… variables say."""
        return psycopg.connect(_THIS_SERVER, port=self.port, password=self.password, dbname=database, autocommit=True)

    def version(self) -> str | None:
        """PostgreSQL's version; None if the server has no free connection."""
        try:
            with contextlib.closing(self.connect()) as connection:
                return connection.info.parameter_status("server_version")
        except psycopg.OperationalError:
            return None
