-- Consuming in SQL: claims, and the events that failed.
--
-- A plan that was made while a table was empty would read the whole table later. EXECUTE makes a plan for the values of
-- each call.

-- A program that changes the epoch or the offset of a partition locks the row of the partition.
CREATE OR REPLACE FUNCTION {schema}.hold_claim(
    claim bigint, epoch bigint,
    OUT topic text, OUT consumer text, OUT partition smallint, OUT after bigint, OUT upto bigint, OUT events bigint,
    OUT failed bigint, OUT attempts integer, OUT allowed integer
)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    own_epoch bigint;
    own_offset bigint;
    begun boolean;
BEGIN
    SELECT c.eql_topic, c.eql_consumer, c.eql_partition, c.eql_after, c.eql_upto, c.eql_events
    INTO topic, consumer, partition, after, upto, events
    FROM {schema}.consumer_claim c WHERE c.eql_id = claim;
    SELECT c.eql_epoch, coalesce(c.eql_last_event_id, 0), c.eql_failed_event_id, c.eql_attempts, c.eql_max_attempts
    INTO own_epoch, own_offset, failed, attempts, allowed
    FROM {schema}.consumer c
    WHERE c.eql_topic = topic AND c.eql_name = consumer AND c.eql_partition = partition
    FOR UPDATE;
    IF FOUND AND own_epoch = epoch AND own_offset = after AND EXISTS (
        SELECT FROM {schema}.consumer_claim c WHERE c.eql_id = claim AND c.eql_state = 'claimed'
    ) THEN
        RETURN;
    END IF;
    RAISE EXCEPTION 'claim % is not held any more', coalesce(claim::text, 'NULL')
        USING ERRCODE = 'no_data_found',
              HINT = 'The claim was committed or released before, or its lease ended and another consumer took the '
                     'partition. Roll the effects back, and fetch again.';
END
$$;
COMMENT ON FUNCTION {schema}.hold_claim(bigint, bigint) IS
    'Lock the partition of a claim for this transaction, and check that the claim is still held.';

