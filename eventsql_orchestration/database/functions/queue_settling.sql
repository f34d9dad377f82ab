-- Acknowledging, releasing and extending messages of queues, and the archive.
--
-- A plan that was made while a table was empty would read the whole table later. These functions make a plan once in a
-- session, and never a plan that reads a table without an index.

-- The archive has a partition for each day on which archived messages expire. The partition is made a day ahead. It has
-- no key: if a publication of all tables has it, the server takes no deletion without a replica identity.
CREATE OR REPLACE FUNCTION {schema}.make_queue_archive(expires timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    first timestamptz := date_trunc('day', expires);
    wanted timestamptz;
    name text;
BEGIN
    IF (expires >= now() - interval '1 year 1 day' AND expires <= now() + interval '1 year 1 day') IS NOT TRUE THEN
        RAISE EXCEPTION 'messages that expire at % cannot be archived', expires
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A retention is a year at most.';
    END IF;
    FOR wanted IN SELECT first + make_interval(days => ahead) FROM generate_series(0, 1) AS ahead LOOP
        name := 'queue_archive_' || to_char(wanted, 'YYYYMMDD');
        CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        IF NOT pg_try_advisory_xact_lock(7310036) THEN
            -- Another transaction makes partitions now. This one waits only for the first day.
            CONTINUE WHEN wanted > first;
            PERFORM pg_advisory_xact_lock(7310036);
        END IF;
        -- Another transaction may have made the partition meanwhile. A session learns of new tables when it locks a
        -- table, and not when it takes an advisory lock. ATTACH takes the same lock, and no reader or writer waits for
        -- it.
        LOCK TABLE {schema}.queue_archive IN SHARE UPDATE EXCLUSIVE MODE;
        CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        EXECUTE format('CREATE TABLE %1$I.%2$I (LIKE %1$I.queue_archive INCLUDING DEFAULTS INCLUDING INDEXES)',
                       {literal}, name);
        EXECUTE format('ALTER TABLE %I.%I REPLICA IDENTITY FULL', {literal}, name);
        EXECUTE format('ALTER TABLE %1$I.queue_archive ATTACH PARTITION %1$I.%2$I FOR VALUES FROM (%3$L) TO (%4$L)',
                       {literal}, name, wanted, wanted + interval '1 day');
    END LOOP;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.make_queue_archive(timestamptz) FROM PUBLIC;

-- After an ANALYZE, a table that has only dead rows counts as empty. A plan from that time joined the messages by the
-- index of their queue, and read the whole queue for each message. Without a join and without this index (+ 0), the
-- primary key is left: no other index of all messages has their ids as they are. `width_bucket` finds the place of an
-- id among the sorted ids. Mostly, all messages have the same receipt: then the ids need no order. The function looks
-- for the messages that wait behind the acknowledged ones itself: for a call of `promote_keys`, the server would plan
-- an update that few acknowledgements need.
CREATE OR REPLACE FUNCTION {schema}.acknowledge_messages(
    of_queue integer, ids bigint[], receipts integer[]
) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off AS $$
DECLARE
    ordered boolean;
    retention double precision;
    alike boolean := receipts = array_fill(receipts[1], ARRAY[cardinality(receipts)]);
    given bigint[] := ids;
    held integer[] := receipts;
    done bigint[];
    keys text[];
    next bigint[];
BEGIN
    SELECT q.eql_ordered, q.eql_retention_seconds INTO ordered, retention
    FROM {schema}.queue q WHERE q.eql_id = of_queue;
    IF ordered AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- The snapshot of the transaction may not show the messages that wait behind these.
        RETURN NULL;
    END IF;
    IF retention IS NOT NULL THEN
        PERFORM {schema}.make_queue_archive(clock_timestamp() + make_interval(secs => retention));
    END IF;

    IF alike IS NOT TRUE THEN
        SELECT array_agg(each.id ORDER BY each.id), array_agg(each.receipt ORDER BY each.id) INTO given, held
        FROM unnest(ids, receipts) AS each (id, receipt);
    END IF;

    BEGIN
        IF retention IS NULL THEN
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m
                WHERE m.eql_id = ANY (given) AND m.eql_queue + 0 = of_queue
                  AND m.eql_receipt = held[CASE WHEN alike THEN 1 ELSE width_bucket(m.eql_id, given) END]
                RETURNING m.eql_id, CASE WHEN m.eql_in_order THEN m.eql_key END AS key
            )
            SELECT array_agg(eql_id), array_agg(key) INTO done, keys FROM deleted;
        ELSE
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m
                WHERE m.eql_id = ANY (given) AND m.eql_queue + 0 = of_queue
                  AND m.eql_receipt = held[CASE WHEN alike THEN 1 ELSE width_bucket(m.eql_id, given) END]
                RETURNING m.*
            ), kept AS (
                INSERT INTO {schema}.queue_archive
                SELECT d.eql_queue, d.eql_id, d.eql_priority, d.eql_key, d.eql_body, d.eql_metadata, d.eql_created_at,
                       d.eql_receives, d.eql_history, clock_timestamp(),
                       clock_timestamp() + make_interval(secs => retention)
                FROM deleted d
            )
            SELECT array_agg(eql_id), array_agg(eql_key) FILTER (WHERE eql_in_order) INTO done, keys FROM deleted;
        END IF;
        IF cardinality(done) IS DISTINCT FROM cardinality(ids) AND done IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'EQ001';
        END IF;
    EXCEPTION WHEN SQLSTATE 'EQ001' THEN
        RETURN ARRAY(SELECT each FROM unnest(ids) AS each WHERE each <> ALL (done));
    END;
    IF done IS NULL THEN
        RETURN ids;
    END IF;
    IF ordered THEN
        -- This statement has a new snapshot, with the messages that receivers have parked behind these.
        SELECT array_agg(first.eql_id) INTO next
        FROM unnest(keys) AS of_key
        CROSS JOIN LATERAL (
            SELECT n.eql_id FROM {schema}.queue_message n
            WHERE n.eql_queue = of_queue AND n.eql_key >= of_key AND n.eql_key <= of_key
              AND n.eql_in_order AND n.eql_visible_at = 'infinity'
            ORDER BY n.eql_key, n.eql_id LIMIT 1
        ) first;
        IF next IS NOT NULL THEN
            UPDATE {schema}.queue_message m
            SET eql_visible_at = greatest(clock_timestamp(), m.eql_due_at), eql_due_at = NULL
            WHERE m.eql_id = ANY (next) AND NOT isfinite(m.eql_visible_at);
        END IF;
    END IF;
    RETURN '{}';
