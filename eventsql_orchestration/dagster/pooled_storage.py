"""`PooledPostgresStorage`: Dagster's storage in PostgreSQL, with connections that are used again.

`DagsterPostgresStorage` connects anew for each access, some 50 times in a short run. Connecting costs the process and
the server more than most accesses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self, cast

from dagster._serdes import ConfigurableClassData
from dagster_postgres import (
    DagsterPostgresStorage,
    PostgresEventLogStorage,
    PostgresRunStorage,
    PostgresScheduleStorage,
)
from dagster_postgres.utils import pg_config, pg_url_from_config
from sqlalchemy import Connection, Engine, create_engine, make_url

from eventsql_orchestration.database.sessions import ping_unused
from eventsql_orchestration.forks import after_fork

_POOL_SIZE: Final = 5
"""Connections that an instance keeps. A thread that finds all of them in use connects for one access, as in Dagster's
own storage."""

_RECYCLE_AFTER: Final = 300.0
"""Seconds until a connection is replaced. Load balancers drop idle connections silently, AWS's after 350 s."""

_COMPLETE: Final[set[str | None]] = set()
"""URLs of storages whose tables exist; None stands for every storage."""


def tables_exist() -> None:
    """Declare that the tables of every storage exist: this process and its forks do not look for them."""
    _COMPLETE.add(None)


def _with_driver(url: str) -> str:
    """The URL, with psycopg 2 if it names no driver.

    SQLAlchemy 2.1 would take psycopg 3, and Dagster's NOTIFY cannot use its parameters.
    """
    parsed = make_url(url)
    if parsed.drivername != "postgresql":
        return url
    return parsed.set(drivername="postgresql+psycopg2").render_as_string(hide_password=False)


def _engine(url: str) -> Engine:
    """A pool of connections. A connection that broke is replaced when it is taken.

    SQLAlchemy's `pool_pre_ping` would ask the server before each access: 12 times in each tick of a sensor.
    """
    engine = create_engine(
        url, isolation_level="AUTOCOMMIT", pool_size=_POOL_SIZE, max_overflow=-1, pool_use_lifo=True,
        pool_recycle=_RECYCLE_AFTER,
    )  # fmt: skip
    ping_unused(engine)
    after_fork(engine, _leave_to_parent)
    return engine


def _leave_to_parent(engine: Engine) -> None:
    """See `forks`. psycopg 2 does not close another process's connection."""
    engine.dispose(close=False)


class _Pooled:
    """A part of the storage, with the connections of `engine`.

    The parts look for tables, columns and indexes of later versions only until they have found them, not at each
    access.
    """

    _engine: Engine

    def __init__(self, url: str, engine: Engine) -> None:
        super().__init__(url, should_autocreate_tables=False)  # type: ignore[call-arg]  # it stands before a storage
        self._engine = engine
        self._found: set[str] = set()

    def _finds(self, name: str, look: Callable[[], bool]) -> bool:
        if name not in self._found and look():
            self._found.add(name)
        return name in self._found

    def dispose(self) -> None:
        super().dispose()  # type: ignore[misc]  # it stands before a storage
        self._engine.dispose()


class _RunStorage(_Pooled, PostgresRunStorage):
    def has_run_stats_index_cols(self) -> bool:
        return self._finds("run stats", super().has_run_stats_index_cols)


class _EventLogStorage(_Pooled, PostgresEventLogStorage):
    def has_asset_key_col(self, column_name: str) -> bool:
        return self._finds(column_name, partial(super().has_asset_key_col, column_name))

    def _has_asset_key_index_cols_on_connection(self, conn: Connection) -> bool:  # noqa: ARG002 - as Dagster calls it
        return self.has_asset_key_index_cols()


class _ScheduleStorage(_Pooled, PostgresScheduleStorage):
    def has_instigators_table(self) -> bool:
        # Dagster takes a connection to ask.
        return self._finds("instigators", super().has_instigators_table)

    def _has_instigators_table(self, conn: Connection) -> bool:
        return self._finds("instigators", partial(super()._has_instigators_table, conn))

    def has_built_index(self, migration_name: str) -> bool:
        # Dagster lists the tables that it can see. PostgreSQL reads all tables of the database for this list.
        return self._finds(migration_name, partial(super().has_built_index, migration_name))


class PooledPostgresStorage(DagsterPostgresStorage):
    """Dagster's storage in PostgreSQL, with at most five connections that an open instance keeps.

    The configuration is that of `DagsterPostgresStorage`, without `auth_provider`. In dagster.yaml it is a storage of
    the kind `custom`.
    """

    def __init__(
        self, postgres_url: str, should_autocreate_tables: bool = True, inst_data: ConfigurableClassData | None = None
    ) -> None:
        postgres_url = _with_driver(postgres_url)
        if should_autocreate_tables and _COMPLETE.isdisjoint({None, postgres_url}):
            DagsterPostgresStorage(postgres_url)
            _COMPLETE.add(postgres_url)

        super().__init__(postgres_url, should_autocreate_tables=False, inst_data=inst_data)
        self.should_autocreate_tables = should_autocreate_tables
        engine = _engine(postgres_url)
        self._run_storage = _RunStorage(postgres_url, engine)
        self._event_log_storage = _EventLogStorage(postgres_url, engine)
        self._schedule_storage = _ScheduleStorage(postgres_url, engine)

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        options = cast("dict[str, Any]", pg_config())
        return {name: option for name, option in options.items() if name != "auth_provider"}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Any) -> Self:
        return cls(pg_url_from_config(config_value), config_value.get("should_autocreate_tables", True), inst_data)
