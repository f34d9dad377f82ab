"""Two acknowledgements at once make an archive of queues once, and a worker makes none beyond the longest retention."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0051"
down_revision = "0050"

_ARCHIVE = """
CREATE OR REPLACE FUNCTION {schema}.make_queue_archive(expires timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    first timestamptz := date_trunc('day', expires);
    wanted timestamptz;
    name text;
BEGIN
    -- A retention is a year at most.
    IF (expires >= now() - interval '1 year 1 day' AND expires <= now() + interval '1 year 1 day') IS NOT TRUE THEN
        RAISE EXCEPTION 'an archive of messages that expire at % is refused', expires
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR wanted IN SELECT first + make_interval(days => ahead) FROM generate_series(0, 1) AS ahead LOOP
        name := 'queue_archive_' || to_char(wanted, 'YYYYMMDD');
        CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        IF NOT pg_try_advisory_xact_lock(7310036) THEN
            -- Somebody else is making it; only the day at hand is waited for.
            CONTINUE WHEN wanted > first;
            PERFORM pg_advisory_xact_lock(7310036);
        END IF;
        -- Another transaction may have made it meanwhile. A session hears of new tables when it locks a table, and not
        -- when it takes an advisory lock. Attaching takes the same lock, which nobody waits for who reads or writes.
        LOCK TABLE {schema}.queue_archive IN SHARE UPDATE EXCLUSIVE MODE;
        CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        EXECUTE format('CREATE TABLE %1$I.%2$I (LIKE %1$I.queue_archive INCLUDING DEFAULTS INCLUDING INDEXES)',
                       {literal}, name);
        EXECUTE format('ALTER TABLE %1$I.queue_archive ATTACH PARTITION %1$I.%2$I FOR VALUES FROM (%3$L) TO (%4$L)',
                       {literal}, name, wanted, wanted + interval '1 day');
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    run(_ARCHIVE.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
