-- Receiving messages of queues. The functions have their caller's rights, as the library's statements have.
--
-- A plan that was made while a table was empty would read the whole table later. These functions make a plan once in a
-- session, and never a plan that reads a table without an index.
--
-- For a table that counts as empty, all indexes cost nearly the same. Three rules leave one index for each search: a
-- look at a key has the order of its index, and no plan may sort (before version 18, a sort that is needed nevertheless
-- would start the JIT compiler, which is off). An update has the ids of its messages, and no join. `isfinite` is no
-- condition of an index.

-- A message whose receives are spent goes to the dead letters, and to no receiver. A key of a queue without order may
-- be too long for the index of keys that an ordered queue needs: then the dead letter has no order. The index takes a
-- key as it is stored, compressed if that makes it shorter. `redrive` has the same rule.
CREATE OR REPLACE FUNCTION {schema}.bury_messages(of_queue integer, to_queue integer, spent bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    ordered boolean;
BEGIN
    SELECT q.eql_ordered INTO ordered FROM {schema}.queue q WHERE q.eql_id = to_queue;
    UPDATE {schema}.queue_message m
    SET eql_id = DEFAULT, eql_queue = to_queue, eql_origin = of_queue, eql_receives = 0, eql_unhandled = 0,
        eql_receipt = NULL,
        eql_visible_at = clock_timestamp(),
        eql_in_order = ordered AND m.eql_key IS NOT NULL AND (m.eql_in_order OR pg_column_size(m.eql_key) <= 2600),
        eql_history = {schema}.note_of_message(
            {schema}.note_of_message(m.eql_history, m.eql_receipt, m.eql_visible_at),
            m.eql_receives, clock_timestamp(), 'moved to the dead letters')
    WHERE m.eql_id = ANY (spent);
END
$$;

-- ORDER BY and the bounds of the key decide which index is read.
CREATE OR REPLACE FUNCTION {schema}.promote_keys(of_queue integer, keys text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off AS $$
BEGIN
    UPDATE {schema}.queue_message m
    SET eql_visible_at = greatest(clock_timestamp(), m.eql_due_at), eql_due_at = NULL
    WHERE m.eql_id = ANY (ARRAY(
        SELECT next.eql_id FROM unnest(keys) AS of_key
        CROSS JOIN LATERAL (
            SELECT n.eql_id FROM {schema}.queue_message n
            WHERE n.eql_queue = of_queue AND n.eql_key >= of_key AND n.eql_key <= of_key AND n.eql_in_order
              AND n.eql_visible_at = 'infinity'
            ORDER BY n.eql_key, n.eql_id LIMIT 1
        ) next
    )) AND NOT isfinite(m.eql_visible_at);
END
$$;

-- While an old snapshot is open, no vacuum removes the rows of acknowledged messages, and each receive would read all
-- these rows again. So a receive tells since when its first message has been visible (`onwards`), and the next receive
-- may begin at that time (`since`). The time is at least 0.1 s ago, because senders commit after their messages become
-- visible. From time to time, a receiver leaves `since` out, and so it finds every message. `since` counts for priority
-- 0 alone.
--
-- The function reads the options of the queue only if one of the messages was received before. The rows are locked, so
-- their places (ctid) stay until the update. The update gives the messages in the order of their places, and the
-- receiver sorts them.
CREATE OR REPLACE FUNCTION {schema}.take_messages(
    of_queue integer, most integer, seconds double precision, since timestamptz DEFAULT NULL
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata text, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb, onwards bytea
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off ROWS 100 AS $$
DECLARE
    allowed integer;
    dead integer;
    ready tid[];
    spent bigint[];
    received boolean;
    moment timestamptz;
    earliest timestamptz := coalesce(since, '-infinity');
    first timestamptz;
    until timestamptz;
    proceed bytea;
    taken integer := 0;
BEGIN
    LOOP
        -- now() is the beginning of the transaction, which may be long ago.
        moment := clock_timestamp();
        SELECT array_agg(found.place), bool_or(found.eql_receives > 0),
               min(found.eql_visible_at) FILTER (WHERE found.level = 0)
        INTO ready, received, first
        FROM (
            SELECT visible.place, visible.eql_receives, visible.eql_visible_at, level
            FROM generate_series(9, 0, -1) AS level
            CROSS JOIN LATERAL (
                SELECT m.ctid AS place, m.eql_receives, m.eql_visible_at
                FROM {schema}.queue_message m
                WHERE m.eql_queue = of_queue AND m.eql_priority = level
                  AND m.eql_visible_at >= CASE WHEN level = 0 THEN earliest ELSE '-infinity' END
                  AND m.eql_visible_at <= moment
                ORDER BY m.eql_visible_at, (m.eql_id + 0) LIMIT most - taken
                FOR UPDATE SKIP LOCKED
            ) visible
            LIMIT most - taken
        ) found;
        spent := NULL;
        IF received THEN
            SELECT q.eql_max_receives, q.eql_dead_letters INTO allowed, dead
            FROM {schema}.queue q WHERE q.eql_id = of_queue;
            SELECT array_agg(m.ctid) FILTER (WHERE (m.eql_receives - m.eql_unhandled >= allowed) IS NOT TRUE),
                   array_agg(m.eql_id) FILTER (WHERE m.eql_receives - m.eql_unhandled >= allowed)
            INTO ready, spent
            FROM {schema}.queue_message m WHERE m.ctid = ANY (ready);
            IF spent IS NOT NULL THEN
                PERFORM {schema}.bury_messages(of_queue, dead, spent);
            END IF;
        END IF;
        IF ready IS NOT NULL THEN
            taken := taken + cardinality(ready);
            until := clock_timestamp() + make_interval(secs => seconds);
            IF first IS NOT NULL THEN
                proceed := timestamptz_send(least(first, now() - interval '0.1 seconds'));
            END IF;
            RETURN QUERY
            UPDATE {schema}.queue_message m
            SET eql_visible_at = until,
                eql_receives = m.eql_receives + 1,
                eql_receipt = m.eql_receives + 1,
                eql_history = {schema}.note_of_message(m.eql_history, m.eql_receipt, m.eql_visible_at)
            WHERE m.ctid = ANY (ready)
            RETURNING m.eql_id, m.eql_body, m.eql_key, m.eql_metadata::text, m.eql_receives, m.eql_receipt,
                      m.eql_priority, m.eql_created_at, m.eql_history, proceed;
        END IF;
        IF ready IS NULL AND spent IS NULL AND earliest > '-infinity' THEN
            earliest := '-infinity';
        ELSE
            EXIT WHEN spent IS NULL OR taken >= most;
        END IF;
    END LOOP;
END
$$;

-- Only the first message of a key is given out, and only while no other message of the key is held. A new message may
-- be visible behind others: the receiver that finds it decides under a lock of the key. The receiver never waits for
-- this lock, and keeps it for its own short transaction. It locks messages, and gives out at once the new messages
-- that are the first of their keys. `take_others_in_order` decides on the other messages. `since` and `onwards` are as
-- for `take_messages`. The lock of a sender does not keep a receiver away.
CREATE OR REPLACE FUNCTION {schema}.take_in_order(
    of_queue integer, most integer, seconds double precision, since timestamptz DEFAULT NULL
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata text, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb, onwards bytea
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off ROWS 100 AS $$
DECLARE
    ready tid[];
    given integer;
    taken integer := 0;
    turns integer := 0;
    look integer;
    begun timestamptz := clock_timestamp();
    moment timestamptz;
    earliest timestamptz := coalesce(since, '-infinity');
    first timestamptz;
    found_first timestamptz;
    until timestamptz;
    proceed bytea;
BEGIN
    WHILE taken < most AND turns < 50 LOOP
        turns := turns + 1;
        moment := clock_timestamp();
        -- The visibility timeout of the messages that are taken runs already.
        EXIT WHEN taken > 0 AND moment > begun + make_interval(secs => seconds / 10);
        -- Other keys may be far behind the messages of a long key: each turn looks further.
        look := CASE WHEN turns = 1 THEN most ELSE greatest(most - taken, 100 * turns) END;
        SELECT array_agg(found.place), min(found.eql_visible_at) FILTER (WHERE found.level = 0)
        INTO ready, found_first
        FROM (
            SELECT visible.place, visible.eql_visible_at, level
            FROM generate_series(9, 0, -1) AS level
            CROSS JOIN LATERAL (
                SELECT m.ctid AS place, m.eql_visible_at FROM {schema}.queue_message m
                WHERE m.eql_queue = of_queue AND m.eql_priority = level
                  AND m.eql_visible_at >= CASE WHEN level = 0 THEN earliest ELSE '-infinity' END
                  AND m.eql_visible_at <= moment
                  AND (NOT m.eql_in_order OR pg_try_advisory_xact_lock(
                      7310035 * 4294967296 + of_queue::bigint * 1024 + (hashtext(m.eql_key) & 1023)))
                ORDER BY m.eql_visible_at, (m.eql_id + 0)
                LIMIT look
                FOR NO KEY UPDATE SKIP LOCKED
            ) visible
            LIMIT look
        ) found;
        IF ready IS NULL AND taken = 0 AND earliest > '-infinity' THEN
            earliest := '-infinity';
            turns := 0;
            CONTINUE;
        END IF;
        EXIT WHEN ready IS NULL;

        first := least(first, found_first);
        IF first IS NOT NULL THEN
            proceed := timestamptz_send(least(first, now() - interval '0.1 seconds'));
        END IF;
        given := 0;
        IF look <= most - taken THEN
            until := clock_timestamp() + make_interval(secs => seconds);
            -- The keys are locked, and this statement has a new snapshot. A new message is the first of its key if it
            -- is the first entry of the key: received messages would come before it, and then earlier messages.
            RETURN QUERY
            UPDATE {schema}.queue_message m
            SET eql_visible_at = until,
                eql_receives = m.eql_receives + 1,
                eql_receipt = m.eql_receives + 1
            WHERE m.ctid = ANY (ready) AND m.eql_receives = 0 AND (NOT m.eql_in_order OR m.eql_id = (
                SELECT o.eql_id FROM {schema}.queue_message o
                WHERE o.eql_queue = of_queue AND o.eql_key >= m.eql_key AND o.eql_key <= m.eql_key
                  AND o.eql_in_order AND o.eql_visible_at < 'infinity'
                ORDER BY o.eql_key, o.eql_receipt, o.eql_id LIMIT 1
            ))
            RETURNING m.eql_id, m.eql_body, m.eql_key, m.eql_metadata::text, m.eql_receives, m.eql_receipt,
                      m.eql_priority, m.eql_created_at, m.eql_history, proceed;
            GET DIAGNOSTICS given = ROW_COUNT;
            taken := taken + given;
        END IF;
        IF given < cardinality(ready) THEN
            -- The messages that were given out have other places by now.
            RETURN QUERY SELECT * FROM {schema}.take_others_in_order(of_queue, most - taken, seconds, ready, proceed);
            GET DIAGNOSTICS given = ROW_COUNT;
            taken := taken + given;
        ELSIF given < look THEN
            EXIT;
        END IF;
    END LOOP;
END
$$;

-- The second half of `take_in_order`: messages that were received before, and messages behind others of their keys. It
-- is a function of its own, because the first receive of a connection reads the whole text of its function.
--
-- A message that has to wait is parked at 'infinity' if another message of its key stays in sight and this transaction
-- has locked it. The acknowledgement of that other message promotes the first parked message. If the other message
-- cannot be locked, the message comes back into sight a second later.
CREATE OR REPLACE FUNCTION {schema}.take_others_in_order(
    of_queue integer, most integer, seconds double precision, others tid[], proceed bytea
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata text, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb, onwards bytea
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off AS $$
DECLARE
    allowed integer;
    dead integer;
    ready tid[];
    spent bigint[];
    waiting bigint[];
    waits_for bigint[];
    witnesses bigint[];
    parked bigint[];
    late boolean;
    gone_keys text[];
    until timestamptz;
BEGIN
    SELECT q.eql_max_receives, q.eql_dead_letters INTO allowed, dead FROM {schema}.queue q WHERE q.eql_id = of_queue;

    -- A message that has to wait has a witness: another message that is held, or an earlier message in sight. For a
    -- message that was received before, an earlier message that is parked is a witness, too. At most one message of a
    -- key has no witness. Behind a message that is held, nothing looks for an earlier one: the index may begin with
    -- thousands of messages of the key that this call has parked. No aggregate has DISTINCT: from PostgreSQL 16 on, the
    -- server would sort the messages of all aggregates for it.
    SELECT array_agg(c.place) FILTER (WHERE c.witness IS NULL AND (c.received >= allowed) IS NOT TRUE),
           array_agg(c.eql_id) FILTER (WHERE c.witness IS NULL AND c.received >= allowed),
           array_agg(c.eql_key) FILTER (WHERE c.witness IS NULL AND c.received >= allowed AND c.eql_in_order),
           array_agg(c.eql_id) FILTER (WHERE c.witness IS NOT NULL),
           array_agg(c.witness) FILTER (WHERE c.witness IS NOT NULL),
           bool_or(c.witness > c.eql_id)
    INTO ready, spent, gone_keys, waiting, waits_for, late
    FROM (
        SELECT m.ctid AS place, m.eql_id, m.eql_key, m.eql_in_order, m.eql_receives - m.eql_unhandled AS received,
               coalesce(taken_before.eql_id, earlier.eql_id, parked.eql_id) AS witness
        FROM {schema}.queue_message m
        LEFT JOIN LATERAL (
            SELECT o.eql_id FROM {schema}.queue_message o
            WHERE m.eql_in_order AND o.eql_queue = of_queue AND o.eql_key = m.eql_key
              AND o.eql_in_order AND o.eql_visible_at < 'infinity' AND o.eql_receipt IS NOT NULL
              AND (o.eql_visible_at > clock_timestamp() OR o.eql_id < m.eql_id)
            ORDER BY o.eql_receipt LIMIT 1
        ) taken_before ON true
        LEFT JOIN LATERAL (
            SELECT o.eql_id FROM {schema}.queue_message o
            WHERE taken_before.eql_id IS NULL AND m.eql_in_order AND o.eql_queue = of_queue AND o.eql_key = m.eql_key
              AND o.eql_in_order AND o.eql_visible_at < 'infinity' AND o.eql_receipt IS NULL
              AND o.eql_id < m.eql_id
            ORDER BY o.eql_receipt, o.eql_id LIMIT 1
        ) earlier ON true
        LEFT JOIN LATERAL (
            SELECT o.eql_id FROM {schema}.queue_message o
            WHERE m.eql_in_order AND m.eql_receives > 0 AND o.eql_queue = of_queue
              AND o.eql_key >= m.eql_key AND o.eql_key <= m.eql_key
              AND o.eql_in_order AND o.eql_visible_at = 'infinity'
            ORDER BY o.eql_key, o.eql_id LIMIT 1
        ) parked ON parked.eql_id < m.eql_id
        WHERE m.ctid = ANY (others)
        ORDER BY m.eql_priority DESC, m.eql_visible_at, m.eql_id
    ) c;
    -- New messages and messages that come again keep the order in which they were found.
    ready := ready[:most];

    IF spent IS NOT NULL THEN
        PERFORM {schema}.bury_messages(of_queue, dead, spent);
        PERFORM {schema}.promote_keys(of_queue, gone_keys);
    END IF;
    IF waiting IS NOT NULL THEN
        SELECT array_agg(locked.eql_id) INTO witnesses
        FROM (
            SELECT m.eql_id FROM {schema}.queue_message m
            WHERE m.eql_id = ANY (waits_for) AND m.eql_queue + 0 = of_queue FOR NO KEY UPDATE SKIP LOCKED
        ) locked;
        UPDATE {schema}.queue_message m
        SET eql_visible_at = greatest(clock_timestamp(), m.eql_due_at), eql_due_at = NULL
        WHERE m.eql_id = ANY (witnesses) AND NOT isfinite(m.eql_visible_at);
        SELECT array_agg(w.id) FILTER (WHERE w.witness = ANY (witnesses) AND w.witness <> ALL (waiting)),
               array_agg(w.id)
        INTO parked, waiting
        FROM unnest(waiting, waits_for) AS w (id, witness)
        WHERE spent IS NULL OR w.witness <> ALL (spent);
        UPDATE {schema}.queue_message m
        SET eql_visible_at = CASE WHEN m.eql_id = ANY (parked) THEN 'infinity'
                             ELSE clock_timestamp() + interval '1 second' END,
            eql_receipt = NULL,
            eql_history = {schema}.note_of_message(m.eql_history, m.eql_receipt, m.eql_visible_at)
        WHERE m.eql_id = ANY (waiting);
        IF late THEN
            -- A later message was received before an earlier one came, which is parked now. The new messages between
            -- them come after the parked one, so they are parked, too.
            UPDATE {schema}.queue_message m SET eql_due_at = m.eql_visible_at, eql_visible_at = 'infinity'
            WHERE m.eql_id = ANY (ARRAY(
                SELECT later.eql_id
                FROM (
                    SELECT p.eql_key, min(p.eql_id) AS earliest FROM {schema}.queue_message p
                    WHERE p.eql_id = ANY (parked) GROUP BY p.eql_key
                ) of_key
                CROSS JOIN LATERAL (
                    SELECT o.eql_id FROM {schema}.queue_message o
                    WHERE o.eql_queue = of_queue AND o.eql_key >= of_key.eql_key AND o.eql_key <= of_key.eql_key
                      AND o.eql_in_order AND o.eql_visible_at < 'infinity' AND o.eql_receipt IS NULL
                      AND o.eql_receives = 0 AND o.eql_id > of_key.earliest
                    ORDER BY o.eql_key, o.eql_receipt, o.eql_id
                    FOR NO KEY UPDATE SKIP LOCKED
                ) later
            ));
        END IF;
    END IF;

    IF ready IS NOT NULL THEN
        until := clock_timestamp() + make_interval(secs => seconds);
        RETURN QUERY
        UPDATE {schema}.queue_message m
        SET eql_visible_at = until,
            eql_receives = m.eql_receives + 1,
            eql_receipt = m.eql_receives + 1,
            eql_history = {schema}.note_of_message(m.eql_history, m.eql_receipt, m.eql_visible_at)
        WHERE m.ctid = ANY (ready)
        RETURNING m.eql_id, m.eql_body, m.eql_key, m.eql_metadata::text, m.eql_receives, m.eql_receipt,
                  m.eql_priority, m.eql_created_at, m.eql_history, proceed;
    END IF;
END
$$;

-- An ordered queue refuses a transaction that is not READ COMMITTED: its snapshot may be older than the statement, and
-- not show that another message of the key was received.
CREATE OR REPLACE FUNCTION {schema}.queue_receive(
    queue text, max_messages integer DEFAULT 1, visibility_timeout double precision DEFAULT NULL
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata json, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb
)
LANGUAGE plpgsql VOLATILE ROWS 100 SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known record;
    seconds double precision;
BEGIN
    known := {schema}.queue_number(queue);
    seconds := coalesce(visibility_timeout, known.timeout);
    IF NOT (seconds > 0 AND seconds <= 31536000) OR (max_messages >= 1 AND max_messages <= 10000) IS NOT TRUE THEN
        RAISE EXCEPTION 'max_messages must be 1 to 10000, and visibility_timeout more than 0 and at most 31536000 seconds'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF known.in_order THEN
        IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
            RAISE EXCEPTION 'queue % is ordered, and this transaction is not READ COMMITTED', quote_nullable(queue)
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = 'The transaction may not see that an earlier message of a key was received. '
                             'Use READ COMMITTED.';
        END IF;
        RETURN QUERY
        SELECT t.id, t.body, t.key, t.metadata::json, t.receives, t.receipt, t.priority, t.sent_at, t.history
        FROM {schema}.take_in_order(known.number, least(max_messages, 1000), seconds) t
        ORDER BY t.priority DESC, t.id;
    ELSE
        RETURN QUERY
        SELECT t.id, t.body, t.key, t.metadata::json, t.receives, t.receipt, t.priority, t.sent_at, t.history
        FROM {schema}.take_messages(known.number, max_messages, seconds) t
        ORDER BY t.priority DESC, t.id;
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_receive(text, integer, double precision) IS
    'Receive visible messages of a queue. Commit at once: this receiver holds them for the visibility timeout.';
