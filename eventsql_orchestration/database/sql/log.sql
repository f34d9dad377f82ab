-- publish -- Write one event to the buffer if its topic is still defined as the publisher knows it. A redefinition
-- locks the buffer: this statement waits for it and then sees its result.
INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
SELECT eql_name, %(partition)s::smallint, %(key)s::text, %(value)s::bytea, %(metadata)s::json
FROM {schema}.topic
WHERE eql_name = %(topic)s AND eql_partitions = %(partitions)s AND eql_layout = %(layout)s;

-- publish_joined -- As `publish`, in a caller's transaction, whose snapshot may be older than the topic's definition. Then
-- locking the definition fails, as a write to a changed row does in such a transaction.
WITH held AS MATERIALIZED (
    SELECT partitions, layout FROM {schema}.hold_topics(ARRAY[%(topic)s::text])
    WHERE current_setting('transaction_isolation') <> 'read committed'
)
INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
SELECT eql_name, %(partition)s::smallint, %(key)s::text, %(value)s::bytea, %(metadata)s::json
FROM {schema}.topic
WHERE eql_name = %(topic)s AND eql_partitions = %(partitions)s AND eql_layout = %(layout)s
  AND NOT EXISTS (SELECT FROM held WHERE partitions <> %(partitions)s OR layout <> %(layout)s);

-- publish_statement -- As `publish`, for a caller's driver: the statement fails unless it inserts the event. Only a
-- function can raise an error with a chosen text, so the statement casts such a text to a number.
-- The metadata is text: a driver may have an encoder of its own for json.
WITH held AS MATERIALIZED (
    SELECT partitions, layout FROM {schema}.hold_topics(ARRAY[%(topic)s::text])
    WHERE current_setting('transaction_isolation') <> 'read committed'
), published AS (
    INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
    SELECT eql_name, %(partition)s::smallint, %(key)s::text, %(value)s::bytea, %(metadata)s::text::json
    FROM {schema}.topic
    WHERE eql_name = %(topic)s::text AND eql_partitions = %(partitions)s::smallint AND eql_layout = %(layout)s::integer
      AND NOT EXISTS (SELECT FROM held WHERE partitions <> %(partitions)s::smallint OR layout <> %(layout)s::integer)
    RETURNING 1 AS event
)
SELECT CASE WHEN count(*) = 1 THEN 1 ELSE
    (count(*)::text || ' events were published, because the topic was redefined or deleted: make the statement anew')::integer
END
FROM published;

-- publish_all -- Any number of events and blocks into the buffer, encoded.
COPY {schema}.event_buffer (
    eql_events, eql_block_partition, eql_keys, eql_values, eql_event_metadata,
    eql_topic, eql_key, eql_value, eql_metadata, eql_partition
) FROM STDIN (FORMAT binary);

-- redefined_topics -- The topics whose definitions have changed since a publisher read them.
SELECT known.topic
FROM unnest(%(topics)s::text[], %(partitions)s::smallint[], %(layouts)s::integer[]) AS known (topic, partitions, layout)
WHERE NOT EXISTS (
    SELECT FROM {schema}.topic t
    WHERE t.eql_name = known.topic AND t.eql_partitions = known.partitions
      AND t.eql_layout = coalesce(known.layout, t.eql_layout)
);

-- hold_topics -- Make sure that the definitions in the snapshot of a caller's transaction are the present ones.
SELECT name FROM {schema}.hold_topics(%(topics)s::text[])
WHERE current_setting('transaction_isolation') <> 'read committed';

-- abort -- Fail, so that the transaction can only be rolled back.
SELECT 1 / 0;

-- topic_exists -- Whether there is a topic of this name.
SELECT EXISTS (SELECT FROM {schema}.topic WHERE eql_name = %(topic)s);

