-- publication -- A writer's batch: the number of its events, and the time of its publication.
SELECT eql_events, eql_created_at FROM {schema}.spark_publication WHERE eql_writer = %(writer)s AND eql_batch = %(batch)s;

-- claims_of_run -- The claims that an owner had within a span of time, in the order in which it made them.
SELECT eql_id, eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_state
FROM {schema}.consumer_claim
WHERE eql_owner = %(owner)s
  AND eql_created_at <= %(last)s
  AND (eql_finished_at IS NULL OR eql_finished_at >= %(first)s)
ORDER BY eql_id;

-- writers_between -- The writers that published within a span of time.
SELECT eql_writer FROM {schema}.spark_publication WHERE eql_created_at >= %(first)s AND eql_created_at <= %(last)s;
