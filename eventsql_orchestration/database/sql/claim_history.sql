-- first_since -- The first claim that was made since a time: ids grow with it.
SELECT eql_id FROM {schema}.consumer_claim WHERE eql_created_at >= %(before)s ORDER BY eql_id LIMIT 1;

-- delete_before -- Delete at most `batch` claims before an id that ended before a time, the oldest first.
DELETE FROM {schema}.consumer_claim
WHERE eql_id = ANY (
    SELECT eql_id
    FROM {schema}.consumer_claim
    WHERE eql_id < %(first)s AND eql_state <> 'claimed' AND eql_finished_at < %(before)s
    ORDER BY eql_id
    LIMIT %(batch)s
);
