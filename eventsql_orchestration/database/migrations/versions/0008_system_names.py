"""Functions that run in anybody's session name the system's functions and operators in full."""

from __future__ import annotations

from alembic import context, op

from eventsql_orchestration.database.connections import driver_connection
from eventsql_orchestration.database.migrations import run
from eventsql_orchestration.database.queries import Queries

revision = "0008"
down_revision = "0007"

_PARTITION_OF_KEY = """
CREATE OR REPLACE FUNCTION partition_of_key(key text, partitions integer) RETURNS smallint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    hash pg_catalog.bytea := pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8'));
    rest bigint := 0;
BEGIN
    FOR byte IN 0..31 LOOP
        rest := (rest OPERATOR(pg_catalog.*) 256 OPERATOR(pg_catalog.+) pg_catalog.get_byte(hash, byte))
            OPERATOR(pg_catalog.%) partitions;
    END LOOP;
    RETURN rest;
END
$$;
"""

_KEEP_PUBLISHED_BLOCK = """
CREATE OR REPLACE FUNCTION keep_published_block() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    waiting boolean;
BEGIN
    EXECUTE pg_catalog.format(
        'SELECT EXISTS (SELECT FROM %I.spark_staged_event WHERE eql_buffer_id OPERATOR(pg_catalog.=) $1)',
        TG_TABLE_SCHEMA
    ) INTO waiting USING OLD.eql_id;
    IF waiting THEN
        RAISE EXCEPTION 'row % of the buffer of topic % stands for a block of events, which only the transfer of '
            'eventsql-orchestration moves', OLD.eql_id, OLD.eql_topic
            USING ERRCODE = 'check_violation', CONSTRAINT = 'event_buffer_published_block';
    END IF;
    RETURN NULL;
END
$$;
"""

# topics/legacy_writer_trigger.py makes it where it is needed first.
_PLACE_IN_LAYOUT = """
CREATE OR REPLACE FUNCTION place_in_layout() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.eql_key IS NULL THEN
        NEW.eql_partition := pg_catalog.mod(NEW.eql_id, TG_ARGV[0]::bigint);
    ELSE
        NEW.eql_partition := "{schema}".partition_of_key(NEW.eql_key, TG_ARGV[0]::integer);
    END IF;
    RETURN NEW;
END
$$;
"""


def upgrade() -> None:
    for statements in (_PARTITION_OF_KEY, _KEEP_PUBLISHED_BLOCK):
        run(statements)
    schema = context.config.attributes["schema"]
    has_function = Queries("guards", schema)("has_guard_function")
    named = {"name": f'"{schema}".place_in_layout()'}
    if driver_connection(op.get_bind()).execute(has_function, named).fetchone() == (True,):
        run(_PLACE_IN_LAYOUT.format(schema=schema))
