"""Creates and upgrades the platform's tables, with Alembic, safely from many processes at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine

from eventsql_orchestration.database.connections import driver_connection
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.database.sessions import let_last

# Alembic takes 0.25 s to import, and only a schema that is not current needs it.
if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

HEAD: Final = "0057"
"""The newest revision in `versions/`."""

SYSTEM_PATH: Final = "SET LOCAL search_path TO pg_catalog, pg_temp"

# One number for all installations: the lock is taken for the transaction that migrates, in the database at hand.
_ADVISORY_LOCK: Final = 0x6576_656E_7473_716C  # "eventsql"


def _config() -> Config:
    from alembic.config import Config  # noqa: PLC0415 - see above

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    return config


def scripts() -> ScriptDirectory:
    """The migrations, as Alembic sees them."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415 - see above

    return ScriptDirectory.from_config(_config())


def known(revision: str) -> bool:
    """Whether this package knows `revision`. If not, a newer package has made it."""
    return revision == HEAD or any(entry.revision == revision for entry in scripts().walk_revisions())


def upgrade(engine: Engine, schema: str, *, times_in: str = "UTC", to: str = HEAD) -> None:
    """Bring `schema` up to a revision, the newest by default, in one transaction.

    Processes that come at the same time wait for the first and find nothing left to do. `times_in` is the time zone of
    the times in existing tables of EventSQL's Java library. Any zone but UTC rewrites these tables.
    """
    with engine.begin() as connection:
        # A limit of the role would end the same building of an index at each attempt. Its `lock_timeout` counts: an
        # operator sets it so that a migration gives way to the transactions of others.
        let_last(driver_connection(connection))
        # The second lock keeps changes of topics and of roles away: grants on one table at once fail.
        for lock in (_ADVISORY_LOCK, REGISTRY_LOCK):
            connection.exec_driver_sql("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (lock,))
        _run(connection, schema, times_in, to)


def run(statements: str) -> None:
    """Run statements of a revision, where unqualified tables are those of the schema that is migrated.

    Everything else of a migration, such as Alembic's own queries, finds the system's names alone.
    """
    from alembic import context, op  # noqa: PLC0415 - see above

    connection = op.get_bind()
    connection.exec_driver_sql(f'SET LOCAL search_path TO "{context.config.attributes["schema"]}", pg_temp')
    connection.exec_driver_sql(statements.replace("%", "%%"))
    connection.exec_driver_sql(SYSTEM_PATH)


def _run(connection: Connection, schema: str, times_in: str, to: str) -> None:
    from alembic import command  # noqa: PLC0415 - see above

    config = _config()
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    config.attributes["times_in"] = times_in
    command.upgrade(config, to)
