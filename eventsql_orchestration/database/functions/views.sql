-- Partitions of declared views.

-- A handler that writes to a view does not own the table of the view. So the function has its owner's rights, and makes
-- only partitions that the view may have. Writers and readers go on while a partition is attached. The bounds are
-- written as text: the caller's DateStyle and time zone must not change the meaning of the text.
CREATE OR REPLACE FUNCTION {schema}.make_view_periods(of_view text, starts timestamptz[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO' SET timezone = 'UTC' AS $$
DECLARE
    seconds bigint;
    starting timestamptz;
    name text;
BEGIN
    SELECT d.eql_period_seconds INTO seconds FROM {schema}.view_definition d WHERE d.eql_name = of_view;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'view % does not exist', quote_nullable(of_view) USING ERRCODE = 'no_data_found';
    END IF;
    IF cardinality(starts) > 100 THEN
        RAISE EXCEPTION '% partitions are too many for one call', cardinality(starts)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass at most 100 periods.';
    END IF;
    FOREACH starting IN ARRAY starts LOOP
        -- The name of a partition has a year of four digits.
        IF starting IS NULL OR NOT starting BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 23:59+00'
            OR mod(extract(epoch FROM starting)::numeric, seconds) <> 0
        THEN
            RAISE EXCEPTION 'no period of view % begins at %', of_view, starting
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        name := format('view_%s_p%s', of_view, to_char(starting AT TIME ZONE 'UTC', 'YYYYMMDDHH24MI'));
        CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        EXECUTE format('LOCK TABLE %I.%I IN SHARE UPDATE EXCLUSIVE MODE', {literal}, 'view_' || of_view);
        -- Another transaction may have made the partition meanwhile.
        CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        EXECUTE format(
            'CREATE TABLE %1$I.%2$I (LIKE %1$I.%3$I INCLUDING DEFAULTS)', {literal}, name, 'view_' || of_view
        );
        EXECUTE format(
            'ALTER TABLE %1$I.%2$I ATTACH PARTITION %1$I.%3$I FOR VALUES FROM (%4$L) TO (%5$L)',
            {literal}, 'view_' || of_view, name, starting, starting + make_interval(secs => seconds)
        );
    END LOOP;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.make_view_periods(text, timestamptz[]) FROM PUBLIC;
