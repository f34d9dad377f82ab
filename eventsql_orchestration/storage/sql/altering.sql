-- holds_events -- Whether a table of a log has an event.
SELECT EXISTS (SELECT FROM {schema}.{table});

-- own_sequence -- Schema and name of the sequence of a new table.
SELECT namespace.nspname, sequence.relname
FROM pg_class sequence
JOIN pg_namespace namespace ON namespace.oid = sequence.relnamespace
WHERE sequence.oid = pg_get_serial_sequence(%(table)s, 'eql_id')::regclass;

-- go_on_at -- Let the ids of a log go on after this one.
SELECT setval(%(sequence)s::regclass, %(newest)s);

-- note_form -- Note the form of a topic's new events.
UPDATE {schema}.topic SET eql_storage = %(storage)s WHERE eql_name = %(topic)s;

-- lost_partitions -- Whether a topic may have had more partitions once: retention deletes the layouts whose events it has
-- dropped, the first one before others.
SELECT coalesce(bool_or(l.eql_partitions > t.eql_partitions) OR min(l.eql_after) > 0, false)
FROM {schema}.topic_layout l JOIN {schema}.topic t ON t.eql_name = l.eql_topic
WHERE l.eql_topic = %(topic)s;
