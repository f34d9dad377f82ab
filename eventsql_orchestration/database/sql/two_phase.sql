-- limit_transaction -- End this transaction if its client is idle in it for too long, and let its commit wait for the
-- disk in any case: other shards rely on it.
SELECT set_config('idle_in_transaction_session_timeout', %(idle)s, true),
       set_config(
           'synchronous_commit',
           CASE WHEN current_setting('synchronous_commit') = ANY (ARRAY['off', 'local']) THEN 'on'
                ELSE current_setting('synchronous_commit') END,
           true
       );

-- announce -- Announce a publication over several shards on the shard that will decide it, before any part is prepared.
INSERT INTO {schema}.spark_decision (eql_id, eql_writer, eql_batch, eql_shards, eql_owner)
VALUES (%(id)s, %(writer)s, %(batch)s, %(shards)s, %(owner)s);

-- lock_publication -- Hold the lock of a publication until this transaction ends. The deciding transaction holds it
-- from before the announcement: nobody can decide a publication whose lock is free.
SELECT pg_advisory_xact_lock(hashtextextended(%(id)s::uuid::text, 0));

-- lock_blocks -- Keep the blocks of attempts from a sweep until this transaction ends.
SELECT FROM {schema}.spark_staged_event
WHERE eql_attempt = ANY (%(attempts)s) AND eql_buffer_id IS NULL
ORDER BY eql_attempt, eql_position
FOR UPDATE;

-- prepare -- Record the part of a publication that lies here. Its commit puts the blocks on disk and protects them.
INSERT INTO {schema}.spark_part (eql_id, eql_shard, eql_writer, eql_batch, eql_attempts, eql_events)
VALUES (%(id)s, %(decider)s, %(writer)s, %(batch)s, %(attempts)s, %(events)s);

-- decide -- Decide an announced publication; no row if somebody has given it up.
UPDATE {schema}.spark_decision SET eql_decided = true WHERE eql_id = %(id)s AND NOT eql_decided;

-- is_decided -- Whether a publication is decided; no row if it is finished or was given up.
SELECT eql_decided FROM {schema}.spark_decision WHERE eql_id = %(id)s;

-- took_place -- Whether the recorded publication of a batch is this one; no row without a record, NULL if an older
-- version recorded it.
SELECT eql_id = %(id)s FROM {schema}.spark_publication WHERE eql_writer = %(writer)s AND eql_batch = %(batch)s;

-- was_replaced -- Whether another publication of the same batch has published its part here.
SELECT EXISTS (
    SELECT FROM {schema}.spark_part
    WHERE eql_shard = %(decider)s AND eql_writer = %(writer)s AND eql_batch = %(batch)s AND eql_id <> %(id)s
      AND eql_published_at IS NOT NULL
);

-- give_up -- Delete an announcement that is not decided, so that nobody can decide it; no row if it is decided.
DELETE FROM {schema}.spark_decision WHERE eql_id = %(id)s AND NOT eql_decided;

-- finish -- Delete a decided announcement whose parts are all published.
DELETE FROM {schema}.spark_decision WHERE eql_id = %(id)s AND eql_decided;

-- publish_part -- Mark a part as published now: this transaction publishes its attempts. No row if it was published or
-- given up before.
UPDATE {schema}.spark_part SET eql_published_at = now()
WHERE eql_id = %(id)s AND eql_published_at IS NULL
RETURNING eql_attempts, eql_events;

-- give_part_up -- Delete an open part of a publication that was given up.
DELETE FROM {schema}.spark_part WHERE eql_id = %(id)s AND eql_published_at IS NULL;

-- announcements -- Unfinished publications that were announced here, oldest first: age in seconds, owner, and whether
-- the owner is known to have ended (see `lock_publication`). The lock lasts as long as the statement's transaction.
SELECT eql_id, eql_writer, eql_batch, eql_shards, eql_decided, extract(epoch FROM now() - eql_created_at)::float8,
       eql_owner,
       CASE WHEN eql_decided OR eql_owner IS NULL THEN false
            ELSE pg_try_advisory_xact_lock_shared(hashtextextended(eql_id::text, 0)) END
FROM {schema}.spark_decision
ORDER BY eql_created_at, eql_id;

-- is_open -- Whether an unpublished part is here.
SELECT EXISTS (SELECT FROM {schema}.spark_part WHERE eql_id = %(id)s AND eql_published_at IS NULL);

-- is_part -- Whether a part is here, published or not.
SELECT EXISTS (SELECT FROM {schema}.spark_part WHERE eql_id = %(id)s);

-- open_parts -- The unpublished parts here, oldest first: the shard that decides each, and when it was prepared.
SELECT eql_id, eql_shard, eql_writer, eql_batch, eql_created_at
FROM {schema}.spark_part
WHERE eql_published_at IS NULL
ORDER BY eql_created_at, eql_id;

-- forget_parts -- Delete the records of parts that were published longer ago than this.
DELETE FROM {schema}.spark_part WHERE eql_published_at < (now() - make_interval(secs => %(seconds)s));

-- published_part -- The number of events of a writer's batch that were published here as a part, and when.
SELECT eql_events, eql_published_at
FROM {schema}.spark_part
WHERE eql_shard = %(decider)s AND eql_writer = %(writer)s AND eql_batch = %(batch)s AND eql_published_at IS NOT NULL;
