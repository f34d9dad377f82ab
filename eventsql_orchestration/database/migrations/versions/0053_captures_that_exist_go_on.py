"""A capture that exists goes on while a constraint of its key is not valid: only a new capture is refused."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0053"
down_revision = "0052"

# The triggers call the function too: with the check of revision 0052 in it, each change of the table failed.
_GO_ON = """
DO $do$
DECLARE
    function CONSTANT regprocedure := '{schema}.capture_columns({schema}.capture, oid)';
BEGIN
    EXECUTE replace(
        pg_get_functiondef(function),
        ' OR EXISTS (
        SELECT FROM pg_constraint n
        WHERE n.conrelid = of_table AND n.contype = ''n'' AND NOT n.convalidated AND n.conkey && key_numbers
    )',
        ''
    );
END
$do$;
"""


def upgrade() -> None:
    run(_GO_ON.replace("{schema}", '"{}"'.format(context.config.attributes["schema"])))
