"""A key of a captured table may not have rows with NULL that a constraint of PostgreSQL 18 has not looked at."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0052"
down_revision = "0051"

# Since PostgreSQL 18, `attnotnull` also stands for a constraint that is NOT VALID: older rows may be NULL.
_NEVER_NULL = """
DO $do$
DECLARE
    function CONSTANT regprocedure := '{schema}.capture_columns({schema}.capture, oid)';
BEGIN
    EXECUTE replace(
        pg_get_functiondef(function),
        'AND NOT a.attnotnull
    ) THEN',
        'AND NOT a.attnotnull
    ) OR EXISTS (
        SELECT FROM pg_constraint n
        WHERE n.conrelid = of_table AND n.contype = ''n'' AND NOT n.convalidated AND n.conkey && key_numbers
    ) THEN'
    );
END
$do$;
"""


def upgrade() -> None:
    run(_NEVER_NULL.replace("{schema}", '"{}"'.format(context.config.attributes["schema"])))
