-- begin -- Record that the events of keys are to be erased. The record of an interrupted erasure is used again.
INSERT INTO {schema}.erasure (eql_topic, eql_key_digest, eql_role, eql_requested_by)
SELECT %(topic)s, digest, session_user, %(requested_by)s
FROM unnest(%(digests)s::text[]) AS digest
ON CONFLICT (eql_topic, eql_key_digest) WHERE eql_finished_at IS NULL DO NOTHING;

-- count -- Add to the numbers of erased events of unfinished erasures: in the log, in the buffer, and dead letters.
UPDATE {schema}.erasure e
SET eql_events = e.eql_events + added.events, eql_buffered = e.eql_buffered + added.buffered,
    eql_dead_letters = e.eql_dead_letters + added.letters
FROM unnest(%(digests)s::text[], %(events)s::bigint[], %(buffered)s::bigint[], %(letters)s::bigint[])
    AS added (digest, events, buffered, letters)
WHERE e.eql_topic = %(topic)s AND e.eql_key_digest = added.digest AND e.eql_finished_at IS NULL;

-- finish -- Note that everything is erased.
UPDATE {schema}.erasure SET eql_finished_at = clock_timestamp()
WHERE eql_topic = %(topic)s AND eql_key_digest = ANY (%(digests)s::text[]) AND eql_finished_at IS NULL;

-- limit_waits -- Let the transaction wait for a lock at most `most` milliseconds, and at most half of `statement_timeout`.
SELECT set_config('lock_timeout', CASE
    WHEN setting::bigint > 0 THEN greatest(1, least(%(most)s::bigint, setting::bigint / 2)) ELSE %(most)s::bigint
END::text, true)
FROM pg_settings WHERE name = 'statement_timeout';

-- list -- Records of erasures, the newest first.
SELECT eql_topic, eql_key_digest, eql_started_at, eql_finished_at, eql_role, eql_requested_by, eql_events, eql_buffered,
       eql_dead_letters
FROM {schema}.erasure
WHERE (%(topic)s::text IS NULL OR eql_topic = %(topic)s) AND (%(digest)s::text IS NULL OR eql_key_digest = %(digest)s)
ORDER BY eql_started_at DESC, eql_topic, eql_key_digest
LIMIT %(limit)s;

-- unfinished -- The topics with erasures that have not ended: how many keys, and when the first erasure began.
SELECT eql_topic, count(*), min(eql_started_at) FROM {schema}.erasure
WHERE eql_finished_at IS NULL AND eql_topic = ANY (%(topics)s::text[])
GROUP BY eql_topic ORDER BY eql_topic;

-- prune -- Delete finished records that began before this time.
DELETE FROM {schema}.erasure
WHERE eql_started_at < (now() - make_interval(days => %(days)s)) AND eql_finished_at IS NOT NULL;
