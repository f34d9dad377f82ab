"""The hint of a captured table that lost its key is a command that a shell takes, also for a name with quotes."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0049"
down_revision = "0048"

# Only the hint of the function of revision 0046 changes. No backslash: sessions read them differently.
_HINT = """
DO $do$
DECLARE
    function CONSTANT regprocedure := '{schema}.capture_changes()';
BEGIN
    EXECUTE replace(
        pg_get_functiondef(function),
        $$format('Run: eventsql capture drop %s %s', captured.eql_table, captured.eql_topic)$$,
        $$format('Run: eventsql capture drop %s %s', CASE WHEN strpos(captured.eql_table, '"') = 0
                      THEN captured.eql_table
                      ELSE '''' || replace(captured.eql_table, '''', '''"''"''') || '''' END, captured.eql_topic)$$
    );
END
$do$;
"""


def upgrade() -> None:
    run(_HINT.replace("{schema}", '"{}"'.format(context.config.attributes["schema"])))
