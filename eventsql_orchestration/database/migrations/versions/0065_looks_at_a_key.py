"""No plan of a table that counted as empty reads the messages of other keys.

For such a table, all indexes cost nearly the same, and the lower ones a little less. A look at a long key read the
whole queue through the index of visible messages. A receive that parks many messages reads each of them a few times:
behind a message that is held, the look for an earlier one read all messages of the key that the call had parked.

A send in SQL or in a caller's transaction deletes deduplication ids whose window ended a day ago.

A message that commits after a later one of its key was received keeps its place before the other messages of its
transaction, and does not wait for the delay with which the later one is released.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0065"
down_revision = "0064"


def upgrade() -> None:
    install("queue_receiving", "queue_sending", "queue_settling")
