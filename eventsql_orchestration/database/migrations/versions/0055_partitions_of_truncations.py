"""The event of a truncation has the number of partitions by which the keys of its rows are found."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0055"
down_revision = "0054"

# Of the function of revision 0046, only the metadata of a truncation change. A row's last event may be in a partition
# that the topic does not have any more, which gets no event of the truncation.
_PARTITIONS = """
DO $do$
DECLARE
    function CONSTANT regprocedure := '{schema}.capture_changes()';
BEGIN
    EXECUTE replace(
        pg_get_functiondef(function),
        $$json_build_object('op', 't', 'table', source.name)$$,
        $$json_build_object('op', 't', 'table', source.name, 'partitions', place::text)$$
    );
END
$do$;
"""


def upgrade() -> None:
    run(_PARTITIONS.replace("{schema}", '"{}"'.format(context.config.attributes["schema"])))
