"""A queue in memory, with the rules that every queue in the database keeps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entry:
    id: int
    key: str | None
    receives: int = 0
    receipt: int | None = None
    hidden: bool = False


@dataclass
class Model:
    ordered: bool
    max_receives: int
    entries: dict[int, Entry] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    def send(self, id_: int, key: str | None) -> None:
        self.entries[id_] = Entry(id_, key)

    def receivable(self) -> set[int]:
        """The messages that a receiver may get now, before dead letters are set aside."""
        visible = [entry for entry in self.entries.values() if not entry.hidden]
        if not self.ordered:
            return {entry.id for entry in visible}
        return {entry.id for entry in visible if entry.key is None or self._first(entry.key) is entry}

    def _first(self, key: str) -> Entry:
        of_key = [entry for entry in self.entries.values() if entry.key == key]
        held = [entry for entry in of_key if entry.hidden and entry.receipt is not None]
        return held[0] if held else min(of_key, key=lambda entry: entry.id)

    def bury(self) -> int:
        """Set the messages aside whose receives are spent and that a receiver would get."""
        buried = 0
        while spent := [each for each in self.receivable() if self.entries[each].receives >= self.max_receives]:
            for each in spent:
                del self.entries[each]
                buried += 1
        return buried

    def received(self, id_: int, receipt: int) -> None:
        entry = self.entries[id_]
        entry.receives += 1
        entry.receipt, entry.hidden = receipt, True

    def holds(self, id_: int, receipt: int) -> bool:
        return id_ in self.entries and self.entries[id_].receipt == receipt

    def acknowledge(self, id_: int) -> None:
        del self.entries[id_]

    def release(self, id_: int, *, delayed: bool) -> None:
        entry = self.entries[id_]
        entry.receipt, entry.hidden = None, delayed

    def expire(self) -> None:
        for entry in self.entries.values():
            entry.hidden = False
