"""Base classes of aggregates: methods decide and record changes, and `apply` alters the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.store.change import Change, RecordedChange


@checked
class Aggregate(ABC):
    """An entity whose state results from its changes.

    A method of the derived class checks its rules and calls `record`. Only `apply` alters the state, for new and for
    replayed changes, so it neither decides nor fails. The constructor takes an id alone and makes the state before the
    first change::

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

    The store keeps all aggregates of the class under the name `aggregate_type`, which must not change.
    """

    aggregate_type: ClassVar[str]

    def __init__(self, aggregate_id: str) -> None:
        self.id = aggregate_id
        self._stored_version = 0
        self._new_changes: list[Change] = []

    @abstractmethod
    @checks_itself
    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Alter the state by a change of this kind."""

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """Apply a new change, which is appended when the aggregate is saved.

        Raises `ValidationError`, with nothing applied, for data that cannot be stored.
        """
        change = Change(kind, data)
        self.apply(kind, data)
        self._new_changes.append(change)

    @property
    def version(self) -> int:
        """The number of changes that made this state, including unsaved changes."""
        return self._stored_version + len(self._new_changes)

    @property
    def stored_version(self) -> int:
        """The version that was loaded or saved last; 0 for an aggregate that is not in the store."""
        return self._stored_version

    @property
    def new_changes(self) -> tuple[Change, ...]:
        """The unsaved changes."""
        return tuple(self._new_changes)

    def replay(self, changes: Iterable[RecordedChange]) -> None:
        """Apply stored changes that follow `stored_version`."""
        for change in changes:
            self.apply(change.kind, change.data)
            self._stored_version = change.version

    def mark_saved(self) -> None:
        """Note that the new changes are stored."""
        self._stored_version = self.version
        self._new_changes.clear()


@checked
class SnapshottingAggregate(Aggregate):
    """An aggregate whose state is stored, too, so that loading it replays only the last changes.

    A save stores the state when the version reaches or passes a multiple of `snapshot_every`. Raise `snapshot_schema`
    whenever `state()` changes: snapshots of another schema are left out, and the changes are replayed.
    """

    snapshot_every: ClassVar[int] = 100
    snapshot_schema: ClassVar[int] = 1

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """The whole state as JSON values: lists, and objects with text as keys."""

    @abstractmethod
    @checks_itself
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state()` gave."""

    def restore_at(self, version: int, state: Mapping[str, Any]) -> None:
        """Take over the stored state of `version`."""
        self.restore(state)
        self._stored_version = version
