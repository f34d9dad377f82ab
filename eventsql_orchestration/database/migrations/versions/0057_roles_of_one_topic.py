"""Roles of one topic publish to a topic whose name is a word of SQL, and hold up no other topic by ids or times."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0057"
down_revision = "0056"

# Python has no infinite time, and none of the year 10000. Programs read the rows of all topics at once.
_TIMES = """
UPDATE {schema}.consumer SET {column} = NULL
WHERE {column} < '0001-01-02 00:00+00' OR {column} >= '9999-12-31 00:00+00';
ALTER TABLE {schema}.consumer ADD CONSTRAINT {column}_can_be_read
    CHECK ({column} >= '0001-01-02 00:00+00' AND {column} < '9999-12-31 00:00+00');
"""
_COLUMNS = ("eql_last_consumption_at", "eql_lease_expires_at", "eql_retry_at")

# The ids are drawn from sequences of all topics: a role of one topic could take the next ones before others draw them.
# The migration then grants what the roles need.
_IDS = """
DO $$
DECLARE
    role text;
BEGIN
    FOR role IN
        SELECT r.rolname FROM {schema}.access_role a JOIN pg_catalog.pg_roles r ON r.rolname = a.eql_role
        WHERE a.eql_kind = 'consumer'
    LOOP
        EXECUTE format(
            'REVOKE INSERT, UPDATE ON {schema}.consumer_claim, {schema}.consumer_cursor, {schema}.consumer_worker '
            'FROM %I', role
        );
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    install("publishing")
    for statements in (*(_TIMES.replace("{column}", each) for each in _COLUMNS), _IDS):
        run(statements)
