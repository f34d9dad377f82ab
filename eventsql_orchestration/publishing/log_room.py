"""The room at the end of a topic's log: the segments and the ids for its next events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from eventsql_orchestration.database import Connection
from eventsql_orchestration.storage import segments, sequences
from eventsql_orchestration.storage.appending import ForeignIdsError, LogAppender

ROOM_CHECK: Final = 500_000
"""Events between two checks for free segments ahead. Far more ids than that are kept ahead."""


class Room(NamedTuple):
    """The room for a log's next events.

    `zoned`: the times of the log have time zones. `looked`: a look has made or found the room.
    """

    zoned: bool
    looked: bool


class LogRoom:
    """A log writer's knowledge of the segments and sequences of its topics."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._left: dict[str, int] = {}
        self._zoned: dict[str, bool] = {}
        self._blocks_of: dict[str, bool] = {}
        self._began_after: dict[str, int] = {}
        self._ids = sequences.Ids(schema)
        self._log = LogAppender(schema)

    def left(self, topic: str) -> bool:
        """Whether the last look at a log found more room than was used since."""
        return self._left.get(topic, 0) > 0

    def make(self, connection: Connection, topic: str, last_id: int | None, *, blocks: bool) -> Room:
        """Make segments for the ids to come, in the caller's transaction that holds the topic.

        Looks once every `ROOM_CHECK` events, and at once if `last_id`, the last id of the log's sequence, is
        unexpected, or if new events got another form. A look advances a sequence that is behind the log: do not use ids
        that were drawn before. Raises `SequenceError`.
        """
        if self._blocks_of.get(topic) != blocks:
            self._blocks_of[topic] = blocks
            self._left.pop(topic, None)
        looks = not (self.left(topic) and self._ids.holds(connection, topic, last_id))
        if looks:
            self._zoned[topic] = self._ids.look(connection, topic)
            segments.ensure_ahead(connection, self._schema, topic)
            self._left[topic] = ROOM_CHECK
        self._began_after[topic] = self.last_id(topic)
        return Room(self._zoned[topic], looks)

    def last_id(self, topic: str) -> int:
        """The last id of the log, counting the ids that this writer drew. Only larger ids may be used."""
        return self._ids.last(topic)

    def check(self, connection: Connection, topic: str) -> None:
        """Raise `ForeignIdsError` if the sequence was set back while the table of a log in rows drew ids from it.

        Call it after `make` and `drew`, before the commit.
        """
        last_id, expected = self._log.last_id(connection, topic), self.last_id(topic)
        # A sequence that gave more ids than there are events may have been set back, too, and forward again.
        if last_id is None or last_id < expected or (last_id > expected and not self._are_all_last(connection, topic)):
            raise ForeignIdsError(f"the sequence of the log of topic {topic!r} was set back while it was used")

    def _are_all_last(self, connection: Connection, topic: str) -> bool:
        """Whether the ids of all events that were written since `make` are larger than those before."""
        began_after = self._began_after[topic]
        return self._log.count_after(connection, topic, began_after) == self.last_id(topic) - began_after

    def drew(self, topic: str, ids: int) -> None:
        """Note that this number of ids of the log was taken."""
        self._left[topic] -= ids
        self._ids.drew(topic, ids)

    @contextmanager
    def using(self, topic: str) -> Iterator[None]:
        """Look for room again if the block fails: it may have lacked room, or its segments were rolled back."""
        try:
            yield
        except BaseException:
            self._left.pop(topic, None)
            raise
