"""Alembic's entry: runs the revisions on the connection and schema that `migrations.upgrade` hands over."""

from alembic import context
from sqlalchemy.schema import CreateSchema

from eventsql_orchestration.database import grants, role_statements
from eventsql_orchestration.database.connections import driver_connection
from eventsql_orchestration.database.migrations import SYSTEM_PATH, known
from eventsql_orchestration.database.migrations.holding import hold_publishers
from eventsql_orchestration.database.queries import Queries, statement
from eventsql_orchestration.database.tables import VERSION_TABLE

connection = context.config.attributes["connection"]
schema = context.config.attributes["schema"]

# `CREATE SCHEMA IF NOT EXISTS` asks for a right on the database even where a DBA has made the schema.
has_schema = Queries("sessions", schema)("has_schema")
if driver_connection(connection).execute(has_schema, {"schema": f'"{schema}"'}).fetchone() != (True,):
    connection.execute(CreateSchema(schema))
# If roles exist, the admin role owns new objects, and the other roles get their rights on them.
has_roles = role_statements.act_as_owner(driver_connection(connection), schema)
connection.exec_driver_sql(SYSTEM_PATH)
# Only in UTC does a column of `timestamp` become `timestamptz` without a rewrite of its table.
connection.exec_driver_sql("SET LOCAL timezone TO 'UTC'")
# While ALTER TABLE waits for an open transaction, later statements wait behind it. So it does not wait for long.
connection.exec_driver_sql(statement("sessions", "give_way"))
context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=schema)
found = context.get_context().get_current_revision()
# A newer package may have migrated while this process waited for it. Its schema is used as it is.
if found is None or known(found):
    if found != context.get_revision_argument():
        # A handler that has an event of a queue uses a table with row security, and then publishes.
        hold_publishers(driver_connection(connection), schema, grants.BY_TOPIC if has_roles else ())
    context.run_migrations()
    if has_roles:
        role_statements.grant(driver_connection(connection), schema)
