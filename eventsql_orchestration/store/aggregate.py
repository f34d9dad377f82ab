"""What aggregates derive from: they decide by recording changes, and become what those say by applying them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.store.change import Change, RecordedChange


@checked
class Aggregate(ABC):
    """An entity whose state is the outcome of its changes.

    A method of the derived class checks its rules and calls `record`; `apply` alone alters the state, for a new change
    and for a replayed one alike, and therefore neither decides nor fails. The class is made with an id alone, as it is
    before its first change:

        class Order(Aggregate):
            aggregate_type = "order"

            def __init__(self, aggregate_id: str) -> None:
                super().__init__(aggregate_id)
                self.price: int | None = None

            def place(self, price: int) -> None:
                if self.price is not None:
                    raise RuleBroken("the order was placed before")
                self.record("placed", {"price": price})

            def apply(self, kind: str, data: Mapping[str, Any]) -> None:
                match kind:
                    case "placed":
                        self.price = data["price"]

    `aggregate_type` is the name under which the store keeps all aggregates of the class; it must not change.
    """

    aggregate_type: ClassVar[str]

    def __init__(self, aggregate_id: str) -> None:
        self.id = aggregate_id
        self._stored_version = 0
        self._new_changes: list[Change] = []

    @abstractmethod
    @checks_itself
    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Alter the state as a change of this kind does."""

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """Apply a new change, to be appended when the aggregate is saved.

        Raises `ValidationError` for what cannot be stored; nothing was applied then.
        """
        change = Change(kind, data)
        self.apply(kind, data)
        self._new_changes.append(change)

    @property
    def version(self) -> int:
        """The number of changes that made this state, those not saved yet included."""
        return self._stored_version + len(self._new_changes)

    @property
    def stored_version(self) -> int:
        """The version that was loaded or saved last; 0 for an aggregate that the store does not know."""
        return self._stored_version

    @property
    def new_changes(self) -> tuple[Change, ...]:
        """The changes that are recorded and not saved yet."""
        return tuple(self._new_changes)

    def replay(self, changes: Iterable[RecordedChange]) -> None:
        """Apply stored changes that follow `stored_version`."""
        for change in changes:
            self.apply(change.kind, change.data)
            self._stored_version = change.version

    def mark_saved(self) -> None:
        """Take the new changes for stored."""
        self._stored_version = self.version
        self._new_changes.clear()


@checked
class SnapshottingAggregate(Aggregate):
    """An aggregate with so many changes that its state is kept too, so that loading it replays the last few alone.

    A save that reaches or passes a multiple of `snapshot_every` changes keeps the state.
    """

    snapshot_every: ClassVar[int] = 100

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """The whole state as JSON gives it back: lists, and objects with text as keys."""

    @abstractmethod
    @checks_itself
    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state()` described."""

    def restore_at(self, version: int, state: Mapping[str, Any]) -> None:
        """Become the stored aggregate of `version`, whose state is `state`."""
        self.restore(state)
        self._stored_version = version
