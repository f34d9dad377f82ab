"""A range of a topic's log as a function: `SELECT … FROM eventsql.events('orders', 100, 200)`."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0016"
down_revision = "0015"

# EXECUTE plans the range for its values each time: a plan that was made while the log was small would read all of it.
# Logs of EventSQL's Java library have times without a zone, in UTC.
_EVENTS = """
CREATE FUNCTION {schema}.events(of_topic text, after bigint DEFAULT 0, upto bigint DEFAULT 9223372036854775807)
RETURNS TABLE (
    eql_id bigint, eql_partition smallint, eql_key text, eql_value bytea,
    eql_buffered_at timestamptz, eql_created_at timestamptz, eql_metadata json
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.topic t WHERE t.eql_name = of_topic) THEN
        RAISE EXCEPTION 'topic % does not exist', coalesce(quote_literal(of_topic), 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table {schema}.topic lists the topics.';
    END IF;
    IF after IS NULL OR upto IS NULL THEN
        RAISE EXCEPTION 'the range of topic % has no offset where it %', quote_literal(of_topic),
            CASE WHEN after IS NULL THEN 'begins' ELSE 'ends' END
            USING ERRCODE = 'null_value_not_allowed',
                  HINT = 'Leave the argument out for the first event, or for the last.';
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT eql_id, eql_partition, eql_key, eql_value, eql_buffered_at::timestamptz, eql_created_at::timestamptz, '
        'eql_metadata FROM %I.%I WHERE eql_id > $1 AND eql_id <= $2 ORDER BY eql_id',
        {literal}, lower(of_topic COLLATE "C") || '_event'
    ) USING after, upto;
END
$$;
COMMENT ON FUNCTION {schema}.events(text, bigint, bigint) IS
    'The events of a topic with after < eql_id <= upto, in order. Needs SELECT on the topic''s log.';
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    run(_EVENTS.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
