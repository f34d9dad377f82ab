-- by_id -- Let this transaction read a log by its index. A new log has no statistics: PostgreSQL would read and sort
-- all of it for each batch. Measured with 300,000 letters: 300 ms a batch instead of 7 ms. A statement that has to sort
-- then seems dear enough to be compiled, which takes 200 ms.
SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true),
       set_config('jit', 'off', true);

-- mark -- Record dead letters as redriven or as `dismissed`; returns the letters that were open, or with `again` all.
-- Waits for other transactions that mark them. In the order of ids, so that two calls do not wait for each other.
INSERT INTO {schema}.redriven_dead_letter AS r (eql_topic, eql_letter_id, eql_redriven_at, eql_dismissed)
SELECT %(letters)s, wanted.id, clock_timestamp(), %(dismissed)s
FROM unnest(%(ids)s::bigint[]) AS wanted (id)
ORDER BY wanted.id
ON CONFLICT (eql_topic, eql_letter_id) DO UPDATE
SET eql_redriven_at = excluded.eql_redriven_at, eql_dismissed = excluded.eql_dismissed
WHERE %(again)s
RETURNING eql_letter_id;

-- prune_deleted -- Forget the redrives of dead letters of topics that were deleted.
DELETE FROM {schema}.redriven_dead_letter r
WHERE NOT EXISTS (SELECT FROM {schema}.topic t WHERE t.eql_name = r.eql_topic);