-- look -- The answering server process, the newest buffer id, the topics with events in the buffer, and whether the
-- buffer's sequence gives ids one by one and upwards. If a topic has a low-water mark, only events beyond it count. A
-- sequence includes ids of open and rolled back transactions. Its file changes when it is altered, restarted or
-- truncated with its table.
SELECT pg_backend_pid() || ' of the server of ' || pg_postmaster_start_time()
           || (SELECT ', sequence ' || pg_relation_filenode(tableoid) FROM {schema}.event_buffer_eql_id_seq),
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.event_buffer_eql_id_seq),
       ARRAY(
           SELECT l.eql_topic
           FROM {schema}.event_buffer_lock l
           LEFT JOIN unnest(%(marked)s::text[], %(low_waters)s::bigint[]) AS mark (topic, id) ON mark.topic = l.eql_topic
           CROSS JOIN LATERAL (
               SELECT FROM {schema}.event_buffer b
               WHERE (b.eql_topic, b.eql_id) > (l.eql_topic, coalesce(mark.id, 0))
                 AND (b.eql_topic, b.eql_id) <= (l.eql_topic, 9223372036854775807)
               ORDER BY b.eql_topic, b.eql_id
               LIMIT 1
           ) waiting
           WHERE %(wanted)s::text[] IS NULL OR l.eql_topic = ANY (%(wanted)s)
           ORDER BY l.eql_topic
       ),
       (SELECT settings.cache_size = 1 AND settings.increment > 0 AND NOT settings.cycle_option
        FROM {schema}.event_buffer_eql_id_seq own CROSS JOIN LATERAL pg_sequence_parameters(own.tableoid) settings);

-- present_topics -- Those of the topics that exist.
SELECT eql_topic FROM {schema}.event_buffer_lock WHERE eql_topic = ANY (%(topics)s);

-- writers -- The open transactions that may have written to a table.
SELECT l.virtualtransaction
FROM pg_locks l
WHERE l.locktype = 'relation'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.relation = %(relation)s::regclass
  AND l.mode = 'RowExclusiveLock';

-- lock_topic -- Become the topic's only writer; no row if another transaction is.
SELECT eql_topic FROM {schema}.event_buffer_lock WHERE eql_topic = %(topic)s FOR UPDATE SKIP LOCKED;

-- same_topic -- Whether a topic of this name is the topic that was made at a time.
SELECT true FROM {schema}.topic WHERE eql_name = %(topic)s AND eql_created_at = %(created_at)s;

-- await_topic -- Become the topic's only writer; waits for the present one.
SELECT eql_topic FROM {schema}.event_buffer_lock WHERE eql_topic = %(topic)s FOR UPDATE;

-- buffered_size -- The size in bytes of an event or a block in the buffer, and the number of events of a block.
SELECT CASE WHEN b.eql_partition < -1
                THEN coalesce(pg_column_size(b.eql_values), octet_length(block.eql_value) + coalesce(pg_column_size(block.eql_values), 0))
            ELSE octet_length(b.eql_value) + coalesce(octet_length(b.eql_key), 0) + octet_length(b.eql_metadata::text)
       END,
       coalesce(b.eql_events, (block.eql_metadata ->> 'events')::bigint)
FROM {schema}.event_buffer b
LEFT JOIN {schema}.spark_staged_event block ON block.eql_buffer_id = b.eql_id
WHERE b.eql_id = %(id)s;

-- buffered -- Events in the buffer by topic and partition, events of blocks included: number, seconds since the oldest
-- came. A program may have written an infinite time, which a server before version 17 does not subtract.
SELECT eql_topic, eql_partition, sum(events)::bigint,
       extract(epoch FROM clock_timestamp()
           - greatest('0001-01-02 00:00+00', least('9999-12-31 00:00+00', min(since))))::float8
FROM (
    SELECT eql_topic, coalesce(eql_block_partition, eql_partition) AS eql_partition, sum(coalesce(eql_events, 1)) AS events,
           min(eql_created_at) AS since
    FROM {schema}.event_buffer
    WHERE eql_topic = ANY (%(topics)s) AND (eql_partition >= -1 OR eql_events IS NOT NULL)
    GROUP BY eql_topic, coalesce(eql_block_partition, eql_partition)
    UNION ALL
    SELECT reference.eql_topic, counted.key::smallint, counted.value::bigint, reference.eql_created_at
    FROM {schema}.spark_staged_event block
    JOIN {schema}.event_buffer reference ON reference.eql_id = block.eql_buffer_id
    CROSS JOIN LATERAL json_each_text(block.eql_metadata -> 'partitions') counted
    WHERE block.eql_buffer_id IS NOT NULL AND reference.eql_topic = ANY (%(topics)s)
) published
GROUP BY eql_topic, eql_partition;

-- part consumer_state -- What a transaction must know of a consumer partition that it takes.
SELECT eql_topic, eql_name, eql_partition, coalesce(eql_last_event_id, 0), eql_consumed_events,
       eql_last_consumption_at, eql_paused, eql_epoch, eql_lease_owner, eql_lease_expires_at,
       eql_failed_event_id, eql_attempts, eql_failure, eql_retry_at, eql_max_attempts, clock_timestamp(),
       eql_filter, eql_until, pg_current_xact_id()::text
FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s