END
$$;

CREATE OR REPLACE FUNCTION {schema}.queue_acknowledge_all(queue text, ids bigint[], receipts integer[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known record;
    missing bigint[];
BEGIN
    known := {schema}.queue_number(queue);
    IF ids IS NULL OR cardinality(ids) IS DISTINCT FROM cardinality(receipts)
       OR cardinality(ids) <> (SELECT count(DISTINCT given) FROM unnest(ids) AS given)
       OR array_position(receipts, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'ids and receipts must have one element for each message, and each message must come once'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cardinality(ids) = 0 THEN
        RETURN;
    END IF;
    missing := {schema}.acknowledge_messages(known.number, ids, receipts);
    IF missing IS NULL THEN
        RAISE EXCEPTION 'queue % is ordered, and this transaction is not READ COMMITTED', quote_nullable(queue)
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'The transaction may not see the message that comes next. Use READ COMMITTED.';
    END IF;
    IF missing <> '{}' THEN
        PERFORM {schema}.refuse_messages(queue, missing);
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_acknowledge_all(text, bigint[], integer[]) IS
    'Delete messages whose work is done, all or none, as part of this transaction.';

CREATE OR REPLACE FUNCTION {schema}.queue_acknowledge(queue text, id bigint, receipt integer) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.queue_acknowledge_all(queue, ARRAY[id], ARRAY[receipt]);
END
$$;
COMMENT ON FUNCTION {schema}.queue_acknowledge(text, bigint, integer) IS
    'Delete a message whose work is done, as part of this transaction.';

CREATE OR REPLACE FUNCTION {schema}.queue_release(
    queue text, id bigint, receipt integer, delay double precision DEFAULT 0, reason text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    known record;
    of_key text;
BEGIN
    known := {schema}.queue_number(queue);
    IF (delay >= 0 AND delay <= 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'delay must be 0 to 31536000 seconds' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE {schema}.queue_message m
    SET eql_visible_at = clock_timestamp() + make_interval(secs => delay), eql_receipt = NULL,
        eql_history = CASE WHEN reason IS NULL THEN m.eql_history ELSE {schema}.note_of_message(
            m.eql_history, m.eql_receives, clock_timestamp(), left(reason, 1000)) END
    WHERE m.eql_id = queue_release.id AND m.eql_queue + 0 = known.number AND m.eql_receipt = queue_release.receipt
    RETURNING CASE WHEN m.eql_in_order THEN m.eql_key END INTO of_key;
    IF NOT FOUND THEN
        PERFORM {schema}.refuse_messages(queue, ARRAY[id]);
    END IF;
    IF delay > 0 AND of_key IS NOT NULL THEN
        -- An earlier message of the key may be parked behind this one. It does not wait for the delay.
        PERFORM {schema}.promote_keys(known.number, ARRAY[of_key]);
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_release(text, bigint, integer, double precision, text) IS
    'Give a message back, visible again after a delay in seconds. The reason goes into its history.';

CREATE OR REPLACE FUNCTION {schema}.queue_extend(queue text, id bigint, receipt integer, seconds double precision)
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    known record;
BEGIN
    known := {schema}.queue_number(queue);
    IF (seconds > 0 AND seconds <= 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'seconds must be more than 0 and at most 31536000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE {schema}.queue_message m SET eql_visible_at = clock_timestamp() + make_interval(secs => seconds)
    WHERE m.eql_id = queue_extend.id AND m.eql_queue + 0 = known.number AND m.eql_receipt = queue_extend.receipt;
    IF NOT FOUND THEN
        PERFORM {schema}.refuse_messages(queue, ARRAY[id]);
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_extend(text, bigint, integer, double precision) IS
    'Hold a message for this number of seconds from now on.';
