-- bound -- Have this transaction ended where its client is idle in it for too long, and let its commit wait for the disk
-- whatever the database's setting is: one shard goes by what another has committed.
SELECT set_config('idle_in_transaction_session_timeout', %(idle)s, true),
       set_config(
           'synchronous_commit',
           CASE WHEN current_setting('synchronous_commit') = ANY (ARRAY['off', 'local']) THEN 'on'
                ELSE current_setting('synchronous_commit') END,
           true
       );

-- intend -- Announce a publication over several shards, on the one that will decide it. Before any part of it is prepared.
INSERT INTO {schema}.spark_decision (eql_id, eql_writer, eql_batch, eql_shards, eql_owner)
VALUES (%(id)s, %(writer)s, %(batch)s, %(shards)s, %(owner)s);

-- attend -- Show all others, until this transaction ends, that somebody is at a publication: the one that decides it, and
-- that began before it was announced. So where nobody has this lock, nobody can decide it any more.
SELECT pg_advisory_xact_lock(hashtextextended(%(id)s::uuid::text, 0));

-- hold_blocks -- Keep the blocks of attempts from a sweep until the end of this transaction.
SELECT FROM {schema}.spark_staged_event
WHERE eql_attempt = ANY (%(attempts)s) AND eql_buffer_id IS NULL
ORDER BY eql_attempt, eql_position
FOR UPDATE;

-- prepare -- Note the part of a publication that lies here. From the commit on, its blocks are on disk, and kept.
INSERT INTO {schema}.spark_part (eql_id, eql_shard, eql_writer, eql_batch, eql_attempts, eql_events)
VALUES (%(id)s, %(decider)s, %(writer)s, %(batch)s, %(attempts)s, %(events)s);

-- decide -- Make an announced publication take place; no row where somebody has given it up.
UPDATE {schema}.spark_decision SET eql_decided = true WHERE eql_id = %(id)s AND NOT eql_decided;

-- is_decided -- Whether a publication is to take place; no row where it is finished, or was given up.
SELECT eql_decided FROM {schema}.spark_decision WHERE eql_id = %(id)s;

-- took_place -- Whether it was this publication of its writer's batch that took place, of all that were tried; no row where
-- none did. NULL where a version of this package recorded the batch that did not note which.
SELECT eql_id = %(id)s FROM {schema}.spark_publication WHERE eql_writer = %(writer)s AND eql_batch = %(batch)s;

-- was_replaced -- Whether another publication of a part's batch took place, and is published here.
SELECT EXISTS (
    SELECT FROM {schema}.spark_part
    WHERE eql_shard = %(decider)s AND eql_writer = %(writer)s AND eql_batch = %(batch)s AND eql_id <> %(id)s
      AND eql_published_at IS NOT NULL
);

-- give_up -- See to it that a publication never takes place; no row where it does.
DELETE FROM {schema}.spark_decision WHERE eql_id = %(id)s AND NOT eql_decided;

-- finish -- Forget a decision whose parts are all published.
DELETE FROM {schema}.spark_decision WHERE eql_id = %(id)s AND eql_decided;

-- publish_part -- Take a part, for this transaction, which publishes its attempts; no row where that is done, or it was
-- given up. Its time is that of its events.
UPDATE {schema}.spark_part SET eql_published_at = now()
WHERE eql_id = %(id)s AND eql_published_at IS NULL
RETURNING eql_attempts, eql_events;

-- give_part_up -- Forget a part of a publication that does not take place.
DELETE FROM {schema}.spark_part WHERE eql_id = %(id)s AND eql_published_at IS NULL;

-- decisions -- The publications that were announced here and are not finished, oldest first, with their age in seconds,
-- who is to decide them, and whether that one is known to have ended. See `attend`; the lock that this takes ends with it.
SELECT eql_id, eql_writer, eql_batch, eql_shards, eql_decided, extract(epoch FROM now() - eql_created_at)::float8,
       eql_owner,
       CASE WHEN eql_decided OR eql_owner IS NULL THEN false
            ELSE pg_try_advisory_xact_lock_shared(hashtextextended(eql_id::text, 0)) END
FROM {schema}.spark_decision
ORDER BY eql_created_at, eql_id;

-- is_open -- Whether a part is here and not published.
SELECT EXISTS (SELECT FROM {schema}.spark_part WHERE eql_id = %(id)s AND eql_published_at IS NULL);

-- open_parts -- The parts here that are not published, oldest first, with the shards that decide about them, and since when
-- they are.
SELECT eql_id, eql_shard, eql_writer, eql_batch, eql_created_at
FROM {schema}.spark_part
WHERE eql_published_at IS NULL
ORDER BY eql_created_at, eql_id;

-- forget_parts -- Delete what is known of parts that were published so long ago.
DELETE FROM {schema}.spark_part WHERE eql_published_at < (now() - make_interval(secs => %(seconds)s));

-- part -- How many events of a writer's batch were published here as a part of it, and when.
SELECT eql_events, eql_published_at
FROM {schema}.spark_part
WHERE eql_shard = %(decider)s AND eql_writer = %(writer)s AND eql_batch = %(batch)s AND eql_published_at IS NOT NULL;
