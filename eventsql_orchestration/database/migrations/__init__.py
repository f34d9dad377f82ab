"""Creates and upgrades the platform's tables, with Alembic, safely from many processes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

VERSION_TABLE: Final = "schema_version"

# One number for all installations: the lock is taken for the transaction that migrates, in the database at hand.
_ADVISORY_LOCK: Final = 0x6576_656E_7473_716C  # "eventsql"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    return config


def head() -> str:
    """The newest revision that this package knows."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None, "the package ships at least one migration"
    return revision


def known(revision: str) -> bool:
    """Whether this package knows `revision`; a newer package has made it otherwise."""
    script = ScriptDirectory.from_config(_config())
    return any(entry.revision == revision for entry in script.walk_revisions())


def upgrade(engine: Engine, schema: str) -> None:
    """Bring `schema` up to `head()`, in one transaction.

    Processes that come at the same time wait for the first and find nothing left to do.
    """
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        _run(connection, schema)


def _run(connection: Connection, schema: str) -> None:
    config = _config()
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    command.upgrade(config, "head")
