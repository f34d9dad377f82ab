"""What every command begins with: the settings of this invocation, the database they name, and the platform on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import click

from eventsql_orchestration.cli.output import say
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.settings import Settings

SETTINGS_FILE: Final = "eventsql.toml"

Setting = Literal["dsn", "schema", "home"]


def embedded_server(settings: Settings) -> EmbeddedPostgres:
    """The embedded server of the settings' home, running or not."""
    return EmbeddedPostgres(settings.home / "postgres")


def resolve_dsn(settings: Settings) -> str:
    """The URL of the database to use, password included.

    Where the settings name none, the embedded server of their home is started and used, and one line on standard error
    says so. Raises `MissingExtraError`, `EmbeddedServerError`.
    """
    if settings.dsn is not None:
        return settings.dsn.get_secret_value()
    embedded = embedded_server(settings)
    running = embedded.status()
    server = running or embedded.start()
    say(
        f"no --dsn, EVENTSQL_DSN or {SETTINGS_FILE} names a database: "
        f"{'using' if running else 'started'} the embedded server of {settings.home} (127.0.0.1:{server.port})"
    )
    return server.dsn


def open_platform(settings: Settings, *, transfer: bool = False, migrate: bool | None = None) -> EventSQL:
    """The platform on the database of the settings; the caller closes it.

    The tables of the embedded server are kept up to date by themselves. A database that the user named is changed by
    `eventsql migrate` alone, so that a mistyped URL leaves no tables anywhere; `migrate` overrides either.
    """
    if migrate is None:
        migrate = settings.dsn is None
    return EventSQL(resolve_dsn(settings), schema=settings.db_schema, migrate=migrate, transfer=transfer)


@dataclass(frozen=True, slots=True)
class System:
    """The platform, and the embedded server that it is on, where it is on one."""

    platform: EventSQL
    embedded: EmbeddedPostgres | None


class CliContext:
    """The options that stand before the command. Nothing is read or connected before it is asked for."""

    def __init__(self, *, dsn: str | None = None, schema: str | None = None, home: Path | None = None) -> None:
        self._dsn = dsn
        self._schema = schema
        self._home = home

    @cached_property
    def settings(self) -> Settings:
        """Raises `ConfigurationError`."""
        return Settings.load(dsn=self._dsn, db_schema=self._schema, home=self._home)

    def source(self, setting: Setting) -> str:
        """Where a setting has its value from."""
        options = {"dsn": self._dsn, "schema": self._schema, "home": self._home}
        if options[setting] is not None:
            return f"--{setting}"
        variable = f"EVENTSQL_{setting.upper()}"
        if variable in os.environ:
            return variable
        field = "db_schema" if setting == "schema" else setting
        return SETTINGS_FILE if field in self.settings.model_fields_set else "default"

    def platform(self, *, transfer: bool = False) -> EventSQL:
        """The platform, as `open_platform` opens it."""
        return open_platform(self.settings, transfer=transfer)

    @contextmanager
    def whole_system(self) -> Iterator[System]:
        """The platform, its tables up to date. An embedded server is stopped when the block ends; its data stays."""
        embedded = embedded_server(self.settings) if self.settings.dsn is None else None
        try:
            with open_platform(self.settings, migrate=True) as platform:
                yield System(platform, embedded)
        finally:
            if embedded is not None:
                embedded.stop()


pass_context = click.make_pass_decorator(CliContext)