CREATE OR REPLACE FUNCTION {schema}.end_claim(claim bigint, outcome text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    UPDATE {schema}.consumer_claim SET eql_state = outcome, eql_finished_at = clock_timestamp() WHERE eql_id = claim;
    UPDATE {schema}.consumer c SET eql_lease_owner = NULL, eql_lease_expires_at = NULL
    FROM {schema}.consumer_claim own
    WHERE own.eql_id = claim AND c.eql_topic = own.eql_topic AND c.eql_name = own.eql_consumer
      AND c.eql_partition = own.eql_partition;
END
$$;
COMMENT ON FUNCTION {schema}.end_claim(bigint, text) IS 'End a claim that this transaction holds, and its lease.';

CREATE OR REPLACE FUNCTION {schema}.advance_consumer(
    of_topic text, of_consumer text, of_partition smallint, after bigint, upto bigint
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    passed record;
BEGIN
    passed := {schema}.partition_waiting(of_topic, of_partition, after, upto, 9223372036854775807);
    UPDATE {schema}.consumer c
    SET eql_last_event_id = upto, eql_first_event_id = coalesce(c.eql_first_event_id, passed.first),
        eql_consumed_events = c.eql_consumed_events + passed.events, eql_last_consumption_at = clock_timestamp(),
        eql_failed_event_id = NULL, eql_attempts = 0, eql_failure = NULL, eql_retry_at = NULL
    WHERE c.eql_topic = of_topic AND c.eql_name = of_consumer AND c.eql_partition = of_partition;
END
$$;
COMMENT ON FUNCTION {schema}.advance_consumer(text, text, smallint, bigint, bigint) IS
    'Move the offset of a partition that this transaction has locked.';

CREATE OR REPLACE FUNCTION {schema}.commit(claim bigint, epoch bigint, upto bigint DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    held record;
    reached bigint;
BEGIN
    held := {schema}.hold_claim(claim, epoch);
    reached := coalesce(upto, held.upto);
    IF reached <= held.after OR reached > held.upto THEN
        RAISE EXCEPTION 'claim % has the offsets after % up to %, and cannot be committed up to %',
            claim, held.after, held.upto, reached
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the id of the last event that is done.';
    END IF;
    PERFORM {schema}.advance_consumer(held.topic, held.consumer, held.partition, held.after, reached);
    PERFORM {schema}.end_claim(claim, CASE WHEN reached = held.upto THEN 'committed' ELSE 'released' END);
END
$$;
COMMENT ON FUNCTION {schema}.commit(bigint, bigint, bigint) IS
    'Commit the offset of fetched events with this transaction. With upto, give the events after upto back.';

CREATE OR REPLACE FUNCTION {schema}.release(claim bigint, epoch bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    PERFORM {schema}.hold_claim(claim, epoch);
    PERFORM {schema}.end_claim(claim, 'released');
END
$$;
COMMENT ON FUNCTION {schema}.release(bigint, bigint) IS 'Give fetched events back. The next fetch gets them again.';

CREATE OR REPLACE FUNCTION {schema}.renew(claim bigint, epoch bigint, lease double precision DEFAULT 60) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    held record;
BEGIN
    IF (lease > 0 AND lease <= 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'lease must be more than 0 and at most 31536000 seconds' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    held := {schema}.hold_claim(claim, epoch);
    UPDATE {schema}.consumer c SET eql_lease_expires_at = clock_timestamp() + make_interval(secs => lease)
    WHERE c.eql_topic = held.topic AND c.eql_name = held.consumer AND c.eql_partition = held.partition;
END
$$;
COMMENT ON FUNCTION {schema}.renew(bigint, bigint, double precision) IS
    'Keep fetched events for this number of seconds from now on.';

CREATE OR REPLACE FUNCTION {schema}.fetch(
    topic text, consumer text, max_events integer DEFAULT 100, lease double precision DEFAULT 60,
    owner text DEFAULT NULL
) RETURNS TABLE (
    claim bigint, epoch bigint, partition smallint, id bigint, key text, value bytea, metadata json,
    published_at timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off ROWS 100 AS $$
DECLARE
    -- Claims whose owner has this prefix are deleted an hour after they ended.
    named text := 'process ' || coalesce(owner, nullif(current_setting('application_name'), '') || ' in SQL', 'in SQL');
    in_blocks boolean;
    partitioned boolean;
    ready text;
    candidate smallint;
    own {schema}.consumer;
    look integer;
    looks integer := 0;
    passing boolean;
    taken bigint;
    waiting record;
BEGIN
    IF (max_events >= 1 AND max_events <= 10000) IS NOT TRUE OR (lease > 0 AND lease <= 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'max_events must be 1 to 10000, and lease more than 0 and at most 31536000 seconds'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT bool_or(c.eql_partition >= 0) INTO partitioned
    FROM {schema}.consumer c WHERE c.eql_topic = topic AND c.eql_name = consumer;
    IF partitioned IS NULL THEN
        RAISE EXCEPTION 'consumer % of topic % does not exist', quote_nullable(consumer), quote_nullable(topic)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Create the consumer with `eventsql consumer create`.';
    END IF;
    in_blocks := EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, lower(topic COLLATE "C") || '_event')) AND relkind = 'v'
    );

    -- The partitions with events after their offset. The one that was consumed longest ago comes first. Each partition
    -- takes one step in an index.
    ready := format(
        'SELECT c.eql_partition FROM {schema}.consumer c CROSS JOIN LATERAL ('
        'SELECT %s AS before FROM {schema}.%I e '
        'WHERE e.eql_id > coalesce(c.eql_last_event_id, 0) %s LIMIT 1) first '
        'WHERE c.eql_topic = $1 AND c.eql_name = $2 AND NOT c.eql_paused '
        'AND (c.eql_lease_owner IS NOT NULL AND c.eql_lease_expires_at > clock_timestamp()) IS NOT TRUE '
        'AND first.before < coalesce(c.eql_until, 9223372036854775807) '
        'ORDER BY c.eql_last_consumption_at NULLS FIRST, c.eql_partition',
        CASE WHEN in_blocks THEN 'greatest(e.eql_id - e.eql_events, coalesce(c.eql_last_event_id, 0))'
             ELSE 'e.eql_id - 1' END,
        lower(topic COLLATE "C") || CASE WHEN in_blocks THEN '_block' ELSE '_event' END,
        CASE WHEN partitioned
             THEN 'AND (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0)) '
                  'AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807) '
                  'ORDER BY e.eql_partition, e.eql_id'
             ELSE 'ORDER BY e.eql_id' END
    );
    FOR turn IN 1..2 LOOP
        FOR candidate IN EXECUTE ready USING topic, consumer LOOP
            look := 0;
            LOOP
                SELECT * INTO own FROM {schema}.consumer c
                WHERE c.eql_topic = topic AND c.eql_name = consumer AND c.eql_partition = candidate AND NOT c.eql_paused
                  AND (c.eql_lease_owner IS NOT NULL AND c.eql_lease_expires_at > clock_timestamp()) IS NOT TRUE
                  AND (c.eql_failed_event_id > coalesce(c.eql_last_event_id, 0) AND (
                      c.eql_retry_at > clock_timestamp()
                      OR c.eql_attempts >= c.eql_max_attempts AND NOT EXISTS (
                          SELECT FROM {schema}.topic t WHERE t.eql_name = "fetch".topic || '_dlt')
                  )) IS NOT TRUE
                FOR UPDATE SKIP LOCKED;
                EXIT WHEN NOT FOUND;
                own.eql_last_event_id := coalesce(own.eql_last_event_id, 0);
                waiting := {schema}.partition_waiting(
                    topic, candidate, own.eql_last_event_id, coalesce(own.eql_until, 9223372036854775807),
                    -- An event that failed is fetched alone.
                    CASE WHEN own.eql_failed_event_id > own.eql_last_event_id THEN 1 ELSE greatest(max_events, look) END
                );
                EXIT WHEN waiting.events = 0;
                IF EXISTS (SELECT FROM json_object_keys(own.eql_filter::json) AS condition
                           WHERE condition <> ALL (ARRAY['keys', 'key_prefix', 'metadata'])) THEN
                    RAISE EXCEPTION 'the filter of consumer % has a condition that this version does not know',
                        quote_literal(consumer) USING ERRCODE = 'feature_not_supported',
                        HINT = 'Upgrade EventSQL Orchestration, and run `eventsql migrate`.';
                END IF;
                passing := look > 0;
                IF passing THEN
                    taken := {schema}.first_taken(
                        topic, candidate, own.eql_last_event_id, waiting.last, own.eql_filter::jsonb);
                    IF taken IS NOT NULL THEN
                        look := 0;
                        waiting := {schema}.partition_waiting(
                            topic, candidate, own.eql_last_event_id, taken - 1, 9223372036854775807);
                        CONTINUE WHEN waiting.events = 0;
                    END IF;
                END IF;

                UPDATE {schema}.consumer_claim c SET eql_state = 'released', eql_finished_at = clock_timestamp()
                WHERE c.eql_topic = topic AND c.eql_consumer = consumer AND c.eql_partition = candidate
                  AND c.eql_state = 'claimed';
                INSERT INTO {schema}.consumer_claim (
                    eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_epoch, eql_owner
                ) VALUES (
                    topic, consumer, candidate, own.eql_last_event_id, waiting.last, waiting.events,
                    own.eql_epoch + 1, named
                ) RETURNING eql_id INTO claim;
                UPDATE {schema}.consumer c
                SET eql_epoch = own.eql_epoch + 1, eql_lease_owner = named,
                    eql_lease_expires_at = clock_timestamp() + make_interval(secs => lease)
                WHERE c.eql_topic = topic AND c.eql_name = consumer AND c.eql_partition = candidate;
                IF NOT passing THEN
                    RETURN QUERY
                    SELECT claim, own.eql_epoch + 1, e.partition, e.id, e.key, e.value, e.metadata, e.published_at
                    FROM {schema}.partition_events(topic, candidate, own.eql_last_event_id, waiting.last) e
                    WHERE own.eql_filter IS NULL OR {schema}.filter_takes(own.eql_filter::jsonb, e.key, e.metadata);
                    IF FOUND THEN
                        IF claim % 257 = 0 THEN
                            DELETE FROM {schema}.consumer_claim c WHERE c.eql_id = ANY (ARRAY(
                                SELECT o.eql_id FROM {schema}.consumer_claim o
                                WHERE o.eql_topic = topic AND o.eql_consumer = consumer AND o.eql_partition = candidate
                                  AND o.eql_state <> 'claimed' AND starts_with(o.eql_owner, 'process ')
                                  AND o.eql_finished_at < clock_timestamp() - interval '1 hour'
                                ORDER BY o.eql_upto LIMIT 500 FOR UPDATE SKIP LOCKED
                            ));
                        END IF;
                        RETURN;
                    END IF;
                    look := max_events;
                END IF;
                -- The filter takes none of these events, so the consumer passes them. The next look is at more events.
                PERFORM {schema}.commit(claim, own.eql_epoch + 1);
                look := least(look * 4, 10000);
                looks := looks + 1;
                EXIT WHEN looks >= 20;
            END LOOP;
        END LOOP;

        -- If all partitions have come to the end of a layout, the consumer enters the next layout.
        EXIT WHEN turn = 2 OR NOT EXISTS (
            SELECT FROM {schema}.consumer c
            WHERE c.eql_topic = topic AND c.eql_name = consumer AND c.eql_until IS NOT NULL
        );
        EXIT WHEN (SELECT count(*) FROM {schema}.consumer c WHERE c.eql_topic = topic AND c.eql_name = consumer) <> (
            SELECT count(*) FROM (
                SELECT FROM {schema}.consumer c WHERE c.eql_topic = topic AND c.eql_name = consumer
                ORDER BY c.eql_partition FOR UPDATE SKIP LOCKED
            ) locked
        );
        EXIT WHEN NOT {schema}.enter_layout(topic, consumer);
    END LOOP;
END
$$;
COMMENT ON FUNCTION {schema}.fetch(text, text, integer, double precision, text) IS
    'Fetch the next events of a consumer from one of its partitions. Commit at once: the claim lasts for the lease.';

-- The function refuses a transaction that is not READ COMMITTED: its snapshot may be older than the statement, and show
-- an event that was erased meanwhile.
CREATE OR REPLACE FUNCTION {schema}.fail(
    claim bigint, epoch bigint, event bigint, message text, exception text DEFAULT 'Error'
) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    held record;
    failed record;
    before record;
    tries integer;
    reached bigint;
    kind text := coalesce(exception, 'Error');
    told text := left(kind || ': ' || coalesce(message, ''), 2000);
    outcome text := 'retry';
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'a failure cannot be recorded in a transaction that is not READ COMMITTED'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'The transaction may not see that the event was erased. Use READ COMMITTED.';
    END IF;
    held := {schema}.hold_claim(claim, epoch);
    -- From here on, an erasure waits for the end of this transaction before it looks for copies. So the event that is
    -- read below is erased already, or the erasure finds the copy.
    PERFORM pg_advisory_xact_lock_shared(hashtextextended({literal} || '.' || held.topic, 6074604));
    SELECT * INTO failed FROM {schema}.partition_events(held.topic, held.partition, greatest(event, 1) - 1, event);
    IF NOT FOUND OR event <= held.after OR event > held.upto THEN
        RAISE EXCEPTION 'claim % has no event %', claim, coalesce(event::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the id of an event that this claim fetched.';
    END IF;

    tries := CASE WHEN held.failed = event THEN held.attempts ELSE 0 END + 1;
    before := {schema}.partition_waiting(held.topic, held.partition, held.after, event - 1, 9223372036854775807);
    reached := held.after;
    IF before.events > 0 THEN
        reached := before.last;
        PERFORM {schema}.advance_consumer(held.topic, held.consumer, held.partition, held.after, reached);
    END IF;
    IF tries >= held.allowed THEN
        INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
        SELECT t.eql_name,
               CASE WHEN t.eql_partitions < 0 THEN -1
                    WHEN failed.key IS NULL THEN floor(random() * t.eql_partitions)::smallint
                    ELSE {schema}.partition_of_key(failed.key, t.eql_partitions) END,
               failed.key, coalesce(failed.value, ''), (
                   -- Written as text, so that the mark of an erased event stays first.
                   SELECT '{' || string_agg(to_json(n.name)::text || ':' || to_json(n.text)::text, ',' ORDER BY n.place)
                          || '}'
                   FROM (
                       SELECT DISTINCT ON (each.name) each.name, each.text, each.place
                       FROM (
                           SELECT m.name, coalesce(m.value #>> '{}', 'null') AS text, m.place
                           FROM json_each({schema}.readable_metadata(failed.metadata)) WITH ORDINALITY AS m (name, value, place)
                           UNION ALL
                           VALUES ('dlt_consumer', held.consumer, 1000001),
                                  ('dlt_exception', left(kind, 2000), 1000002),
                                  ('dlt_message', CASE WHEN failed.value IS NULL THEN 'the event was erased'
                                                  ELSE substr(told, length(kind) + 3) END, 1000003),
                                  ('dlt_attempts', tries::text, 1000004),
                                  ('dlt_topic', held.topic, 1000005),
                                  ('dlt_partition', failed.partition::text, 1000006),
                                  ('dlt_offset', event::text, 1000007),
                                  ('dlt_backfill', substring(held.consumer FROM
                                      '^.+__backfill_([a-z0-9][a-z0-9-]*)_[0-9]+_[0-9]+(?:__into_.+)?$'), 1000008)
                       ) each
                       WHERE each.text IS NOT NULL
                       ORDER BY each.name, each.place DESC
                   ) n
               )::json
        FROM {schema}.topic t WHERE t.eql_name = held.topic || '_dlt';
        outcome := CASE WHEN FOUND THEN 'dead letter' ELSE 'blocked' END;
    END IF;
    IF outcome = 'dead letter' THEN
        PERFORM {schema}.advance_consumer(held.topic, held.consumer, held.partition, reached, event);
        reached := event;
        UPDATE {schema}.consumer c SET eql_given_up = c.eql_given_up + 1
        WHERE c.eql_topic = held.topic AND c.eql_name = held.consumer AND c.eql_partition = held.partition;
    ELSE
        UPDATE {schema}.consumer c
        SET eql_failed_event_id = event, eql_attempts = tries,
            eql_failure = CASE WHEN failed.value IS NULL THEN 'the event was erased' ELSE told END,
            eql_retry_at = clock_timestamp() + make_interval(secs => least(60, 2.0 ^ least(tries - 1, 30)))
        WHERE c.eql_topic = held.topic AND c.eql_name = held.consumer AND c.eql_partition = held.partition;
    END IF;
    PERFORM {schema}.end_claim(claim, CASE WHEN reached = held.upto THEN 'committed' ELSE 'released' END);
    RETURN outcome;
END
$$;
COMMENT ON FUNCTION {schema}.fail(bigint, bigint, bigint, text, text) IS
    'Record that an event failed: retry, dead letter or blocked. Commits earlier events, and gives later ones back.';
