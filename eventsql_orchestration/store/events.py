"""Types of events: the data of changes as dataclasses or pydantic models, with upcasters from their earlier forms."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, ClassVar, TypeAlias
from uuid import UUID

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.errors import ChangeSchemaError, ValidationError
from eventsql_orchestration.store.aggregate import Aggregate
from eventsql_orchestration.store.change import Change, RecordedChange, check_schema_version, encode
from eventsql_orchestration.validation import NO_METADATA, check_kind, check_name, shown

Upcaster: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Takes the data of one version, and gives the data of the next version."""


@dataclass(frozen=True, slots=True)
class EventType:
    """A kind of change, and the class of its data.

    `form` is a dataclass whose fields are JSON values, or a pydantic model. `schema_version` is the version of its
    fields: raise it when they change, and name in `upcasters` the function that makes version n + 1 of the data of
    version n, for each earlier version n. Stored changes stay as they are. Raises `ValidationError`.
    """

    kind: str
    form: type[Any]
    schema_version: int = 1
    upcasters: Mapping[int, Upcaster] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("kind of change", self.kind)
        check_kind(f"the form of {self.kind!r}", self.form, type)
        if not is_dataclass(self.form) and not hasattr(self.form, "model_validate_json"):
            raise ValidationError(
                f"the form of {self.kind!r} must be a dataclass or a pydantic model, not {self.form.__name__}"
            )
        check_schema_version(f"schema_version of {self.kind!r}", self.schema_version)
        check_kind(f"upcasters of {self.kind!r}", self.upcasters, Mapping)
        if set(self.upcasters) != set(range(1, self.schema_version)) or not all(map(callable, self.upcasters.values())):
            raise ValidationError(
                f"schema_version of {self.kind!r} is {self.schema_version}, and its upcasters are for "
                f"{shown(self.upcasters)}: give a function for each earlier version"
            )


def _encode(of: EventType, event: Any) -> dict[str, Any]:
    """The data of an event. Raises `ValidationError` for data that would not come back as the event."""
    try:
        data: dict[str, Any] = asdict(event) if is_dataclass(of.form) else event.model_dump(mode="json", by_alias=True)
    except Exception as error:
        raise ValidationError(
            f"{shown(event)} cannot be written as data of change {of.kind!r} ({describe(error)}): use fields that "
            "become JSON"
        ) from error
    encode(f"data of change {of.kind!r}", data)
    try:
        returned = _decode(of, data)
    except Exception as error:
        raise ValidationError(f"{shown(event)} would not come back from its data: {describe(error)}") from error
    if returned != event:
        raise ValidationError(
            f"{shown(event)} would come back as {shown(returned)}: use a pydantic model for fields that are not JSON"
        )
    return data


def _decode(of: EventType, data: Mapping[str, Any]) -> Any:
    """The event with this data of the newest version."""
    return of.form(**data) if is_dataclass(of.form) else of.form.model_validate_json(json.dumps(dict(data)))


@checked
class Events:
    """The event types of an aggregate, or of all aggregates that a handler reads.

    Raises `ValidationError` if two have one kind or one class::

        EVENTS = Events([EventType("placed", Placed, 2, {1: lambda data: {**data, "currency": "EUR"}})])
    """

    def __init__(self, types: Iterable[EventType]) -> None:
        known = list(types)
        for each in known:
            check_kind("an event type", each, EventType)
        self._by_kind = {each.kind: each for each in known}
        self._by_form = {each.form: each for each in known}
        if min(len(self._by_kind), len(self._by_form)) < len(known):
            raise ValidationError("two event types have one kind or one class: give each its own")

    def change(
        self, event: object,
        *, id: UUID | None = None, metadata: Mapping[str, str] = NO_METADATA,  # noqa: A002 - as `Change`
    ) -> Change:  # fmt: skip
        """The change that stores an event.

        Raises `ValidationError` for an event of another class, and for data that would not come back as the event.
        """
        of = self._by_form.get(type(event))
        if of is None:
            known = ", ".join(form.__name__ for form in self._by_form) or "none"
            raise ValidationError(f"{shown(event)} is not of a known event type ({known})")
        return Change(of.kind, _encode(of, event), id=id, metadata=metadata, schema_version=of.schema_version)

    def read(self, change: RecordedChange) -> Any:
        """The event of a stored change, in its newest version.

        Raises `ChangeSchemaError` for a kind or a version that is not known, and for data that does not fit.
        """
        return self._decode(change.kind, change.data, change.schema_version, f"{change.kind!r} in {change.reference}")

    def decode(self, kind: str, data: Mapping[str, Any]) -> Any:
        """The event of a kind with data of its newest version. Raises `ChangeSchemaError`."""
        return self._decode(kind, data, None, repr(kind))

    def _decode(self, kind: str, data: Mapping[str, Any], stored_version: int | None, of: str) -> Any:
        found = self._by_kind.get(kind)
        if found is None:
            known = ", ".join(self._by_kind) or "none"
            raise ChangeSchemaError(f"{of} is not of a known event type ({known}): declare its type")
        schema_version = stored_version or found.schema_version
        if schema_version > found.schema_version:
            raise ChangeSchemaError(
                f"{of} has schema version {schema_version}, and this process knows {found.schema_version}: upgrade it"
            )
        # A copy, because an upcaster may alter the data, and the stored change may be decoded again.
        current = deepcopy(dict(data)) if schema_version < found.schema_version else dict(data)
        try:
            for version in range(schema_version, found.schema_version):
                current = dict(found.upcasters[version](current))
            return _decode(found, current)
        except Exception as error:
            raise ChangeSchemaError(
                f"{of} has schema version {schema_version} and does not become a {found.form.__name__} of version "
                f"{found.schema_version} ({describe(error)}): correct its data or the upcasters"
            ) from error


def check_events(aggregate_class: type[EventAggregate]) -> None:
    """Raise `ValidationError` for a class that declares no types of events."""
    if not isinstance(getattr(aggregate_class, "events", None), Events):
        raise ValidationError(
            f"{aggregate_class.__name__} declares no events: set its `events` to Events([EventType(…), …])"
        )


@checked
class EventAggregate(Aggregate):
    """An aggregate whose changes are events of declared types. `when` applies one event to its state.

    For example::

        class Order(EventAggregate):
            aggregate_type = "order"
            events = Events([EventType("placed", Placed)])

            def place(self, price: int) -> None:
                self.record_event(Placed(price))

            def when(self, event: Placed) -> None:
                self.price = event.price
    """

    events: ClassVar[Events]

    def __init__(self, aggregate_id: str) -> None:
        super().__init__(aggregate_id)
        check_events(type(self))

    @abstractmethod
    @checks_itself
    def when(self, event: Any) -> None:
        """Alter the state by an event, which has the newest version of its type."""

    def record_event(self, event: object, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        """Apply a new event, which is appended when the aggregate is saved.

        Raises `ValidationError`, with nothing applied, for an event of no declared type or with other data than JSON.
        """
        change = self.events.change(event, metadata=metadata)
        self.when(event)
        self._new_changes.append(change)

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """As `record_event`, for a kind and data of the newest version. Raises `ChangeSchemaError` for others."""
        self.record_event(self.events.decode(kind, data))

    @checks_itself
    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Alter the state by a change of this kind, with data of the newest version."""
        self.when(self.events.decode(kind, data))

    def replay(self, changes: Iterable[RecordedChange]) -> None:
        for change in changes:
            self.when(self.events.read(change))
            self._stored_version = change.version
