"""What is deleted leaves nothing behind, whoever deletes it; records of publications say that older ones went."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0009"
down_revision = "0008"

_TRIGGERS = """
CREATE TRIGGER topic_forgotten AFTER DELETE ON topic FOR EACH ROW EXECUTE FUNCTION forget_topic();
CREATE TRIGGER consumer_forgotten AFTER DELETE ON consumer REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION forget_consumer();
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
    install("leftovers", "layouts")
    for statements in (_TRIGGERS, _MEND, _OLDEST):
        run(statements)
