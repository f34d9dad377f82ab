"""The start of every command: the settings of this invocation, their database, and the platform on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.output import complain, keep_secret, on_shard, say
from eventsql_orchestration.cli.tables import Columns, picked, show_list
from eventsql_orchestration.errors import ConfigurationError, EmbeddedServerError, MissingExtraError

if TYPE_CHECKING:
    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.database.embedded import EmbeddedPostgres
    from eventsql_orchestration.settings import Settings

Setting = Literal["dsn", "schema", "home"]

STOP_SECONDS: Final = 1.0
"""Seconds after which a command says that it waits for the embedded server to stop."""


def embedded_server(settings: Settings) -> EmbeddedPostgres:
    """The embedded server of the settings' home, running or not."""
    return lazy.EmbeddedPostgres(settings.home / "postgres")


def how_begun(embedded: EmbeddedPostgres) -> str:
    """The words for a start of the server. A new, empty server is named as such: the directory may be a wrong one."""
    return "started" if embedded.has_data() else "made and started"


def resolve_dsn(settings: Settings) -> str:
    """The URL of the database to use, password included.

    If the settings name no database, the embedded server of their home is started and used, and one line on standard
    error says so. Raises `MissingExtraError`, `EmbeddedServerError`, and `ConfigurationError` for several databases.
    """
    if len(settings.dsns) > 1:
        raise ConfigurationError(
            f"this command needs one database, and {len(settings.dsns)} are named: choose a shard with --shard NAME"
        )
    if settings.dsns:
        return settings.dsns[0]
    embedded = embedded_server(settings)
    unnamed = f"no --dsn, EVENTSQL_DSN or {lazy.SETTINGS_FILE} names a database"
    try:
        running = embedded.status()
        used = "using" if running else how_begun(embedded)
        server = running or embedded.start()
    except (EmbeddedServerError, MissingExtraError) as error:
        error.args = (f"{unnamed}, and {error.message}",)
        raise
    say(f"{unnamed}: {used} the embedded server of {settings.home} (127.0.0.1:{server.port})")
    return server.dsn


def open_platform(
    settings: Settings, *, transfer: bool = False, migrate: bool | None = None, shard: str | None = None
) -> EventSQL:
    """The platform on the databases of the settings, or on the database of `shard` alone. The caller closes it.

    It keeps the tables of the embedded server up to date. In a database that the user named, only `eventsql topic
    create` creates missing tables, and only `eventsql migrate` upgrades tables. So other commands change nothing in a
    database of another version, or in a mistyped database. `migrate` overrides both rules.
    """
    if migrate is None:
        migrate = settings.dsn is None
    dsns = settings.dsns if len(settings.dsns) > 1 else (resolve_dsn(settings),)
    if shard is not None:
        dsns = (_dsn_of(shard, dsns, settings),)
    return lazy.EventSQL(*dsns, schema=settings.db_schema, migrate=migrate, transfer=transfer)


def _dsn_of(shard: str, dsns: tuple[str, ...], settings: Settings) -> str:
    """The URL of one shard. Raises `ConfigurationError`, or `ShardSetError`, also if a shard is down."""
    with lazy.EventSQL(*dsns, schema=settings.db_schema, migrate=False, transfer=False) as platform:
        platform.open()
        for dsn, each in zip(dsns, platform.shards, strict=True):
            if each.name == shard:
                return dsn
        names = ", ".join(sorted(each.name for each in platform.shards if each.name is not None))
    raise ConfigurationError(
        f"there is no shard {shard!r}" + (f", but {names}" if names else ": one database is named")
    )


