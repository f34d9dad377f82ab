"""Creates and upgrades the platform's tables, with Alembic, safely from many processes at once."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from eventsql_orchestration.database.connections import driver_connection
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.database.sessions import let_last
from eventsql_orchestration.forks import ProcessLock

# Alembic takes 0.25 s to import, and only a schema that is not current needs it.
if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

HEAD: Final = "0077"
"""The newest revision in `versions/`."""

SYSTEM_PATH: Final = "SET LOCAL search_path TO pg_catalog, pg_temp"

_REVOKE: Final = re.compile(r"^REVOKE EXECUTE ON FUNCTION \{schema\}\.(?P<function>.+) FROM PUBLIC;$", re.MULTILINE)

_COPY_RIGHTS: Final = """
DO $$
DECLARE
    rights aclitem[] := (SELECT p.proacl FROM pg_proc p WHERE p.oid = to_regprocedure('{schema}.{function}'));
    grantee text;
BEGIN
    IF rights IS NULL THEN
        RETURN;
    END IF;
    REVOKE EXECUTE ON FUNCTION {schema}.{to} FROM PUBLIC;
    FOR grantee IN
        SELECT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM aclexplode(rights) acl WHERE acl.privilege_type = 'EXECUTE'
    LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION {schema}.{to} TO ' || grantee;
    END LOOP;
END
$$;
"""

# One number for all installations: the lock belongs to the database, and to the transaction that migrates.
_ADVISORY_LOCK: Final = 0x6576_656E_7473_716C  # "eventsql"


_TURNS: Final = ProcessLock()
"""Lets one thread of this process migrate at a time: Alembic keeps the current migration in globals."""


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


def upgrade(
    connecting: AbstractContextManager[Connection], schema: str, *, times_in: str = "UTC", to: str = HEAD
) -> None:
    """Bring `schema` up to a revision, the newest by default, in one transaction on a connection.

    Processes and threads that come at the same time wait for the first and find nothing left to do. `times_in` is the
    time zone of the times in existing tables of EventSQL's Java library. Any zone but UTC rewrites these tables.
    """
    with _TURNS.lock, connecting as connection, connection.begin():
        # A limit of the role would end the same building of an index at each attempt. The role's `lock_timeout` stays:
        # an operator sets it so that a migration gives way to other transactions.
        let_last(driver_connection(connection))
        # The second lock keeps changes of topics and of roles away: of two transactions that grant rights on one table
        # at the same time, one fails.
        for lock in (_ADVISORY_LOCK, REGISTRY_LOCK):
            connection.exec_driver_sql("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (lock,))
        _run(connection, schema, times_in, to)


def run(statements: str) -> None:
    """Run statements of a revision, where unqualified tables are those of the schema that is migrated.

    `{schema}` is that schema, `{literal}` its name as a text. All other statements of a migration, such as Alembic's
    own queries, find only the names of the system's schemas.
    """
    from alembic import context, op  # noqa: PLC0415 - see above

    connection = op.get_bind()
    schema = context.config.attributes["schema"]
    connection.exec_driver_sql(f'SET LOCAL search_path TO "{schema}", pg_temp')
    connection.exec_driver_sql(_in_schema(statements, schema).replace("%", "%%"))
    connection.exec_driver_sql(SYSTEM_PATH)


def install(*files: str) -> None:
    """Create or replace the functions of files in `database/functions`, each file once in a migration.

    PostgreSQL lets everybody execute a new function. A REVOKE in the file takes this right back when the function is
    first made. It is left out when the function is replaced: an operator may have granted the right to PUBLIC since
    then.
    """
    from alembic import context  # noqa: PLC0415 - see above

    installed: set[str] = context.config.attributes["installed"]
    for file in files:
        if file not in installed:
            run(_REVOKE.sub(lambda revoke: "" if exists(revoke["function"]) else revoke[0], _definitions(file)))
            installed.add(file)


def exists(function: str) -> bool:
    """Whether the schema that is migrated has a function, such as `publish(text, text, bytea, json)`."""
    from alembic import context, op  # noqa: PLC0415 - see above

    named = _in_schema(f"{{schema}}.{function}", context.config.attributes["schema"])
    found = op.get_bind().exec_driver_sql("SELECT pg_catalog.to_regprocedure(%s) IS NOT NULL", (named,))
    return bool(found.scalar_one())


def copy_rights(function: str, *, to: str) -> None:
    """Let the roles that may execute a function execute another one, and no other role.

    If the first function does not exist, or nobody has changed its rights, the other one stays as it is.
    """
    run(_COPY_RIGHTS.replace("{function}", function).replace("{to}", to))


def definitions(file: str, schema: str) -> str:
    """The statements that make the functions of a file in `database/functions`."""
    return _in_schema(_definitions(file), schema)


def _definitions(file: str) -> str:
    package = resources.files(__package__.rpartition(".")[0])
    return package.joinpath("functions", f"{file}.sql").read_text(encoding="utf-8")


def _in_schema(statements: str, schema: str) -> str:
    return statements.replace("{schema}", f'"{schema}"').replace("{literal}", f"'{schema}'")


def _run(connection: Connection, schema: str, times_in: str, to: str) -> None:
    from alembic import command  # noqa: PLC0415 - see above

    config = _config()
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    config.attributes["times_in"] = times_in
    config.attributes["installed"] = set()
    command.upgrade(config, to)
