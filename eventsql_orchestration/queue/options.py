"""The options of queues."""

from __future__ import annotations

from dataclasses import dataclass

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.queue.values import QueueDefinition
from eventsql_orchestration.validation import MAX_INTEGER, Duration, check_kind, check_name, check_seconds, check_whole


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The options of a queue, as `Queue` takes them; None leaves an option as it is.

    A `timedelta` becomes seconds. Raises `InvalidNameError`, `ValidationError`.
    """

    ordered: bool | None = None
    visibility_timeout: Duration | None = None
    max_receives: int | None = None
    dead_letters: str | None = None
    retention: Duration | None = None
    deduplication_window: Duration | None = None

    def __post_init__(self) -> None:
        if self.ordered is not None:
            check_kind("ordered", self.ordered, bool)
        if self.max_receives is not None:
            check_whole("max_receives", self.max_receives, least=1, most=MAX_INTEGER)
        if self.dead_letters is not None:
            check_name("dead_letters", self.dead_letters)
        for name in ("visibility_timeout", "retention", "deduplication_window"):
            object.__setattr__(self, name, seconds_of(name, getattr(self, name)))

    def differ(self, found: QueueDefinition) -> bool:
        """Whether an option in the database differs from a given option."""
        return any(
            (given := getattr(self, name)) is not None and given != getattr(found, name) for name in self.__slots__
        )

    def completed(self, found: QueueDefinition) -> QueueOptions:
        """The given options; an option that is not given comes from a definition."""
        own = {name: getattr(self, name) for name in self.__slots__}
        return QueueOptions(**{name: getattr(found, name) if given is None else given for name, given in own.items()})


def seconds_of(what: str, duration: Duration | None) -> float | None:
    """A duration in seconds; None for None. Raises `ValidationError` unless it is positive."""
    return None if duration is None else check_seconds(what, duration, zero=False)


def checked_options(name: str, given: QueueOptions) -> QueueOptions:
    """The options of the queue `name`. Raises `InvalidNameError`, `ValidationError`."""
    if given.dead_letters == name:
        raise ValidationError("a queue cannot be the queue of its own dead letters: use another name")
    if given.max_receives is not None and given.dead_letters is None:
        check_name("queue name with _dead", f"{name}_dead")
    return given