@dataclass(kw_only=True)
class CliContext:
    """The options before the command. Each setting is read, and each connection made, at its first use.

    `dsn` may be several URLs with spaces between them. `dsn_option` is the option that gave it.
    """

    dsn: str | None = None
    dsn_option: str = "--dsn"
    schema: str | None = None
    home: Path | None = None
    shard: str | None = None

    @cached_property
    def settings(self) -> Settings:
        """Raises `ConfigurationError`."""
        settings = lazy.Settings.load(dsn=self.dsn, db_schema=self.schema, home=self.home)
        if settings.dsn is not None and not settings.dsn.get_secret_value().strip():
            named = self.dsn_option if self.dsn is not None else "EVENTSQL_DSN"
            raise ConfigurationError(
                f"{named} is empty: give it the database's URL, or leave it out to use the embedded server of --home"
            )
        keep_secret(*settings.dsns)
        return settings

    def source(self, setting: Setting) -> str:
        """The source of a setting's value: an option, a variable, the settings file, or the default."""
        if getattr(self, setting) is not None:
            return self.dsn_option if setting == "dsn" else f"--{setting}"
        variable = f"EVENTSQL_{setting.upper()}"
        if variable in os.environ:
            return variable
        field = "db_schema" if setting == "schema" else setting
        return lazy.SETTINGS_FILE if field in self.settings.model_fields_set else "default"

    def platform(self, *, transfer: bool = False) -> EventSQL:
        return open_platform(self.settings, transfer=transfer, shard=self.shard)

    def on_shard(self, name: str | None) -> dict[str, Any]:
        """The shard for a JSON object: `name`, or the shard of --shard. Empty if there is only one database."""
        return on_shard(name or self.shard)

    def on_its_shard(self, item: Any, columns: Columns) -> dict[str, Any]:
        """An object for JSON: its shard, if there are several, and these columns."""
        return {**self.on_shard(getattr(item, "shard", None)), **picked(item, columns)}

    def show_items(
        self, items: Sequence[Any], *, as_json: bool, json: Columns, table: Columns, spare: Sequence[str] = ()
    ) -> None:
        """Write objects as a JSON list with the fields of `json`, or as a table with the columns of `table`."""
        show_list(items, table, as_json=as_json, json=lambda item: self.on_its_shard(item, json), spare=spare)

    def whole(self) -> EventSQL:
        """The platform, for a command that changes all shards alike. Raises `ConfigurationError` if one was chosen."""
        self.check_whole()
        return self.platform()

    def check_whole(self) -> None:
        """Raise `ConfigurationError` if one shard was chosen."""
        if self.shard is not None:
            raise ConfigurationError("this command is for all shards together: leave out --shard")

    def make_tables(self, platform: EventSQL) -> None:
        """Make the platform's tables, if the user named one database and it has none.

        `eventsql migrate` changes older tables: those of EventSQL's Java library need its options.
        """
        if len(self.settings.dsns) == 1:
            database = platform.database
            if database.revision() is None and not database.has_tables():
                database.migrate()
                say(f"made the platform's tables in schema {database.schema!r} of {database}")

    @contextmanager
    def whole_system(self) -> Iterator[EventSQL]:
        """The platform, its tables up to date. An embedded server is stopped when the block ends; its data stays.

        It says so if the server takes longer than `STOP_SECONDS` to write what is in its memory.
        """
        embedded = None if self.settings.dsns else embedded_server(self.settings)
        if len(self.settings.dsns) > 1 and self.shard is None:
            resolve_dsn(self.settings)
        try:
            with open_platform(self.settings, migrate=True, shard=self.shard) as platform:
                yield platform
        finally:
            if embedded is not None:
                try:
                    embedded.stop(timeout=STOP_SECONDS)
                except EmbeddedServerError:
                    say("waiting for the embedded server, which writes its memory to the disk")
                    embedded.stop()

    def keep_embedded(self) -> None:
        """Start the embedded server again, if this invocation uses it and it has died."""
        if self.settings.dsns:
            return
        embedded = embedded_server(self.settings)
        if embedded.status() is None:
            log = embedded.directory / "postgres.log"
            complain(f"the embedded server of {self.settings.home} has died, see {log}: starting it again")
            embedded.start()


pass_context = click.make_pass_decorator(CliContext, ensure=True)
