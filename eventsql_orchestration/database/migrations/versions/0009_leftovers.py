"""What is deleted leaves nothing behind, whoever deletes it; records of publications say that older ones went."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0009"
down_revision = "0008"

# EventSQL's Java library deletes the rows of its own tables and knows none of ours. The events in the buffer stay with
# whoever deletes the topic.
_FORGET_TOPIC = """
CREATE FUNCTION forget_topic() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kept_by text;
BEGIN
    FOREACH kept_by IN ARRAY ARRAY[
        'consumer', 'consumer_claim', 'topic_layout', 'shard_fence', 'redriven_dead_letter', 'event_buffer_lock'
    ] LOOP
        EXECUTE format('DELETE FROM %I.%I WHERE eql_topic = $1', TG_TABLE_SCHEMA, kept_by) USING OLD.eql_name;
    END LOOP;
    EXECUTE format(
        'DELETE FROM %1$I.spark_staged_event block WHERE eql_topic = $1 AND ('
        'eql_buffer_id IS NOT NULL OR EXISTS ('
        'SELECT FROM %1$I.spark_part part WHERE eql_published_at IS NULL AND block.eql_attempt = ANY (eql_attempts)))',
        TG_TABLE_SCHEMA
    ) USING OLD.eql_name;
    RETURN NULL;
END
$$;
CREATE TRIGGER topic_forgotten AFTER DELETE ON topic FOR EACH ROW EXECUTE FUNCTION forget_topic();
"""

# A consumer may lose some of its partitions; its claims go with the last one.
_FORGET_CONSUMER = """
CREATE FUNCTION forget_consumer() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format(
        'DELETE FROM %1$I.consumer_claim WHERE (eql_topic, eql_consumer) IN ('
        'SELECT eql_topic, eql_name FROM gone WHERE NOT EXISTS ('
        'SELECT FROM %1$I.consumer c WHERE c.eql_topic = gone.eql_topic AND c.eql_name = gone.eql_name))',
        TG_TABLE_SCHEMA
    );
    RETURN NULL;
END
$$;
CREATE TRIGGER consumer_forgotten AFTER DELETE ON consumer REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION forget_consumer();
"""

# EventSQL's Java library gives an empty topic another number of partitions and leaves its layout as it is. The layouts
# of before are void, and publishers have to look the topic up again.
_REDEFINE = """
CREATE FUNCTION redefine_topic() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('DELETE FROM %I.topic_layout WHERE eql_topic = $1', TG_TABLE_SCHEMA) USING OLD.eql_name;
    NEW.eql_layout := OLD.eql_layout + 1;
    RETURN NEW;
END
$$;
CREATE TRIGGER topic_redefined BEFORE UPDATE OF eql_partitions ON topic FOR EACH ROW
    WHEN (NEW.eql_partitions <> OLD.eql_partitions AND NEW.eql_layout = OLD.eql_layout)
    EXECUTE FUNCTION redefine_topic();
"""

# What was left before there were these triggers. `topics/leftovers.py` clears the rest, a little at a time.
_MEND = """
DELETE FROM topic_layout l WHERE NOT EXISTS (
    SELECT FROM topic t WHERE t.eql_name = l.eql_topic AND t.eql_created_at <= l.eql_created_at
);
UPDATE consumer c SET eql_until = NULL
WHERE eql_partition >= 0 AND eql_until >= 0 AND NOT EXISTS (
    SELECT FROM topic_layout l WHERE l.eql_topic = c.eql_topic AND l.eql_after = c.eql_until
);
"""

# A default that is a constant: no table is rewritten.
_OLDEST = "ALTER TABLE spark_publication ADD COLUMN eql_oldest boolean NOT NULL DEFAULT false;"


def upgrade() -> None:
    for statements in (_FORGET_TOPIC, _FORGET_CONSUMER, _REDEFINE, _MEND, _OLDEST):
        run(statements)
