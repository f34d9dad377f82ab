-- made -- When claims were made, in microseconds since 1970, by their ids.
SELECT eql_id, (extract(epoch FROM eql_created_at) * 1000000)::bigint
FROM {schema}.consumer_claim
WHERE eql_id = ANY (%(claims)s);
