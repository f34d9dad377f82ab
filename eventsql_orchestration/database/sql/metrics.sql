-- given_up -- How many events each consumer partition has given up as dead letters: topic, consumer, partition, number.
SELECT eql_topic, eql_name, eql_partition, eql_given_up FROM {schema}.consumer;

-- claims -- The live claims of each consumer that have events left: topic, consumer, number, how many have a lease that is
-- over, and seconds since the oldest began. A process that consumes without claims passes an abandoned claim, and leaves
-- its row.
SELECT l.eql_topic, l.eql_consumer, count(*),
       count(*) FILTER (WHERE coalesce(c.eql_lease_expires_at <= clock_timestamp(), true)),
       extract(epoch FROM clock_timestamp() - min(l.eql_created_at))::float8
FROM {schema}.consumer_claim l
JOIN {schema}.consumer c
  ON c.eql_topic = l.eql_topic AND c.eql_name = l.eql_consumer AND c.eql_partition = l.eql_partition
WHERE l.eql_state = 'claimed' AND l.eql_upto > coalesce(c.eql_last_event_id, 0)
GROUP BY l.eql_topic, l.eql_consumer;
