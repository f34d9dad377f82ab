"""A queue in memory, with the rules that every queue in the database keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

HISTORY = 20
TIMED_OUT = "the visibility timeout ended"


@dataclass(eq=False)
class Entry:
    """A message. Its body is a number of its own, because a message that moves to another queue gets another id.

    A message without a receipt is hidden by a delay, one with a receipt by its receiver.
    """

    id: int
    body: int
    key: str | None
    priority: int = 0
    hidden: bool = False
    receives: int = 0
    unhandled: int = 0
    receipt: int | None = None
    dead: bool = False
    history: list[tuple[int, str]] = field(default_factory=list)

    def note(self, reason: str) -> None:
        self.history = [*self.history, (self.receives, reason)][-HISTORY:]


@dataclass
class Model:
    ordered: bool
    max_receives: int | None = None
    entries: dict[int, Entry] = field(default_factory=dict)
    archive: dict[int, Entry] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.entries[entry.id] = entry

    def receivable(self) -> set[int]:
        """The messages that a receiver may get now, before dead letters are set aside."""
        return {entry.id for entry in self.entries.values() if not entry.hidden and not self.waits(entry)}

    def waits(self, entry: Entry) -> bool:
        """Whether a message waits for another one of its key: the one that is held, or else the first."""
        if not self.ordered or entry.key is None:
            return False
        of_key = [each for each in self.entries.values() if each.key == entry.key]
        held = [each for each in of_key if each.hidden and each.receipt is not None]
        return entry not in held if held else entry is not min(of_key, key=lambda each: each.id)

    def spent(self, entry: Entry) -> bool:
        return self.max_receives is not None and entry.receives - entry.unhandled >= self.max_receives

    def received(self, id_: int, receipt: int) -> None:
        entry = self.entries[id_]
        if entry.receipt is not None:
            entry.note(TIMED_OUT)
        entry.receives += 1
        entry.receipt, entry.hidden = receipt, True

    def holds(self, id_: int, receipt: int) -> bool:
        return id_ in self.entries and self.entries[id_].receipt == receipt

    def acknowledge(self, id_: int, *, archived: bool) -> None:
        entry = self.entries.pop(id_)
        if archived:
            self.archive[id_] = entry

    def erase(self, key: str, *, letters: bool = False) -> int:
        """Forget the messages of a key, or only the dead letters among them; gives their number."""
        gone = [entry.id for entry in self.entries.values() if entry.key == key and (entry.dead or not letters)]
        for each in gone:
            del self.entries[each]
        return len(gone)

    def erase_archived(self, key: str) -> int:
        before = len(self.archive)
        self.archive = {id_: entry for id_, entry in self.archive.items() if entry.key != key}
        return before - len(self.archive)

    def release(self, id_: int, *, delayed: bool = False, reason: str | None = None) -> None:
        entry = self.entries[id_]
        entry.receipt, entry.hidden = None, delayed
        if reason is not None:
            entry.note(reason)

    def move(self, id_: int, to: Model, new_id: int, reason: str, *, dead: bool) -> None:
        entry = self.entries.pop(id_)
        if entry.receipt is not None:
            entry.note(TIMED_OUT)
        entry.note(reason)
        entry.id, entry.dead = new_id, dead
        entry.receives = entry.unhandled = 0
        entry.receipt, entry.hidden = None, False
        to.add(entry)