-- lock_consumer -- Lock a consumer partition for this transaction; no row if another transaction has it.
{consumer_state} FOR UPDATE SKIP LOCKED;

-- await_consumer -- Lock a consumer partition for this transaction; waits for another transaction that has it.
{consumer_state} FOR UPDATE;

-- consumer_exists -- Whether a consumer has this partition, locked or not.
SELECT EXISTS (
    SELECT FROM {schema}.consumer
    WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s
);

-- part advanced -- Move the offset of a locked consumer partition, and forget its failures.
UPDATE {schema}.consumer
SET eql_last_event_id = %(upto)s,
    eql_first_event_id = coalesce(eql_first_event_id, %(first)s),
    eql_consumed_events = eql_consumed_events + %(consumed)s,
    eql_last_consumption_at = clock_timestamp(),
    eql_failed_event_id = NULL,
    eql_attempts = 0,
    eql_failure = NULL,
    eql_retry_at = NULL
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s

-- advance -- Move the offset of a locked consumer partition, if it has not moved, and if this is still the transaction
-- that locked it: a handler may have ended that transaction.
{advanced}
  AND coalesce(eql_last_event_id, 0) = %(after)s
  AND pg_current_xact_id() = coalesce(%(transaction)s::xid8, pg_current_xact_id());

-- record_failure -- Note that an event failed again and when it is due next.
UPDATE {schema}.consumer
SET eql_failed_event_id = %(event)s,
    eql_attempts = %(attempts)s,
    eql_failure = %(failure)s,
    eql_retry_at = clock_timestamp() + make_interval(secs => %(backoff)s)
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s;

-- count_given_up -- Note that a consumer partition gave an event up as a dead letter.
UPDATE {schema}.consumer
SET eql_given_up = eql_given_up + 1
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s;

-- limit_waits -- Limit how long the caller's transaction waits. A limit of 0 would be none.
SELECT set_config('statement_timeout', %(most)s, true), set_config('lock_timeout', %(most)s, true),
       set_config('idle_in_transaction_session_timeout', %(most)s, true);

-- release_live_claim -- End the partition's claim without consuming it.
UPDATE {schema}.consumer_claim
SET eql_state = 'released', eql_finished_at = clock_timestamp()
WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = %(partition)s
  AND eql_state = 'claimed';

-- insert_claim -- Claim a range of offsets.
INSERT INTO {schema}.consumer_claim
    (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_epoch, eql_owner)
VALUES (%(topic)s, %(consumer)s, %(partition)s, %(after)s, %(upto)s, %(events)s, %(epoch)s, %(owner)s)
RETURNING eql_id;

-- lease -- Give a locked consumer partition to an owner under a new epoch.
UPDATE {schema}.consumer
SET eql_epoch = %(epoch)s,
    eql_lease_owner = %(owner)s,
    eql_lease_expires_at = clock_timestamp() + make_interval(secs => %(lease)s)
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s;

-- renew_lease -- Prolong a lease while its owner and its epoch are still the partition's and its claim is live. A renewal
-- that waited for the end of the claim sees the partition as the end left it, and the claim as it was before.
UPDATE {schema}.consumer
SET eql_lease_expires_at = clock_timestamp() + make_interval(secs => %(lease)s)
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s
  AND eql_epoch = %(epoch)s AND eql_lease_owner = %(owner)s
  AND EXISTS (SELECT FROM {schema}.consumer_claim WHERE eql_id = %(claim)s AND eql_state = 'claimed');

-- end_lease -- Give a partition back while the epoch is still the partition's.
UPDATE {schema}.consumer
SET eql_lease_owner = NULL, eql_lease_expires_at = NULL
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s AND eql_epoch = %(epoch)s;

-- own_claim -- Write a live claim's new owner and epoch.
UPDATE {schema}.consumer_claim SET eql_owner = %(owner)s, eql_epoch = %(epoch)s WHERE eql_id = %(claim)s AND eql_state = 'claimed';

-- finish_claim -- End a claim as committed or released.
UPDATE {schema}.consumer_claim
SET eql_state = %(state)s, eql_finished_at = clock_timestamp()
WHERE eql_id = %(claim)s AND eql_state = 'claimed';

-- claim -- One claim.
SELECT eql_id, eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_epoch, eql_owner, eql_state
FROM {schema}.consumer_claim
WHERE eql_id = %(claim)s;

-- live_claim -- The claim of a partition that is neither committed nor released.
SELECT eql_id, eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_epoch, eql_owner, eql_state
FROM {schema}.consumer_claim
WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = %(partition)s
  AND eql_state = 'claimed';
