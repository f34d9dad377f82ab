"""Alembic's entry: runs the revisions on the connection and schema that `migrations.upgrade` hands over."""

from alembic import context
from sqlalchemy import text
from sqlalchemy.schema import CreateSchema

from eventsql_orchestration.database import roles
from eventsql_orchestration.database.connections import driver_connection
from eventsql_orchestration.database.migrations import VERSION_TABLE

connection = context.config.attributes["connection"]
schema = context.config.attributes["schema"]

# `CREATE SCHEMA IF NOT EXISTS` asks for a right on the database even where a DBA has made the schema.
if connection.scalar(text("SELECT to_regnamespace(:schema)"), {"schema": f'"{schema}"'}) is None:
    connection.execute(CreateSchema(schema))
# Where there are roles, what a migration makes is the admin role's, and the others get their rights on it.
has_roles = roles.act_as_owner(driver_connection(connection), schema)
# Unqualified names of the revisions mean this schema, and a column of `timestamp` becomes `timestamptz` without a
# rewrite of its table only where the session's time zone is UTC.
connection.exec_driver_sql(f'SET LOCAL search_path TO "{schema}"')
connection.exec_driver_sql("SET LOCAL timezone TO 'UTC'")
# A table that is altered keeps everybody waiting who comes after; an open transaction must not make that long.
connection.exec_driver_sql("SET LOCAL lock_timeout TO '10s'")
context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=schema)
context.run_migrations()
if has_roles:
    roles.grant(driver_connection(connection), schema)
