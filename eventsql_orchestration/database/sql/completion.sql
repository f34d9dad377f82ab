-- topics -- Topics whose names begin with a text.
SELECT eql_name FROM {schema}.topic WHERE starts_with(eql_name, %(begun)s) ORDER BY eql_name LIMIT 1000;

-- queues -- Queues whose names begin with a text.
SELECT eql_name FROM {schema}.queue WHERE starts_with(eql_name, %(begun)s) ORDER BY eql_name LIMIT 1000;

-- consumers -- Consumers of a topic whose names begin with a text.
SELECT DISTINCT eql_name FROM {schema}.consumer WHERE eql_topic = %(topic)s AND starts_with(eql_name, %(begun)s) ORDER BY eql_name LIMIT 1000;

-- shards -- Shards whose names begin with a text.
SELECT DISTINCT name FROM {schema}.shard_layout CROSS JOIN unnest(eql_shards) AS known (name) WHERE starts_with(name, %(begun)s) ORDER BY name LIMIT 1000;
